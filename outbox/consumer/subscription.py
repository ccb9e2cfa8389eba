"""What a consumer declares: one group of one topic, its handler and its rules.

What it reads of a queue, the call of its handler inside the running transaction, and what follows from the answer:
decided purely here, written by the consumer.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
import math
import random
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol
from uuid import UUID

from outbox.consumer.sql import InboxUpdate
from outbox.database.execute import Row, is_lost
from outbox.database.session import JoinedSession, check_function, is_async
from outbox.errors import InvalidHandler, InvalidMessage
from outbox.message.content import Codecs, check_group, check_topic
from outbox.message.model import Counts, Message, Park, ReplySender, Retry, Skip, Status, read_headers
from outbox.telemetry.event import TelemetryEvent
from outbox.telemetry.events import MessageFailed, MessageParked, MessageSkipped
from outbox.telemetry.hooks import Handling, observed, observers
from outbox.text import error_text, function_name, kind_of_error, kind_of_text, storable

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

Handler = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Subscription:
    """A named consumer of a topic.

    ``batch`` messages share one transaction; with ``takes_batch`` the handler gets the list itself.
    ``ordered`` retries a failing message in place, before any later one of its queue; when its attempts are
    used up it is parked, or keeps its queue blocked (``on_exhausted``). ``tags`` and ``keys`` filter (a key
    pattern may have ``*``); what they leave out has no inbox row. ``start`` says where a new group begins,
    ``on_pruned`` what happens when messages were pruned before the group read them: raise `MessagesPruned` until a
    human has looked, or go on with the oldest that is kept.
    ``threads`` is the number of consuming threads per worker, each with a connection of its own. ``source`` is
    the producer's database; None: the same as the consumer's. ``model`` is the type that bodies are read as,
    ``codecs`` read those of other content types. ``send_reply`` sends what handlers reply.
    ``retry_delays`` (seconds) has one entry for each retry: its length is the number of retries.

    Raises:
        InvalidHandler: a rule that can't work, or a handler that isn't callable with (message, session).
    """

    topic: str
    group: str
    handler: Handler
    retry_delays: tuple[float, ...]
    batch: int = 1
    takes_batch: bool = False
    ordered: bool = False
    on_exhausted: Literal["park", "block"] = "park"
    tags: tuple[str, ...] | None = None
    keys: tuple[str, ...] | None = None
    start: Literal["first", "now"] = "first"
    on_pruned: Literal["stop", "skip"] = "stop"
    threads: int = 1
    source: Engine | AsyncEngine | str | None = None
    model: Any = None
    codecs: Codecs = field(default_factory=Codecs, repr=False)
    send_reply: ReplySender | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_topic(self.topic)
        check_group(self.group)
        what = f"consumer of {self.topic!r} in group {self.group!r}"
        check_function(f"{what}: the handler", self.handler, "message", "session")
        if self.batch < 1 or self.threads < 1:
            raise InvalidHandler(f"{what}: batch = {self.batch} and threads = {self.threads} must be at least 1")
        if self.on_exhausted not in {"park", "block"} or self.start not in {"first", "now"}:
            raise InvalidHandler(
                f"{what}: on_exhausted = {self.on_exhausted!r} must be 'park' or 'block', "
                f"start = {self.start!r} must be 'first' or 'now'"
            )
        if self.on_pruned not in {"stop", "skip"}:
            raise InvalidHandler(f"{what}: on_pruned = {self.on_pruned!r} must be 'stop' or 'skip'")
        if self.on_exhausted == "block" and not self.ordered:
            raise InvalidHandler(f"{what}: on_exhausted='block' needs ordered=True")

    @property
    def name(self) -> str:
        """What the handler is called."""
        return function_name(self.handler)

    @property
    def is_async(self) -> bool:
        """Is the handler a coroutine function?"""
        return is_async(self.handler)


def as_filter(values: Collection[str] | None) -> tuple[str, ...] | None:
    """Return declared tags or keys as a tuple; a lone str would be read letter by letter, so it is refused."""
    if values is None:
        return None
    if isinstance(values, str):
        raise InvalidHandler(f"a filter is a collection of str, not the str {values!r}; write {{{values!r}}}")
    return tuple(values)


#: Bytes of the SHA-256 of a body that the inbox keeps, for reconciliation.
DIGEST_BYTES = 16


@dataclass(slots=True)
class Entry:
    """A message in a queue; ``message`` is None where the group's filter leaves it out.

    ``began`` is when its handler was called, by the clock of this process that only goes forward.
    """

    position: int
    id: UUID
    message: Message | None
    began: float | None = None

    def digest(self) -> bytes | None:
        """Return the first 16 bytes of the SHA-256 of the body as it is stored; None if it wasn't read."""
        return hashlib.sha256(self.message.stored).digest()[:DIGEST_BYTES] if self.message else None


