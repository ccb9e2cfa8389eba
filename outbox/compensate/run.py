"""Run a compensation: in one transaction with its record, which makes it happen once ever, and the end of its item.

One item of a compensation, and what is written about it in the producer's database: a transaction for each entry.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.compensate import sql
from outbox.compensate.compensation import Compensation
from outbox.compensate.quarantine import QuarantineOrder
from outbox.database.execute import Row, Statement, execute, is_lost
from outbox.database.session import JoinedSession, commit, wait_for
from outbox.database.sql import audit, begin_bulk_job, plan_by_index, wait_at_most
from outbox.errors import InvalidMessage
from outbox.message import content
from outbox.message.model import Counts, Message, Park, Retry, Skip
from outbox.settings import Settings
from outbox.text import storable

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: How long (seconds) nobody else takes an item that a worker has claimed.
LEASE = 60.0


@dataclass(frozen=True, slots=True)
class CompensationItem:
    """A claimed item of a compensation, and the order that it belongs to.

    ``outcome`` is what was said of it before, ``refused`` that it was decided not to compensate it, ``started`` that
    it isn't the first item of its bulk job.
    """

    key: sql.Key
    message_id: UUID
    topic: str
    attempts: int
    outcome: str | None
    refused: bool
    actor: str
    reason: str
    acknowledged: bool
    origin: Mapping[str, str] | None
    cancelled_by: str | None
    started: bool
    former: tuple[UUID, ...]

    @classmethod
    def of(cls, row: Row) -> CompensationItem:
        """Return a row of `store.claim`."""
        bulk_job_id, number, message_id, topic, attempts, outcome, refused, actor, reason, options, *rest = row
        origin, cancelled_by, started, former = rest
        return cls(
            sql.Key(bulk_job_id, number),
            message_id,
            topic,
            attempts,
            outcome,
            refused,
            actor,
            reason,
            bool(json.loads(options).get("acknowledge_delivered")),
            json.loads(origin) if origin else None,
            cancelled_by,
            started,
            tuple(former),
        )

    @property
    def untouched(self) -> bool:
        """Is it certain that nothing was ever quarantined for it, or for an earlier bulk job?"""
        return self.attempts == 1 and self.outcome is None and not self.former

    def order(self, sends: list[Row]) -> QuarantineOrder:
        """Return what the consumers' databases are told, given where the message was placed (`store.sends`)."""
        return QuarantineOrder(
            self.message_id,
            self.topic,
            self.key.bulk_job_id,
            self.actor,
            self.reason,
            self.origin,
            tuple((queue, position) for queue, position in sends),
            self.former,
        )


class ItemTable:
    """Reads and writes about items, on a connection that isn't in a transaction."""

    def __init__(self, connection: Connection, schema: str) -> None:
        self.schema = schema
        self._connection = connection

    def claim(self, key: sql.Key) -> CompensationItem | None:
        """Take an item that is due for `LEASE` seconds; None if it isn't, or somebody else has it."""
        (rows,) = self._run(sql.claim(self.schema, key, LEASE))
        if not rows:
            return None
        item = CompensationItem.of(rows[0])
        if not item.started:
            # Not with the claim: who cancels locks the bulk job first, and then its items.
            self._run(begin_bulk_job(self.schema, key.bulk_job_id))
        return item

    def state_of(self, item: CompensationItem) -> tuple[Row, QuarantineOrder]:
        """Return the item's row of `store.states`, and what the consumers' databases are told."""
        (row,), sends = self._run(sql.states(self.schema, [item.message_id]), sql.sends(self.schema, item.message_id))
        return row, item.order(sends)

    def order(self, item: CompensationItem) -> QuarantineOrder:
        """Return what the consumers' databases are told, as it is now."""
        (sends,) = self._run(sql.sends(self.schema, item.message_id))
        return item.order(sends)

    def ended(self, item: CompensationItem) -> tuple[str, bool]:
        """Return the item's state, and whether its message was compensated."""
        (rows,) = self._run(sql.ended(self.schema, item.key))
        return rows[0] if rows else ("cancelled", False)

    def leave(self, item: CompensationItem, outcome: str, seconds: float) -> str:
        """Leave a claimed item for later; return its state."""
        self._run(sql.wait(self.schema, item.key, item.attempts, outcome, seconds))
        return "pending"

    def refuse(self, item: CompensationItem, why: str) -> bool:
        """Decide that its message will not be compensated; False if it was, or the item isn't pending any more."""
        (rows,) = self._run(sql.refuse(self.schema, item.key, why))
        return bool(rows)

    def close(self, item: CompensationItem, state: str, outcome: str) -> str:
        """End a pending item; return its state."""
        self._run(sql.close(self.schema, item.key, state, outcome))
        return state

    def _run(self, *statements: Statement) -> list[list[Row]]:
        with self._connection.begin():
            return execute(self._connection, plan_by_index(), *statements)[1:]


