"""Statements of sagas: the row of each, and one for each command that it has sent."""

from __future__ import annotations

from outbox.database.execute import Template

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

# Who changes a saga holds its row from here on. What the next statement reads is of after that lock.
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

#: Read the newest sagas: of a name, in a status, with an id, or those that haven't ended.
sagas: Template = Template(f"""
SELECT {_SAGA} FROM {{s}}.saga
 WHERE (%(id)s::uuid IS NULL OR id = %(id)s) AND (%(name)s::text IS NULL OR name = %(name)s)
   AND (%(status)s::text IS NULL OR status = %(status)s) AND (NOT %(open)s OR ended_at IS NULL)
 ORDER BY id DESC LIMIT %(limit)s
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

#: Change a saga's status; ``ended``: it is its last one.
change: Template = Template("""
UPDATE {s}.saga
   SET status = %(status)s, reason = coalesce(reason, %(reason)s),
       ended_at = CASE WHEN %(ended)s THEN clock_timestamp() END
 WHERE id = %(id)s
""")
