"""Handlers outside of transactions, and a worker that is cut off, stands still, or sits behind a pooler."""

from __future__ import annotations

import asyncio
import datetime as dt
import getpass
import multiprocessing
import os
import signal
import socket
import subprocess
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import URL, NullPool, create_engine, text
from sqlalchemy.exc import OperationalError

from examples.bank_transfer.ports import free_port
from outbox import Message, Settings
from outbox.consumer.meter import HandlerMeter
from outbox.consumer.outside.calls import Call, CallContext, Calls
from outbox.consumer.outside.sql import LEASE_SECONDS
from outbox.consumer.subscription import Entry, Subscription
from outbox.database.engines import start_loop
from outbox.database.execute import driver_of
from outbox.telemetry.events import LeaseLost
from outbox.telemetry.hooks import TelemetryEvent
from tests.consumer import outside_workers
from tests.consumer.outside_workers import CONCURRENCY, Effects
from tests.consumer.test_leases import lapse
from tests.doctor.relay import relay
from tests.kit import at_once, consume_all, declare, wait_until
from tests.kit.bench import Bench, Ward
from tests.kit.programs import program

OUTSIDE: dict[str, Any] = {"transactional": False, "ordered": False}
ID = UUID(int=1)
BORN = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)


class Tasks:
    """An async handler that waits until its gate is open, or it is cancelled."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun: list[Any] = []
        self.cancelled: list[Any] = []

    async def __call__(self, message: Message) -> None:
        """Wait."""
        self.begun.append(message.body)
        try:
            while not self.open.is_set():
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.cancelled.append(message.body)
            raise


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tasks]:
    """Handlers that end with the test; their lease is renewed all the time, so that a cut is seen soon."""
    monkeypatch.setattr("outbox.consumer.outside.leased_queue._RENEW_LEFT", LEASE_SECONDS)
    tasks = Tasks()
    yield tasks
    tasks.open.set()


def cut_off(bench: Bench, consumer: Any, tasks: Tasks, count: int) -> None:
    """Run a pass, and cut its connection when so many handlers run."""

    def one_pass() -> None:
        with bench.consumer.connect() as connection:
            driver = driver_of(connection)
            with pytest.raises(OperationalError):
                consumer.consume_once(connection, connection)
            driver.close()

    running = threading.Thread(target=one_pass)
    running.start()
    wait_until(lambda: len(tasks.begun) == count, "the handlers run")
    bench.connection.close()
    bench.source.close()
    bench.cut()
    bench.consumer.dispose()
    running.join(60)
    assert not running.is_alive()


def consume(bench: Bench, consumer: Any) -> None:
    """Consume on a new connection."""
    with bench.consumer.connect() as connection:
        consume_all(consumer, connection, connection)


def test_tasks_outlive_a_lost_connection(bench: Bench, tasks: Tasks) -> None:
    """The next connection finds them running; they are one attempt."""
    bench.send("a", "b")
    consumer = bench.declare(tasks, concurrency=2, **OUTSIDE)
    cut_off(bench, consumer, tasks, 2)
    tasks.open.set()
    consume(bench, consumer)
    assert (sorted(tasks.begun), tasks.cancelled) == (["a", "b"], [])
    assert bench.statuses() == [("consumed", 1)] * 2


def test_tasks_end_with_their_lease(bench: Bench, tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing is known of the database, no task outlives the lease; that was no attempt."""
    monkeypatch.setattr("outbox.consumer.outside.leased_queue.LEASE_SECONDS", 0.5)
    bench.send("a", "b")
    consumer = bench.declare(tasks, concurrency=2, **OUTSIDE)
    cut_off(bench, consumer, tasks, 2)
    wait_until(lambda: len(tasks.cancelled) == 2, "the tasks are cancelled")
    tasks.open.set()
    consume(bench, consumer)
    assert sorted(tasks.begun) == ["a", "a", "b", "b"]
    assert bench.statuses() == [("consumed", 1)] * 2


def test_a_task_that_has_not_begun_ends_with_its_lease() -> None:
    """The loop is busy when a call is started, and when its expiry is ordered: that isn't lost."""
    loop, thread = start_loop("busy")
    free = threading.Event()
    loop.call_soon_threadsafe(free.wait, 60)
    subscription = Subscription("t", wait_for_ever, group="g", retry_delays=(), **OUTSIDE)
    calls = Calls(subscription, HandlerMeter(), CallContext(loop=loop))
    call = Call(0, Entry(1, ID, Message(ID, "t", 0, 1, None, None, "application/json", b"1", BORN, BORN)), 1)
    try:
        calls.start([call])
        calls.expire([call], 0)
        free.set()
        assert calls.wait(60) == [call]
    finally:
        free.set()
        calls.end()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
    assert call.has_expired


async def wait_for_ever(_: Message) -> None:
    """Wait until the task is cancelled."""
    await asyncio.Event().wait()


def test_tasks_of_a_queue_that_was_taken_over_are_cancelled(
    bench: Bench, tasks: Tasks, heard: list[TelemetryEvent]
) -> None:
    """When the worker comes back, another one has handled its messages."""
    bench.send("a", "b")
    consumer, other = bench.declare(tasks, concurrency=2, **OUTSIDE), bench.declare(ward := Ward(), **OUTSIDE)
    cut_off(bench, consumer, tasks, 2)
    lapse(bench)
    consume(bench, other)
    consume(bench, consumer)
    assert (sorted(ward.done), sorted(tasks.begun)) == (["a", "b"], ["a", "b"])
    wait_until(lambda: len(tasks.cancelled) == 2, "the tasks are cancelled")
    assert [(event.calls, event.results) for event in heard if isinstance(event, LeaseLost)] == [(2, 0)]
    assert bench.statuses() == [("consumed", 1)] * 2


