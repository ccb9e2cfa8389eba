"""One outbox on a database of the test's own, and a table with rows to lock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, Engine, text

from outbox import Outbox, Settings, embedded
from outbox.errors import PostgresNotFound


@pytest.fixture
def app(engine: Engine, settings: Settings) -> Outbox:
    """An outbox whose database also has a table of counters, one row for each key."""
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE counter (key text PRIMARY KEY, value int NOT NULL DEFAULT 0)"))
        connection.execute(text("INSERT INTO counter SELECT 'k' || n FROM generate_series(0, 19) n"))
    return Outbox(engine, settings=settings)


@pytest.fixture
def connection(app: Outbox, engine: Engine) -> Iterator[Connection]:
    """The dispatcher's connection, in no transaction."""
    with engine.connect() as connection:
        yield connection


@pytest.fixture(scope="session")
def spare_server() -> Iterator[embedded.Server]:
    """Another cluster than the one of the other tests; it takes prepared transactions."""
    try:
        server = embedded.Server(durable=False, settings={"max_prepared_transactions": "5"})
        server.start()
    except PostgresNotFound as error:
        pytest.skip(str(error))
    try:
        yield server
    finally:
        server.stop()
