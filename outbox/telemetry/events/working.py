"""Events of the worker, of the reconciliations that it runs, and of the orders of operators."""

from __future__ import annotations

import datetime as dt
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outbox.telemetry.hooks import TelemetryEvent, event

# --- servers ----------------------------------------------------------------------------------------------------------


@event("rocketmq.serving", "rocketmq", logging.INFO, "serving RocketMQ's clients on %(addresses)s")
class RocketmqServing(TelemetryEvent):
    """A server of RocketMQ's protocol takes calls at these addresses now."""

    addresses: tuple[str, ...]


@event("rocketmq.stopped", "rocketmq", logging.INFO, "the server of RocketMQ's clients has stopped")
class RocketmqStopped(TelemetryEvent):
    """A server of RocketMQ's protocol has ended; all calls that it had begun were answered, or cut off."""


@event(
    "rocketmq.call_failed",
    "rocketmq",
    logging.ERROR,
    "%(call)s of client %(client)s, topic %(topic)r, failed in the server",
)
class ClientCallFailed(TelemetryEvent):
    """A call of a client was answered with 50001, since the server or the database failed at it.

    ``repeated``: the database was out of reach at a call before, too.
    """

    call: str
    client: str
    topic: str
    repeated: bool


@event(
    "rocketmq.filters_differ",
    "rocketmq",
    logging.WARNING,
    "members of group %(group)r have different filters of topic %(topic)r: %(filters)s; what one passes by, none gets",
)
class ClientFiltersDiffer(TelemetryEvent):
    """Consumers of one group filter a topic in different ways: each loses what the other one passes by."""

    group: str
    topic: str
    filters: tuple[str, ...]


@event(
    "rocketmq.refused",
    "rocketmq",
    logging.WARNING,
    "%(call)s of client %(client)s was refused: %(reason)s",
)
class ClientRefused(TelemetryEvent):
    """A client wasn't let in, or asked for what its user may not do; ``reason`` has no secret."""

    call: str
    client: str
    reason: str


@event("rocketmq.called", "rocketmq", logging.DEBUG, "%(call)s was answered with %(status)s in %(seconds).3f s")
class ClientCallEnded(TelemetryEvent):
    """A call of a client has ended after so many seconds. Told only to hooks.

    ``status`` is the name of the code that it was answered with; CANCELLED: its client has gone away before.
    """

    call: str
    status: str
    seconds: float


# --- worker ----------------------------------------------------------------------------------------------------------


@event(
    "worker.started",
    "worker",
    logging.INFO,
    "worker started with %(count)d duties: groups %(groups)s, of topics %(topics)s; checkers of %(checkers)s%(lacks)s",
)
class WorkerStarted(TelemetryEvent):
    """A worker runs these duties now: it consumes topics for groups, and asks checkers; ``lacks`` warns of gaps.

    It may consume, and no consumer is declared.
    """

    count: int
    duties: tuple[str, ...]
    groups: tuple[str, ...]
    topics: tuple[str, ...]
    checkers: tuple[str, ...]
    lacks: str

    @property
    def level(self) -> int:
        """A warning where it lacks something."""
        return logging.WARNING if self.lacks else self.usual_level


@event("worker.stopping", "worker", logging.INFO, "worker is stopping")
class WorkerStopping(TelemetryEvent):
    """A worker begins no new pass, and waits for running handlers."""


@event(
    "worker.cut_off",
    "worker",
    logging.WARNING,
    "worker stops although handlers are running; their work is rolled back: %(duties)s",
)
class WorkerCutOff(TelemetryEvent):
    """Handlers ran for longer than ``drain_timeout``; what they did is rolled back."""

    duties: tuple[str, ...]


@event("worker.stopped", "worker", logging.INFO, "worker stopped")
class WorkerStopped(TelemetryEvent):
    """A worker has ended; ``drained`` tells whether all its handlers had."""

    drained: bool


@event(
    "process.ended",
    "worker",
    logging.ERROR,
    "worker process %(number)d (pid %(pid)d) has ended after %(seconds).0f s: %(ending)s",
)
class ProcessEnded(TelemetryEvent):
    """A process of ``outbox run --processes`` has ended though it wasn't told to, or not as it was told to.

    ``ending`` is its exit code or the signal that killed it, ``seconds`` how long it has lived. Another one starts
    after ``delay`` seconds.
    """

    number: int
    pid: int
    seconds: float
    ending: str
    delay: float


@event(
    "process.hung",
    "worker",
    logging.ERROR,
    "worker process %(number)d (pid %(pid)d) is ended by force: %(reason)s",
)
class ProcessHung(TelemetryEvent):
    """A process didn't end in time: what its handlers did is undone."""

    number: int
    pid: int
    reason: str


@event(
    "process.not_started",
    "worker",
    logging.ERROR,
    "worker process %(number)d can't start, and is tried again in %(delay).1f s: %(reason)s",
)
class ProcessNotStarted(TelemetryEvent):
    """Another process in the place of one that has ended can't start, which is tried again after ``delay``."""

    number: int
    reason: str
    delay: float


