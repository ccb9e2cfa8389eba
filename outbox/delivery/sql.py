"""Statements of deliveries: what the producer knows, and what the consumers' inboxes say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from outbox.consumer.sql import MATCHES
from outbox.database.execute import Statement, Template
from outbox.database.sql import ALONE, IS_CONFIRMED, SKIPPED, TOOK_EFFECT

# --- in the producer's database --------------------------------------------------------------------------------------

#: Read the newest cursor of a group. Rows: ``(number, starts, positions)`` or none.
cursor: Template = Template("""
SELECT number, starts, positions FROM {s}.delivery_cursor
 WHERE topic = %(topic)s AND consumer_group = %(group)s
 ORDER BY number DESC LIMIT 1
""")

# The number is the one after that which was read: of two workers at the same group, one finds it taken.
#: Append a cursor. Rows: one, or none if another worker has come further meanwhile.
move_cursor: Template = Template("""
INSERT INTO {s}.delivery_cursor (topic, consumer_group, number, starts, positions)
VALUES (%(topic)s, %(group)s, %(number)s, %(starts)s::bigint[], %(positions)s::bigint[])
ON CONFLICT DO NOTHING
RETURNING number
""")

#: Read the next messages of each queue between two positions. Rows: ``(queue, position, id, its grace is over, it was
#: sent again)``.
messages_between: Template = Template("""
SELECT r.queue, m.position, m.half_id,
       m.visible_at < clock_timestamp() - make_interval(secs => %(grace)s), m.send_number > 1
  FROM unnest(%(queues)s::int[], %(after)s::bigint[], %(until)s::bigint[]) r (queue, after, until)
 CROSS JOIN LATERAL (SELECT position, half_id, visible_at, send_number FROM {s}.message m
                      WHERE m.topic = %(topic)s AND m.queue = r.queue
                        AND m.position > r.after AND m.position <= r.until
                      ORDER BY m.position LIMIT %(limit)s) m
 ORDER BY 1, 2
""")

#: Read the next messages after an id whose newest delivery isn't settled. Rows: ``(id,)``.
unsettled: Template = Template("""
SELECT half_id FROM {s}.delivery d
 WHERE topic = %(topic)s AND consumer_group = %(group)s AND NOT settled AND half_id > %(after)s
   AND NOT EXISTS (SELECT FROM {s}.delivery n
                    WHERE n.half_id = d.half_id AND n.consumer_group = d.consumer_group AND n.number > d.number)
 ORDER BY half_id LIMIT %(limit)s
""")

#: Read which of these messages are known as consumed by a cursor alone, if they have no delivery. Rows: ``(id,)``.
known_by_cursor: Template = Template(f"""
SELECT w.id
  FROM unnest(%(ids)s::uuid[]) w (id)
 CROSS JOIN (SELECT %(starts)s::bigint[] AS starts, %(positions)s::bigint[] AS positions) g
 CROSS JOIN LATERAL (SELECT FROM {{s}}.message m WHERE m.half_id = w.id AND {IS_CONFIRMED} LIMIT 1) m
""")

# One look by the primary key for each id, whatever the statistics say.
#: Read the newest deliveries of these messages, if there are any. Rows: ``(id, number, status, settled, reason, all
#: statuses, resends)``.
known: Template = Template("""
SELECT w.id, d.*
  FROM unnest(%(ids)s::uuid[]) w (id)
 CROSS JOIN LATERAL (
       SELECT max(number), (array_agg(status ORDER BY number DESC))[1], (array_agg(settled ORDER BY number DESC))[1],
              (array_agg(reason ORDER BY number DESC))[1],
              array_agg(DISTINCT status),
              count(*) FILTER (WHERE status = 'unconsumed' AND reason IS NULL)
         FROM {s}.delivery WHERE half_id = w.id AND consumer_group = %(group)s
       HAVING count(*) > 0 OFFSET 0) d
""")

#: Read the newest send of each of these. ``keys`` are LIKE patterns.
#: Rows: ``(id, queue, position, its grace is over, the group takes it, it was compensated)``.
newest_sends: Template = Template(f"""
SELECT w.id, m.queue, m.position, m.visible_at < clock_timestamp() - make_interval(secs => %(grace)s), h.matches,
       EXISTS (SELECT FROM {{s}}.compensation c WHERE c.half_id = w.id)
  FROM unnest(%(ids)s::uuid[]) w (id)
 CROSS JOIN LATERAL (SELECT queue, position, visible_at FROM {{s}}.message
                      WHERE half_id = w.id ORDER BY send_number DESC LIMIT 1) m
 CROSS JOIN LATERAL (SELECT {MATCHES} AS matches FROM {{s}}.half_message h WHERE h.id = w.id OFFSET 0) h
