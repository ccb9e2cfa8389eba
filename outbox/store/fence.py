"""Statements that fence messages off in the inboxes of a consumer's database, and lift fences again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from outbox.store.execute import Statement, in_schema
from outbox.store.stats import PLACES

_HAS_INBOX = "SELECT to_regclass(%s) IS NOT NULL"

_KNOWN = f"""{PLACES}, known AS (
    SELECT DISTINCT consumer_group FROM place
     WHERE topic = %(topic)s AND (%(group)s::text IS NULL OR consumer_group = %(group)s)
)"""

# By queue, for those queues that are asked about; a group that hasn't come to one yet is at its beginning.
_REACHED = f"""{_KNOWN}
SELECT k.consumer_group, q.queue,
       coalesce((SELECT max(position) FROM {{s}}.consumer_offset o
                  WHERE o.consumer_group = k.consumer_group AND o.topic = %(topic)s AND o.queue = q.queue), 0),
       coalesce((SELECT max(position) FROM {{s}}.consumer_start b
                  WHERE b.consumer_group = k.consumer_group AND b.topic = %(topic)s AND b.queue = q.queue), 0)
  FROM known k LEFT JOIN unnest(%(queues)s::int[]) q (queue) ON true
 ORDER BY 1, 2
"""

# Whoever handles a failed message holds its row.
_INBOXES = f"""{_KNOWN}
SELECT c.consumer_group, c.status, c.fenced_by
  FROM known k JOIN {{s}}.consumer_message c ON c.consumer_group = k.consumer_group AND c.message_id = %(id)s
 ORDER BY 1
"""

_ROWS = (
    "unnest(%(groups)s::text[], %(ids)s::uuid[], %(queues)s::int[], %(positions)s::bigint[], %(operations)s::uuid[])"
)

# A consumer that has the message in its hands inserts the same row with its commit: one of the two comes first, and the
# other waits for it.
_INSERT = f"""
INSERT INTO {{s}}.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts, fenced_by,
                                   fenced_from)
SELECT consumer_group, id, %(topic)s, queue, position, 'rolled_back', 0, operation_id,
       CASE WHEN operation_id IS NOT NULL THEN 'unconsumed' END
  FROM {_ROWS} r (consumer_group, id, queue, position, operation_id)
 ORDER BY consumer_group, id
ON CONFLICT (consumer_group, message_id) DO NOTHING
RETURNING consumer_group, message_id
"""

# A fence of nobody's stays nobody's; but who found it before, and means to change it, is to see that it has changed.
_TAKE = """
UPDATE {s}.consumer_message c
   SET status = 'rolled_back', next_attempt_at = NULL, claims = 0, discarded_at = NULL, changed_at = clock_timestamp(),
       fenced_by = CASE WHEN status = 'rolled_back' AND fenced_by IS NULL THEN NULL ELSE %(operation)s::uuid END,
       fenced_from = CASE WHEN status = 'rolled_back' THEN fenced_from ELSE status END
 WHERE consumer_group = ANY (%(groups)s::text[]) AND message_id = %(id)s
"""

_MINE = """
SELECT consumer_group, fenced_from FROM {s}.consumer_message
 WHERE consumer_group = ANY (%(groups)s::text[]) AND message_id = %(id)s AND fenced_by = ANY (%(operations)s::uuid[])
 ORDER BY 1
"""

_OF_GROUP = """
SELECT c.* FROM unnest(%(ids)s::uuid[]) m (id) CROSS JOIN LATERAL (
    SELECT message_id FROM {s}.consumer_message
     WHERE consumer_group = %(group)s AND message_id = m.id AND fenced_by IS NOT NULL OFFSET 0) c
"""

_GIVE_BACK = """
UPDATE {s}.consumer_message
   SET status = fenced_from, next_attempt_at = CASE WHEN fenced_from = 'failed' THEN clock_timestamp() END,
       fenced_by = NULL, fenced_from = NULL, changed_at = clock_timestamp()
 WHERE consumer_group = ANY (%(groups)s::text[]) AND message_id = %(id)s AND fenced_by = ANY (%(operations)s::uuid[])
   AND fenced_from IN ('failed', 'parked')
RETURNING consumer_group, status
"""

_DROP = """
DELETE FROM {s}.consumer_message
 WHERE consumer_group = ANY (%(groups)s::text[]) AND message_id = %(id)s AND fenced_by = ANY (%(operations)s::uuid[])
   AND fenced_from = 'unconsumed'
RETURNING consumer_group, 'unconsumed'
"""

_MAKE_DUE = """
INSERT INTO {s}.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts, next_attempt_at)
SELECT g, %(id)s, %(topic)s, %(queue)s, %(position)s, 'failed', 0, clock_timestamp()
  FROM unnest(%(groups)s::text[]) g
 ORDER BY g
