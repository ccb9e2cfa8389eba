"""A worker's host that vanishes: the server is told, for each of our transactions, when to give it up."""

from __future__ import annotations

import logging
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, event, text

from outbox import Message, Settings
from outbox.dispatch.once import dispatch_lock, dispatch_once, release_due_once
from outbox.operator.health import rules
from outbox.worker import report
from outbox.worker.connections import WorkerDatabase
from tests.doctor.relay import relay
from tests.kit import dispatch_all, wait_until
from tests.worker.conftest import Bench

LIMITS = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_user_timeout", "idle_in_transaction_session_timeout")
SETTINGS = text("SELECT " + ", ".join(f"current_setting('{name}')" for name in LIMITS))


@pytest.mark.parametrize("is_async", [False, True])
def test_the_server_probes_a_worker(bench: Bench, is_async: bool) -> None:
    """The server probes the host of a handler while it runs; a handler that waits for something is no dead host."""
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
def test_a_dispatch_that_idles_is_ended(bench: Bench, one_pass: Any) -> None:
    """A transaction of ours alone that idles is ended by the server; nothing of it stays for the session."""
    engine = create_engine(bench.engine.url)
    found: list[Any] = []

    @event.listens_for(engine, "commit")
    def read(connection: Connection) -> None:
        found.append(connection.execute(SETTINGS).one()[-1])

    with engine.connect() as connection:
        one_pass(connection, Settings())
        assert found == ["1min"]
        assert connection.execute(SETTINGS).one()[-1] == "0"
        connection.rollback()
    engine.dispose()


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
        wait_until(lambda: any(getattr(each, "event", "") == "lock.held" for each in caplog.records), "it says so")
        (record,) = (each for each in caplog.records if getattr(each, "event", "") == "lock.held")
        assert (record.__dict__["pid"], record.__dict__["lock"]) == (pid, "dispatch")
    dispatch_all(bench.engine)
