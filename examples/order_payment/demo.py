"""A day from end to end: orders, payments, accidents, the reconciliation, the repair, and the proof."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal

from rich.console import Console
from rich.table import Table
from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from outbox.database.migration import upgrade
from outbox.reconcile.job import EngineName, Spark
from outbox.reconcile.rows import JobResult
from outbox.reconcile.run import reconcile
from outbox.worker import Worker

from . import balance_service, order_service
from .accidents import INBOX, cause
from .balance_service import EnterpriseBalance, Payment, UserBalance
from .comparison import job, top_up
from .order_service import Order, place_order

USERS, ENTERPRISES = 20, 5
IN_SYNC, NOT_IN_SYNC = 0, 1
_MAX_WAIT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Purchase:
    """What a user wants to buy."""

    user: str
    enterprise: str
    price: Decimal


class NotFinished(Exception):
    """The services don't get done."""


def run(orders: int, seed: int, engine: EngineName) -> int:
    """Run the day with the services' own databases, which are empty; print what came of it; return the exit code.

    0: both services agree, to the cent. 1: they don't.
    """
    console = Console(highlight=False, soft_wrap=True)
    a, b = order_service.engine, balance_service.engine
    purchases = make_purchases(orders, seed)
    paid_in = open_balances(a, b, purchases)
    with _workers():
        for purchase in purchases:
            place_order(purchase.user, purchase.enterprise, purchase.price)
        _wait_for(b, ("consumed", "parked"), orders)

    accidents = cause(b, max(1, orders // 20), seed)
    console.print(f"{orders:,} orders were placed. Then there were accidents: {accidents}.")
    with _engine_kept(engine):
        found = reconcile(job(a, b, engine))
        with _workers():
            repaired = reconcile(job(a, b, engine, apply=True))
            topped_up = top_up(repaired, a, b)
            _wait_for(b, ("consumed",), orders)
        after = reconcile(job(a, b, engine))
    return report(found, repaired, after, Sums.of(a, b, paid_in + topped_up), topped_up, console)


def make_purchases(number: int, seed: int) -> list[Purchase]:
    """Return so many purchases; the same seed gives the same ones."""
    dice = random.Random(seed)
    return [
        Purchase(
            f"user-{dice.randint(1, USERS):02}",
            f"enterprise-{dice.randint(1, ENTERPRISES)}",
            Decimal(dice.randint(100, 50_000)).scaleb(-2),
        )
        for _ in range(number)
    ]


def open_balances(orders: Engine, balances: Engine, purchases: Iterable[Purchase]) -> Decimal:
    """Create the tables, and give each user what the purchases cost, the first one only half of it; return the sum."""
    for service, database, part in ((order_service, orders, "producer"), (balance_service, balances, "consumer")):
        upgrade(database, parts=(part,), schema=service.outbox.settings.schema)
        service.Base.metadata.create_all(database)
    costs: defaultdict[str, Decimal] = defaultdict(Decimal)
    for purchase in purchases:
        costs[purchase.user] += purchase.price
    amounts = {user: cost if user != min(costs) else round(cost / 2, 2) for user, cost in costs.items()}
    with Session(balances) as session, session.begin():
        session.add_all(UserBalance(user=user, amount=amount) for user, amount in amounts.items())
        names = sorted({purchase.enterprise for purchase in purchases})
        session.add_all(EnterpriseBalance(enterprise=name, amount=Decimal()) for name in names)
    return sum(amounts.values(), Decimal())


@dataclass(frozen=True, slots=True)
class Sums:
    """Where the money is: paid in by the users, still theirs, with the enterprises; and what was ordered and paid."""

    paid_in: Decimal
    users: Decimal
    enterprises: Decimal
    ordered: Decimal
    paid: Decimal

    @classmethod
    def of(cls, orders: Engine, balances: Engine, paid_in: Decimal) -> Sums:
        """Add up the money in both databases."""
        with orders.connect() as a, balances.connect() as b:
            ordered = a.scalar(select(func.sum(Order.price)))
            users, enterprises, paid = (
                b.scalar(select(func.sum(column)))
                for column in (UserBalance.amount, EnterpriseBalance.amount, Payment.price)
            )
        return cls(paid_in, *(amount or Decimal() for amount in (users, enterprises, ordered, paid)))

    @property
    def agree(self) -> bool:
        """Are they equal, to the cent?"""
        return self.paid_in == self.users + self.enterprises and self.ordered == self.paid == self.enterprises


def report(
    found: JobResult, repaired: JobResult, after: JobResult, sums: Sums, topped_up: Decimal, console: Console
) -> int:
    """Print what was found, what was done about it, and how it ended; return the exit code."""
    done = Counter(repair.kind.label for pair in repaired.pairs for repair in pair.repairs)
    table = Table(box=None, pad_edge=False, title="Differences", title_justify="left")
    for name in ("kind", "found", "repaired", "after"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    before, left = _differences(found), _differences(after)
    for kind in before | left:
        table.add_row(kind, f"{before[kind]:,}", f"{done[kind]:,}", f"{left[kind]:,}")
    console.print(table)
    console.print(f"{topped_up:,} was paid in for parked payments by those whose balance was too low.")
    console.print(f"Ordered for {sums.ordered:,}, paid {sums.paid:,}; the enterprises have {sums.enterprises:,}.")
    if after.in_sync and sums.agree:
        console.print("In sync: both services agree, and the sums are equal to the cent.", style="bold green")
        return IN_SYNC
    console.print("Not in sync: the two services don't agree.", style="bold red")
    return NOT_IN_SYNC


def _differences(result: JobResult) -> Counter[str]:
    return Counter({kind.label: number for pair in result.pairs for kind, number in pair.differences.items()})


@contextmanager
def _engine_kept(engine: EngineName) -> Iterator[None]:
    """Have all comparisons share one Spark session, since Java takes its time to start."""
    if engine is not EngineName.SPARK:
        yield
        return
    from outbox.reconcile.spark.session import session  # noqa: PLC0415 - an extra

    with session(Spark(), workers=2):
        yield


@contextmanager
def _workers() -> Iterator[None]:
    """Have both services work in the background, as ``outbox run`` would in processes of their own."""
    with Worker(order_service.outbox), Worker(balance_service.outbox):
        yield


def _wait_for(balances: Engine, statuses: Sequence[str], number: int) -> None:
    """Return when so many messages are in one of these states.

    Raises:
        NotFinished: that takes too long.
    """
    query = select(func.count()).select_from(INBOX).where(INBOX.c.status.in_(statuses))
    deadline = time.monotonic() + _MAX_WAIT_SECONDS
    while True:
        with balances.connect() as connection:
            now = connection.scalar(query) or 0
        if now >= number:
            return
        if time.monotonic() > deadline:
            raise NotFinished(f"{now} of {number} payments are {' or '.join(statuses)} after {_MAX_WAIT_SECONDS:.0f} s")
        time.sleep(0.05)
