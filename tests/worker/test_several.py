"""One worker for several Outboxes: tenants in databases or schemas of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import INJECTED, Message, Outbox, Settings
from outbox.database import migration
from outbox.embedded import ServerLike
from outbox.errors import NotBound, SchemaMissing
from outbox.worker import Worker
from tests.kit import wait_until

NOTE = text("INSERT INTO public.effect VALUES (:number)")


@dataclass
class Tenants:
    """An Outbox without a database, its tenants, and what each of their databases shows."""

    outbox: Outbox
    of: dict[str, Outbox]
    engines: dict[str, Engine]

    def send(self, name: str, number: int) -> None:
        """Send a number for a tenant."""
        engine = self.engines[name]
        with engine.begin() as connection:
            self.of[name].send(connection, "numbers", {"number": number})

    def effects(self, name: str) -> list[int]:
        """Return the numbers that were handled in a tenant's database."""
        with self.engines[name].connect() as connection:
            return sorted(connection.scalars(text("SELECT number FROM public.effect")))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What ends with the test."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def tenants(new_database: Callable[[], str], stack: ExitStack) -> Tenants:
    """Two tenants in databases of their own, and one in a schema of its own beside the first."""
    outbox, of, engines = Outbox(group="shop", settings=Settings()), {}, {}
    for name in ("north", "south"):
        engine = engines[name] = create_engine(new_database())
        stack.callback(engine.dispose)
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE IF NOT EXISTS public.effect (number int NOT NULL)"))
        of[name] = outbox.bound_to(engine)
    migration.upgrade(engines["north"], schema="west")
    engines["west"], of["west"] = engines["north"], outbox.bound_to(engines["north"], schema="west")
    return Tenants(outbox, of, engines)


def test_each_message_takes_effect_in_its_own_tenant(tenants: Tenants) -> None:
    """One handler serves all; what it does with the Outbox of the module is done for the tenant of the message.

    It joins the transaction of the handler: what it sends is dispatched, and handled, in the same tenant.
    """
    outbox = tenants.outbox

    @outbox.transactional(topic="doubled")
    def double(number: int, session: Session = INJECTED) -> dict[str, int]:
        session.execute(NOTE, {"number": 2 * number})
        return {"number": 2 * number}

    @outbox.consumer("numbers", group="doubling")
    def handle(message: Message, session: Session) -> None:
        double(message.body["number"])
        outbox.send(session, "sent", {"number": message.body["number"]})

    @outbox.consumer("doubled", group="counting")
    @outbox.consumer("sent", group="counting")
    def count(message: Message, session: Session) -> None:
        session.execute(NOTE, {"number": message.body["number"]})

    with Worker(*tenants.of.values()) as worker:
        for number, name in enumerate(tenants.of, 1):
            tenants.send(name, number * 100)
        wait_until(lambda: len(tenants.effects("north")) == 6 and len(tenants.effects("south")) == 3, "all is handled")
        assert worker.is_alive()
        names = list(worker.health())
    assert tenants.effects("south") == [200, 400, 400]
    assert tenants.effects("north") == [100, 200, 200, 300, 600, 600]
    reports = [name for name in names if name.endswith(" report")]
    assert len(names) == len(set(names))
    assert len(reports) == 3
    assert [name for name in reports if "/west " in name]


def test_async_handlers_know_their_tenant(tenants: Tenants, stack: ExitStack) -> None:
    """Also on an event loop, a decorated function joins the handler's transaction, for the handler's tenant."""
    outbox = tenants.outbox

    @outbox.transactional(topic="doubled")
    async def double(number: int, session: AsyncSession = INJECTED) -> dict[str, int]:
        await session.execute(NOTE, {"number": 2 * number})
        return {"number": 2 * number}

    @outbox.consumer("numbers", group="doubling", retry_delays=[])
    async def handle(message: Message, session: AsyncSession) -> None:
        await double(message.body["number"])
        if message.body["number"] < 0:
            raise ValueError("the joined change must go with it")

    bound = [outbox.bound_to(create_async_engine(tenants.engines[name].url)) for name in ("north", "south")]
    tenants.send("north", -5)
    with Worker(*bound):
        tenants.send("north", 1)
        tenants.send("south", 2)
        wait_until(lambda: tenants.effects("north") and tenants.effects("south"), "both are handled")
    assert (tenants.effects("north"), tenants.effects("south")) == ([2], [4])
    with tenants.engines["north"].connect() as connection:
        bodies = connection.scalars(
            text("SELECT convert_from(body, 'UTF8') FROM outbox.half_message WHERE topic = 'doubled'")
        )
        assert list(bodies) == ['{"number":2}']


