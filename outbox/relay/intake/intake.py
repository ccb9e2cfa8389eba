"""Take messages of a broker in: store them as messages of a topic here, and only then tell the broker so.

So consumers of the topic know nothing of the broker: order, retries, parked messages and console are as ever, and no
time limit of the broker's binds their handlers. A message that comes again has its id again, and is stored once: an id
of CloudEvents is that of the message, others follow from the source and the id, or from where the broker has it.

One pass takes a list, writes it (in several transactions, where its bodies are large), and confirms it. If the database
is away in between, the source gives the same list again; if the worker dies, the broker does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID, uuid5

from outbox.database.duty import Duty, DutyPass, Post, Task
from outbox.database.execute import Template, execute
from outbox.database.session import begin
from outbox.database.sql import COMMIT_SYNCHRONOUSLY, plan_by_index
from outbox.errors import InvalidHandler, InvalidMessage
from outbox.message.content import BYTES, MAX_KEY_BYTES, StoredBytes, check_group, check_seconds
from outbox.message.ids import MESSAGE_NAMESPACE, derived_id, message_id
from outbox.message.model import Counts, Outgoing
from outbox.relay.intake.gaps import JOIN_EVERY, join_once, ranges_of
from outbox.relay.intake.source import IntakeSource, Received
from outbox.telemetry.events import IntakeRefused
from outbox.telemetry.hooks import emit
from outbox.text import message_of, storable, summary_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

T = TypeVar("T")

# One message may be taken in as messages of two topics, or be of a topic here by itself.
_OF_OTHERS: Template = Template(
    "SELECT id FROM {s}.half_message WHERE id = ANY (%(ids)s::uuid[]) AND topic <> %(topic)s"
)
# Messages of a kind have their own ids in the topic that takes them in first, and in others ids that follow from those:
# what a look at the messages themselves would say depends on what is committed, and on what is pruned.
_KINDS: Template = Template("SELECT id, topic FROM {s}.intake_kind WHERE id = ANY (%(kinds)s::uuid[])")
_NEW_KINDS: Template = Template("""
INSERT INTO {s}.intake_kind (id, topic) SELECT k.id, %(topic)s FROM unnest(%(kinds)s::uuid[]) AS k (id) ORDER BY 1
ON CONFLICT DO NOTHING
""")

# Bytes of the bodies of one transaction.
_MOST_BYTES = 16 * 1024 * 1024
#: Messages of one list, and seconds that a pass waits for the first of them.
BATCH, WAIT = 500, 1.0
# Headers of a message that say what was wrong with it when it was taken in, and where the broker has it.
REFUSED_HEADER, ORIGIN_HEADER = "intake-refused", "intake-origin"


@dataclass(frozen=True, slots=True)
class OwnLoop:
    """The source of an application that takes messages by itself, which this one therefore has none of."""

    name: str

    def take(self, most: int, seconds: float, /) -> Sequence[Received]:  # noqa: ARG002 - it has none
        """Return nothing."""
        return ()

    def confirm(self) -> None:
        """Do nothing: the application tells the broker."""

    def close(self) -> None:
        """Do nothing: the application has the connection."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A message as it was stored; ``is_refused``: as its bytes, since it can't be one here."""

    id: UUID
    outgoing: Outgoing
    is_refused: bool


