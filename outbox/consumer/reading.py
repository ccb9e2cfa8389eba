"""From rows to messages."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.consumer.subscription import Subscription
from outbox.errors import MessagesPruned
from outbox.model import Message
from outbox.settings import Settings
from outbox.store import inbox
from outbox.store.execute import Row, Statement, execute, is_autocommit

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: Bytes of the SHA-256 of a body that the inbox keeps, for reconciliation.
DIGEST_BYTES = 16


@dataclass(slots=True)
class Entry:
    """A message in a queue; ``message`` is None where the group's filter leaves it out."""

    position: int
    id: UUID
    message: Message | None

    def digest(self) -> bytes | None:
        """Return the first 16 bytes of the SHA-256 of the body as it arrived; None if it wasn't read."""
        return hashlib.sha256(self.message.raw).digest()[:DIGEST_BYTES] if self.message else None


def read_source(source: Connection, *statements: Statement) -> list[list[Row]]:
    """Read from the producer's database: in the running transaction if there is one on it, else in none or its own."""
    if not statements:
        return []
    if source.in_transaction() or is_autocommit(source):
        return execute(source, *statements)
    with source.begin():
        return execute(source, *statements)


def next_messages(subscription: Subscription, settings: Settings, queue: int, position: int) -> Statement:
    """Return the statement that reads the messages of a queue after ``position``."""
    return inbox.messages_after(
        settings.schema,
        subscription.topic,
        queue,
        position,
        max(settings.read_ahead, subscription.batch),
        settings.read_ahead_bytes,
        *filter_of(subscription),
    )


def filter_of(subscription: Subscription) -> tuple[list[str] | None, list[str] | None]:
    """Return the tags and the key patterns that a group takes; None: all."""
    return (
        None if subscription.tags is None else sorted(subscription.tags),
        None if subscription.keys is None else [like(pattern) for pattern in subscription.keys],
    )


def to_entries(rows: list[Row], subscription: Subscription, queue: int, position: int) -> list[Entry]:
    """Return what `next_messages` has read.

    Raises:
        MessagesPruned: the next message is gone, and the subscription says to stop then.
    """
    topic = subscription.topic
    entries = [to_entry(row, topic, queue, subscription) for row in rows]
    if entries and entries[0].position != position + 1 and subscription.on_pruned == "stop":
        raise MessagesPruned(
            f"group {subscription.group!r} fell behind: of topic {topic!r}, queue {queue}, the messages "
            f"{position + 1} to {entries[0].position - 1} were pruned before they were read; find out what they were "
            "(the producer's retention is too short for this group), then go on with on_pruned='skip'"
        )
    return entries


def to_entry(row: Row, topic: str, queue: int, subscription: Subscription) -> Entry:
    """Return one row of `inbox.messages_after` as an entry."""
    position, id_, send_number, visible_at, key, tag, headers, content_type, body, born_at, matches, *_ = row
    if not matches:
        return Entry(position, id_, None)
    message = Message(
        id_,
        topic,
        queue,
        position,
        key,
        tag,
        content_type,
        body,
        born_at,
        visible_at,
        send_number,
        1,
        json.loads(headers) if headers else {},
        subscription.model,
    )
    return Entry(position, id_, message)


def like(pattern: str) -> str:
    """Return a key pattern with ``*`` as a LIKE pattern that matches nothing else."""
    escaped = pattern.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return escaped.replace("*", "%")
