"""Fixtures of relays: a bench, and relays that are driven pass by pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine

from outbox import Settings
from outbox.consumer.outside.consumer import OutsideConsumer
from outbox.relay.publisher import Publisher
from tests.kit.bench import Bench


class Relaying:
    """Relays of a bench's topic `t`, in group `g`; what they have open is closed at the end."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.publishers: list[Publisher] = []

    def __call__(self, publisher: Publisher, **options: object) -> OutsideConsumer:
        """Return what relays to a publisher, as a worker has it."""
        self.publishers.append(publisher)
        self.bench.app.subscriptions.clear()
        self.bench.app.relay("t", to=publisher, group="g", **options)  # type: ignore[arg-type]  # what the test says
        subscription = self.bench.app.subscriptions["t", "g"]
        consumer = OutsideConsumer(subscription, self.bench.settings)
        consumer.start(self.bench.connection, self.bench.source)
        return consumer


@pytest.fixture
def bench(engine: Engine, settings: Settings) -> Iterator[Bench]:
    """Producer and relay in one database."""
    with Bench(engine, engine, settings) as bench:
        yield bench


@pytest.fixture
def relaying(bench: Bench) -> Iterator[Callable[..., OutsideConsumer]]:
    """A function that relays to a publisher."""
    relaying = Relaying(bench)
    yield relaying
    for publisher in relaying.publishers:
        publisher.close()
