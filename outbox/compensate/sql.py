"""Statements of compensations in the producer's database: the orders, the workers at them, the outcomes.

An item is pending until all is done about it. ``outcome`` says how that goes. From the moment in which it
begins with `REFUSED`, no worker compensates for this item any more, and its quarantines may be released.

Statements that quarantine messages off in the inboxes of a consumer's database, and release quarantines again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from outbox.database.execute import Statement, Template, in_schema
from outbox.database.sql import GROUP_QUEUES, OPEN, TIMED, TOOK_EFFECT

#: How the outcome of an item begins whose message will not be compensated.
REFUSED = "refused: "

#: How it begins while the item waits for something that isn't its own failure: that counts as no attempt.
WAITS = "waits: "

_IS_REFUSED = f"coalesce(starts_with(i.outcome, '{REFUSED}'), false)"


class Key(NamedTuple):
    """One item of a bulk job."""

    bulk_job_id: UUID
    number: int


# --- orders ----------------------------------------------------------------------------------------------

#: Read what tells whether these can be rolled back.
#: Rows: ``(id, topic, resolution, decided by, compensated_at, requested by, pending bulk job)``.
states: Template = Template("""
SELECT w.id, h.topic, o.resolution, o.decided_by, c.compensated_at, c.requested_by, i.bulk_job_id
  FROM unnest(%(ids)s::uuid[]) w (id)
  LEFT JOIN {s}.half_message h ON h.id = w.id
  LEFT JOIN {s}.op_message o ON o.half_id = w.id
  LEFT JOIN {s}.compensation c ON c.half_id = w.id
  LEFT JOIN {s}.bulk_item i ON i.message_id = w.id AND i.action = 'compensate' AND i.state = 'pending'
""")

# --- leases ----------------------------------------------------------------------------------------------

# No worker is at an item that says why it waits; a lease takes that away.
_IS_DUE = f"""(i.next_attempt_at <= clock_timestamp()
                       OR (o.cancelled_at IS NOT NULL AND i.outcome IS NOT NULL AND NOT {_IS_REFUSED}))"""

# In turn over the bulk jobs, so that one of many thousands doesn't hold up the others.
#: Find items of these topics that are due. Rows: ``(bulk job, number)``.
due: Template = Template(f"""
SELECT i.bulk_job_id, i.number
  FROM {{s}}.bulk_job o
  CROSS JOIN LATERAL (
       SELECT bulk_job_id, number, row_number() OVER (ORDER BY number) AS turn
         FROM (SELECT bulk_job_id, number FROM {{s}}.bulk_item i
                WHERE bulk_job_id = o.id AND state = 'pending' AND action = 'compensate'
                  AND topic = ANY (%(topics)s::text[]) AND {_IS_DUE}
                  AND (o.rate IS NULL OR number <= 1 + o.rate * extract(epoch FROM
                       coalesce(clock_timestamp() - o.started_at, '0')))
                ORDER BY number LIMIT %(limit)s) d) i
 WHERE o.finished_at IS NULL AND o.action = 'compensate'
 ORDER BY i.turn, o.created_at
 LIMIT %(limit)s