class Filter(Protocol):
    """What takes some of a topic's messages only."""

    @property
    def tags(self) -> tuple[str, ...] | None:
        """The tags that it takes; None: all."""

    @property
    def keys(self) -> tuple[str, ...] | None:
        """The keys that it takes, with ``*`` for any letters; None: all."""


def filter_of(subscription: Filter) -> dict[str, list[str] | None]:
    """Return the tags and the LIKE patterns of keys that a group takes, as bound values; None: all."""
    tags, keys = subscription.tags, subscription.keys
    return {
        "tags": None if tags is None else sorted(tags),
        "keys": None if keys is None else [like(pattern) for pattern in keys],
    }


def to_entry(row: Row, subscription: Subscription, queue: int) -> Entry:
    """Return one row of `sql.messages_after` as an entry."""
    position, id_, number, visible_at, key, tag, headers, content_type, body, born_at, matches = row
    if not matches:
        return Entry(position, id_, None)
    known = id_, subscription.topic, queue, position, key, tag, content_type, body, born_at, visible_at, number, 1
    headers, encoding = read_headers(headers)
    declared = subscription.model, subscription.codecs, encoding, subscription.send_reply
    return Entry(position, id_, Message(*known, headers, *declared))


def like(pattern: str) -> str:
    """Return a key pattern with ``*`` as a LIKE pattern that matches nothing else."""
    escaped = pattern.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return escaped.replace("*", "%")


#: The kind of messages that never come to an end.
_CRASH_KIND = "the worker died each time"
_MAX_DELAY = 100 * 366 * 86400.0


@dataclass(frozen=True, slots=True)
class HandlerFailure:
    """An attempt whose changes must be undone; ``status`` is where the message goes if nothing else says so.

    ``delay`` in seconds overrides the retry table. ``kind`` is what failures with this cause have in common; made from
    the error if nothing better is known.
    """

    error: str
    status: Status = Status.FAILED
    delay: float | None = None
    kind: str | None = None


_ROLLED_BACK = HandlerFailure(
    "the handler rolled the session back; let it raise, or return Retry, Park or Skip instead"
)

# Parked at once: a COMMIT has kept its effect, and each retry would repeat it.
_ENDED = HandlerFailure(
    "a handler ended the transaction by itself (COMMIT or ROLLBACK, in SQL or through the driver), so that nobody "
    "knows whether the effect of this message was kept; let it raise, or return Retry, Park or Skip instead",
    Status.PARKED,
    kind="the handler ended the transaction",
)


class AttemptFailed(Exception):
    """Undo the transaction: the attempt at ``entry`` failed, which ran in it ``together`` with others."""

    def __init__(self, entry: Entry, attempts: int, failure: HandlerFailure, together: int = 1) -> None:
        self.entry: Entry = entry
        self.attempts: int = attempts
        self.failure: HandlerFailure = failure
        self.together: int = together


class TransactionEnded(AttemptFailed):
    """A handler ended the transaction in which those of ``entries`` ran: whether they took effect is unknown."""

    def __init__(self, entries: Sequence[Entry], attempts: int) -> None:
        super().__init__(entries[0], attempts, _ENDED)
        self.entries = entries


def crashed(claims: int) -> HandlerFailure:
    """Return what is said of a message that was claimed for the last time allowed."""
    died = f"started {claims - 1} times without ever finishing: the worker died each time"
    return HandlerFailure(died, Status.PARKED, kind=_CRASH_KIND)


def failure_of(answer: Any) -> HandlerFailure | None:
    """Return what a handler's return value says; None is success, and so is any other value."""
    if answer is None:
        return None
    match answer:
        case Retry(after=after, reason=reason):
            return _retry(after, reason)
        case Park(reason=reason):
            return HandlerFailure(storable(reason), Status.PARKED)
        case Skip(reason=reason):
            return HandlerFailure(storable(reason), Status.CONSUMED)
    return None


def _retry(after: Any, reason: Any) -> HandlerFailure:
    seconds = after.total_seconds() if isinstance(after, dt.timedelta) else after
    if seconds is None:
        return HandlerFailure(storable(reason))
    if not isinstance(seconds, int | float) or math.isnan(seconds):
        return HandlerFailure(f"the handler returned Retry(after={after!r}); give a timedelta or seconds, or None")
    return HandlerFailure(storable(reason), delay=min(max(float(seconds), 0.0), _MAX_DELAY))


def failure_from(error: BaseException) -> HandlerFailure:
    """Return what an exception says. A body that can't be read won't be readable later: it is parked at once."""
    status = Status.PARKED if isinstance(error, InvalidMessage) else Status.FAILED
    return HandlerFailure(error_text(error), status, kind=kind_of_error(error))


