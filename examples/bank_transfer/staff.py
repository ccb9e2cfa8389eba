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
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from .orders import Refusal

_DEATHS_TOO_MANY = 3
_STOP_SECONDS = 10.0

Process = subprocess.Popen[str]


class StaffError(Exception):
    """A process ends again and again without having been killed."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Where in its work a process is to get a signal: at a step of its order of this number, or of a later one."""

    signal: signal.Signals
    step: str
    order: int


class Employee:
    """One process which is started again whenever it dies before its work is done.

    ``role`` is what the report calls its kind; a worker is never done, a teller is at some time. ``ready`` tells
    that it has begun to work, ``refusals`` are the orders that it reported as refused, ``late`` how often it was too
    slow for the check. In the moment in which it reports a step that fits its ``mark`` it is ``struck`` by a signal.
    """

    def __init__(self, role: str, module: str, arguments: Iterable[str], environment: Mapping[str, str]) -> None:
        self.role = role
        self._ends = module == "teller"
        self.refusals: set[Refusal] = set()
        self.late = 0
        self.mark: Mark | None = None
        self.struck = False
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
    def stalled(self) -> bool:
        """Was it stopped at its mark?"""
        return self.struck and self.mark is not None and self.mark.signal == signal.SIGSTOP

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

    def unmark(self) -> None:
        """Forget the mark."""
        self.mark, self.struck = None, False

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
                match fact:
                    case {"step": step, "order": order}:
                        self._strike(process, step, order)
                    case {"refused": reason, "line": number}:
                        self.refusals.add(Refusal(number, reason))
                    case {"late": _}:
                        self.late += 1
                    case {"ready": _}:
                        self.ready = True

    def _strike(self, process: Process, step: str, order: int) -> None:
        mark = self.mark
        if mark is not None and not self.struck and mark.step == step and mark.order <= order:
            self.struck = True  # first: whoever finds the process dead shall know why
            process.send_signal(mark.signal)

    def _note(self, process: Process) -> None:
        assert process.stderr  # noqa: S101
        with process.stderr as lines:
            self.last_words.extend(lines)


class Staff:
    """All processes of both banks.

    ``kills`` and ``restarts`` count by role; of the kills, ``strikes`` those that were aimed at a step, by this step;
    ``stalls`` the processes that were stopped at a step and went on later.
    """

    def __init__(self) -> None:
        self.employees: list[Employee] = []
        self.kills: Counter[str] = Counter()
        self.restarts: Counter[str] = Counter()
        self.strikes: Counter[str] = Counter()
        self.stalls: Counter[str] = Counter()
        self._unexplained: Counter[Employee] = Counter()

    @property
    def refusals(self) -> set[Refusal]:
        """Return the orders which the tellers refused, each once, however often it was reported."""
        return set().union(*(employee.refusals for employee in self.employees))

    @property
    def late(self) -> int:
        """Return how often tellers were too slow for the check, and had to begin an order anew."""
        return sum(employee.late for employee in self.employees)

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
        if employee.mark is not None and employee.struck:
            self.strikes[employee.mark.step] += 1
        employee.unmark()
        self._restart(employee)
        return True

    def wake(self, employee: Employee) -> None:
        """Let a process go on that was stopped at its mark."""
        assert employee.mark is not None  # noqa: S101
        self.stalls[employee.mark.step] += 1
        employee.unmark()
        employee.process.send_signal(signal.SIGCONT)

    def look_after(self) -> None:
        """Start again whoever died.

        Raises:
            StaffError: it has died too often without having been killed.
        """
        for employee in self.employees:
            if employee.running or employee.finished or employee.struck:
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
            employee.process.send_signal(signal.SIGCONT)  # it may be stopped at its mark
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
