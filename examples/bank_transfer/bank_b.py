"""Bank B, the consumer: credits the receiver exactly once, in a database of its own.

Before bank A debits, it may ask whether there is anything against it (`bank_b_desk`); the answer is one of that moment.
``outbox run --app examples.bank_transfer.bank_b:outbox`` consumes.
"""

from __future__ import annotations

import os
from decimal import Decimal
from typing import ClassVar
from uuid import UUID

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Identity, Numeric, create_engine, false
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outbox import Message, Outbox, Park

from .message import GROUP, RICHEST, TOPIC, TransferOrdered

URL = os.environ.get("BANK_B_URL", "postgresql+psycopg://localhost/bank_b")
SOURCE = os.environ.get("BANK_A_URL", "postgresql+psycopg://localhost/bank_a")
engine = create_engine(URL)
outbox = Outbox(engine, group=GROUP)


class Base(DeclarativeBase):
    """The tables of bank B."""

    type_annotation_map: ClassVar = {Decimal: Numeric(14, 2), int: BigInteger}


class Account(Base):
    """An account, called ``<bank>-<number>``; one that is ``closed`` takes no money any more."""

    __tablename__ = "account"
    __table_args__ = (CheckConstraint("balance >= 0", name="account_not_overdrawn"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    balance: Mapped[Decimal]
    closed: Mapped[bool] = mapped_column(server_default=false())


class LedgerEntry(Base):
    """One credit.

    Neither ``transfer_id`` nor ``message_id`` is unique on purpose: that nothing is credited twice is the work of the
    inbox, and audit and reconciliation shall see it if it were. By ``message_id`` the reconciliation finds the effect
    of a message.
    """

    __tablename__ = "ledger_entry"

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    account_id: Mapped[str] = mapped_column(ForeignKey(Account.id))
    transfer_id: Mapped[int]
    message_id: Mapped[UUID] = mapped_column(index=True)
    amount: Mapped[Decimal]


def objection(receiver: str, amount: Decimal, account: Account | None) -> str | None:
    """Return what stands against crediting the receiver, whose account this is; None if nothing does."""
    if account is None:
        return f"no account {receiver} at bank B"
    if account.closed:
        return f"account {receiver} of bank B is closed"
    if account.balance + amount > RICHEST:
        return f"account {receiver} of bank B would hold more than {RICHEST}"
    return None


@outbox.consumer(TOPIC, group=GROUP, source=SOURCE, model=TransferOrdered, batch=50, retry_delays=(0.5, 1, 2, 5))
def credit(message: Message, session: Session) -> Park | None:
    """Credit the receiver; if the account can't take the money, the transfer is set aside, and bank A refunds it.

    The session's transaction also holds the inbox row: both are committed, or neither. ``batch`` lets up to 50
    messages share one; it can't deadlock with another consumer, since an account is the key of its messages, and
    a key is in one queue.
    """
    transfer: TransferOrdered = message.body
    account = session.get(Account, transfer.receiver, with_for_update=True)
    against = objection(transfer.receiver, transfer.amount, account)
    if against is not None:
        return Park(against)
    assert account is not None  # noqa: S101 - else there is an objection
    account.balance += transfer.amount
    session.add(
        LedgerEntry(
            account_id=account.id,
            transfer_id=transfer.transfer_id,
            message_id=message.id,
            amount=transfer.amount,
        )
    )
    return None
