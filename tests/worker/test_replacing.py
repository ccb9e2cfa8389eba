"""Worker processes that are replaced by new ones while they are at work, or can't be; what is measured of them."""

from __future__ import annotations

import errno
import http.client
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from outbox.worker.processes.supervisor import Ending, Supervisor
from tests.kit import wait_until
from tests.worker.conftest import Bench
from tests.worker.fleet import WorkerFleet, fleet, started_fleet

APP = "from tests.worker.process_app import outbox\n"


@pytest.fixture
def module(tmp_path: Path) -> Callable[[str], None]:
    """A function that writes the application's module ``release``, in a folder of its own."""

    def write(text: str) -> None:
        (tmp_path / "release.py").write_text(text)

    write(APP)
    return write


def test_sighup_replaces_one_after_the_other(bench: Bench, module: Callable[[str], None], tmp_path: Path) -> None:
    """New processes run the new code; those before are drained, and all messages are handled once."""
    with fleet(bench, 2, APP="release:outbox", FOLDER=str(tmp_path), PYTHONDONTWRITEBYTECODE="1") as running:
        before = running.pids
        bench.send(count=30)
        module(APP + 'import logging\nlogging.getLogger("shop.release").warning("the second release")\n')
        running.process.send_signal(signal.SIGHUP)
        running.wait_for("process.started", 4)
        wait_until(lambda: len(running.told("worker.stopped")) == 2, "the first two have drained")
        bench.send(count=30)
        wait_until(lambda: len(bench.effects()) >= 60, "all are handled")
        numbers = [each["number"] for each in running.told("process.started")]
        assert numbers == [1, 2, 1, 2]
        wait_until(lambda: not set(before) & set(running.pids), "the first two are gone")
        assert running.end() == 0
    assert len(bench.effects()) == len(set(bench.effects())) == 60
    assert running.lines == ["the second release"] * 2
    assert not running.told("process.ended")


def test_a_release_that_cannot_start(bench: Bench, module: Callable[[str], None], tmp_path: Path) -> None:
    """SIGHUP replaces nothing by it. One that dies then is tried again until it can start; the other goes on."""
    with fleet(bench, 2, APP="release:outbox", FOLDER=str(tmp_path), PYTHONDONTWRITEBYTECODE="1") as running:
        before = running.pids
        module("raise LookupError('half a release')\n")
        running.process.send_signal(signal.SIGHUP)
        (kept,) = running.wait_for("processes.kept")
        assert "LookupError: half a release" in kept["reason"]
        assert running.pids == before
        os.kill(before[0], signal.SIGKILL)
        reasons = [each["reason"] for each in running.wait_for("process.not_started", 2)]
        assert all("LookupError: half a release" in reason for reason in reasons)
        bench.send(count=5)
        wait_until(lambda: len(bench.effects()) == 5, "the other one handles them")
        module(APP)
        running.wait_for("process.started", 3)
        assert running.end() == 0


def test_deaths_in_a_row_end_it(bench: Bench) -> None:
    """Processes that die again and again soon after their start: it ends with 1, and says how they died."""
    with started_fleet(bench, 2, PROGRAM="tests.worker.impatient_fleet", SHOP_ENDS="1") as running:
        assert running.wait() == 1
        ended = running.told("process.ended")
    assert {each["ending"] for each in ended} == {"exit code 3"}
    assert running.lines[-1].startswith("error: 3 worker processes in a row have died soon after their start")


def test_a_machine_that_can_start_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with 1 and the system's own words; the signals are handled as before."""
    supervisor = Supervisor(_exit, 2)

    def start(_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(supervisor._context.Process, "start", start)
    before = signal.getsignal(signal.SIGTERM)
    assert supervisor.run() == Ending(1, "OSError: [Errno 12] Cannot allocate memory")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_process_that_ends_before_it_has_started() -> None:
    """The first one that ends without a word is the end, told by its exit code."""
    ending = Supervisor(_exit, 2).run()
    assert ending == Ending(1, "a worker process ended before it had started: exit code 5")


def _exit(_link: object, _metered: bool) -> None:
    sys.exit(5)


def get(port: int, path: str) -> tuple[int, str]:
    """Return status and body of an answer."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def value(port: int, series: str) -> float | None:
    """Return a measurement, by its name and labels as they are written."""
    status, body = get(port, "/metrics")
    assert status == 200
    found = re.search(rf"(?m)^{re.escape(series)} (\S+)$", body)
    return None if found is None else float(found[1])


def handled(port: int) -> float:
    """Return how many messages all processes have handled."""
    series = 'outbox_handled_total{{group="mail",outcome="consumed",process="{}",topic="paid"}}'
    return sum(value(port, series.format(number)) or 0 for number in (1, 2))


def killed(running: WorkerFleet) -> int:
    """Kill the second process, so that it isn't there; return its number."""
    os.kill(running.pids[1], signal.SIGKILL)
    (ended,) = running.wait_for("process.ended")
    return int(ended["number"])


def test_probes_and_metrics_of_all(bench: Bench) -> None:
    """Ready are all or none; metrics are by process, with the events of the supervisor; each family is there once."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    with fleet(bench, 2, ["--http", f"127.0.0.1:{port}"]) as running:
        wait_until(lambda: get(port, "/readyz")[0] == 200, "all are ready")
        assert get(port, "/healthz") == (200, "alive\n")
        bench.send(count=40)
        wait_until(lambda: handled(port) == 40, "all that were handled are counted")
        number = killed(running)
        wait_until(lambda: get(port, "/readyz")[0] == 503, "one is missing")
        assert value(port, f'outbox_worker_ready{{process="{number}"}}') == 0
        died = 'outbox_events_total{duty="",event="process.ended",group="",process="0",topic=""}'
        assert value(port, died) == 1
        wait_until(lambda: get(port, "/readyz")[0] == 200, "another one is there")
        assert value(port, f'outbox_worker_ready{{process="{number}"}}') == 1
        names = re.findall(r"(?m)^# TYPE (\S+) ", get(port, "/metrics")[1])
        assert len(names) == len(set(names)) > 20
        assert value(port, 'outbox_sample_age_seconds{process="0"}') is None
        assert running.end() == 0
