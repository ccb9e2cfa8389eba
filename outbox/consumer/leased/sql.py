"""Statements about leased messages: take them, and settle them, each guarded by the number of its lease.

All of them run in the consumer's database. A row that is `taken` has the number of its lease, and the lease's end in
``next_attempt_at``: a message whose lease has ended is due again by itself, and nothing has to be written for that. A
lease counts as long as its number is the row's, and its end lies ahead by the database's clock; a statement that
changes a row asks both in its condition, which PostgreSQL asks again of a row that it waited for.
"""

from __future__ import annotations

from outbox.consumer.sql import (
    FIRST_FAILED_AT,
    HOLDS_KEY,
    MARKED_TRANSACTION,
    is_first_of_key,
    last_turn,
    of_earlier_passage,
)
from outbox.database.execute import Statement, Template
from outbox.database.sql import TIMED

_UNTIL = "clock_timestamp() + make_interval(secs => %(invisible)s)"
# Drawn, not counted: after an operator's retry or reset of a row, too, no older handle fits a later lease.
_NUMBER = "(random() * 9007199254740991)::bigint"

#: What the inbox says of an attempt whose client didn't settle its message.
LAPSED = "taken, and not settled before the lease ended"
_UNSAID = "due.lapsed AND (due.taken_by IS NOT NULL OR m.last_error IS NULL)"

# As in the retry pass: a row that another transaction has is left alone. The lease that lapsed was an attempt; one
# without a client was given up by `fail` in SQL, which has written why. One of an earlier passage comes when the group
# reads it again: else one take would hand it out twice.
#: Take messages that are due: they failed, or their lease has ended. Rows: ``(id, queue, position, attempts before
#: this one, number of the lease, its end, it was never attempted, first failed at, passage, the lease before has
#: lapsed, its client, order key, its turn there, the last error, its kind)``.
take_due: Template = Template(f"""
WITH due AS MATERIALIZED (
    SELECT message_id, status = 'taken' AS lapsed, attempts = 0 AND last_error IS NULL AND status = 'failed' AS is_new,
           {FIRST_FAILED_AT} AS first_failed_at, taken_by
      FROM {{s}}.consumer_message c
     WHERE consumer_group = %(group)s AND topic = %(topic)s AND status IN {TIMED}
       AND next_attempt_at <= clock_timestamp() AND NOT {of_earlier_passage("c")} AND {is_first_of_key("c")}
     ORDER BY next_attempt_at LIMIT %(limit)s
       FOR UPDATE SKIP LOCKED
)
UPDATE {{s}}.consumer_message m
   SET status = 'taken', starts = 0, lease = {_NUMBER}, attempts = m.attempts + due.lapsed::int,
       next_attempt_at = {_UNTIL}, taken_by = %(taker)s, take_id = %(take_id)s, follows = false,
       last_error = CASE WHEN {_UNSAID} THEN %(error)s ELSE m.last_error END,
       error_kind = CASE WHEN {_UNSAID} THEN %(error)s ELSE m.error_kind END, changed_at = clock_timestamp()
  FROM due
 WHERE m.consumer_group = %(group)s AND m.message_id = due.message_id
RETURNING m.message_id, m.queue, m.position, m.attempts, m.lease, m.next_attempt_at, due.is_new, due.first_failed_at,
          m.passage, due.lapsed, due.taken_by, m.order_key, m.turn,
          m.last_error, m.error_kind
""")

#: The condition that a row of a key was never handed out: it waits for the one before it, or came back unseen.
_UNTRIED = """w.attempts = 0 AND w.last_error IS NULL AND w.discarded_at IS NULL
       AND (w.status = 'waiting' OR w.status = 'failed' AND w.next_attempt_at <= clock_timestamp())"""

