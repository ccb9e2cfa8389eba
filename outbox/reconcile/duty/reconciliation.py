"""The reconciliation as a duty: the first worker that finds it due runs it, once for all workers.

No transaction or lock is held while it runs. The record keeps the other workers off: under a transaction-level lock a
worker makes sure that no run has begun since the reconciliation was due, and writes that one begins.

When it is due follows from its timetable, from how the last run ended, and from the database's clock
(`outbox.reconcile.record.timetable`).
"""

from __future__ import annotations

import datetime as dt
import importlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from outbox.database.execute import execute, lock_key
from outbox.database.sql import try_lock
from outbox.errors import InvalidSettings, pip_install
from outbox.message.answer import finished
from outbox.message.model import Counts
from outbox.reconcile.config import Values, job_of, merged, own_access, read_file, read_mapping, subscribed
from outbox.reconcile.job import Access, Interrupted, Job, Reconciliation, Stoppable, Window
from outbox.reconcile.record.orders import give_back, take
from outbox.reconcile.record.timetable import FLEET, LastRun, Timetable, last_scheduled
from outbox.telemetry.events import (
    ReconciliationFailed,
    ReconciliationFinished,
    ReconciliationInterrupted,
    ReconciliationReportFailed,
)
from outbox.telemetry.hooks import TelemetryEvent, emit

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.database.duty import ServedOutbox
    from outbox.reconcile.fleet.config import Fleet
    from outbox.reconcile.fleet.run import FleetResult, FleetRun
    from outbox.reconcile.record.write import Recorded, RunIds
    from outbox.reconcile.rows import JobResult

logger: logging.Logger = logging.getLogger("outbox.worker")

#: The longest and the shortest time (seconds) between two reads of the record: operators wait for what they order.
READ_EVERY = 5.0
_READ_FIRST = 0.1
#: Any time, for a job that is only looked at.
SOME_TIME = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
_PAIRS_NAMED = 3


def reconcilers(outbox: ServedOutbox, stopping: threading.Event) -> list[JobReconciler | FleetReconciler]:
    """Return what runs the reconciliations of an Outbox: fleets, and jobs, one for each database that is read.

    Raises:
        InvalidSettings: one that can't be run: its libraries aren't installed, or the declaration doesn't fit.
    """
    found: list[JobReconciler | FleetReconciler] = []
    for declared in outbox.reconciliations.values():
        if declared.fleet is not None:
            found.append(_of_fleet(declared, Path(declared.fleet), outbox, stopping))
        elif declared.follows is False:
            found += [JobReconciler(declared, values, stopping) for values in values_of(declared, outbox)]
    return found


def _of_fleet(declared: Reconciliation, path: Path, outbox: ServedOutbox, stopping: threading.Event) -> FleetReconciler:
    _require_library(declared)
    from outbox.reconcile.fleet.config import read_fleet  # noqa: PLC0415 - an extra

    try:
        return FleetReconciler(declared, read_fleet(path), own_access(outbox), stopping)
    except InvalidSettings as error:
        raise declared.refused(str(error)) from None


def _require_library(declared: Reconciliation) -> None:
    try:
        importlib.import_module("outbox.reconcile.run")  # an extra
    except ModuleNotFoundError as error:
        raise declared.refused(f"it needs {error.name}; {pip_install('reconcile')}") from error


def name_of(declared: Reconciliation, job: Job) -> str:
    """Return what the duty of a reconciliation is called."""
    shown, more = job.pairs[:_PAIRS_NAMED], len(job.pairs) - _PAIRS_NAMED
    rest = f", and {more} more" if more > 0 else ""
    return f"reconcile {declared.name}: {', '.join(map(str, shown))}{rest}"


def values_of(declared: Reconciliation, outbox: ServedOutbox) -> list[Values]:
    """Return the declared values of a reconciliation, one for each database that its groups consume from.

    Raises:
        InvalidSettings: as `reconcilers`.
    """
    _require_library(declared)
    try:
        written = {} if declared.config is None else read_file(Path(declared.config))
        values = merged({"actor": f"reconciliation {declared.name}"}, written)
        values = merged(values, read_mapping(declared.job or {}))
    except InvalidSettings as error:
        raise declared.refused(str(error)) from None
    if "consumer" in values:
        raise declared.refused("its consumer is the database of the Outbox; leave consumer out")
    if not values.get("record", True) or "record_in" in values:
        raise declared.refused("its record is how workers know that it was run; leave record out")
    return subscribed(outbox, values)


