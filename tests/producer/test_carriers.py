"""Every carrier, every end of a transaction: the message is there if and only if the business row is."""

from __future__ import annotations

import contextlib
import json
from typing import Any
from uuid import UUID

import asyncpg
import psycopg
import psycopg2
import psycopg2.extras
import pytest
from sqlalchemy import Engine, create_engine, insert, make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session

from outbox import INJECTED, Outbox, Settings, testing
from outbox.database.dialect import url_of
from outbox.embedded import ServerLike
from outbox.errors import (
    AlreadyCommitted,
    AlreadyRolledBack,
    HalfNotFound,
    InvalidMessage,
    OutboxBusy,
    SchemaMissing,
    TransactionRequired,
)
from outbox.message.model import uuid7
from outbox.telemetry.events import MessagesSent
from outbox.telemetry.hooks import TelemetryEvent, add_hook
from outbox.worker.connections import WorkerDatabase
from tests.producer.bank import change, changes, halves, idle_in_transaction, leftovers, messages, settle, terminate
from tests.producer.carriers import CARRIERS, RAW, send
from tests.producer.proxy import Proxy

every = pytest.mark.parametrize("name", CARRIERS)
every_raw = pytest.mark.parametrize("name", RAW)


@every
async def test_commit_and_rollback(name: str, url: str, engine: Engine, outbox: Outbox) -> None:
    """What is committed has its message, what is rolled back has none, on one carrier in turn."""
    async with CARRIERS[name](url, False) as opened:
        for number in range(1, 7):
            await opened.write(number)
            await send(outbox, opened, number, key="k", tag="g", headers={"h": "ä"}, delay=number)
            await (opened.rollback() if number % 3 == 0 else opened.commit())
    assert (changes(engine), messages(engine)) == ({1, 2, 4, 5}, [1, 2, 4, 5])
    first = halves(engine)[0]
    assert (first.topic, first.key, first.tag, first.headers) == ("t", "k", "g", {"h": "ä"})
    assert (first.producer_group, first.content_type) == ("default", "application/json")
    assert (first.resolution, first.decided_by, first.waits) == ("commit", "producer", False)
    assert abs((first.deliver_at - first.born_at).total_seconds() - 1) < 60
    assert leftovers(engine) == 0


@every
async def test_savepoint(name: str, url: str, engine: Engine, outbox: Outbox) -> None:
    """A savepoint that is rolled back takes its row and its message, and no others."""
    async with CARRIERS[name](url, False) as opened:
        await opened.write(1)
        await send(outbox, opened, 1)
        undo = await opened.savepoint()
        await opened.write(2)
        await send(outbox, opened, 2)
        await settle(undo())
        await opened.write(3)
        await send(outbox, opened, 3)
        await opened.commit()
    assert (changes(engine), messages(engine)) == ({1, 3}, [1, 3])
    assert leftovers(engine) == 0


@every
async def test_deferred_constraint(name: str, url: str, deferred: Engine, outbox: Outbox) -> None:
    """A COMMIT that fails by a constraint takes the messages along, and the carrier works on."""
    async with CARRIERS[name](url, False) as opened:
        for number in (-1, 2, -3, 4):
            await opened.write(number)
            await send(outbox, opened, number)
            if number > 0:
                await opened.commit()
                continue
            with pytest.raises(Exception, match="negative"):
                await opened.commit()
            assert idle_in_transaction(deferred) == 0
            await opened.rollback()
    assert (changes(deferred), messages(deferred)) == ({2, 4}, [2, 4])
    assert leftovers(deferred) == 0


