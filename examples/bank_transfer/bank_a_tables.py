"""The books of bank A: its database, its tables, and how a transfer is booked."""

from __future__ import annotations

import os
from datetime import datetime
from decimal import Decimal
from typing import ClassVar

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Identity, Index, Numeric, create_engine, func, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outbox import Outbox

from .message import TransferOrdered
from .orders import Order

URL = os.environ.get("BANK_A_URL", "postgresql+psycopg://localhost/bank_a")

#: What becomes of a transfer: its amount is debited; then bank B has credited it, or the sender has it back.
DEBITED, CREDITED, REFUNDED = "debited", "credited", "refunded"

engine = create_engine(URL)
outbox = Outbox(engine, group="bank-a")


class Base(DeclarativeBase):
    """The tables of bank A."""

    type_annotation_map: ClassVar = {Decimal: Numeric(14, 2), int: BigInteger}


class Account(Base):
    """An account; the database itself refuses to overdraw it. ``reserved`` is spoken for, but not yet debited."""

    __tablename__ = "account"
    __table_args__ = (CheckConstraint("reserved >= 0 AND balance >= reserved", name="account_not_overdrawn"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    balance: Mapped[Decimal]
    reserved: Mapped[Decimal] = mapped_column(server_default="0")


class Transfer(Base):
    """An executed payment order; its id is that of the order, so that no order is executed twice.

    ``state`` begins as debited, and ends as credited or refunded, at ``settled_at`` (`bank_a_settlement`).
    """

    __tablename__ = "transfer"
    __table_args__ = (
        CheckConstraint("amount > 0", name="transfer_positive"),
        CheckConstraint(f"state IN ('{DEBITED}', '{CREDITED}', '{REFUNDED}')", name="transfer_state"),
        CheckConstraint(f"(state = '{DEBITED}') = (settled_at IS NULL)", name="transfer_settled"),
        Index("transfer_open", "id", postgresql_where=text(f"state = '{DEBITED}'")),
    )

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    account_id: Mapped[int] = mapped_column(ForeignKey(Account.id))
    receiver: Mapped[str]
    amount: Mapped[Decimal]
    purpose: Mapped[str]
    ordered_at: Mapped[datetime] = mapped_column(server_default=func.now())
    state: Mapped[str] = mapped_column(server_default=DEBITED)
    settled_at: Mapped[datetime | None]


class LedgerEntry(Base):
    """One movement of an account: the debit of a transfer, its refund, or, with neither, the opening balance."""

    __tablename__ = "ledger_entry"

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    account_id: Mapped[int] = mapped_column(ForeignKey(Account.id))
    transfer_id: Mapped[int | None] = mapped_column(ForeignKey(Transfer.id), unique=True)
    refund_of: Mapped[int | None] = mapped_column(ForeignKey(Transfer.id), unique=True)
    amount: Mapped[Decimal]


class Refused(Exception):
    """A payment order that bank A doesn't execute."""


class AlreadyExecuted(Exception):
    """A payment order that was executed before."""


class RefundedBefore(Exception):
    """Bank B has credited a transfer that bank A has refunded: the money is there twice, and a human must know."""


def lock_sender(order: Order, session: Session) -> Account:
    """Return the sender's account, locked.

    Raises:
        AlreadyExecuted: the order was executed before.
        Refused: no such account.
    """
    # Lock first, look second. A teller that was killed may have a COMMIT under way in the database still: the
    # lock waits for it, and the statement after it sees what it left.
    account = session.get(Account, order.account_id, with_for_update=True)
    if account is None:
        raise Refused(f"no account {order.account_id} at bank A")
    if session.get(Transfer, order.id) is not None:
        raise AlreadyExecuted(f"order {order.id}")
    return account


def require_funds(order: Order, account: Account) -> None:
    """Make sure that the account covers the order.

    Raises:
        Refused: it doesn't.
    """
    available = account.balance - account.reserved
    if available < order.amount:
        raise Refused(f"insufficient funds: account {account.id} has {available}, needs {order.amount}")


def debit(order: Order, account: Account, session: Session) -> None:
    """Debit the account, and write down what for."""
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


def settle_as_credited(transfer_id: int, session: Session) -> None:
    """Note that bank B has credited a transfer.

    Raises:
        RefundedBefore: the sender has the money back.
    """
    transfer = session.get_one(Transfer, transfer_id, with_for_update=True)
    if transfer.state == REFUNDED:
        raise RefundedBefore(f"transfer {transfer.id} is credited at bank B, and refunded at bank A")
    transfer.state, transfer.settled_at = CREDITED, func.now()


def settle_by_refund(transfer_id: int, session: Session) -> Transfer:
    """Give the sender back what a transfer took; the ledger refuses a second refund."""
    account_id = session.get_one(Transfer, transfer_id).account_id
    account = session.get_one(Account, account_id, with_for_update=True)
    transfer = session.get_one(Transfer, transfer_id, with_for_update=True)
    account.balance += transfer.amount
    session.add(LedgerEntry(account_id=account.id, refund_of=transfer.id, amount=transfer.amount))
    transfer.state, transfer.settled_at = REFUNDED, func.now()
    return transfer


def transfer_message(order: Order) -> TransferOrdered:
    """Return the message that announces a transfer to bank B."""
    return TransferOrdered(
        transfer_id=order.id,
        sender=order.account_id,
        receiver=order.receiver,
        amount=order.amount,
        purpose=order.purpose,
    )
