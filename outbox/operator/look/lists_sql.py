"""Statements that find messages, undecided halves, scheduled messages and audited acts, by many conditions.

Each looks at a window of rows at most, and says where it stopped: the end of the window is read in the same statement,
so in the same snapshot, as what is in it. Each takes the filter of the operator's call, which is checked.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

from outbox.check.sql import UNANSWERED
from outbox.database.execute import Statement, in_schema
from outbox.database.status import message_status
from outbox.operator.look.inbox_sql import FIRST_ID, GROUPS, LAST_ID, end_id, first_id
from outbox.operator.look.message_sql import HALF_STATUS, LAST_CHECK
from outbox.operator.model import AuditFilter, HalfFilter, MessageFilter, ScheduledFilter

# --- messages --------------------------------------------------------------------------------------------

#: How many messages one search looks at, and how many where it must look each up in other tables, too.
WINDOW = 20_000
STATUS_WINDOW = 5_000
#: How many messages with one key are found by an index on keys; of more, the newest are found soon without it.
OF_KEY = 2_000
#: How many bodies one search reads, of how many bytes together, and how large one may be to be searched.
BODIES = 1_000
BODY_BYTES = 8 * 1024 * 1024
LARGEST_BODY = 1024 * 1024

_STATUS = message_status()

_OP = """
      LEFT JOIN LATERAL (SELECT * FROM {s}.op_message WHERE half_id = h.id LIMIT 1) o ON true
      LEFT JOIN LATERAL (SELECT * FROM {s}.scheduled_message WHERE half_id = h.id LIMIT 1) d ON true"""

# The halves of these states are found by a smaller table, however many others there are.
_DRIVERS = (
    ({"undecided"}, "half_check", "true"),
    ({"scheduled"}, "scheduled_message", "recalled_at IS NULL"),
    ({"recalled"}, "scheduled_message", "recalled_at IS NOT NULL"),
    ({"scheduled", "recalled"}, "scheduled_message", "true"),
    ({"rolled_back"}, "op_message", "resolution = 'rollback'"),
)

# Of these, all there are can be counted by an index.
_COUNTED: tuple[set[str], ...] = (set(), {"undecided"}, {"scheduled"}, {"scheduled", "recalled"})

_BY_DRIVER = """
(SELECT half_id FROM (SELECT * FROM {s}.{table} x
                       WHERE half_id < %(below)s::uuid AND half_id >= %(first)s::uuid
                       ORDER BY half_id DESC LIMIT %(window)s) x WHERE {fits}) c
      CROSS JOIN LATERAL (SELECT * FROM {s}.half_message WHERE id = c.half_id LIMIT 1) h"""

_BY_ID = """
(SELECT * FROM {s}.half_message
                 WHERE id < %(below)s::uuid AND id >= %(first)s::uuid
                 ORDER BY id DESC LIMIT %(window)s) h"""

# Written so that the primary key is of no use: the planner might read it to its end instead.
_OF_KEY = """{s}.half_message
                        WHERE key = %(key)s AND {topic}
                          AND coalesce(id < %(below)s::uuid AND id >= %(first)s::uuid, false)"""
_BY_KEY = f"""
(SELECT * FROM (SELECT * FROM {_OF_KEY} OFFSET 0) k ORDER BY id DESC) h"""

_ROW = f"h.id, h.topic, h.key, h.tag, {_STATUS} AS status, h.born_at, h.deliver_at, o.decided_by, o.decided_at"

# The end of the window is read in the same snapshot as what is in it.
_LIST = """
WITH found AS MATERIALIZED (
    SELECT {row}
      FROM {from}{op}
     WHERE {where}
     ORDER BY {ordered} DESC LIMIT %(limit)s
), edge AS (
    SELECT {id} AS id FROM {s}.{table}
     WHERE (SELECT count(*) FROM found) < %(limit)s
       AND {id} < %(below)s::uuid AND {id} >= %(first)s::uuid
     ORDER BY {id} DESC OFFSET %(window)s - 1 LIMIT 1
)
SELECT e.id, n.found, f.*
  FROM (SELECT count(*) AS found FROM found) n LEFT JOIN edge e ON {windowed} LEFT JOIN {found} f ON true
 ORDER BY f.id DESC
