"""Decide a half message: the first writer of the op wins, everybody else is told what came first.

Statements of the producer: half messages, their checks, their ops.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.database.execute import Statement, execute, in_schema, lock_key
from outbox.errors import AlreadyCommitted, AlreadyDecided, AlreadyRolledBack, HalfNotFound
from outbox.message.model import Decision, HalfMessage, Preparation, Resolution

if TYPE_CHECKING:
    from sqlalchemy import Connection

_HALF = "id, producer_group, topic, key, tag, headers, content_type, body, deliver_at"

# One message a transaction is the common case, and scalars cost the client much less than arrays of one.
_SEND_ONE = f"""
WITH half AS (
    INSERT INTO {{s}}.half_message ({_HALF})
    VALUES (%s, %s, %s, %s, %s, %s::jsonb, %s, %s,
            coalesce(%s::timestamptz, clock_timestamp() + make_interval(secs => %s)))
)
INSERT INTO {{s}}.op_message (half_id, resolution, decided_by) VALUES (%s, 'commit', 'producer')
"""

_SEND = f"""
WITH given AS (
    SELECT * FROM unnest(%b::uuid[], %s::text[], %s::text[], %s::text[], %s::text[], %s::text[], %s::text[],
                         %b::bytea[], %s::timestamptz[], %s::float8[], %s::bool[], %s::float8[])
    WITH ORDINALITY AS g (id, producer_group, topic, key, tag, headers, content_type,
                          body, deliver_at, delay, fenced, immunity, number)
), half AS (
    INSERT INTO {{s}}.half_message ({_HALF})
    SELECT id, producer_group, topic, key, tag, headers::jsonb, content_type, body,
           coalesce(deliver_at, clock_timestamp() + make_interval(secs => delay))
      FROM given ORDER BY number
), unchecked AS (
    INSERT INTO {{s}}.half_check (half_id, topic, fenced, next_check_at)
    SELECT id, topic, fenced, clock_timestamp() + make_interval(secs => immunity) FROM given WHERE fenced IS NOT NULL
)
INSERT INTO {{s}}.op_message (half_id, resolution, decided_by)
SELECT id, 'commit', 'producer' FROM given WHERE fenced IS NULL ORDER BY number
"""

# The insert decides every race: it waits for a rival that is under way, and the loser gets no row. Whoever decides
# locks the half's check first, as the check pass does: in the other order the two would deadlock.
_DECIDE = """
WITH half AS (
    SELECT id FROM {s}.half_message WHERE id = %(id)s
), locked AS MATERIALIZED (
    SELECT half_id FROM {s}.half_check WHERE half_id = %(id)s FOR UPDATE
), decided AS (
    INSERT INTO {s}.op_message (half_id, resolution, decided_by)
    SELECT id, %(resolution)s, %(decided_by)s FROM half CROSS JOIN (SELECT count(*) FROM locked) l
    ON CONFLICT (half_id) DO NOTHING
    RETURNING half_id, decided_at
), unchecked AS (
    DELETE FROM {s}.half_check WHERE half_id IN (SELECT half_id FROM decided)
)
SELECT (SELECT count(*) FROM half), (SELECT decided_at FROM decided)
"""

_OP = "SELECT resolution, decided_by, decided_at FROM {s}.op_message WHERE half_id = %s"


def write_halves(schema: str, halves: Sequence[tuple[HalfMessage, Preparation | None]]) -> Statement:
    """Write all half messages of a transaction: sent ones with their op(commit), prepared ones with their check."""
    if len(halves) == 1 and halves[0][1] is None:
        half = halves[0][0]
        return Statement(in_schema(_SEND_ONE, schema), (*_columns(half), half.id))
    rows = [
        (*_columns(half), *((None, None) if prep is None else (prep.fenced, prep.immunity))) for half, prep in halves
    ]
    return Statement(in_schema(_SEND, schema), [list(column) for column in zip(*rows, strict=True)])


def _columns(half: HalfMessage) -> tuple[object, ...]:
    return (
        half.id,
        half.producer_group,
        half.topic,
        half.key,
        half.tag,
        _json(half.headers),
        half.content_type,
        half.body,
        half.deliver_at,
        half.delay,
    )


def _json(headers: Mapping[str, str]) -> str | None:
    return json.dumps(headers, ensure_ascii=False) if headers else None


def write_decision(schema: str, half_id: UUID, resolution: Resolution, decided_by: str) -> Statement:
    """Write the op of a half unless it has one. Rows: ``(halves found, decided_at or None)``."""
    return Statement(
        in_schema(_DECIDE, schema), {"id": half_id, "resolution": resolution.value, "decided_by": decided_by}
    )


def op(schema: str, half_id: UUID) -> Statement:
    """Read the op of a half. Rows: ``(resolution, decided_by, decided_at)``."""
    return Statement(in_schema(_OP, schema), (half_id,))


def fence_key(schema: str, half_id: UUID) -> int:
    """Return the advisory lock that a fenced business transaction holds from its first statement to its end."""
    return lock_key("half", schema, half_id)


def take_lock(key: int) -> Statement:
    """Take a transaction-level advisory lock, waiting for it."""
    return Statement("SELECT pg_advisory_xact_lock(%s)", (key,))


def try_lock(key: int) -> Statement:
    """Try a transaction-level advisory lock without waiting. Rows: ``(taken,)``."""
    return Statement("SELECT pg_try_advisory_xact_lock(%s)", (key,))


def decide(
    connection: Connection, schema: str, half_id: UUID, resolution: Resolution, decided_by: str = "producer"
) -> Decision:
    """Write the op of a half in the caller's transaction, or return the decision that came first.

    Waits for a rival transaction that is deciding the same half.

    Raises:
        HalfNotFound: no half message has this id.
        ValueError: the resolution is UNKNOWN, which is never an op.
    """
    if resolution is Resolution.UNKNOWN:
        raise ValueError("UNKNOWN is not a decision; leave the half undecided")
    (((found, decided_at),),) = execute(connection, write_decision(schema, half_id, resolution, decided_by))
    if not found:
        raise HalfNotFound(half_id)
    if decided_at is not None:
        return Decision(half_id, resolution, decided_by, decided_at, first=True)
    # A statement of its own: its snapshot sees the op that the insert has just waited for.
    (((earlier, by, at),),) = execute(connection, op(schema, half_id))
    return Decision(half_id, Resolution(earlier), by, at, first=False)


def decide_first(connection: Connection, schema: str, half_id: UUID, resolution: Resolution) -> None:
    """Write the op of a half in the caller's transaction, which must fail if anybody was faster.

    Also the same decision made before is refused: the business change beside it would be made twice.

    Raises:
        AlreadyCommitted, AlreadyRolledBack: the decision that came first.
        HalfNotFound: no half message has this id.
    """
    decision = decide(connection, schema, half_id, resolution)
    if not decision.first:
        raise already(decision)


def already(decision: Decision) -> AlreadyDecided:
    """Return the error that tells of an earlier decision."""
    kind = AlreadyCommitted if decision.resolution is Resolution.COMMIT else AlreadyRolledBack
    return kind(decision.half_id, decision.decided_by)
