"""Build the statements over the producer's tables: one message with all about it, its conversation, and the lists."""

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
from outbox.database.sql import IS_CONFIRMED, OFFSET_GROUPS, message_status
from outbox.message.content import CAUSE_HEADER, CONVERSATION_HEADER, CORRELATION_HEADER, ENCODING_HEADER, SENDER_HEADER
from outbox.operator.databases import Query
from outbox.operator.look.inbox_sql import FIRST_ID, GROUPS, LAST_ID, end_id, first_id
from outbox.operator.look.paging import count_of, first_line, fitting
from outbox.operator.model import AuditFilter, HalfFilter, MessageFate, MessageFilter, ScheduledFilter
from outbox.text import sql_list

#: The status of an undecided half by its check ``c``: a `outbox.operator.model.HalfStatus`.
HALF_STATUS = """CASE WHEN c.parked_at IS NOT NULL THEN 'parked'
            WHEN c.next_check_at <= statement_timestamp() THEN 'orphan'
            WHEN c.checked_at IS NULL THEN 'immune'
            ELSE 'waiting' END"""

# Written when the question is put, and kept until it is answered. Once the lease has run out, the worker that asked is
# dead.
IS_BEING_ASKED = "(c.last_error IS NOT DISTINCT FROM %(unanswered)s AND c.next_check_at > statement_timestamp())"

#: The facts about the last question, by the check ``c``; ``{error}`` is how much of its error is wanted.
LAST_CHECK = f"""{IS_BEING_ASKED}, CASE WHEN NOT {IS_BEING_ASKED} THEN c.last_answer END,
       CASE WHEN NOT {IS_BEING_ASKED} THEN {{error}} END, c.checked_at, c.next_check_at"""

# Python writes the sender beside the headers, of which most messages have none.
_OF_SENDER = f"jsonb_strip_nulls(jsonb_build_object('{SENDER_HEADER}', h.sender))"
_HEADERS = f"nullif(coalesce(h.headers, '{{}}') || {_OF_SENDER}, '{{}}')"

# A group is known by its cursor: where it began, and how far was asked. Read once, not for each message.
_CURSORS = """jsonb_to_recordset((SELECT jsonb_agg(k) FROM (
                    SELECT DISTINCT ON (topic, consumer_group) * FROM {s}.delivery_cursor
                     ORDER BY topic, consumer_group, number DESC) k))
             g (topic text, consumer_group text, starts int8[], positions int8[])"""

#: The rows of a message in the producer's tables. A check without an answer counts as being asked until ``timeout``
#: seconds have passed, or its lease has run out: a decision deletes the lease, and the worker that was asking at that
#: moment may still answer.
PRODUCER_SIDE = {
    "half": Query(f"""
-- id producer_group topic key tag headers:json content_type body_bytes raw deliver_at born_at status
SELECT h.id, h.producer_group, h.topic, h.key, h.tag, ({_HEADERS})::text, h.content_type, octet_length(h.body),
       substring(h.body FROM 1 FOR %(most)s), h.deliver_at, h.born_at, {message_status()}
  FROM {{s}}.half_message h
  LEFT JOIN {{s}}.op_message o ON o.half_id = h.id
  LEFT JOIN {{s}}.scheduled_message d ON d.half_id = h.id
 WHERE h.id = %(id)s
"""),
    "check": Query(f"""
-- status fenced check_times being_asked last_answer last_error checked_at next_check_at next_check_in parked_at reason
SELECT {HALF_STATUS}, c.fenced, c.check_times, {LAST_CHECK.replace("{error}", "c.last_error")},
       extract(epoch FROM c.next_check_at - statement_timestamp())::float8, c.parked_at, c.reason
  FROM {{s}}.half_check c WHERE c.half_id = %(id)s
"""),
    "history": Query("""
-- asked_at asked worker answer seconds error state
SELECT a.asked_at, a.asked, a.worker, a.answer, a.seconds, a.error,
       CASE WHEN a.answer IS NOT NULL THEN 'answered'
            WHEN a.asked_at > statement_timestamp() - make_interval(secs => %(timeout)s)
                 OR a.back = 1 AND c.next_check_at > statement_timestamp() THEN 'being_asked'
            ELSE 'no_answer' END
  FROM (SELECT *, row_number() OVER (ORDER BY id DESC) AS back FROM {s}.check_history
         WHERE half_id = %(id)s ORDER BY id DESC LIMIT 1000) a
  LEFT JOIN {s}.half_check c ON c.half_id = a.half_id
 ORDER BY a.id
"""),
    "op": Query("""
-- resolution decided_by decided_at sequence xid
SELECT resolution, decided_by, decided_at, sequence, xid::text FROM {s}.op_message WHERE half_id = %(id)s
"""),
    "raised": Query("""
-- error_kind error raised_at
SELECT error_kind, error, raised_at FROM {s}.half_error WHERE half_id = %(id)s
"""),
    "deliveries": Query(f"""
-- group status settled reason recorded_at
SELECT consumer_group, status, settled, reason, recorded_at FROM {{s}}.delivery WHERE half_id = %(id)s
 UNION ALL
SELECT DISTINCT g.consumer_group, 'consumed', true, NULL, NULL::timestamptz
  FROM {{s}}.message m JOIN {_CURSORS} ON g.topic = m.topic AND {IS_CONFIRMED}
 WHERE m.half_id = %(id)s AND NOT EXISTS (
       SELECT FROM {{s}}.delivery d WHERE d.half_id = m.half_id AND d.consumer_group = g.consumer_group)
 ORDER BY recorded_at, consumer_group LIMIT 1000
"""),
    "sends": Query("""
-- send_number queue position visible_at
SELECT send_number, queue, position, visible_at FROM {s}.message WHERE half_id = %(id)s ORDER BY send_number
"""),
    "scheduled": Query("""
-- deliver_at recalled_at recalled_by held_topic
SELECT deliver_at, recalled_at, recalled_by, held_topic FROM {s}.scheduled_message WHERE half_id = %(id)s
"""),
    "compensation": Query("""
-- function requested_by reason result:json compensated_at
SELECT function, requested_by, reason, result::text, compensated_at FROM {s}.compensation WHERE half_id = %(id)s
"""),
}

