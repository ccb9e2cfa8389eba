"""Statements that find scheduled and recalled messages, and undecided halves; each looks at a window at most.

The end of a window is read in the same statement, so in the same snapshot, as what is in it.
"""

from __future__ import annotations

import datetime as dt
from uuid import UUID

from outbox.database.execute import Statement, in_schema
from outbox.operator.old_halves_sql import LISTED, HalfFilter, list_undecided

#: How many messages one search looks at; each is looked up in another table, but for those that aren't recalled.
WINDOW = 5_000
RECALLED_WINDOW = 20_000

_EPOCH = dt.datetime(1, 1, 1, tzinfo=dt.UTC)
_FIRST_ID = UUID(int=0)
_LAST_ID = UUID(int=(1 << 128) - 1)

_SCHEDULED = """
WITH found AS MATERIALIZED (
    SELECT d.half_id, h.topic, h.key, d.deliver_at, d.recalled_at, d.recalled_by
      FROM (SELECT * FROM {s}.scheduled_message
             WHERE {which} AND {after} ORDER BY {order} LIMIT %(window)s) d
      CROSS JOIN LATERAL (SELECT topic, key FROM {s}.half_message WHERE id = d.half_id LIMIT 1) h
     WHERE {only} AND (%(topic)s::text IS NULL OR h.topic = %(topic)s)
     ORDER BY {d_order} LIMIT %(limit)s
), edge AS (
    SELECT deliver_at, half_id FROM {s}.scheduled_message
     WHERE (SELECT count(*) FROM found) < %(limit)s AND {which} AND {after}
     ORDER BY {order} OFFSET %(window)s - 1 LIMIT 1
)
SELECT e.deliver_at, e.half_id, f.*
  FROM (SELECT 1) one LEFT JOIN edge e ON true LEFT JOIN found f ON true
 ORDER BY {f_order}
"""

_DUE = {
    "which": "recalled_at IS NULL",
    "only": "true",
    "after": "(deliver_at, half_id) > (%(time)s::timestamptz, %(id)s::uuid)",
    "order": "deliver_at, half_id",
    "d_order": "d.deliver_at, d.half_id",
    "f_order": "f.deliver_at, f.half_id",
}
# No index has the recalled ones: they are found among the others, by id.
_RECALLED = {
    "which": "true",
    "only": "d.recalled_at IS NOT NULL",
    "after": "half_id < %(id)s::uuid",
    "order": "half_id DESC",
    "d_order": "d.half_id DESC",
    "f_order": "f.half_id DESC",
}

_COUNT = """
SELECT count(*) FROM (SELECT FROM {s}.scheduled_message WHERE recalled_at IS NULL LIMIT %(limit)s) d
"""

_HALVES = f"""
WITH found ({", ".join(LISTED)}) AS MATERIALIZED ({{list}}), edge AS (
    SELECT half_id FROM {{s}}.half_check
     WHERE (SELECT count(*) FROM found) < %(limit)s AND half_id > %(after)s::uuid
     ORDER BY half_id OFFSET %(window)s - 1 LIMIT 1
)
SELECT e.half_id, f.*
  FROM (SELECT 1) one LEFT JOIN edge e ON true LEFT JOIN found f ON true
 ORDER BY f.id
"""

_COUNT_HALVES = "SELECT count(*) FROM (SELECT FROM {s}.half_check LIMIT %(limit)s) c"


def list_scheduled(
    schema: str, topic: str | None, after: tuple[dt.datetime, UUID] | None, limit: int, window: int = WINDOW
) -> Statement:
    """Find scheduled messages, the next due first, ties by the id, after a time and id.

    Rows: ``(time and id at which the window ended, id, topic, key, deliver_at, recalled_at, recalled_by)``, with an id
    of None where nothing is found. The end is None where all there are were seen, or ``limit`` were found.
    """
    time, half_id = after or (_EPOCH, _FIRST_ID)
    return _statement(_DUE, schema, {"topic": topic, "time": time, "id": half_id, "limit": limit, "window": window})


def list_recalled(
    schema: str, topic: str | None, after: UUID | None, limit: int, window: int = RECALLED_WINDOW
) -> Statement:
    """Find recalled messages, the newest id first, below an id. Rows: as of `list_scheduled`."""
    return _statement(_RECALLED, schema, {"topic": topic, "id": after or _LAST_ID, "limit": limit, "window": window})


def _statement(parts: dict[str, str], schema: str, values: dict[str, object]) -> Statement:
    sql = _SCHEDULED
    for name, text in parts.items():
        sql = sql.replace(f"{{{name}}}", text)
    return Statement(in_schema(sql, schema), values)


def count_scheduled(schema: str, limit: int) -> Statement:
    """Count scheduled messages, ``limit`` at most. Rows: ``(messages,)``."""
    return Statement(in_schema(_COUNT, schema), {"limit": limit})


def list_halves(schema: str, wanted: HalfFilter, after: UUID | None, limit: int, window: int = WINDOW) -> Statement:
    """Find undecided halves, the oldest first, above an id.

    Rows: ``(id at which the window ended, …)`` and what is in `old_halves_sql.LISTED`, with an id of None
    where nothing is found. The end is None where all there are were seen, or ``limit`` were found.
    """
    found = list_undecided(schema, wanted, after or _FIRST_ID, limit, window)
    return Statement(in_schema(_HALVES, schema).replace("{list}", found.sql), found.values)


def count_halves(schema: str, limit: int) -> Statement:
    """Count undecided halves, ``limit`` at most. Rows: ``(halves,)``."""
    return Statement(in_schema(_COUNT_HALVES, schema), {"limit": limit})
