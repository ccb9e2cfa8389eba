"""Connections that are used without SQLAlchemy: of psycopg 3, psycopg2 or asyncpg.

They tell nobody of their COMMIT, so that what is to be written is written at once.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NoReturn, Protocol, TypeVar

from outbox.database.execute import (
    ASYNCPG,
    PSYCOPG,
    PSYCOPG2,
    Row,
    Statement,
    Steps,
    encodings_of,
    in_transaction,
    run_steps,
    translated,
)
from outbox.errors import TransactionRequired

T = TypeVar("T")

#: What a framework around a driver's connection, which knows of its COMMIT, has called with what waits for that.
when_committed: ContextVar[Callable[[Callable[[], None]], object] | None] = ContextVar("when_committed", default=None)


def call_once_committed(function: Callable[[], None]) -> None:
    """Have a function called after the COMMIT of a driver's connection; at once where nobody will tell of it."""
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
        sql, values = translated(statement, self.driver)
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
        sql, values = translated(statement, self.driver)
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
        """Return a cursor of the driver's own kind, whatever cursors, rows and values the connection makes."""
        if self.driver == PSYCOPG2:
            from psycopg2.extensions import cursor  # noqa: PLC0415 - whoever passes its connection has paid for it

            return cursor(self.connection)
        from outbox.database.roundtrip import own_cursor  # noqa: PLC0415 - whoever passes its connection has paid for it

        return own_cursor(self.connection)


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


# --- transactions that the running code isn't to end -----------------------------------------------------------------

# What looks like a statement's begin and is none: comments, texts, names, the body of a function.
_NO_CODE = re.compile(
    r"""--[^\n]*|/\*.*?\*/|\be'(?:[^'\\]|\\.|'')*'|'[^']*'|"[^"]*"|\$(\w*)\$.*?\$\1\$|\bbegin\s+atomic\b.*\bend\b""",
    re.DOTALL | re.IGNORECASE,
)
_ENDS = re.compile(
    r"\s*(?:(?:commit|end|abort|rollback)\b(?!(?:\s+(?:work|transaction))?\s+to\b)|prepare\s+transaction\b)",
    re.IGNORECASE,
)
_MAY_END = re.compile(r"\s*(?:--|/\*|commit|end|abort|rollback|prepare)", re.IGNORECASE)
#: What a cursor runs statements by.
_RUNS = ("execute", "executemany", "stream")

#: Raises, because of a call that would end a transaction.
Refuse = Callable[[str], NoReturn]


def ending_in(sql: str) -> str | None:
    """Return the command in a string of statements that would end the transaction; None without one."""
    if ";" not in sql and not _MAY_END.match(sql):
        return None
    found = (_ENDS.match(each) for each in _NO_CODE.sub(" ", sql).split(";"))
    return next((" ".join(each[0].split()).upper() for each in found if each), None)


def hold_open(driver: Any, refuse: Refuse) -> Callable[[], None]:
    """Refuse what would end a transaction through a connection of psycopg 3's own; return what lets it again.

    That is a call of its methods, or a statement of a cursor that is made meanwhile.
    """
    if not hasattr(driver, "pgconn"):
        return lambda: None

    def transaction(*args: Any, **options: Any) -> Any:
        # On a connection that has yet to begin one, it would be no savepoint.
        return type(driver).transaction(driver, *args, **options) if in_transaction(driver) else refuse("transaction()")

    calls = {name: partial(refuse, f"{name}() of the driver's connection") for name in ("commit", "rollback")}
    held = {
        "transaction": transaction,
        "cursor_factory": refusing(driver.cursor_factory),
        "outbox_refuse": refuse,
        **calls,
    }
    own = vars(driver)
    before = {name: own[name] for name in held if name in own}
    own.update(held)

    def let() -> None:
        for name in held:
            own.pop(name, None)
        own.update(before)

    return let


def let_roll_back(driver: Any) -> None:
    """Let SQLAlchemy roll a transaction back that is held open."""
    getattr(driver, "__dict__", {}).pop("rollback", None)


@cache
def refusing(kind: type) -> type:
    """Return the class of cursors that refuse, on a connection that is held open, what would end its transaction."""

    def wrapped(name: str) -> Callable[..., Any]:
        def run(cursor: Any, query: Any, *args: Any, **options: Any) -> Any:
            refuse = getattr(cursor.connection, "outbox_refuse", None)
            if refuse is not None and (ending := ending_in(_text_of(query, cursor))):
                refuse(ending)
            return getattr(super(made, cursor), name)(query, *args, **options)

        return run

    made: type = type(kind.__name__, (kind,), {name: wrapped(name) for name in _RUNS})
    return made


def _text_of(query: Any, cursor: Any) -> str:
    if isinstance(query, str):
        return query
    if isinstance(query, bytes):
        return query.decode(errors="replace")
    return str(query.as_string(cursor)) if hasattr(query, "as_string") else "".join(getattr(query, "strings", ()))