@event("process.started", "worker", logging.INFO, "worker process %(number)d has started (pid %(pid)d)")
class ProcessStarted(TelemetryEvent):
    """A process of ``outbox run --processes`` is at work."""

    number: int
    pid: int


@event("duty.passed", "worker", logging.DEBUG, "duty %(duty)s: %(done)d of %(taken)d done in %(seconds).3f s")
class PassEnded(TelemetryEvent):
    """A pass of a duty has ended well, after so many seconds; its counts are those of `Counts`. Told only to hooks."""

    duty: str
    seconds: float
    taken: int
    done: int
    failed: int
    parked: int


@event("duty.failed", "worker", logging.ERROR, "duty %(duty)s failed and will be tried again: %(reason)s")
class PassFailed(TelemetryEvent):
    """A pass of a duty has failed, and will be tried again; ``failures`` in a row.

    ``connection_lost``: a database is out of reach. ``repeated``: it failed as the pass before it did.
    """

    duty: str
    failures: int
    reason: str
    connection_lost: bool
    repeated: bool


@event(
    "batch.too_large",
    "database",
    logging.WARNING,
    "%(batch)s failed with %(size)s rows at once, and goes on with fewer: %(reason)s",
)
class BatchTooLarge(TelemetryEvent):
    """A batch failed as a whole, by a time-out of the server's most often; the next ones have fewer rows for a while.

    ``size`` is how many rows it had at most; None: all that there are.
    """

    batch: str
    size: int | None
    reason: str


@event("duty.cut_off", "worker", logging.DEBUG, "duty %(duty)s was cut off")
class PassCutOff(TelemetryEvent):
    """A pass was cut off because its worker stops."""

    duty: str


@event("duty.recovered", "worker", logging.INFO, "duty %(duty)s works again")
class PassRecovered(TelemetryEvent):
    """A duty works again after so many failures."""

    duty: str
    failures: int


@event("listener.working", "worker", logging.INFO, "notifications from %(database)s arrive")
class ListenerWorking(TelemetryEvent):
    """Notifications arrive."""

    database: str


@event(
    "listener.silent",
    "worker",
    logging.WARNING,
    "notifications from %(database)s do not arrive (is there a transaction pooler?); polling goes on without them",
)
class ListenerSilent(TelemetryEvent):
    """Notifications don't arrive although the connection stands."""

    database: str


@event(
    "listener.lost", "worker", logging.WARNING, "listening on %(database)s ended and will be tried again: %(reason)s"
)
class ListenerLost(TelemetryEvent):
    """The connection for notifications was lost; ``repeated``: it couldn't be made anew either."""

    database: str
    reason: str
    repeated: bool


@event("report.sample_failed", "worker", logging.WARNING, "no sample of the statistics could be taken: %(reason)s")
class SampleFailed(TelemetryEvent):
    """The statistics of a minute could not be taken; ``repeated``: as those of the minute before."""

    reason: str
    repeated: bool


@event("report.statistics", "worker", logging.DEBUG, "statistics, %(age).0f s old")
class StatisticsRead(TelemetryEvent):
    """The newest statistics, as a minute's sample has them, ``age`` seconds old. Told only to hooks, with each report.

    ``statistics`` has ``topics`` by name, and ``groups`` by topic and name; without values that are zero or unknown.
    """

    age: float
    statistics: Mapping[str, Any]


@event(
    "lock.held",
    "worker",
    logging.WARNING,
    "the lock of %(lock)s has been held for %(age).0f s by one transaction or session: pid %(pid)s (%(state)s), "
    "user %(user)s, of %(client)s",
)
class LockHeld(TelemetryEvent):
    """One transaction or session has kept a lock from all other workers for ``age`` seconds."""

    lock: str
    session: str
    pid: int
    age: float
    state: str
    user: str
    application_name: str
    client: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reconciled(TelemetryEvent):
    """What came of a reconciliation that a worker ran; ``duty`` names it and its groups."""

    duty: str
    reconciliation: str
    sentence: str


@event("reconcile.finished", "worker", logging.INFO, "%(duty)s: %(sentence)s")
class ReconciliationFinished(_Reconciled):
    """A reconciliation came to a result; ``clean``: there is no difference left."""

    clean: bool

    @property
    def level(self) -> int:
        """WARNING where differences are left."""
        return logging.INFO if self.clean else logging.WARNING


@event("reconcile.interrupted", "worker", logging.INFO, "%(duty)s: %(sentence)s")
class ReconciliationInterrupted(_Reconciled):
    """A reconciliation was cut off because its worker stops."""


@event("reconcile.failed", "worker", logging.ERROR, "%(duty)s: %(sentence)s")
class ReconciliationFailed(_Reconciled):
    """A reconciliation came to no result. Its error may hold a password, so the sentence, from which those are taken
    out, is all that is told at this level."""


@event("reconcile.report_failed", "worker", logging.ERROR, "%(duty)s: %(sentence)s")
class ReconciliationReportFailed(_Reconciled):
    """The application's function that gets the result has failed."""


# --- schedules -------------------------------------------------------------------------------------------------------


