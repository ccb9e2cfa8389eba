"""The clock around the duties: an APScheduler whose interval jobs wake them when their longest wait is over.

A job only wakes its duty, which runs in the thread of its lane; so no job is ever late for another one.
"""

from __future__ import annotations

import datetime as dt
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.interval import IntervalTrigger

#: The scheduler reads its clock at least this often (seconds). A jump is a difference greater than _JUMP.
_WAKE_EVERY = 1.0
_JUMP = 0.5
#: Waits differ by this fraction at random, so that workers which start together don't stay together.
_JITTER = 0.2
_SHORTEST = 0.001


class Clock:
    """Calls functions again and again, by jobs of a scheduler of its own, which logs nothing below ERROR."""

    def __init__(self) -> None:
        quiet = logging.getLogger("outbox.worker.scheduler")
        for logger in (quiet, logging.getLogger("apscheduler.executors.default")):
            logger.setLevel(logging.ERROR)
        self._jobs = _SteadyJobStore()
        self._scheduler = BackgroundScheduler(
            logger=quiet,
            timezone=dt.UTC,
            jobstores={"default": self._jobs},
            job_defaults={"max_instances": 1, "coalesce": True, "misfire_grace_time": None},
        )
        # The scheduler can't be shut down while it starts: it would join a thread that isn't there yet.
        self._turn = threading.RLock()
        self._stopped = False

    @property
    def beat_at(self) -> float:
        """When the scheduler read its clock last, by `time.monotonic`; at least every second while it runs."""
        return self._jobs.beat_at

    def every(self, name: str, seconds: float, function: Callable[[], None]) -> None:
        """Call a short function after so many seconds, give or take a tenth, and again and again.

        The same name with other seconds begins anew; with the same ones nothing changes.
        """
        shortest = dt.timedelta(seconds=max(seconds * (1 - _JITTER / 2), _SHORTEST))
        job = self._scheduler.get_job(name)
        if job is None or job.trigger.interval != shortest:
            trigger = IntervalTrigger(seconds=shortest.total_seconds(), jitter=seconds * _JITTER)
            self._scheduler.add_job(function, trigger, id=name, replace_existing=True)

    def start(self) -> None:
        """Start the scheduler, unless another thread has stopped the clock already."""
        with self._turn:
            if not self._stopped:
                self._scheduler.start()

    def stop(self) -> None:
        """Call nothing from now on."""
        with self._turn:
            self._stopped = True
            if self._scheduler.running:
                self._scheduler.shutdown(wait=False)


class _SteadyJobStore(MemoryJobStore):  # type: ignore[misc]  # APScheduler has no types
    """Jobs that go on when the host's clock jumps.

    The scheduler reckons in wall-clock time: set back by an hour, it would sleep for an hour. So it is woken at least
    every second, and when that clock and the monotonic one have moved apart, all jobs are due.
    """

    def __init__(self, offset: Callable[[], float] = lambda: time.time() - time.monotonic()) -> None:
        super().__init__()
        self._offset = offset
        self._last = offset()
        self.beat_at: float = time.monotonic()

    def get_due_jobs(self, now: dt.datetime) -> list[Any]:
        """Return the jobs to start now."""
        self.beat_at = time.monotonic()
        last, self._last = self._last, self._offset()
        if abs(self._last - last) > _JUMP:
            for job in self.get_all_jobs():
                job.modify(next_run_time=now)
        return list(super().get_due_jobs(now))

    def get_next_run_time(self) -> dt.datetime | None:
        """Return when the scheduler reads its clock again."""
        latest = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=_WAKE_EVERY)
        return min(super().get_next_run_time() or latest, latest)