def settle(
    subscription: Subscription, entry: Entry, attempts: int, failure: HandlerFailure, jitter: float
) -> InboxUpdate:
    """Return the inbox row after attempt number ``attempts`` failed.

    The delay before retry n is entry n of the table, with up to ``jitter`` (a fraction) more or less.
    """
    status, delay = failure.status, None
    if status is Status.FAILED:
        # It is tried once, and once for each retry.
        exhausted = attempts > len(subscription.retry_delays)
        if exhausted and subscription.on_exhausted == "park":
            status = Status.PARKED
        else:
            delay = failure.delay
            if delay is None:
                table = subscription.retry_delays or (0.0,)
                delay = table[min(attempts, len(table)) - 1] * random.uniform(1 - jitter, 1 + jitter)  # noqa: S311 - jitter, no secret
    kind, digest = failure.kind or kind_of_text(failure.error), entry.digest()
    seconds = None if entry.began is None else time.monotonic() - entry.began
    return InboxUpdate(entry.id, entry.position, status.value, attempts, digest, failure.error, delay, kind, seconds)


def counts_of(row: InboxUpdate) -> Counts:
    """Return the counts of one message that was settled so."""
    return Counts(
        taken=1,
        done=int(row.status == Status.CONSUMED),
        failed=int(row.status == Status.FAILED),
        parked=int(row.status == Status.PARKED),
        more=True,
    )


def event_of(subscription: Subscription, queue: int, row: InboxUpdate, error: BaseException | None) -> TelemetryEvent:
    """Return what is told of one message that was settled so, because of an error or of the handler's answer."""
    facts: dict[str, Any] = {
        "group": subscription.group,
        "topic": subscription.topic,
        "queue": queue,
        "position": row.position,
        "message_id": row.id,
        "attempt": row.attempts,
        "reason": (row.error or "").partition("\n")[0],
        "error": error,
    }
    if row.status == Status.FAILED:
        return MessageFailed(**facts, delay=row.delay or 0.0)
    return MessageParked(**facts) if row.status == Status.PARKED else MessageSkipped(**facts)


def run_handler(connection: Connection, subscription: Subscription, entries: Sequence[Entry], attempt: int) -> None:
    """Call the handler for what the filter lets through, in one session that is joined to the running transaction.

    A handler can't commit: ``session.commit()`` only flushes, the framework commits inbox row, business change
    and offset together. A ``session.rollback()`` undoes the transaction, and counts as a failure. What the handlers
    sent is handed to the connection, to be written at its commit. ``attempt`` is that of the first entry.

    Raises:
        AttemptFailed: of one entry; of the first, if they failed together.
        TransactionEnded: a handler ended the transaction, which the entries up to its own ran in.
        BaseException: the connection was lost, or the process or the task ends: nobody's failure, costs no attempt.
    """
    messages = [entry.message for entry in entries if entry.message is not None]
    if not messages:
        return
    messages[0].attempt = attempt
    joined = JoinedSession(connection, is_async=subscription.is_async)
    arguments: Sequence[Any] = [messages] if subscription.takes_batch else messages
    call = partial(_observed_call, joined, subscription) if observers.hooks else joined.call
    entry = entries[0]
    try:
        for entry, argument in zip(entries, arguments, strict=False):
            entry.began = time.monotonic()
            answer = call(subscription.handler, argument)
            if joined.ended and not is_lost(connection):
                raise TransactionEnded(_until(entries, entry, subscription), attempt)
            joined.flush()
            if failure := _ROLLED_BACK if joined.rolled_back else failure_of(answer):
                raise AttemptFailed(entry, attempt, failure, len(entries))
        entry = entries[0]
        joined.finish()
    except AttemptFailed:
        raise
    except BaseException as error:
        if is_lost(connection) or _ends_the_pass(error):
            raise
        if joined.ended:
            raise TransactionEnded(_until(entries, entry, subscription), attempt) from error
        raise AttemptFailed(entry, attempt, failure_from(error), len(entries)) from error
    finally:
        joined.close()


def _observed_call(
    joined: JoinedSession, subscription: Subscription, handler: Handler, argument: Message | list[Message]
) -> Any:
    messages = argument if isinstance(argument, list) else [argument]
    activity = Handling(subscription.group, subscription.topic, messages[0].queue, messages)
    return observed(activity, joined.call, handler, argument)


def _until(entries: Sequence[Entry], last: Entry, subscription: Subscription) -> Sequence[Entry]:
    """Return the entries whose handler has run when that of ``last`` ended."""
    return entries if subscription.takes_batch else entries[: entries.index(last) + 1]


def _ends_the_pass(error: BaseException) -> bool:
    """Tell whether an exception came to the handler from outside, rather than from its own code.

    Python raises KeyboardInterrupt in the main thread, whatever runs there; a cancelled task gets CancelledError where
    it waits, and a coroutine that is closed GeneratorExit.
    """
    match error:
        case KeyboardInterrupt():
            return threading.current_thread() is threading.main_thread()
        case asyncio.CancelledError():
            try:
                task = asyncio.current_task()
            except RuntimeError:  # no event loop runs in this thread
                return False
            return task is not None and task.cancelling() > 0
    return isinstance(error, GeneratorExit)
