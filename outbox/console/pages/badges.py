"""The numbers in the navigation: what waits for a human; counted every few seconds, however many pages are read."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from sqlalchemy.exc import SQLAlchemyError

from outbox.admin.model import HalfFilter, PageRequest, Total
from outbox.errors import OutboxError

if TYPE_CHECKING:
    from outbox.console.console import Console

_log = logging.getLogger("outbox.console")

#: How long (seconds) the numbers are good.
GOOD_FOR = 10.0
_LIMIT = 500


class Badges:
    """Keeps the numbers for one console."""

    def __init__(self, good_for: float = GOOD_FOR) -> None:
        self._good_for = good_for
        self._numbers: dict[str, Total] = {}
        self._until = 0.0
        self._lock = threading.Lock()

    def now(self, console: Console) -> dict[str, Total]:
        """Return the numbers by the names of pages; a page must not fail because they can't be had."""
        with self._lock:
            if time.monotonic() < self._until:
                return self._numbers
            self._until = time.monotonic() + self._good_for
        try:
            self._numbers = _count(console)
        except (OutboxError, SQLAlchemyError) as error:
            _log.warning("the numbers in the navigation can't be counted: %s", type(error).__name__)
            self._numbers = {}
        return self._numbers

    def forget(self) -> None:
        """Count anew at the next page, after somebody has acted."""
        self._until = 0.0


def _count(console: Console) -> dict[str, Total]:
    groups = console.admin.dead_groups(limit=_LIMIT)
    dead = sum(group.count.value for group in groups)
    more = len(groups) == _LIMIT or any(group.count.relation == "gte" for group in groups)
    parked = console.admin.halves(HalfFilter(status="parked"), PageRequest(size=1)).total
    numbers = {"dead": Total(dead, "gte" if more else "eq")}
    return numbers | ({"halves": parked} if parked is not None else {})
