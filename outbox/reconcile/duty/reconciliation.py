"""The reconciliation as a duty: its runs are messages, handled outside of transactions.

When the next run is due follows from the timetable, from how the last run ended, and from the database's clock
(`outbox.reconcile.record.timetable`). So each worker can send its message at any time, and all send the same one:
between two runs there is one, and a timetable that has changed makes another one. The worker that gets a message looks
once more whether a run is due: one that isn't, since the timetable has changed or another message came first, is passed
over.

No transaction or lock is held while it runs. The lease of the queue keeps the other workers off, and the messages of a
reconciliation come one after the other, since they have one key. A worker that dies leaves its message to the next one
when the lease ends; one that stops gives an ordered run to another worker, by a message of its own.
"""

from __future__ import annotations

import datetime as dt
import importlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import UUID

from outbox.consumer.outside.calls import CallContext
from outbox.consumer.outside.consumer import OutsideConsumer
from outbox.consumer.subscription import Subscription
from outbox.database.execute import Template, execute
from outbox.database.sql import NOW, wait_at_most
from outbox.errors import InvalidSettings, SourceError, pip_install
from outbox.message.answer import finished
from outbox.message.ids import derived_id
from outbox.message.model import Counts, Message, Park, Retry
from outbox.reconcile.config import Values, job_of, merged, own_access, read_file, read_mapping, subscribed
from outbox.reconcile.job import Access, Interrupted, Job, Stoppable, Window
from outbox.reconcile.record.timetable import (
    FLEET,
    TOPIC,
    LastRun,
    Reconciliation,
    RunRequest,
    Timetable,
    last_scheduled,
)
from outbox.telemetry.events import (
    ReconciliationFailed,
    ReconciliationFinished,
    ReconciliationInterrupted,
    ReconciliationReportFailed,
)
from outbox.telemetry.hooks import TelemetryEvent, emit
from outbox.text import topic_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.database.duty import ServedOutbox
    from outbox.reconcile.fleet.config import Fleet
    from outbox.reconcile.fleet.run import FleetResult, FleetRun
    from outbox.reconcile.follow.follower import Follower, PassResult
    from outbox.reconcile.record.write import Recorded, RunIds
    from outbox.reconcile.rows import JobResult

#: How many runs a message has begun, and how many of them have no end: their worker has died, or lost the queue.
begun: Template = Template("""
SELECT count(*), count(*) FILTER (WHERE finished_at IS NULL) FROM {s}.reconciliation_run WHERE job_id = %(job)s
""")
#: End those runs of a message: they are begun anew.
lose: Template = Template("""
UPDATE {s}.reconciliation_run SET finished_at = clock_timestamp(), error = 'its worker was lost over it; run again'
 WHERE job_id = %(job)s AND finished_at IS NULL
""")

logger: logging.Logger = logging.getLogger("outbox.worker")

#: The longest time (seconds) of a run: one that takes longer is begun again beside it.
LONGEST = 86_400.0
#: A message that no run could be begun for is tried again after so many seconds, as often as a day has room for.
_AGAIN = 600.0
#: The pause (seconds) between two looks whether the message of the next run is there.
SCHEDULE_EVERY = 5.0
#: The longest time (seconds) until it is looked whether a pass is due that another worker should have taken.
READ_EVERY = 5.0
#: How long (seconds) a look waits for a lock.
_PATIENCE = 3.0
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
            own = own_access(outbox)
            jobs = values_of(declared, outbox)
            found += [JobReconciler(declared, values, own, stopping, beside=len(jobs) - 1) for values in jobs]
    return found


def followings(outbox: ServedOutbox, stopping: threading.Event) -> list[Following]:
    """Return what follows the log for an Outbox, one for each database that its groups consume from.

    Raises:
        InvalidSettings: one that can't be run: its libraries aren't installed, or the declaration doesn't fit.
    """
    return [
        Following(declared, values, stopping, beside=len(jobs) - 1)
        for declared in outbox.reconciliations.values()
        if declared.follows is not False
        for jobs in [values_of(declared, outbox)]
        for values in jobs
    ]


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


