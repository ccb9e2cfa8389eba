"""Engines for what names a database (an engine, of an async engine its URL, or a URL), and connections of theirs."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Engine, NullPool, create_engine, make_url
from sqlalchemy.exc import DBAPIError

from outbox.database.execute import is_lost
from outbox.text import database_address

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncEngine

    Bind = Engine | AsyncEngine | URL | str

_CONNECT_TIMEOUT = 10


def url_of(bind: Bind) -> URL:
    """Return the URL of a database; its driver is psycopg where it names none."""
    url = make_url(bind) if isinstance(bind, str | URL) else bind.url
    return url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url


def address_of(url: URL) -> str:
    """Return what tells two databases apart; no password."""
    return f"{database_address(url)}?{sorted(url.query.items())}"


def engine_of(bind: Bind, timeout: int = _CONNECT_TIMEOUT, **options: Any) -> Engine:
    """Return an engine as it is, else one for the URL.

    That one doesn't wait for a host for longer than ``timeout`` seconds, unless its URL says for how long, and keeps no
    connections, unless ``options`` name another pool.
    """
    if isinstance(bind, Engine):
        return bind
    url = url_of(bind)
    limit = {} if "connect_timeout" in url.query else {"connect_timeout": timeout}
    return create_engine(url, connect_args=limit, **({"poolclass": NullPool} | options))


def connect(engine: Engine) -> Connection:
    """Open a connection that works, in the mode in which `execute` begins transactions itself, READ COMMITTED."""
    try:
        return _connect(engine)
    except DBAPIError as error:
        if not error.connection_invalidated:
            raise
    # The pool gave us one that the server had closed, and knows by now that its others are as old.
    return _connect(engine)


def _connect(engine: Engine) -> Connection:
    connection = engine.connect()
    try:
        connection = connection.execution_options(isolation_level="AUTOCOMMIT")
        with connection.begin():
            connection.exec_driver_sql("SELECT 1")
    except BaseException:
        discard(connection)
        raise
    return connection


def discard(connection: Connection) -> None:
    """Close a connection, broken or not."""
    with suppress(Exception):  # whatever a broken connection says to its end
        if is_lost(connection):
            # Or else the pool would first try to roll it back, and log that it can't.
            connection.invalidate()
    with suppress(Exception):
        connection.close()
