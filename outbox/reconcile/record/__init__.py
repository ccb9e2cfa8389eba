"""What is recorded of reconciliations: runs and their findings, as commands, pages and the worker read them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.database.execute import Row, execute, statement
from outbox.database.sql import plan_by_index
from outbox.reconcile.job import KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

#: What the columns that are read are called by what shows them.
RUN = ("id", "job_id", "topic", "group", "window_start", "window_end", "started_at", "finished_at", "applied",
       "counts", "plan", "error", "schedule")  # fmt: skip
FINDING = ("id", "message_id", "kind", "detail", "action", "result", "acted_at")
_JSON = frozenset({"counts", "plan", "detail"})
_AS = {"group": "consumer_group", **{name: f"{name}::text" for name in _JSON}}

_RUNS = f"""
SELECT {", ".join(_AS.get(name, name) for name in RUN)}
  FROM {{s}}.reconciliation_run
 WHERE (%(id)s::uuid IS NULL OR id = %(id)s)
   AND (%(topic)s::text IS NULL OR topic = %(topic)s) AND (%(group)s::text IS NULL OR consumer_group = %(group)s)
 ORDER BY started_at DESC, id DESC LIMIT %(limit)s
"""

_FINDINGS = f"""
SELECT {", ".join(_AS.get(name, name) for name in FINDING)}
  FROM {{s}}.reconciliation_finding
 WHERE run_id = %(run)s AND id > %(after)s ORDER BY id LIMIT %(limit)s
"""

# The runs of the newest job of the schedule, found pair by pair at the end of an index.
_LAST_SCHEDULED = """
WITH run AS MATERIALIZED (
    SELECT r.* FROM unnest(%(topics)s::text[], %(groups)s::text[]) AS p (topic, consumer_group)
     CROSS JOIN LATERAL (SELECT job_id, started_at, finished_at, error FROM {s}.reconciliation_run r
                          WHERE r.topic = p.topic AND r.consumer_group = p.consumer_group
                            AND r.schedule = %(schedule)s
                          ORDER BY r.started_at DESC LIMIT 1) r
)
SELECT clock_timestamp(), min(started_at), max(finished_at), bool_or(finished_at IS NULL), bool_or(error IS NOT NULL)
  FROM run WHERE job_id = (SELECT job_id FROM run ORDER BY started_at DESC LIMIT 1)
"""


def runs(
    connection: Connection,
    schema: str,
    topic: str | None = None,
    group: str | None = None,
    limit: int = 50,
    run_id: UUID | None = None,
) -> list[dict[str, Any]]:
    """Return the newest runs, or the one of this id, by the names of `RUN`, with the number of their differences."""
    values = {"id": run_id, "topic": topic, "group": group, "limit": limit}
    (rows,) = execute(connection, statement(schema, _RUNS, values))
    found = [_named(RUN, row) for row in rows]
    for each in found:
        counts = each["counts"]
        each["differences"] = None if counts is None else sum(counts.get(kind.label, 0) for kind in KINDS)
    return found


def findings(
    connection: Connection, schema: str, run_id: UUID, after: int = 0, limit: int = 50
) -> list[dict[str, Any]]:
    """Return findings of a run behind the one of this number, by the names of `FINDING`."""
    values = {"run": run_id, "after": after, "limit": limit}
    (rows,) = execute(connection, statement(schema, _FINDINGS, values))
    return [_named(FINDING, row) for row in rows]


def _named(names: tuple[str, ...], row: Row) -> dict[str, Any]:
    pairs = zip(names, row, strict=True)
    return {name: json.loads(value) if name in _JSON and value is not None else value for name, value in pairs}


def last_scheduled(connection: Connection, schema: str, schedule: str, pairs: Sequence[tuple[str, str]]) -> Row:
    """Return how the newest job of a schedule on pairs (topic, group) fares.

    That is ``(the time now, begun, last end, still running, failed)``, all but the first None if there was none.
    """
    topics, groups = map(list, zip(*pairs, strict=True))
    values = {"topics": topics, "groups": groups, "schedule": schedule}
    _, (row,) = execute(connection, plan_by_index(), statement(schema, _LAST_SCHEDULED, values))
    return row
