"""Decide a half message: the first writer of the op wins, all others learn what came first.

Producer, check and operator decide by these functions, so that one insert settles every race between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar
from uuid import UUID

from outbox.database.execute import Steps, Template, lock_key, run_on, statement
from outbox.errors import AlreadyCommitted, AlreadyDecided, AlreadyRolledBack, HalfNotFound
from outbox.message.model import Decision, Resolution

if TYPE_CHECKING:
    from sqlalchemy import Connection


T = TypeVar("T")

# The insert decides every race: it waits for a rival that is under way, and the loser gets no row. Each decider locks
# the half's check first, as the check pass does: in the other order the two would deadlock.
#: Write the op of a half unless it has one. Rows: ``(halves found, decided_at or None)``.
_DECIDE = Template("""
WITH half AS (
    SELECT id FROM {s}.half_message WHERE id = %(id)s
     UNION ALL
    SELECT %(id)s::uuid WHERE current_setting('outbox.unseen_half', true) = %(id)s::uuid::text
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
""")

# A transaction whose snapshot is older than a move of the half (into a segment that was made or emptied, or out of one
# that was dropped) doesn't see it, at a level above READ COMMITTED. The unique index knows it: nothing else in the
# transaction may look past its snapshot. A check that such a snapshot doesn't show is left to the check pass.
_ASK_INDEX = """
DO $$ BEGIN
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        INSERT INTO {s}.half_message (id, producer_group, topic, content_type, body) VALUES ('{id}', 'g', 't', '', '');
        RAISE no_data_found;
    END IF;
EXCEPTION
    WHEN no_data_found THEN NULL;
    WHEN unique_violation THEN PERFORM set_config('outbox.unseen_half', '{id}', true);
    WHEN insufficient_privilege THEN
        RAISE serialization_failure USING MESSAGE = 'this snapshot is too old to show half {id}: try again';
END $$
"""
#: Read the op of a half. Rows: ``(resolution, decided_by, decided_at)``.
op: Template = Template("SELECT resolution, decided_by, decided_at FROM {s}.op_message WHERE half_id = %s")


def fence_key(schema: str, half_id: UUID) -> int:
    """Return the advisory lock that a fenced business transaction holds from its first statement to its end."""
    return lock_key("half", schema, half_id)


def deciding(schema: str, half_id: UUID, resolution: Resolution, decided_by: str = "producer") -> Steps[Decision]:
    """Write the op of a half in the caller's transaction, or return the decision that came first.

    Waits for a rival transaction that is deciding the same half. Right at every isolation level, however old the
    snapshot is.

    Raises:
        HalfNotFound: no half message has this id.
        ValueError: the resolution is UNKNOWN, which is never an op.
    """
    if resolution is Resolution.UNKNOWN:
        raise ValueError("UNKNOWN is not a decision; leave the half undecided")
    values = {"id": half_id, "resolution": resolution.value, "decided_by": decided_by}
    ((found, decided_at),) = yield _DECIDE(schema, **values)
    if not found:
        yield statement(schema, _ASK_INDEX, {}, id=str(half_id))
        ((found, decided_at),) = yield _DECIDE(schema, **values)
    if not found:
        raise HalfNotFound(half_id)
    if decided_at is not None:
        return Decision(half_id, resolution, decided_by, decided_at, first=True)
    # A statement of its own: its snapshot sees the op that the insert has just waited for.
    ((earlier, by, at),) = yield op(schema, half_id)
    return Decision(half_id, Resolution(earlier), by, at, first=False)


def deciding_first(schema: str, half_id: UUID, resolution: Resolution) -> Steps[None]:
    """Write the op of a half in the caller's transaction, which must fail if another writer was faster.

    Also the same decision made before is refused: the business change beside it would be made twice.

    Raises:
        AlreadyCommitted, AlreadyRolledBack: the decision that came first.
        HalfNotFound: no half message has this id.
    """
    decision = yield from deciding(schema, half_id, resolution)
    if not decision.first:
        raise already(decision)


def decide(
    connection: Connection, schema: str, half_id: UUID, resolution: Resolution, decided_by: str = "producer"
) -> Decision:
    """Decide a half as `deciding` does, on a connection of SQLAlchemy's."""
    return run_on(connection, deciding(schema, half_id, resolution, decided_by))


def decide_first(connection: Connection, schema: str, half_id: UUID, resolution: Resolution) -> None:
    """Decide a half as `deciding_first` does, on a connection of SQLAlchemy's."""
    run_on(connection, deciding_first(schema, half_id, resolution))


def already(decision: Decision) -> AlreadyDecided:
    """Return the error that tells of an earlier decision."""
    kind = AlreadyCommitted if decision.resolution is Resolution.COMMIT else AlreadyRolledBack
    return kind(decision.half_id, decision.decided_by)