ON CONFLICT (consumer_group, message_id) DO NOTHING
RETURNING consumer_group, 'failed'
"""

_AUDIT = """
INSERT INTO {s}.audit (actor, action, target, reason, result, origin)
SELECT %(actor)s, %(action)s, target, %(reason)s, result::jsonb, %(origin)s::jsonb
  FROM unnest(%(targets)s::text[], %(results)s::text[]) a (target, result)
"""


@dataclass(frozen=True, slots=True)
class NewFence:
    """A fence where there is no inbox row; queue and position are 0 while there is no message."""

    group: str
    message_id: UUID
    queue: int
    position: int
    operation_id: UUID | None


def has_inbox(schema: str) -> Statement:
    """Tell whether the database has a consumer's tables. Rows: ``(has,)``."""
    return Statement(_HAS_INBOX, (f'"{schema}".consumer_message',))


def reached(schema: str, topic: str, queues: Sequence[int], group: str | None = None) -> Statement:
    """Read how far each group of a topic has come in some queues; ``group`` None: all.

    Rows: ``(group, queue, position, start)``; one without a queue for each group if none is asked about.
    """
    return Statement(in_schema(_REACHED, schema), {"topic": topic, "queues": list(queues), "group": group})


def inboxes(schema: str, topic: str, message_id: UUID, *, lock: bool = False) -> Statement:
    """Read what the inboxes of a topic's groups say of a message. Rows: ``(group, status, fenced by)``.

    With ``lock`` the rows stay so until the transaction ends.
    """
    sql = _INBOXES + (" FOR UPDATE OF c" if lock else "")
    return Statement(in_schema(sql, schema), {"topic": topic, "group": None, "id": message_id})


def insert(schema: str, topic: str, rows: Sequence[NewFence]) -> Statement:
    """Insert fences where there is no inbox row. Rows: ``(group, id)`` of each that is new."""
    return Statement(
        in_schema(_INSERT, schema),
        {
            "topic": topic,
            "groups": [row.group for row in rows],
            "ids": [row.message_id for row in rows],
            "queues": [row.queue for row in rows],
            "positions": [row.position for row in rows],
            "operations": [row.operation_id for row in rows],
        },
    )


def take(schema: str, message_id: UUID, groups: Sequence[str], operation_id: UUID) -> Statement:
    """Make inbox rows, which are locked and not consumed, fences of an operation."""
    return Statement(in_schema(_TAKE, schema), {"id": message_id, "groups": list(groups), "operation": operation_id})


def of_operations(schema: str, message_id: UUID, groups: Sequence[str], operations: Sequence[UUID]) -> Statement:
    """Read the fences of these operations. Rows: ``(group, what the inbox said before)``."""
    return _fences(_MINE, schema, message_id, groups, operations)


def of_group(schema: str, group: str, message_ids: Sequence[UUID]) -> Statement:
    """Read which of these messages an operation has fenced off in a group. Rows: ``(id,)``."""
    return Statement(in_schema(_OF_GROUP, schema), {"group": group, "ids": list(message_ids)})


def give_back(schema: str, message_id: UUID, groups: Sequence[str], operations: Sequence[UUID]) -> Statement:
    """Lift fences over failed messages, which are due now, and over parked ones. Rows: ``(group, status)``."""
    return _fences(_GIVE_BACK, schema, message_id, groups, operations)


def drop(schema: str, message_id: UUID, groups: Sequence[str], operations: Sequence[UUID]) -> Statement:
    """Lift fences that stand where there was no inbox row, and leave none. Rows: ``(group, 'unconsumed')``."""
    return _fences(_DROP, schema, message_id, groups, operations)


def _fences(sql: str, schema: str, message_id: UUID, groups: Sequence[str], operations: Sequence[UUID]) -> Statement:
    return Statement(in_schema(sql, schema), {"id": message_id, "groups": list(groups), "operations": list(operations)})


def make_due(schema: str, topic: str, message_id: UUID, queue: int, position: int, groups: Sequence[str]) -> Statement:
    """Insert inbox rows that are due now, like failed ones, without an attempt so far. Rows: ``(group, status)``."""
    return Statement(
        in_schema(_MAKE_DUE, schema),
        {"topic": topic, "id": message_id, "queue": queue, "position": position, "groups": list(groups)},
    )


def audit(
    schema: str,
    actor: str,
    action: str,
    reason: str,
    origin: Mapping[str, str] | None,
    told: Mapping[str, Mapping[str, object]],
) -> Statement:
    """Record an act on several targets; ``told`` has the result by target."""
    return Statement(
        in_schema(_AUDIT, schema),
        {
            "actor": actor,
            "action": action,
            "reason": reason,
            "origin": json.dumps(dict(origin)) if origin else None,
            "targets": list(told),
            "results": [json.dumps(dict(result), default=str) for result in told.values()],
        },
    )
