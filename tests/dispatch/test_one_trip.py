"""A worker that stops anywhere in a pass, as a host does that vanishes, leaves no lock behind: others dispatch."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from psycopg import generators
from sqlalchemy import Connection, Engine

from outbox import Outbox, Settings
from outbox.dispatch.dispatch_pass import dispatch_once, release_due_once
from outbox.worker.connections import WorkerDatabase
from tests.dispatch.support import assert_dense, dispatch_all, messages, run, scalar, send
from tests.kit import wait_until

PASSES = 6
_OTHERS = "FROM pg_stat_activity a WHERE datname = current_database() AND pid <> pg_backend_pid()"
HOLDING = f"SELECT count(*) {_OTHERS} AND EXISTS (SELECT FROM pg_locks WHERE pid = a.pid AND locktype = 'advisory')"
DUE = "UPDATE outbox.scheduled_message SET deliver_at = clock_timestamp() - interval '1 ms'"


def stop() -> None:
    """Stop this process, until its parent lets it go on."""
    os.kill(os.getpid(), signal.SIGSTOP)


def stopping_passes(url: str, one_pass: Callable[[Connection, Settings], Any]) -> None:
    """Run passes on a worker's connection; stop when a round trip was sent, and again when it was answered."""
    usual_wait, send_all = psycopg.Connection.wait, generators.send

    def wait(connection: psycopg.Connection[Any], *arguments: Any, **options: Any) -> Any:
        answer = usual_wait(connection, *arguments, **options)
        stop()
        return answer

    def sending(libpq: Any) -> Iterator[Any]:
        yield from send_all(libpq)
        stop()

    with closing(WorkerDatabase(url).connect()) as connection, pytest.MonkeyPatch.context() as patch:
        patch.setattr(psycopg.Connection, "wait", wait)
        patch.setattr(generators, "send", sending)
        for _ in range(PASSES):
            one_pass(connection, Settings())


@pytest.mark.parametrize("one_pass", [dispatch_once, release_due_once])
def test_a_worker_that_stops_leaves_no_lock(
    app: Outbox, engine: Engine, connection: Connection, settings: Settings, one_pass: Any
) -> None:
    """Wherever a pass is stopped, the lock is free, another worker dispatches at once, and nothing is lost or doubled.

    Also the first pass of a connection, in which the driver has yet to prepare its statements.
    """
    later: dict[str, Any] = {"delay": 3600} if one_pass is release_due_once else {}
    send(app, 0)
    dispatch_all(connection, settings)
    sent, taken, stops = 1, 0, 0
    url = engine.url.render_as_string(hide_password=False)
    worker = multiprocessing.get_context("spawn").Process(target=stopping_passes, args=(url, one_pass), daemon=True)
    worker.start()
    assert worker.pid is not None
    try:
        while os.WIFSTOPPED(status := os.waitpid(worker.pid, os.WUNTRACED)[1]):
            stops += 1
            wait_until(lambda: not scalar(connection, HOLDING), "the server has done what it was sent")
            send(app, stops, **later)
            sent += 1
            if later:
                dispatch_all(connection, settings)
                run(connection, DUE)
            if stops % 9 == 0:
                taken += one_pass(connection, settings).done
            os.kill(worker.pid, signal.SIGCONT)
    finally:
        worker.kill()
        worker.join()
    assert status == 0  # had it kept the lock, the server would have ended its session after a minute
    assert stops > 2 * PASSES
    assert 0 < taken < len(messages(connection)) - 1  # both have taken some
    dispatch_all(connection, settings)
    while release_due_once(connection, settings).more:
        pass
    found = messages(connection)
    assert_dense(found)
    assert sorted(message.body for message in found) == list(range(sent))
