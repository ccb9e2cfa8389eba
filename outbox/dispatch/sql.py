"""Statements of dispatch: from committed ops to messages, and from due scheduled messages to messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.database.execute import SYNCHRONOUSLY, Statement, Template, in_schema
from outbox.database.sql import HALF_MISSING, LOG, NEWS_OF_QUEUE, PLANNED_ONCE, UNLESS_IDLE, number
from outbox.message.model import NUMBER_BITS

if TYPE_CHECKING:
    from outbox.settings import Settings

# This look keeps an idle pass at one round trip: two index look-ups, no plan worth mentioning.
#: Read the newest cursor, and whether anything is to be done. Rows: one, for a `Cursor`; none before the first.
newest_cursor: Template = Template(f"""
SELECT c.id, c.next_xid::text, c.in_flight::text[], c.target::text, c.after_sequence, c.until_sequence,
       c.base_sequence, c.system_identifier, s.system_identifier, c.epoch, c.log, {LOG},
       c.until_sequence IS NOT NULL
       OR EXISTS (SELECT FROM {{s}}.op_message o WHERE o.xid >= c.next_xid)
       OR EXISTS (SELECT FROM {{s}}.op_message o WHERE o.xid = ANY (c.in_flight))
  FROM (SELECT * FROM {{s}}.dispatch_cursor ORDER BY id DESC LIMIT 1) c, pg_control_system() s
""")

# No client is waited for while the lock is held: a host that vanishes then would keep it from all others. So the
# statements of one round trip learn from the transaction itself whether it is their turn.
_TURN = "current_setting('outbox.dispatching', true) = 'true'"


def try_turn(lock: int) -> Statement:
    """Try dispatch's lock without waiting; what follows in the transaction does nothing without it.

    Rows: ``(taken, …)``.
    """
    return Statement(
        f"SELECT set_config('outbox.dispatching', pg_try_advisory_xact_lock(%s)::text, true)::boolean, {UNLESS_IDLE}",
        (lock,),
    )


def begin_turn(lock: int, *, durable: bool) -> Statement:
    """Begin a transaction of dispatch in one statement: as `try_turn`; all that follows is planned once, by indexes.

    ``durable``: its COMMIT waits for the disk, and for synchronous standbys, also where the setting says otherwise.
    Else it waits for none. Rows: ``(taken, …)``.
    """
    turn, commit = try_turn(lock), SYNCHRONOUSLY if durable else "'off'"
    return Statement(f"{turn.sql}, {PLANNED_ONCE}, set_config('synchronous_commit', {commit}, true)", turn.values)


# Tried only: a nudge holds it for a moment.
# A crash may have forgotten the cursor that was read, and another worker written one of the same number since.
#: Give the turn up if cursor and log aren't those any more which were read before the lock; if it is kept, take the
#: lock ``awake``, unless that is NULL. Rows: ``(it is kept, …)``.
keep_turn: Template = Template(f"""
SELECT kept, CASE WHEN kept THEN pg_try_advisory_xact_lock(%(awake)s::bigint) END
  FROM (SELECT set_config('outbox.dispatching', ({_TURN} AND EXISTS (
               SELECT FROM (SELECT * FROM {{s}}.dispatch_cursor ORDER BY id DESC LIMIT 1) c, pg_control_system() s
                WHERE c.id = %(cursor)s AND {LOG} = %(log)s
                  AND c.next_xid = %(next_xid)s::xid8 AND c.in_flight = %(in_flight)s::xid8[]
                  AND (c.target::text, c.after_sequence, c.until_sequence)
                      IS NOT DISTINCT FROM (%(target)s::text, %(after)s::bigint, %(until)s::bigint)
               ))::text, true)::boolean AS kept OFFSET 0) k
