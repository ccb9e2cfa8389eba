"""The order service, the producer: takes orders, and has each paid exactly when it is committed.

``outbox run --app examples.order_payment.order_service:outbox`` dispatches.
"""

from __future__ import annotations

import os
from decimal import Decimal
from typing import ClassVar

from sqlalchemy import BigInteger, CheckConstraint, Identity, Numeric, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outbox import INJECTED, Outbox

from .message import TOPIC, PaymentDue

engine = create_engine(os.environ.get("ORDERS_URL", "postgresql+psycopg://localhost/orders"))
outbox = Outbox(engine, group="order-service")


class Base(DeclarativeBase):
    """The tables of the order service."""

    type_annotation_map: ClassVar = {Decimal: Numeric(14, 2), int: BigInteger}


class Order(Base):
    """One order of a user at an enterprise."""

    __tablename__ = "customer_order"
    __table_args__ = (CheckConstraint("price > 0", name="order_price_positive"),)

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    user: Mapped[str]
    enterprise: Mapped[str]
    price: Mapped[Decimal]


@outbox.transactional(topic=TOPIC, key=lambda payment: payment.user)
def place_order(user: str, enterprise: str, price: Decimal, session: Session = INJECTED) -> PaymentDue:
    """Place an order, and have it paid.

    What is returned is sent in the transaction that writes the order. The key is the user: the payments of one user
    stay in order, and no two consumers fight over a user's balance.
    """
    order = Order(user=user, enterprise=enterprise, price=price)
    session.add(order)
    session.flush()  # it gets its id
    return PaymentDue(order_id=order.id, user=user, enterprise=enterprise, price=price)
