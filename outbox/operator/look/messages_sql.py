"""Statements that find messages by many conditions; each looks at a window at most, and says where it stopped.

Statements that find messages and follow one through the tables; all by index, or within a window.

Statements that follow one message beyond its own tables: what was found about it, and who could undo it.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from outbox.consumer.sql import GROUP_QUEUES
from outbox.database.execute import Row, Statement, in_schema

#: How many half messages a search looks at before it gives up, and says where to go on.
BROWSE_WINDOW = 100_000

STATUS = """CASE WHEN o.half_id IS NULL THEN 'undecided'
            WHEN o.resolution = 'rollback' THEN 'rolled_back'
            WHEN d.recalled_at IS NOT NULL THEN 'recalled'
            WHEN d.half_id IS NOT NULL THEN 'scheduled'
            WHEN EXISTS (SELECT FROM {s}.message m WHERE m.half_id = h.id) THEN 'dispatched'
            ELSE 'committed' END"""

# The halves of these states are found by a small table of their own, however many others there are.
_SMALL_TABLES = {"undecided": "half_check", "scheduled": "scheduled_message", "recalled": "scheduled_message"}

_SINCE = "coalesce(%(since)s::timestamptz, statement_timestamp() - make_interval(secs => %(age)s))"

# Ids begin with the time of a client's clock, which may be wrong by a day before a search by id misses anything.
_SINCE_ID = f"""
           AND {{id}} >= (lpad(to_hex((extract(epoch FROM {_SINCE} - interval '1 day') * 1000)::bigint), 12, '0')
                          || repeat('0', 20))::uuid"""

_BROWSE_LIST = f"""
WITH candidate AS MATERIALIZED (
    SELECT {{id}} AS id FROM {{s}}.{{table}}
     WHERE (%(after)s::uuid IS NULL OR {{id}} < %(after)s::uuid){{since_id}}
     ORDER BY {{id}} DESC LIMIT %(window)s
), found AS (
    SELECT h.id, h.topic, h.key, h.tag, h.born_at, h.deliver_at, {STATUS} AS status, o.decided_by, o.decided_at
      FROM candidate c
      JOIN {{s}}.half_message h ON h.id = c.id
      LEFT JOIN {{s}}.op_message o ON o.half_id = h.id
      LEFT JOIN {{s}}.scheduled_message d ON d.half_id = h.id
     WHERE (%(topic)s::text IS NULL OR h.topic = %(topic)s) AND (%(key)s::text IS NULL OR h.key = %(key)s)
       {{since}}
     ORDER BY c.id DESC
)
SELECT f.*, w.searched, w.last
  FROM (SELECT count(*) AS searched, (SELECT id FROM candidate ORDER BY id LIMIT 1) AS last FROM candidate) w
  LEFT JOIN (SELECT * FROM found WHERE %(status)s::text IS NULL OR status = %(status)s LIMIT %(limit)s) f ON true
 ORDER BY f.id DESC
"""

#: What the columns of the statements below are called by those who show them.
HALF = ("id", "producer_group", "topic", "key", "tag", "headers", "content_type", "body_bytes", "raw", "deliver_at",
        "born_at", "status")  # fmt: skip
OP = ("resolution", "decided_by", "decided_at", "sequence", "xid")
SEND = ("send_number", "queue", "position", "visible_at")
SCHEDULED = ("deliver_at", "recalled_at", "recalled_by")
COMPENSATION = ("function", "requested_by", "reason", "result", "compensated_at")
AUDIT = ("acted_at", "actor", "action", "reason", "result")
INBOX = ("group", "topic", "queue", "position", "status", "attempts", "claims", "next_attempt_at", "body_digest",
         "last_error", "received_at", "changed_at")  # fmt: skip
_JSON = frozenset({"headers", "result"})

_HALF = f"""
SELECT h.id, h.producer_group, h.topic, h.key, h.tag, h.headers::text, h.content_type, octet_length(h.body),
       CASE WHEN %(body)s THEN h.body END, h.deliver_at, h.born_at, {STATUS}
  FROM {{s}}.half_message h
  LEFT JOIN {{s}}.op_message o ON o.half_id = h.id
  LEFT JOIN {{s}}.scheduled_message d ON d.half_id = h.id
 WHERE h.id = %(id)s
