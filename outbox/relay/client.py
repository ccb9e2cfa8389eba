"""A client of a broker: all threads and loops of a process share one, which has an event loop of its own."""

from __future__ import annotations

import asyncio
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Generic, TypeVar

from outbox.database.engines import start_loop

C = TypeVar("C")
T = TypeVar("T")

# Seconds in which a connection must be closed when a worker ends.
_CLOSE_TIMEOUT = 5.0
#: Seconds in which what is cancelled must end.
CANCEL_TIMEOUT = 1.0
# Turns of a loop in which what a closed connection calls has begun.
_TURNS = 10


# Tasks that nothing waits for, and that must not be collected meanwhile.
_RUNNING: set[asyncio.Future[Any]] = set()


async def settled(tasks: Collection[asyncio.Future[T]], seconds: float) -> list[T | BaseException]:
    """Return what comes of tasks within so many seconds, or the exceptions; those that take longer are cancelled.

    Clients take no notice of that, some of them, for a while: they aren't waited for, and come to a `TimeoutError`.
    """
    try:
        await asyncio.wait(tasks, timeout=max(seconds, 0.0))
    finally:
        late = [task for task in tasks if not task.done()]
        for task in late:
            task.cancel()
            _RUNNING.add(task)
            task.add_done_callback(_ended)
    if late:
        await asyncio.wait(late, timeout=CANCEL_TIMEOUT)
    outcomes: list[T | BaseException] = []
    for task in tasks:
        error = TimeoutError() if not task.done() or task.cancelled() else task.exception()
        outcomes.append(task.result() if error is None else error)
    return outcomes


def _ended(task: asyncio.Future[Any]) -> None:
    _RUNNING.discard(task)
    if not task.cancelled():
        task.exception()  # else the loop would tell that it is of no interest to anything


class LoopClient(ABC, Generic[C]):
    """Connects when it is first needed, and again after `_drop`, `_give_up_opening` or `close`."""

    name: str

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: tuple[asyncio.AbstractEventLoop, threading.Thread, int] | None = None
        self._client: C | None = None
        self._opening: asyncio.Task[C] | None = None

    @abstractmethod
    async def _connect(self) -> C:
        """Return a client that is connected."""

    @abstractmethod
    async def _disconnect(self, client: C) -> None:
        """Close a client."""

    async def _connected(self) -> C:
        """Return the client; all that wait for it wait for one attempt to connect."""
        if self._client is not None:
            return self._client
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._connect())
            self._opening.add_done_callback(self._opened)
        return await asyncio.shield(self._opening)

    def _opened(self, task: asyncio.Task[C]) -> None:
        client = None if task.cancelled() or task.exception() is not None else task.result()
        if task is self._opening:
            self._opening, self._client = None, client
        elif client is not None:  # it came too late
            _RUNNING.add(closing := asyncio.ensure_future(self._closed(client)))
            closing.add_done_callback(_RUNNING.discard)

    def _give_up_opening(self) -> None:
        """Have the next call connect anew, also where a client takes no notice of being cancelled."""
        task, self._opening = self._opening, None
        if task is not None:
            task.cancel()

    async def _drop(self, client: C | None) -> None:
        """Close the client, so that the next call connects anew."""
        if client is not None and client is self._client:
            self._client = None
            await self._closed(client)

    async def _closed(self, client: C) -> None:
        # It is of no use any more, and may take no notice of anything.
        with suppress(Exception):
            await settled([asyncio.ensure_future(self._disconnect(client))], _CLOSE_TIMEOUT)

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            # A fork has neither the thread nor the connection.
            if self._loop is None or self._loop[2] != os.getpid():
                self._client = self._opening = None
                self._loop = *start_loop(f"outbox-{self.name}"), os.getpid()
            return self._loop[0]

    async def _end(self) -> None:
        """Close the client, and let the tasks end that it begins then."""
        await self._drop(self._client)
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=1.0)

    def close(self) -> None:
        """Close the connection, and end its loop; from any thread. The next use opens it again."""
        with self._lock:
            found, self._loop = self._loop, None
        if found is None or found[2] != os.getpid():
            return
        loop, thread, _ = found
        with suppress(Exception):  # the loop is ended all the same
            asyncio.run_coroutine_threadsafe(self._end(), loop).result(2 * _CLOSE_TIMEOUT)
        with self._lock:
            if self._loop is None:  # else it was opened again meanwhile
                self._client = self._opening = None
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_CLOSE_TIMEOUT)
