"""`Unavailable`: what a handler needs isn't there. No message pays, and the group stops until one is handled."""

from __future__ import annotations

import datetime as dt
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy.orm import Session

from outbox import Message, Park, Unavailable
from outbox.consumer.consumer import Consumer
from outbox.consumer.control.gate import ALONE, LONGEST_TRIAL_WAIT
from outbox.telemetry.events import BatchUndone, BreakerOpened, MessageFailed
from outbox.telemetry.hooks import TelemetryEvent
from tests.consumer.test_control import Clock, control, gated, trial_due
from tests.kit.bench import Bench

OUTSIDE: dict[str, Any] = {"transactional": False, "concurrency": 4}
ENGINES = [{}, {"ordered": True}, {"ordered": "key"}, {"batch": 3}, OUTSIDE, {**OUTSIDE, "ordered": True}]
ENGINES += [{**OUTSIDE, "ordered": "key"}, {**OUTSIDE, "takes_batch": True, "batch": 3}]
NAMES = ["plain", "ordered", "by-key", "batch", "outside", "outside-ordered", "outside-by-key", "outside-batch"]


class Provider:
    """What handlers need; ``away`` says whether it isn't there, and for which bodies (None: all)."""

    def __init__(self, *, takes_batch: bool, transactional: bool, after: dt.timedelta | float | None = None) -> None:
        self.away = True
        self.only: set[Any] | None = None
        self.calls: list[Any] = []
        self.done: list[Any] = []
        self.handler: Any = self._handle
        self._after = after
        if takes_batch:
            self.handler = lambda messages: [self._handle(message) for message in messages]
        elif transactional:
            self.handler = self._change

    def _change(self, message: Message, _: Session) -> Unavailable | None:
        return self._handle(message)

    def _handle(self, message: Message) -> Unavailable | None:
        self.calls.append(message.body)
        if self.away and (self.only is None or message.body in self.only):
            return Unavailable("the provider is away", after=self._after)
        self.done.append(message.body)
        return None


def declared(bench: Bench, clock: Clock, options: dict[str, Any], **more: Any) -> tuple[Provider, Consumer]:
    """Return a provider, and the consumer whose handler needs it."""
    kinds = {"takes_batch": options.get("takes_batch", False), "transactional": options.get("transactional", True)}
    provider = Provider(**kinds, **more)
    return provider, gated(bench, clock, provider.handler, **options)


@pytest.mark.parametrize("options", ENGINES, ids=NAMES)
def test_it_costs_no_attempt(bench: Bench, heard: list[TelemetryEvent], options: dict[str, Any]) -> None:
    """The inbox says nothing of it, the offset stays, one event tells; after a trial all are handled, in order."""
    clock = Clock()
    provider, consumer = declared(bench, clock, options)
    bench.send(*range(6))
    for _ in range(3):
        bench.consume(consumer)
        assert bench.statuses() == []
        assert control(bench).state == "open"
        trial_due(bench, clock)
    assert [(each.failures, each.reason) for each in heard if isinstance(each, BreakerOpened)] == [
        (0, "the provider is away")
    ]
    provider.away = False
    bench.consume(consumer)
    assert provider.done == list(range(6))
    assert bench.statuses() == [("consumed", 1)] * 6
    assert control(bench).state == "running"
    assert not [each for each in heard if isinstance(each, MessageFailed)]


@pytest.mark.parametrize("options", [{}, OUTSIDE], ids=["plain", "outside"])
def test_a_retry_costs_none_either(bench: Bench, options: dict[str, Any]) -> None:
    """Nor is it a start that had no end: however often it is tried, it isn't taken for what kills its workers."""
    clock = Clock()
    provider, consumer = declared(bench, clock, options)
    (message_id,) = bench.send("a")
    bench.run(
        "INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts,"
        " next_attempt_at, last_error) SELECT 'g', :id, 't', queue, position, 'failed', 2, clock_timestamp(), 'x'"
        " FROM unnest(CAST(:queues AS int[]), CAST(:positions AS bigint[])) AS m (queue, position)",
        **place(bench, message_id),
    )
    for _ in range(bench.settings.max_starts + 3):
        bench.retry(consumer)
        assert bench.statuses() == [("failed", 2)]
        trial_due(bench, clock)
    provider.away = False
    bench.retry(consumer)
    assert bench.statuses() == [("consumed", 3)]


