from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import create_engine

from outbox import Settings
from outbox.database import migration
from outbox.database.duty import PARTS, Part
from outbox.embedded import ServerLike
from tests.grants.town import Town


@pytest.fixture(scope="package")
def templates(server: ServerLike) -> Iterator[dict[Part, str]]:
    """For each part a database that has its tables alone."""
    names: dict[Part, str] = {part: f"template_{part}" for part in PARTS}
    for part, name in names.items():
        server.create_database(name)
        migration.upgrade(server.url(name), [part])
    yield names
    for name in names.values():
        server.drop_database(name)


@pytest.fixture
def town(server: ServerLike, templates: dict[Part, str], settings: Settings) -> Iterator[Town]:
    """Two databases, and nobody who may do anything there but their owner."""
    names = {part: f"town_{part}" for part in PARTS}
    for part, name in names.items():
        server.create_database(name, template=templates[part])
    producer, consumer = (create_engine(server.url(names[part])) for part in PARTS)
    yield Town(producer, consumer, settings)
    for engine, name in zip((producer, consumer), names.values(), strict=True):
        engine.dispose()
        server.drop_database(name)
