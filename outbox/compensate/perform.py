"""Run a compensation: in one transaction with its record, which makes it happen once ever, and the end of its item."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox import codec
from outbox.compensate.book import Item
from outbox.compensate.declare import Compensation
from outbox.errors import InvalidMessage
from outbox.fences import Order
from outbox.joined import JoinedSession, commit, wait_for
from outbox.model import Counts, Message, Park, Retry, Skip
from outbox.settings import Settings
from outbox.store import compensate as store
from outbox.store.execute import Row, execute, is_lost
from outbox.store.operator import audit, wait_at_most
from outbox.text import storable

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: How long (seconds) a statement may wait for a lock, those of the compensation too.
PATIENCE = 10.0
_SHOWN = 1000


class Failed(Exception):
    """The compensation didn't succeed; all that it did is undone."""


class NotNow(Exception):
    """What was looked at before isn't so any more; nothing was done."""


@dataclass(slots=True, eq=False)
class Performance:
    """One run of a compensation, on a connection of its own.

    ``consumed`` names the groups that the message took effect in, ``fenced`` those that are fenced off. ``held`` tells
    that it was begun, ``called`` that the function was, ``done`` that all is committed, ``error`` what it failed with.
    """

    compensation: Compensation
    settings: Settings
    item: Item
    order: Order
    consumed: list[str]
    fenced: list[str]
    held: bool = False
    called: bool = False
    done: bool = False
    error: Exception | None = None

    def hold(self, connection: Connection, _: Connection) -> Counts:
        """Run it on a connection that isn't in a transaction.

        Raises:
            Exception: the connection was lost: nobody knows what came of it.
        """
        self.held = True
        transaction = connection.begin()
        try:
            self._perform(connection)
            self.done = True
        except Exception as error:
            if is_lost(connection):
                raise
            self.error = error
        finally:
            if transaction.is_active:
                transaction.rollback()
        return Counts()

    def _perform(self, connection: Connection) -> None:
        message = self._begin(connection)
        joined = JoinedSession(connection, is_async=self.compensation.is_async)
        self.called = True
        try:
            given = self.compensation.function(message, joined.open())
            if self.compensation.is_async:
                given = wait_for(given)
            if joined.rolled_back:
                raise Failed("the compensation rolled its session back; let it raise instead")
            _refuse(given)
            joined.finish()
        finally:
            joined.close()
        self._end(connection, given)
        commit(connection)

    def _begin(self, connection: Connection) -> Message:
        """Make the record, unless the item isn't to be done any more; return the message."""
        schema, half_id = self.settings.schema, self.item.message_id
        _, stands, ops, sends, made, messages = execute(
            connection,
            wait_at_most(PATIENCE),
            store.stands(schema, self.item.key),
            store.lock_op(schema, half_id),
            # A statement of its own, after the lock: a resend that this one waited for is seen.
            store.sends(schema, half_id),
            store.compensate(schema, half_id, self.compensation.name, self.item.actor, self.item.reason),
            store.message(schema, half_id),
        )
        if not stands:
            raise NotNow("it is not to be rolled back any more")
        if not ops or not messages:
            raise NotNow("it was pruned")
        if not made:
            raise NotNow("it was compensated")
        if self.order.sends and len(sends) != len(self.order.sends):
            raise NotNow("it was sent again")
        return self._message(messages[0], sends)

    def _message(self, row: Row, sends: list[Row]) -> Message:
        key, tag, headers, content_type, body, born_at, visible_at = row
        queue, position = sends[0] if sends else (0, 0)
        return Message(
            self.item.message_id,
            self.item.topic,
            queue,
            position,
            key,
            tag,
            content_type,
            body,
            born_at,
            visible_at,
            1,
            self.item.attempts,
            json.loads(headers) if headers else {},
            self.compensation.model,
        )

    def _end(self, connection: Connection, given: Any) -> None:
        schema, item, result = self.settings.schema, self.item, _as_json(given)
        told = {
            "operation": item.key.operation_id,
            "function": self.compensation.name,
            "fenced": self.fenced,
            "consumed": self.consumed,
            "returned": None if result is None else json.loads(result),
        }
        done, _, _ = execute(
            connection,
            store.close_done(schema, item.key, self.outcome),
            store.result(schema, item.message_id, result),
            audit(schema, item.actor, "rollback", str(item.message_id), item.reason, told, item.origin),
        )
        if not done:
            raise NotNow("it is not to be rolled back any more")

    @property
    def outcome(self) -> str:
        """What is said of the item once it is done."""
        although = f", although {', '.join(self.consumed)} consumed it" if self.consumed else ""
        return f"compensated by {self.compensation.name}{although}"


def _refuse(given: Any) -> None:
    """Raise if what a compensation returned can't have been meant as a result."""
    if inspect.iscoroutine(given):
        given.close()
        raise Failed("the compensation returned a coroutine: declare it with 'async def'")
    if isinstance(given, Retry | Park | Skip):
        raise Failed(f"the compensation returned {given!r}, which only handlers may; let it raise to be tried again")


def _as_json(given: Any) -> str | None:
    """Return a result as JSON that the database takes; as a text where it has none."""
    if given is None:
        return None
    try:
        raw, content_type = codec.encode(given)
        if codec.is_json(content_type) and "\\u0000" not in (text := raw.decode()):
            return text
    except (InvalidMessage, UnicodeDecodeError):
        pass
    return json.dumps(storable(given if isinstance(given, str) else repr(given))[:_SHOWN])
