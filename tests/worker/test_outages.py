"""PostgreSQL goes away and comes back while messages are sent and handled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import UUID

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from outbox import embedded
from outbox.worker import Worker
from tests.kit import wait_until
from tests.worker.conftest import Bench


@contextmanager
def load(bench: Bench) -> Iterator[list[UUID]]:
    """Send without a pause, whatever the server does; yields the ids of which the commit was confirmed."""
    ids: list[UUID] = []
    stop = threading.Event()

    def send() -> None:
        while not stop.wait(0.002):
            try:
                ids.extend(bench.send())
            except DBAPIError:
                continue

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield ids
    finally:
        stop.set()
        thread.join()


def wait_for_more(ids: list[UUID], count: int) -> None:
    """Wait until so many more messages are sent."""
    before = len(ids)
    wait_until(lambda: len(ids) >= before + count, "messages are sent")


def settle(bench: Bench, ids: list[UUID]) -> None:
    """Wait until all is handled; nothing may be lost or doubled, what the server committed unseen included."""
    committed = "SELECT half_id FROM outbox.op_message"
    wait_until(lambda: len(bench.effects()) >= len(bench.rows(committed)), "all messages are handled")
    effects = bench.effects()
    assert sorted(effects) == sorted(bench.rows(committed))
    assert set(ids) <= set(effects)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("outage", ["restart", "kill"])
def test_a_server_that_goes_away_and_comes_back(
    own_server: embedded.Server, own_url: str, new_bench: Callable[..., Bench], outage: str, is_async: bool
) -> None:
    """Under load PostgreSQL is restarted or killed, twice: all goes on by itself, nothing lost, nothing doubled."""
    bench = new_bench(own_url)
    bench.outbox.consumer("paid", group="mail", threads=2)(bench.handle_async if is_async else bench.handle)
    worker = bench.work()
    with load(bench) as ids:
        for _ in range(2):
            wait_for_more(ids, 20)
            if outage == "restart":
                own_server.restart()
            else:
                own_server.kill()
                own_server.start()
        wait_for_more(ids, 20)
    settle(bench, ids)
    wait_until(lambda: all(not h.failures for h in worker.health().values()), "every duty has recovered")
    assert worker.stop()


def test_connections_that_are_cut_one_by_one(bench: Bench) -> None:
    """The server ends connections at random under load: nothing is lost, nothing doubled, no attempt charged."""
    bench.outbox.consumer("paid", group="mail", threads=2)(bench.handle)
    bench.work()
    terminate = text(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid() ORDER BY random() LIMIT 1"
    )
    with load(bench) as ids:
        for _ in range(20):
            wait_for_more(ids, 5)
            with bench.observer.begin() as connection:
                connection.execute(terminate)
    settle(bench, ids)
    assert set(bench.inbox()) == {("consumed", 1)}


def test_not_ready_while_a_sequence_is_behind_its_table(bench: Bench) -> None:
    """After a switch-over by logical replication dispatch refuses to go on, which is told; the mend makes it ready."""
    bench.send(count=3)
    with Worker(bench.outbox, roles=["dispatch"]):
        wait_until(lambda: bench.rows("SELECT count(*) FROM outbox.message") == [3], "all are dispatched")
    bench.run("UPDATE outbox.dispatch_cursor SET system_identifier = system_identifier - 1")
    bench.run("ALTER SEQUENCE outbox.op_sequence RESTART")
    worker = bench.work(roles=["dispatch"])
    wait_until(lambda: worker.health()["dispatch"].unusable, "dispatch refuses")
    assert not worker.is_ready()
    assert "SELECT setval('outbox.op_sequence', 3)" in str(worker.health()["dispatch"].last_error)
    bench.run("SELECT setval('outbox.op_sequence', 3)")
    bench.send()
    wait_until(worker.is_ready, "it is ready")
    wait_until(lambda: bench.rows("SELECT count(*) FROM outbox.message") == [4], "dispatch goes on")
