"""Statements of the consumer: read messages, write inbox rows, append offsets."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from uuid import UUID

from outbox.database.execute import Row, Statement, Template, sqlstate
from outbox.database.sql import OPEN, REREAD, TRIED, GroupQueue, number
from outbox.text import cut

# --- in the producer's database, read only ---------------------------------------------------------------

#: Read the end of each queue. Rows, in the order of the queues: ``(queue, last, id of the last, is read on a standby,
#: growths)``; none while the topic doesn't exist. In the first row, ``growths`` is JSON of the numbers of queues that
#: the topic got, each with the ends of those that it had.
heads: Template = Template("""
SELECT q, coalesce(l.position, 0), l.half_id, pg_is_in_recovery(),
       CASE WHEN q = 0 THEN (SELECT jsonb_object_agg(g.queues, g.ends)::text FROM {s}.topic_growth g
                          WHERE g.topic = %(topic)s) END
  FROM generate_series(0, (SELECT queues FROM {s}.topic WHERE name = %(topic)s) - 1) q
  LEFT JOIN LATERAL (SELECT position, half_id FROM {s}.message m WHERE m.topic = %(topic)s AND m.queue = q
                      ORDER BY position DESC LIMIT 1) l ON true
 ORDER BY q
""")

# Not for each pass: while an old snapshot is held, it steps over all that was pruned meanwhile.
#: Read the beginning of each queue. Rows: ``(queue, first position)``; none while the topic doesn't exist.
beginnings: Template = Template("""
SELECT q, coalesce((SELECT min(position) FROM {s}.message m WHERE m.topic = %(topic)s AND m.queue = q), 1)
  FROM generate_series(0, (SELECT queues FROM {s}.topic WHERE name = %(topic)s) - 1) q
""")

# Halves the range between the first position and the end until nothing is left of it.
#: Find, in each queue, the first message that became visible at a time or after it. Rows: ``(queue, position before it,
#: id of the message there, how many were pruned that may have been of that time)``.
start_at_time: Template = Template(f"""
WITH RECURSIVE place AS (
    SELECT q, f.position AS first, f.visible_at >= %(since)s AS is_late, l.position AS last
      FROM generate_series(0, (SELECT queues FROM {{s}}.topic WHERE name = %(topic)s) - 1) q
      LEFT JOIN LATERAL (SELECT position, visible_at FROM {{s}}.message m WHERE m.topic = %(topic)s AND m.queue = q
                          ORDER BY position LIMIT 1) f ON true
      LEFT JOIN LATERAL (SELECT position FROM {{s}}.message m WHERE m.topic = %(topic)s AND m.queue = q
                          ORDER BY position DESC LIMIT 1) l ON true
), search AS (
    SELECT q, first AS low, last + 1 AS high FROM place WHERE first IS NOT NULL
    UNION ALL
    SELECT s.q, CASE WHEN m.is_before THEN m.position + 1 ELSE s.low END,
           CASE WHEN m.is_before THEN s.high ELSE (s.low + s.high) / 2 END
      FROM search s CROSS JOIN LATERAL (
           SELECT position, visible_at < %(since)s AS is_before FROM {{s}}.message m
            WHERE m.topic = %(topic)s AND m.queue = s.q AND m.position >= (s.low + s.high) / 2
            ORDER BY position LIMIT 1) m
     WHERE s.low < s.high
)
SELECT p.q, coalesce(b.position, s.low - 1, 0), b.half_id,
       CASE WHEN p.is_late THEN {number("p.first")} - 1 ELSE 0 END
  FROM place p
  LEFT JOIN search s ON s.q = p.q AND s.low = s.high
  LEFT JOIN LATERAL (SELECT position, half_id FROM {{s}}.message m
                      WHERE m.topic = %(topic)s AND m.queue = p.q AND m.position < s.low
                      ORDER BY position DESC LIMIT 1) b ON true
 ORDER BY p.q
