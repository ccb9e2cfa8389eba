"""What a consumer declares: one group of one topic, its handler and its rules.

What it reads of a queue, the call of its handler inside the running transaction, and what follows from the answer:
decided purely here, written by the consumer.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, Protocol
from uuid import UUID

from outbox.calling.carrier import carrier_of
from outbox.calling.function import CalledFunction
from outbox.consumer import sql
from outbox.consumer.meter import BOUNDS, HandlerMeter
from outbox.consumer.sql import InboxUpdate
from outbox.database.dialect import Bigints, Byteas, Uuids
from outbox.database.engines import address_of
from outbox.database.execute import Row, Statement, is_lost
from outbox.database.session import CarrierKind, DeclaredCarrier, JoinedSession
from outbox.database.sql import GroupQueue
from outbox.errors import InvalidHandler, InvalidMessage
from outbox.message.answer import HANDLER, CalledKind, HandlerFailure, failure_of, is_from_outside
from outbox.message.content import EXPIRES_HEADER, check_any_topic, check_group, check_topic
from outbox.message.limits import STARTS, Breaker, is_start, rate_of
from outbox.message.model import Counts, Message, ReplySender, Start, Status, read_headers
from outbox.telemetry.events import MessageExpired, MessageFailed, MessageParked, MessagesHandled, MessageSkipped
from outbox.telemetry.hooks import Handling, TelemetryEvent, middlewares_here, observed, observers
from outbox.text import (
    error_text,
    kind_of_error,
    kind_of_text,
    message_of,
)

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from outbox.message.declared import HeaderFilter, OnExhausted

    Bind = Engine | AsyncEngine | str

Handler = Callable[..., Any]

#: What may become of a message that is out of attempts, by how the group is ordered.
_ON_EXHAUSTED: Mapping[bool | str, Sequence[OnExhausted]] = {
    False: ("park",),
    True: ("park", "block"),
    "key": ("park", "park_sequence", "skip", "block"),
}


#: How long (seconds) a handler may take outside of transactions, unless its declaration says so.
DEFAULT_TIMEOUT = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription(CalledFunction):
    """A named consumer of a topic; ``function`` is its handler.

    ``batch`` messages share one transaction; with ``takes_batch`` the handler gets the list itself. ``takes`` is what
    the handler gets beside it, by its declaration; with ``pipeline`` the statements of its cursors travel together.
    ``ordered`` retries a failing message in place, before any later one of its queue; when its attempts are
    used up it is parked, or keeps its queue blocked (``on_exhausted`` "park" or "block"). With "key" a failing message
    holds back the later ones of its key only: they wait. When its attempts are used up it is parked and its key held
    ("park"), it is parked with all that waits for it ("park_sequence"), it is parked alone and its key goes on
    ("skip"), or it is retried without an end ("block"). ``tags``, ``keys`` (a pattern may have ``*``)
    and ``headers`` (each ``name=value``, one of the values of each name) filter; what they leave out has no inbox row.
    ``start`` says where a new group begins: ``"first"``, ``"now"``, at a time, or at a position. ``on_pruned`` says
    what happens when messages were pruned before the group read them: raise `MessagesPruned` until a human has looked,
    or go on with the oldest that is kept.
    ``threads`` is the number of consuming threads per worker, each with a connection of its own. ``rate`` is how many
    messages a second the group handles at most, over all workers; ``breaker`` stops it while everything fails.
    Operators can set another rate.
    ``transactional=False``: the handler gets the message alone, and runs outside of any transaction, for effects that
    no rollback undoes. Then ``concurrency`` handlers run at once in each worker, whatever the number of queues, and one
    that takes longer than ``timeout`` seconds has failed. Messages of one key wait for each other, unless
    ``ordered=False`` says that they need not. With ``takes_batch`` it gets up to ``batch`` messages of a queue, and
    returns an answer for each; what fails as a whole is tried one by one, at no attempt's cost. ``source`` is
    the producer's database, or several of them; None: the same as the consumer's. Consumers read from one each
    (`Subscription.of_sources`), and ``feed`` is the name under which what they keep of the topic has its source
    (`outbox.database.identity`). Of an internal topic, ``about`` is the topic that its
    notices are about. ``send_reply`` sends what handlers reply.
    ``at_end`` gives up what the handler has open when its worker ends. ``leased``: it has no handler, its messages are
    taken (`outbox.consumer.leased`).
    ``retry_delays`` (seconds) has one entry for each retry: its length is the number of retries.

    Raises:
        InvalidHandler: a rule that can't work, or a handler that isn't callable with (message, session).
    """

    decorator: ClassVar[str] = "consumer"
    kind: ClassVar[CalledKind] = HANDLER
    settings: ClassVar[Mapping[str, str]] = {"retry_delays": "retry_delays"}
    mend: ClassVar[str] = "; a second handler needs a group of its own"

    group: str
    retry_delays: tuple[float, ...]
    batch: int = 1
    takes_batch: bool = False
    pipeline: bool = False
    ordered: bool | Literal["key"] | None = None
    on_exhausted: OnExhausted = "park"
    tags: tuple[str, ...] | None = None
    keys: tuple[str, ...] | None = None
    headers: tuple[str, ...] | None = None
    start: Start = "first"
    on_pruned: Literal["stop", "skip"] = "stop"
    threads: int = 1
    transactional: bool = True
    concurrency: int = 1
    rate: float | None = None
    breaker: Breaker | None = None
    source: Bind | Sequence[Bind] | None = field(default=None, repr=False)
    feed: str = ""
    about: str | None = None
    send_reply: ReplySender | None = field(default=None, repr=False)
    at_end: Callable[[], object] | None = field(default=None, repr=False)
    leased: bool = False
    takes: DeclaredCarrier = field(init=False)

    @property
    def what(self) -> str:
        """What it is called in texts."""
        return f"consumer of {self.topic!r} in group {self.group!r}"

    @property
    def key(self) -> tuple[str, str]:
        """What there is one for."""
        return self.topic, self.group

    def possible(self) -> tuple[tuple[str, ...], ...]:
        """Return what its handler must be callable with."""
        return self.forms if self.transactional else (("messages" if self.takes_batch else "message",),)

    def check_topic(self) -> None:
        """Raise InvalidMessage if its topic isn't a name; one of an internal topic comes by a callback."""
        (check_topic if self.about is None else check_any_topic)(self.topic)

    def check(self) -> None:
        """Raise InvalidHandler if an option can't work."""
        check_group(self.group)
        # As users write them, until here.
        read = {
            "retry_delays": tuple(self.retry_delays),
            "ordered": False if self.transactional and self.ordered is None else self.ordered,
            "tags": as_filter(self.tags),
            "keys": as_filter(self.keys),
            "headers": as_header_filter(self.headers),
            "rate": None if self.rate is None else rate_of(self.rate),
            "takes": self._declared(),
            "feed": self.feed or self.topic,
        }
        for name, value in read.items():
            object.__setattr__(self, name, value)
        what = self.what
        several = {bind and address_of(bind) for bind in self.sources} if len(self.sources) > 1 else self.sources
        if not self.sources or len(several) < len(self.sources):
            raise InvalidHandler(f"{what}: source names a producer's database, or several, each once")
        self._check_transactional(what)
        if self.leased and (self.blocks_queue or self.breaker is not None or len(self.sources) > 1):
            raise InvalidHandler(
                f"{what} is leased: it can be ordered by key, has no breaker, since nothing of ours calls what may be "
                "broken, and one source: give ordered='key' or False, and a group to each source"
            )
        for name in ("batch", "threads", "concurrency"):
            if getattr(self, name) < 1:
                raise InvalidHandler(f"{what}: {name} = {getattr(self, name)} must be at least 1")
        if not is_start(self.start):
            raise InvalidHandler(f"{what}: start = {self.start!r} must be {STARTS}")
        if (ordered := self.ordered or False) not in _ON_EXHAUSTED:
            raise InvalidHandler(f"{what}: ordered = {self.ordered!r} must be True, False or 'key'")
        if self.on_exhausted not in _ON_EXHAUSTED["key"]:
            raise InvalidHandler(
                f"{what}: on_exhausted = {self.on_exhausted!r} must be one of: {', '.join(_ON_EXHAUSTED['key'])}"
            )
        if self.on_exhausted not in _ON_EXHAUSTED[ordered]:
            able = " or ".join(repr(order) for order, rules in _ON_EXHAUSTED.items() if self.on_exhausted in rules)
            raise InvalidHandler(f"{what}: on_exhausted = {self.on_exhausted!r} needs ordered={able}")
        if self.on_pruned not in {"stop", "skip"}:
            raise InvalidHandler(f"{what}: on_pruned = {self.on_pruned!r} must be 'stop' or 'skip'")

    @property
    def sources(self) -> tuple[Bind | None, ...]:
        """The producers' databases that it reads from; None: the consumer's own."""
        if isinstance(self.source, Sequence) and not isinstance(self.source, str):
            return tuple(self.source)
        return (self.source,)

    def of_sources(self) -> list[Subscription]:
        """Return it once for each of its sources: a consumer reads from one."""
        return [self] if len(self.sources) == 1 else [replace(self, source=each) for each in self.sources]

    def queue(self, schema: str, number: int) -> GroupQueue:
        """Return a queue of its topic, as its group sees it."""
        return GroupQueue(schema, self.group, self.feed, number)

    def _declared(self) -> DeclaredCarrier:
        """Return what the handler gets beside its message."""
        if not self.transactional:
            return DeclaredCarrier(is_async=self.is_async)
        what = f"{self.what}: the handler {self.name}"
        takes = carrier_of(what, self.function, is_async=self.is_async)
        if self.pipeline and takes.kind is not CarrierKind.CURSOR:
            cursor = "psycopg.AsyncCursor" if self.is_async else "psycopg.Cursor"
            raise InvalidHandler(
                f"{what} takes a {takes.kind.value}, and pipeline=True is for one whose second parameter is annotated "
                f"as {cursor}: of a {takes.kind.value}, each statement waits for its answer"
            )
        return takes

    def _check_transactional(self, what: str) -> None:
        if self.transactional and (self.concurrency != 1 or self.timeout is not None):
            raise InvalidHandler(
                f"{what}: concurrency = {self.concurrency} and timeout = {self.timeout} are for transactional=False; a "
                "group that handles in transactions has one for each of its threads and queues: raise threads="
            )
        if not self.transactional and ((self.batch > 1 and not self.takes_batch) or self.threads > 1 or self.pipeline):
            raise InvalidHandler(
                f"{what}: with transactional=False each message is handled by itself, unless takes_batch=True: give "
                "concurrency= rather than batch=, pipeline= or threads="
            )

    @property
    def timeout_seconds(self) -> float:
        """How long (seconds) a handler may take outside of transactions."""
        return DEFAULT_TIMEOUT if self.timeout is None else self.timeout

    @property
    def blocks_queue(self) -> bool:
        """Does a failing message keep its queue until it is retried, before any later one?"""
        return self.ordered is True

    @property
    def by_key(self) -> bool:
        """Does a failing message hold back the later ones of its key, and no others?"""
        return self.ordered == "key"

    @property
    def keys_overlap(self) -> bool:
        """May messages of one key be handled at once? Outside of transactions, if it was said so."""
        return self.ordered is False


