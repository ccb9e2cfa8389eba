"""When a reconciliation is due: by its timetable, by how its last run ended, and by the database's clock."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from outbox.database.execute import execute, statement
from outbox.database.sql import plan_by_index

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.reconcile.job import Reconciliation

#: A run that failed is begun again after so many seconds, if the timetable doesn't say so earlier.
RETRY_AFTER = 600.0
#: A run that is at work says so every so many seconds,
HEARTBEAT = 30.0
#: and one that hasn't for so many seconds counts as lost: its process was killed.
LOST_AFTER = 300.0
#: When a run (alias r) was last heard of, as SQL.
HEARD_OF = "coalesce((r.plan ->> 'alive_at')::timestamptz, r.started_at)"
#: What the run of a whole fleet has for topic and group: no topic or group can be called so.
FLEET = ("*", "*")

# The runs of the newest job of the schedule, found pair by pair at the end of an index.
_LAST_SCHEDULED = f"""
WITH run AS MATERIALIZED (
    SELECT r.* FROM unnest(%(topics)s::text[], %(groups)s::text[]) AS p (topic, consumer_group)
     CROSS JOIN LATERAL (SELECT job_id, started_at, {HEARD_OF} AS heard_of, finished_at, error
                           FROM {{s}}.reconciliation_run r
                          WHERE r.topic = p.topic AND r.consumer_group = p.consumer_group
                            AND r.schedule = %(schedule)s
                          ORDER BY r.started_at DESC LIMIT 1) r
)
SELECT clock_timestamp(), min(started_at), max(heard_of), max(finished_at), bool_or(finished_at IS NULL),
       bool_or(error IS NOT NULL)
  FROM run WHERE job_id = (SELECT job_id FROM run ORDER BY started_at DESC LIMIT 1)
"""


def compared(topic: str, group: str) -> str:
    """Return what a run compares, for people."""
    return "a fleet" if (topic, group) == FLEET else f"{topic} → {group}"


class LastRun(NamedTuple):
    """The newest run of a reconciliation, by the clock of the database that has its record."""

    now: dt.datetime
    began: dt.datetime | None
    heard_of: dt.datetime | None
    ended: dt.datetime | None
    running: bool | None
    failed: bool | None


def last_scheduled(connection: Connection, schema: str, schedule: str, pairs: Sequence[tuple[str, str]]) -> LastRun:
    """Return how the newest job of a schedule on pairs (topic, group) fares; all but the time is None without one."""
    topics, groups = map(list, zip(*pairs, strict=True))
    values = {"topics": topics, "groups": groups, "schedule": schedule}
    _, (row,) = execute(connection, plan_by_index(), statement(schema, _LAST_SCHEDULED, values))
    return LastRun(*row)


class Timetable:
    """Computes when a reconciliation is due again.

    One that has never run is due at once, and one that was missed, however often, once. The hosts' clocks may differ,
    so only the moment that follows the last run counts.
    """

    def __init__(self, declared: Reconciliation) -> None:
        self._seconds = declared.seconds
        self._times = declared.recurrence

    def due_in(self, last: LastRun) -> float:
        """Return in how many seconds it is due; 0 or less if it is."""
        return (self.due_at(last) - last.now).total_seconds()

    def due_at(self, last: LastRun) -> dt.datetime:
        """Return when it is due; while a run is at work, when that would count as lost."""
        if last.began is None or last.heard_of is None:
            return last.now
        if last.running or last.ended is None:
            return last.heard_of + dt.timedelta(seconds=LOST_AFTER)
        due = last.began + dt.timedelta(seconds=self._seconds or 0.0)
        if self._times is not None:
            due = self._times.after(last.began) or dt.datetime.max.replace(tzinfo=dt.UTC)
        if last.failed:
            due = min(due, last.ended + dt.timedelta(seconds=RETRY_AFTER))
        return due
