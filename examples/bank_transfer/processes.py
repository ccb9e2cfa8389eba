"""The processes of both banks, as their parent sees them: start, watch, kill, start again, stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import IO, Protocol

from .orders import Refusal

_DEATHS_TOO_MANY = 3
_STOP_SECONDS = 10.0
#: What the report calls the server between the banks.
BROKER = "broker"

Process = subprocess.Popen[str]


class ProcessError(Exception):
    """A process ends again and again without having been killed."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where in its work a process is to get a signal: at a step of its order of this number, or of a later process."""

    signal: signal.Signals
    step: str
    order: int


class BankProcess:
    """One process, which its parent starts again whenever it dies before its work is done.

    ``role`` is what the report calls its kind; a worker is never done, a teller is at some time. ``ready`` tells
    that it has begun to work, ``refusals`` are the orders that it reported as refused, ``late`` how often it was too
    slow for the check, ``taken`` how many messages it took from a broker, or at an endpoint. In the moment in which it
    reports a step that fits its ``target`` it gets the signal. It ``inherits`` these open files of its parent, in each
    of its lives.
    """

    def __init__(
        self,
        role: str,
        module: str,
        arguments: Iterable[str],
        environment: Mapping[str, str],
        inherits: Sequence[int] = (),
    ) -> None:
        self.role = role
        self._ends = module == "teller"
        self.refusals: set[Refusal] = set()
        self.late = self.taken = 0
        self.target: Target | None = None
        self.signalled = False
        self.output_tail: deque[str] = deque(maxlen=30)
        # -P: the folder we were started in may hold another copy of the package.
        self._command = [sys.executable, "-P", "-m", f"{__package__}.{module}", *arguments]
        self._inherits = inherits
        self._environment = {**os.environ, **environment, "PYTHONPATH": _python_path()}
        self._allowed = 0
        self.start()

    def start(self) -> None:
        """Start the process, or start it again."""
        self.ready = False
        self.popen = process = subprocess.Popen(  # noqa: S603 - this interpreter, a module of this package
            self._command,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            pass_fds=self._inherits,
            # A group of its own: Ctrl-C reaches the demo alone, which stops the others in order.
            process_group=0,
        )
        self._readers = [
            Thread(target=self._read_reports, args=(process, process.stdout), daemon=True),
            Thread(target=self._read_errors, args=(process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        self.allow(self._allowed)

    @property
    def stalled(self) -> bool:
        """Was it stopped at its target?"""
        return self.signalled and self.target is not None and self.target.signal == signal.SIGSTOP

    @property
    def running(self) -> bool:
        """Has the process neither finished nor died?"""
        return self.popen.poll() is None

    @property
    def finished(self) -> bool:
        """Did it end by itself, its work done?"""
        return self._ends and self.popen.poll() == 0

    def allow(self, orders: int) -> None:
        """Let the process execute its orders up to this number; its next lives may do so too.

        Nothing is said to one that has ended: it has done its work, or hears it when it starts again.
        """
        self._allowed = orders
        if not self._stdin.closed:
            with suppress(BrokenPipeError):
                os.write(self._stdin.fileno(), f"{orders}\n".encode())

    def clear_target(self) -> None:
        """Forget the target."""
        self.target, self.signalled = None, False

    def reap(self) -> None:
        """Wait for a process that ends, take its last reports, and close the pipes."""
        self.popen.wait()
        for reader in self._readers:
            reader.join()
        self._stdin.close()

    @property
    def _stdin(self) -> IO[str]:
        assert self.popen.stdin  # noqa: S101 - `start` asks for a pipe
        return self.popen.stdin

    def _read_reports(self, process: Process, stdout: IO[str]) -> None:
        with stdout as lines:
            for line in lines:
                try:
                    fact = json.loads(line)
                except ValueError:
                    self.output_tail.append(line)
                    continue
                match fact:
                    case {"step": step, "order": order}:
                        self._signal_at(process, step, order)
                    case {"refused": reason, "line": number}:
                        self.refusals.add(Refusal(number, reason))
                    case {"late": _}:
                        self.late += 1
                    case {"taken": messages}:
                        self.taken += messages
                    case {"ready": _}:
                        self.ready = True

    def _signal_at(self, process: Process, step: str, order: int) -> None:
        target = self.target
        if target is not None and not self.signalled and target.step == step and target.order <= order:
            self.signalled = True  # first: the main thread may find the process dead at once, and must know why
            process.send_signal(target.signal)

    def _read_errors(self, stderr: IO[str]) -> None:
        with stderr as lines:
            self.output_tail.extend(lines)


class Broker(Protocol):
    """A server between the banks."""

    def kill(self) -> None:
        """Kill it by SIGKILL."""

    def start(self) -> None:
        """Start it again, with its data."""


class Processes:
    """All processes of both banks, and the ``broker`` between them, if there is one.

    ``kills`` and ``restarts`` count by role, ``aimed_kills`` (those at a target) and ``stalls`` (processes that were
    stopped at a target, and went on later) by step.
    """

    def __init__(self) -> None:
        self.members: list[BankProcess] = []
        self.broker: Broker | None = None
        self.kills: Counter[str] = Counter()
        self.restarts: Counter[str] = Counter()
        self.aimed_kills: Counter[str] = Counter()
        self.stalls: Counter[str] = Counter()
        self._unexplained: Counter[BankProcess] = Counter()

    @property
    def refusals(self) -> set[Refusal]:
        """Return the orders which the tellers refused, each once, however often it was reported."""
        return set().union(*(process.refusals for process in self.members))

    @property
    def late(self) -> int:
        """Return how often tellers were too slow for the check, and had to begin an order anew."""
        return sum(process.late for process in self.members)

    @property
    def at_work(self) -> dict[str, list[BankProcess]]:
        """Return the processes that have begun to work and haven't ended, by role; the broker is a role without any."""
        found: dict[str, list[BankProcess]] = {} if self.broker is None else {BROKER: []}
        for process in self.members:
            if process.ready and process.running:
                found.setdefault(process.role, []).append(process)
        return found

    @property
    def taken(self) -> int:
        """Return how many messages were taken from a broker, or at endpoints."""
        return sum(process.taken for process in self.members)

    def start(
        self,
        role: str,
        module: str,
        arguments: Iterable[str],
        environment: Mapping[str, str],
        inherits: Sequence[int] = (),
    ) -> BankProcess:
        """Start one more process."""
        process = BankProcess(role, module, arguments, environment, inherits)
        self.members.append(process)
        return process

    def kill(self, process: BankProcess) -> bool:
        """End a process by SIGKILL, and start it again; False if it had just ended by itself."""
        process.popen.kill()
        process.reap()
        if process.popen.returncode != -signal.SIGKILL:
            return False
        self.kills[process.role] += 1
        if process.target is not None and process.signalled:
            self.aimed_kills[process.target.step] += 1
        process.clear_target()
        self._restart(process)
        return True

    def kill_broker(self) -> None:
        """End the broker by SIGKILL, and start it again, with its data."""
        if self.broker is not None:
            self.broker.kill()
            self.kills[BROKER] += 1
            self.broker.start()
            self.restarts[BROKER] += 1

    def wake(self, process: BankProcess) -> None:
        """Let a process go on that was stopped at its target."""
        if process.target is not None:
            self.stalls[process.target.step] += 1
        process.clear_target()
        process.popen.send_signal(signal.SIGCONT)

    def restart_dead(self) -> None:
        """Start each process again that has died.

        Raises:
            ProcessError: it has died too often without having been killed.
        """
        for process in self.members:
            if process.running or process.finished or process.signalled:
                continue
            process.reap()
            self._unexplained[process] += 1
            if self._unexplained[process] > _DEATHS_TOO_MANY:
                raise ProcessError(
                    f"a {process.role} ended {self._unexplained[process]} times by itself, "
                    f"at last with exit code {process.popen.returncode}:\n" + "".join(process.output_tail).strip()
                )
            self._restart(process)

    def stop(self) -> None:
        """End all processes: ask first, insist after a while."""
        for process in self.members:
            process.popen.terminate()
            process.popen.send_signal(signal.SIGCONT)  # it may be stopped at its target
        deadline = time.monotonic() + _STOP_SECONDS
        for process in self.members:
            try:
                process.popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.popen.kill()
            process.reap()

    def _restart(self, process: BankProcess) -> None:
        self.restarts[process.role] += 1
        process.start()


def _python_path() -> str:
    # The folder that this package was imported from, wherever the demo was started.
    root = Path(__file__).parents[(__package__ or "").count(".") + 1]
    return os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
