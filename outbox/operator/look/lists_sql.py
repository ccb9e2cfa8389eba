"""Statements that find messages, undecided halves, scheduled messages and audited acts, by many conditions.

Each looks at a window of rows at most, and says where it stopped: the end of the window is read in the same statement,
so in the same snapshot, as its rows. Each takes the filter of the operator's call, which is checked.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from outbox.acts.changes import MessageStatus
from outbox.check.sql import UNANSWERED
from outbox.database.execute import Statement, Template, statement
from outbox.database.sql import message_status
from outbox.message.content import ENCODING_HEADER
from outbox.operator.look.inbox_sql import FIRST_ID, GROUPS, LAST_ID, end_id, first_id
from outbox.operator.look.message_sql import HALF_STATUS, LAST_CHECK
from outbox.operator.look.paging import count_of, fitting
from outbox.operator.model import AuditFilter, HalfFilter, MessageFate, MessageFilter, ScheduledFilter
from outbox.text import sql_list

# --- messages --------------------------------------------------------------------------------------------

#: How many messages one search looks at, and how many where it must look each up in other tables, too.
WINDOW = 20_000
STATUS_WINDOW = 5_000
#: How many messages with one key are found by an index on keys; of more, the newest are found soon without it.
OF_KEY = 2_000
#: The largest body (bytes, as it was sent) that is searched, or shown masked.
LARGEST_BODY = 1024 * 1024
#: How many bodies one search reads, and of how many stored bytes together.
BODIES = 1_000
BODY_BYTES = 8 * 1024 * 1024

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
                 WHERE {topic} AND id < %(below)s::uuid AND id >= %(first)s::uuid
                 ORDER BY id DESC LIMIT %(window)s) h"""

# Written so that only the index on keys is of use: of the primary key, or of that on topics, the planner might read all
# there is instead.
_OF_KEY = """key = %(key)s
                  AND coalesce({topic} AND id < %(below)s::uuid AND id >= %(first)s::uuid, false)"""
_BY_KEY = f"""
(SELECT * FROM (SELECT * FROM {{s}}.half_message WHERE {_OF_KEY} OFFSET 0) k ORDER BY id DESC) h"""

_ROW = f"h.id, h.topic, h.key, h.tag, {_STATUS} AS status, h.born_at, h.deliver_at, o.decided_by, o.decided_at"

# The end of the window is read in the same snapshot as its rows.
_LIST = """
WITH found AS MATERIALIZED (
    SELECT {row}
      FROM {source}{op}
     WHERE {where}
     ORDER BY {ordered} DESC LIMIT %(limit)s
), edge AS (
    SELECT {id} AS id FROM {s}.{table}
     WHERE (SELECT count(*) FROM found) < %(limit)s
       AND {topic} AND {id} < %(below)s::uuid AND {id} >= %(first)s::uuid
     ORDER BY {id} DESC OFFSET %(window)s - 1 LIMIT 1
)
SELECT e.id, n.found, f.*
  FROM (SELECT count(*) AS found FROM found) n LEFT JOIN edge e ON {windowed} LEFT JOIN {found} f ON true
 ORDER BY f.id DESC
"""

# What one answer may have of bodies; the first one always comes.
_BODIES = """(SELECT b.* FROM (SELECT found.*, sum(octet_length(body)) OVER (ORDER BY id DESC) - octet_length(body)
                                      AS bytes_before FROM found) b WHERE bytes_before < %(bytes)s)"""

_WITH_BODY = f", h.body, h.headers ->> '{ENCODING_HEADER}' AS encoding"

_JSON_BODY = """octet_length(h.body) <= %(largest_body)s AND
       (btrim(split_part(lower(h.content_type), ';', 1)) = 'application/json'
        OR right(btrim(split_part(lower(h.content_type), ';', 1)), 5) = '+json')"""

#: Whether an index that has all keys begins with them. One row: ``(it does,)``.
KEY_INDEX = """
SELECT EXISTS (
    SELECT FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_am m ON m.oid = c.relam
      JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0] AND a.attname = 'key'
     WHERE i.indrelid = '{s}.half_message'::regclass AND i.indisvalid AND i.indisready AND m.amname IN ('btree', 'hash')
       AND coalesce(pg_get_expr(i.indpred, i.indrelid) = '(key IS NOT NULL)', true))
"""

# What doesn't ask for a look at each half message that a smaller table leads to.
_NOT_OF_HALF: dict[str, Any] = {"database": None, "status": (), "since": None, "until": None}

