"""Statements of what holds a group back: a pause, a rate over all workers, and a breaker; by the database's clock."""

from __future__ import annotations

from outbox.database.execute import Template
from outbox.database.sql import FEEDS

#: How long (seconds) after something turned out not to be available the first message is tried, and later ones at most.
FIRST_TRIAL_AFTER, LAST_TRIAL_AFTER = 1.0, 60.0

#: Read what holds a group of a topic back. Rows: ``(paused, rate, breaker is open, seconds until a trial)`` or none.
control: Template = Template("""
SELECT paused_at IS NOT NULL, rate, opened_at IS NOT NULL,
       extract(epoch FROM trial_at - clock_timestamp())::float8
  FROM {s}.group_control WHERE consumer_group = %s AND topic = %s
""")

# The end of the last grant is up to when messages are spoken for; a bit of the time left unused since is made up. A
# grant that ends later than any can at this rate is one of a slower rate, or of a clock that went back.
#: Append a grant of ``messages`` if its turn has come; to be called under the lock of the rate. Rows: one,
#: ``(granted, seconds until its turn)``.
grant: Template = Template("""
WITH turn AS MATERIALIZED (
    SELECT c.now, greatest(g.ends_at, c.now - make_interval(secs => %(credit)s)) AS begins_at
      FROM (SELECT clock_timestamp() AS now OFFSET 0) c
      LEFT JOIN LATERAL (SELECT ends_at FROM {s}.rate_grant
                          WHERE consumer_group = %(group)s AND topic = %(topic)s
                            AND ends_at <= c.now + make_interval(secs => %(longest)s)
                          ORDER BY ends_at DESC LIMIT 1) g ON true
), granted AS (
    INSERT INTO {s}.rate_grant (consumer_group, topic, ends_at, messages)
    SELECT %(group)s, %(topic)s, begins_at + make_interval(secs => %(messages)s / %(rate)s), %(messages)s
      FROM turn WHERE begins_at <= now
    ON CONFLICT DO NOTHING
    RETURNING 1
)
SELECT EXISTS (SELECT FROM granted), greatest(extract(epoch FROM begins_at - now), 0)::float8 FROM turn
""")

# One breaker stops a group for all of its sources, so that what it has of each counts (`outbox.database.identity`).
# A success is known by the rows that it writes anyway: the inbox row of the message at which a queue's offset was left,
# or of one that had failed. So a success pays nothing for the breaker. What comes after it and isn't handled may hide
# it here, but not from the thread that had it (`Gate.succeeded`).
_SINCE = f"""
    SELECT h.failed_at AS since FROM {{s}}.attempt_history h
     WHERE h.failed_at > greatest(clock_timestamp() - make_interval(secs => %(window)s),
                                  (SELECT healthy_at FROM {{s}}.group_control
                                    WHERE consumer_group = %(group)s AND topic = %(topic)s))
       AND h.consumer_group = %(group)s AND h.topic = ANY ({FEEDS}) AND h.status <> 'consumed'
     ORDER BY h.failed_at DESC OFFSET %(failures)s - 1 LIMIT 1"""
_SUCCEEDED = f"""
    SELECT FROM (
        SELECT o.message_id
          FROM unnest(%(queues)s::int[]) q
         CROSS JOIN unnest({FEEDS}) feed
         CROSS JOIN LATERAL (SELECT message_id FROM {{s}}.consumer_offset o
                              WHERE o.consumer_group = %(group)s AND o.topic = feed AND o.queue = q
                              ORDER BY position DESC, starts DESC LIMIT %(failures)s) o
         UNION ALL
        (SELECT h.message_id FROM {{s}}.attempt_history h
          WHERE h.failed_at > clock_timestamp() - make_interval(secs => %(window)s)
            AND h.consumer_group = %(group)s AND h.topic = ANY ({FEEDS})
          ORDER BY h.failed_at DESC LIMIT %(failures)s)) tried
     CROSS JOIN LATERAL (SELECT status, changed_at FROM {{s}}.consumer_message c
                          WHERE c.consumer_group = %(group)s AND c.message_id = tried.message_id OFFSET 0) c
     WHERE c.status = 'consumed' AND c.changed_at > failing.since"""

