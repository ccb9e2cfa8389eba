"""A conversation: the chain of messages that began with one, over all databases, with what each group did with each.

The header of a message names its conversation, and a partial index finds those that have one: a search reads the
conversation alone, however much else there is.
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.database.execute import query
from outbox.errors import DatabaseUnreached
from outbox.operator.databases import Database, OverDatabases, read_each
from outbox.operator.look.message_sql import CONVERSATION, CONVERSATION_OF, RECEIPTS
from outbox.operator.look.redactor import Redactor
from outbox.operator.model import Conversation, ConversationMessage, Receipt
from outbox.text import MASK

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: The most messages of a conversation that are shown.
MOST_MESSAGES = 500


@dataclass(slots=True)
class _Facts:
    """Hold the rows of a conversation: its messages, by id, and their receipts."""

    messages: dict[UUID, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    receipts: defaultdict[UUID, list[Receipt]] = field(default_factory=lambda: defaultdict(list))
    complete: bool = True


class ConversationViews(OverDatabases):
    """Show an operator the conversation that a message belongs to."""

    redactor: Redactor

    def conversation(self, message_id: UUID) -> Conversation:
        """Return the chain of messages that a message belongs to, in the order in which they were sent.

        The message is its first or any other one; `MOST_MESSAGES` are returned at most. A database that can't be read
        is named in ``unseen``.

        Raises:
            NotFound: no database has the message, or any that it has caused, and all could be read.
            DatabaseUnreached: none that could be read has.
        """
        unseen, facts, producers = list(self.databases.away), _Facts(), self.databases.having("producer")
        named = read_each(producers, partial(_conversation_of, message_id=message_id), unseen)
        conversation_id = next(chain.from_iterable(named.values()), message_id)
        read_each(producers, partial(_add_messages, facts, conversation_id), unseen)
        if not facts.messages:
            raise DatabaseUnreached(unseen) if unseen else self.not_found(message_id)
        read_each(self.databases.having("consumer"), partial(_add_receipts, facts), unseen)
        if self.redactor.has_own_names:
            # Bodies aren't read here, and workers know other names: the page of the message has its error.
            for receipts in facts.receipts.values():
                receipts[:] = [replace(each, error=each.error and MASK) for each in receipts]
        return self.shown_texts(Conversation(conversation_id, _in_order(facts), facts.complete, unseen))


def _as_id(text: str | None) -> UUID | None:
    """Return the id that a header has; None where a sender wrote something else into it."""
    try:
        return None if text is None else UUID(text)
    except ValueError:
        return None


def _conversation_of(connection: Connection, database: Database, message_id: UUID) -> list[UUID]:
    rows = query(connection, database.schema, CONVERSATION_OF, id=message_id)
    return [first for (text,) in rows if (first := _as_id(text)) is not None]


def _add_messages(facts: _Facts, first: UUID, connection: Connection, database: Database) -> None:
    rows = CONVERSATION.read(connection, database.schema, id=first, limit=MOST_MESSAGES + 1)
    facts.complete &= len(rows) <= MOST_MESSAGES
    facts.messages |= {row["id"]: (database.name, row) for row in rows[:MOST_MESSAGES]}


def _add_receipts(facts: _Facts, connection: Connection, database: Database) -> None:
    rows = RECEIPTS.read(connection, database.schema, ids=list(facts.messages))
    for row in rows:
        status = "discarded" if row["discarded_at"] else row["status"]
        receipt = Receipt(database.name, row["group"], status, row["attempts"], row["error"], row["changed_at"])
        facts.receipts[row["message_id"]].append(receipt)


def _in_order(facts: _Facts) -> list[ConversationMessage]:
    """Return the messages by time, each after its cause: the clocks of two databases may differ."""
    effects: defaultdict[UUID | None, list[UUID]] = defaultdict(list)
    for message_id in sorted(facts.messages):
        cause = _as_id(facts.messages[message_id][1]["cause"])
        # Of a cause that is pruned, nothing is known but its id.
        effects[cause if cause in facts.messages and cause != message_id else None].append(message_id)
    found: dict[UUID, tuple[dt.datetime, int, ConversationMessage]] = {}
    # Those last that name each other as their cause, which no handler's messages do.
    for root in (*effects[None], *sorted(facts.messages)):
        open_messages = [(root, 0, facts.messages[root][1]["born_at"])]
        while open_messages:
            message_id, depth, earliest = open_messages.pop()
            if message_id in found:
                continue
            message = _message(facts, message_id, depth)
            at = max(earliest, message.born_at)
            found[message_id] = (at, depth, message)
            open_messages += [(effect, depth + 1, at) for effect in effects[message_id]]
    in_order = sorted(found.values(), key=lambda each: (*each[:2], each[2].id))
    return [message for *_, message in in_order[:MOST_MESSAGES]]


def _message(facts: _Facts, message_id: UUID, depth: int) -> ConversationMessage:
    database, row = facts.messages[message_id]
    cause = _as_id(row["cause"])
    return ConversationMessage(
        database=database,
        cause=cause,
        answers=_as_id(row["correlation"]),
        depth=depth,
        sender=_sender(facts, cause, database, row["producer_group"]),
        receipts=facts.receipts[message_id],
        **{name: row[name] for name in ("id", "topic", "key", "tag", "status", "born_at", "deliver_at")},
        compensated_at=row["compensated_at"],
        compensated_by=row["compensated_by"],
    )


def _sender(facts: _Facts, cause: UUID | None, database: str, producer_group: str) -> str:
    """Return the group whose handler sent a message: its inbox row of the cause is in the same database.

    Where several groups there have the cause, which of them it was isn't on record: then it is the producer group.
    """
    groups = {each.group for each in facts.receipts.get(cause, ()) if each.database == database} if cause else set()
    return groups.pop() if len(groups) == 1 else producer_group


@dataclass(frozen=True, slots=True)
class ConversationStep:
    """One step of a conversation: a message from a sender to a group, or the compensation of its sender.

    ``target`` is None where no group is known so far, and of a compensation. ``status`` is what became of the message
    there, or "compensated"; ``at`` when.
    """

    message: ConversationMessage
    source: str
    target: str | None
    status: str
    at: dt.datetime
    error: str | None = None


def steps_of(messages: list[ConversationMessage]) -> list[ConversationStep]:
    """Return the steps: messages in their order, each compensation after all that was sent before it."""
    steps = [step for message in messages for step in _sends(message)]
    for message in messages:
        if message.compensated_at is not None:
            undone = ConversationStep(message, message.sender, None, "compensated", message.compensated_at)
            before = [
                number
                for number, step in enumerate(steps)
                if step.message is message or step.message.born_at <= message.compensated_at
            ]
            steps.insert(before[-1] + 1, undone)
    return steps


def _sends(message: ConversationMessage) -> Iterator[ConversationStep]:
    for each in message.receipts:
        yield ConversationStep(message, message.sender, each.group, each.status, each.changed_at, each.error)
    if not message.receipts:
        yield ConversationStep(message, message.sender, None, message.status, message.born_at)
