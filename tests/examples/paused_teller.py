"""The real teller of bank A, which stops at a point of its first order until it is killed, or told to go on.

It is forked from a server that has imported the libraries already. At the point it makes the file ``paused`` in a
folder, and waits for the file ``go``. A point is an event and the how-many-th of its kind it is: ``before_commit`` (of
a session: neither half message nor op are written), ``decided`` (the op is written, COMMIT isn't sent),
``after_commit``, ``after_flush``, ``after_rollback``. ``none:0`` is no point.
"""

from __future__ import annotations

import os
import sys
import time
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.orm import Session


def work(
    lifeline: Pipe, reports: Pipe, environment: dict[str, str], folder: Path, point: str, arguments: list[str]
) -> None:
    """Be the teller of a command line; ``lifeline`` and ``reports`` are its standard input and output."""
    os.dup2(lifeline.fileno(), 0)
    os.dup2(reports.fileno(), 1)
    reports.close()
    os.environ.update(environment)
    from examples.bank_transfer import teller
    from outbox.database.decision import decide_first
    from outbox.producer import producer

    name, number = point.split(":")
    pause = _pause(folder, int(number))
    if name == "decided":

        def decide_and_pause(*values: Any) -> None:
            decide_first(*values)
            pause()

        pytest.MonkeyPatch().setattr(producer, "decide_first", decide_and_pause)
    elif int(number):
        # The outbox listens to the same events, and came first.
        event.listen(Session, name, pause)
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
