"""How much of what is drawn by chance a run tries: one number for kills, examples, schedules and transfers.

``OUTBOX_TEST_EFFORT`` is 1 on a push and 10 in the night. Each guarantee is tested at least once at any effort.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

#: How much is tried, in multiples of what a push tries.
EFFORT = float(os.environ.get("OUTBOX_TEST_EFFORT", "1"))


def stride(number: int) -> int:
    """Return how many round trips lie between two kills: ``number`` at an effort of 1, and 1 from that effort on."""
    return max(1, round(number / EFFORT))


def tries(number: int) -> int:
    """Return how many kills, examples, schedules or transfers to try, of the ``number`` at an effort of 1."""
    return max(1, round(number * EFFORT))


def sample(values: Iterable[T], number: int) -> list[T]:
    """Return so many of the values at an effort of 1, the first ones, and up to all of them at a higher one."""
    return list(values)[: tries(number)]
