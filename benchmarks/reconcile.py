"""The reconciliation against what a data engineer would write: millions of rows a side, 500 of which differ."""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing

from benchmarks import reconcile_ours as ours
from benchmarks import reconcile_rivals as rivals
from benchmarks.lab import Benchmark, Lab
from benchmarks.measure import Figure, Ratio, interleave
from benchmarks.reconcile_arms import Arm, Make, Place, opened
from benchmarks.reconcile_fill import Books
from outbox.errors import pip_install

DIFFERENCES = 500
SCANNER = "DuckDB's PostgreSQL scanner"
JDBC, BY_HAND = "Spark JDBC join", "Spark JDBC join, queries cut by hand"
SPARK, LOCAL, DIGESTS, SETTLED = (
    "full on Spark",
    "full in this process",
    "digests first",
    "digests, 99 % settled",
)
#: How much of the JDBC join's time ours may take, and how much memory (MiB).
_BARS = {SPARK: 0.65, LOCAL: None, DIGESTS: 0.3, SETTLED: 0.05}
_MEMORY = 1536
#: How much of the scanner's time of all processors they may take.
_CPU_BARS = {LOCAL: 1.0, DIGESTS: 0.7, SETTLED: 0.3}


def run(lab: Lab) -> Iterator[Figure]:
    """Compare, each arm in turn."""
    rows = rows_of(lab, lab.scale(5_000_000, 200_000))
    books = books_of(lab)
    with closing(lab.psycopg("producer")) as connection:
        place = place_of(lab, connection.info.backend_pid)
        books.prepare(rows, int(time.time() * 1000))
        found = fill_a_day(books, place, rows, DIFFERENCES)
        lab.say("reconcile: the inbox into the other database")
        rivals.copy_inbox(place)
        makes, missing = _arms(place)
        with opened(makes, place, {SETTLED: books.recall_settled}) as arms:
            yield from _figures(lab, rows, arms, found)
        yield from missing
    books.empty()


def rows_of(lab: Lab, usual: int) -> int:
    """Return how many rows a side: OUTBOX_BENCH_ROWS, or the usual number."""
    return usual if lab.quick else int(os.environ.get("OUTBOX_BENCH_ROWS", usual))


def books_of(lab: Lab) -> Books:
    """Return the databases of both sides."""
    return Books(lab.psycopg, "producer", "consumer", lambda what: lab.say(f"reconcile: {what}"))


def place_of(lab: Lab, backend: int) -> Place:
    """Return where the arms find all that they need."""
    return Place(lab.urls["producer"], lab.urls["consumer"], rivals.driver_jar(), backend)


def fill_a_day(books: Books, place: Place, rows: int, differences: int) -> int:
    """Write messages of which some differ; when all but the newest hundredth are there, two nights pass.

    Returns how many differences there are then in all.
    """
    old = rows - rows // 100
    late = differences // 100
    books.fill(1, old, in_bulk=True)
    books.plant(differences - late, 1, old, share=0)
    books.vacuum()
    _settle(books, place)
    books.fill(old + 1, rows, in_bulk=False)
    books.plant(late, old + 1, rows, share=0)
    books.vacuum()
    return differences


def _settle(books: Books, place: Place) -> None:
    """Reconcile twice, and remember the ranges settled since: the second night settles more around the differences."""
    books.say("settling")
    with opened({SETTLED: ours.settled}, place) as arms:
        arms[SETTLED]()
        arms[SETTLED]()
    books.remember_settled()