def as_filter(values: Collection[str] | None) -> tuple[str, ...] | None:
    """Return declared tags or keys as a tuple; a lone str would be read letter by letter, so it is refused."""
    if values is None:
        return None
    if isinstance(values, str):
        raise InvalidHandler(f"a filter is a collection of str, not the str {values!r}; write {{{values!r}}}")
    return tuple(values)


def as_header_filter(values: HeaderFilter | None) -> tuple[str, ...] | None:
    """Return declared headers as a tuple of ``name=value``.

    Raises:
        InvalidHandler: it is neither, or a name can't be told from its value.
    """
    if values is None:
        return None
    if not isinstance(values, Mapping):
        texts = as_filter(values) or ()
        if wrong := [text for text in texts if "=" not in text]:
            raise InvalidHandler(f"a filter on headers names their values: {wrong[0]!r} must be 'name=value'")
        return tuple(dict.fromkeys(texts))
    allowed: list[str] = []
    for name, value in values.items():
        several = [value] if isinstance(value, str) else value
        if "=" in name or not isinstance(several, Collection) or not several:
            raise InvalidHandler(
                f"a filter on headers can't have {name!r}: {value!r}; give a name without '=', and its value or values"
            )
        allowed += [f"{name}={each}" for each in several]
    return tuple(dict.fromkeys(allowed))


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

    @property
    def key(self) -> str | None:
        """The key of the message, as far as the group takes it."""
        return self.message.key if self.message else None

    @property
    def can_expire(self) -> bool:
        """Does its sender say until when it is to be handled?"""
        return self.message is not None and EXPIRES_HEADER in self.message.headers

    def digest(self) -> bytes | None:
        """Return the first 16 bytes of the SHA-256 of the body as it is stored; None if it wasn't read."""
        return hashlib.sha256(self.message.stored).digest()[:DIGEST_BYTES] if self.message else None


