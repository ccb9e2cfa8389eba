"""An outbox whose consumers note what they did in a table that shows every doubling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, text

from outbox import Message, Outbox, Settings, embedded
from outbox.database import migration
from outbox.worker import Worker
from tests.kit import Tables, open_observer, send_each


@dataclass
class Bench(Tables):
    """An `Outbox` on one database, with the table ``effect`` that handlers write to."""

    engine: Engine
    observer: Engine
    outbox: Outbox
    stack: ExitStack = field(default_factory=ExitStack)

    def handle(self, message: Message, session: Any) -> None:
        """Note a message as handled; a second time makes a second row."""
        session.execute(_NOTE, {"id": message.id})

    async def handle_async(self, message: Message, session: Any) -> None:
        """Note a message as handled, from an event loop."""
        await session.execute(_NOTE, {"id": message.id})

    def send(self, topic: str = "paid", count: int = 1, **options: Any) -> list[UUID]:
        """Send messages, each in a transaction of its own."""
        return [send_each(self.outbox, topic, {"number": n}, key=str(n), **options)[0] for n in range(count)]

    def effects(self) -> list[UUID]:
        """Return the ids of the handled messages, as often as they took effect."""
        return list(self.rows("SELECT message_id FROM effect"))

    def inbox(self) -> list[tuple[str, int]]:
        """Return status and attempts of all inbox rows."""
        return self.rows("SELECT status, attempts FROM outbox.consumer_message ORDER BY received_at")

    def work(self, **options: Any) -> Worker:
        """Start a worker; it is stopped when the test ends."""
        return self.stack.enter_context(Worker(self.outbox, **options))


_NOTE = text("INSERT INTO effect (message_id) VALUES (:id)")


def open_bench(url: str, settings: Settings) -> Bench:
    """Return a bench on a migrated database."""
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE IF NOT EXISTS effect (message_id uuid NOT NULL)"))
    stack = ExitStack()
    stack.callback(engine.dispose)
    return Bench(engine, open_observer(url, stack), Outbox(engine, settings=settings), stack)


@pytest.fixture
def new_bench(new_database: Callable[[], str]) -> Iterator[Callable[..., Bench]]:
    """A function that makes a bench on a database of its own, or on that of ``url``."""
    with ExitStack() as benches:

        def make(url: str | None = None, **settings: Any) -> Bench:
            bench = open_bench(url or new_database(), Settings(**settings))
            benches.callback(bench.stack.close)
            return bench

        yield make


@pytest.fixture
def bench(new_bench: Callable[..., Bench]) -> Bench:
    """A bench with the default settings."""
    return new_bench()


@pytest.fixture(scope="module")
def own_server() -> Iterator[embedded.Server]:
    """A server that no other test depends on."""
    with embedded.Server(durable=False) as server:
        yield server


@pytest.fixture
def own_url(own_server: embedded.Server) -> Iterator[str]:
    """The URL of a migrated database on it."""
    own_server.create_database("bank")
    migration.upgrade(own_server.url("bank"))
    yield own_server.url("bank")
    own_server.drop_database("bank")
