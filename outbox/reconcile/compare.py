"""One task of a comparison: read the same ids from both sides, judge them, return what was found.

A task is a value: it goes to a thread of this process or to a Spark executor, and says all that is needed there.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from outbox.reconcile.judge import Both, Rules, judge, lags
from outbox.reconcile.model import FINDING, Outcome, Range
from outbox.reconcile.result import Lag

#: Upper bounds of the lag histogram, in seconds.
LAG_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0)


class Part(enum.IntEnum):
    """What a row of a task's result is."""

    FINDING = 0  # a difference, or a message in flight
    COUNT = 1  # ``number`` messages have this outcome
    LAG = 2  # ``number`` messages are in this place (``sends``) of the lag histogram
    READ = 3  # ``number`` rows were read


#: What a task returns: findings, and counts in the same columns, so that it is one table for every engine.
RESULT = pa.schema([*FINDING, pa.field("part", pa.int8(), nullable=False), pa.field("number", pa.int64())])


class Side(Protocol):
    """One side of a comparison. It can be pickled; it opens what it needs when it reads."""

    def read(self, ranges: Sequence[Range]) -> pa.Table:
        """Return all rows of the ranges, which are in order and don't overlap, sorted by id.

        Raises:
            SourceError: it can't be read; says where and why, and holds no password.
        """
        ...


@dataclass(frozen=True, slots=True)
class Task:
    """Ranges of ids to compare; ``number`` names the task."""

    number: int
    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What to do with a task. ``producer`` reads rows of `rows.PRODUCER`, ``consumer`` those of `rows.CONSUMER`."""

    producer: Side
    consumer: Side
    rules: Rules

    def __call__(self, task: Task) -> pa.Table:
        """Return the result of one task (`RESULT`)."""
        return compared(self.producer.read(task.ranges), self.consumer.read(task.ranges), self.rules)


def compared(producer: pa.Table, consumer: pa.Table, rules: Rules) -> pa.Table:
    """Judge the rows of the same ids; return findings and counts (`RESULT`)."""
    both = Both(producer, consumer)
    counts, findings = judge(both, rules)
    places, lagged = np.unique(np.searchsorted(LAG_BOUNDS, lags(both)), return_counts=True)
    rows = findings.num_rows
    return pa.concat_tables(
        [
            findings.append_column(RESULT.field("part"), pa.array(np.full(rows, Part.FINDING, "i1"))).append_column(
                RESULT.field("number"), pa.nulls(rows, pa.int64())
            ),
            _numbers(Part.COUNT, "outcome", {int(outcome): number for outcome, number in counts.items()}),
            _numbers(Part.LAG, "sends", dict(zip(places.tolist(), lagged.tolist(), strict=True))),
            _numbers(Part.READ, "sends", {0: producer.num_rows + consumer.num_rows}),
        ]
    )


def _numbers(part: Part, column: str, numbers: dict[int, int]) -> pa.Table:
    rows: list[dict[str, Any]] = [
        {"id": bytes(16), "outcome": 0, "part": int(part), "number": number, column: place}
        for place, number in numbers.items()
    ]
    return pa.Table.from_pylist(rows, schema=RESULT)


@dataclass(slots=True)
class Collected:
    """The results of many tasks."""

    counts: Counter[Outcome]
    findings: list[pa.Table]
    lags: Counter[int]
    rows_read: int = 0

    @classmethod
    def empty(cls) -> Collected:
        """Return nothing."""
        return cls(Counter(), [], Counter())

    def add(self, result: pa.Table) -> None:
        """Add the result of one task, or of several."""
        parts = result["part"].to_numpy()
        findings = result.filter(pa.array(parts == Part.FINDING))
        if findings.num_rows:
            self.findings.append(findings.select(FINDING.names))
        for row in (
            result.filter(pa.array(parts != Part.FINDING)).select(["part", "outcome", "sends", "number"]).to_pylist()
        ):
            match Part(row["part"]):
                case Part.COUNT:
                    self.counts[Outcome(row["outcome"])] += row["number"]
                case Part.LAG:
                    self.lags[row["sends"]] += row["number"]
                case Part.READ:
                    self.rows_read += row["number"]

    def lag(self, *, sampled: bool) -> Lag | None:
        """Return the histogram of the lags; None if none was measured."""
        if not self.lags:
            return None
        return Lag(LAG_BOUNDS, tuple(self.lags[place] for place in range(len(LAG_BOUNDS) + 1)), sampled)

    @property
    def table(self) -> pa.Table:
        """All findings, sorted by id."""
        return pa.concat_tables([FINDING.empty_table(), *self.findings]).sort_by("id")