"""

# What one answer may have of bodies; the first one always comes.
_BODIES = """(SELECT b.* FROM (SELECT found.*, sum(octet_length(body)) OVER (ORDER BY id DESC) - octet_length(body)
                                      AS bytes_before FROM found) b WHERE bytes_before < %(bytes)s)"""

_JSON_BODY = """octet_length(h.body) <= %(largest_body)s AND
       (btrim(split_part(lower(h.content_type), ';', 1)) = 'application/json'
        OR right(btrim(split_part(lower(h.content_type), ';', 1)), 5) = '+json')"""

_COUNT_OF_KEY = f"SELECT count(*) FROM (SELECT FROM {_OF_KEY} LIMIT %(limit)s) k"

_COUNT = "SELECT count(*) FROM (SELECT FROM {s}.{table} WHERE {fits} LIMIT %(limit)s) c"

# An index with all keys in it, which begins with the key, or with the topic and then the key.
_KEY_INDEX = """
SELECT (SELECT array_agg(a.attname::text ORDER BY k.place)
          FROM unnest(i.indkey::int2[]) WITH ORDINALITY AS k (number, place)
          JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number WHERE k.place <= 2)
  FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_am m ON m.oid = c.relam
 WHERE i.indrelid = '{s}.half_message'::regclass AND i.indisvalid AND i.indisready AND m.amname IN ('btree', 'hash')
   AND coalesce(pg_get_expr(i.indpred, i.indrelid) = '(key IS NOT NULL)', true)
