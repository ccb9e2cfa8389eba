"""Handlers outside of transactions: many at once, one of a key, each result by itself."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy.exc import DBAPIError

from outbox import Message, Park, Retry, Settings, Skip
from outbox.errors import InvalidHandler
from tests.kit import wait_until
from tests.kit.bench import Bench

OUTSIDE: dict[str, Any] = {"transactional": False}


class Meeting:
    """Handlers that wait for each other: so many must run at once, or the test fails."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.bodies: list[Any] = []

    def __call__(self, message: Message) -> None:
        """Wait for the others."""
        self.barrier.wait(60)
        self.bodies.append(message.body)


def offsets(bench: Bench) -> dict[int, int]:
    """Return the newest offset of each queue that has one beyond its beginning."""
    sql = "SELECT queue, max(position) FROM outbox.consumer_offset GROUP BY queue HAVING max(position) > 0"
    return dict(bench.rows(sql))


def test_more_run_at_once_than_there_are_queues(any_bench: Bench) -> None:
    """Messages of one queue run all at once; the offset ends after the last one."""
    meeting = Meeting(20)
    any_bench.send(*range(20))
    consumer = any_bench.declare(meeting, concurrency=20, ordered=False, **OUTSIDE)
    assert any_bench.consume(consumer).done == 20
    assert sorted(meeting.bodies) == list(range(20))
    assert set(any_bench.statuses()) == {("consumed", 1)}
    assert list(offsets(any_bench).values()) == [20]


def test_async_handlers_run_at_once(bench: Bench) -> None:
    """Async handlers are tasks of one loop."""
    waiting: list[Any] = []

    async def handle(message: Message) -> None:
        waiting.append(message.body)
        while len(waiting) < 10:
            await asyncio.sleep(0)

    bench.send(*range(10), key=None)
    assert bench.consume(bench.declare(handle, concurrency=10, **OUTSIDE)).done == 10


def test_messages_of_one_key_wait_for_each_other(bench: Bench) -> None:
    """One of each key at a time, in their order; other keys go on meanwhile."""
    running: Counter[str | None] = Counter()
    order: list[Any] = []
    lock, others = threading.Lock(), threading.Event()

    def handle(message: Message) -> None:
        with lock:
            running[message.key] += 1
            assert running[message.key] == 1
            order.append(message.body)
        if message.key == "other":
            others.set()
        elif message.body == 0:
            assert others.wait(60)
        with lock:
            running[message.key] -= 1

    bench.send(0, 1, 2, 3, key="k")
    bench.send("x", key="other")
    assert bench.consume(bench.declare(handle, concurrency=5, **OUTSIDE)).done == 5
    assert [body for body in order if body != "x"] == [0, 1, 2, 3]


def test_offset_waits_for_the_first_message(bench: Bench) -> None:
    """Results are written when they are there; the offset moves over those that have ended without a gap."""
    first = threading.Event()

    def handle(message: Message) -> None:
        if message.body == 0:
            assert first.wait(60)

    bench.send(*range(5))
    consumer = bench.declare(handle, concurrency=5, ordered=False, **OUTSIDE)
    consuming = threading.Thread(target=bench.consume, args=(consumer,))
    consuming.start()
    wait_until(lambda: len(bench.inbox()) == 4, "the others have their inbox rows")
    assert offsets(bench) == {}
    first.set()
    consuming.join()
    assert list(offsets(bench).values()) == [5]


def answer(message: Message) -> object:
    """Answer as the body says."""
    match message.body:
        case "raise":
            raise ValueError("no")
        case "exit":
            raise SystemExit(3)
        case "retry":
            return Retry(after=5, reason="later")
        case "park":
            return Park("not for us")
        case "skip":
            return Skip("old")
    return None


async def answer_async(message: Message) -> object:
    """Do the same."""
    return answer(message)


