"""Define the service of the image: an Outbox with its consumers. The URL comes from a mounted secret."""

from __future__ import annotations

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from outbox import Message, Outbox
from outbox.reader import variable

engine = create_engine(variable("OUTBOX_DATABASE_URL") or "postgresql+psycopg://localhost/shop")
outbox = Outbox(engine, group="shop")


@outbox.consumer("order-created", group="mail")
def write_mail(message: Message, _session: Session) -> None:
    """Tell the customer."""
    print(f"mail about order {message.body}")
