"""A server that kills itself, before or after what it sends to PostgreSQL: ``python -m tests.rocketmq.dying URL``.

It says at which port it listens. For a number on the standard input it says "armed", and dies when it comes to that
point from then on, in whatever thread.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg import generators
from sqlalchemy import create_engine

from outbox import Outbox, Settings
from outbox.rocketmq.server import Listen, RocketmqServer
from tests.rocketmq.conftest import FIFO_GROUP, options_of

#: Nothing of its own accord is to come in between.
_QUIET = Settings(listen=False, check_interval=3600.0, idle_wait=60.0)


def main() -> None:
    """Serve until the end of the standard input, or of this process."""
    server = RocketmqServer(
        Outbox(create_engine(sys.argv[1]), settings=_QUIET), options_of(groups=FIFO_GROUP), [Listen(port=0)]
    )
    points, last = itertools.count(1), sys.maxsize
    usual_wait, usual_send = psycopg.Connection.wait, generators.send

    def pass_point() -> None:
        if next(points) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    def wait(connection: psycopg.Connection[Any], *arguments: Any, **options: Any) -> Any:
        pass_point()
        return usual_wait(connection, *arguments, **options)

    def send(libpq: Any) -> Iterator[Any]:
        yield from usual_send(libpq)
        pass_point()

    psycopg.Connection.wait = wait  # type: ignore[assignment,method-assign]
    generators.send = send
    server.start()
    sys.stdout.write(f"{server.ports[0]}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        points, last = itertools.count(1), int(line)
        sys.stdout.write("armed\n")
        sys.stdout.flush()
    server.stop()


if __name__ == "__main__":
    main()
