"""Statements of the health model: the numbers of a database, its workers, and the server; all only read.

A number is computed by one statement, whichever view shows it. Each count stops at a limit, so that reading the numbers
costs no more than the work that they describe.
"""

from __future__ import annotations

from outbox.check.sql import KNOWN_TOPICS
from outbox.database.execute import Statement, Template
from outbox.database.sql import (
    ALIVE,
    GROUP_QUEUES,
    HALF_MISSING,
    JOINED_SOURCE,
    SENDS_LATELY,
    jumps,
    number,
    topic_sql,
)
from outbox.dispatch.sql import Cursor
from outbox.operator.databases import Query
from outbox.relay.intake.gaps import GRACE, SPANS

# --- halves and messages at the producer -------------------------------------------------------------------------

#: Counts of the oldest undecided halves, ``limit`` at most: part of `TopicStats`. Oldest first: ids begin with a time.
UNDECIDED = Query("""
-- topic undecided parked orphans unasked oldest_undecided oldest_parked parked_id
SELECT c.topic, count(*), count(c.parked_at), count(*) FILTER (WHERE due),
       count(*) FILTER (WHERE due AND c.checked_at IS NULL),
       extract(epoch FROM clock_timestamp() - min(h.born_at))::float8,
       extract(epoch FROM clock_timestamp() - min(c.parked_at))::float8,
       (array_agg(c.half_id ORDER BY c.parked_at) FILTER (WHERE c.parked_at IS NOT NULL))[1]
  FROM (SELECT *, parked_at IS NULL AND next_check_at <= statement_timestamp() AS due
          FROM {s}.half_check ORDER BY half_id LIMIT %(limit)s) c
  LEFT JOIN LATERAL (SELECT born_at FROM {s}.half_message WHERE id = c.half_id LIMIT 1) h ON true
 GROUP BY c.topic ORDER BY c.topic
""")

#: Counts, for each topic, of the ``limit`` undecided halves whose check comes first, without parked ones; late: due
#: ``check`` intervals ago. Rows: ``(topic, unfenced of no asker, of them due, late, late and never asked, fenced and
#: late, seconds since the first was due, the first of the unfenced, late of an asker, their first, any was asked)``.
CHECKS = Template(f"""{KNOWN_TOPICS}
SELECT k.topic, f.*,
       EXISTS (SELECT FROM (SELECT c.check_times FROM {{s}}.half_check c
                             WHERE c.topic = k.topic AND c.parked_at IS NULL AND NOT c.fenced AND c.asker IS NULL
                             ORDER BY c.next_check_at DESC LIMIT %(limit)s) l WHERE check_times > 0)
  FROM (SELECT topic FROM known LIMIT %(limit)s) k
 CROSS JOIN LATERAL (
       SELECT count(*) FILTER (WHERE native), count(*) FILTER (WHERE native AND due),
              count(*) FILTER (WHERE native AND late), count(*) FILTER (WHERE unasked),
              count(*) FILTER (WHERE fenced AND late),
              extract(epoch FROM statement_timestamp() - min(next_check_at))::float8,
              (array_agg(half_id ORDER BY next_check_at) FILTER (WHERE native))[1],
              count(*) FILTER (WHERE remote AND late),
              (array_agg(half_id ORDER BY next_check_at) FILTER (WHERE remote AND late))[1]
         FROM (SELECT half_id, fenced, next_check_at, next_check_at <= statement_timestamp() AS due, l.late,
                      asker IS NOT NULL AS remote, NOT fenced AND asker IS NULL AS native,
                      l.late AND NOT fenced AND asker IS NULL AND check_times = 0
                      AND NOT EXISTS (SELECT FROM {{s}}.check_history h
                                       WHERE h.half_id = c.half_id AND h.asked = 'checker') AS unasked
                 FROM {{s}}.half_check c
                CROSS JOIN LATERAL (SELECT next_check_at
                      < statement_timestamp() - make_interval(secs => %(check)s * %(check_interval)s)) l (late)
                WHERE c.topic = k.topic AND c.parked_at IS NULL
                ORDER BY next_check_at LIMIT %(limit)s) c) f
 ORDER BY k.topic
""")

#: The oldest undecided halves past their immunity that aren't parked, of the oldest ``limit``; 100 at most. Rows:
#: ``(id, topic, fenced, checks, was checked, age in s, seconds since its check was due)``, the oldest first.
OLDEST_UNDECIDED = Template("""
SELECT c.half_id, c.topic, c.fenced, c.check_times, c.checked_at IS NOT NULL,
       extract(epoch FROM clock_timestamp() - h.born_at)::float8,
       extract(epoch FROM clock_timestamp() - c.next_check_at)::float8
  FROM (SELECT * FROM (SELECT * FROM {s}.half_check ORDER BY half_id LIMIT %(limit)s) o
         WHERE parked_at IS NULL AND (checked_at IS NOT NULL OR next_check_at <= clock_timestamp())
         ORDER BY half_id LIMIT 100) c
  JOIN {s}.half_message h ON h.id = c.half_id
 ORDER BY h.born_at
""")

#: How many halves of each topic were committed and rolled back, as far as dispatch has come, and how many checks there
#: were: a part of `TopicStats`.
TOTALS = Query("""
-- topic committed rolled_back checks
SELECT topic, sum(committed)::int8, sum(rolled_back)::int8, sum(checks)::int8 FROM {s}.topic_total GROUP BY topic
""")

