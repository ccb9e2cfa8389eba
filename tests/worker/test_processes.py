"""Several worker processes under one: one that dies is started again, signals drain all, none is left behind."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from outbox.cli.output import Code
from outbox.embedded import ServerLike
from tests.kit import sample, tries, wait_until
from tests.worker.conftest import Bench
from tests.worker.fleet import WorkerFleet, fleet, started_fleet
from tests.worker.test_signals import wait_for_rollback

WORKERS = "SELECT count(*) FROM outbox.worker"
IN_EACH = 40
KILLS = tries(3)


def handled_once(bench: Bench, count: int) -> None:
    """Wait until so many messages have taken effect, each once."""
    wait_until(lambda: len(bench.effects()) >= count, f"{count} messages are handled")
    assert len(bench.effects()) == len(set(bench.effects())) == count


def begin_everywhere(bench: Bench, running: WorkerFleet) -> set[int]:
    """Send messages until a handler runs in each process, and return these."""
    bench.send(count=IN_EACH)
    wait_until(lambda: set(running.handling()) >= set(running.pids), "a handler runs in each process")
    return set(running.handling())


def test_several_share_the_work(bench: Bench) -> None:
    """All of them report as workers, and each message is handled once."""
    with fleet(bench, 3) as running:
        wait_until(lambda: bench.rows(WORKERS) == [3], "three workers report")
        bench.send(count=200)
        handled_once(bench, 200)
        assert len(set(running.pids)) == 3
        assert {each["process_name"] for each in running.told("worker.started")} == {
            f"outbox-{number}" for number in range(1, 4)
        }
        assert running.end() == 0
    assert bench.rows(WORKERS) == [0]


@pytest.mark.parametrize("number", sample([signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV], 2))
def test_one_that_dies_is_replaced(bench: Bench, number: signal.Signals) -> None:
    """It is told how; SIGTERM to a single one drains it first. The others go on, and nothing happens twice."""
    with fleet(bench) as running:
        victim = running.pids[1]
        bench.send(count=50)
        os.kill(victim, number)
        (ended,) = running.wait_for("process.ended")
        how = "exit code 0" if number == signal.SIGTERM else f"killed by {number.name}"
        assert (ended["pid"], ended["ending"], ended["level"]) == (victim, how, "ERROR")
        bench.send(count=50)
        assert running.wait_for("process.started", 3)[-1]["number"] == ended["number"]
        handled_once(bench, 100)
        assert running.end() == 0


def test_one_that_keeps_the_interpreter_tells_where(bench: Bench, tmp_path: Path) -> None:
    """A handler in native code that never returns: its process says where it hangs, ends, and is replaced."""
    hang = tmp_path / "hang"
    hang.touch()
    with fleet(bench, OUTBOX_HANG_TIMEOUT="3", SHOP_HANG=str(hang)) as running:
        bench.send()
        (ended,) = running.wait_for("process.ended")
        assert ended["ending"] == "exit code 1"
        handled_once(bench, 1)
        assert running.end() == 0
    assert [line for line in running.lines if "process_app.py" in line and "in handle" in line]
    assert bench.inbox() == [("consumed", 1)]


@pytest.mark.parametrize(("number", "to_group"), [(signal.SIGTERM, False), (signal.SIGINT, True)])
def test_a_signal_drains_all(bench: Bench, tmp_path: Path, number: signal.Signals, to_group: bool) -> None:
    """What runs in each process is finished and committed, nothing else begins; a Ctrl-C to all counts once."""
    gate = tmp_path / "gate"
    with fleet(bench, SHOP_GATE=str(gate)) as running:
        begin_everywhere(bench, running)
        (os.killpg if to_group else os.kill)(running.process.pid, number)
        running.wait_for("worker.stopping", 2)
        began = len(running.handling())
        gate.touch()
        assert running.wait() == 0
        assert len(running.told("worker.stopped")) == 2
        assert not running.told("process.ended")
    assert len(bench.effects()) == began == len(running.handling())
    assert bench.inbox() == [("consumed", 1)] * began


def test_a_second_signal_ends_all_at_once(bench: Bench) -> None:
    """Handlers that hang are rolled back in all processes, at no attempt's cost; the exit code names the signal."""
    with fleet(bench, SHOP_GATE="/nowhere") as running:
        begin_everywhere(bench, running)
        running.process.send_signal(signal.SIGTERM)
        running.wait_for("worker.stopping", 2)
        assert running.end() == 128 + signal.SIGTERM
    wait_for_rollback(bench)
    assert (bench.effects(), bench.inbox()) == ([], [])


