"""What an attempt came to, and what follows from it: decided purely, written elsewhere."""

from __future__ import annotations

import datetime as dt
import math
import random
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from outbox.consumer.subscription import Subscription
from outbox.errors import InvalidMessage
from outbox.model import Counts, Park, Retry, Skip, Status
from outbox.store.inbox import Settled
from outbox.text import error_text, kind_of_error, kind_of_text, storable

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
