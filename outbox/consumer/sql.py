"""Statements of the consumer: read messages, write inbox rows, append offsets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from outbox.database.execute import Statement, in_schema
from outbox.database.sql import GroupQueue

# --- in the producer's database, read only ---------------------------------------------------------------

_HEADS = """
SELECT q, coalesce((SELECT max(position) FROM {s}.message m WHERE m.topic = %(topic)s AND m.queue = q), 0),
       coalesce((SELECT min(position) FROM {s}.message m WHERE m.topic = %(topic)s AND m.queue = q), 1)
  FROM generate_series(0, (SELECT queues FROM {s}.topic WHERE name = %(topic)s) - 1) q
"""

MATCHES = """(%(tags)s::text[] IS NULL OR h.tag = ANY (%(tags)s::text[]))
           AND (%(keys)s::text[] IS NULL OR h.key LIKE ANY (%(keys)s::text[]))"""

# The running sum of sizes bounds the memory of a read; the first message always comes.
_AFTER = f"""
SELECT position, half_id, send_number, visible_at, key, tag, headers::text, content_type, body, born_at, matches
  FROM (SELECT m.position, m.half_id, m.send_number, m.visible_at, h.key, h.tag, h.headers, h.content_type, h.body,
               h.born_at, {MATCHES} AS matches,
               sum(octet_length(h.body)) OVER (ORDER BY m.position) - octet_length(h.body) AS bytes_before
          FROM (SELECT * FROM {{s}}.message
                 WHERE topic = %(topic)s AND queue = %(queue)s AND position > %(position)s
                 ORDER BY position LIMIT %(limit)s) m
          JOIN {{s}}.half_message h ON h.id = m.half_id) r
 WHERE bytes_before < %(bytes)s
 ORDER BY position
"""

_BY_ID = f"""
SELECT m.position, m.half_id, m.send_number, m.visible_at, h.key, h.tag, h.headers::text, h.content_type, h.body,
       h.born_at, {MATCHES}
  FROM {{s}}.message m JOIN {{s}}.half_message h ON h.id = m.half_id
 WHERE m.half_id = %(id)s
 ORDER BY m.send_number LIMIT 1
"""

# --- in the consumer's database --------------------------------------------------------------------------

_OFFSET = """
SELECT position, claims FROM {s}.consumer_offset
 WHERE consumer_group = %s AND topic = %s AND queue = %s
 ORDER BY position DESC, claims DESC LIMIT 1
"""

_OFFSETS = """
SELECT q, coalesce((SELECT max(position) FROM {s}.consumer_offset o
                     WHERE o.consumer_group = %s AND o.topic = %s AND o.queue = q), 0)
  FROM unnest(%s::int[]) q
"""

_KNOWN_GROUP = "SELECT EXISTS (SELECT FROM {s}.consumer_offset WHERE consumer_group = %s AND topic = %s)"

_START = """
INSERT INTO {s}.consumer_start (consumer_group, topic, queue, position) VALUES (%s, %s, %s, %s)
ON CONFLICT DO NOTHING
"""

_APPEND_OFFSET = """
INSERT INTO {s}.consumer_offset (consumer_group, topic, queue, position, claims) VALUES (%s, %s, %s, %s, %s)
ON CONFLICT DO NOTHING
"""

# The conflict's update makes a prune wait that was about to delete the row without claims.
_DROP_CLAIMS = """
WITH dropped AS (
    DELETE FROM {s}.consumer_offset
     WHERE consumer_group = %(group)s AND topic = %(topic)s AND queue = %(queue)s AND position = %(position)s
       AND claims > 0
)
INSERT INTO {s}.consumer_offset (consumer_group, topic, queue, position, claims)
VALUES (%(group)s, %(topic)s, %(queue)s, %(position)s, 0)
ON CONFLICT (consumer_group, topic, queue, position, claims) DO UPDATE SET written_at = clock_timestamp()
"""

# One probe of the primary key for each id, whatever the statistics say of a group that is younger than they are: for
# ``message_id = ANY (…)`` the planner would read the whole group each time.
_KNOWN = """
SELECT c.* FROM unnest(%b::uuid[]) AS m (id) CROSS JOIN LATERAL (
    SELECT message_id, status, attempts, greatest(extract(epoch FROM next_attempt_at - clock_timestamp()), 0)::float8,
           queue, position, discarded_at IS NOT NULL
      FROM {s}.consumer_message WHERE consumer_group = %s AND message_id = m.id
    OFFSET 0) c
