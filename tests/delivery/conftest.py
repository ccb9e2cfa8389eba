"""Bank A and bank B, in two databases and in one; made once, and emptied for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine

from outbox import Settings
from outbox.embedded import ServerLike
from tests.delivery.support import Post


@pytest.fixture(scope="package")
def banks(server: ServerLike, template: str) -> Iterator[tuple[Engine, Engine]]:
    """The databases of the two banks."""
    names = ("post_a", "post_b")
    for name in names:
        server.create_database(name, template=template)
    engines = create_engine(server.url(names[0])), create_engine(server.url(names[1]))
    yield engines
    for engine, name in zip(engines, names, strict=True):
        engine.dispose()
        server.drop_database(name)


@pytest.fixture
def post(banks: tuple[Engine, Engine], settings: Settings) -> Iterator[Post]:
    """Two banks in two databases."""
    with Post(*banks, settings) as post:
        yield post


@pytest.fixture
def village(banks: tuple[Engine, Engine], settings: Settings) -> Iterator[Post]:
    """Two banks in one database."""
    with Post(banks[0], banks[0], settings) as post:
        yield post
