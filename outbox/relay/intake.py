"""Take messages of a broker in: store them as messages of a topic here, and only then tell the broker so.

So consumers of the topic know nothing of the broker: order, retries, parked messages and console are as ever, and no
time limit of the broker's binds their handlers. A message that comes again has its id again, and is stored once: an id
of CloudEvents is that of the message, others follow from the source and the id, or from where the broker has it.

One pass takes a list, writes it in one transaction, and confirms it. If the database is away in between, the source
gives the same list again; if the worker dies, the broker does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid5

from outbox.database.duty import Duty, Post, Task
from outbox.database.execute import Template, execute
from outbox.database.session import begin
from outbox.database.sql import COMMIT_SYNCHRONOUSLY, plan_by_index
from outbox.errors import InvalidHandler, InvalidMessage
from outbox.message.content import BYTES, StoredBytes, check_group, check_seconds
from outbox.message.ids import MESSAGE_NAMESPACE, derived_id, message_id
from outbox.message.model import Counts, Outgoing
from outbox.relay.source import IntakeSource, Received
from outbox.telemetry.events import IntakeRefused
from outbox.telemetry.hooks import emit
from outbox.text import message_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

# One message may be taken in as messages of two topics, or be of a topic here by itself.
_OF_OTHERS: Template = Template(
    "SELECT id FROM {s}.half_message WHERE id = ANY (%(ids)s::uuid[]) AND topic <> %(topic)s"
)

#: Messages of one transaction, and seconds that a pass waits for the first of them.
BATCH, WAIT = 500, 1.0
# Headers of a message that say what was wrong with it when it was taken in, and where the broker has it.
REFUSED_HEADER, ORIGIN_HEADER = "intake-refused", "intake-origin"


@dataclass(frozen=True, slots=True)
class Intake:
    """What is taken in as messages of ``topic``, from ``source``.

    ``id_from`` returns a message's id, or a text that tells it from others. ``keeps`` is how long (seconds) the broker
    keeps messages, and may deliver them again. ``send`` sends, in a transaction.
    """

    topic: str
    source: IntakeSource
    send: Callable[[Any, str, Outgoing], Any] = field(repr=False)
    id_from: Callable[[Received], UUID | str] | None = None

    def outgoing(self, received: Received, id_: UUID) -> Outgoing:
        """Return what is sent for a message."""
        headers = {name: value for name, value in received.own_headers.items() if name.lower() != "content-type"}
        content_type = received.content_type or _content_type(received.headers) or BYTES
        key = received.attribute("partitionkey") or received.key
        body = StoredBytes(received.body)
        tag, kind = received.attribute("outboxtag"), received.attribute("type")
        if kind and kind != self.topic:
            headers.setdefault("type", kind)
        options: dict[str, Any] = {"key": key or None, "tag": tag, "headers": headers, "content_type": content_type}
        return Outgoing(body, id=id_, on_duplicate="ignore", **options)

    def as_it_is(self, received: Received, id_: UUID, why: str) -> Outgoing:
        """Return what is sent for a message that can't be one here: its bytes, and what is wrong with it."""
        headers = {REFUSED_HEADER: why[:500], ORIGIN_HEADER: received.origin[:200]}
        body = StoredBytes(received.body)
        return Outgoing(body, id=id_, on_duplicate="ignore", headers=headers, content_type=BYTES)

    def id_of(self, received: Received) -> UUID:
        """Return the id of a message, which is the same whenever it comes.

        Raises:
            InvalidMessage: ``id_from`` has returned neither an id nor a text.
            InvalidHandler: it has none, and the broker knows none.
        """
        if self.id_from is not None:
            found: object = self.id_from(received)
            if not isinstance(found, UUID | str):
                raise InvalidMessage(
                    f"id_from of the intake of {self.topic!r} returned {found!r}; return a UUID or a str"
                )
            return found if isinstance(found, UUID) else message_id(self.topic, found)
        if (text := received.attribute("id")) is None:
            if not received.origin:
                raise InvalidHandler(
                    f"intake of {self.topic!r}: {self.source.name} has given a message without an id, which would be "
                    "stored again whenever it comes again; declare the intake with id_from="
                )
            return message_id(self.topic, f"{self.source.name}:{received.origin}")
        try:
            return UUID(text)
        except ValueError:
            return uuid5(uuid5(MESSAGE_NAMESPACE, received.attribute("source") or ""), text)

    def once(self, connection: Connection, schema: str) -> Counts:
        """Take what is there, at most a list of it, and store it."""
        received = self.source.take(BATCH, WAIT)
        if not received:
            return Counts()
        with begin(connection):
            # The broker forgets what is confirmed.
            ids = [self.id_of(each) for each in received]
            others = _OF_OTHERS(schema, ids=ids, topic=self.topic)
            *_, rows = execute(connection, COMMIT_SYNCHRONOUSLY, plan_by_index(), others)
            taken = {id_ for (id_,) in rows}
            self._store(received, [derived_id(id_, self.topic) if id_ in taken else id_ for id_ in ids], connection)
        self.source.confirm()
        return Counts(taken=len(received), done=len(received), more=True)

    def _store(self, received: Sequence[Received], ids: Sequence[UUID], connection: Connection) -> None:
        """Store messages; one that can't be one here as its bytes, or the broker would give it for ever."""
        for each, id_ in zip(received, ids, strict=True):
            try:
                self.send(connection, self.topic, self.outgoing(each, id_))
            except InvalidMessage as error:
                why = message_of(error)
                self.send(connection, self.topic, self.as_it_is(each, id_, why))
                emit(IntakeRefused(topic=self.topic, source=self.source.name, origin=each.origin, reason=why))


def intake_of(
    topic: str,
    source: IntakeSource,
    send: Callable[..., Any],
    retention: float,
    keeps: Any,
    id_from: Callable[..., Any] | None,
) -> Intake:
    """Return an intake with options as users write them.

    Raises:
        InvalidHandler: no source; or what it repeats wouldn't be known any more, since it keeps messages for longer.
    """
    if not all(callable(getattr(source, name, None)) for name in ("take", "confirm", "close")):
        raise InvalidHandler(
            f"intake of {topic!r}: {source!r} is no IntakeSource, which has name, take, confirm and close"
        )
    if keeps is not None and (seconds := check_seconds("broker_retention", keeps)) > retention:
        raise InvalidHandler(
            f"intake of {topic!r}: the broker keeps messages for {seconds:g} s, and the setting inbox_"
            f"retention is {retention:g} s: one that it delivers again after that would be a new one; set that longer"
        )
    check_group(source.name)
    return Intake(topic, source, send, id_from)


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


DUTIES = (
    Duty(
        "intake",
        "Takes messages of brokers in, as messages of topics.",
        """
        producer: worker
        INSERT ON half_check op_message
        SELECT(id topic) INSERT ON half_message
        USAGE ON op_sequence
        """,
        role="intake",
        tasks=_tasks,
    ),
)
