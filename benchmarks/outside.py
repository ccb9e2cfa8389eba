"""Handlers outside of transactions: many that wait at once in one worker, against a hand-written asyncio loop."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Iterator

from sqlalchemy import Engine

from benchmarks import bank
from benchmarks.lab import Benchmark, Lab
from benchmarks.measure import Figure, Ratio, interleave
from outbox import Message, Outbox, Settings
from outbox.dispatch.dispatch_pass import dispatch_once
from outbox.worker import Worker

_SETTINGS = Settings()
_CONCURRENCY = 100
#: What one handler waits for, such as the answer of a payment provider (seconds).
_CALL = 0.1
_FEW, _LONG_CALL = 10, 0.3


def run(lab: Lab) -> Iterator[Figure]:
    """Measure what many short calls take, and what a few long ones do."""
    engine = lab.engine("main")
    count = lab.scale(1000, 300)
    arms = {
        "async": lambda: _handled(engine, count, _CALL, is_async=True),
        "threads": lambda: _handled(engine, count, _CALL, is_async=False),
        "hand": lambda: asyncio.run(_by_hand(count, _CALL)),
    }
    lab.say(f"outside: {count} calls of {_CALL} s, {_CONCURRENCY} at once")
    seconds = interleave(arms, lab.scale(5, 1))
    for name in ("async", "threads"):
        ratio = Ratio.of(seconds[name], seconds["hand"])
        yield Figure(
            f"{count} messages of {_CALL} s, concurrency={_CONCURRENCY} ({name}) ÷ hand-written asyncio loop",
            f"{statistics.median(seconds[name]):.2f} s",
            f"{statistics.median(seconds['hand']):.2f} s",
            ratio,
            "≤ 1.2" if name == "async" else "",
            ratio.median <= 1.2 if name == "async" else None,
        )
    lab.say(f"outside: {_FEW} calls of {_LONG_CALL} s")
    few = [_handled(engine, _FEW, _LONG_CALL, is_async=True) for _ in range(lab.scale(5, 1))]
    yield Figure(
        f"{_FEW} messages of {_LONG_CALL} s ÷ one after the other",
        f"{statistics.median(few):.2f} s",
        f"{_FEW * _LONG_CALL:.2f} s",
        Ratio.of(few, [_FEW * _LONG_CALL] * len(few)),
    )


async def _by_hand(count: int, call: float) -> float:
    """Return the seconds that so many calls take, so many at once, of messages that are in memory and kept nowhere."""
    began = time.perf_counter()
    turn = asyncio.Semaphore(_CONCURRENCY)

    async def handle() -> None:
        async with turn:
            await asyncio.sleep(call)

    await asyncio.gather(*(handle() for _ in range(count)))
    return time.perf_counter() - began


def _handled(engine: Engine, count: int, call: float, *, is_async: bool) -> float:
    """Return the seconds from a worker's first handler to the end of its last one; the messages wait at the start."""
    outbox = Outbox(engine, settings=_SETTINGS)
    began, ended, done = [0.0], threading.Event(), [0]
    lock = threading.Lock()

    def begin() -> None:
        began[0] = began[0] or time.perf_counter()

    def end() -> None:
        with lock:
            done[0] += 1
        if done[0] == count:
            ended.set()

    def handle(_: Message) -> None:
        begin()
        time.sleep(call)
        end()

    async def handle_async(_: Message) -> None:
        begin()
        await asyncio.sleep(call)
        end()

    group = f"group-{time.monotonic_ns()}"
    consumer = outbox.consumer(bank.TOPIC, group=group, transactional=False, concurrency=_CONCURRENCY, start="now")
    consumer(handle_async) if is_async else consumer(handle)
    with Worker(outbox, roles=["consume"]):
        with engine.begin() as connection:
            for _ in range(count):
                order = bank.new_order()
                outbox.send(connection, bank.TOPIC, order, key=order["receiver"])
        with engine.connect() as connection:
            while dispatch_once(connection, _SETTINGS).taken:
                pass
        ended.wait()
        return time.perf_counter() - began[0]


BENCHMARK = Benchmark(run)
