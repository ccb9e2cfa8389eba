"""What runs as processes of its own, to be killed: tellers, workers of both banks, and an operator who refunds.

A new process is forked from a server that has imported all of this, so that its life begins within milliseconds. It
ends with the process that holds its lifeline. What it reports goes through a pipe in writes that a kill can't tear.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from multiprocessing.connection import Connection as Pipe

from sqlalchemy import func, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from examples.bank_transfer import bank_a, bank_b
from examples.bank_transfer.bank_a import AlreadyExecuted, Refused, Transfer
from examples.bank_transfer.bank_a_tcc import StillReserved
from examples.bank_transfer.evidence import INBOX
from examples.bank_transfer.orders import Order
from outbox.errors import AlreadyRolledBack, OutboxError
from outbox.worker import Worker

#: Where the processes write their warnings.
LOG = "CHAOS_LOG"
ACCOUNTS = 100
#: So many more accounts are named by orders, and bank A doesn't have them: these orders are refused.
UNKNOWN = 5
BANKS = ("AB", "CD", "EF")
#: Account numbers at bank B of which the last is closed: what is sent there is parked, then refunded.
RECEIVERS = range(1_010, 1_020)
CLOSED = RECEIVERS[-1]
#: Ids of orders that a teller has for itself.
SHARE = 1_000_000_000

# The pause (seconds) before a process tries again what can't be done yet: its database is down, or an order waits for
# the check. Nothing is concluded from its length.
_AGAIN = 0.05
_WAYS: tuple[Callable[[Order], object], ...] = (
    bank_a.order_transfer,
    bank_a.order_transfer_two_phase,
    bank_a.order_transfer_tcc,
)


def order_of(number: int) -> Order:
    """Return the order of this id, the same in each life of a teller."""
    dice = random.Random(number)  # noqa: S311 - no secret
    return Order(
        line=number,
        id=number,
        account_id=dice.randint(1, ACCOUNTS + UNKNOWN),
        bank_to=dice.choice(BANKS),
        account_to=str(dice.choice(RECEIVERS)),
        amount=Decimal(dice.randint(1, 50_000)).scaleb(-2),
        purpose="RENT",
    )


def teller(lifeline: Pipe, reports: Pipe, share: int) -> None:
    """Execute orders, as many as the parent grants; report each once its function has returned, or refused it."""
    _begin(lifeline)
    first = share * SHARE
    mine = Transfer.id.between(first, first + SHARE - 1)
    done = None
    while done is None:
        try:
            with Session(bank_a.engine) as session:
                done = session.scalar(select(func.coalesce(func.max(Transfer.id), first)).where(mine))
        except DBAPIError:
            time.sleep(_AGAIN)
    reports.send(("begun", 0))
    number = done
    while True:
        for _ in range(reports.recv()):
            number += 1
            reports.send((_execute(order_of(number)), number))


def _execute(order: Order) -> str:
    """Execute an order, whatever happens to the database meanwhile; return what became of it."""
    way = _way_of(order.id)
    while True:
        try:
            way(order)
        except AlreadyExecuted:
            return "executed"  # by an earlier life, or by a COMMIT whose answer was lost
        except Refused:
            return "refused"
        except (AlreadyRolledBack, StillReserved, DBAPIError):
            time.sleep(_AGAIN)
        else:
            return "executed"


def _way_of(order: int) -> Callable[[Order], object]:
    return _WAYS[order % len(_WAYS)]


def is_tried(order: int) -> bool:
    """Is an order tried first, then confirmed?"""
    return _way_of(order) is bank_a.order_transfer_tcc


def worker(lifeline: Pipe, reports: Pipe, bank: str) -> None:
    """Run all duties of a bank."""
    _begin(lifeline)
    outbox = {"bank_a": bank_a, "bank_b": bank_b}[bank].outbox
    while True:
        try:
            with Worker(outbox) as running:
                reports.send(("begun", 0))
                while not all(health.last_success for health in running.health().values()):
                    time.sleep(_AGAIN / 5)
                reports.send(("works", 0))
                threading.Event().wait()
        except DBAPIError:
            time.sleep(_AGAIN)


def operator(lifeline: Pipe, reports: Pipe) -> None:
    """Order the refund of transfers that bank B has parked, in a race with bank A's policy."""
    _begin(lifeline)
    parked = select(INBOX.c.message_id).where(INBOX.c.status == "parked").limit(10)
    reports.send(("works", 0))
    while True:
        try:
            with bank_b.engine.connect() as connection:
                ids = list(connection.scalars(parked))
            for message_id in ids:
                bank_a.outbox.operator.compensate(message_id, by="chaos", why="the account is closed")
        except (OutboxError, DBAPIError) as error:  # ordered already, or the database is down
            logging.getLogger(__name__).info("no refund this time: %s", error)
        time.sleep(_AGAIN)


def _begin(lifeline: Pipe) -> None:
    def end() -> None:
        lifeline.poll(None)
        os._exit(0)

    threading.Thread(target=end, name="lifeline", daemon=True).start()
    logging.basicConfig(filename=os.environ[LOG], level=logging.WARNING, format="%(asctime)s %(process)d %(message)s")
