"""What may be declared as a checker, and which of its numbers count."""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy.orm import Session

from outbox import INJECTED, Counts, Orphan, Outbox, Resolution
from outbox.errors import InvalidHandler, InvalidMessage
from tests.check.support import Bench

NewBench = Callable[..., Bench]
COMMIT, ROLLBACK, UNKNOWN = Resolution.COMMIT, Resolution.ROLLBACK, Resolution.UNKNOWN


@pytest.fixture
def outbox(bench: Bench) -> Outbox:
    """The outbox of the bench."""
    return bench.outbox


def no_parameter() -> Resolution:
    """Take nothing."""
    return COMMIT


def three_parameters(one: Any, two: Any, three: Any) -> Resolution:
    """Take too much."""
    return COMMIT


def keyword_only(orphan: Any, *, session: Any) -> Resolution:
    """Take the session in another way."""
    return COMMIT


@pytest.mark.parametrize("function", [no_parameter, three_parameters, keyword_only, "paid", None, Orphan])
def test_function_that_cannot_be_called_so(outbox: Outbox, function: Any) -> None:
    """A checker must be callable with the orphan, or with the orphan and a session; nothing is registered else."""
    with pytest.raises(InvalidHandler, match="checker of 'paid'"):
        outbox.checker("paid")(function)
    assert outbox.checkers == {}


class Asked:
    """Checkers of all shapes."""

    def method(self, _: Orphan, __: Any) -> Resolution:
        return COMMIT

    def __call__(self, _: Orphan) -> Resolution:
        return COMMIT


class AskedAsync:
    """A checker that is called like a coroutine function."""

    async def __call__(self, _: Orphan, __: Any) -> Resolution:
        return COMMIT


async def asked_async(orphan: Orphan) -> Resolution:
    """Answer from an event loop."""
    return COMMIT


SHAPES: dict[str, tuple[Any, bool, bool]] = {
    "orphan": (lambda orphan: COMMIT, False, False),
    "orphan and session": (lambda orphan, session: COMMIT, True, False),
    "session with a default": (lambda orphan, session=None: COMMIT, True, False),
    "any arguments": (lambda *_: COMMIT, True, False),
    "method": (Asked().method, True, False),
    "object": (Asked(), False, False),
    "partial": (functools.partial(lambda number, orphan: COMMIT, 1), False, False),
    "coroutine function": (asked_async, False, True),
    "partial of a coroutine function": (functools.partial(asked_async), False, True),
    "object with a coroutine method": (AskedAsync(), True, True),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_checkers(bench: Bench, shape: str) -> None:
    """Functions, methods, objects and partials are called as they can be, with a session if they take one."""
    function, takes_session, is_async = SHAPES[shape]
    assert bench.outbox.checker("paid")(function) is function
    checker = bench.outbox.checkers["paid"]
    assert (checker.takes_session, checker.is_async) == (takes_session, is_async)
    half_id = bench.prepare()
    bench.check()
    assert bench.op(half_id) == ("commit", "check")


def test_defaults_are_the_settings(bench: Bench) -> None:
    """What a checker doesn't say is as the settings have it."""
    bench.register(COMMIT)
    checker, settings = bench.outbox.checkers["paid"], bench.settings
    assert (checker.immunity, checker.interval, checker.max_checks, checker.timeout) == (
        settings.immunity,
        settings.check_interval,
        settings.max_checks,
        settings.check_timeout,
    )


def test_own_numbers(bench: Bench) -> None:
    """Durations may be timedeltas or seconds."""
    bench.register(COMMIT, immunity=dt.timedelta(minutes=1), interval=2, max_checks=3, timeout=dt.timedelta(seconds=4))
    checker = bench.outbox.checkers["paid"]
    assert (checker.immunity, checker.interval, checker.max_checks, checker.timeout) == (60.0, 2.0, 3, 4.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"interval": 0}, "checker of 'paid': interval = 0.0 must be greater than 0"),
        ({"timeout": 0}, "checker of 'paid': timeout = 0.0 must be greater than 0"),
        ({"timeout": dt.timedelta()}, "timeout = 0.0 must be"),
        ({"timeout": 61}, r"timeout = 61.0 s is longer than a pass may take \(check_time_limit = 60.0 s\)"),
        ({"max_checks": 0}, "max_checks = 0 must be an int"),
        ({"max_checks": -1}, "max_checks = -1 must be an int"),
        ({"max_checks": 2.5}, "max_checks = 2.5 must be an int"),
        ({"max_checks": True}, "max_checks = True must be an int"),
        ({"max_checks": "15"}, "max_checks = '15' must be an int"),
        ({"max_checks": 2**31}, "max_checks = 2147483648 must be an int"),
        ({"interval": -1}, "interval -1 must be"),
        ({"immunity": -1}, "immunity -1 must be"),
        ({"immunity": "6"}, "immunity '6' must be"),
        ({"timeout": float("nan")}, "timeout nan must be"),
        ({"timeout": True}, "timeout True must be"),
        ({"interval": 10**10}, "interval 10000000000 must be"),
    ],
)
def test_number_that_cannot_work(bench: Bench, options: dict[str, Any], said: str) -> None:
    """A rule that can't work is refused when it is declared, by its name and value."""
    with pytest.raises((InvalidHandler, InvalidMessage), match=said):
        bench.register(COMMIT, **options)
    assert bench.outbox.checkers == {}


