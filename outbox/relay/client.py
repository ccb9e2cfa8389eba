"""A client of a broker: one of a process, on an event loop of its own, whatever threads and loops use it."""

from __future__ import annotations

import asyncio
import os
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Generic, TypeVar

from outbox.database.engines import start_loop

C = TypeVar("C")

# Seconds in which a connection must be closed when a worker ends.
_CLOSE_TIMEOUT = 5.0
# Turns of a loop in which what a closed connection calls has begun.
_TURNS = 10


class LoopClient(ABC, Generic[C]):
    """Connects when it is first needed, and again after `_drop` or `close`."""

    name: str

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: tuple[asyncio.AbstractEventLoop, threading.Thread, int] | None = None
        self._client: C | None = None
        self._connecting: asyncio.Lock | None = None

    @abstractmethod
    async def _connect(self) -> C:
        """Return a client that is connected."""

    @abstractmethod
    async def _disconnect(self, client: C) -> None:
        """Close a client."""

    async def _connected(self) -> C:
        if self._connecting is None:
            self._connecting = asyncio.Lock()
        async with self._connecting:
            if self._client is None:
                self._client = await self._connect()
            return self._client

    async def _drop(self, client: C | None) -> None:
        """Close the client, so that the next call connects anew."""
        if client is not None and client is self._client:
            self._client = None
            with suppress(Exception):  # it is of no use any more
                async with asyncio.timeout(_CLOSE_TIMEOUT):
                    await self._disconnect(client)

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            # A fork has neither the thread nor the connection.
            if self._loop is None or self._loop[2] != os.getpid():
                self._client = self._connecting = None
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
        self._client = self._connecting = None
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_CLOSE_TIMEOUT)