_FITS = {name: f"h.{name} = %({name})s" for name in ("topic", "key", "tag", "producer_group")} | {
    "sends": "EXISTS (SELECT FROM {s}.message m WHERE m.half_id = h.id AND m.send_number >= %(sends)s)",
    "header": "h.headers @> %(header)s::jsonb",
    "since": "h.id >= %(since_id)s::uuid AND h.born_at >= %(since)s",
    "until": "h.id < %(until_id)s::uuid AND h.born_at < %(until)s",
    "body": _JSON_BODY,
}
# As `_OF_KEY`: a topic may have millions of messages besides those of the key.
_FITS_WITH_KEY = _FITS | {"topic": "coalesce(h.topic = %(topic)s, false)"}

_IS_STATUS = f"({_STATUS}) = ANY (%(status)s)"
_IS_COMPENSATED = "EXISTS (SELECT FROM {s}.compensation x WHERE x.half_id = h.id)"

# A group is known by its cursor, which says where it began; all are read once, and not for each message. What lies
# between that and a group's newest delivery is yet to be confirmed.
# No group has a message that isn't dispatched yet.
_IS_FATE = f"""EXISTS (SELECT FROM (
         SELECT array_agg(coalesce(e.status, 'unconsumed')) AS fates
           FROM jsonb_to_recordset((
                SELECT jsonb_agg(k) FROM (
                    SELECT DISTINCT ON (topic, consumer_group) topic, consumer_group, starts FROM {{s}}.delivery_cursor
                     ORDER BY topic, consumer_group, number DESC) k)) g (topic text, consumer_group text, starts int8[])
           LEFT JOIN LATERAL (SELECT status FROM {{s}}.delivery d
                               WHERE d.half_id = h.id AND d.consumer_group = g.consumer_group
                               ORDER BY number DESC LIMIT 1) e ON true
          WHERE g.topic = h.topic
            AND (e.status IS NOT NULL OR ({_STATUS}) IN {sql_list(each for each in MessageStatus if each.to_come)}
                 OR EXISTS (SELECT FROM {{s}}.message m
                             WHERE m.half_id = h.id AND m.position > coalesce(g.starts[m.queue + 1], 0)))) f
         WHERE fates && %(fates)s
            OR (%(by_all)s AND 'consumed' = ANY (fates) AND fates <@ '{{consumed,left_out}}'))"""


def where(criteria: MessageFilter) -> tuple[str, dict[str, Any]]:
    """Return the condition that a filter stands for, and its values; the schema is still ``{s}``.

    It is about a half message ``h``, its op ``o`` and its schedule ``d``. Of a value in the body it tells only that the
    body is JSON, and not too large to be searched.
    """
    condition, values = fitting(criteria, _FITS if criteria.key is None else _FITS_WITH_KEY)
    chosen = set(criteria.status)
    statuses, fates = chosen & set(MessageStatus), chosen - set(MessageStatus)
    of_status = [
        *([_IS_STATUS] if statuses else []),
        *([_IS_COMPENSATED] if MessageFate.COMPENSATED in fates else []),
        *([_IS_FATE] if fates - {MessageFate.COMPENSATED} else []),
    ]
    if of_status:
        condition += f" AND ({' OR '.join(of_status)})"
    in_any = fates - {MessageFate.COMPENSATED, MessageFate.CONSUMED}
    values |= {"fates": sorted(map(str, in_any)), "by_all": MessageFate.CONSUMED in fates}
    if criteria.header is not None:
        values["header"] = json.dumps(dict([criteria.header]))
    if criteria.since is not None:
        values["since_id"] = first_id(criteria.since)
    if criteria.until is not None:
        values["until_id"] = end_id(criteria.until)
    return condition, values | {"status": sorted(map(str, statuses)), "largest_body": LARGEST_BODY}


