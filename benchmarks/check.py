"""The check: passes over many decided halves, and orphans decided by their fence or by a checker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from threading import Event

from sqlalchemy import Connection, Engine, TextClause, text

from benchmarks import fill
from benchmarks.lab import Benchmark, Lab
from benchmarks.measure import Figure, Ratio, interleave, median_time, milliseconds, rate
from benchmarks.pinned import held_open
from outbox import Orphan, Outbox, Resolution, Settings
from outbox.check.asker import Asker
from outbox.check.check_pass import check_once
from outbox.worker.connections import Runners, WorkerDatabase

_TOGETHER = 100_000

# Halves that were prepared and decided, as they are after a vacuum: the check row is gone with the decision.
_DECIDED = text(
    fill.GIVEN
    + """, half AS (
    INSERT INTO outbox.half_message (id, producer_group, topic, key, content_type, body)
    SELECT id, 'default', 'decided', 'account-' || n % 10000, 'application/json',
           convert_to('{"transfer_id": ' || n || '}', 'UTF8')
      FROM given ORDER BY n
)
INSERT INTO outbox.op_message (half_id, resolution, decided_by)
SELECT id, CASE WHEN n % 10 = 0 THEN 'rollback' ELSE 'commit' END, 'producer' FROM given ORDER BY n
"""
)

# Halves whose function died under its fence, or before it.
_ORPHANS = text("""
WITH given AS MATERIALIZED (
    SELECT gen_random_uuid() AS id, n FROM generate_series(1, CAST(:count AS int)) n
), half AS (
    INSERT INTO outbox.half_message (id, producer_group, topic, content_type, body)
    SELECT id, 'default', :topic, 'application/json', convert_to('{"n": ' || n || '}', 'UTF8') FROM given
)
INSERT INTO outbox.half_check (half_id, topic, fenced, next_check_at)
SELECT id, :topic, :fenced, clock_timestamp() - interval '1 second' FROM given
""")

# The same rows in one statement: what it costs PostgreSQL to decide them, without asking a checker.
_BY_HAND = text("""
WITH orphan AS (DELETE FROM outbox.half_check WHERE fenced RETURNING half_id)
INSERT INTO outbox.op_message (half_id, resolution, decided_by) SELECT half_id, 'rollback', 'check' FROM orphan
""")

# Prepared and decided within a moment: each leaves a dead row behind, which vacuum can't take while a snapshot is open.
_PASSED_BY = text("DELETE FROM outbox.half_check WHERE topic = 'passed'")


def run(lab: Lab) -> Iterator[Figure]:
    """Measure orphans first, then the passes that find nothing, over a table that has grown."""
    engine = lab.engine("main")
    outbox = Outbox(engine, settings=Settings(check_time_limit=3600.0))
    _register(outbox)
    with lab.worker_connection("main") as connection, closing(_Pass(connection, outbox)) as one_pass:
        yield from _fences(lab, engine, one_pass)
        yield from _checkers(lab, engine, one_pass)
        count = lab.scale(10_000_000, 100_000)
        _fill(lab, engine, count)
        what = f"{count / 1e6:g} million decided halves"
        yield _idle(lab, connection, one_pass, f"pass with nothing to do, {what}")
        yield _few(lab, engine, one_pass, f"pass that decides 10 orphans by their fence, {what}")
        with held_open(lab.engine("main"), writing=True):
            decided = lab.scale(200_000, 10_000)
            _orphans(engine, decided, "passed", fenced=False)
            _execute(engine, _PASSED_BY)
            what = f"{decided:,} more decided since a transaction began that is still open"
            yield _idle(lab, connection, one_pass, f"pass with nothing to do, {what}", bar=None)


class _Pass:
    """A worker's check pass."""

    def __init__(self, connection: Connection, outbox: Outbox) -> None:
        self._connection = connection
        self._outbox = outbox
        self._asker = Asker(Runners(WorkerDatabase(outbox.engine), Event()), outbox.settings.checks_in_flight)

    def __call__(self) -> int:
        """Run one; return how many halves it decided."""
        counts = check_once(self._connection, self._outbox.settings, self._outbox.checkers, self._asker)
        return counts.done

    def close(self) -> None:
        self._asker.end()


