"""Rounds of ours and its baselines, interleaved, and the report about them.

What disturbs a machine lasts longer than a round. So the arms take turns in short rounds, in alternating order, and
the ratio is taken round by round: a disturbance hits both sides of a ratio or is outvoted by the median.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

#: One round of one arm; returns its rate (or its time) in the unit of the benchmark.
Arm = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of the rounds' ratios, and the middle half of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ours: Sequence[float], baseline: Sequence[float]) -> Ratio:
        """Return the ratio of two series that were measured round by round."""
        ratios = [a / b for a, b in zip(ours, baseline, strict=True)]
        if len(ratios) < 3:
            return cls(statistics.median(ratios), min(ratios), max(ratios))
        low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table. ``met`` is None where there is no bar, and the line is there for scale."""

    what: str
    ours: str
    baseline: str = ""
    ratio: Ratio | None = None
    bar: str = ""
    met: bool | None = None


def interleave(arms: Mapping[str, Arm], rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Run all arms ``rounds`` times, forwards and backwards in turn; the warm-up rounds are not counted."""
    results: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(-warm_up, rounds):
        order = list(arms) if number % 2 == 0 else list(arms)[::-1]
        for name in order:
            value = arms[name]()
            if number >= 0:
                results[name].append(value)
    return results


def rate(count: int, work: Callable[[], object]) -> float:
    """Return how many per second, where ``work`` does ``count``."""
    began = time.perf_counter()
    work()
    return count / (time.perf_counter() - began)


def median_time(times: int, work: Callable[[], object]) -> float:
    """Return the median duration of ``work`` in milliseconds."""
    durations = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        durations.append(time.perf_counter() - began)
    return statistics.median(durations) * 1000


def per_second(values: Sequence[float]) -> str:
    """Return the median of rates as text."""
    return f"{statistics.median(values):,.0f}/s"


def milliseconds(values: Sequence[float]) -> str:
    """Return the median of times as text."""
    return f"{statistics.median(values):.2f} ms"


def compared(
    what: str, unit: str, ours: Sequence[float], against: str, baseline: Sequence[float], bar: float | None
) -> Figure:
    """Return the figure of a rate that should be at least ``bar`` times that of a baseline."""
    ratio = Ratio.of(ours, baseline)
    return Figure(
        f"{what} ÷ {against}",
        f"{per_second(ours)} {unit}",
        per_second(baseline),
        ratio,
        "" if bar is None else f"≥ {bar:.2f}",
        None if bar is None else ratio.median >= bar,
    )


def at_least(what: str, unit: str, ours: Sequence[float], bar: float) -> Figure:
    """Return the figure of a rate that has an absolute bar."""
    return Figure(what, f"{per_second(ours)} {unit}", bar=f"≥ {bar:,.0f}/s", met=statistics.median(ours) >= bar)


def server_seconds(pid: int) -> float | None:
    """Return the CPU seconds a server process has used; None if it doesn't run on this machine."""
    try:
        # Fields 14 and 15, counted behind the name, which may contain spaces.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
