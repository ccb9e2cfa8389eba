"""Statements about leases: of a queue whose messages are handled outside of transactions, and of what comes of them.

All of them run in the consumer's database, in transactions that hold the queue's lock.
"""

from __future__ import annotations

from outbox.consumer.sql import FIRST_FAILED_AT, is_first_of_key
from outbox.database.execute import Template

#: How long (seconds) a lease holds, unless it is renewed.
LEASE_SECONDS = 30.0

#: Read how far a queue has come, and its newest lease. One row: ``(position, starts, id of the message there, passage,
#: term, renewal, is taken, is held, started)``, with NULL where there is none. ``is taken``: it wasn't given up.
progress: Template = Template("""
SELECT coalesce(o.position, 0), coalesce(o.starts, 0), o.message_id, coalesce(o.passage, 0),
       k.term, k.renewal, k.worker IS NOT NULL, k.until > clock_timestamp(), k.started
  FROM (SELECT %(group)s::text AS consumer_group, %(topic)s::text AS topic, %(queue)s::int AS queue) q
  LEFT JOIN LATERAL (SELECT position, starts, message_id, passage FROM {s}.consumer_offset o
                      WHERE o.consumer_group = q.consumer_group AND o.topic = q.topic AND o.queue = q.queue
                      ORDER BY position DESC, starts DESC LIMIT 1) o ON true
  LEFT JOIN LATERAL (SELECT term, renewal, worker, until, started FROM {s}.consumer_lease k
                      WHERE k.consumer_group = q.consumer_group AND k.topic = q.topic AND k.queue = q.queue
                      ORDER BY term DESC, renewal DESC LIMIT 1) k ON true
""")

#: Append a lease, that ends in so many seconds; without a worker, one that is given up.
append_lease: Template = Template("""
INSERT INTO {s}.consumer_lease (consumer_group, topic, queue, term, renewal, worker, started, until)
VALUES (%(group)s, %(topic)s, %(queue)s, %(term)s, %(renewal)s, %(worker)s, %(started)s,
        clock_timestamp() + make_interval(secs => %(seconds)s))
""")

#: End the newest lease of a queue: its worker finds a newer term, and writes nothing more.
end_lease: Template = Template("""
INSERT INTO {s}.consumer_lease (consumer_group, topic, queue, term, renewal, worker, started, until)
SELECT consumer_group, topic, queue, term + 1, 0, NULL, started, clock_timestamp()
  FROM {s}.consumer_lease WHERE consumer_group = %s AND topic = %s AND queue = %s
 ORDER BY term DESC, renewal DESC LIMIT 1
""")

# What took effect outside stays so, whatever was decided about the message meanwhile.
#: Write that messages were handled, over whatever the inbox says of them.
consumed: Template = Template("""
INSERT INTO {s}.consumer_message AS c
       (consumer_group, message_id, topic, queue, position, status, attempts, body_digest, passage)
SELECT %(group)s, id, %(topic)s, %(queue)s, position, 'consumed', attempt, digest, %(passage)s
  FROM unnest(%(ids)s::uuid[], %(positions)s::bigint[], %(attempts)s::int[], %(digests)s::bytea[])
       AS m (id, position, attempt, digest)
ON CONFLICT (consumer_group, message_id) DO UPDATE
   SET status = 'consumed', attempts = excluded.attempts, starts = 0, next_attempt_at = NULL,
       position = CASE WHEN c.passage < excluded.passage THEN excluded.position ELSE c.position END,
       passage = greatest(c.passage, excluded.passage),
       body_digest = coalesce(excluded.body_digest, c.body_digest), last_error = NULL, error_kind = NULL,
       order_key = NULL, turn = NULL, follows = false, taken_by = NULL, take_id = NULL,
       discarded_at = NULL, quarantined_by = NULL, quarantined_from = NULL, changed_at = clock_timestamp()
 WHERE c.status <> 'consumed' OR c.passage < excluded.passage
""")

#: Read which failed messages of a group are due, the first ones first; if ``ordered``, only of those behind their
#: queue's offset; and not those that run. Rows: ``(queue, id, position, attempts, starts, it was never attempted,
#: first failed at)``.
due: Template = Template(f"""
SELECT queue, message_id, position, attempts, starts, attempts = 0 AND last_error IS NULL,
       {FIRST_FAILED_AT}
  FROM {{s}}.consumer_message c
 WHERE consumer_group = %(group)s AND topic = %(topic)s AND status = 'failed' AND next_attempt_at <= clock_timestamp()
   AND (NOT %(ordered)s OR position <= (
        SELECT max(o.position) FROM {{s}}.consumer_offset o
         WHERE o.consumer_group = c.consumer_group AND o.topic = c.topic AND o.queue = c.queue))
   AND message_id <> ALL (%(running)s::uuid[]) AND {is_first_of_key("c")}
 ORDER BY next_attempt_at LIMIT %(limit)s
""")

# The time of the next attempt moves, so that no other worker finds the message due while it runs; after a crash it is
# due by itself. A row that another transaction holds is left alone. IS TRUE, and the ids twice: so the planner takes
# the key, and no index of all that failed.
#: Count a start of failed messages that are due. Rows: ``(id, starts)`` of each.
start_due: Template = Template("""
WITH free AS MATERIALIZED (
    SELECT message_id FROM {s}.consumer_message
     WHERE consumer_group = %(group)s AND message_id = ANY (%(ids)s::uuid[]) AND (status = 'failed') IS TRUE
       AND next_attempt_at <= clock_timestamp()
       FOR UPDATE SKIP LOCKED
)
UPDATE {s}.consumer_message m
   SET starts = starts + 1, next_attempt_at = clock_timestamp() + make_interval(secs => %(seconds)s)
  FROM free
 WHERE m.consumer_group = %(group)s AND m.message_id = ANY (%(ids)s::uuid[]) AND m.message_id = free.message_id
RETURNING m.message_id, m.starts
""")
