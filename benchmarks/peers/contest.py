"""A contest: arms that take turns in one process, each with a backlog of its own; what a message costs each of them.

The clock of a machine that others share is noisy, the time of its processors is less so: both are measured.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.measure import Ratio
from benchmarks.usage import ServerProcesses


@dataclass(frozen=True, slots=True)
class Arm:
    """``fill`` makes so many messages wait, which isn't measured; ``handle`` handles just as many."""

    fill: Callable[[int], None]
    handle: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Cost:
    """Messages a second, and what one costs: microseconds of this process and of the whole server."""

    rate: float
    python: float
    server: float

    @property
    def cpu(self) -> float:
        """Microseconds of both."""
        return self.python + self.server


@dataclass(frozen=True, slots=True)
class Costs:
    """The rounds of one arm."""

    rounds: Sequence[Cost]

    @property
    def rates(self) -> list[float]:
        """The rate of each round."""
        return [each.rate for each in self.rounds]

    @property
    def cpus(self) -> list[float]:
        """Microseconds of both, in each round."""
        return [each.cpu for each in self.rounds]

    def __str__(self) -> str:
        python = statistics.median(each.python for each in self.rounds)
        server = statistics.median(each.server for each in self.rounds)
        return f"{statistics.median(self.rates):,.0f}/s ({python:,.0f} + {server:,.0f} µs)"


@dataclass(frozen=True, slots=True)
class Bar:
    """Set the bar to reach: the ratio of an arm to another one, by rate or by the time of processors."""

    what: str
    ours: str
    against: str
    least: float
    by_cpu: bool = False

    def ratio(self, results: Mapping[str, Costs]) -> Ratio | None:
        """Return the ratio, above 1 where ours is better; None if one of the arms isn't there."""
        ours, against = results.get(self.ours), results.get(self.against)
        if ours is None or against is None:
            return None
        return Ratio.of(against.cpus, ours.cpus) if self.by_cpu else Ratio.of(ours.rates, against.rates)


def contest(
    arms: Mapping[str, Arm], messages: int, rounds: int, server: ServerProcesses, say: Callable[[str], None]
) -> dict[str, Costs]:
    """Have each arm handle so many messages, so many times, in turns and in alternating order; the first is warm-up."""
    costs: dict[str, list[Cost]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name in list(arms) if number % 2 else list(arms)[::-1]:
            say(f"round {number} of {rounds}: {name}")
            arms[name].fill(messages)
            cost = measured_cost(partial(arms[name].handle, messages), messages, server)
            if number:
                costs[name].append(cost)
    return {name: Costs(each) for name, each in costs.items()}


def measured_cost(work: Callable[[], object], messages: int, server: ServerProcesses) -> Cost:
    """Return what it costs to do ``work``, which is that of so many messages.

    All begin without garbage: a full collection walks over what the whole process has loaded (60 ms here), and would
    fall on an arm, or on none, by the number of objects that the arms before it have left.
    """
    gc.collect()
    python, of_server, began = time.process_time(), server.seconds, time.perf_counter()
    work()
    seconds, used, of_server = time.perf_counter() - began, time.process_time() - python, server.seconds - of_server
    return Cost(messages / seconds, used / messages * 1e6, of_server / messages * 1e6)