"""

# What doesn't ask for a look at each half message that a smaller table leads to.
_NOT_OF_HALF: dict[str, Any] = {"database": None, "status": (), "since": None, "until": None}


def where(criteria: MessageFilter) -> tuple[str, dict[str, object]]:
    """Return the condition that a filter stands for, and its values; the schema is still ``{s}``.

    It is about a half message ``h``, its op ``o`` and its schedule ``d``. Of a value in the body it tells only that the
    body is JSON, and not too large to be searched.
    """
    values: dict[str, object] = {}
    conditions = []
    for name in ("topic", "key", "tag", "producer_group"):
        if (value := getattr(criteria, name)) is not None:
            conditions.append(f"h.{name} = %({name})s")
            values[name] = value
    if criteria.header is not None:
        conditions.append("h.headers @> %(header)s::jsonb")
        values["header"] = json.dumps(dict([criteria.header]))
    if criteria.since is not None:
        conditions.append("h.id >= %(since_id)s::uuid AND h.born_at >= %(since)s")
        values |= {"since": criteria.since, "since_id": first_id(criteria.since)}
    if criteria.until is not None:
        conditions.append("h.id < %(until_id)s::uuid AND h.born_at < %(until)s")
        values |= {"until": criteria.until, "until_id": end_id(criteria.until)}
    if criteria.body is not None:
        conditions.append(_JSON_BODY)
        values["largest_body"] = LARGEST_BODY
    if criteria.status:
        conditions.append(f"({_STATUS}) = ANY (%(statuses)s)")
        values["statuses"] = sorted(set(map(str, criteria.status)))
    return " AND ".join(conditions) or "true", values


def list_messages(
    schema: str,
    criteria: MessageFilter,
    after: UUID | None,
    limit: int,
    *,
    window: int | None = None,
    by_key: bool = False,
) -> Statement:
    """Find messages, the newest id first, below the id ``after``, among the next ``window`` (None: `window_of`).

    ``by_key`` looks at all that have the key, by an index on keys. With a condition on the body, rows have two columns
    more: the body, and the sum of sizes before it; there are as many as may be read at once.

    Rows: ``(end of the window or None, how many were found, id, topic, key, tag, status, born_at, deliver_at,
    decided_by, decided_at)``,
    with an id of None where nothing is found. The end is None where all there are were seen, or ``limit`` were found.
    """
    table, fits = _driver(criteria)
    if by_key:
        table, source = "half_message", _BY_KEY
    else:
        source = _BY_ID if table == "half_message" else _BY_DRIVER
    condition, values = where(criteria)
    sql = (
        _LIST.replace("{from}", source)
        .replace("{op}", _OP)
        .replace("{ordered}", "h.id" if table == "half_message" else "c.half_id")
        .replace("{row}", _ROW + (", h.body" if criteria.body is not None else ""))
        .replace("{where}", condition)
        .replace("{windowed}", "false" if by_key else "true")
        .replace("{found}", _BODIES if criteria.body is not None else "found")
        .replace("{topic}", _of_topic(criteria))
        .replace("{table}", table)
        .replace("{fits}", fits)
        .replace("{id}", "id" if table == "half_message" else "half_id")
    )
    values |= _range(criteria, after) | {"limit": limit, "window": window or window_of(criteria), "bytes": BODY_BYTES}
    return Statement(in_schema(sql, schema), values)


def window_of(criteria: MessageFilter) -> int:
    """Return how many messages one search for these looks at."""
    found_by_status = _driver(criteria)[0] != "half_message" and replace(criteria, **_NOT_OF_HALF) == MessageFilter()
    return WINDOW if found_by_status or not criteria.status else STATUS_WINDOW


def _driver(criteria: MessageFilter) -> tuple[str, str]:
    statuses = set(criteria.status)
    return next(((table, fits) for of, table, fits in _DRIVERS if statuses == of), ("half_message", "true"))


def _of_topic(criteria: MessageFilter) -> str:
    return "true" if criteria.topic is None else "topic = %(topic)s"


def _range(criteria: MessageFilter, after: UUID | None) -> dict[str, object]:
    below = min((bound for bound in (after, criteria.until and end_id(criteria.until)) if bound), default=LAST_ID)
    return {"below": below, "first": first_id(criteria.since) if criteria.since else FIRST_ID}


def count_of_key(schema: str, criteria: MessageFilter, after: UUID | None, limit: int) -> Statement:
    """Count messages with the key by an index on it, ``limit`` at most. Rows: ``(messages,)``."""
    sql = _COUNT_OF_KEY.replace("{topic}", _of_topic(criteria))
    values: dict[str, object] = {"key": criteria.key, "topic": criteria.topic, "limit": limit}
    return Statement(in_schema(sql, schema), values | _range(criteria, after))


def count_messages(schema: str, criteria: MessageFilter, limit: int) -> Statement | None:
    """Count what a filter fits, ``limit`` at most; None where that is not cheap. Rows: ``(messages,)``."""
    table, fits = _driver(criteria)
    if replace(criteria, database=None, status=()) != MessageFilter() or set(criteria.status) not in _COUNTED:
        return None
    sql = _COUNT.replace("{table}", table).replace("{fits}", fits)
    return Statement(in_schema(sql, schema), {"limit": limit})


def key_indexes(schema: str) -> Statement:
    """Read by which columns indexes on half messages begin. Rows: ``([first, second],)``, None where there are none."""
    return Statement(in_schema(_KEY_INDEX, schema))


def has_key_index(columns: Sequence[Sequence[str] | None], topic: str | None) -> bool:
    """Tell whether messages with a key (and a topic) are found by one of these indexes."""
    return any(
        names is not None and (names[0] == "key" or (list(names) == ["topic", "key"] and topic is not None))
        for names in columns
    )


# --- undecided halves ------------------------------------------------------------------------------------

#: How many halves or scheduled messages one search looks at; and how many to find recalled ones, which need no look-up.
HALF_WINDOW = 5_000
RECALLED_WINDOW = 20_000

_LAST_WITH_FIRST_LINE = LAST_CHECK.replace("{error}", "split_part(c.last_error, E'\\n', 1)")

# Ids begin with the time: the oldest come first. Each half message is looked up by itself: a merge of the two tables
# would first read past all that were decided before.
_HALVES = f"""
WITH found AS MATERIALIZED (
    SELECT c.half_id AS id, c.topic, h.key, {HALF_STATUS} AS status, h.born_at,
           extract(epoch FROM statement_timestamp() - h.born_at)::float8 AS age, c.fenced, c.check_times,
           {_LAST_WITH_FIRST_LINE}, c.parked_at, c.reason
      FROM (SELECT * FROM {{s}}.half_check WHERE half_id > %(after)s::uuid ORDER BY half_id LIMIT %(window)s) c
      LEFT JOIN LATERAL (SELECT key, born_at FROM {{s}}.half_message WHERE id = c.half_id LIMIT 1) h ON true
     WHERE {{where}}
     ORDER BY c.half_id LIMIT %(limit)s
), edge AS (
    SELECT half_id FROM {{s}}.half_check
     WHERE (SELECT count(*) FROM found) < %(limit)s AND half_id > %(after)s::uuid
     ORDER BY half_id OFFSET %(window)s - 1 LIMIT 1
)
SELECT e.half_id, f.*
  FROM (SELECT 1) one LEFT JOIN edge e ON true LEFT JOIN found f ON true
 ORDER BY f.id