# Only up to the first one that can't be had: a row that another transaction has is left alone, and so are all behind
# it. The snapshot has numbered the rows before they are locked; a gap in the numbers is such a row.
#: Take, with messages that this transaction has taken as the first of their keys, those that come next of each key and
#: were never handed out, in a row; the nearest of each key first. Rows: as of `take_due`.
take_following: Template = Template(f"""
WITH next AS MATERIALIZED (
    SELECT n.*, row_number() OVER in_turn AS number, bool_and(n.untried) OVER in_turn AS ready
      FROM {{s}}.consumer_message f CROSS JOIN LATERAL (
           SELECT w.message_id, w.order_key, w.turn, w.position, {_UNTRIED} AS untried
             FROM {{s}}.consumer_message w
            WHERE w.consumer_group = %(group)s AND w.topic = %(topic)s AND w.order_key = f.order_key
              AND {HOLDS_KEY} AND NOT {of_earlier_passage("w")}
              AND (w.turn, w.position, w.message_id) > (f.turn, f.position, f.message_id)
            ORDER BY w.turn, w.position, w.message_id LIMIT %(limit)s) n
     WHERE f.consumer_group = %(group)s AND f.message_id = ANY (%(ids)s::uuid[])
    WINDOW in_turn AS (PARTITION BY n.order_key ORDER BY n.turn, n.position, n.message_id)
), locked AS MATERIALIZED (
    SELECT w.message_id, w.order_key, next.number
      FROM next JOIN {{s}}.consumer_message w ON w.consumer_group = %(group)s AND w.message_id = next.message_id
     WHERE next.ready AND w.turn = next.turn AND {_UNTRIED}
       FOR UPDATE OF w SKIP LOCKED
), together AS MATERIALIZED (
    SELECT message_id
      FROM (SELECT l.*, row_number() OVER (PARTITION BY order_key ORDER BY number) AS rank FROM locked l) l
     WHERE rank = number ORDER BY number LIMIT %(limit)s
)
UPDATE {{s}}.consumer_message m
   SET status = 'taken', starts = 0, lease = {_NUMBER}, next_attempt_at = {_UNTIL}, taken_by = %(taker)s,
       take_id = %(take_id)s, follows = false, changed_at = clock_timestamp()
  FROM together
 WHERE m.consumer_group = %(group)s AND m.message_id = together.message_id
RETURNING m.message_id, m.queue, m.position, m.attempts, m.lease, m.next_attempt_at, true, NULL::timestamptz,
          m.passage, false, m.taken_by, m.order_key, m.turn
""")

#: Take again, under new leases, what an earlier take of the same name has, since its answer was lost.
#: Rows: as of `take_due`.
take_again: Template = Template(f"""
UPDATE {{s}}.consumer_message m
   SET lease = {_NUMBER}, next_attempt_at = {_UNTIL}, taken_by = %(taker)s, changed_at = clock_timestamp()
 WHERE consumer_group = %(group)s AND message_id = ANY (ARRAY(
       SELECT message_id FROM {{s}}.consumer_message
        WHERE consumer_group = %(group)s AND topic = %(topic)s AND take_id = %(take_id)s AND status = 'taken'
          AND next_attempt_at > clock_timestamp()
          FOR UPDATE SKIP LOCKED))
RETURNING message_id, queue, position, attempts, lease, next_attempt_at, false,
          {FIRST_FAILED_AT}, passage, false, taken_by, order_key, turn
""")

# No ON CONFLICT, as of those that are consumed: a quarantine that came in between must undo the whole take. A key is
# only of a group that is ordered by key.
#: Insert the inbox rows of new messages that are taken, in the transaction that was marked. Rows: ``(id, number of the
#: lease, its end)``.
take_new: Template = Template(f"""
INSERT INTO {{s}}.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts, body_digest,
                                   passage, next_attempt_at, lease, taken_by, take_id, order_key, turn)
SELECT %(group)s, id, %(topic)s, %(queue)s, position, 'taken', 0, digest, %(passage)s, {_UNTIL}, {_NUMBER}, %(taker)s,
       %(take_id)s, key,
       CASE WHEN key IS NOT NULL THEN {last_turn("m.key")} + row_number() OVER (PARTITION BY key ORDER BY position) END
  FROM unnest(%(ids)s::uuid[], %(positions)s::bigint[], %(digests)s::bytea[], %(keys)s::text[])
       AS m (id, position, digest, key)
 WHERE {MARKED_TRANSACTION}
RETURNING message_id, lease, next_attempt_at
""")

#: Take messages that this passage handles again, over their rows of an earlier one, which are locked and were kept.
take_reread: Template = Template(f"""
UPDATE {{s}}.consumer_message c
   SET status = 'taken', attempts = 0, starts = 0, lease = {_NUMBER}, next_attempt_at = {_UNTIL}, queue = %(queue)s,
       position = m.position, body_digest = m.digest, last_error = NULL, error_kind = NULL, passage = %(passage)s,
       taken_by = %(taker)s, take_id = %(take_id)s, follows = false, order_key = m.key,
       turn = CASE WHEN m.key IS NOT NULL THEN {last_turn("m.key")} + m.number END, changed_at = clock_timestamp()
  FROM unnest(%(ids)s::uuid[], %(positions)s::bigint[], %(digests)s::bytea[], %(keys)s::text[])
       WITH ORDINALITY AS m (id, position, digest, key, number)
 WHERE c.consumer_group = %(group)s AND c.message_id = ANY (%(ids)s::uuid[]) AND c.message_id = m.id
   AND {MARKED_TRANSACTION}
RETURNING c.message_id, c.lease, c.next_attempt_at
""")

