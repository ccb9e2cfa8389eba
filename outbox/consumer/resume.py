"""Give a parked message back to its consumer."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

from outbox.errors import NotParked
from outbox.store import inbox, operator
from outbox.store.execute import execute

if TYPE_CHECKING:
    from sqlalchemy import Connection


def resume(connection: Connection, schema: str, group: str, message_id: UUID, *, actor: str, reason: str) -> None:
    """Make a parked message due now, with all its attempts, in the caller's transaction; record who and why.

    Raises:
        NotParked: the message isn't parked in this group; says what it is.
    """
    if not execute(connection, inbox.resume(schema, group, message_id))[0]:
        (rows,) = execute(connection, inbox.status(schema, group, message_id))
        what = f"it is {rows[0][0]}" if rows else "this group has never seen it"
        raise NotParked(f"message {message_id} can't be resumed in group {group!r}: {what}")
    execute(connection, operator.audit(schema, actor, "resume", f"{group}/{message_id}", reason))
