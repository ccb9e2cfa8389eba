"""A worker whose handlers run outside of transactions."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from outbox import Message
from outbox.consumer.outside.sql import LEASE_SECONDS
from outbox.worker import Worker
from tests.kit import wait_until
from tests.worker.conftest import Bench


def consumed(bench: Bench) -> int:
    """Return how many messages are consumed."""
    return int(bench.value("SELECT count(*) FROM outbox.consumer_message WHERE status = 'consumed'"))


def test_messages_are_handled_as_they_come(bench: Bench) -> None:
    """What comes while handlers run is begun too; after the end nothing is leased."""
    first, second = threading.Event(), threading.Event()

    @bench.outbox.consumer("paid", group="mail", transactional=False, concurrency=2)
    def handle(message: Message) -> None:
        if message.key == "first":
            first.set()
            assert second.wait(60)
        else:
            second.set()

    with Worker(bench.outbox):
        send(bench, "first")
        assert first.wait(60)
        send(bench, "second")
        wait_until(lambda: consumed(bench) == 2, "both are consumed")
        wait_until(lambda: leased(bench) == 0, "nothing is leased")


def leased(bench: Bench) -> int:
    """Return how many queues are leased."""
    newest = "SELECT DISTINCT ON (queue) worker FROM outbox.consumer_lease ORDER BY queue, term DESC, renewal DESC"
    return int(bench.value(f"SELECT count(*) FROM ({newest}) n WHERE worker IS NOT NULL"))


def send(bench: Bench, key: str) -> None:
    """Send a message."""
    with bench.engine.begin() as connection:
        bench.outbox.send(connection, "paid", {}, key=key)


def test_failures_are_retried_by_the_worker(new_bench: Callable[..., Bench]) -> None:
    """A failed message is tried again by the same pass, without a notification."""
    bench = new_bench(retry_delays=(0.0, 0.0, 0.0), retry_interval=0.01)
    attempts: list[int] = []

    @bench.outbox.consumer("paid", group="mail", transactional=False, concurrency=2)
    def handle(message: Message) -> None:
        attempts.append(message.attempt)
        if message.attempt < 3:
            raise ValueError("not yet")

    bench.send()
    with Worker(bench.outbox):
        wait_until(lambda: consumed(bench) == 1, "it is consumed")
    assert attempts == [1, 2, 3]


def test_the_end_waits_for_handlers(bench: Bench) -> None:
    """A worker that stops begins nothing more, and writes the results of what runs."""
    begun, go_on = threading.Event(), threading.Event()

    @bench.outbox.consumer("paid", group="mail", transactional=False)
    def handle(message: Message) -> None:
        begun.set()
        assert go_on.wait(60)

    bench.send(count=3)
    worker = Worker(bench.outbox)
    bench.stack.callback(worker.stop)
    worker.start()
    assert begun.wait(60)
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    wait_until(worker._stopping.is_set, "the worker stops")
    go_on.set()
    stopping.join()
    assert consumed(bench) == 1
    assert leased(bench) == 0


def test_async_handlers_run_on_the_loop_of_the_application(bench: Bench) -> None:
    """They are tasks of the loop around the worker, and are cancelled if they outlive its end."""
    loops: list[Any] = []
    cancelled = threading.Event()

    async def main() -> None:
        begun = asyncio.Event()

        @bench.outbox.consumer("paid", group="mail", transactional=False, concurrency=3)
        async def handle(message: Message) -> None:
            loops.append(asyncio.get_running_loop())
            if len(loops) == 3:
                begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        worker = Worker(bench.outbox)
        async with worker:
            await begun.wait()
            await asyncio.to_thread(worker._stop, 0.0)
        assert set(loops) == {asyncio.get_running_loop()}

    bench.send(count=3)
    asyncio.run(main())
    assert cancelled.is_set()
    assert bench.inbox() == []


def test_several_workers_share_the_queues(bench: Bench) -> None:
    """No message is handled twice by three workers, with several outboxes of one group."""
    handled: Counter[str | None] = Counter()
    lock = threading.Lock()

    @bench.outbox.consumer("paid", group="mail", transactional=False, concurrency=4)
    def handle(message: Message) -> None:
        with lock:
            handled[message.key] += 1

    bench.send(count=200)
    workers = [bench.work() for _ in range(3)]
    wait_until(lambda: consumed(bench) == 200, "all are consumed")
    for worker in workers:
        worker.stop()
    assert set(handled.values()) == {1}
    assert len(handled) == 200


def test_one_connection_however_many_handlers_run(new_bench: Callable[..., Bench]) -> None:
    """A group has one connection, and all such groups of a worker one more to be pruned."""
    bench = new_bench(listen=False)
    together = threading.Barrier(20)
    names = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE :name"
    found: list[int] = []

    @bench.outbox.consumer("paid", group="mail", transactional=False, concurrency=20)
    def handle(message: Message) -> None:
        together.wait(60)
        if message.key == "0":
            found.append(bench.value(names, name="outbox/mail/%"))
        together.wait(60)

    @bench.outbox.consumer("paid", group="post", transactional=False, concurrency=20)
    def post(message: Message) -> None:
        """Do nothing."""

    bench.send(count=20)
    bench.work(roles=["dispatch", "consume", "prune"])
    wait_until(lambda: consumed(bench) == 40, "all are consumed")
    # The one to prune may not be open yet.
    assert found[0] in {1, 2}
    assert bench.value(names, name="outbox/mail/%") + bench.value(names, name="outbox/post/%") <= 3


def test_ready_while_a_handler_outlives_an_outage(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose connection was cut is ready as soon as it is back, and not when its handler has ended."""
    monkeypatch.setattr("outbox.consumer.outside.leased_queue._RENEW_LEFT", LEASE_SECONDS)
    begun, go_on = threading.Event(), threading.Event()

    @bench.outbox.consumer("paid", group="mail", transactional=False, timeout=600)
    def handle(message: Message) -> None:
        begun.set()
        assert go_on.wait(600)

    bench.send()
    worker = bench.work()
    assert begun.wait(60)
    wait_until(worker.is_ready, "it is ready")
    bench.cut("application_name = 'outbox/mail/consume'")
    consume = next(name for name in worker.health() if name.startswith("consume"))
    wait_until(lambda: worker.health()[consume].last_error, "the cut is seen")
    try:
        wait_until(worker.is_ready, "it is ready again", 30.0)
        assert consumed(bench) == 0
    finally:
        go_on.set()
    wait_until(lambda: consumed(bench) == 1, "it is consumed")
