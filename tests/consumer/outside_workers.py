"""Processes that handle messages outside of transactions, and die or stand still at a step of the way."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as PipeConnection
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, NullPool, create_engine

from outbox import Message, Outbox, Settings
from outbox.consumer.outside.consumer import consumer_of
from outbox.consumer.outside.leased_queue import LeasedQueue

#: Messages of which a process handles this many at once.
CONCURRENCY = 4
LIMITS = Settings(retry_delays=(0.0,) * 5, max_starts=3)


class Effects:
    """What handlers did, in a file that outlives their process: a line for each begin."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, message: Message) -> None:
        """Note that a message was begun."""
        with self.path.open("a") as file:
            file.write(f"{message.body}\n")

    @property
    def gate(self) -> Path:
        """The file that opens a gate."""
        return self.path.with_suffix(".gate")

    def bodies(self) -> list[str]:
        """Return what was begun, as often as it was."""
        return self.path.read_text().split() if self.path.exists() else []


def die(*_: Any) -> None:
    """End the process without a trace."""
    os._exit(137)


def _before(name: str) -> None:
    setattr(LeasedQueue, name, die)


def _after(name: str) -> None:
    original: Callable[..., Any] = getattr(LeasedQueue, name)

    def then_die(*arguments: Any, **options: Any) -> None:
        original(*arguments, **options)
        die()

    setattr(LeasedQueue, name, then_die)


#: Where a process dies: after the lease's commit; with handlers running; with results that aren't written; inside the
#: transaction that writes them; and after its commit.
STEPS: dict[str, Callable[[], None]] = {
    "leased": lambda: _before("_accept"),
    "handling": lambda: None,
    "handled": lambda: _before("_update_of"),
    "writing": lambda: _after("_write"),
    "written": lambda: _before("_tell"),
}


def consume(engine: Engine, effects: Effects, step: str) -> None:
    """Consume all there is; ``bomb`` as the body, and the step "handling" with the body 5, end the process.

    With the step "gate", handlers wait at it.
    """
    app = Outbox(engine, settings=LIMITS)

    @app.consumer("t", group="g", transactional=False, concurrency=CONCURRENCY, ordered=False)
    def handle(message: Message) -> None:
        effects.add(message)
        if message.body == "bomb" or (step == "handling" and message.body == 5):
            die()
        while step == "gate" and not effects.gate.exists():
            time.sleep(0.01)

    consumer = consumer_of(app.subscriptions["t", "g"], LIMITS)

    def passes(connection: Connection) -> None:
        consumer.start(connection, connection)
        while consumer.consume_once(connection, connection):
            pass

    with engine.connect() as connection:
        passes(connection)


def _die_with(lifeline: PipeConnection) -> None:
    lifeline.poll(None)
    die()


def start(lifeline: PipeConnection, url: str, path: str, step: str) -> None:
    """Work as a process of its own, until it dies, or until the test that holds the lifeline has ended."""
    threading.Thread(target=_die_with, args=(lifeline,), daemon=True).start()
    STEPS.get(step, lambda: None)()
    consume(create_engine(url, poolclass=NullPool), Effects(Path(path)), step)