"""

_COUNT_HALVES = "SELECT count(*) FROM (SELECT FROM {s}.half_check LIMIT %(limit)s) c"


def half_where(criteria: HalfFilter) -> tuple[str, dict[str, object]]:
    """Return the condition that a filter stands for, over a half message ``h`` and its check ``c``, and its values."""
    values: dict[str, object] = {}
    conditions = []
    if criteria.topic is not None:
        conditions.append("c.topic = %(topic)s")
        values["topic"] = criteria.topic
    if criteria.status is not None:
        conditions.append(f"({HALF_STATUS}) = %(status)s")
        values["status"] = str(criteria.status)
    if criteria.min_age is not None:
        conditions.append("h.born_at <= statement_timestamp() - make_interval(secs => %(age)s)")
        values["age"] = criteria.min_age
    return " AND ".join(conditions) or "true", values


def list_halves(
    schema: str, criteria: HalfFilter, after: UUID | None, limit: int, window: int | None = None
) -> Statement:
    """Find undecided halves, the oldest first, above an id.

    Rows: ``(id at which the window ended, …)`` and the fields of `HalfRow` after the database, with an id of None where
    nothing is found. The end is None where all there are were seen, or ``limit`` were found.
    """
    condition, values = half_where(criteria)
    values |= {"after": after or FIRST_ID, "limit": limit, "window": window or HALF_WINDOW, "unanswered": UNANSWERED}
    return Statement(in_schema(_HALVES.replace("{where}", condition), schema), values)


def count_halves(schema: str, limit: int) -> Statement:
    """Count undecided halves, ``limit`` at most. Rows: ``(halves,)``."""
    return Statement(in_schema(_COUNT_HALVES, schema), {"limit": limit})


# --- scheduled messages ----------------------------------------------------------------------------------

_EPOCH = dt.datetime(1, 1, 1, tzinfo=dt.UTC)

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

_DUE_PARTS = {
    "which": "recalled_at IS NULL",
    "only": "true",
    "after": "(deliver_at, half_id) > (%(time)s::timestamptz, %(id)s::uuid)",
    "order": "deliver_at, half_id",
    "d_order": "d.deliver_at, d.half_id",
    "f_order": "f.deliver_at, f.half_id",
}
# No index has the recalled ones: they are found among the others, by id.
_RECALLED_PARTS = {
    "which": "true",
    "only": "d.recalled_at IS NOT NULL",
    "after": "half_id < %(id)s::uuid",
    "order": "half_id DESC",
    "d_order": "d.half_id DESC",
    "f_order": "f.half_id DESC",
}

_COUNT_SCHEDULED = """
SELECT count(*) FROM (SELECT FROM {s}.scheduled_message WHERE recalled_at IS NULL LIMIT %(limit)s) d
"""


def list_scheduled(
    schema: str, criteria: ScheduledFilter, after: tuple[Any, ...] | None, limit: int, window: int | None = None
) -> Statement:
    """Find scheduled messages, the next due first, ties by the id; or recalled ones, the newest id first.

    ``after`` is the time and the id after which to go on; of recalled ones, the id alone.
    Rows: ``(time and id at which the window ended, id, topic, key, deliver_at, recalled_at, recalled_by)``, with an id
    of None where nothing is found. The end is None where all there are were seen, or ``limit`` were found.
    """
    values: dict[str, object] = {"topic": criteria.topic, "limit": limit}
    if criteria.recalled:
        parts = _RECALLED_PARTS
        values |= {"id": after[0] if after else LAST_ID, "window": window or RECALLED_WINDOW}
    else:
        parts = _DUE_PARTS
        time, half_id = after or (_EPOCH, FIRST_ID)
        values |= {"time": time, "id": half_id, "window": window or HALF_WINDOW}
    sql = _SCHEDULED
    for name, text in parts.items():
        sql = sql.replace(f"{{{name}}}", text)
    return Statement(in_schema(sql, schema), values)


def count_scheduled(schema: str, limit: int) -> Statement:
    """Count scheduled messages, ``limit`` at most. Rows: ``(messages,)``."""
    return Statement(in_schema(_COUNT_SCHEDULED, schema), {"limit": limit})


# --- the audit -------------------------------------------------------------------------------------------

#: How many acts one search looks at, and how many of one target are ever shown.
AUDIT_WINDOW = 20_000
OF_TARGET = 5_000

_LAST_AUDIT = 2**63 - 1

_AUDIT_ROW = "id, acted_at, actor, action, target, reason, result::text, origin::text"

_AUDIT = f"""
WITH found AS MATERIALIZED (
    SELECT * FROM (SELECT * FROM {{s}}.audit WHERE id < %(below)s ORDER BY id DESC LIMIT %(window)s) a
     WHERE {{where}}
     ORDER BY id DESC LIMIT %(limit)s
), edge AS (
    SELECT id FROM {{s}}.audit WHERE (SELECT count(*) FROM found) < %(limit)s AND id < %(below)s
     ORDER BY id DESC OFFSET %(window)s - 1 LIMIT 1
)
SELECT e.id, {", ".join(f"f.{column.strip()}" for column in _AUDIT_ROW.split(","))}
  FROM (SELECT 1) one LEFT JOIN edge e ON true LEFT JOIN found f ON true
 ORDER BY f.id DESC
