"""What compares two sides in the benchmarks of the reconciliation: each in a process of its own, kept for all rounds.

So that Java's start, imports and what memory one of them keeps don't count for another.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from benchmarks.usage import Usage

#: The differences: the label of each, by its id.
Found = Mapping[bytes, str]


@dataclass(frozen=True, slots=True)
class Place:
    """The databases, Spark's driver for them, and the process of the server behind a connection that stays open."""

    producer: str
    consumer: str
    jar: str | None
    backend: int


#: Makes what runs once a round, in the process that runs it.
Make = Callable[[Place], Callable[[], Found]]


@dataclass(frozen=True, slots=True)
class Round:
    """One round: how long it took, the time of all processors (seconds), the peak of the memory (MiB), the finds.

    ``note`` is what the arm says of it.
    """

    seconds: float
    cpu: float
    peak: float
    found: Found
    note: str


class Arm:
    """One of them. ``make`` is a function of a module, called in the new process; ``before`` runs ahead of a round."""

    def __init__(self, make: Make, place: Place, before: Callable[[], object] | None = None) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        self._backend, self._before = place.backend, before
        self._pid, self.start = self._pool.submit(_start, make, place).result()
        self.rounds: list[Round] = []

    def __call__(self) -> float:
        """Run a round; return how long it took (seconds)."""
        if self._before is not None:
            self._before()
        self._pool.submit(_ahead).result()
        with Usage(self._pid, self._backend) as usage:
            seconds, found, note = self._pool.submit(_round).result()
        self.rounds.append(Round(seconds, usage.cpu, usage.peak, found, note))
        return seconds

    def told(self, seconds: Sequence[float], rows: int) -> str:
        """Return time, rows per second, processor time and peak memory; ``seconds`` are of the rounds that count."""
        middle = statistics.median(seconds)
        cpu = statistics.median(each.cpu for each in self.rounds[-len(seconds) :])
        peak = max(each.peak for each in self.rounds)
        return f"{middle:.2f} s, {rows / middle:,.0f} rows/s, {cpu:.1f} s CPU, {peak:,.0f} MiB"

    def close(self) -> None:
        """End the process, and what it has started."""
        self._pool.submit(_end).result()
        self._pool.shutdown()


@contextmanager
def opened(
    makes: Mapping[str, Make], place: Place, before: Mapping[str, Callable[[], object]] | None = None
) -> Iterator[dict[str, Arm]]:
    """Start arms; they end with the block."""
    arms: dict[str, Arm] = {}
    try:
        for name, make in makes.items():
            arms[name] = Arm(make, place, (before or {}).get(name))
        yield arms
    finally:
        for arm in arms.values():
            arm.close()


#: What an arm does ahead of each round, and at the end of its process.
AHEAD: list[Callable[[], object]] = []
AT_END: list[Callable[[], object]] = []
#: What an arm has to say of the round that it has just run.
NOTES: list[str] = []
_here: list[Any] = []


def _start(make: Make, place: Place) -> tuple[int, float]:
    began = time.perf_counter()
    _here.append(make(place))
    return os.getpid(), time.perf_counter() - began


def _ahead() -> None:
    for each in AHEAD:
        each()


def _round() -> tuple[float, Found, str]:
    NOTES.clear()
    began = time.perf_counter()
    found = _here[0]()
    return time.perf_counter() - began, found, "; ".join(NOTES)


def _end() -> None:
    for end in AT_END:
        end()
