"""A consumer that is told which queue has new messages begins with it: a round trip, and no look at the others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from sqlalchemy import Connection
from sqlalchemy.orm import Session

from outbox import Message
from outbox.consumer import consumer as consumer_module
from outbox.consumer.consumer import Consumer, QueueConsumer
from outbox.database.execute import Row, Statement, execute, read_source
from outbox.message.limits import Breaker
from tests.kit.bench import Bench, Ward, record

#: Makes a group's inbox row of a message, as a compensation does.
QUARANTINE = """
INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts)
VALUES ('g', '{}', 't', 0, 0, 'quarantined', 0)
"""


@dataclass
class Trips:
    """How often consumers read the log by itself, and their own database with what a step begins with."""

    looks: int = 0
    steps: list[int] = field(default_factory=list)  # of each, how many statements


@pytest.fixture(autouse=True)
def never_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """No look at all queues is due because of the time."""
    monkeypatch.setattr(consumer_module, "ALL_QUEUES_EVERY", math.inf)


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> Trips:
    """Count round trips."""
    counted = Trips()

    def counting(connection: Connection, *statements: Statement) -> list[list[Row]]:
        counted.steps.append(len(statements))
        return execute(connection, *statements)

    def looking(connection: Connection, *statements: Statement) -> list[list[Row]]:
        counted.looks += 1
        return read_source(connection, *statements)

    monkeypatch.setattr(consumer_module, "execute", counting)
    monkeypatch.setattr(consumer_module, "read_source", looking)
    return counted


def settled(bench: Bench, *, handler: Callable[..., Any] = record, queues: int = 1, **options: Any) -> Consumer:
    """Return a consumer that has consumed a message of each queue, and knows where it is."""
    bench.app.declare_topic("t", queues)
    consumer = bench.declare(handler, **options)
    for queue in range(queues):
        bench.send(f"first of {queue}", queue=queue)
    bench.consume(consumer)
    return consumer


def told(bench: Bench, consumer: Consumer, queue: int | None = 0) -> Any:
    """Make a pass of a consumer that was told of a queue."""
    consumer.wake(queue)
    return consumer.consume_once(bench.connection, bench.source)


def test_one_round_trip_and_the_handler(bench: Bench, trips: Trips) -> None:
    """Lock, offset, messages and what the inbox knows of them come together."""
    consumer = settled(bench, queues=2)
    trips.looks, trips.steps[:] = 0, []
    bench.send("new", queue=1)
    assert told(bench, consumer, 1).done == 1
    assert (trips.looks, trips.steps) == (0, [4])
    assert bench.ledger()[-1] == "new"
    assert consumer.consume_once(bench.connection, bench.source).taken == 0
    assert trips.looks > 0


def test_all_that_came_is_handled(bench: Bench, trips: Trips) -> None:
    """Also in several batches; a queue of which nothing was told waits for the next look."""
    consumer = settled(bench, queues=3, batch=2)
    trips.looks = 0
    for queue in (0, 1, 2):
        bench.send(*(f"{queue}{n}" for n in range(5)), queue=queue)
    consumer.wake(2)
    consumer.wake(0)
    consumer.wake(2)
    assert consumer.consume_once(bench.connection, bench.source).done == 10
    assert trips.looks == 0
    assert {body[0] for body in bench.ledger()[3:]} == {"0", "2"}
    assert consumer.consume_once(bench.connection, bench.source).done == 5


@pytest.mark.parametrize("queue", [None, 7], ids=["any queue", "an unknown queue"])
def test_what_names_no_queue_has_all_looked_at(bench: Bench, trips: Trips, queue: int | None) -> None:
    """And a queue that this worker doesn't know is one that the topic may have got meanwhile."""
    consumer = settled(bench, queues=2)
    trips.looks = 0
    bench.send("new", queue=1)
    consumer.wake(0)
    assert told(bench, consumer, queue).done == 1
    assert trips.looks > 0


