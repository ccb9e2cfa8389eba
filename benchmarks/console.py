"""The console over millions of messages: what the statements behind each page cost the database."""

from __future__ import annotations

import os
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from sqlalchemy import Engine

from benchmarks.console_cases import Case, cases
from benchmarks.console_fill import fill
from benchmarks.lab import Benchmark, Lab
from benchmarks.measure import Figure
from benchmarks.reconcile_fill import Books
from outbox import Settings
from outbox.database import execute
from outbox.database.dialect import BEGIN, COMMIT, UNPREPARED
from outbox.database.roundtrip import own_cursor
from outbox.operator.operator import Operator
from outbox.worker.report import Facts, report_once

#: The most that a statement behind a page may take (ms).
BAR = 100.0
_ROWS = 5_000_000
_WORKERS = 5
_HANDLERS = 20

#: (SQL, values, ms) of each statement.
Taken = list[tuple[str, Any, float]]


def run(lab: Lab) -> Iterator[Figure]:
    """Fill both databases, call all that the pages call, and tell the slowest statement of each."""
    rows = lab.scale(rows_of(), 20_000)
    books = Books(lab.psycopg, "producer", "consumer", lambda what: lab.say(f"console: {what}"))
    fill(books, rows, int(time.time() * 1000))
    engines = {"bank_a": lab.engine("producer"), "bank_b": lab.engine("consumer")}
    for engine in engines.values():
        report(engine)
    admin = Operator.open(engines, Settings())
    yield Figure(f"over {rows / 1e6:g} million messages, the slowest statement (median) behind each call:", "")
    for case in cases(admin):
        lab.say(f"console: {case.page}: {case.what}")
        yield _figure(case, lab.scale(7, 2))


def rows_of() -> int:
    """Return how many messages: OUTBOX_BENCH_SIZES in millions, the first of them."""
    given = os.environ.get("OUTBOX_BENCH_SIZES")
    return int(float(given.split(",")[0]) * 1e6) if given else _ROWS


def report(engine: Engine) -> None:
    """Have a few workers report, as they do all the time."""
    handlers = [
        {"kind": "consumer", "topic": f"topic-{n}", "group": "mail", "name": f"app.handle_{n}", "options": {"batch": 9}}
        for n in range(_HANDLERS)
    ]
    duties: Mapping[str, Mapping[str, Any]] = {f"duty {n}": {"failures": 0, "last_error": None} for n in range(30)}
    with engine.connect() as connection:
        for number in range(1, _WORKERS + 1):
            facts = Facts(UUID(int=number), f"bench:{number}", "1", ["all"], handlers, duties)
            report_once(connection, Settings(), facts, lambda _: {})


def _figure(case: Case, times: int) -> Figure:
    taken: dict[str, list[float]] = defaultdict(list)
    totals = []
    values: dict[str, Any] = {}
    for number in range(times + 1):
        with timed() as statements:
            case.call()
        if not number:  # it fills caches, and prepares
            continue
        totals.append(sum(took for _, _, took in statements))
        # The same one runs in each database: the slower one counts.
        longest: dict[str, float] = {}
        for sql, given, took in statements:
            if took > longest.get(sql, 0):
                longest[sql], values[sql] = took, given
        for sql, took in longest.items():
            taken[sql].append(took)
    slowest = max(taken, key=lambda sql: statistics.median(taken[sql]))
    median = statistics.median(taken[slowest])
    if median > BAR:
        explain(f"{case.page}: {case.what}", slowest, values[slowest], case.call)
    return Figure(
        f"{case.page}: {case.what}",
        f"{median:.1f} ms, at most {max(taken[slowest]):.1f}",
        f"{of(slowest)}; {len(taken)} statements, {statistics.median(totals):.1f} ms",
        bar=f"≤ {BAR:.0f} ms",
        met=median <= BAR,
    )


def of(sql: str) -> str:
    """Return by which tables one may know a statement."""
    tables = list(dict.fromkeys(re.findall(r'"outbox"\.(\w+)', sql)))
    return ", ".join(tables[:2]) + (", …" if len(tables) > 2 else "") if tables else " ".join(sql.split())[:30]


@contextmanager
def timed() -> Iterator[Taken]:
    """Have each statement take a round trip of its own, and note how long that took; results are the same."""
    taken: Taken = []
    original = execute._run

    def one_by_one(raw: Any, before: Sequence[tuple[Any, str, Any]], trip: Any) -> list[list[Any]]:
        rows = []
        for sql, values in (*(each[1:] for each in before), *trip.statements):
            cursor = own_cursor(raw)
            began = time.perf_counter()
            cursor.execute(sql, values, prepare=sql not in UNPREPARED, binary=True)
            rows.append(cursor.fetchall() if cursor.description else [])
            if sql not in {BEGIN, COMMIT} and "set_config" not in sql:
                taken.append((sql, values, (time.perf_counter() - began) * 1000))
        return rows

    execute._run = one_by_one
    try:
        yield taken
    finally:
        execute._run = original


def explain(name: str, sql: str, values: Any, call: Callable[[], object]) -> None:
    """Show how the database ran a slow statement, where a person looks."""
    original = execute._run

    def explained(raw: Any, before: Sequence[tuple[Any, str, Any]], trip: Any) -> list[list[Any]]:
        for each, given in (*(step[1:] for step in before), *trip.statements):
            if each == sql and given == values and re.match(r"\s*(WITH|SELECT)\b", sql):
                explain = f"EXPLAIN (ANALYZE, BUFFERS) {sql}"
                plan = own_cursor(raw).execute(explain, values, prepare=False).fetchall()
                lines = (line if isinstance(line, str) else bytes(line).decode() for (line,) in plan)
                sys.stderr.write(f"\n{name}\n{sql}\n" + "\n".join(lines) + "\n")
        return original(raw, before, trip)

    execute._run = explained
    try:
        call()
    finally:
        execute._run = original


BENCHMARK = Benchmark(run, ("producer", "consumer"))
