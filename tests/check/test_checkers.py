"""Checkers: what may be declared, what each answer does, and what a checker may do meanwhile."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import ForeignKey, insert, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outbox import INJECTED, Counts, Orphan, Outbox, Resolution, Settings
from outbox.errors import InvalidHandler, InvalidMessage
from tests.check.support import SHORT, Bench, asking_threads
from tests.kit.tables import OTHERS

NewBench = Callable[..., Bench]
COMMIT, ROLLBACK, UNKNOWN = Resolution.COMMIT, Resolution.ROLLBACK, Resolution.UNKNOWN


class Base(DeclarativeBase):
    """Mapped classes of the tests."""


class Change(Base):
    """What a checker writes; what it is of is looked up at COMMIT."""

    __tablename__ = "change"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    of: Mapped[int | None] = mapped_column(ForeignKey("change.number", deferrable=True, initially="DEFERRED"))


@pytest.fixture
def bench(new_bench: NewBench) -> Bench:
    """A bench with the table ``change`` beside the outbox."""
    bench = new_bench()
    Base.metadata.create_all(bench.engine)
    return bench


def changes(bench: Bench) -> list[int]:
    """Return what is in the table."""
    return [row[0] for row in bench.rows("SELECT number FROM change ORDER BY 1")]


# --- declarations --------------------------------------------------------------------------------------------------


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
    with pytest.raises(InvalidHandler, match=r"topic 'paid' has a checker already: Asked\.method"):
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
    with pytest.raises(InvalidHandler, match="has a checker already"):
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


# --- answers -------------------------------------------------------------------------------------------------------


class Broken:
    """What can't be shown."""

    def __repr__(self) -> str:
        raise LookupError


def coroutine() -> Any:
    """Return a coroutine, as a checker does that forgot to await."""

    async def never() -> Resolution:
        raise AssertionError

    return never()


#: What a checker gives: an answer, an exception, or a function that makes one; and what is recorded of it.
ANSWERS: dict[str, tuple[Any, str | None]] = {
    "COMMIT": (COMMIT, None),
    "ROLLBACK": (ROLLBACK, None),
    "UNKNOWN": (UNKNOWN, None),
    "None": (None, "the checker returned None, which is not a Resolution"),
    "str": ("commit", "the checker returned 'commit' (str), which is not a Resolution"),
    "True": (True, "the checker returned True (bool), which is not a Resolution"),
    "class": (Resolution, "the checker returned <enum 'Resolution'> (EnumType), which is not a Resolution"),
    "long": ("x" * 10**6, "the checker returned '" + "x" * 199 + " (str), which is not a Resolution"),
    "broken": (Broken(), "LookupError"),
    "coroutine": (coroutine, "the checker returned a coroutine: declare it with 'async def'"),
    "exception": (ValueError("no such payment"), "ValueError: no such payment"),
    "group": (ExceptionGroup("two", [ValueError("a"), LookupError("b")]), "ExceptionGroup: two (2 sub-exceptions)"),
    "SystemExit": (SystemExit(3), "SystemExit: 3"),
    "KeyboardInterrupt": (KeyboardInterrupt(), "KeyboardInterrupt"),
    "CancelledError": (asyncio.CancelledError(), "CancelledError"),
    "StopIteration": (StopIteration(), "StopIteration"),
}