""")

#: Keep an item for ``lease`` seconds, unless another worker has it. Rows: ``(message, topic, requested by, reason,
#: origin, bulk jobs that were to roll it back before, attempts with this one, outcome before, refused, options,
#: cancelled by, its bulk job has started)`` or none.
lease: Template = Template(f"""
WITH item AS MATERIALIZED (
    SELECT i.bulk_job_id, i.number, i.outcome, {_IS_REFUSED} AS refused
      FROM {{s}}.bulk_item i JOIN {{s}}.bulk_job o ON o.id = i.bulk_job_id
     WHERE i.bulk_job_id = %(bulk_job_id)s AND i.number = %(number)s AND i.state = 'pending' AND {_IS_DUE}
       FOR UPDATE OF i SKIP LOCKED
), leased AS (
    UPDATE {{s}}.bulk_item i
       SET attempts = i.attempts + CASE WHEN starts_with(item.outcome, '{WAITS}') THEN 0 ELSE 1 END,
           outcome = CASE WHEN item.refused THEN item.outcome END, changed_at = clock_timestamp(),
           next_attempt_at = clock_timestamp() + make_interval(secs => %(lease)s)
      FROM item
     WHERE i.bulk_job_id = item.bulk_job_id AND i.number = item.number
    RETURNING i.bulk_job_id, i.number, i.message_id, i.topic, i.attempts, item.outcome, item.refused
)
SELECT i.message_id, i.topic, o.requested_by, o.reason, o.origin::text,
       ARRAY(SELECT f.bulk_job_id FROM {{s}}.bulk_item f
              WHERE f.message_id = i.message_id AND f.action = 'compensate' AND f.state <> 'pending'),
       i.attempts, i.outcome, i.refused, o.options::text, o.cancelled_by, o.started_at IS NOT NULL
  FROM leased i JOIN {{s}}.bulk_job o ON o.id = i.bulk_job_id
""")

#: Read a half message. Rows: ``(key, tag, headers, content type, body, born_at, visible_at)`` or none.
message: Template = Template("""
SELECT h.key, h.tag, h.headers::text, h.content_type, h.body, h.born_at, coalesce(m.visible_at, h.deliver_at, h.born_at)
  FROM {s}.half_message h
  LEFT JOIN LATERAL (SELECT visible_at FROM {s}.message m WHERE m.half_id = h.id
                      ORDER BY send_number LIMIT 1) m ON true
 WHERE h.id = %s
""")

#: Read where a message was placed. Rows: ``(queue, position)``, one for each send.
sends: Template = Template("SELECT queue, position FROM {s}.message WHERE half_id = %s ORDER BY send_number")

# --- what came of it -------------------------------------------------------------------------------------

_ITEM = "bulk_job_id = %(bulk_job_id)s AND number = %(number)s AND state = 'pending'"

# ``attempts`` tells that no other worker has leased it since.
#: Leave a leased item for later.
wait: Template = Template(
    f"""
UPDATE {{s}}.bulk_item i
   SET outcome = CASE WHEN {_IS_REFUSED} THEN split_part(outcome, chr(10), 1) || chr(10) || %(outcome)s
                      ELSE %(outcome)s END,
       changed_at = clock_timestamp(),
       next_attempt_at = clock_timestamp() + make_interval(secs => %(seconds)s)
 WHERE {_ITEM} AND attempts = %(attempts)s
""",
    lossy=("outcome",),
)

#: Decide that the item's message will not be compensated. Rows: ``(outcome,)``; none if it was, or all is done.
refuse: Template = Template(
    f"""
UPDATE {{s}}.bulk_item i
   SET outcome = CASE WHEN {_IS_REFUSED} THEN outcome ELSE %(outcome)s END, changed_at = clock_timestamp()
 WHERE {_ITEM} AND NOT EXISTS (SELECT FROM {{s}}.compensation c WHERE c.half_id = i.message_id)
RETURNING outcome
""",
    lossy=("outcome",),
)

#: Give a pending item its last state; done it is only if it wasn't refused. Rows: one if that could be written.
close: Template = Template(
    f"""
UPDATE {{s}}.bulk_item i SET state = %(state)s, outcome = %(outcome)s, changed_at = clock_timestamp()
 WHERE {_ITEM} AND (%(state)s <> 'done' OR NOT {_IS_REFUSED})
RETURNING number
""",
    lossy=("outcome",),
)

#: Tell whether the item is still to be done. Rows: one if so.
stands: Template = Template(f"SELECT number FROM {{s}}.bulk_item i WHERE {_ITEM} AND NOT {_IS_REFUSED}")

#: Read how an item has ended. Rows: ``(state, its message was compensated)`` or none.
ended: Template = Template("""
SELECT i.state, EXISTS (SELECT FROM {s}.compensation c WHERE c.half_id = i.message_id)
  FROM {s}.bulk_item i WHERE i.bulk_job_id = %(bulk_job_id)s AND i.number = %(number)s
