"""Messages that are too old when a group comes to them: no handler gets them, and the inbox says so.

The clock of the consumer's database counts: in the transaction in which the handler would run, or when it is about to
be called outside of one. Where no message can expire (`Entry.can_expire`), nothing is asked.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.consumer import sql
from outbox.consumer.sql import InboxUpdate
from outbox.consumer.subscription import Entry
from outbox.database.at_commit import after_commit, at_commit
from outbox.database.execute import execute
from outbox.database.sql import NOW, GroupQueue
from outbox.message.model import Status
from outbox.telemetry.events import MessageExpired
from outbox.telemetry.hooks import emit

if TYPE_CHECKING:
    from sqlalchemy import Connection


def database_time(connection: Connection) -> dt.datetime:
    """Return what time it is by the database's clock."""
    (((now,),),) = execute(connection, NOW)
    assert isinstance(now, dt.datetime)  # noqa: S101 - that is what the statement selects
    return now


def has_expired(entry: Entry, now: dt.datetime) -> bool:
    """Tell whether a message is too old to be handled at a time."""
    expires_at = None if entry.message is None else entry.message.expires_at
    return expires_at is not None and expires_at <= now


def expired_of(connection: Connection, entries: Sequence[Entry]) -> dict[UUID, Entry]:
    """Return those of some messages that have expired by now, by their ids."""
    now = database_time(connection)
    return {entry.id: entry for entry in entries if has_expired(entry, now)}


def expiry_of(entry: Entry, attempts: int) -> InboxUpdate:
    """Return what the inbox is to say of a message that expired after so many attempts (0: it was never handled)."""
    return InboxUpdate(entry.id, entry.position, Status.EXPIRED.value, attempts, entry.digest(), None)


def event_of_expiry(queue: GroupQueue, entry: Entry, attempts: int) -> MessageExpired:
    """Return the event that tells of that message."""
    group, topic, number = queue.values
    return MessageExpired(
        group=group, topic=topic, queue=number, position=entry.position, message_id=entry.id, attempts=attempts
    )


def record_expiry(connection: Connection, queue: GroupQueue, entry: Entry, attempts: int, passage: int) -> None:
    """Have the inbox say at the COMMIT that a message expired, and tell it after that.

    ``passage`` is the number of the group's passage of the queue, as of each result.
    """
    at_commit(connection, *sql.settle(queue, expiry_of(entry, attempts), passage))
    after_commit(connection, partial(emit, event_of_expiry(queue, entry, attempts)))