@event(
    "schedule.missed", "worker", logging.WARNING, "schedule %(schedule)s has missed times since %(since)s: %(policy)s"
)
class ScheduleMissed(TelemetryEvent):
    """No worker came to times of a schedule while they were due; ``policy`` says what became of them."""

    schedule: str
    topic: str
    since: dt.datetime
    policy: str


@event(
    "schedule.superseded",
    "worker",
    logging.WARNING,
    "schedule %(schedule)s is declared otherwise by a worker that began later (%(declared)s): this one leaves it alone",
)
class ScheduleSuperseded(TelemetryEvent):
    """A release is rolled out, or two applications have schedules of one name: the newest declaration counts."""

    schedule: str
    topic: str
    declared: str


@event("schedule.failed", "worker", logging.ERROR, "schedule %(schedule)s: no message of %(at)s was sent: %(reason)s")
class ScheduleFailed(TelemetryEvent):
    """The function of a schedule has failed, or its message couldn't be sent; it is tried again after a minute."""

    schedule: str
    topic: str
    at: dt.datetime
    reason: str


@event("intake.refused", "worker", logging.ERROR, "%(source)s: %(origin)s can't be a message of %(topic)s: %(reason)s")
class IntakeRefused(TelemetryEvent):
    """A message of a broker can't be one here: it is stored as its bytes; or the broker has it no more."""

    topic: str
    source: str
    origin: str
    reason: str


@event(
    "receive.failed",
    "consumer",
    logging.WARNING,
    "the handler of group %(group)r failed at message %(message_id)s of topic %(topic)r where it was received; its"
    " workers try it: %(reason)s",
)
class InlineFailed(TelemetryEvent):
    """What a handler did in a transaction of the application's is undone, the message is stored."""

    group: str
    topic: str
    message_id: uuid.UUID
    reason: str


@event(
    "intake.gap",
    "worker",
    logging.ERROR,
    "topic %(topic)s: %(missing)d messages from %(first)d to %(last)d of queue %(queue)d of %(published)s of %(source)s"
    " never came",
)
class IntakeGap(TelemetryEvent):
    """Positions of a queue that a relay publishes haven't come, though later ones have for ten minutes."""

    topic: str
    source: str
    published: str
    queue: int
    first: int
    last: int
    missing: int


@event(
    "intake.missing",
    "worker",
    logging.ERROR,
    "%(source)s has %(origin)s, which was confirmed, and topic %(topic)s has no message %(message_id)s",
)
class IntakeMissing(TelemetryEvent):
    """A comparison with a broker has found a message that isn't here; ``stored``: it is stored now."""

    topic: str
    source: str
    origin: str
    message_id: uuid.UUID
    stored: bool


# --- reconciliations without an end ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Followed(TelemetryEvent):
    """What a pass of a reconciliation that follows the log has come to; ``duty`` names it and its groups."""

    duty: str
    reconciliation: str
    topic: str
    group: str


@event(
    "reconcile.differences_found",
    "worker",
    logging.WARNING,
    "%(duty)s: %(number)d %(kind)s of topic %(topic)r in group %(group)r: %(message_ids)s; %(mend)s",
)
class DifferencesFound(_Followed):
    """Messages differ, past their grace period; the first hundred are named. Each is told once.

    Of a backlog (``kind`` is ``unconsumed``) none are named: it is told when it begins.
    """

    kind: str
    number: int
    message_ids: tuple[uuid.UUID, ...]
    mend: str


@event(
    "reconcile.differences_gone",
    "worker",
    logging.INFO,
    "%(duty)s: %(number)d %(kind)s of topic %(topic)r in group %(group)r are gone, %(left)d are left: %(message_ids)s",
)
class DifferencesGone(_Followed):
    """Messages differ no more, or in another way; the first hundred are named."""

    kind: str
    number: int
    message_ids: tuple[uuid.UUID, ...]
    left: int


@event(
    "reconcile.differences_repaired",
    "worker",
    logging.INFO,
    "%(duty)s: repaired of topic %(topic)r in group %(group)r: %(results)s",
)
class DifferencesRepaired(_Followed):
    """Differences were repaired by the policy; ``results`` is how often which came of it."""

    results: Mapping[str, int]


@event(
    "reconcile.rewound",
    "worker",
    logging.WARNING,
    "%(duty)s: the log of topic %(topic)r, or group %(group)r in it, fell back;"
    " messages that may be concerned are compared anew",
)
class FollowerRewound(_Followed):
    """The producer's storage was put back, or is another one, or the group reads again: a follower has gone back."""


# --- operator --------------------------------------------------------------------------------------------------------


@event("bulk.item_failed", "bulk", logging.WARNING, "bulk job %(bulk_job)s: item %(item)d failed")
class BulkItemFailed(TelemetryEvent):
    """An item of a bulk job has failed for a reason that is no refusal."""

    bulk_job: uuid.UUID
    item: int


@event("doctor.failed", "doctor", logging.ERROR, "inspecting %(inspection)s failed")
class InspectionFailed(TelemetryEvent):
    """An inspection of the doctor has failed, which is a defect."""

    inspection: str
