"""Acts that run at the same time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tests.kit.waiting import PATIENCE

T = TypeVar("T")


def at_once(*acts: Callable[[], T]) -> list[T]:
    """Do acts in a thread each; return what they return, in their order, or raise what the first of them raises."""
    with ThreadPoolExecutor(len(acts)) as pool:
        running = [pool.submit(act) for act in acts]
        return [each.result(PATIENCE) for each in running]