@every
async def test_hooks_are_told_after_the_commit(name: str, url: str, deferred: Engine, outbox: Outbox) -> None:
    """A hook hears of a message when others can see it, and never of one whose COMMIT fails.

    A driver's own connection tells nobody of its COMMIT: there, no hook hears of it.
    """
    heard: list[tuple[int, list[int]]] = []

    def hear(event: TelemetryEvent) -> None:
        if isinstance(event, MessagesSent):
            heard.append((len(event.message_ids), messages(deferred)))

    remove = add_hook(hear)
    try:
        async with CARRIERS[name](url, False) as opened:
            for number in (-1, 2, 3):
                await opened.write(number)
                await send(outbox, opened, number)
                with contextlib.nullcontext() if number > 0 else pytest.raises(Exception, match="negative"):
                    await opened.commit()
                if number < 0:
                    await opened.rollback()
    finally:
        remove()
    assert (changes(deferred), messages(deferred)) == ({2, 3}, [2, 3])
    assert heard == ([] if name in RAW else [(1, [2]), (1, [2, 3])])
    assert leftovers(deferred) == 0


@every
async def test_id_given_twice(name: str, url: str, engine: Engine, outbox: Outbox) -> None:
    """A repeated send with the same id fails, at the latest at the COMMIT, and its change isn't made again.

    In another transaction, and in the same one.
    """
    half_id = uuid7()
    async with CARRIERS[name](url, False) as opened:
        await opened.write(1)
        assert await send(outbox, opened, 1, id=half_id) == half_id
        await opened.commit()
        for again in ([half_id], [uuid7()] * 2):
            await opened.write(2)
            with pytest.raises(Exception, match=r"(half|op)_message\w*_pkey") as error:
                for each in again:
                    await send(outbox, opened, 2, id=each)
                await opened.commit()
            assert str(again[0]) in str(error.value) or "asyncpg" in name
            assert '"number"' not in str(error.value)
            await opened.rollback()
    assert (changes(engine), messages(engine)) == ({1}, [1])


@every
async def test_connection_lost_before_commit(name: str, url: str, engine: Engine, outbox: Outbox) -> None:
    """A connection that the server ended before the COMMIT leaves neither."""
    async with CARRIERS[name](url, False) as opened:
        await opened.write(1)
        await send(outbox, opened, 1)
        terminate(engine, await opened.pid())
        with pytest.raises(Exception, match=r".") as error:
            await opened.commit()
        assert not isinstance(error.value, DBAPIError) or error.value.connection_invalidated
        with contextlib.suppress(Exception):
            await opened.rollback()
    async with CARRIERS[name](url, False) as opened:
        await opened.write(2)
        await send(outbox, opened, 2)
        await opened.commit()
    assert (changes(engine), messages(engine)) == ({2}, [2])
    assert leftovers(engine) == 0


@every
@pytest.mark.parametrize("cut", ["before", "after"])
async def test_connection_lost_at_commit(
    cut: Any, name: str, url: str, proxy: Proxy, engine: Engine, outbox: Outbox
) -> None:
    """A COMMIT that the server never got leaves neither; one whose answer got lost leaves both."""
    through = make_url(url).set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
    async with CARRIERS[name](through, False) as opened:
        for number in (1, 2):
            await opened.write(number)
            await send(outbox, opened, number)
            proxy.cut = None if number == 1 else cut
            if number == 1:
                await opened.commit()
        with pytest.raises(Exception, match=r"."):
            await opened.commit()
        with contextlib.suppress(Exception):
            await opened.rollback()
    assert (changes(engine), messages(engine)) == (({1}, [1]) if cut == "before" else ({1, 2}, [1, 2]))
    assert leftovers(engine) == 0


@every
async def test_autocommit(name: str, url: str, engine: Engine, outbox: Outbox) -> None:
    """What would commit each statement by itself takes no message, and says so when it is asked to.

    A session whose class chooses its engine by code of its own (Flask-SQLAlchemy's) may yet come to use another one,
    and tells at the COMMIT.
    """
    async with CARRIERS[name](url, True) as opened:
        await opened.pid()
        with pytest.raises(TransactionRequired, match="would not commit together"):
            await send(outbox, opened, 1)
            assert name == "Flask-SQLAlchemy"
            await opened.commit()
        await opened.rollback()
    assert halves(engine) == []