"""

# No ON CONFLICT: a row that came in between (a quarantine, a resend in another queue) must undo the whole batch.
_CONSUMED = """
INSERT INTO {s}.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts, body_digest)
SELECT %s, id, %s, %s, position, 'consumed', 1, digest
  FROM unnest(%b::uuid[], %b::bigint[], %b::bytea[]) AS m (id, position, digest)
"""

_SETTLE = """
INSERT INTO {s}.consumer_message AS c (consumer_group, message_id, topic, queue, position, status, attempts,
                                       next_attempt_at, body_digest, last_error, error_kind)
VALUES (%(group)s, %(id)s, %(topic)s, %(queue)s, %(position)s, %(status)s, %(attempts)s,
        clock_timestamp() + make_interval(secs => %(delay)s), %(digest)s, %(error)s, %(kind)s)
ON CONFLICT (consumer_group, message_id) DO UPDATE
   SET status = excluded.status, attempts = excluded.attempts, next_attempt_at = excluded.next_attempt_at,
       body_digest = coalesce(excluded.body_digest, c.body_digest), last_error = excluded.last_error,
       error_kind = excluded.error_kind, claims = 0, changed_at = clock_timestamp()
 WHERE c.status = 'failed'
"""

_DUE = """
UPDATE {s}.consumer_message
   SET claims = claims + 1
 WHERE consumer_group = %(group)s
   AND message_id = (SELECT message_id FROM {s}.consumer_message c
                      WHERE consumer_group = %(group)s AND topic = %(topic)s AND status = 'failed'
                        AND next_attempt_at <= clock_timestamp()
                        AND (NOT %(ordered)s OR position <= (
                             SELECT max(o.position) FROM {s}.consumer_offset o
                              WHERE o.consumer_group = c.consumer_group AND o.topic = c.topic AND o.queue = c.queue))
                      ORDER BY next_attempt_at LIMIT 1 FOR UPDATE SKIP LOCKED)
   AND status = 'failed'
RETURNING message_id, queue, position, attempts, claims
"""

_LOCK_FAILED = """
SELECT attempts, attempts = 0 AND last_error IS NULL FROM {s}.consumer_message
 WHERE consumer_group = %s AND message_id = %s AND status = 'failed' AND next_attempt_at <= clock_timestamp()
   FOR UPDATE SKIP LOCKED
"""

#: What a retry changes in a failed or parked inbox row ``m``: it is due now, a parked one with all its attempts.
RETRY = """status = 'failed', next_attempt_at = clock_timestamp(),
       attempts = CASE WHEN m.status = 'parked' THEN 0 ELSE m.attempts END,
       claims = CASE WHEN m.status = 'parked' THEN 0 ELSE m.claims END"""

# The row takes the position of the newest send that was read, which tells this send from the next one. A row that a
# retry or an operator holds is left alone: what they make of it is seen at the next look.
_RETRY_RESENT = f"""
UPDATE {{s}}.consumer_message m
   SET {RETRY}, queue = %(queue)s, position = %(position)s, changed_at = clock_timestamp()
  FROM (SELECT message_id FROM {{s}}.consumer_message
         WHERE consumer_group = %(group)s AND message_id = %(id)s AND status IN ('parked', 'failed')
           AND discarded_at IS NULL FOR UPDATE SKIP LOCKED) f
 WHERE m.consumer_group = %(group)s AND m.message_id = f.message_id
RETURNING m.message_id
"""

_FORGET = "DELETE FROM {s}.consumer_message WHERE consumer_group = %s AND message_id = %s"

_STATUS = "SELECT status FROM {s}.consumer_message WHERE consumer_group = %s AND message_id = %s"


@dataclass(frozen=True, slots=True)
class InboxUpdate:
    """The state of a message in an inbox after an attempt that was not a plain success."""

    id: UUID
    position: int
    status: str
    attempts: int
    digest: bytes | None
    error: str | None
    delay: float | None = None
    kind: str | None = None


def heads(schema: str, topic: str) -> Statement:
    """Read the ends of each queue. Rows: ``(queue, last, first)``; none while the topic doesn't exist."""
    return Statement(in_schema(_HEADS, schema), {"topic": topic})


def messages_after(
    schema: str,
    topic: str,
    queue: int,
    position: int,
    limit: int,
    max_bytes: int,
    tags: Sequence[str] | None,
    keys: Sequence[str] | None,
) -> Statement:
    """Read the next messages of a queue, ``max_bytes`` of bodies at most (but one message at least).

    ``keys`` are LIKE patterns. Rows: ``(position, id, send number, visible_at, key, tag, headers, content type,
    body, born_at, matches)``; those which don't match the filter are there to be stepped over.
    """
    return Statement(
        in_schema(_AFTER, schema),
        {
            "topic": topic,
            "queue": queue,
            "position": position,
            "limit": limit,
            "bytes": max_bytes,
            "tags": None if tags is None else list(tags),
            "keys": None if keys is None else list(keys),
        },
    )


