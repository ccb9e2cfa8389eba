"""Root's embedded PostgreSQL, which doesn't run as root, and that of an ordinary user."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outbox import embedded
from outbox.embedded import Server
from outbox.errors import EmbeddedError
from tests.embedded.owners import PROJECT, WAITS, as_root, ask, libpq, nothing_left, owner


@pytest.mark.parametrize("run_as", ["namespace", "nobody"])
def test_as_root(run_as: Any) -> None:
    """Root's server runs in a user namespace, or as nobody where that is forbidden; both leave nothing."""
    with Server(durable=False, run_as=run_as) as server:
        if server.runs_as != run_as:
            pytest.skip("user namespaces are forbidden here")
        assert ask(libpq(server), "SELECT 1") == 1
        nobody = pwd.getpwnam("nobody").pw_uid
        assert (server.folder / "data").stat().st_uid == (nobody if run_as == "nobody" else 0)
        server.restart()
        server.kill()
        server.start()
        assert ask(libpq(server), "SELECT 1") == 1
    assert nothing_left(server.folder)


@as_root
def test_as_root_with_binaries_out_of_reach(wheel: embedded.Binaries, tmp_path: Path) -> None:
    """Binaries where nobody can't read them are copied into the server's folder, with their libraries."""
    assert wheel.base
    hidden = tmp_path / "hidden"
    for tree in wheel.trees:
        shutil.copytree(tree, hidden / tree.relative_to(wheel.base), symlinks=True)
    hidden.chmod(0o700)
    moved = embedded.Binaries(
        hidden / wheel.folder.relative_to(wheel.base),
        wheel.version,
        wheel.origin,
        hidden,
        tuple(hidden / tree.relative_to(wheel.base) for tree in wheel.trees),
    )
    with Server(durable=False, run_as="nobody", binaries=moved) as server:
        assert (server.folder / "runtime").is_dir()
        assert ask(libpq(server), "SELECT 1") == 1
    assert nothing_left(server.folder)


@as_root
def test_as_root_in_a_folder_out_of_reach(tmp_path: Path) -> None:
    """Where nobody can't enter the folder, the error says so, and no folder above it is opened."""
    above = tmp_path / "private"
    above.mkdir(mode=0o700)
    with pytest.raises(EmbeddedError, match="nobody can't enter"):
        Server(folder=above / "data", run_as="nobody").start()
    assert stat.S_IMODE(above.stat().st_mode) == 0o700


def interpreter_for(user: str, folder: Path) -> str | None:
    """Return a Python that this user can run, or None."""
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            subprocess.run(
                [python, "-c", "import sys, json; sys.exit(sys.version_info < (3, 11))"],
                user=user,
                group=pwd.getpwnam(user).pw_gid,
                extra_groups=[],
                cwd=folder,
                check=True,
                capture_output=True,
            )
        except (OSError, subprocess.CalledProcessError):
            continue
        return python
    return None


@as_root
def test_as_an_ordinary_user(open_folder: Path) -> None:
    """Somebody who isn't root needs no other user."""
    python = interpreter_for("nobody", open_folder)
    if python is None:
        pytest.skip("no Python 3.11 or newer that the user nobody can run")
    shutil.copytree(PROJECT / "outbox" / "embedded", open_folder / "outbox" / "embedded")
    (open_folder / "outbox" / "__init__.py").touch()
    shutil.copy(PROJECT / "outbox" / "errors.py", open_folder / "outbox")
    found = embedded.find_binaries()
    for tree in found.trees:
        shutil.copytree(tree, open_folder / tree.relative_to(found.base or "/"), symlinks=True)
    folder = open_folder / found.folder.relative_to(found.base) if found.base else found.folder
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(open_folder), "OUTBOX_PG_BIN": str(folder)}
    nobody: dict[str, Any] = {"user": "nobody", "group": pwd.getpwnam("nobody").pw_gid, "extra_groups": []}
    with owner(WAITS, python=python, env=environment, cwd=open_folder, **nobody) as other:
        assert ask(other.facts["url"], "SELECT 1") == 1
        assert other.folder.stat().st_uid == pwd.getpwnam("nobody").pw_uid
        other.process.communicate("go on\n")
        assert other.process.returncode == 0
        assert nothing_left(other.folder)
