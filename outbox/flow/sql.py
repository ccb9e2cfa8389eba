"""Statements of sagas: the row of each, and one for each command that it has sent."""

from __future__ import annotations

from outbox.database.duty import Duty
from outbox.database.execute import Template
from outbox.message.content import CONVERSATION_HEADER, CORRELATION_HEADER

_SAGA = "id, name, status, content_type, body, started_at, ended_at, reason"
_COMMAND = """message_id, number, step, kind, sent_at, overdue_at, answered_at, answer, reason,
       result_type, result"""

#: Write down that a saga was started. Rows: one, or none if it was before.
start: Template = Template("""
INSERT INTO {s}.saga (id, name, content_type, body)
VALUES (%(id)s, %(name)s, %(content_type)s, %(body)s)
ON CONFLICT DO NOTHING
RETURNING started_at
""")

# A transaction that changes a saga holds its row from here on. Its next statement's snapshot is of after that lock.
#: Lock the saga that has sent a command. Rows: one as of `sagas`, or none.
lock: Template = Template(f"""
SELECT {_SAGA} FROM {{s}}.saga
 WHERE name = %(name)s AND id = (SELECT saga_id FROM {{s}}.saga_command WHERE message_id = %(command)s)
   FOR UPDATE
""")

#: Read what a saga has sent, of which one is the given command, in the order of sending.
commands_beside: Template = Template(f"""
SELECT {_COMMAND} FROM {{s}}.saga_command
 WHERE saga_id = (SELECT saga_id FROM {{s}}.saga_command WHERE message_id = %(command)s)
 ORDER BY number
""")

#: Read the commands of sagas in the order of sending. Rows: the saga's id, then as of `commands_beside`.
commands: Template = Template(f"""
SELECT saga_id, {_COMMAND} FROM {{s}}.saga_command WHERE saga_id = ANY (%s::uuid[]) ORDER BY saga_id, number
""")

#: Read the newest sagas: of a name, in a status, with an id.
sagas: Template = Template(f"""
SELECT {_SAGA} FROM {{s}}.saga
 WHERE (%(id)s::uuid IS NULL OR id = %(id)s) AND (%(name)s::text IS NULL OR name = %(name)s)
   AND (%(status)s::text IS NULL OR status = %(status)s)
 ORDER BY id DESC LIMIT %(limit)s
""")

# What an operator sees of a flow in a list: the step of its last command, and since when an answer is overdue.
_LISTED = """f.id, f.name, f.status, f.reason, f.started_at, f.ended_at, c.step, c.kind, o.overdue_at"""
_COMMANDED = """
      LEFT JOIN LATERAL (SELECT step, kind FROM {s}.saga_command
                          WHERE saga_id = f.id ORDER BY number DESC LIMIT 1) c ON true
      LEFT JOIN LATERAL (SELECT min(overdue_at) AS overdue_at FROM {s}.saga_command
                          WHERE saga_id = f.id AND answered_at IS NULL) o ON true"""

# The end of the search is read in the same snapshot as its finds.
#: Read the newest sagas below an id that fit. Rows: where the search stopped (an id), then as of `listed_flow`.
listed_flows: Template = Template(f"""
WITH searched AS MATERIALIZED (
    SELECT * FROM {{s}}.saga
     WHERE (%(below)s::uuid IS NULL OR id < %(below)s) AND (NOT %(open)s OR ended_at IS NULL)
     ORDER BY id DESC LIMIT %(window)s
), found AS MATERIALIZED (
    SELECT {_LISTED}
      FROM searched f{_COMMANDED}
     WHERE (%(saga)s::text IS NULL OR f.name = %(saga)s) AND (NOT %(overdue)s OR o.overdue_at IS NOT NULL)
       AND (%(status)s::text[] IS NULL OR f.status = ANY (%(status)s))
     ORDER BY f.id DESC LIMIT %(limit)s
)
SELECT e.id, f.* FROM (SELECT count(*) AS rows FROM found) n
  LEFT JOIN (SELECT id FROM searched ORDER BY id LIMIT 1) e
         ON n.rows < %(limit)s AND (SELECT count(*) FROM searched) = %(window)s
  LEFT JOIN found f ON true
 ORDER BY f.id DESC
""")

#: Read one saga.
#: Rows: ``(id, name, status, reason, started_at, ended_at, step and kind of its last command, overdue_at)`` or none.
listed_flow: Template = Template(f"SELECT {_LISTED} FROM {{s}}.saga f{_COMMANDED} WHERE f.id = %(id)s")

