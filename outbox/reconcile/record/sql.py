"""Statements of the record: runs, what they found, what was done about it, and ranges that were found in sync."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from outbox.database.execute import Statement, in_schema
from outbox.reconcile.sql import as_array

_BEGIN = """
INSERT INTO {s}.reconciliation_run (id, job_id, topic, consumer_group, window_start, window_end, schedule)
VALUES (%(id)s, %(job)s, %(topic)s, %(group)s, %(since)s::timestamptz, %(until)s::timestamptz, %(schedule)s)
ON CONFLICT (id) DO NOTHING
"""

_REOPEN = "UPDATE {s}.reconciliation_run SET applied = true, finished_at = NULL WHERE id = %s"

_END = """
UPDATE {s}.reconciliation_run
   SET finished_at = clock_timestamp(), counts = %(counts)s::jsonb, plan = %(plan)s::jsonb
 WHERE id = %(id)s
"""

_FAIL = "UPDATE {s}.reconciliation_run SET finished_at = clock_timestamp(), error = %s WHERE id = %s"

_FINDINGS = """
INSERT INTO {s}.reconciliation_finding (run_id, message_id, kind, detail, action)
SELECT %(run)s, * FROM unnest(%(ids)s::uuid[], %(kinds)s::text[], %(details)s::jsonb[], %(actions)s::text[])
"""

_ACTED = """
UPDATE {s}.reconciliation_finding f
   SET action = a.action, result = a.result, acted_at = clock_timestamp()
  FROM unnest(%(ids)s::uuid[], %(actions)s::text[], %(results)s::text[]) AS a (id, action, result)
 WHERE f.run_id = %(run)s AND f.message_id = a.id
"""

# The runs of the newest job of the schedule, found pair by pair at the end of an index.
_LAST_SCHEDULED = """
WITH run AS MATERIALIZED (
    SELECT r.* FROM unnest(%(topics)s::text[], %(groups)s::text[]) AS p (topic, consumer_group)
     CROSS JOIN LATERAL (SELECT job_id, started_at, finished_at, error FROM {s}.reconciliation_run r
                          WHERE r.topic = p.topic AND r.consumer_group = p.consumer_group
                            AND r.schedule = %(schedule)s
                          ORDER BY r.started_at DESC LIMIT 1) r
)
SELECT clock_timestamp(), min(started_at), max(finished_at), bool_or(finished_at IS NULL), bool_or(error IS NOT NULL)
  FROM run WHERE job_id = (SELECT job_id FROM run ORDER BY started_at DESC LIMIT 1)
"""

_COLUMNS = """id, job_id, topic, consumer_group, window_start, window_end, started_at, finished_at, applied,
       counts::text, plan::text, error, schedule"""

_RUNS = f"""
SELECT {_COLUMNS}
  FROM {{s}}.reconciliation_run
 WHERE (%(topic)s::text IS NULL OR topic = %(topic)s) AND (%(group)s::text IS NULL OR consumer_group = %(group)s)
 ORDER BY started_at DESC, id DESC LIMIT %(limit)s
"""

_RUN = f"SELECT {_COLUMNS} FROM {{s}}.reconciliation_run WHERE id = %s"

_FINDINGS_OF = """
SELECT id, message_id, kind, detail::text, action, result, acted_at FROM {s}.reconciliation_finding
 WHERE run_id = %(run)s AND id > %(after)s ORDER BY id LIMIT %(limit)s
"""

#: What the columns of the statements that read are called by what shows them.
RUN = ("id", "job_id", "topic", "group", "window_start", "window_end", "started_at", "finished_at", "applied",
       "counts", "plan", "error", "schedule")  # fmt: skip
FINDING = ("id", "message_id", "kind", "detail", "action", "result", "acted_at")


def begin_run(schema: str, values: Mapping[str, object]) -> Statement:
    """Write that a run begins, if it isn't there; ``values``: id, job, topic, group, since, until, schedule."""
    return Statement(in_schema(_BEGIN, schema), values)


def reopen_run(schema: str, run_id: UUID) -> Statement:
    """Write that what a run found is being repaired."""
    return Statement(in_schema(_REOPEN, schema), (run_id,))


def end_run(schema: str, run_id: UUID, counts: Mapping[str, int], plan: Mapping[str, Any]) -> Statement:
    """Write how a run ended."""
    return Statement(in_schema(_END, schema), {"id": run_id, "counts": json.dumps(counts), "plan": json.dumps(plan)})


