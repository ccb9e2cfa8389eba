"""Worker processes that are started again, or can't be; the address that each serves its probes at."""

from __future__ import annotations

import errno
import http.client
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

from outbox.worker.supervisor import Supervisor
from tests.kit import wait_until
from tests.worker.conftest import Bench
from tests.worker.fleet import fleet

APP = "from tests.worker.process_app import outbox\n"


@pytest.fixture
def module(tmp_path: Path) -> Callable[[str], None]:
    """A function that writes the application's module ``release``, in a folder of its own."""

    def write(text: str) -> None:
        (tmp_path / "release.py").write_text(text)

    write(APP)
    return write


def test_a_release_that_cannot_start(bench: Bench, module: Callable[[str], None], tmp_path: Path) -> None:
    """One that dies is tried again until it can start; the other goes on."""
    with fleet(bench, 2, APP="release:outbox", FOLDER=str(tmp_path), PYTHONDONTWRITEBYTECODE="1") as running:
        module("raise LookupError('half a release')\n")
        os.kill(running.pids[0], signal.SIGKILL)
        reasons = [each["reason"] for each in running.wait_for("process.not_started", 2)]
        assert all("LookupError: half a release" in reason for reason in reasons)
        bench.send(count=5)
        wait_until(lambda: len(bench.effects()) == 5, "the other one handles them")
        module(APP)
        running.wait_for("process.started", 3)
        assert running.end() == 0


def test_a_machine_that_can_start_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with 1 and the system's own words; the signals are handled as before."""
    supervisor = Supervisor(_exit, 2)

    def start(_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(supervisor._context.Process, "start", start)
    before = signal.getsignal(signal.SIGTERM)
    assert supervisor.run() == (1, "OSError: [Errno 12] Cannot allocate memory")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_process_that_ends_before_it_has_started() -> None:
    """The first one that ends without a word is the end, told by its exit code."""
    assert Supervisor(_exit, 2).run() == (5, "it ended before it had started: exit code 5")


def _exit(_number: int, _link: object) -> None:
    sys.exit(5)


def get(port: int, path: str) -> tuple[int, str]:
    """Return status and body of an answer."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def is_free(port: int) -> bool:
    """Can a port be listened on?"""
    with closing(socket.socket()) as one, suppress(OSError):
        one.bind(("127.0.0.1", port))
        return True
    return False


def test_each_serves_its_own_probes(bench: Bench) -> None:
    """The second process one port higher than the first, also once another one has started in its place."""
    port = next(free for free in range(20_000, 30_000, 2) if is_free(free) and is_free(free + 1))
    with fleet(bench, 2, ["--http", f"127.0.0.1:{port}"]) as running:
        wait_until(lambda: get(port, "/readyz")[0] == get(port + 1, "/readyz")[0] == 200, "both are ready")
        assert "outbox_worker_ready 1.0" in get(port + 1, "/metrics")[1]
        os.kill(running.pids[1], signal.SIGKILL)
        running.wait_for("process.started", 3)
        wait_until(lambda: get(port + 1, "/readyz")[0] == 200, "another one is there")
        assert running.end() == 0
