"""A Python that has imported the project already: a process of it is a fork, and needn't import for a second.

`warm_python` returns a program that is called as ``python`` is: with ``-m module``, ``-c code`` or a file. It asks a
server, which forks: the fork has the caller's streams, folder and environment, is sent the signals that the program
gets, and is killed when the program is. Tests of how an interpreter starts or ends take `sys.executable`.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: What is imported before the first fork, if it is installed: the oldest libraries are tried without some of these.
_IMPORTED = (
    "alembic.command",
    "django.contrib.admin",
    "django.core.management",
    "django.db.backends.postgresql.base",
    "django.test",
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
request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
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
#: The servers of this process.
_servers: list[subprocess.Popen[bytes]] = []


@functools.cache
def warm_python() -> str:
    """Return the path of the program; its server lives as long as this process."""
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
    return str(program)


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
        size, streams, _, _ = socket.recv_fds(program, 4, 3)
        request = b""
        while len(request) < int.from_bytes(size, "big") and (part := program.recv(1 << 20)):
            request += part
        process = os.fork()
        if not process:
            self._ready.close()
            for each in (self._listener, program, *self._forks):
                each.close()
            arguments, folder, environment = json.loads(request)
            return _become(arguments, folder, environment, streams)
        for stream in streams:
            os.close(stream)
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


def _become(arguments: list[str], folder: str, environment: dict[str, str], streams: list[int]) -> list[str]:
    """Make a fork of the server what a new interpreter would be; return its arguments, without options."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww"))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *sys.path[2:]]
    while arguments[0] == "-W":
        warnings.simplefilter(arguments[1])  # type: ignore[arg-type]
        arguments = arguments[2:]
    return arguments


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
