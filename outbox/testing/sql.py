"""Statements of the tests' kit: which messages wait, which were sent, what the inboxes say; and rows made older."""

from __future__ import annotations

from outbox.consumer.sql import START_TIME
from outbox.database.execute import Statement, Template
from outbox.database.sql import TIMED

#: Undo what a pass has set for the rest of its transaction: a test that stands still in a debugger must not be ended.
STAY_IDLE = Statement("SELECT set_config('idle_in_transaction_session_timeout', '0', true)")

#: Tell which tables there are. Rows: ``(the producer's, the consumer's)``.
parts: Template = Template(
    "SELECT to_regclass('{s}.op_message') IS NOT NULL, to_regclass('{s}.consumer_message') IS NOT NULL"
)

#: Have the ops written of messages sent in SQL, or through a driver's own connection, which wait for a COMMIT.
write_late_ops: Template = Template("SET CONSTRAINTS {s}.commit_half IMMEDIATE")
#: Have them wait again.
wait_for_commit: Template = Template("SET CONSTRAINTS {s}.commit_half DEFERRED")

#: Read the committed halves that are neither message nor scheduled, in the order of their ops. Rows: ``(id,)``.
undispatched: Template = Template("""
SELECT o.half_id FROM {s}.op_message o
 WHERE o.resolution = 'commit'
   AND NOT EXISTS (SELECT FROM {s}.message m WHERE m.half_id = o.half_id)
   AND NOT EXISTS (SELECT FROM {s}.scheduled_message d WHERE d.half_id = o.half_id)
   AND NOT EXISTS (SELECT FROM {s}.compensation c WHERE c.half_id = o.half_id)
 ORDER BY o.sequence LIMIT 1000
""")

# --- rows made older -------------------------------------------------------------------------------------

_MOMENT = "interval '1 ms'"
_EARLIER = "make_interval(secs => %(seconds)s)"


def _older(table: str, row_id: str, condition: str, time: str, over: str = _MOMENT) -> Template:
    """Subtract ``seconds`` from a time; where they are NULL, let it be over, if it isn't, since an interval, ``over``.

    A message that was to come earlier still does: the times of two rows are a microsecond apart at least.
    """
    # Not of rows that another transaction is about to change: workers may run meanwhile.
    return Template(f"""
UPDATE {{s}}.{table} t
   SET {time} = CASE WHEN %(seconds)s::float8 IS NULL
                     THEN least(t.{time}, statement_timestamp() - {over} - ranked.later * interval '1 us')
                     ELSE t.{time} - {_EARLIER} END
  FROM (SELECT segment, place, row_number() OVER (ORDER BY {time} DESC, {row_id} DESC) AS later
          FROM (SELECT tableoid AS segment, ctid AS place, {time}, {row_id} FROM {{s}}.{table}
                 WHERE {condition} AND (%(ids)s::uuid[] IS NULL OR {row_id} = ANY (%(ids)s::uuid[]))
                   FOR UPDATE SKIP LOCKED) locked) ranked
 WHERE t.tableoid = ranked.segment AND t.ctid = ranked.place
""")


#: Let messages be due that were sent to be delivered later.
age_delayed: Template = _older("scheduled_message", "half_id", "recalled_at IS NULL", "deliver_at")
# One that a worker has begun to retry is due for others that much later.
#: Let failed messages be due for their retry.
age_failed: Template = _older(
    "consumer_message", "message_id", f"status IN {TIMED}", "next_attempt_at", f"({START_TIME} + {_MOMENT})"
)
#: Let undecided halves be due for their check; not parked ones.
age_orphans: Template = _older("half_check", "half_id", "parked_at IS NULL", "next_check_at")
#: Let undecided halves have been written earlier, which checkers are told as their age.
age_halves: Template = Template(f"""
UPDATE {{s}}.half_message SET born_at = born_at - {_EARLIER}
 WHERE id IN (SELECT half_id FROM {{s}}.half_check WHERE (%(ids)s::uuid[] IS NULL OR half_id = ANY (%(ids)s::uuid[])))
""")

# --- what there is ---------------------------------------------------------------------------------------

#: Read the newest halves with their decisions. Rows: ``(topic, key, tag, headers, content type, body, deliver_at, id,
#: resolution)``, the oldest first, by their ids.
halves: Template = Template("""
SELECT topic, key, tag, headers::text, content_type, body, deliver_at, id, resolution
  FROM (SELECT h.*, o.resolution FROM {s}.half_message h LEFT JOIN {s}.op_message o ON o.half_id = h.id
         ORDER BY h.id DESC LIMIT 1000) n
 ORDER BY id
""")

#: Read the newest rows of the inboxes. Rows: ``(group, topic, id, status, attempts, last error)``, the oldest first.
inbox: Template = Template("""
SELECT consumer_group, topic, message_id, status, attempts, last_error
  FROM (SELECT * FROM {s}.consumer_message ORDER BY message_id DESC LIMIT 1000) n
 ORDER BY message_id, consumer_group
""")

#: Tell whether a server process is there. Rows: ``(it is,)``.
IS_THERE = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)"
