"""What a message knows of its way: its group, the attempt, the first failure, and how much stands behind it."""

from __future__ import annotations

from typing import Any

from outbox import Message, Retry
from outbox.text import process_name
from tests.kit.bench import Bench, record


def test_group_and_lag(bench: Bench) -> None:
    """The first of three has two behind it; in another queue, or after the last one, nothing counts."""
    seen: list[tuple[Any, ...]] = []

    def handle(message: Message, session: Any) -> None:
        seen.append((message.body, message.group, message.lag, message.attempt, message.first_failed_at))

    bench.app.declare_topic("t", 2)
    consumer = bench.declare(handle)
    bench.send(1, 2, 3, queue=0, key=None)
    bench.consume(consumer)
    assert seen == [(1, "g", 2, 1, None), (2, "g", 1, 1, None), (3, "g", 0, 1, None)]
    bench.send(4, queue=1, key=None)
    bench.consume(consumer)
    assert seen[3:] == [(4, "g", 0, 1, None)]


def test_the_process_that_sent_it_is_an_operators(bench: Bench) -> None:
    """An operator sees the host and the process that wrote a message or a half; handlers have the headers as given."""
    seen: list[Any] = []

    def handle(message: Message, session: Any) -> None:
        seen.append(message.headers)

    consumer = bench.declare(handle)
    ids = bench.send(1) + bench.send(2, headers={"h": "1", "outbox-sender": "forged"})
    with bench.producer.begin() as connection:
        ids += [bench.app.prepare(connection, "t", {})]
    bench.consume(consumer)
    assert seen == [{}, {"h": "1"}]
    shown = [(bench.app.operator.message(each).half or {})["headers"] for each in ids]
    assert shown == [{"outbox-sender": process_name()}, {"h": "1", "outbox-sender": process_name()}, shown[0]]


def test_the_first_failure_is_known_at_each_retry(bench: Bench) -> None:
    """It is the time at which the inbox heard of the message, and stays so through retries, also an operator's."""
    seen: list[Message] = []

    def handle(message: Message, session: Any) -> Retry:
        seen.append(message)
        return Retry()

    consumer = bench.declare(handle, retry_delays=(1.0,))
    (message_id,) = bench.send("x")
    bench.consume(consumer)
    bench.retry(consumer)
    assert bench.statuses() == [("parked", 2)]
    bench.sink.operator.retry([message_id], group="g", by="ann", why="test")
    bench.retry(consumer)
    (received_at,) = bench.rows("SELECT received_at FROM outbox.consumer_message")
    assert [message.first_failed_at for message in seen] == [None, received_at, received_at]
    assert [message.attempt for message in seen] == [1, 2, 1]
    assert [message.lag for message in seen] == [0, None, None]


def test_an_ordered_group_knows_it_too(bench: Bench) -> None:
    """It retries in place, by the row that its step has read; and has its lag at each attempt."""
    seen: list[tuple[bool, int | None]] = []

    def handle(message: Message, session: Any) -> Retry | None:
        seen.append((message.first_failed_at is None, message.lag))
        if message.attempt == 1 and message.body == 1:
            return Retry(after=0)
        record(message, session)
        return None

    consumer = bench.declare(handle, ordered=True)
    bench.send(1, 2)
    bench.consume(consumer)
    assert bench.ledger() == ["1", "2"]
    assert seen == [(True, 1), (False, 1), (True, 0)]


def test_outside_of_transactions_it_is_known_too(bench: Bench) -> None:
    """Group and lag at the first attempt, the first failure at the second."""
    seen: list[tuple[Any, ...]] = []

    def handle(message: Message) -> Retry | None:
        seen.append((message.group, message.lag, message.first_failed_at))
        return Retry() if message.attempt == 1 else None

    consumer = bench.declare(handle, transactional=False, concurrency=1)
    bench.send(1)
    bench.consume(consumer)
    (received_at,) = bench.rows("SELECT received_at FROM outbox.consumer_message")
    bench.retry(consumer)
    assert seen == [("g", 0, None), ("g", None, received_at)]
    assert bench.statuses() == [("consumed", 2)]
