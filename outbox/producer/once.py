"""Send once: the id that a business string stands for, and what becomes of a second message of it.

The id is made of topic and string, so that a send knows the id of the first message without I/O, and the primary key of
the half messages decides every race: a second transaction that inserts the same id waits for the first one to end. If
that commits, the second one writes nothing; if it rolls back, the second one is the first.

Where a second message is an error, it is written in a round trip before the COMMIT, so that the transaction still knows
what came of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.database.execute import execute
from outbox.database.session import RunningTransaction
from outbox.errors import InvalidMessage
from outbox.message.content import MAX_KEY_BYTES, check_text
from outbox.message.ids import derived_id, message_id
from outbox.message.model import Follows, SendOptions
from outbox.producer.sql import write_once
from outbox.producer.write import Once
from outbox.telemetry.events import DuplicateIgnored

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.database.execute import Row, Statement
    from outbox.producer.write import AnyCarrier, Write


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
    carrier: AnyCarrier, topic: str, follows: Follows, options: SendOptions, content: tuple[str | None, bytes]
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


def firsts(
    connection: Connection, schema: str, writes: Sequence[Write], duplicates: dict[int, DuplicateIgnored]
) -> list[Statement]:
    """Return what writes messages, but those that the transaction has sent before, or that their topics have already.

    ``duplicates`` gets the events of these, by the identities of their writes, once that is answered. Where a second
    message may be an error, it is written here.

    Raises:
        DuplicateMessage: a second message whose sender wants that; the transaction is to be rolled back.
    """
    first_of: dict[UUID, Write] = {}
    for write in writes:
        first_of.setdefault(write.half.id, write)
    written = [write for write in writes if write.once is None or first_of[write.half.id] is write]
    once = {write.half.id for write in written if write.once is not None}

    def answered(rows: list[Row]) -> None:
        there = {half_id for (half_id,) in rows}
        for write in writes:
            if write.once is not None and (write.half.id in there or first_of[write.half.id] is not write):
                duplicates[id(write)] = write.once.second(write.half)

    statement = write_once(schema, [(write.half, write.preparation) for write in written], once)
    statement = replace(statement, answered=answered)
    if all(write.once is None or write.once.on_duplicate == "ignore" for write in writes):
        return [statement]
    execute(connection, statement)
    return []