@dataclass(frozen=True, slots=True)
class Intake:
    """What is taken in as messages of ``topic``, from ``source``.

    ``id_from`` returns a message's id, or a text that tells it from others. ``send`` sends, in a transaction. Of a body
    that is too large the first ``most`` bytes are stored; the broker has the rest. ``complete``: the source has all
    messages of the topics that a relay publishes there, so that gaps between their positions are told. ``alone`` is
    held by the pass that uses the source.
    """

    topic: str
    source: IntakeSource
    send: Callable[[Any, str, Outgoing], Any] = field(repr=False)
    id_from: Callable[[Received], UUID | str] | None = None
    most: int = 4 * 1024 * 1024
    complete: bool = False
    alone: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def outgoing(self, received: Received, id_: UUID) -> Outgoing:
        """Return what is sent for a message."""
        headers = received.own_headers
        content_type = received.content_type or _content_type(received.headers) or BYTES
        key = received.attribute("partitionkey")
        key = received.key if key is None else key
        body = StoredBytes(received.body)
        tag, kind = received.attribute("outboxtag"), received.attribute("type")
        if kind and kind != self.topic:
            headers.setdefault("type", kind)
        options: dict[str, Any] = {"key": key, "tag": tag, "headers": headers, "content_type": content_type}
        return Outgoing(body, id=id_, on_duplicate="ignore", **options)

    def as_it_is(self, received: Received, id_: UUID, why: str) -> Outgoing:
        """Return what is sent for a message that can't be one here: its bytes, and what is wrong with it."""
        headers = {REFUSED_HEADER: storable(why)[:500], ORIGIN_HEADER: storable(received.origin)[:200]}
        key = received.attribute("partitionkey")
        key = _fit(received.key if key is None else key, MAX_KEY_BYTES)
        body = StoredBytes(received.body[: self.most])
        return Outgoing(body, id=id_, on_duplicate="ignore", headers=headers, content_type=BYTES, key=key)

    def id_of(self, received: Received) -> UUID:
        """Return the id of a message, which is the same whenever it comes.

        Raises:
            InvalidMessage: ``id_from`` has returned neither an id nor a text.
            InvalidHandler: it has none, and the broker knows none.
        """
        found: object = received.attribute("id") if self.id_from is None else self.id_from(received)
        if isinstance(found, UUID):
            return found
        if self.id_from is not None and not (isinstance(found, str) and found):
            raise InvalidMessage(f"id_from of the intake of {self.topic!r} returned {found!r}; return a UUID or a text")
        if not found:
            return self._id_of_origin(received)
        text = storable(found)
        if self.id_from is not None:
            return message_id(self.topic, text)
        try:
            return UUID(text)
        except ValueError:
            return uuid5(uuid5(MESSAGE_NAMESPACE, storable(received.attribute("source") or "")), text)

    def _id_of_origin(self, received: Received) -> UUID:
        if received.origin:
            return message_id(self.topic, storable(f"{self.source.name}:{received.origin}"))
        raise InvalidHandler(
            f"intake of {self.topic!r}: {self.source.name} has given a message without an id, which would be stored "
            "again whenever it comes again; declare the intake with id_from="
        )

    def once(self, connection: Connection, schema: str) -> Counts:
        """Take what is there, at most a list of it, and store it."""
        if not self.alone.acquire(blocking=False):  # another worker of this process has the source
            return Counts()
        try:
            received = self.source.take(BATCH, WAIT)
            for part in parts(received, lambda each: len(each.body)):
                with begin(connection):
                    execute(connection, plan_by_index())
                    self.store(connection, schema, part)
            if received:
                self.source.confirm()
        finally:
            self.alone.release()
        return Counts(taken=len(received), done=len(received), more=bool(received))

    def store(self, connection: Connection, schema: str, received: Sequence[Received]) -> list[Stored]:
        """Store messages; one that can't be one here as its bytes, or the broker would give it for ever."""
        named = [self.name_of(each) for each in received]
        others = _OF_OTHERS(schema, ids=[id_ for id_, _ in named], topic=self.topic)
        known = _KINDS(schema, kinds=sorted({each.kind for each in received}))
        # The broker forgets what is confirmed.
        _, rows, kinds = execute(connection, COMMIT_SYNCHRONOUSLY, others, known)
        taken, topics, stored = {id_ for (id_,) in rows}, dict(map(tuple, kinds)), list[Stored]()
        if new := sorted({each.kind for each in received} - topics.keys()):
            topics = dict(map(tuple, execute(connection, _NEW_KINDS(schema, kinds=new, topic=self.topic), known)[1]))
        if self.complete and (noted := ranges_of(schema, self.topic, received)) is not None:
            execute(connection, noted)
        for each, (id_, refusal) in zip(received, named, strict=True):
            is_others = id_ in taken or topics[each.kind] != self.topic
            own, why = derived_id(id_, self.topic) if is_others else id_, refusal
            try:
                if not why:
                    sent = self.outgoing(each, own)
                    self.send(connection, self.topic, sent)
            except InvalidMessage as error:
                why = message_of(error)
            if why:
                sent = self.as_it_is(each, own, why)
                self.send(connection, self.topic, sent)
                emit(IntakeRefused(topic=self.topic, source=self.source.name, origin=each.origin, reason=why))
            stored.append(Stored(own, sent, is_refused=bool(why)))
        return stored

    def name_of(self, received: Received) -> tuple[UUID, str]:
        """Return the id of a message, and what is wrong with it: then it is that of where the broker has it."""
        try:
            return self.id_of(received), ""
        except InvalidHandler:
            raise
        except Exception as error:  # the application's function, or what it returned
            return self._id_of_origin(received), summary_of(error)