def give(given: Any) -> Any:
    """Return or raise what an answer is made of."""
    if isinstance(given, BaseException):
        raise given
    return given() if given is coroutine else given


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("takes_session", [False, True], ids=["plain", "session"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_answers(bench: Bench, is_async: bool, takes_session: bool, name: str) -> None:
    """COMMIT and ROLLBACK decide, with what was written; all else is UNKNOWN, recorded, and undoes what was written."""
    given, said = ANSWERS[name]

    def plain(orphan: Orphan) -> Any:
        return give(given)

    def with_session(orphan: Orphan, session: Session) -> Any:
        assert type(session) is Session
        session.add(Change(number=1))
        return give(given)

    async def plain_async(orphan: Orphan) -> Any:
        await asyncio.sleep(0)
        return give(given)

    async def with_session_async(orphan: Orphan, session: AsyncSession) -> Any:
        assert type(session) is AsyncSession
        await session.execute(insert(Change).values(number=1))
        return give(given)

    checkers: dict[tuple[bool, bool], Any] = {
        (False, False): plain,
        (False, True): with_session,
        (True, False): plain_async,
        (True, True): with_session_async,
    }
    bench.outbox.checker("paid")(checkers[is_async, takes_session])
    half_id = bench.prepare()
    decides = given is COMMIT or given is ROLLBACK
    assert bench.check() == Counts(taken=1, done=int(decides), failed=int(not decides))
    (check,) = bench.history(half_id)
    assert check.answer == (given if decides else UNKNOWN)
    if said is None:
        assert check.error is None
    elif is_async and name == "StopIteration":
        assert "coroutine raised StopIteration" in check.error
    else:
        assert said in check.error.partition("\n")[0]
    assert check.seconds >= 0
    assert bench.op(half_id) == ((given, "check") if decides else None)
    assert changes(bench) == ([1] if decides and takes_session else [])
    assert (bench.waits(half_id) is None) == decides
    # Whatever it was, the next one is asked as if nothing had been.
    bench.outbox.checkers.clear()
    bench.register(COMMIT)
    assert bench.age_and_check().failed == 0


# --- sessions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("theirs", [COMMIT, ROLLBACK])
@pytest.mark.parametrize("ours", [COMMIT, ROLLBACK])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_state_that_changed_meanwhile(bench: Bench, is_async: bool, ours: Resolution, theirs: Resolution) -> None:
    """Who decided while the checker ran has won, also with the same verdict: what the checker wrote is undone."""
    half_id = bench.prepare()

    def rival() -> None:
        (bench.outbox.commit if theirs is COMMIT else bench.outbox.rollback)(half_id)

    def checker(orphan: Orphan, session: Session) -> Resolution:
        session.add(Change(number=1))
        bench.outbox.send(session, "told", {})
        rival()
        return ours

    async def async_checker(orphan: Orphan, session: AsyncSession) -> Resolution:
        session.add(Change(number=1))
        bench.outbox.send(session, "told", {})
        await asyncio.get_running_loop().run_in_executor(None, rival)
        return ours

    bench.outbox.checker("paid")(async_checker if is_async else checker)
    # It is decided, if not by this pass.
    assert bench.check() == Counts(taken=1, done=1)
    (check,) = bench.history(half_id)
    assert (check.answer, check.error) == (theirs, f"answered {ours}, but the producer had decided {theirs}")
    assert (bench.op(half_id), changes(bench)) == ((theirs, "producer"), [])
    assert bench.value("SELECT count(*) FROM outbox.half_message") == 1
    bench.prepare()
    assert bench.value("SELECT count(*) FROM outbox.half_check") == 1


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_no_transaction_while_a_checker_without_session_runs(bench: Bench, is_async: bool) -> None:
    """It may take its time: no connection is in a transaction, and none holds back vacuum."""
    seen: list[Any] = []
    busy = "state <> 'idle' OR xact_start IS NOT NULL OR backend_xmin IS NOT NULL"

    def look() -> None:
        seen.extend(bench.rows(f"SELECT state, query FROM pg_stat_activity WHERE {OTHERS} AND ({busy})"))

    def checker(orphan: Orphan) -> Resolution:
        look()
        return COMMIT

    async def async_checker(orphan: Orphan) -> Resolution:
        look()
        return COMMIT

    bench.outbox.checker("paid")(async_checker if is_async else checker)
    bench.prepare()
    assert bench.check().done == 1
    assert seen == []


def test_one_transaction_while_a_checker_with_session_runs(bench: Bench) -> None:
    """What the checker reads and writes, the op and the answer are of one transaction."""
    xids: list[Any] = []

    @bench.outbox.checker("paid")
    def checker(orphan: Orphan, session: Session) -> Resolution:
        xids.append(session.scalar(text("SELECT pg_current_xact_id()::text::bigint")))
        return COMMIT

    bench.prepare()
    bench.check()
    xids += bench.rows("SELECT xid::text::bigint FROM outbox.op_message")[0]
    xids += bench.rows("SELECT xmin::text::bigint FROM outbox.check_history")[0]
    assert len(set(xids)) == 1


def test_sessions_commit_is_the_verdicts(bench: Bench) -> None:
    """A checker can't commit by itself: without a verdict what it wrote is undone, with one it stays."""

    @bench.outbox.checker("paid")
    def checker(orphan: Orphan, session: Session) -> Resolution:
        session.add(Change(number=orphan.checks))
        session.commit()
        session.add(Change(number=10 + orphan.checks))
        return COMMIT if orphan.checks == 2 else UNKNOWN

    bench.prepare()
    bench.check()
    assert changes(bench) == []
    bench.age_and_check()
    assert changes(bench) == [2, 12]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_session_that_is_rolled_back(bench: Bench, is_async: bool) -> None:
    """A checker that rolls its session back gave no verdict, whatever it says: part of its work may be gone."""

    def checker(orphan: Orphan, session: Session) -> Resolution:
        session.add(Change(number=1))
        session.flush()
        session.rollback()
        return COMMIT

    async def async_checker(orphan: Orphan, session: AsyncSession) -> Resolution:
        session.add(Change(number=1))
        await session.flush()
        await session.rollback()
        return COMMIT

    bench.outbox.checker("paid")(async_checker if is_async else checker)
    half_id = bench.prepare()
    assert bench.check() == Counts(taken=1, failed=1)
    assert bench.history(half_id)[0].error == "the checker rolled its session back"
    assert (bench.op(half_id), changes(bench)) == (None, [])


def test_savepoint_of_a_checker(bench: Bench) -> None:
    """A checker may try something in a savepoint; what it undoes is undone, the rest commits with the verdict."""

    @bench.outbox.checker("paid")
    def checker(orphan: Orphan, session: Session) -> Resolution:
        session.add(Change(number=1))
        session.flush()
        with pytest.raises(DBAPIError), session.begin_nested():
            bench.outbox.send(session, "told", {})
            session.execute(insert(Change).values(number=1))
        return COMMIT

    half_id = bench.prepare()
    assert bench.check().done == 1
    assert (bench.op(half_id), changes(bench)) == (("commit", "check"), [1])
    bench.dispatch()
    assert bench.messages() == [half_id]


def swallow(session: Session) -> None:
    """Fail, and say nothing of it."""
    with pytest.raises(DBAPIError):
        session.execute(text("SELECT 1 / 0"))


FAILURES: dict[str, Callable[[Session], Any]] = {
    "at the flush": lambda session: session.add_all([Change(number=1), Change(number=2, of=None), Change(number=0)]),
    "at COMMIT": lambda session: session.add(Change(number=1, of=99)),
    "and swallowed": swallow,
    "too long a number": lambda session: session.add(Change(number=2**40)),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_writes_that_fail(bench: Bench, failure: str) -> None:
    """A verdict whose writes can't be committed isn't one: UNKNOWN, with the error, and the connection is usable."""
    bench.run("INSERT INTO change VALUES (0)")

    @bench.outbox.checker("paid")
    def checker(orphan: Orphan, session: Session) -> Resolution:
        if orphan.checks == 1:
            FAILURES[failure](session)
        return COMMIT

    half_id = bench.prepare()
    assert bench.check() == Counts(taken=1, failed=1)
    assert "psycopg.errors" in bench.history(half_id)[0].error
    assert (bench.op(half_id), changes(bench)) == (None, [0])
    assert bench.waits(half_id) is not None
    assert bench.age_and_check() == Counts(taken=1, done=1)


@pytest.mark.parametrize("answer", [COMMIT, ROLLBACK, UNKNOWN])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_what_a_checker_sends(bench: Bench, is_async: bool, answer: Resolution) -> None:
    """Messages sent and halves decided with a checker's session go out with its verdict, or not at all."""
    other = bench.prepare("shipped")

    def checker(orphan: Orphan, session: Session) -> Resolution:
        bench.outbox.send(session, "told", {"n": 1})
        bench.outbox.commit(other, session)
        return answer

    async def async_checker(orphan: Orphan, session: AsyncSession) -> Resolution:
        bench.outbox.send(session, "told", {"n": 1})
        bench.outbox.commit(other, session)
        return answer

    bench.outbox.checker("paid")(async_checker if is_async else checker)
    half_id = bench.prepare()
    bench.check()
    bench.dispatch()
    topics = [row[0] for row in bench.rows("SELECT topic FROM outbox.message ORDER BY 1")]
    decided = {COMMIT: ["paid", "shipped", "told"], ROLLBACK: ["shipped", "told"], UNKNOWN: []}[answer]
    assert topics == decided
    assert bench.op(other) == (None if answer is UNKNOWN else ("commit", "producer"))
    assert bench.op(half_id) == (None if answer is UNKNOWN else (answer, "check"))


# --- time ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("takes_session", [False, True], ids=["plain", "session"])
def test_async_checker_that_hangs_is_cancelled(bench: Bench, takes_session: bool) -> None:
    """It is given up and cancelled: it ends, leaves no thread and no connection behind, and its topic goes on."""
    cancelled = threading.Event()

    async def hang(orphan: Orphan) -> Resolution:
        if orphan.key == "hangs":
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
        return COMMIT

    async def hang_with_session(orphan: Orphan, session: AsyncSession) -> Resolution:
        session.add(Change(number=1 if orphan.key == "hangs" else orphan.body["n"]))
        await session.flush()
        return await hang(orphan)

    bench.outbox.checker("paid", timeout=2)(hang_with_session if takes_session else hang)
    bench.warm_up(is_async=True)
    half_id = bench.prepare(key="hangs")
    assert bench.check() == Counts(taken=1, failed=1)
    assert cancelled.wait(60)
    bench.wait_for(lambda: not asking_threads(), "no thread is left behind")
    assert bench.history(half_id)[0].error == "no answer within 2 s: the checker was given up"
    assert changes(bench) == []
    others = [bench.prepare(body={"n": 2 + n}) for n in range(10)]
    while bench.check():
        pass
    assert {bench.op(each) for each in others} == {("commit", "check")}
    bench.asker.end()
    bench.wait_for(
        lambda: not [thread for thread in threading.enumerate() if thread.name == "outbox-worker-loop"],
        "the event loops have ended",
    )


def test_async_checker_that_refuses_to_be_cancelled(bench: Bench) -> None:
    """One that goes on all the same can't record anything: its connection is gone."""
    answered = threading.Event()

    @bench.outbox.checker("paid", timeout=SHORT)
    async def checker(orphan: Orphan, session: AsyncSession) -> Resolution:
        session.add(Change(number=1))
        await session.flush()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            answered.set()
        return COMMIT

    half_id = bench.prepare()
    bench.warm_up(is_async=True)
    assert bench.check() == Counts(taken=1, failed=1)
    assert answered.wait(60)
    bench.wait_for(lambda: not asking_threads(), "the thread has ended")
    assert (bench.op(half_id), bench.answers(half_id), changes(bench)) == (None, ["unknown"], [])


def test_async_checker_that_blocks_its_loop(bench: Bench) -> None:
    """It can't be cancelled; it holds up its own loop, and no other checker."""

    @bench.outbox.checker("paid", timeout=SHORT)
    async def blocks(orphan: Orphan) -> Resolution:
        bench.let_go.wait()
        return COMMIT

    @bench.outbox.checker("shipped")
    async def good(orphan: Orphan) -> Resolution:
        return COMMIT

    blocked = bench.prepare()
    bench.warm_up(is_async=True, count=5)
    others = [bench.prepare("shipped") for _ in range(10)]
    assert bench.check() == Counts(taken=11, done=10, failed=1)
    assert {bench.op(each) for each in others} == {("commit", "check")}
    assert bench.answers(blocked) == ["unknown"]
    bench.let_go.set()
    bench.wait_for(lambda: not asking_threads(), "it has ended")
    assert bench.op(blocked) is None


def test_topic_goes_on_when_its_checkers_have_ended(new_bench: NewBench) -> None:
    """While all threads of a topic hang it rests, uncounted; when they have ended at last it goes on."""
    bench = new_bench(checks_in_flight=2)
    asked = bench.register(bench.let_go, timeout=SHORT)
    bench.warm_up(count=2)
    ids = [bench.prepare() for _ in range(4)]
    bench.age_and_check(4)
    assert len(asked) == 2
    assert sorted(bench.waits(each).check_times for each in ids) == [0, 0, 1, 1]
    bench.let_go.set()
    bench.wait_for(lambda: not asking_threads(), "the checkers have ended")
    bench.age_and_check()
    assert {bench.op(each) for each in ids} == {("commit", "check")}


def test_statement_that_takes_too_long(bench: Bench) -> None:
    """A statement of a checker ends with its time, also on the server."""

    @bench.outbox.checker("paid", timeout=SHORT)
    def checker(orphan: Orphan, session: Session) -> Resolution:
        session.add(Change(number=1))
        session.execute(text("SELECT pg_sleep(3600)"))
        return COMMIT

    half_id = bench.prepare()
    bench.warm_up()
    assert bench.check() == Counts(taken=1, failed=1)
    bench.wait_for(lambda: bench.connections("query LIKE '%pg_sleep(3600)%'") == 0, "the statement has ended")
    bench.wait_for(lambda: not asking_threads(), "and its thread")
    assert (bench.op(half_id), bench.answers(half_id), changes(bench)) == (None, ["unknown"], [])


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_lock_that_is_not_to_be_had(bench: Bench, is_async: bool) -> None:
    """A checker that must wait for the transaction it is asked about answers UNKNOWN soon, and gives its place up."""
    bench.run("INSERT INTO change VALUES (1)")
    update = text("UPDATE change SET of = 1")

    def checker(orphan: Orphan, session: Session) -> Resolution:
        session.execute(update)
        return COMMIT

    async def async_checker(orphan: Orphan, session: AsyncSession) -> Resolution:
        await session.execute(update)
        return COMMIT

    bench.outbox.checker("paid", timeout=60)(async_checker if is_async else checker)
    half_id = bench.prepare()
    with bench.engine.begin() as business:
        business.execute(update)
        assert bench.check() == Counts(taken=1, failed=1)
    (check,) = bench.history(half_id)
    assert "psycopg.errors.LockNotAvailable" in check.error
    assert "canceling statement due to lock timeout" in check.error
    assert check.seconds < 60
    assert bench.age_and_check() == Counts(taken=1, done=1)


def test_limits_are_of_the_transaction(bench: Bench) -> None:
    """What limits a checker's statements is gone with its transaction: the connection may be a pooler's."""
    seen: list[tuple[Any, ...]] = []
    show = text("SELECT current_setting('statement_timeout'), current_setting('lock_timeout')")
    engine_default = tuple(bench.rows(str(show))[0])

    @bench.outbox.checker("paid", timeout=7, interval=1)
    def checker(orphan: Orphan, session: Session) -> Resolution:
        seen.append(tuple(session.execute(show).one()))
        return COMMIT

    @bench.outbox.checker("shipped", timeout=0.2)
    def quick(orphan: Orphan, session: Session) -> Resolution:
        seen.append(tuple(session.execute(show).one()))
        return COMMIT

    bench.prepare()
    bench.check()
    shipped = bench.prepare("shipped")
    while bench.op(shipped) is None:  # on a busy machine it may be given up, and is asked again
        bench.age_and_check()
    assert (seen[0], set(seen[1:])) == (("7s", "500ms"), {("200ms", "200ms")})
    (runner,) = bench.asker._idle[False]

    def look(connection: Any, _: Any) -> Counts:
        with connection.begin():
            seen.append(tuple(connection.execute(show).one()))
        return Counts()

    runner.run(look)
    assert seen[-1] == engine_default


def test_the_longest_times_that_may_be_set(new_bench: NewBench) -> None:
    """What the settings let through works: the server takes these limits, and the clock these waits."""
    century = 100 * 366 * 86400 - 1
    bench = new_bench(immunity=century, check_interval=century, check_time_limit=86400, check_timeout=86400)
    bench.outbox.checker("paid")(lambda orphan, session: COMMIT if orphan.checks == 2 else UNKNOWN)
    half_id = bench.prepare(due=False)
    for _ in range(2):
        assert bench.check() == Counts()
        assert bench.waits(half_id).wait > century - 60
        bench.age_and_check()
    assert bench.op(half_id) == ("commit", "check")


def test_checker_for_a_moment_only(new_bench: NewBench) -> None:
    """A worker without the checker leaves what another one has claimed; who has it goes on with his own rules."""
    bench = new_bench()
    asked = bench.register(UNKNOWN, max_checks=2)
    half_id = bench.prepare()
    bench.check()
    other = bench.colleague(Outbox(bench.engine, settings=Settings(max_checks=15)))
    other.age_and_check(3)
    assert bench.waits(half_id).check_times == 1
    patient = other.register(UNKNOWN)
    other.age_and_check(2)
    assert not bench.waits(half_id).parked
    assert ([each.checks for each in asked], [each.checks for each in patient]) == ([1], [2, 3])
    # By this one's rules it has been asked about often enough.
    assert bench.age_and_check() == Counts(taken=1, parked=1)
    assert len(asked) == 1