class Filter(Protocol):
    """A filter that takes some of a topic's messages only."""

    @property
    def tags(self) -> Collection[str] | None:
        """The tags that it takes; None: all."""

    @property
    def keys(self) -> Collection[str] | None:
        """The keys that it takes, with ``*`` for any letters; None: all."""

    @property
    def headers(self) -> Collection[str] | None:
        """The values that headers must have, each as ``name=value``, one of those of each name; None: any."""


#: The bound values of a filter that takes all messages.
EVERYTHING: Mapping[str, Any] = {"tags": None, "keys": None, "headers": None}


def filter_of(group: Filter) -> dict[str, Any]:
    """Return what `sql.MATCHES` binds of a group's filter: its tags, the LIKE patterns of its keys, its headers."""
    return {
        "tags": None if group.tags is None else sorted(group.tags),
        "keys": None if group.keys is None else [like(pattern) for pattern in sorted(group.keys)],
        "headers": None if group.headers is None else json.dumps(values_by_header(group.headers)),
    }


def values_by_header(texts: Collection[str]) -> dict[str, list[str]]:
    """Return the values that each header may have, of texts ``name=value``."""
    values: dict[str, list[str]] = {}
    for text in sorted(texts):
        name, _, value = text.partition("=")
        values.setdefault(name, []).append(value)
    return values


