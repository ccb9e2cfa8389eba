"""The drivers that a message may be sent through: psycopg 3, psycopg2 and asyncpg.

Statements are written with psycopg 3's placeholders and translated here for the other two. Through SQLAlchemy each of
those runs a statement by its DBAPI (`outbox.database.execute`). A connection that is used without SQLAlchemy is a
`Raw` one, of any of the three: it tells nobody of its COMMIT, so that what is to be written is written at once.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from uuid import UUID

from outbox.errors import InvalidSettings, TransactionRequired

if TYPE_CHECKING:
    from sqlalchemy import URL, Dialect

    from outbox.database.execute import Row, Statement

T = TypeVar("T")

PSYCOPG, PSYCOPG2, ASYNCPG = "psycopg", "psycopg2", "asyncpg"
DRIVERS = (PSYCOPG, PSYCOPG2, ASYNCPG)

_PLACEHOLDER = re.compile(r"%(?:%|(?P<plain>[sb])|\((?P<name>\w+)\)(?P<named>[sb]))")
_BINARY = re.compile(r"%(\(\w+\))?b")


class RawConnection(Protocol):
    """A connection of psycopg 3 or psycopg2, as its driver made it."""

    def cursor(self) -> Any:
        """Return what statements are run with."""

    def commit(self) -> None:
        """Commit the transaction."""


class RawPsycopgAsync(Protocol):
    """An AsyncConnection of psycopg 3."""

    def cursor(self) -> Any:
        """Return what statements are run with."""

    async def commit(self) -> None:
        """Commit the transaction."""


class RawAsyncpg(Protocol):
    """A connection of asyncpg, by itself or out of asyncpg's pool."""

    def is_in_transaction(self) -> bool:
        """Tell whether a transaction is open."""

    async def fetch(self, query: str, *args: Any) -> Any:
        """Run a statement and return its rows."""


RawAsyncConnection = RawPsycopgAsync | RawAsyncpg


def check_driver(dialect: Dialect) -> None:
    """Make sure that messages can be sent through a dialect of SQLAlchemy's.

    Raises:
        InvalidSettings: it isn't PostgreSQL's, or not through one of `DRIVERS`.
    """
    if dialect.name != "postgresql" or dialect.driver not in DRIVERS:
        raise InvalidSettings(
            f"the outbox needs PostgreSQL through psycopg 3, psycopg2 or asyncpg, not {dialect.name} through "
            f"{dialect.driver}; make the engine with a URL that begins with postgresql+psycopg://"
        )


def check_database(own: URL, database: str | None) -> None:
    """Make sure that a carrier leads to the database of its Outbox, as far as their names tell, which costs no I/O.

    Raises:
        TransactionRequired: it leads to a database of another name.
    """
    if own.database and database and own.database != database:
        raise TransactionRequired(
            f"the session or connection is on database {database!r}, but this Outbox is on {own.database!r}: the "
            "message would be written where nothing dispatches it, or not at all; send with a session of the Outbox's "
            "database, or make an Outbox on the engine of the other one"
        )


@lru_cache(maxsize=1000)
def numbered(sql: str) -> tuple[str, tuple[str, ...], tuple[bool, ...]]:
    """Turn psycopg's placeholders into PostgreSQL's.

    Returns the SQL, the name of each parameter ("" where it has none), and whether ``%b`` asked for a binary value.
    """
    names: list[str] = []
    binary: list[bool] = []

    def number(match: re.Match[str]) -> str:
        kind = match["plain"] or match["named"]
        if kind is None:
            return "%"
        name = match["name"]
        if name is not None and name in names:
            return f"${names.index(name) + 1}"
        names.append(name or "")
        binary.append(kind == "b")
        return f"${len(names)}"

    text = _PLACEHOLDER.sub(number, sql)
    return text, tuple(names), tuple(binary)


def in_order(names: Sequence[str], values: Sequence[Any] | Mapping[str, Any]) -> Sequence[Any]:
    """Return values in the order of their parameters, whose names `numbered` returns."""
    return [values[name] for name in names] if isinstance(values, Mapping) else values


def translated(statement: Statement, driver: str) -> tuple[str, Any]:
    """Return SQL and values as ``driver`` takes them."""
    if driver == ASYNCPG:
        sql, names, _ = numbered(statement.sql)
        return sql, tuple(in_order(names, statement.values))
    if driver == PSYCOPG2:
        return _for_psycopg2(statement.sql), _plain(statement.values)
    return statement.sql, statement.values


@lru_cache(maxsize=1000)
def _for_psycopg2(sql: str) -> str:
    return _BINARY.sub(r"%\1s", sql)


def _plain(value: Any) -> Any:
    """Write UUIDs out: psycopg2 only takes them where somebody has registered the type."""
    match value:
        case UUID():
            return str(value)
        case Mapping():
            return {name: _plain(each) for name, each in value.items()}
        case list() | tuple():
            return type(value)(map(_plain, value))
    return value


# --- connections without SQLAlchemy ------------------------------------------------------------------------

#: Yields statements, gets the rows of each, and returns what comes of them: the same for sync and async connections.
Steps = Generator["Statement", "list[Row]", T]
#: Looks at an error of the driver's, and at the statement that failed.
Tell = Callable[[Exception, "Statement"], None]


def run_steps(steps: Steps[T], execute: Callable[[Statement], list[Row]]) -> T:
    """Run the statements of ``steps`` one by one."""
    try:
        statement = next(steps)
        while True:
            statement = steps.send(execute(statement))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # what the generator returns