def test_topic_that_is_no_name(outbox: Outbox) -> None:
    """The topic is checked as that of a message is."""
    with pytest.raises(InvalidMessage, match="topic"):
        outbox.checker("no topic")(lambda orphan: COMMIT)


def test_second_checker_of_a_topic(outbox: Outbox) -> None:
    """One checker answers for a topic; the error names the one that is there."""
    outbox.checker("paid")(Asked().method)
    with pytest.raises(InvalidHandler, match=rf"checker of 'paid' is declared already: {__name__}\.Asked\.method"):
        outbox.checker("paid")(lambda orphan: COMMIT)
    assert outbox.checkers["paid"].takes_session


def test_two_phase_registers_its_check(bench: Bench) -> None:
    """``check=`` is the checker of the topic, for as many functions as have the same one; another one is refused."""

    def check(orphan: Orphan) -> Resolution:
        return COMMIT

    def other(orphan: Orphan) -> Resolution:
        return ROLLBACK

    ran = []
    for number in (1, 2):

        @bench.outbox.two_phase(topic="paid", check=check, immunity=0)
        def pay(number: int = number) -> None:
            ran.append(number)
            raise LookupError

        with pytest.raises(LookupError):
            pay()
    assert bench.outbox.checkers["paid"].function is check
    with pytest.raises(InvalidHandler, match="checker of 'paid' is declared already"):
        bench.outbox.two_phase(topic="paid", check=other)
    assert bench.check() == Counts(taken=2, done=2)
    assert ran == [1, 2]


def test_check_of_a_fenced_function_is_refused(outbox: Outbox) -> None:
    """A fence tells whether the function committed: a check beside it would be asked by nobody."""
    with pytest.raises(InvalidHandler, match="a fenced function needs no check"):
        outbox.two_phase(topic="paid", fenced=True, check=lambda orphan: COMMIT)
    assert outbox.checkers == {}


@pytest.mark.parametrize("way", ["prepare", "two_phase", "two_phase fenced"])
@pytest.mark.parametrize("by", ["message", "topic", "settings"])
def test_immunity_in_order_of_precedence(new_bench: NewBench, by: str, way: str) -> None:
    """The message's own immunity goes before the topic's, and that before the settings'."""
    bench = new_bench(immunity=1000)
    given = {"topic": None, "settings": None, "message": 3000}[by]
    if by != "settings":
        bench.register(UNKNOWN, immunity=2000)
    if way == "prepare":
        bench.prepare(immunity=given, due=False)
    else:

        def pay(session: Session = INJECTED) -> None:
            raise LookupError

        def pay_elsewhere() -> None:
            raise LookupError

        fenced = way.endswith("fenced")
        function = pay if fenced else pay_elsewhere
        with pytest.raises(LookupError):
            bench.outbox.two_phase(topic="paid", fenced=fenced, immunity=given)(function)()
    wait = bench.value("SELECT extract(epoch FROM next_check_at - clock_timestamp()) FROM outbox.half_check")
    expected = {"message": 3000, "topic": 2000, "settings": 1000}[by]
    assert expected - 100 < wait <= expected


def test_immunity_of_another_topic_is_its_own(bench: Bench) -> None:
    """A topic's immunity is for its own halves, from its declaration on."""
    early = bench.prepare(due=False)
    bench.register(COMMIT, immunity=2000)
    other, late = bench.prepare("shipped", due=False), bench.prepare(due=False)
    assert [round(bench.waits(each).wait, -3) for each in (early, other, late)] == [0, 0, 2000]


@dataclasses.dataclass
class Payment:
    """A body."""

    amount: int


def test_body_as_a_model(bench: Bench) -> None:
    """The body is read as the type that the checker declares; one that doesn't fit is UNKNOWN."""
    amounts = []

    @bench.outbox.checker("paid", model=Payment)
    def checker(orphan: Orphan) -> Resolution:
        amounts.append(orphan.body.amount)
        return COMMIT

    good, bad = bench.prepare(body=Payment(7)), bench.prepare(body={"sum": 7})
    assert bench.check() == Counts(taken=2, done=1, failed=1)
    assert (amounts, bench.op(good)) == ([7], ("commit", "check"))
    assert "InvalidMessage" in bench.history(bad)[0].error
