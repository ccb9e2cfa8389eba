"""Several worker processes under one command: they are started, drained by a signal, and started again when they die.

More than that is for systemd or Kubernetes. The supervisor imports nothing of the application, so a process that starts
later runs the code that is there then. The processes are spawned, so none inherits a connection, a lock or a thread;
they share the work by the locks in the database, as workers on several machines do.

A process has one pipe to its supervisor. It writes one word: it is at work, or why it can't be. The end of the pipe is
the order to drain, so that the death of the supervisor is one too. That order is no signal: Ctrl-C and systemd send
theirs to all processes, and a worker takes a second one for the order to end at once.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Protocol

from outbox.database.execute import Backoff
from outbox.settings import Settings
from outbox.telemetry.events import ProcessEnded, ProcessHung, ProcessNotStarted, ProcessStarted
from outbox.telemetry.hooks import emit

#: How often (seconds) a process shows its watchdog that it lives, and the supervisor looks at its processes.
_TICK = 0.5
#: How long (seconds) the end of a worker may take after its drain (connections are closed, its row is deleted), and at
#: once.
_END_WITHIN, _AT_ONCE = 10.0, 2.0
#: The first and the longest wait (seconds) before a process is started again, and how long one must live so that the
#: next wait is the first one again.
_RESTART_FIRST, _RESTART_CAP, _SETTLED_AFTER = 0.2, 30.0, 60.0
_ENDING = (signal.SIGTERM, signal.SIGINT)


class Supervised(Protocol):
    """What runs in a supervised process: a worker, or a server."""

    @property
    def is_running(self) -> bool:
        """Is it at work?"""

    @property
    def drain_timeout(self) -> float:
        """How long (seconds) it may drain."""

    @property
    def hang_timeout(self) -> float:
        """After how long (seconds) without a sign of life its process is to end."""

    def is_alive(self) -> bool:
        """Does it give signs of life?"""

    def stop(self) -> object:
        """Drain, and end."""

    def run(self) -> int:
        """Work until an order or a signal; return the exit code."""


#: What a process runs, which leaves with an exit code: with its number, from 1 on, and the pipe for `SupervisedWorker`.
ProcessTarget = Callable[[int, Connection], None]


class SupervisedWorker:
    """The worker of this process, which is watched from now on; ``link`` is the pipe to the supervisor.

    A process that hangs, because native code keeps the interpreter or its loops stand still, ends after
    ``hang_timeout`` and writes to stderr where its threads are.
    """

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._worker: Supervised | None = None
        # Until the worker runs, Ctrl-C is the supervisor's alone; a terminal that closes always is.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        for task in (self._watch, self._obey):
            threading.Thread(target=task, name="outbox-supervised", daemon=True).start()

    def run(self, worker: Supervised) -> int:
        """Run the worker until an order, a signal or the supervisor's end; return the exit code.

        Raises:
            As `Worker.run`.
        """
        self._worker = worker
        return worker.run()

    def tell(self, word: float | str) -> None:
        """Tell the supervisor for how long (seconds) the worker, now at work, may drain; or why it can't start."""
        with suppress(OSError):  # the supervisor is gone, which ends the pipe too
            self._link.send(word)

    def _watch(self) -> None:
        resting, reported, limit = threading.Event(), False, Settings().hang_timeout
        while not resting.wait(_TICK):
            worker = self._worker
            if worker is not None and worker.is_running and not reported:
                limit, reported = worker.hang_timeout, True
                self.tell(float(worker.drain_timeout))
            if sys.__stderr__ is not None and (worker is None or worker.is_alive()):
                faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__)

    def _obey(self) -> None:
        """Drain when the pipe ends, and end in any case: there may be no supervisor left to kill this process."""
        with suppress(EOFError, OSError):  # the end of the pipe, which it waits for
            self._link.recv()
        worker = self._worker
        if worker is None or not worker.is_running:
            os._exit(0)  # nothing runs that could be waited for
        threading.Thread(target=worker.stop, name="outbox-worker-stop", daemon=True).start()
        threading.Event().wait(worker.drain_timeout + _END_WITHIN)
        os._exit(1)


