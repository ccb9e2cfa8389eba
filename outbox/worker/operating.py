"""Operations as duties: what operators have ordered in a worker's database, and rollbacks, where it knows how."""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING

from outbox.admin.operations.run import operate_once
from outbox.compensate.run import compensate_once
from outbox.worker.async_lane import AsyncLane
from outbox.worker.database import Database
from outbox.worker.lane import Lane, Pass, SyncLane
from outbox.worker.passes import on_producer

if TYPE_CHECKING:
    from outbox.app import Outbox


class Rooms:
    """Opens connections for compensations, and takes them away from those that run on when the worker ends."""

    def __init__(self, database: Database, stopping: threading.Event) -> None:
        self._database = database
        self._stopping = stopping
        self._open: weakref.WeakSet[Lane] = weakref.WeakSet()

    def __call__(self, is_async: bool) -> Lane:
        """Open one, for async functions or plain ones."""
        lane = (AsyncLane if is_async else SyncLane)(self._database, None, self._stopping)
        self._open.add(lane)
        return lane

    def end(self) -> None:
        """End those that are open: what runs on is cut off, and rolled back."""
        for lane in list(self._open):
            lane.end()


def operating(outbox: Outbox, lane: SyncLane) -> Pass:
    """Return the pass that carries operations out, on both sides' tables."""
    return on_producer(partial(operate_once, stopping=lane.ending), outbox.settings)


def compensating(outbox: Outbox, lane: SyncLane, rooms: Rooms) -> Pass:
    """Return the pass that rolls local transactions back."""
    one_pass = partial(compensate_once, compensations=outbox.compensations, rooms=rooms, stopping=lane.ending)
    return on_producer(one_pass, outbox.settings)
