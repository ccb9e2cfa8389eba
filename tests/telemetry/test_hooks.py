"""Hooks get each event after the COMMIT that made it true, and break nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from outbox import INJECTED, Message, Outbox, Park, Resolution, testing
from outbox.errors import AlreadyCommitted
from outbox.message.model import HalfMessage
from outbox.telemetry import events
from outbox.telemetry.hooks import (
    Activity,
    Handling,
    Middleware,
    Sending,
    TelemetryEvent,
    add_hook,
    add_observer,
    add_send_hook,
    emit,
)
from tests.kit import wait_until
from tests.worker.conftest import Bench

#: Headers that no hook may add: what options of a send make, and what the framework does.
OWN = ("outbox-encoding", "outbox-expires-at", "outbox-correlation")


@pytest.fixture
def bench(new_bench: Callable[..., Bench]) -> Bench:
    """A bench with the default settings."""
    return new_bench()


def of(heard: list[TelemetryEvent], *kinds: type[TelemetryEvent]) -> list[TelemetryEvent]:
    """Return the events of some kinds."""
    return [event for event in heard if isinstance(event, kinds)]


@pytest.mark.parametrize("resolution", [Resolution.COMMIT, Resolution.ROLLBACK])
@pytest.mark.parametrize("within", ["alone", "session", "driver"])
def test_a_decision_is_told_before_and_after(
    bench: Bench, heard: list[TelemetryEvent], resolution: Resolution, within: str
) -> None:
    """Of each decision of the producer's: before its op is written, and once it has committed."""

    def decided() -> list[tuple[type[TelemetryEvent], UUID, str]]:
        kinds = (events.HalfDeciding, events.HalfDecided)
        return [(type(each), each.half_id, each.resolution) for each in heard if isinstance(each, kinds)]

    with Session(bench.engine) as session, session.begin():
        half_id = bench.outbox.prepare(session, "paid", {})
    decide = bench.outbox.commit if resolution is Resolution.COMMIT else bench.outbox.rollback
    before = (events.HalfDeciding, half_id, resolution.value)
    both = [before, (events.HalfDecided, half_id, resolution.value)]
    if within == "driver":
        pooled = bench.engine.raw_connection()
        driver: Any = pooled.driver_connection
        driver.execute("SELECT 1")
        decide(half_id, within=driver)
        driver.commit()
        pooled.close()
        assert decided() == [before]  # nothing tells of its COMMIT
        return
    if within == "session":
        with Session(bench.engine) as session, session.begin():
            decide(half_id, within=session)
            assert decided() == []
    else:
        decide(half_id)
    assert decided() == both
    decide(half_id)  # which does nothing
    assert decided() == [*both, before]


def test_a_decision_that_fails_is_not_told_as_done(bench: Bench, heard: list[TelemetryEvent]) -> None:
    """Another decision came first, or the transaction was rolled back: a hook hears that it was to be, and no more."""
    with Session(bench.engine) as session, session.begin():
        half_id = bench.outbox.prepare(session, "paid", {})
    with Session(bench.engine) as session:
        bench.outbox.rollback(half_id, within=session)
        session.rollback()
    assert of(heard, events.HalfDeciding, events.HalfDecided) == []
    bench.outbox.commit(half_id)
    with pytest.raises(AlreadyCommitted):
        bench.outbox.rollback(half_id)
    with pytest.raises(AlreadyCommitted), Session(bench.engine) as session, session.begin():
        bench.outbox.rollback(half_id, within=session)
    assert [type(each) for each in of(heard, events.HalfDeciding, events.HalfDecided)] == [
        *(events.HalfDeciding, events.HalfDecided),
        *(events.HalfDeciding, events.HalfDeciding),
    ]


def test_middlewares_hear_of_the_decisions_of_two_phase(bench: Bench) -> None:
    """Those of its own Outbox: the commit with the function's transaction, the rollback after its failure."""
    heard: list[tuple[str, str]] = []

    class Ears(Middleware):
        def on_event(self, event: TelemetryEvent, /) -> None:
            if isinstance(event, events.HalfDeciding):
                heard.append((event.code, event.resolution))

    bench.outbox.use(Ears())

    @bench.outbox.two_phase(topic="paid", rollback_on=(ValueError,))
    def pay(fails: bool, session: Session = INJECTED) -> dict[str, bool]:
        if fails:
            raise ValueError("no")
        return {"paid": True}

    pay(False)
    with pytest.raises(ValueError, match="no"):
        pay(True)
    codes = ("half.deciding", "half.decided")
    assert heard == [(code, resolution) for resolution in ("commit", "rollback") for code in codes]


