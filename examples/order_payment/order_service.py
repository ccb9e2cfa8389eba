"""The order service, the consumer: marks an order as paid and credits its enterprise, exactly once.

It serves the status of its inbox by HTTP, for the account service to ask: any ASGI server serves `app`.
``outbox run --app examples.order_payment.order_service:outbox`` consumes, and compares both services each minute.
"""

from __future__ import annotations

import os
from decimal import Decimal
from pathlib import Path
from typing import ClassVar
from uuid import UUID

from fastapi import FastAPI
from sqlalchemy import BigInteger, ForeignKey, Identity, Numeric, create_engine, false
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outbox import Message, Outbox, Park
from outbox.asgi import InboxStatusService

from .message import CARD, GROUP, TOPIC, OrderPaid

UNPAID, PAID = "unpaid", "paid"

engine = create_engine(os.environ.get("ORDERS_URL", "postgresql+psycopg://localhost/orders"))
outbox = Outbox(engine, group=GROUP)

#: The scheduler: one of the workers compares both services each minute, message by message and by their sums. What was
#: sent less than a minute ago is on its way. It repairs nothing: the account service sends again what it finds lost.
EACH_MINUTE, RECONCILIATION = "each-minute", Path(__file__).with_name("reconciliation.toml")
_MINUTE = float(os.environ.get("RECONCILE_EVERY", "60"))
outbox.reconciliation(EACH_MINUTE, every=_MINUTE, config=RECONCILIATION, job={"window": {"grace": _MINUTE}})


class Base(DeclarativeBase):
    """The tables of the order service."""

    type_annotation_map: ClassVar = {Decimal: Numeric(14, 2), int: BigInteger}


class Enterprise(Base):
    """What an enterprise has earned; one that is ``blocked`` can't be credited for now."""

    __tablename__ = "enterprise"

    name: Mapped[str] = mapped_column(primary_key=True)
    amount: Mapped[Decimal]
    blocked: Mapped[bool] = mapped_column(server_default=false())


class Order(Base):
    """One order of a user at an enterprise."""

    __tablename__ = "customer_order"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    user: Mapped[str]
    enterprise: Mapped[str] = mapped_column(ForeignKey(Enterprise.name))
    price: Mapped[Decimal]
    state: Mapped[str] = mapped_column(server_default=UNPAID)


class Credit(Base):
    """What an enterprise was credited. By ``message_id`` the reconciliation finds the effect of a message.

    It isn't unique on purpose: that no order is credited twice is the work of the inbox.
    """

    __tablename__ = "credit"

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    message_id: Mapped[UUID] = mapped_column(index=True)
    order_id: Mapped[int] = mapped_column(ForeignKey(Order.id))
    enterprise: Mapped[str] = mapped_column(ForeignKey(Enterprise.name))
    price: Mapped[Decimal]


class EnterpriseBlocked(Exception):
    """The enterprise can't be credited for now: the message is tried again later."""


@outbox.consumer(
    TOPIC,
    group=GROUP,
    source=os.environ.get("ACCOUNTS_URL", "postgresql+psycopg://localhost/accounts"),
    model=OrderPaid,
    # Vouchers are for the next release. The account service wasn't told: nobody is perfect.
    tags=[CARD],
)
def settle(message: Message, session: Session) -> Park | None:
    """Mark the order as paid and credit the enterprise, in the transaction that also holds the inbox row.

    Raises:
        EnterpriseBlocked: it is tried again, and parked after the last retry.
    """
    paid: OrderPaid = message.body
    order = session.get(Order, paid.order_id, with_for_update=True)
    if order is None or (order.enterprise, order.price) != (paid.enterprise, paid.price):
        return Park(f"no order {paid.order_id} of {paid.price} at {paid.enterprise}")
    if order.state == PAID:
        return Park(f"order {order.id} is paid already")
    enterprise = session.get_one(Enterprise, order.enterprise, with_for_update=True)
    if enterprise.blocked:
        raise EnterpriseBlocked(f"{enterprise.name} can't be credited for now")
    order.state = PAID
    enterprise.amount += paid.price
    session.add(
        Credit(message_id=message.id, order_id=order.id, enterprise=paid.enterprise, price=paid.price),
    )
    return None


def application(consuming: Outbox) -> FastAPI:
    """Return what the order service serves by HTTP: the status of its inbox, to callers that have the token."""
    served = FastAPI(title="Order service")
    token = os.environ.get("ORDERS_STATUS_TOKEN", "a token of this example only")
    served.mount("/inbox/status", InboxStatusService(consuming, token=token))
    return served


app = application(outbox)
