"""The account service, the producer: debits the user, tells the order service, and learns what became of it.

A payment ends as settled (the order is paid, the enterprise has the money) or returned (the user has it back). Each
minute the workers ask the order service about messages that are older than a minute: by HTTP, so that this service
needs no access to the other's tables to know what happened there. What the order service has lost is sent again.

``outbox run --app examples.order_payment.account_service:outbox`` dispatches, asks each minute, and gives back.
"""

from __future__ import annotations

import os
from decimal import Decimal
from typing import ClassVar

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Numeric, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outbox import INJECTED, Delivery, Message, Outbox, Outgoing

from .message import CARD, GROUP, TOPIC, OrderPaid

#: What becomes of a payment.
DEBITED, SETTLED, RETURNED = "debited", "settled", "returned"
#: How long (seconds) the order service may heal what it has parked, before the money goes back.
GIVE_BACK_AFTER = float(os.environ.get("GIVE_BACK_AFTER", "600"))

engine = create_engine(os.environ.get("ACCOUNTS_URL", "postgresql+psycopg://localhost/accounts"))
outbox = Outbox(engine, group="account-service")

outbox.known_group(
    TOPIC,
    group=GROUP,
    status_url=os.environ.get("ORDERS_STATUS_URL", "http://localhost:8020/inbox/status"),
    token=os.environ.get("ORDERS_STATUS_TOKEN", "a token of this example only"),
)


class Base(DeclarativeBase):
    """The tables of the account service."""

    type_annotation_map: ClassVar = {Decimal: Numeric(14, 2), int: BigInteger}


class Account(Base):
    """What a user can spend; the database itself refuses to overdraw it."""

    __tablename__ = "account"
    __table_args__ = (CheckConstraint("amount >= 0", name="account_not_overdrawn"),)

    user: Mapped[str] = mapped_column(primary_key=True)
    amount: Mapped[Decimal]


class Payment(Base):
    """The payment of an order; no order is paid twice."""

    __tablename__ = "payment"
    __table_args__ = (
        CheckConstraint("price > 0", name="payment_price_positive"),
        CheckConstraint(f"state IN ('{DEBITED}', '{SETTLED}', '{RETURNED}')", name="payment_state"),
    )

    order_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    user: Mapped[str] = mapped_column(ForeignKey(Account.user))
    enterprise: Mapped[str]
    price: Mapped[Decimal]
    state: Mapped[str] = mapped_column(server_default=DEBITED)


class Refused(Exception):
    """A payment that isn't made; nothing of it stays."""


class ReturnedBefore(Exception):
    """The order service has settled a payment that was returned: the money is there twice, and a human must know."""


@outbox.transactional(topic=TOPIC, key=lambda paid: paid.enterprise)
def pay(
    order_id: int, user: str, enterprise: str, price: Decimal, *, by: str = CARD, session: Session = INJECTED
) -> Outgoing:
    """Debit the user and tell the order service, both or neither.

    The returned body is sent in the transaction that debits. The key is the enterprise: no two consumers fight over its
    balance. The tag says what was paid ``by``.

    Raises:
        Refused: there is no such account, or it doesn't cover the price.
    """
    account = session.get(Account, user, with_for_update=True)
    if account is None:
        raise Refused(f"no account of {user}")
    if account.amount < price:
        raise Refused(f"{user} has {account.amount}, needs {price}")
    account.amount -= price
    session.add(Payment(order_id=order_id, user=user, enterprise=enterprise, price=price))
    return Outgoing(OrderPaid(order_id=order_id, user=user, enterprise=enterprise, price=price), tag=by)


@outbox.on_delivered(TOPIC, model=OrderPaid)
def note_settled(delivery: Delivery, session: Session) -> None:
    """Note that the order service has consumed the message: once, in the transaction that records the delivery.

    Raises:
        ReturnedBefore: it is logged, and called again in the next pass.
    """
    payment = session.get_one(Payment, delivery.message.body.order_id, with_for_update=True)
    if payment.state == RETURNED:
        raise ReturnedBefore(f"order {payment.order_id} is paid, and its price was returned")
    payment.state = SETTLED


@outbox.compensation(
    TOPIC,
    model=OrderPaid,
    # The one access that this service needs over there: a message must be quarantined before its money goes back.
    consumers=[os.environ.get("ORDERS_URL", "postgresql+psycopg://localhost/orders")],
    when="parked",
    after=GIVE_BACK_AFTER,
)
def give_back(message: Message, session: Session) -> dict[str, str]:
    """Roll a payment back: the user has the money again. By itself for what stays parked, or ordered by an operator."""
    paid: OrderPaid = message.body
    account = session.get_one(Account, paid.user, with_for_update=True)
    payment = session.get_one(Payment, paid.order_id, with_for_update=True)
    account.amount += paid.price
    payment.state = RETURNED
    return {"user": paid.user, "returned": str(paid.price)}