# IS TRUE, and the ids once more beside each join: a row is found by its key. With many that are taken, the index of all
# of them looks small to the planner; where statistics are older than the group, all of it does. An acknowledgement
# would walk through either.
#: The condition that a lease, by its message and its number, is the row's and hasn't ended.
_HELD = "(m.status = 'taken') IS TRUE AND m.lease = l.number AND m.next_attempt_at > clock_timestamp()"
_NAMED = "m.consumer_group = %(group)s AND m.message_id = ANY (%(ids)s::uuid[])"
#: The leases that are named, as ``l (message_id, number, order_key)``: those alone that can be locked, or, of a form
#: that waits, all of them; then the UPDATE waits.
_LEASES = f"""
WITH l AS MATERIALIZED (
    SELECT m.message_id, m.order_key, l.number FROM unnest(%(ids)s::uuid[], %(numbers)s::bigint[]) l (id, number)
      JOIN {{s}}.consumer_message m ON {_NAMED} AND m.message_id = l.id
     WHERE (m.topic = %(topic)s AND m.status = 'taken') IS TRUE{{free}}
)"""


class LeaseTemplate:
    """A statement about leases in two forms: one waits for rows that other transactions have, one leaves them alone.

    Another transaction that has such a row is settling it, and may last: its client may do so with its own change.
    """

    def __init__(self, sql: str) -> None:
        free = sql.replace("{free}", " FOR UPDATE OF m SKIP LOCKED").replace("{skip}", " SKIP LOCKED")
        self._forms = {True: Template(sql.replace("{free}", "").replace("{skip}", "")), False: Template(free)}

    def __call__(self, schema: str, /, *, waits: bool, **named: object) -> Statement:
        """Return the statement that waits, or the one that doesn't."""
        return self._forms[waits](schema, **named)


# The number of the lease stays: the client that settles twice, since its answer was lost, is told that it has.
#: Write that messages were handled under these leases. Rows: ``(id, attempts, queue, number of the lease, order key)``,
#: of those that could.
acknowledge: LeaseTemplate = LeaseTemplate(f"""{_LEASES}
UPDATE {{s}}.consumer_message m
   SET status = 'consumed', attempts = attempts + 1, next_attempt_at = NULL, last_error = NULL, error_kind = NULL,
       taken_by = NULL, take_id = NULL, order_key = NULL, turn = NULL, follows = false, changed_at = clock_timestamp()
  FROM l WHERE {_NAMED} AND m.message_id = l.message_id AND {_HELD}
RETURNING m.message_id, m.attempts, m.queue, m.lease, l.order_key
""")

#: Where messages stand that have the number of these leases still. Rows: ``(id, number of the lease, status)``: one
#: that is taken, and whose lease hasn't ended, can't be settled now, since another transaction has it.
statuses: Template = Template(f"""
SELECT m.message_id, m.lease, m.status FROM unnest(%(ids)s::uuid[], %(numbers)s::bigint[]) l (id, number)
  JOIN {{s}}.consumer_message m ON {_NAMED} AND m.message_id = l.id AND m.topic = %(topic)s
 WHERE m.lease = l.number AND (m.status <> 'taken' OR {_HELD})
""")

# It may be done twice, since the answer to its COMMIT was lost: by then the number is the new one.
#: Have a lease end in so many seconds from now, under another number. Rows: ``(end,)``, or none if it has ended.
extend: LeaseTemplate = LeaseTemplate(f"""{_LEASES}
UPDATE {{s}}.consumer_message m SET lease = %(next)s, next_attempt_at = {_UNTIL}, changed_at = clock_timestamp()
  FROM l WHERE {_NAMED} AND m.message_id = l.message_id
   AND ({_HELD} OR (m.status = 'taken') IS TRUE AND m.lease = %(next)s)
RETURNING m.next_attempt_at
""")