def list_messages(
    schema: str, criteria: MessageFilter, after: UUID | None, limit: int, *, by_key: bool = False
) -> Statement:
    """Find messages, the newest id first, below the id ``after``, among the next ones (`window_of`).

    ``by_key`` looks at all that have the key, by an index on keys. With a condition on the body, rows have three
    columns more: the body, how it is compressed, and the sum of sizes before it; there are as many as may be read at
    once.

    Rows: the end of the window or None, how many were found, and the fields of `MessageRow`, with an id of None where
    nothing is found. The end is None where all there are were seen, or ``limit`` were found.
    """
    table, fits = ("half_message", "") if by_key else driver(criteria)
    of_half, with_body = table == "half_message", criteria.body is not None
    condition, values = where(criteria)
    return statement(
        schema,
        _LIST,
        values | _range(criteria, after) | {"limit": limit, "window": window_of(criteria), "bytes": BODY_BYTES},
        source=_BY_KEY if by_key else _BY_ID if of_half else _BY_DRIVER,
        op=_OP,
        ordered="h.id" if of_half else "c.half_id",
        row=_ROW + _WITH_BODY * with_body,
        where=condition,
        windowed="false" if by_key else "true",
        found=_BODIES if with_body else "found",
        topic=_of_topic(criteria) if of_half else "true",
        table=table,
        fits=fits,
        id="id" if of_half else "half_id",
    )


def window_of(criteria: MessageFilter) -> int:
    """Return how many messages one search for these looks at."""
    found_by_status = driver(criteria)[0] != "half_message" and replace(criteria, **_NOT_OF_HALF) == MessageFilter()
    looks_up_each = criteria.status or criteria.sends is not None
    return STATUS_WINDOW if looks_up_each and not found_by_status else WINDOW


def driver(criteria: MessageFilter) -> tuple[str, str]:
    """Return the table that leads to the halves of these statuses, and the condition on its rows."""
    statuses = set(criteria.status)
    return next(((table, fits) for of, table, fits in _DRIVERS if statuses == of), ("half_message", "true"))


def _of_topic(criteria: MessageFilter) -> str:
    return "true" if criteria.topic is None else "topic = %(topic)s"


def _range(criteria: MessageFilter, after: UUID | None) -> dict[str, object]:
    below = min((bound for bound in (after, criteria.until and end_id(criteria.until)) if bound), default=LAST_ID)
    return {"below": below, "first": first_id(criteria.since) if criteria.since else FIRST_ID}


def count_of_key(schema: str, criteria: MessageFilter, after: UUID | None, most: int) -> Statement:
    """Count messages with the key by an index on it, ``most`` at most. Rows: ``(messages,)``."""
    condition = _OF_KEY.replace("{topic}", _of_topic(criteria))
    values = {"key": criteria.key, "topic": criteria.topic, **_range(criteria, after)}
    return count_of(schema, "half_message", condition, most, **values)


def count_messages(schema: str, criteria: MessageFilter) -> Statement | None:
    """Count the messages that a filter fits; None where that is not cheap. Rows: ``(messages,)``."""
    if replace(criteria, database=None, status=(), topic=None) != MessageFilter():
        return None
    if set(criteria.status) not in _COUNTED or (criteria.status and criteria.topic):
        return None
    table, fits = driver(criteria)
    return count_of(schema, table, f"{fits} AND {_of_topic(criteria)}", topic=criteria.topic)


# --- messages that a group hasn't consumed ---------------------------------------------------------------

# Of a message that was sent again, the first send after the group's offsets stands for the message.
_AFTER_OFFSETS = f"""
WITH place AS MATERIALIZED (
    SELECT * FROM unnest(%(topics)s::text[], %(queues)s::int[], %(offsets)s::bigint[], %(belows)s::bigint[])
             WITH ORDINALITY p (topic, queue, position, below, number)
)
SELECT p.number::int - 1, m.position, m.half_id, r.*
  FROM place p
 CROSS JOIN LATERAL (SELECT * FROM {{s}}.message
                      WHERE topic = p.topic AND queue = p.queue AND position > p.position AND position < p.below
                      ORDER BY position DESC LIMIT %(window)s) m
  LEFT JOIN LATERAL (
       SELECT {_ROW} FROM (SELECT * FROM {{s}}.half_message WHERE id = m.half_id LIMIT 1) h{_OP}
        WHERE {{where}} AND NOT EXISTS (
              SELECT FROM {{s}}.message e
               WHERE e.half_id = m.half_id AND e.send_number < m.send_number
                 AND e.position > (SELECT q.position FROM place q WHERE q.topic = e.topic AND q.queue = e.queue))) r
       ON true
 ORDER BY p.number, m.position DESC
"""

_OF_IDS = f"""
SELECT r.* FROM unnest(%(ids)s::uuid[]) w (id)
 CROSS JOIN LATERAL (
       SELECT {_ROW} FROM (SELECT * FROM {{s}}.half_message WHERE id = w.id LIMIT 1) h{_OP} WHERE {{where}}) r
"""


