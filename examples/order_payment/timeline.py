"""The states of all messages, minute by minute, as both services have them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from rich.table import Table
from sqlalchemy import Engine, func, select, text

from outbox.database.sql import IS_CONFIRMED
from outbox.database.tables import producer_tables

from .accidents import INBOX
from .account_service import outbox
from .message import TOPIC

_SCHEMA = outbox.settings.schema
HALVES, DELIVERIES, COMPENSATIONS = (
    producer_tables(_SCHEMA).tables[f"{_SCHEMA}.{name}"] for name in ("half_message", "delivery", "compensation")
)

#: The producer's delivery state of a message that no pass has asked about so far, and of one that was compensated.
SENT, CONSUMED, ROLLED_BACK = "sent", "consumed", "rolled back"
PRODUCER = (SENT, "unconsumed", CONSUMED, "failed", "parked", "resend_exhausted", ROLLED_BACK)
CONSUMER = ("consumed", "failed", "parked", "quarantined")

#: The messages up to which the producer has asked, and that had no other fate.
CONFIRMED = text(f"""
SELECT m.half_id
  FROM {_SCHEMA}.message m
  JOIN (SELECT DISTINCT ON (topic, consumer_group) * FROM {_SCHEMA}.delivery_cursor
         ORDER BY topic, consumer_group, number DESC) g ON g.topic = m.topic AND {IS_CONFIRMED}
 WHERE NOT EXISTS (SELECT FROM {_SCHEMA}.delivery d WHERE d.half_id = m.half_id)
""")

_LOOK_SECONDS = 0.05


class NotFinished(Exception):
    """The services don't get done."""


def known(accounts: Engine) -> dict[UUID, str]:
    """Return the state of each message as the producer has it, what it knew last; the oldest message first."""
    of_topic = select(HALVES.c.id).where(HALVES.c.topic == TOPIC).order_by(HALVES.c.id)
    with accounts.connect() as connection:
        states: dict[UUID, str] = dict.fromkeys(connection.scalars(of_topic), SENT)
        # What is consumed at once has no row: how far was asked tells it.
        states.update(dict.fromkeys(connection.scalars(CONFIRMED), CONSUMED))
        newest = select(DELIVERIES.c.half_id, DELIVERIES.c.status).order_by(DELIVERIES.c.number)
        states.update((half_id, status) for half_id, status in connection.execute(newest) if status in PRODUCER)
        states.update(dict.fromkeys(connection.scalars(select(COMPENSATIONS.c.half_id)), ROLLED_BACK))
    return states


def seen(accounts: Engine) -> set[str]:
    """Return every state that a message has been in, as the producer knows."""
    with accounts.connect() as connection:
        told = set(connection.scalars(select(DELIVERIES.c.status).distinct()))
        told |= {CONSUMED for _ in connection.scalars(CONFIRMED)}
        compensated = connection.scalar(select(func.count()).select_from(COMPENSATIONS))
    return {SENT, *(told & set(PRODUCER)), *([ROLLED_BACK] if compensated else [])}


def at_consumer(orders: Engine) -> Counter[str]:
    """Count the consumer's messages by status."""
    query = select(INBOX.c.status, func.count()).group_by(INBOX.c.status)
    with orders.connect() as connection:
        return Counter({row[0]: row[1] for row in connection.execute(query)})


class Look(NamedTuple):
    """The states at one moment: its minute, what has just happened, and how many messages each side has in a state."""

    minute: float
    event: str
    producer: Counter[str]
    consumer: Counter[str]


@dataclass(slots=True)
class Timeline:
    """Wait for an event, and meanwhile looks at both services once a ``minute`` (seconds)."""

    accounts: Engine
    orders: Engine
    minute: float
    patience: float
    _looks: list[Look] = field(default_factory=list)
    _begun: float = field(default_factory=time.monotonic)

    def until(self, what: str, fact: Callable[[], bool]) -> None:
        """Return when it is so; note the states of that moment, and ``what`` happened.

        Raises:
            NotFinished: that takes too long.
        """
        deadline = time.monotonic() + self.patience
        while not fact():
            if time.monotonic() > deadline:
                raise NotFinished(f"after {self.patience:.0f} s still not: {what}")
            if not self._looks or self._now >= int(self._looks[-1].minute) + 1:
                self._look("")
            time.sleep(_LOOK_SECONDS)
        self._look(what)

    def wait(self, what: str) -> None:
        """Let a minute go by."""
        until = self._now + 1
        self.until(what, lambda: self._now >= until)

    def tables(self) -> Iterator[Table]:
        """Yield the states over time, of the producer and of the consumer: the moments in which something changed."""
        yield self._table("What the account service knows", PRODUCER, lambda look: look.producer, events=True)
        yield self._table("What the order service's inbox says", CONSUMER, lambda look: look.consumer, events=False)

    def _table(
        self, title: str, states: Sequence[str], counts: Callable[[Look], Counter[str]], *, events: bool
    ) -> Table:
        table = Table(box=None, pad_edge=False, title=title, title_justify="left")
        headings = {"unconsumed": "lost", "resend_exhausted": "given\nup"}
        for name in ("minute", *(headings.get(state, state.replace(" ", "\n")) for state in states)):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("what happened" if events else "", no_wrap=True)
        before: Counter[str] | None = None
        for look in self._looks:
            event = look.event if events else ""
            if counts(look) != before or event:
                before = counts(look)
                numbers = (f"{before[state]:,}" if before[state] else "" for state in states)
                table.add_row(f"{look.minute:.0f}", *numbers, event)
        return table

    @property
    def _now(self) -> float:
        return (time.monotonic() - self._begun) / self.minute

    def _look(self, event: str) -> None:
        self._looks.append(Look(self._now, event, Counter(known(self.accounts).values()), at_consumer(self.orders)))