def to_entry(row: Row, subscription: Subscription, queue: int, end: int | None = None) -> Entry:
    """Return one row of `sql.messages_after` as an entry; ``end`` is the last position of its queue, if it is known."""
    position, id_, number, visible_at, key, tag, headers, content_type, body, born_at, matches = row
    if not matches:
        return Entry(position, id_, None)
    known = id_, subscription.topic, queue, position, key, tag, content_type, body, born_at, visible_at, number, 1
    headers, encoding = read_headers(headers)
    declared = subscription.model, subscription.codecs, encoding, subscription.send_reply
    return Entry(position, id_, Message(*known, headers, *declared, subscription.group, end))


def like(pattern: str) -> str:
    """Return a key pattern with ``*`` as a LIKE pattern that matches nothing else."""
    escaped = pattern.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return escaped.replace("*", "%")


#: The kind of messages that never come to an end.
_CRASH_KIND = "the worker died each time"


_ROLLED_BACK = HandlerFailure(
    "the handler rolled the session back; let it raise, or return Retry, Park or Skip instead"
)

# Parked at once: a COMMIT has kept its effect, and each retry would repeat it.
_ENDED = HandlerFailure(
    "a handler ended the transaction by itself (COMMIT or ROLLBACK, in SQL or through the driver), so that no worker "
    "knows whether the effect of this message was kept; let it raise, or return Retry, Park or Skip instead",
    Status.PARKED,
    kind="the handler ended the transaction",
)


class AttemptFailed(Exception):
    """Undo the transaction: the attempt at ``entry`` failed, which ran in it ``together`` with others.

    ``pipelined``: the statements of all travelled together, so that the failure of any may be that of another one.
    """

    def __init__(
        self, entry: Entry, attempts: int, failure: HandlerFailure, together: int = 1, *, pipelined: bool = False
    ) -> None:
        self.entry: Entry = entry
        self.attempts: int = attempts
        self.failure: HandlerFailure = failure.about(entry.message)
        self.together: int = together
        self.pipelined: bool = pipelined

    @property
    def is_answered(self) -> bool:
        """Has the handler answered `Skip` or `Park`? What it needs is there."""
        return self.failure.is_answered and self.__cause__ is None

    @property
    def is_of_entry(self) -> bool:
        """Is it known which message has failed, and at which statement?"""
        return self.together == 1 and not self.pipelined


class TransactionEnded(AttemptFailed):
    """A handler ended the transaction in which those of ``entries`` ran: whether they took effect is unknown."""

    def __init__(self, entries: Sequence[Entry], attempts: int) -> None:
        super().__init__(entries[0], attempts, _ENDED)
        self.entries = entries


def crashed(subscription: Subscription, attempts: int, starts: int) -> tuple[int, HandlerFailure]:
    """Return what came of a message that was started for the last time allowed, and after how many attempts.

    It is parked; where the group blocks rather than go past a message, all those starts count as one attempt.
    """
    died = f"started {starts - 1} times without ever finishing: the worker died each time"
    if subscription.on_exhausted == "block":
        return attempts + 1, HandlerFailure(died, kind=_CRASH_KIND)
    return attempts, HandlerFailure(died, Status.PARKED, kind=_CRASH_KIND)


