"""Events on the way of a message: it is sent, dispatched, handled."""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass

from outbox.telemetry.hooks import TelemetryEvent, event

# --- producer --------------------------------------------------------------------------------------------------------


@event("message.sent", "producer", logging.DEBUG, "sent to topic %(topic)r: %(message_ids)s")
class MessagesSent(TelemetryEvent):
    """A transaction that sent these messages (or prepared these halves) has committed. Told only to hooks."""

    topic: str
    message_ids: tuple[uuid.UUID, ...]
    prepared: bool = False


@event("half.deciding", "producer", logging.DEBUG, "about to write the op of half message %(half_id)s: %(resolution)s")
class HalfDeciding(TelemetryEvent):
    """The producer is about to write the op of a half: it may yet fail. Told only to hooks, before the write."""

    half_id: uuid.UUID
    resolution: str


@event("half.decided", "producer", logging.DEBUG, "half message %(half_id)s is decided: %(resolution)s")
class HalfDecided(HalfDeciding):
    """The producer's decision on a half has committed, ``seconds`` after it was told to be due. Told only to hooks."""

    seconds: float


@event(
    "message.duplicate",
    "producer",
    logging.INFO,
    "message %(message_id)s to topic %(topic)r was not sent again: there is one of %(dedupe)r already",
)
class DuplicateIgnored(TelemetryEvent):
    """A transaction has sent a message that its topic had already, which did nothing (``on_duplicate="ignore"``).

    Through a driver's own connection it is told before the COMMIT.
    """

    topic: str
    message_id: uuid.UUID
    dedupe: str


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

    half_id: uuid.UUID


@event(
    "half.error_lost",
    "producer",
    logging.WARNING,
    "what the function of half message %(half_id)s raised could not be stored with it",
)
class HalfErrorLost(TelemetryEvent):
    """A ``@two_phase`` function failed, and what it raised could not be stored; its caller got it."""

    half_id: uuid.UUID


@event(
    "message.headers_refused",
    "producer",
    logging.WARNING,
    "message %(message_id)s to topic %(topic)r goes without what a hook added to its headers, %(names)s: %(reason)s",
)
class HeadersRefused(TelemetryEvent):
    """A send hook has added headers that can't be stored; the message goes without them."""

    message_id: uuid.UUID
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
    "the committed half message %(half_id)s is gone: it was deleted by hand, and can't become a message",
)
class HalfMissing(TelemetryEvent):
    """A committed half is gone from its table, so that it can't become a message."""

    half_id: uuid.UUID


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
    message_ids: tuple[uuid.UUID, ...]
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
    message_id: uuid.UUID
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
    "message.expired",
    "consumer",
    logging.INFO,
    "message %(message_id)s of topic %(topic)r was too old when group %(group)r came to it: it is not handled",
)
class MessageExpired(TelemetryEvent):
    """A message had expired when its group came to it, or to its retry after so many ``attempts``."""

    group: str
    topic: str
    queue: int
    position: int
    message_id: uuid.UUID
    attempts: int


@event(
    "batch.undone",
    "consumer",
    logging.WARNING,
    "group %(group)r failed at a batch of topic %(topic)r (messages: %(size)d), and tries one by one: %(reason)s",
)
class BatchUndone(TelemetryEvent):
    """Messages that shared a transaction failed together; they are handled once more, one by one."""

    group: str
    topic: str
    queue: int
    size: int
    reason: str


@event(
    "breaker.opened",
    "consumer",
    logging.ERROR,
    "group %(group)r handles nothing more of topic %(topic)r for the moment: %(reason)s"
    " (%(failures)d attempts failed, and none succeeded)",
)
class BreakerOpened(TelemetryEvent):
    """Everything has failed lately, so the group stops, over all workers; told by the one that found it out."""

    group: str
    topic: str
    failures: int
    reason: str


@event(
    "breaker.tried",
    "consumer",
    logging.INFO,
    "group %(group)r, whose breaker is open, tries one message of topic %(topic)r",
)
class BreakerTried(TelemetryEvent):
    """A group that had stopped tries one message (half-open); the breaker is closed if that succeeds."""

    group: str
    topic: str


@event("breaker.closed", "consumer", logging.INFO, "group %(group)r handles messages of topic %(topic)r again")
class BreakerClosed(TelemetryEvent):
    """The message that was tried has succeeded, or the handler has no breaker any more: the group goes on."""

    group: str
    topic: str


@event(
    "queue.crash_found",
    "consumer",
    logging.WARNING,
    "group %(group)r, topic %(topic)r, queue %(queue)d: %(starts)d starts after position %(position)d had no end;"
    " its messages are tried one by one",
)
class CrashFound(TelemetryEvent):
    """Earlier starts on a queue had no end: workers died, or lost their connections, over the messages that follow.

    One may also be that of a worker which was stopped right then. What began less than a second ago isn't told: it may
    go on.
    """

    group: str
    topic: str
    queue: int
    position: int
    starts: int

    @property
    def level(self) -> int:
        """WARNING from the second one on."""
        return logging.WARNING if self.starts > 1 else logging.INFO


@event(
    "queue.lease_lost",
    "consumer",
    logging.WARNING,
    "group %(group)r, topic %(topic)r, queue %(queue)d: another worker has taken the queue over; %(calls)d handlers"
    " that run are given up, and what came of %(results)d messages is dropped: they are handled again",
)
class LeaseLost(TelemetryEvent):
    """This worker couldn't renew its lease in time, and another one has the queue: messages are handled twice."""

    group: str
    topic: str
    queue: int
    calls: int
    results: int


@event(
    "handler.hangs",
    "consumer",
    logging.ERROR,
    "group %(group)r, topic %(topic)r: %(count)d calls of the handler were given up and haven't ended; nothing more is"
    " begun until one does",
)
class HandlerHangs(TelemetryEvent):
    """As many calls as may run at once hang beyond their time: the handler takes no heed of its time limit."""

    group: str
    topic: str
    count: int


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
    lost: tuple[uuid.UUID, ...]


@event(
    "source.moved",
    "consumer",
    logging.WARNING,
    "the database that topic %(topic)r of group %(group)r is read from, source %(number)d with the id %(source)s, is"
    " at %(address)s now; it was at %(before)s. If both live, one is a copy, and a group that reads from both takes"
    " each for the other: give the copy an id of its own by outbox db new-source",
)
class SourceMoved(TelemetryEvent):
    """A producer's database was met at another address than before: after a fail-over, a move, or as a copy."""

    group: str
    topic: str
    number: int
    source: uuid.UUID
    address: str
    before: str
