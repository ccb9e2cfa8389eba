"""Statements of schedules: one narrow row each, which says up to which time all is done."""

from __future__ import annotations

from outbox.database.execute import Template

#: Read what the database has of schedules. Rows, one for each of the names: ``(now, name, topic, recurrence, missed,
#: last_at, is paused, ordered_at)``, with NULL for what it hasn't; a row without a next time counts as none.
schedules: Template = Template("""
SELECT clock_timestamp(), n, s.topic, s.recurrence, s.missed, s.last_at, s.paused_at IS NOT NULL, s.ordered_at
  FROM unnest(%(names)s::text[]) n
  LEFT JOIN {s}.cron_schedule s ON s.name = n AND (s.next_at IS NOT NULL OR s.paused_at IS NOT NULL)
""")

# One whose times are others begins anew: those that have passed by now were none.
#: Write down a schedule as it is declared now.
declare: Template = Template("""
INSERT INTO {s}.cron_schedule AS k (name, topic, recurrence, missed, last_at, next_at)
VALUES (%(name)s, %(topic)s, %(recurrence)s, %(missed)s, %(now)s, %(next)s)
ON CONFLICT (name) DO UPDATE
   SET topic = excluded.topic, recurrence = excluded.recurrence, missed = excluded.missed, next_at = excluded.next_at,
       last_at = CASE WHEN k.recurrence = excluded.recurrence THEN k.last_at
                      ELSE greatest(k.last_at, excluded.last_at) END
""")

# Of two workers, the second waits for the first one's transaction, and finds another time.
#: Take a time as done, and all before it, if the time before is still the last one. Rows: one, or none.
advance: Template = Template("""
UPDATE {s}.cron_schedule SET last_at = %(at)s, next_at = %(next)s
 WHERE name = %(name)s AND last_at = %(last)s AND paused_at IS NULL
RETURNING 1
""")

#: Order a message of each of these schedules now.
order: Template = Template("""
UPDATE {s}.cron_schedule SET ordered_at = clock_timestamp() WHERE name = ANY (%(names)s) AND ordered_at IS NULL
""")

#: Take the order of an operator, if it is still there. Rows: one, or none.
take_order: Template = Template("""
UPDATE {s}.cron_schedule SET ordered_at = NULL WHERE name = %(name)s AND ordered_at = %(at)s RETURNING 1
""")
