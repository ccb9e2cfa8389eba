"""What runs the tasks of a comparison, and the engine that does it in this process.

What a job tells while it works: to a progress bar, a log, or nobody.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Protocol

import pyarrow as pa

from outbox.reconcile.compare import Comparison, Task
from outbox.reconcile.source import cancel

#: Who is told of finished tasks is told at least so often (seconds), and may end the job.
_TELL_EVERY = 0.5
#: A read that is being cancelled may be about to send its next statement: it is cancelled again.
_CANCEL_EVERY = 0.1


class Engine(Protocol):
    """Runs tasks, in any order, some at the same time; each exactly once as far as its result is concerned."""

    def run(self, comparison: Comparison, tasks: Sequence[Task], done: Callable[[int], None]) -> Iterator[pa.Table]:
        """Yield results (`compare.RESULT`) of one or several tasks each.

        ``done`` is told how many of the tasks are finished.

        Raises:
            SourceError: a side can't be read.
        """
        ...


class LocalEngine:
    """Threads of this process: reading and comparing release Python's lock."""

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def run(self, comparison: Comparison, tasks: Sequence[Task], done: Callable[[int], None]) -> Iterator[pa.Table]:
        """Yield the result of each task as it is finished; whoever ends this early waits for none of them."""
        threads: list[int] = []
        with ThreadPoolExecutor(
            self._workers, "reconcile", initializer=lambda: threads.append(threading.get_ident())
        ) as pool:
            pending = {pool.submit(comparison, task) for task in tasks}
            try:
                while pending:
                    finished, pending = wait(pending, _TELL_EVERY, FIRST_COMPLETED)
                    for future in finished:
                        yield future.result()
                    done(len(tasks) - len(pending))
            finally:
                _give_up(pending, threads)


def _give_up(pending: Collection[Future[pa.Table]], threads: Collection[int]) -> None:
    running = {future for future in pending if not future.cancel()}
    while running:
        cancel(threads)
        running = wait(running, _CANCEL_EVERY).not_done


class Told(Protocol):
    """Somebody who is told how a job goes on. Called from the job's own thread."""

    def stage(self, title: str, total: int | None) -> None:
        """A stage begins; ``total`` is how many steps it has, None if that isn't known."""

    def done(self, steps: int) -> None:
        """So many steps of the stage are done."""

    def say(self, sentence: str) -> None:
        """Something was decided."""


class Interrupted(Exception):
    """Raised by one who is told, to end the job; what was done is in the record, and a job may be run again."""


class Silent:
    """Nobody."""

    def stage(self, title: str, total: int | None) -> None:
        """Say nothing."""

    def done(self, steps: int) -> None:
        """Say nothing."""

    def say(self, sentence: str) -> None:
        """Say nothing."""


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Add the duration of the block to those of the stages, also if it fails."""
    began = time.monotonic()
    try:
        yield
    finally:
        seconds[stage] = seconds.get(stage, 0.0) + time.monotonic() - began