""")

# No act sends the message again, and prune leaves it alone, until the transaction ends.
#: Lock the decision on a half. Rows: ``(resolution,)`` or none.
lock_op: Template = Template("SELECT resolution FROM {s}.op_message WHERE half_id = %s FOR UPDATE")

#: Write that a message is compensated; waits for a worker that does the same. Rows: one if none was faster.
compensate: Template = Template("""
INSERT INTO {s}.compensation (half_id, function, requested_by, reason)
VALUES (%s, %s, %s, %s)
ON CONFLICT (half_id) DO NOTHING
RETURNING half_id
""")

#: Write what the compensation has returned, as JSON.
result: Template = Template("UPDATE {s}.compensation SET result = %s::jsonb WHERE half_id = %s")

# --- for a group that starts -----------------------------------------------------------------------------

# Of a message that was ordered to be rolled back more than once, the last order counts; and the one by which it was.
# An order that no worker has begun will find the group by itself.
#: Read which messages of a topic were rolled back, are about to be, or were to be and will not.
#: Rows: ``(id, bulk job, stands, actor, reason, origin, queues, positions, ended bulk jobs)``.
compensations: Template = Template(f"""
WITH item AS MATERIALIZED (
    SELECT DISTINCT ON (i.message_id) i.message_id, i.bulk_job_id, i.state, {_IS_REFUSED} AS refused,
           o.requested_by, o.reason, o.origin
      FROM {{s}}.bulk_job o JOIN {{s}}.bulk_item i ON i.bulk_job_id = o.id
     WHERE o.action = 'compensate' AND i.action = 'compensate' AND i.topic = %(topic)s
       AND i.attempts > 0
     ORDER BY i.message_id, (i.state = 'done') DESC, i.changed_at DESC
)
SELECT h.id, CASE WHEN c.half_id IS NULL OR i.state = 'done' THEN i.bulk_job_id END,
       c.half_id IS NOT NULL OR i.state = 'failed' OR (i.state = 'pending' AND NOT i.refused),
       coalesce(c.requested_by, i.requested_by), coalesce(c.reason, i.reason), i.origin::text,
       ARRAY(SELECT queue FROM {{s}}.message m WHERE m.half_id = h.id ORDER BY send_number),
       ARRAY(SELECT position FROM {{s}}.message m WHERE m.half_id = h.id ORDER BY send_number),
       ARRAY(SELECT f.bulk_job_id FROM {{s}}.bulk_item f
              WHERE f.message_id = h.id AND f.action = 'compensate' AND f.state <> 'pending')
  FROM item i
  FULL JOIN {{s}}.compensation c ON c.half_id = i.message_id
  JOIN {{s}}.half_message h ON h.id = coalesce(i.message_id, c.half_id) AND h.topic = %(topic)s
""")


#: Tell whether the database has a consumer's tables. Rows: ``(has,)``.
has_inbox: Template = Template("SELECT to_regclass('{s}.consumer_message') IS NOT NULL")

_KNOWN = f"""{GROUP_QUEUES}, known AS (
    SELECT DISTINCT consumer_group FROM place
     WHERE topic = %(topic)s AND (%(group)s::text IS NULL OR consumer_group = %(group)s)
)"""

_NEWEST_LEASE = """(SELECT * FROM {s}.consumer_lease c
                      WHERE c.consumer_group = k.consumer_group AND c.topic = %(topic)s AND c.queue = q.queue
                      ORDER BY term DESC, renewal DESC LIMIT 1)"""

# By queue, for those queues that are asked about; a group that hasn't come to one yet is at its beginning. Where a
# worker handles messages outside of transactions, it has come as far as its lease says, ended or not.
#: Read how far each group of a topic has come in some queues; ``group`` None: all.
#: Rows: ``(group, queue, position, start)``; one without a queue for each group if none is asked about.
reached: Template = Template(f"""{_KNOWN}
SELECT k.consumer_group, q.queue,
       greatest((SELECT max(position) FROM {{s}}.consumer_offset o
                  WHERE o.consumer_group = k.consumer_group AND o.topic = %(topic)s AND o.queue = q.queue),
                (SELECT started FROM {_NEWEST_LEASE} n), 0),
       coalesce((SELECT max(position) FROM {{s}}.consumer_start b
                  WHERE b.consumer_group = k.consumer_group AND b.topic = %(topic)s AND b.queue = q.queue), 0)
  FROM known k LEFT JOIN unnest(%(queues)s::int[]) q (queue) ON true
 ORDER BY 1, 2