"""

_BROWSE_OP = "SELECT resolution, decided_by, decided_at, sequence, xid::text FROM {s}.op_message WHERE half_id = %s"

_SENDS = """
SELECT send_number, queue, position, visible_at FROM {s}.message WHERE half_id = %s ORDER BY send_number
"""

_SCHEDULED = "SELECT deliver_at, recalled_at, recalled_by FROM {s}.scheduled_message WHERE half_id = %s"

_COMPENSATION = """
SELECT function, requested_by, reason, result::text, compensated_at FROM {s}.compensation WHERE half_id = %s
"""

_AUDIT = """
SELECT acted_at, actor, action, reason, result::text FROM {s}.audit WHERE target = %s ORDER BY id LIMIT 1000
"""

# The inbox's key begins with the group, so each known group is asked.
_INBOX = (
    GROUP_QUEUES
    + """, known AS (SELECT DISTINCT consumer_group FROM place)
SELECT m.consumer_group, m.topic, m.queue, m.position, m.status, m.attempts, m.claims, m.next_attempt_at,
       encode(m.body_digest, 'hex'), m.last_error, m.received_at, m.changed_at
  FROM known k JOIN {s}.consumer_message m ON m.consumer_group = k.consumer_group AND m.message_id = %s
 ORDER BY 1
"""
)

_REACHED = (
    GROUP_QUEUES
    + """, known AS (SELECT DISTINCT consumer_group FROM place WHERE topic = %(topic)s)
SELECT consumer_group,
       coalesce((SELECT max(position) FROM {s}.consumer_offset o
                  WHERE o.consumer_group = k.consumer_group AND o.topic = %(topic)s AND o.queue = %(queue)s), 0)
  FROM known k
 ORDER BY 1
"""
)


@dataclass(frozen=True, slots=True)
class Filter:
    """What to look for; None looks at all. ``since`` is a time, ``age`` the same as seconds before now."""

    topic: str | None = None
    key: str | None = None
    status: str | None = None
    since: dt.datetime | None = None
    age: float | None = None


def list_halves(schema: str, wanted: Filter, after: UUID | None, limit: int, window: int = BROWSE_WINDOW) -> Statement:
    """Find half messages, the newest first, below the id ``after``, among the next ``window``.

    Rows: ``(id, topic, key, tag, born_at, deliver_at, status, decided_by, decided_at, searched, last searched id)``;
    one with an id of None where nothing is found.
    """
    table = _SMALL_TABLES.get(wanted.status or "", "half_message")
    timed = wanted.since is not None or wanted.age is not None
    sql = (
        _BROWSE_LIST.replace("{since_id}", _SINCE_ID if timed else "")
        .replace("{since}", f"AND h.born_at >= {_SINCE}" if timed else "")
        .replace("{table}", table)
        .replace("{id}", "id" if table == "half_message" else "half_id")
    )
    values: dict[str, object] = {
        "topic": wanted.topic,
        "key": wanted.key,
        "status": wanted.status,
        "limit": limit,
        "window": window,
    }
    values |= {"since": wanted.since, "age": wanted.age, "after": after}
    return Statement(in_schema(sql, schema), values)


def half(schema: str, half_id: UUID, *, body: bool) -> Statement:
    """Read a half message and its status, with its body if wanted. Rows: as `HALF`."""
    return Statement(in_schema(_HALF, schema), {"id": half_id, "body": body})


def op_of(schema: str, half_id: UUID) -> Statement:
    """Read the decision on a half. Rows: as `OP`."""
    return Statement(in_schema(_BROWSE_OP, schema), (half_id,))


def way_of_half(schema: str, half_id: UUID) -> list[Statement]:
    """Read what became of a half after its decision: sends, schedule and compensation, in this order."""
    return [Statement(in_schema(sql, schema), (half_id,)) for sql in (_SENDS, _SCHEDULED, _COMPENSATION)]


def audit_of(schema: str, target: str) -> Statement:
    """Read what operators did to a target. Rows: as `AUDIT`."""
    return Statement(in_schema(_AUDIT, schema), (target,))


def inbox_of(schema: str, message_id: UUID) -> Statement:
    """Read the inbox rows of a message. Rows: as `INBOX`."""
    return Statement(in_schema(_INBOX, schema), (message_id,))


def reached(schema: str, topic: str, queue: int) -> Statement:
    """Read how far each group of a topic has come in a queue. Rows: ``(group, position)``."""
    return Statement(in_schema(_REACHED, schema), {"topic": topic, "queue": queue})


def named(names: Sequence[str], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return rows with the names of their columns; what is JSON is decoded."""
    return [
        {
            name: json.loads(value) if name in _JSON and value is not None else value
            for name, value in zip(names, row, strict=True)
        }
        for row in rows
    ]


def first(names: Sequence[str], rows: Sequence[Row]) -> dict[str, Any] | None:
    """Return the only row with the names of its columns; None if there is none."""
    return next(iter(named(names, rows)), None)


