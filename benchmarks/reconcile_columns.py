"""Two business tables compared column by column, of which one row in 10,000 is falsified: ours against reladiff."""

from __future__ import annotations

import importlib
import importlib.util
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

from sqlalchemy import make_url

from benchmarks.lab import Benchmark, Lab
from benchmarks.measure import Figure, Ratio, interleave
from benchmarks.reconcile_arms import NOTES, Arm, Found, Make, Place, opened
from outbox import Settings
from outbox.reconcile.columns import TablesJob
from outbox.reconcile.job import Access

OURS, TOLERANT, RELADIFF = "columns", "columns, floats by a tolerance", "reladiff"
#: How many rows there are for each that is falsified.
_ONE_IN = 10_000
#: How much of reladiff's time ours may take, and how much memory (MiB).
_MOST, _MEMORY = 1.0, 512
_COLUMNS = ("customer", "total", "weight", "placed_at", "state", "note")

_MAKE = """
CREATE TABLE shop_order (id bigint PRIMARY KEY, customer uuid NOT NULL, total numeric(12, 2) NOT NULL,
                         weight double precision, placed_at timestamptz NOT NULL, state text NOT NULL, note text)
"""
_FILL = """
INSERT INTO shop_order
SELECT i, md5(i::text)::uuid, (i %% 100000) / 100.0, sqrt(i), timestamptz '2026-01-01 00:00Z' + i * interval '1 s',
       (array['new', 'paid', 'sent', 'done'])[i %% 4 + 1], CASE WHEN i %% 3 = 0 THEN repeat('x', (i %% 60)::int) END
  FROM generate_series(1, %(rows)s) i
"""
# Of each column some, and a row in eight is gone.
_FALSIFY = """
UPDATE shop_order SET total = total + CASE i %% 4 WHEN 0 THEN 1 ELSE 0 END,
       state = CASE i %% 4 WHEN 1 THEN 'lost' ELSE state END,
       weight = CASE i %% 4 WHEN 2 THEN weight * 2 ELSE weight END, note = CASE i %% 4 WHEN 3 THEN 'y' ELSE note END
  FROM generate_series(1, %(differing)s) i WHERE id = i * %(step)s
"""


def run(lab: Lab) -> Iterator[Figure]:
    """Compare, each arm in turn."""
    rows = lab.scale(int(os.environ.get("OUTBOX_BENCH_ROWS", "5000000")), 200_000)
    differing = rows // _ONE_IN
    for side in ("producer", "consumer"):
        lab.say(f"columns: the {side}'s table")
        with closing(lab.psycopg(side)) as connection:
            connection.execute("DROP TABLE IF EXISTS shop_order")
            connection.execute(_MAKE)
            connection.execute(_FILL, {"rows": rows})
            if side == "consumer":
                connection.execute(_FALSIFY, {"differing": differing, "step": _ONE_IN - 1})
            connection.commit()
            connection.autocommit = True
            connection.execute("VACUUM ANALYZE shop_order")
    makes: dict[str, Make] = {OURS: ours, TOLERANT: tolerant}
    if importlib.util.find_spec(RELADIFF) is None:
        yield Figure(RELADIFF, f"not measured: pip install {RELADIFF}")
    else:
        makes[RELADIFF] = reladiff
    with closing(lab.psycopg("producer")) as connection:
        place = Place(lab.urls["producer"], lab.urls["consumer"], None, connection.info.backend_pid)
        with opened(makes, place) as arms:
            yield from _figures(lab, rows, differing, arms)


def _figures(lab: Lab, rows: int, differing: int, arms: dict[str, Arm]) -> Iterator[Figure]:
    lab.say("columns: rounds")
    seconds = interleave(arms, lab.scale(3, 2))
    where = f"{rows / 1e6:g} million rows a side, {differing} differ"
    for name, arm in arms.items():
        peak = max(each.peak for each in arm.rounds)
        told = f"{arm.told(seconds[name], 2 * rows)}; {arm.rounds[-1].note}"
        yield Figure(f"{where}: {name}", told, bar=f"≤ {_MEMORY:,} MiB", met=peak <= _MEMORY or name == RELADIFF)
    if RELADIFF in arms:
        ratio = Ratio.of(seconds[OURS], seconds[RELADIFF])
        ours_, theirs = (f"{statistics.median(seconds[name]):.2f} s" for name in (OURS, RELADIFF))
        yield Figure(f"{where}: {OURS} ÷ {RELADIFF}", ours_, theirs, ratio, f"≤ {_MOST}", ratio.median <= _MOST)
    found = [each.found for arm in arms.values() for each in arm.rounds]
    same = all(each == found[0] for each in found) and len(found[0]) == differing
    numbers = "/".join(map(str, sorted({len(each) for each in found})))
    yield Figure(f"the keys found, identical in {len(found)} rounds", numbers, bar=f"{differing}", met=same)


def ours(place: Place) -> Callable[[], Found]:
    """Return the comparison of all columns."""
    return partial(_ours, place, ())


def tolerant(place: Place) -> Callable[[], Found]:
    """Return the same with a tolerance for floats."""
    return partial(_ours, place, ("weight=0.001%",))


def _ours(place: Place, tolerances: tuple[str, ...]) -> Found:
    from outbox.reconcile.columns.compare import compare_tables

    left, right = (Access(url, Settings()) for url in (place.producer, place.consumer))
    job = TablesJob(left, right, "shop_order", key=("id",), tolerances=tolerances, sample=1_000_000)
    result = compare_tables(job)
    stages = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in result.seconds.items())
    NOTES.append(f"{result.differing:,} of {result.ranges:,} ranges, {result.rows_read:,} rows read; {stages}")
    return {row["id"].encode(): "differs" for row in result.to_arrow()["key"].to_pylist()}


def reladiff(place: Place) -> Callable[[], Found]:
    """Return reladiff's comparison by hashes, on as many threads as it takes by itself."""
    return partial(_by_reladiff, importlib.import_module(RELADIFF), place)


def _by_reladiff(library: Any, place: Place) -> Found:
    urls = [
        make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
        for url in (place.producer, place.consumer)
    ]
    tables = [library.connect_to_table(url, "shop_order", ("id",), extra_columns=_COLUMNS) for url in urls]
    found = library.diff_tables(*tables, algorithm=library.Algorithm.HASHDIFF)
    return {str(row[0]).encode(): "differs" for _, row in found}


BENCHMARK = Benchmark(run, ("producer", "consumer"))
