"""What the framework tells of itself: each failure, park, refusal and recovery is an event, and so is success.

An event is declared once, here: its code, the logger and the level of its record, the sentence, and the facts. What is
done with it is `outbox.telemetry.hooks`. Times are in seconds; ids are those of the tables. ``error`` is the exception
behind it, whose traceback the record shows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from outbox.telemetry.event import TelemetryEvent, event

# --- producer --------------------------------------------------------------------------------------------------------


@event("message.sent", "producer", logging.DEBUG, "sent to topic %(topic)r: %(message_ids)s")
class MessagesSent(TelemetryEvent):
    """A transaction that sent these messages (or prepared these halves) has committed. Told only to hooks."""

    topic: str
    message_ids: tuple[UUID, ...]
    prepared: bool = False


@event(
    "message.refused",
    "producer",
    logging.WARNING,
    "a message to topic %(topic)r was refused: %(waiting)d wait (%(setting)s = %(limit)d)",
)
class SendRefused(TelemetryEvent):
    """Flow control has refused a message: the caller got `OutboxBusy`."""

    topic: str
    waiting: int
    setting: str
    limit: int


@event(
    "half.rollback_failed",
    "producer",
    logging.WARNING,
    "half message %(half_id)s was not rolled back; the check will decide it",
)
class RollbackFailed(TelemetryEvent):
    """A ``@two_phase`` function failed, and its half could not be rolled back; the check will decide it."""

    half_id: UUID


@event(
    "message.headers_refused",
    "producer",
    logging.WARNING,
    "message %(message_id)s to topic %(topic)r goes without what a hook added to its headers, %(names)s: %(reason)s",
)
class HeadersRefused(TelemetryEvent):
    """A send hook has added headers that can't be stored; the message goes without them."""

    message_id: UUID
    topic: str
    names: tuple[str, ...]
    reason: str


@event("roundtrip.afterwards_failed", "database", logging.DEBUG, "after the commit: %(reason)s")
class AfterCommitFailed(TelemetryEvent):
    """What follows a COMMIT for speed alone has failed; nothing depends on it."""

    reason: str


# --- dispatch --------------------------------------------------------------------------------------------------------


@event(
    "log.epoch",
    "dispatch",
    logging.WARNING,
    "the log of messages is another one, which may have lost what consumers have seen (a fail-over, a restore):"
    " its positions go on in epoch %(epoch)d",
)
class EpochBegun(TelemetryEvent):
    """The producer's log is another one (a fail-over, a restore): positions go on in a new epoch."""

    epoch: int
    log_before: str
    log: str


@event(
    "dispatch.half_missing",
    "dispatch",
    logging.ERROR,
    "the committed half message %(half_id)s is gone: somebody has deleted it, and it can't become a message",
)
class HalfMissing(TelemetryEvent):
    """A committed half is gone from its table, so that it can't become a message."""

    half_id: UUID


# --- consumer --------------------------------------------------------------------------------------------------------


@event(
    "message.handled",
    "consumer",
    logging.DEBUG,
    "group %(group)r handled of topic %(topic)r, at attempt %(attempt)d: %(message_ids)s",
)
class MessagesHandled(TelemetryEvent):
    """A transaction in which a group handled these messages has committed.

    First attempts are told only to hooks; a later ``attempt`` that succeeds is a recovery, and has its record.
    """

    group: str
    topic: str
    queue: int
    message_ids: tuple[UUID, ...]
    attempt: int = 1

    @property
    def level(self) -> int:
        """INFO where it failed before."""
        return logging.INFO if self.attempt > 1 else logging.DEBUG


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settled(TelemetryEvent):
    """What came of one message that was not handled; ``reason`` is the first line of what its inbox row says."""

    group: str
    topic: str
    queue: int
    position: int
    message_id: UUID
    attempt: int
    reason: str


@event(
    "message.failed",
    "consumer",
    logging.WARNING,
    "group %(group)r failed at message %(message_id)s of topic %(topic)r (attempt %(attempt)d, the next one in"
    " %(delay).0f s): %(reason)s",
)
class MessageFailed(_Settled):
    """An attempt has failed and was undone; the next one comes after ``delay`` seconds."""

    delay: float


@event(
    "message.parked",
    "consumer",
    logging.ERROR,
    "group %(group)r parked message %(message_id)s of topic %(topic)r (attempt %(attempt)d): %(reason)s",
)
class MessageParked(_Settled):
    """A message was set aside for an operator: a dead letter."""


@event(
    "message.skipped",
    "consumer",
    logging.INFO,
    "group %(group)r skipped message %(message_id)s of topic %(topic)r: %(reason)s",
)
class MessageSkipped(_Settled):
    """The handler said that a message is to count as consumed, and undid what it had done."""


@event(
    "batch.undone",
    "consumer",
    logging.WARNING,
    "group %(group)r failed at a batch of %(size)d messages of topic %(topic)r, and tries them one by one: %(reason)s",
)
class BatchUndone(TelemetryEvent):
    """Messages that shared a transaction failed together; they are handled once more, one by one."""

    group: str
    topic: str
    queue: int
    size: int
    reason: str