@pytest.mark.parametrize("handler", [answer, answer_async])
def test_answers(bench: Bench, handler: Callable[[Message], object]) -> None:
    """What is raised or answered is one attempt of that message, whatever the others do."""
    ids = bench.send("raise", "exit", "fine", "retry", "park", "skip")
    counts = bench.consume(bench.declare(handler, concurrency=3, **OUTSIDE))
    assert (counts.done, counts.failed, counts.parked) == (2, 3, 1)
    inbox = bench.inbox()
    assert [inbox[id_].status for id_ in ids] == ["failed", "failed", "consumed", "failed", "parked", "consumed"]
    assert "SystemExit" in str(inbox[ids[1]].error)
    assert list(offsets(bench).values()) == [6]


def test_failed_messages_are_retried(bench: Bench) -> None:
    """A retry is the next attempt, and a success ends it; what is used up is parked."""
    attempts: list[int] = []

    def handle(message: Message) -> None:
        attempts.append(message.attempt)
        if message.body == "never" or message.attempt < 3:
            raise ValueError("not yet")

    bench.send("third", key="a")
    bench.send("never", key="b")
    consumer = bench.declare(handle, concurrency=2, retry_delays=(1.0, 1.0, 1.0), **OUTSIDE)
    bench.consume(consumer)
    for _ in range(3):
        bench.retry(consumer)
    assert sorted(attempts) == [1, 1, 2, 2, 3, 3, 4]
    assert bench.statuses() == [("consumed", 3), ("parked", 4)]
    assert bench.rows("SELECT DISTINCT starts FROM outbox.consumer_message") == [0]


def test_ordered_group_retries_in_place(bench: Bench) -> None:
    """With ordered=True one message of the queue runs at a time, and the next ones wait for its retry."""
    handled: list[tuple[Any, int]] = []

    def handle(message: Message) -> None:
        handled.append((message.body, message.attempt))
        if message.attempt == 1 and message.body == "b":
            raise ValueError("no")

    bench.send("a", "b", "c")
    consumer = bench.declare(handle, concurrency=5, ordered=True, retry_delays=(60.0,), **OUTSIDE)
    bench.consume(consumer)
    assert handled == [("a", 1), ("b", 1)]
    bench.age_retries()
    bench.consume(consumer)
    assert handled == [("a", 1), ("b", 1), ("b", 2), ("c", 1)]
    assert bench.statuses() == [("consumed", 1), ("consumed", 2), ("consumed", 1)]


def test_filter_leaves_messages_out(bench: Bench) -> None:
    """What the filter leaves out has no inbox row, and the offset passes it, also where nothing is handled."""
    bench.send("x", tag="a")
    bench.send("y", "z", tag="b")
    consumer = bench.declare(Meeting(1), tags=["a"], **OUTSIDE)
    assert bench.consume(consumer).done == 1
    assert len(bench.inbox()) == 1
    assert list(offsets(bench).values()) == [3]


@pytest.mark.parametrize("is_async", [False, True])
def test_time_out_is_a_failed_attempt(bench: Bench, is_async: bool) -> None:
    """A handler that takes too long has failed; a task is cancelled, a thread goes on to no avail."""
    ended = threading.Event()

    def hang(message: Message) -> None:
        if message.body == "hang":
            ended.wait(60)

    async def hang_async(message: Message) -> None:
        if message.body == "hang":
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

    ids = bench.send("hang", "fine")
    consumer = bench.declare(hang_async if is_async else hang, concurrency=2, timeout=0.2, ordered=False, **OUTSIDE)
    counts = bench.consume(consumer)
    assert (counts.done, counts.failed) == (1, 1)
    row = bench.inbox()[ids[0]]
    assert (row.status, row.attempts) == ("failed", 1)
    assert "took longer than 0.2 s" in str(row.error)
    assert ended.wait(60) if is_async else not ended.is_set()
    ended.set()


def test_handlers_that_hang_keep_their_share(bench: Bench) -> None:
    """When all that may run hang, nothing more is begun until one of them has ended."""
    ended = threading.Event()
    begun: list[Any] = []

    def hang(message: Message) -> None:
        begun.append(message.body)
        ended.wait(60)

    bench.send(*range(5))
    consumer = bench.declare(hang, concurrency=2, timeout=0.1, ordered=False, **OUTSIDE)
    bench.consume(consumer)
    assert begun == [0, 1]
    ended.set()
    wait_until(lambda: bench.consume(consumer) and len(begun) == 5, "the others are handled")
    assert begun == [0, 1, 2, 3, 4]