def test_a_handler_that_fails_takes_what_joined_it_along(tenants: Tenants) -> None:
    """A decorated function that a handler calls without its session has no effect of its own to leave behind."""
    north = tenants.of["north"]
    calls: list[int] = []

    @north.transactional(topic="doubled")
    def double(number: int, session: Session = INJECTED) -> dict[str, int]:
        session.execute(NOTE, {"number": number})
        return {"number": number}

    @north.consumer("numbers", group="doubling", retry_delays=[0.0])
    def handle(message: Message, session: Any) -> None:
        double(message.body["number"])
        calls.append(message.body["number"])
        if len(calls) == 1:
            raise ValueError("the first try fails")

    tenants.send("north", 1)
    with Worker(north):
        wait_until(lambda: tenants.effects("north"), "the retry is through")
    assert (tenants.effects("north"), calls) == ([1], [1, 1])


def test_a_database_that_is_migrated_while_a_worker_begins(
    tenants: Tenants, server: ServerLike, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that found no tables at first, and then those of consumers, dispatches all the same."""
    server.create_database("worker_migrated")
    stack.callback(server.drop_database, "worker_migrated")
    engine = create_engine(server.url("worker_migrated"))
    stack.callback(engine.dispose)
    current = migration.current

    def migrated_after(*args: Any) -> Any:
        """Return what there is, and have all there is to be right behind it."""
        found = current(*args)
        migration.upgrade(server.url("worker_migrated"))
        return found

    monkeypatch.setattr(migration, "current", migrated_after)
    handled: list[int] = []

    @tenants.outbox.consumer("numbers", group="counting")
    def count(message: Message, session: Session) -> None:
        handled.append(message.body["number"])

    outbox = tenants.outbox.bound_to(engine)
    with Worker(outbox):
        with engine.begin() as connection:
            outbox.send(connection, "numbers", {"number": 1})
        wait_until(lambda: handled == [1], "it is dispatched and handled")


def test_a_database_that_is_out_of_reach_at_the_start(
    tenants: Tenants, server: ServerLike, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are served meanwhile; it is named, and served as soon as it can be reached."""
    missing = create_engine(server.url("worker_missing"))
    stack.callback(missing.dispose)
    late = tenants.outbox.bound_to(missing)

    @tenants.outbox.consumer("numbers", group="counting")
    def count(message: Message, session: Session) -> None:
        session.execute(NOTE, {"number": message.body["number"]})

    with Worker(late, tenants.of["south"]) as worker:
        tenants.send("south", 1)
        wait_until(lambda: tenants.effects("south") == [1], "the other tenant is served")
        assert not worker.is_ready()
        (name,) = (name for name, health in worker.health().items() if health.connection_lost)
        assert "worker_missing" in name
        assert "duty.failed" in {getattr(record, "outbox_event", "") for record in caplog.records}

        server.create_database("worker_missing")
        stack.callback(server.drop_database, "worker_missing")
        stack.callback(missing.dispose)
        migration.upgrade(server.url("worker_missing"))
        with missing.begin() as connection:
            connection.execute(text("CREATE TABLE public.effect (number int NOT NULL)"))
            late.send(connection, "numbers", {"number": 2})
        with missing.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            wait_until(lambda: connection.scalar(text("SELECT number FROM public.effect")) == 2, "it is served at last")
        wait_until(worker.is_ready, "all are ready")
    missing.dispose()


def test_all_out_of_reach(tenants: Tenants, server: ServerLike, stack: ExitStack) -> None:
    """With no database at all, the start fails as that of a single one does, and ends what it began."""
    engines = [create_engine(server.url(f"worker_missing_{number}")) for number in range(2)]
    worker = Worker(*(tenants.outbox.bound_to(engine) for engine in engines))
    with pytest.raises(OperationalError, match="worker_missing_1"):
        worker.start()
    assert worker.stop()


def test_one_that_cannot_start_is_named(tenants: Tenants, server: ServerLike, stack: ExitStack) -> None:
    """An Outbox without a database, or on one without tables, is told at the start, and nothing is left running."""
    with (
        pytest.raises(NotBound, match="group 'shop' has no database yet"),
        Worker(tenants.of["north"], tenants.outbox),
    ):
        pass
    server.create_database("worker_bare")
    stack.callback(server.drop_database, "worker_bare")
    bare = create_engine(server.url("worker_bare"))
    stack.callback(bare.dispose)
    worker = Worker(tenants.of["north"], tenants.outbox.bound_to(bare))
    with pytest.raises(SchemaMissing, match="'worker_bare'"):
        worker.start()
    assert worker.stop()
