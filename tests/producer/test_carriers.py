"""Every carrier, every end of a transaction: the message is there if and only if the business row is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

import pytest
from sqlalchemy import Engine

from outbox import Outbox
from outbox.errors import AlreadyCommitted, AlreadyRolledBack, HalfNotFound, InvalidMessage, TransactionRequired
from outbox.message.model import uuid7
from tests.producer.bank import changes, halves, idle_in_transaction, leftovers, messages, settle, terminate
from tests.producer.carriers import CARRIERS, RAW, send

every = pytest.mark.parametrize("name", CARRIERS)
every_raw = pytest.mark.parametrize("name", RAW)


def run(act: Coroutine[Any, Any, None]) -> None:
    """Run an async act to its end."""
    asyncio.run(asyncio.wait_for(act, 120))


@every
def test_commit_and_rollback(name: str, url: str, engine: Engine, outbox: Outbox) -> None:
    """What is committed has its message, what is rolled back has none, on one carrier in turn."""

    async def act() -> None:
        async with CARRIERS[name](url, False) as opened:
            for number in range(1, 7):
                await opened.write(number)
                await send(outbox, opened, number, key="k", tag="g", headers={"h": "ä"}, delay=number)
                await (opened.rollback() if number % 3 == 0 else opened.commit())

    run(act())
    assert (changes(engine), messages(engine)) == ({1, 2, 4, 5}, [1, 2, 4, 5])
    first = halves(engine)[0]
    assert (first.key, first.tag, first.headers, first.decided_by) == ("k", "g", {"h": "ä"}, "producer")
    assert abs((first.deliver_at - first.born_at).total_seconds() - 1) < 60
    assert leftovers(engine) == 0


@every
def test_savepoint(name: str, url: str, engine: Engine, outbox: Outbox) -> None:
    """A savepoint that is rolled back takes its row and its message, and no others."""

    async def act() -> None:
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

    run(act())
    assert (changes(engine), messages(engine)) == ({1, 3}, [1, 3])
    assert leftovers(engine) == 0


@every
def test_deferred_constraint(name: str, url: str, deferred: Engine, outbox: Outbox) -> None:
    """A COMMIT that fails by a constraint takes the messages along, and the carrier works on."""

    async def act() -> None:
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

    run(act())
    assert (changes(deferred), messages(deferred)) == ({2, 4}, [2, 4])
    assert leftovers(deferred) == 0


@every
def test_id_given_twice(name: str, url: str, engine: Engine, outbox: Outbox) -> None:
    """A repeated send with the same id fails, at the latest at the COMMIT, and its change isn't made again."""
    half_id = uuid7()

    async def act() -> None:
        async with CARRIERS[name](url, False) as opened:
            await opened.write(1)
            assert await send(outbox, opened, 1, id=half_id) == half_id
            await opened.commit()
            await opened.write(2)
            with pytest.raises(Exception, match=r"pk_(half|op)_message") as error:
                await send(outbox, opened, 2, id=half_id)
                await opened.commit()
            assert '"number"' not in str(error.value)
            await opened.rollback()

    run(act())
    assert (changes(engine), messages(engine)) == ({1}, [1])


@every
def test_connection_lost_at_commit(name: str, url: str, engine: Engine, outbox: Outbox) -> None:
    """A connection that the server ended before the COMMIT leaves neither."""

    async def act() -> None:
        async with CARRIERS[name](url, False) as opened:
            await opened.write(1)
            await send(outbox, opened, 1)
            terminate(engine, await opened.pid())
            with pytest.raises(Exception, match=r"."):
                await opened.commit()
            with contextlib.suppress(Exception):
                await opened.rollback()
        async with CARRIERS[name](url, False) as opened:
            await opened.write(2)
            await send(outbox, opened, 2)
            await opened.commit()

    run(act())
    assert (changes(engine), messages(engine)) == ({2}, [2])
    assert leftovers(engine) == 0


@every
def test_autocommit(name: str, url: str, engine: Engine, outbox: Outbox) -> None:
    """What would commit each statement by itself takes no message, and says so when it is asked to.

    A session whose class chooses its engine by code of its own (Flask-SQLAlchemy's) may yet come to use another one,
    and tells at the COMMIT.
    """

    async def act() -> None:
        async with CARRIERS[name](url, True) as opened:
            await opened.pid()
            with pytest.raises(TransactionRequired, match="would not commit together"):
                await send(outbox, opened, 1)
                assert name == "Flask-SQLAlchemy"
                await opened.commit()
            await opened.rollback()

    run(act())
    assert halves(engine) == []


@every
def test_another_database(name: str, url: str, new_engine: Any, outbox: Outbox) -> None:
    """A session or connection of another database is refused; its transaction goes on without the message."""
    other = new_engine()

    async def act() -> None:
        async with CARRIERS[name](other.url.render_as_string(hide_password=False), False) as opened:
            await opened.pid()
            with pytest.raises(TransactionRequired, match=f"{other.url.database!r}, but this Outbox is on 'producer'"):
                await send(outbox, opened, 1)
                assert name == "Flask-SQLAlchemy"
                await opened.commit()
            await opened.rollback()

    run(act())
    assert halves(other) == []


@every
def test_prepare_and_decide(name: str, url: str, engine: Engine, outbox: Outbox) -> None:
    """A half is prepared with one transaction and decided with another; a second decision fails it."""

    async def act() -> None:
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

    run(act())
    assert (changes(engine), messages(engine)) == ({1, 2, 3, 4}, [1])
    assert leftovers(engine) == 0


@every
def test_bad_message(name: str, url: str, engine: Engine, outbox: Outbox) -> None:
    """A message that can't be stored is refused by the call itself; the transaction goes on."""

    async def act() -> None:
        async with CARRIERS[name](url, False) as opened:
            await opened.write(1)
            with pytest.raises(InvalidMessage, match="may only have"):
                outbox.send(opened.carrier, "a b", {})
            await opened.commit()

    run(act())
    assert (changes(engine), messages(engine)) == ({1}, [])


@every_raw
def test_sequence_is_drawn_at_the_commit(name: str, url: str, engine: Engine, outbox: Outbox) -> None:
    """Of two raw transactions that send before one waits for the other's lock, the first to commit comes first."""

    async def act() -> None:
        async with CARRIERS[name](url, False) as first, CARRIERS[name](url, False) as second:
            await first.write(1)
            await send(outbox, first, 1)
            await second.write(2)
            await send(outbox, second, 2)
            await second.commit()
            await first.commit()

    run(act())
    assert messages(engine) == [2, 1]


@pytest.mark.parametrize("name", ["async psycopg", "asyncpg"])
def test_nothing_is_sent_before_it_is_awaited(name: str, url: str, engine: Engine, outbox: Outbox) -> None:
    """With a driver's async connection the call alone writes nothing."""

    async def act() -> None:
        async with CARRIERS[name](url, False) as opened:
            await opened.write(1)
            outbox.send(opened.carrier, "t", {"number": 9}).close()
            await opened.write(2)
            await send(outbox, opened, 2)
            await opened.commit()

    run(act())
    assert messages(engine) == [2]
