"""Engines for what names a database (an engine, of an async engine its URL, or a URL), connections of theirs, runners.

A checker or a compensation runs on a connection of its own, so that it can be taken away from a function that doesn't
end.
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sqlalchemy import URL, Engine, NullPool, create_engine, make_url
from sqlalchemy.exc import DBAPIError

from outbox.database.execute import DRIVERS, PSYCOPG, is_lost
from outbox.errors import InvalidSettings, TransactionRequired
from outbox.message.model import Counts
from outbox.text import database_address

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncEngine

    Bind = Engine | AsyncEngine | URL | str

T = TypeVar("T")

_CONNECT_TIMEOUT = 10
#: Seconds until a peer that fell silent is noticed: KEEP_IDLE + KEEP_COUNT * KEEP_INTERVAL.
KEEP_IDLE, KEEP_INTERVAL, KEEP_COUNT = 10, 5, 3
#: The same as libpq's options of a connection,
KEEP_ALIVE = {
    "keepalives_idle": f"{KEEP_IDLE}",
    "keepalives_interval": f"{KEEP_INTERVAL}",
    "keepalives_count": f"{KEEP_COUNT}",
}
#: and as settings of the server's side.
SERVER_KEEP_ALIVE = {
    "tcp_keepalives_idle": f"{KEEP_IDLE}s",
    "tcp_keepalives_interval": f"{KEEP_INTERVAL}s",
    "tcp_keepalives_count": f"{KEEP_COUNT}",
    "tcp_user_timeout": f"{KEEP_IDLE + KEEP_COUNT * KEEP_INTERVAL}s",
}
#: As often as psycopg executes a statement before it prepares it, unless it is told otherwise.
PREPARE_AFTER = 5
_THRESHOLD = "prepare_threshold"
#: What is between databases: blanks, lines, or a comma before the next one; a comma between hosts of one URL isn't.
_BETWEEN = re.compile(r",?\s+|,$|,(?=(?:[\w.-]+=)?\w+(?:\+\w+)?://)")


#: What the drivers with which an application sends are called in URLs. What works on the tables has psycopg 3.
_OTHERS = frozenset({"postgresql", *(f"postgresql+{driver}" for driver in DRIVERS if driver != PSYCOPG)})
#: Options of asyncpg's, which libpq doesn't know.
_OF_ASYNCPG = ("prepared_statement_cache_size", "prepared_statement_name_func")


def url_of(bind: Bind) -> URL:
    """Return the URL of a database for psycopg, also where it names no driver, psycopg2 or asyncpg."""
    url = make_url(bind) if isinstance(bind, str | URL) else bind.url
    if url.drivername not in _OTHERS:
        return url
    if "ssl" in url.query:  # as asyncpg calls it, with libpq's values
        url = url.update_query_dict({"sslmode": url.query["ssl"]}).difference_update_query(["ssl"])
    return url.set(drivername="postgresql+psycopg").difference_update_query(_OF_ASYNCPG)


def psycopg_engine(bind: Bind) -> Engine | None:
    """Return the engine that was given if passes and acts can run on it: a sync one of psycopg 3."""
    return bind if isinstance(bind, Engine) and bind.dialect.driver == PSYCOPG else None


def usable_anywhere(engine: Engine) -> Engine:
    """Return the engine; of an async one, which belongs to an event loop, one of its URL that keeps no connections."""
    return engine_of(engine.url) if engine.dialect.is_async else engine


def address_of(url: URL) -> str:
    """Return what tells two databases apart; no password."""
    return f"{database_address(url)}?{sorted(url.query.items())}"


def named_url(text: str) -> tuple[str, str]:
    """Return name and URL of ``name=url``; the name of an URL alone is empty."""
    name, equals, url = text.partition("=")
    return (name, url) if equals and "://" not in name else ("", text)


def named_urls(text: str) -> list[tuple[str, str]]:
    """Return the names and URLs of databases, of which each is ``name=url`` or an URL."""
    return [named_url(word) for word in _BETWEEN.split(text) if word]


def engine_of(bind: Bind, timeout: int | None = _CONNECT_TIMEOUT, *, name: str = "outbox", **options: Any) -> Engine:
    """Return an engine as it is, else one for the URL, with the arguments of `arguments_of`.

    It keeps no connections, unless ``options`` name another pool.
    """
    if (engine := psycopg_engine(bind)) is not None:
        return engine
    url, arguments = arguments_of(url_of(bind), name, timeout)
    return create_engine(url, connect_args=arguments, **({"poolclass": NullPool} | options))


def arguments_of(url: URL, name: str, timeout: int | None = None) -> tuple[URL, dict[str, Any]]:
    """Return the URL and the driver's arguments by which a URL alone is connected to.

    Nothing is prepared on the server, since there may be any transaction pooler in between; ``prepare_threshold=5`` in
    the URL says otherwise. ``name`` is what the server calls the connection (``application_name``), and ``timeout`` for
    how many seconds a host is waited for, unless the URL or the environment says so.

    Raises:
        InvalidSettings: a ``prepare_threshold`` that isn't a number.
    """
    arguments: dict[str, Any] = {"prepare_threshold": None, "fallback_application_name": name}
    if timeout is not None and "connect_timeout" not in url.query:
        arguments["connect_timeout"] = timeout
    if (prepared := url.query.get(_THRESHOLD)) is not None:
        if not isinstance(prepared, str) or not prepared.isdecimal():
            raise InvalidSettings(f"{_THRESHOLD} = {prepared!r} in the URL must be a number, such as 5")
        arguments[_THRESHOLD] = int(prepared)
    return url.difference_update_query([_THRESHOLD]), arguments


def calling_engine(bind: Engine | AsyncEngine) -> Engine:
    """Return the engine on which calling code does its acts: of an AsyncEngine, that of code inside ``run_sync``.

    Raises:
        TransactionRequired: it is an AsyncEngine, and the code isn't inside ``run_sync``.
    """
    if isinstance(bind, Engine):
        return engine_of(bind)
    from sqlalchemy.ext.asyncio import create_async_engine  # noqa: PLC0415 - needs greenlet
    from sqlalchemy.util.concurrency import in_greenlet  # noqa: PLC0415 - needs greenlet

    if not in_greenlet():
        raise TransactionRequired(
            "this Outbox is bound to an AsyncEngine: await outbox.run_sync(function, ...), such as "
            "outbox.run_sync(outbox.commit, half_id), or outbox.run_sync(lambda: outbox.operator.resend(...))"
        )
    if bind.dialect.driver == PSYCOPG:
        return bind.sync_engine
    url, arguments = arguments_of(url_of(bind), "outbox")
    return create_async_engine(url, connect_args=arguments, poolclass=NullPool).sync_engine


async def run_from_async(bind: Engine | AsyncEngine, work: Callable[[], T]) -> T:
    """Do work that uses an engine without an await: on the caller's loop for an AsyncEngine, else in a thread."""
    if isinstance(bind, Engine):
        return await asyncio.to_thread(work)
    from sqlalchemy.util import greenlet_spawn  # noqa: PLC0415 - needs what only async callers have installed

    return await greenlet_spawn(work)


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
    with suppress(Exception):  # it is given up in any case
        connection.close()