@dataclass(frozen=True, slots=True)
class Raw:
    """A connection that is used without SQLAlchemy."""

    connection: Any
    driver: str
    is_async: bool

    @property
    def database(self) -> str | None:
        """The name of its database; None where the driver doesn't tell."""
        if self.driver == ASYNCPG:
            # The driver keeps it to itself, and its versions may do so elsewhere.
            return getattr(getattr(self.connection, "_params", None), "database", None)
        return str(self.connection.info.dbname)

    @property
    def encodings(self) -> set[str]:
        """The encodings other than UTF-8 that texts pass on their way into a table."""
        return encodings_of(self.connection)

    def refuse_autocommit(self) -> None:
        """Make sure that a transaction is open, or that the next statement opens one.

        Raises:
            TransactionRequired: the connection would commit each statement by itself.
        """
        if in_transaction(self.connection):
            return
        if self.driver == ASYNCPG:
            raise TransactionRequired(
                "the connection is in no transaction: message and business change would not commit together; "
                "send inside 'async with connection.transaction()'"
            )
        if self.connection.autocommit:
            raise TransactionRequired(
                "the connection is in autocommit mode and in no transaction: message and business change would not "
                "commit together; turn it off, or begin a transaction first ('with connection.transaction()' in "
                "psycopg 3, a BEGIN in psycopg2)"
            )

    def run(self, steps: Steps[T], tell: Tell) -> T | Coroutine[Any, Any, T]:
        """Run statements on the connection, at once; if it is async, when the coroutine is awaited.

        ``tell`` may raise a better error than the driver's; otherwise that one is raised.
        """
        if self.is_async:
            return self._run_async(steps, tell)
        return run_steps(steps, lambda statement: self._execute(statement, tell))

    def _execute(self, statement: Statement, tell: Tell) -> list[Row]:
        sql, values = translated(statement, self.driver)
        cursor = self._cursor()
        try:
            cursor.execute(sql, values)
            return list(cursor.fetchall()) if cursor.description else []
        except Exception as error:
            tell(error, statement)
            raise
        finally:
            cursor.close()

    async def _run_async(self, steps: Steps[T], tell: Tell) -> T:
        try:
            statement = next(steps)
            while True:
                try:
                    rows = await self._execute_async(statement)
                except Exception as error:
                    tell(error, statement)
                    raise
                statement = steps.send(rows)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # what the generator returns

    async def _execute_async(self, statement: Statement) -> list[Row]:
        sql, values = translated(statement, self.driver)
        if self.driver == ASYNCPG:
            return [tuple(row) for row in await self.connection.fetch(sql, *values)]
        async with self._cursor() as cursor:
            await cursor.execute(sql, values)
            return list(await cursor.fetchall()) if cursor.description else []

    def _cursor(self) -> Any:
        """Return a cursor of the driver's own kind, whatever kinds of cursors and rows the connection makes."""
        if self.driver == PSYCOPG2:
            from psycopg2.extensions import cursor  # noqa: PLC0415 - whoever passes its connection has paid for it

            return cursor(self.connection)
        import psycopg  # noqa: PLC0415 - whoever passes its connection has paid for it
        from psycopg.rows import tuple_row  # noqa: PLC0415 - as above

        kind: Any = psycopg.AsyncCursor if self.is_async else psycopg.Cursor
        return kind(self.connection, row_factory=tuple_row)


def raw_connection(carrier: object) -> Raw | None:
    """Return the connection of a driver by itself; None if ``carrier`` is something else.

    A driver that nobody has imported can't have made it.
    """
    psycopg = sys.modules.get("psycopg")
    if psycopg is not None and isinstance(carrier, (psycopg.Connection, psycopg.AsyncConnection)):
        return Raw(carrier, PSYCOPG, isinstance(carrier, psycopg.AsyncConnection))
    psycopg2 = sys.modules.get("psycopg2.extensions")
    if psycopg2 is not None and isinstance(carrier, psycopg2.connection):
        return Raw(carrier, PSYCOPG2, False)
    asyncpg = sys.modules.get("asyncpg")
    if asyncpg is not None and isinstance(carrier, (asyncpg.Connection, asyncpg.pool.PoolConnectionProxy)):
        return Raw(carrier, ASYNCPG, True)
    return None


def in_transaction(driver: Any) -> bool:
    """Tell, without I/O, whether a driver's own connection is in a transaction on the server."""
    if hasattr(driver, "is_in_transaction"):  # asyncpg's
        return bool(driver.is_in_transaction())
    return bool(driver.info.transaction_status)  # 0 is PQTRANS_IDLE


def is_closed(driver: Any) -> bool:
    """Tell whether a driver's own connection has ended."""
    if hasattr(driver, "is_closed"):  # asyncpg's
        return bool(driver.is_closed())
    return bool(getattr(driver, "closed", False))


def encodings_of(driver: Any) -> set[str]:
    """Return the encodings other than UTF-8 that texts pass on their way into a table: the client's, the server's."""
    return {_parameter(driver, name) for name in ("client_encoding", "server_encoding")} - {"UTF8", ""}


def _parameter(driver: Any, name: str) -> str:
    """Return a parameter of the server's as it was reported to the driver; "" if it wasn't."""
    if (libpq := getattr(driver, "pgconn", None)) is not None:
        return (libpq.parameter_status(name.encode()) or b"").decode()
    if hasattr(driver, "get_settings"):  # asyncpg's
        return getattr(driver.get_settings(), name, "")
    return driver.info.parameter_status(name) or ""
