"""Send the messages of schedules at their times: each once, over all workers.

A worker takes a time by moving the schedule's row from the time before, in the transaction that sends the message: of
several workers one moves it, and where one dies, neither is there. The id of the message is made of the schedule and
the time: also a database that was put back to before sends no second message for what its consumers have had.

What fails is told, and tried again after `RETRY_AFTER` by this worker; the schedule's later times wait for it, or are
missed, as its policy says. Others go on.
"""

from __future__ import annotations

import datetime as dt
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.calling.engine import CallRunners, RecordedCall
from outbox.database.duty import SEND, Duty, Post, Task
from outbox.database.execute import execute, kind_of
from outbox.database.session import begin
from outbox.errors import ErrorKind
from outbox.message.ids import derived_id
from outbox.message.model import Counts, Outgoing
from outbox.schedule import sql
from outbox.schedule.schedule import CronSchedule
from outbox.telemetry.events import ScheduleFailed, ScheduleMissed
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


def scheduled_id(schedule: str, at: dt.datetime) -> UUID:
    """Return the id of the message of a schedule and a time."""
    return derived_id(_NO_TIME, "schedule", schedule, at.astimezone(dt.UTC).isoformat())


@dataclass(slots=True, eq=False)
class ScheduledCall(RecordedCall[dt.datetime]):
    """The call for one time of a schedule; ``last`` is the time before it, None where an operator has ordered it."""

    function: CronSchedule
    schema: str
    at: dt.datetime
    last: dt.datetime | None

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
            options |= {"id": scheduled_id(self.function.schedule, argument), "on_duplicate": "ignore"}
        self.function.send(connection, self.function.topic, Outgoing(made.body, **options))


class Scheduler:
    """The passes of a worker over its schedules, and when the next one is due."""

    def __init__(self, settings: Settings, schedules: Mapping[str, CronSchedule], new_runner: NewRunner) -> None:
        self._settings = settings
        self._schedules = schedules
        self._runners = CallRunners(new_runner)
        self._failed_until: dict[str, float] = {}
        self._due_at = -math.inf

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
        schedules = dict(self._schedules)
        schema = self._settings.schema
        with begin(connection):
            (rows,) = execute(connection, sql.schedules(schema, names=list(schedules)))
        for now, name, *known in rows:
            if stopping():
                return counts
            if self._failed_until.get(name, 0.0) > time.monotonic():
                continue
            schedule = schedules[name]
            if tuple(known[:3]) != tuple(schedule.declared.values()):
                self._declare(connection, schedule, now)
                wait = 0.0
                continue
            step, due_in = self._send_due(connection, schedule, now, tuple(known))
            wait, counts = min(wait, due_in), counts + step
        self._due_at = time.monotonic() + wait
        return counts

    def order(self, connection: Connection) -> None:
        """Have a message of each schedule sent by the next pass."""
        schema, names = self._settings.schema, list(self._schedules)
        with begin(connection):
            (rows,) = execute(connection, sql.schedules(schema, names=names))
        for now, name, *_ in rows:
            self._declare(connection, self._schedules[name], now)
        with begin(connection):
            execute(connection, sql.order(schema, names=names))

    def _declare(self, connection: Connection, schedule: CronSchedule, now: dt.datetime) -> None:
        values = {"name": schedule.schedule, **schedule.declared, "now": now, "next": schedule.recurrence.after(now)}
        with begin(connection):
            execute(connection, sql.declare(self._settings.schema, **values))

    def _send_due(
        self, connection: Connection, schedule: CronSchedule, now: dt.datetime, known: Row
    ) -> tuple[Counts, float]:
        """Send what is due of a schedule; return what came of it, and after how many seconds it is due again."""
        *_, last, is_paused, ordered_at = known
        schema = self._settings.schema
        calls = [ScheduledCall(schedule, schema, ordered_at, None)] if ordered_at is not None else []
        if is_paused:
            return self._make(calls), math.inf
        due, name = schedule.due(last, now), schedule.schedule
        for before, at in pairwise([last, *due.times]):
            calls.append(ScheduledCall(schedule, schema, at, before))
        counts, left_out = self._make(calls), False
        if due.done is not None and not due.times:
            values = {"name": name, "at": due.done, "last": last, "next": schedule.recurrence.after(due.done)}
            with begin(connection):
                left_out = bool(execute(connection, sql.advance(schema, **values))[0])
        if due.missed is not None and (left_out or counts.done):
            emit(ScheduleMissed(schedule=name, topic=schedule.topic, since=due.missed, policy=schedule.missed))
        return counts, 0.0 if due.more else schedule.due_in(due.done or last, now)

    def _make(self, calls: list[ScheduledCall]) -> Counts:
        counts = Counts()
        for each in calls:
            error = self._runners.make(each)
            if error is not None and kind_of(error) is ErrorKind.UNAVAILABLE:
                raise error  # it isn't the schedule's: the pass is made again as soon as the database is back
            if error is not None:
                name, topic = each.function.schedule, each.function.topic
                self._failed_until[name] = time.monotonic() + RETRY_AFTER
                reason = summary_of(error).partition("\n")[0]
                emit(ScheduleFailed(schedule=name, topic=topic, at=each.at, reason=reason, error=error))
                return counts + Counts(taken=1, failed=1)
            if not each.done:
                break  # another worker has it
            counts += Counts(taken=1, done=1)
        return counts


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
