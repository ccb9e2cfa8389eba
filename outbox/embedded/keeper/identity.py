"""As whom PostgreSQL runs: it refuses to run as root, so for root another user has to be found."""

from __future__ import annotations

import ctypes
import os
import pwd
import sys
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWUSER = 0x10000000
_FORBIDDEN, _NO_FOLDER, _NO_BINARIES = 90, 91, 92


class RefusedError(Exception):
    """A command that can't be done; the text goes back to the owner."""


@dataclass(frozen=True)
class Identity:
    """``self``: unchanged. ``namespace``: root seen as nobody by the server. ``nobody``: really nobody.

    A user namespace needs no user, no change of owners, and reaches whatever root owns; some containers
    forbid it.
    """

    kind: str
    uid: int
    gid: int

    def enter(self) -> None:
        """Become this user, in the calling process, for good.

        Raises:
            OSError: not permitted here.

        """
        if self.kind == "namespace":
            _enter_namespace()
        elif self.kind == "nobody":
            os.setgroups([])
            os.setgid(self.gid)
            os.setuid(self.uid)


def choose(run_as: str, postgres: Path, folder: Path) -> tuple[Identity, bool]:
    """Return the first identity that can run ``postgres`` in ``folder``, and whether it reaches the binaries.

    ``folder`` is handed over to that identity.

    Raises:
        RefusedError: root, and there is no way to run as somebody else here.

    """
    if os.geteuid() != 0:
        return Identity("self", os.geteuid(), os.getegid()), True
    why = []
    for identity in _candidates(run_as, folder / "data"):
        try:
            os.chown(folder, identity.uid, identity.gid)
        except OSError:
            answer = _FORBIDDEN
        else:
            answer = _try(identity, postgres, folder)
        if answer in (0, _NO_BINARIES):
            return identity, answer == 0
        reason = "is forbidden" if answer == _FORBIDDEN else f"can't enter {folder}"
        why.append(f"{identity.kind} {reason}")
    raise RefusedError(
        f"PostgreSQL doesn't run as root, and no other way works here: {', '.join(why)}; "
        "mend: run as another user, or choose a folder that the user nobody can enter"
    )


def _candidates(run_as: str, data: Path) -> list[Identity]:
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        raise RefusedError("PostgreSQL doesn't run as root, and this machine has no user nobody") from None
    every = [Identity("namespace", 0, 0), Identity("nobody", nobody.pw_uid, nobody.pw_gid)]
    if data.exists():
        every = [identity for identity in every if identity.uid == data.stat().st_uid]
    chosen = [identity for identity in every if run_as in ("auto", identity.kind)]
    if not chosen:
        raise RefusedError(f"{data} belongs to another user (uid {data.stat().st_uid}); run as that user")
    return chosen


def _try(identity: Identity, postgres: Path, folder: Path) -> int:
    """Run ``postgres --version`` as ``identity`` from ``folder``; return 0 or the step that failed."""
    child = os.fork()
    if child == 0:
        step = _FORBIDDEN
        try:
            identity.enter()
            step = _NO_FOLDER
            os.chdir(folder)
            step = _NO_BINARIES
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
            os.execv(postgres, [str(postgres), "--version"])  # noqa: S606
        finally:
            os._exit(step)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status if status in (0, _FORBIDDEN, _NO_FOLDER) else _NO_BINARIES


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
