"""How the reconciliation grows with the rows of a side."""

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


def run(lab: Lab) -> Iterator[Figure]:
    """Fill, compare and empty both databases, once for each size."""
    sizes = _sizes(lab)
    books = books_of(lab)
    with closing(lab.psycopg("producer")) as connection:
        place = place_of(lab, connection.info.backend_pid)
        for rows in sizes:
            books.prepare(rows, int(time.time() * 1000))
            fill_a_day(books, place, rows, DIFFERENCES)
            yield from _size(books, place, rows)
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
        yield from _measured(arms, rows)


def _measured(arms: dict[str, Arm], rows: int) -> Iterator[Figure]:
    seconds = interleave(arms, 1)
    for name, arm in arms.items():
        what = f"{rows / 1e6:g} million rows a side, {DIFFERENCES} differ: {name}"
        told = f"{arm.told(seconds[name], 2 * rows)}, {statistics.median(seconds[name]) / rows * 1e6:.2f} µs a message"
        yield Figure(what, told) if name != BY_HAND else Figure(what, "", told)
    yield identical(arms, DIFFERENCES)


BENCHMARK = Benchmark(run, ("producer", "consumer"))
