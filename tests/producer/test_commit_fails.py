"""COMMIT fails, on purpose, in every way: nothing of either stays, and session, connection and pool work on.

By each carrier, with what each of them can meet: in `test_carriers`.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, insert, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import Outbox, Settings
from outbox.message.model import uuid7
from tests.kit import at_once, wait_until
from tests.producer.bank import (
    KINDS,
    Kind,
    change,
    changes,
    drive,
    halves,
    idle_in_transaction,
    leftovers,
    messages,
    opened,
    pid_of,
    settle,
    terminate,
    waits_for_a_lock,
    write,
)


def nothing_hangs(engine: Engine) -> None:
    """Make sure that no transaction is left open and no op stands alone."""
    assert idle_in_transaction(engine) == 0
    assert leftovers(engine) == 0


def test_pooled_connection_that_died_meanwhile(engine: Engine, outbox: Outbox) -> None:
    """A transaction that only sends finds out at its commit that the pool's connection is dead; the next one works."""
    with engine.connect() as connection:
        pid = pid_of(connection)
    other = create_engine(engine.url)
    terminate(other, pid)
    other.dispose()
    with Session(engine) as session:
        outbox.send(session, "t", {"number": 1})
        with pytest.raises(OperationalError) as error:
            session.commit()
        assert error.value.connection_invalidated
        session.rollback()
        outbox.send(session, "t", {"number": 2})
        session.commit()
    assert messages(engine) == [2]


@pytest.mark.parametrize("kind", KINDS)
def test_statement_failed_before(kind: Kind, url: str, engine: Engine) -> None:
    """After a failed statement COMMIT raises instead of rolling back in silence, as PostgreSQL by itself would."""

    async def act(databases: Any) -> None:
        outbox = Outbox(databases.engine_for(kind), settings=Settings())
        async with opened(kind, databases) as carrier:
            await write(carrier, 1)
            outbox.send(carrier, "t", {"number": 1})
            with pytest.raises(SQLAlchemyError):
                await settle(carrier.execute(text("SELECT 1/0")))
            with pytest.raises(DBAPIError, match="aborted"):
                await settle(carrier.commit())
            await settle(carrier.rollback())
            await write(carrier, 2)
            outbox.send(carrier, "t", {"number": 2})
            await settle(carrier.commit())

    drive(url, act)
    assert (changes(engine), messages(engine)) == ({2}, [2])
    nothing_hangs(engine)


def test_serialization_failure(engine: Engine) -> None:
    """Of two SERIALIZABLE transactions that can't both commit, the loser leaves neither change nor message."""
    serializable = create_engine(engine.url, isolation_level="SERIALIZABLE")
    outbox = Outbox(serializable, settings=Settings())

    def work(session: Session, number: int) -> None:
        total = session.scalar(text("SELECT count(*) FROM change"))
        session.execute(insert(change).values(number=number + 10 * (total or 0)))
        outbox.send(session, "t", {"number": number})

    with Session(serializable) as first, Session(serializable) as second:
        work(first, 1)
        work(second, 2)
        first.commit()
        with pytest.raises(OperationalError, match="serialize"):
            second.commit()
        second.rollback()
        work(second, 3)
        second.commit()
    serializable.dispose()
    assert (changes(engine), messages(engine)) == ({1, 13}, [1, 3])
    nothing_hangs(engine)


def one_connection(engine: Engine) -> Engine:
    """Make an engine whose pool has one connection."""
    return create_engine(engine.url, pool_size=1, max_overflow=0, pool_timeout=5)


@pytest.mark.parametrize("way", ["session", "connection"])
def test_pool_after_failures(way: str, deferred: Engine) -> None:
    """A pool of one connection survives failed commits: the connection comes back, in no transaction, the same one."""
    small = one_connection(deferred)
    outbox = Outbox(small, settings=Settings())
    pids = set()
    for number in (-1, 1, -2, 2, -3, 3):
        try:
            if way == "session":
                with Session(small) as session, session.begin():
                    session.execute(insert(change).values(number=number))
                    outbox.send(session, "t", {"number": number})
            else:
                with small.begin() as connection:
                    connection.execute(insert(change).values(number=number))
                    outbox.send(connection, "t", {"number": number})
        except IntegrityError:
            assert number < 0
        with small.connect() as connection:
            assert connection.connection.driver_connection.info.transaction_status == 0  # type: ignore[union-attr]
            pids.add(pid_of(connection))
    small.dispose()
    assert len(pids) == 1
    assert messages(deferred) == [1, 2, 3]


