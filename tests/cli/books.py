"""What the tests of operators' commands act on: messages that were consumed, failed, parked, scheduled."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Engine, text

from outbox import Message, Outbox, Park, Settings, testing
from tests.kit import send_each


class Terminal(io.StringIO):
    """A stdin at which somebody sits."""

    def isatty(self) -> bool:
        return True


def handle(message: Message, session: Any) -> Park | None:
    """Do what the body says."""
    match message.body:
        case {"do": "fail", "why": why}:
            raise RuntimeError(why)
        case {"do": "park", "why": why}:
            return Park(why)
    return None


@dataclass
class Books:
    """A shop: its outbox sends orders, its group ``till`` (in the same database or another one) consumes them."""

    engine: Engine
    outbox: Outbox
    till: Outbox

    @classmethod
    def open(cls, engine: Engine, other: Engine | None = None) -> Books:
        """Return the books over one database, or over the producer's and the consumer's."""
        outbox = Outbox(engine, group="shop", settings=Settings())
        till = Outbox(other, group="till", settings=Settings()) if other is not None else outbox
        till.consumer("orders", group="till", source=engine if other is not None else None)(handle)
        return cls(engine, outbox, till)

    def send(self, *bodies: Any, topic: str = "orders", **options: Any) -> list[UUID]:
        """Send messages, each in a transaction of its own."""
        return send_each(self.outbox, topic, *bodies, **options)

    def work(self) -> None:
        """Dispatch and consume all there is."""
        testing.drain(*dict.fromkeys((self.outbox, self.till)))

    def parked(self, *reasons: str) -> list[UUID]:
        """Have messages parked for these reasons."""
        ids = self.send(*({"do": "park", "why": reason} for reason in reasons))
        self.work()
        return ids

    def failed(self, *reasons: str) -> list[UUID]:
        """Have messages failed for these reasons; their retry is due later."""
        ids = self.send(*({"do": "fail", "why": reason} for reason in reasons))
        self.work()
        return ids

    def rows(self, sql: str, **values: Any) -> Sequence[Any]:
        """Return what a query finds in the consumer's database."""
        with self.till.engine.connect() as connection:  # type: ignore[union-attr]
            return connection.execute(text(sql), values).all()

    def statuses(self, *ids: UUID) -> list[str]:
        """Return how messages stand in the inbox."""
        query = "SELECT message_id, status, discarded_at FROM outbox.consumer_message WHERE message_id = ANY(:ids)"
        found = {row[0]: "discarded" if row[2] else row[1] for row in self.rows(query, ids=list(ids))}
        return [found[each] for each in ids]

    def audited(self) -> list[tuple[str, str, str, str]]:
        """Return who did what to which target, and why; all by the command line."""
        found = self.rows("SELECT actor, action, target, reason, origin FROM outbox.audit ORDER BY id")
        assert all((row[4] or {}).get("via") == "cli" for row in found), found
        return [tuple(row[:4]) for row in found]
