"""A broker is away under load, and what a relay to it has lost, repeated, reordered and used up when all is over."""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

from confluent_kafka import Consumer, TopicPartition
from sqlalchemy import Engine, text

from benchmarks.lab import Benchmark, Lab, peak_memory
from benchmarks.measure import Figure
from outbox import Message, Outbox
from outbox.relay import KafkaPublisher
from outbox.telemetry.events import BreakerOpened
from outbox.telemetry.hooks import TelemetryEvent, add_hook
from outbox.worker import Worker
from tests.relay import servers, targets

_RATE, _KEYS = 500, 50
_DEADLINE = 900.0
_OPEN = text("""
SELECT (SELECT count(*) FROM outbox.attempt_history WHERE consumer_group = :group),
       (SELECT count(*) FROM outbox.consumer_message WHERE consumer_group = :group AND status = 'consumed')
""")


@dataclass
class Outage:
    """What came of one outage: ``confirmed_at`` has a time for each list that the broker has confirmed."""

    sent: dict[UUID, int] = field(default_factory=dict)
    confirmed_at: list[float] = field(default_factory=list)
    attempts: int = 0
    opened: int = 0
    drained: float = 0.0
    memory: tuple[float, float] = (0.0, 0.0)

    def silence(self) -> float:
        """Return the longest time (seconds) in which nothing was confirmed."""
        return max(b - a for a, b in zip(self.confirmed_at, self.confirmed_at[1:], strict=False))

    def compared(self, found: list[tuple[UUID, str | None, int]]) -> str:
        """Return what the broker has of it: ids, keys and numbers, in its order."""
        times = Counter(id_ for id_, _, _ in found)
        by_key: defaultdict[str | None, list[int]] = defaultdict(list)
        for _, key, number in found:
            if number not in by_key[key][-1:]:
                by_key[key].append(number)
        swapped = sum(numbers != sorted(numbers) for numbers in by_key.values())
        lost, twice = len(self.sent.keys() - times.keys()), sum(count - 1 for count in times.values())
        return (
            f"{len(self.sent):,} sent, {lost} lost, {twice} there twice, {swapped} keys out of order, "
            f"{self.attempts} attempts used up, breaker opened {self.opened} times"
        )


def run(lab: Lab) -> Iterator[Figure]:
    """Measure NATS that is away for long, and a leader of Kafka that is stopped, killed and frozen."""
    length = lab.scale(600, 10)
    with tempfile.TemporaryDirectory() as folder, targets.NatsTarget.serve(Path(folder)) as server:
        target = targets.NatsTarget(server)

        def away() -> None:
            server.kill()
            time.sleep(length)
            server.start()

        lab.say(f"outage: NATS is away for {length} s")
        found = _outage(lab.engine("main"), "nats", target.publisher(), away)
        there = [
            (UUID(each.id), each.headers.get("ce-partitionkey"), each.value["number"]) for each in _of_nats(target)
        ]
        before, after = found.memory
        what = f"NATS away for {length} s under {_RATE}/s: drained in, and the most memory before and after (MiB)"
        yield Figure(what, f"{found.drained:.0f} s, {before:.0f}, {after:.0f}; {found.compared(there)}")
    with servers.kafka_servers(3) as kafka:
        for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
            lab.say(f"outage: Kafka's leader gets {number.name}")
            yield _of_leader(lab, kafka, number)


def _of_leader(lab: Lab, kafka: servers.KafkaServers, number: signal.Signals) -> Figure:
    topic, node = f"outage-{number.name.lower()}", 2
    targets.make_kafka_topic(kafka.bootstrap, topic, 6)
    config = {"bootstrap.servers": kafka.bootstrap, "log_level": 0}
    length = lab.scale(20, 5)

    def leader() -> None:
        kafka.signal(node, number)
        time.sleep(length)
        if number is signal.SIGSTOP:
            kafka.signal(node, signal.SIGCONT)
        else:
            kafka.restart()

    found = _outage(lab.engine("main"), topic, KafkaPublisher(config, topic, timeout=120), leader)
    what = f"Kafka, three brokers, one of which gets {number.name} under {_RATE}/s: nothing confirmed for, drained in"
    return Figure(what, f"{found.silence():.1f} s, {found.drained:.0f} s; {found.compared(_of_kafka(config, topic))}")


def _of_nats(target: targets.NatsTarget) -> Iterator[targets.Received]:
    """Read all that is in the stream, by lists."""
    source: Any = target.source(group="reader")
    while messages := source.take(500, 1.0):
        for each in messages:
            yield targets.Received({name.lower(): value for name, value in each.headers.items()}, each.body)
        source.confirm()
    source.close()


def _of_kafka(config: dict[str, Any], topic: str) -> list[tuple[UUID, str | None, int]]:
    consumer = Consumer({**config, "group.id": "reader"})
    found = []
    for number in consumer.list_topics(topic, timeout=60).topics[topic].partitions:
        low, high = consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=60)
        consumer.assign([TopicPartition(topic, number, low)])
        while low < high:
            if (report := consumer.poll(60)) is not None and report.error() is None:
                each = targets._of_kafka(report)
                found.append((UUID(each.id), each.key, each.value["number"]))
                low = int(report.offset() or 0) + 1
    consumer.close()
    return found


@contextmanager
def _opened() -> Iterator[list[TelemetryEvent]]:
    heard: list[TelemetryEvent] = []
    remove = add_hook(lambda event: heard.append(event) if isinstance(event, BreakerOpened) else None)
    try:
        yield heard
    finally:
        remove()


def _outage(engine: Engine, name: str, publisher: Any, away: Callable[[], None]) -> Outage:
    """Send at a fixed rate while the broker is away, and go on until all is confirmed."""
    outbox, found, ended = Outbox(engine), Outage(), threading.Event()
    topic, publish = f"outage-{name}", publisher.publish

    async def timed(messages: list[Message], /) -> Any:
        answers = await publish(messages)
        if any(each is None for each in answers):
            found.confirmed_at.append(time.monotonic())
        return answers

    publisher.publish = timed
    outbox.relay(topic, to=publisher, group=name)

    def send() -> None:
        began = time.monotonic()
        while not ended.is_set():
            with engine.begin() as connection:
                while len(found.sent) < (time.monotonic() - began) * _RATE:
                    number = len(found.sent)
                    id_ = outbox.send(connection, topic, {"number": number}, key=f"key {number % _KEYS}")
                    found.sent[id_] = number
            ended.wait(0.02)

    sender = threading.Thread(target=send)
    with _opened() as heard, Worker(outbox):
        sender.start()
        time.sleep(5)
        before = peak_memory()
        away()
        back = time.monotonic()
        time.sleep(5)
        ended.set()
        sender.join()
        while not _is_done(engine, name, found) and time.monotonic() - back < _DEADLINE:
            time.sleep(0.1)
        found.drained, found.opened = time.monotonic() - back, len(heard)
        found.memory = before, peak_memory()
    return found


def _is_done(engine: Engine, name: str, found: Outage) -> bool:
    with engine.connect() as connection:
        found.attempts, consumed = connection.execute(_OPEN, {"group": name}).one()
    return bool(consumed >= len(found.sent))


BENCHMARK = Benchmark(run)
