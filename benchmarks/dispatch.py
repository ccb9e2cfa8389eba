"""Dispatch: from committed ops to messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, text

from benchmarks import fill, handmade
from benchmarks.lab import Benchmark, Lab, backend_pid
from benchmarks.measure import (
    Figure,
    Ratio,
    at_least,
    compared,
    interleave,
    median_time,
    milliseconds,
    rate,
    server_seconds,
)
from benchmarks.pinned import held_open
from outbox import Settings
from outbox.dispatch.dispatch_pass import dispatch_once

TOPIC = "transfer"

# The same rows, table, indexes and order, and nothing else: what any dispatcher has to do.
_COPY_TABLE = "CREATE TABLE copied (LIKE outbox.message INCLUDING ALL)"
_COPY = """
INSERT INTO copied (topic, queue, position, half_id, send_number)
SELECT h.topic, hashtextextended(h.key, 0) & 7,
       row_number() OVER (PARTITION BY h.topic, hashtextextended(h.key, 0) & 7 ORDER BY o.sequence), h.id, 1
  FROM outbox.op_message o JOIN outbox.half_message h ON h.id = o.half_id
 WHERE o.sequence > %s
"""


@dataclass(slots=True)
class _OneCore:
    """Rates by the CPU time of one server process instead of by the clock."""

    pid: int
    count: int
    rates: list[float] = field(default_factory=list)

    @contextmanager
    def measured(self) -> Iterator[None]:
        before = server_seconds(self.pid)
        yield
        after = server_seconds(self.pid)
        if before is not None and after is not None:
            self.rates.append(self.count / max(after - before, 0.01))


def run(lab: Lab) -> Iterator[Figure]:
    """Measure a backlog, then the passes of every day over a large table of dispatched messages."""
    settings = Settings()
    engine, queue = lab.engine("main"), lab.psycopg("main")
    handmade.create(engine)
    queue.execute(_COPY_TABLE)
    queue.commit()
    with lab.worker_connection("main") as connection:
        yield from _backlog(lab, engine, connection, queue, settings)
        lab.say("dispatch: filling")
        while _dispatched(connection) < lab.scale(1_000_000, 20_000):
            fill.backlog(engine, TOPIC, lab.scale(100_000, 20_000))
            fill.dispatch_all(connection, settings)
        fill.vacuum(engine)
        total = f"{_dispatched(connection) / 1e6:.1f} million dispatched"
        yield _idle(lab, connection, settings, f"idle pass, {total}")
        yield _small(lab, engine, connection, settings, f"pass with 100 new, {total}")
        with held_open(lab.engine("main"), writing=True):
            yield _idle(lab, connection, settings, "idle pass, transaction held open")
            yield _small(lab, engine, connection, settings, "pass with 100 new, transaction held open")
            fill.backlog(engine, TOPIC, lab.scale(100_000, 10_000))
            speed = rate(lab.scale(100_000, 10_000), partial(fill.dispatch_all, connection, settings))
            yield at_least("backlog, transaction held open", "messages", [speed], 100_000)


def _backlog(
    lab: Lab, engine: Engine, connection: Connection, queue: psycopg.Connection[Any], settings: Settings
) -> Iterator[Figure]:
    count, rounds = lab.scale(200_000, 20_000), lab.scale(5, 2)
    cpu = _OneCore(backend_pid(connection), count)

    def ours() -> float:
        lab.say("dispatch: backlog")
        fill.backlog(engine, TOPIC, count)
        with cpu.measured():
            return rate(count, partial(fill.dispatch_all, connection, settings))

    def take_loop() -> float:
        lab.say("dispatch: hand-written queue")
        queue.execute(handmade.FILL, (count,))
        queue.commit()
        return rate(count, partial(_take_all, queue))

    def copy() -> float:
        lab.say("dispatch: INSERT … SELECT")
        queue.execute("TRUNCATE copied")
        queue.commit()
        ((last,),) = queue.execute("SELECT max(sequence) FROM outbox.op_message").fetchall()
        return rate(count, partial(_copy, queue, last - count))

    results = interleave({"ours": ours, "copy": copy, "queue": take_loop}, rounds, warm_up=0)
    what = f"backlog of {count:,}"
    yield at_least(f"{what}, by the clock", "messages", results["ours"], 100_000)
    if cpu.rates:
        yield at_least(f"{what}, by CPU time of the server process", "messages", cpu.rates, 100_000)
    yield compared(what, "messages", results["ours"], "INSERT … SELECT of the same rows", results["copy"], None)
    yield compared(what, "messages", results["ours"], "hand-written queue, 1000 at a time", results["queue"], None)


def _copy(queue: psycopg.Connection[Any], after: int) -> None:
    queue.execute(_COPY, (after,))
    queue.commit()


def _take_all(queue: psycopg.Connection[Any]) -> None:
    while queue.execute(handmade.TAKE, (1000,)).fetchall():
        queue.commit()
    queue.commit()


def _idle(lab: Lab, connection: Connection, settings: Settings, what: str) -> Figure:
    def nothing() -> None:
        with connection.begin():
            connection.exec_driver_sql("SELECT 1")

    times = lab.scale(50, 20)
    results = interleave(
        {
            "ours": lambda: median_time(times, partial(dispatch_once, connection, settings)),
            "bare": lambda: median_time(times, nothing),
        },
        lab.scale(11, 3),
    )
    return _pass(f"{what} ÷ transaction with SELECT 1", results["ours"], results["bare"], 2.0)


def _small(lab: Lab, engine: Engine, connection: Connection, settings: Settings, what: str) -> Figure:
    durations = []
    for _ in range(lab.scale(30, 5)):
        fill.backlog(engine, TOPIC, 100)
        durations.append(median_time(1, partial(dispatch_once, connection, settings)))
    return Figure(what, milliseconds(durations))


def _pass(what: str, ours: list[float], bare: list[float], bar: float) -> Figure:
    middle = milliseconds(ours)
    met = float(middle.split()[0]) <= bar
    return Figure(what, middle, milliseconds(bare), Ratio.of(ours, bare), f"≤ {bar:.0f} ms", met)


def _dispatched(connection: Connection) -> int:
    with connection.begin():
        return int(connection.scalar(text("SELECT count(*) FROM outbox.message")) or 0)


BENCHMARK = Benchmark(run)
