"""Where the orders of a run come from, and how they are shared among the tellers."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Decimal
from pathlib import Path

from .orders import Order, Refusal, generate_orders, read_orders

#: One account is closed for so many orders, but at least so many, and not too many.
_CLOSED_EVERY, _FEWEST_CLOSED, _MOST_CLOSED = 100, 2, 25


@dataclass(frozen=True, slots=True)
class Source:
    """The orders of a file, or ``count`` generated ones; every process that reads them gets the same."""

    file: Path | None
    count: int
    seed: int

    def __iter__(self) -> Iterator[Order | Refusal]:
        """Yield orders, and refusals of rows that can't be orders.

        Raises:
            OrdersUnreadable: the file as a whole is of no use.
        """
        return read_orders(self.file) if self.file else generate_orders(self.count, self.seed)

    def share(self, teller: int, tellers: int) -> Iterator[Order]:
        """Yield the orders of one teller; all those of one account go to the same one, in their order."""
        return (order for order in self if isinstance(order, Order) and teller_of(order, tellers) == teller)

    def __str__(self) -> str:
        return self.file.name if self.file else f"generated with seed {self.seed}"


@dataclass(slots=True)
class Survey:
    """What is known of the orders before the first is executed.

    ``needs`` is the amount that each sender's orders add up to, ``shares`` the number of orders per teller,
    ``refusals`` are the rows which are no orders.
    """

    rows: int = 0
    needs: defaultdict[int, Decimal] = field(default_factory=lambda: defaultdict(Decimal))
    receivers: set[str] = field(default_factory=set)
    shares: Counter[int] = field(default_factory=Counter)
    refusals: list[Refusal] = field(default_factory=list)

    def opening_balance(self, account: int) -> Decimal:
        """Return what covers all orders of an account, rounded up to full thousands."""
        return (self.needs.get(account, Decimal()) / 1000).to_integral_value(ROUND_CEILING) * 1000


def survey(source: Source, tellers: int, known: Collection[int] | None = None) -> Survey:
    """Read all orders once; the receivers are those of senders in ``known``, if given.

    Raises:
        OrdersUnreadable: the file as a whole is of no use.
    """
    seen = Survey()
    for row in source:
        seen.rows += 1
        if isinstance(row, Refusal):
            seen.refusals.append(row)
            continue
        seen.needs[row.account_id] += row.amount
        if known is None or row.account_id in known:
            seen.receivers.add(row.receiver)
        seen.shares[teller_of(row, tellers)] += 1
    return seen


def teller_of(order: Order, tellers: int) -> int:
    """Return the number of the teller that executes this order."""
    return order.account_id % tellers


def choose_closing(source: Source, seed: int) -> list[int]:
    """Return some orders, each of another receiver, which closes the account when bank A has just asked about it.

    Raises:
        OrdersUnreadable: the file as a whole is of no use.
    """
    dice, chosen, seen, orders = random.Random(seed), dict[str, int](), Counter[str](), 0
    for order in source:
        if isinstance(order, Order):
            orders += 1
            seen[order.receiver] += 1
            if dice.randrange(seen[order.receiver]) == 0:
                chosen[order.receiver] = order.id
    number = min(max(orders // _CLOSED_EVERY, _FEWEST_CLOSED), _MOST_CLOSED, len(chosen))
    return dice.sample(list(chosen.values()), number)
