"""The nouns of the framework: half message, message, resolution, and what a handler may answer."""

from __future__ import annotations

import datetime as dt
import enum
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, TypedDict, Unpack
from uuid import UUID

from typing_extensions import TypeVar

from outbox.errors import InvalidMessage
from outbox.message.compression import decompress
from outbox.message.content import (
    CAUSE_HEADER,
    CONVERSATION_HEADER,
    CORRELATION_HEADER,
    DEDUPE_HEADER,
    ENCODING_HEADER,
    EXPIRES_HEADER,
    OPTION_HEADERS,
    REFUSAL_HEADER,
    REPLY_TO_HEADER,
    SENDER_HEADER,
    Codecs,
    check_topic,
    encode_json,
)
from outbox.message.masking import NAMES, read_json, secrets_of
from outbox.message.topic import Topic
from outbox.text import SEARCHED_CHARS, storable, without

#: What a body is read as: the ``model`` of a consumer, a checker or a compensation.
T_co = TypeVar("T_co", covariant=True, default=Any)


class Resolution(enum.StrEnum):
    """The answer to "did the local transaction commit?"; UNKNOWN is never stored (RocketMQ: LocalTransactionState)."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    UNKNOWN = "unknown"


#: Where a group begins in a topic: with the oldest message that is kept; with what comes from now on; with the first
#: message that became visible at a time (aware) or after it; or at a position: the same in every queue, or by queue,
#: where a queue that isn't named is read from its first message.
Start = Literal["first", "now"] | dt.datetime | int | Mapping[int, int]


class Status(enum.StrEnum):
    """Status of an inbox row, and what that means: the one place where it is said.

    ``waiting``: an earlier message of its key is to be settled first. ``taken``: a client has it until its lease ends
    (`outbox.consumer.leased`). ``expired``: when the group came to the message, it was too old to be handled.
    ``open``: the group isn't done with the message, unless it was discarded. ``tried``: a call of the handler leaves
    it. ``alone``: the group will handle it without an operator, if ``timed`` at its next attempt.
    """

    open: bool
    tried: bool
    alone: bool
    timed: bool

    def __new__(cls, value: str, *properties: str) -> Status:
        """Make a member."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.__dict__ |= {name: name in properties for name in ("open", "tried", "alone", "timed")}
        return member

    CONSUMED = "consumed", "tried"
    FAILED = "failed", "open", "tried", "alone", "timed"
    WAITING = "waiting", "open", "alone"
    TAKEN = "taken", "open", "alone", "timed"
    PARKED = "parked", "open", "tried"
    QUARANTINED = "quarantined"
    EXPIRED = "expired"

    @property
    def reread(self) -> bool:
        """Tell whether a later passage handles it again: not if it was set aside for ever, or is too old."""
        return self.open or self.tried


class DeliveryStatus(enum.StrEnum):
    """What the producer knows of a message's fate in a group.

    ``unconsumed``: the group has read past it, and its inbox doesn't have it; it was sent again. ``resend_exhausted``:
    so often that it isn't any more. ``left_out``: the group's filter takes other messages. The others are as in
    `Status`.
    """

    CONSUMED = "consumed"
    UNCONSUMED = "unconsumed"
    FAILED = "failed"
    PARKED = "parked"
    QUARANTINED = "quarantined"
    RESEND_EXHAUSTED = "resend_exhausted"
    LEFT_OUT = "left_out"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class HalfMessage:
    """A message as the producer writes it; immutable from then on.

    ``delay`` (seconds) becomes ``deliver_at`` by the database's clock when the half is written.
    """

    id: UUID
    producer_group: str
    topic: str
    key: str | None
    tag: str | None
    headers: Mapping[str, str]
    content_type: str
    body: bytes
    deliver_at: dt.datetime | None = None
    delay: float | None = None
    queue: int | None = None


