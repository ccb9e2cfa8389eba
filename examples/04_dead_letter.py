"""Retry and dead letter: what fails is tried again by a table of delays, then parked, and healed by an operator.

It prints::

    attempt 1, attempt 2, attempt 3
    parked: RuntimeError: the mail server is down
    attempt 4
    consumed after the operator's retry
"""

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from outbox import Message, Outbox, embedded
from outbox.database import migration
from outbox.testing import drain

outbox = Outbox(group="shop")
attempts: list[str] = []
mended = False


@outbox.consumer("order-created", group="mail", retry_delays=[10, 30])
def write_a_mail(message: Message, session: Session) -> None:
    """Fail until the mail server is back. By default there are 16 retries, from 10 seconds to 2 hours apart."""
    attempts.append(f"attempt {len(attempts) + 1}")
    if not mended:
        raise RuntimeError("the mail server is down")


if __name__ == "__main__":
    with embedded.server(["shop"], durable=False) as server:
        migration.upgrade(server.url("shop"))
        engine = create_engine(server.url("shop"))
        outbox.bind(engine)
        with Session(engine) as session, session.begin():
            sent = outbox.send(session, "order-created", {"customer": "alice"})
        drain(outbox, failed=True)  # retries don't wait for their time here
        print(", ".join(attempts))
        (inbox,) = outbox.operator.message(sent).inbox
        print(f"{inbox.status}: {(inbox.last_error or '').splitlines()[0]}")
        mended = True
        outbox.operator.retry(sent, group="mail", by="ann", why="the mail server is back")
        drain(outbox)
        print(attempts[-1])
        print(f"{outbox.operator.message(sent).inbox[0].status} after the operator's retry")
        engine.dispose()
