"""The check as a duty of a worker: by itself, beside the others, through signals and outages."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from outbox import INJECTED, Orphan, Outbox, Resolution, Settings, embedded
from outbox.errors import AlreadyRolledBack
from outbox.worker import Worker
from tests.kit import python, read_until, wait_until
from tests.producer.bank import idle_in_transaction
from tests.worker.conftest import Bench
from tests.worker.test_signals import wait_for_rollback

NewBench = Callable[..., Bench]
COMMIT, ROLLBACK, UNKNOWN = Resolution.COMMIT, Resolution.ROLLBACK, Resolution.UNKNOWN
NOTE = text("INSERT INTO effect (message_id) VALUES (:id)")


def prepare(bench: Bench, topic: str = "paid", count: int = 1, immunity: float = 0) -> list[UUID]:
    """Prepare halves, past their immunity time, and leave them alone."""
    with bench.engine.begin() as connection:
        return [bench.outbox.prepare(connection, topic, {}, immunity=immunity) for _ in range(count)]


def wait_for_ops(bench: Bench, ids: list[UUID]) -> None:
    """Wait until all these halves are decided."""
    wait_until(lambda: set(ids) <= set(bench.ops()), "the halves are decided")


@pytest.fixture
def let_go() -> Iterator[threading.Event]:
    """What hanging checkers wait for: the end of the test."""
    event = threading.Event()
    yield event
    event.set()
    wait_until(
        lambda: not [each for each in threading.enumerate() if each.name.startswith("outbox-check-")],
        "the threads of the checkers have ended",
    )


# --- by itself -----------------------------------------------------------------------------------------------------


def test_orphans_are_decided_and_delivered(new_bench: NewBench) -> None:
    """A worker asks checkers, sync and async, tries fences, and delivers what was committed, all by itself."""
    bench = new_bench(check_interval=0.05)
    bench.outbox.consumer("paid", group="mail")(bench.handle)
    bench.outbox.consumer("shipped", group="mail")(bench.handle)

    @bench.outbox.checker("paid")
    def paid(orphan: Orphan, session: Any) -> Resolution:
        return COMMIT

    @bench.outbox.checker("shipped")
    async def shipped(orphan: Orphan) -> Resolution:
        await asyncio.sleep(0)
        return COMMIT

    @bench.outbox.two_phase(topic="paid", immunity=0)
    def pay(session: Session = INJECTED) -> None:
        raise LookupError

    early = prepare(bench, count=3)
    worker = bench.work()
    ids = early + prepare(bench, count=10) + prepare(bench, "shipped", count=10)
    # Without immunity, the check may be there before the function's first statement, and roll the half back itself.
    with pytest.raises((LookupError, AlreadyRolledBack)):
        pay()
    wait_until(lambda: len(bench.effects()) >= 23, "what was committed is handled")
    assert sorted(bench.effects()) == sorted(ids)
    wait_until(lambda: len(bench.ops()) == 24, "the orphan of the function is decided")
    assert list(bench.ops().values()).count("rollback") == 1
    assert worker.health()["check"].last_success is not None
    assert worker.stop()
    assert bench.rows("SELECT count(*) FROM outbox.half_check") == [0]


def test_on_an_async_engine(new_bench: NewBench) -> None:
    """Bound to an AsyncEngine, a worker asks sync and async checkers all the same."""
    from sqlalchemy.ext.asyncio import create_async_engine

    bench = new_bench()
    outbox = Outbox(create_async_engine(bench.engine.url), settings=Settings(check_interval=0.05))
    outbox.checker("paid")(lambda orphan, session: COMMIT)

    @outbox.checker("shipped")
    async def shipped(orphan: Orphan, session: Any) -> Resolution:
        await session.execute(NOTE, {"id": orphan.id})
        return ROLLBACK

    ids = prepare(bench, count=5), prepare(bench, "shipped", count=5)
    with Worker(outbox, roles=["check"]):
        wait_for_ops(bench, ids[0] + ids[1])
    assert bench.ops() == dict.fromkeys(ids[0], "commit") | dict.fromkeys(ids[1], "rollback")
    assert sorted(bench.effects()) == sorted(ids[1])


def test_verdict_wakes_dispatch(new_bench: NewBench) -> None:
    """A dispatcher that would look by itself once an hour turns a verdict into a message at once."""
    bench = new_bench(check_interval=0.05, idle_wait=3600.0, listen=False)
    bench.outbox.checker("paid")(lambda orphan: COMMIT)
    worker = bench.work()
    wait_until(lambda: worker.health()["dispatch"].last_success, "dispatch has looked once")
    (half_id,) = prepare(bench)
    wait_until(lambda: bench.rows("SELECT half_id FROM outbox.message") == [half_id], "the verdict is dispatched")


def test_role_check_alone(new_bench: NewBench) -> None:
    """A worker may be there for the check only: it decides, and leaves the rest to others."""
    bench = new_bench(check_interval=0.05)
    bench.outbox.checker("paid")(lambda orphan: COMMIT)
    bench.outbox.consumer("paid", group="mail")(bench.handle)
    worker = bench.work(roles=["check"])
    ids = prepare(bench, count=5)
    wait_for_ops(bench, ids)
    assert set(worker.health()) == {"check", "report"}
    assert bench.rows("SELECT half_id FROM outbox.message") == []
    bench.work(roles=["dispatch", "consume"])
    wait_until(lambda: len(bench.effects()) >= 5, "another one delivers them")
    assert sorted(bench.effects()) == sorted(ids)


def test_without_the_role_nothing_is_checked(new_bench: NewBench) -> None:
    """A worker with other roles leaves orphans alone."""
    bench = new_bench(check_interval=0.05)
    bench.outbox.checker("paid")(lambda orphan: COMMIT)
    worker = bench.work(roles=["dispatch", "release", "prune"])
    assert "check" not in worker.health()
    prepare(bench)
    ids = bench.send(count=3)
    wait_until(lambda: len(bench.rows("SELECT half_id FROM outbox.message")) == 3, "the others do their work")
    assert set(bench.ops()) == set(ids)


def test_topics_own_interval(new_bench: NewBench) -> None:
    """A topic that is to be asked about more often than others is."""
    bench = new_bench(check_interval=3600.0)
    asked: list[int] = []

    @bench.outbox.checker("paid", interval=0.05, max_checks=4)
    def checker(orphan: Orphan) -> Resolution:
        asked.append(orphan.checks)
        return UNKNOWN

    bench.work()
    prepare(bench)
    wait_until(lambda: bench.rows("SELECT reason FROM outbox.half_check WHERE parked_at IS NOT NULL"), "it is parked")
    assert asked == [1, 2, 3, 4]


def test_many_workers(new_bench: NewBench) -> None:
    """Three workers on one database ask about each half once."""
    bench = new_bench(check_interval=0.02)
    asked: list[UUID] = []

    @bench.outbox.checker("paid")
    def checker(orphan: Orphan) -> Resolution:
        asked.append(orphan.id)
        return COMMIT

    for _ in range(3):
        bench.work(roles=["check"])
    ids = [half_id for _ in range(10) for half_id in prepare(bench, count=20)]
    wait_for_ops(bench, ids)
    assert sorted(asked) == sorted(ids)


# --- beside the others ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_hanging_checkers_starve_nobody(new_bench: NewBench, let_go: threading.Event, is_async: bool) -> None:
    """While checkers hang in all the room that the check has, messages are dispatched, released and handled."""
    bench = new_bench(check_interval=0.05, checks_in_flight=2, retry_delays=(), drain_timeout=0.1)
    hanging: list[UUID] = []

    def checker(orphan: Orphan, session: Any) -> Resolution:
        hanging.append(orphan.id)
        let_go.wait()
        return COMMIT

    async def async_checker(orphan: Orphan, session: Any) -> Resolution:
        hanging.append(orphan.id)
        await asyncio.Event().wait()
        return COMMIT

    bench.outbox.checker("paid", timeout=60)(async_checker if is_async else checker)
    bench.outbox.consumer("mail", group="mail")(bench.handle)
    worker = bench.work()
    prepare(bench, count=10)
    wait_until(lambda: len(hanging) == 2, "the checkers hang")
    ids = bench.send("mail", 20) + bench.send("mail", 5, delay=0.01)
    wait_until(lambda: len(bench.effects()) >= 25, "the others go on")
    assert sorted(bench.effects()) == sorted(ids)
    assert len(hanging) == 2
    assert worker.health()["check"].failures == 0
    assert not worker.stop(), "the checkers were cut off"
    wait_until(lambda: idle_in_transaction(bench.observer) == 0, "their transactions are rolled back")
    assert bench.rows("SELECT count(*) FROM outbox.half_check") == [10]


def test_checkers_that_hang_one_after_the_other(new_bench: NewBench, let_go: threading.Event) -> None:
    """A checker that hangs for good costs its topic alone: the other topic's orphans are decided, pass by pass."""
    bench = new_bench(check_interval=0.05, checks_in_flight=2)

    @bench.outbox.checker("stuck", timeout=0.5)
    def stuck(orphan: Orphan) -> Resolution:
        let_go.wait()
        return COMMIT

    bench.outbox.checker("paid")(lambda orphan: COMMIT)
    worker = bench.work()
    prepare(bench, "stuck", count=20)
    for _ in range(5):
        wait_for_ops(bench, prepare(bench, count=10))
    counters = "SELECT check_times FROM outbox.half_check WHERE check_times > 0"
    wait_until(lambda: len(bench.rows(counters)) == 2, "the checkers of the stuck topic hang in all the room it has")
    wait_for_ops(bench, prepare(bench, count=10))
    assert worker.stop()
    assert bench.rows(counters) == [1, 1]


