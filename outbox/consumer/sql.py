"""Statements of the consumer: read messages, write inbox rows, append offsets."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from uuid import UUID

from outbox.database.execute import Statement, Template
from outbox.database.sql import GroupQueue, try_lock

# --- in the producer's database, read only ---------------------------------------------------------------

#: Read the end of each queue. Rows: ``(queue, last, id of the last, is read on a standby)``; none while the topic
#: doesn't exist.
heads: Template = Template("""
SELECT q, coalesce(l.position, 0), l.half_id, pg_is_in_recovery()
  FROM generate_series(0, (SELECT queues FROM {s}.topic WHERE name = %(topic)s) - 1) q
  LEFT JOIN LATERAL (SELECT position, half_id FROM {s}.message m WHERE m.topic = %(topic)s AND m.queue = q
                      ORDER BY position DESC LIMIT 1) l ON true
""")

# Not for each pass: while an old snapshot is held, it steps over all that was pruned meanwhile.
#: Read the beginning of each queue. Rows: ``(queue, first position)``; none while the topic doesn't exist.
beginnings: Template = Template("""
SELECT q, coalesce((SELECT min(position) FROM {s}.message m WHERE m.topic = %(topic)s AND m.queue = q), 1)
  FROM generate_series(0, (SELECT queues FROM {s}.topic WHERE name = %(topic)s) - 1) q
""")

MATCHES = """(%(tags)s::text[] IS NULL OR h.tag = ANY (%(tags)s::text[]))
           AND (%(keys)s::text[] IS NULL OR h.key LIKE ANY (%(keys)s::text[]))"""

# The running sum of sizes bounds the memory of a read; the first message always comes. With OFFSET 0, each half is
# looked up by itself, in the one partition that can have it: the planner reckons with a look-up in each of them, and
# would read all of them rather.
#: Read the message at a position, without its body, and the next ones of the queue, ``bytes`` of bodies at most (but
#: one message at least). ``keys`` are LIKE patterns. Rows: ``(position, id, send number, visible_at, key, tag, headers,
#: content type, body, born_at, matches)``; those which don't match the filter are there to be stepped over.
messages_after: Template = Template(f"""
SELECT position, half_id, send_number, visible_at, key, tag, headers::text, content_type, body, born_at, matches
  FROM (SELECT *, sum(octet_length(body)) OVER (ORDER BY position) - octet_length(body) AS bytes_before
          FROM (SELECT m.position, m.half_id, m.send_number, m.visible_at, h.key, h.tag, h.headers, h.content_type,
                       CASE WHEN m.position > %(position)s THEN h.body ELSE '' END AS body,
                       h.born_at, {MATCHES} AS matches
                  FROM (SELECT * FROM {{s}}.message
                         WHERE topic = %(topic)s AND queue = %(queue)s AND position >= %(position)s
                         ORDER BY position LIMIT %(limit)s + (%(position)s > 0)::int) m
                 CROSS JOIN LATERAL (SELECT * FROM {{s}}.half_message h WHERE h.id = m.half_id OFFSET 0) h) b) r
 WHERE bytes_before < %(bytes)s
 ORDER BY position
""")

#: Read one message as it was sent first. Rows: as of `messages_after`, or none.
message_by_id: Template = Template(f"""
SELECT m.position, m.half_id, m.send_number, m.visible_at, h.key, h.tag, h.headers::text, h.content_type, h.body,
       h.born_at, {MATCHES}
  FROM {{s}}.message m JOIN {{s}}.half_message h ON h.id = m.half_id
 WHERE m.half_id = %(id)s
 ORDER BY m.send_number LIMIT 1
""")

#: Read which messages stand at a position or before it, the last first. Rows: ``(position, id)``.
messages_before: Template = Template("""
SELECT position, half_id FROM {s}.message
 WHERE topic = %(topic)s AND queue = %(queue)s AND position <= %(position)s
 ORDER BY position DESC LIMIT %(limit)s
