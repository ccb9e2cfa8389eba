"""Connections of the worker's own: made as the application makes them, and taken away when the worker must end.

A runner holds connections to one database, and to the producer's database if that is another one, and runs passes on
them. Duties run on them for as long as the worker lives; checkers and compensations get runners of their own.
"""

from __future__ import annotations

import asyncio
import contextvars
import socket
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sqlalchemy import URL, Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.util import await_only, greenlet_spawn

from outbox.database.dialect import url_of
from outbox.database.engines import (
    KEEP_COUNT,
    KEEP_IDLE,
    KEEP_INTERVAL,
    PREPARE_AFTER,
    SERVER_KEEP_ALIVE,
    Pass,
    address_of,
    connect,
    discard,
    engine_like,
    engine_of,
    know_engine,
    psycopg_engine,
    start_loop,
)
from outbox.database.execute import Statement, driver_of, execute
from outbox.message.model import Counts
from outbox.text import database_address

if TYPE_CHECKING:
    from outbox.database.engines import Bind

T = TypeVar("T")

# The last one, of PostgreSQL 14 and later, also while a statement runs.
_OF_SERVER = SERVER_KEEP_ALIVE | {"client_connection_check_interval": f"{KEEP_IDLE}s"}
_WATCH = """
SELECT set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) s (name, value) JOIN pg_settings USING (name)
"""
# A search path that names pg_catalog after another schema prefers that one's functions and operators, of which only a
# qualified statement can be sure. Where it isn't named it comes first, and nothing else changes.
_CATALOG_FIRST = Statement("""
SELECT pg_catalog.set_config('search_path', pg_catalog.string_agg(pg_catalog.quote_ident(name::pg_catalog.text), ', '
                                                                  ORDER BY number), false)
  FROM pg_catalog.unnest(pg_catalog.current_schemas(false)) WITH ORDINALITY s (name, number)
 WHERE name OPERATOR(pg_catalog.<>) 'pg_catalog'
HAVING pg_catalog.array_position(pg_catalog.current_schemas(false), 'pg_catalog'::pg_catalog.name)
       OPERATOR(pg_catalog.>) 1
""")
_WHICH = Statement("SELECT pg_catalog.pg_backend_pid(), pg_catalog.current_setting('application_name')")
_NAME = "SELECT pg_catalog.set_config('application_name', %s, false)"
# As many bytes as PostgreSQL keeps.
_LONGEST_NAME = 63
# Seconds in which the connections of an event loop must close.
_CLOSE_TIMEOUT = 5.0


class WorkerDatabase:
    """Opens connections to one database.

    They are made as those of the engine that was given, with its connect arguments and listeners, and are detached from
    its pool: they don't count in its size.
    """

    def __init__(self, bind: Bind) -> None:
        self.bind = bind
        self.url: URL = url_of(bind)
        self.engine: Engine = engine_of(bind, None)

    def engine_of_loop(self) -> Engine:
        """Return what a connection is made by in one event loop: a pool that connects for several at once has one lock.

        Raises:
            InvalidSettings: the engine that was given opens its own in a way that can't be carried over.
        """
        return engine_like(self.bind, None, is_async=True)

    @property
    def name(self) -> str:
        """Where it is, for logs: no password."""
        return database_address(self.url)

    @property
    def address(self) -> str:
        """What distinguishes two databases."""
        return address_of(self.bind)

    def connect(self, name: str = "outbox", *, is_async: bool = False) -> Connection:
        """Open a connection of this name, with ``is_async`` inside an event loop; the caller closes it."""
        connection = connect(self.engine_of_loop() if is_async else self.engine)
        try:
            connection.detach()
            keep_alive(driver_of(connection))
            # A driver other than psycopg says nothing of what psycopg prepares.
            by_psycopg = psycopg_engine(self.bind) or psycopg_engine(self.bind, is_async=True)
            set_up(connection, name, by_url=by_psycopg is None)
        except BaseException:
            connection.close()
            raise
        return connection


def keep_alive(driver: Any) -> None:
    """Have the kernel test an idle TCP connection, so that a server which vanished is noticed within half a minute."""
    with suppress(OSError), _socket(driver) as sock:  # without it, the server's end of the watch remains
        if sock.family == socket.AF_UNIX:
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_KEEPIDLE", KEEP_IDLE),
            ("TCP_KEEPINTVL", KEEP_INTERVAL),
            ("TCP_KEEPCNT", KEEP_COUNT),
        ):
            if (number := cast("int | None", getattr(socket, option, None))) is not None:
                sock.setsockopt(socket.IPPROTO_TCP, number, value)


