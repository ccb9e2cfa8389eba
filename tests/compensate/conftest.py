"""Bank A and bank B, in two databases and in one; made once, and emptied for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from outbox import Settings
from outbox.embedded import ServerLike
from tests.compensate.support import Town
from tests.kit.databases import clones


@pytest.fixture(scope="package")
def banks(server: ServerLike, template: str) -> Iterator[tuple[Engine, Engine]]:
    """The databases of the two banks."""
    with clones(server, template, "bank_a", "bank_b") as (a, b):
        yield a, b


@pytest.fixture
def town(banks: tuple[Engine, Engine], settings: Settings) -> Iterator[Town]:
    """Two banks in two databases."""
    with Town(*banks, settings) as town:
        yield town


@pytest.fixture
def village(banks: tuple[Engine, Engine], settings: Settings) -> Iterator[Town]:
    """Two banks in one database."""
    with Town(banks[0], banks[0], settings) as town:
        yield town
