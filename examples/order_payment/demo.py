"""A few minutes from end to end: payments, what goes wrong with them, how each of them ends, and the proof."""

from __future__ import annotations

import random
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from uuid import UUID

import uvicorn
from fastapi import FastAPI
from rich.console import Console
from sqlalchemy import Engine, func, select, update
from sqlalchemy.orm import Session

from outbox.database.duty import PARTS
from outbox.database.migration import upgrade
from outbox.reconcile.job import EngineName, Spark
from outbox.reconcile.run import reconcile
from outbox.worker import Worker

from . import account_service, order_service
from .accidents import lose
from .account_service import RETURNED, SETTLED, Account, Payment, pay
from .comparison import each_minute, job
from .message import CARD, VOUCHER
from .order_service import PAID, Enterprise, Order
from .timeline import ROLLED_BACK, Timeline, at_consumer, known

USERS, ENTERPRISES = 20, 5
#: Enterprises that can't be credited: the one for a while, the other for good.
BLOCKED, CLOSED = "enterprise-blocked", "enterprise-closed"
IN_SYNC, NOT_IN_SYNC = 0, 1
#: How long (seconds) to wait for anything.
_PATIENCE = 120.0


@dataclass(frozen=True, slots=True)
class Purchase:
    """What a user has ordered, and how it is paid."""

    order: int
    user: str
    enterprise: str
    price: Decimal
    by: str = CARD


def run(orders: int, seed: int, minute: float, engine: EngineName, listening: socket.socket) -> int:
    """Run the services with their own databases, which are empty; print what came of it; return the exit code.

    A minute takes ``minute`` seconds. The order service is asked at the socket ``listening``. 0: both services agree,
    to the cent, and each payment has come to its end. 1: not so.

    Raises:
        NotFinished: the services don't get done.
    """
    console = Console(highlight=False, soft_wrap=True)
    a, b = account_service.engine, order_service.engine
    purchases = make_purchases(orders, seed)
    paid_in = open_books(a, b, purchases)
    timeline = Timeline(a, b, minute, _PATIENCE)
    some = _some(orders)
    console.print(
        f"{orders:,} orders are paid: {some} to an enterprise that is blocked for a while, {some} to one for good, "
        f"{some} with vouchers, which the order service doesn't know; {some} others get lost there."
    )
    with Worker(account_service.outbox):
        _pay(each for each in purchases if each.enterprise not in {BLOCKED, CLOSED})
        timeline.wait("no group consumes")
        with Worker(order_service.outbox):
            _live(timeline, purchases, seed, listening)
    for table in timeline.tables():
        console.print(table)
    runs = each_minute(b)
    different = sum(each.state == "different" for each in runs)
    console.print(
        f"Each minute the services were compared: {len(runs):,} times, {different:,} of them with differences."
    )
    return report(Books.of(a, b, paid_in), _reconciled(a, b, engine), console)


def _live(timeline: Timeline, purchases: list[Purchase], seed: int, listening: socket.socket) -> None:
    """Let happen what happens to the messages, until each payment has come to its end."""
    a, b, some = timeline.accounts, timeline.orders, _some(len(purchases))
    expected = len(purchases) - 3 * some
    timeline.until("orders are settled", lambda: at_consumer(b).total() == expected)
    lose(b, some, seed)
    with serving(order_service.app, listening):
        timeline.until("losses are known", lambda: Counter(known(a).values())["unconsumed"] == 2 * some)
        _pay(each for each in purchases if each.enterprise in {BLOCKED, CLOSED})
        timeline.until("failures are known", lambda: Counter(known(a).values())["failed"] == 2 * some)
        with b.begin() as connection:
            connection.execute(update(Enterprise).where(Enterprise.name == BLOCKED).values(blocked=False))
        ends = {"consumed", ROLLED_BACK, "resend_exhausted"}
        timeline.until("parked: money back", lambda: set(known(a).values()) <= ends)
        given_up = [message for message, state in known(a).items() if state == "resend_exhausted"]
        roll_back(given_up)
        timeline.until("given up: by hand", lambda: set(known(a).values()) <= {"consumed", ROLLED_BACK})


def _pay(purchases: Iterable[Purchase]) -> None:
    for each in purchases:
        pay(each.order, each.user, each.enterprise, each.price, by=each.by)


def roll_back(messages: Iterable[UUID]) -> None:
    """Have payments rolled back that the order service has never settled, as an operator does in the console."""
    account_service.outbox.operator.compensate(
        list(messages), by="operator", why="the order service takes no vouchers, and was asked often enough"
    )


