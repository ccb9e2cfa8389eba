"""From send to effect through a running worker."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text

from outbox import Message, Outbox, Retry, Settings, embedded
from outbox.consumer.consumer import Consumer
from outbox.errors import InvalidSettings, SchemaMissing
from outbox.worker import Worker
from tests.kit import make_odd_schema, wait_until
from tests.worker.conftest import Bench

NewBench = Callable[..., Bench]
OTHERS = (
    "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
    "AND backend_type = 'client backend'"
)


def test_what_is_sent_takes_effect_once(bench: Bench) -> None:
    """Messages sent before and after the start are handled, each exactly once."""
    bench.outbox.consumer("paid", group="mail")(bench.handle)
    ids = bench.send(count=20)
    bench.work()
    ids += bench.send(count=20)
    wait_until(lambda: len(bench.effects()) >= 40, "all messages are handled")
    assert sorted(bench.effects()) == sorted(ids)
    assert bench.inbox() == [("consumed", 1)] * 40


@pytest.mark.parametrize(("roles", "warned"), [(None, True), (["consume", "bulk"], True), (["dispatch"], False)])
def test_what_it_says_at_its_start(
    bench: Bench, roles: list[str] | None, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """One line names groups, topics and checkers; a worker that may consume and has no consumer warns of that."""
    caplog.set_level(logging.INFO, "outbox.worker")

    def told(code: str) -> list[logging.LogRecord]:
        return [record for record in caplog.records if getattr(record, "outbox_event", "") == code]

    bench.work(roles=roles).stop()
    (started,) = told("worker.started")
    assert (started.levelname, "consumes nothing" in started.getMessage()) == (
        ("WARNING", True) if warned else ("INFO", False)
    )
    caplog.clear()
    bench.outbox.consumer("paid", group="mail")(bench.handle)
    bench.outbox.consumer("sent", group="mail")(bench.handle)
    bench.outbox.checker("due")(lambda orphan: None)
    bench.work(roles=roles).stop()
    (started,) = told("worker.started")
    consumes, checks = roles is None or "consume" in roles, roles is None
    facts = vars(started)
    assert (facts["groups"], facts["topics"]) == ((["mail"], ["paid", "sent"]) if consumes else ([], []))
    assert facts["checkers"] == (["due"] if checks else [])
    assert started.levelname == "INFO"


def test_every_group_sees_every_message(bench: Bench) -> None:
    """Two groups of a topic, one of them with threads, each handle all messages."""
    bench.outbox.consumer("paid", group="mail", threads=3)(bench.handle)
    bench.outbox.consumer("paid", group="audit", batch=10)(bench.handle)
    bench.work()
    ids = bench.send(count=30)
    wait_until(lambda: len(bench.effects()) >= 60, "both groups are done")
    assert sorted(bench.effects()) == sorted(ids * 2)


def test_async_handlers(bench: Bench) -> None:
    """A coroutine handler runs in an event loop, which keeps its tasks between messages."""
    left_behind = threading.Event()

    @bench.outbox.consumer("paid", group="mail", threads=2)
    async def handle(message: Message, session: Any) -> None:
        import asyncio

        await bench.handle_async(message, session)

        async def later() -> None:
            await asyncio.sleep(0)
            left_behind.set()

        handle.tasks.add(asyncio.create_task(later()))  # type: ignore[attr-defined]

    handle.tasks = set()  # type: ignore[attr-defined]
    worker = bench.work()
    ids = bench.send(count=20)
    wait_until(lambda: len(bench.effects()) >= 20, "all messages are handled")
    assert sorted(bench.effects()) == sorted(ids)
    assert left_behind.wait(60)
    assert worker.stop()


def test_an_outbox_on_an_async_engine(new_database: Callable[[], str], bench: Bench) -> None:
    """Bound to an AsyncEngine, sync and async handlers and the producer's duties work from its URL."""
    from sqlalchemy.ext.asyncio import create_async_engine

    url = bench.engine.url
    outbox = Outbox(create_async_engine(url), settings=Settings())
    outbox.consumer("paid", group="sync")(bench.handle)
    outbox.consumer("paid", group="async")(bench.handle_async)
    with Worker(outbox):
        ids = bench.send(count=5)
        wait_until(lambda: len(bench.effects()) >= 10, "both groups are done")
    assert sorted(bench.effects()) == sorted(ids * 2)