#: Counts of scheduled messages, ``limit`` at most: a part of `TopicStats`.
SCHEDULED = Query("""
-- topic scheduled next_due overdue oldest_overdue
SELECT h.topic, count(*), min(d.deliver_at) FILTER (WHERE d.held_topic IS NULL), count(*) FILTER (WHERE late),
       extract(epoch FROM clock_timestamp() - min(d.deliver_at) FILTER (WHERE late))::float8
  FROM (SELECT half_id, held_topic, deliver_at,
               deliver_at < clock_timestamp() - make_interval(secs => %(undispatched)s) AS late
          FROM {s}.scheduled_message
         WHERE recalled_at IS NULL ORDER BY deliver_at, half_id LIMIT %(limit)s) d
  JOIN {s}.half_message h ON h.id = d.half_id
 GROUP BY h.topic ORDER BY h.topic
""")

#: Counts of messages that relays have published and that never came, by the topic here and the one there: a part of
#: the doctor's.
GAPS = Query(f"""
-- topic source published missing queue first last age
SELECT topic, source, published, sum(first - before - 1)::int8, (array_agg(queue ORDER BY stored_at, first))[1],
       (array_agg(before + 1 ORDER BY stored_at, first))[1], (array_agg(first - 1 ORDER BY stored_at, first))[1],
       extract(epoch FROM clock_timestamp() - min(stored_at))::float8
  FROM ({SPANS}) r
 WHERE first > before + 1 AND stored_at < clock_timestamp() - make_interval(secs => {GRACE})
 GROUP BY topic, source, published ORDER BY 1, 2, 3 LIMIT %(limit)s
""")

# A message that a group has after all, since an operator sent it again, has a newer delivery.
#: Counts of messages that were given up in some known group, ``limit`` at most: a part of `TopicStats`.
EXHAUSTED = Query("""
-- topic exhausted oldest_exhausted exhausted_id exhausted_group
SELECT topic, count(DISTINCT half_id), extract(epoch FROM clock_timestamp() - min(recorded_at))::float8,
       (array_agg(half_id ORDER BY recorded_at))[1], (array_agg(consumer_group ORDER BY recorded_at))[1]
  FROM (SELECT topic, half_id, consumer_group, recorded_at FROM {s}.delivery d
         WHERE status = 'resend_exhausted'
           AND NOT EXISTS (SELECT FROM {s}.delivery n WHERE n.half_id = d.half_id
                              AND n.consumer_group = d.consumer_group AND n.number > d.number)
         LIMIT %(limit)s) d
 GROUP BY topic ORDER BY topic
""")

# Of the flows that haven't ended, the oldest come first: they are the ones that wait for too long.
#: Counts of the flows of sagas that haven't ended, over ``limit`` flows at most: a part of `SagaStats`.
SAGAS = Query("""
-- saga open compensating overdue oldest_overdue overdue_id overdue_step overdue_message
SELECT f.name, count(*), count(*) FILTER (WHERE f.status = 'compensating'), count(o.overdue_at),
       extract(epoch FROM clock_timestamp() - min(o.overdue_at))::float8,
       (array_agg(f.id ORDER BY o.overdue_at))[1], (array_agg(o.step ORDER BY o.overdue_at))[1],
       (array_agg(o.message_id ORDER BY o.overdue_at))[1]
  FROM (SELECT id, name, status FROM {s}.saga WHERE ended_at IS NULL ORDER BY id LIMIT %(limit)s) f
  LEFT JOIN LATERAL (SELECT overdue_at, step, message_id FROM {s}.saga_command
                      WHERE saga_id = f.id AND answered_at IS NULL AND overdue_at IS NOT NULL
                      ORDER BY overdue_at LIMIT 1) o ON true
 GROUP BY f.name ORDER BY f.name
""")

#: The groups that confirm passes have asked. Rows: ``(topic, group, SQL that forgets the group)``, at most ``limit``.
CONFIRMED_GROUPS = Template("""
SELECT DISTINCT topic, consumer_group,
       format('DELETE FROM {s}.delivery_cursor WHERE topic = %%L AND consumer_group = %%L;', topic, consumer_group)
  FROM {s}.delivery_cursor ORDER BY 1, 2 LIMIT %(limit)s
""")

#: The end of each queue. Rows: ``(topic, queue, last position)``.
HEADS = Template("""
SELECT t.name, q, coalesce((SELECT max(position) FROM {s}.message m WHERE m.topic = t.name AND m.queue = q), 0)
  FROM {s}.topic t, generate_series(0, t.queues - 1) q
 ORDER BY 1, 2
""")

# The ops that the newest cursor has not covered yet; outbox/dispatch/dispatch_pass.py says what its columns mean.
_SINCE_SNAPSHOT = (
    "xid >= %(next_xid)s::xid8 AND sequence > %(base_sequence)s",
    "xid = ANY (%(in_flight)s::xid8[]) AND sequence > %(base_sequence)s",
)
_REST_OF_CUT = (
    "sequence > %(after_sequence)s AND (xid >= %(next_xid)s::xid8 OR xid = ANY (%(in_flight)s::xid8[]))",
    "xid >= pg_snapshot_xmax(%(target)s::pg_snapshot) AND sequence > %(base_sequence)s",
    "xid = ANY (ARRAY(SELECT pg_snapshot_xip(%(target)s::pg_snapshot))) AND sequence > %(base_sequence)s",
)
_REST_OF_REBASE = (
    "sequence > %(after_sequence)s AND sequence <= %(until_sequence)s ORDER BY sequence",
    *_SINCE_SNAPSHOT,
)
_NEWEST = ("true ORDER BY sequence DESC",)

