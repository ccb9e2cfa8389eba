"""Handlers that leave something behind on the worker's connection, or keep their session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import Message
from tests.consumer.support import Bench, record


def by_sql(statement: str) -> Callable[[Session], object]:
    """Return an act that executes a statement."""
    return lambda session: session.execute(text(statement))


def unread(session: Session) -> None:
    """Leave most rows of a server-side cursor unread."""
    rows = session.connection().execute(
        text("SELECT generate_series(1, 100000)"), execution_options={"stream_results": True, "yield_per": 10}
    )
    assert rows.fetchone() is not None


def open_cursor(session: Session) -> None:
    """Leave a cursor of the driver open."""
    cursor: Any = session.connection().connection.cursor()
    cursor.execute("SELECT 1")


#: What a handler leaves behind after its effect.
LEFT: dict[str, Callable[[Session], object]] = {
    "a savepoint": lambda session: session.begin_nested(),
    "a savepoint by SQL": by_sql("SAVEPOINT mine"),
    "rows": unread,
    "a cursor": open_cursor,
    "a cursor with hold": by_sql("DECLARE mine CURSOR WITH HOLD FOR SELECT 1"),
    "a lock of the session": by_sql("SELECT pg_advisory_lock(4711)"),
    "a temporary table": by_sql("CREATE TEMPORARY TABLE IF NOT EXISTS mine (n int)"),
    "a search path": by_sql("SET search_path = public, pg_temp"),
    "a time zone": by_sql("SET TimeZone = 'Asia/Kathmandu'"),
    "another style of dates": by_sql("SET DateStyle = 'SQL, DMY'"),
}


# psycopg warns of a server-side cursor that is forgotten.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("left", LEFT)
def test_what_a_handler_leaves_behind_harms_nobody(bench: Bench, left: str, batch: int) -> None:
    """Its effect is kept, and the messages after it are handled once, on the same connection."""

    def handler(message: Message, session: Session) -> None:
        record(message, session)
        if message.body == 2:
            LEFT[left](session)

    consumer = bench.declare(handler, batch=batch)
    bench.send(1, 2, 3)
    bench.consume(consumer)
    bench.send(4)
    bench.consume(consumer)
    assert bench.statuses() == [("consumed", 1)] * 4
    assert bench.ledger() == ["1", "2", "3", "4"]


def test_a_session_is_of_no_use_after_its_message(bench: Bench) -> None:
    """What a handler does later with the session of an earlier message would go with another message's effect."""
    kept: list[Session] = []

    def handler(message: Message, session: Session) -> None:
        record(message, session)
        kept.append(session)
        if message.body == 2:
            record(message, kept[0])

    consumer = bench.declare(handler)
    ids = bench.send(1, 2, 3)
    bench.consume(consumer)
    assert bench.ledger() == ["1", "3"]
    assert UnboundExecutionError.__name__ in str(bench.inbox()[ids[1]].error)
    with pytest.raises(UnboundExecutionError):
        kept[-1].execute(text("SELECT 1"))


def test_an_async_session_is_of_no_use_after_its_message(bench: Bench) -> None:
    """A task that a handler leaves behind can't write into the transaction of a later message."""
    kept: list[AsyncSession] = []

    async def handler(message: Message, session: AsyncSession) -> None:
        await session.run_sync(lambda sync: record(message, sync))
        kept.append(session)
        if message.body == 2:
            await kept[0].execute(text("INSERT INTO ledger (body) VALUES ('late')"))

    consumer = bench.declare(handler)
    bench.send(1, 2, 3)

    async def consume() -> None:
        engine = create_async_engine(bench.consumer.url)
        async with engine.connect() as connection:
            await connection.run_sync(lambda sync: bench.consume_on(consumer, sync, sync))
        await engine.dispose()

    asyncio.run(consume())
    assert bench.ledger() == ["1", "3"]
    assert bench.statuses() == [("consumed", 1), ("failed", 1), ("consumed", 1)]