@every
async def test_another_database(name: str, url: str, new_engine: Any, outbox: Outbox) -> None:
    """A session or connection of another database is refused; its transaction goes on without the message."""
    other = new_engine()
    async with CARRIERS[name](other.url.render_as_string(hide_password=False), False) as opened:
        await opened.pid()
        with pytest.raises(TransactionRequired, match=f"{other.url.database!r}, but this Outbox is on 'producer'"):
            await send(outbox, opened, 1)
            assert name == "Flask-SQLAlchemy"
            await opened.commit()
        await opened.rollback()
    assert halves(other) == []


@every
async def test_prepare_and_decide(name: str, url: str, engine: Engine, outbox: Outbox) -> None:
    """A half is prepared with one transaction and decided with another; a second decision fails it."""
    async with CARRIERS[name](url, False) as opened:
        ids = []
        for number in (1, 2):
            await opened.write(number)
            body = {"number": number}
            ids.append(await settle(outbox.prepare(opened.carrier, "t", body, immunity=3600)))
            await opened.commit()
        assert [half.waits for half in halves(engine)] == [True, True]
        await opened.write(3)
        await settle(outbox.commit(ids[0], opened.carrier))
        await opened.commit()
        await opened.write(4)
        await settle(outbox.rollback(ids[1], opened.carrier))
        await opened.commit()
        mistakes = ((ids[0], AlreadyCommitted), (ids[1], AlreadyRolledBack), (uuid7(), HalfNotFound))
        for half_id, error in mistakes:
            await opened.write(5)
            with pytest.raises(error):
                await settle(outbox.commit(half_id, opened.carrier))
                await opened.commit()
            await opened.rollback()
    assert (changes(engine), messages(engine)) == ({1, 2, 3, 4}, [1])
    assert leftovers(engine) == 0


@every
async def test_bad_message(name: str, url: str, engine: Engine, outbox: Outbox) -> None:
    """A message that can't be stored is refused by the call itself; the transaction goes on."""
    async with CARRIERS[name](url, False) as opened:
        await opened.write(1)
        with pytest.raises(InvalidMessage, match="may only have"):
            outbox.send(opened.carrier, "a b", {})
        await opened.commit()
    assert (changes(engine), messages(engine)) == ({1}, [])


@pytest.mark.parametrize("name", [name for name in CARRIERS if name not in RAW])
async def test_full_topic(name: str, url: str, engine: Engine) -> None:
    """What waits is counted through every driver: the COMMIT that finds the topic full writes nothing."""
    outbox = Outbox(engine, settings=Settings(max_undispatched=3, max_undecided=3))
    async with CARRIERS[name](url, False) as opened:
        for number in range(3):
            await opened.write(number)
            await send(Outbox(engine, settings=Settings()), opened, number)
        await opened.commit()
        await opened.write(4)
        await send(outbox, opened, 4)
        await settle(outbox.prepare(opened.carrier, "other", {"number": 4}))
        with pytest.raises(OutboxBusy):
            await opened.commit()
        await opened.rollback()
    assert (changes(engine), messages(engine)) == ({0, 1, 2}, [0, 1, 2])


@every_raw
async def test_sequence_is_drawn_at_the_commit(name: str, url: str, engine: Engine, outbox: Outbox) -> None:
    """Of two raw transactions that send before one waits for the other's lock, the first to commit comes first."""
    async with CARRIERS[name](url, False) as first, CARRIERS[name](url, False) as second:
        await first.write(1)
        await send(outbox, first, 1)
        await second.write(2)
        await send(outbox, second, 2)
        await second.commit()
        await first.commit()
    assert messages(engine) == [2, 1]


