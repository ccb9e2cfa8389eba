"""A carrier must lead to the database of its Outbox: not to another one, whatever that is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, insert, make_url
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from outbox import Outbox, Settings, embedded
from outbox.database import migration
from outbox.database.identity import OwnDatabase
from outbox.errors import TransactionRequired
from tests.producer.bank import change, changes, create_business_tables, halves, messages, settle
from tests.producer.carriers import CARRIERS, send
from tests.producer.proxy import Proxy


@pytest.fixture(scope="module")
def twin() -> Iterator[str]:
    """The URL of a database on another server, of the same name as the test's."""
    with embedded.Server(durable=False) as server:
        server.create_database("producer")
        url = server.url("producer")
        migration.upgrade(url)
        engine = create_engine(url)
        create_business_tables(engine)
        engine.dispose()
        yield url


@pytest.mark.parametrize("name", CARRIERS)
async def test_namesake(name: str, twin: str, outbox: Outbox) -> None:
    """A database of the same name on another server is refused, at the COMMIT at the latest, which writes nothing."""
    other = create_engine(twin)
    async with CARRIERS[name](twin, False) as opened:
        await opened.write(1)
        with pytest.raises(TransactionRequired, match=r"'producer' of another server than .*/producer\)"):
            await send(outbox, opened, 1)
            await opened.commit()
        await opened.rollback()
    assert (changes(other), halves(other)) == (set(), [])
    other.dispose()


@pytest.mark.parametrize("name", CARRIERS)
@pytest.mark.parametrize("driver", ["psycopg2", "asyncpg"])
async def test_same_database_by_another_way(
    driver: str, name: str, url: str, proxy: Proxy, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a pooler the database is the Outbox's own, which is found out once, whatever the Outbox is bound to."""
    through = make_url(url).set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
    own = make_url(url).set(drivername=f"postgresql+{driver}", host="localhost")
    bound: Any = create_async_engine(own) if driver == "asyncpg" else create_engine(own)
    outbox = Outbox(bound, settings=Settings())
    asked = []
    ask = OwnDatabase._ask

    def count(own: OwnDatabase) -> Any:
        asked.append(own)
        return ask(own)

    monkeypatch.setattr(OwnDatabase, "_ask", count)
    for number in (1, 2, 3):
        async with CARRIERS[name](through, False) as opened:
            await opened.write(number)
            await send(outbox, opened, number)
            await opened.commit()
    await settle(bound.dispose())
    assert (changes(engine), messages(engine)) == ({1, 2, 3}, [1, 2, 3])
    assert len(asked) == 1


def test_outbox_whose_database_is_away(url: str, proxy: Proxy, engine: Engine) -> None:
    """Without an answer of its own database, an Outbox takes no message of an address that it doesn't know."""
    away = create_engine(make_url(url).set(host="localhost", port=1))
    outbox = Outbox(away, settings=Settings())
    with Session(engine) as session:
        session.execute(insert(change).values(number=1))
        outbox.send(session, "t", {"number": 1})
        with pytest.raises(Exception, match="refused"):
            session.commit()
    assert (changes(engine), messages(engine)) == (set(), [])
    away.dispose()


def test_engine_whose_url_does_not_say(engine: Engine, outbox: Outbox, new_engine: Callable[[], Engine]) -> None:
    """An engine that connects by a function of its own is known by its driver's connection."""
    dsn = new_engine().url.set(drivername="postgresql").render_as_string(hide_password=False)
    other = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn))
    with Session(other) as session:
        outbox.send(session, "t", {"number": 1})
        with pytest.raises(TransactionRequired, match="but this Outbox is on 'producer'"):
            session.commit()
    assert halves(other) == []
    other.dispose()
