"""A PostgreSQL server of one's own, in a folder of its own.

The owner's side of the pipe to the keeper.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from outbox.embedded import files
from outbox.embedded.binaries import Binaries, find_binaries
from outbox.embedded.server import Mode, Progress, ServerLike
from outbox.errors import EmbeddedError

_STOP_LIMIT = 90.0
_RUN = "import sys; sys.path.append(sys.argv[1]); from keeper.main import main; main()"


class Link:
    """A keeper process and the only open end of its command pipe."""

    def __init__(self, folder: Path, binaries: Binaries, *, temporary: bool, sync: bool, run_as: str) -> None:
        plan = {
            "owner": os.getpid(),
            "folder": str(folder),
            "temporary": temporary,
            "sync": sync,
            "run_as": run_as,
            "binaries": str(binaries.folder),
            "base": str(binaries.base),
            "trees": [str(tree) for tree in binaries.trees],
        }
        self._number = 0
        with (folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                [sys.executable, "-I", "-S", "-c", _RUN, str(Path(__file__).parent), json.dumps(plan)],
                # No buffers: their locks could be held by another thread at the moment of a fork.
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
        _links.add(self)

    @property
    def pid(self) -> int:
        """The keeper's process id."""
        return self._process.pid

    def ask(self, do: str, **more: str) -> dict[str, Any]:
        """Have a command done and return the keeper's answer.

        Raises:
            EmbeddedError: refused or failed, or the keeper is gone.

        """
        self._number += 1
        command = {"number": self._number, "do": do, **more}
        assert self._process.stdin and self._process.stdout  # noqa: S101 - both are pipes
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
        answer: dict[str, Any] = {}
        # An older number is the answer to a command whose caller was interrupted.
        while answer.get("number") != self._number:
            line = self._process.stdout.readline()
            if not line:
                raise EmbeddedError("the process which keeps PostgreSQL running was ended by somebody else")
            answer = json.loads(line)
        if "error" in answer:
            raise EmbeddedError(answer["error"])
        return answer

    def close(self) -> None:
        """End the keeper and wait until it has stopped the server."""
        self._close_pipes()
        # The signal is for a keeper which is busy and doesn't look at its pipe.
        self._process.terminate()
        try:
            self._process.wait(_STOP_LIMIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def forget(self) -> None:
        """Let go of the keeper, in a forked child, whose it isn't."""
        self._close_pipes()
        self._process.returncode = 0

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _forget_all() -> None:
    for link in list(_links):
        link.forget()


if hasattr(os, "register_at_fork"):
    # A forked child must not hold the pipe open after its parent was killed.
    os.register_at_fork(after_in_child=_forget_all)


RunAs = Literal["auto", "namespace", "nobody"]

_PORT_TRIES = 5


class Server(ServerLike):
    """A PostgreSQL server that lives as long as this ``with`` block, and never longer than its process.

    It listens on a free port of the loopback address only, and lets nobody in without its random password.
    Without ``folder`` its data are in a temporary folder, removed at the end; with ``folder`` they are kept
    there, and only one server at a time can use it. ``settings`` are PostgreSQL's own. ``durable=False``
    turns fsync off: faster, still safe when processes are killed, not when the machine loses its power.
    ``progress`` is called with a line of text at each step. ``run_as`` matters to root only, as whom
    PostgreSQL won't run: ``namespace`` or ``nobody``; by default the first that works.

    A forked child may use the URLs but can't stop, restart or kill the server.
    """

    def __init__(
        self,
        *,
        folder: Path | None = None,
        settings: Mapping[str, str] | None = None,
        durable: bool = True,
        progress: Progress | None = None,
        binaries: Binaries | None = None,
        run_as: RunAs = "auto",
    ) -> None:
        super().__init__(progress)
        self._settings = dict(settings or {})
        files.check_settings(self._settings)
        self._kept = folder
        self._durable = durable
        self._binaries = binaries
        self._run_as = run_as
        self._lock = threading.RLock()
        self._link: Link | None = None
        self._owner = 0
        self._folder = Path()
        self._log_starts_at = 0
        self._password = ""
        self._port = 0
        self._runs_as = ""

    def __repr__(self) -> str:
        state = f"at {files.HOST}:{self._port}" if self._link else "not started"
        return f"<Server {self._binaries or 'PostgreSQL'} {state}>"

    @property
    def folder(self) -> Path:
        """The folder with the data and ``server.log``; a temporary one is gone after the end."""
        return self._folder

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1; 0 before the start."""
        return self._port

    @property
    def runs_as(self) -> str:
        """``self``, or for root ``namespace`` or ``nobody``; empty before the start."""
        return self._runs_as

    def url(self, database: str = "postgres", *, driver: str = "postgresql+psycopg") -> str:
        """Return the SQLAlchemy URL of a database, password included; ``driver="postgresql"`` suits libpq.

        Raises:
            EmbeddedError: the server was not started.

        """
        if not self._link:
            raise EmbeddedError("the server is not started")
        return f"{driver}://postgres:{self._password}@{files.HOST}:{self._port}/{quote(database, safe='')}"

    def start(self) -> None:
        """Start the server, or start it again after ``kill()``; returns when it takes connections.

        Raises:
            PostgresNotFound: there are no binaries.
            EmbeddedError: it runs already, the folder is in use, or PostgreSQL can't start.

        """
        with self._lock:
            if self._link:
                self._ask("start")
                return
            if os.name != "posix":
                raise EmbeddedError(
                    "the embedded server needs Linux or macOS; mend: name a server in OUTBOX_DATABASE_URL"
                )
            binaries = self._binaries = self._binaries or find_binaries()
            self._tell(f"starting {binaries}")
            self._owner = os.getpid()
            try:
                self._open(binaries)
                self._listen()
            except BaseException:
                self.stop()
                raise
            self._tell(f"started at {files.HOST}:{self._port}")

    def stop(self) -> None:
        """Stop the server and remove a temporary folder; does nothing if it isn't running or isn't ours."""
        # First of all: a forked child may have inherited the lock as taken, by a thread which it hasn't.
        if self._owner != os.getpid():
            return
        with self._lock:
            link, self._link = self._link, None
            self._owner = 0
            if link:
                link.close()
            if self._kept is None and self._folder.is_absolute():
                # The keeper has done so already, unless somebody killed it.
                shutil.rmtree(self._folder, ignore_errors=True)
            self._tell("stopped")

    def restart(self, mode: Mode = "fast") -> None:
        """Stop and start the server on the same port, which cuts connections; ``immediate`` is not orderly.

        Raises:
            EmbeddedError: not started, not by this process, or PostgreSQL can't start again.

        """
        if mode not in ("fast", "immediate"):
            raise EmbeddedError(f"mode must be 'fast' or 'immediate', not {mode!r}")
        with self._lock:
            self._ask("stop", mode=mode)
            self._ask("start")

    def kill(self) -> None:
        """End every process of the server by SIGKILL, as a crash of the machine would; ``start()`` recovers.

        Raises:
            EmbeddedError: not started, or not by this process.

        """
        with self._lock:
            self._ask("kill")

    def log_tail(self) -> str:
        """Return the last lines which the server logged since it was started."""
        return files.log_tail(self._folder, self._log_starts_at)

    def _open(self, binaries: Binaries) -> None:
        temporary = self._kept is None
        self._folder = files.kept(self._kept, binaries) if self._kept else files.temporary()
        self._log_starts_at = files.log_size(self._folder)
        sync = self._durable and not temporary
        self._link = Link(self._folder, binaries, temporary=temporary, sync=sync, run_as=self._run_as)
        self._runs_as = self._ask("prepare")["run_as"]
        self._password = (password := self._folder / "password").read_text()
        if temporary:
            password.unlink()

    def _listen(self) -> None:
        for attempt in range(_PORT_TRIES):
            self._port = files.free_port()
            text = files.render(self._settings, durable=self._durable, port=self._port)
            (self._folder / "outbox.conf").write_text(text)
            try:
                self._ask("start")
            except EmbeddedError as error:
                # Somebody else may have taken the port between our look and the server's start.
                if "could not bind" not in str(error) or attempt == _PORT_TRIES - 1:
                    raise
            else:
                return

    def _real_name(self, name: str) -> str:
        return name

    def _ask(self, do: str, **more: str) -> dict[str, Any]:
        if self._link is None:
            raise EmbeddedError("the server is not started")
        if self._owner != os.getpid():
            raise EmbeddedError("only the process which started the server can restart, stop or kill it")
        try:
            return self._link.ask(do, **more)
        except EmbeddedError as error:
            tail = self.log_tail()
            raise EmbeddedError(f"{error}\n{tail}" if tail else str(error)) from None
