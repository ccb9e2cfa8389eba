"""The small process between the owner and its PostgreSQL server.

It is the server's parent. It runs in a session of its own, so that Ctrl-C reaches the owner only. It reads commands
from a pipe whose other end only the owner holds. It stops the server and removes a temporary folder as soon as the pipe
closes or the owner is gone, however it died. It is started by its path and imports nothing of the package.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import locale
import os
import pwd
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

_COMMANDS, _ANSWERS = 0, 1
_LOOK_AT_OWNER = 0.5
INITDB_LIMIT = 300.0
START_LIMIT = 120.0
STOP_LIMITS = {"fast": 60.0, "immediate": 15.0}
_SIGNALS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_PAUSE = 0.01
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CLONE_NEWUSER = 0x10000000

if sys.platform == "linux":
    _prctl = ctypes.CDLL(None).prctl
    _prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
else:
    _prctl = None


class RefusedError(Exception):
    """What every command raises that can't be done; the text goes back to the owner."""


@dataclass(frozen=True)
class Identity:
    """The user that PostgreSQL runs as; it refuses to run as root.

    ``self``: unchanged. ``namespace``: root, which the server sees as the user ``nobody``. ``nobody``: that user
    itself. A user namespace needs no change of owners, and reaches whatever root owns; some containers forbid it.
    """

    kind: str
    uid: int
    gid: int

    def enter(self) -> None:
        """Become this user, in the calling process, for good."""
        if self.kind == "namespace":
            _enter_namespace()
        elif self.kind == "nobody":
            os.setgroups([])
            os.setgid(self.gid)
            os.setuid(self.uid)


def choose(run_as: str, postgres: Path, folder: Path) -> tuple[Identity, bool]:
    """Return the first identity that can run ``postgres`` in ``folder``, and whether it reaches the binaries.

    ``folder`` is handed over to that identity.
    """
    if os.geteuid() != 0:
        return Identity("self", os.geteuid(), os.getegid()), True
    kinds = []
    for identity in _candidates(run_as, folder / "data"):
        kinds.append(identity.kind)
        try:
            os.chown(folder, identity.uid, identity.gid)
            return identity, _can_run(postgres, folder, identity)
        except (OSError, subprocess.SubprocessError):  # another identity may; if none can, that is raised below
            continue
    raise RefusedError(
        f"PostgreSQL doesn't run as root, and {' or '.join(kinds)} can't enter {folder} here; "
        "mend: run as another user, or choose a folder that the user 'nobody' can enter"
    )


def _can_run(postgres: Path, folder: Path, identity: Identity) -> bool:
    """Can the identity run the program? Raises where it can't even enter the folder."""

    def enter() -> None:
        identity.enter()
        os.chdir(folder)

    try:
        subprocess.run(  # noqa: S603 - the owner found the program, and this process has no threads
            [postgres, "--version"], preexec_fn=enter, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True
        )
    except (OSError, subprocess.CalledProcessError):  # that is the answer
        return False
    return True


def _candidates(run_as: str, data: Path) -> list[Identity]:
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        raise RefusedError("PostgreSQL doesn't run as root, and this machine has no user 'nobody'") from None
    every = [Identity("namespace", 0, 0), Identity("nobody", nobody.pw_uid, nobody.pw_gid)]
    if data.exists():
        every = [identity for identity in every if identity.uid == data.stat().st_uid]
    chosen = [identity for identity in every if run_as in ("auto", identity.kind)]
    if not chosen:
        raise RefusedError(f"{data} belongs to another user (uid {data.stat().st_uid}); run as that user")
    return chosen


