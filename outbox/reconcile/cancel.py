"""Reads that other threads are at, to be cut short: a query may take minutes, and who gives up doesn't wait for it."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_guard = threading.Lock()
_cursors: dict[int, Any] = {}


@contextmanager
def cancellable(cursor: Any) -> Iterator[None]:
    """Let other threads cancel what this one does with an ADBC cursor in the block."""
    thread = threading.get_ident()
    with _guard:
        _cursors[thread] = cursor
    try:
        yield
    finally:
        # Under the lock, so that nobody cancels a cursor that is being closed.
        with _guard:
            del _cursors[thread]


def cancel(threads: Collection[int]) -> None:
    """Cancel what these threads (by their identifiers) are reading; those that read nothing are left alone."""
    with _guard:
        for thread in threads:
            if (cursor := _cursors.get(thread)) is not None:
                with suppress(Exception):  # it has just ended
                    cursor.adbc_cancel()
