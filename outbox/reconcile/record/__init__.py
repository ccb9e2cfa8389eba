"""What is recorded of reconciliations: runs and their findings, as commands and pages show them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.database.execute import Row, execute
from outbox.reconcile.job import KINDS
from outbox.reconcile.record import sql

if TYPE_CHECKING:
    from sqlalchemy import Connection


def runs(
    connection: Connection, schema: str, topic: str | None = None, group: str | None = None, limit: int = 50
) -> list[dict[str, Any]]:
    """Return the newest runs, the newest first, by the names of `store.RUN`."""
    (rows,) = execute(connection, sql.runs(schema, topic, group, limit))
    return [_run(row) for row in rows]


def run(connection: Connection, schema: str, run_id: UUID) -> dict[str, Any] | None:
    """Return one run; None if there is none."""
    (rows,) = execute(connection, sql.run(schema, run_id))
    return _run(rows[0]) if rows else None


def findings(
    connection: Connection, schema: str, run_id: UUID, after: int = 0, limit: int = 50
) -> list[dict[str, Any]]:
    """Return findings of a run behind the one of this number, by the names of `store.FINDING`."""
    (rows,) = execute(connection, sql.findings_of(schema, run_id, after, limit))
    return [_named(sql.FINDING, row) for row in rows]


def differences(counts: dict[str, int] | None) -> int | None:
    """Return how many differences a run has counted; None if it has counted nothing."""
    return None if counts is None else sum(counts.get(kind.label, 0) for kind in KINDS)


def _run(row: Row) -> dict[str, Any]:
    found = _named(sql.RUN, row)
    return found | {"differences": differences(found["counts"])}


def _named(names: tuple[str, ...], row: Row) -> dict[str, Any]:
    values = dict(zip(names, row, strict=True))
    return values | {
        name: json.loads(values[name]) for name in ("counts", "plan", "detail") if values.get(name) is not None
    }
