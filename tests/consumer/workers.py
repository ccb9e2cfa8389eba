"""What the tests run as processes of their own, to kill them."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection as PipeConnection
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, NullPool, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from outbox import Breaker, Message, Outbox, Settings
from outbox.consumer.consumer import Consumer
from outbox.dispatch.once import dispatch_once, newest_sends, resend
from outbox.message.model import Counts
from tests.consumer.support import LEDGER

LIMITS = Settings(retry_delays=(0.0,) * 5, read_ahead=20, max_claims=1_000)
CRASHING = Settings(retry_delays=(0.0,) * 5, max_claims=3)
CREDIT = text("UPDATE account SET balance = balance + 1 WHERE key = :key")


def credit(message: Message, session: Session) -> None:
    """Write into the ledger and credit an account; fail now and then."""
    session.execute(LEDGER, {"id": message.id, "body": str(message.body), "attempt": message.attempt})
    session.execute(CREDIT, {"key": message.key})
    if random.random() < 0.02:  # noqa: S311
        raise RuntimeError("bad luck")


def stumble(message: Message, session: Session) -> None:
    """Write into the ledger; fail often."""
    session.execute(LEDGER, {"id": message.id, "body": str(message.body), "attempt": message.attempt})
    if random.random() < 0.1:  # noqa: S311
        raise RuntimeError("bad luck")


def crash(message: Message, session: Session) -> None:
    """End the process, without a trace, for the message `bomb`; for `late bomb`, at its retry."""
    session.execute(LEDGER, {"id": message.id, "body": str(message.body), "attempt": message.attempt})
    if message.body == "bomb" or (message.body == "late bomb" and message.attempt > 1):
        os._exit(137)
    if message.body == "late bomb":
        raise RuntimeError("not yet")


def hang(message: Message, session: Session) -> None:
    """Change something, tell by a file that it is done, and wait to be killed."""
    session.execute(LEDGER, {"id": message.id, "body": str(message.body), "attempt": message.attempt})
    Path(message.headers["file"]).touch()
    threading.Event().wait()


def depend(message: Message, session: Session) -> None:
    """Write into the ledger, if what it needs is up."""
    if session.scalar(text("SELECT down FROM dependency")):
        raise ConnectionError("the provider is down")
    session.execute(LEDGER, {"id": message.id, "body": str(message.body), "attempt": message.attempt})


HANDLERS: Mapping[str, Callable[..., Any]] = {
    "money": credit,
    "keys": stumble,
    "crash": crash,
    "ordered": crash,
    "block": crash,
    "hang": hang,
    "limited": depend,
    "broken": depend,
}
OPTIONS: Mapping[str, dict[str, Any]] = {
    "ordered": {"ordered": True},
    "keys": {"ordered": "key", "on_exhausted": "block"},
    "block": {"ordered": "key", "on_exhausted": "block"},
    "limited": {"rate": "60/s"},
    "broken": {"breaker": Breaker(5, 60, 0.2)},
}


def subscription(engine: Engine, mode: str, seed: int) -> Consumer:
    """Return the consumer of a mode."""
    settings = LIMITS if mode in {"money", "keys"} else CRASHING
    app = Outbox(engine, settings=settings)
    app.consumer("t", group="g", batch=1 + seed % 3 * 4, **OPTIONS.get(mode, {}))(HANDLERS[mode])
    return Consumer(app.subscriptions["t", "g"], settings)


def passes(consumer: Consumer, connection: Connection, source: Connection, mode: str) -> Counts:
    """Run every pass once; return what they did."""
    settings = consumer._settings
    counts = dispatch_once(source, settings, limit=random.randint(1, 30))  # noqa: S311
    if mode == "money" and counts and random.random() < 0.5:  # noqa: S311
        with source.begin():
            sql = "SELECT half_id FROM outbox.message ORDER BY random() LIMIT 3"
            sends = newest_sends(source, settings, list(source.execute(text(sql)).scalars()))
            resend(source, settings, sends, actor="me", reason="test")
    counts += consumer.consume_once(connection, source)
    return counts + consumer.retry_once(connection, source)


def work(mode: str, producer_url: str, consumer_url: str, seed: int) -> None:
    """Work until the process ends; a connection that was lost is replaced."""
    random.seed(seed)
    producer = create_engine(producer_url, poolclass=NullPool)
    consumer_engine = create_engine(consumer_url, poolclass=NullPool)
    consumer = subscription(consumer_engine, mode, seed)
    idle = threading.Event()
    while True:
        try:
            with consumer_engine.connect() as connection, producer.connect() as source:
                consumer.start(connection, source)
                while True:
                    if not passes(consumer, connection, source, mode):
                        idle.wait(0.005)  # leave the processor to the others
        except DBAPIError as error:
            if not error.connection_invalidated:
                raise


def start(lifeline: PipeConnection, mode: str, producer_url: str, consumer_url: str, seed: int) -> None:
    """Work as a process of its own, until it is killed, or until the test that holds the lifeline has ended."""
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    work(mode, producer_url, consumer_url, seed)


def _end_with(lifeline: PipeConnection) -> None:
    lifeline.poll(None)
    os._exit(0)
