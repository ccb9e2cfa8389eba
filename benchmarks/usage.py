"""Measure the use of the machine by a process, all that it started, and the database server."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Self

import psutil

# Adding up the pages of a Java takes 20 ms of a processor.
_EVERY = 0.25


class Usage:
    """Watches a process with all its children while the block runs.

    ``peak`` is the most memory they had together (MiB): pages that several of them share are counted once where the
    system tells (PSS), else in each (RSS). ``cpu`` is the time of all processors that they and the server took
    (seconds); without the server if it doesn't run on this machine.
    """

    def __init__(self, pid: int, backend: int) -> None:
        self.peak = self.cpu = 0.0
        self._process, self._server = psutil.Process(pid), ServerProcesses(backend)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self.cpu = -self.seconds
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
        self.cpu += self.seconds

    def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, sum(map(_memory, _tree(self._process))) / 1024 / 1024)
            if self._end.wait(_EVERY):
                return

    @property
    def seconds(self) -> float:
        """The time of all processors that they and the server have taken since they began."""
        return processor_seconds(self._process.pid) + self._server.seconds


class ServerProcesses:
    """All processes of the server behind a backend."""

    def __init__(self, backend: int) -> None:
        self._server = _parent(backend)

    @property
    def seconds(self) -> float:
        """The time of all processors that they have taken; 0 if the server doesn't run on this machine."""
        return 0.0 if self._server is None else sum(map(_cpu, _tree(self._server)))


def processor_seconds(pid: int) -> float:
    """Return the time of all processors that a process and all that it started have taken."""
    return sum(map(_cpu, _tree(psutil.Process(pid))))


def _parent(backend: int) -> Any:
    """Return the process that starts the server's backends."""
    try:
        process = psutil.Process(backend)
        return process.parent() if "postgres" in process.name() else None
    except psutil.Error:
        return None


def _tree(process: Any) -> list[Any]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _memory(process: Any) -> float:
    try:
        told = process.memory_full_info()
    except psutil.Error:  # it ended, or isn't ours
        return 0.0
    return float(getattr(told, "pss", 0) or told.rss)


def _cpu(process: Any) -> float:
    try:
        told = process.cpu_times()
    except psutil.Error:
        return 0.0
    # With those of children that have ended: a parallel worker is gone with its query.
    return float(told.user + told.system + getattr(told, "children_user", 0) + getattr(told, "children_system", 0))