""")

#: Find what stands before a position of each queue. Rows: ``(queue, position before it, id of the message there)``.
start_at_position: Template = Template("""
SELECT w.number - 1, coalesce(b.position, 0), b.half_id
  FROM unnest(%(positions)s::bigint[]) WITH ORDINALITY w (position, number)
  LEFT JOIN LATERAL (SELECT position, half_id FROM {s}.message m
                      WHERE m.topic = %(topic)s AND m.queue = w.number - 1 AND m.position < w.position
                      ORDER BY position DESC LIMIT 1) b ON true
 ORDER BY 1
""")

#: Read up to where queues of a topic that has grown so often have nothing, from positions on. Rows: ``(queue,
#: position)``; none where this database doesn't know the last growth yet.
before_next: Template = Template("""
SELECT a.queue, coalesce(n.position, 9223372036854775807) - 1
  FROM unnest(%(queues)s::int[], %(positions)s::bigint[]) AS a (queue, position)
  LEFT JOIN LATERAL (SELECT position FROM {s}.message m
                      WHERE m.topic = %(topic)s AND m.queue = a.queue AND m.position > a.position
                      ORDER BY m.position LIMIT 1) n ON true
 WHERE (SELECT count(*) FROM {s}.topic_growth WHERE topic = %(topic)s) >= %(growths)s