class _Logged(Stoppable):
    """The progress of a job, which ends when the worker stops."""

    def say(self, sentence: str) -> None:
        """Something was decided."""
        logger.debug("%s", sentence, extra={"outbox_event": "reconcile.plan"})


#: What a reconciler runs: a `Job`, or a `FleetRun`.
Work = TypeVar("Work", bound="Recorded")


class Reconciler(ABC, Generic[Work]):
    """The runs of one timetable, with their record in one database; its calls are the passes of a duty.

    ``name`` is that of the duty. ``pairs`` are the topics and groups of its runs, ``schema`` is that of their record.
    """

    def __init__(
        self,
        declared: Reconciliation,
        stopping: threading.Event,
        *,
        name: str,
        pairs: Sequence[tuple[str, str]],
        schema: str,
    ) -> None:
        self.declared: Reconciliation = declared
        self.name: str = name
        self.pairs: list[tuple[str, str]] = list(pairs)
        self.schema: str = schema
        self._timetable = Timetable(declared)
        self._progress = _Logged(stopping)
        self._due_at = time.monotonic()
        self._key = lock_key("reconcile", schema, declared.name, *self.pairs[0])

    def wait(self) -> float:
        """Return after how many seconds to read the record again."""
        return min(max(self._due_at - time.monotonic(), _READ_FIRST), READ_EVERY)

    def __call__(self, connection: Connection, _: Connection) -> Counts:
        """Run it if it is due, or an operator has ordered it, and no other worker does."""
        with connection.begin():
            last = self._last(connection)
        work = self.work_at(last.now)
        if self._is_due(last):
            ids = self._begin(connection, work)
        else:
            work, ids = self._take_order(connection, work)
        if ids is None:
            return Counts()
        pairs = len(work.names)
        return Counts(taken=pairs, done=pairs) if self._run(work, ids) else Counts(taken=pairs, failed=pairs)

    @abstractmethod
    def work_at(self, now: dt.datetime) -> Work:
        """Return the work to run, if ``now`` is the time."""

    @abstractmethod
    def _ordered(self, work: Work, actor: str, *, dry_run: bool) -> Work:
        """Return it as an operator has ordered it."""

    @abstractmethod
    def _carry_out(self, work: Work, ids: RunIds) -> Any:
        """Run it; return its result."""

    @abstractmethod
    def _tell_of(self, result: Any) -> bool:
        """Tell what came of it; False if it counts as failed."""

    def _last(self, connection: Connection) -> LastRun:
        return last_scheduled(connection, self.schema, self.declared.name, self.pairs)

    def _is_due(self, last: LastRun) -> bool:
        due_in = self._timetable.due_in(last)
        self._due_at = time.monotonic() + due_in
        return due_in <= 0

    def _begin(self, connection: Connection, work: Work) -> RunIds | None:
        """Write that a run begins, unless another worker was faster."""
        from outbox.reconcile.record.write import RunIds  # noqa: PLC0415 - an extra

        with connection.begin():
            ((taken, *_),) = execute(connection, try_lock(self._key))[0]
            # Read again under the lock, by a statement that sees what earlier holders of the lock have committed.
            if not taken or not self._is_due(self._last(connection)):
                return None
            ids = RunIds.new(work, self.declared.name)
            execute(connection, *ids.begin(work))
        return ids

    def _take_order(self, connection: Connection, work: Work) -> tuple[Work, RunIds | None]:
        """Take an order, if there is one, and write that its run begins; the timetable knows nothing of it."""
        from outbox.reconcile.record.write import RunIds  # noqa: PLC0415 - an extra

        ids, (topic, group) = RunIds.new(work), self.pairs[0]
        named = {"schedule": self.declared.name, "topic": topic, "group": group, "job": ids.job}
        with connection.begin():
            (rows,) = execute(connection, take(self.schema, **named))
            if not rows:
                return work, None
            dry_run, actor = rows[0]
            ordered = self._ordered(work, actor, dry_run=dry_run)
            execute(connection, *ids.begin(ordered))
        return ordered, ids

    def _run(self, work: Work, ids: RunIds) -> bool:
        """Run it; False if it came to no result, which is in the record, and a line in the log."""
        from outbox.reconcile.record.write import why_of  # noqa: PLC0415 - an extra
        from outbox.reconcile.source import connected  # noqa: PLC0415 - an extra

        try:
            result = self._carry_out(work, ids)
        except Interrupted:
            self._tell(ReconciliationInterrupted, "was interrupted, and will be run again")
            # The worker's own connection may be closed by now.
            with connected(work.recorder) as own:
                execute(own, give_back(self.schema, job=ids.job))
            return False
        except Exception as error:  # the duty goes on, and the record says when it is due again
            self._tell(ReconciliationFailed, why_of(error, work))
            logger.debug("%s failed", self.name, exc_info=error)
            return False
        is_done = self._tell_of(result)
        try:
            if self.declared.report is not None:
                finished("it", self.declared.report(result))
        except Exception as error:  # it is the application's function
            self._tell(ReconciliationReportFailed, f"its report failed: {why_of(error, work)}", error=error)
        return is_done

    def _tell(self, kind: Callable[..., TelemetryEvent], sentence: str, **facts: Any) -> None:
        emit(kind(duty=self.name, reconciliation=self.declared.name, sentence=sentence, **facts))


