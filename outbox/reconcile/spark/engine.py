"""The engine that runs the tasks of a comparison on Spark, reports how far it is, and ends a plan that is given up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

import pyarrow as pa

from outbox.errors import OutboxError
from outbox.reconcile.archive import UnionSide
from outbox.reconcile.compare import Collected, Comparison, Task
from outbox.reconcile.job import Spark
from outbox.reconcile.source import PostgresSide
from outbox.reconcile.spark.java import translated
from outbox.reconcile.spark.session import Session, refuse_loopback, session
from outbox.reconcile.spark.tasks import planned, planned_by_jdbc, results

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Each partition costs a fifth of a second in this process, which has few cores; so many for each of them even out
# what one has to do more than another. On a cluster each task is one: how many cores it will have isn't known yet.
_OF_CORE = 4
# What JDBC reads is asked for its columns first, partition by partition, by the driver.
_BY_JDBC = 64


class SparkEngine(ExitStack):
    """Runs tasks on Spark, which starts when there is something to run, and ends with the block if it is one of ours.

    ``workers`` tasks run at once where Spark is started in this process; on a cluster as many as the application has
    cores.
    """

    def __init__(self, options: Spark, workers: int) -> None:
        super().__init__()
        self._options = options
        self._workers = workers

    @cached_property
    def session(self) -> Session:
        """The session; it is opened at first use."""
        return self.enter_context(session(self._options, self._workers))

    def run(self, comparison: Comparison, tasks: Sequence[Task], done: Callable[[int], None]) -> Iterator[Collected]:
        """Yield the result of all tasks.

        Raises:
            InvalidSettings: executors on other hosts would look for a database on their own.
            SourceError: a side can't be read.
            ReconcileError: Spark doesn't start, or fails.
        """
        if not tasks:
            return
        opened = self.session
        both = (comparison.producer, comparison.consumer)
        for side in both:
            live = side.live if isinstance(side, UnionSide) else side
            if isinstance(live, PostgresSide):
                refuse_loopback(opened.master, live.access.url)
        by_jdbc = self._options.jdbc_jar is not None and all(isinstance(side, PostgresSide) for side in both)
        plan = planned_by_jdbc if by_jdbc else planned
        partitions = len(tasks)
        if by_jdbc:
            partitions = min(partitions, _BY_JDBC)
        elif opened.master.in_process:
            partitions = min(partitions, _OF_CORE * opened.spark.sparkContext.defaultParallelism)
        try:
            frame = plan(opened.spark, comparison, tasks, partitions)
            answers = run(opened, frame, lambda share: done(int(share * len(tasks))))
        except OutboxError:
            raise
        except Exception as error:  # what Spark raises has no common base
            raise translated(error) from None
        yield results(answers)
        done(len(tasks))


# Seconds between two questions for the progress.
_REPORT_EVERY = 0.2


def run(session: Session, plan: DataFrame, report: Callable[[float], None]) -> pa.Table:
    """Return the rows of a plan; ``report`` is called with the share that is finished, under 1, which only grows."""
    from pyspark import InheritableThread  # noqa: PLC0415 - an extra

    name = f"outbox-{uuid4().hex}"
    box: list[pa.Table | BaseException] = []

    def collect() -> None:
        try:
            # Of this thread alone, and gone with it.
            if session.master.connect:
                session.spark.addTag(name)
            else:
                session.spark.sparkContext.setJobGroup(name, "outbox reconcile")
            box.append(plan.toArrow())
        except BaseException as error:  # raised again by the thread that waits
            box.append(error)

    # In a thread of its own: this one stays free for Ctrl-C, which Java's answer would keep waiting.
    thread = InheritableThread(target=collect, session=session.spark)
    with _progress_of_client(session) if session.master.connect else nullcontext(_tracked(session, name)) as progress:
        thread.start()
        most = 0.0
        try:
            while thread.is_alive():
                thread.join(_REPORT_EVERY)
                if most < (now := progress()) < 1.0:
                    report(most := now)
        except BaseException:
            # The session may be gone by now, and there is something else to raise.
            with suppress(Exception):
                if session.master.connect:
                    session.spark.interruptTag(name)
                else:
                    session.spark.sparkContext.cancelJobGroup(name)
            thread.join()
            raise
    if isinstance(box[0], BaseException):
        raise box[0]
    return box[0]


@contextmanager
def _progress_of_client(session: Session) -> Iterator[Callable[[], float]]:
    share = [0.0]

    def handler(stages: Iterable[Any] | None, **_others: object) -> None:
        share[0] = _share((stage.num_completed_tasks, stage.num_tasks) for stage in stages or ())

    # Declared as a class, called as a function, with names.
    typed = cast("Any", handler)
    session.spark.registerProgressHandler(typed)
    try:
        yield lambda: share[0]
    finally:
        session.spark.removeProgressHandler(typed)


def _tracked(session: Session, group: str) -> Callable[[], float]:
    tracker = session.spark.sparkContext.statusTracker()

    def progress() -> float:
        jobs = filter(None, map(tracker.getJobInfo, tracker.getJobIdsForGroup(group)))
        stages = filter(None, (tracker.getStageInfo(number) for job in jobs for number in job.stageIds))
        return _share((stage.numCompletedTasks, stage.numTasks) for stage in stages)

    return progress


def _share(stages: Iterable[tuple[int, int]]) -> float:
    counts = list(stages)
    total = sum(tasks for _, tasks in counts)
    return sum(completed for completed, _ in counts) / total if total else 0.0
