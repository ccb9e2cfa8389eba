"""Two banks, a database each, with the demo's own tables and functions, and real workers: what the console looks at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING
from uuid import UUID

from sqlalchemy import Engine, insert, select, text
from sqlalchemy.orm import Session

from examples.bank_transfer import bank_a_tables as bank_a
from examples.bank_transfer import bank_b
from examples.bank_transfer.bank_a_settlement import refund
from examples.bank_transfer.message import GROUP, TOPIC, TransferOrdered
from examples.bank_transfer.orders import Order
from outbox import Message, Outbox, Park, Settings
from outbox.operator.operator import Operator
from outbox.worker import Worker
from tests.kit import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: Groups of bank B: one credits transfers, one reads notes, which do as they say.
CREDIT = GROUP
NOTE, CLERK = "note", "clerk"

OPENING = Decimal("1000.00")
SENDER = 1
#: An account that bank B has.
KNOWN = "BB-1"

_SETTLED = ("consumed", "parked", "quarantined", "failed")
_STATUS = text("SELECT status, discarded_at FROM outbox.consumer_message WHERE message_id = :id")
_HURRY = text("UPDATE outbox.consumer_message SET next_attempt_at = now() WHERE message_id = :id")
_SETTLED_OF = text(
    "SELECT count(*) FROM outbox.consumer_message WHERE message_id = ANY(:ids) AND status = ANY(:statuses)"
)


class Trouble(Exception):
    """What a handler of the town raises when a note says so."""


class Town:
    """Both banks: outboxes bound to two databases, accounts with money, and what the tests do with them."""

    def __init__(self, a: Engine, b: Engine, settings: Settings) -> None:
        self.a, self.b, self.settings = a, b, settings
        self.bank_a = Outbox(a, group="bank-a", settings=settings)
        self.bank_b = Outbox(b, group=CREDIT, settings=settings)
        #: What was sent, by message.
        self.transfers: dict[UUID, Decimal] = {}
        #: Notes of these texts are no trouble any more.
        self.mended: set[str] = set()
        self._orders = 0
        self.bank_a.compensation(TOPIC, model=TransferOrdered, consumers=[b])(refund)
        credit = self.bank_b.consumer(TOPIC, group=CREDIT, source=a, model=TransferOrdered, retry_delays=(0.1,))
        credit(bank_b.credit)
        self.bank_b.consumer(NOTE, group=CLERK, source=a, retry_delays=(3600.0,))(self._read)
        bank_a.Base.metadata.create_all(a)
        bank_b.Base.metadata.create_all(b)
        with a.begin() as at_a, b.begin() as at_b:
            at_a.execute(insert(bank_a.Account), {"id": SENDER, "balance": OPENING})
            at_a.execute(insert(bank_a.LedgerEntry), {"account_id": SENDER, "amount": OPENING})
            at_b.execute(insert(bank_b.Account), {"id": KNOWN, "balance": Decimal(0)})

    def _read(self, message: Message, _: Session) -> Park | None:
        text = message.body.get("trouble")
        if text is None or text in self.mended:
            return None
        if message.body.get("park"):
            return Park(text)
        raise Trouble(text)

    @property
    def databases(self) -> dict[str, Engine]:
        """Both databases by the names that the console knows them by."""
        return {"bank_a": self.a, "bank_b": self.b}

    @cached_property
    def operator(self) -> Operator:
        """The service layer over both databases."""
        return Operator.open(self.databases, self.settings)

    def transfer(self, amount: str = "10.00", receiver: str = KNOWN, purpose: str = "rent") -> UUID:
        """Debit the sender and tell bank B, in one transaction; return the id of the message."""
        self._orders += 1
        bank, _, number = receiver.partition("-")
        order = Order(self._orders, self._orders, SENDER, bank, number, Decimal(amount), purpose)
        with Session(self.a) as session, session.begin():
            account = bank_a.lock_sender(order, session)
            bank_a.require_funds(order, account)
            bank_a.debit(order, account, session)
            message = self.bank_a.send(session, TOPIC, bank_a.transfer_message(order), key=receiver)
        self.transfers[message] = order.amount
        return message

    def note(
        self,
        trouble: str | None = None,
        *,
        park: bool = True,
        body: Mapping[str, object] | None = None,
        key: str | None = None,
        tag: str | None = None,
        headers: Mapping[str, str] | None = None,
        delay: float | None = None,
    ) -> UUID:
        """Send a note, whose reader parks it (or fails) with the text ``trouble``; return its id."""
        said = {"trouble": trouble, "park": park, **(body or {})}
        with Session(self.a) as session, session.begin():
            return self.bank_a.send(session, NOTE, said, key=key, tag=tag, headers=headers, delay=delay)

    def prepare(self, topic: str) -> UUID:
        """Write a half message that nobody is going to decide; return its id."""
        with Session(self.a) as session, session.begin():
            return self.bank_a.prepare(session, topic, {"trouble": None}, key="prepared")

    def open_account(self, number: str) -> None:
        """Open an account at bank B."""
        with self.b.begin() as connection:
            connection.execute(insert(bank_b.Account), {"id": number, "balance": Decimal(0)})

    def balance(self) -> Decimal:
        """Return what the sender has at bank A."""
        with self.a.connect() as connection:
            return connection.execute(select(bank_a.Account.balance).where(bank_a.Account.id == SENDER)).scalar_one()

    def credited(self, account: str = KNOWN) -> Decimal:
        """Return what an account of bank B has."""
        with self.b.connect() as connection:
            query = select(bank_b.Account.balance).where(bank_b.Account.id == account)
            return connection.execute(query).scalar() or Decimal(0)

    def status(self, message_id: UUID) -> str | None:
        """Return the status of a message in bank B's inbox; discarded ones by this word."""
        with self.b.connect() as connection:
            row = connection.execute(_STATUS, {"id": message_id}).one_or_none()
        return None if row is None else "discarded" if row.discarded_at else str(row.status)

    def becomes(self, message_id: UUID, *wanted: str) -> None:
        """Wait until a message has one of these statuses in bank B's inbox."""
        wait_until(lambda: self.status(message_id) in wanted, f"{message_id} becomes {' or '.join(wanted)}")

    def hurry(self, message_id: UUID) -> None:
        """Make a failed message due now, without anybody having ordered it."""
        with self.b.begin() as connection:
            connection.execute(_HURRY, {"id": message_id})

    def refunded(self) -> set[UUID]:
        """Return the messages whose debit was undone."""
        with self.a.connect() as connection:
            return set(connection.scalars(text("SELECT half_id FROM outbox.compensation")))

    def settled(self, ids: Sequence[UUID], statuses: Sequence[str] = _SETTLED) -> None:
        """Wait until bank B is done with these messages."""

        def done() -> bool:
            with self.b.connect() as connection:
                values = {"ids": list(ids), "statuses": list(statuses)}
                return int(connection.execute(_SETTLED_OF, values).scalar_one()) >= len(ids)

        wait_until(done, "bank B settles all")

    def carried_out(self, bulk_job_id: UUID) -> None:
        """Wait until workers are done with a bulk job."""
        wait_until(lambda: self.operator.bulk_job(bulk_job_id).finished_at, f"bulk job {bulk_job_id} is done")

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Have a worker of each bank at work."""
        with ExitStack() as stack:
            for outbox in (self.bank_a, self.bank_b):
                stack.enter_context(Worker(outbox))
            yield


@contextmanager
def a_town(new_engine: Callable[[], Engine]) -> Iterator[Town]:
    """Build a town in two new databases; nobody works there yet."""
    settings = Settings(retry_interval=0.1, idle_wait=0.1, release_interval=0.2, immunity=0.0, check_interval=3600.0)
    yield Town(new_engine(), new_engine(), settings)
