"""One snapshot of each database, held open for as long as a comparison reads."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Connection, Engine, NullPool, create_engine
from sqlalchemy.exc import SQLAlchemyError

from outbox import migration
from outbox.errors import SourceError
from outbox.reconcile.model import Access
from outbox.reconcile.secret import hidden, place, tell
from outbox.store import reconcile as store
from outbox.store.execute import execute
from outbox.text import summary_of

_CONNECT_TIMEOUT = 10


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one database looked like at a moment: a connection in a transaction that sees just that.

    ``name`` is what other connections import it by; ``now`` the database's clock at the time, in microseconds.
    """

    access: Access
    connection: Connection
    name: str
    now: int


@dataclass(frozen=True, slots=True)
class Snapshots:
    """Both databases. The consumer's was taken first: whatever it has consumed, the producer's has sent."""

    consumer: Snapshot
    producer: Snapshot


@contextmanager
def taken(producer: Access, consumer: Access) -> Iterator[Snapshots]:
    """Take a snapshot of both databases, and hold them until the end of the block.

    While they are held, vacuum can't remove what they see: don't hold them longer than it takes to read.

    Raises:
        SourceError: a database can't be reached.
        SchemaMissing, SchemaOutdated: it isn't migrated.
    """
    with _taken(consumer, "consumer") as of_consumer, _taken(producer, "producer") as of_producer:
        yield Snapshots(of_consumer, of_producer)


def engine_of(access: Access) -> Engine:
    """Return an engine that keeps no connections, and doesn't wait for a host for ever."""
    return create_engine(
        access.url, poolclass=NullPool, connect_args={"connect_timeout": _CONNECT_TIMEOUT}, hide_parameters=True
    )


def as_time(microseconds: int) -> dt.datetime:
    """Return a database's clock as a time."""
    return dt.datetime.fromtimestamp(microseconds / 1e6, dt.UTC)


@contextmanager
def reaching(access: Access) -> Iterator[None]:
    """Turn what a database, or the way to it, goes wrong with into a `SourceError` without its password."""
    try:
        yield
    except SQLAlchemyError as error:
        text = summary_of(getattr(error, "orig", None) or error)
        tell(SourceError(f"{place(access.url)}: {hidden(text, access.url)}"))


@contextmanager
def _taken(access: Access, part: str) -> Iterator[Snapshot]:
    engine = engine_of(access)
    try:
        with reaching(access):
            connection = engine.connect()
        try:
            with reaching(access):
                migration.require(connection, (part,), access.schema)
                connection.rollback()
                snapshot = _begin(access, connection)
            yield snapshot
        finally:
            connection.close()
    finally:
        engine.dispose()


def _begin(access: Access, connection: Connection) -> Snapshot:
    connection.begin()
    execute(connection, store.read_in_one_snapshot())
    _, ((name,),), ((now,),) = execute(connection, store.plan_for_scans(), store.export_snapshot(), store.clock())
    return Snapshot(access, connection, name, now)
