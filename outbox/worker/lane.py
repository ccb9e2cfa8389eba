"""A lane: a connection that a few duties share, one pass at a time.

A lane for asynchronous handlers: an event loop in a thread of its own, for as long as the worker runs.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection

from outbox.database.execute import driver_of
from outbox.database.runner import Pass
from outbox.message.model import Counts
from outbox.worker.database import Database, cut, discard, keep_alive

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

#: How long (seconds) a long pass keeps a lane that another duty waits for.
SLICE = 0.1


class Lane(ABC):
    """Runs passes on a connection of its own, which is opened when needed and dropped when a pass fails.

    ``source`` is the producer's database, None if it is the same one. From the moment ``stopping`` is set, no pass
    begins.
    """

    def __init__(self, database: Database, source: Database | None, stopping: threading.Event) -> None:
        self.database = database
        self.source = source
        self._stopping = stopping
        self._turn = Turns()
        self._began = 0.0
        self._interrupted = False
        self._ended = False

    def run(self, act: Pass) -> Counts:
        """Run one pass, after those who asked before."""
        try:
            with self._turn:
                return Counts() if self._stopping.is_set() else self._guarded(act)
        finally:
            if self._ended:
                self.end()

    def _guarded(self, act: Pass) -> Counts:
        self._began = time.monotonic()
        self._interrupted = False
        counts = self._act(act)
        return counts + Counts(more=True) if self._interrupted else counts

    def ending(self) -> bool:
        """Tell a running pass whether to end after its transaction: the worker stops, or others need the lane."""
        if self._stopping.is_set():
            return True
        if self._turn.wanted and time.monotonic() - self._began > SLICE:
            self._interrupted = True
            return True
        return False

    def end(self) -> None:
        """Close the connections, or cut them off under a pass that runs on; none begins any more."""
        self._ended = True
        if self._turn.taken:
            self.cut()
        else:
            self.close()

    @abstractmethod
    def close(self) -> None:
        """Close the connections; no pass is running."""

    @abstractmethod
    def cut(self) -> None:
        """Take the connections away from a pass that runs on: what it has not committed is rolled back."""

    @abstractmethod
    def _act(self, act: Pass) -> Counts:
        """Run the pass on open connections."""


class SyncLane(Lane):
    """A lane for passes that run in the calling thread."""

    def __init__(self, database: Database, source: Database | None, stopping: threading.Event) -> None:
        super().__init__(database, source, stopping)
        self._connections: tuple[Connection, Connection] | None = None
        self._drivers: tuple[Any, ...] = ()

    @property
    def backend_pid(self) -> int | None:
        """The server process behind the open connection."""
        return self._drivers[0].info.backend_pid if self._drivers else None

    def close(self) -> None:
        """Close the connections; no pass is running."""
        connections, self._connections = self._connections, None
        drivers, self._drivers = self._drivers, ()
        for connection in reversed(connections or ()):
            discard(connection)
        for driver in drivers:
            # SQLAlchemy drops an invalidated connection without closing it.
            driver.close()

    def last(self, act: Callable[[Connection], None]) -> None:
        """Do something on the connection although no pass begins any more; nothing if it isn't open and free."""
        if self._turn.taken:
            return
        with self._turn, suppress(Exception):  # nobody waits for it, and nothing depends on it
            if self._connections is not None and not self._ended:
                act(self._connections[0])
        if self._ended:
            self.end()

    def cut(self) -> None:
        """Take the connections away from a pass that runs on."""
        for driver in self._drivers:
            cut(driver)

    def _act(self, act: Pass) -> Counts:
        try:
            connection, source = self._open()
            counts = act(connection, source)
            for each in {connection, source}:
                if each.in_transaction():
                    each.rollback()
        except BaseException:
            self.close()
            raise
        return counts

    def _open(self) -> tuple[Connection, Connection]:
        if self._connections is None:
            connection = self.database.connect()
            self._connections = connection, connection
            if self.source is not None:
                self._connections = connection, self.source.connect()
            self._drivers = tuple(driver_of(each) for each in dict.fromkeys(self._connections))
        return self._connections


