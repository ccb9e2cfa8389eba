"""A worker that runs reconciliations, turn by turn."""

from __future__ import annotations

import threading
from contextlib import ExitStack

from sqlalchemy import Engine

from outbox import Outbox
from outbox.dispatch.dispatch_pass import dispatch_once, release_due_once
from outbox.reconcile.duty.reconciliation import Runs, reconcilers
from outbox.worker.connections import OwnRunner, WorkerDatabase


def take_turn(engine: Engine, outbox: Outbox, *, stopping: threading.Event | None = None) -> None:
    """Let a worker send the messages of the runs that are due, and handle those that are there."""
    settings, ending = outbox.settings, stopping or threading.Event()
    found = reconcilers(outbox, ending)
    with ExitStack() as ends:
        runner = OwnRunner(WorkerDatabase(engine), None, threading.Event())
        ends.callback(runner.end)
        for each in found:
            runner.run(each.schedule)
        for one_pass in (dispatch_once, release_due_once, dispatch_once):
            runner.run(lambda connection, _, one_pass=one_pass: one_pass(connection, settings))  # type: ignore[misc]
        for name in {each.declared.name for each in found}:
            runs = Runs(name, [each for each in found if each.declared.name == name], outbox, ending, ends.callback)
            runner.run(runs)
