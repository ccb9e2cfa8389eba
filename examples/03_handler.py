"""A handler: its change, the inbox row and the offset commit together, so that a message takes effect once.

It prints::

    consumed: 1, points of alice: 1
    sent again, points of alice: 1
"""

from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outbox import Message, Outbox, embedded
from outbox.database import migration
from outbox.testing import drain

outbox = Outbox(group="shop")


class Base(DeclarativeBase):
    """The shop's tables."""


class Customer(Base):
    """A customer, and the points that orders have brought."""

    __tablename__ = "customer"
    name: Mapped[str] = mapped_column(primary_key=True)
    points: Mapped[int] = mapped_column(default=0)


@outbox.consumer("order-created", group="loyalty")
def add_a_point(message: Message, session: Session) -> None:
    """Add a point; the worker commits."""
    session.get_one(Customer, message.body["customer"]).points += 1


def points(engine: Engine, name: str) -> int:
    """Return the points that a customer has."""
    with Session(engine) as session:
        return session.get_one(Customer, name).points


if __name__ == "__main__":
    with embedded.server(["shop"], durable=False) as server:
        migration.upgrade(server.url("shop"))
        engine = create_engine(server.url("shop"))
        outbox.bind(engine)
        Base.metadata.create_all(engine)
        with Session(engine) as session, session.begin():
            session.add(Customer(name="alice"))
            sent = outbox.send(session, "order-created", {"customer": "alice"})
        done = drain(outbox).done  # what a worker does: `outbox run --app module:outbox`
        print(f"consumed: {done}, points of alice: {points(engine, 'alice')}")
        outbox.operator.resend(sent, by="ann", why="a partner asked for it")
        drain(outbox)
        print(f"sent again, points of alice: {points(engine, 'alice')}")
        engine.dispose()
