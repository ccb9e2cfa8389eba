"""One of several worker processes, as seen from inside: its reports to the supervisor, and the orders that it gets.

Both talk through one pipe, which is also how a process learns that its supervisor has died: the pipe ends. Orders never
count as signals, so that a Ctrl-C, which the terminal sends to all of them, and the order that follows it are one.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from outbox.settings import Settings
from outbox.worker.probes import measured

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from outbox.worker.worker import Worker

#: How often (seconds) a process gives a sign of life.
BEAT = 0.5
#: How long (seconds) the end of a worker may take after its drain: connections are closed, its row is deleted.
END_WITHIN = 10.0
_DEFAULTS = Settings()


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life: is the worker started, alive and ready?

    It may drain for ``drain_timeout``, and give no sign of life for ``hang_timeout`` (seconds).
    """

    started: bool = False
    alive: bool = True
    ready: bool = False
    drain_timeout: float = _DEFAULTS.drain_timeout
    hang_timeout: float = _DEFAULTS.hang_timeout


@dataclass(frozen=True, slots=True)
class StartRefusal:
    """Why the worker can't start, and the exit code for that; ``temporary``: a later try may find it mended."""

    reason: str
    code: int
    temporary: bool


@dataclass(frozen=True, slots=True)
class Measurements:
    """The metric families of a process, for the scrape of this number."""

    scrape: int
    families: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Drain:
    """Order: begin no new pass, wait for the handlers, and end."""


@dataclass(frozen=True, slots=True)
class EndAtOnce:
    """Order: cut the handlers off and end, as by a second signal of this number."""

    signal: int


@dataclass(frozen=True, slots=True)
class ReportMeasurements:
    """Order: answer with `Measurements` of this number."""

    scrape: int


class SupervisedProcess:
    """The worker of this process; ``link`` is the pipe to the supervisor. With ``metered`` it counts and times."""

    def __init__(self, link: Connection, *, metered: bool) -> None:
        self._link = link
        self._metered = metered
        self._sending = threading.Lock()
        self._worker: Worker | None = None
        self._registry: CollectorRegistry | None = None

    def run(self, make: Callable[[], Worker]) -> int:
        """Make the worker and run it until an order, a signal or the supervisor's end; return the exit code.

        Raises:
            As `Worker.run`, and what ``make`` raises.
        """
        # Until the worker runs, Ctrl-C is the supervisor's alone; a terminal that closes always is.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        for task in (self._give_signs, self._obey):
            threading.Thread(target=task, name="outbox-supervised", daemon=True).start()
        worker = make()
        with ExitStack() as stack:
            if self._metered:
                self._registry = measured(worker, stack)
            self._worker = worker
            return worker.run()

    def refuse(self, refusal: StartRefusal) -> None:
        """Say why the worker can't start."""
        self._send(refusal)

    def _give_signs(self) -> None:
        """Give signs of life; a process that can't, because something in it keeps the interpreter, ends by itself.

        It writes to stderr where its threads are. So it ends also when there is no supervisor any more to kill it.
        """
        resting = threading.Event()
        while not resting.wait(BEAT):
            worker = self._worker
            beat = Heartbeat()
            if worker is not None:
                beat = Heartbeat(
                    worker.is_running, worker.is_alive(), worker.is_ready(), worker.drain_timeout, worker.hang_timeout
                )
            if sys.__stderr__ is not None:
                faulthandler.dump_traceback_later(beat.hang_timeout, exit=True, file=sys.__stderr__)
            # A supervisor that is stopped reads nothing, and must not stop this thread with it.
            if select.select([], [self._link], [], 0)[1]:
                self._send(beat)

    def _obey(self) -> None:
        """Carry out orders; drain when the supervisor is gone, and end in any case."""
        while True:
            try:
                order = self._link.recv()
            except (EOFError, OSError):  # the supervisor is gone
                self._end_alone()
                return
            match order:
                case Drain():
                    self._drain()
                case EndAtOnce(number) if self._worker is not None:
                    self._worker.end_at_once(number)
                case ReportMeasurements(scrape):
                    families: list[Any] = []
                    # Whatever fails in it, the next order must be obeyed; an answer without families is told.
                    with suppress(Exception):
                        families = [] if self._registry is None else list(self._registry.collect())
                    self._send(Measurements(scrape, families))

    def _drain(self) -> None:
        worker = self._worker
        if worker is None or not worker.is_running:
            os._exit(0)  # nothing runs that could be waited for
        threading.Thread(target=worker.stop, name="outbox-worker-stop", daemon=True).start()

    def _end_alone(self) -> None:
        self._drain()
        longest = _DEFAULTS.drain_timeout if self._worker is None else self._worker.drain_timeout
        # Whatever hinders the end of the interpreter, no supervisor is left to kill this process.
        threading.Event().wait(longest + END_WITHIN)
        os._exit(1)

    def _send(self, news: object) -> None:
        # The supervisor is gone: the other thread reads that too.
        with self._sending, suppress(OSError):
            self._link.send(news)
