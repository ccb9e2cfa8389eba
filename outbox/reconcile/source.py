"""One snapshot of each database, held open for as long as a comparison reads.

Reads that other threads are at, to be cut short: a query may take minutes, and who gives up doesn't wait for it.

Addresses of databases: for the driver with the password, for people without it.
"""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import quote, quote_plus

from psycopg.conninfo import make_conninfo
from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, make_url
from sqlalchemy.exc import SQLAlchemyError

from outbox.database import migration
from outbox.database.execute import execute
from outbox.errors import OutboxError, SourceError
from outbox.reconcile import sql
from outbox.reconcile.model import Access
from outbox.text import summary_of

_guard = threading.Lock()
_cursors: dict[int, Any] = {}


@contextmanager
def cancellable(cursor: Any) -> Iterator[None]:
    """Let other threads cancel what this one does with an ADBC cursor in the block."""
    thread = threading.get_ident()
    with _guard:
        _cursors[thread] = cursor
    try:
        yield
    finally:
        # Under the lock, so that nobody cancels a cursor that is being closed.
        with _guard:
            del _cursors[thread]


def cancel(threads: Collection[int]) -> None:
    """Cancel what these threads (by their identifiers) are reading; those that read nothing are left alone."""
    with _guard:
        for thread in threads:
            if (cursor := _cursors.get(thread)) is not None:
                with suppress(Exception):  # it has just ended
                    cursor.adbc_cancel()


def conninfo(url: str) -> str:
    """Return a SQLAlchemy URL as libpq takes it, password included.

    Not as a URL: SQLAlchemy leaves spaces in a password as they are, which libpq refuses, and quotes in its error.
    """
    parts = make_url(url)
    _, options = parts.get_dialect()().create_connect_args(parts)
    return make_conninfo(**options)


def place(url: str) -> str:
    """Return which database is meant, in words without a secret."""
    parts = make_url(url)
    return f"database {parts.database!r} on {parts.host or 'the local socket'}"


def hidden(text: str, url: str) -> str:
    """Return a text without the password of a URL, in whatever way it is written there."""
    for form in _forms(make_url(url)):
        text = text.replace(form, "***")
    return text


def tell(error: OutboxError) -> NoReturn:
    """Raise an error with nothing behind it: psycopg's own keep the password of their connection."""
    try:
        raise error from None
    except OutboxError:
        error.__context__ = None
        raise


def _forms(url: URL) -> list[str]:
    secrets = [str(value) for value in (url.password, url.query.get("password"), url.query.get("sslpassword")) if value]
    return sorted({form for secret in secrets for form in _written(secret)}, key=len, reverse=True)


def _written(secret: str) -> tuple[str, ...]:
    """Return a secret as it is, as URLs have it (SQLAlchemy's leave spaces), and as libpq's own strings have it."""
    quoted = (quote(secret), quote(secret, safe=""), quote(secret, safe=" +"), quote_plus(secret))
    return secret, *quoted, secret.replace("\\", "\\\\").replace("'", "\\'")


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
    execute(connection, sql.read_in_one_snapshot())
    _, ((name,),), ((now,),) = execute(connection, sql.plan_for_scans(), sql.export_snapshot(), sql.clock())
    return Snapshot(access, connection, name, now)
