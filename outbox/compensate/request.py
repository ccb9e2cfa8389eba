"""Order that local transactions be rolled back; workers which have the compensation of the topic carry it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.compensate import sql
from outbox.database.execute import Row, execute
from outbox.database.sql import audit
from outbox.errors import CompensationRefused
from outbox.message.model import Resolution, uuid7

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.settings import Settings


def refusals(connection: Connection, settings: Settings, message_ids: Sequence[UUID]) -> dict[UUID, str]:
    """Return which of these can't be compensated, and why, as far as the producer's database knows; a clause each.

    In the caller's transaction; writes nothing.
    """
    (rows,) = execute(connection, sql.states(settings.schema, message_ids))
    return {row[0]: why for row in rows if (why := _why_not(row)) is not None}


def refusal(connection: Connection, settings: Settings, message_id: UUID) -> str | None:
    """Do the same for one message; None if it can be rolled back."""
    return refusals(connection, settings, [message_id]).get(message_id)


def refused(row: Row) -> str | None:
    """Return why a message can't be compensated; whether somebody is at it doesn't matter (a row of `store.states`)."""
    _, topic, resolution, decided_by, compensated_at, by, _ = row
    if compensated_at is not None:
        return f"it was compensated already, at {compensated_at.isoformat()} (ordered by {by}); that happens once ever"
    if topic is None:
        return "no half message has this id; was it sent in another database, or pruned?"
    if resolution is None:
        return "it is not decided yet; roll the half back instead"
    if resolution != Resolution.COMMIT:
        return f"its local transaction was rolled back (by the {decided_by}): there is nothing to undo"
    return None


def _why_not(row: Row) -> str | None:
    bulk_job_id = row[6]
    if bulk_job_id is not None:
        return f"bulk job {bulk_job_id} is about to compensate it; wait for that, or cancel it"
    return refused(row)


def request(
    connection: Connection,
    settings: Settings,
    message_ids: Sequence[UUID],
    *,
    actor: str,
    reason: str,
    acknowledge_delivered: bool = False,
    origin: Mapping[str, str] | None = None,
) -> UUID:
    """Order the compensation of these messages' local transactions, in the caller's transaction; return the bulk job.

    With ``acknowledge_delivered`` also of messages that took effect already.

    Raises:
        CompensationRefused: one of them can't be compensated, or another bulk job is about to; or no reason.
    """
    ids = list(dict.fromkeys(message_ids))
    if not reason.strip():
        raise CompensationRefused("give a reason for rolling a local transaction back")
    (rows,) = execute(connection, sql.states(settings.schema, ids))
    topics = {row[0]: row[1] for row in rows}
    for row in rows:
        if (why := _why_not(row)) is not None:
            raise CompensationRefused(f"message {row[0]} can't be compensated: {why}")
    bulk_job_id = uuid7()
    options = {"acknowledge_delivered": True} if acknowledge_delivered else {}
    selector = {
        "targets": [[str(message_id), None] for message_id in ids],
        "described": f"compensate the local transaction of message {ids[0]}"
        if len(ids) == 1
        else f"compensate the local transactions of {len(ids)} messages",
    }
    _, inserted, _ = execute(
        connection,
        sql.order(settings.schema, bulk_job_id, actor, reason, options, selector, len(ids), origin),
        sql.order_items(settings.schema, bulk_job_id, ids, [topics[message_id] for message_id in ids]),
        audit(
            settings.schema,
            actor,
            "bulk",
            str(bulk_job_id),
            reason,
            {"did": "start", "action": "compensate", "items": len(ids)},
            origin,
        ),
    )
    late = set(ids).difference(message_id for (message_id,) in inserted)
    if late:
        _raise_late(connection, settings, sorted(late)[0])
    return bulk_job_id


def _raise_late(connection: Connection, settings: Settings, message_id: UUID) -> None:
    # Somebody else's order came first; a statement of its own sees it.
    why = refusal(connection, settings, message_id) or "another bulk job has just compensated it"
    raise CompensationRefused(f"message {message_id} can't be compensated: {why}")
