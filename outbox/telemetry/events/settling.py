"""Events of settling: halves are checked, messages compensated, deliveries confirmed, and so on."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outbox.telemetry.hooks import TelemetryEvent, event

# --- check -----------------------------------------------------------------------------------------------------------


@event(
    "half.checked",
    "check",
    logging.INFO,
    "check %(checks)d of half message %(half_id)s of topic %(topic)r: %(resolution)s%(because)s",
)
class HalfChecked(TelemetryEvent):
    """A checker was asked about a half; ``reason`` tells the fault of its answer, if it had one."""

    half_id: uuid.UUID
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

    half_id: uuid.UUID
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
    "check.no_producer",
    "check",
    logging.WARNING,
    "halves of topic %(topic)r that came by %(asker)s wait for a check, and no producer of it is connected here",
)
class ProducerMissing(TelemetryEvent):
    """Orphans of remote producers wait, and none is connected that could be asked; no check is used up by that."""

    topic: str
    asker: str


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

    half_id: uuid.UUID
    topic: str
    timeout: float


@event(
    "check.not_asked",
    "check",
    logging.WARNING,
    "no checker could be asked about half message %(half_id)s of topic %(topic)r: %(reason)s",
)
class CheckSkipped(TelemetryEvent):
    """No checker could be asked about a half, which costs it no check."""

    half_id: uuid.UUID
    topic: str
    reason: str


# --- compensate ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compensated(TelemetryEvent):
    """What came of the order to compensate a message."""

    message_id: uuid.UUID
    topic: str
    bulk_job: uuid.UUID


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


@event("delivery.confirmed", "delivery", logging.DEBUG, "of topic %(topic)r, group %(group)r: %(numbers)s")
class DeliveriesConfirmed(TelemetryEvent):
    """It became known what became of so many messages in a group, by their status. Told only to hooks."""

    topic: str
    group: str
    numbers: Mapping[str, int]


@event(
    "delivery.resent",
    "delivery",
    logging.WARNING,
    "group %(group)r has read past messages of topic %(topic)r that its inbox doesn't have; they are sent again:"
    " %(message_ids)s",
)
class MessageResent(TelemetryEvent):
    """Messages that a group has lost were sent again."""

    message_ids: tuple[uuid.UUID, ...]
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

    message_id: uuid.UUID
    topic: str
    group: str
    reason: str


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


# --- sagas -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _SagaCommand(TelemetryEvent):
    """Something about a command of a saga: which flow has sent it, for which step, by which message."""

    saga: str
    flow_id: uuid.UUID
    step: str
    command: str
    message_id: uuid.UUID


@event(
    "saga.overdue",
    "flow",
    logging.WARNING,
    "saga %(saga)s, flow %(flow_id)s: the %(command)s of step %(step)s, message %(message_id)s, isn't answered"
    " (told %(times)d times)",
)
class SagaOverdue(_SagaCommand):
    """A participant hasn't answered in time; told for the ``times``-th time."""

    times: int

    @property
    def level(self) -> int:
        """ERROR from the second time on, and where something isn't undone: a human must look."""
        return logging.ERROR if self.times > 1 or self.command == "compensation" else logging.WARNING


@event(
    "saga.undo_refused",
    "flow",
    logging.ERROR,
    "saga %(saga)s, flow %(flow_id)s: step %(step)s isn't undone, for its participant refuses to (%(reason)s);"
    " the command is sent again",
)
class UndoRefused(_SagaCommand):
    """A participant refuses to undo its step; the command is sent again, for ever."""

    reason: str


@event(
    "saga.undo_undeliverable",
    "flow",
    logging.ERROR,
    "saga %(saga)s, flow %(flow_id)s: step %(step)s isn't undone: message %(message_id)s %(reason)s;"
    " have the group try it again",
)
class UndoUndeliverable(_SagaCommand):
    """A participant has parked the command to undo its step, or has lost it."""

    reason: str


@event(
    "saga.done_after_all",
    "flow",
    logging.WARNING,
    "saga %(saga)s, flow %(flow_id)s: step %(step)s is done after all, by message %(message_id)s, which counted as"
    " refused (%(reason)s); it is undone",
)
class StepDoneAfterAll(_SagaCommand):
    """A participant has done what counted as refused, such as what it had parked; the step is undone."""

    reason: str
