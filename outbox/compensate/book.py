"""One item of a rollback, and what is written about it in the producer's database: a transaction for each entry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.fences import Order
from outbox.store import compensate as store
from outbox.store.dispatch import plan_by_index
from outbox.store.execute import Row, Statement, execute
from outbox.store.operate import begin

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: How long (seconds) nobody else takes an item that a worker has claimed.
LEASE = 60.0


@dataclass(frozen=True, slots=True)
class Item:
    """A claimed item of a rollback, and the order that it belongs to.

    ``outcome`` is what was said of it before, ``refused`` that it was decided not to compensate it, ``started`` that
    it isn't the first item of its operation.
    """

    key: store.Key
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
    def of(cls, row: Row) -> Item:
        """Return a row of `store.claim`."""
        operation_id, number, message_id, topic, attempts, outcome, refused, actor, reason, options, *rest = row
        origin, cancelled_by, started, former = rest
        return cls(
            store.Key(operation_id, number),
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
        """Is it certain that nothing was ever fenced off for it, or for an earlier operation?"""
        return self.attempts == 1 and self.outcome is None and not self.former

    def order(self, sends: list[Row]) -> Order:
        """Return what the consumers' databases are told, given where the message was placed (`store.sends`)."""
        return Order(
            self.message_id,
            self.topic,
            self.key.operation_id,
            self.actor,
            self.reason,
            self.origin,
            tuple((queue, position) for queue, position in sends),
            self.former,
        )


class Book:
    """Reads and writes about items, on a connection that isn't in a transaction."""

    def __init__(self, connection: Connection, schema: str) -> None:
        self.schema = schema
        self._connection = connection

    def claim(self, key: store.Key) -> Item | None:
        """Take an item that is due for `LEASE` seconds; None if it isn't, or somebody else has it."""
        (rows,) = self._run(store.claim(self.schema, key, LEASE))
        if not rows:
            return None
        item = Item.of(rows[0])
        if not item.started:
            # Not with the claim: who cancels locks the operation first, and then its items.
            self._run(begin(self.schema, key.operation_id))
        return item

    def look(self, item: Item) -> tuple[Row, Order]:
        """Return the item's row of `store.states`, and what the consumers' databases are told."""
        (row,), sends = self._run(
            store.states(self.schema, [item.message_id]), store.sends(self.schema, item.message_id)
        )
        return row, item.order(sends)

    def order(self, item: Item) -> Order:
        """Return what the consumers' databases are told, as it is now."""
        (sends,) = self._run(store.sends(self.schema, item.message_id))
        return item.order(sends)

    def ended(self, item: Item) -> tuple[str, bool]:
        """Return the item's state, and whether its message was compensated."""
        (rows,) = self._run(store.ended(self.schema, item.key))
        return rows[0] if rows else ("cancelled", False)

    def leave(self, item: Item, outcome: str, seconds: float) -> str:
        """Leave a claimed item for later; return its state."""
        self._run(store.wait(self.schema, item.key, item.attempts, outcome, seconds))
        return "pending"

    def refuse(self, item: Item, why: str) -> bool:
        """Decide that its message will not be compensated; False if it was, or the item isn't pending any more."""
        (rows,) = self._run(store.refuse(self.schema, item.key, why))
        return bool(rows)

    def close(self, item: Item, state: str, outcome: str) -> str:
        """End a pending item; return its state."""
        self._run(store.close(self.schema, item.key, state, outcome))
        return state

    def _run(self, *statements: Statement) -> list[list[Row]]:
        with self._connection.begin():
            return execute(self._connection, plan_by_index(), *statements)[1:]
