from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from outbox import Outbox, Settings, embedded
from outbox.database import migration
from outbox.embedded import Server, ServerLike
from tests.doctor.support import sql


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    """An Outbox on the test's database."""
    return Outbox(engine, settings=Settings())


@pytest.fixture(scope="package")
def durable() -> Iterator[ServerLike]:
    """A server as it should be in production."""
    with embedded.server([], durable=True) as server:
        yield server


@pytest.fixture
def durable_url(durable: ServerLike) -> Iterator[str]:
    """A migrated database on the server that is as it should be."""
    durable.create_database("healthy")
    migration.upgrade(durable.url("healthy"))
    yield durable.url("healthy")
    durable.drop_database("healthy")


@pytest.fixture(scope="package")
def odd() -> Iterator[Server]:
    """A server on which much is set up wrongly; none of the user's own can be made so."""
    settings = {"autovacuum": "off", "track_counts": "off", "synchronous_commit": "off", "max_connections": "12"}
    with Server(settings=settings, durable=False) as server:
        server.create_database("odd")
        migration.upgrade(server.url("odd"))
        yield server


@pytest.fixture
def parameters_kept(odd: Server) -> Iterator[None]:
    """Forget what ALTER SYSTEM has set on the odd server."""
    from sqlalchemy import create_engine

    yield
    engine = create_engine(odd.url("odd"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        sql(connection, "ALTER SYSTEM RESET ALL")
        sql(connection, "SELECT pg_reload_conf()")
    engine.dispose()
