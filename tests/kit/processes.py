"""Processes of the project's own, which tests start, talk to and kill."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from sqlalchemy import Engine

from tests.kit.warm import warm_python

#: The root of the project.
ROOT = Path(__file__).parents[2]
#: What the processes of tests run that are forked from a server. It takes its list when it starts, which it does once
#: in a run: with a list of one test only, each process of the others would import all for itself, for a second.
FORKED = (
    "tests.check.killed",
    "tests.compensate.killed",
    "tests.consumer.outside_workers",
    "tests.consumer.workers",
    "tests.delivery.killed",
    "tests.reconcile.repair_process",
    "tests.schedule.ticking",
    "tests.examples.paused_teller",
    # Not the bank that this one runs: with it comes an engine, on the database that the environment names then.
    "examples.bank_transfer.message",
    "examples.bank_transfer.options",
    "examples.bank_transfer.source",
    # What comes with the first engine.
    "psycopg",
    "sqlalchemy.dialects.postgresql.psycopg",
    "sqlalchemy.ext.asyncio",
)
_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(list(FORKED))


@contextmanager
def spoken_to(target: Callable[[Pipe], None]) -> Iterator[Pipe]:
    """Run a function as a process, of a server that has imported everything already; yield the pipe to it."""
    pipe, theirs = _FORKSERVER.Pipe()
    process = _FORKSERVER.Process(target=target, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield pipe
    finally:
        kill(process)


def kill(process: BaseProcess) -> None:
    """Kill a process by SIGKILL, and wait for its end."""
    process.kill()
    process.join()


@contextmanager
def python(module: str, *arguments: str | Engine, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run a module as a process; it is killed at the end if it is still there. An engine stands for its URL."""
    texts = [each.url.render_as_string(hide_password=False) if isinstance(each, Engine) else each for each in arguments]
    process = subprocess.Popen(
        [warm_python(), "-m", module, *texts],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], line: str) -> None:
    """Read the output of the process until it says ``line``."""
    assert process.stdout
    for text in process.stdout:
        if line in text:
            return
    pytest.fail(f"the process ended ({process.wait()}) without saying {line!r}")
