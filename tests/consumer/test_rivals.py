"""Two workers of a group: one comes back to a queue that the other has taken on meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.orm import Session

from outbox import Message
from outbox.consumer.consumer import Consumer, QueueConsumer
from tests.consumer.support import Bench


def steps(bench: Bench, consumer: Consumer, connection: Connection, count: int) -> None:
    """Make so many steps on the only queue that has messages."""
    (queue,) = bench.rows("SELECT DISTINCT queue FROM outbox.message")
    consumer.waiting_queues(connection, connection)
    for _ in range(count):
        consumer._queues[queue].step(connection, connection)


def test_what_was_read_ahead_is_not_handled_when_another_worker_has_gone_past_it(bench: Bench) -> None:
    """Not even if the inbox has forgotten it since: the offset tells, not the inbox."""
    bench.send("a", "b", "c")
    first, second = bench.declare(), bench.declare()
    # It claims, and consumes one; two are left of what it has read ahead.
    steps(bench, first, bench.connection, 2)
    assert bench.ledger() == ["a"]
    with bench.consumer.connect() as other:
        bench.consume_on(second, other, other)
    assert bench.ledger() == ["a", "b", "c"]
    bench.run("DELETE FROM outbox.consumer_message")
    steps(bench, first, bench.connection, 3)
    assert bench.ledger() == ["a", "b", "c"]


def fails_as(name: str) -> Callable[[Message, Session], None]:
    """Return a handler that fails, and says whose it is."""

    def handle(message: Message, session: Session) -> None:
        raise ValueError(f"the {name} worker's failure")

    return handle


def before_recording(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Have somebody act once where a worker's transaction is undone, and its failure not recorded yet."""
    record, acts = QueueConsumer._record, [act]

    def record_late(self: QueueConsumer, *args: Any) -> Any:
        while acts:
            acts.pop()()
        return record(self, *args)

    monkeypatch.setattr(QueueConsumer, "_record", record_late)


def test_a_failure_is_not_recorded_when_another_worker_has_gone_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row is the other worker's affair: what it says of the message stays."""
    (message_id,) = bench.send("a")
    first, second = bench.declare(fails_as("first")), bench.declare(fails_as("second"))
    with bench.consumer.connect() as other:
        before_recording(monkeypatch, lambda: bench.consume_on(second, other, other))
        bench.consume(first)
    row = bench.inbox()[message_id]
    assert (row.status, row.attempts) == ("failed", 1)
    assert row.error is not None
    assert "the second worker's failure" in row.error


def test_a_late_failure_of_an_ordered_group_takes_no_attempt_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The offset doesn't move while another worker fails at the same message, again and again; its attempts count."""
    (message_id,) = bench.send("a")
    first, second = (bench.declare(fails_as(name), ordered=True) for name in ("first", "second"))
    with bench.consumer.connect() as other:

        def fail_three_times() -> None:
            for _ in range(3):
                bench.age_retries()
                bench.consume_on(second, other, other)

        before_recording(monkeypatch, fail_three_times)
        bench.consume(first)
    row = bench.inbox()[message_id]
    assert (row.status, row.attempts) == ("failed", 3)
    assert row.error is not None
    assert "the second worker's failure" in row.error
