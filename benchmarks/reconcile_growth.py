"""How the reconciliation grows: with the rows of a side, and with the differences among five million."""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import closing

from benchmarks import reconcile_ours as ours
from benchmarks import reconcile_rivals as rivals
from benchmarks.lab import Benchmark, Lab
from benchmarks.measure import Figure, interleave
from benchmarks.reconcile import (
    BY_HAND,
    DIFFERENCES,
    DIGESTS,
    LOCAL,
    SETTLED,
    SPARK,
    books_of,
    fill_a_day,
    identical,
    place_of,
)
from benchmarks.reconcile_arms import Arm, Make, Place, opened
from benchmarks.reconcile_fill import Books

#: More differences among the rows of the second size: so many in all, by the share of the messages that they fall on.
_MORE = {2: 5_000, 3: 50_000}


def run(lab: Lab) -> Iterator[Figure]:
    """Fill, compare and empty both databases, once for each size."""
    sizes = _sizes(lab)
    books = books_of(lab)
    with closing(lab.psycopg("producer")) as connection:
        place = place_of(lab, connection.info.backend_pid)
        for number, rows in enumerate(sizes):
            books.prepare(rows, int(time.time() * 1000))
            fill_a_day(books, place, rows, DIFFERENCES)
            yield from _size(books, place, rows)
            if number == 1:
                yield from _differences(books, place, rows)
            books.empty()


def _sizes(lab: Lab) -> list[int]:
    """Return the rows a side: OUTBOX_BENCH_SIZES in millions, separated by commas; or 1, 5 and 20."""
    if lab.quick:
        return [50_000, 200_000]
    return [int(float(each) * 1e6) for each in os.environ.get("OUTBOX_BENCH_SIZES", "1,5,20").split(",")]


def _size(books: Books, place: Place, rows: int) -> Iterator[Figure]:
    makes: dict[str, Make] = {LOCAL: ours.full, DIGESTS: ours.digests, SETTLED: ours.settled}
    if importlib.util.find_spec("pyspark") is not None:
        makes[SPARK] = ours.full_on_spark
        if place.jar is not None:
            makes[BY_HAND] = rivals.spark_jdbc_by_hand
    with opened(makes, place, {SETTLED: books.recall_settled}) as arms:
        yield from _measured(arms, rows, DIFFERENCES)


def _differences(books: Books, place: Place, rows: int) -> Iterator[Figure]:
    planted = DIFFERENCES
    for share, count in _MORE.items():
        if count > rows // 100:  # they would no longer be spread, but fall together
            return
        books.plant(count - planted, 1, rows - 4, share)
        books.vacuum()
        planted = count
        with opened({LOCAL: ours.full, DIGESTS: ours.digests}, place) as arms:
            yield from _measured(arms, rows, planted)


def _measured(arms: dict[str, Arm], rows: int, planted: int) -> Iterator[Figure]:
    seconds = interleave(arms, 1)
    for name, arm in arms.items():
        what = f"{rows / 1e6:g} million rows a side, {planted:,} differ: {name}"
        told = f"{arm.told(seconds[name], 2 * rows)}, {statistics.median(seconds[name]) / rows * 1e6:.2f} µs a message"
        yield Figure(what, told) if name != BY_HAND else Figure(what, "", told)
    yield identical(arms, planted)


BENCHMARK = Benchmark(run, ("producer", "consumer"))
