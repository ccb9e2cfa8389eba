"""A topic gets more queues while it is used: no key loses its order."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise

import pytest

from outbox.consumer import growth
from outbox.consumer.consumer import QueueConsumer, State
from outbox.consumer.growth import Growth, Reach
from outbox.database.execute import read_source
from tests.kit.bench import Bench, Ward


def inversions(ledger: list[str]) -> int:
    """Count how often a key's later message took effect before an earlier one; bodies are ``key:number``."""
    numbers = defaultdict(list)
    for body in ledger:
        key, _, number = body.partition(":")
        numbers[key].append(int(number))
    return sum(later < earlier for each in numbers.values() for earlier, later in pairwise(each))


class Load:
    """Sends the next message of random keys."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.sent: defaultdict[str, int] = defaultdict(int)
        self.random = random.Random(7)  # noqa: S311 - no secret

    def send(self, number: int) -> None:
        """Send so many messages in one transaction."""
        with self.bench.producer.begin() as connection:
            for _ in range(number):
                key = f"k{self.random.randrange(40)}"
                self.bench.app.send(connection, "t", f"{key}:{self.sent[key]}", key=key)
                self.sent[key] += 1


@pytest.mark.parametrize("ordered", [False, True, "key"])
def test_growth_keeps_the_order_of_every_key(any_bench: Bench, *, ordered: bool | str) -> None:
    """With a backlog in the old queues, new queues are read when it is done; in each mode no key is out of order."""
    any_bench.app.declare_topic("t", 3)
    load = Load(any_bench)
    consumer = any_bench.declare(ordered=ordered, batch=5)
    for queues in (4, 8, 12):
        load.send(80)
        any_bench.dispatch()
        consumer.consume_once(any_bench.connection, any_bench.source)
        load.send(80)
        any_bench.dispatch()
        any_bench.app.declare_topic("t", queues)
        load.send(80)
        any_bench.dispatch()
    for _ in range(3):
        any_bench.consume(consumer)
    assert len(any_bench.ledger()) == 720
    assert inversions(any_bench.ledger()) == 0


def test_a_worker_that_has_not_heard_of_a_growth(bench: Bench) -> None:
    """A worker that looked at the topic before it grew reads nothing that was sent into the queue after it."""
    bench.app.declare_topic("t", 1)
    bench.send(1, 2, key="k")
    bench.app.declare_topic("t", 2)
    bench.send(*range(20), key=None)
    consumer = bench.declare()
    worker = QueueConsumer(consumer.subscription, bench.settings, 0, consumer.meter, consumer.gate)
    worker.progress = worker.progress._replace(position=0)
    (rows,) = read_source(bench.source, worker.next_messages())
    assert [row[0] for row in rows] == bench.rows("SELECT position FROM outbox.message WHERE queue = 0 ORDER BY 1")[:2]
    worker.progress = worker.progress._replace(reach=Reach(2))
    assert len(read_source(bench.source, worker.next_messages())[0]) == 12
    # What stands at its offset is read in any case: whether the log went back is seen by it.
    last = rows[-1][0] + 5
    worker.progress = worker.progress._replace(reach=Reach(), position=last)
    assert [row[0] for row in read_source(bench.source, worker.next_messages())[0]] == [last]


def test_a_key_that_is_held_over_a_growth(bench: Bench) -> None:
    """Messages of a key that wait follow in their order, also where the later ones came by another queue."""
    bench.app.declare_topic("t", 1)
    ward = Ward("k:0")
    consumer = bench.declare(ward, ordered="key")
    bench.send("k:0", "k:1")
    bench.consume(consumer)
    for queues in (5, 11):
        bench.app.declare_topic("t", queues)
        bench.send(f"k:{queues}")
        bench.consume(consumer)
    assert bench.ledger() == []
    ward.ill.clear()
    bench.retry(consumer)
    assert bench.ledger() == ["k:0", "k:1", "k:5", "k:11"]


def test_a_new_group_of_a_topic_that_has_grown(bench: Bench) -> None:
    """A group that begins now is behind all growths; one that begins with the first message goes through them."""
    bench.app.declare_topic("t", 2)
    load = Load(bench)
    load.send(30)
    bench.dispatch()
    bench.app.declare_topic("t", 8)
    load.send(30)
    bench.dispatch()
    now = bench.declare(group="now", start="now")
    first = bench.declare(group="first")
    assert bench.consume(first).done == 60
    assert inversions(bench.ledger()) == 0
    load.send(10)
    bench.dispatch()
    assert bench.consume(now).done == 10


def test_what_was_pruned_is_not_waited_for(any_bench: Bench) -> None:
    """An old queue whose messages are gone holds up nothing, and what is gone there isn't taken for a lost log."""
    any_bench.app.declare_topic("t", 1)
    any_bench.send("k:0", "k:1")
    consumer = any_bench.declare(on_pruned="skip")
    any_bench.consume(consumer)
    any_bench.send("k:2", "k:3")
    any_bench.app.declare_topic("t", 2)
    for number in range(4, 20):
        any_bench.send(f"k{number}:0", key=f"k{number}")
    with any_bench.producer.begin() as connection:
        connection.exec_driver_sql("DELETE FROM outbox.message WHERE queue = 0 AND position <= 4")
    any_bench.consume(consumer)
    assert sorted(any_bench.ledger()) == sorted(["k:0", "k:1", *(f"k{number}:0" for number in range(4, 20))])
    assert any_bench.rows("SELECT count(*) FROM outbox.log_loss") == [0]


