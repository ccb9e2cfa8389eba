"""A lane: a connection that a few duties share, one pass at a time."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection

from outbox.model import Counts
from outbox.store.execute import driver_of
from outbox.worker.database import Database, cut, discard

#: A pass: gets a connection to the database, and one to the producer's (the same object where it is the same).
Pass = Callable[[Connection, Connection], Counts]

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
