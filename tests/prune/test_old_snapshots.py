"""Callers above READ COMMITTED: what prune makes, empties, drops and rewrites is right for a snapshot that is older."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import OperationalError

from outbox import Orphan, Outbox, Resolution, Settings
from outbox.dispatch.dispatch_pass import dispatch_once
from outbox.errors import AlreadyCommitted, HalfNotFound, OutboxBusy
from outbox.message.model import uuid7
from outbox.producer import flow_control
from outbox.prune import rewrite as rewrite_module
from outbox.prune import segments as module
from outbox.prune.prune_pass import prune_producer_once
from outbox.prune.rewrite import CHECKS, CURSORS, Rewritten, rewrite
from outbox.prune.segments import drop_segment, make_segment
from outbox.testing import check
from tests.prune.yard import OLD, WIDE, YOUNG, Yard

LEVELS = ["REPEATABLE READ", "SERIALIZABLE"]


@pytest.fixture
def yard(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Yard]:
    """A producer, on a machine that may be slow."""
    monkeypatch.setattr(module, "WAIT", 30.0)
    monkeypatch.setattr(rewrite_module, "WAIT", 30.0)
    yard = Yard(engine)
    yield yard
    yard.connection.close()


def _make(yard: Yard) -> None:
    assert make_segment(yard.connection, YOUNG, WIDE)


def _empty(yard: Yard) -> None:
    yard.send(*"aaa")
    assert yard.empty() > 0


def _drop(yard: Yard) -> None:
    assert drop_segment(yard.connection, OLD, WIDE)


#: What moves the rows of a half, and whether the half is in no segment before.
MOVES: dict[str, tuple[Callable[[Yard], None], bool]] = {
    "make": (_make, True),
    "empty": (_empty, False),
    "drop": (_drop, False),
}


def by_python(yard: Yard, connection: Connection, half_id: UUID) -> None:
    """Decide at the COMMIT."""
    yard.app.commit(half_id, within=connection)


def by_driver(yard: Yard, connection: Connection, half_id: UUID) -> None:
    """Decide at once, on the driver's own connection."""
    driver: Any = connection.connection.driver_connection
    yard.app.commit(half_id, within=driver)


def by_sql(_yard: Yard, connection: Connection, half_id: UUID) -> None:
    """Decide by the function for other languages."""
    connection.execute(text("SELECT outbox.commit(:id)"), {"id": half_id})


@pytest.mark.parametrize("decide", [by_python, by_driver, by_sql])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("move", MOVES)
def test_a_half_that_moved_is_decided(yard: Yard, move: str, level: Any, decide: Callable[..., None]) -> None:
    """It was prepared before the transaction began, and its partition is another one, or another file, since."""
    act, outside = MOVES[move]
    if outside:
        _drop(yard)
    half_id = yard.prepare()
    with yard.observer.connect().execution_options(isolation_level=level) as connection:
        connection.execute(text("SELECT pg_current_snapshot()"))
        act(yard)
        decide(yard, connection, half_id)
        connection.commit()
    assert yard.op(half_id) == ("commit", "producer")
    assert half_id in yard.left()
    with pytest.raises(AlreadyCommitted):
        yard.app.rollback(half_id)


@pytest.mark.parametrize("decide", [by_python, by_driver, by_sql])
@pytest.mark.parametrize("level", ["READ COMMITTED", *LEVELS])
def test_a_half_that_is_not_there_is_not_found(yard: Yard, level: Any, decide: Callable[..., None]) -> None:
    """To look for it leaves nothing behind, also where the transaction goes on."""
    missing = uuid7()
    with yard.observer.connect().execution_options(isolation_level=level) as connection:
        connection.execute(text("SELECT 1"))
        savepoint = connection.begin_nested()
        with pytest.raises((HalfNotFound, Exception), match="no half message"):
            decide(yard, connection, missing)
            connection.commit() if decide is by_python else None
        if decide is not by_python:
            savepoint.rollback()
            connection.commit()
    assert yard.left() == set()