#: Find the scheduled messages below an id, the newest first. Rows: ``(id,)``.
scheduled_below: Template = Template("""
SELECT half_id FROM {s}.scheduled_message WHERE recalled_at IS NULL AND half_id < %(below)s::uuid
 ORDER BY half_id DESC LIMIT %(limit)s
""")


@dataclass(frozen=True, slots=True)
class UnreadQueue:
    """A queue that a group has read as far as ``position``; its list goes on below ``below``, 0 at its end."""

    topic: str
    queue: int
    position: int
    below: int


def list_after_offsets(schema: str, criteria: MessageFilter, queues: Sequence[UnreadQueue], window: int) -> Statement:
    """Find the messages of these queues after a group's offsets, the last position first, ``window`` of each queue.

    Rows: ``(index of the queue, position, id)`` and the fields of `MessageRow`, which are None where the filter doesn't
    fit, or where an earlier send of the message is among them.
    """
    condition, values = where(criteria)
    of_queues = {
        "topics": [each.topic for each in queues],
        "queues": [each.queue for each in queues],
        "offsets": [each.position for each in queues],
        "belows": [each.below for each in queues],
    }
    return statement(schema, _AFTER_OFFSETS, values | of_queues | {"window": window}, where=condition)


def messages_of(schema: str, criteria: MessageFilter, ids: Sequence[UUID]) -> Statement:
    """Find those of some messages that a filter fits. Rows: the fields of `MessageRow`."""
    condition, values = where(criteria)
    return statement(schema, _OF_IDS, values | {"ids": list(ids)}, where=condition)


# --- windows of other tables -----------------------------------------------------------------------------

#: How many halves or scheduled messages one search looks at; and how many to find recalled ones, which need no look-up.
HALF_WINDOW = 5_000
RECALLED_WINDOW = 20_000
#: How many acts one search looks at, and how many of one target are ever shown.
AUDIT_WINDOW = 20_000
OF_TARGET = 5_000

# Each row of the window is looked up in other tables by itself: a merge of two tables would first read past all that
# came before.
_WINDOW = """
WITH found AS MATERIALIZED (
    SELECT {row}
      FROM (SELECT * FROM {s}.{table} WHERE {after} ORDER BY {order} LIMIT %(window)s) c{join}
     WHERE {where}
     ORDER BY {order} LIMIT %(limit)s
), edge AS (
    SELECT {position} FROM {s}.{table}
     WHERE (SELECT count(*) FROM found) < %(limit)s AND {after}
     ORDER BY {order} OFFSET %(window)s - 1 LIMIT 1
)
SELECT e.*, f.*
  FROM (SELECT 1) one LEFT JOIN edge e ON true LEFT JOIN found f ON true
 ORDER BY {f_order}
"""


def _window(
    schema: str, values: Mapping[str, Any], *, position: str, descending: bool = False, **parts: str
) -> Statement:
    """Return the search of a window of one table in the order of ``position``, a list of columns.

    Rows: ``(position at which the window ended, …)`` and the row, with a first column of None where nothing is found.
    The position is None where all there are were seen, or ``limit`` were found.
    """
    down = " DESC" * descending
    order, f_order = (", ".join(f"{of}{name}{down}" for name in position.split(", ")) for of in ("", "f."))
    return statement(schema, _WINDOW, values, position=position, **parts, order=order, f_order=f_order)


_SHORT_CHECK = LAST_CHECK.replace("{error}", "split_part(c.last_error, E'\\n', 1)")

# Ids begin with the time: the oldest come first.
_HALF_ROW = f"""c.half_id, c.topic, h.key, {HALF_STATUS} AS status, h.born_at,
           extract(epoch FROM statement_timestamp() - h.born_at)::float8 AS age, c.fenced, c.check_times,
           {_SHORT_CHECK}, c.parked_at, c.reason"""

_OF_HALF = """
      {kind} JOIN LATERAL (SELECT topic, key, born_at FROM {s}.half_message WHERE id = c.half_id LIMIT 1) h ON true"""

#: What each field of a `HalfFilter` stands for, over a half message ``h`` and its check ``c``.
HALF_FITS = {
    "topic": "c.topic = %(topic)s",
    "status": f"({HALF_STATUS}) = %(status)s",
    "min_age": "h.born_at <= statement_timestamp() - make_interval(secs => %(min_age)s)",
}


