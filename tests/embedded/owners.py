"""Processes that own a server, and what is left of it when they have ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outbox import embedded

PROJECT = Path(embedded.__file__).parents[2]
SEARCHED = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root needs another user for PostgreSQL")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")


def ask(url: str, query: str) -> Any:
    """Return the first value which the query gives."""
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(query.encode()).fetchone()
    return row[0] if row else None


def execute(url: str, command: str) -> None:
    """Run a command that gives no rows."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(command.encode())


def libpq(server: embedded.ServerLike, database: str = "postgres") -> str:
    """Return the address of a database as libpq takes it."""
    return server.url(database, driver="postgresql")


def command_lines() -> list[str]:
    """Return the arguments of every process of this machine."""
    if Path("/proc/self/cmdline").exists():
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue
        return lines
    return subprocess.check_output(["ps", "-A", "-o", "args="], text=True).splitlines()


def nothing_left(folder: Path) -> bool:
    """Tell whether neither the folder nor a process that names it is there."""
    return not folder.exists() and not any(str(folder) in line for line in command_lines())


def ended(pid: int) -> bool:
    """Tell whether the process has ended, though nobody may have asked for its exit code."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return Path("/proc/self").exists()
    except ProcessLookupError:
        return True


def postmaster(folder: Path) -> int:
    """Return the process id of the server in ``folder``."""
    return int((folder / "data" / "postmaster.pid").read_text().split()[0])


@dataclass
class Owner:
    """A process that runs a server in its own ``with`` block."""

    process: subprocess.Popen[str]
    facts: dict[str, Any]

    @property
    def folder(self) -> Path:
        """The server's folder."""
        return Path(self.facts["folder"])


REPORT = """
import json, os, signal, sys
from pathlib import Path
from outbox.embedded import Server
def report(server, **more):
    facts = {"folder": str(server.folder), "url": server.url(driver="postgresql"), **more}
    print(json.dumps(facts), flush=True)
"""


@contextmanager
def owner(body: str, **options: Any) -> Iterator[Owner]:
    """Run ``body`` in a process of its own; wait for its report and kill it at the end, if it still runs."""
    options.setdefault("env", {**os.environ, "PYTHONPATH": SEARCHED})
    process = subprocess.Popen(
        [options.pop("python", sys.executable), "-c", REPORT + body],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )
    with process:
        assert process.stdout
        try:
            line = process.stdout.readline()
            assert line, "the owner ended without a report"
            yield Owner(process, json.loads(line))
        finally:
            process.kill()


WAITS = """
with Server(durable=False) as server:
    report(server)
    sys.stdin.readline()
"""
