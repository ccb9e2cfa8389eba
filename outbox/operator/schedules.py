"""An operator sees the schedules of applications, pauses and resumes them, runs one now, deletes one that is gone.

Each is a row in the producer's database, which workers that declare it write (`outbox.schedule.schedule_pass`).
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from outbox.acts.changes import Declaration, checked_actor, record_of, unless_locked
from outbox.acts.whole_acts import DELETE_CRON, PAUSE_CRON, RESUME_CRON, RUN_CRON
from outbox.database.execute import Statement, Template, execute
from outbox.errors import ActRefused, NotFound
from outbox.operator.databases import Query
from outbox.operator.groups import busy
from outbox.operator.health.sql import OVERDUE
from outbox.operator.topics import Topics

if TYPE_CHECKING:
    from outbox.acts.changes import Actor


@dataclass(frozen=True, slots=True)
class CronScheduleRow:
    """A schedule: the times at which a message of its topic is sent, of which all up to ``last_at`` are done.

    ``next_at`` is the next one, as the worker knew that sent the last message; None until a worker has found it.
    ``overdue``: for how long (seconds) a time has been due, or the run that an operator ordered at ``ordered_at``; None
    if neither is.
    """

    columns: ClassVar[str] = "schedule=name topic recurrence last=last_at next=next_at overdue> paused=paused_at"
    database: str
    name: str
    topic: str
    recurrence: str
    missed: str
    last_at: dt.datetime
    next_at: dt.datetime | None
    overdue: float | None
    paused_at: dt.datetime | None
    paused_by: str | None
    pause_reason: str | None
    ordered_at: dt.datetime | None


_SCHEDULES = Query(f"""
-- name topic recurrence missed last_at next_at overdue paused_at paused_by pause_reason ordered_at
SELECT s.name, s.topic, s.recurrence, s.missed, s.last_at, s.next_at, CASE WHEN {OVERDUE} > 0 THEN {OVERDUE} END,
       s.paused_at, s.paused_by, s.pause_reason, s.ordered_at
  FROM {{s}}.cron_schedule s ORDER BY s.name
""")
_IS_KNOWN = Template("SELECT 1 FROM {s}.cron_schedule WHERE name = %(name)s")
_PAUSE = Template("""
UPDATE {s}.cron_schedule SET paused_at = clock_timestamp(), paused_by = %(by)s, pause_reason = %(why)s
 WHERE name = %(name)s AND paused_at IS NULL RETURNING 1
""")
# The times that passed meanwhile were not to be. A worker finds the next one.
_RESUME = Template("""
UPDATE {s}.cron_schedule
   SET paused_at = NULL, paused_by = NULL, pause_reason = NULL, next_at = NULL,
       last_at = greatest(last_at, clock_timestamp())
 WHERE name = %(name)s AND paused_at IS NOT NULL RETURNING 1
""")
_RUN = Template("""
UPDATE {s}.cron_schedule SET ordered_at = clock_timestamp() WHERE name = %(name)s AND ordered_at IS NULL RETURNING 1
""")
_DELETE = Template("DELETE FROM {s}.cron_schedule WHERE name = %(name)s RETURNING 1")


class CronSchedules(Topics):
    """The schedules of applications, and the acts of an operator on them.

    Raises (of the acts):
        NotFound: the database has no such schedule.
        ActRefused: there is nothing to change.
        InvalidRequest: no reason where one is needed, or several producers' databases are registered and none is named.
        UnknownDatabase: no database of that name.
    """

    def cron_schedules(self, database: str | None = None) -> list[CronScheduleRow]:
        """Return the schedules that workers have declared."""
        rows = []
        for each in self.databases.having("producer", database):
            with each.read_only() as connection:
                rows += [CronScheduleRow(database=each.name, **row) for row in _SCHEDULES.read(connection, each.schema)]
        return self.shown_texts(rows)

    def pause_cron(self, cron: str, *, by: str | Actor, why: str, database: str | None = None) -> str:
        """Have no message of a schedule sent until it is resumed; return a sentence."""
        actor = checked_actor(PAUSE_CRON, by, why)
        change = _PAUSE, {"by": actor.name, "why": why.strip()}
        self._change(PAUSE_CRON, actor, why, cron, *change, database=database, otherwise="it is paused already")
        return f"schedule {cron} is paused: no message of it is sent"

    def resume_cron(self, cron: str, *, by: str | Actor, why: str = "", database: str | None = None) -> str:
        """Have a paused schedule go on with its next time; return a sentence. The times that passed are left out."""
        actor = checked_actor(RESUME_CRON, by, why)
        self._change(RESUME_CRON, actor, why, cron, _RESUME, {}, database=database, otherwise="it isn't paused")
        return f"schedule {cron} is resumed: it goes on with its next time"

    def run_cron(self, cron: str, *, by: str | Actor, why: str = "", database: str | None = None) -> str:
        """Have a worker send a message of a schedule now, beside those of its times; return a sentence."""
        actor = checked_actor(RUN_CRON, by, why)
        self._change(RUN_CRON, actor, why, cron, _RUN, {}, database=database, otherwise="it is ordered already")
        return f"schedule {cron}: a worker that declares it sends a message within seconds"

    def delete_cron(self, cron: str, *, by: str | Actor, why: str, database: str | None = None) -> str:
        """Delete a schedule that no application declares any more; return a sentence.

        A worker that still declares it makes it anew, and goes on with the next time.
        """
        actor = checked_actor(DELETE_CRON, by, why)
        self._change(DELETE_CRON, actor, why, cron, _DELETE, {}, database=database, otherwise="it is gone")
        return f"schedule {cron} is deleted; a worker that declares it makes it anew"

    def _change(
        self,
        act: Declaration,
        actor: Actor,
        why: str,
        cron: str,
        change: Template,
        values: dict[str, str],
        *,
        database: str | None,
        otherwise: str,
    ) -> None:
        found = self._sole_producer(database)
        statements: list[Statement] = [_IS_KNOWN(found.schema, name=cron), change(found.schema, name=cron, **values)]
        with unless_locked(partial(busy, f"schedule {cron!r}")), found.acting() as connection:
            known, changed = execute(connection, *statements)
            if not known:
                raise NotFound(
                    f"database {found.name} has no schedule {cron!r}; see those that it has: outbox cron list"
                )
            if not changed:
                raise ActRefused(f"schedule {cron} is left as it is: {otherwise}; see outbox cron list")
            execute(connection, record_of(found.schema, act.name, actor, why, cron))
