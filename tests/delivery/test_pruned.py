"""Deliveries go with their messages, in segments or row by row, and cursors when newer ones have replaced them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from outbox import Delivery
from outbox.prune import segments as module
from outbox.prune.once import prune_producer_once
from outbox.prune.segments import complete_segments, drop_segment, prune_rows
from tests.delivery.support import Post
from tests.prune.yard import OLD, WIDE, YOUNG, Yard

DELIVERY = "INSERT INTO outbox.delivery (half_id, consumer_group, number, topic, status, settled)"


@pytest.fixture
def yard(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Yard]:
    """A producer, on a machine that may be slow."""
    monkeypatch.setattr(module, "WAIT", 30.0)
    yard = Yard(engine)
    yield yard
    yard.connection.close()


def deliver(yard: Yard) -> None:
    """Have all messages consumed by two groups."""
    for group in ("g", "h"):
        yard.run(f"{DELIVERY} SELECT id, '{group}', 1, topic, 'consumed', true FROM outbox.half_message")


def delivered(yard: Yard) -> set[UUID]:
    """Return which messages have deliveries."""
    return set(yard.rows("SELECT DISTINCT half_id FROM outbox.delivery"))


def test_emptied_with_their_segment(yard: Yard) -> None:
    """What survives of a segment keeps its deliveries, and what goes takes them along."""
    yard.send(*"abcdefgh")
    undecided = yard.prepare()
    deliver(yard)
    assert yard.empty() > 0
    assert undecided in yard.left()
    assert delivered(yard) == yard.left()
    assert len(yard.rows("SELECT 1 FROM outbox.delivery")) == 2 * len(yard.left())
    assert drop_segment(yard.connection, OLD, WIDE)
    assert delivered(yard) == yard.left()


def test_deleted_row_by_row(yard: Yard) -> None:
    """Outside of segments, a message goes with its deliveries."""
    assert drop_segment(yard.connection, YOUNG, WIDE)
    yard.send(*"abcdefgh")
    deliver(yard)
    assert prune_producer_once(yard.connection, OLD).done > 0
    assert delivered(yard) == yard.left()


def test_a_delivery_that_slipped_in_behind(yard: Yard) -> None:
    """One that was appended when its message had gone goes at the next look at the segment."""
    yard.send(*"abcdefgh")
    deliver(yard)
    before = delivered(yard)
    yard.empty()
    (gone, *_) = before - yard.left()
    yard.run(f"{DELIVERY} VALUES (:id, 'g', 2, 't', 'consumed', true)", id=gone)
    yard.empty()
    assert delivered(yard) == yard.left()


def test_a_segment_without_a_partition_of_deliveries_gets_one(yard: Yard) -> None:
    """A worker that didn't know the table has made a segment while the schema was upgraded; its rows move over."""
    yard.run("DROP TABLE outbox.delivery_wide")
    yard.send(*"abcdefgh")
    deliver(yard)
    assert yard.value("SELECT count(*) FROM outbox.delivery_default") == 16
    for _ in range(2):
        complete_segments(yard.connection, YOUNG)
    assert yard.value("SELECT count(*) FROM outbox.delivery_default") == 0
    assert yard.value("SELECT count(*) FROM outbox.delivery_wide") == 16
    yard.empty()
    assert delivered(yard) == yard.left()


def test_replaced_cursors(yard: Yard) -> None:
    """The newest of each group stays."""
    cursor = "INSERT INTO outbox.delivery_cursor (topic, consumer_group, number, starts, positions)"
    yard.run(f"{cursor} SELECT 't', g, n, '{{0}}', ARRAY[n] FROM unnest(ARRAY['g', 'h']) g, generate_series(1, 50) n")
    prune_producer_once(yard.connection, YOUNG)
    assert yard.rows("SELECT consumer_group, number FROM outbox.delivery_cursor ORDER BY 1") == [("g", 50), ("h", 50)]


def test_pruned_while_its_callback_runs(post: Post) -> None:
    """The delivery that the callback's transaction commits then has no message any more; the next pass deletes it."""
    begun, go_on = threading.Event(), threading.Event()
    app, consumer = post.know(), post.declare()

    @app.on_delivered("t")
    def credit(delivery: Delivery, session: Session) -> None:
        begun.set()
        assert go_on.wait(60)

    half_id, newest = post.send(1, 2)
    post.consume(consumer)

    def prune() -> int:
        # Whatever segments the workers of other tests have made.
        with post.producer.connect() as connection:
            return prune_rows(connection, OLD, UUID(int=0), UUID(int=(1 << 128) - 1), lambda: False)

    with ThreadPoolExecutor(1) as threads:
        confirming = threads.submit(post.confirm, app)
        assert begun.wait(60)
        assert prune() >= 1
        go_on.set()
        confirming.result()
    assert set(post.fates()) == {half_id, newest}
    assert post.at_a.rows("SELECT id FROM outbox.half_message") == [newest]
    prune()
    assert set(post.fates()) == {newest}
