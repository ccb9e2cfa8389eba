"""Send once: the id that a business string stands for, and what becomes of a second message of it.

The id is made of topic and string, so that a send knows the id of the first message without I/O, and the primary key of
the half messages decides every race: a second transaction that inserts the same id waits for the first one to end. If
that commits, the second one writes nothing; if it rolls back, the second one is the first.

Where a second message is an error, it is written in a round trip before the COMMIT, so that the transaction still knows
what came of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any
from uuid import UUID

from outbox.database.session import RunningTransaction
from outbox.errors import DuplicateMessage, InvalidMessage
from outbox.message.content import MAX_KEY_BYTES, check_text
from outbox.message.ids import derived_id, message_id
from outbox.message.model import Follows, HalfMessage, OnDuplicate, SendOptions
from outbox.telemetry.events import DuplicateIgnored


@dataclass(frozen=True, slots=True)
class Once:
    """A business string of which a topic is to have one message, and what a second send does.

    ``again`` is called for a second one, before the COMMIT.
    """

    dedupe: str
    on_duplicate: OnDuplicate
    again: Callable[[], object] | None = None

    def second(self, half: HalfMessage) -> DuplicateIgnored:
        """Return the event that tells of a second message.

        Raises:
            DuplicateMessage: its sender wants that.
        """
        if self.on_duplicate == "error":
            raise DuplicateMessage(half.topic, self.dedupe, half.id)
        if self.again is not None:
            self.again()
        return DuplicateIgnored(topic=half.topic, message_id=half.id, dedupe=self.dedupe)


def once_of(options: SendOptions) -> Once | None:
    """Return what the options say of a second send; None where they say nothing.

    Raises:
        InvalidMessage: an option isn't what it must be, or two of them exclude each other.
    """
    on_duplicate, chosen = options.get("on_duplicate"), options.get("id")
    dedupe = _business_string("dedupe", options.get("dedupe"))
    if dedupe is None and on_duplicate is None:
        return None
    if dedupe is None and chosen is None:
        raise InvalidMessage(
            f"on_duplicate = {on_duplicate!r} says nothing without dedupe='…' or id=…; give one of them too, or none"
        )
    if dedupe is not None and chosen is not None:
        raise InvalidMessage(f"dedupe = {dedupe!r} makes the id of the message: leave id out")
    if on_duplicate not in {None, "ignore", "error"}:
        raise InvalidMessage(f"on_duplicate = {on_duplicate!r} must be 'ignore' or 'error'")
    return Once(dedupe or str(chosen), on_duplicate or "ignore")


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
    if (once := once_of(options)) is not None and options.get("id") is None:
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


def following_id(
    carrier: Any, topic: str, follows: Follows, options: SendOptions, content: tuple[str | None, bytes]
) -> UUID | None:
    """Return the id of a message that follows from what the calling code is called with; None: it is drawn.

    It is one where the carrier is of the transaction of that call: a message committed with it isn't sent again, unless
    the database has lost it. An answer is one of its message; all else is also of its ``content`` (key and body), so
    that what a replay sends otherwise is never taken for what it has sent before. Outside of a transaction so are
    answers.
    """
    within = RunningTransaction.of_carrier(carrier)
    if within is None and not follows.answers:
        return None
    coordinates: tuple[object, ...] = (*follows.coordinates, topic, "answer")
    if within is None or not follows.answers:
        key, body = content
        headers = json.dumps(dict(options.get("headers") or {}), sort_keys=True)
        text = "\0".join((key or "", options.get("tag") or "", headers, ""))
        coordinates = (*follows.coordinates, topic, blake2b(text.encode() + body).hexdigest())
    number = 0
    if within is not None:
        of_call = (follows.source, *coordinates)
        number = within.sent[of_call] = within.sent.get(of_call, -1) + 1
    return derived_id(follows.source, *coordinates, number)


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