_UNDISPATCHED_OPS = """
-- half_id decided_at
SELECT DISTINCT half_id, decided_at FROM ({candidates}) c
 WHERE resolution = 'commit'
   AND NOT EXISTS (SELECT FROM {s}.message m WHERE m.half_id = c.half_id)
   AND NOT EXISTS (SELECT FROM {s}.scheduled_message d WHERE d.half_id = c.half_id)
 LIMIT %(limit)s
"""
_UNDISPATCHED = f"""
-- topic undispatched oldest_undispatched
SELECT h.topic, count(*), extract(epoch FROM clock_timestamp() - min(o.decided_at))::float8
  FROM ({_UNDISPATCHED_OPS.partition("decided_at")[2]}) o
  JOIN {{s}}.half_message h ON h.id = o.half_id
 GROUP BY h.topic ORDER BY h.topic
"""


def undispatched(cursor: Cursor | None, *, each: bool = False) -> Query:
    """Count committed ops that are no message yet, ``limit`` at most: a part of `TopicStats`; or find ``each``.

    After a restore into another cluster, before the first dispatch, only the newest ``limit`` ops are read.
    """
    sources: tuple[str, ...]
    if cursor is None or cursor.restored:
        sources = _NEWEST
    elif cursor.until_sequence is None:
        sources = _SINCE_SNAPSHOT
    else:
        sources = _REST_OF_REBASE if cursor.target is None else _REST_OF_CUT
    ops = "(SELECT half_id, resolution, decided_at FROM {s}.op_message WHERE "
    candidates = " UNION ALL ".join(f"{ops}{source} LIMIT %(limit)s)" for source in sources)
    return Query((_UNDISPATCHED_OPS if each else _UNDISPATCHED).replace("{candidates}", candidates))


#: How many of the oldest ``limit`` decided halves prune could have deleted long ago, and the age of the first in s.
#: Prune comes round every prune_interval; a half left after ten rounds, and an hour in any case, is left for good.
UNPRUNED = Query("""
-- halves oldest retention
SELECT count(*), extract(epoch FROM clock_timestamp() - min(decided_at))::float8, max(kept)::float8
  FROM (SELECT h.id, o.resolution, o.decided_at, r.kept,
               clock_timestamp() - make_interval(secs => r.kept + greatest(10 * %(prune_interval)s, 3600)) AS due
          FROM (SELECT greatest(%(retention)s, %(undelivered_retention)s)) r (kept)
         CROSS JOIN {s}.half_message h JOIN {s}.op_message o ON o.half_id = h.id
         ORDER BY h.id LIMIT %(limit)s) old
 WHERE decided_at < due AND (resolution = 'rollback' OR EXISTS (
        SELECT FROM {s}.message m
         WHERE m.half_id = old.id AND m.visible_at < due
           AND EXISTS (SELECT FROM {s}.message n
                        WHERE n.topic = m.topic AND n.queue = m.queue AND n.position > m.position)))
""")

#: Ops, of the newest ``limit`` acts, that dispatch has set aside since their halves were gone: they are no messages.
MISSING_HALVES = Query(f"""
-- halves half_id age
SELECT count(*), (array_agg(o.half_id ORDER BY a.id))[1],
       extract(epoch FROM clock_timestamp() - min(a.acted_at))::float8
  FROM (SELECT * FROM {{s}}.audit ORDER BY id DESC LIMIT %(limit)s) a
  JOIN {{s}}.op_message o ON o.half_id::text = a.target
 WHERE a.action = '{HALF_MISSING}' AND NOT EXISTS (SELECT FROM {{s}}.message m WHERE m.half_id = o.half_id)
""")

#: Of the newest ``limit`` halves, those that were sent at once and have no op: the trigger that writes it didn't run.
UNSENT = Query("""
-- halves half_id age
SELECT count(*), (array_agg(h.id ORDER BY h.id))[1], extract(epoch FROM clock_timestamp() - min(h.born_at))::float8
  FROM (SELECT id, born_at, at_commit FROM {s}.half_message ORDER BY id DESC LIMIT %(limit)s) h
 WHERE h.at_commit AND NOT EXISTS (SELECT FROM {s}.op_message o WHERE o.half_id = h.id)
""")

# Committed ops without a half are told by dispatch, see MISSING_HALVES.
#: Messages, of the newest ``limit`` ops and messages, whose rows contradict each other.
TORN = Query("""
-- messages half_id how age
SELECT count(DISTINCT half_id), (array_agg(half_id ORDER BY half_id))[1], (array_agg(how ORDER BY half_id))[1],
       extract(epoch FROM clock_timestamp() - min(at))::float8
  FROM (SELECT m.half_id, m.visible_at AS at,
               CASE WHEN h.topic IS NULL THEN 'is a message without a half message'
                    WHEN o.resolution = 'rollback' THEN 'is a message, though it was rolled back'
                    WHEN o.resolution IS NULL THEN 'is a message, though it is undecided'
                    WHEN m.topic <> h.topic THEN 'is a message of another topic than its half message' END AS how
          FROM (SELECT * FROM {s}.message ORDER BY half_id DESC LIMIT %(limit)s) m
          LEFT JOIN LATERAL (SELECT topic FROM {s}.half_message WHERE id = m.half_id LIMIT 1) h ON true
          LEFT JOIN LATERAL (SELECT resolution FROM {s}.op_message WHERE half_id = m.half_id LIMIT 1) o ON true
         UNION ALL
        SELECT o.half_id, o.decided_at, 'is a rollback without a half message'
          FROM (SELECT * FROM {s}.op_message ORDER BY half_id DESC LIMIT %(limit)s) o
         WHERE o.resolution = 'rollback' AND NOT EXISTS (SELECT FROM {s}.half_message h WHERE h.id = o.half_id)
           AND NOT EXISTS (SELECT FROM {s}.message m WHERE m.half_id = o.half_id)) t
 WHERE how IS NOT NULL
""")