class _Child:
    """One of the processes that there are to be: while it isn't ``there``, another one is to start at ``start_at``."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.there, self.start_at = False, 0.0
        self.backoff = Backoff(_RESTART_FIRST, _RESTART_CAP)
        #: It is to end by then.
        self.end_by: float | None = None

    def begin(self, process: BaseProcess, link: Connection) -> None:
        """Be this process from now on."""
        self.process, self.link, self.pid, self.began = process, link, process.pid or 0, time.monotonic()
        self.there = True
        #: What it has told of itself.
        self.word: float | str | None = None

    def hear(self) -> bool:
        """Take its word, if there is one; is it at work since now?"""
        with suppress(EOFError, OSError):  # it has died, which its sentinel says too, or is to end
            if self.word is None and self.link.poll():
                self.word = self.link.recv()
                return isinstance(self.word, float)
        return False

    def ending(self, code: int) -> str:
        """Say how it has ended."""
        if isinstance(self.word, str):
            return self.word
        name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
        how = f"killed by {name}" if code < 0 else f"exit code {code}"
        return how if self.word is not None else f"it ended before it had started: {how}"

    def later(self) -> float:
        """Have another one started after a pause; return how long (seconds) that is."""
        delay = self.backoff.next()
        self.start_at = time.monotonic() + delay
        return delay


class Supervisor:
    """Keeps so many processes running that each run ``target``, until a signal ends them.

    SIGTERM or SIGINT drains all, a second one ends all at once, as with a single worker.
    """

    def __init__(self, target: ProcessTarget, processes: int) -> None:
        self._target = target
        self._context = multiprocessing.get_context("spawn")
        self._children = [_Child(number) for number in range(1, processes + 1)]
        # At first there is one process, so that what hinders all is told once.
        self._proven = False
        self._hindrance: str | None = None
        self._code: int | None = None
        self._signals: list[int] = []

    def run(self) -> tuple[int, str | None]:
        """Keep the processes running, in the main thread; return the exit code, and what kept them from starting."""
        before = {number: signal.signal(number, lambda each, _: self._signals.append(each)) for number in _ENDING}
        try:
            while self._code is None or self._running:
                self._start_due()
                links = [child.link for child in self._running if child.word is None and not child.link.closed]
                wait([*links, *(child.process.sentinel for child in self._running)], _TICK)
                self._obey()
                for child in self._running:
                    self._judge(child)
        finally:
            for child in self._running:  # also where the supervisor itself fails
                child.process.kill()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._code, self._hindrance

    @property
    def _running(self) -> list[_Child]:
        return [child for child in self._children if child.there]

    def _start_due(self) -> None:
        for child in self._children if self._proven else self._children[:1]:
            if self._code is not None or child.there or child.start_at > time.monotonic():
                continue
            try:
                ours, theirs = self._context.Pipe()
            except OSError as error:  # of files
                self._not_started(child, f"{type(error).__name__}: {error}", 1)
                continue
            name = f"outbox-{child.number}"
            process = self._context.Process(target=self._target, args=(child.number, theirs), name=name)
            try:
                process.start()
            except OSError as error:  # of memory, of processes, of files
                ours.close()
                self._not_started(child, f"{type(error).__name__}: {error}", 1)
            else:
                child.begin(process, ours)
            finally:
                theirs.close()

    def _obey(self) -> None:
        """Have all drain by the first signal, and end at once by the second one."""
        if self._signals and self._code is None:
            self._end(0)
        if len(self._signals) > 1 and self._code == 0:
            self._code = 128 + self._signals[1]
            for child in self._running:
                child.end_by = time.monotonic() + _AT_ONCE
                for each in _ENDING:  # a worker drains after the first one
                    with suppress(ProcessLookupError):
                        os.kill(child.pid, each)

    def _end(self, code: int) -> None:
        self._code = code
        for child in self._running:
            child.link.close()
            drain = child.word if isinstance(child.word, float) else Settings().drain_timeout
            child.end_by = time.monotonic() + drain + _END_WITHIN

    def _judge(self, child: _Child) -> None:
        """Take note of what a process has told, and of its end; kill it if its time is over."""
        code = child.process.exitcode  # before its word, which it told before
        if child.hear():
            self._proven = True
            emit(ProcessStarted(number=child.number, pid=child.pid))
        if code is not None:
            child.there = False
            child.process.join()
            child.link.close()
            if self._code is None:
                self._lost(child, code)
        elif child.end_by is not None and time.monotonic() > child.end_by:
            emit(ProcessHung(number=child.number, pid=child.pid, reason="it hasn't ended in time"))
            child.process.kill()
            child.end_by = None

    def _lost(self, child: _Child, code: int) -> None:
        """Have another process started in the place of one that has ended."""
        seconds, ending = time.monotonic() - child.began, child.ending(code)
        if not isinstance(child.word, float):
            self._not_started(child, ending, max(code, 1))
            return
        if seconds >= _SETTLED_AFTER:
            child.backoff.reset()
        emit(ProcessEnded(number=child.number, pid=child.pid, seconds=seconds, ending=ending, delay=child.later()))

    def _not_started(self, child: _Child, reason: str, code: int) -> None:
        """Have another try later; end if no process has ever started."""
        if self._proven:
            emit(ProcessNotStarted(number=child.number, reason=reason, delay=child.later()))
        else:
            self._hindrance = reason
            self._end(code)