""")

#: Read which of these are committed. Rows: ``(id,)``.
committed: Template = Template("""
SELECT half_id FROM {s}.op_message WHERE half_id = ANY (%(ids)s::uuid[]) AND resolution = 'commit'
""")

# --- in the consumer's database --------------------------------------------------------------------------

# A setting that is local to a transaction ends with it, whoever ends it. The cast of any other text is an error.
_MARK = "set_config('outbox.handling', 'on', true)"
#: What the error of a statement with `_MARKED` says.
ENDED = "the handler ended the transaction"
_MARKED = f"coalesce(nullif(current_setting('outbox.handling', true), ''), '{ENDED}')::boolean"

#: Mark the transaction in which a handler is to run.
MARK = Statement(f"SELECT {_MARK}")

#: Fail unless this is still the transaction that was marked.
MARKED = Statement(f"SELECT {_MARKED}")


def take_queue(queue: GroupQueue) -> Statement:
    """Try the lock of a queue without waiting, and mark the transaction. Rows: ``(taken, …)``."""
    return try_lock(queue.lock, _MARK)


#: Read the newest offset. Rows: ``(position, claims, id of the message there)`` or none.
offset: Template = Template("""
SELECT position, claims, message_id FROM {s}.consumer_offset
 WHERE consumer_group = %s AND topic = %s AND queue = %s
 ORDER BY position DESC, claims DESC LIMIT 1
""")

#: Read the offset of each queue. Rows: ``(queue, position, id of the message there)``.
offsets: Template = Template("""
SELECT q, coalesce(n.position, 0), n.message_id
  FROM unnest(%(queues)s::int[]) q
  LEFT JOIN LATERAL (SELECT position, message_id FROM {s}.consumer_offset o
                      WHERE o.consumer_group = %(group)s AND o.topic = %(topic)s AND o.queue = q
                      ORDER BY position DESC, claims DESC LIMIT 1) n ON true
""")

#: Tell whether a group has any offset of a topic. Rows: ``(known,)``.
group_is_known: Template = Template(
    "SELECT EXISTS (SELECT FROM {s}.consumer_offset WHERE consumer_group = %s AND topic = %s)"
)

#: Write down where a new group begins in a queue: up to ``position``, nothing was meant for it.
write_start: Template = Template("""
INSERT INTO {s}.consumer_start (consumer_group, topic, queue, position) VALUES (%s, %s, %s, %s)
ON CONFLICT DO NOTHING
""")

#: Append an offset: all up to ``position`` is handled; ``claims`` starts of what follows had no end.
append_offset: Template = Template("""
INSERT INTO {s}.consumer_offset (consumer_group, topic, queue, position, claims, message_id)
VALUES (%s, %s, %s, %s, %s, %s)
ON CONFLICT DO NOTHING
""")

# The conflict's update makes a prune wait that was about to delete the row without claims.
#: Forget the starts that were counted at the offset ``position``: one of them had an end.
drop_claims: Template = Template("""
WITH dropped AS (
    DELETE FROM {s}.consumer_offset
     WHERE consumer_group = %(group)s AND topic = %(topic)s AND queue = %(queue)s AND position = %(position)s
       AND claims > 0
)
INSERT INTO {s}.consumer_offset (consumer_group, topic, queue, position, claims, message_id)
VALUES (%(group)s, %(topic)s, %(queue)s, %(position)s, 0, %(id)s)
ON CONFLICT (consumer_group, topic, queue, position, claims) DO UPDATE SET written_at = clock_timestamp()
""")

#: Read which of these messages of a queue the group has had, at the same position: the last. Rows: ``(position, id)``
#: or none. The inbox doesn't know what the group's filter left out, an offset may.
agreed: Template = Template("""
SELECT l.* FROM unnest(%(positions)s::bigint[], %(ids)s::uuid[]) l (position, id)
 WHERE EXISTS (SELECT FROM {s}.consumer_message c
                WHERE c.consumer_group = %(group)s AND c.message_id = l.id AND c.topic = %(topic)s
                  AND c.queue = %(queue)s AND c.position = l.position)
    OR EXISTS (SELECT FROM {s}.consumer_offset o
                WHERE o.consumer_group = %(group)s AND o.topic = %(topic)s AND o.queue = %(queue)s
                  AND o.position = l.position AND o.message_id = l.id)
 ORDER BY l.position DESC LIMIT 1
""")

#: Read what the inbox has of a queue after a position and up to another one, as far as it is among the newest ``limit``
#: of the group. Rows: ``(id,)``.
had_between: Template = Template("""
SELECT message_id
  FROM (SELECT message_id, topic, queue, position FROM {s}.consumer_message
         WHERE consumer_group = %(group)s ORDER BY message_id DESC LIMIT %(limit)s) c
 WHERE topic = %(topic)s AND queue = %(queue)s AND position > %(agreed)s AND position <= %(position)s
 ORDER BY message_id