#: Tell whether this role may make segments. Rows: ``(this role, the owner of the tables, both quoted, this role may)``.
SEGMENT_OWNER = Template("""
SELECT quote_ident(current_user), quote_ident(pg_get_userbyid(c.relowner)),
       pg_has_role(c.relowner, 'USAGE') AND has_schema_privilege(c.relnamespace, 'CREATE')
  FROM pg_class c WHERE c.oid = '{s}.half_message'::regclass
""")

_IN_SEGMENT = "message_id >= %(first)s AND message_id < %(end)s"
_HOLDERS = jumps("place", "{s}.consumer_message", "consumer_group", where=_IN_SEGMENT)
#: Read which pairs have inbox rows in a range of ids, a segment, and haven't told what their producers have of it;
#: ``limit`` rows of each group are looked at. Rows: ``(group, topic)``.
HOLDING = Template(f"""
WITH RECURSIVE {_HOLDERS}
SELECT DISTINCT p.consumer_group, r.topic
  FROM place p CROSS JOIN LATERAL (
       SELECT topic FROM {{s}}.consumer_message m
        WHERE {_IN_SEGMENT} AND m.consumer_group = p.consumer_group
        LIMIT %(limit)s) r
 WHERE NOT EXISTS (SELECT FROM {{s}}.segment_hold h
                    WHERE h.consumer_group = p.consumer_group AND h.topic = r.topic AND h.first_id = %(first)s)
 ORDER BY 1, 2
""")

#: The topics. Rows: ``(name, number of queues)``.
TOPICS = Template("SELECT name, queues FROM {s}.topic ORDER BY name")

#: The topics of which there was a message. Rows: ``(name, a group that is known here reads it)``.
SENT_TOPICS = Template(f"""{GROUP_QUEUES}
SELECT t.name, EXISTS (SELECT FROM place p
                         {JOINED_SOURCE}
                        WHERE {topic_sql("p.topic")} = t.name AND (s.id IS NULL OR s.id = {{s}}.source_id()))
               OR EXISTS (SELECT FROM {{s}}.delivery_cursor d WHERE d.topic = t.name)
  FROM {{s}}.topic t WHERE EXISTS (SELECT FROM {{s}}.message m WHERE m.topic = t.name)
 ORDER BY 1 LIMIT %(limit)s
""")

# --- groups at the consumer --------------------------------------------------------------------------------------

#: How far each group has come. Rows: ``(group, topic, queue, position)``.
OFFSETS = Template(f"""{GROUP_QUEUES}
SELECT p.consumer_group, p.topic, p.queue,
       (SELECT max(position) FROM {{s}}.consumer_offset o
         WHERE o.consumer_group = p.consumer_group AND o.topic = p.topic AND o.queue = p.queue)
  FROM place p
 ORDER BY 1, 2, 3
""")

#: How long (seconds) the first message after an offset has waited, of queues that have one: a part of `GroupStats`.
WAITING = Query(f"""
-- group topic oldest_lag
SELECT p.consumer_group, p.topic, extract(epoch FROM clock_timestamp() - min(n.visible_at))::float8
  FROM unnest(%(groups)s::text[], %(topics)s::text[], %(queues)s::int[], %(positions)s::bigint[])
       AS p (consumer_group, topic, queue, position)
 CROSS JOIN LATERAL (SELECT visible_at FROM {{s}}.message m
                      WHERE m.topic = {topic_sql("p.topic")} AND m.queue = p.queue AND m.position > p.position
                      ORDER BY m.position LIMIT 1) n
 GROUP BY 1, 2
""")


def _few(where: str) -> str:
    """Return the SQL of how many messages of a group ``g`` are so, ``limit`` at most."""
    return f"""(SELECT count(*) FROM (SELECT FROM {{s}}.consumer_message m
         WHERE m.consumer_group = g.consumer_group AND m.topic = g.topic AND {where} LIMIT %(limit)s) f)"""


_LAPSED = "m.status = 'taken' AND NOT h.paused AND m.next_attempt_at < now() - make_interval(secs => %(retry)s)"
#: Counts of failed messages, those that wait for an earlier one of their key, taken ones, and parked ones that aren't
#: discarded, ``limit`` of each at most; and whether the group is held back: a part of `GroupStats`.
FAILURES = Query(f"""
-- group topic failed oldest_due overdue waiting taken lapsed parked oldest_parked parked_id paused breaker_open
{GROUP_QUEUES}
SELECT g.consumer_group, g.topic, f.*, n.*, p.age, p.message_id, h.paused, h.breaker_open
  FROM (SELECT DISTINCT consumer_group, topic FROM place) g
 CROSS JOIN LATERAL (
       SELECT coalesce(bool_or(paused_at IS NOT NULL), false), coalesce(bool_or(opened_at IS NOT NULL), false)
         FROM {{s}}.group_control c
        WHERE c.consumer_group = g.consumer_group AND c.topic = {topic_sql("g.topic")}) h (paused, breaker_open)
 CROSS JOIN LATERAL (
       SELECT count(*),
              extract(epoch FROM clock_timestamp() - min(due) FILTER (WHERE due <= statement_timestamp()))::float8,
              count(*) FILTER (WHERE NOT (h.paused OR h.breaker_open)
                                 AND due < statement_timestamp() - make_interval(secs => %(retry)s))
         FROM (SELECT next_attempt_at FROM {{s}}.consumer_message m
                WHERE m.consumer_group = g.consumer_group AND m.topic = g.topic AND status = 'failed'
                ORDER BY next_attempt_at LIMIT %(limit)s) m (due)) f
 CROSS JOIN LATERAL (SELECT {_few("m.status = 'waiting' AND m.order_key IS NOT NULL AND m.discarded_at IS NULL")},
                            {_few("m.status = 'taken'")}, {_few(_LAPSED)},
                            {_few("m.status = 'parked' AND m.discarded_at IS NULL")}) n (waiting, taken, lapsed, parked)
  LEFT JOIN LATERAL (
       SELECT message_id, extract(epoch FROM clock_timestamp() - changed_at)::float8 AS age
         FROM {{s}}.consumer_message m
        WHERE n.parked > 0 AND m.consumer_group = g.consumer_group AND m.topic = g.topic AND status = 'parked'
          AND discarded_at IS NULL
        ORDER BY message_id LIMIT 1) p ON true ORDER BY 1, 2
""")