def failure_from(error: BaseException, entries: Sequence[Entry]) -> HandlerFailure:
    """Return what an exception says, without secrets of these, one of which it is about.

    A body that can't be read won't be readable later: it is parked at once.
    """
    secrets = {secret for entry in entries if entry.message for secret in entry.message.secrets}
    status = Status.PARKED if issubclass(type(error), InvalidMessage) else Status.FAILED
    return HandlerFailure(error_text(error, secrets), status, kind=kind_of_error(error))


def raise_refused(connection: Connection, error: Exception, entries: Sequence[Entry], attempt: int) -> NoReturn:
    """Raise what came of a COMMIT that failed: because of a deferred constraint, a handler's act, or the server.

    Raises:
        AttemptFailed: it is the failure of these entries, whose attempt it was.
        TransactionEnded: a handler had ended the transaction.
        Exception: the error itself: the connection was lost, or there is no entry.
    """
    if is_lost(connection) or not entries:
        raise error
    if sql.ENDED in message_of(error):
        raise TransactionEnded(entries, attempt) from error
    raise AttemptFailed(entries[0], attempt, failure_from(error, entries), len(entries)) from error


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
        if exhausted and subscription.on_exhausted != "block":
            status = Status.PARKED
        else:
            delay = failure.delay
            if delay is None:
                table = subscription.retry_delays or (0.0,)
                delay = table[min(attempts, len(table)) - 1] * random.uniform(1 - jitter, 1 + jitter)  # noqa: S311 - jitter, no secret
    kind, digest = failure.kind or kind_of_text(failure.error), entry.digest()
    seconds = None if entry.began is None else time.monotonic() - entry.began
    row = InboxUpdate(entry.id, entry.position, status.value, attempts, digest, failure.error, delay, kind, seconds)
    return replace(row, holds=_holds(subscription, status), key=entry.key)


def settled(entry: Entry, status: Status, attempts: int) -> InboxUpdate:
    """Return the inbox row of a message that came to its end without a failure, at its last attempt."""
    return InboxUpdate(entry.id, entry.position, status.value, attempts, entry.digest(), None)


def _holds(subscription: Subscription, status: Status) -> bool:
    """Tell whether a message that is settled so holds back the later ones of its key."""
    return subscription.by_key and (
        status is Status.FAILED or (status is Status.PARKED and subscription.on_exhausted != "skip")
    )


def counts_of(row: InboxUpdate) -> Counts:
    """Return the counts of one message that was settled so."""
    return Counts(
        taken=1,
        done=int(row.status == Status.CONSUMED),
        failed=int(row.status == Status.FAILED),
        parked=int(row.status == Status.PARKED),
        more=True,
    )


def count_call(meter: HandlerMeter, seconds: float) -> None:
    """Count a call of the handler that has ended, by its time."""
    meter.calls[bisect_left(BOUNDS, seconds)] += 1


def count_attempt(meter: HandlerMeter, row: InboxUpdate) -> None:
    """Count an attempt that was undone and written down: a failure, unless the handler skipped its message."""
    if row.status == Status.CONSUMED:
        meter.done += 1
    else:
        meter.failed += 1


def event_of(queue: GroupQueue, row: InboxUpdate, error: BaseException | None = None) -> TelemetryEvent:
    """Return the event that tells of one message settled so, because of an error or of the handler's answer."""
    facts: dict[str, Any] = {"group": queue.group, "topic": queue.topic, "queue": queue.queue}
    facts |= {"position": row.position, "message_id": row.id}
    if row.status == Status.EXPIRED:
        return MessageExpired(**facts, attempts=row.attempts)
    facts |= {"attempt": row.attempts, "reason": (row.error or "").partition("\n")[0], "error": error}
    if row.status == Status.FAILED:
        return MessageFailed(**facts, delay=row.delay or 0.0)
    return MessageParked(**facts) if row.status == Status.PARKED else MessageSkipped(**facts)


def handled(queue: GroupQueue, entries: Sequence[Entry], attempt: int) -> MessagesHandled:
    """Return the event that tells of a queue's messages that were handled."""
    ids = tuple(entry.id for entry in entries)
    return MessagesHandled(group=queue.group, topic=queue.topic, queue=queue.queue, message_ids=ids, attempt=attempt)


