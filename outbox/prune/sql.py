"""Statements that delete old and settled rows, in small batches."""

from __future__ import annotations

import re

from outbox.database.execute import Statement, Template, in_schema
from outbox.database.sql import SETTLED
from outbox.message.ids import FIRST_BUSINESS_ID


def _deleting(keys: str) -> Template:
    """Return what deletes the first ``limit`` rows of a table whose keys a query reads."""
    ((key, table),) = re.findall(r"^\nSELECT (?:\w\.)?(\w+) FROM \{s\}\.(\w+)", keys)
    return Template(f"DELETE FROM {{s}}.{table} WHERE {key} = ANY (ARRAY({keys} LIMIT %(limit)s)) RETURNING 1")


def _replaced(table: str, *order: str) -> Template:
    """Return what deletes the rows of a group in a topic that newer ones of their queues have replaced."""
    ours, newer, newest = (", ".join(form.format(each) for each in order) for form in ("o.{}", "n.{}", "n.{} DESC"))
    return _deleting(f"""
SELECT o.ctid FROM {{s}}.{table} o
 WHERE o.consumer_group = %(group)s AND o.topic = %(topic)s
   AND ({ours}) < (SELECT {newer} FROM {{s}}.{table} n
                    WHERE n.consumer_group = o.consumer_group AND n.topic = o.topic AND n.queue = o.queue
                    ORDER BY {newest} LIMIT 1)
""")


#: Delete cursors that newer ones have replaced. Rows: one for each.
old_cursors: Template = _deleting("""
SELECT id FROM {s}.dispatch_cursor WHERE id < (SELECT max(id) FROM {s}.dispatch_cursor) ORDER BY id
""")

# Of two passes at once, one gets a row, and the other finds it gone: nothing is added up twice.
#: Make one row of the totals of each topic that has several. Rows: one for each.
add_up_totals: Template = Template("""
WITH counted AS (
    DELETE FROM {s}.topic_total
     WHERE topic IN (SELECT topic FROM {s}.topic_total GROUP BY topic HAVING count(*) > 1 LIMIT %(limit)s)
    RETURNING topic, committed, rolled_back, checks
)
INSERT INTO {s}.topic_total (topic, committed, rolled_back, checks)
SELECT topic, sum(committed), sum(rolled_back), sum(checks) FROM counted GROUP BY topic RETURNING 1
""")

#: Delete parked checks of decided halves: no check pass comes to them (see `outbox.check.sql`). Rows: one for each.
decided_checks: Template = _deleting("""
SELECT c.half_id FROM {s}.half_check c JOIN {s}.op_message o ON o.half_id = c.half_id
 WHERE parked_at IS NOT NULL
""")

#: Delete cursors of deliveries that newer ones have replaced. Rows: one for each.
old_delivery_cursors: Template = _deleting("""
SELECT c.ctid FROM {s}.delivery_cursor c
 WHERE EXISTS (SELECT FROM {s}.delivery_cursor n
                WHERE n.topic = c.topic AND n.consumer_group = c.consumer_group AND n.number > c.number)
""")

#: Delete sagas that ended long ago, with their commands. Rows: one for each saga.
old_sagas: Template = Template("""
WITH old AS MATERIALIZED (
    SELECT id FROM {s}.saga
     WHERE ended_at < clock_timestamp() - make_interval(secs => %(retention)s) ORDER BY ended_at LIMIT %(limit)s
), commands AS (
    DELETE FROM {s}.saga_command WHERE saga_id IN (SELECT id FROM old)
)
DELETE FROM {s}.saga WHERE id IN (SELECT id FROM old) RETURNING id
""")

#: Delete branches of transactions that were confirmed or cancelled long ago. Rows: one for each.
old_branches: Template = _deleting("""
SELECT ctid FROM {s}.tcc_branch
 WHERE state <> 'tried' AND changed_at < clock_timestamp() - make_interval(secs => %(retention)s)
""")

#: Delete offsets that newer ones have replaced. Rows: one for each.
old_offsets: Template = _replaced("consumer_offset", "position", "starts")

#: Delete leases that newer ones have replaced. Rows: one for each.
old_leases: Template = _replaced("consumer_lease", "term", "renewal")

# A row is settled when no worker or operator waits for it any more; a discarded one is, from then on.
_SETTLED = f"""(status IN {SETTLED} OR discarded_at IS NOT NULL)
       AND greatest(changed_at, discarded_at) < clock_timestamp() - make_interval(secs => %(retention)s)"""

#: Read the next inbox rows after an id and before another one. Rows: ``(id, settled and old)``.
old_inbox: Template = Template(f"""
SELECT message_id, {_SETTLED}
  FROM {{s}}.consumer_message
 WHERE consumer_group = %(group)s AND message_id > %(after)s AND message_id < %(end)s AND topic = %(topic)s
 ORDER BY message_id LIMIT %(limit)s
""")

