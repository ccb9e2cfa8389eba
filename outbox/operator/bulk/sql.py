"""Statements that carry bulk jobs out, end them, and show them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from uuid import UUID

from outbox.database.execute import Statement, in_schema
from outbox.database.sql import BULK_COUNTS

# Compensations are left to the workers that have them, and acts that only a newer version knows to its workers.
_OPEN = """
SELECT id, action, requested_by, reason, options::text, origin::text, rate, started_at IS NOT NULL
  FROM {s}.bulk_job
 WHERE finished_at IS NULL AND action = ANY (%(actions)s::text[]) AND (%(id)s::uuid IS NULL OR id = %(id)s::uuid)
 ORDER BY created_at LIMIT %(limit)s
"""

# Who has this lock is the only one that carries the bulk job out: what the others just did would not be seen.
_LOCK_RATED = "SELECT id FROM {s}.bulk_job WHERE id = %s AND finished_at IS NULL FOR NO KEY UPDATE SKIP LOCKED"

# So many items as the rate has in a second, but one at least, in the time that these may take.
_BUDGET = """
SELECT greatest(w.items - (
           SELECT count(*) FROM {s}.bulk_item
            WHERE bulk_job_id = %(id)s AND attempts > 0
              AND changed_at > clock_timestamp() - make_interval(secs => w.items / %(rate)s::float8)), 0)::int
  FROM (SELECT greatest(floor(%(rate)s::float8), 1) AS items) w
"""

_TAKE = """
SELECT number, message_id, consumer_group, attempts
  FROM {s}.bulk_item
 WHERE bulk_job_id = %(id)s AND state = 'pending' AND number > %(after)s AND next_attempt_at <= clock_timestamp()
 ORDER BY number LIMIT %(limit)s
   FOR UPDATE SKIP LOCKED
"""

# The range is for the index: of a bulk job that is younger than the statistics, a hash join would else read all items
# for each batch.
_SETTLE = """
UPDATE {s}.bulk_item i
   SET state = w.state, outcome = w.outcome, attempts = i.attempts + 1, changed_at = clock_timestamp(),
       next_attempt_at = clock_timestamp() + make_interval(secs => w.delay)
  FROM unnest(%(numbers)s::int[], %(states)s::text[], %(outcomes)s::text[], %(delays)s::float8[])
       w (number, state, outcome, delay)
 WHERE i.bulk_job_id = %(id)s AND i.number BETWEEN %(first)s AND %(last)s AND i.number = w.number
   AND i.state = 'pending'
"""

_LOCK = "SELECT finished_at, cancelled_at FROM {s}.bulk_job WHERE id = %s FOR UPDATE"

# A compensation that has begun has quarantined the message at consumers: a worker releases it there, and ends the item.
_CANCEL = """
WITH marked AS (
    UPDATE {s}.bulk_job SET cancelled_at = clock_timestamp(), cancelled_by = %(actor)s WHERE id = %(id)s
)
UPDATE {s}.bulk_item
   SET state = 'cancelled', changed_at = clock_timestamp()
 WHERE bulk_job_id = %(id)s AND state = 'pending' AND (action <> 'compensate' OR attempts = 0)
RETURNING number
"""

#: The names of the columns of bulk jobs and items.
BULK_JOB = ("id", "action", "requested_by", "reason", "options", "described", "rate", "total", "counts", "created_at",
             "started_at", "finished_at", "cancelled_at", "cancelled_by", "state")  # fmt: skip
ITEM = ("number", "action", "message_id", "topic", "group", "state", "outcome", "attempts", "changed_at")

# A finished bulk job has its counts in its row. A compensation is begun by its first attempt.
_ROWS = f"""
SELECT id, action, requested_by, reason, options::text, selector ->> 'described', rate, total,
       coalesce(selector -> 'counts', {BULK_COUNTS})::text AS counts, created_at, began, finished_at, cancelled_at,
       cancelled_by, state
  FROM (SELECT p.*, b.began,
               CASE WHEN p.cancelled_at IS NOT NULL THEN 'cancelled'
                    WHEN p.finished_at IS NULL THEN CASE WHEN b.began IS NULL THEN 'waiting' ELSE 'running' END
                    WHEN (p.selector -> 'counts' ->> 'done')::int = p.total THEN 'done'
                    ELSE 'partly' END AS state
          FROM {{s}}.bulk_job p
         CROSS JOIN LATERAL (
               SELECT CASE WHEN p.started_at IS NULL AND p.action = 'compensate'
                           THEN (SELECT p.created_at FROM {{s}}.bulk_item i
                                  WHERE i.bulk_job_id = p.id AND i.attempts > 0 LIMIT 1)
                           ELSE p.started_at END AS began) b) p"""

_LIST = f"""{_ROWS}
 WHERE (%(after)s::uuid IS NULL OR id < %(after)s::uuid) AND (%(state)s::text IS NULL OR state = %(state)s)
 ORDER BY id DESC LIMIT %(limit)s