@event(
    "queue.crash_found",
    "consumer",
    logging.WARNING,
    "group %(group)r, topic %(topic)r, queue %(queue)d: %(claims)d starts after position %(position)d had no end;"
    " its messages are tried one by one",
)
class CrashFound(TelemetryEvent):
    """Earlier starts on a queue had no end: workers died, or lost their connections, over the messages that follow.

    A single one may also be that of a worker which began a moment ago, or was stopped right then.
    """

    group: str
    topic: str
    queue: int
    position: int
    claims: int

    @property
    def level(self) -> int:
        """WARNING from the second one on."""
        return logging.WARNING if self.claims > 1 else logging.INFO


@event(
    "log.went_back",
    "consumer",
    logging.ERROR,
    "the log of topic %(topic)r, queue %(queue)d went back behind the offset of group %(group)r (a fail-over, a"
    " restore): the group goes on after position %(agreed)d, not %(position)d; it has %(count)d messages that the"
    " producer has lost",
)
class LogWentBack(TelemetryEvent):
    """The producer has lost messages that a group has read; ``lost`` are their ids."""

    group: str
    topic: str
    queue: int
    agreed: int
    position: int
    count: int
    lost: tuple[UUID, ...]


# --- check -----------------------------------------------------------------------------------------------------------


@event(
    "half.checked",
    "check",
    logging.INFO,
    "check %(checks)d of half message %(half_id)s of topic %(topic)r: %(resolution)s%(because)s",
)
class HalfChecked(TelemetryEvent):
    """A checker was asked about a half; ``reason`` says what was wrong with its answer, if anything was."""

    half_id: UUID
    topic: str
    checks: int
    resolution: str
    seconds: float
    reason: str | None

    @property
    def level(self) -> int:
        """WARNING where the checker failed; an UNKNOWN that it meant is no news."""
        if self.reason is not None:
            return logging.WARNING
        return logging.DEBUG if self.resolution == "unknown" else logging.INFO

    def facts(self) -> dict[str, Any]:
        """Return its fields, and the end of its sentence."""
        # Not super(): a dataclass with slots is another class than the one that this method was made in.
        return TelemetryEvent.facts(self) | {"because": f" ({self.reason})" if self.reason else ""}


@event(
    "half.fences_checked",
    "check",
    logging.INFO,
    "%(decided)d orphans were rolled back by their fences; %(running)d transactions still run",
)
class FencesChecked(TelemetryEvent):
    """Orphans of fenced functions were rolled back (``decided``), or left alone (``running``)."""

    decided: int
    running: int

    @property
    def level(self) -> int:
        """INFO where something was decided."""
        return logging.INFO if self.decided else logging.DEBUG


@event(
    "half.parked",
    "check",
    logging.ERROR,
    "half message %(half_id)s of topic %(topic)r is parked after %(checks)d checks without a verdict",
)
class HalfParked(TelemetryEvent):
    """A half has used up its checks without a verdict; an operator must decide it."""

    half_id: UUID
    topic: str
    checks: int


@event(
    "check.no_checker",
    "check",
    logging.WARNING,
    "halves of topic %(topic)r wait for a check, and no checker is registered for it on this worker",
)
class CheckerMissing(TelemetryEvent):
    """Orphans of a topic wait, and this worker has no checker for it."""

    topic: str


@event(
    "check.hanging",
    "check",
    logging.ERROR,
    "the checker of topic %(topic)r hangs in every thread it may have; its halves are left alone",
)
class CheckerHangs(TelemetryEvent):
    """A topic's checker hangs in every thread that it may have; the topic rests."""

    topic: str


@event(
    "check.timed_out",
    "check",
    logging.WARNING,
    "the checker of topic %(topic)r gave no answer within %(timeout)g s about half message %(half_id)s",
)
class CheckTimedOut(TelemetryEvent):
    """A checker was given up: it took longer than it may."""

    half_id: UUID
    topic: str
    timeout: float


@event(
    "check.not_asked",
    "check",
    logging.WARNING,
    "nobody could be asked about half message %(half_id)s of topic %(topic)r: %(reason)s",
)
class CheckSkipped(TelemetryEvent):
    """No checker could be asked about a half, which costs it no check."""

    half_id: UUID
    topic: str
    reason: str


# --- compensate ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compensated(TelemetryEvent):
    """What came of the order to compensate a message."""

    message_id: UUID
    topic: str
    bulk_job: UUID


@event(
    "message.compensated",
    "compensate",
    logging.INFO,
    "the local transaction of message %(message_id)s of topic %(topic)r is compensated",
)
class MessageCompensated(_Compensated):
    """A local transaction was undone by the function that the service registered."""


@event(
    "compensation.failed",
    "compensate",
    logging.ERROR,
    "the compensation of topic %(topic)r failed for message %(message_id)s (attempt %(attempt)d of %(attempts)d)",
)
class CompensationAttemptFailed(_Compensated):
    """A compensation has failed and was undone; ``attempt`` of ``attempts``, after which it is given up."""

    attempt: int
    attempts: int