""")

# Dispatch numbers its cursors by itself: the newest row counts, and logical replication carries no sequence. The values
# of the other columns follow.
_NEW_CURSOR = """
    INSERT INTO {s}.dispatch_cursor (id, next_xid, in_flight, target, after_sequence, until_sequence,
                                     base_sequence, system_identifier, epoch, log) OVERRIDING SYSTEM VALUE
    SELECT coalesce((SELECT max(id) FROM {s}.dispatch_cursor), 0) + 1,"""

# Ops beyond the limit are neither kept nor counted: a backlog may have millions. Only the first ones are.
_FRESH = f"""
batch AS MATERIALIZED (
    SELECT * FROM (
        SELECT half_id, sequence, resolution FROM {{s}}.op_message
         WHERE xid >= %(next_xid)s::xid8 AND {_TURN}
         UNION ALL
        SELECT half_id, sequence, resolution FROM {{s}}.op_message
         WHERE xid = ANY (%(in_flight)s::xid8[]) AND {_TURN}
    ) fresh ORDER BY sequence LIMIT %(limit)s
)"""

# A full batch may be all there was: then the next one is empty, and ends the cut. The newest op of all bounds what the
# snapshot adds.
_CURSOR_OF_FRESH = f""", cursor AS ({_NEW_CURSOR}
           CASE WHEN cut THEN %(next_xid)s::xid8 ELSE pg_snapshot_xmax(pg_current_snapshot()) END,
           CASE WHEN cut THEN %(in_flight)s::xid8[] ELSE ARRAY(SELECT pg_snapshot_xip(pg_current_snapshot())) END,
           CASE WHEN cut THEN pg_current_snapshot() END,
           CASE WHEN cut THEN last END,
           CASE WHEN cut THEN (SELECT max(sequence) FROM {{s}}.op_message) END,
           %(base)s, %(system)s, %(epoch)s, %(log)s
      FROM (SELECT count(*) = %(limit)s AS cut, max(sequence) AS last FROM batch) b
     WHERE last IS NOT NULL
)"""

_REST = f"""
batch AS MATERIALIZED (
    SELECT half_id, sequence, resolution FROM {{s}}.op_message
     WHERE sequence > %(after)s AND sequence <= %(until)s
       AND (xid >= %(next_xid)s::xid8 OR xid = ANY (%(in_flight)s::xid8[]))
       AND pg_visible_in_snapshot(xid, %(target)s::pg_snapshot) AND {_TURN}
     ORDER BY sequence LIMIT %(limit)s
)"""

# Without a target, the cursor read is of before a re-base, and the snapshot stays as it is.
_CURSOR_OF_REST = f""", cursor AS ({_NEW_CURSOR}
           CASE WHEN done AND cut THEN pg_snapshot_xmax(target) ELSE %(next_xid)s::xid8 END,
           CASE WHEN done AND cut THEN ARRAY(SELECT pg_snapshot_xip(target)) ELSE %(in_flight)s::xid8[] END,
           CASE WHEN NOT done THEN target END, CASE WHEN NOT done THEN last END, CASE WHEN NOT done THEN %(until)s END,
           %(base)s, %(system)s, %(epoch)s, %(log)s
      FROM (SELECT *, target IS NOT NULL AS cut
              FROM (SELECT count(*) < %(limit)s AS done, max(sequence) AS last, %(target)s::pg_snapshot AS target
                      FROM {{read}}) r) b
     WHERE {_TURN}
)"""

# Of before a re-base. Their xids may be ahead of this cluster's, and would be taken for new ones: 0 is behind all.
_MISSED = f"""
old AS MATERIALIZED (
    SELECT half_id, sequence, resolution FROM {{s}}.op_message
     WHERE sequence > %(after)s AND sequence <= %(until)s AND {_TURN}
     ORDER BY sequence LIMIT %(limit)s
), forgotten AS (
    UPDATE {{s}}.op_message SET xid = '0' WHERE half_id IN (SELECT half_id FROM old)
), batch AS MATERIALIZED (
    SELECT * FROM old
     WHERE resolution = 'commit'
       AND NOT EXISTS (SELECT FROM {{s}}.message m WHERE m.half_id = old.half_id)
       AND NOT EXISTS (SELECT FROM {{s}}.scheduled_message d WHERE d.half_id = old.half_id)
)"""

# With OFFSET 0, as in the scalar subquery, each row is looked up by itself, in the one partition that can have it.
# Else the planner, which reckons with a look-up in each partition, would read all of them rather.
_HALVES = """batch b
      LEFT JOIN LATERAL (SELECT id, topic, key, queue, deliver_at FROM {s}.half_message
                          WHERE id = b.half_id OFFSET 0) h ON true"""

_OPS_TO_ENTRIES = f""", entry AS MATERIALIZED (
    SELECT b.sequence, b.sequence AS turn, b.half_id, 1 AS send_number, h.topic, h.key, h.queue, h.deliver_at,
           coalesce(h.topic IN (SELECT topic FROM {{s}}.topic_pause), false) AS held
      FROM {_HALVES}
     WHERE b.resolution = 'commit'
       AND (h.deliver_at IS NULL OR (SELECT d.half_id FROM {{s}}.scheduled_message d WHERE d.half_id = h.id) IS NULL)
)"""

# The rest of an entry that is due, whatever its half says, of a batch of such.
_ENTRY_DUE = f"""b.half_id, h.topic, h.key, h.queue, NULL::timestamptz AS deliver_at, false AS held
      FROM {_HALVES}"""

# Entries that become messages at once.
_DUE = "(deliver_at IS NULL OR deliver_at <= statement_timestamp()) AND NOT held"

# The topics of entries, read once for all that is done by topic: a look-up for each entry would be a tenth of a batch,
# a join to the table would read all topics for a lone message.
_TOPICS = f""", topics AS MATERIALIZED (
    SELECT topic, entries, due, coalesce((SELECT queues FROM {{s}}.topic WHERE name = e.topic), %(queues)s) AS queues
      FROM (SELECT topic, count(*) AS entries, count(*) FILTER (WHERE {_DUE}) AS due
              FROM entry WHERE topic IS NOT NULL GROUP BY topic) e
)"""

# The commits and rollbacks of each topic of the batch: this statement comes to each op once. Sums of all topics, kept
# up to date here, would have a message cost more the more topics there are.
_TOTALS = """, counted AS (
    INSERT INTO {s}.topic_total (topic, committed, rolled_back)
    SELECT topic, sum(committed), sum(rolled_back)
      FROM (SELECT topic, entries AS committed, 0 AS rolled_back FROM topics
             UNION ALL
            SELECT h.topic, 0, 1
              FROM batch b
             CROSS JOIN LATERAL (SELECT topic FROM {s}.half_message WHERE id = b.half_id OFFSET 0) h
             WHERE b.resolution = 'rollback') n
     GROUP BY topic
)"""

# Entries without a half, which is gone or can't be seen.
_UNSEEN = """, unseen AS MATERIALIZED (
    SELECT array_agg(half_id) AS half_ids FROM entry WHERE topic IS NULL
)"""

#: What the error of a statement with `_MISSING` says, before how many halves there are and one of them.
HIDDEN = "halves are hidden: "

# A committed op whose half is gone is passed over, and the doctor tells of it. Where row security may only hide the
# half from this role, the statement must fail, or the op would be lost: the cast of that text is an error.
_MISSING = f"""{_UNSEEN}, missing AS (
    INSERT INTO {{s}}.audit (actor, action, target, reason)
    SELECT 'dispatch', '{HALF_MISSING}', unnest(half_ids),
           'its half message is gone, so that it can''t become a message'
      FROM unseen
     WHERE CASE WHEN row_security_active('{{s}}.half_message'::regclass)
                THEN ('{HIDDEN}' || cardinality(half_ids) || ' ' || half_ids[1])::boolean ELSE true END
)"""

#: The time for which what a paused topic holds is scheduled; a host of any time zone knows it.
HELD_UNTIL = "timestamptz '9999-01-01 00:00+00'"

# So many that consumers had better look at all queues of their topics; of fewer, they are told the queues.
_MANY = "(SELECT sum(due) > 20 FROM topics)"

_EPOCH_BEGINS = f"(SELECT epoch << {NUMBER_BITS} FROM {{s}}.dispatch_cursor ORDER BY id DESC LIMIT 1)"

# From entries to messages; the same for a dispatch, a release and a resend. An entry without a topic is one whose half
# can't be seen: its id is returned, and it is left to the caller. The end of a queue is looked up once, at its first
# row: looked up for each row, it would step over all those that this statement has inserted and can't see. ``sequence``
# orders a batch's entries, also as they are inserted: by queue, ids would split pages in the middle of their index.
# ``turn`` is the sequence of the op: messages without a key take the queues in turn. A queue that the sender chose was
# one of the topic's when it was written; the remainder sees to it that no consumer misses it, whatever program wrote
# the half. A queue whose last position is of an earlier epoch goes on with its numbers in this one. What a paused topic
# holds waits in the schedule, by the order of the ops, for a time that never comes.
_APPEND = f""", new_topic AS (
    INSERT INTO {{s}}.topic AS t (name, queues)
    SELECT topic, %(queues)s::int FROM topics e WHERE NOT EXISTS (SELECT FROM {{s}}.topic k WHERE k.name = e.topic)
    -- Declared with fewer meanwhile: consumers must look at every queue that this batch uses.
    ON CONFLICT (name) DO UPDATE SET queues = greatest(t.queues, excluded.queues)
), scheduled AS (
    INSERT INTO {{s}}.scheduled_message (half_id, deliver_at, held_topic, held_sequence)
    SELECT half_id, CASE WHEN deliver_at > statement_timestamp() THEN deliver_at ELSE {HELD_UNTIL} END,
           CASE WHEN deliver_at > statement_timestamp() THEN NULL ELSE topic END,
           CASE WHEN deliver_at > statement_timestamp() THEN NULL ELSE turn END
      FROM entry WHERE deliver_at > statement_timestamp() OR held
    RETURNING half_id
), placed AS NOT MATERIALIZED (
    SELECT half_id, sequence, send_number, topic,
           CASE WHEN queue IS NOT NULL THEN (queue %% queues + queues) %% queues
                WHEN key IS NULL THEN turn %% queues
                ELSE (hashtextextended(key, 0) %% queues + queues) %% queues END::int AS queue
      FROM entry JOIN topics USING (topic)
     WHERE {_DUE}
), numbered AS (
    SELECT topic, queue, half_id, sequence, send_number, number,
           CASE WHEN number = 1 THEN coalesce((SELECT max(position) FROM {{s}}.message m
                                                WHERE m.topic = n.topic AND m.queue = n.queue), 0) END AS ended
      FROM (SELECT *, row_number() OVER (PARTITION BY topic, queue ORDER BY sequence) AS number FROM placed) n
), dispatched AS (
    INSERT INTO {{s}}.message (topic, queue, position, half_id, send_number)
    SELECT topic, queue, greatest(after, {_EPOCH_BEGINS} + {number("after")}) + number, half_id, send_number
      FROM (SELECT *, max(ended) OVER (PARTITION BY topic, queue) AS after FROM numbered) n
     ORDER BY sequence
    RETURNING 1
), news AS MATERIALIZED (
    SELECT topic AS text FROM topics WHERE due > 0 AND {_MANY}
     UNION ALL
    SELECT DISTINCT topic || '{NEWS_OF_QUEUE}' || queue FROM placed WHERE NOT {_MANY}
)
SELECT (SELECT count(*) FROM batch), (SELECT count(*) FROM dispatched), (SELECT count(*) FROM scheduled),
       (SELECT array_agg(text) FROM news), (SELECT half_ids FROM unseen)