@dataclass(frozen=True, slots=True)
class Preparation:
    """How an undecided half is to be checked: fenced or not, and how long to leave it alone (seconds).

    ``asker`` asks about it, where that is no checker of an application: its lease takes no other's halves.
    """

    fenced: bool
    immunity: float
    asker: str | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The one durable decision on a half message.

    ``first`` is False when it had been decided so before this call.
    """

    half_id: UUID
    resolution: Resolution
    decided_by: str
    decided_at: dt.datetime
    first: bool


def read_headers(text: str | None) -> tuple[dict[str, str], str | None]:
    """Return the headers of a message as its sender gave them, and how its body is compressed."""
    if not text or text == "{}":
        return {}, None
    headers: dict[str, str] = json.loads(text)
    headers.pop(SENDER_HEADER, None)
    return headers, headers.pop(ENCODING_HEADER, None)


def expiry_in(headers: Mapping[str, str]) -> dt.datetime | None:
    """Return when a message expires; None if it doesn't, or the header, written by hand, isn't a time with a zone."""
    if (text := headers.get(EXPIRES_HEADER)) is None:
        return None
    try:
        moment = dt.datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return None if moment.tzinfo is None else moment


class _Decoded(Generic[T_co]):
    """What has an id, headers, bytes, a content type, and perhaps a model for them."""

    __slots__ = ()

    id: UUID
    stored: bytes
    content_type: str
    headers: Mapping[str, str]
    model: Any
    codecs: Codecs
    encoding: str | None

    @property
    def raw(self) -> bytes:
        """The bytes of the body; decompressed, where they are ``stored`` compressed.

        Raises:
            InvalidMessage: they can't be decompressed, or to more than ``max_body_bytes`` of the settings.
        """
        if self.encoding is None:
            return self.stored
        return decompress(self.stored, self.encoding, self.codecs.max_body_bytes)

    @property
    def body(self) -> T_co:
        """The body, decoded by its content type; as the ``model`` or `Topic` where one is declared.

        Bytes, where neither the framework nor a codec (`Outbox.codec`) reads the content type.

        Raises:
            InvalidMessage: the bytes don't fit the content type or the model.
            VersionUnknown: it is of a version of the topic that this code can't read.
        """
        if isinstance(self.model, Topic):
            versioned: T_co = self.model.decode(self.raw, self.content_type, self.headers, self.codecs)
            return versioned
        body: T_co = self.codecs.decode(self.raw, self.content_type, self.model)
        return body

    @property
    def secrets(self) -> set[str]:
        """What stands under telling names in its headers and body: nothing that is written about it may quote that."""
        try:
            return set(secrets_of(NAMES, self.headers, self.content_type, self.raw, self.codecs))
        except Exception:  # a damaged body, or a defect in a codec: no reader can read what the body says
            return {self.stored.decode(errors="replace"), *self.headers.values()}

    @property
    def conversation(self) -> UUID:
        """The id of the first message of the chain that this one belongs to; its own id, if it is the first.

        Raises:
            InvalidMessage: its sender wrote something else into the header.
        """
        return self._id_in(CONVERSATION_HEADER) or self.id

    @property
    def cause(self) -> UUID | None:
        """The id of the message whose handler sent this one; None where no handler did.

        Raises:
            InvalidMessage: its sender wrote something else into the header.
        """
        return self._id_in(CAUSE_HEADER)

    @property
    def correlation(self) -> UUID | None:
        """The id of the message that this one answers, if it is an answer.

        Raises:
            InvalidMessage: its sender wrote something else into the header.
        """
        return self._id_in(CORRELATION_HEADER)

    @property
    def reply_to(self) -> str | None:
        """The topic that its sender expects the answer in; None where it expects none."""
        return self.headers.get(REPLY_TO_HEADER)

    @property
    def refusal(self) -> str | None:
        """Why what it answers was refused; None unless it was (`Message.refuse`)."""
        return self.headers.get(REFUSAL_HEADER)

    @property
    def expires_at(self) -> dt.datetime | None:
        """From when on no group handles it; None if it doesn't expire, or its header isn't a time."""
        return expiry_in(self.headers)

    def _id_in(self, header: str) -> UUID | None:
        if (text := self.headers.get(header)) is None:
            return None
        try:
            return UUID(text)
        except ValueError:
            raise InvalidMessage(f"header {header!r} of message {self.id} must be an id, not {text[:40]!r}") from None


@dataclass(frozen=True, slots=True)
class Orphan(_Decoded[T_co]):
    """An undecided half message past its immunity time, as a checker receives it.

    ``age`` is the time since it was written, ``checks`` how often its topic's checker was asked, this time included;
    ``born_at`` and ``age`` are by the clock of the producer's database.
    """

    id: UUID
    topic: str
    key: str | None
    tag: str | None
    headers: Mapping[str, str]
    content_type: str
    stored: bytes
    born_at: dt.datetime
    age: dt.timedelta
    checks: int
    model: Any = None
    codecs: Codecs = field(default_factory=Codecs, repr=False, compare=False)
    encoding: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one check: the resolution, and why it is UNKNOWN where something went wrong.

    ``seconds`` is how long the answer took; ``decided_by`` tells which decider was faster than the answer; ``cause`` is
    what the checker raised.
    """

    resolution: Resolution
    error: str | None = None
    seconds: float = 0.0
    decided_by: str | None = None
    cause: BaseException | None = field(default=None, compare=False, repr=False)


