"""A worker of one schedule, as a process that is killed."""

from __future__ import annotations

import datetime as dt
from multiprocessing.connection import Connection as Pipe

from sqlalchemy import create_engine

from outbox import Outbox
from outbox.worker import Worker

#: How often it ticks (seconds).
EVERY = 0.05


def tick(at: dt.datetime) -> dict[str, float]:
    """Return the time."""
    return {"at": at.timestamp()}


def tick_on(pipe: Pipe) -> None:
    """Send a message at each time, those that were missed too, to the database that comes by a pipe, until killed."""
    outbox = Outbox(create_engine(pipe.recv()))
    outbox.every(EVERY, topic="tick", missed="all")(tick)
    Worker(outbox, roles=["schedule"]).start()
    pipe.recv()