"""

#: Wait until no transaction is writing an op, and keep new ones out until this one ends.
lock_ops: Template = Template("LOCK TABLE {s}.op_message IN SHARE MODE")

# Writers queue up behind a lock that waits, so it must not wait long; the next pass tries again.
#: For this transaction, give up waiting for a lock after 0.2 seconds.
WAIT_SHORTLY = Statement("SELECT set_config('lock_timeout', '200ms', true)")

# By the clock, since the epochs of a log that was lost aren't known here; and never one that is known.
_NEXT_EPOCH = "greatest({epoch} + 1, extract(epoch FROM clock_timestamp() - timestamptz '2024-01-01 00:00+00')::bigint)"

_BEGIN_EPOCH = f"""
WITH newest AS (
    SELECT * FROM {{s}}.dispatch_cursor ORDER BY id DESC LIMIT 1
), begun AS ({_NEW_CURSOR}
           next_xid, in_flight, target, after_sequence, until_sequence, base_sequence, newest.system_identifier,
           {_NEXT_EPOCH.replace("{epoch}", "epoch")}, {LOG}
      FROM newest, pg_control_system() s WHERE log <> {LOG} AND {{turn}}
    RETURNING epoch, log
)
SELECT begun.epoch, newest.log, begun.log FROM begun, newest
"""

#: Begin a new epoch if the log isn't the one that the newest cursor knows. Rows: ``(epoch, log before, log now)``.
begin_epoch: Template = Template(_BEGIN_EPOCH.replace("{turn}", "true"))
#: The same, if it is the transaction's turn.
begin_epoch_in_turn: Template = Template(_BEGIN_EPOCH.replace("{turn}", _TURN))

# A re-base looks for commits that are no messages, which it counts. Rollbacks of before it are counted here, at the
# first one; at a later one they were counted.
#: Start over in this cluster: compare op and message by sequence up to now, follow xids from now on.
rebase: Template = Template(f"""
WITH counted AS (
    INSERT INTO {{s}}.topic_total (topic, rolled_back)
    SELECT h.topic, count(*)
      FROM {{s}}.op_message o JOIN {{s}}.half_message h ON h.id = o.half_id
     WHERE o.resolution = 'rollback' AND NOT EXISTS (SELECT FROM {{s}}.dispatch_cursor)
     GROUP BY h.topic
){_NEW_CURSOR}
       pg_snapshot_xmax(pg_current_snapshot()), ARRAY(SELECT pg_snapshot_xip(pg_current_snapshot())), NULL,
       coalesce(min(sequence), 1) - 1, coalesce(max(sequence), 0), coalesce(max(sequence), 0),
       (SELECT system_identifier FROM pg_control_system()),
       coalesce((SELECT epoch FROM {{s}}.dispatch_cursor ORDER BY id DESC LIMIT 1),
                {_NEXT_EPOCH.replace("{epoch}", "0")}), (SELECT {LOG} FROM pg_control_system() s)
  FROM {{s}}.op_message