def parts(received: Sequence[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield messages in lists that one transaction takes."""
    part, size = list[T](), 0
    for each in received:
        if part and size + size_of(each) > _MOST_BYTES:
            yield part
            part, size = [], 0
        part.append(each)
        size += size_of(each)
    if part:
        yield part


def _fit(value: str | None, most: int) -> str | None:
    """Return a key, unless it can't be one."""
    return None if value is None or "\0" in value or len(storable(value).encode()) > most else value


def check_intake(intake: Intake, others: Sequence[Intake], retention: float, keeps: Any) -> Intake:
    """Return an intake, beside ``others``; ``keeps`` is how long the broker keeps messages, None: that isn't said.

    Raises:
        InvalidHandler: no source, one that another intake has, or whose messages couldn't be told from those of another
            one; or what it repeats wouldn't be known any more, since ``keeps`` is longer than ``retention``.
    """
    topic, source = intake.topic, intake.source
    if not all(callable(getattr(source, name, None)) for name in ("take", "confirm", "close")):
        raise InvalidHandler(
            f"intake of {topic!r}: {source!r} is no IntakeSource, which has name, take, confirm and close"
        )
    check_group(source.name)
    if any(each.source is source or (each.topic, each.source.name) == (topic, source.name) for each in others):
        raise InvalidHandler(
            f"intake of {topic!r}: source {source.name!r} has an intake already; each needs an object and a name of "
            "its own"
        )
    if keeps is not None and (seconds := check_seconds("broker_retention", keeps)) > retention:
        raise InvalidHandler(
            f"intake of {topic!r}: the broker keeps messages for {seconds:g} s, and the setting inbox_"
            f"retention is {retention:g} s: one that it delivers again after that would be a new one; set that longer"
        )
    return intake


def _content_type(headers: Mapping[str, str]) -> str | None:
    return next((value for name, value in headers.items() if name.lower() == "content-type"), None)


def _tasks(at: Post) -> Iterator[Task]:
    for intake in at.outbox.intakes if "producer" in at.parts else ():
        at.at_end(intake.source.close)

        def one_pass(connection: Connection, _: Connection, __: object, intake: Intake = intake) -> Counts:
            return intake.once(connection, at.settings.schema)

        # A lane of its own: it waits for the broker.
        name = f"take in {intake.topic} from {intake.source.name}"
        yield Task(name=name, one_pass=one_pass, every=WAIT / 10, after=at.wake_dispatch, parts=("producer",))
    if "producer" in at.parts and any(intake.complete for intake in at.outbox.intakes):
        join: DutyPass = lambda connection, _, __: join_once(connection, at.settings)  # noqa: E731 - a pass
        yield Task(name="gaps of intakes", one_pass=join, every=JOIN_EVERY, lane="upkeep", parts=("producer",))


DUTIES = (
    Duty(
        "intake",
        "Takes messages of brokers in, as messages of topics.",
        """
        producer: worker
        INSERT ON half_check op_message
        SELECT INSERT DELETE ON intake_range
        SELECT INSERT ON intake_kind
        SELECT(id topic) INSERT ON half_message
        USAGE ON op_sequence
        """,
        role="intake",
        tasks=_tasks,
    ),
)
