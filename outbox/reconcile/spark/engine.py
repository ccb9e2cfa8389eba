"""The engine that runs the tasks of a comparison on Spark, reports how far it is, and ends a plan that is given up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

import pyarrow as pa

from outbox.errors import OutboxError
from outbox.reconcile.archive import UnionSide
from outbox.reconcile.compare import Comparison, Side, Task
from outbox.reconcile.job import Spark
from outbox.reconcile.source import PostgresSide
from outbox.reconcile.spark.java import translated
from outbox.reconcile.spark.session import Session, refuse_loopback, session
from outbox.reconcile.spark.tasks import planned, planned_by_jdbc, reads_by_jdbc, results

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
        self._session: Session | None = None

    @property
    def session(self) -> Session:
        """The session; it is opened if it wasn't.

        Raises:
            InvalidSettings: the options contradict each other, or a session that is there already.
            ReconcileError: Spark doesn't start.
        """
        if self._session is None:
            self._session = self.enter_context(session(self._options, self._workers))
        return self._session

    def run(self, comparison: Comparison, tasks: Sequence[Task], done: Callable[[int], None]) -> Iterator[pa.Table]:
        """Yield the result of all tasks.

        Raises:
            InvalidSettings: executors on other hosts would look for a database on their own.
            SourceError: a side can't be read.
            ReconcileError: Spark doesn't start, or fails.
        """
        if not tasks:
            return
        opened = self.session
        for side in (comparison.producer, comparison.consumer):
            for url in _databases(side):
                refuse_loopback(opened.master, url)
        yield self._collected(opened, comparison, tasks, lambda share: done(int(share * len(tasks))))
        done(len(tasks))

    def _collected(
        self, opened: Session, comparison: Comparison, tasks: Sequence[Task], share: Callable[[float], None]
    ) -> pa.Table:
        by_jdbc = self._options.jdbc_jar is not None and reads_by_jdbc(comparison)
        plan = planned_by_jdbc if by_jdbc else planned
        most = _BY_JDBC if by_jdbc else _OF_CORE * opened.cores if opened.master.in_process else len(tasks)
        partitions = min(len(tasks), most)
        try:
            answers = run(opened, plan(opened.spark, comparison, tasks, partitions), share)
        except OutboxError:
            raise
        except Exception as error:  # what Spark raises has no common base
            raise translated(error) from None
        return results(answers)


def _databases(side: Side) -> list[str]:
    match side:
        case PostgresSide(access=access):
            return [access.url]
        case UnionSide(live=live):
            return _databases(live)
        case _:
            return []


# Seconds between two questions for the progress.
_REPORT_EVERY = 0.2


def run(session: Session, plan: DataFrame, report: Callable[[float], None]) -> pa.Table:
    """Return the rows of a plan; ``report`` is called with the share that is finished, under 1, which only grows.

    Raises:
        Exception: what Spark raises.
    """
    from pyspark import InheritableThread  # noqa: PLC0415

    name = f"outbox-{uuid4().hex}"
    box: list[pa.Table | BaseException] = []

    def collect() -> None:
        try:
            with _named(session, name):
                box.append(plan.toArrow())
        except BaseException as error:  # raised again by the thread that waits
            box.append(error)

    # In a thread of its own: this one stays free for Ctrl-C, which Java's answer would keep waiting.
    thread = InheritableThread(target=collect, session=session.spark)
    with _progress(session, name) as progress:
        thread.start()
        try:
            _watch(thread, progress, report)
        except BaseException:
            _cancel(session, name)
            thread.join()
            raise
    if isinstance(box[0], BaseException):
        raise box[0]
    return box[0]


def _watch(thread: Any, progress: Callable[[], float], report: Callable[[float], None]) -> None:
    most = 0.0
    while thread.is_alive():
        thread.join(_REPORT_EVERY)
        if most < (now := progress()) < 1.0:
            most = now
            report(most)


@contextmanager
def _named(session: Session, name: str) -> Iterator[None]:
    if session.master.connect:
        session.spark.addTag(name)
        try:
            yield
        finally:
            session.spark.removeTag(name)
    else:
        session.spark.sparkContext.setJobGroup(name, "outbox reconcile")
        yield


def _cancel(session: Session, name: str) -> None:
    # The session may be gone by now, and there is something else to raise.
    with suppress(Exception):
        if session.master.connect:
            session.spark.interruptTag(name)
        else:
            session.spark.sparkContext.cancelJobGroup(name)


@contextmanager
def _progress(session: Session, name: str) -> Iterator[Callable[[], float]]:
    if not session.master.connect:
        yield lambda: _tracked(session, name)
        return
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


def _tracked(session: Session, name: str) -> float:
    tracker = session.spark.sparkContext.statusTracker()
    stages = [
        stage
        for job in tracker.getJobIdsForGroup(name)
        if (info := tracker.getJobInfo(job)) is not None
        for number in info.stageIds
        if (stage := tracker.getStageInfo(number)) is not None
    ]
    return _share((stage.numCompletedTasks, stage.numTasks) for stage in stages)


def _share(stages: Iterable[tuple[int, int]]) -> float:
    completed, total = 0, 0
    for done, tasks in stages:
        completed += done
        total += tasks
    return completed / total if total else 0.0