@pytest.mark.parametrize("name", ["async psycopg", "asyncpg"])
async def test_nothing_is_sent_before_it_is_awaited(name: str, url: str, engine: Engine, outbox: Outbox) -> None:
    """With a driver's async connection the call alone writes nothing."""
    async with CARRIERS[name](url, False) as opened:
        await opened.write(1)
        outbox.send(opened.carrier, "t", {"number": 9}).close()
        await opened.write(2)
        await send(outbox, opened, 2)
        await opened.commit()
    assert messages(engine) == [2]


async def test_drivers_set_up_in_other_ways(url: str, engine: Engine, outbox: Outbox) -> None:
    """Rows as dicts, placeholders as dollars, JSON by a codec of the application's: a send works, and a decision."""
    dsn = url.replace("postgresql+psycopg", "postgresql")

    def send_and_decide(connection: Any, number: int) -> None:
        outbox.send(connection, "t", {"number": number}, headers={"a": "b"})
        half_id = outbox.prepare(connection, "t", {"number": 100 + number}, headers={"a": "b"})
        connection.commit()
        outbox.commit(half_id, connection)
        connection.commit()

    with psycopg.connect(dsn, row_factory=psycopg.rows.dict_row, cursor_factory=psycopg.RawCursor) as dicts:
        send_and_decide(dicts, 1)
    dictionaries = psycopg2.connect(dsn, cursor_factory=psycopg2.extras.RealDictCursor)
    send_and_decide(dictionaries, 2)
    dictionaries.close()
    named = {"cursor_factory": psycopg2.extras.NamedTupleCursor}
    through = create_engine(engine.url.set(drivername="postgresql+psycopg2"), connect_args=named)
    with through.connect() as opened:
        send_and_decide(opened, 3)
    through.dispose()
    connection: Any = await asyncpg.connect(dsn)
    await connection.set_type_codec("jsonb", schema="pg_catalog", encoder=json.dumps, decoder=json.loads)
    async with connection.transaction():
        await outbox.send(connection, "t", {"number": 4}, headers={"a": "b"})
    async with connection.transaction():
        half_id = await outbox.prepare(connection, "t", {"number": 104}, headers={"a": "b"})
        await outbox.commit(half_id, connection)
    await connection.close()
    assert sorted(messages(engine)) == [1, 2, 3, 4, 101, 102, 103, 104]
    assert {tuple(half.headers.items()) for half in halves(engine)} == {(("a", "b"),)}


def test_raw_connection_in_an_explicit_transaction(url: str, engine: Engine, outbox: Outbox) -> None:
    """A connection in autocommit mode takes messages inside a transaction that was begun on it."""
    dsn = url.replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(dsn, autocommit=True) as connection:
        with connection.transaction():
            outbox.send(connection, "t", {"number": 1})
        with pytest.raises(TransactionRequired, match="begin a transaction first"):
            outbox.send(connection, "t", {"number": 9})
    assert messages(engine) == [1]


@pytest.mark.parametrize("name", CARRIERS)
async def test_database_without_the_tables(name: str, server: ServerLike) -> None:
    """Without the tables a send fails, at the latest at the COMMIT, with the command that makes them."""
    server.create_database("bare")
    engine = create_engine(server.url("bare"))
    outbox = Outbox(engine, settings=Settings())
    try:
        async with CARRIERS[name](server.url("bare"), False) as opened:
            await opened.pid()
            with pytest.raises(
                SchemaMissing, match=r"not in database 'bare'.*outbox db upgrade --url postgres"
            ) as error:
                await send(outbox, opened, 1)
                await opened.commit()
            assert str(engine.url.password) not in str(error.value)
            await opened.rollback()
    finally:
        engine.dispose()
        server.drop_database("bare")


# --- an Outbox that is bound to another driver ---------------------------------------------------------------


