"""A Python that has imported the project already: a process of it is a fork, and needn't import for a second.

`warm_python` returns a program that is called as ``python`` is: with ``-m module``, ``-c code`` or a file. It asks a
server, which forks: the fork has the caller's streams, folder and environment, is sent the signals that the program
gets, and is killed when the program is. Tests of how an interpreter starts or ends take `sys.executable`.

`Forked` is the same for code that starts processes by `subprocess.Popen`, and shows the fork itself: also a signal
that no program can pass on, such as SIGSTOP, reaches it at once.
"""

from __future__ import annotations

import fcntl
import functools
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
#: What is imported before the first fork, if it is installed: the oldest libraries are tried without some of these.
_IMPORTED = (
    "alembic.command",
    "django.contrib.admin",
    "django.core.management",
    "django.db.backends.postgresql.base",
    "django.test",
    "httpx",
    "outbox.cli.processes",
    "outbox.console.app",
    "outbox.testing",
    "outbox.worker.worker",
    "psycopg",
    "sqlalchemy.dialects.postgresql.psycopg",
    "uvicorn.protocols.http.auto",
)
#: The program; its interpreter imports next to nothing. A signal that has ended the fork ends it, too.
_PROGRAM = """#!{python} -IS
import array, json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ), None]).encode()
streams = array.array("i", [0, 1, 2])
server.sendmsg([len(request).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
server.sendall(request)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, frame: server.send(bytes([number])))
code = int(server.recv(16) or -signal.SIGKILL)
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""
#: Names the program to processes that tests start, which may start others by it.
_FOUND = "OUTBOX_TEST_WARM_PYTHON"
#: The bytes of a number that a server tells.
_WIDTH = 8
#: From this number on files are put that come from elsewhere, until they get the numbers that they had there.
_ASIDE = 512
#: The servers of this process.
_servers: list[subprocess.Popen[bytes]] = []


@functools.cache
def warm_python() -> str:
    """Return the path of the program; its server lives as long as this process, or one that has started this."""
    if found := os.environ.get(_FOUND):
        return found
    folder = tempfile.mkdtemp(prefix="warm-")
    program = Path(folder, "python")
    program.write_text(_PROGRAM.format(python=sys.executable, address=f"{folder}/socket"))
    program.chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import _serve; _serve({folder!r})"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    _servers.append(server)
    assert server.stdout
    assert server.stdout.readline() == b"ready\n"
    os.environ[_FOUND] = str(program)
    return str(program)


class Forked:
    """A fork as `subprocess.Popen` shows a process: what is needed of it, with a pipe for each stream."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: dict[str, str] | None = None,
        text: bool = False,
        errors: str | None = None,
        pass_fds: Sequence[int] = (),
        **_: Any,
    ) -> None:
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(str(Path(warm_python()).with_name("socket")))
        (given, stdin), (stdout, out), (stderr, err) = os.pipe(), os.pipe(), os.pipe()
        said = json.dumps([command[1:], str(Path.cwd()), env or dict(os.environ), pass_fds]).encode()
        socket.send_fds(self._server, [len(said).to_bytes(4, "big")], [given, out, err, *pass_fds])
        self._server.sendall(said)
        for theirs in (given, out, err):
            os.close(theirs)
        self.pid = int(self._server.recv(_WIDTH))
        self.returncode: int | None = None
        mode = "" if text else "b"
        self.stdin: IO[Any] = os.fdopen(stdin, f"w{mode}")
        self.stdout: IO[Any] = os.fdopen(stdout, f"r{mode}", errors=errors)
        self.stderr: IO[Any] = os.fdopen(stderr, f"r{mode}", errors=errors)

    def poll(self) -> int | None:
        """Return how it has ended; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return how it has ended, when it has; raise `subprocess.TimeoutExpired` if that takes too long (seconds)."""
        if self.returncode is None:
            if not select.select([self._server], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self.returncode = int(self._server.recv(_WIDTH) or -signal.SIGKILL)
            self._server.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it hasn't ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)


#: In the place of the module `subprocess`, where a module is to start forks.
FORKING = types.SimpleNamespace(**{**vars(subprocess), "Popen": Forked})


def forking(package: str) -> list[str]:
    """Return the command of an example, as a fork; what its module ``processes`` starts are forks, too."""
    code = (
        f"import sys; from {package} import processes; from {__name__} import FORKING; processes.subprocess = FORKING; "
        f"from {package}.__main__ import main; sys.exit(main())"
    )
    return [warm_python(), "-c", code]


class _Server:
    """Forks for each program that asks, sends its signals on, and tells it how its fork has ended."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._ready = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{folder}/socket")
        self._listener.listen(64)
        self._ready.register(self._listener, selectors.EVENT_READ)
        self._ready.register(sys.stdin.fileno(), selectors.EVENT_READ)
        #: The process of each program.
        self._forks: dict[socket.socket, int] = {}

    def serve(self) -> list[str] | None:
        """Return the arguments in a fork; and None when the standard input is closed."""
        while True:
            for key, _ in self._ready.select():
                if key.fileobj is self._listener:
                    if arguments := self._fork():
                        return arguments
                elif key.fd == 0:
                    for process in self._forks.values():
                        os.kill(process, signal.SIGKILL)
                    shutil.rmtree(self._folder)
                    return None
                elif isinstance(key.data, socket.socket):
                    self._reap(key.fd, key.data)
                else:
                    self._pass_on(key.fileobj)

    def _fork(self) -> list[str] | None:
        program, _ = self._listener.accept()
        size, streams, _, _ = socket.recv_fds(program, 4, 16)
        request = b""
        while len(request) < int.from_bytes(size, "big") and (part := program.recv(1 << 20)):
            request += part
        arguments, folder, environment, inherited = json.loads(request)
        process = os.fork()
        if not process:
            self._ready.close()
            for each in (self._listener, program, *self._forks):
                each.close()
            files = dict(zip([0, 1, 2, *(inherited or ())], streams, strict=True))
            return _become(arguments, folder, environment, files)
        for stream in streams:
            os.close(stream)
        if inherited is not None:
            program.send(f"{process:{_WIDTH}}".encode())
        self._forks[program] = process
        self._ready.register(program, selectors.EVENT_READ)
        self._ready.register(os.pidfd_open(process), selectors.EVENT_READ, program)
        return None

    def _pass_on(self, program: Any) -> None:
        if program in self._forks:
            numbers = program.recv(16)
            for number in numbers or [signal.SIGKILL]:
                os.kill(self._forks[program], number)
            if not numbers:
                self._ready.unregister(program)

    def _reap(self, ended: int, program: socket.socket) -> None:
        self._ready.unregister(ended)
        os.close(ended)
        code = os.waitstatus_to_exitcode(os.waitpid(self._forks.pop(program), 0)[1])
        with suppress(KeyError):
            self._ready.unregister(program)
        with program, suppress(OSError):
            program.send(str(code).encode())


def _become(arguments: list[str], folder: str, environment: dict[str, str], files: dict[int, int]) -> list[str]:
    """Make a fork of the server what a new interpreter would be; return its arguments, without options."""
    aside = {number: fcntl.fcntl(file, fcntl.F_DUPFD, _ASIDE) for number, file in files.items()}
    for file in files.values():
        os.close(file)
    for number, file in aside.items():
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww"))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *sys.path[2:]]
    while arguments[0] == "-W":
        warnings.simplefilter(arguments[1])  # type: ignore[arg-type]
        arguments = arguments[2:]
    # No folder is put before the path here: no program of the tests is started where that makes a difference.
    return arguments[arguments[0] == "-P" :]


def _run(arguments: list[str]) -> None:
    """Do what an interpreter does with these arguments."""
    first, *others = arguments
    if first in {"-", "-c"}:
        sys.path.insert(0, "")
        code = others.pop(0) if first == "-c" else sys.stdin.read()
        sys.argv = [first, *others]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec", dont_inherit=True), main.__dict__)  # noqa: S102
    elif first == "-m":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = others
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(first).resolve().parent))
        sys.argv = arguments
        runpy.run_path(first, run_name="__main__")


def _serve(folder: str) -> None:
    for name in _IMPORTED:
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)
    # A run that is interrupted ends its programs by itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
    server = _Server(folder)
    os.write(1, b"ready\n")
    if arguments := server.serve():
        _run(arguments)