# --- signals -------------------------------------------------------------------------------------------------------


def hanging_checker(bench: Bench, kind: str, **settings: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """Run the worker process; killed at the end if it is still there."""
    return python("tests.worker.hanging_checker", bench.engine, kind, **settings)


def heal(bench: Bench, ids: list[UUID]) -> None:
    """Make sure that nothing is left of the worker that ended, and that the next one decides."""
    wait_for_rollback(bench)
    assert (bench.effects(), bench.ops()) == ([], {})
    bench.age_checks()

    @bench.outbox.checker("paid")
    def checker(orphan: Orphan, session: Any) -> Resolution:
        session.execute(NOTE, {"id": orphan.id})
        return COMMIT

    bench.work()
    wait_for_ops(bench, ids)
    assert sorted(bench.effects()) == sorted(ids)


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_a_checker_hangs(bench: Bench, number: signal.Signals, kind: str) -> None:
    """The drain waits no longer than its time; the checker loses its connection, its half stays for the next worker."""
    ids = prepare(bench)
    with hanging_checker(bench, kind, OUTBOX_DRAIN_TIMEOUT="0.2", OUTBOX_CHECK_TIMEOUT="60") as process:
        read_until(process, "checker begins")
        process.send_signal(number)
        assert process.wait(timeout=60) == 0
    heal(bench, ids)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_drain_waits_for_a_checkers_time(bench: Bench, kind: str) -> None:
    """A checker whose time is over within the drain is given up and counted, and the drain has succeeded."""
    ids = prepare(bench)
    with hanging_checker(bench, kind, OUTBOX_CHECK_TIMEOUT="1", OUTBOX_LISTEN="off") as process:
        read_until(process, "checker begins")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
    assert "gave no answer within 1 s" in output
    assert "worker stops although" not in output
    assert bench.rows("SELECT answer FROM outbox.check_history") == ["unknown"]
    heal(bench, ids)


def test_threads_left_behind_keep_no_process_alive(bench: Bench) -> None:
    """Checkers that were given up long ago hang on; the worker ends as if they weren't there."""
    ids = prepare(bench, count=4)
    with hanging_checker(bench, "sync", OUTBOX_CHECK_TIMEOUT="1") as process:
        for _ in ids:
            read_until(process, "gave no answer within 1 s")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
    assert "worker stops although" not in output
    heal(bench, ids)


def test_second_signal_while_a_checker_hangs(bench: Bench) -> None:
    """It ends the process at once."""
    ids = prepare(bench)
    with hanging_checker(bench, "sync", OUTBOX_CHECK_TIMEOUT="60") as process:
        read_until(process, "checker begins")
        process.send_signal(signal.SIGTERM)
        read_until(process, "worker is stopping")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    heal(bench, ids)


def test_killed_while_a_checker_hangs(bench: Bench) -> None:
    """After SIGKILL the lease ends by itself, and the question that was put counts."""
    ids = prepare(bench)
    with hanging_checker(bench, "sync", OUTBOX_CHECK_TIMEOUT="60") as process:
        read_until(process, "checker begins")
        process.kill()
        process.wait(timeout=60)
    heal(bench, ids)
    assert bench.rows("SELECT answer FROM outbox.check_history ORDER BY id") == [None, "commit"]


# --- outages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("outage", ["restart", "kill"])
def test_outage_while_checkers_run(
    own_server: embedded.Server, own_url: str, new_bench: NewBench, outage: str, is_async: bool
) -> None:
    """PostgreSQL goes away under running checkers and comes back: each half has one verdict, with what was written."""
    bench = new_bench(own_url, check_interval=0.05, reconnect_cap=0.2)
    asked, go_on = threading.Semaphore(0), threading.Event()

    def checker(orphan: Orphan, session: Any) -> Resolution:
        session.execute(NOTE, {"id": orphan.id})
        asked.release()
        go_on.wait(60)
        return COMMIT

    async def async_checker(orphan: Orphan, session: Any) -> Resolution:
        await session.execute(NOTE, {"id": orphan.id})
        asked.release()
        await asyncio.get_running_loop().run_in_executor(None, go_on.wait, 60)
        return COMMIT

    bench.outbox.checker("paid", interval=0.05)(async_checker if is_async else checker)
    ids = prepare(bench, count=20)
    bench.engine.dispose()
    worker = bench.work(roles=["check"])
    for _ in range(bench.outbox.settings.checks_in_flight):
        assert asked.acquire(timeout=60)
    if outage == "restart":
        own_server.restart()
    else:
        own_server.kill()
        own_server.start()
    go_on.set()

    def hurried() -> bool:
        # Where no answer could be recorded, the half would wait until its lease ends.
        with bench.observer.begin() as connection:
            connection.execute(
                text("UPDATE outbox.half_check SET next_check_at = now() WHERE next_check_at > now() + interval '5 s'")
            )
        return set(ids) <= set(bench.ops())

    wait_until(hurried, "all halves are decided")
    assert sorted(bench.effects()) == sorted(ids)
    wait_until(lambda: not worker.health()["check"].failures, "the check works again")
    assert worker.stop()
