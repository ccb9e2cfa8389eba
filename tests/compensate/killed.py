"""A process that rolls back, and stops after a round trip to a server, to be killed there."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection as Pipe

from sqlalchemy import Engine, create_engine

from outbox import Outbox, Settings
from outbox.compensate.compensate_pass import compensate_once
from outbox.database.engines import EngineRunner
from tests.check.killed import Stops
from tests.compensate.support import give_back

Order = tuple[str, list[str], int]


def serve(pipe: Pipe, work: Callable[[Pipe, str, list[str], int], None] | None = None) -> None:
    """Make a pass in a process of its own each time the parent says where, and after how many round trips to stop.

    ``work`` makes the pass, by default one of compensations.
    """
    while True:
        url, consumers, after = pipe.recv()
        if (pid := os.fork()) == 0:
            (work or _work)(pipe, url, consumers, after)
            os._exit(0)
        pipe.recv()  # until then its number belongs to it, dead or not: the parent may kill it
        os.waitpid(pid, 0)
        pipe.send(("gone", "0"))


def _work(pipe: Pipe, url: str, consumers: list[str], after: int) -> None:
    engine, *others = (create_engine(each) for each in (url, *consumers))
    app = Outbox(engine)
    app.compensation("t", consumers=others)(give_back)
    stops = armed(pipe, engine, *others)
    with engine.connect() as connection:
        stops.arm(after)
        compensate_once(
            connection, Settings(), compensations=app.compensations, new_runner=lambda is_async: EngineRunner(engine)
        )
        stops.arm(0)
    pipe.send(("ended", stops.where))


def armed(pipe: Pipe, engine: Engine, *others: Engine) -> Stops:
    """Return what counts the round trips of this process, when its engines have been used before."""
    stops = Stops(pipe)
    stops.where = str(os.getpid())
    with ExitStack() as stack:
        # What SQLAlchemy asks on the first connection of an engine isn't part of what is tested.
        warm = [stack.enter_context(each.connect()) for each in (engine, engine, *others)]
        for connection in warm:
            connection.exec_driver_sql("SELECT 1")
    return stops
