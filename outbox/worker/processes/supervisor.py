"""The supervisor of ``outbox run --processes``: it starts worker processes, watches them, and replaces them.

It imports nothing of the application, so that a process which starts later runs the code that is there then. The
processes are spawned, so none inherits a connection, a lock or a thread. They share the work by the locks in the
database, as workers on several machines do; the supervisor has no part in that.
"""

from __future__ import annotations

import multiprocessing
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from outbox.database.engines import Backoff
from outbox.telemetry.events import (
    ProcessEnded,
    ProcessesReplaced,
    ProcessHung,
    ProcessNotStarted,
    ProcessStarted,
    ReplacementFailed,
)
from outbox.telemetry.hooks import emit
from outbox.worker.processes.supervised import (
    BEAT,
    END_WITHIN,
    Drain,
    EndAtOnce,
    Heartbeat,
    Measurements,
    ReportMeasurements,
    StartRefusal,
)

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

#: How often (seconds) the processes are judged, and how late that may be before the supervisor itself was held up.
_TICK = 0.5
_LATE = 1.0
#: How long (seconds) without a turn of its loop the supervisor still counts as alive.
_STUCK_AFTER = 60.0
#: A process that has lived so long (seconds) is no part of a series of deaths.
_SETTLED_AFTER = 60.0
#: Deaths in a row after which the supervisor ends: more than `max_claims`, so that a message that kills its process is
#: parked before.
_DEATHS = 20
#: The first and the longest wait (seconds) before a process is started again.
_RESTART_FIRST, _RESTART_CAP = 0.2, 30.0
#: How long (seconds) the processes may take to end at once, and to answer a scrape.
_AT_ONCE = 2.0
_SCRAPE_WITHIN = 2.0
#: How long (seconds) what a process has said before its end may take to be read.
_LAST_WORDS = 1.0
#: The exit code where processes die again and again.
_FAILED = 1
_ENDING = (signal.SIGTERM, signal.SIGINT)

#: What a process runs, which leaves with an exit code: with the arguments of a `SupervisedProcess`.
ProcessTarget = Callable[[Connection, bool], None]


@dataclass(frozen=True, slots=True)
class Ending:
    """How the supervisor has ended: an exit code, and what to tell the user, if anything went wrong."""

    code: int
    reason: str | None = None


@dataclass(slots=True, eq=False)
class _Child:
    """A process, and what it has said."""

    process: BaseProcess
    link: Connection
    began: float
    heard_at: float
    beat: Heartbeat = field(default_factory=Heartbeat)
    refusal: StartRefusal | None = None
    #: It is to end by then.
    end_by: float | None = None
    hung: bool = False
    #: What it answered the newest scrape with.
    measurements: Measurements | None = None
    reading: threading.Thread | None = None
    sending: threading.Lock = field(default_factory=threading.Lock)

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    def order(self, order: object) -> None:
        """Send an order."""
        with self.sending, suppress(OSError):  # it has died, which its sentinel says too
            self.link.send(order)

    def answer(self, scrape: int) -> Measurements | None:
        """Return its answer to a scrape, or to a later one."""
        newest = self.measurements
        return newest if newest is not None and newest.scrape >= scrape else None

    def ending(self) -> str:
        """Say how it has ended."""
        code, silent = self.process.exitcode or 0, time.monotonic() - self.heard_at
        if self.refusal is not None:
            return self.refusal.reason
        if code < 0:
            known = -code in {*signal.Signals}
            return f"killed by {signal.Signals(-code).name if known else f'signal {-code}'}"
        if code and silent > self.beat.hang_timeout - BEAT:
            return f"it gave no sign of life for {silent:.0f} s, wrote to stderr where it hung, and ended"
        return f"exit code {code}"


@dataclass(slots=True, eq=False)
class _ProcessSlot:
    """One of the processes that there are to be: the child that runs, and another one that is to take its place."""

    number: int
    child: _Child | None = None
    successor: _Child | None = None
    start_at: float = 0.0
    backoff: Backoff = field(default_factory=lambda: Backoff(_RESTART_FIRST, _RESTART_CAP))

    @property
    def children(self) -> list[_Child]:
        return [each for each in (self.child, self.successor) if each is not None]