#: Read when the deadlines of a saga come. Rows: ``(topic, id of the command, time)``, also of other delayed answers.
deadlines: Template = Template(f"""
SELECT m.topic, m.headers ->> '{CORRELATION_HEADER}', d.deliver_at
  FROM {{s}}.half_message m JOIN {{s}}.scheduled_message d ON d.half_id = m.id AND d.recalled_at IS NULL
 WHERE m.headers ? '{CONVERSATION_HEADER}' AND m.headers ? '{CORRELATION_HEADER}'
   AND "left"(m.headers ->> '{CONVERSATION_HEADER}', 36) = (
       SELECT coalesce("left"(h.headers ->> '{CONVERSATION_HEADER}', 36), h.id::text)
         FROM {{s}}.half_message h WHERE h.id = %(id)s)
""")

#: Read what a command is, and its answer. Rows: ``(saga's id, its name, step, kind, answer)`` or none.
commanded: Template = Template("""
SELECT f.id, f.name, c.step, c.kind, c.answer
  FROM {s}.saga_command c JOIN {s}.saga f ON f.id = c.saga_id WHERE c.message_id = %(command)s
""")

#: Tell whether a saga may yet come to an answer: it hasn't ended, or was sent and hasn't begun. Rows: ``(it may,)``.
may_come: Template = Template("""
SELECT EXISTS (SELECT FROM {s}.saga WHERE id = ANY (%(ids)s::uuid[]) AND name = %(name)s AND ended_at IS NULL)
    OR EXISTS (SELECT FROM {s}.half_message WHERE id = ANY (%(ids)s::uuid[]) AND topic = %(start)s
                  AND id NOT IN (SELECT id FROM {s}.saga WHERE id = ANY (%(ids)s::uuid[])))
""")

#: Write down a command that is sent with this transaction.
send: Template = Template("""
INSERT INTO {s}.saga_command (message_id, saga_id, number, step, kind)
VALUES (%(message_id)s, %(saga_id)s, %(number)s, %(step)s, %(kind)s)
""")

#: Write down the answer to a command.
answer: Template = Template("""
UPDATE {s}.saga_command
   SET answer = %(answer)s, answered_at = clock_timestamp(), reason = %(reason)s,
       result_type = %(result_type)s, result = %(result)s
 WHERE message_id = %(command)s
""")

#: Write down that a command wasn't answered in time.
overdue: Template = Template("""
UPDATE {s}.saga_command SET overdue_at = coalesce(overdue_at, clock_timestamp()) WHERE message_id = %(command)s
""")

#: Write down why a command that undoes a step can't be delivered.
stuck: Template = Template("""
UPDATE {s}.saga_command SET reason = %(reason)s, overdue_at = coalesce(overdue_at, clock_timestamp())
 WHERE message_id = %(command)s
""")

#: Change a saga's status; ``ended``: it is its last one.
change: Template = Template("""
UPDATE {s}.saga
   SET status = %(status)s, reason = coalesce(reason, %(reason)s),
       ended_at = CASE WHEN %(ended)s THEN clock_timestamp() END
 WHERE id = %(id)s
""")

# --- try, confirm, cancel --------------------------------------------------------------------------------------------

# Each waits for a transaction that has the row, and then sees what it did: the unique key is what makes a call exclude
# another.
_BRANCH = "transaction_id = %(transaction_id)s AND branch = %(branch)s AND participant = %(participant)s"

#: Write down that a branch is tried. Rows: one, or none if there was a call before.
try_branch: Template = Template("""
INSERT INTO {s}.tcc_branch (transaction_id, branch, participant, state, was_tried)
VALUES (%(transaction_id)s, %(branch)s, %(participant)s, 'tried', true)
ON CONFLICT DO NOTHING RETURNING state
""")

#: Write down that a branch is confirmed. Rows: one, or none if it isn't tried.
confirm_branch: Template = Template(f"""
UPDATE {{s}}.tcc_branch SET state = 'confirmed', changed_at = clock_timestamp()
 WHERE {_BRANCH} AND state = 'tried' RETURNING state
""")

#: Write down that a branch is cancelled, also one that there isn't yet. Rows: ``(it was tried,)``, or none if it is
#: confirmed or cancelled.
cancel_branch: Template = Template("""
INSERT INTO {s}.tcc_branch AS b (transaction_id, branch, participant, state, was_tried)
VALUES (%(transaction_id)s, %(branch)s, %(participant)s, 'cancelled', false)
ON CONFLICT (transaction_id, branch, participant) DO UPDATE SET state = 'cancelled', changed_at = clock_timestamp()
 WHERE b.state = 'tried'
RETURNING was_tried
""")

#: Read the state of a branch. Rows: ``(state,)`` or none.
branch_state: Template = Template(f"SELECT state FROM {{s}}.tcc_branch WHERE {_BRANCH}")


DUTIES = (
    Duty(
        "saga",
        "Starts sagas and branches, and takes their answers.",
        """
        producer: producer
        SELECT INSERT UPDATE ON saga saga_command tcc_branch
        SELECT(id topic) ON half_message
        """,
    ),
)
