"""`outbox.use` puts a middleware around what one Outbox sends and handles; it gets its events, and breaks nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from outbox import Breaker, Message, Middleware, Outbox, Park, Resolution, testing
from outbox.errors import InvalidHandler
from outbox.message.model import HalfMessage
from outbox.telemetry import events
from outbox.telemetry.hooks import Activity, Calling, Handling, Sending, TelemetryEvent
from tests.kit import send_each, wait_until
from tests.worker.conftest import Bench


class Recorder(Middleware):
    """Writes down all that it sees, in one list, and marks what is sent."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.seen: list[Any] = []
        self.heard: list[TelemetryEvent] = []
        self.committed: list[UUID] = []

    def on_send(self, half: HalfMessage, /) -> Sending:
        """Mark the message."""
        return Sending({f"by-{self.name}": self.name}, lambda: self.committed.append(half.id))

    @contextmanager
    def around(self, activity: Activity, /) -> Iterator[None]:
        """Note what comes before and after."""
        self.seen.append(("before", self.name))
        try:
            yield
        except ZeroDivisionError:
            self.seen.append(("failed", self.name))
            raise
        self.seen.append(("after", self.name, activity.answer))

    def on_event(self, event: TelemetryEvent, /) -> None:
        """Keep it."""
        self.heard.append(event)

    def of(self, kind: type[TelemetryEvent]) -> list[TelemetryEvent]:
        """Return the events of a kind."""
        return [event for event in self.heard if isinstance(event, kind)]


class Broken(Middleware):
    """Fails at everything."""

    def on_send(self, _: HalfMessage, /) -> Sending | None:
        """Fail."""
        raise ZeroDivisionError("a broken middleware")

    def around(self, _: Activity, /) -> AbstractContextManager[object]:
        """Fail."""
        raise ZeroDivisionError("a broken middleware")

    def on_event(self, _: TelemetryEvent, /) -> None:
        """Fail."""
        raise ZeroDivisionError("a broken middleware")


class BrokenExit(Middleware):
    """Fails when the handler has returned."""

    @contextmanager
    def around(self, _: Activity, /) -> Iterator[None]:
        """Fail at the end."""
        yield
        raise ZeroDivisionError("a broken middleware")


@pytest.fixture
def bench(new_bench: Callable[..., Bench]) -> Bench:
    """A bench with the default settings."""
    return new_bench()


def test_around_send_and_handler(bench: Bench) -> None:
    """The first is outermost; what they add reaches the handler; an exception is seen, and stays the handler's."""
    first, second, got = Recorder("a"), Recorder("b"), []
    bench.outbox.use(first)
    bench.outbox.use(second)
    second.seen = first.seen

    @bench.outbox.consumer("paid", group="mail")
    def handle(message: Message, session: Any) -> Park:
        got.append({name: value for name, value in message.headers.items() if name.startswith("by-")})
        if message.body["number"] == 0:
            raise ZeroDivisionError
        return Park("for the test")

    ids = bench.send()
    testing.drain(bench.outbox)
    assert first.seen == [("before", "a"), ("before", "b"), ("failed", "b"), ("failed", "a")]
    first.seen.clear()
    with Session(bench.engine) as session, session.begin():
        ids.append(bench.outbox.send(session, "paid", {"number": 1}))
        assert first.committed == ids[:1]
    testing.drain(bench.outbox)
    answer = Park("for the test")
    assert first.seen == [("before", "a"), ("before", "b"), ("after", "b", answer), ("after", "a", answer)]
    assert got == [{"by-a": "a", "by-b": "b"}] * 2
    assert (first.committed, second.committed) == (ids, ids)