""")

# A handler begun outside of transactions shows in no row before it has ended.
#: Read which groups may be handling a message, sent at these positions, outside of transactions, or have just done so.
#: Rows: ``(group,)``.
in_flight: Template = Template(f"""{_KNOWN}
SELECT k.consumer_group
  FROM known k CROSS JOIN unnest(%(queues)s::int[], %(positions)s::bigint[]) q (queue, position)
  CROSS JOIN LATERAL {_NEWEST_LEASE} n
 WHERE (n.started >= q.position AND q.position > coalesce(
           (SELECT max(position) FROM {{s}}.consumer_offset o
             WHERE o.consumer_group = k.consumer_group AND o.topic = %(topic)s AND o.queue = q.queue), 0))
    OR EXISTS (SELECT FROM {{s}}.consumer_message m
                WHERE m.consumer_group = k.consumer_group AND m.message_id = %(id)s AND m.status = 'consumed')
 GROUP BY 1 ORDER BY 1
""")

#: Read which groups may be retrying a failed message, whose rows are locked, outside of transactions, or have given it
#: to a client. Rows: ``(group,)``.
retried: Template = Template(f"""
SELECT q.consumer_group
  FROM {{s}}.consumer_message q JOIN unnest(%(groups)s::text[]) k (consumer_group) USING (consumer_group)
  LEFT JOIN LATERAL {_NEWEST_LEASE} n ON true
 WHERE q.message_id = %(id)s
   AND ((q.status = 'failed' AND q.starts > 0 AND n.worker IS NOT NULL)
        OR (q.status = 'taken' AND q.next_attempt_at > clock_timestamp()))
 ORDER BY 1
""")

# A worker that handles a failed message holds its row.
_INBOXES = f"""{_KNOWN}
SELECT c.consumer_group, c.status, c.quarantined_by, c.status = 'consumed' OR {TOOK_EFFECT}
  FROM known k JOIN {{s}}.consumer_message c ON c.consumer_group = k.consumer_group AND c.message_id = %(id)s
 ORDER BY 1
"""

_ROWS = "unnest(%(groups)s::text[], %(ids)s::uuid[], %(queues)s::int[], %(positions)s::bigint[], %(bulk_jobs)s::uuid[])"

# A consumer that has the message in its hands inserts the same row with its commit: one of the two comes first, and the
# other waits for it.
_INSERT = Template(f"""
INSERT INTO {{s}}.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts,
                                   quarantined_by, quarantined_from)
SELECT consumer_group, id, %(topic)s, queue, position, 'quarantined', 0, bulk_job_id,
       CASE WHEN bulk_job_id IS NOT NULL THEN 'unconsumed' END
  FROM {_ROWS} r (consumer_group, id, queue, position, bulk_job_id)
 ORDER BY consumer_group, id
ON CONFLICT (consumer_group, message_id) DO NOTHING
RETURNING consumer_group, message_id
""")

# A quarantine of no bulk job stays so; but a worker that found it before, and means to change it, must see the change.
#: Make inbox rows, which are locked and not consumed, quarantines of a bulk job.
take: Template = Template("""
UPDATE {s}.consumer_message c
   SET status = 'quarantined', next_attempt_at = NULL, starts = 0, taken_by = NULL, take_id = NULL,
       discarded_at = NULL, changed_at = clock_timestamp(),
       quarantined_by = CASE WHEN status <> 'quarantined' OR quarantined_by IS NOT NULL THEN %(bulk_job)s::uuid END,
       quarantined_from = CASE WHEN status = 'quarantined' THEN quarantined_from ELSE status END
 WHERE consumer_group = ANY (%(groups)s::text[]) AND message_id = %(id)s