def known_rows(queue: GroupQueue, entries: Sequence[Entry]) -> Statement:
    """Return what reads the inbox rows of messages (`outbox.consumer.sql.known`)."""
    return sql.known(queue.schema, Uuids([entry.id for entry in entries]), queue.group)


def consumed(queue: GroupQueue, passage: int, entries: Sequence[Entry], earlier: Collection[UUID]) -> list[Statement]:
    """Write the inbox rows of messages that were consumed at their first attempt in a passage.

    ``earlier`` are those of `outbox.consumer.passage.take_earlier`.
    """
    statements: list[Statement] = []
    again = [entry for entry in entries if entry.id in earlier] if earlier else []
    if new := [entry for entry in entries if entry.id not in earlier] if again else entries:
        statements.append(sql.consumed(queue.schema, *queue.values, passage, *columns(new)))
    if again:
        ids, positions, digests = columns(again)
        of_passage = {"group": queue.group, "ids": ids, "passage": passage}
        written = {"queue": queue.queue, "positions": positions, "digests": digests}
        statements.append(sql.keep_earlier(queue.schema, **of_passage))
        statements.append(sql.consumed_again(queue.schema, **of_passage, **written))
    return statements


def columns(entries: Sequence[Entry]) -> tuple[Uuids, Bigints, Byteas]:
    """Return ids, positions and digests."""
    return (
        Uuids([entry.id for entry in entries]),
        Bigints([entry.position for entry in entries]),
        Byteas([entry.digest() for entry in entries]),
    )


def run_handler(
    connection: Connection,
    subscription: Subscription,
    entries: Sequence[Entry],
    attempt: int,
    meter: HandlerMeter,
    passage: int,
    first_failed_at: dt.datetime | None = None,
    *,
    pipelined: bool = False,
) -> None:
    """Call the handler for what the filter lets through, in one session that is joined to the running transaction.

    A handler can't commit: ``session.commit()`` only flushes, the framework commits inbox row, business change
    and offset together. A ``session.rollback()`` undoes the transaction, and counts as a failure. What the handlers
    sent is handed to the connection, to be written at its commit. ``attempt`` is that of the first entry, which failed
    first at ``first_failed_at``. ``meter`` times the calls. ``passage`` is the number of the group's way through the
    queue. ``pipelined``: the statements of all travel together.

    Raises:
        AttemptFailed: of one entry; of the first, if they failed together.
        TransactionEnded: a handler ended the transaction, which the entries up to its own ran in.
        BaseException: the connection was lost, or the process or the task ends: no handler's failure, costs no attempt.
    """
    messages = [entry.message for entry in entries if entry.message is not None]
    if not messages:
        return
    messages[0].attempt, messages[0].first_failed_at = attempt, first_failed_at
    for message in messages if passage else ():
        message.passage = passage
    joined = JoinedSession(connection, is_async=subscription.is_async, takes=subscription.takes)
    arguments: Sequence[Any] = [messages] if subscription.takes_batch else messages
    call = partial(_observed_call, joined, subscription) if observers.hooks or middlewares_here.get() else joined.call
    entry, meter.in_flight = entries[0], len(messages) if subscription.takes_batch else 1
    try:
        with joined.pipeline() if pipelined else nullcontext():
            for entry, argument in zip(entries, arguments, strict=False):
                entry.began = began = time.monotonic()
                try:
                    answer = call(subscription.function, argument)
                finally:
                    count_call(meter, time.monotonic() - began)
                # Of a pipeline it is seen at the COMMIT: the transaction isn't the one that was marked.
                if not pipelined and joined.ended and not is_lost(connection):
                    raise TransactionEnded(_until(entries, entry, subscription), attempt)
                joined.flush()
                failure = _ROLLED_BACK if joined.rolled_back else None if answer is None else failure_of(answer)
                if failure is not None:
                    raise AttemptFailed(entry, attempt, failure, len(entries), pipelined=pipelined)
        entry = entries[0]
        joined.finish()
    except AttemptFailed:
        raise
    except BaseException as error:
        if is_lost(connection) or is_from_outside(error):
            raise
        if joined.ended:
            raise TransactionEnded(_until(entries, entry, subscription), attempt) from error
        raise AttemptFailed(entry, attempt, failure_from(error, entries), len(entries), pipelined=pipelined) from error
    finally:
        meter.in_flight = 0
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
