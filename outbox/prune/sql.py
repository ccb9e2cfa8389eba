"""Statements that delete what is old and settled, in small batches."""

from __future__ import annotations

from outbox.database.execute import Template

#: Delete cursors that newer ones have replaced. Rows: one for each.
old_cursors: Template = Template("""
DELETE FROM {s}.dispatch_cursor
 WHERE id = ANY (ARRAY(SELECT id FROM {s}.dispatch_cursor
                        WHERE id < (SELECT max(id) FROM {s}.dispatch_cursor) ORDER BY id LIMIT %s))
RETURNING id
""")

#: Delete offsets that newer ones have replaced. Rows: one for each.
old_offsets: Template = Template("""
DELETE FROM {s}.consumer_offset
 WHERE ctid = ANY (ARRAY(
       SELECT o.ctid FROM {s}.consumer_offset o
        WHERE o.consumer_group = %(group)s AND o.topic = %(topic)s
          AND (o.position, o.claims) < (SELECT n.position, n.claims FROM {s}.consumer_offset n
                                         WHERE n.consumer_group = o.consumer_group AND n.topic = o.topic
                                           AND n.queue = o.queue
                                         ORDER BY n.position DESC, n.claims DESC LIMIT 1)
        LIMIT %(limit)s))
RETURNING 1
""")

# Settled is what nobody waits for any more; what was discarded is, from then on.
_SETTLED = """(status IN ('consumed', 'quarantined') OR discarded_at IS NOT NULL)
       AND greatest(changed_at, discarded_at) < clock_timestamp() - make_interval(secs => %(retention)s)"""

#: Read the next inbox rows after an id. Rows: ``(id, settled and old)``.
old_inbox: Template = Template(f"""
SELECT message_id, {_SETTLED}
  FROM {{s}}.consumer_message
 WHERE consumer_group = %(group)s AND message_id > %(after)s AND topic = %(topic)s
 ORDER BY message_id LIMIT %(limit)s
""")

#: Read, in the producer's database, which messages could still be delivered or resent. Rows: ``(id,)``.
still_there: Template = Template("SELECT id FROM {s}.half_message WHERE id = ANY (%s::uuid[])")

#: Delete inbox rows that are settled and old. Rows: one for each.
forget: Template = Template(f"""
DELETE FROM {{s}}.consumer_message
 WHERE consumer_group = %(group)s AND message_id = ANY (%(ids)s::uuid[]) AND {_SETTLED}
RETURNING message_id
""")

#: Delete what runs of the reconciliation found that began ``retention`` seconds ago. Rows: one for each.
old_findings: Template = Template("""
DELETE FROM {s}.reconciliation_finding
 WHERE id = ANY (ARRAY(
       SELECT f.id FROM {s}.reconciliation_run r JOIN {s}.reconciliation_finding f ON f.run_id = r.id
        WHERE r.topic = %(topic)s AND r.consumer_group = %(group)s
          AND r.started_at < clock_timestamp() - make_interval(secs => %(retention)s)
        LIMIT %(limit)s))
RETURNING 1
""")

# The newest of each schedule says when the next is due.
#: Delete such runs, once their findings are gone, but the newest of each schedule. Rows: one for each.
old_runs: Template = Template("""
DELETE FROM {s}.reconciliation_run
 WHERE id = ANY (ARRAY(
       SELECT r.id FROM {s}.reconciliation_run r
        WHERE r.topic = %(topic)s AND r.consumer_group = %(group)s
          AND r.started_at < clock_timestamp() - make_interval(secs => %(retention)s)
          AND NOT EXISTS (SELECT FROM {s}.reconciliation_finding f WHERE f.run_id = r.id)
          AND EXISTS (SELECT FROM {s}.reconciliation_run n
                       WHERE n.topic = r.topic AND n.consumer_group = r.consumer_group
                         AND n.schedule IS NOT DISTINCT FROM r.schedule AND n.started_at > r.started_at)
        LIMIT %(limit)s))
RETURNING 1
""")

#: Delete samples that are ``age`` seconds old. Rows: one for each.
old_samples: Template = Template("""
DELETE FROM {s}.stats_sample
 WHERE sampled_at = ANY (ARRAY(
       SELECT sampled_at FROM {s}.stats_sample
        WHERE sampled_at < clock_timestamp() - make_interval(secs => %(age)s) ORDER BY sampled_at LIMIT %(limit)s))
RETURNING 1
""")

#: Delete workers that weren't seen for ``age`` seconds. Rows: one for each.
dead_workers: Template = Template("""
DELETE FROM {s}.worker
 WHERE id = ANY (ARRAY(
       SELECT id FROM {s}.worker
        WHERE seen_at < clock_timestamp() - make_interval(secs => %(age)s) ORDER BY seen_at LIMIT %(limit)s))
   AND seen_at < clock_timestamp() - make_interval(secs => %(age)s)
RETURNING 1
""")

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
