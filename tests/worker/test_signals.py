"""A worker process and the signals that end it."""

from __future__ import annotations

import signal
import subprocess
from contextlib import AbstractContextManager

import pytest

from tests.kit import python, read_until, wait_until
from tests.worker.conftest import Bench


def slow_worker(bench: Bench, **settings: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """Run the worker process; killed at the end if it is still there."""
    return python("tests.worker.slow_worker", bench.engine, **settings)


def wait_for_rollback(bench: Bench) -> None:
    """Wait until the server has no connection of the worker left."""
    others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    bench.engine.dispose()
    wait_until(lambda: bench.rows(f"SELECT count(*) {others}") == [0], "the worker's connections are closed")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(bench: Bench, number: signal.Signals) -> None:
    """The running handler finishes and is committed, no other begins, and the exit code is 0."""
    ids = bench.send(count=3)
    with slow_worker(bench) as process:
        read_until(process, "handler begins")
        process.send_signal(number)
        read_until(process, "worker is stopping")
        process.communicate("x", timeout=60)
        assert process.returncode == 0
    (handled,) = bench.effects()
    assert handled in ids
    assert bench.inbox() == [("consumed", 1)]


def test_a_second_signal_ends_at_once(bench: Bench) -> None:
    """The handler that hangs is rolled back without costing an attempt; the exit code names the signal."""
    bench.send()
    with slow_worker(bench) as process:
        read_until(process, "handler begins")
        process.send_signal(signal.SIGTERM)
        read_until(process, "worker is stopping")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    wait_for_rollback(bench)
    assert bench.effects() == []
    assert bench.inbox() == []


def test_the_drain_is_bounded(bench: Bench) -> None:
    """A handler that hangs longer than the drain's time is rolled back; its message is handled by the next worker."""
    ids = bench.send()
    with slow_worker(bench, OUTBOX_DRAIN_TIMEOUT="0.1") as process:
        read_until(process, "handler begins")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    wait_for_rollback(bench)
    assert bench.effects() == []
    assert bench.inbox() == []
    bench.outbox.consumer("paid", group="mail")(bench.handle)
    bench.work()
    wait_until(bench.effects, "the message is handled")
    assert bench.effects() == ids
    assert bench.inbox() == [("consumed", 1)]


def test_a_killed_worker_leaves_its_message_to_the_next(bench: Bench) -> None:
    """After SIGKILL in the middle of a handler the message is handled once, by another worker."""
    ids = bench.send()
    with slow_worker(bench) as process:
        read_until(process, "handler begins")
        process.kill()
        process.wait(timeout=60)
    bench.outbox.consumer("paid", group="mail")(bench.handle)
    bench.work()
    wait_until(bench.effects, "the message is handled")
    assert bench.effects() == ids
    assert bench.inbox() == [("consumed", 1)]
