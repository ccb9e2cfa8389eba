"""Endurance: minute after minute at a fixed rate, with a short retention, and a snapshot held open in between.

What must not grow: the latency, the passes that find nothing to do, the dead rows that retention leaves, the memory.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context

import psutil
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from benchmarks import bank
from benchmarks.lab import Benchmark, Lab
from benchmarks.latency import Moments, produce
from benchmarks.measure import Figure, Ratio, median_time
from benchmarks.pinned import held_open
from outbox import Message, Outbox, Settings
from outbox.consumer.consumer import Consumer
from outbox.dispatch.dispatch_pass import dispatch_once
from outbox.prune.prune_pass import prune_consumer_once, prune_producer_once
from outbox.worker import Worker

RATE = 800
_PRODUCERS = 2
_GROUP = "endurance"
#: In these minutes a transaction with a snapshot is open.
_HELD = range(3, 7)
_PASSES = 30
_DEADLINE = 120.0
_MOST = 1.5

_SETTINGS = Settings(retention=20.0, inbox_retention=60.0, retry_delays=(1.0,), prune_interval=5.0)
# A worker's own row is dead whenever it gives a sign of life, which has nothing to do with retention.
_STATE = text("""
SELECT sum(n_dead_tup) FILTER (WHERE relname <> 'worker'), sum(pg_total_relation_size(relid)) / 1024 ^ 2
  FROM pg_stat_user_tables WHERE schemaname = 'outbox'
""")


@dataclass(frozen=True, slots=True)
class Minute:
    """Hold the measures of one minute: latencies and passes in milliseconds, sizes in MiB."""

    rate: float
    p99: float
    dispatch: float
    consume: float
    prune: float
    dead: int
    tables: float
    memory: float

    def __str__(self) -> str:
        return (
            f"{self.rate:,.0f}/s, p99 {self.p99:.1f} ms; idle: dispatch {self.dispatch:.2f}, "
            f"consume {self.consume:.2f}, prune {self.prune:.2f} ms; {self.dead:,} dead rows, "
            f"tables {self.tables:,.0f} MiB, worker {self.memory:,.0f} MiB"
        )


def run(lab: Lab) -> Iterator[Figure]:
    """Send, consume and prune; after each minute of it, measure passes with nothing to do."""
    engine, sending = lab.engine("main"), lab.scale(50, 5)
    outbox, started = Outbox(engine, settings=_SETTINGS), Moments()

    @outbox.consumer(bank.TOPIC, group=_GROUP, batch=100)
    def note(message: Message, _session: Session) -> None:
        started[message.id] = time.monotonic()

    minutes: list[Minute] = []
    with ExitStack() as stack:
        stack.enter_context(Worker(outbox))
        passes = stack.enter_context(lab.worker_connection("main"))
        consumer = Consumer(outbox.subscriptions[bank.TOPIC, _GROUP], _SETTINGS, lambda: False)
        held = stack.enter_context(ExitStack())
        for number in range(lab.scale(10, 8)):
            lab.say(f"endurance: minute {number + 1}")
            if number == _HELD.start:
                held.enter_context(held_open(lab.engine("main"), writing=False))
            if number == _HELD.stop:
                held.close()
            started.clear()
            latencies = _latencies(lab.urls["main"], sending, started)
            minutes.append(_measured(engine, passes, consumer, sending, latencies))
            what = f"minute {number + 1}" + (", a snapshot held open" if number in _HELD else "")
            yield Figure(what, str(minutes[-1]))
    first = minutes[0]
    for name, what in (("p99", "p99"), ("consume", "idle consume pass"), ("dispatch", "idle dispatch pass")):
        of_first, worst = getattr(first, name), max(getattr(each, name) for each in minutes)
        ratio = Ratio(worst / of_first, worst / of_first, worst / of_first)
        yield Figure(
            f"{what}: worst minute ÷ first", f"{worst:.2f} ms", f"{of_first:.2f} ms", ratio, f"≤ {_MOST}",
            ratio.median <= _MOST,
        )  # fmt: skip
    worst_dead = max(each.dead for each in minutes)
    yield Figure("dead rows", f"{worst_dead:,}", bar="0", met=worst_dead == 0)


def _latencies(url: str, seconds: int, started: Moments) -> list[float]:
    """Send for so long, wait until all is consumed, and return how long each message took (ms)."""
    count, gap = seconds * RATE // _PRODUCERS, _PRODUCERS / RATE
    begin_at = time.monotonic() + 3  # when all have been imported
    with get_context("spawn").Pool(_PRODUCERS) as pool:
        jobs = [(url, "ours", count, gap, begin_at + number / RATE) for number in range(_PRODUCERS)]
        committed = [each for one in pool.starmap(produce, jobs) for each in one]
    deadline = time.monotonic() + _DEADLINE
    while (missing := sum(id_ not in started for id_, _ in committed)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not missing, f"{missing} messages never arrived"
    return [max(started[id_] - at, 0.0) * 1000 for id_, at in committed if at > begin_at + 0.5]


def _measured(engine: Engine, passes: Connection, consumer: Consumer, seconds: int, latencies: list[float]) -> Minute:
    with engine.connect() as connection:
        ((dead, tables),) = connection.execute(_STATE)

    def prune() -> None:
        prune_producer_once(passes, _SETTINGS)
        prune_consumer_once(passes, passes, _SETTINGS, _GROUP, bank.TOPIC)

    prune()
    return Minute(
        rate=len(latencies) / (seconds - 0.5),
        p99=statistics.quantiles(latencies, n=100, method="inclusive")[98],
        dispatch=median_time(_PASSES, lambda: dispatch_once(passes, _SETTINGS)),
        consume=median_time(_PASSES, lambda: consumer.consume_once(passes, passes)),
        prune=median_time(_PASSES, prune),
        dead=int(dead or 0),
        tables=float(tables or 0),
        memory=psutil.Process(os.getpid()).memory_info().rss / 1024**2,
    )


BENCHMARK = Benchmark(run)
