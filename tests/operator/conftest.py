"""A desk for the tests of bulk jobs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outbox.embedded import ServerLike
from tests.kit import empty
from tests.operator.acting import Desk, open_desk

_TABLES = (
    *("consumer_message", "bulk_job", "bulk_item", "audit", "compensation"),
    *("half_message", "half_check", "op_message", "message", "scheduled_message"),
)


@pytest.fixture(scope="module")
def _desk(server: ServerLike, template: str) -> Iterator[Desk]:
    with open_desk(server, template, "bank") as opened:
        yield opened


@pytest.fixture
def desk(_desk: Desk) -> Desk:
    """A desk over one database that is the producer's and the consumer's, with nothing on it."""
    with _desk.engine.begin() as connection:
        empty(connection, *(f"outbox.{table}" for table in _TABLES))
    return _desk