#: Whether a group goes on, by its row ``c`` of ``group_control``, which it may not have.
GROUP_STATE = """CASE WHEN c.paused_at IS NOT NULL THEN 'paused' WHEN c.opened_at IS NULL THEN 'running'
            WHEN c.trial_at > clock_timestamp() THEN 'open' ELSE 'half_open' END"""

#: The state of each group that anything was ever done to: the others are running.
GROUP_STATES = Query(f"""
-- group topic state
SELECT consumer_group, topic, {GROUP_STATE} FROM {{s}}.group_control c
""")

#: Groups that an operator or their breaker has stopped: for how long (s) either, the operator and the reason.
STOPPED = Query("""
-- group topic paused by why opened because
SELECT consumer_group, topic, extract(epoch FROM clock_timestamp() - paused_at)::float8, paused_by, pause_reason,
       extract(epoch FROM clock_timestamp() - opened_at)::float8, opened_because
  FROM {s}.group_control WHERE paused_at IS NOT NULL OR opened_at IS NOT NULL
 ORDER BY 1, 2
""")

#: Topics of which nothing is dispatched: for how long (s), the operator and the reason.
PAUSED_TOPICS = Query("""
-- topic paused by why
SELECT topic, extract(epoch FROM clock_timestamp() - paused_at)::float8, paused_by, pause_reason
  FROM {s}.topic_pause WHERE resumed_at IS NULL ORDER BY 1
""")

#: For how long (s) something of a schedule ``s`` is due that no worker has sent: a time, or what an operator ordered.
OVERDUE = """extract(epoch FROM clock_timestamp() - least(
           s.ordered_at, CASE WHEN s.paused_at IS NULL THEN coalesce(s.next_at, s.last_at) END))::float8"""
#: Schedules that are paused, those of which something is due and not sent, and those that are done up to a time far
#: ahead: for how long (s) each.
SCHEDULES = Query(f"""
-- schedule topic paused by why overdue ahead
SELECT * FROM (
SELECT s.name, s.topic, extract(epoch FROM clock_timestamp() - s.paused_at)::float8, s.paused_by, s.pause_reason,
       CASE WHEN {OVERDUE} > 120 THEN {OVERDUE} END AS overdue,
       CASE WHEN s.last_at > clock_timestamp() + interval '2 min'
            THEN extract(epoch FROM s.last_at - clock_timestamp())::float8 END AS ahead
  FROM {{s}}.cron_schedule s) f (name, topic, paused, by, why, overdue, ahead)
 WHERE coalesce(paused, overdue, ahead) IS NOT NULL ORDER BY 1
""")

#: How far each group that has something to read is behind, as far as its topic is in this database: in how many queues
#: messages were pruned before they were read, the age of the oldest in s, which share of the retention that is where
#: nothing was pruned, and SQL that forgets the group.
#: Messages are kept longer for a group that is known to their producer.
#: Numbers are dense: where the next message hasn't the next number, those in between were pruned. A queue that was
#: added after the group began has no offset, and is read from its first message.
UNREAD = Query(f"""
-- group topic queues behind retention share forget
{GROUP_QUEUES}
SELECT consumer_group, topic, queues, behind, kept::float8, CASE WHEN queues = 0 THEN behind / kept END::float8,
       format('DELETE FROM {{s}}.consumer_offset WHERE consumer_group = %%L AND topic = %%L;', consumer_group, topic)
  FROM (
SELECT p.consumer_group, p.topic,
       count(*) FILTER (WHERE {number("n.position")} > {number("o.position")} + 1) AS queues,
       max(extract(epoch FROM clock_timestamp() - n.visible_at))::float8 AS behind
  FROM (SELECT DISTINCT consumer_group, topic FROM place) p
  JOIN {{s}}.topic t ON t.name = {topic_sql("p.topic")}
  {JOINED_SOURCE}
 CROSS JOIN LATERAL generate_series(0, t.queues - 1) q (queue)
 CROSS JOIN LATERAL (
       SELECT coalesce(max(position), 0) FROM {{s}}.consumer_offset o
        WHERE o.consumer_group = p.consumer_group AND o.topic = p.topic AND o.queue = q.queue) o (position)
 CROSS JOIN LATERAL (
       SELECT position, visible_at FROM {{s}}.message m
        WHERE m.topic = t.name AND m.queue = q.queue AND m.position > o.position
        ORDER BY position LIMIT 1) n
 WHERE s.id IS NULL OR s.id = {{s}}.source_id()
 GROUP BY 1, 2) of_group
 CROSS JOIN LATERAL (
       SELECT greatest(%(retention)s, CASE WHEN EXISTS (
                  SELECT FROM {{s}}.delivery_cursor c
                   WHERE c.consumer_group = of_group.consumer_group
                     AND c.topic = {topic_sql("of_group.topic")})
              THEN %(undelivered_retention)s END)) r (kept)
 ORDER BY 1, 2
""")

