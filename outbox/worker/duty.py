"""A duty: one pass function, run again and again as fast as its work comes in.

How long to wait before the next try.
"""

from __future__ import annotations

import datetime as dt
import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from outbox.message.model import Counts


def jittered(wait: float, jitter: float = 0.1) -> float:
    """Return a wait (seconds) made up to ``jitter`` (a fraction) shorter or longer, at random."""
    return wait * random.uniform(1 - jitter, 1 + jitter)  # noqa: S311


class Backoff:
    """Waits in seconds that double from ``first`` to ``cap``, each shortened by up to half at random.

    The randomness keeps all duties of all workers from coming back in the same moment. Not thread-safe.
    """

    def __init__(self, first: float, cap: float, *, jitter: float = 0.5) -> None:
        self._first = min(first, cap)
        self._cap = cap
        self._jitter = jitter
        self._next = self._first

    def next(self) -> float:
        """Return the next wait."""
        wait, self._next = self._next, min(self._next * 2, self._cap)
        return wait * random.uniform(1 - self._jitter, 1)  # noqa: S311

    def reset(self) -> None:
        """Begin with the first wait again."""
        self._next = self._first


logger = logging.getLogger("outbox.worker")

#: How long (seconds) a duty stays hot after its last work: it looks by itself, in waits from _HOT_FIRST to _HOT_CAP.
QUIET_AFTER = 1.0
_HOT_FIRST = 0.001
_HOT_CAP = 0.032
_FAILURE_FIRST = 0.1


@dataclass(frozen=True, slots=True)
class Health:
    """How a duty fares. Times are those of this host, for people to read.

    ``failures`` counts the failed passes since the last success; ``last_error`` stays after a recovery.
    """

    last_success: dt.datetime | None = None
    last_error: str | None = None
    last_error_at: dt.datetime | None = None
    failures: int = 0


class Duty:
    """A pass function with the loop around it.

    ``longest_wait`` returns the seconds after which the duty looks for work although nobody woke it. ``after`` is
    called when a pass brought work, or failed and may have: those who wait for it look then. A duty that is ``eager``
    goes on looking for a while after its last work; another one only as long as its pass says that there is more.
    """

    def __init__(
        self,
        name: str,
        one_pass: Callable[[], Counts],
        *,
        longest_wait: Callable[[], float],
        stopping: threading.Event,
        reconnect_cap: float,
        after: Callable[[], None] | None = None,
        eager: bool = True,
    ) -> None:
        self.name = name
        self.health = Health()
        self.rested = threading.Event()
        self.rested.set()
        self.run_now: Callable[[], None] = lambda: None
        self._pass = one_pass
        self._longest_wait = longest_wait
        self._stopping = stopping
        self._after = after
        self._eager = eager
        self._backoff = Backoff(_FAILURE_FIRST, reconnect_cap)
        self._woken = threading.Event()
        self._guard = threading.Lock()
        self._running = False

    def longest_wait(self) -> float:
        """Return the longest wait between two looks in seconds, with the jitter that keeps workers apart."""
        return jittered(self._longest_wait())

    def wake(self) -> None:
        """Have the duty look for work at once; cheap, from any thread, as often as one likes."""
        if self._woken.is_set():
            return
        self._woken.set()
        with self._guard:
            if self._running:
                return
        self.run_now()

    def run(self) -> None:
        """Run pass after pass until there has been no work for a while; the body of the scheduler's job."""
        with self._guard:
            self._running = True
            self.rested.clear()
        try:
            self._run()
        finally:
            self.rested.set()

    def settled(self) -> None:
        """Note that the scheduler has its thread back and would start the job again.

        Between the last look of `run` and this moment the scheduler refuses to start the job: whoever woke the
        duty meanwhile left it at that, so it is started here.
        """
        with self._guard:
            self._running = False
        if self._woken.is_set() and not self._stopping.is_set():
            self.run_now()

    def _run(self) -> None:
        hot = Backoff(_HOT_FIRST, _HOT_CAP, jitter=0.0)
        hot_until = 0.0
        while not self._stopping.is_set():
            # Before the pass: a wake-up during the pass may be about what the pass did not see.
            self._woken.clear()
            counts = self._attempt()
            if counts is None:
                self._stopping.wait(self._backoff.next())
                continue
            if counts or counts.more:
                hot.reset()
                hot_until = time.monotonic() + QUIET_AFTER if self._eager else 0.0
            if counts.more:
                continue
            # A pass without ``more`` took all there was: one that follows at once would only take the processor from
            # those whose turn it is now.
            if time.monotonic() < hot_until:
                self._woken.wait(hot.next())
            elif not self._woken.is_set():
                return

    def _attempt(self) -> Counts | None:
        """Run one pass; return None where it failed, which never ends the duty."""
        try:
            counts = self._pass()
        except Exception as error:  # whatever it is, the duty goes on
            self._failed(error)
            counts = None
        else:
            self._succeeded()
        if self._after and (counts is None or counts):
            self._after()
        return counts

    def _failed(self, error: Exception) -> None:
        if self._stopping.is_set():
            logger.debug("duty %s was cut off", self.name, exc_info=error, extra={"event": "duty.cut_off"})
            return
        before, text = self.health, f"{type(error).__name__}: {error}"
        self.health = replace(
            before, last_error=text, last_error_at=dt.datetime.now(dt.UTC), failures=before.failures + 1
        )
        # An outage is one line in the log, not one for each try.
        news = before.failures == 0 or type(error).__name__ != (before.last_error or "").partition(":")[0]
        logger.log(
            logging.ERROR if news else logging.DEBUG,
            "duty %s failed and will be tried again",
            self.name,
            exc_info=error if news else None,
            extra={"event": "duty.failed", "duty": self.name, "failures": self.health.failures, "error": text},
        )

    def _succeeded(self) -> None:
        failures = self.health.failures
        self.health = replace(self.health, last_success=dt.datetime.now(dt.UTC), failures=0)
        if failures:
            self._backoff.reset()
            logger.info(
                "duty %s works again",
                self.name,
                extra={"event": "duty.recovered", "duty": self.name, "failures": failures},
            )
