"""Statements by which workers report that they live, and the statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from outbox.database.execute import Statement, in_schema

# What hasn't changed is left as it is: it may be long, and stored apart.
_BEAT = """
INSERT INTO {s}.worker AS w (id, name, version, roles, handlers, duties)
VALUES (%(id)s, %(name)s, %(version)s, %(roles)s::jsonb, %(handlers)s::jsonb, %(duties)s::jsonb)
ON CONFLICT (id) DO UPDATE
   SET seen_at = clock_timestamp(), duties = excluded.duties,
       handlers = CASE WHEN w.handlers = excluded.handlers THEN w.handlers ELSE excluded.handlers END
"""

# The worker that writes the row of a minute takes its sample. The row is empty until then, and for good if that worker
# dies over it.
_CLAIM_SAMPLE = """
INSERT INTO {s}.stats_sample (sampled_at, stats) VALUES (date_trunc('minute', statement_timestamp()), '{}')
ON CONFLICT (sampled_at) DO NOTHING
RETURNING sampled_at::text
"""

_WRITE_SAMPLE = "UPDATE {s}.stats_sample SET stats = %s::jsonb WHERE sampled_at = %s::timestamptz"

_LEAVE = "DELETE FROM {s}.worker WHERE id = %s"


def beat(schema: str, values: Mapping[str, Any]) -> Statement:
    """Write that a worker lives and how it fares: the columns by name; ``roles``, ``handlers``, ``duties`` as JSON."""
    return Statement(in_schema(_BEAT, schema), dict(values))


def claim_sample(schema: str) -> Statement:
    """Claim this minute's sample. Rows: ``(minute as text,)``, none if another worker was faster."""
    return Statement(in_schema(_CLAIM_SAMPLE, schema))


def write_sample(schema: str, minute: str, stats: str) -> Statement:
    """Write the statistics of a minute; ``stats`` is JSON."""
    return Statement(in_schema(_WRITE_SAMPLE, schema), (stats, minute))


def leave(schema: str, worker_id: UUID) -> Statement:
    """Delete the row of a worker that ends in order."""
    return Statement(in_schema(_LEAVE, schema), (worker_id,))
