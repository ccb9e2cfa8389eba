"""What is to be sent once: the id that a business string stands for, and what becomes of a second message of it.

The id is made of topic and string, so that a send knows the id of the first message without I/O, and the primary key of
the half messages decides every race: a second transaction that inserts the same id waits for the first one to end. If
that commits, the second one writes nothing; if it rolls back, the second one is the first.

It is written in a round trip before the COMMIT, so that the transaction still knows what came of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.database.execute import execute
from outbox.errors import DuplicateMessage, InvalidMessage
from outbox.message.content import MAX_KEY_BYTES, check_text
from outbox.message.model import HalfMessage, OnDuplicate, SendOptions, message_id
from outbox.producer.sql import write_once
from outbox.telemetry.events import DuplicateIgnored

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.producer.producer import Write


@dataclass(frozen=True, slots=True)
class Once:
    """A business string of which a topic is to have one message, and what a second send does."""

    dedupe: str
    on_duplicate: OnDuplicate

    def second(self, half: HalfMessage) -> DuplicateIgnored:
        """Return what is told of a second message.

        Raises:
            DuplicateMessage: its sender wants that.
        """
        if self.on_duplicate == "error":
            raise DuplicateMessage(half.topic, self.dedupe, half.id)
        return DuplicateIgnored(topic=half.topic, message_id=half.id, dedupe=self.dedupe)


def once_of(options: SendOptions) -> Once | None:
    """Return what the options say of a second send; None where they say nothing.

    Raises:
        InvalidMessage: an option isn't what it must be, or two of them exclude each other.
    """
    on_duplicate = options.get("on_duplicate")
    if (dedupe := _business_string("dedupe", options.get("dedupe"))) is None:
        if on_duplicate is not None:
            raise InvalidMessage(f"on_duplicate = {on_duplicate!r} says nothing without dedupe='…'; give both, or none")
        return None
    if options.get("id") is not None:
        raise InvalidMessage(f"dedupe = {dedupe!r} makes the id of the message: leave id out")
    if on_duplicate not in {None, "ignore", "error"}:
        raise InvalidMessage(f"on_duplicate = {on_duplicate!r} must be 'ignore' or 'error'")
    return Once(dedupe, on_duplicate or "ignore")


def refuse_once(options: SendOptions) -> None:
    """Raise for a half that is prepared: one that is rolled back would keep all later messages of its string away.

    Raises:
        InvalidMessage: the options say what a second send does.
    """
    if (once := once_of(options)) is not None:
        raise InvalidMessage(
            f"dedupe = {once.dedupe!r} can't be prepared, since a half may yet be rolled back; give id={once.dedupe!r} "
            "instead, with which a second one fails"
        )


def chosen_id(topic: str, options: SendOptions) -> UUID | None:
    """Return the id that the options give a message to a topic; None where they leave it to the framework.

    Raises:
        InvalidMessage: it isn't a UUID or a business string; or as `once_of`.
    """
    if (once := once_of(options)) is not None:
        return message_id(topic, once.dedupe)
    chosen = options.get("id")
    if chosen is None or isinstance(chosen, UUID):
        return chosen
    if not isinstance(chosen, str):
        raise InvalidMessage(f"id must be a UUID or a business string, not {type(chosen).__name__}: {chosen!r}")
    if _is_uuid(chosen):
        raise InvalidMessage(
            f"id {chosen!r} is the text of a UUID, which would stand for another id: give UUID({chosen!r})"
        )
    text = _business_string("id", chosen)
    return None if text is None else message_id(topic, text)


def _business_string(option: str, value: object) -> str | None:
    text = check_text(option, value, MAX_KEY_BYTES)
    if text == "":
        raise InvalidMessage(f"{option} is empty: give the string that your business knows the message by")
    return text


def _is_uuid(text: str) -> bool:
    try:
        UUID(text)
    except ValueError:
        return False
    return True


def write_firsts(connection: Connection, schema: str, writes: Sequence[Write]) -> dict[int, DuplicateIgnored]:
    """Write messages, but those that the transaction has sent before, or that their topics have already.

    Return what is told of these, by the identities of their writes.

    Raises:
        DuplicateMessage: a second message whose sender wants that; the transaction is to be rolled back.
    """
    first_of: dict[UUID, Write] = {}
    for write in writes:
        first_of.setdefault(write.half.id, write)
    firsts = [write for write in writes if write.once is None or first_of[write.half.id] is write]
    once = {write.half.id for write in firsts if write.once is not None}
    (rows,) = execute(connection, write_once(schema, [(write.half, write.preparation) for write in firsts], once))
    there = {half_id for (half_id,) in rows}
    return {
        id(write): write.once.second(write.half)
        for write in writes
        if write.once is not None and (write.half.id in there or first_of[write.half.id] is not write)
    }
