"""Statements about ranges of ids that were found in sync: keep them, and find out what may have changed in them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from outbox.database.execute import Statement, in_schema
from outbox.reconcile.sql import as_array

_LOAD = """
SELECT first_id, end_id, counts::text FROM {s}.reconciliation_settled
 WHERE consumer_group = %(group)s AND topic = %(topic)s
   AND verified_at > clock_timestamp() - make_interval(secs => %(keep_for)s)
 ORDER BY first_id
"""

_MARK = "SELECT version, mark::text FROM {s}.reconciliation_mark WHERE consumer_group = %s AND topic = %s"

# The first who writes at a version wins; the loser's ranges were judged against a mark that is gone.
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
