"""One pass of the check: a half that is due is decided by its fence, or a checker is asked.

Rules, with RocketMQ's in brackets where they differ (``TransactionalMessageServiceImpl.check``): the counter moves when
a checker is asked and at no other time (immunity burns it); a half that was decided is never asked about again (its
copies are); each half has its own next check (one young half stops the scan); nothing is copied for a check (each
check appends the half again).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from outbox.check import sql
from outbox.check.asker import Asker, Checker, Interview, tell_parked
from outbox.database.duty import DECIDE, Duty, Post, Task
from outbox.database.execute import by_size, execute
from outbox.database.notices import NOTICES
from outbox.database.sql import plan_by_index
from outbox.message.model import Answer, Counts, Resolution
from outbox.settings import Settings
from outbox.telemetry.events import (
    CheckerHangs,
    CheckerMissing,
    CheckSkipped,
    CheckTimedOut,
    FencesChecked,
    HalfParked,
    ProducerMissing,
)
from outbox.telemetry.hooks import emit
from outbox.text import process_name

if TYPE_CHECKING:
    from sqlalchemy import Connection


def question_of(checker: Checker, asker: str | None = None) -> sql.Question:
    """Return how halves are leased for a checker: until it must have answered, and one interval longer.

    ``asker`` is whose halves they are; None: those of applications.
    """
    return sql.Question(checker.max_checks, checker.timeout + checker.interval, process_name(), asker)


def check_once(
    connection: Connection,
    settings: Settings,
    checkers: Mapping[str, Checker],
    asker: Asker,
    *,
    stopping: Callable[[], bool] = lambda: False,
) -> Counts:
    """Check the halves that are due, on ``connection``, which must not be in a transaction; ``checkers`` by topic.

    ``checkers`` may be fewer by the moment: no half of a topic that has left is leased.

    Returns ``taken`` halves, ``done`` of them decided, ``failed`` without a verdict (or with a transaction that still
    runs), ``parked``. After ``check_time_limit`` seconds it begins nothing new, and says that there is ``more``.
    """
    with connection.begin():
        _, ((_, fenced), *topics) = execute(connection, plan_by_index(), sql.due(settings.schema, asker=asker.name))
    due = [topic for topic, is_due in topics if is_due]
    run = _Pass(connection, settings, checkers, asker, stopping, fences=bool(fenced))
    run.topics.extend(topic for topic in due if topic in checkers)
    for topic in asker.newly_unasked(set(due).difference(checkers)):
        lacks = CheckerMissing(topic=topic) if asker.name is None else ProducerMissing(topic=topic, asker=asker.name)
        emit(lacks)
    return run.run() if fenced or run.topics or asker.busy else Counts()


def check_fences(connection: Connection, settings: Settings, *, limit: int | None = None) -> Counts:
    """Decide due fenced halves, at most ``limit`` (default: ``check_batch``), in one transaction.

    A fence that is held means that the business transaction still runs; a free one, where there is no op, that it ended
    without committing, or never began: it is rolled back, and a late commit fails on that.
    """
    most, name = settings.check_batch if limit is None else limit, ("fences", settings.schema)
    return by_size(connection, name, most, partial(_check_fences, connection, settings))


def _check_fences(connection: Connection, settings: Settings, batch: int) -> Counts:
    with connection.begin():
        _, rows = execute(connection, plan_by_index(), sql.due_fenced(settings.schema, batch))
        if not rows:
            return Counts()
        ids = [half_id for (half_id,) in rows]
        (((running, decided),),) = execute(
            connection, sql.try_fences(settings.schema, ids, settings.check_interval, process_name())
        )
    emit(FencesChecked(decided=decided, running=running))
    return Counts(taken=len(ids), done=decided, failed=running, more=len(ids) == batch)


@dataclass(slots=True)
class _Pass:
    """The state of one pass: the topics that are due, in turn, and whether fences are left."""

    connection: Connection
    settings: Settings
    checkers: Mapping[str, Checker]
    asker: Asker
    stopping: Callable[[], bool]
    fences: bool
    deadline: float = 0.0
    topics: deque[str] = field(default_factory=deque)
    counts: Counts = field(default_factory=Counts)

    def run(self) -> Counts:
        self.deadline = time.monotonic() + self.settings.check_time_limit
        while True:
            if not self._over():
                self._fences()
                self._ask()
            going_on = self.fences and not self._over()
            ended = self.asker.next_ended(wait=not going_on)
            if ended is not None:
                self._settle(*ended)
            elif not going_on:
                break
        self.asker.rest()
        return self.counts + Counts(more=self.fences or bool(self.topics))

    def _over(self) -> bool:
        return self.stopping() or time.monotonic() > self.deadline

    def _fences(self) -> None:
        if self.fences:
            step = check_fences(self.connection, self.settings)
            self.fences = step.more
            self.counts += Counts(step.taken, step.done, step.failed)

    def _ask(self) -> None:
        """Begin as many interviews as may run at a time, topic by topic."""
        while self.topics and self.asker.free > 0 and not self._over():
            topic = self.topics.popleft()
            if self.asker.rests(topic):
                emit(CheckerHangs(topic=topic))
                continue
            limit = max(self.asker.free // (len(self.topics) + 1), 1)
            if (checker := self.checkers.get(topic)) is not None and self._lease(checker, limit) == limit:
                self.topics.append(topic)

    def _lease(self, checker: Checker, limit: int) -> int:
        self.asker.make_runner(is_async=checker.is_async)
        with self.connection.begin():
            _, rows = execute(
                self.connection,
                plan_by_index(),
                sql.lease(self.settings.schema, checker.topic, limit, question_of(checker, self.asker.name)),
            )
            spent = {row[0]: (row[3], row[2]) for row in rows if row[1] is None}
            if statements := tell_parked(self.settings.schema, checker, spent):
                execute(self.connection, *statements)
        for row in rows:
            if row[1] is None:
                self.counts += Counts(taken=1, parked=1)
                emit(HalfParked(half_id=row[0], topic=checker.topic, checks=checker.max_checks))
            else:
                self.asker.begin(Interview.of(checker, self.settings, row))
        return len(rows)

    def _settle(self, interview: Interview, answer: Answer | None) -> None:
        topic = interview.checker.topic
        if not interview.held:
            interview.give_back(self.connection)
            if answer is not None:
                late = f"no connection within {interview.checker.timeout:g} s"
                why = late if interview.abandoned else answer.error or ""
                emit(CheckSkipped(half_id=interview.half_id, topic=topic, reason=why, error=answer.cause))
                self._leave(topic)
            return
        if answer is not None:
            # Its own connection is gone, or was taken away.
            interview.record_unknown(self.connection, answer)
        if interview.abandoned:
            emit(CheckTimedOut(half_id=interview.half_id, topic=topic, timeout=interview.checker.timeout))
            self._leave(topic)
        decided = interview.answer is not None and interview.answer.resolution is not Resolution.UNKNOWN
        self.counts += Counts(taken=1, done=int(decided), failed=int(not decided), parked=int(interview.parked))

    def _leave(self, topic: str) -> None:
        """Leave the rest of a topic for the next pass: the checkers of others must not wait for this one's."""
        self.topics = deque(each for each in self.topics if each != topic)


def _tasks(at: Post) -> Iterator[Task]:
    settings, checkers = at.settings, at.outbox.functions.of(Checker)
    asker = Asker(at.new_runner, settings.checks_in_flight)
    at.at_end(asker.end)

    def every() -> float:
        # A topic may be asked about more often than the settings say; one may be declared at any time.
        return min([settings.check_interval, *(each.interval for each in list(checkers.values()))])

    def one_pass(connection: Connection, _: Connection, stopping: Callable[[], bool]) -> Counts:
        if at.at_once:
            with connection.begin():
                execute(connection, sql.hurry(settings.schema))
        return check_once(connection, settings, checkers, asker, stopping=stopping)

    # A lane of its own: a pass may take a minute, and dispatch must not wait for it.
    yield Task(name="check", one_pass=one_pass, every=every, after=at.wake_dispatch, parts=("producer",))


DUTIES = (
    Duty(
        "check",
        "Decides orphans by their fences, or asks their checkers.",
        f"""
        producer: worker
        {DECIDE}
        {NOTICES}
        SELECT INSERT UPDATE DELETE ON check_history
        INSERT ON topic_total
        """,
        role="check",
        tasks=_tasks,
        functions="checkers",
    ),
)
