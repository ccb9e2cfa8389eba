"""Bank A and bank B, in two databases and in one; made once, and emptied for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from outbox import Settings
from outbox.embedded import ServerLike
from tests.delivery.support import Post
from tests.kit.databases import clones


@pytest.fixture(scope="package")
def banks(server: ServerLike, template: str) -> Iterator[tuple[Engine, Engine]]:
    """The databases of the two banks."""
    with clones(server, template, "post_a", "post_b") as (a, b):
        yield a, b


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