""")

#: Where a sequence is, NULL if that can't be seen, and the highest number of it among ``{rows}``. Values: the table and
#: the column that it numbers, its name if it isn't theirs. Rows: ``(sequence, value, highest)``.
SEQUENCE = """
SELECT s.name, CASE WHEN has_sequence_privilege(s.name, 'SELECT, USAGE')
                    THEN coalesce(pg_sequence_last_value(s.name::regclass), 0) END, coalesce(m.highest, 0)
  FROM (SELECT coalesce(pg_get_serial_sequence('{s}.' || %(table)s, %(column)s), '{s}.' || %(named)s) AS name) s,
       (SELECT max(number) AS highest FROM ({rows}) r (number)) m
"""

# Of scheduled messages: their topics aren't paused.
_NOT_PAUSED = """(NOT EXISTS (SELECT FROM {s}.topic_pause)
                 OR NOT EXISTS (SELECT FROM {s}.half_message h JOIN {s}.topic_pause p ON p.topic = h.topic
                                 WHERE h.id = half_id))"""

#: Turn due scheduled messages into messages, in turn. For `appending`; rows as of `dispatch_batch`.
RELEASE_DUE = f"""
WITH batch AS MATERIALIZED (
    DELETE FROM {{s}}.scheduled_message
     WHERE half_id = ANY (ARRAY(
           SELECT half_id FROM {{s}}.scheduled_message
            WHERE recalled_at IS NULL AND deliver_at <= statement_timestamp() AND {_TURN} AND {_NOT_PAUSED}
            ORDER BY deliver_at, half_id LIMIT %(limit)s))
       AND recalled_at IS NULL
    RETURNING half_id, deliver_at
), entry AS MATERIALIZED (
    SELECT row_number() OVER (ORDER BY b.deliver_at, o.sequence) AS sequence, o.sequence AS turn, 1 AS send_number,
           {_ENTRY_DUE}
      LEFT JOIN LATERAL (SELECT sequence FROM {{s}}.op_message WHERE half_id = b.half_id OFFSET 0) o ON true
){_MISSING}{_TOPICS}{_APPEND}"""

# Else each pass would step over all of them again.
#: Hold scheduled messages that are due and whose topic is paused, if it is the transaction's turn. Rows: one for each.
hold_due: Template = Template(f"""
UPDATE {{s}}.scheduled_message d SET deliver_at = {HELD_UNTIL}, held_topic = due.topic, held_sequence = due.sequence
  FROM (SELECT d.half_id, h.topic, o.sequence
          FROM {{s}}.scheduled_message d
          JOIN {{s}}.half_message h ON h.id = d.half_id
          JOIN {{s}}.op_message o ON o.half_id = d.half_id
         WHERE d.recalled_at IS NULL AND d.deliver_at <= statement_timestamp()
           AND h.topic IN (SELECT topic FROM {{s}}.topic_pause)
           AND EXISTS (SELECT FROM {{s}}.topic_pause) AND {_TURN}
         ORDER BY d.deliver_at, d.half_id LIMIT %(limit)s) due
 WHERE d.half_id = due.half_id AND d.recalled_at IS NULL
