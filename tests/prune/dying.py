"""Passes of prune in processes that kill themselves, before or after what they send to the server.

Started as ``python -m tests.prune.dying URL ACT``. For each line on the standard input, a number, it runs the act in a
process of its own that dies there, and says "died", or "done" where it came to the end before.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psycopg
import pytest
from psycopg import generators
from sqlalchemy import Connection, create_engine

from outbox.prune import ahead
from outbox.prune import segments as module
from outbox.prune.segments import drop_segment, empty_segment, make_segment
from tests.prune.yard import OLD, WIDE, YOUNG

NAME = "dying"
ACTS: Mapping[str, Callable[[Connection], object]] = {
    "make": lambda connection: make_segment(connection, YOUNG, WIDE),
    "make far ahead": lambda connection: ahead.make_ahead(connection, YOUNG),
    "empty": lambda connection: empty_segment(connection, OLD, WIDE),
    "drop": lambda connection: drop_segment(connection, OLD, WIDE),
}


def patient(patch: pytest.MonkeyPatch) -> None:
    """Take every DEFAULT partition for a large one, of a machine that may be slow; make one segment far ahead."""
    patch.setattr(module, "WAIT", 30.0)
    patch.setattr(ahead, "_SMALL", -1)
    patch.setattr(ahead, "_LEAD", 0.0)
    patch.setattr(ahead, "_BEHIND", -1)


def run(url: str, act: str, last: int) -> None:
    """Run an act; die at this point."""
    point, usual_wait = 0, psycopg.Connection.wait

    def pass_point() -> None:
        nonlocal point
        point += 1
        if point == last:
            os.kill(os.getpid(), signal.SIGKILL)

    def wait(connection: psycopg.Connection[Any], *arguments: Any, **options: Any) -> Any:
        pass_point()
        return usual_wait(connection, *arguments, **options)

    send_all = generators.send

    def sending(libpq: Any) -> Iterator[Any]:
        yield from send_all(libpq)
        pass_point()

    with pytest.MonkeyPatch.context() as patch:
        patient(patch)
        with create_engine(url, connect_args={"application_name": NAME}).connect() as connection:
            patch.setattr(psycopg.Connection, "wait", wait)
            patch.setattr(generators, "send", sending)
            ACTS[act](connection)
    os._exit(0)


def main() -> None:
    """Fork a process for each number that is read."""
    url, act = sys.argv[1:]
    for line in sys.stdin:
        if not (child := os.fork()):
            run(url, act, int(line))
        _, status = os.waitpid(child, 0)
        assert status in {0, signal.SIGKILL}
        sys.stdout.write("died\n" if status else "done\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
