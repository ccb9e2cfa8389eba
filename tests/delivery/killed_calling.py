"""A process that parks, and tells the application, and stops after a round trip, to be killed there."""

from __future__ import annotations

from functools import partial
from multiprocessing.connection import Connection as Pipe

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from outbox import DeadLetter, Outbox, Resolution
from outbox.check.asker import Asker
from outbox.check.check_pass import check_once
from outbox.consumer.consumer import Consumer
from outbox.database.engines import EngineRunner
from outbox.dispatch.dispatch_pass import dispatch_once
from tests.compensate.killed import armed
from tests.compensate.killed import serve as serve_passes
from tests.delivery.support import refuse


def note(letter: DeadLetter, session: Session) -> None:
    """Write down what is parked; the same may be written twice."""
    session.connection().exec_driver_sql(
        "INSERT INTO told (message_id, consumer_group, status) VALUES (%s, %s, %s)",
        (letter.id, letter.group, letter.reason),
    )


def _park_and_tell(pipe: Pipe, url: str, consumers: list[str], after: int) -> None:
    producer, consumer = create_engine(url), create_engine(consumers[0])
    app = Outbox(consumer, group="bank")
    app.consumer("t", group="g", source=producer, retry_delays=())(refuse)
    app.on_parked("t")(note)
    parking, telling = (Consumer(each, app.settings) for each in app.subscriptions.values())
    stops = armed(pipe, consumer, producer)
    with consumer.connect() as connection, producer.connect() as source:
        stops.arm(after)
        parking.consume_once(connection, source)
        parking.consume_once(connection, source)
        dispatch_once(connection, app.settings)
        telling.consume_once(connection, connection)
        telling.consume_once(connection, connection)
        stops.arm(0)
    pipe.send(("ended", stops.where))


def _ask_and_tell(pipe: Pipe, url: str, _: list[str], after: int) -> None:
    engine = create_engine(url)
    app = Outbox(engine)
    app.checker("t", max_checks=1)(lambda orphan: Resolution.UNKNOWN)
    app.on_parked("t")(note)
    (telling,) = (Consumer(each, app.settings) for each in app.subscriptions.values())
    asker = Asker(lambda is_async: EngineRunner(engine), 1)
    stops = armed(pipe, engine)
    with engine.connect() as connection:
        stops.arm(after)
        check_once(connection, app.settings, app.checkers, asker)
        dispatch_once(connection, app.settings)
        telling.consume_once(connection, connection)
        telling.consume_once(connection, connection)
        stops.arm(0)
    pipe.send(("ended", stops.where))


serve = partial(serve_passes, work=_park_and_tell)
serve_halves = partial(serve_passes, work=_ask_and_tell)
