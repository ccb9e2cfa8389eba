"""The keeper's loop: commands in, answers out, and an orderly end when the owner is gone."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .identity import Identity, RefusedError, choose
from .postmaster import Postmaster

_COMMANDS, _ANSWERS = 0, 1
_LOOK_AT_OWNER = 0.5


class Keeper:
    """Serves one owner. ``plan`` is what the owner wrote: see ``outbox.embedded.own``."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self._folder = Path(plan["folder"])
        self._postmaster: Postmaster | None = None
        self._lock: int | None = None
        self._told_to_end = False
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
            self._finish()

    def over(self) -> bool:
        """Tell whether the owner is gone or has told us to end.

        The pipe alone doesn't show it: a process forked by the owner outside Python holds the other end too.
        """
        return self._told_to_end or os.getppid() != self._plan["owner"]

    def _end(self, *_: object) -> None:
        self._told_to_end = True
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
        except BrokenPipeError:
            self._told_to_end = True

    def _obey(self, what: str, mode: str) -> dict[str, Any]:
        if what == "prepare":
            return {"run_as": self._prepare()}
        if self._postmaster is None:
            raise RefusedError("nothing is prepared")
        if what == "start":
            self._postmaster.start()
        elif what == "stop":
            self._postmaster.stop(mode)
        elif what == "kill":
            self._postmaster.kill()
        return {}

    def _prepare(self) -> str:
        if not self._plan["temporary"]:
            self._take_lock()
        binaries = Path(self._plan["binaries"])
        identity, reachable = choose(self._plan["run_as"], binaries / "postgres", self._folder)
        if not reachable:
            binaries = self._copy_binaries(binaries)
        postmaster = Postmaster(binaries, self._folder, identity, self.over)
        if not (self._folder / "data").exists():
            shutil.rmtree(self._folder / "data.new", ignore_errors=True)
            self._write_password(identity)
            postmaster.make(sync=self._plan["sync"])
        self._postmaster = postmaster
        return identity.kind

    def _take_lock(self) -> None:
        self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RefusedError(f"{self._folder} is in use by another server; choose another folder") from None

    def _write_password(self, identity: Identity) -> None:
        path = self._folder / "password"
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:  # noqa: PTH123
            file.write(os.urandom(18).hex())
        os.chown(path, identity.uid, identity.gid)

    def _copy_binaries(self, binaries: Path) -> Path:
        if not self._plan["trees"]:
            raise RefusedError(f"the server's user can't reach {binaries}; name others in OUTBOX_PG_BIN")
        base, runtime = Path(self._plan["base"]), self._folder / "runtime"
        shutil.rmtree(runtime, ignore_errors=True)
        for tree in map(Path, self._plan["trees"]):
            # Without the headers, and with the links between the libraries as they are.
            shutil.copytree(
                tree,
                runtime / tree.relative_to(base),
                symlinks=True,
                ignore=shutil.ignore_patterns("include"),
            )
        for path in (runtime, *runtime.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755)
        return runtime / binaries.relative_to(base)

    def _finish(self) -> None:
        if self._postmaster:
            self._postmaster.stop("immediate" if self._plan["temporary"] else "fast")
        if self._plan["temporary"]:
            shutil.rmtree(self._folder, ignore_errors=True)


def main() -> None:
    """Run the keeper with the plan in the last argument."""
    Keeper(json.loads(sys.argv[-1])).main()
