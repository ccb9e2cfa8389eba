"""Slows down who guesses passwords."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

from outbox.console.problems import Problem


class Throttle:
    """Counts failed logins by who and from where; after ``free`` of them each next one has to wait twice as long.

    At most ``most`` are remembered, those that failed last, each for ``memory`` seconds.
    """

    def __init__(
        self,
        *,
        free: int = 5,
        longest: float = 300.0,
        memory: float = 900.0,
        most: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._free, self._longest, self._memory, self._most, self._clock = free, longest, memory, most, clock
        self._failures: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._failures)

    def check(self, who: Hashable) -> None:
        """Refuse who has to wait.

        Raises:
            Problem: (429) too many logins have failed; ``Retry-After`` says how many seconds are left.
        """
        with self._lock:
            count, last = self._failures.get(who, (0, 0.0))
        left = last + self._wait(count) - self._clock() if count else 0.0
        if left > 0:
            seconds = str(math.ceil(left))
            raise Problem(
                "too-many-attempts",
                f"too many logins have failed; try again in {seconds} s",
                headers={"Retry-After": seconds},
            )

    def failed(self, who: Hashable) -> None:
        """Count a failed login."""
        now = self._clock()
        with self._lock:
            count, last = self._failures.pop(who, (0, now))
            self._failures[who] = (1 if now - last > self._memory else count + 1, now)
            while len(self._failures) > self._most:
                self._failures.popitem(last=False)

    def succeeded(self, who: Hashable) -> None:
        """Forget the failures of somebody who has logged in."""
        with self._lock:
            self._failures.pop(who, None)

    def _wait(self, count: int) -> float:
        return min(2.0 ** min(count - self._free, 30), self._longest) if count >= self._free else 0.0
