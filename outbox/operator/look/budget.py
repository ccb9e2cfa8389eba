"""What a reader may cost: how much a search inflates, for how long, and for whom.

A search through bodies counts what it really does: the bytes that a decompression makes, and seconds. Its rows are
read before that, and their connection is given back, so that inflating and comparing keep none from others.
"""

from __future__ import annotations

import time

from outbox.errors import InvalidMessage
from outbox.message.compression import decompress
from outbox.operator.databases import CALLER

#: The largest body (bytes, as it was sent) that is searched, or shown masked.
LARGEST_BODY = 1024 * 1024
#: How many bytes one page of a search may inflate, and for how long (seconds) it may compare them.
INFLATED_BYTES = 16 * LARGEST_BODY
SECONDS = 2.0


class BodySearch:
    """What one page of a search through bodies may still inflate in one of so many databases, and until when."""

    def __init__(self, databases: int) -> None:
        self._left: int = max(INFLATED_BYTES // databases, LARGEST_BODY)
        self._until: float = time.monotonic() + SECONDS / databases

    @property
    def is_over(self) -> bool:
        """Whether the budget is spent; raises as `Caller.check`."""
        CALLER.get().check()
        return self._left <= 0 or time.monotonic() >= self._until

    def opened(self, stored: bytes, encoding: str | None) -> bytes | None:
        """Return a body as it was sent; None where it can't be read, or is too large to be searched.

        Raises:
            InvalidMessage: it may be larger than the rest of the budget; the next page has a whole one.
        """
        limit = min(LARGEST_BODY, self._left)
        try:
            raw = decompress(stored, encoding, limit)
        except InvalidMessage:
            # So much may have been inflated before it failed.
            self._left -= limit
            if limit < LARGEST_BODY:
                raise
            return None
        self._left -= len(raw)
        return raw