def _register(outbox: Outbox) -> None:
    @outbox.checker("with_session")
    def with_session(_: Orphan, __: object) -> Resolution:
        return Resolution.ROLLBACK

    @outbox.checker("without_session")
    def without_session(_: Orphan) -> Resolution:
        return Resolution.ROLLBACK


def _fences(lab: Lab, engine: Engine, one_pass: _Pass) -> Iterator[Figure]:
    count, rounds = lab.scale(100_000, 5_000), lab.scale(3, 2)
    seconds: list[float] = []

    def ours() -> float:
        lab.say("check: orphans by their fence")
        _orphans(engine, count, "fenced", fenced=True)
        began = time.perf_counter()
        assert one_pass() == count
        seconds.append(time.perf_counter() - began)
        return count / seconds[-1]

    def by_hand() -> float:
        lab.say("check: orphans by hand")
        _orphans(engine, count, "fenced", fenced=True)
        return rate(count, partial(_execute, engine, _BY_HAND))

    results = interleave({"ours": ours, "by hand": by_hand}, rounds, warm_up=0)
    middle = sorted(seconds)[len(seconds) // 2]
    ratio = Ratio.of(results["ours"], results["by hand"])
    baseline = f"{sorted(count / each for each in results['by hand'])[rounds // 2]:.2f} s"
    what = f"{count:,} orphans decided by their fence ÷ DELETE and INSERT in one statement"
    yield Figure(what, f"{middle:.2f} s", baseline, ratio, "≤ 30 s", middle <= 30)


def _checkers(lab: Lab, engine: Engine, one_pass: _Pass) -> Iterator[Figure]:
    count = lab.scale(5_000, 500)
    for topic, how in (("with_session", "with a session"), ("without_session", "without a session")):
        lab.say(f"check: orphans by a checker {how}")
        speeds = []
        for _ in range(lab.scale(3, 1)):
            _orphans(engine, count, topic, fenced=False)
            speeds.append(rate(count, one_pass))
        yield Figure(f"orphans decided by a no-op checker {how}", f"{sorted(speeds)[len(speeds) // 2]:,.0f}/s")


def _fill(lab: Lab, engine: Engine, count: int) -> None:
    for first in range(1, count + 1, _TOGETHER):
        lab.say(f"check: filling, {first:,} of {count:,}")
        with engine.begin() as connection:
            connection.execute(_DECIDED, {"first": first, "last": min(first + _TOGETHER - 1, count)})
    lab.say("check: vacuum")
    fill.vacuum(engine)


def _idle(lab: Lab, connection: Connection, one_pass: Callable[[], int], what: str, bar: float | None = 20.0) -> Figure:
    def nothing() -> None:
        with connection.begin():
            connection.exec_driver_sql("SELECT 1")

    times = lab.scale(50, 20)
    results = interleave(
        {"ours": lambda: median_time(times, one_pass), "bare": lambda: median_time(times, nothing)}, lab.scale(11, 3)
    )
    middle = milliseconds(results["ours"])
    return Figure(
        f"{what} ÷ transaction with SELECT 1",
        middle,
        milliseconds(results["bare"]),
        Ratio.of(results["ours"], results["bare"]),
        f"≤ {bar:.0f} ms" if bar else "",
        float(middle.split()[0]) <= bar if bar else None,
    )


def _few(lab: Lab, engine: Engine, one_pass: Callable[[], int], what: str) -> Figure:
    durations = []
    for _ in range(lab.scale(30, 5)):
        _orphans(engine, 10, "fenced", fenced=True)
        durations.append(median_time(1, one_pass))
    middle = milliseconds(durations)
    return Figure(what, middle, bar="≤ 20 ms", met=float(middle.split()[0]) <= 20)


def _orphans(engine: Engine, count: int, topic: str, *, fenced: bool) -> None:
    with engine.begin() as connection:
        connection.execute(_ORPHANS, {"count": count, "topic": topic, "fenced": fenced})


def _execute(engine: Engine, statement: TextClause) -> None:
    with engine.begin() as connection:
        connection.execute(statement)


BENCHMARK = Benchmark(run)
