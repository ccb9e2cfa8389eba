"""``outbox run --processes`` as a process of its own, with what it and its workers log."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from tests.kit import ROOT, wait_until
from tests.worker.conftest import Bench


@dataclass
class WorkerFleet:
    """A supervisor with its processes; ``records`` are the records of all, ``lines`` what else was written."""

    process: subprocess.Popen[str]
    records: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    reader: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            try:
                self.records.append(json.loads(line))
            except ValueError:
                self.lines.append(line.rstrip("\n"))

    def told(self, code: str) -> list[dict[str, Any]]:
        """Return the records of one kind of event."""
        return [each for each in list(self.records) if each.get("outbox_event") == code]

    def wait_for(self, code: str, count: int = 1) -> list[dict[str, Any]]:
        """Wait until an event has been told so often."""
        wait_until(lambda: len(self.told(code)) >= count or not self.reader.is_alive(), f"{count} times {code}")
        assert len(self.told(code)) >= count, (self.process.poll(), self.lines, self.records)
        return self.told(code)

    @property
    def pids(self) -> list[int]:
        """The processes that have started and are there, in the order of their starts."""
        return [each["pid"] for each in self.told("process.started") if psutil.pid_exists(each["pid"])]

    def handling(self) -> list[int]:
        """Return the processes in which handlers have begun, as often as they have."""
        return [int(each["message"].split()[-1]) for each in list(self.records) if each["logger"] == "shop"]

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, and return the exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Wait for its end, and for that of all that it has started; return the exit code."""
        code = self.process.wait(timeout=120)
        self.reader.join(timeout=120)
        assert not self.reader.is_alive(), "a process is left, which still has our pipe"
        return code


@contextmanager
def fleet(bench: Bench, processes: int = 2, options: Sequence[str] = (), **environment: str) -> Iterator[WorkerFleet]:
    """Run workers for a bench, once all have started; whatever is left of them at the end is killed."""
    with started_fleet(bench, processes, options, **environment) as running:
        running.wait_for("process.started", processes)
        yield running


@contextmanager
def started_fleet(
    bench: Bench, processes: int = 2, options: Sequence[str] = (), **environment: str
) -> Iterator[WorkerFleet]:
    """Run workers for a bench, which may never start.

    ``environment`` are variables; ``APP`` and ``FOLDER`` say which application it is and where.
    """
    url = bench.engine.url.render_as_string(hide_password=False)
    app = environment.pop("APP", "tests.worker.process_app:outbox")
    command = ["run", "--app", app, "--processes", str(processes), "--log-format", "json", *options]
    process = subprocess.Popen(
        [sys.executable, "-m", "outbox.cli", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{environment.pop('FOLDER', '')}", "SHOP_URL": url, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A group of its own, so that a test may send it a Ctrl-C.
        start_new_session=True,
    )
    running = WorkerFleet(process)
    with process:
        try:
            yield running
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