def set_up(connection: Connection, name: str, *, by_url: bool) -> None:
    """Set what a session of a worker's needs, unless a pooler would hand the session to others.

    The server is to test this host, so that a worker which vanished keeps no lock for longer than half a minute (by
    itself it would wait for two hours); functions and operators are to be PostgreSQL's own; and a session that the
    application hasn't named is called ``name``. A pooler invents the number of the server process. ``by_url``: the
    connection was made by `arguments_of`, which prepares nothing in case that there is a pooler.
    """
    (((pid, called),),) = execute(connection, _WHICH)
    driver = driver_of(connection)
    if pid != driver.info.backend_pid:
        return
    execute(connection, _CATALOG_FIRST)
    with suppress(DBAPIError):  # a platform without one of them
        execute(connection, Statement(_WATCH, (list(_OF_SERVER), list(_OF_SERVER.values()))))
    if called in {"", "outbox"}:
        execute(connection, Statement(_NAME, (name[:_LONGEST_NAME],)))
    if by_url and driver.prepare_threshold is None:
        driver.prepare_threshold = PREPARE_AFTER


def cut(driver: Any) -> None:
    """End a connection that another thread may be using: client and server see it closed, and the server rolls back.

    The socket is shut down rather than the connection closed, since libpq's is no thread-safe object.
    """
    with suppress(Exception), _socket(driver) as sock:  # it is closed already
        sock.shutdown(socket.SHUT_RDWR)


def _socket(driver: Any) -> socket.socket:
    """Return a second handle of the connection's socket."""
    return socket.socket(fileno=socket.dup(driver.fileno()))


@dataclass(frozen=True)
class PassContext:
    """The frame of each pass of a worker's runners.

    ``active`` is entered for the time of a pass. ``loop`` is the application's event loop, which async functions then
    run on, with its context variables as they were in ``variables``; None: each runner has a loop of its own.
    """

    active: Callable[[], AbstractContextManager[object]] = nullcontext
    loop: asyncio.AbstractEventLoop | None = None
    variables: contextvars.Context | None = None


class OwnRunner:
    """Runs passes, one at a time, on connections that are opened when needed and closed when a pass fails.

    It runs them in the calling thread. ``source`` is the producer's database, None if it is the same one. Once
    ``stopping`` is set, no pass begins. ``name`` is what the server calls the connections. ``on_source`` is called with
    new connections, before any pass: an address may lead to another database than before.
    """

    on_source: Callable[[Connection, Connection], object] | None = None

    def __init__(
        self,
        database: WorkerDatabase,
        source: WorkerDatabase | None,
        stopping: threading.Event,
        context: PassContext | None = None,
        name: str = "outbox",
    ) -> None:
        self.database = database
        self.source = source
        self.name = name
        self._context = context or PassContext()
        self._connections: tuple[Connection, Connection] | None = None
        self._drivers: tuple[Any, ...] = ()
        self._stopping = stopping
        self._guard = threading.Lock()
        self._busy = False
        self._ended = False

    @property
    def backend_pid(self) -> int | None:
        """The server process behind the open connection."""
        return self._drivers[0].info.backend_pid if self._drivers else None

    def active(self) -> AbstractContextManager[object]:
        """Return the frame of each pass, for code that does something else for the same Outbox."""
        return self._context.active()

    def run(self, one_pass: Pass) -> Counts:
        """Run a pass; return empty counts, without running it, when the worker stops."""
        return Counts() if self._stopping.is_set() else self._occupied(one_pass)

    def last(self, one_pass: Pass) -> None:
        """Run a pass although the worker stops, if the connection is open and free; an error is of no interest."""
        if self._drivers and not self._busy:
            with suppress(Exception):  # no caller is left that could do something about it
                self._occupied(one_pass)

    def end(self) -> None:
        """Close the connections, or cut them off under a pass that runs on; no pass begins any more."""
        with self._guard:
            self._ended, busy = True, self._busy
        if busy:
            self.cut()
        else:
            self.close()

    def close(self) -> None:
        """Close the connections; no pass is running."""
        connections, self._connections = self._connections, None
        drivers, self._drivers = self._drivers, ()
        for connection in reversed(connections or ()):
            discard(connection)
        for driver in drivers:
            # SQLAlchemy drops an invalidated connection without closing it.
            self._close_driver(driver)

    def cut(self) -> None:
        """Take the connections away from a pass that runs on: its open transactions are rolled back."""
        for driver in self._drivers:
            cut(driver)

    def _occupied(self, one_pass: Pass) -> Counts:
        with self._guard:
            if self._ended:
                return Counts()
            self._busy = True
        try:
            return self._run(one_pass)
        finally:
            with self._guard:
                self._busy, ended = False, self._ended
            if ended:
                self.close()

    def _run(self, one_pass: Pass) -> Counts:
        try:
            connection, source = self._open()
            with self.active():
                # To connect may have taken longer than the worker had left.
                counts = Counts() if self._ended else one_pass(connection, source)
            for each in {connection, source}:
                if each.in_transaction():
                    each.rollback()
        except BaseException:
            OwnRunner.close(self)  # the connections only: an event loop goes on
            raise
        return counts

    def _open(self) -> tuple[Connection, Connection]:
        if self._connections is None:
            connection = self._connect(self.database)
            self._connections = connection, connection
            know_engine(connection, self.database.bind)
            if self.source is not None:
                self._connections = connection, self._connect(self.source)
            self._drivers = tuple(driver_of(each) for each in dict.fromkeys(self._connections))
            if self.source is not None and self.on_source is not None:
                self.on_source(*self._connections)
        return self._connections

    def _connect(self, database: WorkerDatabase) -> Connection:
        return database.connect(self.name)

    def _close_driver(self, driver: Any) -> None:
        driver.close()