#: The messages that groups had read, and that the producer lost in the last ``lost`` s: a part of `GroupStats`.
LOSSES = Query("""
-- group topic lost newest_loss lost_id
SELECT consumer_group, topic, count(DISTINCT m.id),
       extract(epoch FROM clock_timestamp() - max(found_at))::float8, min(m.id::text)::uuid
  FROM {s}.log_loss l CROSS JOIN LATERAL unnest(message_ids) m (id)
 WHERE found_at > clock_timestamp() - make_interval(secs => %(lost)s)
 GROUP BY 1, 2 ORDER BY 1, 2
""")

# Few of ten thousand groups are reconciled.
_RECONCILED = f"""
WITH RECURSIVE {jumps("pair", "{s}.reconciliation_run", "topic", "consumer_group")}, reconciled AS (
    SELECT * FROM pair p
     WHERE EXISTS (SELECT FROM {{s}}.consumer_offset WHERE consumer_group = p.consumer_group AND topic = p.topic))"""

# A follower's run ends after a day, and another one goes on.
#: The state of a group by the reconciliation that follows the log, and how long ago (seconds) it looked: a part of
#: `GroupStats`.
FOLLOWED = Query(f"""
-- group topic differences unfollowed
{_RECONCILED}
SELECT p.consumer_group, p.topic, r.differences, r.age
  FROM reconciled p
 CROSS JOIN LATERAL (
       SELECT (SELECT coalesce(sum(value::int8), 0)::int8 FROM jsonb_each_text(n.counts)
                WHERE NOT key = ANY (%(in_order)s::text[])) AS differences,
              extract(epoch FROM clock_timestamp() - coalesce((plan ->> 'passed_at')::timestamptz, started_at))::float8
                AS age
         FROM {{s}}.reconciliation_run n
        WHERE n.topic = p.topic AND n.consumer_group = p.consumer_group AND finished_at IS NULL
          AND started_at > clock_timestamp() - interval '2 days' AND plan ->> 'follows' IS NOT NULL
        ORDER BY started_at DESC LIMIT 1) r
 ORDER BY 1, 2
""")

#: The newest reconciliation of each group and topic that has one. Rows: ``(topic, group, ended, error, counts, applied,
#: what its measures left unexplained as JSON, age in s, age of the newest that came to a result in s)``.
LAST_RUNS = Template(f"""{_RECONCILED}
SELECT p.topic, p.consumer_group, r.finished_at IS NOT NULL, r.error, r.counts::text, r.applied,
       jsonb_path_query_array(r.measures, '$[*].totals[*].unexplained')::text,
       extract(epoch FROM clock_timestamp() - r.started_at)::float8, extract(epoch FROM clock_timestamp() - (
           SELECT max(started_at) FROM {{s}}.reconciliation_run d
            WHERE d.topic = p.topic AND d.consumer_group = p.consumer_group AND d.counts IS NOT NULL))::float8
  FROM reconciled p
 CROSS JOIN LATERAL (
       SELECT * FROM {{s}}.reconciliation_run n
        WHERE n.topic = p.topic AND n.consumer_group = p.consumer_group ORDER BY started_at DESC LIMIT 1) r
 ORDER BY 1, 2
""")

# --- workers, bulk jobs, tables ----------------------------------------------------------------------------------

#: The workers; alive is one that was seen within `ALIVE` seconds.
WORKERS = Query(f"""
-- id name version roles:json started_at seen_at alive duties:json handlers:json seconds
SELECT id, name, version, roles::text, started_at, seen_at,
       seen_at > clock_timestamp() - make_interval(secs => {ALIVE}), duties::text, handlers::text,
       extract(epoch FROM clock_timestamp() - seen_at)::float8
  FROM {{s}}.worker ORDER BY name, id LIMIT 1000
""")

#: The producing processes, those of a group together, the newest report first.
PRODUCERS = Query(f"""
-- id name producer_group version started_at seen_at active instances
SELECT id, name, producer_group, version, started_at, seen_at, active,
       count(*) FILTER (WHERE active) OVER (PARTITION BY producer_group)
  FROM (SELECT *, seen_at > clock_timestamp() - make_interval(secs => {SENDS_LATELY}) AS active
          FROM {{s}}.producer_process) p
 ORDER BY producer_group, seen_at DESC, id LIMIT 1000
""")

#: Counts of bulk jobs that haven't finished. Rows: ``(jobs, age of the oldest in s)``, one.
OPEN_BULK_JOBS = Template("""
SELECT count(*), extract(epoch FROM clock_timestamp() - min(created_at))::float8
  FROM (SELECT created_at FROM {s}.bulk_job WHERE finished_at IS NULL ORDER BY created_at LIMIT %(limit)s) o
""")

#: The tables, the biggest first. Rows: ``(name, estimated rows, bytes, dead rows, last vacuum)``.
TABLE_SIZES = Template("""
SELECT w.relname, sum(greatest(c.reltuples, 0))::int8, sum(pg_total_relation_size(c.oid))::int8,
       coalesce(sum(t.n_dead_tup), 0)::int8, max(greatest(t.last_vacuum, t.last_autovacuum))
  FROM pg_class c
  JOIN pg_class w ON w.oid = coalesce(pg_partition_root(c.oid)::oid, c.oid)
  LEFT JOIN pg_stat_user_tables t ON t.relid = c.oid
 WHERE c.relnamespace = '{s}'::regnamespace AND c.relkind = 'r'
 GROUP BY w.relname
 ORDER BY 3 DESC, 1
""")

