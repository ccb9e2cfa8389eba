"""What the tests run as processes of their own, to kill them."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection as PipeConnection
from pathlib import Path
from typing import Any, NoReturn

import psycopg
from sqlalchemy import Connection, Engine, NullPool, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import Breaker, Message, Outbox, Settings
from outbox.consumer.consumer import Consumer
from outbox.dispatch.dispatch_pass import dispatch_once, newest_sends, resend
from outbox.errors import LeaseEnded
from outbox.leases import LeasedGroup, LeasedMessage
from outbox.message.model import Counts
from outbox.worker import Worker
from tests.kit.bench import LEDGER, record

LIMITS = Settings(retry_delays=(0.0,) * 5, read_ahead=20, max_starts=1_000)
CRASHING = Settings(retry_delays=(0.0,) * 5, max_starts=3)
WRITE = "INSERT INTO ledger (message_id, body, attempt) VALUES (%s, %s, %s)"
CREDIT = text("UPDATE account SET balance = balance + 1 WHERE key = :key")


def credit(message: Message, session: Session) -> None:
    """Write into the ledger and credit an account; fail now and then."""
    session.execute(LEDGER, {"id": message.id, "body": str(message.body), "attempt": message.attempt})
    session.execute(CREDIT, {"key": message.key})
    if random.random() < 0.02:  # noqa: S311
        raise RuntimeError("bad luck")


def credit_by_connection(message: Message, connection: Connection) -> None:
    """Do the same with a connection."""
    connection.execute(LEDGER, {"id": message.id, "body": str(message.body), "attempt": message.attempt})
    connection.execute(CREDIT, {"key": message.key})
    if random.random() < 0.02:  # noqa: S311
        raise RuntimeError("bad luck")


def credit_by_cursor(message: Message, cursor: psycopg.Cursor) -> None:
    """Do the same with a cursor, and fail at a statement."""
    cursor.execute(WRITE, (message.id, str(message.body), message.attempt))
    cursor.execute("UPDATE account SET balance = balance + 1 WHERE key = %s", (message.key,))
    if random.random() < 0.02:  # noqa: S311
        cursor.execute("SELECT 1 / %s", (0,))


async def credit_by_async_cursor(message: Message, cursor: psycopg.AsyncCursor) -> None:
    """Do the same in a task."""
    await cursor.execute(WRITE, (message.id, str(message.body), message.attempt))
    await cursor.execute("UPDATE account SET balance = balance + 1 WHERE key = %s", (message.key,))
    if random.random() < 0.02:  # noqa: S311
        await cursor.execute("SELECT 1 / %s", (0,))


async def credit_by_async_connection(message: Message, connection: AsyncConnection) -> None:
    """Do the same in a task."""
    await connection.execute(LEDGER, {"id": message.id, "body": str(message.body), "attempt": message.attempt})
    await connection.execute(CREDIT, {"key": message.key})
    if random.random() < 0.02:  # noqa: S311
        raise RuntimeError("bad luck")


async def credit_by_async_session(message: Message, session: AsyncSession) -> None:
    """Do the same in a task."""
    await session.execute(LEDGER, {"id": message.id, "body": str(message.body), "attempt": message.attempt})
    await session.execute(CREDIT, {"key": message.key})
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
    "connection": credit_by_connection,
    "cursor": credit_by_cursor,
    "pipeline": credit_by_cursor,
    "async session": credit_by_async_session,
    "async connection": credit_by_async_connection,
    "async pipeline": credit_by_async_cursor,
    "keys": stumble,
    "crash": crash,
    "ordered": crash,
    "block": crash,
    "hang": hang,
    "limited": depend,
    "broken": depend,
}
#: Those that credit accounts, beside the one with a session.
CREDITING = ("connection", "cursor", "pipeline", "async session", "async connection", "async pipeline")
OPTIONS: Mapping[str, dict[str, Any]] = {
    "pipeline": {"pipeline": True},
    "async pipeline": {"pipeline": True},
    "ordered": {"ordered": True},
    "keys": {"ordered": "key", "on_exhausted": "block"},
    "block": {"ordered": "key", "on_exhausted": "block"},
    "limited": {"rate": "60/s"},
    "broken": {"breaker": Breaker(5, 60, 0.2)},
}


#: Those without a handler: messages are taken, in any order or by their keys.
TAKING: Mapping[str, dict[str, Any]] = {"taken": {}, "taken by key": {"ordered": "key", "on_exhausted": "block"}}


def take(mode: str, producer: Engine, consumer_engine: Engine) -> NoReturn:
    """Dispatch, and take and credit messages: now and then one fails, or is left until its lease ends."""
    app = Outbox(consumer_engine, settings=LIMITS)
    group: LeasedGroup[Any] = app.leased("t", group="g", source=producer, **TAKING[mode])
    idle = threading.Event()
    while True:
        with producer.connect() as source:
            dispatch_once(source, LIMITS, limit=random.randint(1, 30))  # noqa: S311
        taken = group.take(random.randint(1, 8), invisible=1.0)  # noqa: S311
        stopped: set[str | None] = set()
        for each in taken:
            # What comes after one that isn't done isn't done either, of its key.
            waits = each.message.key in stopped and mode != "taken"
            if waits or random.random() < 0.02 or not _credit_taken(consumer_engine, each):  # noqa: S311
                stopped.add(each.message.key)
        if not taken:
            idle.wait(0.005)


def _credit_taken(engine: Engine, taken: LeasedMessage[Any]) -> bool:
    try:
        with Session(engine) as session:
            try:
                credit(taken.message, session)
            except RuntimeError as error:
                session.rollback()
                taken.fail(str(error))
                return False
            taken.acknowledge(session)
            session.commit()
    except LeaseEnded:  # too slow: it is another one's by now
        return False
    return True


def subscription(engine: Engine, mode: str, seed: int) -> Consumer:
    """Return the consumer of a mode."""
    settings = LIMITS if mode in {"money", "keys", "limited", "broken", *CREDITING} else CRASHING
    app = Outbox(engine, settings=settings)
    app.consumer("t", group="g", batch=1 + seed % 3 * 4, **OPTIONS.get(mode, {}))(HANDLERS[mode])
    return Consumer(app.subscriptions["t", "g"], settings)


def passes(consumer: Consumer, connection: Connection, source: Connection, mode: str) -> Counts:
    """Run every pass once; return what they did."""
    settings = consumer._settings
    counts = dispatch_once(source, settings, limit=random.randint(1, 30))  # noqa: S311
    if mode in {"money", *CREDITING} and counts and random.random() < 0.5:  # noqa: S311
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
    consumer = subscription(consumer_engine, mode, seed) if mode not in TAKING else None
    while True:
        try:
            if consumer is None:
                take(mode, producer, consumer_engine)
            elif consumer.subscription.is_async:
                asyncio.run(_on_loop(consumer, producer_url, consumer_url, mode))
            else:
                with consumer_engine.connect() as connection, producer.connect() as source:
                    _pass_on(consumer, connection, source, mode)
        except DBAPIError as error:
            if not error.connection_invalidated:
                raise


def _pass_on(consumer: Consumer, connection: Connection, source: Connection, mode: str) -> NoReturn:
    idle = threading.Event()
    consumer.start(connection, source)
    while True:
        if not passes(consumer, connection, source, mode):
            idle.wait(0.005)  # leave the processor to the others


async def _on_loop(consumer: Consumer, producer_url: str, consumer_url: str, mode: str) -> None:
    producer, consumer_engine = (create_async_engine(url, poolclass=NullPool) for url in (producer_url, consumer_url))
    async with consumer_engine.connect() as connection, producer.connect() as source:
        assert source.sync_connection is not None
        await connection.run_sync(partial(_pass_on, consumer), source.sync_connection, mode)


def start(lifeline: PipeConnection, mode: str, producer_url: str, consumer_url: str, seed: int) -> None:
    """Work as a process of its own, until it is killed, or until the test that holds the lifeline has ended."""
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    work(mode, producer_url, consumer_url, seed)


def _end_with(lifeline: PipeConnection) -> None:
    lifeline.poll(None)
    os._exit(0)


def read_all(pipe: PipeConnection) -> None:
    """Serve group `g` of topic `t` from the databases that come by a pipe, until the process is killed."""
    head, sources = pipe.recv()
    outbox = Outbox(create_engine(head))
    outbox.consumer("t", group="g", source=sources, batch=5, threads=2)(record)
    Worker(outbox).start()
    pipe.recv()