#: How many messages one search looks at, and how many where it must look each up in other tables, too.
WINDOW = 20_000
STATUS_WINDOW = 5_000
#: How many messages with one key are found by an index on keys; of more, the newest are found soon without it.
OF_KEY = 2_000
#: How many bodies one search reads, of how many bytes together, and how large one may be to be searched.
BODIES = 1_000
BODY_BYTES = 8 * 1024 * 1024
LARGEST_BODY = 1024 * 1024

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_LAST_ID = (1 << 128) - 1
# An id has the time of the client's clock at which the message was handed over, ``born_at`` that of the database at the
# flush. So ids lie behind by the length of a transaction, and ahead only where a client's clock is wrong.
_BEHIND = dt.timedelta(days=1)
_AHEAD = dt.timedelta(minutes=5)

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

_ROW = f"h.id, h.topic, h.key, h.tag, {STATUS} AS status, h.born_at, h.deliver_at, o.decided_by, o.decided_at"

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

_BODY = "SELECT content_type, body FROM {s}.half_message WHERE id = %s"


# What doesn't ask for a look at each half message that a smaller table leads to.
_NOT_OF_HALF: dict[str, Any] = {"statuses": (), "since": None, "until": None}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which messages; None (or nothing) looks at all. ``since`` and ``until`` go by ``born_at``.

    ``header`` is a name and its value; with ``json_body`` only those with JSON bodies that aren't too large to search.
    """

    statuses: tuple[str, ...] = ()
    topic: str | None = None
    key: str | None = None
    tag: str | None = None
    producer_group: str | None = None
    since: dt.datetime | None = None
    until: dt.datetime | None = None
    header: tuple[str, str] | None = None
    json_body: bool = False


def where(wanted: Wanted) -> tuple[str, dict[str, object]]:
    """Return the condition that says which are wanted, and its values; the schema is still ``{s}``.

    It is about a half message ``h``, its op ``o`` and its schedule ``d``.
    """
    values: dict[str, object] = {}
    conditions = []
    for name in ("topic", "key", "tag", "producer_group"):
        if (value := getattr(wanted, name)) is not None:
            conditions.append(f"h.{name} = %({name})s")
            values[name] = value
    if wanted.header is not None:
        conditions.append("h.headers @> %(header)s::jsonb")
        values["header"] = json.dumps(dict([wanted.header]))
    if wanted.since is not None:
        conditions.append("h.id >= %(since_id)s::uuid AND h.born_at >= %(since)s")
        values |= {"since": wanted.since, "since_id": first_id(wanted.since)}
    if wanted.until is not None:
        conditions.append("h.id < %(until_id)s::uuid AND h.born_at < %(until)s")
        values |= {"until": wanted.until, "until_id": end_id(wanted.until)}
    if wanted.json_body:
        conditions.append(_JSON_BODY)
        values["largest_body"] = LARGEST_BODY
    if wanted.statuses:
        conditions.append(f"({STATUS}) = ANY (%(statuses)s)")
        values["statuses"] = sorted(set(wanted.statuses))
    return " AND ".join(conditions) or "true", values


def first_id(since: dt.datetime) -> UUID:
    """Return an id below those of all messages born at that time or later."""
    return _id_at(since, -_BEHIND)


def end_id(until: dt.datetime) -> UUID:
    """Return an id above those of all messages born before that time, unless a client's clock is ahead by minutes."""
    return _id_at(until, _AHEAD)


def _id_at(moment: dt.datetime, more: dt.timedelta) -> UUID:
    milliseconds = (moment - _EPOCH + more) // dt.timedelta(milliseconds=1)
    return UUID(int=max(0, min(milliseconds << 80, _LAST_ID)))


def list_messages(
    schema: str, wanted: Wanted, after: UUID | None, limit: int, *, window: int | None = None, by_key: bool = False
) -> Statement:
    """Find messages, the newest id first, below the id ``after``, among the next ``window`` (None: `window_of`).

    ``by_key`` looks at all that have the key, by an index on keys. With ``json_body``, rows have two columns more: the
    body, and one that is of no use; there are as many as may be read at once.

    Rows: ``(end of the window or None, how many were found, id, topic, key, tag, status, born_at, deliver_at,
    decided_by, decided_at)``,
    with an id of None where nothing is found. The end is None where all there are were seen, or ``limit`` were found.
    """
    table, fits = _driver(wanted)
    if by_key:
        table, source = "half_message", _BY_KEY
    else:
        source = _BY_ID if table == "half_message" else _BY_DRIVER
    condition, values = where(wanted)
    sql = (
        _LIST.replace("{from}", source)
        .replace("{op}", _OP)
        .replace("{ordered}", "h.id" if table == "half_message" else "c.half_id")
        .replace("{row}", _ROW + (", h.body" if wanted.json_body else ""))
        .replace("{where}", condition)
        .replace("{windowed}", "false" if by_key else "true")
        .replace("{found}", _BODIES if wanted.json_body else "found")
        .replace("{topic}", _of_topic(wanted))
        .replace("{table}", table)
        .replace("{fits}", fits)
        .replace("{id}", "id" if table == "half_message" else "half_id")
    )
    values |= _range(wanted, after) | {"limit": limit, "window": window or window_of(wanted), "bytes": BODY_BYTES}
    return Statement(in_schema(sql, schema), values)