# The id is written out twice: for the DEFAULT partition, and for the index of these ids, which is this statement's.
#: Read the next settled and old inbox rows of business strings' ids, by the time of their last change.
#: Rows: ``(id, settled and old, last change)``.
old_business_inbox: Template = Template(f"""
SELECT message_id, {_SETTLED}, changed_at
  FROM {{s}}.consumer_message
 WHERE consumer_group = %(group)s AND topic = %(topic)s AND message_id >= '{FIRST_BUSINESS_ID}'
   AND (message_id >= '{FIRST_BUSINESS_ID}') IS TRUE AND changed_at < now() - make_interval(secs => %(retention)s)
   AND (changed_at, message_id) > (%(since)s, %(after)s)
 ORDER BY changed_at, message_id LIMIT %(limit)s
""")

#: Read, in the producer's database, which messages could still be delivered or resent. Rows: ``(id,)``.
still_there: Template = Template("SELECT id FROM {s}.half_message WHERE id = ANY (%s::uuid[])")

#: Delete inbox rows that are settled and old. Rows: one for each.
forget: Template = Template(f"""
DELETE FROM {{s}}.consumer_message
 WHERE consumer_group = %(group)s AND message_id = ANY (%(ids)s::uuid[]) AND {_SETTLED}
RETURNING message_id
""")

# --- segments of the inbox -----------------------------------------------------------------------------------------

#: Read, in the producer's database, which messages of a range of ids could still be delivered or resent; ``most``
#: halves of all topics are looked at. Rows: ``(looked at, ids)``.
still_between: Template = Template("""
SELECT count(*), coalesce(array_agg(id) FILTER (WHERE topic = %(topic)s), '{}')
  FROM (SELECT id, topic FROM {s}.half_message WHERE id >= %(first)s AND id < %(end)s LIMIT %(most)s) h
""")

#: Write down what a group's producer still had of a segment; a worker that says the same again says so now and then.
hold: Template = Template("""
INSERT INTO {s}.segment_hold AS h (consumer_group, topic, first_id, message_ids, asked_at)
VALUES (%(group)s, %(topic)s, %(first)s, %(ids)s::uuid[], to_timestamp(%(asked_ms)s / 1000.0))
ON CONFLICT (consumer_group, topic, first_id) DO UPDATE
   SET message_ids = excluded.message_ids, asked_at = excluded.asked_at
 WHERE h.message_ids <> excluded.message_ids OR h.asked_at < excluded.asked_at - interval '10 minutes'
""")

#: Delete the notes about segments that begin otherwise than with one of these ids.
drop_holds: Template = Template("DELETE FROM {s}.segment_hold WHERE first_id <> ALL (%s::uuid[])")

# Of a group and topic for which no pass has asked its producer, all stays. A row written since it asked may be of a
# half that wasn't committed then. The rows are counted where few are to be kept: all of them have been read then.
#: Look a segment of the inbox through. Rows: ``(rows, groups of those to be kept, their ids)``; to be kept are
#: ``limit`` at most, and where there are as many, that isn't all.
SURVEY: str = f"""
WITH held AS MATERIALIZED (
    SELECT consumer_group, topic, unnest(message_ids) AS message_id FROM {{s}}.segment_hold WHERE first_id = %(first)s
), survivor AS MATERIALIZED (
    SELECT m.consumer_group, m.message_id
      FROM {{consumer_message}} m
      LEFT JOIN {{s}}.segment_hold h
             ON h.consumer_group = m.consumer_group AND h.topic = m.topic AND h.first_id = %(first)s
      LEFT JOIN held k
             ON k.consumer_group = m.consumer_group AND k.topic = m.topic AND k.message_id = m.message_id
     WHERE ({_SETTLED} AND greatest(changed_at, discarded_at) < h.asked_at AND k.message_id IS NULL) IS NOT TRUE
     LIMIT %(limit)s
)
SELECT CASE WHEN (SELECT count(*) FROM survivor) < %(limit)s THEN (SELECT count(*) FROM {{consumer_message}})
            ELSE %(limit)s + 1 END,
       ARRAY(SELECT consumer_group FROM survivor), ARRAY(SELECT message_id FROM survivor)
"""


def index_of_late(schema: str, leaf: str, since: str) -> Statement:
    """Make the index by which `changed_since` finds rows."""
    sql = f"CREATE INDEX {leaf}_late ON {{s}}.{leaf} (changed_at) WHERE changed_at >= '{since}'"
    return Statement(in_schema(sql, schema))


def changed_since(schema: str, leaf: str, since: str) -> Statement:
    """Read which rows of a segment were written since a time. Rows: ``(group, id)``.

    The time is written out: the planner takes the index only where it sees that the condition implies the index's own.
    """
    return Statement(
        in_schema(f"SELECT consumer_group, message_id FROM {{s}}.{leaf} WHERE changed_at >= '{since}'", schema)
    )


# --- records ---------------------------------------------------------------------------------------------------------

#: Delete the findings of the reconciliation's runs that began ``retention`` seconds ago. Rows: one for each.
old_findings: Template = _deleting("""
SELECT f.id FROM {s}.reconciliation_finding f JOIN {s}.reconciliation_run r ON r.id = f.run_id
 WHERE r.topic = %(topic)s AND r.consumer_group = %(group)s
   AND r.started_at < clock_timestamp() - make_interval(secs => %(retention)s)
""")