def make_purchases(number: int, seed: int) -> list[Purchase]:
    """Return so many purchases; the same seed gives the same ones."""
    dice, some = random.Random(seed), _some(number)
    purchases = []
    for order in range(1, number + 1):
        enterprise, by = f"enterprise-{dice.randint(1, ENTERPRISES)}", CARD
        if order <= 2 * some:
            enterprise = BLOCKED if order <= some else CLOSED
        elif order <= 3 * some:
            by = VOUCHER
        price = Decimal(dice.randint(100, 50_000)).scaleb(-2)
        purchases.append(Purchase(order, f"user-{dice.randint(1, USERS):02}", enterprise, price, by))
    dice.shuffle(purchases)
    return purchases


def open_books(accounts: Engine, orders: Engine, purchases: Iterable[Purchase]) -> Decimal:
    """Create the tables, give each user what the purchases cost, and place the orders; return what users have."""
    # Both services send and consume: callbacks are told by messages, and the reconciliation is run by them.
    for service, database, parts in ((account_service, accounts, PARTS), (order_service, orders, PARTS)):
        upgrade(database, parts=parts, schema=service.outbox.settings.schema)
        service.Base.metadata.create_all(database)
    costs: defaultdict[str, Decimal] = defaultdict(Decimal)
    for purchase in purchases:
        costs[purchase.user] += purchase.price
    with Session(accounts) as session, session.begin():
        session.add_all(Account(user=user, amount=amount) for user, amount in costs.items())
    with Session(orders) as session, session.begin():
        for name in sorted({purchase.enterprise for purchase in purchases}):
            session.add(Enterprise(name=name, amount=Decimal(), blocked=name in {BLOCKED, CLOSED}))
        session.flush()  # orders refer to them
        for each in purchases:
            session.add(Order(id=each.order, user=each.user, enterprise=each.enterprise, price=each.price))
    return sum(costs.values(), Decimal())


@dataclass(frozen=True, slots=True)
class Books:
    """Where the money is, and how the payments ended; ``unlike``: orders that are paid though returned, or not paid."""

    paid_in: Decimal
    users: Decimal
    enterprises: Decimal
    payments: Counter[str]
    unlike: int

    @classmethod
    def of(cls, accounts: Engine, orders: Engine, paid_in: Decimal) -> Books:
        """Add up both databases, and compare each payment with its order."""
        with accounts.connect() as a, orders.connect() as b:
            users, enterprises = (
                a.scalar(select(func.sum(Account.amount))),
                b.scalar(select(func.sum(Enterprise.amount))),
            )
            payments = {row[0]: row[1] for row in a.execute(select(Payment.order_id, Payment.state))}
            paid = set(b.scalars(select(Order.id).where(Order.state == PAID)))
        settled = {order for order, state in payments.items() if state == SETTLED}
        counts = Counter(payments.values())
        return cls(paid_in, users or Decimal(), enterprises or Decimal(), counts, len(settled ^ paid))

    @property
    def agree(self) -> bool:
        """Is all the money there, and has each payment come to the end that its order has?"""
        ended = self.payments[SETTLED] + self.payments[RETURNED] == self.payments.total()
        return ended and not self.unlike and self.paid_in == self.users + self.enterprises


def report(books: Books, in_sync: bool, console: Console) -> int:
    """Print how it ended; return the exit code."""
    ends = ", ".join(f"{number:,} {state}" for state, number in sorted(books.payments.items(), reverse=True))
    console.print(f"Payments: {ends}. Users have {books.users:,}, enterprises {books.enterprises:,}.")
    off = books.paid_in - books.users - books.enterprises
    if in_sync and books.agree:
        console.print(
            "In sync: each order is paid, or the money is back, and not a cent is missing.", style="bold green"
        )
        return IN_SYNC
    console.print(
        f"Not in sync: {off:,} is missing, {books.unlike:,} orders are unlike their payments.", style="bold red"
    )
    return NOT_IN_SYNC


@contextmanager
def serving(app: FastAPI, listening: socket.socket) -> Iterator[None]:
    """Serve an application by HTTP in the background, as any ASGI server would in a process of its own."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


def _reconciled(accounts: Engine, orders: Engine, engine: EngineName) -> bool:
    """Compare both databases message by message, and by their sums; tell whether they agree."""
    if engine is not EngineName.SPARK:
        return reconcile(job(accounts, orders, engine)).in_sync
    from outbox.reconcile.spark.session import session  # noqa: PLC0415 - an extra

    with session(Spark(), workers=2):
        return reconcile(job(accounts, orders, engine)).in_sync


def _some(orders: int) -> int:
    """Return to how many messages each thing happens."""
    return max(1, orders // 20)