def test_nothing_is_open_while_a_handler_runs(bench: Bench) -> None:
    """No connection is in a transaction, or holds a snapshot, while a handler runs."""
    open_ones = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        " AND backend_type = 'client backend' AND (xact_start IS NOT NULL OR backend_xmin IS NOT NULL)"
    )

    def handle(_: Message) -> None:
        # Begun by a pass, which looks for more messages at that moment.
        wait_until(lambda: bench.value(open_ones) == 0, "nothing is open")

    bench.send(0, 1)
    assert bench.consume(bench.declare(handle, **OUTSIDE)).done == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"concurrency": 5}, "are for transactional=False"),
        ({"timeout": 5}, "are for transactional=False"),
        ({"transactional": False, "batch": 5}, "give concurrency="),
        ({"transactional": False, "threads": 2}, "give concurrency="),
        ({"transactional": False, "concurrency": 0}, "must be at least 1"),
        ({"transactional": False, "timeout": 0}, "greater than 0"),
    ],
)
def test_options_that_can_not_work(bench: Bench, settings: Settings, options: dict[str, Any], text: str) -> None:
    """A declaration that contradicts itself is refused, and says what to give instead."""

    def handle(message: Message, session: object = None) -> None:
        """Do nothing."""

    with pytest.raises(InvalidHandler, match=text):
        bench.declare(handle, settings=settings, **options)


def test_what_can_not_be_written_of_one_queue_stops_no_other(bench: Bench) -> None:
    """Results of all queues are written together; what fails so is written queue by queue, and told."""
    bench.run(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN IF NEW.queue = 3 THEN RAISE EXCEPTION 'not this queue'; END IF; RETURN NEW; END $$"
    )
    bench.run("CREATE TRIGGER refuse BEFORE INSERT ON outbox.consumer_message FOR EACH ROW EXECUTE FUNCTION refuse()")
    bench.app.declare_topic("t", 8)
    called = Counter[Any]()

    def handle(message: Message) -> None:
        called[message.queue] += 1

    for queue in range(8):
        bench.send(*range(20), key=None, queue=queue)
    consumer = bench.declare(handle, concurrency=8, **OUTSIDE)
    for _ in range(3):
        with pytest.raises(DBAPIError, match="not this queue"):
            bench.consume(consumer)
    assert offsets(bench) == {queue: 20 for queue in range(8) if queue != 3}
    assert 0 < called[3] <= 8
    bench.run("DROP TRIGGER refuse ON outbox.consumer_message")
    bench.consume(consumer)
    assert bench.statuses() == [("consumed", 1)] * 160
    assert called == Counter(dict.fromkeys(range(8), 20))


def test_a_queue_that_is_lost_takes_no_result_of_others_along(bench: Bench) -> None:
    """Another worker has taken one over meanwhile: what came of its message is refused, and no other."""
    bench.app.declare_topic("t", 8)
    all_began, other = threading.Barrier(8), 5

    def handle(_: Message) -> None:
        if all_began.wait(60) == 0:
            bench.run(
                "INSERT INTO outbox.consumer_lease"
                " (consumer_group, topic, queue, term, renewal, worker, started, until)"
                " SELECT consumer_group, topic, queue, term + 1, 0, 'other', 0, clock_timestamp() + interval '1 hour'"
                "   FROM outbox.consumer_lease WHERE queue = 5 ORDER BY term DESC, renewal DESC LIMIT 1"
            )
        all_began.wait(60)

    ids = [bench.send(queue, key=None, queue=queue)[0] for queue in range(8)]
    bench.consume(bench.declare(handle, concurrency=8, **OUTSIDE))
    assert set(bench.inbox()) == set(ids) - {ids[other]}