def fail_run(schema: str, run_id: UUID, error: str) -> Statement:
    """Write why a run ended before its time; what was counted until then stays."""
    return Statement(in_schema(_FAIL, schema), (error, run_id))


def write_findings(schema: str, run_id: UUID, rows: Sequence[tuple[UUID, str, str, str]]) -> Statement:
    """Write findings of a run: id, kind, detail (JSON) and action of each."""
    ids, kinds, details, actions = (list(column) for column in zip(*rows, strict=True))
    values = {"run": run_id, "ids": ids, "kinds": kinds, "details": details, "actions": actions}
    return Statement(in_schema(_FINDINGS, schema), values)


def mark_acted(schema: str, run_id: UUID, rows: Sequence[tuple[UUID, str, str]]) -> Statement:
    """Write what was done about findings of a run: id, action and result of each."""
    ids, actions, results = (list(column) for column in zip(*rows, strict=True))
    return Statement(in_schema(_ACTED, schema), {"run": run_id, "ids": ids, "actions": actions, "results": results})


def last_scheduled(schema: str, schedule: str, pairs: Sequence[tuple[str, str]]) -> Statement:
    """Read how the newest job of a schedule on pairs (topic, group) fares.

    Rows: ``(the time now, begun, last end, still running, failed)``, all but the first None if there was none.
    """
    topics, groups = ([pair[at] for pair in pairs] for at in (0, 1))
    return Statement(in_schema(_LAST_SCHEDULED, schema), {"topics": topics, "groups": groups, "schedule": schedule})


def runs(schema: str, topic: str | None, group: str | None, limit: int) -> Statement:
    """Read the newest runs. Rows: as `RUN`."""
    return Statement(in_schema(_RUNS, schema), {"topic": topic, "group": group, "limit": limit})


def run(schema: str, run_id: UUID) -> Statement:
    """Read one run. Rows: as `RUN`, none if it isn't there."""
    return Statement(in_schema(_RUN, schema), (run_id,))


def findings_of(schema: str, run_id: UUID, after: int, limit: int) -> Statement:
    """Read findings of a run behind the one of this number. Rows: as `FINDING`."""
    return Statement(in_schema(_FINDINGS_OF, schema), {"run": run_id, "after": after, "limit": limit})


_LOAD = """
SELECT first_id, end_id, counts::text FROM {s}.reconciliation_settled
 WHERE consumer_group = %(group)s AND topic = %(topic)s
   AND verified_at > clock_timestamp() - make_interval(secs => %(keep_for)s)
 ORDER BY first_id
"""

_MARK = "SELECT version, mark::text FROM {s}.reconciliation_mark WHERE consumer_group = %s AND topic = %s"

# The first run that writes at a version wins; the loser's ranges were judged against a mark that is gone.
_WRITE_MARK = """
INSERT INTO {s}.reconciliation_mark AS m (consumer_group, topic, version, mark)
VALUES (%(group)s, %(topic)s, %(version)s + 1, %(mark)s::jsonb)
ON CONFLICT (consumer_group, topic) DO UPDATE
   SET version = excluded.version, mark = excluded.mark, written_at = clock_timestamp()
 WHERE m.version = %(version)s
RETURNING version
"""

_FORGET = """
DELETE FROM {s}.reconciliation_settled
 WHERE consumer_group = %(group)s AND topic = %(topic)s AND NOT first_id = ANY (%(keep)s::uuid[])
"""

_KEEP = """
INSERT INTO {s}.reconciliation_settled (consumer_group, topic, first_id, end_id, counts)
SELECT %(group)s, %(topic)s, * FROM unnest(%(firsts)s::uuid[], %(ends)s::uuid[], %(counts)s::jsonb[])
"""

# A restore to a point in time, and a standby that takes over, may lose what the consumer has seen: another timeline.
_HERE = """
SELECT (SELECT system_identifier FROM pg_control_system())::text,
       (SELECT timeline_id FROM pg_control_checkpoint())::text, current_database()::text, pg_current_snapshot()::text
"""

_HEADS = """
SELECT q, coalesce((SELECT max(position) FROM {s}.message m WHERE m.topic = %(topic)s AND m.queue = q), 0)
  FROM generate_series(0, (SELECT queues FROM {s}.topic WHERE name = %(topic)s) - 1) q
"""

_BUCKET = "width_bucket({id}, %(bounds)s::uuid[])"