""")

#: Read the quarantines of these bulk jobs. Rows: ``(group, what the inbox said before)``.
of_bulk_jobs: Template = Template("""
SELECT consumer_group, quarantined_from FROM {s}.consumer_message
 WHERE consumer_group = ANY (%(groups)s::text[]) AND message_id = %(id)s
   AND quarantined_by = ANY (%(bulk_jobs)s::uuid[])
 ORDER BY 1
""")

#: Read which of these messages a bulk job has quarantined in a group. Rows: ``(id,)``.
of_group: Template = Template("""
SELECT c.* FROM unnest(%(ids)s::uuid[]) m (id) CROSS JOIN LATERAL (
    SELECT message_id FROM {s}.consumer_message
     WHERE consumer_group = %(group)s AND message_id = m.id AND quarantined_by IS NOT NULL OFFSET 0) c
""")

#: Release quarantines over failed and taken messages, which are due now, and over waiting and parked ones.
#: Rows: ``(group, status)``.
give_back: Template = Template(f"""
UPDATE {{s}}.consumer_message
   SET status = CASE WHEN quarantined_from IN {TIMED} THEN 'failed' ELSE quarantined_from END,
       next_attempt_at = CASE WHEN quarantined_from IN {TIMED} THEN clock_timestamp() END,
       quarantined_by = NULL, quarantined_from = NULL, changed_at = clock_timestamp()
 WHERE consumer_group = ANY (%(groups)s::text[]) AND message_id = %(id)s
   AND quarantined_by = ANY (%(bulk_jobs)s::uuid[])
   AND quarantined_from IN {OPEN}
RETURNING consumer_group, status
""")

#: Release quarantines that stand where there was no inbox row, and leave none. Rows: ``(group, 'unconsumed')``.
drop: Template = Template("""
DELETE FROM {s}.consumer_message
 WHERE consumer_group = ANY (%(groups)s::text[]) AND message_id = %(id)s
   AND quarantined_by = ANY (%(bulk_jobs)s::uuid[])
   AND quarantined_from = 'unconsumed'
RETURNING consumer_group, 'unconsumed'
""")

#: Insert inbox rows that are due now, like failed ones, without an attempt so far. Rows: ``(group, status)``.
make_due: Template = Template("""
INSERT INTO {s}.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts, next_attempt_at)
SELECT g, %(id)s, %(topic)s, %(queue)s, %(position)s, 'failed', 0, clock_timestamp()
  FROM unnest(%(groups)s::text[]) g
 ORDER BY g
ON CONFLICT (consumer_group, message_id) DO NOTHING
RETURNING consumer_group, 'failed'
""")


class NewQuarantine(NamedTuple):
    """A quarantine where there is no inbox row; queue and position are 0 while there is no message."""

    group: str
    id: UUID
    queue: int
    position: int
    bulk_job: UUID | None


def inboxes(schema: str, topic: str, message_id: UUID, *, lock: bool = False) -> Statement:
    """Read what the inboxes of a topic's groups say of a message.

    Rows: ``(group, status, quarantined by, it took effect)``.

    With ``lock`` the rows stay so until the transaction ends.
    """
    sql = _INBOXES + (" FOR UPDATE OF c" if lock else "")
    return Statement(in_schema(sql, schema), {"topic": topic, "group": None, "id": message_id})


def insert(schema: str, topic: str, rows: Sequence[NewQuarantine]) -> Statement:
    """Insert quarantines where there is no inbox row. Rows: ``(group, id)`` of each that is new."""
    columns = {f"{name}s": [getattr(row, name) for row in rows] for name in NewQuarantine._fields}
    return _INSERT(schema, topic=topic, **columns)
