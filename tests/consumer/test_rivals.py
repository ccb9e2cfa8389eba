"""Two workers of a group: one comes back to a queue that the other has taken on meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Connection
from sqlalchemy.orm import Session

from outbox import Message
from outbox.consumer import sql
from outbox.consumer.consumer import Consumer, QueueConsumer
from outbox.database.execute import Statement, execute
from outbox.message.model import Counts
from tests.kit.bench import Bench


def steps(bench: Bench, consumer: Consumer, connection: Connection, count: int, *, looks: bool = True) -> None:
    """Make so many steps on the only queue that has messages; ``looks``: first see where the group is, as passes do."""
    (queue,) = bench.rows("SELECT DISTINCT queue FROM outbox.message")
    if looks:
        consumer.waiting_queues(connection, connection)
    for _ in range(count):
        consumer._queues[queue].step(connection, connection)


@pytest.mark.parametrize("looks", [True, False], ids=["in the next pass", "in the same pass"])
def test_what_was_read_ahead_is_not_handled_when_another_worker_has_gone_past_it(bench: Bench, looks: bool) -> None:
    """Not even if the inbox has forgotten it since: the offset tells, not the inbox."""
    bench.send("a", "b", "c")
    first, second = bench.declare(), bench.declare()
    # It starts, and consumes one; two are left of what it has read ahead.
    steps(bench, first, bench.connection, 2)
    assert bench.ledger() == ["a"]
    with bench.another() as other:
        bench.consume_on(second, *other)
    assert bench.ledger() == ["a", "b", "c"]
    bench.run("DELETE FROM outbox.consumer_message")
    steps(bench, first, bench.connection, 3, looks=looks)
    assert bench.ledger() == ["a", "b", "c"]


def test_workers_that_race_to_start_are_no_crash(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Each has written down its start and lost the lock to the next: all live, so no message is to blame."""
    bench.send("a")
    crew = [bench.declare() for _ in range(bench.settings.max_starts)]
    late = bench.declare()
    for consumer in crew:
        steps(bench, consumer, bench.connection, 1)
    assert not caplog.records
    assert bench.value("SELECT max(starts) FROM outbox.consumer_offset") == bench.settings.max_starts
    # The newest start may be of one that is between two transactions.
    steps(bench, late, bench.connection, 3)
    assert bench.statuses() == []
    # Nor does any of them blame the others, however late it goes on.
    age_starts(bench)
    steps(bench, crew[0], bench.connection, 1)
    assert bench.statuses() == [("consumed", 1)]


def test_starts_without_an_end_are_a_crash(bench: Bench) -> None:
    """If nobody goes on for a while, whoever comes next parks the message, and counts no start of its own."""
    bench.send("a", "b")
    for _ in range(bench.settings.max_starts):
        steps(bench, bench.declare(), bench.connection, 1)
    age_starts(bench)
    late = bench.declare()
    steps(bench, late, bench.connection, 2)
    assert bench.rows("SELECT status FROM outbox.consumer_message ORDER BY position") == ["parked", "consumed"]
    assert bench.rows("SELECT last_error FROM outbox.consumer_message WHERE status = 'parked'") == [
        f"started {bench.settings.max_starts} times without ever finishing: the worker died each time"
    ]


def fail_once(bench: Bench) -> UUID:
    """Send a message whose first attempt fails, and let its retry be due."""
    (message_id,) = bench.send("a")
    bench.consume(bench.declare(fails_as("first")))
    bench.age_retries()
    return message_id


def count_a_retry(bench: Bench) -> list[int]:
    """Start a retry as a worker does that has no lock yet; return how many starts the message has, if it is due."""
    with bench.consumer.connect() as other, other.begin():
        (rows,) = execute(other, sql.start_retry("outbox", group="g", topic="t", ordered=False))
    return [row[4] for row in rows]


def test_workers_that_race_to_retry_are_no_crash(bench: Bench) -> None:
    """One of them begins; the others don't count a start until it could have locked the message long ago."""
    fail_once(bench)
    assert count_a_retry(bench) == [1]
    for _ in range(bench.settings.max_starts):
        assert count_a_retry(bench) == []
    consumer = bench.declare()
    assert consumer.retry_once(bench.connection, bench.source) == Counts()
    assert bench.statuses() == [("failed", 1)]
    bench.age_retries()
    assert consumer.retry_once(bench.connection, bench.source).done == 1
    assert bench.statuses() == [("consumed", 2)]


def test_retries_without_an_end_are_a_crash(bench: Bench) -> None:
    """Whoever comes after the last one parks the message."""
    fail_once(bench)
    for number in range(bench.settings.max_starts):
        assert count_a_retry(bench) == [number + 1]
        bench.age_retries()
    assert bench.declare().retry_once(bench.connection, bench.source).parked == 1
    assert bench.rows("SELECT last_error FROM outbox.consumer_message") == [
        f"started {bench.settings.max_starts} times without ever finishing: the worker died each time"
    ]


def test_a_slow_retry_is_no_crash(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has the last start, and finds that another one runs the message, neither parks it nor says so."""
    message_id = fail_once(bench)
    for _ in range(bench.settings.max_starts):
        count_a_retry(bench)
        bench.age_retries()
    lock = sql.lock_failed
    with bench.consumer.connect() as slow:

        def lock_late(*args: Any) -> Statement:
            execute(slow, lock("outbox", "g", message_id))
            return lock(*args)

        monkeypatch.setattr(sql, "lock_failed", lock_late)
        assert bench.declare().retry_once(bench.connection, bench.source).parked == 0
    assert bench.statuses() == [("failed", 1)]


def age_starts(bench: Bench) -> None:
    """Let all starts be older than those of workers that are between two transactions."""
    bench.run("UPDATE outbox.consumer_offset SET written_at = written_at - interval '1 minute'")


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