RETURNING 1
""")

#: Turn what topics held, and are resumed, into messages, in the order of their ops. As `RELEASE_DUE`.
RELEASE_HELD = f"""
WITH batch AS MATERIALIZED (
    DELETE FROM {{s}}.scheduled_message
     WHERE half_id = ANY (ARRAY(
           SELECT d.half_id FROM {{s}}.topic_pause p
            CROSS JOIN LATERAL (SELECT half_id, held_sequence FROM {{s}}.scheduled_message
                                 WHERE held_topic = p.topic AND recalled_at IS NULL
                                 ORDER BY held_topic, held_sequence LIMIT %(limit)s) d
            WHERE p.resumed_at IS NOT NULL AND {_TURN}
            ORDER BY d.held_sequence LIMIT %(limit)s))
       AND recalled_at IS NULL
    RETURNING half_id, held_sequence
), entry AS MATERIALIZED (
    SELECT b.held_sequence AS sequence, b.held_sequence AS turn, 1 AS send_number, {_ENTRY_DUE}
){_MISSING}{_TOPICS}{_APPEND}"""

# Until then, dispatch holds new messages as well, so that none overtakes those held. Both hold dispatch's lock.
#: End the pauses of topics that are resumed and hold nothing any more, if it is the transaction's turn.
end_pauses: Template = Template(f"""
DELETE FROM {{s}}.topic_pause p
 WHERE resumed_at IS NOT NULL AND {_TURN}
   AND NOT EXISTS (SELECT FROM {{s}}.scheduled_message d WHERE d.held_topic = p.topic AND d.recalled_at IS NULL)