class DeclaredJob:
    """A declared reconciliation of groups that consume from one database; there are so many others ``beside`` it.

    A group may read one topic from several databases: its pairs then differ by the names under which it keeps it.
    """

    def __init__(self, declared: Reconciliation, values: Values, *, beside: int = 0) -> None:
        self.declared: Reconciliation = declared
        self._values, self._beside, self._feeds = values, beside, dict[str, str]()
        # Refused now rather than at night.
        job = self.work_at(SOME_TIME)
        self.pairs: list[tuple[str, str]] = list(job.names)
        shown, more = job.pairs[:_PAIRS_NAMED], len(job.pairs) - _PAIRS_NAMED
        rest = f", and {more} more" if more > 0 else ""
        self.name: str = f"reconcile {declared.name}: {', '.join(map(str, shown))}{rest}"

    def work_at(self, now: dt.datetime) -> Job:
        """Return the job, of which ``now`` is the time."""
        try:
            job = job_of(self._values, lambda _: now)
        except InvalidSettings as error:
            raise self.declared.refused(str(error)) from None
        return job.from_feeds(self._feeds)

    def locate(self) -> bool:
        """Learn which feeds its groups have of this producer's topics; False until all have read from it.

        Raises:
            SourceError: a database can't be asked now.
        """
        from outbox.reconcile.source import located  # noqa: PLC0415 - an extra

        if not self._feeds and (job := located(self.work_at(SOME_TIME), unmet=False)) is not None:
            self._feeds = {pair.topic: pair.feed for pair in job.pairs}
            self.pairs[:] = job.names
        return bool(self._feeds)


def hand_over(declared: Reconciliation, duty: str, result: Any, work: Recorded) -> None:
    """Give a result to the application's function, if there is one; tell of its failure."""
    from outbox.reconcile.record.write import why_of  # noqa: PLC0415 - an extra

    try:
        if declared.report is not None:
            finished("it", declared.report(result))
    except Exception as error:  # it is the application's function
        sentence = f"its report failed: {why_of(error, work)}"
        emit(ReconciliationReportFailed(duty=duty, reconciliation=declared.name, sentence=sentence, error=error))


class _Logged(Stoppable):
    """The progress of a job, which ends when the worker stops."""

    def say(self, sentence: str) -> None:
        """Something was decided."""
        logger.debug("%s", sentence, extra={"outbox_event": "reconcile.plan"})


#: What a reconciler runs: a `Job`, or a `FleetRun`.
Work = TypeVar("Work", bound="Recorded")


class Reconciler(ABC, Generic[Work]):
    """The runs of one timetable, with their record in the database of the Outbox.

    ``name`` is that of the duty. ``pairs`` are the topics and groups of its runs, ``own`` is the database.
    """

    def __init__(
        self,
        declared: Reconciliation,
        own: Access,
        stopping: threading.Event,
        *,
        name: str,
        pairs: Sequence[tuple[str, str]],
    ) -> None:
        self.declared: Reconciliation = declared
        self.name: str = name
        self.pairs: list[tuple[str, str]] = list(pairs)
        self._own = own
        self._timetable = Timetable(declared)
        self._progress = _Logged(stopping)
        self._sent: UUID | None = None

    def locate(self) -> bool:
        """Learn which feeds its groups have, which tells its runs from those of others; False if it isn't known yet."""
        return True

    def schedule(self, connection: Connection, _: Connection) -> Counts:
        """Send the message of the next run, unless it is there."""
        if not self.locate():
            return Counts()
        with connection.begin():
            execute(connection, wait_at_most(_PATIENCE))
            return self._send_next(connection)

    def _send_next(self, connection: Connection) -> Counts:
        last = self._last(connection)
        # A run that is at work comes first: the next one follows from how it ends.
        if last.running and self._timetable.due_in(last) > 0:
            return Counts()
        request, due = RunRequest(self.declared.name, *self.pairs[0]), self._timetable.due_at(last)
        message_id = request.scheduled_id(last, due)
        if message_id == self._sent:
            return Counts()
        execute(connection, request.send(self._own.settings.schema, message_id, due))
        self._sent = message_id
        return Counts(taken=1, done=1)

    def handle(self, message_id: UUID, request: RunRequest) -> None:
        """Run what a message asks for, unless it was run, or isn't due any more; have the next one sent."""
        from outbox.reconcile.record.write import RunIds  # noqa: PLC0415 - an extra
        from outbox.reconcile.source import connected  # noqa: PLC0415 - an extra

        schema, ordered = self._own.settings.schema, request.by is not None
        with connected(self._own) as connection:
            last = self._last(connection)
            ((number, lost),) = execute(connection, begun(schema, job=message_id))[0]
            has_ended = number and not lost
            if has_ended or not (number or ordered or self._timetable.due_in(last) <= 0):
                return
            work = self.work_at(last.now)
            if request.by is not None:
                work = self._ordered(work, request.by, dry_run=request.dry_run)
            schedule = None if ordered else self.declared.name
            ids = RunIds.new(work, schedule, message_id=message_id, ordered_by=request.by)
            execute(connection, lose(schema, job=message_id), *ids.begin(work))
        try:
            self._run(work, ids)
        except Interrupted:
            self._tell(ReconciliationInterrupted, "was interrupted, and will be run again")
            if ordered:
                with connected(self._own) as connection:
                    execute(connection, request.send(schema, derived_id(message_id, "again")))
            return
        with connected(self._own) as connection:
            self._send_next(connection)

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
    def _tell_of(self, result: Any) -> None:
        """Tell what came of it."""

    def _last(self, connection: Connection) -> LastRun:
        return last_scheduled(connection, self._own.settings.schema, self.declared.name, self.pairs)

    def _run(self, work: Work, ids: RunIds) -> None:
        """Run it; if it comes to no result, that is in the record, and a line in the log.

        Raises:
            Interrupted: the worker stops.
        """
        from outbox.reconcile.record.write import why_of  # noqa: PLC0415 - an extra

        try:
            result = self._carry_out(work, ids)
        except Interrupted:
            raise
        except Exception as error:  # the record says when it is due again
            self._tell(ReconciliationFailed, why_of(error, work))
            logger.debug("%s failed", self.name, exc_info=error)
            return
        self._tell_of(result)
        hand_over(self.declared, self.name, result, work)

    def _tell(self, kind: Callable[..., TelemetryEvent], sentence: str, **facts: Any) -> None:
        emit(kind(duty=self.name, reconciliation=self.declared.name, sentence=sentence, **facts))