def list_halves(schema: str, criteria: HalfFilter, after: UUID | None, limit: int) -> Statement:
    """Find undecided halves, the oldest first, above an id. Rows: the end, and the fields of `HalfRow`."""
    condition, values = fitting(criteria, HALF_FITS)
    return _window(
        schema,
        values | {"id": after or FIRST_ID, "limit": limit, "window": HALF_WINDOW, "unanswered": UNANSWERED},
        position="half_id",
        table="half_check",
        row=_HALF_ROW,
        join=_OF_HALF.replace("{kind}", "LEFT"),
        after="half_id > %(id)s::uuid",
        where=condition,
    )


_EPOCH = dt.datetime(1, 1, 1, tzinfo=dt.UTC)
_DUE: dict[str, Any] = {
    "position": "deliver_at, half_id",
    "after": "recalled_at IS NULL AND (deliver_at, half_id) > (%(time)s::timestamptz, %(id)s::uuid)",
    "where": "(%(topic)s::text IS NULL OR h.topic = %(topic)s)",
}
# No index has the recalled ones: they are found among the others, by id.
_RECALLED: dict[str, Any] = {
    "position": "half_id",
    "descending": True,
    "after": "half_id < %(id)s::uuid",
    "where": f"c.recalled_at IS NOT NULL AND {_DUE['where']}",
}


def list_scheduled(schema: str, criteria: ScheduledFilter, after: tuple[Any, ...] | None, limit: int) -> Statement:
    """Find scheduled messages, the next due first, ties by the id; or recalled ones, the newest id first.

    ``after`` is the time and the id after which to go on; of recalled ones, the id alone, and so is the end.
    Rows: the end, and the fields of `ScheduledRow`.
    """
    time, half_id = (_EPOCH, *(after or [LAST_ID])) if criteria.recalled else after or (_EPOCH, FIRST_ID)
    window = RECALLED_WINDOW if criteria.recalled else HALF_WINDOW
    return _window(
        schema,
        {"topic": criteria.topic, "time": time, "id": half_id, "limit": limit, "window": window},
        table="scheduled_message",
        row="c.half_id, h.topic, h.key, c.deliver_at, c.recalled_at, c.recalled_by, c.held_topic IS NOT NULL",
        join=_OF_HALF.replace("{kind}", "INNER"),
        **(_RECALLED if criteria.recalled else _DUE),
    )


_LAST_AUDIT = 2**63 - 1
_AUDIT_ROW = "id, acted_at, actor, action, target, reason, result::text, origin::text"
_AUDIT_FITS = {
    "actor": "c.actor = %(actor)s",
    "action": "c.action = %(action)s",
    "since": "c.acted_at >= %(since)s",
    "until": "c.acted_at < %(until)s",
    # An act of a bulk job has that job in its origin.
    "summed": "(NOT %(summed)s OR (c.origin -> 'bulk_job') IS NULL)",
}

# All of a target at once: in the order of ids, the planner might read the primary key to its end.
_OF_TARGETS = f"""
WITH found AS MATERIALIZED (
    SELECT * FROM {{s}}.audit WHERE target = ANY (%(targets)s) LIMIT {OF_TARGET}
)
SELECT NULL::bigint, {_AUDIT_ROW} FROM found c WHERE id < %(below)s AND {{where}} ORDER BY id DESC LIMIT %(limit)s
"""

#: The groups that have a row in the inbox, be it that of a quarantine. Rows: ``(group,)``.
KNOWN_GROUPS = f"""
WITH RECURSIVE {GROUPS} SELECT consumer_group FROM place ORDER BY 1
"""


def list_audit(
    schema: str, criteria: AuditFilter, targets: Sequence[str] | None, below: int | None, limit: int
) -> Statement:
    """Find acts, the newest id first, below an id; with ``targets`` only those on one of them.

    Rows: the end, and the fields of `AuditRow`, the last two as JSON texts.
    """
    condition, values = fitting(criteria, _AUDIT_FITS)
    values |= {"below": _LAST_AUDIT if below is None else below, "limit": limit, "window": AUDIT_WINDOW}
    if targets is not None:
        return statement(schema, _OF_TARGETS, values | {"targets": list(targets)}, where=condition)
    return _window(
        schema,
        values,
        position="id",
        descending=True,
        table="audit",
        row=_AUDIT_ROW,
        join="",
        after="id < %(below)s",
        where=condition,
    )
