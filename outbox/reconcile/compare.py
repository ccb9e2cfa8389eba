"""Run the tasks of a comparison: read the same ids from both sides, judge them, return the findings.

A task is a value: it goes to a thread of this process or to a Spark executor, and says all that is needed there.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import pyarrow as pa

from outbox.reconcile.job import Outcome, Range
from outbox.reconcile.judge import Both, Rules, judge, lags
from outbox.reconcile.rows import FINDING, Lag
from outbox.reconcile.source import cancel

#: Upper bounds of the lag histogram, in seconds.
LAG_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0)


class Side(Protocol):
    """One side of a comparison. It can be pickled; it opens what it needs when it reads."""

    def read(self, ranges: Sequence[Range]) -> pa.Table:
        """Return all rows of the ranges, which are in order and don't overlap, sorted by id.

        Raises:
            SourceError: it can't be read; says where and why, and holds no password.
        """
        ...


@dataclass(frozen=True, slots=True)
class Task:
    """Ranges of ids to compare; ``number`` names the task."""

    number: int
    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What to do with a task. ``producer`` reads rows of `rows.PRODUCER`, ``consumer`` those of `rows.CONSUMER`."""

    producer: Side
    consumer: Side
    rules: Rules

    def __call__(self, task: Task) -> Collected:
        """Return the result of one task."""
        return compared(self.producer.read(task.ranges), self.consumer.read(task.ranges), self.rules)


def compared(producer: pa.Table, consumer: pa.Table, rules: Rules) -> Collected:
    """Judge the rows of the same ids."""
    both = Both(producer, consumer)
    counts, findings = judge(both, rules)
    bins, lagged = np.unique(np.searchsorted(LAG_BOUNDS, lags(both)), return_counts=True)
    lags_by_bin = Counter(dict(zip(bins.tolist(), lagged.tolist(), strict=True)))
    return Collected(
        counts, [findings], lags_by_bin, producer.num_rows + consumer.num_rows, producer.nbytes + consumer.nbytes
    )


@dataclass(slots=True)
class Collected:
    """The result of a task, or of many: ``findings`` are tables of `rows.FINDING`, ``lags`` bins of a histogram."""

    counts: Counter[Outcome] = field(default_factory=Counter)
    findings: list[pa.Table] = field(default_factory=list)
    lags: Counter[int] = field(default_factory=Counter)
    rows_read: int = 0
    bytes_read: int = 0

    def add(self, other: Collected) -> None:
        """Add the result of other tasks."""
        self.counts.update(other.counts)
        self.findings += other.findings
        self.lags.update(other.lags)
        self.rows_read += other.rows_read
        self.bytes_read += other.bytes_read

    def lag(self, *, sampled: bool) -> Lag | None:
        """Return the histogram of the lags; None if none was measured."""
        if not self.lags:
            return None
        return Lag(LAG_BOUNDS, tuple(self.lags[bin_] for bin_ in range(len(LAG_BOUNDS) + 1)), sampled)

    @property
    def table(self) -> pa.Table:
        """All findings, sorted by id."""
        return pa.concat_tables([FINDING.empty_table(), *self.findings]).sort_by("id")


#: Progress is reported at least so often (seconds); what listens to it may end the job.
_TELL_EVERY = 0.5
#: A read that is being cancelled may be about to send its next statement: it is cancelled again.
_CANCEL_EVERY = 0.1


class Engine(Protocol):
    """Runs tasks, in any order, some at the same time; each exactly once as far as its result is concerned."""

    def run(self, comparison: Comparison, tasks: Sequence[Task], done: Callable[[int], None]) -> Iterator[Collected]:
        """Yield results of one or several tasks each.

        ``done`` is called with how many of the tasks are finished.

        Raises:
            SourceError: a side can't be read.
        """
        ...


class LocalEngine:
    """Threads of this process: reading and comparing release Python's lock."""

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def run(self, comparison: Comparison, tasks: Sequence[Task], done: Callable[[int], None]) -> Iterator[Collected]:
        """Yield the result of each task as it is finished; a caller that ends this early waits for none of them."""
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
                running = {future for future in pending if not future.cancel()}
                while running:
                    cancel(threads)
                    running = wait(running, _CANCEL_EVERY).not_done


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Add the duration of the block to those of the stages, also if it fails."""
    began = time.monotonic()
    try:
        yield
    finally:
        seconds[stage] = seconds.get(stage, 0.0) + time.monotonic() - began