class Turns:
    """A lock that is given to those who wait in the order in which they came.

    A busy duty releases its lane and takes it again at once: with an ordinary lock the others would never get it.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()

    @property
    def taken(self) -> bool:
        """Has anybody got it?"""
        return self._taken

    @property
    def wanted(self) -> bool:
        """Is anybody waiting?"""
        return bool(self._waiting)

    def __enter__(self) -> None:
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        mine.acquire()

    def __exit__(self, *_: object) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False


_CLOSE_TIMEOUT = 5.0


class AsyncLane(Lane):
    """Runs passes in the event loop, by ``run_sync``: the same code, with connections that belong to the loop.

    The loop goes on between passes, so tasks and clients that a handler leaves behind live on.
    """

    def __init__(self, database: Database, source: Database | None, stopping: threading.Event) -> None:
        super().__init__(database, source, stopping)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._engines: list[AsyncEngine] = []
        self._connections: tuple[AsyncConnection, AsyncConnection] | None = None
        self._drivers: tuple[Any, ...] = ()
        self._task: asyncio.Task[Any] | None = None

    def close(self) -> None:
        """Close the connections and end the loop; no pass is running."""
        loop, self._loop = self._loop, None
        if loop is None or self._thread is None:
            return
        with suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._close(), loop).result(_CLOSE_TIMEOUT)
        loop.call_soon_threadsafe(self._over.set)
        self._thread.join(_CLOSE_TIMEOUT)

    def cut(self) -> None:
        """Take the connections away from a pass that runs on, and cancel it."""
        # First the connection: a handler that catches its cancellation still can't commit.
        for driver in self._drivers:
            cut(driver)
        if self._loop is not None and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)

    def _act(self, act: Pass) -> Counts:
        outcome = asyncio.run_coroutine_threadsafe(self._run(act), self._loop or self._start()).result()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _start(self) -> asyncio.AbstractEventLoop:
        started: Future[asyncio.AbstractEventLoop] = Future()

        async def until_closed() -> None:
            self._over = asyncio.Event()
            started.set_result(asyncio.get_running_loop())
            await self._over.wait()

        self._thread = threading.Thread(
            target=asyncio.run, args=(until_closed(),), name="outbox-worker-loop", daemon=True
        )
        self._thread.start()
        self._loop = started.result()
        return self._loop

    async def _run(self, act: Pass) -> Counts | BaseException:
        self._task = asyncio.current_task()
        try:
            connection, source = await self._open()
            raw_source = source.sync_connection
            assert raw_source is not None  # noqa: S101 - it is open
            counts = await connection.run_sync(lambda raw: act(raw, raw if source is connection else raw_source))
            for each in {connection, source}:
                if each.in_transaction():
                    await each.rollback()
        except (SystemExit, KeyboardInterrupt) as error:
            # Raised out of a task, these would end the loop, and with it all passes to come.
            await self._close()
            return error
        except BaseException:
            await self._close()
            raise
        return counts

    async def _open(self) -> tuple[AsyncConnection, AsyncConnection]:
        if self._connections is None:
            connection = await self._connect(self.database)
            self._connections = connection, connection
            if self.source is not None:
                self._connections = connection, await self._connect(self.source)
        return self._connections

    async def _connect(self, database: Database) -> AsyncConnection:
        engine = database.async_engine()
        self._engines.append(engine)
        connection = await engine.connect()
        driver = (await connection.get_raw_connection()).driver_connection
        keep_alive(driver)
        self._drivers = (*self._drivers, driver)
        return connection

    async def _close(self) -> None:
        connections, self._connections = self._connections, None
        drivers, self._drivers = self._drivers, ()
        engines, self._engines = self._engines, []
        for connection in dict.fromkeys(connections or ()):
            # A connection that broke is closed already, whatever its rollback says.
            with suppress(Exception):
                await connection.close()
        for driver in drivers:
            # SQLAlchemy drops an invalidated connection without closing it.
            await driver.close()
        for engine in engines:
            await engine.dispose()


class Runners:
    """Makes connections for checkers and compensations, and ends those that are open when the worker ends."""

    def __init__(self, database: Database, stopping: threading.Event) -> None:
        self._database = database
        self._stopping = stopping
        self._open: weakref.WeakSet[Lane] = weakref.WeakSet()

    def __call__(self, is_async: bool) -> Lane:
        """Make one, for async functions or plain ones."""
        lane = (AsyncLane if is_async else SyncLane)(self._database, None, self._stopping)
        self._open.add(lane)
        return lane

    def end(self) -> None:
        """End those that are open: what runs on is cut off, and rolled back."""
        for lane in list(self._open):
            lane.end()