def test_a_look_comes_due_while_others_tell(bench: Bench, trips: Trips, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of which nothing was told (what told it was lost) doesn't wait for an end of the others."""
    monkeypatch.setattr(consumer_module, "ALL_QUEUES_EVERY", 0.0)
    consumer = settled(bench, queues=2)
    trips.looks = 0
    bench.send("of which nothing is told", queue=1)
    assert told(bench, consumer, 0).done == 1
    assert trips.looks > 0


def test_two_databases_need_a_look(any_bench: Bench, trips: Trips) -> None:
    """The log of another database can't be read in the round trip of the lock."""
    consumer = settled(any_bench)
    trips.looks = 0
    any_bench.send("new")
    assert told(any_bench, consumer).done == 1
    assert (trips.looks > 0) is (any_bench.producer is not any_bench.consumer)


def test_nothing_new_is_no_work(bench: Bench) -> None:
    """What was told came to nothing: a message that another worker has handled meanwhile, and none is handled twice."""
    consumer, rival = settled(bench), bench.declare()
    bench.send("new")
    bench.consume(rival)
    assert not told(bench, consumer)
    assert not told(bench, consumer)
    bench.send("newer")
    bench.consume(rival)
    bench.send("newest")
    assert told(bench, consumer).done == 1
    assert bench.ledger()[1:] == ["new", "newer", "newest"]
    assert bench.rows("SELECT count(*) FROM outbox.log_loss") == [0]


def test_a_look_is_enough_to_know(bench: Bench, trips: Trips) -> None:
    """A worker that has handled nothing of a queue knows the group's offset; its first step writes down a start."""
    rival = settled(bench)
    consumer = bench.declare()
    assert not consumer.consume_once(bench.connection, bench.source)
    trips.looks, trips.steps[:] = 0, []
    bench.send("new")
    assert told(bench, consumer).done == 1
    assert (trips.looks, trips.steps) == (0, [4, 3])
    bench.send("newer")
    assert told(bench, rival).done == 1


def test_a_queue_that_another_worker_has(bench: Bench) -> None:
    """It is left to that one; and taken at the next look, if the message is still there."""
    consumer = settled(bench)
    meanwhile_taken: list[int] = []

    def meanwhile(message: Message, session: Session) -> None:
        meanwhile_taken.append(told(bench, consumer).taken)
        raise RuntimeError("ill")

    bench.send("new")
    with bench.consumer.connect() as other:
        bench.declare(meanwhile, ordered=True).consume_once(other, other)
    assert meanwhile_taken == [0]
    bench.age_retries()
    assert told(bench, consumer).done == 0
    assert bench.retry(consumer).done == 1
    assert bench.ledger()[1:] == ["new"]


def test_what_the_inbox_knows_is_passed(bench: Bench, trips: Trips) -> None:
    """A message that was quarantined before it was dispatched has no effect."""
    consumer = settled(bench, batch=3)
    trips.looks = 0
    with bench.producer.begin() as connection:
        ids = [bench.app.send(connection, "t", body, key="k") for body in ("a", "quarantined", "b")]
        connection.exec_driver_sql(QUARANTINE.format(ids[1]))
    bench.dispatch()
    assert told(bench, consumer).done == 2
    assert trips.looks == 0
    assert bench.ledger()[1:] == ["a", "b"]
    assert bench.inbox()[ids[1]].status == "quarantined"


def test_what_the_inbox_comes_to_know(bench: Bench, trips: Trips) -> None:
    """A message is quarantined while it is handled: all is undone, and begins anew in the same pass."""
    quarantined: list[object] = []

    def handle(message: Message, session: Session) -> None:
        record(message, session)
        if message.body == "b" and not quarantined:
            quarantined.append(message.id)
            with bench.consumer.begin() as connection:
                connection.exec_driver_sql(QUARANTINE.format(message.id))

    consumer = settled(bench, handler=handle, batch=3)
    trips.looks = 0
    bench.send("a", "b", "c")
    assert told(bench, consumer).done == 2
    assert trips.looks == 0
    assert bench.ledger()[1:] == ["a", "c"]


def test_one_that_comes_between_the_reads(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked up, and not yet read: the next transaction handles it."""
    consumer = settled(bench, batch=10)
    statements = QueueConsumer._read_statements

    def with_another(self: QueueConsumer, size: int) -> list[Statement]:
        take, offset, messages, known = statements(self, size)
        values = {**cast("dict[str, Any]", messages.values), "before": last}
        rows = Statement(f"SELECT * FROM ({messages.sql}) m WHERE position < %(before)s", values)
        return [take, offset, rows, known]

    bench.send("read")
    (last,) = bench.rows("SELECT max(position) + 1 FROM outbox.message")
    (id_,) = bench.send("between")
    with bench.consumer.begin() as connection:
        connection.exec_driver_sql(QUARANTINE.format(id_))
    with monkeypatch.context() as patch:
        patch.setattr(QueueConsumer, "_read_statements", with_another)
        assert told(bench, consumer).done == 1
    bench.send("after")
    assert told(bench, consumer).done == 1
    assert bench.ledger()[1:] == ["read", "after"]


def test_a_key_that_is_held(bench: Bench, trips: Trips) -> None:
    """Of a group that is ordered by key, what is held back is asked when the keys are known."""

    consumer = settled(bench, handler=Ward("ill"), ordered="key")
    bench.send("ill", key="a")
    assert told(bench, consumer).failed == 1
    trips.looks = 0
    bench.send("waits", key="a")
    bench.send("free", key="b")
    assert told(bench, consumer).done == 1
    assert trips.looks == 0
    assert bench.ledger()[1:] == ["free"]
    assert sorted(row.status for row in bench.inbox().values()) == ["consumed", "consumed", "failed", "waiting"]


def test_a_failure_of_a_batch_is_found_one_by_one(bench: Bench) -> None:
    """In the same pass, which isn't over when a transaction was undone."""

    consumer = settled(bench, handler=Ward(2), batch=3)
    bench.send(1, 2, 3)
    assert told(bench, consumer).taken == 3
    assert bench.ledger()[1:] == ["1", "3"]
    assert [status for status, _ in bench.statuses()] == ["consumed", "consumed", "failed", "consumed"]


@pytest.mark.parametrize("limit", [{"rate": 1000.0}, {"breaker": Breaker()}], ids=["rate", "breaker"])
def test_a_group_with_limits(bench: Bench, trips: Trips, limit: dict[str, Any]) -> None:
    """With a rate it looks first: nobody takes of what threads share without a message. Others don't."""
    consumer = settled(bench, **limit)
    trips.looks = 0
    bench.send("new")
    assert told(bench, consumer).done == 1
    assert (trips.looks > 0) is ("rate" in limit)


def test_no_growth_is_read_over(bench: Bench) -> None:
    """A topic gets more queues: what stands behind that waits for what the old queues have, whatever was told."""
    consumer = settled(bench, queues=1)
    bench.send("before", key="k")
    bench.app.declare_topic("t", 2)
    while not bench.rows("SELECT count(*) FROM outbox.message WHERE queue = 0 AND position > 2")[0]:
        bench.send("after", key="k", queue=0)
    assert told(bench, consumer).done == 1
    assert bench.ledger()[1:] == ["before"]
    bench.consume(consumer)
    assert set(bench.ledger()[2:]) == {"after"}


def test_a_message_knows_the_end_of_its_queue(bench: Bench) -> None:
    """As far as the worker has read it."""
    seen: list[tuple[Any, int | None]] = []
    consumer = settled(bench, handler=lambda message, _: seen.append((message.body, message.lag)))
    bench.send("a", "b", "c")
    told(bench, consumer)
    assert seen[1:] == [("a", 2), ("b", 1), ("c", 0)]


def test_what_is_told_during_a_pass_is_for_the_next(bench: Bench, trips: Trips) -> None:
    """Another thread tells of a queue when this one has been looked at: nothing is lost."""

    def handle(message: Message, session: Session) -> None:
        record(message, session)
        consumer.wake(1)

    consumer = settled(bench, handler=handle, queues=2)
    consumer.consume_once(bench.connection, bench.source)
    bench.send("new", queue=0)
    assert told(bench, consumer, 0).done == 1
    bench.send("newer", queue=1)
    trips.looks = 0
    assert consumer.consume_once(bench.connection, bench.source).done == 1
    assert trips.looks == 0