""")

# Whatever became of an earlier order, an operator knows of the message.
#: Read the messages of a topic that are parked since ``seconds`` and have no order to compensate. Rows: ``(id,)``.
parked: Template = Template("""
SELECT DISTINCT half_id FROM {s}.delivery d
 WHERE topic = %(topic)s AND NOT settled AND status = 'parked'
   AND recorded_at <= clock_timestamp() - make_interval(secs => %(seconds)s)
   AND NOT EXISTS (SELECT FROM {s}.delivery n
                    WHERE n.half_id = d.half_id AND n.consumer_group = d.consumer_group AND n.number > d.number)
   AND NOT EXISTS (SELECT FROM {s}.compensation c WHERE c.half_id = d.half_id)
   AND NOT EXISTS (SELECT FROM {s}.bulk_item i WHERE i.message_id = d.half_id AND i.action = 'compensate')
 ORDER BY half_id LIMIT %(limit)s
""")

#: Count the compensations that an actor has ordered within the last hour. Rows: ``(messages,)``.
ordered_lately: Template = Template("""
SELECT coalesce(sum(total), 0)::int FROM {s}.bulk_job
 WHERE action = 'compensate' AND requested_by = %(actor)s AND created_at > clock_timestamp() - interval '1 hour'
""")


class NewDelivery(NamedTuple):
    """A row to be appended."""

    half_id: UUID
    number: int
    status: str
    settled: bool
    reason: str | None


# Where another worker was faster, the number is taken: what this one found out is of no use any more. In the order of
# ids, as all locks of several rows. Each message is looked up by itself: of an EXISTS, the planner would make a join
# that reads the whole index.
_APPEND = Template("""
INSERT INTO {s}.delivery (half_id, consumer_group, number, topic, status, settled, reason)
SELECT half_id, %(group)s, number, %(topic)s, status, settled, reason
  FROM unnest(%(half_id)s::uuid[], %(number)s::int[], %(status)s::text[], %(settled)s::bool[], %(reason)s::text[])
       r (half_id, number, status, settled, reason)
 CROSS JOIN LATERAL (SELECT FROM {s}.message m WHERE m.half_id = r.half_id LIMIT 1) m
 ORDER BY half_id
ON CONFLICT DO NOTHING
RETURNING half_id
""")


def append(schema: str, topic: str, group: str, rows: Sequence[NewDelivery]) -> Statement:
    """Append deliveries of messages that weren't pruned. Rows: ``(id,)`` of each that no other worker has appended."""
    columns = {name: [getattr(row, name) for row in rows] for name in NewDelivery._fields}
    return _APPEND(schema, topic=topic, group=group, **columns)


# --- in a consumer's database ----------------------------------------------------------------------------------------

#: Read where a group began in each queue of a topic, how far it has read, and which ranges it has skipped: after a
#: position, up to another one. Rows: ``(queue, start, position, after, up to)``; none while the group has read nothing.
progress: Template = Template(f"""
WITH {SKIPPED}
SELECT q, coalesce((SELECT position FROM {{s}}.consumer_start b
                     WHERE b.consumer_group = %(group)s AND b.topic = %(topic)s AND b.queue = q), 0),
       coalesce((SELECT max(position) FROM {{s}}.consumer_offset o
                  WHERE o.consumer_group = %(group)s AND o.topic = %(topic)s AND o.queue = q), 0),
       ARRAY(SELECT former FROM skipped WHERE queue = q AND former < position ORDER BY former, position),
       ARRAY(SELECT position FROM skipped WHERE queue = q AND former < position ORDER BY former, position)
  FROM generate_series(0, (SELECT max(queue) FROM {{s}}.consumer_offset
                            WHERE consumer_group = %(group)s AND topic = %(topic)s)) q
""")

# What waits for an earlier message of its key, or is with a client, is to producers what will be tried again.
#: Read what the inbox of a group says of these messages. Rows: ``(id, status, kind of error)`` of those that it has.
statuses: Template = Template(f"""
SELECT c.message_id,
       CASE WHEN {TOOK_EFFECT} THEN 'consumed' WHEN c.status IN {ALONE} THEN 'failed' ELSE c.status END,
       CASE c.status WHEN 'waiting' THEN 'waits for an earlier message of its key' WHEN 'taken' THEN 'taken by a client'
                     ELSE c.error_kind END
  FROM unnest((SELECT %(ids)s::uuid[])) AS m (id) CROSS JOIN LATERAL (
    SELECT consumer_group, message_id, status, error_kind FROM {{s}}.consumer_message
     WHERE consumer_group = %(group)s AND message_id = m.id OFFSET 0) c
""")
