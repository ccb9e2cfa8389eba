"""The bank: takes the price of a trip from the customer's account, and gives it back."""

from __future__ import annotations

import os
from decimal import Decimal
from typing import ClassVar
from uuid import UUID

from sqlalchemy import BigInteger, CheckConstraint, Identity, Numeric, create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outbox import Message, Outbox

from .message import PaymentDue

_AGENCY = os.environ.get("AGENCY_URL", "postgresql+psycopg://localhost/agency")

engine = create_engine(os.environ.get("BANK_URL", "postgresql+psycopg://localhost/bank"))
outbox = Outbox(engine, group="bank")


class Base(DeclarativeBase):
    """The tables of the bank."""

    type_annotation_map: ClassVar = {Decimal: Numeric(14, 2), int: BigInteger}


class Account(Base):
    """A customer's account; the database itself refuses to overdraw it."""

    __tablename__ = "account"
    __table_args__ = (CheckConstraint("balance >= 0", name="account_not_overdrawn"),)

    customer: Mapped[str] = mapped_column(primary_key=True)
    balance: Mapped[Decimal]


class Payment(Base):
    """Money taken for a trip, by the message that asked for it."""

    __tablename__ = "payment"

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    trip_id: Mapped[UUID]
    message_id: Mapped[UUID]
    customer: Mapped[str]
    amount: Mapped[Decimal]


class Refund(Base):
    """Money given back that a message had taken."""

    __tablename__ = "refund"

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    trip_id: Mapped[UUID]
    paid_by: Mapped[UUID | None]
    amount: Mapped[Decimal]


@outbox.consumer("payment.take", group="bank", source=_AGENCY, model=PaymentDue)
def take(message: Message[PaymentDue], session: Session) -> None:
    """Debit the customer, or refuse."""
    due = message.body
    account = session.get(Account, due.customer, with_for_update=True)
    if account is None or account.balance < due.amount:
        message.refuse(session, f"{due.customer} can't pay {due.amount}")
        return
    account.balance -= due.amount
    session.add(Payment(trip_id=UUID(message.key), message_id=message.id, customer=due.customer, amount=due.amount))
    message.reply(session, {})


@outbox.consumer("payment.give", group="bank", source=_AGENCY, model=PaymentDue)
def give_back(message: Message[PaymentDue], session: Session) -> None:
    """Give the amount taken back."""
    payment = session.scalars(select(Payment).where(Payment.message_id == message.correlation)).one()
    account = session.get_one(Account, payment.customer, with_for_update=True)
    account.balance += payment.amount
    session.add(Refund(trip_id=payment.trip_id, paid_by=payment.message_id, amount=payment.amount))
    message.reply(session, {})
