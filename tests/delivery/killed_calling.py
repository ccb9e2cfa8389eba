"""A process that calls the application for what is parked, and stops after a round trip, to be killed there."""

from __future__ import annotations

from functools import partial
from multiprocessing.connection import Connection as Pipe

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from outbox import DeadLetter, Outbox
from outbox.dead_letter.announce_pass import announce_messages_once
from tests.compensate.killed import armed
from tests.compensate.killed import serve as serve_passes


def note(letter: DeadLetter, session: Session) -> None:
    """Write down what is parked; the same may be written twice."""
    session.connection().exec_driver_sql(
        "INSERT INTO told (message_id, consumer_group, status) VALUES (%s, %s, %s)",
        (letter.id, letter.group, letter.reason),
    )


def _announce(pipe: Pipe, url: str, consumers: list[str], after: int) -> None:
    producer, consumer = create_engine(url), create_engine(consumers[0])
    app = Outbox(consumer)
    app.consumer("t", group="g", source=producer)(lambda message, session: None)
    app.on_parked("t")(note)
    stops = armed(pipe, consumer, producer)
    with consumer.connect() as connection, producer.connect() as source:
        stops.arm(after)
        announce_messages_once(connection, source, app.settings, app.parked_callbacks["t"], app.subscriptions["t", "g"])
        stops.arm(0)
    pipe.send(("ended", stops.where))


serve = partial(serve_passes, work=_announce)