""")

# Locked against prune, which deletes a half together with its messages.
#: Lock those of these halves that are messages. Rows: ``(id, newest send number)``.
lock_sends: Template = Template("""
SELECT o.half_id, n.sent
  FROM {s}.op_message o
  CROSS JOIN LATERAL (SELECT max(send_number) AS sent FROM {s}.message m WHERE m.half_id = o.half_id) n
 WHERE o.half_id = ANY (%s::uuid[]) AND o.resolution = 'commit' AND n.sent IS NOT NULL
 ORDER BY o.half_id
   FOR UPDATE OF o
""")

#: Append messages, which `lock_sends` has locked, with the next send number. As `RELEASE_DUE`.
RESEND = f"""
WITH batch AS MATERIALIZED (
    SELECT o.half_id, o.sequence, n.sent
      FROM {{s}}.op_message o
      CROSS JOIN LATERAL (SELECT max(send_number) AS sent FROM {{s}}.message m WHERE m.half_id = o.half_id) n
     WHERE o.half_id = ANY (%(half_ids)s::uuid[])
), entry AS MATERIALIZED (
    SELECT b.sequence, b.sequence AS turn, b.sent + 1 AS send_number, {_ENTRY_DUE}
){_UNSEEN}{_TOPICS}{_APPEND}"""

# The exact complement of what dispatch will find: it looks for ops from the cursor's next_xid on, and for those of
# transactions that were in flight. Messages with a schedule are the release's to make.
#: Lock those of these halves that should be messages and aren't. Rows: ``(id, dispatch has passed it)``.
#: Without a ``cursor``, dispatch has passed none.
lock_undispatched: Template = Template("""
SELECT o.half_id, d.half_id IS NULL AND o.xid < %(next_xid)s::xid8 AND o.xid <> ALL (%(in_flight)s::xid8[])
  FROM {s}.op_message o
  JOIN {s}.half_message h ON h.id = o.half_id
  LEFT JOIN {s}.scheduled_message d ON d.half_id = o.half_id
 WHERE o.half_id = ANY (%(half_ids)s::uuid[]) AND o.resolution = 'commit'
   AND (d.half_id IS NULL OR (d.recalled_at IS NULL AND d.deliver_at <= statement_timestamp()))
   AND NOT EXISTS (SELECT FROM {s}.message m WHERE m.half_id = o.half_id)
   AND NOT EXISTS (SELECT FROM {s}.compensation c WHERE c.half_id = o.half_id)
 ORDER BY o.half_id
   FOR UPDATE OF o
