"""Call a handler inside the running transaction.

What an attempt came to, and what follows from it: decided purely, written elsewhere.
"""

from __future__ import annotations

import datetime as dt
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.consumer.sql import Settled
from outbox.consumer.subscription import Subscription
from outbox.database.execute import is_lost
from outbox.database.session import JoinedSession, wait_for
from outbox.errors import InvalidMessage
from outbox.message.model import Counts, Message, Park, Retry, Skip, Status
from outbox.text import error_text, kind_of_error, kind_of_text, storable

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: The kind of messages that never come to an end.
CRASH_KIND = "the worker died each time"
_MAX_DELAY = 100 * 366 * 86400.0


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt whose changes must be undone; ``status`` is where the message goes if nothing else says so.

    ``delay`` in seconds overrides the retry table. ``kind`` is what failures with this cause have in common; made from
    the error if nothing better is known.
    """

    error: str
    status: Status = Status.FAILED
    delay: float | None = None
    kind: str | None = None


def failure_of(answer: Any) -> Failure | None:
    """Return what a handler's return value says; None is success, and so is any other value."""
    match answer:
        case Retry(after=after, reason=reason):
            return _retry(after, reason)
        case Park(reason=reason):
            return Failure(storable(reason), Status.PARKED)
        case Skip(reason=reason):
            return Failure(storable(reason), Status.CONSUMED)
    return None


def _retry(after: Any, reason: Any) -> Failure:
    seconds = after.total_seconds() if isinstance(after, dt.timedelta) else after
    if seconds is None:
        return Failure(storable(reason))
    if not isinstance(seconds, int | float) or math.isnan(seconds):
        return Failure(f"the handler returned Retry(after={after!r}); give a timedelta or seconds, or None")
    return Failure(storable(reason), delay=min(max(float(seconds), 0.0), _MAX_DELAY))


def failure_from(error: Exception) -> Failure:
    """Return what an exception says. A body that can't be read won't be readable later: it is parked at once."""
    status = Status.PARKED if isinstance(error, InvalidMessage) else Status.FAILED
    return Failure(error_text(error), status, kind=kind_of_error(error))


def settle(
    subscription: Subscription,
    message_id: UUID,
    position: int,
    digest: bytes | None,
    attempts: int,
    failure: Failure,
    jitter: float,
) -> Settled:
    """Return the inbox row after attempt number ``attempts`` failed.

    The delay before retry n is entry n of the table, with up to ``jitter`` (a fraction) more or less.
    """
    status, delay = failure.status, None
    if status is Status.FAILED:
        exhausted = attempts >= subscription.max_attempts
        if exhausted and subscription.on_exhausted == "park":
            status = Status.PARKED
        else:
            delay = failure.delay
            if delay is None:
                table = subscription.retry_delays or (0.0,)
                delay = table[min(attempts, len(table)) - 1] * random.uniform(1 - jitter, 1 + jitter)  # noqa: S311
    kind = failure.kind or kind_of_text(failure.error)
    return Settled(message_id, position, status.value, attempts, digest, failure.error, delay, kind)


def counts_of(row: Settled) -> Counts:
    """Return the counts of one message that was settled so."""
    return Counts(
        taken=1,
        done=int(row.status == Status.CONSUMED),
        failed=int(row.status == Status.FAILED),
        parked=int(row.status == Status.PARKED),
        more=True,
    )


class HandlerSession:
    """One session for the handlers of one transaction, joined to it.

    A handler can't commit: ``session.commit()`` only flushes, the framework commits inbox row, business change
    and offset together. A ``session.rollback()`` undoes the transaction, and counts as a failure.
    """

    def __init__(self, connection: Connection, subscription: Subscription) -> None:
        self._connection = connection
        self._subscription = subscription
        self._joined = JoinedSession(connection, is_async=subscription.is_async)

    def handle(self, argument: Message | list[Message]) -> Failure | None:
        """Call the handler with a message or, where it takes batches, a list; return its failure, if it failed.

        Raises:
            Exception: the connection was lost, which is nobody's failure and costs no attempt.
        """
        try:
            answer = self._subscription.handler(argument, self._joined.open())
            if self._subscription.is_async:
                answer = wait_for(answer)
            self._joined.flush()
        except Exception as error:
            if is_lost(self._connection):
                raise
            return failure_from(error)
        if self._joined.rolled_back:
            return Failure("the handler rolled the session back; let it raise, or return Retry, Park or Skip instead")
        return failure_of(answer)

    def finish(self) -> Failure | None:
        """Flush, and hand what the handlers sent to the connection, to be written at its commit."""
        try:
            self._joined.finish()
        except Exception as error:
            if is_lost(self._connection):
                raise
            return failure_from(error)
        return None

    def close(self) -> None:
        """Forget the session; its transaction is the caller's."""
        self._joined.close()
