"""The effect is exactly once: inbox row, business change and offset commit together or not at all."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from uuid import UUID

import pytest
from sqlalchemy import Connection, create_engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from outbox import Message
from tests.kit import at_once, wait_until
from tests.kit.bench import Bench, Ward, record

QUARANTINE = """INSERT INTO outbox.consumer_message
                (consumer_group, message_id, topic, queue, position, status, attempts)
           VALUES ('g', :id, 't', 0, 1, :status, 0)"""
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


def test_inbox_effect_and_offset_together(any_bench: Bench) -> None:
    """A consumed message has its effect, its inbox row with a digest, and an offset at its position."""
    consumer = any_bench.declare()
    ids = any_bench.send(1, 2, 3)
    counts = any_bench.consume(consumer)
    assert (counts.taken, counts.done, counts.failed, counts.parked) == (3, 3, 0, 0)
    assert any_bench.ledger() == ["1", "2", "3"]
    assert set(any_bench.inbox()) == set(ids)
    assert any_bench.statuses() == [("consumed", 1)] * 3
    assert any_bench.rows("SELECT max(position) FROM outbox.consumer_offset") == [3]
    assert any_bench.rows("SELECT DISTINCT octet_length(body_digest) FROM outbox.consumer_message") == [16]
    assert not any_bench.consume(consumer)


def test_each_group_sees_every_message(any_bench: Bench) -> None:
    """Two groups of a topic consume it independently of each other."""
    first, second = any_bench.declare(), any_bench.declare(group="h")
    any_bench.send(1, 2)
    any_bench.consume(first)
    any_bench.send(3)
    any_bench.consume(second)
    any_bench.consume(first)
    assert sorted(any_bench.ledger()) == ["1", "1", "2", "2", "3", "3"]


@pytest.mark.parametrize("batch", [1, 5])
def test_the_connection_is_cut_in_the_handler(any_bench: Bench, batch: int) -> None:
    """A consumer whose connection is cut inside its handler leaves nothing behind, costs no attempt, and is redone."""
    cut: list[UUID] = []

    def handler(message: Message, session: Session) -> None:
        record(message, session)
        if message.body == 2 and not cut:
            cut.append(message.id)
            pid = session.execute(text("SELECT pg_backend_pid()")).scalar_one()
            any_bench.run("SELECT pg_terminate_backend(:pid)", pid=pid)
            session.execute(text("SELECT 1"))

    consumer = any_bench.declare(handler, batch=batch)
    any_bench.send(1, 2, 3)
    with any_bench.another() as doomed, pytest.raises(DBAPIError):
        any_bench.consume_on(consumer, *doomed)
    assert any_bench.ledger() == (["1"] if batch == 1 else [])
    any_bench.consume(consumer)
    assert any_bench.ledger() == ["1", "2", "3"]
    assert any_bench.statuses() == [("consumed", 1)] * 3


def test_a_swallowed_cut_is_no_success(any_bench: Bench) -> None:
    """A handler that swallows the loss of its own connection doesn't get its message consumed."""
    cuts: list[int] = []

    def handler(message: Message, session: Session) -> None:
        record(message, session)
        if not cuts:
            cuts.append(1)
            try:
                session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
            except DBAPIError:
                return

    consumer = any_bench.declare(handler)
    any_bench.send(1)
    lost = pytest.raises(Exception)  # whatever SQLAlchemy says of a lost connection
    with any_bench.another() as doomed, lost:
        any_bench.consume_on(consumer, *doomed)
    assert any_bench.ledger() == []
    any_bench.consume(consumer)
    assert any_bench.ledger() == ["1"]


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_a_resent_message_is_consumed_once(any_bench: Bench, batch: int) -> None:
    """Copies of a message, in one batch or in several, before or after it was consumed, have no second effect."""
    consumer = any_bench.declare(batch=batch)
    ids = any_bench.send(1, 2, 3)
    any_bench.resend(*ids)
    any_bench.resend(ids[0])
    counts = any_bench.consume(consumer)
    assert (counts.taken, counts.done) == (7, 3)
    any_bench.resend(*ids)
    counts = any_bench.consume(consumer)
    assert (counts.taken, counts.done) == (3, 0)
    assert any_bench.ledger() == ["1", "2", "3"]
    assert any_bench.statuses() == [("consumed", 1)] * 3


def test_a_copy_in_another_queue(any_bench: Bench) -> None:
    """A copy that came to another queue, since the topic has grown, is known there as well."""
    any_bench.app.declare_topic("t", 1)
    (half_id,) = any_bench.send(1)
    consumer = any_bench.declare()
    any_bench.consume(consumer)
    any_bench.app.declare_topic("t", 64)
    any_bench.resend(half_id)
    assert any_bench.consume(consumer).taken == 1
    assert any_bench.ledger() == ["1"]