""")

# As in `drop_claims`, a prune waits that was about to delete the row.
#: Move an offset back, or to where the log begins now; and write down what was lost.
go_back: Template = Template("""
WITH dropped AS (
    DELETE FROM {s}.consumer_offset
     WHERE consumer_group = %(group)s AND topic = %(topic)s AND queue = %(queue)s
       AND (position > %(agreed)s OR (position = %(agreed)s AND claims > 0))
), started AS (
    UPDATE {s}.consumer_start SET position = %(agreed)s
     WHERE consumer_group = %(group)s AND topic = %(topic)s AND queue = %(queue)s AND position > %(agreed)s
), loss AS (
    INSERT INTO {s}.log_loss (consumer_group, topic, queue, position, agreed, message_ids)
    VALUES (%(group)s, %(topic)s, %(queue)s, %(position)s, %(agreed)s, %(lost)s::uuid[])
)
INSERT INTO {s}.consumer_offset (consumer_group, topic, queue, position, claims, message_id)
VALUES (%(group)s, %(topic)s, %(queue)s, %(agreed)s, 0, %(id)s)
ON CONFLICT (consumer_group, topic, queue, position, claims)
DO UPDATE SET written_at = clock_timestamp(), message_id = excluded.message_id
""")

# One probe of the primary key for each id, whatever the statistics say of a group that is younger than they are: for
# ``message_id = ANY (…)`` the planner would read the whole group each time. It doesn't see how many ids there are: by
# their number it would make a new plan each time, which takes longer than to run it.
#: Read which messages the inbox knows.
#: Rows: ``(id, status, attempts, seconds until the next attempt, queue, position, is discarded)``.
known: Template = Template("""
SELECT c.* FROM unnest((SELECT %b::uuid[])) AS m (id) CROSS JOIN LATERAL (
    SELECT message_id, status, attempts, greatest(extract(epoch FROM next_attempt_at - clock_timestamp()), 0)::float8,
           queue, position, discarded_at IS NOT NULL
      FROM {s}.consumer_message WHERE consumer_group = %s AND message_id = m.id
    OFFSET 0) c
""")

# No ON CONFLICT: a row that came in between (a quarantine, a resend in another queue) must undo the whole batch.
#: Insert the inbox rows of messages that were consumed at the first attempt, in the transaction that was marked.
consumed: Template = Template(f"""
INSERT INTO {{s}}.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts, body_digest)
SELECT %s, id, %s, %s, position, 'consumed', 1, digest
  FROM unnest(%b::uuid[], %b::bigint[], %b::bytea[]) AS m (id, position, digest)
 WHERE {_MARKED}
""")

# A worker lets go of the message when its handler has failed, and records that after: another one may have failed at it
# more often by then.
_SETTLE = Template(
    """
INSERT INTO {s}.consumer_message AS c (consumer_group, message_id, topic, queue, position, status, attempts,
                                       next_attempt_at, body_digest, last_error, error_kind)
VALUES (%(group)s, %(id)s, %(topic)s, %(queue)s, %(position)s, %(status)s, %(attempts)s,
        clock_timestamp() + make_interval(secs => %(delay)s), %(digest)s, %(error)s, %(kind)s)
ON CONFLICT (consumer_group, message_id) DO UPDATE
   SET status = excluded.status, attempts = excluded.attempts, next_attempt_at = excluded.next_attempt_at,
       body_digest = coalesce(excluded.body_digest, c.body_digest), last_error = excluded.last_error,
       error_kind = excluded.error_kind, claims = 0, changed_at = clock_timestamp()
 WHERE c.status = 'failed' AND c.attempts <= excluded.attempts
""",
    lossy=("error", "kind"),
)

#: How many failed attempts of a message are kept for a group, and how much (characters) of the error of each.
MOST_ATTEMPTS = 20
_ERROR_CHARS = 2_000

# A message can be tried without an end (an ordered group that stays blocked, an operator's retries).
_FAILED = Template(
    """