""")

#: Make the messages of ops, or their schedules, whatever the cursor says. As `RELEASE_DUE`.
APPEND_THESE = f"""
WITH batch AS MATERIALIZED (
    SELECT half_id, sequence, resolution FROM {{s}}.op_message WHERE half_id = ANY (%(half_ids)s::uuid[])
){_OPS_TO_ENTRIES}{_UNSEEN}{_TOPICS}{_APPEND}"""

#: Take back a message that is not due yet, leaving the evidence.
#: Rows: ``(halves found, deliver_at, resolution, recalled now, is already a message)``.
recall: Template = Template("""
WITH half AS (
    SELECT h.id, coalesce(h.deliver_at, d.deliver_at) AS deliver_at, o.resolution
      FROM {s}.half_message h LEFT JOIN {s}.op_message o ON o.half_id = h.id
      LEFT JOIN {s}.scheduled_message d ON d.half_id = h.id
     WHERE h.id = %(half_id)s
), recalled AS (
    INSERT INTO {s}.scheduled_message AS d (half_id, deliver_at, recalled_at, recalled_by)
    SELECT id, deliver_at, clock_timestamp(), %(actor)s FROM half
     WHERE deliver_at IS NOT NULL AND resolution = 'commit'
       AND NOT EXISTS (SELECT FROM {s}.message m WHERE m.half_id = half.id)
    ON CONFLICT (half_id) DO UPDATE SET recalled_at = clock_timestamp(), recalled_by = %(actor)s
     WHERE d.recalled_at IS NULL
    RETURNING half_id
)
SELECT (SELECT count(*) FROM half), (SELECT deliver_at FROM half), (SELECT resolution FROM half),
       (SELECT count(*) FROM recalled),
       EXISTS (SELECT FROM {s}.message m WHERE m.half_id = %(half_id)s)