def place(bench: Bench, message_id: UUID) -> dict[str, Any]:
    """Return where a message stands at its producer, as arrays of one."""
    with bench.producer.connect() as connection:
        queue, position = connection.exec_driver_sql("SELECT queue, position FROM outbox.message").one()
    return {"id": message_id, "queues": [queue], "positions": [position]}


@pytest.mark.parametrize("options", ENGINES, ids=NAMES)
def test_one_that_is_alone_with_it_has_failed(bench: Bench, options: dict[str, Any]) -> None:
    """Others are handled meanwhile; in the end it pays with an attempt, and nothing is held up for ever."""
    clock = Clock()
    provider, consumer = declared(bench, clock, options)
    provider.only = {"ill"}
    bench.app.declare_topic("t", 2)
    bench.send("ill", queue=0)
    rounds = 0
    while ("failed", 1) not in bench.statuses():
        bench.send(rounds, queue=1)
        bench.consume(consumer)
        trial_due(bench, clock)
        rounds += 1
        assert rounds < 20 * ALONE
    assert provider.calls.count("ill") > ALONE
    assert provider.done


@pytest.mark.parametrize("after", [7, dt.timedelta(seconds=7)])
def test_it_says_when_to_come_back(bench: Bench, after: Any) -> None:
    """As an answer 429 does; the first trial comes no earlier."""
    clock = Clock()
    _, consumer = declared(bench, clock, OUTSIDE, after=after)
    bench.send("a")
    bench.consume(consumer)
    assert 5 < seconds_to_trial(bench) <= 7
    _, consumer = declared(bench, clock, OUTSIDE, after=dt.timedelta(days=400))
    trial_due(bench, clock)
    bench.consume(consumer)
    assert LONGEST_TRIAL_WAIT - 2 < seconds_to_trial(bench) <= LONGEST_TRIAL_WAIT


def seconds_to_trial(bench: Bench) -> float:
    """Return in how many seconds the next trial is due."""
    sql = "SELECT extract(epoch FROM trial_at - clock_timestamp())::float8 FROM outbox.group_control"
    return float(bench.rows(sql)[0])


def test_trials_become_rarer(bench: Bench) -> None:
    """From one a second to one a minute, by how long it has been away."""
    clock = Clock()
    _, consumer = declared(bench, clock, OUTSIDE)
    bench.send("a")
    bench.consume(consumer)
    for minutes, least, most in ((0, 0, 1), (1, 13, 15.5), (3, 43, 46), (60, 58, 60)):
        bench.run(f"UPDATE outbox.group_control SET opened_at = clock_timestamp() - interval '{minutes} min'")
        trial_due(bench, clock)
        bench.consume(consumer)
        assert least < seconds_to_trial(bench) <= most


@pytest.mark.parametrize("after", ["soon", float("nan")])
def test_a_time_that_is_none(bench: Bench, after: Any) -> None:
    """It is a failure like any other wrong answer, not a stop of the group."""
    _, consumer = declared(bench, Clock(), OUTSIDE, after=after)
    bench.send("a")
    bench.consume(consumer)
    ((status, attempts),) = bench.statuses()
    assert (status, attempts) == ("failed", 1)
    assert "Unavailable(after=" in str(bench.rows("SELECT last_error FROM outbox.consumer_message")[0])


# --- lists of messages outside of transactions --------------------------------------------------------------------


def lists(bench: Bench, handler: Any, **options: Any) -> Consumer:
    """Return a consumer whose handler takes lists."""
    return bench.declare(handler, **{"transactional": False, "takes_batch": True, "batch": 4, **options})


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_each_message_of_a_list_has_its_answer(bench: Bench, is_async: bool) -> None:
    """Messages of one key aren't in one list, since they wait for each other."""
    taken: list[list[Any]] = []

    def handle(messages: list[Message]) -> list[Any]:
        taken.append([message.body for message in messages])
        return [Park("ill") if message.body == 2 else None for message in messages]

    async def handle_later(messages: list[Message]) -> list[Any]:
        return handle(messages)

    bench.app.declare_topic("t", 1)
    consumer = lists(bench, handle_later if is_async else handle)
    for number in range(4):
        bench.send(number, key=str(number))
    bench.send("again", key="0")
    bench.consume(consumer)
    assert taken == [[0, 1, 2, 3], ["again"]]
    assert bench.statuses() == [("consumed", 1)] * 2 + [("parked", 1)] + [("consumed", 1)] * 2


