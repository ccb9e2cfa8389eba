"""Half message and business change commit or vanish together, in all four kinds of transaction."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, insert, text
from sqlalchemy.ext.asyncio import async_scoped_session, async_sessionmaker
from sqlalchemy.orm import scoped_session, sessionmaker
from sqlalchemy.util import greenlet_spawn

from outbox import Outbox, Settings
from tests.producer.bank import (
    KINDS,
    Databases,
    Kind,
    change,
    changes,
    drive,
    halves,
    leftovers,
    messages,
    opened,
    settle,
    write,
)
from tests.producer.conftest import SECOND_SCHEMA

each_kind = pytest.mark.parametrize("kind", KINDS)


def numbered(databases: Databases, kind: Kind) -> Outbox:
    """Make the outbox of this kind of transaction."""
    return Outbox(databases.engine_for(kind), settings=Settings())


def both_are(engine: Engine, *numbers: int) -> None:
    """Make sure that exactly these numbers are in the business table and, in order, in messages."""
    assert messages(engine) == list(numbers)
    assert changes(engine) == set(numbers)
    assert leftovers(engine) == 0


@each_kind
@pytest.mark.parametrize("end", ["rollback", "close", "invalidate"])
def test_anything_but_commit_keeps_neither(kind: Kind, end: str, url: str, engine: Engine) -> None:
    """A transaction that is rolled back, closed or invalidated leaves nothing, and the next one isn't tainted by it."""

    async def act(databases: Databases) -> None:
        outbox = numbered(databases, kind)
        async with opened(kind, databases) as carrier:
            await write(carrier, 1)
            outbox.send(carrier, "t", {"number": 1})
            await settle(getattr(carrier, end)())
            if end == "invalidate" and kind.endswith("Connection"):
                await settle(carrier.rollback())
            if end != "close" or kind.endswith("Session"):
                await write(carrier, 2)
                outbox.send(carrier, "t", {"number": 2})
                await settle(carrier.commit())

    drive(url, act)
    if end == "close" and kind.endswith("Connection"):
        both_are(engine)
    else:
        both_are(engine, 2)


@each_kind
def test_exception_in_a_begin_block_keeps_neither(kind: Kind, url: str, engine: Engine) -> None:
    """An exception that leaves `with x.begin()` takes the message with the change."""

    async def act(databases: Databases) -> None:
        outbox = numbered(databases, kind)
        async with opened(kind, databases) as carrier:

            async def work(number: int) -> None:
                await write(carrier, number)
                outbox.send(carrier, "t", {"number": number})
                if number == 1:
                    raise LookupError(number)

            for number in (1, 2):
                try:
                    if kind.startswith("Async"):
                        async with carrier.begin():
                            await work(number)
                    else:
                        with carrier.begin():
                            await work(number)
                except LookupError:
                    assert number == 1

    drive(url, act)
    both_are(engine, 2)


@each_kind
def test_message_without_a_change(kind: Kind, url: str, engine: Engine) -> None:
    """A transaction that does nothing but send is a transaction too: it writes its message, and only in its turn."""

    async def act(databases: Databases) -> None:
        outbox = numbered(databases, kind)
        async with opened(kind, databases) as carrier:
            outbox.send(carrier, "t", {"number": 1})
            await settle(carrier.commit())
            assert messages(databases.sync_engine) == [1]
            outbox.send(carrier, "t", {"number": 2})
            await settle(carrier.rollback())
            await settle(carrier.commit())
            assert messages(databases.sync_engine) == [1]
            outbox.send(carrier, "t", {"number": 3})
            await settle(carrier.commit())

    drive(url, act)
    assert messages(engine) == [1, 3]


@each_kind
def test_send_does_not_touch_the_database(kind: Kind, url: str, engine: Engine) -> None:
    """Until the commit nothing is written, not even into the transaction itself."""

    async def act(databases: Databases) -> None:
        async with opened(kind, databases) as carrier:
            await write(carrier, 1)
            numbered(databases, kind).send(carrier, "t", {"number": 1})
            rows = await settle(carrier.execute(text("SELECT count(*) FROM outbox.half_message")))
            assert rows.scalar_one() == 0
            await settle(carrier.commit())

    drive(url, act)
    both_are(engine, 1)


