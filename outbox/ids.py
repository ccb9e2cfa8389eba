"""Ids made by the client: UUIDv7 (RFC 9562), so that ids of later messages sort later."""

from __future__ import annotations

import os
import threading
import time
from uuid import UUID

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


def _forget_after_fork() -> None:
    """A forked child must not continue its parent's counter in the same millisecond."""
    global _lock, _counter  # noqa: PLW0603
    _lock = threading.Lock()
    _counter = int.from_bytes(os.urandom(3), "big")


os.register_at_fork(after_in_child=_forget_after_fork)
