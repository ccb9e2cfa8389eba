"""Statements about parked messages and halves, and about calls of the application for them."""

from __future__ import annotations

from outbox.database.execute import Template

#: What the audit calls a call of `Outbox.on_parked`.
ACTION = "on_parked"

# The audit is never pruned: for a letter parked for years there is no second call.
_UNCALLED = "NOT EXISTS (SELECT FROM {s}.audit a WHERE a.target = %s AND a.action = 'on_parked')"
_MESSAGE_UNCALLED = _UNCALLED.replace("%s", "c.consumer_group || '/' || c.message_id")
_HALF_UNCALLED = _UNCALLED.replace("%s", "c.half_id::text")

# --- in the consumer's database --------------------------------------------------------------------------

#: Read the next parked messages of a group after an id that had no call. An operator knows of a discarded one. Rows:
#: ``(id, queue, attempts, error, parked at)``.
parked_messages: Template = Template(f"""
SELECT message_id, queue, attempts, coalesce(last_error, error_kind, ''), changed_at
  FROM {{s}}.consumer_message c
 WHERE consumer_group = %(group)s AND topic = %(topic)s AND status = 'parked' AND discarded_at IS NULL
   AND message_id > %(after)s AND {_MESSAGE_UNCALLED}
 ORDER BY message_id LIMIT %(limit)s
""")

#: Tell whether a message is parked still, and had no call. Rows: one, or none.
message_stands: Template = Template(f"""
SELECT message_id FROM {{s}}.consumer_message c
 WHERE consumer_group = %(group)s AND message_id = %(id)s AND status = 'parked' AND discarded_at IS NULL
   AND {_MESSAGE_UNCALLED}
""")

# --- in the producer's database --------------------------------------------------------------------------

#: Read the next parked halves of a topic after an id that had no call. Rows: ``(id, checks, reason, parked at, key,
#: tag, headers, content type, body, born_at, age in s)``.
parked_halves: Template = Template(f"""
SELECT c.half_id, c.check_times, c.reason, c.parked_at, h.key, h.tag, h.headers::text, h.content_type, h.body,
       h.born_at, extract(epoch FROM clock_timestamp() - h.born_at)::float8
  FROM {{s}}.half_check c JOIN {{s}}.half_message h ON h.id = c.half_id
 WHERE c.topic = %(topic)s AND c.parked_at IS NOT NULL AND c.half_id > %(after)s AND {_HALF_UNCALLED}
 ORDER BY c.half_id LIMIT %(limit)s
""")

#: Tell whether a half is parked still, and had no call. Rows: one, or none.
half_stands: Template = Template(f"""
SELECT half_id FROM {{s}}.half_check c
 WHERE half_id = %(id)s AND parked_at IS NOT NULL AND {_HALF_UNCALLED}
""")