@pytest.mark.parametrize("as_url", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_consumer_in_another_database(
    new_bench: NewBench, new_engine: Callable[..., Engine], as_url: bool, is_async: bool
) -> None:
    """The producer's worker dispatches, the consumer's worker reads from there and writes here."""
    producer, consumer = new_bench(), new_bench()
    url = producer.engine.url
    source = url.render_as_string(hide_password=False) if as_url else producer.engine
    consumer.outbox.consumer("paid", group="mail", source=source)(
        consumer.handle_async if is_async else consumer.handle
    )
    producer.work()
    consumer.work(roles=["consume", "retry", "prune"])
    ids = producer.send(count=10)
    wait_until(lambda: len(consumer.effects()) >= 10, "all messages are handled")
    assert sorted(consumer.effects()) == sorted(ids)
    assert producer.effects() == []


def test_without_notifications_polling_is_enough(new_bench: NewBench) -> None:
    """With LISTEN switched off everything arrives all the same."""
    bench = new_bench(listen=False)
    bench.outbox.consumer("paid", group="mail")(bench.handle)
    bench.work()
    ids = bench.send(count=10)
    wait_until(lambda: len(bench.effects()) >= 10, "all messages are handled")
    assert sorted(bench.effects()) == sorted(ids)
    assert bench.rows(f"SELECT count(*) {OTHERS} AND query ~ 'LISTEN'") == [0]


def test_notifications_of_another_worker(new_bench: NewBench, caplog: pytest.LogCaptureFixture) -> None:
    """A worker that only consumes, and would look by itself once an hour, hears of messages from the dispatcher's."""
    caplog.set_level(logging.INFO, "outbox.worker")
    bench = new_bench(idle_wait=3600.0)
    bench.outbox.consumer("paid", group="mail")(bench.handle)
    other = new_bench(bench.engine.url.render_as_string(hide_password=False))
    bench.work(roles=["consume"])
    wait_until(lambda: "arrive" in caplog.text, "the listener has proved itself")
    other.work(roles=["dispatch"])
    ids = bench.send(count=3)
    wait_until(lambda: len(bench.effects()) >= 3, "all messages are handled")
    assert sorted(bench.effects()) == sorted(ids)


def test_consumers_hear_of_their_queues(new_bench: NewBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the dispatch of their own worker, and by notification from that of another one; of other topics, nothing."""
    heard: list[tuple[str, int | None]] = []
    wake = Consumer.wake

    def note(self: Consumer, queue: int | None = None) -> None:
        heard.append((self.subscription.group, queue))
        wake(self, queue)

    monkeypatch.setattr(Consumer, "wake", note)
    bench = new_bench()
    bench.outbox.declare_topic("paid", 8)
    bench.outbox.consumer("paid", group="mail")(bench.handle)
    bench.outbox.consumer("shipped", group="other-topic")(bench.handle)
    other = new_bench(bench.engine.url.render_as_string(hide_password=False))
    other.outbox.consumer("paid", group="other-worker")(other.handle)
    other.work(roles=["consume"])
    bench.work()
    ids: list[object] = []

    def both_have_heard() -> bool:
        ids.extend(bench.send(queue=5))
        return {("mail", 5), ("other-worker", 5)} <= set(heard)

    wait_until(both_have_heard, "both are told of the queue")
    wait_until(lambda: len(bench.effects()) >= 2 * len(ids), "both have handled all messages")
    assert {queue for group, queue in heard if group == "other-topic"} <= {None}
    assert {queue for group, queue in heard if group != "other-topic"} <= {None, 5}


@pytest.mark.parametrize("listen", [True, False])
def test_consumers_whom_notifications_wake_look_less_by_themselves(new_bench: NewBench, listen: bool) -> None:
    """They needn't look for what they are told of; dispatch is woken by none of the messages that follow each other."""
    bench = new_bench(listen=listen)
    bench.outbox.consumer("paid", group="mail")(bench.handle)
    duties = {duty.name: duty for duty in bench.work()._duties}
    if listen:
        wait_until(duties["consume paid of mail"].is_woken, "the listener has proved itself")
    assert duties["consume paid of mail"].is_woken() is listen
    assert duties["dispatch"].is_woken() is listen


def test_two_workers_share_the_work(bench: Bench) -> None:
    """Two workers with all roles dispatch and consume at once, and nothing is doubled."""
    bench.outbox.consumer("paid", group="mail", threads=2)(bench.handle)
    bench.work()
    bench.work()
    ids = bench.send(count=200)
    wait_until(lambda: len(bench.effects()) >= 200, "all messages are handled")
    assert sorted(bench.effects()) == sorted(ids)
    assert bench.inbox() == [("consumed", 1)] * 200


def test_failures_are_retried(new_bench: NewBench) -> None:
    """What failed is retried by the worker when its delay is over; a delayed message comes when it is due."""
    bench = new_bench(retry_delays=(0.0, 0.0), retry_interval=0.05, release_interval=0.05)

    @bench.outbox.consumer("paid", group="mail")
    def handle(message: Message, session: Any) -> Retry | None:
        bench.handle(message, session)
        return Retry() if message.attempt < 3 else None

    bench.work()
    ids = bench.send() + bench.send(delay=0.2)
    wait_until(lambda: bench.inbox() == [("consumed", 3)] * 2, "both are handled at the third attempt")
    assert sorted(bench.effects()) == sorted(ids)


def test_a_duty_that_fails_stops_no_other(bench: Bench) -> None:
    """While the duties of one group fail, those of another go on; health tells which."""
    bench.outbox.consumer("paid", group="good")(bench.handle)
    gone = create_engine(bench.engine.url.set(database="gone"))
    bench.outbox.consumer("paid", group="bad", source=gone)(bench.handle)
    worker = Worker(bench.outbox)
    with pytest.raises(Exception, match="gone"):
        worker.start()
    bench.outbox.subscriptions.pop(("paid", "bad"))
    worker = bench.work()
    with bench.engine.begin() as connection:
        connection.execute(text("ALTER TABLE outbox.scheduled_message RENAME TO hidden"))
    ids = [bench.send()[0]]
    wait_until(lambda: worker.health()["release"].failures, "the release fails")
    with bench.engine.begin() as connection:
        connection.execute(text("ALTER TABLE outbox.hidden RENAME TO scheduled_message"))
    ids += bench.send()
    wait_until(lambda: sorted(bench.effects()) == sorted(ids), "both messages are handled")
    wait_until(lambda: worker.health()["release"].failures == 0, "the release recovers")
    health = worker.health()
    assert "hidden" in (health["release"].last_error or "") or health["release"].last_error
    assert health["consume paid of good"].last_error is None


def test_roles(bench: Bench) -> None:
    """A worker does what its roles say, and reports; roles that don't exist or leave nothing to do are refused."""
    with pytest.raises(InvalidSettings, match="'cook'"):
        Worker(bench.outbox, roles=["cook"])
    with pytest.raises(InvalidSettings, match="nothing to do"), Worker(bench.outbox, roles=["consume"]):
        pass
    bench.outbox.consumer("paid", group="mail", threads=2)(bench.handle)
    assert set(bench.work(roles=["dispatch"]).health()) == {"dispatch", "report"}
    assert set(bench.work(roles=["consume", "retry"]).health()) == {
        "consume paid of mail #1",
        "consume paid of mail #2",
        "retry paid of mail",
        "look for retries",
        "report",
    }


def test_a_database_without_tables_is_refused(server: embedded.ServerLike) -> None:
    """An unmigrated database is refused before anything runs, with the command that mends it."""
    server.create_database("empty")
    engine = create_engine(server.url("empty"))
    try:
        with (
            pytest.raises(SchemaMissing, match="outbox db upgrade"),
            Worker(Outbox(engine, settings=Settings())),
        ):
            pass
    finally:
        engine.dispose()
        server.drop_database("empty")


def test_connections(bench: Bench) -> None:
    """One connection for each consuming thread and five more, none idle in a transaction, none taken from the pool."""
    bench.outbox.consumer("paid", group="mail", threads=2)(bench.handle)
    bench.outbox.consumer("paid", group="audit")(bench.handle)
    worker = bench.work()
    ids = bench.send(count=10)
    wait_until(lambda: len(bench.effects()) >= 2 * len(ids), "all messages are handled")
    wait_until(lambda: all(health.last_success for health in worker.health().values()), "all duties have run")
    bench.engine.dispose()  # the application's own
    wait_until(lambda: bench.rows(f"SELECT count(*) {OTHERS}") == [2 + 1 + 5], "eight connections are open")
    wait_until(lambda: bench.rows(f"SELECT DISTINCT state {OTHERS}") == ["idle"], "none is in a transaction")
    assert bench.engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    assert worker.stop()
    wait_until(lambda: bench.rows(f"SELECT count(*) {OTHERS}") == [0], "all are closed")


def test_a_worker_is_used_once(bench: Bench) -> None:
    """A second start is refused; stopping twice, or before the start, is no error."""
    worker = Worker(bench.outbox)
    worker.start()
    with pytest.raises(RuntimeError, match="once"):
        worker.start()
    assert worker.stop()
    assert worker.stop()
    with pytest.raises(RuntimeError, match="once"):
        worker.start()
    assert Worker(bench.outbox).stop()


def test_run_returns_when_another_thread_stops_it(bench: Bench) -> None:
    """Outside of the main thread run() installs no signal handlers, and ends with stop()."""
    worker = Worker(bench.outbox)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(worker.run()))
    thread.start()
    wait_until(lambda: worker.health() and worker.health()["dispatch"].last_success, "the worker runs")
    worker.stop()
    thread.join()
    assert codes == [0]


def test_stop_cuts_off_a_handler_that_takes_too_long(bench: Bench) -> None:
    """A handler that outlasts the drain loses its transaction: no effect, no attempt, and it is handled later."""
    entered, leave = threading.Event(), threading.Event()

    @bench.outbox.consumer("paid", group="mail")
    def handle(message: Message, session: Any) -> None:
        bench.handle(message, session)
        entered.set()
        leave.wait(60)

    first = bench.work()
    ids = bench.send()
    assert entered.wait(60)
    assert first.stop(timeout=0.01) is False
    leave.set()
    bench.work()
    wait_until(bench.effects, "the message is handled")
    assert bench.effects() == ids
    assert bench.inbox() == [("consumed", 1)]


def test_stop_cuts_off_an_async_handler(bench: Bench) -> None:
    """A coroutine that outlasts the drain is cancelled, and what it did is rolled back without costing an attempt."""
    entered, cancelled = threading.Event(), threading.Event()
    import asyncio

    @bench.outbox.consumer("paid", group="mail")
    async def handle(message: Message, session: Any) -> None:
        await bench.handle_async(message, session)
        if entered.is_set():
            return
        entered.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    first = bench.work()
    ids = bench.send()
    assert entered.wait(60)
    assert first.stop(timeout=0.01) is False
    assert cancelled.wait(60)
    bench.work()
    wait_until(bench.effects, "the message is handled")
    assert bench.effects() == ids
    assert bench.inbox() == [("consumed", 1)]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_strange_search_path(new_bench: NewBench, new_database: Callable[[], str], is_async: bool) -> None:
    """A worker whose role prefers another schema to pg_catalog means PostgreSQL's functions; handlers find tables."""
    url = new_database()
    bench = new_bench(url)
    with bench.engine.begin() as connection:
        make_odd_schema(connection)
        connection.execute(text("CREATE TABLE odd.only_here (n int)"))
    engine = create_engine(bench.engine.url.update_query_dict({"options": "-csearch_path=odd,pg_catalog,public"}))
    outbox = Outbox(engine, settings=bench.outbox.settings)
    attempts: list[int] = []

    def handle(message: Message, session: Any) -> None:
        attempts.append(message.attempt)
        session.execute(text("SELECT n FROM only_here"))
        if len(attempts) == 1:
            raise RuntimeError("once more")
        bench.handle(message, session)

    async def handle_async(message: Message, session: Any) -> None:
        await session.run_sync(lambda sync: handle(message, sync))

    outbox.consumer("paid", group="mail")(handle_async if is_async else handle)
    ids = bench.send(count=2)
    with Worker(outbox):
        wait_until(lambda: len(bench.inbox()) == 2, "both are seen")
        bench.age_retries()
        wait_until(lambda: sorted(bench.inbox()) == [("consumed", 1), ("consumed", 2)], "both are consumed")
    engine.dispose()
    assert sorted(bench.effects()) == sorted(ids)
