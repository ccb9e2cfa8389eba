"""A service whose tests use the kit: customers, who get points by messages."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Engine, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox import Message, Outbox

POINTS = "CREATE TABLE points (customer text)"
ADD = text("INSERT INTO points (customer) VALUES (:customer)")


def add_points(message: Message, session: Session) -> None:
    """Give the customer a point."""
    session.execute(ADD, {"customer": message.body["customer"]})


async def add_points_async(message: Message, session: AsyncSession) -> None:
    """Do the same on an event loop."""
    await session.execute(ADD, {"customer": message.body["customer"]})


def send(outbox: Outbox, bind: Engine | Connection, customer: str, **options: Any) -> None:
    """Send an order in a transaction of its own; on a connection, in a savepoint."""
    with Session(bind, join_transaction_mode="create_savepoint") as session, session.begin():
        outbox.send(session, "order", {"customer": customer}, **options)


def points(bind: Engine | Connection) -> list[str]:
    """Return who has points."""
    with Session(bind, join_transaction_mode="create_savepoint") as session:
        return list(session.scalars(text("SELECT customer FROM points ORDER BY customer")))