def message_by_id(
    schema: str, half_id: UUID, tags: Sequence[str] | None = None, keys: Sequence[str] | None = None
) -> Statement:
    """Read one message as it was sent first. Rows: as of `messages_after`, or none."""
    values = {
        "id": half_id,
        "tags": None if tags is None else list(tags),
        "keys": None if keys is None else list(keys),
    }
    return Statement(in_schema(_BY_ID, schema), values)


def offset(of: GroupQueue) -> Statement:
    """Read the newest offset. Rows: ``(position, claims)`` or none."""
    return Statement(in_schema(_OFFSET, of.schema), of.values)


def offsets(schema: str, group: str, topic: str, queues: Sequence[int]) -> Statement:
    """Read the offset of each queue. Rows: ``(queue, position)``."""
    return Statement(in_schema(_OFFSETS, schema), (group, topic, list(queues)))


def group_is_known(schema: str, group: str, topic: str) -> Statement:
    """Tell whether a group has any offset of a topic. Rows: ``(known,)``."""
    return Statement(in_schema(_KNOWN_GROUP, schema), (group, topic))


def write_start(of: GroupQueue, position: int) -> Statement:
    """Write down where a new group begins in a queue: up to ``position``, nothing was meant for it."""
    return Statement(in_schema(_START, of.schema), (*of.values, position))


def append_offset(of: GroupQueue, position: int, claims: int = 0) -> Statement:
    """Append an offset: all up to ``position`` is handled; ``claims`` starts of what follows had no end."""
    return Statement(in_schema(_APPEND_OFFSET, of.schema), (*of.values, position, claims))


def drop_claims(of: GroupQueue, position: int) -> Statement:
    """Forget the starts that were counted at the offset ``position``: one of them had an end."""
    group, topic, queue = of.values
    return Statement(
        in_schema(_DROP_CLAIMS, of.schema), {"group": group, "topic": topic, "queue": queue, "position": position}
    )


def known(of: GroupQueue, ids: Sequence[UUID]) -> Statement:
    """Read which messages the inbox knows.

    Rows: ``(id, status, attempts, seconds until the next attempt, queue, position, is discarded)``.
    """
    return Statement(in_schema(_KNOWN, of.schema), (list(ids), of.group))


def consumed(of: GroupQueue, ids: list[UUID], positions: list[int], digests: list[bytes | None]) -> Statement:
    """Insert the inbox rows of messages that were consumed at the first attempt."""
    return Statement(in_schema(_CONSUMED, of.schema), (of.group, of.topic, of.queue, ids, positions, digests))


def settle(of: GroupQueue, row: InboxUpdate) -> Statement:
    """Write the inbox row of one message after an attempt, over a failed one if there is one."""
    values: dict[str, Any] = {
        "group": of.group,
        "topic": of.topic,
        "queue": of.queue,
        "id": row.id,
        "position": row.position,
        "status": row.status,
        "attempts": row.attempts,
        "delay": row.delay,
        "digest": row.digest,
        "error": row.error,
        "kind": row.kind,
    }
    return Statement(in_schema(_SETTLE, of.schema), values)


def claim_due(schema: str, group: str, topic: str, *, ordered: bool) -> Statement:
    """Count a start of the failed message that is due first; if ``ordered``, only of those behind their queue's offset.

    Rows: ``(id, queue, position, attempts, claims)`` or none.
    """
    return Statement(in_schema(_DUE, schema), {"group": group, "topic": topic, "ordered": ordered})


def lock_failed(schema: str, group: str, message_id: UUID) -> Statement:
    """Lock a due failed message unless somebody has it. Rows: ``(attempts, it was never attempted)`` or none."""
    return Statement(in_schema(_LOCK_FAILED, schema), (group, message_id))


def retry_resent(of: GroupQueue, message_id: UUID, position: int) -> Statement:
    """Make a failed or parked message due now, since it was sent again. Rows: one, or none if another one holds it."""
    group, _, queue = of.values
    values = {"group": group, "queue": queue, "id": message_id, "position": position}
    return Statement(in_schema(_RETRY_RESENT, of.schema), values)


def forget(schema: str, group: str, message_id: UUID) -> Statement:
    """Delete an inbox row, which is locked: the message isn't for this group."""
    return Statement(in_schema(_FORGET, schema), (group, message_id))


def status(schema: str, group: str, message_id: UUID) -> Statement:
    """Read the status of a message in an inbox. Rows: ``(status,)`` or none."""
    return Statement(in_schema(_STATUS, schema), (group, message_id))
