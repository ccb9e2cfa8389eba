"""Send the messages of schedules at their times: each once, over all workers.

A worker takes a time by moving the schedule's row from the time before, in the transaction that sends the message: of
several workers one moves it, and where one dies, neither is there. The id of the message is made of the database, the
schedule, its topic and the time: so a database that was put back to before sends no second message of a time that its
consumers have had.

A failure is told, and the same worker tries the schedule again after `RETRY_AFTER`, for the newest time by then; others
go on. The functions of one worker are called one after the other.
"""

from __future__ import annotations

import datetime as dt
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.calling.engine import CallRunners, FunctionTimedOut, RecordedCall
from outbox.database.duty import SEND, Duty, Post, Task
from outbox.database.execute import execute, is_lost
from outbox.database.session import begin
from outbox.message.ids import derived_id
from outbox.message.model import Counts, Outgoing
from outbox.schedule import sql
from outbox.schedule.schedule import CronSchedule
from outbox.telemetry.events import ScheduleFailed, ScheduleMissed, ScheduleSuperseded
from outbox.telemetry.hooks import emit
from outbox.text import summary_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.database.engines import NewRunner
    from outbox.database.execute import Row
    from outbox.settings import Settings

#: A schedule that failed is tried again after so many seconds.
RETRY_AFTER = 60.0
#: Orders of operators, and what they have resumed, are seen after so many seconds.
LONGEST_WAIT = 5.0
#: The clock that wakes a worker may be late by a part of the time that it waits.
_EARLY, _SHORTEST = 0.85, 0.005
#: An id that bears a time would lie among messages that are long pruned, where a time is made up for much later.
_NO_TIME = UUID(int=0)


def scheduled_id(source: UUID, schedule: CronSchedule, at: dt.datetime) -> UUID:
    """Return the id of the message of a schedule and a time, in the database of this id."""
    moment = at.astimezone(dt.UTC).isoformat()
    return derived_id(_NO_TIME, "schedule", source, schedule.topic, schedule.schedule, moment)


@dataclass(slots=True, eq=False)
class ScheduledCall(RecordedCall[dt.datetime]):
    """The call for one time of a schedule; ``last`` is the time before it, None where an operator has ordered it."""

    function: CronSchedule
    schema: str
    source: UUID
    at: dt.datetime
    last: dt.datetime | None = None

    def begin(self, connection: Connection) -> dt.datetime | None:
        """Take the time, so that no other worker sends its message; None where another has."""
        name, following = self.function.schedule, self.function.recurrence.after(self.at)
        take = (
            sql.take_order(self.schema, name=name, at=self.at)
            if self.last is None
            else sql.advance(self.schema, name=name, at=self.at, last=self.last, next=following)
        )
        return self.function.recurrence.local(self.at) if execute(connection, take)[0] else None

    def end(self, connection: Connection, argument: dt.datetime, answer: Any) -> None:
        """Send what the function has returned, unless that is None."""
        if answer is None:
            return
        made = answer if isinstance(answer, Outgoing) else Outgoing(answer)
        options: dict[str, Any] = {**made.options}
        if options.keys().isdisjoint({"id", "dedupe"}):
            options |= {"id": scheduled_id(self.source, self.function, argument), "on_duplicate": "ignore"}
        self.function.send(connection, self.function.topic, Outgoing(made.body, **options))


