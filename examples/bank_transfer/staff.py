"""The demo's end of the processes: start, watch, kill, start again, stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread

from .orders import Refusal

_DEATHS_TOO_MANY = 3
_STOP_SECONDS = 10.0

Process = subprocess.Popen[str]


class StaffError(Exception):
    """A process ends again and again without having been killed."""


class Employee:
    """One process which is started again whenever it dies before its work is done.

    ``role`` is what the report calls its kind; a worker is never done, a teller is at some time. ``ready`` tells
    that it has begun to work, ``refusals`` are the orders that it reported as refused.
    """

    def __init__(self, role: str, module: str, arguments: Iterable[str], environment: Mapping[str, str]) -> None:
        self.role = role
        self._ends = module == "teller"
        self.refusals: set[Refusal] = set()
        self.last_words: deque[str] = deque(maxlen=30)
        # -P: the folder we were started in may hold another copy of the package.
        self._command = [sys.executable, "-P", "-m", f"{__package__}.{module}", *arguments]
        self._environment = {**os.environ, **environment, "PYTHONPATH": _python_path()}
        self._allowed = 0
        self.start()

    def start(self) -> None:
        """Start the process, or start it again."""
        self.ready = False
        self.process = process = subprocess.Popen(  # noqa: S603 - a module of ours
            self._command,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # A group of its own: Ctrl-C reaches the demo alone, which stops the others in order.
            process_group=0,
        )
        self._readers = [Thread(target=read, args=(process,), daemon=True) for read in (self._hear, self._note)]
        for reader in self._readers:
            reader.start()
        self.allow(self._allowed)

    @property
    def running(self) -> bool:
        """Has the process neither finished nor died?"""
        return self.process.poll() is None

    @property
    def finished(self) -> bool:
        """Did it end by itself, its work done?"""
        return self._ends and self.process.poll() == 0

    def allow(self, orders: int) -> None:
        """Let the process execute its orders up to this number; its next lives may do so too."""
        self._allowed = orders
        assert self.process.stdin  # noqa: S101 - a pipe, see start
        with suppress(BrokenPipeError):
            os.write(self.process.stdin.fileno(), f"{orders}\n".encode())

    def bury(self) -> None:
        """Wait for a process that ends, take its last reports, and close the pipes."""
        self.process.wait()
        for reader in self._readers:
            reader.join()
        assert self.process.stdin  # noqa: S101
        self.process.stdin.close()

    def _hear(self, process: Process) -> None:
        assert process.stdout  # noqa: S101
        with process.stdout as lines:
            for line in lines:
                try:
                    fact = json.loads(line)
                except ValueError:
                    self.last_words.append(line)
                    continue
                if "refused" in fact:
                    self.refusals.add(Refusal(fact["line"], fact["refused"]))
                else:
                    self.ready = True

    def _note(self, process: Process) -> None:
        assert process.stderr  # noqa: S101
        with process.stderr as lines:
            self.last_words.extend(lines)


class Staff:
    """All processes of both banks; ``kills`` and ``restarts`` count by role."""

    def __init__(self) -> None:
        self.employees: list[Employee] = []
        self.kills: Counter[str] = Counter()
        self.restarts: Counter[str] = Counter()
        self._unexplained: Counter[Employee] = Counter()

    @property
    def refusals(self) -> set[Refusal]:
        """Return the orders which the tellers refused, each once, however often it was reported."""
        return set().union(*(employee.refusals for employee in self.employees))

    def hire(self, role: str, module: str, arguments: Iterable[str], environment: Mapping[str, str]) -> Employee:
        """Start a process."""
        employee = Employee(role, module, arguments, environment)
        self.employees.append(employee)
        return employee

    def kill(self, employee: Employee) -> bool:
        """End a process by SIGKILL, and start it again; False if it had just ended by itself."""
        employee.process.kill()
        employee.bury()
        if employee.process.returncode != -signal.SIGKILL:
            return False
        self.kills[employee.role] += 1
        self._restart(employee)
        return True

    def look_after(self) -> None:
        """Start again whoever died.

        Raises:
            StaffError: it has died too often without having been killed.
        """
        for employee in self.employees:
            if employee.running or employee.finished:
                continue
            employee.bury()
            self._unexplained[employee] += 1
            if self._unexplained[employee] > _DEATHS_TOO_MANY:
                raise StaffError(
                    f"a {employee.role} ended {self._unexplained[employee]} times by itself, "
                    f"at last with exit code {employee.process.returncode}:\n" + "".join(employee.last_words).strip()
                )
            self._restart(employee)

    def stop(self) -> None:
        """End all processes: ask first, insist after a while."""
        for employee in self.employees:
            employee.process.terminate()
        deadline = time.monotonic() + _STOP_SECONDS
        for employee in self.employees:
            try:
                employee.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                employee.process.kill()
            employee.bury()

    def _restart(self, employee: Employee) -> None:
        self.restarts[employee.role] += 1
        employee.start()


def _python_path() -> str:
    # The folder that this package was imported from, wherever the demo was started.
    root = Path(__file__).parents[(__package__ or "").count(".") + 1]
    return os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