class JobReconciler(DeclaredJob, Reconciler["Job"]):
    """Runs a declared job by its timetable."""

    def __init__(
        self, declared: Reconciliation, values: Values, own: Access, stopping: threading.Event, *, beside: int = 0
    ) -> None:
        DeclaredJob.__init__(self, declared, values, beside=beside)
        Reconciler.__init__(self, declared, own, stopping, name=self.name, pairs=self.pairs)

    def locate(self) -> bool:
        """Ask as any declared job; where no other has its pairs, it needn't be known."""
        try:
            return DeclaredJob.locate(self) or not self._beside
        except SourceError:  # the run tells of it
            if self._beside:
                raise
            return True

    def _ordered(self, work: Job, actor: str, *, dry_run: bool) -> Job:
        return replace(work, apply=work.apply and not dry_run, actor=actor)

    def _carry_out(self, work: Job, ids: RunIds) -> JobResult:
        from outbox.reconcile.run import reconcile  # noqa: PLC0415 - an extra

        return reconcile(work, self._progress, ids)

    def _tell_of(self, result: JobResult) -> None:
        from outbox.reconcile.report import verdict  # noqa: PLC0415 - an extra

        reached = verdict(result)
        self._tell(ReconciliationFinished, reached.sentence, clean=not (reached.left or reached.measures))


class FleetReconciler(Reconciler["FleetRun"]):
    """A fleet, whose run is recorded in the database of the Outbox."""

    def __init__(self, declared: Reconciliation, fleet: Fleet, own: Access, stopping: threading.Event) -> None:
        job = {"actor": f"reconciliation {declared.name}", **fleet.job}
        self._fleet = replace(fleet, job=job)
        name = f"reconcile {declared.name}: fleet {declared.fleet}"
        super().__init__(declared, own, stopping, name=name, pairs=[FLEET])

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

    def _tell_of(self, result: FleetResult) -> None:
        if result.failed:
            self._tell(ReconciliationFailed, result.sentence)
        else:
            reached = result.verdict
            self._tell(ReconciliationFinished, result.sentence, clean=not (reached.left or reached.measures))