#: So many characters of a refusal's reason are in its header; all are in its body.
_LONGEST_REFUSAL = 500


#: A position is an epoch of the log, and in its lower bits a number. Numbers are dense in a queue, over all epochs.
NUMBER_BITS = 32
NUMBERS = (1 << NUMBER_BITS) - 1


def number_of(position: int) -> int:
    """Return the number of a position in its queue."""
    return position & NUMBERS


def behind(position: int, end: int) -> int:
    """Return how many messages an offset is behind the end of its queue, whatever epochs lie between."""
    ahead = end - position
    return ahead if 0 <= ahead <= NUMBERS else max(number_of(end) - number_of(position), 0)


@dataclass(slots=True)
class Message(_Decoded[T_co]):
    """A message as a handler receives it.

    ``id`` is the half message's id and stays the same through retries and resends; ``attempt`` counts
    from 1; ``born_at`` and ``visible_at`` are times of the producer's database. ``Message[Order]`` is one of a consumer
    with ``model=Order``: its ``body`` is an Order. ``send_reply`` is how the consumer's `Outbox` sends an answer.

    ``group`` is the one that handles it. ``queue_end`` is the last position of its queue when the worker looked last,
    None in a retry. ``first_failed_at`` is when the group failed at it for the first time, by the
    consumer's database, None at its first attempt. (A message that was quarantined before: when that was.)
    ``passage`` is the group's way through the queue in which it is handled: 0, and one more after each reset or skip.
    """

    id: UUID
    topic: str
    queue: int
    position: int
    key: str | None
    tag: str | None
    content_type: str
    stored: bytes
    born_at: dt.datetime
    visible_at: dt.datetime
    send_number: int = 1
    attempt: int = 1
    headers: Mapping[str, str] = field(default_factory=dict)
    model: Any = None
    codecs: Codecs = field(default_factory=Codecs, repr=False, compare=False)
    encoding: str | None = None
    send_reply: ReplySender | None = field(default=None, repr=False, compare=False)
    group: str | None = None
    queue_end: int | None = field(default=None, repr=False, compare=False)
    first_failed_at: dt.datetime | None = None
    passage: int = field(default=0, repr=False, compare=False)

    @property
    def lag(self) -> int | None:
        """How many messages of its queue stood behind it when the worker looked last; None in a retry."""
        return None if self.queue_end is None else behind(self.position, self.queue_end)

    def reply(self, carrier: Any, body: Any, **options: Unpack[SendOptions]) -> Any:
        """Answer the message: send a body to the topic that its sender named by ``reply_to``; return the answer's id.

        The answer is sent from the database of the handler, with its transaction, as by `Outbox.send`, whose carriers,
        options and errors these are. It has this message as its correlation, and its key unless there is another one.
        Its id follows from the message, the group and its passage: an answer that is given again is the same one.

        Raises:
            InvalidMessage: the sender expects no answer (`reply_to` is None); or the message isn't one that a consumer
                handles.
        """
        topic = self.reply_to
        if topic is None:
            raise InvalidMessage(
                f"message {self.id} of topic {self.topic!r} can't be answered: its sender expects no answer; it would "
                "say so by outbox.send(…, reply_to=topic)"
            )
        if self.send_reply is None:
            raise InvalidMessage(
                f"message {self.id} of topic {self.topic!r} can't be answered here: only the handler of a consumer can"
            )
        merged: SendOptions = {"key": self.key, "correlation": self.id, "cause": self, **options}
        return self.send_reply(carrier, topic, Outgoing(body, **merged))

    def refuse(self, carrier: Any, reason: str, **options: Unpack[SendOptions]) -> Any:
        """Answer that what the message asks for will not be done; return the answer's id.

        Otherwise as `reply`. What the handler has changed before is kept: look first, then refuse or change.
        """
        reason = without(str(reason)[:SEARCHED_CHARS], self.secrets)
        merged: SendOptions = {"refusal": reason, **options}
        return self.reply(carrier, {"refused": reason}, **merged)


