"""Ids of messages that aren't drawn: of a moment, of a business string, or following from another id."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any
from uuid import UUID, uuid5

from outbox.message.model import VERSION_AND_VARIANT
from outbox.message.topic import Topic


def uuid7_at(unix_seconds: float) -> UUID:
    """Return the smallest UUIDv7 of a moment: a bound for ranges over ids."""
    return UUID(int=(int(unix_seconds * 1000) << 80) | VERSION_AND_VARIANT)


#: Where the ids of business strings come from: the UUIDv5 of "outbox" in the namespace of object ids (RFC 9562).
MESSAGE_NAMESPACE: UUID = UUID("7da24bf3-a29d-5f9f-a8ef-1ac2457c95cc")

#: Ids of business strings begin here, behind all that begin with a time: so a range of ids that stands for a time has
#: none of them.
FIRST_BUSINESS_ID: UUID = UUID("f0000000-0000-0000-0000-000000000000")


def message_id(topic: str | Topic[Any], text: str) -> UUID:
    """Return the id of the message to a topic that a business string stands for, such as "order-4711".

    It is the UUIDv5 of the text, in the namespace that is the UUIDv5 of the topic's name in `MESSAGE_NAMESPACE`, with
    "f" as its first digit (`FIRST_BUSINESS_ID`): the same in every process and language.
    """
    name = topic.name if isinstance(topic, Topic) else topic
    return UUID(int=uuid5(uuid5(MESSAGE_NAMESPACE, name), text).int | FIRST_BUSINESS_ID.int)


#: The version of ids that follow from others.
FOLLOWING_VERSION = 8


def derived_id(source: UUID, *coordinates: object) -> UUID:
    """Return the id that follows from another one and coordinates: the same in each process, and again after a restore.

    It begins with the time of ``source`` (UUIDv8 of RFC 9562), and so is in its segment; where that has none, with "f",
    as ids of business strings do.
    """
    text = "\0".join(map(str, (source, *coordinates))).encode("utf-8", "surrogatepass")
    hashed = int.from_bytes(blake2b(text, digest_size=16).digest(), "big")
    of_time = source.version in {7, FOLLOWING_VERSION} and source < FIRST_BUSINESS_ID
    head = (source.int if of_time else hashed | FIRST_BUSINESS_ID.int) >> 80 << 80
    tail = hashed & ((1 << 80) - 1) & ~(0xF << 76) & ~(0b11 << 62)
    return UUID(int=head | (FOLLOWING_VERSION << 76) | (0b10 << 62) | tail)
