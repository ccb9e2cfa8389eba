"""The workers of all services as processes: start them, kill them, start them again, stop them."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Thread

_STOP_SECONDS = 20.0


class WorkerProcess:
    """The worker of one service, through all its lives; ``ready`` tells that it has begun to work in this one."""

    def __init__(self, service: str) -> None:
        self.service = service
        self.start()

    def start(self) -> None:
        """Start it, or start it again."""
        self.ready = False
        command = [sys.executable, "-P", "-m", f"{__package__}.worker", self.service]
        # Its standard input is its lifeline: it ends with this process, however that ends.
        self.popen = popen = subprocess.Popen(  # noqa: S603 - this interpreter, a module of this package
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0
        )
        self._reader = Thread(target=self._read, args=(popen,), daemon=True)
        self._reader.start()

    def end(self, *, kill: bool) -> None:
        """End it by SIGKILL, or in order."""
        if kill:
            self.popen.kill()
        else:
            self.popen.terminate()
        try:
            self.popen.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self._reader.join()
        if self.popen.stdin is not None:
            self.popen.stdin.close()

    def _read(self, popen: subprocess.Popen[bytes]) -> None:
        assert popen.stdout is not None  # noqa: S101 - it is a pipe
        with popen.stdout as lines:
            for _ in lines:  # its first line says that it works
                self.ready = True


class Processes:
    """The workers of all services; ``kills`` counts by service."""

    def __init__(self, services: Iterable[str]) -> None:
        self.members = [WorkerProcess(service) for service in services]
        self.kills: Counter[str] = Counter()

    def kill(self, number: int) -> None:
        """Kill a worker with SIGKILL, and start it again."""
        member = self.members[number % len(self.members)]
        member.end(kill=True)
        self.kills[member.service] += 1
        member.start()

    def restart_dead(self) -> None:
        """Start each worker again that has ended by itself."""
        for member in self.members:
            if member.popen.poll() is not None:
                member.end(kill=False)
                member.start()


@contextmanager
def running(services: Iterable[str]) -> Iterator[Processes]:
    """Have the workers run during a block."""
    processes = Processes(services)
    try:
        yield processes
    finally:
        for member in processes.members:
            member.popen.terminate()
        for member in processes.members:
            member.end(kill=False)
