"""A business table, what stands beside it in the outbox, and one way to drive all four kinds of transaction."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Literal
from uuid import UUID

from sqlalchemy import Column, Connection, Engine, Integer, MetaData, Table, create_engine, insert, select, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from tests.kit import Tables, wait_until

Kind = Literal["Session", "AsyncSession", "Connection", "AsyncConnection"]
KINDS: tuple[Kind, ...] = ("Session", "AsyncSession", "Connection", "AsyncConnection")

business = MetaData()
#: The numbers that committed transactions wrote; a message about a number carries it in its body.
change = Table("change", business, Column("number", Integer, primary_key=True, autoincrement=False))


class Base(DeclarativeBase):
    """Mapped classes of the tests."""


class Account(Base):
    """A row that the unit of work writes when it flushes."""

    __tablename__ = "account"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    owner: Mapped[str] = mapped_column(unique=True)


def create_business_tables(engine: Engine) -> None:
    """Create the tables of the business in the engine's database."""
    business.create_all(engine)
    Base.metadata.create_all(engine)


def changes(engine: Engine) -> set[int]:
    """Return the numbers in the business table."""
    with engine.connect() as connection:
        return set(connection.scalars(select(change.c.number)))


def accounts(engine: Engine) -> set[int]:
    """Return the ids of the accounts."""
    with engine.connect() as connection:
        return set(connection.scalars(select(Account.id)))


def halves(engine: Engine, schema: str = "outbox") -> list[Any]:
    """Return what the half messages say (body as JSON), with their op and whether they wait for a check, by op."""
    return Tables(engine).records(
        "SELECT h.id, h.topic, h.key, h.producer_group, convert_from(h.body, 'UTF8')::jsonb AS body,"
        " o.resolution, o.decided_by, c.half_id IS NOT NULL AS waits, c.fenced, h.deliver_at, h.born_at,"
        " h.tag, h.headers, h.content_type, c.next_check_at"
        f" FROM {schema}.half_message h LEFT JOIN {schema}.op_message o ON o.half_id = h.id"
        f" LEFT JOIN {schema}.half_check c ON c.half_id = h.id ORDER BY o.sequence, h.id"
    )


def messages(engine: Engine, schema: str = "outbox") -> list[int]:
    """Return the numbers that committed messages carry, in the order of their ops."""
    return [row.body["number"] for row in halves(engine, schema) if row.resolution == "commit"]


def leftovers(engine: Engine) -> int:
    """Return how many rows of ops and checks stand without a half message."""
    rows = "(SELECT half_id FROM outbox.op_message UNION ALL SELECT half_id FROM outbox.half_check) AS r"
    lone = "NOT EXISTS (SELECT FROM outbox.half_message h WHERE h.id = r.half_id)"
    return int(Tables(engine).value(f"SELECT count(*) FROM {rows} WHERE {lone}"))


def idle_in_transaction(engine: Engine) -> int:
    """Return how many other connections to this database are in a transaction and do nothing."""
    return Tables(engine).connections("state LIKE 'idle in transaction%'")


def waits_for_a_lock(engine: Engine, pid: int) -> bool:
    """Tell whether a backend is blocked by another transaction."""
    blocked = f"pid = {pid} AND wait_event_type = 'Lock' AND cardinality(pg_blocking_pids(pid)) > 0"
    return Tables(engine).connections(blocked) > 0


def pid_of(connection: Connection) -> int:
    """Return the process that serves a connection."""
    return int(connection.scalar(text("SELECT pg_backend_pid()")) or 0)


def terminate(engine: Engine, pid: int) -> None:
    """End a backend, as an administrator or a crash would."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
        alive = text("SELECT count(*) FROM pg_stat_activity WHERE pid = :pid")
        wait_until(lambda: not connection.scalar(alive, {"pid": pid}), "the backend has ended")


def op_of(engine: Engine, half_id: UUID) -> tuple[str, str] | None:
    """Return the resolution of a half and who decided it."""
    return Tables(engine).op(half_id)


def count_of_checks(engine: Engine) -> int:
    """Return how many halves wait for a check."""
    return int(Tables(engine).value("SELECT count(*) FROM outbox.half_check"))


class Databases:
    """The same database through a sync and an async engine."""

    def __init__(self, url: str) -> None:
        self.sync_engine = create_engine(url)
        self.async_engine = create_async_engine(url)

    def engine_for(self, kind: Kind) -> Engine | AsyncEngine:
        """Return the engine which this kind of transaction runs on."""
        return self.async_engine if kind.startswith("Async") else self.sync_engine


async def settle(value: Any) -> Any:
    """Return the value, awaited if it is awaitable: one test serves the sync and the async kinds."""
    return await value if inspect.isawaitable(value) else value


async def write(carrier: Any, number: int) -> None:
    """Make the business change."""
    await settle(carrier.execute(insert(change).values(number=number)))


@asynccontextmanager
async def opened(kind: Kind, databases: Databases) -> AsyncIterator[Any]:
    """Open a session or connection in no transaction yet, and close it at the end."""
    match kind:
        case "Session":
            with Session(databases.sync_engine) as session:
                yield session
        case "Connection":
            with databases.sync_engine.connect() as connection:
                yield connection
        case "AsyncSession":
            async with AsyncSession(databases.async_engine) as session:
                yield session
        case "AsyncConnection":
            async with databases.async_engine.connect() as connection:
                yield connection


def drive(url: str, act: Callable[[Databases], Coroutine[Any, Any, Any]]) -> Any:
    """Run an async act with both engines on a database; dispose of them afterwards."""

    async def run() -> Any:
        databases = Databases(url)
        try:
            return await act(databases)
        finally:
            await databases.async_engine.dispose()
            databases.sync_engine.dispose()

    return asyncio.run(run())


Act = Callable[[Any], Awaitable[None]]
