"""A proxy between a relay and its broker, which loses what the broker answers: the network on a bad day.

It passes on all that the relay says, until at a random moment it does one of two things, by turns. It passes on what
the relay has just said, and keeps from it whatever the broker answers, for a while; then it cuts the connection. Or it
cuts that right behind what it has passed on. So the broker has messages of which the relay doesn't know that.
"""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from contextlib import suppress
from types import TracebackType

_CHUNK = 64 * 1024
#: So many pieces of what relays say come between two blows, at least and at most.
_PIECES = (8, 40)
#: How long (seconds) answers are kept back, at most: some relays have given up before, others haven't.
_SILENCE = 4.0


class Proxy:
    """Listens on ``port`` of this machine, and leads to the port ``to``, once that is set; a thread serves it.

    ``cuts`` are the connections that it has cut at once, ``dropped`` those in which it has kept an answer back.
    """

    def __init__(self, seed: int) -> None:
        self.to: int | None = None
        self.cuts = self.dropped = 0
        self._dice = random.Random(seed)
        self._left, self._blows = _PIECES[0], 0
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=200)
        self.port = int(self._listening.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(asyncio.start_server(self._begin, sock=self._listening))
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self._listening.close()
            self._loop.close()

    async def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.CancelledError):
            try:
                await self._connect(reader, writer)
            finally:
                writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on between a relay and its broker, until one of them ends, or the connection is cut."""
        if self.to is None:
            return
        theirs, to_broker = await asyncio.open_connection("127.0.0.1", self.to)
        line = _Line()
        try:
            both = [
                asyncio.ensure_future(self._to_broker(line, reader, to_broker)),
                asyncio.ensure_future(self._to_relay(line, theirs, writer)),
            ]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for each in both:
                each.cancel()
            await asyncio.gather(*both, return_exceptions=True)
        finally:
            to_broker.close()  # behind what was written
            self.dropped += line.kept_back

    async def _to_broker(self, line: _Line, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(_CHUNK):
            blow = not line.silent and self._is_due()
            line.silent = line.silent or (blow and self._blows % 2 == 1)
            writer.write(piece)
            await writer.drain()
            if blow and line.silent:
                asyncio.get_running_loop().call_later(self._dice.uniform(0.1, _SILENCE), writer.transport.abort)
            elif blow:
                self.cuts += 1
                return

    async def _to_relay(self, line: _Line, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(_CHUNK):
            if line.silent:
                line.kept_back = True
                continue
            writer.write(piece)
            await writer.drain()

    def _is_due(self) -> bool:
        self._left -= 1
        if self._left > 0:
            return False
        self._left = self._dice.randint(*_PIECES)
        self._blows += 1
        return True


class _Line:
    """A connection: whether what the broker answers is kept back, and whether something was."""

    def __init__(self) -> None:
        self.silent = self.kept_back = False
