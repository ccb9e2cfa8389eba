"""Order per key: what it costs while some keys fail, against a group without any order that has the same failures."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Literal

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from benchmarks import fill
from benchmarks.lab import Benchmark, Lab
from benchmarks.measure import Figure, compared, interleave, rate
from benchmarks.readers import TOPIC, new_group
from outbox import Message, Retry, Settings
from outbox.consumer.consumer import Consumer
from outbox.consumer.subscription import Subscription

BATCH = 20
#: Of a hundred keys, how many have a message that fails at its first attempt.
FAILING = (0, 1, 10)


def run(lab: Lab) -> Iterator[Figure]:
    """Measure how many messages a second are settled, retries included."""
    # What has failed is due at once: the figure is of the work, not of the waiting.
    settings = Settings(retry_delays=(0.0,) * 3)
    messages, rounds = lab.scale(20_000, 2_000), lab.scale(7, 3)
    lab.say("by_key: filling")
    fill.messages(lab.engine("main"), TOPIC, messages, settings)
    with lab.worker_connection("main") as connection:
        for failing in FAILING:
            lab.say(f"by_key: {failing} % of the keys fail")
            results = interleave(
                {
                    "key": partial(_settle_all, connection, settings, "key", failing, messages),
                    "none": partial(_settle_all, connection, settings, None, failing, messages),
                },
                rounds,
            )
            what = f'ordered="key", batch={BATCH}, {failing} % of the keys fail once'
            yield compared(what, "messages", results["key"], "ordered=False", results["none"], None)


def _settle_all(
    connection: Connection, settings: Settings, ordered: Literal["key"] | None, failing: int, messages: int
) -> float:
    """Have a new group consume all, and retry what failed; return messages a second."""
    failed: set[str] = set()

    def handler(message: Message, _: Session) -> Retry | None:
        key = str(message.key)
        if key not in failed and int(key.rpartition("-")[2]) % 100 < failing:
            failed.add(key)
            return Retry(reason="the first message of this key fails once")
        return None

    subscription = Subscription(
        TOPIC, handler, group=new_group(), retry_delays=settings.retry_delays, batch=BATCH, ordered=ordered or False
    )
    consumer = Consumer(subscription, settings)
    consumer.start(connection, connection)

    def settle() -> None:
        while consumer.consume_once(connection, connection):
            pass
        while consumer.retry_once(connection, connection, limit=messages):
            pass

    return rate(messages, settle)


BENCHMARK = Benchmark(run, ("main",))
