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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outbox.database.execute import execute, lock_key
from outbox.database.sql import try_lock
from outbox.errors import InvalidSettings, pip_install
from outbox.message.model import Counts
from outbox.reconcile.config import Values, job_of, merged, read_file, read_mapping, subscribed
from outbox.reconcile.job import Interrupted, Job, Reconciliation, Stoppable
from outbox.reconcile.record.orders import give_back, take
from outbox.reconcile.record.timetable import LastRun, Timetable, last_scheduled
from outbox.telemetry.event import TelemetryEvent
from outbox.telemetry.events import (
    ReconciliationFailed,
    ReconciliationFinished,
    ReconciliationInterrupted,
    ReconciliationReportFailed,
)
from outbox.telemetry.hooks import emit

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.app import Outbox
    from outbox.reconcile.record.write import RunIds

logger: logging.Logger = logging.getLogger("outbox.worker")

#: The longest and the shortest time (seconds) between two readings of the record: operators wait for what they order.
READ_EVERY = 5.0
_READ_FIRST = 0.1
_SOME_TIME = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
_PAIRS_NAMED = 3


def reconcilers(outbox: Outbox, stopping: threading.Event) -> list[Reconciler]:
    """Return what runs the reconciliations of an Outbox, one for each database that their groups consume from.

    Raises:
        InvalidSettings: one that can't be run: its libraries aren't installed, or what was declared doesn't fit.
    """
    return [
        Reconciler(declared, values, stopping)
        for declared in outbox.reconciliations.values()
        for values in _values(declared, outbox)
    ]


def _values(declared: Reconciliation, outbox: Outbox) -> list[Values]:
    try:
        importlib.import_module("outbox.reconcile.run")  # an extra
    except ModuleNotFoundError as error:
        raise declared.refused(f"it needs {error.name}; {pip_install('reconcile')}") from error
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


class Reconciler:
    """One reconciliation of groups that consume from one database; its calls are the passes of a duty."""

    def __init__(self, declared: Reconciliation, values: Values, stopping: threading.Event) -> None:
        self.declared: Reconciliation = declared
        self._values = values
        self._timetable = Timetable(declared)
        self._progress = _Logged(stopping)
        self._due_at = time.monotonic()
        # Refused now rather than at night.
        job = self.job_at(_SOME_TIME)
        self.pairs: list[tuple[str, str]] = [pair.names for pair in job.pairs]
        self.schema: str = job.consumer.schema
        self._key = lock_key("reconcile", self.schema, declared.name, *self.pairs[0])
        shown, more = job.pairs[:_PAIRS_NAMED], len(job.pairs) - _PAIRS_NAMED
        rest = f", and {more} more" if more > 0 else ""
        self.name: str = f"reconcile {declared.name}: {', '.join(map(str, shown))}{rest}"

    def wait(self) -> float:
        """Return after how many seconds to read the record again."""
        return min(max(self._due_at - time.monotonic(), _READ_FIRST), READ_EVERY)

    def __call__(self, connection: Connection, _: Connection) -> Counts:
        """Run the job if it is due, or an operator has ordered it, and no other worker does."""
        with connection.begin():
            last = self._last(connection)
        if self._is_due(last):
            job = self.job_at(last.now)
            ids = self._claim(connection, job)
        else:
            job, ids = self._take_order(connection, self.job_at(last.now))
        if ids is None:
            return Counts()
        pairs = len(job.pairs)
        return Counts(taken=pairs, done=pairs) if self._run(job, ids) else Counts(taken=pairs, failed=pairs)

    def job_at(self, now: dt.datetime) -> Job:
        """Return the job, of which ``now`` is the time."""
        try:
            return job_of(self._values, lambda _: now)
        except InvalidSettings as error:
            raise self.declared.refused(str(error)) from None

    def _last(self, connection: Connection) -> LastRun:
        return last_scheduled(connection, self.schema, self.declared.name, self.pairs)

    def _is_due(self, last: LastRun) -> bool:
        due_in = self._timetable.due_in(last)
        self._due_at = time.monotonic() + due_in
        return due_in <= 0

    def _claim(self, connection: Connection, job: Job) -> RunIds | None:
        """Write that a run begins, unless another worker was faster."""
        from outbox.reconcile.record.write import RunIds  # noqa: PLC0415 - an extra

        with connection.begin():
            ((taken, *_),) = execute(connection, try_lock(self._key))[0]
            # Read again under the lock, by a statement that sees what earlier holders of the lock have committed.
            if not taken or not self._is_due(self._last(connection)):
                return None
            ids = RunIds.new(job, self.declared.name)
            execute(connection, *ids.begin(job))
        return ids

    def _take_order(self, connection: Connection, job: Job) -> tuple[Job, RunIds | None]:
        """Take an order, if there is one, and write that its run begins; the timetable knows nothing of it."""
        from outbox.reconcile.record.write import RunIds  # noqa: PLC0415 - an extra

        ids, (topic, group) = RunIds.new(job), self.pairs[0]
        named = {"schedule": self.declared.name, "topic": topic, "group": group, "job": ids.job}
        with connection.begin():
            (rows,) = execute(connection, take(self.schema, **named))
            if not rows:
                return job, None
            dry_run, actor = rows[0]
            ordered = replace(job, apply=job.apply and not dry_run, actor=actor)
            execute(connection, *ids.begin(ordered))
        return ordered, ids

    def _run(self, job: Job, ids: RunIds) -> bool:
        """Run the job; False if it came to no result, which is in the record, and a line in the log."""
        from outbox.reconcile.record.write import why_of  # noqa: PLC0415 - an extra
        from outbox.reconcile.report import verdict  # noqa: PLC0415 - an extra
        from outbox.reconcile.run import reconcile  # noqa: PLC0415 - an extra
        from outbox.reconcile.source import connected  # noqa: PLC0415 - an extra

        try:
            result = reconcile(job, self._progress, ids)
        except Interrupted:
            self._tell(ReconciliationInterrupted, "was interrupted, and will be run again")
            # The worker's own connection may be closed by now.
            with connected(job.consumer) as own:
                execute(own, give_back(self.schema, job=ids.job))
            return False
        except Exception as error:  # the duty goes on, and the record says when it is due again
            self._tell(ReconciliationFailed, why_of(error, job))
            logger.debug("%s failed", self.name, exc_info=error)
            return False
        reached = verdict(result)
        self._tell(ReconciliationFinished, reached.sentence, clean=not (reached.left or reached.measures))
        try:
            if self.declared.report is not None:
                self.declared.report(result)
        except Exception as error:  # it is the application's function
            self._tell(ReconciliationReportFailed, f"its report failed: {why_of(error, job)}", error=error)
        return True

    def _tell(self, kind: Callable[..., TelemetryEvent], sentence: str, **facts: Any) -> None:
        emit(kind(duty=self.name, reconciliation=self.declared.name, sentence=sentence, **facts))
