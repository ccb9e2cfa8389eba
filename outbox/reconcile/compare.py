"""Compare two sides: read the same ids from both, judge them, return the findings; look again at what differs.

A comparison and its tasks are values: they go to a thread of this process or to a Spark executor, and say all that is
needed there.

The second look: a difference counts only if it is still there when both sides are read again. Two databases have no
snapshot in common. In the first look the consumer's is the older one, so that it knows nothing the producer's doesn't;
what it consumed in between looks missing. The second look reads the differing messages again, the producer's side
first, and goes on until two looks in a row say the same of a message.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from outbox.reconcile.job import KINDS, Outcome, Range
from outbox.reconcile.judge import Both, Rules, judge, lags
from outbox.reconcile.rows import FINDING, Lag, to_uuids
from outbox.reconcile.source import cancel
from outbox.reconcile.sql import LAST_ID

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
class Portion:
    """Ranges of ids to compare; ``number`` names the task."""

    number: int
    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What to do with a task. ``producer`` reads rows of `rows.PRODUCER`, ``consumer`` those of `rows.CONSUMER`."""

    producer: Side
    consumer: Side
    rules: Rules

    def __call__(self, task: Portion) -> Collected:
        """Return the result of one task."""
        return compared(self.producer.read(task.ranges), self.consumer.read(task.ranges), self.rules)

    def again(self, ids: Iterable[UUID]) -> tuple[pa.Table, Counter[Outcome]]:
        """Read messages from both sides, the producer's first, and judge them (`SecondRead`); ``ids`` are in order."""
        collected = self(Portion(0, tuple(map(only, ids))))
        others = Counter({outcome: number for outcome, number in collected.counts.items() if not outcome.differs})
        return collected.table, others


def only(id_: UUID) -> Range:
    """Return the range of one id."""
    return Range(id_, None if id_ == LAST_ID else UUID(int=id_.int + 1))


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


def differing(table: pa.Table) -> pa.Table:
    """Return the rows of a table of findings that are differences."""
    return table.filter(pc.greater_equal(table["outcome"], int(KINDS[0])))


def in_flight(table: pa.Table) -> pa.Table:
    """Return the messages in flight of a table of findings."""
    return table.filter(pc.equal(table["outcome"], int(Outcome.IN_FLIGHT)))


# --- the second look -------------------------------------------------------------------------------------

#: Reads messages again: those that differ or are in flight (`rows.FINDING`), and how many others have which outcome.
SecondRead = Callable[[list[UUID]], tuple[pa.Table, Counter[Outcome]]]

#: So many messages are read again at once.
BATCH = 2_000
#: A message on which both sides are at work is different at each read; after so many it is reported as it is.
_MOST_READS = 4


def recheck(
    findings: pa.Table, read_again: SecondRead, done: Callable[[int], None] = lambda _: None, batch: int | None = None
) -> tuple[pa.Table, pa.Table, Counter[Outcome]]:
    """Read differences (`rows.FINDING`) again, until two reads in a row agree; ``batch`` of them at once.

    Returns those that are still there, and what of them is in flight now; and how the counts change.
    """
    confirmed: list[pa.Table] = [FINDING.empty_table()]
    opened: list[pa.Table] = [FINDING.empty_table()]
    change: Counter[Outcome] = Counter()
    batch = batch or BATCH
    for start in range(0, findings.num_rows, batch):
        outcomes = _outcomes(findings.slice(start, batch))
        change.subtract(outcomes.values())
        for attempt in range(_MOST_READS):
            findings_now, others = read_again(sorted(outcomes))
            still = differing(findings_now)
            opened.append(in_flight(findings_now))
            change.update(others)
            before, outcomes = outcomes, _outcomes(still)
            if outcomes == before or not outcomes or attempt == _MOST_READS - 1:
                break
        change.update(outcomes.values())
        confirmed.append(still)
        done(min(start + batch, findings.num_rows))
    return pa.concat_tables(confirmed), pa.concat_tables(opened), change


def _outcomes(table: pa.Table) -> dict[UUID, Outcome]:
    return dict(zip(to_uuids(table), map(Outcome, table["outcome"].to_pylist()), strict=True))


# --- engines ---------------------------------------------------------------------------------------------

#: Progress is reported at least so often (seconds); what listens to it may end the job.
_TELL_EVERY = 0.5
#: A read that is being cancelled may be about to send its next statement: it is cancelled again.
_CANCEL_EVERY = 0.1


class Engine(Protocol):
    """Runs tasks, in any order, some at the same time; each exactly once as far as its result is concerned."""

    def run(self, comparison: Comparison, tasks: Sequence[Portion], done: Callable[[int], None]) -> Iterator[Collected]:
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

    def run(self, comparison: Comparison, tasks: Sequence[Portion], done: Callable[[int], None]) -> Iterator[Collected]:
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