"""

# All of a target at once: in the order of ids, the planner might read the primary key to its end.
_OF_TARGETS = f"""
WITH found AS MATERIALIZED (
    SELECT * FROM {{s}}.audit a WHERE a.target = ANY (%(targets)s) LIMIT {OF_TARGET}
)
SELECT NULL::bigint, {_AUDIT_ROW} FROM found a WHERE id < %(below)s AND {{where}} ORDER BY id DESC LIMIT %(limit)s
"""

_COUNT_AUDIT = "SELECT count(*) FROM (SELECT FROM {s}.audit LIMIT %(limit)s) a"

# Groups that have a row in the inbox, be it that of a quarantine.
_KNOWN_GROUPS = f"""
WITH RECURSIVE {GROUPS} SELECT consumer_group FROM place ORDER BY 1
"""


def list_audit(
    schema: str,
    criteria: AuditFilter,
    targets: Sequence[str] | None,
    below: int | None,
    limit: int,
    window: int = AUDIT_WINDOW,
) -> Statement:
    """Find acts, the newest id first, below an id; with ``targets`` only those on one of them.

    Rows: ``(id at which the window ended, id, acted_at, actor, action, target, reason, result, origin)``, the last two
    as JSON texts; with a second id of None where nothing is found.
    """
    values: dict[str, object] = {"below": _LAST_AUDIT if below is None else below, "limit": limit, "window": window}
    conditions = []
    for condition, name in (
        ("a.actor = %(actor)s", "actor"),
        ("a.action = %(action)s", "action"),
        ("a.acted_at >= %(since)s", "since"),
        ("a.acted_at < %(until)s", "until"),
    ):
        if (value := getattr(criteria, name)) is not None:
            conditions.append(condition)
            values[name] = value
    sql = _AUDIT
    if targets is not None:
        sql = _OF_TARGETS
        values["targets"] = list(targets)
    return Statement(in_schema(sql.replace("{where}", " AND ".join(conditions) or "true"), schema), values)


def count_audit(schema: str, limit: int) -> Statement:
    """Count all acts, ``limit`` at most. Rows: ``(acts,)``."""
    return Statement(in_schema(_COUNT_AUDIT, schema), {"limit": limit})


def known_groups(schema: str) -> Statement:
    """Find the groups that have rows in the inbox. Rows: ``(group,)``."""
    return Statement(in_schema(_KNOWN_GROUPS, schema))