WITH gone AS (
    DELETE FROM {s}.attempt_history
     WHERE message_id = %(id)s AND consumer_group = %(group)s
       AND failed_at <= (SELECT failed_at FROM {s}.attempt_history
                          WHERE message_id = %(id)s AND consumer_group = %(group)s
                          ORDER BY failed_at DESC OFFSET %(most)s - 1 LIMIT 1)
)
INSERT INTO {s}.attempt_history (message_id, consumer_group, topic, attempt, status, worker, seconds, error_kind, error)
VALUES (%(id)s, %(group)s, %(topic)s, %(attempts)s, %(status)s, %(worker)s, %(seconds)s, %(kind)s,
        left(%(error)s, %(chars)s))
ON CONFLICT DO NOTHING
""",
    lossy=("error", "kind", "worker"),
)

#: Count a start of the failed message that is due first; if ``ordered``, only of those behind their queue's offset.
#: Rows: ``(id, queue, position, attempts, claims)`` or none.
claim_due: Template = Template("""
UPDATE {s}.consumer_message
   SET claims = claims + 1
 WHERE consumer_group = %(group)s
   AND message_id = (SELECT message_id FROM {s}.consumer_message c
                      WHERE consumer_group = %(group)s AND topic = %(topic)s AND status = 'failed'
                        AND next_attempt_at <= clock_timestamp()
                        AND (NOT %(ordered)s OR position <= (
                             SELECT max(o.position) FROM {s}.consumer_offset o
                              WHERE o.consumer_group = c.consumer_group AND o.topic = c.topic AND o.queue = c.queue))
                      ORDER BY next_attempt_at LIMIT 1 FOR UPDATE SKIP LOCKED)
   AND status = 'failed'
RETURNING message_id, queue, position, attempts, claims
""")

#: Lock a due failed message unless somebody has it. Rows: ``(attempts, it was never attempted)`` or none.
lock_failed: Template = Template("""
SELECT attempts, attempts = 0 AND last_error IS NULL FROM {s}.consumer_message
 WHERE consumer_group = %s AND message_id = %s AND status = 'failed' AND next_attempt_at <= clock_timestamp()
   FOR UPDATE SKIP LOCKED
""")

#: What a retry changes in a failed or parked inbox row ``m``: it is due now, a parked one with all its attempts.
RETRY = """status = 'failed', next_attempt_at = clock_timestamp(),
       attempts = CASE WHEN m.status = 'parked' THEN 0 ELSE m.attempts END,
       claims = CASE WHEN m.status = 'parked' THEN 0 ELSE m.claims END"""

# The row takes the position of the newest send that was read, which tells this send from the next one. A row that a
# retry or an operator holds is left alone: what they make of it is seen at the next look.
#: Make a failed or parked message due now, since it was sent again. Rows: one, or none if another one holds it.
retry_resent: Template = Template(f"""
UPDATE {{s}}.consumer_message m
   SET {RETRY}, queue = %(queue)s, position = %(position)s, changed_at = clock_timestamp()
  FROM (SELECT message_id FROM {{s}}.consumer_message
         WHERE consumer_group = %(group)s AND message_id = %(id)s AND status IN ('parked', 'failed')
           AND discarded_at IS NULL FOR UPDATE SKIP LOCKED) f
 WHERE m.consumer_group = %(group)s AND m.message_id = f.message_id
RETURNING m.message_id
""")

#: Delete an inbox row, which is locked: the message isn't for this group.
forget: Template = Template("DELETE FROM {s}.consumer_message WHERE consumer_group = %s AND message_id = %s")


@dataclass(frozen=True, slots=True)
class InboxUpdate:
    """The state of a message in an inbox after an attempt that was no plain success, and how long (seconds) it took."""

    id: UUID
    position: int
    status: str
    attempts: int
    digest: bytes | None
    error: str | None
    delay: float | None = None
    kind: str | None = None
    seconds: float | None = None


def settle(of: GroupQueue, row: InboxUpdate) -> Statement:
    """Write the inbox row of one message after an attempt, over a failed one if there is one."""
    return _SETTLE(of.schema, group=of.group, topic=of.topic, queue=of.queue, **asdict(row))


def settle_failure(of: GroupQueue, row: InboxUpdate, worker: str) -> tuple[Statement, Statement]:
    """Write the inbox row of one message after a failed attempt, and the attempt into its history."""
    values = asdict(row) | {"worker": worker, "most": MOST_ATTEMPTS, "chars": _ERROR_CHARS}
    return settle(of, row), _FAILED(of.schema, group=of.group, topic=of.topic, **values)