def test_a_worker_that_stood_still_for_too_long_writes_nothing(bench: Bench, tmp_path: Path) -> None:
    """SIGSTOP past the end of its lease: another worker handles all; what was in flight is all that is repeated."""
    bench.send(*range(20))
    effects = Effects(tmp_path / "effects")
    context = multiprocessing.get_context("forkserver")
    lifeline, held = context.Pipe(duplex=False)
    url = bench.consumer.url.render_as_string(hide_password=False)
    process = context.Process(
        target=outside_workers.start, args=(lifeline, url, str(effects.path), "gate"), daemon=True
    )
    process.start()
    assert process.pid
    handled: list[int] = []
    try:
        wait_until(lambda: len(effects.bodies()) == CONCURRENCY, "it handles as many as it may")
        os.kill(process.pid, signal.SIGSTOP)
        lapse(bench)
        bench.consume(bench.declare(lambda message: handled.append(message.body), concurrency=4, **OUTSIDE))
        rows = bench.rows("SELECT message_id, status, changed_at FROM outbox.consumer_message ORDER BY 1")
    finally:
        effects.gate.touch()
        os.kill(process.pid, signal.SIGCONT)
        process.join(120)
    held.close()
    assert process.exitcode == 0
    assert sorted(handled) == list(range(20))
    assert len(effects.bodies()) == CONCURRENCY
    assert bench.rows("SELECT message_id, status, changed_at FROM outbox.consumer_message ORDER BY 1") == rows
    assert bench.value("SELECT max(position) FROM outbox.consumer_offset") == 20


def test_time_limits_of_transactions_are_of_no_concern(bench: Bench) -> None:
    """A server that ends idle transactions at once, and long ones, ends no handler's work."""
    name = bench.consumer.url.database
    for limit in ("idle_in_transaction_session_timeout", "statement_timeout"):
        bench.run(f"ALTER DATABASE {name} SET {limit} = '100ms'")
    bench.send("a")

    def handle(_: Message) -> None:
        with bench.consumer.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("SET statement_timeout = 0"))
            connection.execute(text("SELECT pg_sleep(0.3)"))

    consumer = bench.declare(handle, **OUTSIDE)
    bench.connection.close()
    bench.consumer.dispose()
    consume(bench, consumer)
    assert bench.statuses() == [("consumed", 1)]


# --- poolers ---------------------------------------------------------------------------------------------


@pytest.fixture(params=["in miniature", "PgBouncer"])
def pooler(request: pytest.FixtureRequest, bench: Bench) -> Iterator[URL]:
    """The address of a pooler in transaction mode; the real one, where it is installed, has one server connection."""
    server = bench.consumer.url
    with ExitStack() as stack:
        if request.param == "PgBouncer":
            yield stack.enter_context(pgbouncer(program("pgbouncer", package="pgbouncer"), server))
        else:
            yield stack.enter_context(relay(server))


@contextmanager
def pgbouncer(path: str, server: URL) -> Iterator[URL]:
    """Run PgBouncer with one server connection for all clients together; yield its address."""
    port = free_port()
    url = server.set(host="127.0.0.1", port=port, query={})
    host = server.query.get("host") or server.host
    ini = f"""
        [databases]
        {server.database} = host={host} port={server.port or 5432} user={server.username} password={server.password}
        [pgbouncer]
        listen_addr = 127.0.0.1
        listen_port = {port}
        unix_socket_dir =
        auth_type = any
        pool_mode = transaction
        default_pool_size = 1
    """
    # It doesn't run as root, nor does another user come to the folders of a test.
    user = ["-u", "nobody"] if getpass.getuser() == "root" else []
    with tempfile.NamedTemporaryFile("w", suffix=".ini") as file:
        file.write(textwrap.dedent(ini))
        file.flush()
        Path(file.name).chmod(0o644)
        process = subprocess.Popen([path, *user, file.name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def listens() -> bool:
            assert process.poll() is None
            with socket.socket() as client:
                return client.connect_ex(("127.0.0.1", port)) == 0

        try:
            wait_until(listens, "PgBouncer listens")
            yield url
        finally:
            process.kill()
            process.wait()


def test_behind_a_transaction_pooler(bench: Bench, pooler: URL, settings: Settings) -> None:
    """Two workers share one server connection while handlers of both run: none of them keeps it."""
    for number in range(10):
        bench.send(number, key=str(number))
    handled: list[Any] = []
    both = threading.Barrier(2)

    def handle(message: Message) -> None:
        handled.append(message.body)
        if len(handled) <= 2:
            both.wait(60)

    def work() -> None:
        engine = create_engine(pooler, poolclass=NullPool, connect_args={"prepare_threshold": None})
        consumer = declare(engine, "t", "g", handle, settings=settings, **OUTSIDE)
        with engine.connect() as connection:
            consumer.start(connection, connection)
            while bench.value("SELECT count(*) FROM outbox.consumer_message") < 10:
                consumer.consume_once(connection, connection)

    at_once(work, work)
    assert sorted(handled) == list(range(10))
    assert set(bench.statuses()) == {("consumed", 1)}
