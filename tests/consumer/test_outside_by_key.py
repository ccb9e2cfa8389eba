"""Order per key outside of transactions: what fails holds back its key, while many of other keys run."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from outbox import Message
from tests.consumer.test_by_key import by_key, send, states
from tests.consumer.test_growth import Load, inversions
from tests.consumer.test_reread import reset
from tests.kit.bench import Bench, Ward

OUTSIDE: dict[str, Any] = {"transactional": False, "concurrency": 10, "ordered": "key"}


def test_a_failed_message_holds_back_its_key_alone(any_bench: Bench) -> None:
    """What was read with it waits, and what comes later; its retry releases them in order."""
    any_bench.app.declare_topic("t", 1)
    ward = Ward("a1")
    consumer = any_bench.declare(ward, **OUTSIDE)
    send(any_bench, "a1", "a2", "b1", "b2")
    any_bench.consume(consumer)
    send(any_bench, "a3", "b3")
    any_bench.consume(consumer)
    assert ward.done == ["b1", "b2", "b3"]
    assert by_key(list(states(any_bench)))["a"] == ["a1", "a2", "a3"]
    assert [states(any_bench)[body] for body in ("a1", "a2", "a3")] == ["failed", "waiting", "waiting"]
    ward.ill.clear()
    any_bench.retry(consumer)
    assert ward.done[3:] == ["a1", "a2", "a3"]
    assert set(states(any_bench).values()) == {"consumed"}
    assert any_bench.rows("SELECT count(*) FROM outbox.consumer_message WHERE order_key IS NOT NULL") == [0]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("park_sequence", ["parked", "parked"]), ("skip", ["parked", "consumed"]), ("block", ["failed", "waiting"])],
)
def test_what_becomes_of_a_key_whose_head_is_exhausted(bench: Bench, policy: str, expected: list[str]) -> None:
    """As in transactions, by what is declared."""
    consumer = bench.declare(Ward("a1"), on_exhausted=policy, retry_delays=(60.0,), **OUTSIDE)
    send(bench, "a1", "a2")
    bench.consume(consumer)
    for due in (True, False, False):
        bench.retry(consumer, due=due)
    assert [states(bench)[body] for body in ("a1", "a2")] == expected


def test_a_key_drains_in_the_pass_that_releases_it(bench: Bench) -> None:
    """Sixty messages wait for one that failed; its retry has all follow, with those that come meanwhile, by itself."""
    ward, coming = Ward(0), iter(range(61, 76))

    def handle(message: Message) -> None:
        ward(message)
        if message.body % 4 == 0 and (body := next(coming, None)) is not None:
            bench.send(body)
            consumer.wake()

    consumer = bench.declare(handle, **OUTSIDE)
    bench.send(*range(61))
    bench.consume(consumer)
    assert (ward.done, set(bench.statuses())) == ([], {("failed", 1), ("waiting", 0)})
    ward.ill.clear()
    bench.retry(consumer)
    assert ward.done == list(range(76))


def test_a_held_key_is_read_again(bench: Bench) -> None:
    """After a reset, what an earlier passage had holds back nothing."""
    ward = Ward("a2")
    consumer = bench.declare(ward, **OUTSIDE)
    send(bench, "a1", "a2", "a3")
    bench.consume(consumer)
    reset(bench)
    ward.ill = {"a1"}
    bench.consume(consumer)
    assert states(bench) == {"a1": "failed", "a2": "waiting", "a3": "waiting"}
    ward.ill.clear()
    for due in (True, False, False):
        bench.retry(consumer, due=due)
    assert ward.done == ["a1", "a1", "a2", "a3"]


def test_each_key_is_in_order(bench: Bench) -> None:
    """Forty keys, random failures, many at once, retries at random times: per key strictly in order, each once."""
    chance = random.Random(11)  # noqa: S311 - no secret
    lock = threading.Lock()
    failures: dict[str, int] = {}
    done: list[str] = []

    def handle(message: Message) -> None:
        with lock:
            if failures[message.body]:
                failures[message.body] -= 1
                raise RuntimeError("planned")
            done.append(message.body)

    consumer = bench.declare(handle, retry_delays=(60.0,) * 5, **OUTSIDE)
    sent = 0
    for _ in range(3):
        with bench.producer.begin() as connection:
            for _ in range(100):
                body = f"k{chance.randrange(40)}:{sent:04}"
                failures[body] = chance.choice((1, 2, 3)) if chance.random() < 0.1 else 0
                bench.app.send(connection, "t", body, key=body.partition(":")[0])
                sent += 1
        bench.dispatch()
        bench.consume(consumer)
        bench.retry(consumer)
    while len(done) < sent:
        bench.retry(consumer)
    assert len(done) == len(set(done)) == sent
    assert inversions(done) == 0


def test_growth_keeps_the_order_of_every_key(bench: Bench) -> None:
    """New queues are read when the old ones are done, whatever runs in them."""
    bench.app.declare_topic("t", 2)
    done: list[str] = []
    load = Load(bench)
    consumer = bench.declare(lambda message: done.append(message.body), **OUTSIDE)
    for queues in (3, 6):
        load.send(60)
        bench.dispatch()
        bench.app.declare_topic("t", queues)
        load.send(60)
        bench.dispatch()
    for _ in range(4):
        bench.consume(consumer)
    assert len(done) == 240
    assert inversions(done) == 0