#: A message's body. Rows: ``(content_type, bytes, encoding)`` or none.
BODY = f"SELECT content_type, body, headers ->> '{ENCODING_HEADER}' FROM {{s}}.half_message WHERE id = %(id)s"

#: Which groups of a topic have come to a position in a queue, 1,000 at most. Rows: ``(group, left_out or unconsumed)``.
REACHED = f"""{OFFSET_GROUPS}, known AS (
    SELECT consumer_group FROM one WHERE EXISTS (
        SELECT FROM {{s}}.consumer_offset o WHERE o.consumer_group = one.consumer_group AND o.topic = %(topic)s))
SELECT consumer_group,
       CASE WHEN (SELECT max(position) FROM {{s}}.consumer_offset o
                   WHERE o.consumer_group = k.consumer_group AND o.topic = %(topic)s AND o.queue = %(queue)s)
                 >= %(position)s THEN 'left_out' ELSE 'unconsumed' END
  FROM known k
 ORDER BY 1 LIMIT 1000
"""

#: The failed attempts of groups at a message, the oldest first, 1,000 at most. Rows: the fields of `FailedAttempt`.
ATTEMPTS: Template = Template("""
SELECT * FROM (SELECT consumer_group, failed_at, attempt, status, worker, seconds, error_kind, error
                 FROM {s}.attempt_history WHERE message_id = %s
                ORDER BY failed_at DESC LIMIT 1000) a
 ORDER BY failed_at, consumer_group
""")

#: What these groups' inboxes said of a message before they read it again.
EARLIER = Query(f"""
-- group passage status attempts error received_at changed_at
SELECT consumer_group, passage, status, attempts, {first_line("last_error")}, received_at, changed_at
  FROM {{s}}.reread_message WHERE consumer_group = ANY (%(groups)s::text[]) AND message_id = %(id)s
 ORDER BY consumer_group, passage
""")

#: What reconciliations found about a message, the newest first, 100 at most.
FINDINGS = Query("""
-- run_id topic group kind detail:json action acted_at result:json started_at finished_at
SELECT f.run_id, r.topic, r.consumer_group, f.kind, f.detail::text, f.action, f.acted_at,
       to_jsonb(f.result)::text, r.started_at, r.finished_at
  FROM (SELECT * FROM {s}.reconciliation_finding WHERE message_id = %(id)s LIMIT 1000) f
  LEFT JOIN LATERAL (SELECT * FROM {s}.reconciliation_run WHERE id = f.run_id LIMIT 1) r ON true
 ORDER BY f.id DESC LIMIT 100
""")

#: Which conversation a message belongs to. Rows: ``(the header or None,)``, none where its half isn't here.
CONVERSATION_OF = f"SELECT headers ->> '{CONVERSATION_HEADER}' FROM {{s}}.half_message WHERE id = %(id)s"