def _arms(place: Place) -> tuple[dict[str, Make], list[Figure]]:
    """Return the arms, and a line for each that can't be run here."""
    makes: dict[str, Make] = {LOCAL: ours.full, DIGESTS: ours.digests, SETTLED: ours.settled}
    makes["FULL OUTER JOIN in one PostgreSQL"] = rivals.one_database
    missing = []
    for name, make, library in (
        (SPARK, ours.full_on_spark, "pyspark"),
        (JDBC, rivals.spark_jdbc, "pyspark"),
        (BY_HAND, rivals.spark_jdbc_by_hand, "pyspark"),
        ("DuckDB over Arrow", rivals.duckdb, "duckdb"),
        (SCANNER, rivals.duckdb_scanner, "duckdb_extension_postgres_scanner"),
        ("Polars over Arrow", rivals.polars, "polars"),
    ):
        if importlib.util.find_spec(library) is None:
            missing.append(Figure(name, f"not measured: {pip_install('bench')} for {library}"))
        elif name in {JDBC, BY_HAND} and place.jar is None:
            missing.append(Figure(name, "not measured: no driver; name its jar in OUTBOX_BENCH_JDBC_JAR"))
        else:
            makes[name] = make
    return makes, missing


def _figures(lab: Lab, rows: int, arms: Mapping[str, Arm], planted: int) -> Iterator[Figure]:
    rounds = lab.scale(3, 2)
    lab.say("reconcile: rounds")
    seconds = interleave(arms, rounds)
    yield from _ratios(f"{rows / 1e6:g} million rows a side, {planted} differ: ", seconds)
    yield from _cpu_ratios(arms, rounds)
    for name, arm in arms.items():
        what = f"{name}: time, rows of both sides a second, time of all processors, peak memory"
        told = arm.told(seconds[name], 2 * rows)
        yield Figure(what, told) if name in _BARS else Figure(what, "", told)
    for name in (SPARK, JDBC, BY_HAND):
        if name in arms:
            first = f"{arms[name].start:.1f} s + {arms[name].rounds[0].seconds:.1f} s"
            yield Figure(f"{name}: start of Spark + first round", *((first, "") if name in _BARS else ("", first)))
    for name in filter(arms.__contains__, _BARS):
        peak = max(each.peak for each in arms[name].rounds)
        yield Figure(f"{name}: peak memory", f"{peak:,.0f} MiB", bar=f"≤ {_MEMORY:,} MiB", met=peak <= _MEMORY)
    yield identical(arms, planted)


def _ratios(where: str, seconds: Mapping[str, Sequence[float]]) -> Iterator[Figure]:
    for rival in (JDBC, BY_HAND):
        for name, most in _BARS.items():
            if name not in seconds or rival not in seconds:
                continue
            ratio = Ratio.of(seconds[name], seconds[rival])
            bar = most if rival == JDBC else None
            yield Figure(
                f"{where}{name} ÷ {rival}",
                f"{statistics.median(seconds[name]):.2f} s",
                f"{statistics.median(seconds[rival]):.2f} s",
                ratio,
                "" if bar is None else f"≤ {bar}",
                None if bar is None else ratio.median <= bar,
            )


def _cpu_ratios(arms: Mapping[str, Arm], rounds: int) -> Iterator[Figure]:
    if SCANNER not in arms:
        return
    cpu = {name: [each.cpu for each in arm.rounds[-rounds:]] for name, arm in arms.items()}
    for name, most in _CPU_BARS.items():
        ratio = Ratio.of(cpu[name], cpu[SCANNER])
        own, theirs = (f"{statistics.median(cpu[each]):.1f} s CPU" for each in (name, SCANNER))
        yield Figure(f"CPU: {name} ÷ {SCANNER}", own, theirs, ratio, f"≤ {most}", ratio.median <= most)


def identical(arms: Mapping[str, Arm], planted: int) -> Figure:
    """Return whether all rounds of all arms found the same differences, and as many as there are."""
    every = [each.found for arm in arms.values() for each in arm.rounds]
    same = all(each == every[0] for each in every) and len(every[0]) == planted
    numbers = "/".join(map(str, sorted({len(each) for each in every})))
    return Figure(
        f"differences found, their ids and kinds identical in {len(every)} rounds of {len(arms)} engines",
        numbers,
        bar=f"{planted}",
        met=same,
    )


BENCHMARK = Benchmark(run, ("producer", "consumer"))
