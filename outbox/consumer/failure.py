"""What is written of a message that no handler has done: an attempt failed, or the message was too old.

A failed attempt is an inbox row, a row of its history, and a notice where the message is parked. A message that has
expired when a group comes to it is only a row: no handler gets it. The clock of the consumer's database counts, in the
transaction in which the handler would run, or when it is about to be called outside of one. Where no message can expire
(`Entry.can_expire`), nothing is asked.
"""

from __future__ import annotations

import datetime as dt
from functools import partial
from typing import TYPE_CHECKING

from outbox.calling.callback import parked_callback, parked_facts, parked_notice
from outbox.consumer import sql
from outbox.consumer.subscription import event_of, settled
from outbox.database.at_commit import after_commit, at_commit
from outbox.database.execute import execute
from outbox.database.notices import Notice, write_parked
from outbox.database.sql import NOW
from outbox.message.model import Status
from outbox.telemetry.hooks import emit
from outbox.text import process_name

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from sqlalchemy import Connection

    from outbox.consumer.subscription import Entry, Subscription
    from outbox.database.execute import Statement
    from outbox.database.sql import GroupQueue
    from outbox.message.model import Message


def record_failure(
    subscription: Subscription, of: GroupQueue, entry: Entry, row: sql.InboxUpdate, passage: int
) -> list[Statement]:
    """Write the inbox row of a message after a failed attempt, and the attempt into its history; tell if it is parked.

    Nothing is told of a message that another worker has settled in another way meanwhile.
    """
    statements = sql.settle_failure(of, row, passage, process_name())
    if row.status != Status.PARKED:
        return statements
    reason = row.error or row.kind or ""
    return statements + tell_parked(of.schema, subscription, entry.id, entry.message, reason, row.attempts)


def tell_parked(
    schema: str, subscription: Subscription, message_id: UUID, message: Message | None, reason: str, attempts: int
) -> list[Statement]:
    """Tell the callback of a topic, if there is one, that a message is parked, in the transaction that parks it."""
    callback, group = parked_callback(subscription), subscription.group
    if callback is None:
        return []
    notice = Notice(parked_notice(message_id, group), message_id, parked_facts(group, reason, attempts))
    return [write_parked(schema, callback.app, notice, message, topic=callback.topic, tag=callback.group, group=group)]


def database_time(connection: Connection) -> dt.datetime:
    """Return what time it is by the database's clock."""
    (((now,),),) = execute(connection, NOW)
    assert isinstance(now, dt.datetime)  # noqa: S101 - that is what the statement selects
    return now


def expired_of(connection: Connection, entries: Sequence[Entry]) -> dict[UUID, Entry]:
    """Return those of some messages that have expired by now, by their ids."""
    now = database_time(connection)
    return {entry.id: entry for entry in entries if (at := expires_at(entry)) is not None and at <= now}


def expires_at(entry: Entry) -> dt.datetime | None:
    """Return when a message will be too old to be handled, by the database's clock; None: never."""
    return None if entry.message is None else entry.message.expires_at


def record_expiry(connection: Connection, queue: GroupQueue, entry: Entry, attempts: int, passage: int) -> None:
    """Have the inbox say at the COMMIT that a message expired, and tell it after that.

    ``passage`` is the number of the group's passage of the queue, as of each result.
    """
    row = settled(entry, Status.EXPIRED, attempts)
    at_commit(connection, *sql.settle(queue, row, passage))
    after_commit(connection, partial(emit, event_of(queue, row)))
