"""Send in a transaction: an order and its message are committed together, or neither is.

It prints::

    order 1: order-created key='alice' body={'order': 1}
    orders: 1, messages: 1
"""

from sqlalchemy import create_engine, func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outbox import Outbox, embedded
from outbox.database import migration
from outbox.testing import sent_messages


class Base(DeclarativeBase):
    """The shop's tables."""


class Order(Base):
    """An order of a customer."""

    __tablename__ = "shop_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]


def place_order(outbox: Outbox, session: Session, customer: str) -> int:
    """Write an order, and announce it with the same transaction: no round trip is added to it."""
    session.add(order := Order(customer=customer))
    session.flush()
    outbox.send(session, "order-created", {"order": order.id}, key=customer)
    return order.id


if __name__ == "__main__":
    with embedded.server(["shop"], durable=False) as server:
        migration.upgrade(server.url("shop"))
        engine = create_engine(server.url("shop"))
        outbox = Outbox(engine, group="shop")
        Base.metadata.create_all(engine)
        with Session(engine) as session, session.begin():
            number = place_order(outbox, session, "alice")
        print(f"order {number}: {sent_messages(outbox)[0]}")
        with Session(engine) as session:
            place_order(outbox, session, "bob")
            session.rollback()  # as an exception would
            orders = session.scalar(select(func.count()).select_from(Order))
        print(f"orders: {orders}, messages: {len(sent_messages(outbox))}")
        engine.dispose()