#: Indexes of these tables that can't be used. Rows: ``(index, table, index quoted with its schema, it belongs to an
#: index of a partitioned table)``.
#: One that is being built is not valid yet either.
INVALID_INDEXES = Template("""
SELECT i.relname::text, t.relname::text, format('%%I.%%I', n.nspname, i.relname), i.relispartition
  FROM pg_namespace n
  JOIN pg_class t ON t.relnamespace = n.oid
  JOIN pg_class w ON w.oid = coalesce(pg_partition_root(t.oid)::oid, t.oid) AND w.relname = ANY (%(tables)s::text[])
  JOIN pg_index x ON x.indrelid = t.oid
  JOIN pg_class i ON i.oid = x.indexrelid AND i.relkind = 'i'
 WHERE n.oid = to_regnamespace('{s}') AND NOT (x.indisvalid AND x.indisready AND x.indislive)
   AND NOT EXISTS (SELECT FROM pg_stat_progress_create_index p WHERE p.index_relid = x.indexrelid)
 ORDER BY 2, 1
""")

#: Which of these tables have autovacuum off. Rows: ``(table quoted with its schema, storage parameter)``.
AUTOVACUUM_OFF = Template("""
SELECT format('%%I.%%I', n.nspname, c.relname), o.prefix || 'autovacuum_enabled'
  FROM pg_namespace n
  JOIN pg_class c ON c.relnamespace = n.oid AND c.relkind = 'r'
  JOIN pg_class w ON w.oid = coalesce(pg_partition_root(c.oid)::oid, c.oid) AND w.relname = ANY (%(tables)s::text[])
  LEFT JOIN pg_class toast ON toast.oid = c.reltoastrelid
 CROSS JOIN LATERAL (
       SELECT '' AS prefix, * FROM pg_options_to_table(c.reloptions)
        UNION ALL
       SELECT 'toast.', * FROM pg_options_to_table(toast.reloptions)) o
 WHERE n.oid = to_regnamespace('{s}')
   AND CASE WHEN o.option_name = 'autovacuum_enabled' THEN NOT o.option_value::bool ELSE false END
 ORDER BY 1, 2
""")

# --- the server --------------------------------------------------------------------------------------------------

#: One row: version as a number, version, is a standby, role, role quoted, database quoted, may make temporary tables,
#: time.
SERVER = Template("""
SELECT current_setting('server_version_num')::int, current_setting('server_version'), pg_is_in_recovery(),
       session_user::text, quote_ident(session_user), quote_ident(current_database()),
       has_database_privilege(current_database(), 'TEMPORARY'), clock_timestamp()
""")

#: Configuration parameters as they are for this session. Rows: ``(name, value, source)``.
PARAMETERS = Template("SELECT name, setting, source FROM pg_settings WHERE name = ANY (%(names)s::text[])")

# Qualified throughout: it is to be right where the others aren't.
#: What schemas before ``pg_catalog`` in this session's search path have of their own in place of PostgreSQL's functions
#: and operators, with the same types.
SHADOWING = Query("""
-- schema names
SELECT n.nspname::pg_catalog.text, pg_catalog.string_agg(o.name::pg_catalog.text, ', ')
  FROM pg_catalog.unnest(pg_catalog.current_schemas(true)) WITH ORDINALITY s (name, number)
  JOIN pg_catalog.pg_namespace n ON n.nspname OPERATOR(pg_catalog.=) s.name
 CROSS JOIN LATERAL (
       SELECT DISTINCT p.proname AS name FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_proc c
           ON c.proname OPERATOR(pg_catalog.=) p.proname AND c.proargtypes OPERATOR(pg_catalog.=) p.proargtypes
        WHERE p.pronamespace OPERATOR(pg_catalog.=) n.oid
          AND c.pronamespace OPERATOR(pg_catalog.=) 'pg_catalog'::pg_catalog.regnamespace
        UNION ALL
       SELECT DISTINCT p.oprname FROM pg_catalog.pg_operator p JOIN pg_catalog.pg_operator c
           ON c.oprname OPERATOR(pg_catalog.=) p.oprname AND c.oprleft OPERATOR(pg_catalog.=) p.oprleft
          AND c.oprright OPERATOR(pg_catalog.=) p.oprright
        WHERE p.oprnamespace OPERATOR(pg_catalog.=) n.oid
          AND c.oprnamespace OPERATOR(pg_catalog.=) 'pg_catalog'::pg_catalog.regnamespace) o
 WHERE s.number OPERATOR(pg_catalog.<)
       pg_catalog.array_position(pg_catalog.current_schemas(true), 'pg_catalog'::pg_catalog.name)
 GROUP BY n.nspname
""")

#: How many connections there may be, and are besides this one. Superusers are held back by neither limit, and may take
#: the reserved ones; walsenders have a limit of their own. One row: max, reserved for others, limit of the role, of the
#: database (NULL: none), in use by all, by the role, in the database.
CONNECTIONS = Template("""
SELECT current_setting('max_connections')::int,
       CASE WHEN r.rolsuper THEN 0 ELSE current_setting('superuser_reserved_connections')::int
            + coalesce(current_setting('reserved_connections', true)::int, 0) END,
       CASE WHEN r.rolsuper OR r.rolconnlimit < 0 THEN NULL ELSE r.rolconnlimit END,
       CASE WHEN r.rolsuper OR d.datconnlimit < 0 THEN NULL ELSE d.datconnlimit END,
       a.used, a.role, a.database
  FROM pg_roles r CROSS JOIN pg_database d CROSS JOIN LATERAL (
       SELECT count(*) AS used, count(*) FILTER (WHERE usesysid = r.oid) AS role,
              count(*) FILTER (WHERE datid = d.oid) AS database
         FROM pg_stat_activity WHERE usesysid IS NOT NULL AND datid IS NOT NULL AND pid <> pg_backend_pid()) a
 WHERE r.rolname = session_user AND d.datname = current_database()
""")

