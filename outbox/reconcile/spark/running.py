"""Run a Spark plan, tell how far it is, and end it when nobody waits for it any more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

import pyarrow as pa

from outbox.reconcile.spark.session import Session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Seconds between two looks at the progress.
_LOOK = 0.2


def run(session: Session, plan: DataFrame, told: Callable[[float], None]) -> pa.Table:
    """Return the rows of a plan; ``told`` is called with the share that is finished, under 1, which only grows.

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
        except BaseException as error:  # raised again by who waits
            box.append(error)

    # In a thread of its own: this one stays free for Ctrl-C, which Java's answer would keep waiting.
    thread = InheritableThread(target=collect, session=session.spark)
    with _progress(session, name) as progress:
        thread.start()
        try:
            _watch(thread, progress, told)
        except BaseException:
            _cancel(session, name)
            thread.join()
            raise
    if isinstance(box[0], BaseException):
        raise box[0]
    return box[0]


def _watch(thread: Any, progress: Callable[[], float], told: Callable[[float], None]) -> None:
    most = 0.0
    while thread.is_alive():
        thread.join(_LOOK)
        if most < (now := progress()) < 1.0:
            most = now
            told(most)


@contextmanager
def _named(session: Session, name: str) -> Iterator[None]:
    if session.place.connect:
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
        if session.place.connect:
            session.spark.interruptTag(name)
        else:
            session.spark.sparkContext.cancelJobGroup(name)


@contextmanager
def _progress(session: Session, name: str) -> Iterator[Callable[[], float]]:
    if not session.place.connect:
        yield lambda: _tracked(session, name)
        return
    seen = [0.0]

    def handler(stages: Iterable[Any] | None, **_others: object) -> None:
        seen[0] = _share((stage.num_completed_tasks, stage.num_tasks) for stage in stages or ())

    # Declared as a class, called as a function, with names.
    told = cast("Any", handler)
    session.spark.registerProgressHandler(told)
    try:
        yield lambda: seen[0]
    finally:
        session.spark.removeProgressHandler(told)


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
