"""Statements of schedules: one narrow row each, which says up to which time all is done."""

from __future__ import annotations

from outbox.database.execute import Template

#: Read what the database has of schedules. Rows, one for each of the names: ``(source, now, name, topic, recurrence,
#: missed, declared_at, last_at, is paused, ordered_at)``, with NULL for what it hasn't; a row without a next time is as
#: none. ``source`` is the id of this database.
schedules: Template = Template("""
SELECT {s}.source_id(), clock_timestamp(), n, s.topic, s.recurrence, s.missed, s.declared_at, s.last_at,
       s.paused_at IS NOT NULL, s.ordered_at
  FROM unnest(%(names)s::text[]) n
  LEFT JOIN {s}.cron_schedule s ON s.name = n AND (s.next_at IS NOT NULL OR s.paused_at IS NOT NULL)
""")

# One whose times are others begins anew: those that have passed by now were none. While a release is rolled out, two
# declarations meet: that of the worker which began last counts, and the other one never comes back over it.
#: Write down a schedule as a worker declares it that began at ``since``.
declare: Template = Template("""
INSERT INTO {s}.cron_schedule AS k (name, topic, recurrence, missed, declared_at, last_at, next_at)
VALUES (%(name)s, %(topic)s, %(recurrence)s, %(missed)s, %(since)s, %(now)s, %(next)s)
ON CONFLICT (name) DO UPDATE
   SET topic = excluded.topic, recurrence = excluded.recurrence, missed = excluded.missed,
       declared_at = excluded.declared_at, next_at = excluded.next_at,
       last_at = CASE WHEN k.recurrence = excluded.recurrence THEN k.last_at
                      ELSE greatest(k.last_at, excluded.last_at) END
 WHERE k.declared_at <= excluded.declared_at
""")

# Where another worker calls the function at this moment, this one doesn't wait for it: it comes back later.
_TAKE = """
UPDATE {{s}}.cron_schedule SET {change}
 WHERE name = (SELECT name FROM {{s}}.cron_schedule WHERE name = %(name)s AND {still} FOR UPDATE SKIP LOCKED)
RETURNING 1
"""
#: Take a time as done, and all before it, if the time before is still the last one. Rows: one, or none.
advance: Template = Template(
    _TAKE.format(change="last_at = %(at)s, next_at = %(next)s", still="last_at = %(last)s AND paused_at IS NULL")
)
#: Take the order of an operator, if it is still there. Rows: one, or none.
take_order: Template = Template(_TAKE.format(change="ordered_at = NULL", still="ordered_at = %(at)s"))

#: Order a message of each of these schedules now.
order: Template = Template("""
UPDATE {s}.cron_schedule SET ordered_at = clock_timestamp() WHERE name = ANY (%(names)s) AND ordered_at IS NULL
""")
