"""The demo as a command: its output, Ctrl-C, and its death."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from examples.bank_transfer.__main__ import main
from outbox.embedded import ServerLike
from outbox.embedded.external import URL_VARIABLE
from tests.kit import wait_until
from tests.kit.warm import forking

ROOT = Path(__file__).parents[2]
# One teller and one consumer: each process takes a second to start.
ALONE = ["--producers", "1", "--consumers", "1"]
COMMAND = [sys.executable, "-m", "examples.bank_transfer", "--engine", "local", *ALONE]
# More orders than it gets done with before the test ends it.
ENDLESS = [*COMMAND, "--transfers", "20000"]


def test_the_command_prints_tables_and_verdict() -> None:
    """On an embedded server of its own: tables and verdict on stdout, the headline on stderr, exit code 0."""
    command = [*forking("examples.bank_transfer"), "--engine", "local", "--transfers", "50"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Settled: 50 transfers, and not a cent is missing." in done.stdout
    assert "Two banks, a database each. 50 orders (generated with seed 1)" in done.stderr


def test_json_is_the_only_thing_on_stdout_and_any_folder_will_do(server: ServerLike, tmp_path: Path) -> None:
    """One JSON object; the package is found wherever the demo was started, also beside another copy of it."""
    for decoy in ("outbox", "examples"):
        (tmp_path / decoy).mkdir()
        (tmp_path / decoy / "__init__.py").write_text("raise ImportError('the wrong copy')")
    command = [sys.executable, "-P", *COMMAND[1:], "--transfers", "20", "--kills", "1", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), URL_VARIABLE: server.url("postgres")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert report["transfers"] + len(report["refused"]) == 20
    assert sum(report["kills"].values()) == 1


@pytest.mark.slow
def test_spark_finds_and_mends_the_faults_and_java_says_nothing(server: ServerLike) -> None:
    """With Spark installed it is what compares: every fault is found as such, and stderr has our own words only."""
    command = [*forking("examples.bank_transfer"), "--engine", "auto", "--transfers", "60", "--faults", "--json"]
    environment = {**os.environ, URL_VARIABLE: server.url("postgres")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reconciled = json.loads(done.stdout)["reconciliation"]
    assert reconciled["planted"] == reconciled["found"]
    assert (len(reconciled["found"]), reconciled["left"]) == (8, {})
    assert {told["pairs"][0]["plan"]["engine"] for told in reconciled["reports"].values()} == {"spark"}
    assert [line.split()[0] for line in done.stderr.splitlines()] == ["Two", "The"]


@pytest.mark.parametrize("arguments", [["--producers", "0"], ["--transfers", "many"], ["--opening-balance", "a lot"]])
def test_bad_options_end_with_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence on stderr that names the option, and no traceback."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert arguments[0].strip("-").replace("-", "_") in said.replace("-", "_")
    assert "Traceback" not in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_stops_everything_that_it_started(number: signal.Signals) -> None:
    """After Ctrl-C or SIGTERM: exit code 130, no process left."""
    with _at_work() as (process, children):
        process.send_signal(number)
        assert process.wait(60) == 130
        wait_until(lambda: not _alive(children), "all processes of the demo are gone")


def test_killed_it_leaves_no_process_behind() -> None:
    """After SIGKILL nobody is there to stop the others: each sees that its parent is gone, and ends."""
    with _at_work() as (process, children):
        process.kill()
        process.wait()
        wait_until(lambda: not _alive(children), "all processes of the demo are gone")


@contextmanager
def _at_work() -> Iterator[tuple[subprocess.Popen[bytes], set[int]]]:
    """Yield a demo whose tellers are at work, and the process ids of all that it has started."""
    process = subprocess.Popen(ENDLESS, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process, wait_until(lambda: _staff(process), "the demo has started all its processes")
    finally:
        process.kill()
        process.wait()


def _staff(process: subprocess.Popen[bytes]) -> set[int]:
    assert process.poll() is None, "the demo ended before it was to be interrupted"
    processes = _processes()
    found = _descendants(process.pid, processes)
    # A teller, 2 dispatchers, a consumer, a desk; beside them the keeper of the database, and PostgreSQL itself.
    staff = [pid for pid in found if "bank_transfer." in processes[pid].command]
    return found if len(staff) == 5 else set()


def _descendants(parent: int, processes: dict[int, _Process]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    found, ahead = set[int](), [parent]
    while ahead:
        new = children.get(ahead.pop(), [])
        found.update(new)
        ahead.extend(new)
    return found


def _alive(pids: set[int]) -> set[int]:
    return pids & _processes().keys()


def _processes() -> dict[int, _Process]:
    """Return all processes by their ids; a zombie is no process any more."""
    running = (process.info for process in psutil.process_iter(["pid", "ppid", "status", "cmdline"]))
    return {
        info["pid"]: _Process(info["ppid"], " ".join(info["cmdline"] or ()))
        for info in running
        if info["status"] != psutil.STATUS_ZOMBIE
    }


class _Process(NamedTuple):
    parent: int
    command: str = ""