class Supervisor:
    """Keeps so many processes running that each run ``target``, until it is told to end.

    SIGTERM or SIGINT drains all, a second one ends all at once, as with a single worker. SIGHUP replaces one after the
    other: each ends, drained, when its successor is at work. ``metered`` makes the processes count and time.
    """

    def __init__(self, target: ProcessTarget, processes: int, *, metered: bool = False) -> None:
        self._target = target
        self._metered = metered
        self._context = multiprocessing.get_context("spawn")
        self._slots = [_ProcessSlot(number) for number in range(1, processes + 1)]
        #: Children that are to end, and belong to no slot any more.
        self._leaving: list[tuple[int, _Child]] = []
        self._replacing: list[_ProcessSlot] = []
        self._deaths = 0
        self._proven = False
        self._ending: Ending | None = None
        self._signal: int | None = None
        self._turned_at = time.monotonic()
        # What the processes say, each read in a thread of its own: one that is stopped in the middle of a word must not
        # stop the supervisor. A byte to the waker ends the wait of its loop.
        self._news: SimpleQueue[tuple[_Child, object, float]] = SimpleQueue()
        self._waker: socket.socket | None = None
        # Answers to scrapes, which come in threads of their own too.
        self._answered = threading.Condition()
        self._scrapes = 0

    def run(self) -> Ending:
        """Start the processes and keep them running; return when all have ended. Only in the main thread."""
        with self._signals() as signals, ExitStack() as stack:
            stack.callback(self._kill_all)
            while not (self._ending and not self._children()):
                self._start_due()
                self._wait(signals)
                self._reap()
                self._judge()
                self._replace_next()
        return self._ending

    def is_alive(self) -> bool:
        """Does it turn? A process that hangs is its own business: it replaces that."""
        return self._turned_at > time.monotonic() - _STUCK_AFTER

    def is_ready(self) -> bool:
        """Are all the processes at work, each as ready as `Worker.is_ready` says, and none to end?"""
        children = [slot.child for slot in self._slots]
        return self._ending is None and all(each is not None and each.beat.ready for each in children)

    # --- starting ------------------------------------------------------------------------------------------------

    def _start_due(self) -> None:
        """Start the processes that aren't there; at first one alone, so that what hinders all is told once."""
        now = time.monotonic()
        for slot in self._slots:
            if self._ending is None and slot.child is None and slot.start_at <= now:
                try:
                    slot.child = self._new_child(slot)
                except OSError as error:  # of memory, of processes, of files
                    self._not_started(slot, f"{type(error).__name__}: {error}", _FAILED)
            if not self._proven:
                return

    def _new_child(self, slot: _ProcessSlot) -> _Child:
        ours, theirs = self._context.Pipe()
        arguments, name = (theirs, self._metered), f"outbox-{slot.number}"
        process = self._context.Process(target=self._target, args=arguments, name=name)
        try:
            process.start()
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        now = time.monotonic()
        child = _Child(process, ours, now, now)
        child.reading = threading.Thread(target=self._read, args=(child,), name="outbox-supervisor", daemon=True)
        child.reading.start()
        return child

    # --- hearing -------------------------------------------------------------------------------------------------

    def _wait(self, signals: socket.socket) -> None:
        """Wait for signals, for what the processes say and for their ends, a moment at most; take note of it."""
        began, children = time.monotonic(), self._children()
        found = wait([signals, *(each.process.sentinel for each in children)], _TICK)
        self._turned_at = now = time.monotonic()
        if (late := now - began - _TICK) > _LATE:
            # The supervisor was held up (stopped, or the machine was): so may the processes have been.
            for each in children:
                each.heard_at += late
        self._hear()
        if signals in found:
            for number in filter(None, signals.recv(4096)):
                self._signalled(number)

    def _read(self, child: _Child) -> None:
        """Read what a process says, until it has ended."""
        while True:
            try:
                news = child.link.recv()
            except (EOFError, OSError):  # it has died, which its sentinel says too
                return
            if isinstance(news, Measurements):
                with self._answered:
                    child.measurements = news
                    self._answered.notify_all()
                continue
            self._news.put((child, news, time.monotonic()))
            with suppress(OSError):  # the bytes before have woken it, or it has ended
                if self._waker is not None:
                    self._waker.send(bytes(1))

    def _hear(self) -> None:
        """Take note of the news read."""
        with suppress(Empty):
            while True:
                child, news, heard_at = self._news.get_nowait()
                child.heard_at = max(child.heard_at, heard_at)
                if isinstance(news, Heartbeat):
                    self._beaten(child, news)
                elif isinstance(news, StartRefusal):
                    child.refusal = news

    def _beaten(self, child: _Child, beat: Heartbeat) -> None:
        before, child.beat = child.beat, beat
        if beat.started and not before.started:
            self._proven = True
            for slot in self._slots:
                if child in slot.children:
                    emit(ProcessStarted(number=slot.number, pid=child.pid))
                if child is slot.successor:
                    self._leave(slot)
                    slot.child, slot.successor = child, None

    def _signalled(self, number: int) -> None:
        if number not in _ENDING:
            if self._ending is None and not self._replacing and self._proven:
                emit(ProcessesReplaced())
                self._replacing = list(self._slots)
        elif self._signal is None:
            self._signal = number
            if self._ending is None:
                self._end(Ending(0))
        else:
            self._ending = Ending(128 + number)
            for child in self._children():
                child.order(EndAtOnce(number))
                child.end_by = time.monotonic() + _AT_ONCE

    # --- ends ----------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Take note of the processes that have ended."""
        for child in self._children():
            if child.process.exitcode is not None and child.reading is not None:
                child.reading.join(_LAST_WORDS)
        self._hear()
        for number, child in list(self._leaving):
            if self._buried(child):
                self._leaving.remove((number, child))
                if child.process.exitcode != 0 and child.beat.started and self._signal is None:
                    self._tell_end(number, child, None)
        for slot in self._slots:
            if (successor := slot.successor) is not None and self._buried(successor):
                slot.successor = None
                if self._ending is None:
                    self._replacing.clear()
                    emit(ReplacementFailed(number=slot.number, reason=successor.ending()))
            if (working := slot.child) is not None and self._buried(working):
                slot.child = None
                if self._ending is None:
                    self._lost(slot, working)

    @staticmethod
    def _buried(child: _Child) -> bool:
        """Has it ended? Then nothing is left of it."""
        if child.process.exitcode is None:
            return False
        child.process.join()
        child.link.close()
        return True

    def _lost(self, slot: _ProcessSlot, child: _Child) -> None:
        """Have another process started in the place of one that has ended, or end."""
        now = time.monotonic()
        if not self._proven:
            if child.refusal is not None:
                self._not_started(slot, child.refusal.reason, child.refusal.code)
            else:
                self._not_started(slot, f"a worker process ended before it had started: {child.ending()}", _FAILED)
            return
        if now - child.began >= _SETTLED_AFTER:
            slot.backoff.reset()
        if not child.beat.started:
            self._not_started(slot, child.ending(), _FAILED)
        else:
            delay = slot.backoff.next()
            slot.start_at = now + delay
            self._tell_end(slot.number, child, delay)
        if child.refusal is not None and child.refusal.temporary:
            return
        settled = any(now - each.began >= _SETTLED_AFTER for each in (child, *self._children()))
        self._deaths = 0 if settled else self._deaths + 1
        if self._deaths >= _DEATHS:
            reason = (
                f"{_DEATHS} worker processes in a row have died soon after their start; the last one: {child.ending()}"
            )
            self._end(Ending(_FAILED, reason))

    def _not_started(self, slot: _ProcessSlot, reason: str, code: int) -> None:
        """Have another try later; end if none has ever started."""
        if not self._proven:
            self._end(Ending(code, reason))
            return
        delay = slot.backoff.next()
        slot.start_at = time.monotonic() + delay
        emit(ProcessNotStarted(number=slot.number, reason=reason, delay=delay))

    @staticmethod
    def _tell_end(number: int, child: _Child, delay: float | None) -> None:
        """Tell that a child has ended, unless it was told why it had to."""
        if not child.hung:
            seconds = time.monotonic() - child.began
            emit(ProcessEnded(number=number, pid=child.pid, seconds=seconds, ending=child.ending(), delay=delay))

    def _end(self, ending: Ending) -> None:
        """Begin to end all; those that aren't at work have nothing to drain."""
        self._ending = ending
        self._replacing.clear()
        for slot in self._slots:
            if slot.successor is not None:
                slot.successor.process.kill()
            self._leave(slot)

    def _leave(self, slot: _ProcessSlot) -> None:
        """Have the child of a slot drain and end."""
        child, slot.child = slot.child, None
        if child is None:
            return
        if child.beat.started:
            child.order(Drain())
        else:
            child.process.terminate()
        child.end_by = time.monotonic() + child.beat.drain_timeout + END_WITHIN
        self._leaving.append((slot.number, child))

    def _judge(self) -> None:
        """Kill what hangs: what gives no sign of life, what only a restart can help, what doesn't end in time."""
        now = time.monotonic()
        for slot in self._slots:
            for child in slot.children:
                silent, limit = now - child.heard_at, child.beat.hang_timeout
                # Its own watchdog comes first, which says where it hangs.
                if silent > limit + 2 * BEAT:
                    self._kill(slot.number, child, f"no sign of life for {silent:.0f} s (hang_timeout = {limit:g} s)")
            if (working := slot.child) is not None and not working.beat.alive:
                emit(ProcessHung(number=slot.number, pid=working.pid, reason="its loops stand still"))
                self._leave(slot)
        for number, child in self._leaving:
            if child.end_by is not None and now > child.end_by:
                self._kill(number, child, "it hasn't ended in time")

    def _kill(self, number: int, child: _Child, reason: str) -> None:
        if not child.hung:
            child.hung = True
            emit(ProcessHung(number=number, pid=child.pid, reason=reason))
            child.process.kill()

    def _replace_next(self) -> None:
        """Start the successor of the next process that is to be replaced, when the one before has ended."""
        if not self._replacing or self._leaving or any(slot.successor for slot in self._slots):
            return
        slot = self._replacing.pop(0)
        # One that isn't there is started anew in any case.
        if slot.child is not None:
            try:
                slot.successor = self._new_child(slot)
            except OSError as error:  # of memory, of processes, of files
                self._replacing.clear()
                emit(ReplacementFailed(number=slot.number, reason=f"{type(error).__name__}: {error}"))

    def _kill_all(self) -> None:
        """Leave nothing behind, also where the supervisor itself fails."""
        for child in self._children():
            child.process.kill()
            child.process.join()

    def _children(self) -> list[_Child]:
        return [*(each for slot in self._slots for each in slot.children), *(child for _, child in self._leaving)]

    @contextmanager
    def _signals(self) -> Iterator[socket.socket]:
        """Yield a socket from which the numbers of signals are read: a handler must not do more than write them."""
        reader, writer = socket.socketpair()
        with reader, writer:
            reader.setblocking(False)
            writer.setblocking(False)
            before = {number: signal.signal(number, lambda *_: None) for number in (*_ENDING, signal.SIGHUP)}
            self._waker = writer
            wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            try:
                yield reader
            finally:
                self._waker = None
                signal.set_wakeup_fd(wakeup)
                for number, handler in before.items():
                    signal.signal(number, handler)

    # --- scrapes -------------------------------------------------------------------------------------------------

    def families(self) -> dict[int, Sequence[Metric]]:
        """Return what the processes have measured, by their numbers: nothing of one that doesn't answer in time.

        From any thread, while `run` runs.
        """
        with self._answered:
            self._scrapes += 1
            scrape = self._scrapes
        children = {slot.number: child for slot in self._slots if (child := slot.child) and child.beat.started}
        for child in children.values():
            child.order(ReportMeasurements(scrape))
        with self._answered:
            self._answered.wait_for(lambda: all(each.answer(scrape) for each in children.values()), _SCRAPE_WITHIN)
        answers = {number: child.answer(scrape) for number, child in children.items()}
        return {slot.number: answer.families if (answer := answers.get(slot.number)) else () for slot in self._slots}