#: Sends an answer: given the carrier, the topic, and the message to send.
ReplySender = Callable[[Any, str, "Outgoing"], Any]


@dataclass(frozen=True, slots=True)
class Delivery(Generic[T_co]):
    """What became of a message in a group, as a callback of the producer's receives it.

    ``reason`` is the kind of the error behind it, where there is one.
    """

    message: Message[T_co]
    group: str
    status: DeliveryStatus
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class DeadLetter(Generic[T_co]):
    """A parked message of a group, or a parked half message, as a function of `Outbox.on_parked` receives it.

    ``group`` is None for a half. ``reason`` is the error of the last attempt, or why the half is parked; ``attempts``
    were made of the handler, or of the checker. ``parked_at`` is a time of the database. ``message`` is an `Orphan` for
    a half; None if the producer has pruned it.
    """

    id: UUID
    topic: str
    group: str | None
    reason: str
    attempts: int
    parked_at: dt.datetime
    message: Message[T_co] | Orphan[T_co] | None


#: What a send does where the topic has a message of the same business string already.
OnDuplicate = Literal["ignore", "error"]


class SendOptions(TypedDict, total=False):
    """What can be said of a message beside its topic and body; None is the same as leaving an option out.

    Messages of one ``key`` (at most 255 bytes) stay in order. Consumers can filter by ``tag``. The message is delivered
    later by ``deliver_at`` (with time zone), ``delay`` (timedelta or seconds) or ``delay_level`` (1 and more, of the
    setting ``delay_levels``; a level above the last is the last). From ``expires_at`` (with time zone) on no group
    handles it, by the clock of the group's database. A given ``id`` makes a repeated send fail instead of doubling, or
    do nothing with ``on_duplicate="ignore"``; a str is a business string, whose id is that of `message_id`. Without one
    the id of what a handler sends with its transaction follows from its message. ``content_type`` says how the body is
    encoded: by the codec of `Outbox.codec`; None leaves it to the body's type, or to its `Topic`. ``queue`` is the one
    of the topic's that the message comes to, from 0 on, whatever its key: the order is then the sender's business.

    ``dedupe`` is a business string, too, of which the topic gets one message only: a second send does nothing and
    returns the id of the first, or raises DuplicateMessage with ``on_duplicate="error"``, for as long as the first one
    is kept.

    ``reply_to`` is the topic that the sender expects an answer in (`Message.reply`). A message sent while another one
    is handled has that as its cause, and belongs to its conversation; ``cause`` names the message where the framework
    can't know it (in a handler that takes a list, in a thread of its own), ``conversation`` the first one of a chain
    that was written down. ``correlation`` is the message that this one answers, ``refusal`` why it says no, where that
    isn't done by `Message.reply` and `Message.refuse`.
    """

    key: str | None
    tag: str | None
    headers: Mapping[str, str] | None
    deliver_at: dt.datetime | None
    delay: dt.timedelta | float | int | None
    delay_level: int | None
    expires_at: dt.datetime | None
    id: UUID | str | None
    dedupe: str | None
    on_duplicate: OnDuplicate
    content_type: str | None
    queue: int | None
    reply_to: str | Topic[Any] | None
    correlation: UUID | None
    refusal: str | None
    conversation: UUID | None
    cause: Message | Orphan | None


