"""What a job tells while it works: to a progress bar, a log, or nobody."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Told(Protocol):
    """Somebody who is told how a job goes on. Called from the job's own thread."""

    def stage(self, title: str, total: int | None) -> None:
        """A stage begins; ``total`` is how many steps it has, None if that isn't known."""

    def done(self, steps: int) -> None:
        """So many steps of the stage are done."""

    def say(self, sentence: str) -> None:
        """Something was decided."""


class Interrupted(Exception):
    """Raised by one who is told, to end the job; what was done is in the record, and a job may be run again."""


class Silent:
    """Nobody."""

    def stage(self, title: str, total: int | None) -> None:
        """Say nothing."""

    def done(self, steps: int) -> None:
        """Say nothing."""

    def say(self, sentence: str) -> None:
        """Say nothing."""


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Add the duration of the block to those of the stages, also if it fails."""
    began = time.monotonic()
    try:
        yield
    finally:
        seconds[stage] = seconds.get(stage, 0.0) + time.monotonic() - began
