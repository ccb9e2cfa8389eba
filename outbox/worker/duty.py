"""A duty is one pass function, run again and again as fast as its work comes in; a lane is the thread that runs duties.

A pass that found more than its limit is repeated at once, after the other duties of the lane. A duty that found work
runs again by itself for a while. Otherwise it rests until it is woken: by a notification, by another duty, or by the
clock when its longest wait is over.
"""

from __future__ import annotations

import datetime as dt
import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outbox.database.duty import Task
from outbox.database.execute import Backoff, kind_of
from outbox.errors import ErrorKind
from outbox.message.model import Counts
from outbox.telemetry.events import PassCutOff, PassEnded, PassFailed, PassRecovered
from outbox.telemetry.hooks import emit, listeners, middlewares_here
from outbox.text import class_name, named
from outbox.worker.clock import Clock
from outbox.worker.connections import OwnRunner

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: How long (seconds) a duty stays hot after its last work: it runs by itself.
QUIET_AFTER = 1.0
#: A hot duty waits for this part of the time that has passed since its last work.
HOT_PART = 1 / 8
#: The shortest and the longest of these waits, and the shortest one where others wake the duty (seconds).
HOT_FIRST, HOT_CAP, HOT_FIRST_IF_WOKEN = 0.0005, 0.032, 0.016
#: The wait for so long as the longest one after ops that came faster than passes (seconds).
HOT_IF_BUSY = 0.004
_FAILURE_FIRST = 0.1
#: How long (seconds) a long pass keeps a lane that another duty waits for.
SLICE = 0.1
_NEVER = math.inf


def jittered(wait: float, jitter: float = 0.1) -> float:
    """Return a wait (seconds) made up to ``jitter`` (a fraction) shorter or longer, at random."""
    return wait * random.uniform(1 - jitter, 1 + jitter)  # noqa: S311 - jitter, no secret


@dataclass(frozen=True, slots=True)
class Health:
    """How a duty fares. Times are those of this host, for operators to read.

    ``failures`` counts the failed passes since the last success; ``last_error`` stays after a recovery.
    ``connection_lost``: the last pass failed because a database is out of reach. ``unusable``: or because its tables
    aren't as they must be.
    """

    last_success: dt.datetime | None = None
    last_error: str | None = None
    last_error_at: dt.datetime | None = None
    failures: int = 0
    connection_lost: bool = False
    unusable: bool = False


def after_failure(duty: str, before: Health, error: BaseException) -> tuple[Health, PassFailed]:
    """Return how a duty fares that has failed once more, and the event that tells of it."""
    kind, failures, text = kind_of(error), before.failures + 1, named(error)
    lost, unusable = kind is ErrorKind.UNAVAILABLE, kind is ErrorKind.SCHEMA
    same = before.failures > 0 and class_name(error) == (before.last_error or "").partition(":")[0]
    why, now = text.partition("\n")[0], dt.datetime.now(dt.UTC)
    failed = PassFailed(duty=duty, failures=failures, reason=why, connection_lost=lost, repeated=same, error=error)
    return Health(before.last_success, text, now, failures, connection_lost=lost, unusable=unusable), failed


class Lane:
    """A thread and a runner that a few duties share: one pass at a time, in the order in which duties became due.

    A busy duty would otherwise keep the runner from the others for ever.
    """

    def __init__(self, runner: OwnRunner, clock: Clock, stopping: threading.Event) -> None:
        self.runner = runner
        self.duties: list[RunningDuty] = []
        self._clock = clock
        self.stopping = stopping
        self._changed = threading.Condition()
        self._running: RunningDuty | None = None
        self._began = 0.0
        self._cut_short = False
        self._thread = threading.Thread(target=self._work, name="outbox-worker", daemon=True)

    def start(self) -> None:
        """Start the thread, and with it all duties."""
        self._thread.start()

    def wake(self, duty: RunningDuty) -> None:
        """Have a duty run as soon as the lane is free; cheap, from any thread, as often as one likes."""
        with self._changed:
            due_at = max(time.monotonic(), duty.not_before)
            if due_at < duty.due_at:
                duty.due_at = due_at
                self._changed.notify()

    def ending(self) -> bool:
        """Return whether a running pass is to end after its transaction: the worker stops, or other duties are due."""
        if self.stopping.is_set():
            return True
        now = time.monotonic()
        if now - self._began > SLICE and any(each.due_at <= now for each in self.duties if each is not self._running):
            self._cut_short = True
        return self._cut_short

    def rested(self, timeout: float) -> bool:
        """Wait until the thread has ended, at most so many seconds; ``stopping`` is set."""
        with self._changed:
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def turns(self, since: float) -> bool:
        """Does the thread live, and run what has been due since a monotonic time? A pass that takes long is no stop."""
        duty = min(self.duties, key=lambda each: each.due_at)
        return self._thread.is_alive() and (self._running is not None or duty.due_at > since)

    @property
    def is_held(self) -> bool:
        """Does a pass run for so long that another one may have to wait?"""
        return self._running is not None and time.monotonic() - self._began > HOT_CAP

    @property
    def running(self) -> str:
        """The name of the duty whose pass runs, empty if none does."""
        duty = self._running
        return duty.name if duty else ""

    def _work(self) -> None:
        while (duty := self._next()) is not None:
            again = duty.run()
            if self._cut_short:
                again = min(again, time.monotonic())
            with self._changed:
                # A wake-up during the pass may be about what the pass did not see; it doesn't shorten a back-off.
                duty.due_at = max(min(duty.due_at, again), duty.not_before)
            if again == _NEVER and (wait := duty.longest_wait()) < _NEVER:
                self._clock.every(duty.name, wait, duty.wake)
        self._running = None

    def _next(self) -> RunningDuty | None:
        """Wait for the duty that has been due for the longest time; None when the worker stops."""
        with self._changed:
            while not self.stopping.is_set():
                duty = min(self.duties, key=lambda each: each.due_at)
                wait = duty.due_at - time.monotonic()
                if wait <= 0:
                    duty.due_at = _NEVER
                    self._running, self._began, self._cut_short = duty, time.monotonic(), False
                    return duty
                self._running = None
                self._changed.wait(None if wait == _NEVER else wait)
        return None