def test_success_is_told_to_hooks(bench: Bench, heard: list[TelemetryEvent]) -> None:
    """Sends, passes and handled messages, in the order of their commits."""
    bench.outbox.consumer("paid", group="mail")(bench.handle)
    with Session(bench.engine) as session, session.begin():
        ids = tuple(bench.outbox.send(session, "paid", {"n": n}, key="k") for n in range(3))
        assert of(heard, events.MessagesSent) == []
    assert of(heard, events.MessagesSent) == [events.MessagesSent(topic="paid", message_ids=ids)]
    bench.work(roles=["dispatch", "consume"])
    wait_until(lambda: of(heard, events.MessagesHandled), "the messages are handled")
    wait_until(lambda: len(bench.effects()) >= 3, "all of them")
    handled = of(heard, events.MessagesHandled)
    assert [id_ for event in handled if isinstance(event, events.MessagesHandled) for id_ in event.message_ids] == [
        *ids
    ]
    wait_until(lambda: of(heard, events.PassEnded), "the passes are told")


@pytest.mark.parametrize("savepoint", [False, True])
def test_what_is_rolled_back_is_not_told(bench: Bench, heard: list[TelemetryEvent], savepoint: bool) -> None:
    """A message that was rolled back, with its transaction or its savepoint, was never sent."""
    with Session(bench.engine) as session, session.begin() as transaction:
        if savepoint:
            with session.begin_nested() as nested:
                bench.outbox.send(session, "paid", {})
                nested.rollback()
        else:
            bench.outbox.send(session, "paid", {})
            transaction.rollback()
    assert of(heard, events.MessagesSent) == []


def test_a_commit_that_fails_sent_nothing(bench: Bench, heard: list[TelemetryEvent]) -> None:
    """A COMMIT that the server refuses (a deferred constraint) tells nothing."""
    with bench.engine.begin() as connection:
        connection.execute(text("CREATE TABLE one (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)"))
    with pytest.raises(Exception, match="one_n_key"), Session(bench.engine) as session, session.begin():
        session.execute(text("INSERT INTO one VALUES (1), (1)"))
        bench.outbox.send(session, "paid", {})
    assert of(heard, events.MessagesSent) == []


def test_a_decision_and_a_send_in_one_transaction(bench: Bench, heard: list[TelemetryEvent]) -> None:
    """What is sent beside a decision is told after their COMMIT."""
    with Session(bench.engine) as session, session.begin():
        half_id = bench.outbox.prepare(session, "paid", {})
    with Session(bench.engine) as session, session.begin():
        bench.outbox.commit(half_id, session)
        sent = bench.outbox.send(session, "mail", {})
    prepared, other = of(heard, events.MessagesSent)
    assert prepared == events.MessagesSent(topic="paid", message_ids=(half_id,), prepared=True)
    assert other == events.MessagesSent(topic="mail", message_ids=(sent,))
    assert bench.rows("SELECT count(*) FROM outbox.op_message") == [2]


