"""Build statements that find the rows written since a follower's last pass, without reading those it has judged."""

from __future__ import annotations

from outbox.database.execute import Template
from outbox.database.sql import open_rows
from outbox.reconcile.record.settled import WRITTEN_SINCE

#: So many ids of each kind that the log doesn't tell of are read in a pass.
MOST = 5_000

#: What became visible since a mark (`settled.written_since`) with an id below the frontier, or made ahead of time.
#: Rows: ``(half_id,)``.
late: Template = Template(f"""
SELECT DISTINCT half_id FROM ({WRITTEN_SINCE}) t
 WHERE half_id < %(frontier)s::uuid OR half_id >= %(ahead)s::uuid
""")

# Each by an index. Their rows go away, or are few: the caller leaves out what it has judged already.
#: What no op and no message tells of: halves that wait for a decision, what was compensated, what is overdue for its
#: release by so many seconds. Rows: ``(half_id,)``.
unsaid: Template = Template(f"""
(SELECT half_id FROM {{s}}.half_check WHERE topic = %(topic)s AND half_id < %(frontier)s::uuid LIMIT {MOST})
 UNION ALL
(SELECT half_id FROM {{s}}.compensation WHERE half_id < %(frontier)s::uuid
  ORDER BY half_id DESC LIMIT {MOST})
 UNION ALL
(SELECT half_id FROM {{s}}.scheduled_message
  WHERE recalled_at IS NULL AND deliver_at < clock_timestamp() - make_interval(secs => %(grace)s)
    AND half_id < %(frontier)s::uuid
  ORDER BY deliver_at LIMIT {MOST})
""")

#: What a group isn't done with: it fails at it, has parked it, or has it wait for its key. Rows: ``(message_id,)``.
failing: Template = Template(f"""
SELECT message_id FROM ({open_rows(f"discarded_at IS NULL LIMIT {MOST}")}) f WHERE message_id < %(frontier)s::uuid
""")

#: The messages that a group comes to next, of the queues of which positions are given. Rows: ``(half_id,)``.
at_positions: Template = Template("""
SELECT n.half_id
  FROM unnest(%(queues)s::int[], %(positions)s::int8[]) AS q (queue, position)
 CROSS JOIN LATERAL (SELECT half_id FROM {s}.message m
                      WHERE m.topic = %(topic)s AND m.queue = q.queue AND m.position > q.position
                      ORDER BY m.position LIMIT 1) n
""")
