"""Order per key: a message that fails holds back the later ones of its key, and of no other key.

It prints::

    while alice's first order fails: ['bob 1', 'bob 2']
    after its retry: ['bob 1', 'bob 2', 'alice 1', 'alice 2']
"""

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from outbox import Message, Outbox, embedded
from outbox.database import migration
from outbox.testing import drain, failing

outbox = Outbox(group="shop")
shipped: list[str] = []


@outbox.consumer("order-created", group="warehouse", ordered="key")
def ship(message: Message, session: Session) -> None:
    """Ship an order after the earlier ones of its customer."""
    shipped.append(f"{message.key} {message.body['order']}")


if __name__ == "__main__":
    with embedded.server(["shop"], durable=False) as server:
        migration.upgrade(server.url("shop"))
        engine = create_engine(server.url("shop"))
        outbox.bind(engine)
        for customer in ("alice", "bob"):
            for order in (1, 2):
                with Session(engine) as session, session.begin():
                    sent = outbox.send(session, "order-created", {"order": order}, key=customer)
                if (customer, order) == ("alice", 1):
                    with failing(outbox, "order-created", error=ConnectionError("no label printer")):
                        drain(outbox)
        drain(outbox)
        print(f"while alice's first order fails: {shipped}")
        drain(outbox, failed=True)
        print(f"after its retry: {shipped}")
        engine.dispose()