# --- runners ---------------------------------------------------------------------------------------------

#: One pass over some work. It gets a connection to the database, and one to the producer's database; the same object
#: twice where both are one. Neither is in a transaction.
Pass = Callable[["Connection", "Connection"], Counts]


class Runner(Protocol):
    """Runs passes, one at a time, on a connection of its own."""

    def run(self, one_pass: Pass) -> Counts:
        """Run a pass; may return empty counts without running it when the worker ends."""

    def end(self) -> None:
        """Close the connection, or cut it off under a pass that runs on: what that did is rolled back."""


#: Makes a runner, for async functions (True) or plain ones.
NewRunner = Callable[[bool], Runner]


#: Where a connection of a runner has the engine of its `Outbox`, which may be another one: of an application's driver.
OUTBOX_ENGINE = "outbox.engine"


def know_engine(connection: Connection, bind: Bind) -> None:
    """Let code that runs on a connection know the engine of the Outbox for which it was opened."""
    if not isinstance(bind, str | URL):
        connection.info[OUTBOX_ENGINE] = getattr(bind, "sync_engine", bind)


class EngineRunner:
    """Runs passes with plain functions; its connection goes back to the engine's pool after each pass."""

    def __init__(self, bind: Bind) -> None:
        self._bind = bind
        self._engine = engine_of(bind)

    def run(self, one_pass: Pass) -> Counts:
        """Run a pass on a connection of the pool."""
        # Whatever level the application has chosen: a pass reads what others have written until it had its locks.
        with self._engine.connect().execution_options(isolation_level="READ COMMITTED") as connection:
            know_engine(connection, self._bind)
            return one_pass(connection, connection)

    def end(self) -> None:
        """Do nothing: a pass that runs on keeps its connection until it ends."""


def start_loop(name: str) -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    """Start an event loop in a thread of its own, which runs until the loop is stopped."""
    # With a factory, it doesn't become the loop of the calling thread too.
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    loop = runner.get_loop()

    def serve() -> None:
        with runner:
            loop.run_forever()

    thread = threading.Thread(target=serve, name=name, daemon=True)
    thread.start()
    return loop, thread


class LoopRunner:
    """Runs passes with async functions on an event loop, for a thread that waits for them; each on a new connection."""

    def __init__(self, bind: Bind, loop: asyncio.AbstractEventLoop) -> None:
        self._bind = bind
        self._loop = loop

    def run(self, one_pass: Pass) -> Counts:
        """Run a pass as a task of the loop."""
        return asyncio.run_coroutine_threadsafe(self._run(one_pass), self._loop).result()

    async def _run(self, one_pass: Pass) -> Counts:
        from sqlalchemy.ext.asyncio import create_async_engine  # noqa: PLC0415 - needs greenlet

        def known(connection: Connection) -> Counts:
            know_engine(connection, self._bind)
            return one_pass(connection, connection)

        url, arguments = arguments_of(url_of(self._bind), "outbox")
        engine = create_async_engine(url, connect_args=arguments, poolclass=NullPool)
        async with engine.connect() as connection:
            return await connection.run_sync(known)

    def end(self) -> None:
        """Do nothing: the connection was closed with its pass."""


class Backoff:
    """Waits in seconds that double from ``first`` to ``cap``, each shortened by up to half at random.

    The randomness keeps all who wait for the same database from coming back in the same moment. Not thread-safe.
    """

    def __init__(self, first: float, cap: float) -> None:
        self._first = min(first, cap)
        self._cap = cap
        self._next = self._first

    def next(self) -> float:
        """Return the next wait."""
        wait, self._next = self._next, min(self._next * 2, self._cap)
        return wait * random.uniform(0.5, 1)  # noqa: S311 - jitter, no secret

    def reset(self) -> None:
        """Begin with the first wait again."""
        self._next = self._first
