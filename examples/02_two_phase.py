"""Two phases: the outcome lies elsewhere, the process dies before it decides, and a checker finds out.

It prints::

    the provider was paid, and then the process died: payment-made (prepared) body={'order': 7}
    asked about an order that was paid: payment-made body={'order': 7}
"""

from contextlib import suppress

from sqlalchemy import create_engine

from outbox import Orphan, Outbox, Resolution, embedded
from outbox.database import migration
from outbox.testing import check, sent_messages

outbox = Outbox(group="shop")
paid: set[int] = set()  # stands for the payment provider's books


def was_paid(orphan: Orphan) -> Resolution:
    """Say what became of a half message that nothing has decided; a worker asks after 6 seconds."""
    return Resolution.COMMIT if orphan.body["order"] in paid else Resolution.ROLLBACK


@outbox.two_phase(topic="payment-made", fenced=False, check=was_paid)
def pay(order: int) -> None:
    """Have the provider take the money. Before it is called, the half message is committed, invisible to consumers."""
    paid.add(order)
    raise ConnectionError("the provider's answer is lost")  # a SIGKILL here leaves the same behind


if __name__ == "__main__":
    with embedded.server(["shop"], durable=False) as server:
        migration.upgrade(server.url("shop"))
        engine = create_engine(server.url("shop"))
        outbox.bind(engine)
        with suppress(ConnectionError):
            pay(7)
        print(f"the provider was paid, and then the process died: {sent_messages(outbox)[0]}")
        check(outbox)  # what a worker does by itself
        print(f"asked about an order that was paid: {sent_messages(outbox)[0]}")
        engine.dispose()