@pytest.mark.parametrize("answers", ["raise", "too few", "one for all", "no answer"])
def test_what_fails_as_a_whole_is_tried_alone(bench: Bench, heard: list[TelemetryEvent], answers: str) -> None:
    """A list costs nobody an attempt; alone, the message that is at fault is found."""
    taken: list[list[Any]] = []

    def handle(messages: list[Message]) -> Any:
        taken.append([message.body for message in messages])
        if len(messages) == 1:
            return [Park("ill")] if messages[0].body == 1 else None
        if answers == "raise":
            raise RuntimeError("something of these")
        return {"too few": [None], "one for all": Park("all"), "no answer": 3}[answers]

    bench.app.declare_topic("t", 1)
    bench.send(0, 1, 2, key=None)
    bench.consume(lists(bench, handle))
    assert taken == [[0, 1, 2], [0], [1], [2]]
    assert bench.statuses() == [("consumed", 1), ("parked", 1), ("consumed", 1)]
    assert [each.size for each in heard if isinstance(each, BatchUndone)] == [3]


# --- what a fresh pair of eyes has found -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", ENGINES, ids=NAMES)
def test_a_trial_that_fails_is_the_last_one_until_the_next_is_due(bench: Bench, options: dict[str, Any]) -> None:
    """However many passes there are meanwhile, and whatever time the handler asks for."""
    clock = Clock()
    provider, consumer = declared(bench, clock, options, after=600)
    bench.send(*range(8))
    bench.consume(consumer)
    trial_due(bench, clock)
    before = len(provider.calls)
    for _ in range(20):
        bench.consume(consumer)
        bench.retry(consumer, due=False)
        clock.now += 0.01
    assert len(provider.calls) == before + 1
    assert 590 < seconds_to_trial(bench) <= 600


@pytest.mark.parametrize("options", [{}, OUTSIDE, {**OUTSIDE, "ordered": "key"}], ids=["plain", "outside", "by-key"])
def test_a_retry_does_not_have_each_trial(bench: Bench, options: dict[str, Any]) -> None:
    """One that fails by itself is due again at once; those that are new have their turn."""
    clock = Clock()
    provider, consumer = declared(bench, clock, options)
    provider.only, provider.away = {"ill"}, True
    (ill,) = bench.send("ill", key="a")
    bench.run(
        "INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts,"
        " next_attempt_at, last_error) SELECT 'g', :id, 't', queue, position, 'failed', 1, clock_timestamp(), 'x'"
        " FROM unnest(CAST(:queues AS int[]), CAST(:positions AS bigint[])) AS m (queue, position)",
        **place(bench, ill),
    )
    bench.run(
        "INSERT INTO outbox.group_control (consumer_group, topic, opened_at, trial_at, opened_because) VALUES"
        " ('g', 't', clock_timestamp(), clock_timestamp(), 'x')"
    )
    bench.send(*range(20), key=None)
    for _ in range(12):
        bench.retry(consumer)
        bench.consume(consumer)
        trial_due(bench, clock)
    assert len(provider.done) == 20


def test_of_several_the_gravest_counts(bench: Bench) -> None:
    """A pause and the longest wait, whichever comes last."""
    clock = Clock()
    answers = {0: Unavailable("gone", pause=True), 1: Unavailable("busy", after=600), 2: Unavailable("x")}
    consumer = gated(
        bench,
        clock,
        lambda messages: [answers[message.body] for message in messages],
        **{**OUTSIDE, "ordered": False, "takes_batch": True, "batch": 3},
    )
    bench.app.declare_topic("t", 1)
    bench.send(0, 1, 2)
    bench.consume(consumer)
    assert control(bench).state == "paused"
    assert control(bench).pause_reason == "gone"
    assert seconds_to_trial(bench) > 500


@pytest.mark.parametrize("options", [{}, OUTSIDE], ids=["plain", "outside"])
def test_a_trial_that_is_parked_closes_the_breaker(bench: Bench, options: dict[str, Any]) -> None:
    """The handler has looked at the message, and what it needs is there."""
    clock, away = Clock(), [True]

    def handle(message: Message, _: Any = None) -> Any:
        return Unavailable("away") if away[0] else Park("ill") if message.body < 3 else None

    consumer = gated(bench, clock, handle if options else lambda message, session: handle(message), **options)
    bench.send(*range(6), key="k")
    bench.consume(consumer)
    away[0] = False
    trial_due(bench, clock)
    for _ in range(3):
        bench.consume(consumer)
        clock.look()
    assert [status for status, _ in bench.statuses()] == ["parked"] * 3 + ["consumed"] * 3
    assert control(bench).state == "running"
