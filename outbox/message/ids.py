"""Ids of messages: drawn by the client (UUIDv7 of RFC 9562), of a business string, or following from another id.

Ids that are drawn later sort later.
"""

from __future__ import annotations

import os
import threading
import time
from hashlib import blake2b
from typing import Any
from uuid import UUID, uuid5

from outbox.message.topic import Topic

_VERSION_AND_VARIANT = (7 << 76) | (0b10 << 62)
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
        | _VERSION_AND_VARIANT
        | ((counter >> 30) << 64)
        | ((counter & 0x3FFF_FFFF) << 32)
        | (random & 0xFFFF_FFFF)
    )


def uuid7_at(unix_seconds: float) -> UUID:
    """Return the smallest UUIDv7 of a moment: a bound for ranges over ids."""
    return UUID(int=(int(unix_seconds * 1000) << 80) | _VERSION_AND_VARIANT)


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


def _forget_after_fork() -> None:
    """A forked child must not continue its parent's counter in the same millisecond."""
    global _lock, _counter  # noqa: PLW0603 - the state of the process's ids
    _lock = threading.Lock()
    _counter = int.from_bytes(os.urandom(3), "big")


os.register_at_fork(after_in_child=_forget_after_fork)