def test_the_drain_of_all_is_bounded(bench: Bench) -> None:
    """Handlers that run longer than the drain's time are rolled back, and the exit code is 0, as with one process."""
    with fleet(bench, SHOP_GATE="/nowhere", OUTBOX_DRAIN_TIMEOUT="0.1") as running:
        begin_everywhere(bench, running)
        assert running.end() == 0
        assert running.told("worker.cut_off")
    wait_for_rollback(bench)
    assert (bench.effects(), bench.inbox()) == ([], [])


def test_a_stopped_process_does_not_hold_up_the_end(bench: Bench) -> None:
    """One that can't drain because it is stopped is killed when its time is over, and that is told."""
    with fleet(bench, OUTBOX_DRAIN_TIMEOUT="0.1") as running:
        os.kill(running.pids[0], signal.SIGSTOP)
        assert running.end() == 0
        (hung,) = running.told("process.hung")
        assert "hasn't ended in time" in hung["reason"]


def test_none_outlives_the_supervisor(bench: Bench, tmp_path: Path) -> None:
    """After SIGKILL to the supervisor the processes drain and end by themselves; what their handlers did is there."""
    gate = tmp_path / "gate"
    with fleet(bench, SHOP_GATE=str(gate)) as running:
        processes = [psutil.Process(pid) for pid in running.pids]
        begin_everywhere(bench, running)
        running.process.kill()
        running.wait_for("worker.stopping", 2)
        began = len(running.handling())
        gate.touch()
        running.wait()
        assert psutil.wait_procs(processes, timeout=60)[1] == []
    assert len(bench.effects()) == began


@pytest.mark.parametrize("app", ["tests.worker.nowhere:outbox", "tests.worker.process_app:nothing"])
def test_an_application_that_is_none(bench: Bench, app: str) -> None:
    """One error in one line, and the exit code of a single worker; nothing is started again."""
    with started_fleet(bench, APP=app) as running:
        assert running.wait() == Code.CONFIG
        (line,) = running.lines
        assert line.startswith(f"error: --app '{app}'")
        assert running.records == []


def test_tables_that_are_none(bench: Bench, server: ServerLike) -> None:
    """The same where the database isn't migrated."""
    with started_fleet(bench, SHOP_URL=server.url()) as running:
        assert running.wait() == Code.CONFIG
        assert running.lines[-1].startswith("error: ")
        assert "outbox db upgrade" in running.lines[-1]
        assert not any("Traceback" in line for line in running.lines)


@pytest.mark.slow
def test_exactly_once_while_processes_are_killed(new_bench: Callable[..., Bench]) -> None:
    """Kills at any moment, one process after the other: no message is lost, none takes effect twice."""
    bench, dice, count = new_bench(), random.Random(17), 50 * KILLS  # noqa: S311 - no secret
    with fleet(bench, 3, OUTBOX_MAX_STARTS="1000") as running:
        for number in range(KILLS):
            bench.send(count=50)
            running.wait_for("process.started", 3 + number)
            os.kill(dice.choice(running.pids), dice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGABRT]))
            running.wait_for("process.ended", number + 1)
        handled_once(bench, count)
        assert running.end() == 0
    assert bench.inbox() == [("consumed", 1)] * count