# Each branch by an index, in each partition; the header's condition is that of the partial one.
#: The messages of a conversation, in the order of their ids.
CONVERSATION = Query(f"""
-- id cause correlation topic key tag producer_group born_at deliver_at status compensated_at compensated_by
SELECT h.id, h.headers ->> '{CAUSE_HEADER}', h.headers ->> '{CORRELATION_HEADER}', h.topic, h.key, h.tag,
       h.producer_group, h.born_at, h.deliver_at, {message_status()}, c.compensated_at, c.function
  FROM (SELECT * FROM {{s}}.half_message WHERE id = %(id)s
         UNION ALL
        (SELECT * FROM {{s}}.half_message m
          WHERE m.headers ? '{CONVERSATION_HEADER}' AND "left"(m.headers ->> '{CONVERSATION_HEADER}', 36) = %(id)s::text
            AND m.id <> %(id)s
          ORDER BY "left"(m.headers ->> '{CONVERSATION_HEADER}', 36), m.id LIMIT %(limit)s)) h
  LEFT JOIN LATERAL (SELECT * FROM {{s}}.op_message WHERE half_id = h.id OFFSET 0) o ON true
  LEFT JOIN LATERAL (SELECT * FROM {{s}}.scheduled_message WHERE half_id = h.id OFFSET 0) d ON true
  LEFT JOIN LATERAL (SELECT * FROM {{s}}.compensation WHERE half_id = h.id OFFSET 0) c ON true
 ORDER BY h.id LIMIT %(limit)s
""")

#: The inbox rows of messages, by group.
RECEIPTS = Query(f"""
-- message_id group status attempts error received_at changed_at discarded_at
WITH RECURSIVE {GROUPS}
SELECT m.message_id, m.consumer_group, m.status, m.attempts, {first_line("m.last_error")},
       m.received_at, m.changed_at, m.discarded_at
  FROM place p CROSS JOIN unnest(%(ids)s::uuid[]) wanted (id)
 CROSS JOIN LATERAL (SELECT * FROM {{s}}.consumer_message
                      WHERE consumer_group = p.consumer_group AND message_id = wanted.id OFFSET 0) m
 ORDER BY m.changed_at, m.consumer_group
""")


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
_BY_KEY = """
(SELECT * FROM (SELECT * FROM {s}.half_message WHERE key = %(key)s AND coalesce(
                {topic} AND id < %(below)s::uuid AND id >= %(first)s::uuid, false) OFFSET 0) k ORDER BY id DESC) h"""

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
    "header": f"({_HEADERS}) @> %(header)s::jsonb",
    "since": "h.id >= %(since_id)s::uuid AND h.born_at >= %(since)s",
    "until": "h.id < %(until_id)s::uuid AND h.born_at < %(until)s",
    "body": _JSON_BODY,
}
# As `_BY_KEY`: a topic may have millions of messages besides those of the key.
_FITS_WITH_KEY = _FITS | {"topic": "coalesce(h.topic = %(topic)s, false)"}

_IS_STATUS = f"({_STATUS}) = ANY (%(status)s)"
_IS_COMPENSATED = "EXISTS (SELECT FROM {s}.compensation x WHERE x.half_id = h.id)"

# No group has a message that isn't dispatched yet.
_TO_COME = sql_list(each for each in MessageStatus if each.to_come)
_IS_FATE = f"""EXISTS (SELECT FROM (
         SELECT array_agg(coalesce(e.status, CASE WHEN s.confirmed THEN 'consumed' ELSE 'unconsumed' END)) AS fates
           FROM {_CURSORS}
           LEFT JOIN LATERAL (SELECT status FROM {{s}}.delivery d WHERE d.consumer_group = g.consumer_group
                               AND d.half_id = h.id ORDER BY number DESC LIMIT 1) e ON true
          CROSS JOIN LATERAL (SELECT bool_or({IS_CONFIRMED}) AS confirmed FROM {{s}}.message m
                               WHERE m.half_id = h.id AND m.position > coalesce(g.starts[m.queue + 1], 0)) s
          WHERE g.topic = h.topic
            AND (coalesce(e.status, s.confirmed::text) IS NOT NULL OR ({_STATUS}) IN {_TO_COME})) f
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


def count_of_key(schema: str, key: str, most: int) -> Statement:
    """Count messages with the key by an index on it, ``most`` at most. Rows: ``(messages,)``."""
    return count_of(schema, "half_message", "key = %(key)s", most, key=key)


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
