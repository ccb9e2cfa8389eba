"""Statements that find messages and follow one through the tables; all by index, or within a window."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from outbox.store.execute import Row, Statement, in_schema
from outbox.store.stats import PLACES

#: How many half messages a search looks at before it gives up, and says where to go on.
WINDOW = 100_000

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

_LIST = f"""
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

_OP = "SELECT resolution, decided_by, decided_at, sequence, xid::text FROM {s}.op_message WHERE half_id = %s"

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
    PLACES
    + """, known AS (SELECT DISTINCT consumer_group FROM place)
SELECT m.consumer_group, m.topic, m.queue, m.position, m.status, m.attempts, m.claims, m.next_attempt_at,
       encode(m.body_digest, 'hex'), m.last_error, m.received_at, m.changed_at
  FROM known k JOIN {s}.consumer_message m ON m.consumer_group = k.consumer_group AND m.message_id = %s
 ORDER BY 1
"""
)

_REACHED = (
    PLACES
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


def list_halves(schema: str, wanted: Filter, after: UUID | None, limit: int, window: int = WINDOW) -> Statement:
    """Find half messages, the newest first, below the id ``after``, among the next ``window``.

    Rows: ``(id, topic, key, tag, born_at, deliver_at, status, decided_by, decided_at, searched, last searched id)``;
    one with an id of None where nothing is found.
    """
    table = _SMALL_TABLES.get(wanted.status or "", "half_message")
    timed = wanted.since is not None or wanted.age is not None
    sql = (
        _LIST.replace("{since_id}", _SINCE_ID if timed else "")
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
    return Statement(in_schema(_OP, schema), (half_id,))


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