class AsyncRunner(OwnRunner):
    """Runs passes in an event loop: the same code, as ``run_sync`` runs it, with connections that belong to the loop.

    The loop is the application's, or one of the runner's own, which goes on between passes, so tasks and clients that a
    handler leaves behind live on. The calling thread waits for the pass. A loop that is blocked meanwhile only makes it
    longer: the locks of its transaction are the server's, and nothing runs out.
    """

    _own_loop: asyncio.AbstractEventLoop | None = None
    _thread: threading.Thread | None = None
    _task: asyncio.Task[Any] | None = None

    @property
    def _loop(self) -> asyncio.AbstractEventLoop | None:
        return self._context.loop or self._own_loop

    def close(self) -> None:
        """Close the connections and end the runner's own loop; no pass is running."""
        loop, self._own_loop = self._loop, None
        if loop is None:
            return
        with suppress(Exception):  # the loop ends, and its connections with it
            self._submit(loop, greenlet_spawn(super().close)).result(_CLOSE_TIMEOUT)
        if self._thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(_CLOSE_TIMEOUT)

    def cut(self) -> None:
        """Take the connections away from a pass that runs on, and cancel it."""
        # First the connection: a handler that catches its cancellation still can't commit.
        super().cut()
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # the application has closed its loop
                self._loop.call_soon_threadsafe(self._task.cancel)

    def _run(self, one_pass: Pass) -> Counts:
        outcome = self._submit(self._loop or self._start(), self._in_loop(one_pass)).result()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _submit(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Have a task of the loop do it, with the application's context variables."""
        variables = (self._context.variables or contextvars.copy_context()).copy()
        try:
            return variables.run(asyncio.run_coroutine_threadsafe, work, loop)
        except RuntimeError:  # the application has closed its loop
            work.close()
            raise

    async def _in_loop(self, one_pass: Pass) -> Counts | BaseException:
        self._task = asyncio.current_task()
        try:
            return await greenlet_spawn(super()._run, one_pass)
        except (SystemExit, KeyboardInterrupt) as error:
            # Raised out of a task, these would end the loop, and with it all passes to come.
            return error

    def _start(self) -> asyncio.AbstractEventLoop:
        self._own_loop, self._thread = start_loop("outbox-worker-loop")
        return self._own_loop

    def _connect(self, database: WorkerDatabase) -> Connection:
        return database.connect(self.name, is_async=True)

    def _close_driver(self, driver: Any) -> None:
        await_only(driver.close())


class Runners:
    """Makes connections for checkers and compensations, and ends those that are open when the worker ends."""

    def __init__(
        self,
        database: WorkerDatabase,
        stopping: threading.Event,
        context: PassContext | None = None,
        name: str = "outbox",
    ) -> None:
        self._database = database
        self._stopping = stopping
        self._context = context
        self._name = name
        self._open: weakref.WeakSet[OwnRunner] = weakref.WeakSet()

    def __call__(self, is_async: bool) -> OwnRunner:
        """Make one, for async functions or plain ones."""
        kind = AsyncRunner if is_async else OwnRunner
        runner = kind(self._database, None, self._stopping, self._context, self._name)
        self._open.add(runner)
        return runner

    def end(self) -> None:
        """End those that are open: passes that run on are cut off, and rolled back."""
        for runner in list(self._open):
            runner.end()
