"""How long to wait before the next try."""

from __future__ import annotations

import random


def jittered(wait: float, jitter: float = 0.1) -> float:
    """Return a wait (seconds) made up to ``jitter`` (a fraction) shorter or longer, at random."""
    return wait * random.uniform(1 - jitter, 1 + jitter)  # noqa: S311


class Backoff:
    """Waits in seconds that double from ``first`` to ``cap``, each shortened by up to half at random.

    The randomness keeps all duties of all workers from coming back in the same moment. Not thread-safe.
    """

    def __init__(self, first: float, cap: float, *, jitter: float = 0.5) -> None:
        self._first = min(first, cap)
        self._cap = cap
        self._jitter = jitter
        self._next = self._first

    def next(self) -> float:
        """Return the next wait."""
        wait, self._next = self._next, min(self._next * 2, self._cap)
        return wait * random.uniform(1 - self._jitter, 1)  # noqa: S311

    def reset(self) -> None:
        """Begin with the first wait again."""
        self._next = self._first