def test_decorators_on_psycopg2(engine: Engine) -> None:
    """Decorated functions get sessions of the engine's own driver; the fence of a two-phase one holds."""
    through = create_engine(engine.url.set(drivername="postgresql+psycopg2"))
    outbox = Outbox(through, settings=Settings())

    @outbox.transactional(topic="t")
    def place(number: int, *, session: Session = INJECTED) -> dict[str, int]:
        session.execute(insert(change).values(number=number))
        return {"number": number}

    @outbox.two_phase(topic="t", rollback_on=(ValueError,))
    def book(number: int, *, session: Session = INJECTED) -> None:
        session.execute(insert(change).values(number=number))
        if number < 0:
            raise ValueError

    place(1)
    book(2)
    with pytest.raises(ValueError):
        book(-3)
    outbox.commit(outbox_prepared(outbox, through))
    through.dispose()
    assert (changes(engine), messages(engine)) == ({1, 2}, [1, 2, 4])


def outbox_prepared(outbox: Outbox, engine: Engine) -> UUID:
    """Prepare a message about number 4 and return its id."""
    with Session(engine) as session, session.begin():
        return outbox.prepare(session, "t", {"number": 4})


async def test_decorators_on_asyncpg(url: str, engine: Engine) -> None:
    """The same for coroutines."""
    through = create_async_engine(url.replace("+psycopg", "+asyncpg"))
    outbox = Outbox(async_sessionmaker(through), settings=Settings())

    @outbox.transactional(topic="t")
    async def place(number: int, *, session: AsyncSession = INJECTED) -> dict[str, int]:
        await session.execute(insert(change).values(number=number))
        return {"number": number}

    @outbox.two_phase(topic="t", rollback_on=(ValueError,))
    async def book(number: int, *, session: AsyncSession = INJECTED) -> None:
        await session.execute(insert(change).values(number=number))
        if number < 0:
            raise ValueError

    await place(1)
    await book(2)
    with pytest.raises(ValueError):
        await book(-3)
    await through.dispose()
    assert (changes(engine), messages(engine)) == ({1, 2}, [1, 2])


def test_acts_and_passes_beside_another_driver(engine: Engine) -> None:
    """What is sent through psycopg2 is consumed by `drain`, and seen and undone by an operator."""
    through = create_engine(engine.url.set(drivername="postgresql+psycopg2"))
    outbox = Outbox(through, settings=Settings())
    heard: list[int] = []
    outbox.consumer("of-psycopg2", group="g")(lambda message, _: heard.append(message.body["number"]))
    outbox.declare_topic("of-psycopg2", 2)
    with Session(through) as session, session.begin():
        outbox.send(session, "of-psycopg2", {"number": 1})
    assert testing.drain(outbox).done == 1
    assert heard == [1]
    half_id = outbox_prepared(outbox, through)
    outbox.operator.rollback(half_id, by="ops", why="a test")
    through.dispose()
    assert [half.resolution for half in halves(engine) if half.id == half_id] == ["rollback"]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql://h/d", "postgresql+psycopg://h/d"),
        ("postgresql+asyncpg://u@h:1/d?ssl=require", "postgresql+psycopg://u@h:1/d?sslmode=require"),
        ("postgresql+asyncpg://h/d?prepared_statement_cache_size=0", "postgresql+psycopg://h/d"),
        ("postgresql+psycopg2://h/d?sslmode=disable", "postgresql+psycopg://h/d?sslmode=disable"),
        ("postgresql+psycopg://h/d", "postgresql+psycopg://h/d"),
    ],
)
def test_url_for_psycopg(url: str, expected: str) -> None:
    """What works on the tables reaches the same database with psycopg 3."""
    assert str(url_of(url)) == expected


async def test_worker_connects_beside_asyncpg(url: str) -> None:
    """A worker of an Outbox on asyncpg has connections of psycopg 3."""
    through = create_async_engine(url.replace("+psycopg", "+asyncpg"))
    database = WorkerDatabase(Outbox(through, settings=Settings()).engine)
    with database.connect() as connection:
        assert connection.dialect.driver == "psycopg"
    database.engine.dispose()
    await through.dispose()