class JobReconciler(Reconciler["Job"]):
    """A reconciliation of groups that consume from one database."""

    def __init__(self, declared: Reconciliation, values: Values, stopping: threading.Event) -> None:
        self._declared, self._values = declared, values
        # Refused now rather than at night.
        job = self.work_at(SOME_TIME)
        super().__init__(declared, stopping, name=name_of(declared, job), pairs=job.names, schema=job.consumer.schema)

    def work_at(self, now: dt.datetime) -> Job:
        """Return the job."""
        try:
            return job_of(self._values, lambda _: now)
        except InvalidSettings as error:
            raise self._declared.refused(str(error)) from None

    def _ordered(self, work: Job, actor: str, *, dry_run: bool) -> Job:
        return replace(work, apply=work.apply and not dry_run, actor=actor)

    def _carry_out(self, work: Job, ids: RunIds) -> JobResult:
        from outbox.reconcile.run import reconcile  # noqa: PLC0415 - an extra

        return reconcile(work, self._progress, ids)

    def _tell_of(self, result: JobResult) -> bool:
        from outbox.reconcile.report import verdict  # noqa: PLC0415 - an extra

        reached = verdict(result)
        self._tell(ReconciliationFinished, reached.sentence, clean=not (reached.left or reached.measures))
        return True


class FleetReconciler(Reconciler["FleetRun"]):
    """A fleet, whose run is recorded in the database of the Outbox."""

    def __init__(self, declared: Reconciliation, fleet: Fleet, own: Access, stopping: threading.Event) -> None:
        job = {"actor": f"reconciliation {declared.name}", **fleet.job}
        self._fleet, self._own = replace(fleet, job=job), own
        name = f"reconcile {declared.name}: fleet {declared.fleet}"
        super().__init__(declared, stopping, name=name, pairs=[FLEET], schema=own.schema)

    def work_at(self, now: dt.datetime) -> FleetRun:
        """Return the fleet."""
        from outbox.reconcile.fleet.run import FleetRun  # noqa: PLC0415 - an extra

        window = Window(**self._fleet.job.get("window", {})).ending(lambda: now)
        return FleetRun(self._fleet, self._own, window)

    def _ordered(self, work: FleetRun, actor: str, *, dry_run: bool) -> FleetRun:
        job = {**work.fleet.job, "actor": actor, "apply": work.fleet.job.get("apply", False) and not dry_run}
        return replace(work, fleet=replace(work.fleet, job=job))

    def _carry_out(self, work: FleetRun, ids: RunIds) -> FleetResult:
        return work.carry_out(ids, self._progress)

    def _tell_of(self, result: FleetResult) -> bool:
        if result.failed:
            self._tell(ReconciliationFailed, result.sentence)
        else:
            reached = result.verdict
            self._tell(ReconciliationFinished, result.sentence, clean=not (reached.left or reached.measures))
        return not result.failed