#: Delete notes that are ``retention`` seconds old about dead letters of a group and topic that there are none of.
#: Rows: one for each.
old_notes: Template = _deleting("""
SELECT n.ctid FROM {s}.dead_letter_note n
 WHERE n.consumer_group = %(group)s AND n.topic = %(topic)s
   AND n.written_at < clock_timestamp() - make_interval(secs => %(retention)s)
   AND NOT EXISTS (SELECT FROM {s}.consumer_message m
                    WHERE m.consumer_group = n.consumer_group AND m.topic = n.topic AND m.status = 'parked'
                      AND m.discarded_at IS NULL AND coalesce(m.error_kind, 'unclassified'::text) = n.error_kind)
""")

#: Delete grants of a group's rate that ended so long ago that none looks at them. Rows: one for each.
old_grants: Template = _deleting("""
SELECT ctid FROM {s}.rate_grant
 WHERE consumer_group = %(group)s AND topic = %(topic)s AND ends_at < clock_timestamp() - interval '1 minute'
""")

#: Delete failed attempts that are ``retention`` seconds old. Rows: one for each.
old_attempts: Template = _deleting("""
SELECT ctid FROM {s}.attempt_history
 WHERE failed_at < clock_timestamp() - make_interval(secs => %(retention)s)
 ORDER BY failed_at
""")

# While a message may yet be compensated, it counts that an earlier passage has consumed it.
#: Delete inbox rows of earlier passages that were written over ``retention`` seconds ago. Rows: one for each.
old_earlier_rows: Template = _deleting("""
SELECT e.ctid FROM {s}.reread_message e
 WHERE e.replaced_at < clock_timestamp() - make_interval(secs => %(retention)s)
   AND NOT EXISTS (SELECT FROM {s}.consumer_message c
                    WHERE c.consumer_group = e.consumer_group AND c.message_id = e.message_id
                      AND c.status <> 'consumed')
 ORDER BY e.replaced_at
""")

# The newest of each schedule says when the next is due.
#: Delete such runs, once their findings are gone, but the newest of each schedule. Rows: one for each.
old_runs: Template = _deleting("""
SELECT r.id FROM {s}.reconciliation_run r
 WHERE r.topic = %(topic)s AND r.consumer_group = %(group)s
   AND r.started_at < clock_timestamp() - make_interval(secs => %(retention)s)
   AND NOT EXISTS (SELECT FROM {s}.reconciliation_finding f WHERE f.run_id = r.id)
   AND EXISTS (SELECT FROM {s}.reconciliation_run n
                WHERE n.topic = r.topic AND n.consumer_group = r.consumer_group
                  AND n.schedule IS NOT DISTINCT FROM r.schedule AND n.started_at > r.started_at)
""")

#: Delete samples that are ``age`` seconds old. Rows: one for each.
old_samples: Template = _deleting("""
SELECT sampled_at FROM {s}.stats_sample
 WHERE sampled_at < clock_timestamp() - make_interval(secs => %(age)s) ORDER BY sampled_at
""")


def _unseen(table: str) -> Template:
    """Return what deletes rows that weren't seen for ``age`` seconds, and aren't seen at this moment either."""
    old = "seen_at < clock_timestamp() - make_interval(secs => %(age)s)"
    some = f"SELECT id FROM {{s}}.{table} WHERE {old} ORDER BY seen_at LIMIT %(limit)s"
    return Template(f"DELETE FROM {{s}}.{table} WHERE id = ANY (ARRAY({some})) AND {old} RETURNING 1")


#: Delete producing processes that weren't seen for ``age`` seconds. Rows: one for each.
silent_producers: Template = _unseen("producer_process")

#: Delete workers that weren't seen for ``age`` seconds. Rows: one for each.
dead_workers: Template = _unseen("worker")

# Items of bulk jobs that have finished don't change any more.
#: Delete items of the first ``bulk jobs`` that finished ``age`` seconds ago. Rows: one for each.
old_items: Template = Template("""
DELETE FROM {s}.bulk_item
 WHERE ctid = ANY (ARRAY(
       SELECT i.ctid
         FROM (SELECT id FROM {s}.bulk_job
                WHERE finished_at < clock_timestamp() - make_interval(secs => %(age)s)
                ORDER BY id LIMIT %(bulk_jobs)s) o
        CROSS JOIN LATERAL (SELECT ctid FROM {s}.bulk_item WHERE bulk_job_id = o.id LIMIT %(limit)s) i
        LIMIT %(limit)s))
RETURNING 1
""")

#: Delete the first of such bulk jobs, those whose items are gone. Rows: one for each.
old_bulk_jobs: Template = Template("""
DELETE FROM {s}.bulk_job o
 WHERE id = ANY (ARRAY(
       SELECT id FROM {s}.bulk_job
        WHERE finished_at < clock_timestamp() - make_interval(secs => %(age)s)
        ORDER BY id LIMIT %(limit)s))
   AND NOT EXISTS (SELECT FROM {s}.bulk_item i WHERE i.bulk_job_id = o.id)
RETURNING 1
""")
