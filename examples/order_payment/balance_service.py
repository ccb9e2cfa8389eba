"""The balance service, the consumer: moves the price of an order from balance to balance, exactly once.

``outbox run --app examples.order_payment.balance_service:outbox`` consumes.
"""

from __future__ import annotations

import os
from decimal import Decimal
from typing import ClassVar
from uuid import UUID

from sqlalchemy import BigInteger, CheckConstraint, Identity, Numeric, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outbox import Message, Outbox, Park

from .message import TOPIC, PaymentDue

GROUP = "balance-service"
#: How the reason begins for which a payment waits for a human.
TOO_LOW = "balance too low"

engine = create_engine(os.environ.get("BALANCES_URL", "postgresql+psycopg://localhost/balances"))
outbox = Outbox(engine, group=GROUP)


class Base(DeclarativeBase):
    """The tables of the balance service."""

    type_annotation_map: ClassVar = {Decimal: Numeric(14, 2), int: BigInteger}


class UserBalance(Base):
    """What a user can spend; the database itself refuses to overdraw it."""

    __tablename__ = "user_balance"
    __table_args__ = (CheckConstraint("amount >= 0", name="user_balance_not_overdrawn"),)

    user: Mapped[str] = mapped_column(primary_key=True)
    amount: Mapped[Decimal]


class EnterpriseBalance(Base):
    """What an enterprise has earned."""

    __tablename__ = "enterprise_balance"

    enterprise: Mapped[str] = mapped_column(primary_key=True)
    amount: Mapped[Decimal]


class Payment(Base):
    """One paid order. By ``message_id`` the reconciliation finds the effect of a message.

    It isn't unique on purpose: that no order is paid twice is the work of the inbox.
    """

    __tablename__ = "payment"

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    message_id: Mapped[UUID] = mapped_column(index=True)
    order_id: Mapped[int]
    user: Mapped[str]
    enterprise: Mapped[str]
    price: Mapped[Decimal]


@outbox.consumer(
    TOPIC,
    group=GROUP,
    source=os.environ.get("ORDERS_URL", "postgresql+psycopg://localhost/orders"),
    model=PaymentDue,
)
def pay(message: Message, session: Session) -> Park | None:
    """Debit the user and credit the enterprise, in the transaction that also holds the inbox row.

    Each message has a transaction of its own: several enterprises locked in one, in the order in which their payments
    happen to come, could deadlock with another queue.
    """
    due: PaymentDue = message.body
    user = session.get(UserBalance, due.user, with_for_update=True)
    if user is None:
        return Park(f"no user {due.user}")
    if user.amount < due.price:
        return Park(f"{TOO_LOW}: {due.user} has {user.amount}, needs {due.price}")
    enterprise = session.get(EnterpriseBalance, due.enterprise, with_for_update=True)
    if enterprise is None:
        return Park(f"no enterprise {due.enterprise}")
    user.amount -= due.price
    enterprise.amount += due.price
    session.add(
        Payment(
            message_id=message.id,
            order_id=due.order_id,
            user=due.user,
            enterprise=due.enterprise,
            price=due.price,
        )
    )
    return None
