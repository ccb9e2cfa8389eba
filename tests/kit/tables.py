"""SQL on one database: what a test reads, changes by hand, and ends."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Engine, create_engine, text

from outbox.database.execute import execute
from outbox.testing.sql import age_failed
from tests.kit.waiting import wait_until

#: The connections of others to this database.
OTHERS = "datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
_FILLED = (
    "SELECT string_agg(name, ', ') FROM unnest(CAST(:tables AS text[])) AS name"
    " WHERE EXISTS (SELECT FROM pg_partition_tree(CAST(name AS regclass)) p WHERE pg_relation_size(p.relid) > 0)"
    "    OR pg_relation_size(CAST(name AS regclass)) > 0"
)
_DUE = "clock_timestamp() - interval '1 ms'"


def make_odd_schema(connection: Connection) -> None:
    """Make a schema in which a clock stands still and two equal texts differ, for search paths that prefer it."""
    for statement in (
        "CREATE SCHEMA odd",
        "CREATE FUNCTION odd.now() RETURNS timestamptz LANGUAGE sql AS 'SELECT to_timestamp(0)'",
        "CREATE FUNCTION odd.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS 'SELECT to_timestamp(0)'",
        "CREATE FUNCTION odd.differ(text, text) RETURNS bool LANGUAGE sql AS 'SELECT $1 <> $2'",
        "CREATE OPERATOR odd.= (FUNCTION = odd.differ, LEFTARG = text, RIGHTARG = text)",
    ):
        connection.execute(text(statement))


def empty(connection: Connection, *tables: str) -> None:
    """Empty tables, in the caller's transaction; fails, rather than hang, when a test left a transaction open.

    Those without rows are left alone: to truncate a table makes new files for it and for each of its indexes.
    """
    connection.execute(text("SET LOCAL lock_timeout = '10s'"))
    if filled := connection.scalar(text(_FILLED), {"tables": list(tables)}):
        connection.execute(text(f"TRUNCATE {filled}"))


def open_observer(url: str, stack: ExitStack) -> Engine:
    """Return an engine that keeps one connection, also if that is cut: to log in takes longer than to look."""
    observer = create_engine(url, pool_size=1, pool_pre_ping=True)
    stack.callback(observer.dispose)
    return observer


class Tables:
    """The tables of the database of ``observer``; each statement is in a transaction of its own."""

    observer: Engine

    def __init__(self, observer: Engine) -> None:
        self.observer = observer

    # --- any SQL -----------------------------------------------------------------------------------------

    def run(self, sql: str, **values: Any) -> None:
        """Execute a statement."""
        with self.observer.begin() as connection:
            connection.execute(text(sql), values)

    def records(self, sql: str, **values: Any) -> list[Any]:
        """Return the rows of a query, which have their columns as attributes."""
        with self.observer.connect() as connection:
            return list(connection.execute(text(sql), values))

    def rows(self, sql: str, **values: Any) -> list[Any]:
        """Return the rows of a query as tuples, or the values where it has one column."""
        return [row[0] if len(row) == 1 else tuple(row) for row in self.records(sql, **values)]

    def value(self, sql: str, **values: Any) -> Any:
        """Return the first column of the first row; None if there is none."""
        with self.observer.connect() as connection:
            return connection.scalar(text(sql), values)

    # --- the producer's side -----------------------------------------------------------------------------

    def op(self, half_id: UUID) -> tuple[str, str] | None:
        """Return a half's resolution and its author."""
        rows = self.records("SELECT resolution, decided_by FROM outbox.op_message WHERE half_id = :id", id=half_id)
        return tuple(rows[0]) if rows else None

    def ops(self) -> dict[UUID, str]:
        """Return the resolutions of decided halves."""
        return {row[0]: row[1] for row in self.records("SELECT half_id, resolution FROM outbox.op_message")}

    def messages(self) -> list[UUID]:
        """Return the halves that have become messages, once for each send, in the order of their positions."""
        return [row[0] for row in self.records("SELECT half_id FROM outbox.message ORDER BY topic, queue, position")]

    def age_checks(self, *half_ids: UUID) -> None:
        """Let the wait of undecided halves be over: of these, or of all; not of those that are being decided.

        Unlike `outbox.testing.make_due`, of parked ones too, so that a test sees that their time doesn't count.
        """
        self.run(
            f"UPDATE outbox.half_check SET next_check_at = {_DUE} WHERE half_id IN (SELECT half_id"
            " FROM outbox.half_check WHERE half_id = ANY (:ids) OR cardinality(CAST(:ids AS uuid[])) = 0"
            " FOR UPDATE SKIP LOCKED)",
            ids=list(half_ids),
        )

    def age_bulk_items(self) -> None:
        """Make the items of bulk jobs due whose time has yet to come."""
        self.run(f"UPDATE outbox.bulk_item SET next_attempt_at = {_DUE} WHERE state = 'pending'")

    # --- the consumer's side -----------------------------------------------------------------------------

    def age_retries(self) -> None:
        """Make all failed messages due, as `outbox.testing.make_due` does, which dispatches before."""
        with self.observer.begin() as connection:
            execute(connection, age_failed("outbox", seconds=None, ids=None))

    # --- both sides --------------------------------------------------------------------------------------

    def audited(self, target: object) -> list[tuple[Any, ...]]:
        """Return actor, action, reason, result and origin of each audit row of a target."""
        sql = "SELECT actor, action, reason, result, origin FROM outbox.audit WHERE target = :target ORDER BY id"
        return self.rows(sql, target=str(target))

    # --- the server --------------------------------------------------------------------------------------

    def connections(self, condition: str = "true") -> int:
        """Count the connections of others for which an SQL condition on pg_stat_activity is true."""
        return int(self.value(f"SELECT count(*) FROM pg_stat_activity WHERE {OTHERS} AND ({condition})"))

    def waiting(self) -> bool:
        """Return whether a connection waits for a lock."""
        return self.connections("wait_event_type = 'Lock'") > 0

    def cut(self, condition: str = "true") -> None:
        """End the connections of others for which a condition is true, and wait until they have ended.

        The server, asked to wait, looks ten times a second.
        """
        ended = f"SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity WHERE {OTHERS} AND ({condition})"
        there = text("SELECT count(*) FROM pg_stat_activity WHERE pid = ANY (:pids)")
        # On one connection: others of the observer's may be among the ended.
        with self.observer.connect() as connection:
            pids = [pid for pid, _ in connection.execute(text(ended))]

            def gone() -> bool:
                connection.rollback()  # within a transaction the server tells the same again
                return not connection.scalar(there, {"pids": pids})

            wait_until(gone, "the connections have ended")
