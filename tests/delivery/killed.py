"""A process that confirms, and stops after a round trip to a server, to be killed there."""

from __future__ import annotations

from functools import partial
from multiprocessing.connection import Connection as Pipe

from sqlalchemy import create_engine

from outbox import Outbox, Settings
from outbox.delivery.confirm_pass import confirm_once
from tests.compensate.killed import armed
from tests.compensate.killed import serve as serve_passes
from tests.delivery.support import tell


def _confirm(pipe: Pipe, url: str, consumers: list[str], after: int) -> None:
    engine, consumer = create_engine(url), create_engine(consumers[0])
    app = Outbox(engine)
    app.known_group("t", group="g", consumer=consumer)
    app.on_delivered("t")(tell)
    app.on_undeliverable("t")(tell)
    stops = armed(pipe, engine, consumer)
    with engine.connect() as connection:
        stops.arm(after)
        confirm_once(
            connection, Settings(confirm_grace=0.0), groups=app.groups_to_confirm(), callbacks=app.delivery_callbacks
        )
        stops.arm(0)
    pipe.send(("ended", stops.where))


serve = partial(serve_passes, work=_confirm)
