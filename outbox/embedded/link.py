"""The owner's side of the pipe to the keeper."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

from outbox.embedded.binaries import Binaries
from outbox.embedded.errors import EmbeddedError

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
