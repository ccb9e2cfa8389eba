"""When a reconciliation is due: by its timetable, by the database's clock, and by how the last one ended."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from apscheduler.triggers.cron import CronTrigger

from outbox.schedule import Reconciliation

#: A run that failed is begun again after so many seconds, if the timetable doesn't say so earlier.
RETRY_AFTER = 600.0
#: A run without an end counts as lost after so many seconds: its worker was killed.
LOST_AFTER = 3600.0
_MOMENT = dt.timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class LastRun:
    """The newest run of a reconciliation, by the clock of the database that has its record."""

    now: dt.datetime
    began: dt.datetime | None
    ended: dt.datetime | None
    running: bool | None
    failed: bool | None


class Timetable:
    """Tells when a reconciliation is due again.

    One that has never run is due at once, and one that was missed, however often, once.

    Raises:
        InvalidSettings: no such time zone, or fields of cron that can't be read.
    """

    def __init__(self, declared: Reconciliation) -> None:
        self._seconds = declared.seconds
        self._trigger = None
        if declared.fields is not None:
            try:
                self._trigger = CronTrigger.from_crontab(declared.fields, timezone=declared.timezone)
            except (ValueError, KeyError, OSError) as error:
                raise declared.refused(f"{declared.fields!r} in time zone {declared.timezone!r}: {error}") from None

    def due_in(self, last: LastRun) -> float:
        """Return in how many seconds it is due; 0 or less if it is."""
        if last.began is None:
            return 0.0
        if last.running or last.ended is None:
            due = last.began + dt.timedelta(seconds=LOST_AFTER)
        else:
            due = self._after(last.began)
            if last.failed:
                due = min(due, last.ended + dt.timedelta(seconds=RETRY_AFTER))
        return (due - last.now).total_seconds()

    def _after(self, began: dt.datetime) -> dt.datetime:
        if self._trigger is None:
            return began + dt.timedelta(seconds=self._seconds or 0.0)
        following: dt.datetime | None = self._trigger.get_next_fire_time(None, began + _MOMENT)
        return dt.datetime.max.replace(tzinfo=dt.UTC) if following is None else following
