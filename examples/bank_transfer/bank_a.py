"""Bank A, the producer: debits the sender and sends the message in one local transaction.

``outbox run --app examples.bank_transfer.bank_a:outbox`` dispatches what it sent.
"""

from __future__ import annotations

import os
from datetime import datetime
from decimal import Decimal

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Identity, Numeric, create_engine, func
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outbox import INJECTED, Outbox

from .message import TOPIC, TransferOrdered
from .orders import Order

URL = os.environ.get("BANK_A_URL", "postgresql+psycopg://localhost/bank_a")

engine = create_engine(URL)
outbox = Outbox(engine, group="bank-a")


class Base(DeclarativeBase):
    """The tables of bank A."""

    type_annotation_map = {Decimal: Numeric(14, 2), int: BigInteger}  # noqa: RUF012 - SQLAlchemy's way


class Account(Base):
    """An account; the database itself refuses to overdraw it."""

    __tablename__ = "account"
    __table_args__ = (CheckConstraint("balance >= 0", name="account_not_overdrawn"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    balance: Mapped[Decimal]


class Transfer(Base):
    """An executed payment order; its id is that of the order, so that no order is executed twice."""

    __tablename__ = "transfer"
    __table_args__ = (CheckConstraint("amount > 0", name="transfer_positive"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    account_id: Mapped[int] = mapped_column(ForeignKey(Account.id))
    receiver: Mapped[str]
    amount: Mapped[Decimal]
    purpose: Mapped[str]
    ordered_at: Mapped[datetime] = mapped_column(server_default=func.now())


class LedgerEntry(Base):
    """One movement of an account; without a transfer it is the opening balance."""

    __tablename__ = "ledger_entry"

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    account_id: Mapped[int] = mapped_column(ForeignKey(Account.id))
    transfer_id: Mapped[int | None] = mapped_column(ForeignKey(Transfer.id), unique=True)
    amount: Mapped[Decimal]


class Refused(Exception):
    """A payment order that bank A doesn't execute; nothing of it stays."""


@outbox.transactional(topic=TOPIC, key=lambda transfer: transfer.receiver)
def order_transfer(order: Order, session: Session = INJECTED) -> TransferOrdered | None:
    """Debit the sender, and tell bank B; None if the order was executed before.

    What is returned is sent in the transaction that debits. The key is the receiver: what is meant for one
    account stays in order, and no two consumers fight over its row.

    Raises:
        Refused: no such account, or insufficient funds.
    """
    # Lock first, look second. A teller that was killed may have a COMMIT under way in the database still: the
    # lock waits for it, and the statement after it sees what it left.
    account = session.get(Account, order.account_id, with_for_update=True)
    if account is None:
        raise Refused(f"no account {order.account_id} at bank A")
    if session.get(Transfer, order.id) is not None:
        return None
    if account.balance < order.amount:
        raise Refused(f"insufficient funds: account {account.id} has {account.balance}, needs {order.amount}")

    account.balance -= order.amount
    transfer = Transfer(
        id=order.id,
        account_id=account.id,
        receiver=order.receiver,
        amount=order.amount,
        purpose=order.purpose,
    )
    session.add(transfer)
    session.flush()  # the ledger entry refers to it
    session.add(LedgerEntry(account_id=account.id, transfer_id=transfer.id, amount=-order.amount))
    return TransferOrdered(
        transfer_id=order.id,
        sender=account.id,
        receiver=order.receiver,
        amount=order.amount,
        purpose=order.purpose,
    )
