"""One database as the worker reaches it: connections of its own, made as the application makes them."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, make_url
from sqlalchemy.exc import DBAPIError

from outbox.database.execute import driver_of, is_lost

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

# The passes send BEGIN in their first round trip; in the driver's own hands it would be a round trip more.
_ISOLATION = "AUTOCOMMIT"
# Seconds until a peer that fell silent is noticed: _KEEP_IDLE + _KEEP_COUNT * _KEEP_INTERVAL.
_KEEP_IDLE, _KEEP_INTERVAL, _KEEP_COUNT = 10, 5, 3


class Database:
    """Opens connections that belong to nobody else.

    Of an `Engine`, they come from its pool and are detached from it: they have its connect arguments and events, and
    take no room in it. Of an `AsyncEngine` or a URL only the URL is taken.
    """

    def __init__(self, bind: Engine | AsyncEngine | URL | str) -> None:
        if isinstance(bind, Engine):
            self.engine, self.url = bind, bind.url
            return
        self.url = bind if isinstance(bind, URL) else make_url(bind) if isinstance(bind, str) else bind.url
        if self.url.drivername == "postgresql":
            self.url = self.url.set(drivername="postgresql+psycopg")
        self.engine = create_engine(self.url, poolclass=NullPool)

    @property
    def name(self) -> str:
        """Where it is, for logs: no password."""
        return f"{self.url.host or 'local'}:{self.url.port or 5432}/{self.url.database}"

    @property
    def address(self) -> str:
        """What tells two databases apart."""
        return f"{self.name}?{sorted(self.url.query.items())}"

    def connect(self) -> Connection:
        """Open a connection; the caller closes it."""
        try:
            return self._connect()
        except DBAPIError as error:
            if not error.connection_invalidated:
                raise
        # The pool gave us one that the server had closed, and knows by now that its others are as old.
        return self._connect()

    def _connect(self) -> Connection:
        connection = self.engine.connect()
        try:
            connection = connection.execution_options(isolation_level=_ISOLATION)
            with connection.begin():
                connection.exec_driver_sql("SELECT 1")
            connection.detach()
            keep_alive(driver_of(connection))
        except BaseException:
            connection.close()
            raise
        return connection

    def async_engine(self) -> AsyncEngine:
        """Return an engine for one event loop; it keeps no connections."""
        from sqlalchemy.ext.asyncio import create_async_engine  # noqa: PLC0415 - needs greenlet

        return create_async_engine(self.url, poolclass=NullPool, isolation_level=_ISOLATION)


def discard(connection: Connection) -> None:
    """Close a connection, broken or not."""
    with suppress(Exception):  # whatever a broken connection says to its end
        if is_lost(connection):
            # Or else the pool would first try to roll it back, and log that it can't.
            connection.invalidate()
    with suppress(Exception):
        connection.close()


def keep_alive(driver: Any) -> None:
    """Have the kernel probe an idle TCP connection, so that a server which vanished is noticed within half a minute."""
    with suppress(OSError), _socket(driver) as sock:
        if sock.family == socket.AF_UNIX:
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_KEEPIDLE", _KEEP_IDLE),
            ("TCP_KEEPINTVL", _KEEP_INTERVAL),
            ("TCP_KEEPCNT", _KEEP_COUNT),
        ):
            if (number := cast("int | None", getattr(socket, option, None))) is not None:
                sock.setsockopt(socket.IPPROTO_TCP, number, value)


def cut(driver: Any) -> None:
    """End a connection that another thread may be using: both sides see it closed, and the server rolls back.

    The socket is shut down rather than the connection closed, since libpq's is no thread-safe object.
    """
    with suppress(OSError, Exception), _socket(driver) as sock:
        sock.shutdown(socket.SHUT_RDWR)


def _socket(driver: Any) -> socket.socket:
    """Return a second handle of the connection's socket."""
    return socket.socket(fileno=socket.dup(driver.fileno()))
