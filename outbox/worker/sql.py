"""Statements by which workers tell that they are there, and how things stand."""

from __future__ import annotations

from dataclasses import dataclass
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

_SAMPLE_MISSING = """
SELECT NOT EXISTS (SELECT FROM {s}.stats_sample WHERE sampled_at = date_trunc('minute', statement_timestamp()))
"""

# Whoever writes the row of a minute takes its sample; it is empty until then, and for good if that one dies over it.
_CLAIM_SAMPLE = """
INSERT INTO {s}.stats_sample (sampled_at, stats) VALUES (date_trunc('minute', statement_timestamp()), '{}')
ON CONFLICT (sampled_at) DO NOTHING
RETURNING sampled_at::text
"""

_WRITE_SAMPLE = "UPDATE {s}.stats_sample SET stats = %s::jsonb WHERE sampled_at = %s::timestamptz"

_LEAVE = "DELETE FROM {s}.worker WHERE id = %s"


@dataclass(frozen=True, slots=True)
class WorkerValues:
    """What a worker tells of itself; ``roles``, ``handlers`` and ``duties`` are JSON."""

    id: UUID
    name: str
    version: str
    roles: str
    handlers: str
    duties: str


def beat(schema: str, worker: WorkerValues) -> Statement:
    """Write that a worker is there, and how it fares."""
    return Statement(
        in_schema(_BEAT, schema),
        {
            "id": worker.id,
            "name": worker.name,
            "version": worker.version,
            "roles": worker.roles,
            "handlers": worker.handlers,
            "duties": worker.duties,
        },
    )


def sample_missing(schema: str) -> Statement:
    """Tell whether nobody has taken this minute's sample so far. Rows: ``(missing,)``."""
    return Statement(in_schema(_SAMPLE_MISSING, schema))


def claim_sample(schema: str) -> Statement:
    """Take it upon oneself to sample this minute. Rows: ``(minute as text,)``, none if somebody else was faster."""
    return Statement(in_schema(_CLAIM_SAMPLE, schema))


def write_sample(schema: str, minute: str, stats: str) -> Statement:
    """Write how things stood in a minute; ``stats`` is JSON."""
    return Statement(in_schema(_WRITE_SAMPLE, schema), (stats, minute))


def leave(schema: str, worker_id: UUID) -> Statement:
    """Forget a worker that ends in order."""
    return Statement(in_schema(_LEAVE, schema), (worker_id,))
