"""A dependency is down for a while, under load: what it costs a group with a breaker, and one without."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from benchmarks.lab import Benchmark, Lab
from benchmarks.measure import Figure
from outbox import Breaker, Message, Outbox, Settings
from outbox.worker import Worker

RATE = 200
#: Retries for a minute: shorter than the outage.
_SETTINGS = Settings(retry_delays=(1.0, 2.0, 4.0, 8.0, 16.0, 32.0))
_BREAKER = Breaker(failures=10, window=60, trial_after=5)
_BEFORE, _DEADLINE = 5.0, 300.0

_ATTEMPTS = text("SELECT count(*) FROM outbox.attempt_history WHERE consumer_group = :group")
_STATUSES = text("SELECT status, count(*) FROM outbox.consumer_message WHERE consumer_group = :group GROUP BY status")


@dataclass(frozen=True, slots=True)
class Aftermath:
    """Count the traces of an outage: attempts that failed, messages parked, and seconds until nothing waited."""

    attempts: int
    parked: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.attempts:,} attempts burnt, {self.parked:,} parked, drained in {self.seconds:.0f} s"


def run(lab: Lab) -> Iterator[Figure]:
    """Have the dependency of both groups down for the same time, one after the other."""
    length = float(lab.scale(120, 6))
    found = {}
    for group, breaker in (("with", _BREAKER), ("without", None)):
        lab.say(f"outage: {group} a breaker")
        found[group] = _outage(lab.engine("main"), group, breaker, length)
    what = f"outage of {length:.0f} s under {RATE}/s"
    with_breaker, without = found["with"], found["without"]
    met = with_breaker.parked == 0 and with_breaker.attempts <= without.attempts
    yield Figure(f"{what}, with a breaker ÷ without", str(with_breaker), str(without), bar="none parked", met=met)


def _outage(engine: Engine, group: str, breaker: Breaker | None, length: float) -> Aftermath:
    outbox, down, ended = Outbox(engine, settings=_SETTINGS), threading.Event(), threading.Event()
    topic = f"outage_{group}"
    sent = 0

    @outbox.consumer(topic, group=group, breaker=breaker)
    def call(_message: Message, _session: Session) -> None:
        if down.is_set():
            raise ConnectionError("the dependency is down")

    def produce() -> None:
        nonlocal sent
        began = time.monotonic()
        while not ended.is_set():
            with engine.begin() as connection:
                while sent < (time.monotonic() - began) * RATE:
                    outbox.send(connection, topic, {"number": sent}, key=str(sent % 100))
                    sent += 1
            ended.wait(0.05)

    producer = threading.Thread(target=produce)
    with Worker(outbox):
        producer.start()
        ended.wait(_BEFORE)
        down.set()
        ended.wait(length)
        down.clear()
        over = time.monotonic()
        ended.wait(_BEFORE)
        ended.set()
        producer.join()
        while (left := _left(engine, group, sent)) and time.monotonic() - over < _DEADLINE:
            down.wait(0.1)
        seconds = time.monotonic() - over
    assert not left, f"{left} messages still wait"
    with engine.connect() as connection:
        attempts = connection.scalar(_ATTEMPTS, {"group": group}) or 0
    return Aftermath(attempts, _statuses(engine, group).get("parked", 0), seconds)


def _statuses(engine: Engine, group: str) -> dict[str, int]:
    with engine.connect() as connection:
        return dict(connection.execute(_STATUSES, {"group": group}).tuples().all())


def _left(engine: Engine, group: str, sent: int) -> int:
    """Return how many messages are neither consumed nor parked."""
    statuses = _statuses(engine, group)
    return sent - statuses.get("consumed", 0) - statuses.get("parked", 0)


BENCHMARK = Benchmark(run)
