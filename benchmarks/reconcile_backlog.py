"""The reconciliation of a group that is a million messages behind: it has consumed none of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

from benchmarks import reconcile_ours as ours
from benchmarks.lab import Benchmark, Lab
from benchmarks.measure import Figure, interleave
from benchmarks.reconcile import books_of, place_of, rows_of
from benchmarks.reconcile_arms import Place, opened

_SECONDS, _MEMORY = 60, 1536
_NOBODY = """
TRUNCATE outbox.consumer_message;
UPDATE outbox.consumer_offset SET position = 0
"""


def run(lab: Lab) -> Iterator[Figure]:
    """Compare a full producer with an empty inbox, record included."""
    rows = rows_of(lab, lab.scale(1_000_000, 100_000))
    books = books_of(lab)
    with closing(lab.psycopg("producer")) as connection:
        place = place_of(lab, connection.info.backend_pid)
        books.prepare(rows, int(time.time() * 1000))
        books.fill(1, rows, in_bulk=True)
        with lab.psycopg("consumer") as consumer:
            consumer.execute(_NOBODY)
        books.vacuum()
        yield from _figures(lab, rows, place)
    books.empty()


def _figures(lab: Lab, rows: int, place: Place) -> Iterator[Figure]:
    what = f"{rows / 1e6:g} million messages that no group has consumed"
    with opened({what: ours.behind}, place) as arms:
        (seconds,) = interleave(arms, lab.scale(3, 1)).values()
        (arm,) = arms.values()
        most, peak = max(seconds), max(each.peak for each in arm.rounds)
        yield Figure(what, arm.told(seconds, rows), bar=f"≤ {_SECONDS} s", met=most <= _SECONDS)
        yield Figure("peak memory", f"{peak:,.0f} MiB", bar=f"≤ {_MEMORY:,} MiB", met=peak <= _MEMORY)


BENCHMARK = Benchmark(run, ("producer", "consumer"))
