"""Latency: from the commit to the start of the handler, at a fixed rate, with the real worker."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from typing import Any
from uuid import UUID

from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session

from benchmarks import bank, handmade
from benchmarks.lab import Benchmark, Lab
from benchmarks.measure import Figure, Ratio
from outbox import Message, Outbox, Settings
from outbox.worker import Worker

RATE = 500
_PRODUCERS = 2
_POLL = 0.010
_DEADLINE = 30.0

#: Message id to the moment (`time.monotonic`, the same clock in all processes of a machine).
Moments = dict[UUID, float]


def run(lab: Lab) -> Iterator[Figure]:
    """Measure in turns with a hand-written poller; each turn has producers of its own."""
    seconds = lab.scale(6, 2)
    engine = lab.engine("main")
    handmade.create(engine)
    ours: list[list[float]] = []
    hand: list[list[float]] = []
    for number in range(lab.scale(4, 1)):
        lab.say(f"latency: round {number + 1}")
        ours.append(_latencies(lab.urls["main"], seconds, "ours", _with_worker(engine, f"group-{number}")))
        hand.append(_latencies(lab.urls["main"], seconds, "hand", _with_poller(engine)))
    for name, percent, bar in (("p50", 50, 5), ("p99", 99, 25)):
        mine = [_percentile(each, percent) for each in ours]
        theirs = [_percentile(each, percent) for each in hand]
        yield Figure(
            f"{name} at {RATE} messages/s ÷ hand-written poller, each {_POLL * 1000:.0f} ms",
            f"{statistics.median(mine):.1f} ms",
            f"{statistics.median(theirs):.1f} ms",
            Ratio.of(mine, theirs),
            f"≤ {bar} ms",
            statistics.median(mine) <= bar,
        )


def produce(url: str, how: str, count: int, gap: float, begin_at: float) -> list[tuple[UUID, float]]:
    """Send at a fixed rate, one message a transaction; return when each was committed."""
    engine = create_engine(url)
    outbox = Outbox(engine, settings=Settings())
    committed = []
    for number in range(count):
        time.sleep(max(begin_at + number * gap - time.monotonic(), 0))
        order = bank.new_order()
        with engine.begin() as connection:
            if how == "ours":
                id_ = outbox.send(connection, bank.TOPIC, order, key=order["receiver"])
            else:
                row = handmade.values(bank.TOPIC, order["receiver"], order)
                connection.execute(handmade.INSERT, row)
                id_ = row["id"]
        committed.append((id_, time.monotonic()))
    return committed


def _latencies(url: str, seconds: int, how: str, consumer: Callable[[Moments, threading.Event], None]) -> list[float]:
    """Return the latency of every message in milliseconds; those of the first half second are warm-up."""
    started: Moments = {}
    stop = threading.Event()
    thread = threading.Thread(target=consumer, args=(started, stop))
    thread.start()
    count, gap = seconds * RATE // _PRODUCERS, _PRODUCERS / RATE
    begin_at = time.monotonic() + 3  # when all have been imported
    with get_context("spawn").Pool(_PRODUCERS) as pool:
        jobs = [(url, how, count, gap, begin_at + number / RATE) for number in range(_PRODUCERS)]
        committed = [each for one in pool.starmap(produce, jobs) for each in one]
    deadline = time.monotonic() + _DEADLINE
    while (missing := [id_ for id_, _ in committed if id_ not in started]) and time.monotonic() < deadline:
        time.sleep(0.05)
    stop.set()
    thread.join()
    assert not missing, f"{len(missing)} messages never arrived"
    # A handler may start before the producer has seen the answer to its COMMIT.
    return [max(started[id_] - at, 0.0) * 1000 for id_, at in committed if at > begin_at + 0.5]


def _with_worker(engine: Engine, group: str) -> Callable[[Moments, threading.Event], None]:
    def consume(started: Moments, stop: threading.Event) -> None:
        outbox = Outbox(engine, settings=Settings())

        @outbox.consumer(bank.TOPIC, group=group, batch=100, start="now")
        def note(message: Message, _session: Session) -> None:
            started[message.id] = time.monotonic()

        with Worker(outbox):
            stop.wait()

    return consume


def _with_poller(engine: Engine) -> Callable[[Moments, threading.Event], None]:
    def consume(started: Moments, stop: threading.Event) -> None:
        with engine.connect() as connection:
            while not stop.wait(_POLL):
                rows: Any = connection.exec_driver_sql(handmade.TAKE, (100,)).fetchall()
                for row in rows:
                    started[row[0]] = time.monotonic()
                if rows:
                    connection.exec_driver_sql(handmade.INBOX, ([row[0] for row in rows],))
                connection.commit()

    return consume


def _percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


BENCHMARK = Benchmark(run)