#: How long (seconds) a statement may wait for a lock, those of the compensation too.
PATIENCE = 10.0
_SHOWN = 1000


class CompensationFailed(Exception):
    """The compensation didn't succeed; all that it did is undone."""


class StaleItem(Exception):
    """What was looked at before isn't so any more; nothing was done."""


@dataclass(slots=True, eq=False)
class CompensationRun:
    """One run of a compensation, on a connection of its own.

    ``consumed`` names the groups that the message took effect in, ``quarantined`` those that are quarantined. ``held``
    tells that it was begun, ``called`` that the function was, ``done`` that all is committed, ``error`` how it
    failed.
    """

    compensation: Compensation
    settings: Settings
    item: CompensationItem
    order: QuarantineOrder
    consumed: list[str]
    quarantined: list[str]
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
            result = self.compensation.function(message, joined.open())
            if self.compensation.is_async:
                result = wait_for(result)
            if joined.rolled_back:
                raise CompensationFailed("the compensation rolled its session back; let it raise instead")
            _refuse(result)
            joined.finish()
        finally:
            joined.close()
        self._end(connection, result)
        commit(connection)

    def _begin(self, connection: Connection) -> Message:
        """Make the record, unless the item isn't to be done any more; return the message."""
        schema, half_id = self.settings.schema, self.item.message_id
        _, stands, ops, sends, made, messages = execute(
            connection,
            wait_at_most(PATIENCE),
            sql.stands(schema, self.item.key),
            sql.lock_op(schema, half_id),
            # A statement of its own, after the lock: a resend that this one waited for is seen.
            sql.sends(schema, half_id),
            sql.compensate(schema, half_id, self.compensation.name, self.item.actor, self.item.reason),
            sql.message(schema, half_id),
        )
        if not stands:
            raise StaleItem("it is not to be compensated any more")
        if not ops or not messages:
            raise StaleItem("it was pruned")
        if not made:
            raise StaleItem("it was compensated")
        if self.order.sends and len(sends) != len(self.order.sends):
            raise StaleItem("it was sent again")
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

    def _end(self, connection: Connection, result: Any) -> None:
        schema, item, result = self.settings.schema, self.item, _as_json(result)
        audited = {
            "bulk_job": item.key.bulk_job_id,
            "function": self.compensation.name,
            "quarantined": self.quarantined,
            "consumed": self.consumed,
            "returned": None if result is None else json.loads(result),
        }
        done, _, _ = execute(
            connection,
            sql.close_done(schema, item.key, self.outcome),
            sql.result(schema, item.message_id, result),
            audit(schema, item.actor, "compensate", str(item.message_id), item.reason, audited, item.origin),
        )
        if not done:
            raise StaleItem("it is not to be compensated any more")

    @property
    def outcome(self) -> str:
        """What is said of the item once it is done."""
        although = f", although {', '.join(self.consumed)} consumed it" if self.consumed else ""
        return f"compensated by {self.compensation.name}{although}"


def _refuse(result: Any) -> None:
    """Raise if what a compensation returned can't have been meant as a result."""
    if inspect.iscoroutine(result):
        result.close()
        raise CompensationFailed("the compensation returned a coroutine: declare it with 'async def'")
    if isinstance(result, Retry | Park | Skip):
        raise CompensationFailed(
            f"the compensation returned {result!r}, which only handlers may; let it raise to be tried again"
        )


def _as_json(result: Any) -> str | None:
    """Return a result as JSON that the database takes; as a text where it has none."""
    if result is None:
        return None
    try:
        raw, content_type = content.encode(result)
        if content.is_json(content_type) and "\\u0000" not in (text := raw.decode()):
            return text
    except (InvalidMessage, UnicodeDecodeError):
        pass
    return json.dumps(storable(result if isinstance(result, str) else repr(result))[:_SHOWN])