def test_events_of_this_outbox_alone(bench: Bench) -> None:
    """What another Outbox of the process sends and handles is none of its affair, though the tables are the same."""
    other = Outbox(bench.engine, group="other", settings=bench.outbox.settings)
    own, strange = Recorder("own"), Recorder("strange")
    bench.outbox.use(own)
    other.use(strange)

    @bench.outbox.consumer("paid", group="mail")
    def handle(message: Message, session: Any) -> Park | None:
        if message.body["number"] == 0:
            raise ZeroDivisionError
        return Park("for the test") if message.body["number"] == 1 else None

    bench.work(roles=["dispatch", "consume"])
    ids = bench.send(count=3)
    wait_until(lambda: own.of(events.MessagesHandled) and own.of(events.MessageParked), "two are done with")
    wait_until(lambda: own.of(events.MessageFailed), "one has failed")
    assert own.of(events.MessagesSent) == [events.MessagesSent(topic="paid", message_ids=(each,)) for each in ids]
    assert strange.heard == strange.seen == []
    with Session(bench.engine) as session, session.begin():
        there = other.send(session, "paid", {"number": 2})
        here = bench.outbox.send(session, "paid", {"number": 2})
    (sent,) = strange.of(events.MessagesSent)
    assert sent == events.MessagesSent(topic="paid", message_ids=(there,))
    assert own.of(events.MessagesSent)[3:] == [events.MessagesSent(topic="paid", message_ids=(here,))]


def test_a_half_that_is_parked(bench: Bench) -> None:
    """The checker is a function of the application's as well; its last UNKNOWN parks the half, and that is told."""
    seen: list[Activity] = []

    class Checks(Recorder):
        @contextmanager
        def around(self, activity: Activity, /) -> Iterator[None]:
            seen.append(activity)
            yield

    middleware = Checks()
    bench.outbox.use(middleware)

    @bench.outbox.checker("paid", max_checks=1, immunity=0)
    def ask(orphan: Any) -> Resolution:
        return Resolution.UNKNOWN

    with Session(bench.engine) as session, session.begin():
        half_id = bench.outbox.prepare(session, "paid", {})
    testing.check(bench.outbox)
    assert [(type(activity), activity.answer) for activity in seen] == [(Calling, Resolution.UNKNOWN)]
    (parked,) = middleware.of(events.HalfParked)
    assert isinstance(parked, events.HalfParked)
    assert parked.half_id == half_id


def test_what_a_worker_fails_at_and_finishes(bench: Bench) -> None:
    """A pass that fails, the recovery after it, and a reconciliation that has ended are told, of this Outbox alone."""
    own, strange = Recorder(), Recorder()
    bench.outbox.use(own)
    other = Outbox(bench.engine, group="other", settings=bench.outbox.settings)
    other.use(strange)
    bench.outbox.consumer("paid", group="mail")(bench.handle)
    bench.outbox.reconciliation("nightly", every=86_400)
    bench.work()
    hide = "ALTER TABLE outbox.{} RENAME TO {}"
    with bench.engine.begin() as connection:
        connection.execute(text(hide.format("scheduled_message", "hidden")))
    bench.send()
    (failed, *_) = wait_until(lambda: own.of(events.PassFailed), "a pass fails")
    with bench.engine.begin() as connection:
        connection.execute(text(hide.format("hidden", "scheduled_message")))
    duty = failed.facts()["duty"]
    recovered = partial(own.of, events.PassRecovered)
    wait_until(lambda: duty in [event.facts()["duty"] for event in recovered()], "it recovers")
    (finished,) = wait_until(lambda: own.of(events.ReconciliationFinished), "the reconciliation ends")
    assert finished.facts()["reconciliation"] == "nightly"
    assert strange.heard == []


def test_a_breaker_that_opens(bench: Bench) -> None:
    """Who pages the operator of one Outbox learns that its group has stopped."""
    own = Recorder()
    bench.outbox.use(own)

    @bench.outbox.consumer("paid", group="mail", breaker=Breaker(failures=2, window=60, trial_after=600))
    def handle(message: Message, session: Any) -> None:
        raise ZeroDivisionError

    bench.work(roles=["dispatch", "consume"])
    bench.send(count=2)
    (opened,) = wait_until(lambda: own.of(events.BreakerOpened), "the breaker opens")
    assert opened.facts()["group"] == "mail"
    assert len(own.of(events.MessageFailed)) == 2