# All that became visible since the mark, whatever its age; what waits for a decision, or was compensated; by bucket.
_TOUCHED_AT_PRODUCER = f"""
SELECT DISTINCT {_BUCKET.replace("{id}", "half_id")}
  FROM (SELECT half_id FROM {{s}}.op_message
         WHERE xid >= pg_snapshot_xmin(%(snapshot)s::pg_snapshot)
           AND NOT pg_visible_in_snapshot(xid, %(snapshot)s::pg_snapshot)
         UNION ALL
        SELECT m.half_id
          FROM unnest(%(queues)s::int[], %(positions)s::int8[]) AS q (queue, position)
         CROSS JOIN LATERAL (SELECT half_id FROM {{s}}.message m
                              WHERE m.topic = %(topic)s AND m.queue = q.queue AND m.position > q.position OFFSET 0) m
         UNION ALL
        SELECT half_id FROM {{s}}.half_check
         UNION ALL
        SELECT half_id FROM {{s}}.compensation) t
"""

# Each of the two has an index of its own.
_TOUCHED_AT_CONSUMER = f"""
SELECT DISTINCT {_BUCKET.replace("{id}", "message_id")}
  FROM (SELECT message_id FROM {{s}}.consumer_message
         WHERE consumer_group = %(group)s AND topic = %(topic)s AND status = 'failed'
         UNION ALL
        SELECT message_id FROM {{s}}.consumer_message
         WHERE consumer_group = %(group)s AND topic = %(topic)s AND status = 'parked') t
"""


def load(schema: str, group: str, topic: str, keep_for: float) -> Statement:
    """Read the ranges verified within ``keep_for`` seconds. Rows: ``(first id, end id, counts)``, in order."""
    return Statement(in_schema(_LOAD, schema), {"group": group, "topic": topic, "keep_for": keep_for})


def mark(schema: str, group: str, topic: str) -> Statement:
    """Read up to where the ranges are known to be untouched. Rows: ``(version, mark)`` or none."""
    return Statement(in_schema(_MARK, schema), (group, topic))


def write_mark(schema: str, group: str, topic: str, version: int, mark: Mapping[str, Any]) -> Statement:
    """Replace the mark of this version (0: there is none yet). Rows: one, unless another run was faster."""
    return Statement(
        in_schema(_WRITE_MARK, schema),
        {"group": group, "topic": topic, "version": version, "mark": json.dumps(mark)},
    )


def forget(schema: str, group: str, topic: str, keep: Sequence[UUID]) -> Statement:
    """Drop all ranges but those that begin with one of these ids."""
    return Statement(in_schema(_FORGET, schema), {"group": group, "topic": topic, "keep": list(keep)})


def keep(
    schema: str, group: str, topic: str, ranges: Sequence[tuple[UUID, UUID | None]], counts: Sequence[Mapping[str, int]]
) -> Statement:
    """Write ranges that were found in sync, with the counts of their outcomes."""
    return Statement(
        in_schema(_KEEP, schema),
        {
            "group": group,
            "topic": topic,
            "firsts": [first for first, _ in ranges],
            "ends": [end for _, end in ranges],
            "counts": [json.dumps(each) for each in counts],
        },
    )


def here() -> Statement:
    """Read which cluster and database this is, and its snapshot.

    Rows: ``(system identifier, timeline, database, snapshot)``.
    """
    return Statement(_HERE)


def heads(schema: str, topic: str) -> Statement:
    """Read the ends of each queue. Rows: ``(queue, position)``; none while the topic doesn't exist."""
    return Statement(in_schema(_HEADS, schema), {"topic": topic})


def touched_at_producer(
    schema: str, topic: str, bounds: Sequence[UUID], snapshot: str, heads: Mapping[int, int]
) -> Statement:
    """Find the ranges in which anything was written since a mark; range n begins with the n-th of ``bounds``.

    Rows: ``(n,)``; 0 is before the first. New queues must be in ``heads``, with 0.
    """
    return Statement(
        in_schema(_TOUCHED_AT_PRODUCER, schema),
        {
            "topic": topic,
            "bounds": as_array(bounds),
            "snapshot": snapshot,
            "queues": list(heads),
            "positions": list(heads.values()),
        },
    )


def touched_at_consumer(schema: str, group: str, topic: str, bounds: Sequence[UUID]) -> Statement:
    """Find the ranges with messages that failed or are parked. Rows: ``(n,)`` as of `touched_at_producer`."""
    return Statement(
        in_schema(_TOUCHED_AT_CONSUMER, schema), {"group": group, "topic": topic, "bounds": as_array(bounds)}
    )
