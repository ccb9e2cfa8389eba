"""The reconciliation that follows the log as a duty: each pass is taken by one of the workers that have it.

The record keeps the others off (`outbox.reconcile.follow.record`). Findings, new and gone, are told when they are
written down: one event for each kind and pass, however many messages they are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from outbox.database.execute import execute
from outbox.database.sql import NOW
from outbox.errors import InvalidSettings
from outbox.message.model import Counts
from outbox.reconcile.config import Values
from outbox.reconcile.duty.reconciliation import SOME_TIME, DeclaredJob, hand_over, values_of
from outbox.reconcile.job import Job, Stoppable
from outbox.reconcile.record.timetable import Reconciliation
from outbox.telemetry.hooks import emit

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.database.duty import ServedOutbox
    from outbox.reconcile.follow.follower import Follower, PassResult

#: The longest time (seconds) until it is looked whether a pass is due that another worker should have taken.
READ_EVERY = 5.0


def followings(outbox: ServedOutbox, stopping: threading.Event) -> list[Following]:
    """Return what follows the log for an Outbox, one for each database that its groups consume from.

    Raises:
        InvalidSettings: one that can't be run: its libraries aren't installed, or the declaration doesn't fit.
    """
    return [
        Following(declared, values, stopping, beside=len(jobs) - 1)
        for declared in outbox.reconciliations.values()
        if declared.follows is not False
        for jobs in [values_of(declared, outbox)]
        for values in jobs
    ]


class Following(DeclaredJob):
    """A declared job that follows the log; its calls are passes."""

    def __init__(self, declared: Reconciliation, values: Values, stopping: threading.Event, *, beside: int = 0) -> None:
        from outbox.reconcile.follow.follower import check_followed  # noqa: PLC0415 - an extra

        super().__init__(declared, values, beside=beside)
        self._progress = Stoppable(stopping)
        self._followers: list[Follower] = []
        self._due_at = time.monotonic()
        try:
            check_followed(self.work_at(SOME_TIME))
        except InvalidSettings as error:
            raise declared.refused(str(error)) from None

    def wait(self) -> float:
        """Return after how many seconds to look again whether a pass is due."""
        return min(max(self._due_at - time.monotonic(), 0.0), READ_EVERY)

    def __call__(self, connection: Connection, _: Connection) -> Counts:
        """Take the pass of each pair that is due, and that no other worker takes."""
        if not self._feeds and self.locate() and any(topic != feed for topic, feed in self._feeds.items()):
            self.end()
            self._followers.clear()
        if not self._followers:
            if self._beside and not self._feeds:  # whose log it is can't be told before
                return Counts()
            with connection.begin():
                ((now,),) = execute(connection, NOW)[0]
            self._followers = list(self._made(self.work_at(now)))
        counts = Counts()
        self._due_at = time.monotonic() + self.declared.pass_every
        failure: Exception | None = None
        for follower in self._followers:
            self._progress.done(0)
            try:
                counts += follower(connection)
            except Exception as error:  # the other pairs go on
                failure = failure or error
        if failure is not None:
            raise failure
        return counts

    def end(self) -> None:
        """Close the connections, also under a pass that runs on."""
        for follower in self._followers:
            follower.close()

    def _made(self, job: Job) -> Iterator[Follower]:
        from outbox.reconcile.follow.follower import Follower  # noqa: PLC0415 - an extra

        every = self.declared.pass_every
        for pair in job.pairs:
            yield Follower(job, pair, self.declared.name, every, self._report, lambda: self._progress.done(0))

    def _report(self, result: PassResult) -> None:
        from outbox.reconcile.follow.follower import events_of  # noqa: PLC0415 - an extra

        for event in events_of(result, self.name, self.declared.name):
            emit(event)
        hand_over(self.declared, self.name, result, self._followers[0].job)