# One that its client has extended for longer stays so.
#: Renew leases under their numbers: their clients are at work. Rows: ``(id,)`` of those that are renewed.
renew: LeaseTemplate = LeaseTemplate(f"""{_LEASES}
UPDATE {{s}}.consumer_message m SET next_attempt_at = greatest(m.next_attempt_at, {_UNTIL})
  FROM l WHERE {_NAMED} AND m.message_id = l.message_id AND {_HELD}
RETURNING m.message_id
""")

#: Have messages due again that were taken for a client that is gone: nothing was tried.
give_back: LeaseTemplate = LeaseTemplate(f"""{_LEASES}
UPDATE {{s}}.consumer_message m
   SET status = 'failed', next_attempt_at = clock_timestamp(), taken_by = NULL, take_id = NULL,
       changed_at = clock_timestamp()
  FROM l WHERE {_NAMED} AND m.message_id = l.message_id AND {_HELD}
""")

# A row that another transaction has is left to it: its client settles it at this moment, in a transaction that may
# last, and which may wait for our row in turn. Without a number, no earlier word counts, also after an act on the row.
#: Have the later messages of a key wait again that a take handed out with an earlier one, and that were never tried.
hold_back: Template = Template(f"""
UPDATE {{s}}.consumer_message
   SET status = 'waiting', follows = true, next_attempt_at = NULL, lease = NULL, taken_by = NULL, take_id = NULL,
       changed_at = clock_timestamp()
 WHERE consumer_group = %(group)s AND message_id = ANY (ARRAY(
       SELECT message_id FROM {{s}}.consumer_message
        WHERE consumer_group = %(group)s AND topic = %(topic)s AND order_key = %(key)s AND {HOLDS_KEY}
          AND (turn, position, message_id) > (%(turn)s, %(position)s, %(id)s)
          AND status = 'taken' AND attempts = 0 AND last_error IS NULL
          AND taken_by IS NOT DISTINCT FROM %(taker)s AND take_id IS NOT DISTINCT FROM %(take_id)s
          FOR UPDATE SKIP LOCKED))
""")

#: Lock a message under a lease that hasn't ended. Rows: ``(attempts, order key, its turn there, client, take)`` or
#: none.
lock: LeaseTemplate = LeaseTemplate(f"""
SELECT m.attempts, m.order_key, m.turn, m.taken_by, m.take_id
  FROM unnest(%(ids)s::uuid[], %(numbers)s::bigint[]) l (id, number)
  JOIN {{s}}.consumer_message m ON {_NAMED} AND m.message_id = l.id AND m.topic = %(topic)s
 WHERE {_HELD}
   FOR UPDATE OF m{{skip}}
""")

#: Write what became of a locked message whose attempt failed: it is due again after ``delay`` seconds, or parked.
fail: Template = Template(
    """
UPDATE {s}.consumer_message
   SET status = %(status)s, attempts = %(attempts)s, taken_by = NULL, take_id = NULL,
       next_attempt_at = clock_timestamp() + make_interval(secs => %(delay)s), last_error = %(error)s,
       error_kind = %(kind)s, order_key = CASE WHEN %(holds)s THEN order_key END,
       turn = CASE WHEN %(holds)s THEN turn END, changed_at = clock_timestamp()
 WHERE consumer_group = %(group)s AND message_id = %(id)s
""",
    lossy=("error", "kind"),
)

#: Have all that a client has taken of a group due again soon: it has said that it ends. What is taken for longer than
#: ``longest`` stays so. Rows: ``(id,)``.
give_up: Template = Template("""
UPDATE {s}.consumer_message
   SET next_attempt_at = clock_timestamp() + make_interval(secs => %(seconds)s), changed_at = clock_timestamp()
 WHERE consumer_group = %(group)s AND message_id = ANY (ARRAY(
       SELECT message_id FROM {s}.consumer_message
        WHERE consumer_group = %(group)s AND topic = %(topic)s AND status = 'taken' AND taken_by = %(taker)s
          AND next_attempt_at > clock_timestamp() + make_interval(secs => %(seconds)s)
          AND next_attempt_at <= clock_timestamp() + make_interval(secs => %(longest)s)
          FOR UPDATE SKIP LOCKED))
RETURNING message_id
""")

#: Write of a message that was taken just now, under a lease, that it was too old to be handled.
expire: Template = Template("""
UPDATE {s}.consumer_message
   SET status = 'expired', next_attempt_at = NULL, taken_by = NULL, take_id = NULL, order_key = NULL, turn = NULL,
       follows = false, changed_at = clock_timestamp()
 WHERE consumer_group = %(group)s AND message_id = %(id)s AND (status = 'taken') IS TRUE
   AND lease = %(number)s
""")
