"""The constants by which a reconciliation is planned, measured: processors' time of digests and of reading, by part."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from typing import Any
from uuid import UUID

from benchmarks.lab import Benchmark, Lab
from benchmarks.measure import Figure, interleave
from benchmarks.reconcile import books_of, place_of, rows_of
from benchmarks.reconcile_arms import AT_END, Found, Place, opened
from benchmarks.reconcile_fill import GROUP, TOPIC
from outbox import Settings
from outbox.reconcile import plan
from outbox.reconcile.digest import PairDigester, ProducerDigests, digested, mixing_of
from outbox.reconcile.job import FIRST_ID, Access, Job, Pair, Range
from outbox.reconcile.pairing import LocalEngine, rules_of, sources
from outbox.reconcile.rows import Comparison
from outbox.reconcile.source import snapshots_of

_WHOLE = [Range(FIRST_ID, None)]
_RANGES = 1_000
#: Rows of a side in the ranges: of two scans, of ranges that are read, and of those that are digested by the indexes.
_FEW, _MANY, _READ, _SMALL, _LARGE = 60, 4_000, 60, 250, 1_000


class _Sides:
    """Both databases, in one snapshot each until the process ends."""

    def __init__(self, place: Place) -> None:
        stack = ExitStack()
        AT_END.append(stack.close)
        settings = Settings()
        self.job = Job(Access(place.producer, settings), Access(place.consumer, settings), (Pair(TOPIC, GROUP),))
        (self.pair,) = self.job.pairs
        self.snapshots = stack.enter_context(snapshots_of(self.job.databases))
        self.size = plan.size_of(self.snapshots)

    def ranges(self, rows: int) -> list[Range]:
        """Return ranges of so many rows of a side, all there are."""
        return plan.cut(_WHOLE, plan.points(self.snapshots, self.size, max(self.size.values()) // rows))

    def some(self, rows: int) -> list[Range]:
        """Return a few of them, here and there."""
        every = self.ranges(rows)
        return sorted(random.Random(rows).sample(every, min(_RANGES, len(every))))


def scan(place: Place, rows: int) -> Callable[[], Found]:
    """Return what digests everything in ranges of so many rows of a side."""
    sides = _Sides(place)
    mixing = mixing_of(sides.snapshots)

    def round_() -> Found:
        pieces = sides.ranges(rows)
        of_producer = ProducerDigests({sides.pair.names: _WHOLE}, [sides.pair], pieces, mixing)
        digested(sides.snapshots, sides.pair, of_producer, UUID(int=0))
        return {}

    return round_


def rescan(place: Place, rows: int) -> Callable[[], Found]:
    """Return what digests some ranges of so many rows of a side, by the indexes."""
    sides = _Sides(place)
    some = sides.some(rows)
    digester = PairDigester(sides.snapshots, sides.pair, mixing_of(sides.snapshots), UUID(int=0))

    def round_() -> Found:
        digester.digest(some, some)
        return {}

    return round_


def read(place: Place, rows: int | None) -> Callable[[], Found]:
    """Return what reads some ranges of so many rows of a side; everything for None."""
    sides = _Sides(place)
    rules = rules_of(sides.job, sides.pair, sides.snapshots)
    comparison = Comparison(*sources(sides.job, sides.pair, snapshots=sides.snapshots), rules)
    if rows is None:
        points = plan.points(sides.snapshots, sides.size, plan.POINTS)
        tasks = plan.few_tasks(plan.weighed(_WHOLE, points, sides.size))
    else:
        tasks = plan.few_tasks([(each, 2 * rows) for each in sides.some(rows)])

    def round_() -> Found:
        for _ in LocalEngine(2).run(comparison, tasks, lambda _: None):
            pass
        return {}

    return round_


def run(lab: Lab) -> Iterator[Figure]:
    """Measure each part by itself, with sides that agree."""
    rows = rows_of(lab, lab.scale(1_000_000, 200_000))
    books = books_of(lab)
    with closing(lab.psycopg("producer")) as connection:
        place = place_of(lab, connection.info.backend_pid)
        books.prepare(rows, int(time.time() * 1000))
        books.fill(1, rows, in_bulk=True)
        books.vacuum()
        yield from _figures(rows, _measured(lab, place))
    books.empty()


def _measured(lab: Lab, place: Place) -> Mapping[str, float]:
    """Return the processors' time of each part, in microseconds."""
    makes: dict[str, Any] = {
        "few": partial(scan, rows=_FEW),
        "many": partial(scan, rows=_MANY),
        "all": partial(read, rows=None),
        "read": partial(read, rows=_READ),
        "small": partial(rescan, rows=_SMALL),
        "large": partial(rescan, rows=_LARGE),
    }
    rounds = lab.scale(5, 1)
    with opened(makes, place) as arms:
        interleave(arms, rounds)
        return {name: statistics.median(each.cpu for each in arm.rounds[-rounds:]) * 1e6 for name, arm in arms.items()}


def _figures(rows: int, micros: Mapping[str, float]) -> Iterator[Figure]:
    few, many = rows / _FEW, rows / _MANY
    bucket = (micros["few"] - micros["many"]) / (few - many)
    scanned = (micros["many"] - bucket * many) / rows
    row = micros["all"] / 2 / rows
    small, large = (min(_RANGES, rows // size) for size in (_SMALL, _LARGE))
    of_small, of_large = micros["small"] / small, micros["large"] / large
    rescanned = (of_large - of_small) / (_LARGE - _SMALL)
    found = {
        "SCANNED": (scanned, "a message digested by a scan of both sides"),
        "BUCKET": (bucket, "a range digested"),
        "ROW": (row, "a row read and judged"),
        "RANGE": (micros["read"] / min(_RANGES, rows // _READ) - 2 * _READ * row, "a range read by itself"),
        "RESCANNED": (rescanned, "a message digested by the indexes"),
    }
    for name, (measured, what) in found.items():
        told = f"{measured:,.1f} µs CPU, in the model {getattr(plan, name):,.1f} µs"
        yield Figure(f"{name}: {what}, of {rows / 1e6:g} million messages", told)


BENCHMARK = Benchmark(run, ("producer", "consumer"))