def test_two_consumers_on_one_queue(any_bench: Bench) -> None:
    """While one consumer has a queue, another one of the same group leaves it alone, and takes over afterwards."""
    inside, go_on = threading.Event(), threading.Event()

    def slow(message: Message, session: Session) -> None:
        record(message, session)
        inside.set()
        assert go_on.wait(60)

    one, two = any_bench.declare(slow), any_bench.declare()
    any_bench.send(1, 2)
    with ThreadPoolExecutor(1) as pool, any_bench.another() as there:
        running = pool.submit(one.consume_once, *there)
        assert inside.wait(60)
        assert not two.consume_once(any_bench.connection, any_bench.source)
        any_bench.send(3)
        assert not two.consume_once(any_bench.connection, any_bench.source)
        go_on.set()
        running.result()
    any_bench.consume(two)
    any_bench.consume(one)
    assert any_bench.ledger() == ["1", "2", "3"]


def test_many_consumers_race(any_bench: Bench) -> None:
    """Threads that consume all queues of a topic at once, with copies among the messages, have each effect once."""
    any_bench.app.declare_topic("t", 4)
    ids = [half_id for n in range(200) for half_id in any_bench.send(n, key=None)]
    any_bench.resend(*ids[::3])
    consumers = [any_bench.declare(batch=1 + 3 * n) for n in range(4)]
    start = threading.Barrier(4)

    def consume(number: int) -> None:
        with any_bench.another() as there:
            start.wait()
            for _ in range(30):
                consumers[number].consume_once(*there)

    at_once(*(partial(consume, number) for number in range(4)))
    any_bench.consume(consumers[0])
    assert sorted(map(int, any_bench.ledger())) == list(range(200))
    assert set(any_bench.statuses()) == {("consumed", 1)}


@pytest.mark.parametrize("status", ["quarantined", "parked", "consumed"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_quarantine_keeps_a_message_from_running(any_bench: Bench, status: str, batch: int) -> None:
    """A message that the inbox knows already, for whatever reason, is stepped over and the row left as it is."""
    consumer = any_bench.declare(batch=batch)
    ids = any_bench.send(1, 2, 3)
    any_bench.run(QUARANTINE, id=ids[1], status=status)
    counts = any_bench.consume(consumer)
    assert (counts.taken, counts.done) == (3, 2)
    assert any_bench.ledger() == ["1", "3"]
    assert any_bench.inbox()[ids[1]].status == status


@pytest.mark.parametrize("batch", [1, 3])
def test_a_quarantine_that_comes_in_between(any_bench: Bench, batch: int) -> None:
    """A quarantine committed between the look into the inbox and the commit undoes the batch, which is redone."""
    done: list[int] = []

    def handler(message: Message, session: Session) -> None:
        record(message, session)
        if message.body == 2 and not done:
            done.append(1)
            any_bench.run(QUARANTINE, id=message.id, status="quarantined")

    consumer = any_bench.declare(handler, batch=batch)
    ids = any_bench.send(1, 2, 3)
    any_bench.consume(consumer)
    assert any_bench.ledger() == ["1", "3"]
    assert any_bench.inbox()[ids[1]].status == "quarantined"
    assert [row.attempts for row in any_bench.inbox().values() if row.status == "consumed"] == [1, 1]


def test_a_quarantine_that_is_not_committed_yet(any_bench: Bench) -> None:
    """A consumer waits for a quarantine in an open transaction, and goes on with its message if that rolls back."""
    consumer = any_bench.declare()
    (half_id,) = any_bench.send(1)
    with any_bench.consumer.connect() as rival, ThreadPoolExecutor(1) as pool:
        rival.begin()
        rival.execute(text(QUARANTINE), {"id": half_id, "status": "quarantined"})
        running = pool.submit(any_bench.consume, consumer)
        wait_until(lambda: any_bench.rows(WAITING) == [1], "the consumer waits for the quarantine")
        rival.rollback()
        running.result()
    assert any_bench.ledger() == ["1"]
    assert any_bench.statuses() == [("consumed", 1)]


def test_a_read_ahead_that_another_worker_has_overtaken(any_bench: Bench) -> None:
    """A worker that slept over its read-ahead goes by the offset: the inbox may have forgotten what others consumed."""
    slow, fast = any_bench.declare(batch=1), any_bench.declare(batch=1)
    any_bench.send(1, 2, 3)

    def overtaken() -> bool:
        if any_bench.ledger() == ["1"]:
            with any_bench.another() as there:
                any_bench.consume_on(fast, *there)
            any_bench.run("DELETE FROM outbox.consumer_message")  # as prune does, much later
        return False

    slow._stopping = overtaken
    any_bench.consume(slow)
    assert any_bench.ledger() == ["1", "2", "3"]


def test_a_failure_that_another_worker_has_overtaken(any_bench: Bench) -> None:
    """Between the rollback of an attempt and its record other workers go on to the third attempt: it still counts."""
    ward = Ward(1)
    slow, fast = any_bench.declare(ward), any_bench.declare(ward)
    any_bench.send(1)
    engine = create_engine(any_bench.consumer.url)

    @event.listens_for(engine, "begin")
    def overtake(_: Connection) -> None:
        if len(ward.calls) == 1:
            with any_bench.another() as there:
                any_bench.consume_on(fast, *there)
                for _retry in range(2):
                    any_bench.age_retries()
                    fast.retry_once(*there)

    with engine.connect() as connection:
        slow.consume_once(connection, any_bench.source if any_bench.source is not any_bench.connection else connection)
    engine.dispose()
    assert len(ward.calls) == 4
    assert any_bench.statuses() == [("failed", 3)]