# The failures before a breaker was closed don't count: neither in what this statement sees, nor if that happens while
# it waits for the row. That is what ``healthy_at`` of the inserted row is for: the first of the failures that count.
#: Open the breaker if so many attempts have failed within the window and none has succeeded since the first of them.
#: Rows: ``(times opened,)`` where this call opened it.
trip: Template = Template(
    f"""
WITH failing AS MATERIALIZED ({_SINCE})
INSERT INTO {{s}}.group_control AS g (consumer_group, topic, opened_at, trial_at, opened_because, healthy_at, openings)
SELECT %(group)s, %(topic)s, clock_timestamp(), clock_timestamp() + make_interval(secs => %(trial_after)s),
       %(because)s, since, 1
  FROM failing
 WHERE NOT EXISTS ({_SUCCEEDED})
ON CONFLICT (consumer_group, topic) DO UPDATE
   SET opened_at = excluded.opened_at, trial_at = excluded.trial_at, opened_because = excluded.opened_because,
       openings = g.openings + 1
 WHERE g.opened_at IS NULL AND (g.healthy_at IS NULL OR g.healthy_at <= excluded.healthy_at)
RETURNING openings
""",
    lossy=("because",),
)

#: Open the breaker, unless it is. Rows: ``(times opened,)`` where this call opened it.
open_now: Template = Template(
    """
INSERT INTO {s}.group_control AS g (consumer_group, topic, opened_at, trial_at, opened_because, openings)
VALUES (%(group)s, %(topic)s, clock_timestamp(), clock_timestamp(), %(because)s, 1)
ON CONFLICT (consumer_group, topic) DO UPDATE
   SET opened_at = excluded.opened_at, trial_at = excluded.trial_at, opened_because = excluded.opened_because,
       openings = g.openings + 1
 WHERE g.opened_at IS NULL
RETURNING openings
""",
    lossy=("because",),
)

# The longer it is open, the rarer the trials: not to hurry what is ill, and not to find out too late that it is well.
#: Put off the next trial: from a second on to a minute, a quarter of the time since the breaker opened; not less than
#: ``after`` seconds.
put_off: Template = Template(
    f"""
UPDATE {{s}}.group_control
   SET opened_because = %(because)s,
       trial_at = greatest(
           CASE WHEN NOT %(is_trial)s THEN trial_at END,
           clock_timestamp() + greatest(make_interval(secs => %(after)s), least(
               greatest((clock_timestamp() - opened_at) / 4, make_interval(secs => {FIRST_TRIAL_AFTER})),
               make_interval(secs => {LAST_TRIAL_AFTER}))))
 WHERE consumer_group = %(group)s AND topic = %(topic)s AND opened_at IS NOT NULL
""",
    lossy=("because",),
)

#: Pause a group, unless it is paused. Rows: ``(topic,)`` of each that is paused now.
pause: Template = Template(
    """
INSERT INTO {s}.group_control AS c (consumer_group, topic, paused_at, paused_by, pause_reason)
SELECT %(group)s, t, clock_timestamp(), %(by)s, %(why)s FROM unnest(%(topics)s::text[]) t
ON CONFLICT (consumer_group, topic) DO UPDATE
   SET paused_at = excluded.paused_at, paused_by = excluded.paused_by, pause_reason = excluded.pause_reason
 WHERE c.paused_at IS NULL
RETURNING topic
""",
    lossy=("why",),
)

#: Take the one trial that is due, and put off the next one. Rows: one, or none where it isn't due or another has it.
take_trial: Template = Template("""
UPDATE {s}.group_control SET trial_at = clock_timestamp() + make_interval(secs => %(trial_after)s)
 WHERE consumer_group = %(group)s AND topic = %(topic)s AND opened_at IS NOT NULL AND trial_at <= clock_timestamp()
RETURNING 1
""")

#: Close the breaker, in the transaction of the message that was handled. Rows: one, or none where it isn't open.
close: Template = Template("""
UPDATE {s}.group_control
   SET opened_at = NULL, trial_at = NULL, opened_because = NULL, healthy_at = clock_timestamp()
 WHERE consumer_group = %s AND topic = %s AND opened_at IS NOT NULL
RETURNING 1
""")
