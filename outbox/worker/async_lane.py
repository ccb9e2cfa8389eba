"""A lane for asynchronous handlers: an event loop in a thread of its own, for as long as the worker runs."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from outbox.model import Counts
from outbox.worker.database import Database, cut, keep_alive
from outbox.worker.lane import Lane, Pass

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

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
