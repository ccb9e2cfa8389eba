"""The reconciliation where few or many messages differ, here and there: digests first against reading everything."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing

from benchmarks import reconcile_ours as ours
from benchmarks.lab import Benchmark, Lab
from benchmarks.measure import Figure, Ratio, interleave
from benchmarks.reconcile import DIGESTS, LOCAL, books_of, identical, place_of
from benchmarks.reconcile_arms import Place, opened
from benchmarks.reconcile_fill import Books

#: How many differ in all, and the share of the messages that the last ones fall on. Those of a share that is used twice
#: never meet: 6 and 45,001 have no common divisor.
_COUNTS = ((5, 0), (500, 2), (5_000, 3), (50_000, 0))
#: The larger sizes have so many.
_ONCE = 500
#: How much of the processors' time of reading everything digests may take, and how much memory (MiB).
_MOST, _MEMORY = 1.1, 1536


def run(lab: Lab) -> Iterator[Figure]:
    """Fill both databases, plant differences, and compare after each planting."""
    first, *others = _sizes(lab)
    books = books_of(lab)
    with closing(lab.psycopg("producer")) as connection:
        place = place_of(lab, connection.info.backend_pid)
        yield from _planted(books, place, first, [each for each in _COUNTS if each[0] <= first // 100], lab)
        for rows in others:
            yield from _planted(books, place, rows, [(_ONCE, 0)], lab)


def _sizes(lab: Lab) -> list[int]:
    """Return the rows a side: OUTBOX_BENCH_SIZES in millions, separated by commas; or 5 and 20."""
    if lab.quick:
        return [100_000]
    return [int(float(each) * 1e6) for each in os.environ.get("OUTBOX_BENCH_SIZES", "5,20").split(",")]


def _planted(books: Books, place: Place, rows: int, counts: Sequence[tuple[int, int]], lab: Lab) -> Iterator[Figure]:
    books.prepare(rows, int(time.time() * 1000))
    books.fill(1, rows, in_bulk=True)
    planted = 0
    for count, share in counts:
        books.plant(count - planted, 1, rows - 4, share)
        books.vacuum()
        planted = count
        yield from _compared(place, rows, planted, lab.scale(3, 1))
    books.empty()


def _compared(place: Place, rows: int, planted: int, rounds: int) -> Iterator[Figure]:
    where = f"{rows / 1e6:g} million rows a side, {planted:,} differ"
    with opened({LOCAL: ours.full, DIGESTS: ours.digests}, place) as arms:
        seconds = interleave(arms, rounds)
        cpu = {name: [each.cpu for each in arm.rounds[-rounds:]] for name, arm in arms.items()}
        ratio = Ratio.of(cpu[DIGESTS], cpu[LOCAL])
        few, full = (f"{statistics.median(cpu[name]):.1f} s CPU" for name in (DIGESTS, LOCAL))
        yield Figure(f"{where}: {DIGESTS} ÷ {LOCAL}", few, full, ratio, f"≤ {_MOST}", ratio.median <= _MOST)
        for name, arm in arms.items():
            told = f"{arm.told(seconds[name], 2 * rows)}; {arm.rounds[-1].note}"
            peak = max(each.peak for each in arm.rounds)
            yield Figure(f"{where}: {name}", told, bar=f"≤ {_MEMORY:,} MiB", met=peak <= _MEMORY)
        yield identical(arms, planted)


BENCHMARK = Benchmark(run, ("producer", "consumer"))