def _enter_namespace() -> None:
    if sys.platform != "linux":
        raise OSError("user namespaces exist on Linux only")
    # initdb looks its user up by name, so the number has to be one that the machine knows.
    nobody = pwd.getpwnam("nobody")
    uid, gid = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUSER):
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{nobody.pw_uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{nobody.pw_gid} {gid} 1")


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
        """
        unfinished = self._folder / "data.new"
        process = self._spawn(
            *("initdb", "-D", str(unfinished), "-U", "postgres", "-E", "UTF8", f"--locale={_locale()}"),
            *("--auth=scram-sha-256", f"--pwfile={self._folder / 'password'}"),
            *(() if sync else ("--no-sync",)),
        )
        self._wait(lambda: process.poll() is not None, process, INITDB_LIMIT, "initdb")
        if process.returncode:
            raise RefusedError(f"initdb failed with exit code {process.returncode}")
        with (unfinished / "postgresql.conf").open("a") as conf:
            conf.write("\ninclude '../outbox.conf'\n")
        unfinished.rename(self._data)

    def start(self) -> None:
        """Start the server and wait until it takes connections."""
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
            with contextlib.suppress(subprocess.TimeoutExpired):  # the next step is harder
                self._process.wait(STOP_LIMITS[step])
        self.kill()

    def kill(self) -> None:
        """End the server and all its backends by SIGKILL, as a machine that loses its power would."""
        process, backends = self._process, set[int]()
        if process and process.poll() is None:
            # A stopped postmaster can't start another backend between the listing and the kill.
            process.send_signal(signal.SIGSTOP)
            backends.update(_children(process.pid))
            process.kill()
            process.wait()
        # The backends of a postmaster that another process killed are our children by now.
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
        return len(lines) > 7 and int(lines[0]) == process.pid and lines[7].strip() in {"ready", "standby"}


def _give_up(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGQUIT)
    process.wait()
    # initdb leaves children behind, which would go on writing into a folder that is about to be removed.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # there is none left
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
    except ChildProcessError:  # it isn't a child of this process
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


class Keeper:
    """Serves one owner. ``plan`` is what the owner wrote: see ``outbox.embedded.own``."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self._folder = Path(plan["folder"])
        self._postmaster: Postmaster | None = None
        self._lock: int | None = None
        self._ending = False
        self._wake, self._waker = os.pipe()

    def main(self) -> None:
        """Serve until the owner is gone, then stop the server and remove a temporary folder."""
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGHUP, self._end)
        signal.signal(signal.SIGINT, lambda *_: None)
        try:
            for command in self._commands():
                self._answer(command)
        finally:
            if self._postmaster:
                self._postmaster.stop("immediate" if self._plan["temporary"] else "fast")
            if self._plan["temporary"]:
                shutil.rmtree(self._folder, ignore_errors=True)

    def over(self) -> bool:
        """Tell whether the owner is gone or wants an end.

        The pipe alone doesn't show it: a process forked by the owner outside Python holds the other end too.
        """
        return self._ending or os.getppid() != self._plan["owner"]

    def _end(self, *_: object) -> None:
        self._ending = True
        os.write(self._waker, b".")

    def _commands(self) -> Iterator[dict[str, Any]]:
        while not self.over():
            if _COMMANDS in select.select([_COMMANDS, self._wake], [], [], _LOOK_AT_OWNER)[0]:
                text = os.read(_COMMANDS, 65_536)
                if not text:
                    return
                yield from map(json.loads, text.splitlines())

    def _answer(self, command: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"number": command["number"]}
        try:
            answer |= self._obey(command["do"], command.get("mode", "fast"))
        except (RefusedError, OSError, subprocess.SubprocessError) as error:
            answer["error"] = str(error)
        try:
            os.write(_ANSWERS, json.dumps(answer).encode() + b"\n")
        except BrokenPipeError:  # the owner is gone, and no longer waits for the answer
            self._ending = True

    def _obey(self, what: str, mode: str) -> dict[str, Any]:
        if what == "prepare":
            return {"run_as": self._prepare()}
        server = self._postmaster
        if server is None:
            raise RefusedError("nothing is prepared")
        stop = partial(server.stop, mode)
        acts: dict[str, Callable[[], None]] = {"start": server.start, "stop": stop, "kill": server.kill}
        acts[what]()
        return {}

    def _prepare(self) -> str:
        if not self._plan["temporary"]:
            self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RefusedError(f"{self._folder} is in use by another server; choose another folder") from None
        binaries = Path(self._plan["binaries"]["folder"])
        identity, reachable = choose(self._plan["run_as"], binaries / "postgres", self._folder)
        if not reachable:
            binaries = self._copy_binaries(binaries)
        postmaster = Postmaster(binaries, self._folder, identity, self.over)
        if not (self._folder / "data").exists():
            shutil.rmtree(self._folder / "data.new", ignore_errors=True)
            password = self._folder / "password"
            password.unlink(missing_ok=True)
            password.touch(0o600, exist_ok=False)
            password.write_text(os.urandom(18).hex())
            os.chown(password, identity.uid, identity.gid)
            postmaster.make(sync=self._plan["sync"])
        self._postmaster = postmaster
        return identity.kind

    def _copy_binaries(self, binaries: Path) -> Path:
        base, trees = self._plan["binaries"]["base"], self._plan["binaries"]["trees"]
        if not trees:
            raise RefusedError(f"the server's user can't reach {binaries}; name others in OUTBOX_PG_BIN")
        runtime = self._folder / "runtime"
        shutil.rmtree(runtime, ignore_errors=True)
        for tree in map(Path, trees):
            # Without the headers, and with the links between the libraries as they are.
            target, headers = runtime / tree.relative_to(base), shutil.ignore_patterns("include")
            shutil.copytree(tree, target, symlinks=True, ignore=headers)
        for path in (runtime, *runtime.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755)
        return runtime / binaries.relative_to(base)


if __name__ == "__main__":
    Keeper(json.loads(sys.argv[1])).main()
