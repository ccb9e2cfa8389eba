"""One database with business tables for all tests of this folder, emptied before each: cloning one costs a second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from outbox import Outbox, Settings
from outbox.database import migration
from outbox.embedded import ServerLike
from tests.kit import Tables, empty
from tests.producer import bank
from tests.producer.caller import Caller
from tests.producer.proxy import Proxy

SECOND_SCHEMA = "second"
#: What `npm install --prefix tests/node` brings.
NODE = Path(__file__).parents[1] / "node" / "node_modules"

_TABLES = [
    *(f"outbox.{table}" for table in ("half_message", "half_check", "half_error", "op_message", "message")),
    "outbox.producer_process",
    *(f"{SECOND_SCHEMA}.{table}" for table in ("half_message", "half_check", "op_message")),
    "change",
    "account",
]


@pytest.fixture(scope="session")
def _database_url(server: ServerLike) -> str:
    return new_database(server)


def new_database(server: ServerLike) -> str:
    """Create the database of this folder on a server; return its URL."""
    server.create_database("producer")
    url = server.url("producer")
    migration.upgrade(url)
    migration.upgrade(url, schema=SECOND_SCHEMA)
    engine = create_engine(url)
    bank.create_business_tables(engine)
    engine.dispose()
    return url


@pytest.fixture
def url(_database_url: str) -> str:
    """The URL of the emptied database."""
    engine = create_engine(_database_url)
    with engine.begin() as connection:
        empty(connection, *_TABLES)
    engine.dispose()
    return _database_url


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    """An engine on the emptied database."""
    engine = create_engine(url)
    yield engine
    engine.dispose()


@pytest.fixture
def other_engine(url: str) -> Iterator[Engine]:
    """A second engine on the same database, which a session takes for another one."""
    engine = create_engine(url)
    yield engine
    engine.dispose()


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    """An outbox on the test's engine."""
    return Outbox(engine, settings=Settings())


@pytest.fixture(params=["sync", "async"])
def caller(request: pytest.FixtureRequest, url: str, engine: Engine) -> Iterator[Caller]:
    """Sync functions on an Engine, and async ones on an AsyncEngine."""
    if request.param == "sync":
        yield Caller(Outbox(engine, settings=Settings()), engine, asynchronous=False)
        return
    async_engine = create_async_engine(url)
    caller = Caller(Outbox(async_engine, settings=Settings()), async_engine, asynchronous=True)
    yield caller
    assert caller.runner
    caller.runner.run(async_engine.dispose())
    caller.runner.close()


@pytest.fixture
def proxy(engine: Engine) -> Iterator[Proxy]:
    """A proxy before the test's server."""
    assert engine.url.host
    assert engine.url.port
    proxy = Proxy(engine.url.host, engine.url.port)
    yield proxy
    proxy.close()


@pytest.fixture
def deferred(engine: Engine) -> Iterator[Engine]:
    """An engine on a database whose table `change` checks at COMMIT that no number is negative."""
    with at_the_commit(engine, "RAISE check_violation USING MESSAGE = 'negative';", when="NEW.number < 0"):
        yield engine


@contextmanager
def at_the_commit(engine: Engine, body: str, when: str = "true") -> Iterator[None]:
    """Have a COMMIT that wrote into `change` run a trigger's ``body`` for each row of which a condition is true."""
    tables = Tables(engine)
    tables.run(f"CREATE FUNCTION late() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} RETURN NULL; END $$")
    tables.run(
        "CREATE CONSTRAINT TRIGGER late AFTER INSERT ON change DEFERRABLE INITIALLY DEFERRED"
        f" FOR EACH ROW WHEN ({when}) EXECUTE FUNCTION late()"
    )
    try:
        yield
    finally:
        tables.run("DROP FUNCTION late() CASCADE")


@pytest.fixture
def through(proxy: Proxy, engine: Engine) -> Iterator[Engine]:
    """An engine with one connection, through the proxy."""
    through = create_engine(engine.url.set(host="127.0.0.1", port=proxy.port), pool_size=1, max_overflow=0)
    yield through
    through.dispose()
