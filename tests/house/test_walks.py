"""How many modules a reader has to open to follow a message, or an operator's act."""

from __future__ import annotations

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Settings
from outbox.consumer.consumer import Consumer
from outbox.dispatch.once import dispatch_once
from tests.house.walk import modules_of

MESSAGE, ACT = 15, 12


def test_a_message_passes_few_modules(engine: Engine) -> None:
    """From `Outbox.send` to the handler: a send and its COMMIT, one pass of dispatch, one of the consumer.

    The thread in which a worker calls the two passes is another story, which is not the message's.
    """
    outbox = Outbox(engine, settings=Settings())
    handled: list[object] = []

    @outbox.consumer("t", group="g")
    def handle(message: Message, _: Session) -> None:
        handled.append(message.body)

    consumer = Consumer(outbox.subscriptions["t", "g"], outbox.settings)
    with engine.connect() as connection:
        consumer.start(connection, connection)

        def pass_on() -> None:
            with Session(engine) as session, session.begin():
                outbox.send(session, "t", {"n": len(handled)}, key="k")
            dispatch_once(connection, outbox.settings)
            consumer.consume_once(connection, connection)

        for _ in range(3):  # the first dispatch in a database finds out where it is
            pass_on()
        passed = modules_of(pass_on)
    assert [body["n"] for body in handled if isinstance(body, dict)] == list(range(len(handled)))
    assert len(handled) >= 2
    print(len(passed), *passed, sep="\n")  # noqa: T201 - shown with -s
    assert len(passed) <= MESSAGE, passed
