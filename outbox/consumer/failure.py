"""What is written of a failed attempt: the inbox row, its history, and the notice where the message is parked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.calling.callback import parked_callback, parked_facts, parked_notice
from outbox.consumer import sql
from outbox.database.notices import Notice, write_parked
from outbox.message.model import Status
from outbox.text import process_name

if TYPE_CHECKING:
    from uuid import UUID

    from outbox.consumer.sql import InboxUpdate
    from outbox.consumer.subscription import Entry, Subscription
    from outbox.database.execute import Statement
    from outbox.database.sql import GroupQueue
    from outbox.message.model import Message


def record_failure(
    subscription: Subscription, of: GroupQueue, entry: Entry, row: InboxUpdate, passage: int
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
