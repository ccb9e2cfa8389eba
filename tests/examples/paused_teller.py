"""The real teller of bank A, which stops at a point of its first order until it is killed, or told to go on.

It is forked from a server that has imported the libraries already. At the point it makes the file ``paused`` in a
folder, and waits for the file ``go``. A point is an event and the how-many-th of its kind it is: ``before_commit`` (of
a session: neither half message nor op are written), ``commit`` (of the engine: the op is written, COMMIT isn't sent; a
half message shares the round trip of its COMMIT), ``after_commit``, ``after_flush``, ``after_rollback``. ``none:0`` is
no point.
"""

from __future__ import annotations

import os
import sys
import time
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from sqlalchemy import event
from sqlalchemy.orm import Session

#: What the server imports. Not the bank: with it comes an engine, on the database that the environment names then.
LIBRARIES = [
    __name__,
    "psycopg",
    "sqlalchemy.dialects.postgresql.psycopg",
    "examples.bank_transfer.message",
    "examples.bank_transfer.options",
    "examples.bank_transfer.source",
    "outbox.app",
    "outbox.check.asker",
]


def work(
    lifeline: Pipe, reports: Pipe, environment: dict[str, str], folder: Path, point: str, arguments: list[str]
) -> None:
    """Be the teller of a command line; ``lifeline`` and ``reports`` are its standard input and output."""
    os.dup2(lifeline.fileno(), 0)
    os.dup2(reports.fileno(), 1)
    reports.close()
    os.environ.update(environment)
    from examples.bank_transfer import teller
    from examples.bank_transfer.bank_a import engine

    name, number = point.split(":")
    if int(number):
        # The outbox listens to the same events, and came first.
        event.listen(engine if name == "commit" else Session, name, _pause(folder, int(number)))
    sys.argv[1:] = arguments
    teller.main()


def _pause(folder: Path, number: int) -> Any:
    """Return what stops at its call of this number."""
    seen = 0

    def happened(*_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            (folder / "paused").touch()
            while not (folder / "go").exists():
                time.sleep(0.01)

    return happened