""")

# Under dispatch's lock, so that a message sent before has a position before those ends, and one sent later one after.
#: Create a topic or give it more queues; never fewer, since messages may wait in them.
declare_topic: Template = Template("""
WITH grown AS (
    INSERT INTO {s}.topic_growth (topic, queues, ends)
    SELECT name, %(queues)s, ARRAY(
           SELECT coalesce((SELECT max(position) FROM {s}.message m WHERE m.topic = t.name AND m.queue = q), 0)
             FROM generate_series(0, t.queues - 1) q ORDER BY q)
      FROM {s}.topic t WHERE name = %(name)s AND queues < %(queues)s
)
INSERT INTO {s}.topic AS t (name, queues) VALUES (%(name)s, %(queues)s)
ON CONFLICT (name) DO UPDATE SET queues = excluded.queues WHERE t.queues < excluded.queues
""")

#: Read the number of queues of a topic. Rows: ``(queues,)`` or none.
topic_queues: Template = Template("SELECT queues FROM {s}.topic WHERE name = %s")

#: Read which of these were compensated. Rows: ``(id,)``.
compensated: Template = Template("SELECT half_id FROM {s}.compensation WHERE half_id = ANY (%s::uuid[])")


def _dispatching(source: str, cursor: str) -> str:
    """Return the SQL that makes messages of a batch of ops, and moves the cursor."""
    return f"WITH {source}{_OPS_TO_ENTRIES}{_TOPICS}{_TOTALS}{cursor}{_MISSING}{_APPEND}"


_DISPATCH_FRESH = _dispatching(_FRESH, _CURSOR_OF_FRESH)
_DISPATCH_REST = _dispatching(_REST, _CURSOR_OF_REST.replace("{read}", "batch"))
_DISPATCH_MISSED = _dispatching(_MISSED, _CURSOR_OF_REST.replace("{read}", "old"))


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far dispatch has come; xids as text, since they are 64-bit and only PostgreSQL computes with them.

    Dispatched is every op that the snapshot ``(next_xid, in_flight)`` sees. ``target`` is a later snapshot of
    which the ops up to ``after_sequence`` are dispatched, those up to ``until_sequence`` not yet. Without a
    ``target``, ``until_sequence`` marks a re-base under way. Ops up to ``base_sequence`` are of before a
    re-base: their xids mean nothing in this cluster, and the re-base sets them to 0. ``log`` is the one that has the
    messages of ``epoch``; None before the first.
    """

    id: int
    next_xid: str
    in_flight: list[str]
    target: str | None
    after_sequence: int | None
    until_sequence: int | None
    base_sequence: int
    system_identifier: int
    current_system: int
    epoch: int
    log: str | None
    current_log: str
    pending: bool

    @property
    def values(self) -> dict[str, Any]:
        """What tells how far it has come, as statements bind it."""
        return {
            "next_xid": self.next_xid,
            "in_flight": self.in_flight,
            "target": self.target,
            "after": self.after_sequence,
            "until": self.until_sequence,
        }

    @property
    def restored(self) -> bool:
        """Was the database restored into another cluster since this row was written?"""
        return self.system_identifier != self.current_system

    @property
    def fell_back(self) -> bool:
        """Is the log another one, which may have lost messages that consumers have seen?"""
        return self.log is not None and self.log != self.current_log


def appending(settings: Settings, limit: int, sql: str, **values: object) -> Statement:
    """Return a statement that ends with `_APPEND`, with the values that this binds, and more."""
    return Statement(in_schema(sql, settings.schema), {"queues": settings.queues, "limit": limit, **values})


def dispatch_batch(settings: Settings, limit: int, cursor: Cursor) -> Statement:
    """Turn the next ops into messages and move the cursor, all in one snapshot, if `keep_turn` has kept the turn.

    Rows: ``(ops taken, messages, scheduled, news for `read_news` or None, halves that can't be seen or None)``.
    """
    fresh = cursor.until_sequence is None
    return appending(
        settings,
        limit,
        _DISPATCH_FRESH if fresh else _DISPATCH_MISSED if cursor.target is None else _DISPATCH_REST,
        **cursor.values,
        base=cursor.base_sequence,
        system=cursor.system_identifier,
        epoch=cursor.epoch,
        log=cursor.current_log,
    )