def test_what_becomes_of_a_send(bench: Bench) -> None:
    """A header that can't be stored is left out, and told to the middlewares of the Outbox that sent."""

    class Wrong(Recorder):
        def on_send(self, _: HalfMessage, /) -> Sending:
            return Sending({"wrong": "\x00"})

    wrong = Wrong()
    bench.outbox.use(wrong)
    (message_id,) = send_each(bench.outbox, "paid", {})
    (refused,) = wrong.of(events.HeadersRefused)
    assert (refused.facts()["message_id"], refused.facts()["names"]) == (str(message_id), ["wrong"])


def test_an_error_breaks_nothing(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Each that fails is one line in the log; the messages are sent and handled once, and the others see them."""
    behind = Recorder()
    for middleware in (Broken(), BrokenExit(), behind):
        bench.outbox.use(middleware)
    bench.outbox.consumer("paid", group="mail")(bench.handle)
    ids = bench.send(count=3)
    testing.drain(bench.outbox)
    assert sorted(bench.effects()) == sorted(ids)
    assert bench.inbox() == [("consumed", 1)] * 3
    assert behind.committed == ids
    assert len(behind.seen) == 6
    records = [each for each in caplog.records if getattr(each, "outbox_event", "") == "hook.failed"]
    assert [each.levelno for each in records].count(logging.ERROR) == 4


def test_a_middleware_counts_for_tenants(bench: Bench, new_bench: Callable[..., Bench]) -> None:
    """What is used on either is used by both, until it is taken away."""
    middleware, other = Recorder("t"), new_bench()
    tenant = bench.outbox.bound_to(other.engine)
    end = tenant.use(middleware)
    bench.outbox.consumer("paid", group="mail")(bench.handle)
    send_each(bench.outbox, "paid", {})
    send_each(tenant, "paid", {})
    testing.drain(bench.outbox)
    testing.drain(tenant)
    assert [one[0] for one in middleware.seen] == ["before", "after"] * 2
    end()
    bench.send()
    testing.drain(bench.outbox)
    assert len(middleware.seen) == 4


def test_an_async_handler(bench: Bench) -> None:
    """The middleware is around the coroutine, in its task."""
    middleware = Recorder()
    bench.outbox.use(middleware)
    bench.outbox.consumer("paid", group="mail")(bench.handle_async)
    bench.work()
    bench.send()
    wait_until(bench.effects, "the message is handled")
    wait_until(lambda: middleware.of(events.MessagesHandled), "that is told")
    assert [one[0] for one in middleware.seen] == ["before", "after"]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_handler_outside_of_transactions(bench: Bench, is_async: bool) -> None:
    """The middleware is around each call, in its thread or task; the event comes when the result is written."""
    middleware, got = Recorder(), list[UUID]()
    bench.outbox.use(middleware)

    def handle(message: Message) -> None:
        got.append(message.id)

    async def handle_async(message: Message) -> None:
        handle(message)

    bench.outbox.consumer("paid", group="mail", transactional=False)(handle_async if is_async else handle)
    bench.work()
    ids = bench.send()
    wait_until(lambda: middleware.of(events.MessagesHandled), "the message is handled")
    assert got == ids
    assert middleware.seen == [("before", ""), ("after", "", None)]


def test_what_can_not_be_used(bench: Bench) -> None:
    """A function isn't a middleware, and one is used once."""
    wrong: Any = Handling
    with pytest.raises(InvalidHandler, match=r"outbox\.Middleware, not type"):
        bench.outbox.use(wrong)
    middleware = Recorder()
    bench.outbox.use(middleware)
    with pytest.raises(InvalidHandler, match="in use already"):
        bench.outbox.use(middleware)
