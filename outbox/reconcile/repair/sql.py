"""Statements that repair what a reconciliation has found: locks, reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from outbox.database.execute import Statement, in_schema

# --- in the consumer's database --------------------------------------------------------------------------

# One probe for each id in what follows, whatever the statistics say.

# The consumer that runs the handler of a failed message holds its row: it is left alone.
_LOCK_INBOX = """
SELECT c.* FROM unnest(%s::uuid[]) AS m (id) CROSS JOIN LATERAL (
    SELECT message_id, status, attempts, changed_at FROM {s}.consumer_message
     WHERE consumer_group = %s AND message_id = m.id
       FOR UPDATE SKIP LOCKED) c
"""

_STATUSES = """
SELECT c.* FROM unnest(%s::uuid[]) AS m (id) CROSS JOIN LATERAL (
    SELECT message_id, status FROM {s}.consumer_message WHERE consumer_group = %s AND message_id = m.id OFFSET 0) c
"""

_EFFECTS = """
SELECT m.id, c.number FROM unnest(%s::uuid[]) AS m (id) CROSS JOIN LATERAL (
    SELECT count(*) AS number FROM {table} b WHERE b.{column} = m.id) c
"""

_INSERT_INBOX = """
INSERT INTO {s}.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts, body_digest,
                                  last_error, error_kind)
SELECT %(group)s, id, %(topic)s, queue, position, %(status)s, %(attempts)s, digest, %(why)s,
       CASE WHEN %(status)s = 'parked' THEN 'parked by a repair' END
  FROM unnest(%(ids)s::uuid[], %(queues)s::int[], %(positions)s::bigint[], %(digests)s::bytea[])
       AS m (id, queue, position, digest)
 ORDER BY id
ON CONFLICT (consumer_group, message_id) DO NOTHING
RETURNING message_id
"""

# Without a reason there is nothing to tell: a consumed row with an error is one that the handler has skipped.
_SETTLE_INBOX = """
UPDATE {s}.consumer_message
   SET status = %(status)s, next_attempt_at = NULL, claims = 0, changed_at = clock_timestamp(),
       discarded_at = NULL, quarantined_by = NULL, quarantined_from = NULL,
       error_kind = CASE WHEN %(status)s = 'parked' THEN coalesce(error_kind, 'parked by a repair') END,
       last_error = CASE WHEN %(why)s::text IS NOT NULL THEN concat_ws('; before: ', %(why)s::text, last_error) END
 WHERE consumer_group = %(group)s AND message_id = ANY (%(ids)s::uuid[])
"""

# --- in the producer's database --------------------------------------------------------------------------

_DISPATCHED = """
SELECT h.id, h.body_digest FROM {s}.half_message h
 WHERE h.id = ANY (%s::uuid[]) AND EXISTS (SELECT FROM {s}.message m WHERE m.half_id = h.id)
"""

_LOCK_CHECKS = """
SELECT half_id, parked_at IS NULL AND next_check_at <= clock_timestamp() FROM {s}.half_check
 WHERE half_id = ANY (%s::uuid[])
 ORDER BY half_id
   FOR UPDATE SKIP LOCKED
"""

_CHECKS = "SELECT half_id FROM {s}.half_check WHERE half_id = ANY (%s::uuid[])"


@dataclass(frozen=True, slots=True)
class NewRow:
    """An inbox row that is missing; queue and position are 0 where there is no message."""

    id: UUID
    queue: int
    position: int
    digest: bytes | None


def lock_inbox(schema: str, group: str, ids: Sequence[UUID]) -> Statement:
    """Lock inbox rows, but those locked by others. Rows: ``(id, status, attempts, changed_at)``."""
    return Statement(in_schema(_LOCK_INBOX, schema), (list(ids), group))


def statuses(schema: str, group: str, ids: Sequence[UUID]) -> Statement:
    """Read what the inbox says of these messages. Rows: ``(id, status)``."""
    return Statement(in_schema(_STATUSES, schema), (list(ids), group))


def effects(table: str, column: str, ids: Sequence[UUID]) -> Statement:
    """Count what each of these messages has in a business table, whose names are quoted. Rows: ``(id, number)``."""
    return Statement(_EFFECTS.replace("{table}", table).replace("{column}", column), (list(ids),))


def insert_inbox(
    schema: str, group: str, topic: str, status: str, attempts: int, rows: Sequence[NewRow], why: str | None
) -> Statement:
    """Insert inbox rows where there are none. Rows: ``(id,)`` of each that is new."""
    return Statement(
        in_schema(_INSERT_INBOX, schema),
        {
            "group": group,
            "topic": topic,
            "status": status,
            "attempts": attempts,
            "why": why,
            "ids": [row.id for row in rows],
            "queues": [row.queue for row in rows],
            "positions": [row.position for row in rows],
            "digests": [row.digest for row in rows],
        },
    )


def settle_inbox(schema: str, group: str, status: str, ids: Sequence[UUID], why: str | None) -> Statement:
    """Give inbox rows, which are locked, their last status; ``why`` is put before what they say of their failure."""
    return Statement(in_schema(_SETTLE_INBOX, schema), {"group": group, "status": status, "ids": list(ids), "why": why})


def dispatched(schema: str, half_ids: Sequence[UUID]) -> Statement:
    """Read which of these are messages. Rows: ``(id, digest of the body)``."""
    return Statement(in_schema(_DISPATCHED, schema), (list(half_ids),))


def lock_checks(schema: str, half_ids: Sequence[UUID]) -> Statement:
    """Lock the checks of undecided halves, but those locked by others. Rows: ``(id, a check is due)``."""
    return Statement(in_schema(_LOCK_CHECKS, schema), (list(half_ids),))


def checks(schema: str, half_ids: Sequence[UUID]) -> Statement:
    """Read which of these have a check, that is, are undecided. Rows: ``(id,)``."""
    return Statement(in_schema(_CHECKS, schema), (list(half_ids),))
