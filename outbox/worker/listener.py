"""Wake-ups from other processes: LISTEN on a producer's database, where that is possible.

It only makes things faster. Behind a transaction pooler LISTEN succeeds and nothing ever arrives, so it counts as
working only while notifications do arrive; when none came for a while, one is sent to oneself by another connection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from outbox.database.engines import discard
from outbox.database.execute import Backoff, driver_of
from outbox.database.sql import PING, listen
from outbox.telemetry.events import ListenerLost, ListenerSilent, ListenerWorking
from outbox.telemetry.hooks import emit
from outbox.text import message_of
from outbox.worker.connections import WorkerDatabase, cut
from outbox.worker.duty import jittered

#: Seconds without a notification after which a ping is sent, and in which it must arrive.
PING_AFTER = 30.0
PING_WITHIN = 5.0
_FIRST_WAIT = 0.1


class Listener:
    """A thread that listens on one database.

    ``wake`` is called with the news of new messages (`outbox.database.sql.read_news`), with `OPS`, or with None when
    anything may have been missed.
    ``ping`` has `PING` sent by another connection. What the server processes ``own_pids`` sent is known here already.
    """

    def __init__(
        self,
        database: WorkerDatabase,
        schema: str,
        *,
        name: str = "outbox",
        wake: Callable[[str | None], None],
        ping: Callable[[], None],
        own_pids: Callable[[], Collection[int | None]],
        stopping: threading.Event,
        reconnect_cap: float,
    ) -> None:
        self._database = database
        self._schema = schema
        self._name = name
        self._wake = wake
        self._ping = ping
        self._own_pids = own_pids
        self._stopping = stopping
        self._backoff = Backoff(_FIRST_WAIT, reconnect_cap)
        self._driver: Any = None
        self._lost = False
        #: Do notifications arrive?
        self.working: bool = False
        self._thread = threading.Thread(target=self._run, name="outbox-worker-listener", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the connection, and so the thread; ``stopping`` is set."""
        if self._driver is not None:
            cut(self._driver)
        if self._thread.is_alive():
            self._thread.join(PING_WITHIN)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                connection = self._database.connect(self._name)
                try:
                    self._listen(driver_of(connection))
                finally:
                    discard(connection)
            except Exception as error:  # whatever it is: listen again
                self._failed(error)
            self._stopping.wait(self._backoff.next())

    def _listen(self, driver: Any) -> None:
        self._driver = driver
        driver.autocommit = True
        driver.execute(listen(self._schema))
        self._backoff.reset()
        self._lost = False
        # A notification before the LISTEN is lost.
        self._wake(None)
        ping_at, ping_until = time.monotonic(), 0.0
        while not self._stopping.is_set():
            now = time.monotonic()
            if now >= ping_at:
                self._ping()
                ping_at, ping_until = now + jittered(PING_AFTER), now + PING_WITHIN
            elif ping_until and now >= ping_until:
                self._set_working(False)
                ping_until = 0.0
            arrived = list(driver.notifies(timeout=min(ping_at, ping_until or ping_at) - now, stop_after=1))
            if arrived:
                self._set_working(True)
                ping_at, ping_until = time.monotonic() + jittered(PING_AFTER), 0.0
                for payload in {n.payload for n in arrived if n.pid not in self._own_pids()} - {PING}:
                    self._wake(payload)

    def _set_working(self, working: bool) -> None:
        if working == self.working:
            return
        self.working = working
        if working:
            emit(ListenerWorking(database=self._database.name))
            return
        # The longest wait of all consumers has just become shorter.
        self._wake(None)
        emit(ListenerSilent(database=self._database.name))

    def _failed(self, error: Exception) -> None:
        self._driver = None
        self.working = False
        with suppress(Exception):  # duties run by their own clock too
            self._wake(None)
        if self._stopping.is_set():
            return
        emit(ListenerLost(database=self._database.name, reason=message_of(error), repeated=self._lost, error=error))
        self._lost = True