"""

_ONE = f"{_ROWS} WHERE id = %(id)s"

_OF_MESSAGE = f"""{_ROWS}
 WHERE id IN (SELECT bulk_job_id FROM {{s}}.bulk_item WHERE message_id = %s LIMIT 100) ORDER BY created_at
"""

_BY_KEY = """
SELECT id, action, requested_by, reason, options::text, selector::text, rate
  FROM {s}.bulk_job WHERE idempotency_key = %s
"""

_ITEMS = """
SELECT number, action, message_id, topic, consumer_group, state, outcome, attempts, changed_at
  FROM {s}.bulk_item
 WHERE bulk_job_id = %(id)s AND number > %(after)s AND (%(state)s::text IS NULL OR state = %(state)s)
 ORDER BY number LIMIT %(limit)s
"""


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of an item; one that stays ``pending`` is due again after ``delay`` seconds."""

    number: int
    state: str
    outcome: str
    delay: float = 0.0


def open_bulk_jobs(schema: str, actions: Collection[str], limit: int, bulk_job_id: UUID | None = None) -> Statement:
    """Read the oldest bulk jobs of these actions that aren't done; only this one, if one is named.

    Rows: ``(id, action, requested_by, reason, options, origin, rate, has begun)``.
    """
    return Statement(in_schema(_OPEN, schema), {"actions": sorted(actions), "limit": limit, "id": bulk_job_id})


def lock_rated(schema: str, bulk_job_id: UUID) -> Statement:
    """Keep all others from carrying this bulk job out. Rows: one, or none if another one does."""
    return Statement(in_schema(_LOCK_RATED, schema), (bulk_job_id,))


def budget(schema: str, bulk_job_id: UUID, rate: float) -> Statement:
    """Read how many items may be tried now, if ``rate`` is the most in a second. Rows: ``(items,)``."""
    return Statement(in_schema(_BUDGET, schema), {"id": bulk_job_id, "rate": rate})


def take(schema: str, bulk_job_id: UUID, after: int, limit: int) -> Statement:
    """Lock the next items that are due, but those of others. Rows: ``(number, message, group, attempts)``."""
    return Statement(in_schema(_TAKE, schema), {"id": bulk_job_id, "after": after, "limit": limit})


def settle(schema: str, bulk_job_id: UUID, items: Sequence[Settled]) -> Statement:
    """Write what became of items, which are locked, and count the attempt."""
    return Statement(
        in_schema(_SETTLE, schema),
        {
            "id": bulk_job_id,
            "first": min(item.number for item in items),
            "last": max(item.number for item in items),
            "numbers": [item.number for item in items],
            "states": [item.state for item in items],
            "outcomes": [item.outcome for item in items],
            "delays": [item.delay for item in items],
        },
    )


def lock(schema: str, bulk_job_id: UUID) -> Statement:
    """Lock a bulk job. Rows: ``(finished_at, cancelled_at)`` or none."""
    return Statement(in_schema(_LOCK, schema), (bulk_job_id,))


def cancel(schema: str, bulk_job_id: UUID, actor: str) -> Statement:
    """Cancel what is left of a bulk job, which is locked. Rows: ``(number,)``."""
    return Statement(in_schema(_CANCEL, schema), {"id": bulk_job_id, "actor": actor})


def list_jobs(schema: str, state: str | None, after: UUID | None, limit: int) -> Statement:
    """Read bulk jobs, the newest first, below the id ``after``. Rows: as `BULK_JOB`."""
    return Statement(in_schema(_LIST, schema), {"state": state, "after": after, "limit": limit})


def job(schema: str, bulk_job_id: UUID) -> Statement:
    """Read a bulk job. Rows: as `BULK_JOB`, or none."""
    return Statement(in_schema(_ONE, schema), {"id": bulk_job_id})


def jobs_of(schema: str, message_id: UUID) -> Statement:
    """Read the bulk jobs that a message was in, 100 at most. Rows: as `BULK_JOB`."""
    return Statement(in_schema(_OF_MESSAGE, schema), (message_id,))


def by_key(schema: str, key: str) -> Statement:
    """Read the bulk job with an idempotency key.

    Rows: ``(id, action, requested_by, reason, options, selector, rate)`` or none.
    """
    return Statement(in_schema(_BY_KEY, schema), (key,))


def items(schema: str, bulk_job_id: UUID, state: str | None, after: int, limit: int) -> Statement:
    """Read items of a bulk job in their order, above the number ``after``. Rows: as `ITEM`."""
    return Statement(in_schema(_ITEMS, schema), {"id": bulk_job_id, "state": state, "after": after, "limit": limit})
