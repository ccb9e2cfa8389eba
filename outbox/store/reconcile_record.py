"""Statements that write down runs of the reconciliation, what they found, and what was done about it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from outbox.store.execute import Statement, in_schema

_BEGIN = """
INSERT INTO {s}.reconciliation_run (id, job_id, topic, consumer_group, window_start, window_end, applied)
VALUES (%(id)s, %(job)s, %(topic)s, %(group)s, %(since)s::timestamptz, %(until)s::timestamptz, %(applied)s)
"""

_END = """
UPDATE {s}.reconciliation_run
   SET finished_at = clock_timestamp(), counts = %(counts)s::jsonb, plan = %(plan)s::jsonb, error = %(error)s
 WHERE id = %(id)s
"""

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

_LAST_BEGUN = """
SELECT extract(epoch FROM clock_timestamp() - max(started_at))::float8 FROM {s}.reconciliation_run
 WHERE topic = %s AND consumer_group = %s
"""

_RUNS = """
SELECT id, job_id, topic, consumer_group, window_start, window_end, started_at, finished_at, applied,
       counts::text, plan::text, error
  FROM {s}.reconciliation_run
 WHERE (%(topic)s::text IS NULL OR topic = %(topic)s) AND (%(group)s::text IS NULL OR consumer_group = %(group)s)
 ORDER BY started_at DESC LIMIT %(limit)s
"""

_FINDINGS_OF = """
SELECT id, message_id, kind, detail::text, action, result, acted_at FROM {s}.reconciliation_finding
 WHERE run_id = %(run)s AND id > %(after)s ORDER BY id LIMIT %(limit)s
"""

#: What the columns of the statements that read are called by those who show them.
RUN = ("id", "job_id", "topic", "group", "window_start", "window_end", "started_at", "finished_at", "applied",
       "counts", "plan", "error")  # fmt: skip
FINDING = ("id", "message_id", "kind", "detail", "action", "result", "acted_at")


@dataclass(frozen=True, slots=True)
class FindingRow:
    """One finding as it is written down; ``detail`` is JSON."""

    message_id: UUID
    kind: str
    detail: Mapping[str, Any]
    action: str


def begin_run(schema: str, values: Mapping[str, object]) -> Statement:
    """Write that a run begins; ``values``: id, job, topic, group, since, until, applied."""
    return Statement(in_schema(_BEGIN, schema), values)


def end_run(
    schema: str, run_id: UUID, counts: Mapping[str, int], plan: Mapping[str, Any] | None, error: str | None
) -> Statement:
    """Write how a run ended."""
    return Statement(
        in_schema(_END, schema),
        {
            "id": run_id,
            "counts": json.dumps(counts),
            "plan": None if plan is None else json.dumps(plan),
            "error": error,
        },
    )


def write_findings(schema: str, run_id: UUID, rows: Sequence[FindingRow]) -> Statement:
    """Write findings of a run."""
    return Statement(
        in_schema(_FINDINGS, schema),
        {
            "run": run_id,
            "ids": [row.message_id for row in rows],
            "kinds": [row.kind for row in rows],
            "details": [json.dumps(row.detail, default=str) for row in rows],
            "actions": [row.action for row in rows],
        },
    )


def mark_acted(
    schema: str, run_id: UUID, ids: Sequence[UUID], actions: Sequence[str], results: Sequence[str]
) -> Statement:
    """Write what was done about findings of a run."""
    return Statement(
        in_schema(_ACTED, schema),
        {"run": run_id, "ids": list(ids), "actions": list(actions), "results": list(results)},
    )


def last_begun(schema: str, topic: str, group: str) -> Statement:
    """Read how long ago the last run of a pair began. Rows: ``(seconds or None,)``."""
    return Statement(in_schema(_LAST_BEGUN, schema), (topic, group))


def runs(schema: str, topic: str | None, group: str | None, limit: int) -> Statement:
    """Read the newest runs. Rows: as `RUN`."""
    return Statement(in_schema(_RUNS, schema), {"topic": topic, "group": group, "limit": limit})


def findings_of(schema: str, run_id: UUID, after: int, limit: int) -> Statement:
    """Read findings of a run behind the one of this number. Rows: as `FINDING`."""
    return Statement(in_schema(_FINDINGS_OF, schema), {"run": run_id, "after": after, "limit": limit})