def test_an_old_queue_is_pruned_while_another_is_behind(bench: Bench) -> None:
    """A queue whose rest before the growth is gone waits for the others, and takes the gap for no lost log."""
    bench.app.declare_topic("t", 2)
    load = Load(bench)
    load.send(20)
    bench.dispatch()
    consumer = bench.declare(on_pruned="skip", early=True)
    consumer.start(bench.connection, bench.source)
    bench.run(
        "INSERT INTO outbox.consumer_offset (consumer_group, topic, queue, position, starts) VALUES ('g', 't', 0, 1, 0)"
    )
    bench.app.declare_topic("t", 3)
    load.send(40)
    bench.dispatch()
    bench.run("DELETE FROM outbox.message WHERE queue = 0 AND position <= (SELECT ends[1] FROM outbox.topic_growth)")
    gone = 60 - bench.rows("SELECT count(*) FROM outbox.message")[0]
    assert gone > 1
    worker = QueueConsumer(consumer.subscription, bench.settings, 0, consumer.meter, consumer.gate)
    ends = bench.rows("SELECT ends[1] FROM outbox.topic_growth")[0]
    worker.progress = worker.progress._replace(reach=Reach(0, ends, 1))
    assert worker.step(bench.connection, bench.source)[0] is State.EMPTY
    assert bench.consume(consumer).done == 60 - gone
    assert inversions(bench.ledger()) == 0
    assert bench.rows("SELECT count(*) FROM outbox.log_loss") == [0]


def test_a_group_that_is_moved_back_over_a_growth(bench: Bench) -> None:
    """A worker that had passed a growth reads no later than that when its group is moved back: the next pass does."""
    bench.app.declare_topic("t", 1)
    bench.send("k:0", "k:1")
    bench.app.declare_topic("t", 2)
    bench.send(*(f"x{number}:0" for number in range(20)), key=None)
    consumer = bench.declare(handler := Ward())
    bench.consume(consumer)
    bench.run("DELETE FROM outbox.consumer_message")
    bench.run("DELETE FROM outbox.consumer_offset WHERE position > 0")
    handler.done.clear()
    worker = consumer._queues[0]
    while worker.step(bench.connection, bench.source)[0] is State.WORKED:
        pass
    assert handler.done == ["k:0", "k:1"]
    bench.consume(consumer)
    assert len(handler.done) == 22


@pytest.mark.parametrize(
    ("positions", "expected"), [({}, Reach(0, 0)), ({3: 10}, Reach(16)), ({3: 9}, Reach(0, 0)), ({2: 10}, Reach(0, 0))]
)
def test_a_queue_waits_for_those_that_had_its_keys(positions: Mapping[int, int], expected: Reach) -> None:
    """From 8 to 16 queues, queue 11 waits for queue 3 alone."""
    grown = [Growth(16, (10,) * 8)]
    assert growth.reach(grown, 11, positions) == expected


def test_an_old_queue_stops_at_its_own_end() -> None:
    """What an old queue had before the growth is read; the rest when the others that had its keys are done."""
    grown = [Growth(6, (5, 7, 9, 4)), Growth(12, (5, 7, 9, 4, 0, 1))]
    assert growth.reach(grown, 1, {1: 3, 3: 4}) == Reach(0, 7)
    assert growth.reach(grown, 1, {1: 7, 3: 4}) == Reach(12)
    assert growth.reach(grown, 11, {1: 7, 3: 4}) == Reach(6, 0)
    assert growth.reach(grown, 11, {1: 7, 3: 4, 5: 1}) == Reach(12)
