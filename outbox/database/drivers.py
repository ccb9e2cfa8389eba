"""Connections that are used without SQLAlchemy: of psycopg 3, psycopg2 or asyncpg.

They don't tell of their COMMIT, so that rows are written at once.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from outbox.database.dialect import ASYNCPG, PSYCOPG, PSYCOPG2, translated
from outbox.database.execute import Row, Statement, Steps, encodings_of, in_transaction, run_steps
from outbox.errors import TransactionRequired

T = TypeVar("T")

#: What a framework around a driver's connection, which knows of its COMMIT, has called with what waits for that.
when_committed: ContextVar[Callable[[Callable[[], None]], object] | None] = ContextVar("when_committed", default=None)


def call_once_committed(function: Callable[[], None]) -> None:
    """Have a function called after the COMMIT of a driver's connection; at once where it can't be told of."""
    if (register := when_committed.get()) is None:
        function()
    else:
        register(function)


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


# --- connections without SQLAlchemy ------------------------------------------------------------------------

#: Looks at an error of the driver's, and at the statement that failed.
Tell = Callable[[Exception, Statement], None]


@dataclass(frozen=True, slots=True)
class Raw:
    """A connection that is used without SQLAlchemy."""

    connection: Any
    driver: str
    is_async: bool

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
        return run_steps(steps, lambda work: self._execute(work, tell) if isinstance(work, Statement) else work())

    def _execute(self, statement: Statement, tell: Tell) -> list[Row]:
        sql, values = translated(statement.sql, statement.values, self.driver)
        cursor = self._cursor()
        try:
            # In a pipeline, such as a handler's, there is no answer before the end of one of our own in it.
            with self.connection.pipeline() if self._in_pipeline else nullcontext():
                cursor.execute(sql, values, **self._binary)
            return list(cursor.fetchall()) if cursor.description else []
        except Exception as error:
            tell(error, statement)
            raise
        finally:
            cursor.close()

    async def _run_async(self, steps: Steps[T], tell: Tell) -> T:
        try:
            work = next(steps)
            while True:
                if isinstance(work, Statement):
                    rows = await self._execute_async(work, tell)
                else:
                    rows = await asyncio.to_thread(work)
                work = steps.send(rows)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # what the generator returns

    async def _execute_async(self, statement: Statement, tell: Tell) -> list[Row]:
        try:
            return await self._fetch(statement)
        except Exception as error:
            tell(error, statement)
            raise

    async def _fetch(self, statement: Statement) -> list[Row]:
        sql, values = translated(statement.sql, statement.values, self.driver)
        if self.driver == ASYNCPG:
            return [tuple(row) for row in await self.connection.fetch(sql, *values)]
        async with self._cursor() as cursor:
            async with self.connection.pipeline() if self._in_pipeline else nullcontext():
                await cursor.execute(sql, values, **self._binary)
            return list(await cursor.fetchall()) if cursor.description else []

    @property
    def _binary(self) -> dict[str, bool]:
        """Rows in binary form: how a time is written depends on the session."""
        return {"binary": True} if self.driver == PSYCOPG else {}

    @property
    def _in_pipeline(self) -> bool:
        return self.driver == PSYCOPG and bool(self.connection.pgconn.pipeline_status)

    def _cursor(self) -> Any:
        """Return a cursor of the driver's own kind, not of the kind that the connection makes."""
        if self.driver == PSYCOPG2:
            from psycopg2.extensions import cursor  # noqa: PLC0415 - a caller with a connection has imported the driver

            return cursor(self.connection)
        from outbox.database.roundtrip import own_cursor  # noqa: PLC0415 - a caller with a connection has imported the driver

        return own_cursor(self.connection)


def raw_connection(carrier: object) -> Raw | None:
    """Return the connection of a driver by itself; None if ``carrier`` is something else.

    A driver that isn't imported can't have made it.
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
