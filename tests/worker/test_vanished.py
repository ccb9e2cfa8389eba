"""A worker's host that vanishes: the server is told, for each of our transactions, when to give it up."""

from __future__ import annotations

import logging
import socket
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import Connection, text

from outbox import Message, Settings
from outbox.database.engines import discard
from outbox.database.execute import Row, Statement, driver_of, execute
from outbox.dispatch import dispatch_pass
from outbox.dispatch.dispatch_pass import dispatch_lock, dispatch_once, release_due_once
from outbox.operator.health import rules
from outbox.worker import report
from outbox.worker.connections import WorkerDatabase
from tests.doctor.relay import relay
from tests.kit import dispatch_all, wait_until
from tests.worker.conftest import Bench

TCP_REPAIR = 19  # linux/tcp.h; Python has no name for it
LIMITS = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_user_timeout", "idle_in_transaction_session_timeout")
SETTINGS = text("SELECT " + ", ".join(f"current_setting('{name}')" for name in LIMITS))


@pytest.mark.parametrize("is_async", [False, True])
def test_the_server_notices_a_worker_that_is_gone(bench: Bench, is_async: bool) -> None:
    """The server tests the host of a handler while it runs; a handler that waits for something is no dead host."""
    found: list[Any] = []

    def handle(message: Message, session: Any) -> None:
        found.append(tuple(session.execute(SETTINGS).one()))

    async def handle_async(message: Message, session: Any) -> None:
        found.append(tuple((await session.execute(SETTINGS)).one()))

    bench.outbox.consumer("paid", group="mail")(handle_async if is_async else handle)
    bench.work()
    bench.send()
    wait_until(lambda: found, "it is handled")
    assert found == [("10", "5", "25000", "0")]


def test_a_pooler_is_left_alone(bench: Bench) -> None:
    """Behind a transaction pooler nothing is set, since others would get the session."""
    with relay(bench.engine.url) as url, closing(WorkerDatabase(url).connect()) as connection:
        assert connection.execute(SETTINGS).one()[2:] == ("0", "0")
    with closing(WorkerDatabase(bench.engine.url).connect()) as connection:
        assert connection.execute(SETTINGS).one()[2:] == ("25000", "0")


@pytest.mark.parametrize("one_pass", [dispatch_once, release_due_once])
def test_a_dispatch_that_idles_is_ended(bench: Bench, one_pass: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a pass takes several round trips, its transaction is ended when it idles; the session isn't."""
    found: list[Any] = []

    def without_commit(connection: Connection, *statements: Statement, **_: Any) -> list[list[Row]]:
        rows = execute(connection, *statements)
        found.append(connection.execute(SETTINGS).one()[-1])
        return rows

    dispatch_all(bench.engine)
    bench.send()
    monkeypatch.setattr(dispatch_pass, "execute", without_commit)
    with bench.engine.connect() as connection:
        one_pass(connection, Settings())
        assert found[-1] == "1min"
        assert connection.execute(SETTINGS).one()[-1] == "0"
    dispatch_all(bench.engine)


def test_workers_name_who_keeps_a_lock(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker says in its log which transaction keeps dispatch from all workers, and since when."""
    monkeypatch.setattr(report, "Thresholds", lambda: rules.Thresholds(lock=0))
    bench.send()
    with bench.engine.connect() as holder, caplog.at_level(logging.WARNING, "outbox.worker"):
        holder.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": dispatch_lock("outbox")})
        pid = holder.scalar(text("SELECT pg_backend_pid()"))
        bench.work()
        wait_until(
            lambda: any(getattr(each, "outbox_event", "") == "lock.held" for each in caplog.records), "it says so"
        )
        (record,) = (each for each in caplog.records if getattr(each, "outbox_event", "") == "lock.held")
        assert (record.__dict__["pid"], record.__dict__["lock"]) == (pid, "dispatch")
    dispatch_all(bench.engine)


def vanish(connection: Connection) -> None:
    """End the client's side of a TCP connection without a word to the server, as a host does that loses its power."""
    driver = driver_of(connection)
    with socket.socket(fileno=socket.dup(driver.fileno())) as sock:
        try:
            # What the server sent last must be acknowledged: sent again, it would find that the socket is gone.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            sock.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
        except OSError:
            driver.close()
            pytest.skip("only Linux can do that, and only with the capability CAP_NET_ADMIN")
    driver.close()
    discard(connection)


def test_a_worker_s_host_vanishes(bench: Bench) -> None:
    """The transaction of a worker whose host is gone is ended by the server, and its lock is free for others."""
    connection = WorkerDatabase(bench.engine.url).connect()
    connection.exec_driver_sql("BEGIN")
    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": dispatch_lock("outbox")})
    pid = connection.scalar(text("SELECT pg_backend_pid()"))
    vanish(connection)
    assert bench.connections(f"pid = {pid} AND state = 'idle in transaction'") == 1
    bench.send()
    wait_until(lambda: dispatch_all(bench.engine).done, "another one dispatches")
    assert bench.connections(f"pid = {pid}") == 0
