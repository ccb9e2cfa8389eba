"""A pruner that is killed anywhere: nothing that is needed is lost, senders go on, and so does the next pass."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import pytest
from sqlalchemy import Engine

from outbox.prune.ahead import make_ahead
from outbox.prune.prune_pass import prune_producer_once
from outbox.prune.segments import drop_segment, make_segment, segments
from tests.dispatch.support import messages
from tests.kit import stride, wait_until
from tests.kit.processes import python
from tests.prune.dying import NAME, patient
from tests.prune.yard import OLD, WIDE, YOUNG, Yard

TABLES = ("message", "half_message", "op_message")
GONE = f"SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = '{NAME}')"
CHECKS = "SELECT count(*) FROM pg_constraint WHERE conname = 'segments_ahead'"
LEAVES = f"SELECT count(*) FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhparent WHERE c.relname IN {TABLES}"


@pytest.fixture
def yard(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Yard]:
    """A producer, on a machine that may be slow."""
    patient(monkeypatch)
    yard = Yard(engine)
    yield yard
    yard.connection.close()


@pytest.mark.parametrize("act", ["make", "make far ahead", "empty", "drop"])
def test_killed_at_any_statement(yard: Yard, engine: Engine, act: str) -> None:
    """Before and after things that are sent to the server, of which a night tries all.

    Each time the next pass ends what was begun.
    """
    needed = {yard.prepare(), *yard.send("x", delay=10**9)}
    with python("tests.prune.dying", engine, act) as process:
        assert process.stdin
        assert process.stdout
        for point in range(1, 1000, stride(6)):
            newest = yard.send(*"aaa")[-1]
            if act.startswith("make"):
                without_segments(yard)
            process.stdin.write(f"{point}\n")
            process.stdin.flush()
            ended = process.stdout.readline()
            wait_until(lambda: yard.value(GONE), "the server has ended the dead one's session")
            newest = all_is_there(yard, {*needed, newest})
            go_on(yard, act)
            all_is_there(yard, needed)
            if ended == "done\n":
                break
            assert ended == "died\n"
        assert point > 10
        process.stdin.close()
    prune_producer_once(yard.connection, OLD)


def without_segments(yard: Yard) -> None:
    """Drop all segments, which are empty then; their rows are in the DEFAULT partitions again."""
    with yard.connection.begin():
        found = segments(yard.connection, "outbox")
    for segment in found:
        assert drop_segment(yard.connection, YOUNG, segment)


def all_is_there(yard: Yard, needed: set[UUID]) -> UUID:
    """See that nothing is lost and that a message can be sent and dispatched; return that."""
    (half_id,) = yard.send("a")
    assert {*needed, half_id} <= yard.left()
    found = [each.id for each in messages(yard.connection)]
    assert found.count(half_id) == 1
    return half_id


def go_on(yard: Yard, act: str) -> None:
    """End what was begun, and see that nothing is left half done."""
    if act == "empty":
        yard.empty()
        assert len(yard.left()) == 3
    elif act == "drop":
        drop_segment(yard.connection, OLD, WIDE)
        make(yard)
        yard.empty()
        assert len(yard.left()) == 3
    elif act == "make":
        make(yard)
    else:
        make_ahead(yard.connection, YOUNG)
    assert yard.value(CHECKS) == 0
    # Each table has its DEFAULT partition and one more.
    assert yard.value(LEAVES) == 2 * len(TABLES)


def make(yard: Yard) -> None:
    """Make the segment, if it isn't there."""
    make_segment(yard.connection, YOUNG, WIDE)