def test_an_error_in_a_hook_breaks_nothing(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Hooks of all kinds that raise: the message is sent, handled once, and the log says it once for each hook."""

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("a broken hook")

    @contextmanager
    def broken_exit(_: Activity) -> Iterator[None]:
        try:
            yield
        finally:
            raise ZeroDivisionError("a broken observer")

    removes = [add_hook(broken), add_observer(broken_exit), add_observer(broken), add_send_hook(broken)]
    try:
        bench.outbox.consumer("paid", group="mail")(bench.handle)
        ids = bench.send(count=3)
        testing.drain(bench.outbox)
    finally:
        for remove in removes:
            remove()
    assert sorted(bench.effects()) == sorted(ids)
    assert bench.inbox() == [("consumed", 1)] * 3
    records = [each for each in caplog.records if getattr(each, "outbox_event", "") == "hook.failed"]
    assert [each.levelno for each in records].count(logging.ERROR) == 3


def test_a_log_that_fails_breaks_nothing(bench: Bench) -> None:
    """A filter of the application's that raises doesn't lose the failed attempt's record in the inbox."""

    def broken(_: logging.LogRecord) -> bool:
        raise ZeroDivisionError

    @bench.outbox.consumer("paid", group="mail")
    def handle(message: Message, session: Any) -> Park:
        return Park("for the test")

    logger = logging.getLogger("outbox.consumer")
    logger.addFilter(broken)
    try:
        bench.send()
        testing.drain(bench.outbox)
    finally:
        logger.removeFilter(broken)
    assert bench.inbox() == [("parked", 1)]


def test_an_event_without_facts_has_its_record(caplog: pytest.LogCaptureFixture) -> None:
    """Its sentence is whole, and the record is where the event was told."""
    caplog.set_level(logging.INFO, "outbox")
    emit(events.WorkerStopping())
    assert [(each.getMessage(), each.filename) for each in caplog.records] == [("worker is stopping", "test_hooks.py")]


def test_observers_are_around_the_handler(bench: Bench) -> None:
    """An observer is entered before the handler, left after it, and sees what it answered or raised."""
    seen: list[Any] = []

    @contextmanager
    def observer(activity: Activity) -> Iterator[None]:
        assert isinstance(activity, Handling)
        seen.append(("before", activity.group, [message.id for message in activity.messages]))
        try:
            yield
        except ZeroDivisionError as error:
            seen.append(error)
        seen.append(activity.answer)

    @bench.outbox.consumer("paid", group="mail")
    def handle(message: Message, session: Any) -> Park:
        if message.body["number"] == 0:
            raise ZeroDivisionError
        seen.append("handler")
        return Park("for the test")

    remove = add_observer(observer)
    try:
        first, second = bench.send(count=2)
        testing.drain(bench.outbox)
    finally:
        remove()
    by_id = [("before", "mail", [first]), ("before", "mail", [second])]
    assert [each for each in seen if isinstance(each, tuple)] in (by_id, by_id[::-1])
    assert seen[seen.index("handler") - 1] == by_id[1]
    assert seen[seen.index("handler") + 1] == Park("for the test")
    assert isinstance(seen[seen.index(by_id[0]) + 1], ZeroDivisionError)
    assert {status for status, _ in bench.inbox()} == {"failed", "parked"}


current: ContextVar[str] = ContextVar("current", default="")


def test_what_an_observer_sets_is_seen_by_an_async_handler(bench: Bench) -> None:
    """A context variable of the observer's is there in the coroutine, and in the tasks that it starts."""
    seen: list[str] = []

    @contextmanager
    def observer(activity: Activity) -> Iterator[None]:
        assert isinstance(activity, Handling)
        token = current.set(str(activity.messages[0].id))
        yield
        current.reset(token)

    @bench.outbox.consumer("paid", group="mail")
    async def handle(message: Message, session: Any) -> None:
        seen.append(current.get())

        async def other() -> None:
            seen.append(current.get())

        await asyncio.create_task(other())
        await bench.handle_async(message, session)

    remove = add_observer(observer)
    try:
        bench.work()
        (message_id,) = bench.send()
        wait_until(bench.effects, "the message is handled")
    finally:
        remove()
    assert seen == [str(message_id)] * 2


def test_send_hooks_add_headers(bench: Bench, heard: list[TelemetryEvent]) -> None:
    """What a send hook adds reaches the handler; a header that can't be stored is left out, which is told."""
    got: list[dict[str, str]] = []
    committed: list[UUID] = []

    def hook(half: HalfMessage) -> Sending:
        return Sending({"traceparent": "00-1"}, lambda: committed.append(half.id))

    @bench.outbox.consumer("paid", group="mail")
    def handle(message: Message, session: Any) -> None:
        got.append(dict(message.headers))

    removes = [add_send_hook(hook), add_send_hook(lambda _: Sending({"bad": "\0"}))]
    removes += [add_send_hook(partial(lambda own, _: Sending({own: "x"}), own)) for own in OWN]
    try:
        ids = bench.send(headers={"own": "x"})
    finally:
        for remove in removes:
            remove()
    testing.drain(bench.outbox)
    assert got == [{"own": "x", "traceparent": "00-1"}]
    assert committed == ids
    refused = of(heard, events.HeadersRefused)
    assert [getattr(each, "names", None) for each in refused] == [("bad",), *((own,) for own in OWN)]
    assert {(each.facts()["message_id"], each.facts()["topic"]) for each in refused} == {(str(ids[0]), "paid")}


def test_the_context_of_an_outbox_is_its_own(engine: Engine) -> None:
    """Without a hook nothing is added to a message."""
    outbox = Outbox(engine)
    with engine.begin() as connection:
        outbox.send(connection, "paid", {})
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(headers) FROM outbox.half_message")).scalar() == 0