def test_pool_is_not_warned_of_anything(deferred: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Failed commits leave the pool nothing to complain about."""
    small = one_connection(deferred)
    outbox = Outbox(small, settings=Settings())
    with caplog.at_level(logging.WARNING, logger="sqlalchemy"):
        for number in (-1, -2):
            with pytest.raises(IntegrityError), small.begin() as connection:
                connection.execute(insert(change).values(number=number))
                outbox.send(connection, "t", {"number": number})
    small.dispose()
    assert [record.getMessage() for record in caplog.records] == []


def test_failed_commit_must_be_rolled_back_first(deferred: Engine, outbox: Outbox) -> None:
    """A connection whose commit failed takes no message before its rollback, so that none can slip into nowhere."""
    with deferred.connect() as connection:
        connection.execute(insert(change).values(number=-1))
        outbox.send(connection, "t", {"number": -1})
        with pytest.raises(IntegrityError):
            connection.commit()
        with pytest.raises(SQLAlchemyError):
            outbox.send(connection, "t", {"number": 2})
        connection.rollback()
        outbox.send(connection, "t", {"number": 3})
        connection.commit()
    assert messages(deferred) == [3]


def test_listener_that_fails_in_commit(engine: Engine, outbox: Outbox) -> None:
    """Another listener's exception in the commit event fails the whole transaction, when it comes before the COMMIT."""
    own = create_engine(engine.url)
    calls: list[int] = []

    def listener(connection: Connection) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise LookupError

    event.listen(own, "commit", listener)
    first = Outbox(own, settings=Settings())
    for number in (1, 2):
        try:
            with own.begin() as connection:
                connection.execute(insert(change).values(number=number))
                first.send(connection, "t", {"number": number})
        except LookupError:
            assert number == 1
    own.dispose()
    assert (changes(engine), messages(engine)) == ({2}, [2])


def test_async_commit_cancelled(url: str, engine: Engine) -> None:
    """A task cancelled while its COMMIT waits leaves nothing, and its connection doesn't linger in the transaction."""
    half_id = uuid7()

    async def act() -> None:
        async_engine = create_async_engine(url, pool_size=1, max_overflow=0, pool_timeout=10)
        outbox = Outbox(async_engine, settings=Settings())
        pids: list[int] = []

        async def work() -> None:
            async with AsyncSession(async_engine) as session, session.begin():
                await write(session, 2)
                pids.append(await session.scalar(text("SELECT pg_backend_pid()")) or 0)
                outbox.send(session, "t", {"number": 2}, id=half_id)

        with engine.connect() as rival:
            rival.execute(
                text(
                    "INSERT INTO outbox.half_message (id, producer_group, topic, content_type, body)"
                    " VALUES (:id, 'g', 't', '', '')"
                ),
                {"id": half_id},
            )
            task = asyncio.create_task(work())
            await asyncio.to_thread(
                wait_until, lambda: task.done() or (pids and waits_for_a_lock(engine, pids[0])), "the COMMIT waits"
            )
            assert not task.done()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            rival.rollback()
        async with AsyncSession(async_engine) as session, session.begin():
            await write(session, 3)
            outbox.send(session, "t", {"number": 3})
        await async_engine.dispose()

    asyncio.run(asyncio.wait_for(act(), 60))
    wait_until(lambda: idle_in_transaction(engine) == 0, "no connection is left in a transaction")
    assert (changes(engine), messages(engine)) == ({3}, [3])


def test_values_stay_out_of_the_error(deferred: Engine, outbox: Outbox) -> None:
    """The error of a failed commit doesn't carry the message's body into logs."""
    with pytest.raises(IntegrityError) as error, deferred.begin() as connection:
        connection.execute(insert(change).values(number=-1))
        outbox.send(connection, "t", {"number": -1, "card": "4111-1111"})
    assert "4111" not in str(error.value)


def test_error_in_another_thread_changes_nothing_here(deferred: Engine, outbox: Outbox) -> None:
    """Threads that fail and threads that don't, on one engine, keep their transactions apart."""

    def work(numbers: range) -> None:
        for number in numbers:
            try:
                with Session(deferred) as session, session.begin():
                    session.execute(insert(change).values(number=number))
                    outbox.send(session, "t", {"number": number})
            except IntegrityError:
                if number >= 0:
                    raise

    fine = [range(200, 220), range(400, 420)]
    at_once(*(partial(work, numbers) for numbers in (*fine, range(-120, -100), range(-320, -300))))
    expected = {number for numbers in fine for number in numbers}
    assert (changes(deferred), set(messages(deferred))) == (expected, expected)
    assert len(halves(deferred)) == 40