@pytest.mark.parametrize("level", LEVELS)
def test_who_may_not_look_is_to_try_again(yard: Yard, level: Any) -> None:
    """A role that only decides can't ask the index: it gets what PostgreSQL says to a snapshot that is too old."""
    _drop(yard)
    half_id = yard.prepare()
    yard.run("CREATE ROLE decider")
    for grant in (
        "USAGE ON SCHEMA outbox",
        "SELECT (id) ON outbox.half_message",
        "SELECT, UPDATE, DELETE ON outbox.half_check",
        "SELECT, INSERT ON outbox.op_message",
        "USAGE ON SEQUENCE outbox.op_sequence",
    ):
        with suppress(Exception):
            yard.run(f"GRANT {grant} TO decider")
    try:
        with yard.observer.connect().execution_options(isolation_level=level) as connection:
            connection.execute(text("SET LOCAL ROLE decider"))
            connection.execute(text("SELECT pg_current_snapshot()"))
            _make(yard)
            with pytest.raises((OperationalError, psycopg.OperationalError), match="too old"):
                by_driver(yard, connection, half_id)
            connection.rollback()
    finally:
        yard.run("DROP OWNED BY decider")
        yard.run("DROP ROLE decider")
    assert yard.ops() == {}


@pytest.mark.parametrize("parked", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_a_decided_half_is_not_asked_about(yard: Yard, level: Any, parked: bool) -> None:
    """A decision that couldn't see the check leaves it; a pass takes it away unasked."""
    asked: list[UUID] = []

    @yard.app.checker("t", immunity=0)
    def ask(orphan: Orphan, _session: Any) -> Resolution:
        asked.append(orphan.id)
        return Resolution.UNKNOWN

    half_id = yard.prepare()
    if parked:
        yard.run("UPDATE outbox.half_check SET parked_at = now(), reason = 'so'")
    with yard.observer.connect().execution_options(isolation_level=level) as connection:
        connection.execute(text("SELECT pg_current_snapshot()"))
        assert rewrite(yard.connection, "outbox", Rewritten(CHECKS.table, CHECKS.counts, size=0)) is not None
        by_python(yard, connection, half_id)
        connection.commit()
    assert yard.op(half_id) == ("commit", "producer")
    yard.run("UPDATE outbox.half_check SET next_check_at = now() - interval '1 hour'")
    prune_producer_once(yard.connection, YOUNG) if parked else check(yard.app)
    assert (asked, yard.rows("SELECT half_id FROM outbox.half_check")) == ([], [])


@pytest.mark.parametrize("rewritten", [CURSORS, Rewritten(CHECKS.table, CHECKS.counts, size=0)])
@pytest.mark.parametrize("level", LEVELS)
def test_no_count_is_made_of_a_table_that_was_truncated(
    yard: Yard, level: Any, rewritten: Rewritten, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flow control doesn't take it for an empty one, and nobody else goes by that."""
    monkeypatch.setattr(flow_control, "INTERVAL", 3600.0)
    limited = Outbox(yard.observer, settings=Settings(queues=2, max_undecided=2, max_undispatched=2))
    for _ in range(3):
        with yard.observer.begin() as connection:
            for _ in range(2):
                yard.app.send(connection, "t", 1)
        dispatch_once(yard.connection, YOUNG, limit=2)
        yard.prepare()
    with yard.observer.begin() as connection:
        for _ in range(3):
            yard.app.send(connection, "t", 1)
    with yard.observer.connect().execution_options(isolation_level=level) as connection:
        connection.execute(text("SELECT pg_current_snapshot()"))
        assert rewrite(yard.connection, "outbox", rewritten) is not None
        limited.prepare(connection, "t", 1)
        connection.commit()
    with pytest.raises(OutboxBusy), yard.observer.begin() as connection:
        limited.prepare(connection, "t", 2)