class Scheduler:
    """The passes of a worker over its schedules, and when the next one is due."""

    def __init__(self, settings: Settings, schedules: Mapping[str, CronSchedule], new_runner: NewRunner) -> None:
        self._settings = settings
        self._schedules = schedules
        self._runners = CallRunners(new_runner)
        self._failed_until: dict[str, float] = {}
        self._superseded: set[str] = set()
        self._since: dt.datetime | None = None
        self._due_at = -math.inf
        self._lost: BaseException | None = None

    def every(self) -> float:
        """Return after how many seconds a pass is due: a bit before a schedule is, and again then."""
        wait = min(self._due_at - time.monotonic(), LONGEST_WAIT)
        return max(wait * _EARLY, _SHORTEST)

    def end(self) -> None:
        """Close the connections on which functions were called."""
        self._runners.end()

    def once(self, connection: Connection, _: Connection, stopping: Callable[[], bool]) -> Counts:
        """Send the messages of all times that are due; declare schedules that are new."""
        counts, wait = Counts(), math.inf
        schedules, schema = dict(self._schedules), self._settings.schema
        with begin(connection):
            (rows,) = execute(connection, sql.schedules(schema, names=list(schedules)))
        for source, now, name, *known in rows:
            if stopping():
                return counts
            self._since = self._since or now
            if self._failed_until.get(name, 0.0) > time.monotonic():
                continue
            try:
                step, due_in = self._step(connection, schedules[name], source, now, known)
            except Exception as error:
                if error is self._lost or is_lost(connection):
                    raise
                step, due_in = self._failed(schedules[name], now, error), RETRY_AFTER
            wait, counts = min(wait, due_in), counts + step
        self._due_at = time.monotonic() + wait
        return counts

    def _step(
        self, connection: Connection, schedule: CronSchedule, source: UUID, now: dt.datetime, known: list[Any]
    ) -> tuple[Counts, float]:
        """Declare a schedule or send what is due of it; return what came of it, and in how many seconds it is due."""
        declared, (declared_at, *row), name = tuple(known[:3]), known[3:], schedule.schedule
        if declared == tuple(schedule.declared.values()):
            return self._send_due(connection, schedule, source, now, tuple(row))
        if declared_at is None or declared_at <= self._since:
            self._declare(connection, schedule, now, self._since or now)
            return Counts(), schedule.due_in(now, now)
        if name not in self._superseded:
            self._superseded.add(name)
            emit(ScheduleSuperseded(schedule=name, topic=schedule.topic, declared=", ".join(declared)))
        return Counts(), math.inf

    def order(self, connection: Connection) -> None:
        """Have a message of each schedule sent by the next pass."""
        schema, names = self._settings.schema, list(self._schedules)
        with begin(connection):
            (rows,) = execute(connection, sql.schedules(schema, names=names))
        for _, now, name, *_ in rows:
            self._declare(connection, self._schedules[name], now, now)
        with begin(connection):
            execute(connection, sql.order(schema, names=names))

    def _declare(self, connection: Connection, schedule: CronSchedule, now: dt.datetime, since: dt.datetime) -> None:
        following = schedule.recurrence.after(now)
        values = {"name": schedule.schedule, "since": since, "now": now, "next": following}
        with begin(connection):
            execute(connection, sql.declare(self._settings.schema, **values, **schedule.declared))

    def _send_due(
        self, connection: Connection, schedule: CronSchedule, source: UUID, now: dt.datetime, row: Row
    ) -> tuple[Counts, float]:
        last, is_paused, ordered_at = row
        call, counts = partial(ScheduledCall, schedule, self._settings.schema, source), Counts()
        if ordered_at is not None:
            counts += self._make([call(ordered_at)])
        if is_paused or counts.failed:
            return counts, math.inf
        due, name = schedule.due(last, now), schedule.schedule
        took = (sent := self._make([call(at, before) for before, at in pairwise([last, *due.times])])).done > 0
        if due.done is not None and not due.times:
            values = {"name": name, "at": due.done, "last": last, "next": schedule.recurrence.after(due.done)}
            with begin(connection):
                took = bool(execute(connection, sql.advance(self._settings.schema, **values))[0])
        if took and due.missed is not None and (now - due.missed).total_seconds() > schedule.grace:
            emit(ScheduleMissed(schedule=name, topic=schedule.topic, since=due.missed, policy=schedule.missed))
        if due.more:  # where another worker is at it, this one would find the same again and again
            return counts + sent, 0.0 if took else LONGEST_WAIT
        return counts + sent, schedule.due_in(due.done or last, now)

    def _make(self, calls: Iterable[ScheduledCall]) -> Counts:
        counts = Counts()
        for each in calls:
            error = self._runners.make(each)
            if error is not None and each.error is None and not isinstance(error, FunctionTimedOut):
                self._lost = error  # the database went away, or couldn't be reached: the pass has failed
                raise error
            if error is not None:
                return counts + self._failed(each.function, each.at, error)
            if not each.done:
                break  # another worker has it
            counts += Counts(taken=1, done=1)
        return counts

    def _failed(self, schedule: CronSchedule, at: dt.datetime, error: BaseException) -> Counts:
        # A time that is left out when it is older than the grace is tried again before that.
        self._failed_until[schedule.schedule] = time.monotonic() + min(RETRY_AFTER, max(schedule.grace / 2, 1.0))
        reason = summary_of(error).partition("\n")[0]
        emit(ScheduleFailed(schedule=schedule.schedule, topic=schedule.topic, at=at, reason=reason, error=error))
        return Counts(taken=1, failed=1)


def _tasks(at: Post) -> Iterator[Task]:
    schedules = at.outbox.functions.of(CronSchedule)
    if not schedules or "producer" not in at.parts:
        return
    scheduler = Scheduler(at.settings, schedules, at.new_runner)
    at.at_end(scheduler.end)

    def one_pass(connection: Connection, source: Connection, stopping: Callable[[], bool]) -> Counts:
        if at.at_once:
            scheduler.order(connection)
        return scheduler.once(connection, source, stopping)

    # A lane of its own: a function may take long.
    yield Task(name="schedule", one_pass=one_pass, every=scheduler.every, after=at.wake_dispatch, parts=("producer",))


DUTIES = (
    Duty(
        "schedule",
        "Sends the messages of schedules at their times.",
        f"""
        producer: worker
        SELECT INSERT UPDATE ON cron_schedule
        {SEND}
        """,
        role="schedule",
        tasks=_tasks,
        functions="schedules",
    ),
)
