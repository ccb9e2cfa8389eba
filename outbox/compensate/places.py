"""The databases in which a message may take effect: the producer's own, if it has inboxes, and the consumers'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from sqlalchemy import URL, Engine, NullPool, create_engine, make_url
from sqlalchemy.exc import DBAPIError

from outbox.compensate.sql import has_inbox
from outbox.database.execute import execute, is_lost
from outbox.database.failure import CONTENDED, sqlstate
from outbox.errors import SchemaError
from outbox.text import database_address, summary_of

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncEngine

    from outbox.compensate.declaration import Compensation

T = TypeVar("T")

#: After how long (seconds) an item is tried again for which a row was locked, or a database couldn't be asked.
BUSY = 5.0
UNREACHABLE = 30.0

_CONNECT_SECONDS = 10


class Waits(Exception):
    """Nothing can be done about an item now; ``seconds`` until it is tried again."""

    def __init__(self, why: str, seconds: float) -> None:
        super().__init__(why)
        self.seconds = seconds


class Place:
    """One database with inboxes, by the name that is shown for it."""

    def __init__(self, name: str, connect: Callable[[], Connection]) -> None:
        self.name = name
        self._connect = connect
        self._connection: Connection | None = None
        self._failure: str | None = None

    def run(self, act: Callable[[Connection], T]) -> T:
        """Run an act on a connection that isn't in a transaction.

        Raises:
            Waits: the database can't be asked now, or what is to be changed is locked.
        """
        if self._failure is not None:
            raise Waits(self._failure, UNREACHABLE)
        try:
            if self._connection is None:
                self._connection = self._connect()
            return act(self._connection)
        except (DBAPIError, SchemaError) as error:
            if sqlstate(error) in CONTENDED:
                raise Waits(f"somebody is handling the message in database {self.name} at this moment", BUSY) from error
            self._failed(error)
            raise Waits(str(self._failure), UNREACHABLE) from error

    def named(self, groups: Sequence[str]) -> list[str]:
        """Return what groups of this database are called in texts."""
        return [f"{group} (database {self.name})" for group in groups]

    def close(self) -> None:
        """Give the connection back."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):  # whatever a broken connection says to its end
                connection.close()

    def _failed(self, error: Exception) -> None:
        """Don't ask it again in this pass: each attempt to reach it may take long."""
        first, _, _ = summary_of(getattr(error, "orig", None) or error).partition("\n")
        self._failure = f"database {self.name}: {first}"
        self.close()


class OwnPlace(Place):
    """The producer's database, by the connection of the pass: if that is lost, so is the pass."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(database_address(connection.engine.url), lambda: connection)
        self.address = _address_of(connection.engine.url)

    def close(self) -> None:
        """Leave the connection to the pass."""

    def _failed(self, error: Exception) -> None:
        raise error


class Places:
    """The places of one pass; what is opened stays open to its end."""

    def __init__(self, own: Connection, schema: str) -> None:
        self._own = OwnPlace(own)
        self._schema = schema
        self._has_inbox: bool | None = None
        self._others: dict[str, Place] = {}

    def of(self, compensation: Compensation) -> list[Place]:
        """Return the places in which messages of a compensation's topic may take effect."""
        if self._has_inbox is None:
            self._has_inbox = self._own.run(self._look)
        places: list[Place] = [self._own] if self._has_inbox else []
        for consumer in compensation.consumers:
            address = _address_of(url := _url_of(consumer))
            if address == self._own.address:
                continue
            if address not in self._others:
                self._others[address] = Place(database_address(url), partial(_connect, consumer))
            places.append(self._others[address])
        return places

    def close(self) -> None:
        """Give all connections back."""
        for place in self._others.values():
            place.close()

    def _look(self, connection: Connection) -> bool:
        with connection.begin():
            (((has,),),) = execute(connection, has_inbox(self._schema))
        return bool(has)


def _url_of(bind: Engine | AsyncEngine | str) -> URL:
    url = make_url(bind) if isinstance(bind, str) else bind.url
    return url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url


def _address_of(url: URL) -> str:
    """Return what tells two databases apart."""
    return f"{database_address(url)}?{sorted(url.query.items())}"


def _connect(bind: Engine | AsyncEngine | str) -> Connection:
    """Open a connection in the mode in which `execute` begins transactions itself, READ COMMITTED."""
    engine = bind
    if not isinstance(engine, Engine):
        url = _url_of(engine)
        limits = {} if "connect_timeout" in url.query else {"connect_timeout": _CONNECT_SECONDS}
        engine = create_engine(url, poolclass=NullPool, connect_args=limits)
    try:
        return _ready(engine)
    except DBAPIError as error:
        if not error.connection_invalidated:
            raise
    # The pool gave us one that the server had closed, and knows by now that its others are as old.
    return _ready(engine)


def _ready(engine: Engine) -> Connection:
    connection = engine.connect()
    try:
        connection = connection.execution_options(isolation_level="AUTOCOMMIT")
        with connection.begin():
            connection.exec_driver_sql("SELECT 1")
    except BaseException:
        if is_lost(connection):
            connection.invalidate()
        connection.close()
        raise
    return connection