def window_of(wanted: Wanted) -> int:
    """Return how many messages one search for these looks at."""
    found_by_status = _driver(wanted)[0] != "half_message" and replace(wanted, **_NOT_OF_HALF) == Wanted()
    return WINDOW if found_by_status or not wanted.statuses else STATUS_WINDOW


def _driver(wanted: Wanted) -> tuple[str, str]:
    statuses = set(wanted.statuses)
    return next(((table, fits) for of, table, fits in _DRIVERS if statuses == of), ("half_message", "true"))


def _of_topic(wanted: Wanted) -> str:
    return "true" if wanted.topic is None else "topic = %(topic)s"


def _range(wanted: Wanted, after: UUID | None) -> dict[str, object]:
    below = min(
        (bound for bound in (after, wanted.until and end_id(wanted.until)) if bound), default=UUID(int=_LAST_ID)
    )
    return {"below": below, "first": first_id(wanted.since) if wanted.since else UUID(int=0)}


def count_of_key(schema: str, wanted: Wanted, after: UUID | None, limit: int) -> Statement:
    """Count messages with the key by an index on it, ``limit`` at most. Rows: ``(messages,)``."""
    sql = _COUNT_OF_KEY.replace("{topic}", _of_topic(wanted))
    values: dict[str, object] = {"key": wanted.key, "topic": wanted.topic, "limit": limit}
    return Statement(in_schema(sql, schema), values | _range(wanted, after))


def count(schema: str, wanted: Wanted, limit: int) -> Statement | None:
    """Count what is wanted, ``limit`` at most; None where that is not cheap. Rows: ``(messages,)``."""
    table, fits = _driver(wanted)
    if replace(wanted, statuses=()) != Wanted() or set(wanted.statuses) not in _COUNTED:
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


def body(schema: str, half_id: UUID) -> Statement:
    """Read a message's body. Rows: ``(content_type, bytes)`` or none."""
    return Statement(in_schema(_BODY, schema), (half_id,))


#: What the columns of findings are called by those who show them.
FINDING = ("run_id", "topic", "group", "kind", "detail", "action", "acted_at", "result", "started_at", "finished_at")

_FINDINGS = """
SELECT f.run_id, r.topic, r.consumer_group, f.kind, f.detail::text, f.action, f.acted_at, f.result, r.started_at,
       r.finished_at
  FROM (SELECT * FROM {s}.reconciliation_finding WHERE message_id = %s LIMIT 1000) f
  LEFT JOIN LATERAL (SELECT * FROM {s}.reconciliation_run WHERE id = f.run_id LIMIT 1) r ON true
 ORDER BY f.id DESC LIMIT 100
"""

_WORKERS = """
SELECT count(*) FROM {s}.worker WHERE seen_at > clock_timestamp() - make_interval(secs => %(alive)s)
"""

_HANDLERS = """
SELECT DISTINCT h ->> 'kind', h ->> 'group', h ->> 'options'
  FROM {s}.worker w
 CROSS JOIN LATERAL jsonb_array_elements(CASE jsonb_typeof(w.handlers) WHEN 'array' THEN w.handlers END) h
 WHERE w.seen_at > clock_timestamp() - make_interval(secs => %(alive)s) AND h ->> 'topic' = %(topic)s
 LIMIT 1000
"""


def findings_of(schema: str, message_id: UUID) -> Statement:
    """Read what reconciliations found about a message, the newest first, 100 at most. Rows: as `FINDING`."""
    return Statement(in_schema(_FINDINGS, schema), (message_id,))


def workers(schema: str, alive: float) -> Statement:
    """Count the workers seen within ``alive`` seconds. Rows: ``(workers,)``."""
    return Statement(in_schema(_WORKERS, schema), {"alive": alive})


def handlers_of(schema: str, topic: str, alive: float) -> Statement:
    """Read what workers seen within ``alive`` seconds have for a topic. Rows: ``(kind, group, options as JSON)``."""
    return Statement(in_schema(_HANDLERS, schema), {"topic": topic, "alive": alive})