""")

# Without the operator ``?``, which JDBC takes for a parameter: an array contains a text that is one of its elements.
#: Whether a half ``h`` is for a group: ``headers`` has, as JSON, the values that each header may have.
MATCHES = """(%(tags)s::text[] IS NULL OR h.tag = ANY (%(tags)s::text[]))
           AND (%(keys)s::text[] IS NULL OR h.key LIKE ANY (%(keys)s::text[]))
           AND (%(headers)s::jsonb IS NULL OR NOT EXISTS (
                SELECT FROM jsonb_each(%(headers)s::jsonb) f
                 WHERE (f.value @> to_jsonb(h.headers ->> f.key)) IS NOT TRUE))"""

# In the statement that reads messages: a growth that comes later can have no message before it that is read here.
_BEFORE_GROWTH = """coalesce((
                               SELECT min(coalesce(ends[%(queue)s::int + 1], 0)) FROM {s}.topic_growth
                                WHERE topic = %(topic)s AND queues > %(grown)s), 9223372036854775807)"""

# The running sum of sizes bounds the memory of a read; the first message always comes. With OFFSET 0, each half is
# looked up by itself, in the one partition that can have it: the planner reckons with a look-up in each of them, and
# would read all of them rather.
#: Read the message at a position, without its body, and the next ones of the queue, ``bytes`` of bodies at most (but
#: one message at least), none behind a growth to more than ``grown`` queues. ``keys`` are LIKE patterns.
#: Rows: ``(position, id, send number, visible_at, key, tag, headers, content type, body, born_at, matches)``; those
#: which don't match the filter are there to be stepped over.
messages_after: Template = Template(f"""
SELECT position, half_id, send_number, visible_at, key, tag, headers::text, content_type, body, born_at, matches
  FROM (SELECT *, sum(octet_length(body)) OVER (ORDER BY position) - octet_length(body) AS bytes_before
          FROM (SELECT m.position, m.half_id, m.send_number, m.visible_at, h.key, h.tag, h.headers, h.content_type,
                       CASE WHEN m.position > %(position)s THEN h.body ELSE '' END AS body,
                       h.born_at, {MATCHES} AS matches
                  FROM (SELECT * FROM {{s}}.message
                         WHERE topic = %(topic)s AND queue = %(queue)s AND position >= %(position)s
                           AND position <= greatest(%(position)s, {_BEFORE_GROWTH})
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

#: Read when the first message behind each of some positions came into its queue. Rows: ``(time,)``.
first_times: Template = Template("""
SELECT m.visible_at FROM unnest(%(queues)s::int[], %(positions)s::bigint[]) p (queue, position)
 CROSS JOIN LATERAL (SELECT visible_at FROM {s}.message m
                      WHERE m.topic = %(topic)s AND m.queue = p.queue AND m.position > p.position
                      ORDER BY m.position LIMIT 1) m
""")

#: Read which of these are committed. Rows: ``(id,)``.
committed: Template = Template("""
SELECT half_id FROM {s}.op_message WHERE half_id = ANY (%(ids)s::uuid[]) AND resolution = 'commit'
""")

# --- in the consumer's database --------------------------------------------------------------------------

# A setting that is local to a transaction ends with it, however that ends. The cast of any other text is an error.
#: Marks the transaction in which a handler is to run, in the round trip that tries the lock of its queue (`try_lock`).
MARKING = "set_config('outbox.handling', 'on', true)"
#: What the error of a statement with `MARKED_TRANSACTION` says.
ENDED = "the handler ended the transaction"
#: The condition that this is still the transaction that was marked; an error if not.
MARKED_TRANSACTION = f"coalesce(nullif(current_setting('outbox.handling', true), ''), '{ENDED}')::boolean"

#: Mark the transaction in which a handler is to run.
MARK = Statement(f"SELECT {MARKING}")

_UNIQUE_VIOLATION = "23505"


def is_inbox_conflict(error: Exception, schema: str) -> bool:
    """Tell whether a statement failed because the inbox has the row by now.

    The one unique index of the inbox has another name in each partition.
    """
    if sqlstate(error) != _UNIQUE_VIOLATION:
        return False
    diagnosis = getattr(getattr(error, "orig", None), "diag", None)
    table = getattr(diagnosis, "table_name", None) or ""
    return getattr(diagnosis, "schema_name", None) == schema and table.startswith("consumer_message")


#: Fail unless this is still the transaction that was marked.
MARKED = Statement(f"SELECT {MARKED_TRANSACTION}")


def is_held(row: str) -> str:
    """Return the expression that tells whether the queue of a row is leased: NULL if not, false if that has lapsed."""
    return f"""(SELECT CASE WHEN k.worker IS NOT NULL THEN k.until > clock_timestamp() END FROM {{s}}.consumer_lease k
         WHERE k.consumer_group = {row}.consumer_group AND k.topic = {row}.topic AND k.queue = {row}.queue
         ORDER BY k.term DESC, k.renewal DESC LIMIT 1)"""


#: How long a worker may be between its start and the lock: a start that has had no end for longer counts as one of a
#: worker that has died.
START_TIME = "interval '1 s'"

#: Read the newest offset. Rows: ``(position, starts, id of the message there, passage, is held, is new)`` or none.
offset: Template = Template(f"""
SELECT position, starts, message_id, passage, {is_held("o")},
       written_at > clock_timestamp() - {START_TIME}
  FROM {{s}}.consumer_offset o
 WHERE consumer_group = %s AND topic = %s AND queue = %s
 ORDER BY position DESC, starts DESC LIMIT 1
""")

#: What `offset` would say of a queue that has no offset.
NO_OFFSET: Row = (0, 0, None, 0, None, False)

#: Read the offset of each queue. Rows: ``(queue, position, id of the message there)``.
offsets: Template = Template("""
SELECT q, coalesce(n.position, 0), n.message_id
  FROM unnest(%(queues)s::int[]) q
  LEFT JOIN LATERAL (SELECT position, message_id FROM {s}.consumer_offset o
                      WHERE o.consumer_group = %(group)s AND o.topic = %(topic)s AND o.queue = q
                      ORDER BY position DESC, starts DESC LIMIT 1) n ON true
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

#: Append an offset: all up to ``position`` is handled; ``starts`` starts of what follows had no end.
append_offset: Template = Template("""
INSERT INTO {s}.consumer_offset (consumer_group, topic, queue, position, starts, message_id, passage)
VALUES (%s, %s, %s, %s, %s, %s, %s)
ON CONFLICT DO NOTHING
""")

# The conflict's update makes a prune wait that was about to delete the row without starts.
#: Forget the starts that were counted at the offset ``position``: one of them had an end.
drop_starts: Template = Template("""
WITH dropped AS (
    DELETE FROM {s}.consumer_offset
     WHERE consumer_group = %(group)s AND topic = %(topic)s AND queue = %(queue)s AND position = %(position)s
       AND starts > 0
)
INSERT INTO {s}.consumer_offset (consumer_group, topic, queue, position, starts, message_id, passage)
VALUES (%(group)s, %(topic)s, %(queue)s, %(position)s, 0, %(id)s, %(passage)s)
ON CONFLICT (consumer_group, topic, queue, position, starts) DO UPDATE SET written_at = clock_timestamp()
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

# As in `drop_starts`, a prune waits that was about to delete the row.
#: Move an offset back, or to where the log begins now; and write down the loss.
go_back: Template = Template("""
WITH dropped AS (
    DELETE FROM {s}.consumer_offset
     WHERE consumer_group = %(group)s AND topic = %(topic)s AND queue = %(queue)s
       AND (position > %(agreed)s OR (position = %(agreed)s AND starts > 0))
), started AS (
    UPDATE {s}.consumer_start SET position = %(agreed)s
     WHERE consumer_group = %(group)s AND topic = %(topic)s AND queue = %(queue)s AND position > %(agreed)s
), loss AS (
    INSERT INTO {s}.log_loss (consumer_group, topic, queue, position, agreed, message_ids)
    VALUES (%(group)s, %(topic)s, %(queue)s, %(position)s, %(agreed)s, %(lost)s::uuid[])
)
INSERT INTO {s}.consumer_offset (consumer_group, topic, queue, position, starts, message_id, passage)
VALUES (%(group)s, %(topic)s, %(queue)s, %(agreed)s, 0, %(id)s,
        coalesce((SELECT max(passage) FROM {s}.consumer_passage
                   WHERE consumer_group = %(group)s AND topic = %(topic)s AND queue = %(queue)s), 0))
ON CONFLICT (consumer_group, topic, queue, position, starts)
DO UPDATE SET written_at = clock_timestamp(), message_id = excluded.message_id
""")

# The first attempt at a message writes its row when it has ended, or writes over that of an earlier passage.
#: When the group failed at a message for the first time, or NULL, by its inbox row.
FIRST_FAILED_AT = "CASE WHEN last_error IS NOT NULL THEN received_at END"

_KNOWN = f"""message_id, status, attempts,
           greatest(extract(epoch FROM next_attempt_at - clock_timestamp()), 0)::float8,
           queue, position, discarded_at IS NOT NULL, passage, {FIRST_FAILED_AT}"""

# One look-up in the primary key for each id, whatever the statistics say of a group that is younger than they are: for
# ``message_id = ANY (…)`` the planner would read the whole group each time. It doesn't see how many ids there are: by
# their number it would make a new plan each time, which takes longer than to run it.
#: Read which messages the inbox knows.
#: Rows: ``(id, status, attempts, seconds until the next attempt, queue, position, is discarded, passage,
#: first failed at)``.
known: Template = Template(f"""
SELECT c.* FROM unnest((SELECT %b::uuid[])) AS m (id) CROSS JOIN LATERAL (
    SELECT {_KNOWN} FROM {{s}}.consumer_message WHERE consumer_group = %s AND message_id = m.id
    OFFSET 0) c
""")

#: What `known` would say of a message that the inbox doesn't know.
NO_ROW: Row = (None, None, 0, 0.0, None, None, False, 0, None)

# Where the log is in the same database, a round trip less than to read the messages first. One that comes in between
# only makes it look at that as well.
#: Read which messages the inbox knows of the next ones, at most so many, after a position of a queue. Rows: as of
#: `known`.
known_after: Template = Template(f"""
SELECT c.* FROM (SELECT half_id AS id FROM {{s}}.message
                  WHERE topic = %s AND queue = %s AND position > %s ORDER BY position LIMIT %s) m CROSS JOIN LATERAL (
    SELECT {_KNOWN} FROM {{s}}.consumer_message WHERE consumer_group = %s AND message_id = m.id
    OFFSET 0) c
""")

# No ON CONFLICT: a row that came in between (a quarantine, a resend in another queue) must undo the whole batch.
#: Insert the inbox rows of messages that were consumed at the first attempt, in the transaction that was marked.
consumed: Template = Template(f"""
INSERT INTO {{s}}.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts, body_digest,
                                   passage)
SELECT %s, id, %s, %s, position, 'consumed', 1, digest, %s
  FROM unnest(%b::uuid[], %b::bigint[], %b::bytea[]) AS m (id, position, digest)
 WHERE {MARKED_TRANSACTION}
""")

# The ids are given once more: else the planner, with statistics older than the group, may walk through all of it.
#: Say where messages stand that were handled before they were dispatched: in a queue, of the passage that meets them.
give_positions: Template = Template("""
UPDATE {s}.consumer_message c SET queue = %(queue)s, position = m.position, passage = %(passage)s
  FROM unnest(%(ids)s::uuid[], %(positions)s::bigint[]) AS m (id, position)
 WHERE c.consumer_group = %(group)s AND c.message_id = ANY (%(ids)s::uuid[]) AND c.message_id = m.id AND c.position = 0
""")

#: The condition that a row of the inbox holds back the later messages of its key: the partial index has it.
HOLDS_KEY = f"order_key IS NOT NULL AND status IN {OPEN} AND discarded_at IS NULL"


def of_earlier_passage(row: str) -> str:
    """Return the condition that the message of an inbox row, by its alias, is to be handled again.

    Of such a row nothing follows any more: it holds back no key, and isn't retried before the group comes to it.
    """
    return f"""EXISTS (SELECT FROM (SELECT passage, position FROM {{s}}.consumer_passage r
                      WHERE r.consumer_group = {row}.consumer_group AND r.topic = {row}.topic AND r.queue = {row}.queue
                      ORDER BY passage DESC LIMIT 1) r
                WHERE r.passage > {row}.passage AND r.position < {row}.position)"""


# An earlier message of the key may have come back: its quarantine was released, or an operator has restored it.
def is_first_of_key(row: str) -> str:
    """Return the condition that a failed row, by its alias, isn't held back by an earlier one of its key."""
    return f"""({row}.order_key IS NULL OR NOT ({of_earlier_passage(row)} OR EXISTS (
        SELECT FROM {{s}}.consumer_message e
         WHERE e.consumer_group = {row}.consumer_group AND e.topic = {row}.topic AND e.order_key = {row}.order_key
           AND {HOLDS_KEY} AND NOT {of_earlier_passage("e")}
           AND (e.turn, e.position, e.message_id) < ({row}.turn, {row}.position, {row}.message_id))))"""


def last_turn(key: str) -> str:
    """Return the expression of the last turn among the rows that hold a key, which is an SQL expression; 0 if none."""
    return f"""coalesce((SELECT max(h.turn) FROM {{s}}.consumer_message h
                  WHERE h.consumer_group = %(group)s AND h.topic = %(topic)s AND h.order_key = {key}
                    AND {HOLDS_KEY}), 0)"""


# A worker lets go of the message when its handler has failed, and records that after: another one may have failed at it
# more often by then. A row of an earlier passage doesn't count.
_SETTLE = Template(
    f"""
INSERT INTO {{s}}.consumer_message AS c (consumer_group, message_id, topic, queue, position, status, attempts,
                                       next_attempt_at, body_digest, last_error, error_kind, passage, order_key, turn)
SELECT %(group)s, %(id)s, %(topic)s, %(queue)s, %(position)s, %(status)s, %(attempts)s,
       clock_timestamp() + make_interval(secs => %(delay)s), %(digest)s, %(error)s, %(kind)s, %(passage)s, key,
       CASE WHEN key IS NOT NULL THEN {last_turn("k.key")} + 1 END
  FROM (SELECT CASE WHEN %(holds)s THEN %(key)s::text COLLATE "C" END AS key) k
ON CONFLICT (consumer_group, message_id) DO UPDATE
   SET status = excluded.status, attempts = excluded.attempts, next_attempt_at = excluded.next_attempt_at,
       order_key = CASE WHEN %(holds)s THEN coalesce(c.order_key, excluded.order_key) END,
       turn = CASE WHEN %(holds)s THEN
                   CASE WHEN c.turn IS NULL OR {of_earlier_passage("c")} THEN excluded.turn ELSE c.turn END END,
       follows = false,
       body_digest = coalesce(excluded.body_digest, c.body_digest), last_error = excluded.last_error,
       received_at = CASE WHEN c.passage < excluded.passage THEN clock_timestamp() ELSE c.received_at END,
       passage = greatest(c.passage, excluded.passage),
       error_kind = excluded.error_kind, starts = 0, taken_by = NULL, take_id = NULL, changed_at = clock_timestamp()
 WHERE c.status = 'failed' AND c.attempts <= excluded.attempts
    OR (c.passage < excluded.passage AND c.status IN {REREAD} AND c.discarded_at IS NULL)
""",
    lossy=("error", "kind"),
)

# --- handling again --------------------------------------------------------------------------------------------------

#: Read behind which position of a queue a passage began. Rows: ``(position,)`` or none.
passage_began: Template = Template("""
SELECT position FROM {s}.consumer_passage WHERE consumer_group = %s AND topic = %s AND queue = %s AND passage = %s
""")

# In the order of ids, as all locks of several rows.
#: Lock the rows of these messages that an earlier passage wrote, without waiting. Rows: ``(id,)`` of each that is ours.
lock_earlier: Template = Template(f"""
SELECT c.message_id FROM unnest((SELECT %(ids)s::uuid[])) AS m (id) CROSS JOIN LATERAL (
    SELECT message_id FROM {{s}}.consumer_message
     WHERE consumer_group = %(group)s AND message_id = m.id AND passage < %(passage)s
       AND status IN {REREAD} AND discarded_at IS NULL
       FOR UPDATE SKIP LOCKED) c
 ORDER BY 1
""")

# In the producer's database.
#: Read which of these messages are compensated, or are about to be. Rows: ``(id,)``.
compensated: Template = Template("""
SELECT m.id FROM unnest((SELECT %(ids)s::uuid[])) AS m (id)
 WHERE EXISTS (SELECT FROM {s}.compensation c WHERE c.half_id = m.id)
    OR EXISTS (SELECT FROM {s}.bulk_item i
                WHERE i.message_id = m.id AND i.action = 'compensate' AND i.state = 'pending')
""")

# Before anything writes over them.
#: Keep the rows that these messages have of an earlier passage, as far as a handler had them.
keep_earlier: Template = Template(f"""
INSERT INTO {{s}}.reread_message (consumer_group, message_id, passage, topic, queue, position, status, attempts,
                                 body_digest, last_error, error_kind, received_at, changed_at)
SELECT c.* FROM unnest((SELECT %(ids)s::uuid[])) AS m (id) CROSS JOIN LATERAL (
    SELECT consumer_group, message_id, passage, topic, queue, position, status, attempts, body_digest, last_error,
           error_kind, received_at, changed_at
      FROM {{s}}.consumer_message
     WHERE consumer_group = %(group)s AND message_id = m.id AND passage < %(passage)s
       AND status IN {REREAD} AND discarded_at IS NULL AND status IN {TRIED} OFFSET 0) c
ON CONFLICT DO NOTHING
""")

#: Write of messages, whose rows of an earlier passage are locked, that they were consumed at the first attempt of this
#: one, in the transaction that was marked.
consumed_again: Template = Template(f"""
UPDATE {{s}}.consumer_message c
   SET status = 'consumed', attempts = 1, starts = 0, next_attempt_at = NULL, queue = %(queue)s, position = m.position,
       body_digest = m.digest, last_error = NULL, error_kind = NULL, passage = %(passage)s, order_key = NULL,
       turn = NULL, follows = false, taken_by = NULL, take_id = NULL, changed_at = clock_timestamp()
  FROM unnest(%(ids)s::uuid[], %(positions)s::bigint[], %(digests)s::bytea[]) AS m (id, position, digest)
 WHERE c.consumer_group = %(group)s AND c.message_id = ANY (%(ids)s::uuid[]) AND c.message_id = m.id
   AND {MARKED_TRANSACTION}
""")

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
VALUES (%(id)s, %(group)s, %(topic)s, %(attempts)s, %(status)s, %(worker)s, %(seconds)s, %(kind)s, %(error)s)
ON CONFLICT DO NOTHING
""",
    lossy=("error", "kind", "worker"),
)

# A start of a moment ago is of a worker that lives and has no lock yet: a second one would be counted as a crash.
_DUE = f"""SELECT message_id FROM {{s}}.consumer_message c
                      WHERE consumer_group = %(group)s AND topic = %(topic)s AND status = 'failed'
                        AND next_attempt_at <= clock_timestamp() - CASE WHEN starts > 0 THEN {START_TIME} ELSE '0' END
                        AND (NOT %(ordered)s OR position <= (
                             SELECT max(o.position) FROM {{s}}.consumer_offset o
                              WHERE o.consumer_group = c.consumer_group AND o.topic = c.topic AND o.queue = c.queue))
                        AND {is_held("c")} IS NOT TRUE
                        AND {is_first_of_key("c")}
                      ORDER BY next_attempt_at LIMIT 1"""

#: Read the failed message that is due first; ``ordered`` as in `start_retry`. Rows: ``(id,)`` or none.
due: Template = Template(_DUE)

#: Read which groups may have something for a retry pass: messages that are due, or hold back or wait for their key.
#: Rows: ``(group, topic)``.
to_retry: Template = Template(f"""
SELECT g, t FROM unnest(%(groups)s::text[], %(topics)s::text[]) AS u (g, t)
 WHERE EXISTS (SELECT FROM {{s}}.consumer_message
                WHERE consumer_group = g AND topic = t AND status = 'failed' AND next_attempt_at <= clock_timestamp())
    OR EXISTS (SELECT FROM {{s}}.consumer_message WHERE consumer_group = g AND topic = t AND {HOLDS_KEY})
""")

#: Count a start of the failed message that is due first, and write down when; if ``ordered``, only of those behind
#: their queue's offset. Not of queues that are leased. Rows: ``(id, queue, position, attempts, starts, the group's
#: passage of the queue)`` or none.
start_retry: Template = Template(f"""
UPDATE {{s}}.consumer_message m
   SET starts = starts + 1, next_attempt_at = clock_timestamp()
 WHERE consumer_group = %(group)s
   AND message_id = ({_DUE} FOR UPDATE SKIP LOCKED)
   AND status = 'failed'
RETURNING message_id, queue, position, attempts, starts,
          coalesce((SELECT max(passage) FROM {{s}}.consumer_passage r
                     WHERE r.consumer_group = m.consumer_group AND r.topic = m.topic AND r.queue = m.queue), 0)
""")

# A worker that retries outside of transactions first moves the time of the next attempt: a worker that waited for the
# row then finds that it isn't due.
#: Lock a due failed message unless another transaction has it. Rows: ``(attempts, it was never attempted, first failed
#: at)`` or none.
lock_failed: Template = Template(f"""
SELECT attempts, attempts = 0 AND last_error IS NULL, {FIRST_FAILED_AT} FROM {{s}}.consumer_message c
 WHERE consumer_group = %s AND message_id = %s AND status = 'failed' AND next_attempt_at <= clock_timestamp()
   AND {is_held("c")} IS NOT TRUE
   FOR UPDATE SKIP LOCKED
""")

#: Read which topics have a name like one of these patterns. Rows: ``(name,)``.
topics_like: Template = Template("SELECT name FROM {s}.topic WHERE name LIKE ANY (%(patterns)s::text[]) ORDER BY name")

# IS TRUE: so the planner takes the key, and no index of all that failed.
#: Make failed messages due again, whose last start was no attempt.
due_again: Template = Template("""
UPDATE {s}.consumer_message SET starts = 0, next_attempt_at = clock_timestamp()
 WHERE consumer_group = %(group)s AND message_id = ANY (%(ids)s::uuid[]) AND (status = 'failed') IS TRUE
""")

#: What a retry changes in a failed, taken or parked inbox row ``m``: it is due now, a parked one with all its attempts.
#: One that was parked because of an earlier message of its key waits for its turn. A lease has no effect any more.
RETRY = """status = CASE WHEN m.follows THEN 'waiting' ELSE 'failed' END,
       next_attempt_at = CASE WHEN NOT m.follows THEN clock_timestamp() END,
       attempts = CASE WHEN m.status = 'parked' THEN 0 ELSE m.attempts END,
       starts = CASE WHEN m.status = 'parked' THEN 0 ELSE m.starts END, taken_by = NULL, take_id = NULL"""

# The row takes the position of the newest send that was read, which tells this send from the next one. A row that a
# retry or an operator holds is left alone: what they make of it is seen at the next look.
#: Make a failed or parked message due now, since it was sent again. Rows: one, or none if another one holds it.
retry_resent: Template = Template(f"""
UPDATE {{s}}.consumer_message m
   SET {RETRY}, queue = %(queue)s, position = %(position)s, changed_at = clock_timestamp()
 WHERE consumer_group = %(group)s AND message_id = (
       SELECT message_id FROM {{s}}.consumer_message
        WHERE consumer_group = %(group)s AND message_id = %(id)s AND status IN {OPEN} AND status IN {TRIED}
          AND discarded_at IS NULL FOR UPDATE SKIP LOCKED)
RETURNING m.message_id
""")

#: Delete an inbox row, which is locked: the message isn't for this group.
forget: Template = Template("DELETE FROM {s}.consumer_message WHERE consumer_group = %s AND message_id = %s")


@dataclass(frozen=True, slots=True)
class InboxUpdate:
    """The state of a message in an inbox after an attempt that was no plain success, and how long (seconds) it took.

    ``holds``: it holds back the later messages of its ``key``.
    """

    id: UUID
    position: int
    status: str
    attempts: int
    digest: bytes | None
    error: str | None
    delay: float | None = None
    kind: str | None = None
    seconds: float | None = None
    holds: bool = False
    key: str | None = None


def settle(of: GroupQueue, row: InboxUpdate, passage: int) -> list[Statement]:
    """Write the inbox row of one message after an attempt, over a failed one or one of an earlier passage."""
    settled = _SETTLE(of.schema, group=of.group, topic=of.topic, queue=of.queue, **asdict(row), passage=passage)
    if not passage:
        return [settled]
    return [keep_earlier(of.schema, group=of.group, ids=[row.id], passage=passage), settled]


def settle_failure(of: GroupQueue, row: InboxUpdate, passage: int, worker: str) -> list[Statement]:
    """Write the inbox row of one message after a failed attempt, and the attempt into its history."""
    return [*settle(of, row, passage), write_attempt(of, row, worker)]


def write_attempt(of: GroupQueue, row: InboxUpdate, worker: str) -> Statement:
    """Write a failed attempt into the history of its message; of those that it has, the newest stay."""
    values = asdict(row) | {"worker": worker, "most": MOST_ATTEMPTS, "error": cut(row.error or "", _ERROR_CHARS)}
    return _FAILED(of.schema, group=of.group, topic=of.topic, **values)