_OPTIONS = frozenset(SendOptions.__annotations__)
# Those that `_chain_headers` makes headers of.
_TYING = frozenset({"cause", "conversation", "correlation", "reply_to", "refusal"})

#: What the application's code is called with now: a message, a list of them, an orphan, or the time of a schedule.
HANDLED: ContextVar[Any] = ContextVar("outbox_handled", default=None)


def headers_of(headers: Mapping[str, str], options: SendOptions, expires_at: dt.datetime | None) -> Mapping[str, str]:
    """Return the headers of a message: those that its sender gave, and those that its options make.

    Raises:
        InvalidMessage: one is for the framework alone, or an option isn't what it must be.
    """
    if ENCODING_HEADER in headers:
        raise InvalidMessage(f"header {ENCODING_HEADER!r} is for compressed bodies alone; leave it out")
    if headers and not OPTION_HEADERS.isdisjoint(headers):  # those of a message that is passed on
        headers = {name: value for name, value in headers.items() if name not in OPTION_HEADERS}
    # Most messages have none of them.
    own = {} if _TYING.isdisjoint(options) and HANDLED.get() is None else _chain_headers(options)
    if (dedupe := options.get("dedupe")) is not None:
        own[DEDUPE_HEADER] = dedupe
    if expires_at is not None:
        own[EXPIRES_HEADER] = expires_at.isoformat()
    return {**headers, **own} if own else headers


def _chain_headers(options: SendOptions) -> dict[str, str]:
    """Return the headers that tie a message to others: to those that its options name, and to the one that is handled.

    Raises:
        InvalidMessage: an option isn't what it must be.
    """
    headers: dict[str, str] = {}
    if (cause := options.get("cause") or _handled_message()) is not None:
        if not isinstance(cause, Message | Orphan):
            raise InvalidMessage(f"cause must be a message that is handled, not {type(cause).__name__}: {cause!r}")
        headers[CONVERSATION_HEADER] = cause.headers.get(CONVERSATION_HEADER) or str(cause.id)
        headers[CAUSE_HEADER] = str(cause.id)
    ids = (("conversation", CONVERSATION_HEADER), ("correlation", CORRELATION_HEADER))
    for option, header in ids:
        if (value := options.get(option)) is not None:
            if not isinstance(value, UUID):
                raise InvalidMessage(f"{option} must be a UUID, not {type(value).__name__}: {value!r}")
            headers[header] = str(value)
    if (topic := options.get("reply_to")) is not None:
        headers[REPLY_TO_HEADER] = topic.name if isinstance(topic, Topic) else check_topic(topic)
    if (reason := options.get("refusal")) is not None:
        headers[REFUSAL_HEADER] = storable(reason)[:_LONGEST_REFUSAL]
    return headers


class Follows(NamedTuple):
    """What a send follows from: the message behind it, what more that is known by, and if the send answers it."""

    source: UUID
    coordinates: tuple[object, ...]
    answers: bool = False


def followed(options: SendOptions) -> Follows | None:
    """Return what a send follows from; None where that is nothing which a replay would meet again."""
    match options.get("cause") or HANDLED.get():
        case (Message() as message) | [Message() as message]:
            return Follows(message.id, (message.group, message.passage), options.get("correlation") == message.id)
    return None


def _handled_message() -> Message | Orphan | None:
    """Return the message that the calling code handles; None where there is none, or which of several isn't known."""
    handled = HANDLED.get()
    if isinstance(handled, list):
        handled = handled[0] if len(handled) == 1 else None
    return handled if isinstance(handled, Message | Orphan) else None