class RunningDuty:
    """A pass function, how it fares, and when it is due next.

    ``is_woken`` tells whether others wake it when its work comes, so that it needn't look so often: until it finds ops
    of which it wasn't told, as some drivers can't. ``title`` comes before its name. ``due_at`` and ``not_before`` are
    monotonic times, and the lane's.
    """

    def __init__(
        self,
        task: Task,
        lane: Lane,
        reconnect_cap: float,
        *,
        title: str = "",
        is_woken: Callable[[], bool] = lambda: False,
    ) -> None:
        self.task = task
        self.name: str = title + task.name
        self.health: Health = Health()
        self.is_woken = is_woken
        self.due_at: float = -_NEVER
        self.not_before: float = -_NEVER
        self._lane = lane
        self._backoff = Backoff(_FAILURE_FIRST, reconnect_cap)
        self._worked_at = self._silent_ops_at = -_NEVER
        self._busy_at = -_NEVER
        self._nudged = False
        lane.duties.append(self)

    def longest_wait(self) -> float:
        """Return the seconds after which the duty runs although nothing woke it."""
        return self.task.every() if callable(self.task.every) else self.task.every

    @property
    def is_at_work(self) -> bool:
        """Does it run, as far as is known, as soon as it is woken?"""
        return not self.health.failures and not self._lane.is_held

    def wake(self) -> None:
        """Have the duty run at once."""
        self._lane.wake(self)

    def nudge(self) -> None:
        """Have the duty run at once, because of ops."""
        if self.task.on_ops is not None:
            self.task.on_ops()  # first: the pass that begins now must know of it
        self._nudged, self._silent_ops_at = True, -_NEVER
        # Another worker may have the turn, and its snapshot may be of before: look again soon, though nothing is found.
        self._worked_at = time.monotonic()
        self.wake()

    def progressed(self) -> None:
        """Take note that the pass which runs, for long, has just done its work in the database."""
        self._succeeded()

    def run(self) -> float:
        """Run one pass; return the monotonic time of the next one, infinity for a duty that rests until it is woken."""
        nudged, self._nudged = self._nudged, False
        went_on = self._busy_at == self._worked_at
        with self._lane.runner.active():  # the events of the pass concern its Outbox
            counts = self._attempt()
        now = time.monotonic()
        if counts is None:
            self.not_before = now + self._backoff.next()
            return self.not_before
        if counts or counts.more:
            self._worked_at = now
            if counts.more:
                self._busy_at = now
            if not nudged and not went_on:
                self._silent_ops_at = now
        if counts.more:
            return now
        quiet = now - self._worked_at
        if not self.task.eager or quiet >= QUIET_AFTER:
            return _NEVER
        # A pass without ``more`` took all there was: one that follows at once would only take the processor from
        # the duties whose turn it is now.
        # Of ops that came fast, the last ones may have come without telling.
        if self.task.on_ops is not None and now - self._busy_at < HOT_CAP:
            return now + HOT_IF_BUSY
        silent = self.task.on_ops is not None and now - self._silent_ops_at < QUIET_AFTER
        shortest = HOT_FIRST if silent or not self.is_woken() else HOT_FIRST_IF_WOKEN
        return now + min(max(quiet * HOT_PART, shortest), HOT_CAP)

    def _pass(self, connection: Connection, source: Connection) -> Counts:
        return self.task.one_pass(connection, source, self._lane.ending)

    def _attempt(self) -> Counts | None:
        """Run one pass; return None where it failed, which never ends the duty."""
        began = time.perf_counter()
        try:
            counts = self._lane.runner.run(self._pass)
        except BaseException as error:  # even a handler's SystemExit: the duty goes on
            self._failed(error)
            counts = None
        else:
            self._succeeded()
            if counts is not None and (listeners.hooks or middlewares_here.get()):
                self._tell(counts, time.perf_counter() - began)
        if self.task.after and (counts is None or counts):
            self.task.after()
        return counts

    def _tell(self, counts: Counts, seconds: float) -> None:
        emit(
            PassEnded(
                duty=self.name,
                seconds=seconds,
                taken=counts.taken,
                done=counts.done,
                failed=counts.failed,
                parked=counts.parked,
            )
        )

    def _failed(self, error: BaseException) -> None:
        if self._lane.stopping.is_set():
            emit(PassCutOff(duty=self.name, error=error))
            return
        self.health, failed = after_failure(self.name, self.health, error)
        emit(failed)

    def _succeeded(self) -> None:
        failures = self.health.failures
        now = dt.datetime.now(dt.UTC)
        self.health = replace(self.health, last_success=now, failures=0, connection_lost=False, unusable=False)
        if failures:
            self._backoff.reset()
            emit(PassRecovered(duty=self.name, failures=failures))