@event(
    "compensation.refused",
    "compensate",
    logging.WARNING,
    "message %(message_id)s of topic %(topic)r is not compensated (%(state)s): %(reason)s",
)
class CompensationEnded(_Compensated):
    """A compensation was refused or cancelled: ``state`` is that of its item."""

    state: str
    reason: str


@event(
    "compensation.postponed",
    "compensate",
    logging.WARNING,
    "the compensation of message %(message_id)s of topic %(topic)r waits: %(reason)s",
)
class CompensationPostponed(_Compensated):
    """A compensation can't be carried out now, for a database is out of reach or busy; it will be tried again."""

    reason: str


# --- delivery --------------------------------------------------------------------------------------------------------


@event(
    "delivery.resent",
    "delivery",
    logging.WARNING,
    "group %(group)r has read past messages of topic %(topic)r that its inbox doesn't have; they are sent again:"
    " %(message_ids)s",
)
class MessageResent(TelemetryEvent):
    """Messages that a group has lost were sent again."""

    message_ids: tuple[UUID, ...]
    topic: str
    group: str


@event(
    "delivery.exhausted",
    "delivery",
    logging.ERROR,
    "message %(message_id)s of topic %(topic)r doesn't reach group %(group)r (%(reason)s); it isn't sent again",
)
class ResendExhausted(TelemetryEvent):
    """A message was sent again as often as the settings say, and the group still doesn't have it."""

    message_id: UUID
    topic: str
    group: str
    reason: str


@event(
    "delivery.callback_failed",
    "delivery",
    logging.ERROR,
    "%(callback)s failed for message %(message_id)s of topic %(topic)r in group %(group)r, and will be called again",
)
class DeliveryCallbackFailed(TelemetryEvent):
    """What the producer does about a message's fate has failed, and was undone."""

    message_id: UUID
    topic: str
    group: str
    callback: str


@event("delivery.unreachable", "delivery", logging.WARNING, "group %(group)r of %(topic)r can't be asked: %(reason)s")
class InboxUnreachable(TelemetryEvent):
    """A known group's inbox can't be asked; the next pass asks again."""

    group: str
    topic: str
    reason: str


@event(
    "delivery.held", "delivery", logging.ERROR, "%(waiting)d parked messages of topic %(topic)r wait for an operator"
)
class CompensationsHeld(TelemetryEvent):
    """More is parked than is compensated without an operator (`Settings.compensate_parked`)."""

    topic: str
    waiting: int
    limit: int


# --- worker ----------------------------------------------------------------------------------------------------------


@event("worker.started", "worker", logging.INFO, "worker started with %(count)d duties")
class WorkerStarted(TelemetryEvent):
    """A worker runs these duties now."""

    count: int
    duties: tuple[str, ...]


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

    @property
    def level(self) -> int:
        """An outage is one line in the log, not one for each try."""
        return logging.DEBUG if self.repeated else logging.ERROR


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

    @property
    def level(self) -> int:
        """An outage is one line in the log, not one for each try."""
        return logging.DEBUG if self.repeated else logging.WARNING


@event("report.sample_failed", "worker", logging.WARNING, "no sample of the statistics could be taken: %(reason)s")
class SampleFailed(TelemetryEvent):
    """The statistics of a minute could not be taken; ``repeated``: as those of the minute before."""

    reason: str
    repeated: bool

    @property
    def level(self) -> int:
        """An outage is one line in the log, not one for each minute."""
        return logging.DEBUG if self.repeated else logging.WARNING


@event("report.statistics", "worker", logging.DEBUG, "statistics, %(age).0f s old")
class StatisticsRead(TelemetryEvent):
    """The newest statistics, as a minute's sample has them, ``age`` seconds old. Told only to hooks, with each report.

    ``statistics`` has ``topics`` by name, and ``groups`` by topic and name; without what is zero or isn't known.
    """

    age: float
    statistics: Mapping[str, Any]


@event(
    "lock.held",
    "worker",
    logging.WARNING,
    "the lock of %(lock)s has been held for %(age).0f s by one transaction: pid %(pid)s (%(state)s) of %(client)s",
)
class LockHeld(TelemetryEvent):
    """One transaction has kept a lock from all other workers for ``age`` seconds."""

    lock: str
    session: str
    pid: int
    age: float
    state: str
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


# --- operator --------------------------------------------------------------------------------------------------------


@event("bulk.item_failed", "bulk", logging.WARNING, "bulk job %(bulk_job)s: item %(item)d failed")
class BulkItemFailed(TelemetryEvent):
    """An item of a bulk job has failed for a reason that is no refusal."""

    bulk_job: UUID
    item: int


@event("doctor.failed", "doctor", logging.ERROR, "inspecting %(inspection)s failed")
class InspectionFailed(TelemetryEvent):
    """An inspection of the doctor has failed, which is a defect."""

    inspection: str
