"""Statements that follow one message beyond its own tables: what was found about it, and who could undo it."""

from __future__ import annotations

from uuid import UUID

from outbox.store.execute import Statement, in_schema

#: What the columns of findings are called by those who show them.
FINDING = ("run_id", "topic", "group", "kind", "detail", "action", "acted_at", "result", "started_at", "finished_at")

_FINDINGS = """
SELECT f.run_id, r.topic, r.consumer_group, f.kind, f.detail::text, f.action, f.acted_at, f.result, r.started_at,
       r.finished_at
  FROM (SELECT * FROM {s}.reconciliation_finding WHERE message_id = %s LIMIT 1000) f
  LEFT JOIN LATERAL (SELECT * FROM {s}.reconciliation_run WHERE id = f.run_id LIMIT 1) r ON true
 ORDER BY f.id DESC LIMIT 100
"""

_WORKERS = """
SELECT count(*) FROM {s}.worker WHERE seen_at > clock_timestamp() - make_interval(secs => %(alive)s)
"""

_HANDLERS = """
SELECT DISTINCT h ->> 'kind', h ->> 'group', h ->> 'options'
  FROM {s}.worker w
 CROSS JOIN LATERAL jsonb_array_elements(CASE jsonb_typeof(w.handlers) WHEN 'array' THEN w.handlers END) h
 WHERE w.seen_at > clock_timestamp() - make_interval(secs => %(alive)s) AND h ->> 'topic' = %(topic)s
 LIMIT 1000
"""


def findings_of(schema: str, message_id: UUID) -> Statement:
    """Read what reconciliations found about a message, the newest first, 100 at most. Rows: as `FINDING`."""
    return Statement(in_schema(_FINDINGS, schema), (message_id,))


def workers(schema: str, alive: float) -> Statement:
    """Count the workers seen within ``alive`` seconds. Rows: ``(workers,)``."""
    return Statement(in_schema(_WORKERS, schema), {"alive": alive})


def handlers_of(schema: str, topic: str, alive: float) -> Statement:
    """Read what workers seen within ``alive`` seconds have for a topic. Rows: ``(kind, group, options as JSON)``."""
    return Statement(in_schema(_HANDLERS, schema), {"topic": topic, "alive": alive})