#: The oldest transaction of this database that is open for longer, in seconds; and nothing of its queries.
#: Transactions of other roles are hidden from a role without the privilege pg_monitor. Rows: ``(pid, age in s, state,
#: application name, how many there are)`` or none.
OPEN_TRANSACTIONS = Template("""
SELECT pid, extract(epoch FROM clock_timestamp() - xact_start)::float8, state, application_name, count(*) OVER ()
  FROM pg_stat_activity
 WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
   AND xact_start < clock_timestamp() - make_interval(secs =>
       CASE WHEN state LIKE 'idle in transaction%%' THEN %(idle_transaction)s::float8 ELSE %(running_transaction)s END)
 ORDER BY xact_start LIMIT 1
""")

# PostgreSQL's own name of a session, as in its log (%c): a pid is used again, a pid with its start isn't. A prepared
# transaction has no session any more, and is called by its name.
_SESSION = """coalesce(p.gid, to_hex(trunc(extract(epoch FROM a.backend_start))::bigint) || '.' || to_hex(a.pid))"""
# A session that shows nothing of itself to this role is left out. A prepared transaction also holds the lock of its id.
_HOLDERS = """
  FROM pg_locks l
  JOIN unnest(%(keys)s::bigint[]) k (key) ON k.key = (l.classid::bigint << 32) | l.objid::bigint
  JOIN pg_database d ON d.oid = l.database AND d.datname = current_database()
  LEFT JOIN pg_stat_activity a ON a.pid = l.pid AND a.pid <> pg_backend_pid()
  LEFT JOIN pg_locks x ON l.pid IS NULL AND x.pid IS NULL AND x.locktype = 'transactionid'
                      AND x.virtualtransaction = l.virtualtransaction
  LEFT JOIN pg_prepared_xacts p ON p.transaction = x.transactionid
 WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted
   AND (p.gid IS NOT NULL OR a.backend_start IS NOT NULL)"""

#: Which sessions have held these advisory locks for longer than ``lock`` seconds, or hold one outside of a transaction:
#: what takes a lock for a session may keep it for ever. Rows: ``(key, session, pid, age of the transaction or else of
#: the session in s, state, user, application name, client)``.
LOCK_HOLDERS = Template(f"""
SELECT k.key, {_SESSION}, coalesce(a.pid, 0),
       extract(epoch FROM clock_timestamp() - coalesce(p.prepared, a.xact_start, a.backend_start))::float8,
       CASE WHEN p.gid IS NOT NULL THEN 'prepared transaction'
            WHEN a.xact_start IS NULL THEN a.state || ', locked for the session' ELSE a.state END,
       coalesce(p.owner, a.usename)::text, coalesce(a.application_name, ''),
       coalesce(host(a.client_addr) || ':' || a.client_port, 'this host'){_HOLDERS}
   AND coalesce(coalesce(p.prepared, a.xact_start) < clock_timestamp() - make_interval(secs => %(lock)s), true)
 ORDER BY coalesce(p.prepared, a.xact_start, a.backend_start)
""")

#: End a session if it holds one of these advisory locks. Rows: ``(it was told to,)``, or none.
END_HOLDER = Template(f"""
SELECT pg_terminate_backend(pid) FROM (SELECT DISTINCT a.pid{_HOLDERS} AND {_SESSION} = %(session)s OFFSET 0) h
""")

#: The sessions of this database that don't show their transactions. One row: without the privilege, not tracked.
HIDDEN_SESSIONS = Template("""
SELECT count(*) FILTER (WHERE backend_type IS NULL), count(*) FILTER (WHERE state = 'disabled')
  FROM pg_stat_activity WHERE datname = current_database()
""")

#: The oldest two-phase transaction of this database that is prepared for too long. Rows:
#: ``(name, age in s, name as an SQL literal, how many there are)`` or none.
PREPARED_TRANSACTIONS = Template("""
SELECT gid, extract(epoch FROM clock_timestamp() - prepared)::float8, quote_literal(gid), count(*) OVER ()
  FROM pg_prepared_xacts
 WHERE database = current_database() AND prepared < clock_timestamp() - make_interval(secs => %(prepared_transaction)s)
 ORDER BY prepared LIMIT 1
""")

#: The server process that runs this.
BACKEND_PID = Statement("SELECT pg_backend_pid()")

#: Whether the server process has a prepared statement of this name. Rows: ``(has it,)``.
PREPARED_STATEMENT = Template("SELECT EXISTS (SELECT FROM pg_prepared_statements WHERE name = %(name)s)")

#: Replication slots: name, type, active, age of xmin in transactions, bytes of WAL kept, SQL that drops it.
SLOTS = Template("""
SELECT slot_name::text, slot_type, active, age(xmin),
       pg_wal_lsn_diff(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END,
                       restart_lsn)::float8,
       format('SELECT pg_drop_replication_slot(%%L);', slot_name)
  FROM pg_replication_slots ORDER BY slot_name LIMIT 100
""")

#: The standby without a slot that holds vacuum back most: name, age in transactions.
STANDBYS = Template("""
SELECT application_name, age(backend_xmin) FROM pg_stat_replication
 WHERE backend_xmin IS NOT NULL ORDER BY age(backend_xmin) DESC LIMIT 1
""")
