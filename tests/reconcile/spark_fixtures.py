"""Fixtures of the Spark tests: two databases with differences, once for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from uuid import UUID

import pytest

from outbox.embedded import ServerLike
from outbox.reconcile.job import Range
from outbox.reconcile.rows import Comparison
from tests.reconcile import spark_rows


@dataclass(frozen=True)
class Night:
    """Two databases that differ, what is to be compared, and how to open them as somebody who may change them."""

    producer: str
    consumer: str
    ids: list[UUID]

    @property
    def comparison(self) -> Comparison:
        """The comparison, by a role whose password must never be seen."""
        return spark_rows.comparison(spark_rows.reader(self.producer), spark_rows.reader(self.consumer))

    def tasks(self, number: int = 7) -> list[Sequence[Range]]:
        """All ids, in so many tasks."""
        return spark_rows.tasks(self.ids, number)


@pytest.fixture(scope="module")
def night(server: ServerLike, template: str, request: pytest.FixtureRequest) -> Iterator[Night]:
    """Two databases with 2,000 messages, of which one in ten differs."""
    names = [f"{request.module.__name__.rpartition('.')[2]}_{side}" for side in ("producer", "consumer")]
    for name in names:
        server.create_database(name, template=template)
    producer, consumer = map(server.url, names)
    yield Night(producer, consumer, spark_rows.plant(producer, consumer, 2_000, seed=7))
    for name in names:
        server.drop_database(name)