@each_kind
@pytest.mark.parametrize(
    ("end", "kept"), [("commit", (1, 2, 3)), ("rollback", (1, 3)), ("close", (1, 3)), ("the outer commit", (1, 2))]
)
def test_end_of_a_savepoint(kind: Kind, end: str, kept: tuple[int, ...], url: str, engine: Engine) -> None:
    """What was sent inside a savepoint vanishes or stays with it; one that is open goes with its transaction."""

    async def act(databases: Databases) -> None:
        outbox = numbered(databases, kind)
        async with opened(kind, databases) as carrier:

            async def change_and_send(number: int) -> None:
                await write(carrier, number)
                outbox.send(carrier, "t", {"number": number})

            await change_and_send(1)
            savepoint = await settle(carrier.begin_nested())
            await change_and_send(2)
            if end == "close":
                await greenlet_spawn(getattr(savepoint, "sync_transaction", savepoint).close)
            elif end != "the outer commit":
                await settle(getattr(savepoint, end)())
            if end != "the outer commit":
                await change_and_send(3)
            await settle(carrier.commit())

    drive(url, act)
    both_are(engine, *kept)


@each_kind
@pytest.mark.parametrize("failing", [True, False])
def test_factories(kind: Kind, failing: bool, url: str, engine: Engine) -> None:
    """`sessionmaker.begin()`, scoped sessions and `engine.begin()` carry messages like any other transaction."""

    async def act(databases: Databases) -> None:
        outbox = numbered(databases, kind)

        async def work(carrier: Any, number: int) -> None:
            outbox.send(carrier, "t", {"number": number})
            await settle(carrier.execute(insert(change).values(number=number)))
            if failing:
                raise LookupError

        try:
            match kind:
                case "Session":
                    with sessionmaker(databases.sync_engine).begin() as session:
                        await work(session, 1)
                case "Connection":
                    with databases.sync_engine.begin() as connection:
                        await work(connection, 1)
                case "AsyncSession":
                    async with async_sessionmaker(databases.async_engine).begin() as session_:
                        await work(session_, 1)
                case "AsyncConnection":
                    async with databases.async_engine.begin() as connection_:
                        await work(connection_, 1)
        except LookupError:
            assert failing
        scoped: Any = None
        if kind == "Session":
            scoped = scoped_session(sessionmaker(databases.sync_engine))
        elif kind == "AsyncSession":
            scoped = async_scoped_session(async_sessionmaker(databases.async_engine), scopefunc=lambda: 1)
        if scoped:
            outbox.send(scoped, "t", {"number": 2})
            await write(scoped, 2)
            await settle(scoped.rollback() if failing else scoped.commit())
            await settle(scoped.remove())

    drive(url, act)
    both_are(engine, *(() if failing else (1, 2) if kind.endswith("Session") else (1,)))


@pytest.mark.parametrize("kind", ["AsyncSession", "AsyncConnection"])
def test_run_sync_hands_over_the_same_transaction(kind: Kind, url: str, engine: Engine) -> None:
    """A message sent inside `run_sync` belongs to the async transaction around it."""

    async def act(databases: Databases) -> None:
        outbox = numbered(databases, kind)
        for number in (1, 2):
            async with opened(kind, databases) as carrier:

                def inside(sync_carrier: Any, number: int = number) -> None:
                    sync_carrier.execute(insert(change).values(number=number))
                    outbox.send(sync_carrier, "t", {"number": number})

                await carrier.run_sync(inside)
                await (carrier.commit() if number == 1 else carrier.rollback())

    drive(url, act)
    both_are(engine, 1)


@each_kind
def test_outboxes_of_several_schemas_share_a_transaction(kind: Kind, url: str, engine: Engine) -> None:
    """Each outbox writes into its own schema, all with the same commit."""

    async def act(databases: Databases) -> None:
        bind = databases.engine_for(kind)
        first, second = (
            Outbox(bind, settings=Settings()),
            Outbox(bind, group="two", settings=Settings(schema=SECOND_SCHEMA)),
        )
        async with opened(kind, databases) as carrier:
            for number in (1, 2, 3):
                await write(carrier, number)
                first.send(carrier, "t", {"number": number})
                second.send(carrier, "t", {"number": 10 * number})
                await settle(carrier.rollback() if number == 2 else carrier.commit())

    drive(url, act)
    assert messages(engine) == [1, 3]
    assert messages(engine, SECOND_SCHEMA) == [10, 30]
    assert {half.producer_group for half in halves(engine, SECOND_SCHEMA)} == {"two"}
