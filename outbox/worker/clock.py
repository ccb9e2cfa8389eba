"""The clock around the duties: APScheduler starts them when their wait is over, or when they are woken.

A job's interval is the duty's longest wait, asked anew each time, since it depends on whether LISTEN works. A duty
that is hot stays inside its job, and the scheduler skips its starts meanwhile (``max_instances=1``).
"""

from __future__ import annotations

import datetime as dt
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED, JobExecutionEvent
from apscheduler.executors.base import BaseExecutor, run_job
from apscheduler.jobstores.base import JobLookupError
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.schedulers import SchedulerNotRunningError
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.base import BaseTrigger

from outbox.worker.duty import Duty

_EXECUTOR = "outbox"
_JOB_STORE = "default"
#: The scheduler looks at its clock at least this often (seconds), and takes a greater difference for a jump.
_LOOK_EVERY = 1.0
_JUMP = 0.5


class Clock:
    """Runs duties as jobs of a scheduler of its own, which says nothing in the log below ERROR."""

    def __init__(self) -> None:
        self._duties: dict[str, Duty] = {}
        quiet = logging.getLogger("outbox.worker.scheduler")
        # "Maximum number of running instances reached" is how a busy duty looks to the scheduler.
        for logger in (quiet, logging.getLogger(f"apscheduler.executors.{_EXECUTOR}")):
            logger.setLevel(logging.ERROR)
        self._scheduler = BackgroundScheduler(
            logger=quiet,
            timezone=dt.UTC,
            jobstores={_JOB_STORE: SteadyJobStore()},
            executors={_EXECUTOR: _DaemonThreads()},
            job_defaults={"max_instances": 1, "coalesce": True, "misfire_grace_time": None},
        )
        self._scheduler.add_listener(self._settled, EVENT_JOB_EXECUTED | EVENT_JOB_ERROR)

    def add(self, duty: Duty) -> None:
        """Have the duty run at the start, whenever it is woken, and when its longest wait is over."""
        self._duties[duty.name] = duty
        duty.run_now = lambda: self._run_now(duty.name)
        self._scheduler.add_job(
            duty.run,
            _WaitTrigger(duty.longest_wait),
            id=duty.name,
            executor=_EXECUTOR,
            next_run_time=dt.datetime.now(dt.UTC),
        )

    def start(self) -> None:
        """Start the scheduler and with it all duties."""
        self._scheduler.start()

    def stop(self) -> None:
        """Start no job from now on; those that run are left alone."""
        with suppress(SchedulerNotRunningError):
            self._scheduler.shutdown(wait=False)

    def _run_now(self, name: str) -> None:
        with suppress(JobLookupError):  # the scheduler is shut down
            self._scheduler.modify_job(name, next_run_time=dt.datetime.now(dt.UTC))

    def _settled(self, event: JobExecutionEvent) -> None:
        self._duties[event.job_id].settled()


class _WaitTrigger(BaseTrigger):  # type: ignore[misc]
    """Fires when the wait that a function returns is over; never more than once, however late it is."""

    def __init__(self, wait: Callable[[], float]) -> None:
        self._wait = wait

    def get_next_fire_time(self, _previous: dt.datetime | None, now: dt.datetime) -> dt.datetime:
        return now + dt.timedelta(seconds=self._wait())


class SteadyJobStore(MemoryJobStore):  # type: ignore[misc]
    """Jobs that go on when the host's clock jumps.

    The scheduler reckons in wall-clock time: set back by an hour, it would sleep for an hour. So it is woken at least
    every second, and when that clock and the monotonic one have moved apart, all jobs are due.
    """

    def __init__(self, offset: Callable[[], float] = lambda: time.time() - time.monotonic()) -> None:
        super().__init__()
        self._offset = offset
        self._last = offset()

    def get_due_jobs(self, now: dt.datetime) -> list[Any]:
        """Return the jobs to start now."""
        last, self._last = self._last, self._offset()
        if abs(self._last - last) > _JUMP:
            for job in self.get_all_jobs():
                job.modify(next_run_time=now)
        return list(super().get_due_jobs(now))

    def get_next_run_time(self) -> dt.datetime | None:
        """Return when the scheduler looks again."""
        latest = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=_LOOK_EVERY)
        return min(super().get_next_run_time() or latest, latest)


class _DaemonThreads(BaseExecutor):  # type: ignore[misc]
    """Runs jobs in threads that never keep the process alive.

    Those of `concurrent.futures` are joined when the interpreter exits: a handler that hangs would hold up SIGTERM.
    And APScheduler's executor on top of them runs a job's listeners in the scheduler's own thread if the job ends
    before its future is looked at, where what `Duty.settled` does is overwritten.
    """

    def __init__(self) -> None:
        super().__init__()
        self._work: SimpleQueue[tuple[Any, list[dt.datetime]] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads = 0

    def shutdown(self, wait: bool = True) -> None:  # noqa: ARG002
        """Let the threads end when they are idle; nobody waits for them."""
        for _ in range(self._threads):
            self._work.put(None)

    def _do_submit_job(self, job: Any, run_times: list[dt.datetime]) -> None:
        # Only called by the scheduler's thread.
        if not self._idle.acquire(blocking=False):
            self._threads += 1
            threading.Thread(target=self._run, name=f"outbox-worker-{self._threads}", daemon=True).start()
        self._work.put((job, run_times))

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            job, run_times = work
            try:
                events = run_job(job, _JOB_STORE, run_times, self._logger.name)
            except BaseException as error:  # it is APScheduler's to tell
                self._run_job_error(job.id, error, error.__traceback__)
            else:
                self._run_job_success(job.id, events)
            self._idle.release()
