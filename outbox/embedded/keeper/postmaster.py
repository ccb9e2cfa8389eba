"""One PostgreSQL server as a child process: made, started, stopped, killed."""

from __future__ import annotations

import contextlib
import ctypes
import locale
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from .identity import Identity, RefusedError

INITDB_LIMIT = 300.0
START_LIMIT = 120.0
STOP_LIMITS = {"fast": 60.0, "immediate": 15.0}
_SIGNALS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_PAUSE = 0.01
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

if sys.platform == "linux":
    _prctl = ctypes.CDLL(None).prctl
    _prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
else:
    _prctl = None


class Postmaster:
    """The server of one data folder. ``over`` tells whether the owner is gone; every wait gives up then."""

    def __init__(self, binaries: Path, folder: Path, identity: Identity, over: Callable[[], bool]) -> None:
        self._binaries = binaries
        self._folder = folder
        self._data = folder / "data"
        self._identity = identity
        self._over = over
        self._process: subprocess.Popen[bytes] | None = None
        if _prctl:
            # The backends of a killed postmaster become our children, so we can wait until none is left.
            _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def make(self, *, sync: bool) -> None:
        """Run initdb with the password in the file ``password``.

        The data folder gets its name last: where it exists, it is complete.

        Raises:
            RefusedError: initdb failed, or the owner is gone.

        """
        unfinished = self._folder / "data.new"
        process = self._spawn(
            *("initdb", "-D", str(unfinished), "-U", "postgres", "-E", "UTF8", f"--locale={_locale()}"),
            *("--auth=scram-sha-256", f"--pwfile={self._folder / 'password'}", "--no-instructions"),
            *(() if sync else ("--no-sync",)),
        )
        self._wait(lambda: process.poll() is not None, process, INITDB_LIMIT, "initdb")
        if process.returncode:
            raise RefusedError(f"initdb failed with exit code {process.returncode}")
        with (unfinished / "postgresql.conf").open("a") as conf:
            conf.write("\ninclude '../outbox.conf'\n")
        unfinished.rename(self._data)

    def start(self) -> None:
        """Start the server and wait until it takes connections.

        Raises:
            RefusedError: it runs already, ended while starting, takes too long, or the owner is gone.

        """
        if self._process and self._process.poll() is None:
            raise RefusedError("the server is running already")
        self.kill()
        process = self._process = self._spawn("postgres", "-D", str(self._data))
        self._wait(lambda: self._ready(process), process, START_LIMIT, "start")
        if process.poll() is not None:
            raise RefusedError(f"PostgreSQL ended while starting, with exit code {process.returncode}")

    def stop(self, mode: str) -> None:
        """Stop the server: fast, then immediate, then by SIGKILL, each when the one before takes too long."""
        for step in ("fast", "immediate")[mode == "immediate" :]:
            if self._process is None or self._process.poll() is not None:
                break
            self._process.send_signal(_SIGNALS[step])
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_LIMITS[step])
        self.kill()

    def kill(self) -> None:
        """End the server and all its backends by SIGKILL, as a machine that loses its power would."""
        process, backends = self._process, set[int]()
        if process and process.poll() is None:
            # A stopped postmaster can't start another backend between our look and our blow.
            process.send_signal(signal.SIGSTOP)
            backends.update(_children(process.pid))
            process.kill()
            process.wait()
        # The backends of a postmaster that somebody else killed are our children by now.
        backends.update(_children(os.getpid()))
        for pid in backends:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # A new server refuses to start while an old backend still holds the shared memory.
        while not all(_gone(pid) for pid in backends):
            time.sleep(_PAUSE)

    def _spawn(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        environment = {name: text for name, text in os.environ.items() if not name.startswith(("PG", "LC_"))}
        with (self._folder / "server.log").open("ab") as log:
            return subprocess.Popen(  # noqa: S603 - the owner found the program
                [self._binaries / program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env={**environment, "LC_ALL": "C", "TZ": "UTC"},
                start_new_session=True,
                preexec_fn=self._become,  # noqa: PLW1509 - this process has no threads
            )

    def _become(self) -> None:
        self._identity.enter()
        if _prctl:
            # Should this process itself be killed, the server shuts down at once.
            _prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT, 0, 0, 0)

    def _wait(self, done: Callable[[], bool], process: subprocess.Popen[bytes], limit: float, what: str) -> None:
        deadline = time.monotonic() + limit
        while process.poll() is None and not done():
            if self._over() or time.monotonic() > deadline:
                _give_up(process)
                raise RefusedError(f"{what} was given up" if self._over() else f"{what} took over {limit} s")
            time.sleep(_PAUSE)

    def _ready(self, process: subprocess.Popen[bytes]) -> bool:
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) > 7 and int(lines[0]) == process.pid and lines[7].strip() == "ready"


def _give_up(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGQUIT)
    process.wait()
    # initdb leaves children behind, which would go on writing into a folder that is about to be removed.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-process.pid, 0)


def _locale() -> str:
    try:
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
    except locale.Error:
        return "C"
    return "C.UTF-8"


def _children(parent: int) -> list[int]:
    if sys.platform == "linux":
        pairs = []
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                # The name in parentheses may hold anything; the parent's number is the second field after it.
                pairs.append((entry.parent.name, entry.read_text().rpartition(")")[2].split()[1]))
    else:
        listing = subprocess.check_output(["/bin/ps", "-A", "-o", "pid=,ppid="], text=True)
        pairs = [(pid, ppid) for pid, ppid in map(str.split, listing.splitlines())]
    return [int(pid) for pid, ppid in pairs if int(ppid) == parent]


def _gone(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
