"""A producer's and a consumer's database, in one and in two, with a ledger that counts effects."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine

from outbox import Settings
from tests.kit.bench import Bench, Branch, Two, make_ledger

Start = Callable[..., Bench]


@pytest.fixture
def bench(engine: Engine, settings: Settings) -> Iterator[Bench]:
    """Producer and consumer in one database."""
    make_ledger(engine)
    with Bench(engine, engine, settings) as bench:
        yield bench


@pytest.fixture(params=["one database", "two databases"])
def any_bench(request: pytest.FixtureRequest, new_engine: Callable[[], Engine], settings: Settings) -> Iterator[Bench]:
    """Producer and consumer in one database, then in two."""
    producer = new_engine()
    consumer = producer if request.param == "one database" else new_engine()
    make_ledger(consumer)
    with Bench(producer, consumer, settings) as bench:
        yield bench


@pytest.fixture
def two(new_engine: Callable[[], Engine], settings: Settings) -> Iterator[Two]:
    """Two branches and a head office, each in a database of its own."""
    head = new_engine()
    make_ledger(head)
    world = Two([Branch(new_engine(), settings) for _ in range(2)], head, settings)
    yield world
    world.close()
