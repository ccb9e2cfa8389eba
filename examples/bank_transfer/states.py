"""Tell how the transfers of bank A ended, by their states, and find the faults.

A state is only a word until both ledgers bear it out: credited is what bank B's ledger has, refunded what bank A's has,
and nothing is both. Where bank A asks bank B's inbox, the framework has compensated each refunded transfer, once, and
that is quarantined at bank B.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from .bank_a import LedgerEntry, Transfer
from .bank_a_tables import CREDITED, DEBITED, REFUNDED
from .bank_b import LedgerEntry as Credit
from .evidence import COMPENSATIONS, HALVES, INBOX, TRANSFER
from .message import GROUP
from .sentences import counted, transfers_found


@dataclass(frozen=True, slots=True)
class States:
    """How many transfers are in each state, and how long (seconds) the slowest took to its end."""

    counts: Counter[str]
    slowest: float


def settled(connection: Connection) -> int:
    """Return how many transfers have come to their end."""
    query = select(func.count()).select_from(Transfer)
    every, still_open = (connection.scalar(each) or 0 for each in (query, query.where(Transfer.state == DEBITED)))
    return every - still_open


def parked(connection: Connection) -> int:
    """Return how many messages wait at bank B for an operator."""
    query = select(func.count()).where(INBOX.c.consumer_group == GROUP, INBOX.c.status == "parked")
    return connection.scalar(query) or 0


def read(connection: Connection) -> States:
    """Count the transfers by state."""
    query = select(Transfer.state, func.count()).group_by(Transfer.state)
    counts = Counter({row[0]: row[1] for row in connection.execute(query)})
    slowest = connection.scalar(select(func.max(Transfer.settled_at - Transfer.ordered_at)))
    return States(counts, slowest.total_seconds() if slowest is not None else 0.0)


def faults(a: Connection, b: Connection, waiting: Collection[int]) -> Iterator[str]:
    """Compare each state with the ledgers of both banks; those ``waiting`` for an operator may have no end so far."""
    states = {row[0]: row[1] for row in a.execute(select(Transfer.id, Transfer.state))}
    of = {state: {transfer for transfer, each in states.items() if each == state} for state in set(states.values())}
    credited, refunded = of.get(CREDITED, set()), of.get(REFUNDED, set())
    in_b = set(b.scalars(select(Credit.transfer_id)))
    back_at_a = refunds(a)
    yield from transfers_found("neither credited nor refunded", of.get(DEBITED, set()) - set(waiting))
    yield from transfers_found("credited by their state, and not by bank B's ledger", credited - in_b)
    yield from transfers_found("credited by bank B's ledger, and not by their state", (in_b & states.keys()) - credited)
    yield from transfers_found("refunded by their state, and not by bank A's ledger", refunded - back_at_a)
    yield from transfers_found("refunded by bank A's ledger, and not by their state", back_at_a - refunded)


def refunds(a: Connection) -> set[int]:
    """Return the transfers that bank A's ledger has refunded."""
    return {each for each in a.scalars(select(LedgerEntry.refund_of)) if each is not None}


def compensation_faults(a: Connection, b: Connection) -> Iterator[str]:
    """Compare the refunds with what the framework has compensated, and with bank B's inbox."""
    back_at_a = refunds(a)
    compensated = Counter(a.scalars(select(TRANSFER).join(COMPENSATIONS, COMPENSATIONS.c.half_id == HALVES.c.id)))
    yield from transfers_found("compensated more than once", (t for t, times in compensated.items() if times > 1))
    yield from transfers_found("compensated, and not refunded", compensated.keys() - back_at_a)
    yield from transfers_found("refunded, and not compensated", back_at_a - compensated.keys())
    kept = b.scalar(select(func.count()).where(INBOX.c.consumer_group == GROUP, INBOX.c.status == "quarantined")) or 0
    if kept != len(compensated):
        times, messages = counted(len(compensated), "transfer"), counted(kept, "message")
        yield f"{times} compensated, but {messages} quarantined at bank B"
