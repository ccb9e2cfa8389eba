"""The engine that runs the tasks of a comparison on Spark, reports how far it is, and ends a plan that is given up.

Each executor reads both sides of its ranges itself, nothing is shuffled. Bytes and numbers are sent to and fro, so that
it works through Spark Connect too; whatever else is needed, an executor imports. A source that can't be read is an
answer, not an exception: Spark would try it four times and log the Java trace of each.
"""

from __future__ import annotations

import pickle
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from threading import Event
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

import numpy as np
import pyarrow as pa

from outbox.errors import OutboxError, ReconcileError, SourceError, SourceLost
from outbox.reconcile.compare import Collected, Comparison, Portion
from outbox.reconcile.job import Interrupted, Spark
from outbox.reconcile.source import PostgresSide
from outbox.reconcile.spark.session import Session, cause, refuse_loopback, session, text_of
from outbox.text import duration

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Each partition costs a fifth of a second in this process, which has few cores; so many for each of them even out
# what one has to do more than another. On a cluster each task is one: how many cores it will have isn't known yet.
_OF_CORE = 4


class SparkEngine(ExitStack):
    """Runs tasks on Spark, which starts at the latest when there is something to run, and ends with the block if it is
    one of ours.

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

    def start(self, waiting: Callable[[], None]) -> None:
        """Start Spark, and wait until it has run a task: a cluster may have no free place, or no Python with libraries.

        ``waiting`` is called now and then; what it raises ends the wait.

        Raises:
            ReconcileError: Spark doesn't start, fails, or has run nothing for as long as the options allow.
        """
        opened, most = self.session, self._options.max_wait
        until = time.monotonic() + most

        def wait(_: float) -> None:
            waiting()
            if time.monotonic() > until:
                raise ReconcileError(
                    f"Spark on {opened.master} has run no task within max_wait = {duration(most)}: it has no worker, "
                    "or none with as much memory and as many cores free as an executor wants; mend: see its web page, "
                    "ask for less (spark.executor.memory, spark.cores.max), or wait longer"
                )

        with translating():
            run(opened, opened.spark.range(0, 1, 1, 1).mapInArrow(ready, "id long"), wait)

    def run(self, comparison: Comparison, tasks: Sequence[Portion], done: Callable[[int], None]) -> Iterator[Collected]:
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
            if isinstance(side, PostgresSide):
                refuse_loopback(opened.master, side.access.resolved().url)
        partitions = len(tasks)
        if opened.master.in_process:
            partitions = min(partitions, _OF_CORE * opened.spark.sparkContext.defaultParallelism)
        with translating():
            frame = planned(opened.spark, comparison, tasks, partitions)
            answers = run(opened, frame, lambda share: done(int(share * len(tasks))))
        yield results(answers)
        done(len(tasks))


@contextmanager
def translating() -> Iterator[None]:
    """Turn what Spark goes wrong with in the block into an error of ours, in one line."""
    try:
        yield
    except (OutboxError, Interrupted):
        raise
    except Exception as error:  # what Spark raises has no common base
        raise translated(error) from None


# Seconds between two questions for the progress.
_REPORT_EVERY = 0.2


def run(session: Session, plan: DataFrame, report: Callable[[float], None]) -> pa.Table:
    """Return the rows of a plan.

    ``report`` is called several times a second with the share that is finished, under 1, which never shrinks; what it
    raises ends the job.
    """
    from pyspark import InheritableThread  # noqa: PLC0415 - an extra

    name = f"outbox-{uuid4().hex}"
    box: list[pa.Table | BaseException] = []
    # Asked in place of the thread, which Python takes for ended where Ctrl-C interrupts the thread that joins it.
    ended = Event()

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
        finally:
            ended.set()

    # In a thread of its own: this one stays free for Ctrl-C, which Java's answer would keep waiting.
    thread = InheritableThread(target=collect, session=session.spark)
    with _progress_of_client(session) if session.master.connect else nullcontext(_tracked(session, name)) as progress:
        thread.start()
        most = 0.0
        try:
            while not ended.wait(_REPORT_EVERY):
                most = max(most, now) if (now := progress()) < 1.0 else most
                report(most)
        except BaseException:
            while not ended.is_set():
                # The session may be gone by now, and there is something else to raise.
                with suppress(Exception):
                    if session.master.connect:
                        session.spark.interruptTag(name)
                    else:
                        session.spark.sparkContext.cancelJobGroup(name)
                # A job that isn't submitted yet can't be cancelled yet.
                ended.wait(_REPORT_EVERY)
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


# --- tasks as a plan -----------------------------------------------------------------------------------------

#: The columns of an answer.
ANSWER = "answer binary"
#: Findings in an answer: Spark has one of its values as a whole in memory, several times.
_ROWS_OFANSWER = 10_000


def planned(spark: SparkSession, comparison: Comparison, tasks: Sequence[Portion], partitions: int) -> DataFrame:
    """Return what runs the tasks and gives their answers (see `results`)."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            for batch in batches:
                for number in batch["id"].to_pylist():
                    yield from answers(comparison(tasks[number]))
        except SourceError as error:
            yield _sent(error)
            # Whose input isn't read to its end is thrown away, and the next task begins with all the imports.
            deque(batches, maxlen=0)

    return spark.range(0, len(tasks), 1, partitions).mapInArrow(run, ANSWER)


