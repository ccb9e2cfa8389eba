"""Pause, rate and breaker of a group that handles its messages outside of transactions."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from sqlalchemy import Connection

from outbox import Breaker, Message
from outbox.consumer.consumer import Consumer
from outbox.consumer.outside.leased_queue import LeasedQueue
from tests.consumer.test_control import Clock, age_grants, control, gated, trial_due
from tests.kit.bench import Bench, Ward

OUTSIDE: dict[str, Any] = {"transactional": False, "concurrency": 4, "ordered": False}
BREAKER = Breaker(failures=3, window=60, trial_after=30)


def declare(bench: Bench, handler: Any, clock: Clock, **options: Any) -> Consumer:
    """Return the consumer, whose gate goes by the clock of the test."""
    return gated(bench, clock, handler, **{**OUTSIDE, **options})


def test_a_paused_group_begins_nothing(bench: Bench) -> None:
    """What runs when it is paused goes on to its end, and what came of it is written."""
    clock, dependency = Clock(), Ward()

    def pause(body: Any) -> None:
        if body == 0:
            bench.app.operator.pause_group("g", by="me", why="the provider moves")
            clock.look()

    dependency.afterwards = pause
    consumer = declare(bench, dependency, clock, concurrency=1)
    bench.send(*range(5), key="k")
    assert bench.consume(consumer).done == 1
    assert not bench.retry(consumer)
    assert bench.statuses() == [("consumed", 1)]
    with bench.producer.connect() as connection:
        second = connection.exec_driver_sql("SELECT visible_at FROM outbox.message ORDER BY position OFFSET 1").scalar()
    assert (consumer.meter.lag, consumer.meter.waiting_since) == (4, second)
    bench.app.operator.resume_group("g", by="me")
    clock.look()
    assert bench.consume(consumer).done == 4
    assert dependency.calls == list(range(5))


def test_a_rate_holds_for_calls_that_begin(bench: Bench) -> None:
    """One an hour is one, however many may run at once, and a retry is one of them."""
    clock, dependency = Clock(), Ward()
    consumer = declare(bench, dependency, clock, rate="1/h")
    bench.send(*range(4))
    dependency.down = True
    bench.consume(consumer)
    dependency.down = False
    assert len(dependency.calls) == 1
    assert not bench.retry(consumer)
    for hour in range(2, 4):
        clock.now += 3600
        age_grants(bench, 1)
        assert (bench.retry if hour == 2 else bench.consume)(consumer).done == 1
        assert len(dependency.calls) == hour


def test_a_breaker_opens_and_one_call_closes_it(bench: Bench) -> None:
    """What is in flight when it opens is recorded; then one call at a time decides, and its success closes it."""
    clock, dependency = Clock(), Ward()
    consumer = declare(bench, dependency, clock, breaker=BREAKER)
    bench.send(*range(30))
    dependency.down = True
    bench.consume(consumer)
    # Those that had begun when the third failure was written.
    burnt = len(dependency.calls)
    assert 3 <= burnt <= 3 + 2 * 4
    assert [status for status, _ in bench.statuses()] == ["failed"] * burnt
    assert control(bench).state == "open"
    clock.look()
    assert not bench.consume(consumer)

    trial_due(bench, clock)
    bench.consume(consumer)
    assert len(dependency.calls) == burnt + 1
    assert control(bench).state == "open"

    dependency.down = False
    trial_due(bench, clock)
    assert bench.consume(consumer).done == 30 - burnt - 1
    assert control(bench).state == "running"


def test_a_retry_decides_too(bench: Bench) -> None:
    """Where nothing waits but what has failed."""
    clock, dependency = Clock(), Ward()
    consumer = declare(bench, dependency, clock, breaker=BREAKER)
    bench.send(1, 2, 3)
    dependency.down = True
    bench.consume(consumer)
    assert not bench.retry(consumer)
    dependency.down = False
    trial_due(bench, clock)
    assert bench.retry(consumer).done >= 1
    assert control(bench).state == "running"


def test_a_success_among_failures_keeps_it_closed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the messages end together, so that the offset shows one of them alone."""
    results = LeasedQueue.results

    def together(queue: LeasedQueue, connection: Connection) -> Any:
        """Return what came of all, and nothing before: three failures alone would rightly open it."""
        return None if queue.in_flight else results(queue, connection)

    monkeypatch.setattr(LeasedQueue, "results", together)
    all_began = threading.Barrier(4)

    def handle(message: Message) -> None:
        all_began.wait(60)
        if message.body % 4 != 1:
            raise ConnectionError("not this one")

    consumer = declare(bench, handle, Clock(), breaker=BREAKER)
    bench.send(*range(4))
    bench.consume(consumer)
    assert sorted(bench.statuses()) == [("consumed", 1)] + [("failed", 1)] * 3
    assert control(bench).state == "running"
