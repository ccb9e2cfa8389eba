"""Decide a half message: the first writer of the op wins, everybody else is told what came first."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

from outbox.errors import AlreadyCommitted, AlreadyDecided, AlreadyRolledBack, HalfNotFound
from outbox.model import Decision, Resolution
from outbox.store.execute import execute
from outbox.store.halves import decide as insert_op
from outbox.store.halves import op

if TYPE_CHECKING:
    from sqlalchemy import Connection


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
    (((found, decided_at),),) = execute(connection, insert_op(schema, half_id, resolution, decided_by))
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