class Runs:
    """Runs what messages ask for of one reconciliation; its calls are the passes of a duty, which last as long."""

    def __init__(
        self,
        name: str,
        reconcilers: Sequence[JobReconciler | FleetReconciler],
        outbox: ServedOutbox,
        stopping: threading.Event,
        at_end: Callable[[Callable[[], object]], object],
    ) -> None:
        self.name: str = f"run {name}"
        self._all = reconcilers
        self._reconcilers: dict[tuple[str, str], JobReconciler | FleetReconciler] = {}
        subscription = Subscription(
            TOPIC,
            self.handle,
            None,
            outbox.codecs,
            group=name,
            about=TOPIC,
            keys=(name,),
            retry_delays=(_AGAIN,) * int(86_400 / _AGAIN),
            transactional=False,
            timeout=LONGEST,
        )
        self._consumer = OutsideConsumer(
            subscription, outbox.settings, stopping.is_set, context=CallContext(outbox.active), retries=True
        )
        self._has_started = self._knows_all = False
        at_end(self._consumer.end)

    def __call__(self, connection: Connection, source: Connection) -> Counts:
        """Handle the messages that are there, one after the other."""
        located = [each for each in self._all if each.locate()]
        self._knows_all = len(located) == len(self._all)
        # An operator may have ordered by the topic, before this worker knew the feed.
        by_topic = {(topic_of(topic), group): each for each in located for topic, group in each.pairs[:1]}
        self._reconcilers = by_topic | {each.pairs[0]: each for each in located}
        if not self._has_started:
            self._consumer.start(connection, source)
            self._has_started = True
        return self._consumer.consume_once(connection, source)

    def handle(self, message: Message) -> Park | Retry | None:
        """Run what a message asks for."""
        request = RunRequest.of(message.body)
        if (reconciler := self._reconcilers.get(request.pair)) is not None:
            reconciler.handle(message.id, request)
        elif not self._knows_all:  # it may be of one whose group hasn't read from its source yet
            return Retry(_AGAIN)
        elif request.by is not None:
            return Park(
                f"reconciliation {request.schedule!r} doesn't compare {request.topic} with {request.group} any more"
            )
        # Its timetable goes on with the pairs that it has now.
        return None


# --- without an end --------------------------------------------------------------------------------------

# Each pass is taken by one of the workers that have it: the record keeps the others off (`follow.record`). Findings,
# new and gone, are told when they are written down: one event for each kind and pass, however many messages they are.


class Following(DeclaredJob):
    """A declared job that follows the log; its calls are passes."""

    def __init__(self, declared: Reconciliation, values: Values, stopping: threading.Event, *, beside: int = 0) -> None:
        from outbox.reconcile.follow.follower import check_followed  # noqa: PLC0415 - an extra

        super().__init__(declared, values, beside=beside)
        self._progress = Stoppable(stopping)
        self._followers: list[Follower] = []
        self._due_at = time.monotonic()
        try:
            check_followed(self.work_at(SOME_TIME))
        except InvalidSettings as error:
            raise declared.refused(str(error)) from None

    def wait(self) -> float:
        """Return after how many seconds to look again whether a pass is due."""
        return min(max(self._due_at - time.monotonic(), 0.0), READ_EVERY)

    def __call__(self, connection: Connection, _: Connection) -> Counts:
        """Take the pass of each pair that is due, and that no other worker takes."""
        if not self._feeds and self.locate() and any(topic != feed for topic, feed in self._feeds.items()):
            self.end()
            self._followers.clear()
        if not self._followers:
            if self._beside and not self._feeds:  # whose log it is can't be told before
                return Counts()
            with connection.begin():
                ((now,),) = execute(connection, NOW)[0]
            self._followers = list(self._made(self.work_at(now)))
        counts = Counts()
        self._due_at = time.monotonic() + self.declared.pass_every
        failure: Exception | None = None
        for follower in self._followers:
            self._progress.done(0)
            try:
                counts += follower(connection)
            except Exception as error:  # the other pairs go on
                failure = failure or error
        if failure is not None:
            raise failure
        return counts

    def end(self) -> None:
        """Close the connections, also under a pass that runs on."""
        for follower in self._followers:
            follower.close()

    def _made(self, job: Job) -> Iterator[Follower]:
        from outbox.reconcile.follow.follower import Follower  # noqa: PLC0415 - an extra

        every = self.declared.pass_every
        for pair in job.pairs:
            yield Follower(job, pair, self.declared.name, every, self._report, lambda: self._progress.done(0))

    def _report(self, result: PassResult) -> None:
        from outbox.reconcile.follow.follower import events_of  # noqa: PLC0415 - an extra

        for event in events_of(result, self.name, self.declared.name):
            emit(event)
        hand_over(self.declared, self.name, result, self._followers[0].job)
