"""Deliveries go with their messages, in segments or row by row, and cursors when newer ones have replaced them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from uuid import UUID

import pytest
from sqlalchemy import Engine

from outbox.prune import segments as module
from outbox.prune.prune_pass import prune_producer_once
from outbox.prune.segments import PRODUCER, complete_segments, drop_segment
from tests.delivery.support import Post
from tests.prune.yard import OLD, WIDE, YOUNG, Yard

DELIVERY = "INSERT INTO outbox.delivery (half_id, consumer_group, number, topic, status, settled)"
CURSOR = "INSERT INTO outbox.delivery_cursor (topic, consumer_group, number, starts, positions)"
#: What is settled is old at once, and what a known group has yet to consume after an hour.
KEEPING = replace(OLD, undelivered_retention=3600.0)


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
    yard.run(f"{CURSOR} SELECT 't', g, n, '{{0}}', ARRAY[n] FROM unnest(ARRAY['g', 'h']) g, generate_series(1, 50) n")
    prune_producer_once(yard.connection, YOUNG)
    assert yard.rows("SELECT consumer_group, number FROM outbox.delivery_cursor ORDER BY 1") == [("g", 50), ("h", 50)]


def know(yard: Yard, *positions: int) -> None:
    """Have group ``g`` known, as far as it has read each queue."""
    number = yard.value("SELECT coalesce(max(number), 0) + 1 FROM outbox.delivery_cursor")
    yard.run(f"{CURSOR} VALUES ('t', 'g', :number, :zeros, :positions)",
             number=number, zeros=[0] * len(positions), positions=list(positions))  # fmt: skip


def in_segment(yard: Yard) -> None:
    """Prune, row by row where that must be."""
    yard.empty(KEEPING, by_row=True)


def row_by_row(yard: Yard) -> None:
    """Prune outside of segments."""
    drop_segment(yard.connection, YOUNG, WIDE)
    prune_producer_once(yard.connection, KEEPING)


@pytest.mark.parametrize("prune", [in_segment, row_by_row])
def test_kept_until_it_is_delivered(yard: Yard, prune: Callable[[Yard], None]) -> None:
    """What a known group has failed at stays, however old, until it has consumed it; what is settled goes."""
    ids = yard.send(*"aaaa")
    last = yard.value("SELECT max(position) FROM outbox.message")
    know(yard, last, last)
    deliver(yard)
    yard.run(f"{DELIVERY} VALUES (:id, 'g', 2, 't', 'parked', false)", id=ids[1])
    prune(yard)
    assert yard.left() == delivered(yard) == {ids[1], ids[3]}
    yard.run(f"{DELIVERY} VALUES (:id, 'g', 3, 't', 'consumed', true)", id=ids[1])
    prune(yard)
    assert yard.left() == delivered(yard) == {ids[3]}


@pytest.mark.parametrize("prune", [in_segment, row_by_row])
def test_kept_until_it_is_read(yard: Yard, prune: Callable[[Yard], None]) -> None:
    """What lies beyond a known group's cursor stays, also in a queue that the cursor doesn't know yet."""
    ids = yard.send(*"abcdefgh")
    know(yard, 0)
    prune(yard)
    assert yard.left() == set(ids)
    ends = dict(yard.rows("SELECT queue, max(position) FROM outbox.message GROUP BY queue"))
    know(yard, ends[0])
    prune(yard)
    in_second = set(yard.rows("SELECT half_id FROM outbox.message WHERE queue = 1"))
    assert len(in_second) > 1
    assert in_second < yard.left()
    know(yard, ends[0], ends[1])
    prune(yard)
    assert len(yard.left()) == 2


@pytest.mark.parametrize("prune", [in_segment, row_by_row])
def test_kept_for_so_long_at_most(yard: Yard, prune: Callable[[Yard], None]) -> None:
    """A group that is known and consumes nothing any more holds nothing for ever."""
    ids = yard.send(*"aaaa")
    know(yard, 0, 0)
    deliver(yard)
    yard.run(f"{DELIVERY} VALUES (:id, 'g', 2, 't', 'failed', false)", id=ids[1])
    yard.run("UPDATE outbox.message SET visible_at = visible_at - interval '2 hours' WHERE half_id <> :id", id=ids[2])
    prune(yard)
    assert yard.left() == {ids[2], ids[3]}


def test_a_segment_that_groups_have_yet_to_consume(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is much that they have to, nothing of the segment is read for them again and again."""
    monkeypatch.setattr(module, "FEW", 3)
    ids = yard.send(*"aaaaaa")
    know(yard, 0, 0)
    yard.run("DELETE FROM outbox.message WHERE half_id = :id", id=ids[0])
    assert PRODUCER.survey(yard.connection, KEEPING, WIDE) is None
    assert yard.empty(KEEPING, by_row=True) == 0
    assert yard.left() == set(ids)
    assert yard.empty(OLD) == 4


def test_pruned_before_its_callback_runs(post: Post) -> None:
    """The notice is a copy: what it tells doesn't need its message any more."""
    app, consumer, told = post.know(), post.declare(), []
    app.on_delivered("t")(lambda delivery, session: told.append((delivery.message.id, delivery.message.body)))
    half_id, _newest = post.send("gone", "newest")
    post.consume(consumer)
    post.confirm_without_calls(app)
    post.dispatch()
    for table, column in (("message", "half_id"), ("op_message", "half_id"), ("half_message", "id")):
        post.at_a.run(f"DELETE FROM outbox.{table} WHERE {column} = :id", id=half_id)
    post.call(app)
    assert (half_id, "gone") in told
    assert len(told) == 2