@dataclass(frozen=True, slots=True, init=False)
class Outgoing:
    """What a ``@transactional`` function may return to say more than the body; ``options`` are those of `Outbox.send`.

    A given ``id`` lets the function write it into its own tables.

    Raises:
        TypeError: an option that `SendOptions` doesn't have.
    """

    body: Any
    options: SendOptions

    def __init__(self, body: Any, **options: Unpack[SendOptions]) -> None:
        if not options.keys() <= _OPTIONS:
            raise TypeError(f"a message has no option {', '.join(sorted(options.keys() - _OPTIONS))}")
        object.__setattr__(self, "body", body)
        object.__setattr__(self, "options", options)

    @property
    def secrets(self) -> set[str]:
        """What stands under telling names in its headers and body; as `Message.secrets`."""
        try:
            document = read_json(encode_json(self.body))
        except InvalidMessage:  # it is of a codec, or bytes
            document = str(self.body)
        return set(NAMES.secrets_in([dict(self.options.get("headers") or {}), document]))


@dataclass(frozen=True, slots=True)
class Retry:
    """Handler's answer: undo what I did, call me again, ``after`` seconds or by the retry table. Costs an attempt."""

    after: dt.timedelta | float | None = None
    reason: str = "the handler asked for a retry"


@dataclass(frozen=True, slots=True)
class Park:
    """Handler's answer: undo what I did and set the message aside for a human."""

    reason: str


@dataclass(frozen=True, slots=True)
class Skip:
    """Handler's answer: undo what I did and count the message as consumed."""

    reason: str = "skipped by the handler"


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Handler's answer: undo what I did; what I need isn't there, and no message would fare better. Costs no attempt.

    The group stops as with an open `Breaker`, declared or not: one message is tried, first ``after`` a second (or this
    timedelta or seconds), until one is handled. One that is answered so again and again while others are handled pays
    by an attempt. ``pause``: an operator has to resume the group.
    """

    reason: str
    after: dt.timedelta | float | None = None
    pause: bool = False


#: What a handler may answer; None is success.
HandlerAnswer = Retry | Park | Skip | Unavailable | None


@dataclass(frozen=True, slots=True)
class Counts:
    """What one pass did; truthy when it did anything at all.

    ``taken``: rows the pass worked on. ``done``: of these, with the result the pass is there for
    (dispatched, consumed, released, decided, deleted). ``failed``: messages to be retried, or halves whose check
    gave no verdict. ``parked``: messages or halves set aside for a human.
    ``more``: the pass stopped at its limit and should be called again at once.
    """

    taken: int = 0
    done: int = 0
    failed: int = 0
    parked: int = 0
    more: bool = False

    def __bool__(self) -> bool:
        return self.taken > 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.taken + other.taken,
            self.done + other.done,
            self.failed + other.failed,
            self.parked + other.parked,
            self.more or other.more,
        )


#: What a UUIDv7 of RFC 9562 has beside its time and its random bits.
VERSION_AND_VARIANT: int = (7 << 76) | (0b10 << 62)
_lock = threading.Lock()
_last_ms = 0
_counter = 0


def uuid7() -> UUID:
    """Return a new id: 48 bits of Unix milliseconds, 12 + 30 bits of counter, 32 random bits.

    Ids made by one process strictly increase (RFC 9562 section 6.2, method 1), also when its clock
    is set back. Nothing is decided by the time in an id: it only keeps index inserts at the right edge.
    """
    global _last_ms, _counter  # noqa: PLW0603 - the monotonic state of this process
    now_ms = time.time_ns() // 1_000_000
    random = int.from_bytes(os.urandom(8), "big")
    with _lock:
        if now_ms > _last_ms:
            _last_ms = now_ms
            # Half of the counter's range stays free for this millisecond.
            _counter = (random >> 32) & 0x1FF_FFFF
        else:
            _counter += 1
        ms, counter = _last_ms, _counter
    return UUID(
        int=(ms << 80)
        | VERSION_AND_VARIANT
        | ((counter >> 30) << 64)
        | ((counter & 0x3FFF_FFFF) << 32)
        | (random & 0xFFFF_FFFF)
    )


def _forget_after_fork() -> None:
    """A forked child must not continue its parent's counter in the same millisecond."""
    global _lock, _counter  # noqa: PLW0603 - the state of the process's ids
    _lock = threading.Lock()
    _counter = int.from_bytes(os.urandom(3), "big")


os.register_at_fork(after_in_child=_forget_after_fork)
