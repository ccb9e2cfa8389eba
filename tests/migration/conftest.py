from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest
from sqlalchemy import Engine, NullPool, create_engine

from outbox import embedded


@pytest.fixture(scope="session")
def postgres() -> Iterator[embedded.ServerLike]:
    """A server for this folder's tests."""
    with embedded.server(durable=False) as server:
        yield server


@pytest.fixture
def url(postgres: embedded.ServerLike) -> Iterator[str]:
    """An empty database of the test's own."""
    name = f"test_{uuid4().hex[:12]}"
    postgres.create_database(name)
    yield postgres.url(name)
    postgres.drop_database(name)


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    """An engine on the test's database which keeps no connection open."""
    engine = create_engine(url, poolclass=NullPool)
    yield engine
    engine.dispose()