def ready(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pass rows on: an executor that does so has a Python, this package and its libraries."""
    yield from batches


def answers(result: Collected) -> Iterator[pa.RecordBatch]:
    """Yield a result as it goes to the driver."""
    yield _sent(replace(result, findings=[]))
    rows = result.table
    for start in range(0, rows.num_rows, _ROWS_OFANSWER):
        # Taken, not sliced: a slice is pickled with all that it was cut from.
        some = rows.take(np.arange(start, min(start + _ROWS_OFANSWER, rows.num_rows)))
        yield _sent(Collected(findings=[some]))


def _sent(answer: Collected | SourceError) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"answer": [pickle.dumps(answer)]})


def results(sent: pa.Table) -> Collected:
    """Return the result of answers as they came from Spark; raise the `SourceError` that is one of them."""
    collected = Collected()
    for value in sent["answer"]:
        answer: Collected | SourceError = pickle.loads(value.as_py())  # noqa: S301 - from our own executors
        if isinstance(answer, SourceError):
            raise answer
        collected.add(answer)
    return collected


# --- what went wrong -----------------------------------------------------------------------------------------

_PYTHON = re.compile(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception|Interrupt|Exit|Warning))(?:: (.*))?$", re.MULTILINE)
# An error of ours that a task raised.
_OURS = re.compile(r"^outbox\.errors\.(\w+): (.+)$", re.MULTILINE)


def translated(error: Exception) -> ReconcileError:
    """Return what to raise instead; the Python trace of a task, if there is one, is its note."""
    text = text_of(error)
    if (start := text.rfind("Traceback (most recent call last)")) >= 0:
        return _of_task(text[start:])
    return ReconcileError(f"Spark failed: {cause(error)}")


def _of_task(trace: str) -> ReconcileError:
    trace = trace.partition("\n\tat ")[0]
    if ours := _OURS.findall(trace):
        name, text = ours[-1]
        return {"SourceError": SourceError, "SourceLost": SourceLost}.get(name, ReconcileError)(text)
    raised = list(_PYTHON.finditer(trace))
    if not raised:
        return ReconcileError("a task failed on Spark")
    last = raised[-1]
    if last[1] == "ModuleNotFoundError":
        return ReconcileError(
            f"Spark's executors miss a library ({last[2]}); mend: give them a Python with the extra 'reconcile', "
            "see docs/spark.md"
        )
    result = ReconcileError(f"a task failed on Spark: {last[0]}")
    result.add_note(trace[: last.end()])
    return result
