"""Delay: a message that is due later, and one that is recalled before it is due.

It prints::

    sent: []
    after 2 hours: ['alice']
"""

import datetime as dt

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from outbox import Message, Outbox, embedded
from outbox.database import migration
from outbox.testing import advance, drain

outbox = Outbox(group="shop")
reminded: list[str] = []


@outbox.consumer("cart-left", group="mail")
def remind(message: Message, session: Session) -> None:
    """Remind a customer of a cart that was left."""
    reminded.append(message.body["customer"])


if __name__ == "__main__":
    with embedded.server(["shop"], durable=False) as server:
        migration.upgrade(server.url("shop"))
        engine = create_engine(server.url("shop"))
        outbox.bind(engine)
        later = dt.timedelta(hours=2)
        with Session(engine) as session, session.begin():
            outbox.send(session, "cart-left", {"customer": "alice"}, delay=later)
            bobs = outbox.send(session, "cart-left", {"customer": "bob"}, delay=later)
        drain(outbox)
        print(f"sent: {reminded}")
        outbox.operator.recall(bobs, by="shop", why="bob has ordered after all")
        advance(outbox, later)  # a test's way to wait
        drain(outbox)
        print(f"after 2 hours: {reminded}")
        engine.dispose()
