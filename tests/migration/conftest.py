from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest
from sqlalchemy import Engine, NullPool, create_engine

from outbox.embedded import ServerLike


@pytest.fixture
def url(server: ServerLike) -> Iterator[str]:
    """An empty database of the test's own."""
    name = f"migration_{uuid4().hex[:12]}"
    server.create_database(name)
    yield server.url(name)
    server.drop_database(name)


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    """An engine on the test's database which keeps no connection open."""
    engine = create_engine(url, poolclass=NullPool)
    yield engine
    engine.dispose()
