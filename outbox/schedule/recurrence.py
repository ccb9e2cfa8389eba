"""When something is due again and again: by the five fields of cron in a time zone, or every so many seconds.

APScheduler computes the times of cron. Two things it has otherwise than cron itself, and they are mended here. Of a day
of the month and a weekday, either suffices (POSIX, ``crontab``). And where the clocks are put back, an hour that is
named comes once: cron(8) of Debian says so of jobs at a fixed time. An hour that is skipped in spring counts as the
next one, as APScheduler has it. Weekdays go by their names, since numbers begin with Sunday for some and with Monday
for others.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any
from zoneinfo import ZoneInfo

from outbox.errors import InvalidSettings
from outbox.message.content import check_seconds

_FIELDS = re.compile(r"(\S+\s+){4}[^\s\d]+")
_MOMENT = dt.timedelta(microseconds=1)
_EPOCH = dt.datetime.fromtimestamp(0, dt.UTC)
#: From how long ago on (days) the newest time is looked for, the shortest first: a lull may have had a million times.
_SPANS = (1 / 24, 1, 32, 366)


@dataclass(frozen=True)
class Recurrence:
    """Times that come again and again: ``fields`` of cron in time zone ``zone``, or every so many ``seconds``.

    Intervals are counted from 1970 on (UTC), so that the times are the same for each worker.

    Raises:
        InvalidSettings: fields that can't be read, or that never come; no such time zone; an interval of 0 or less.
    """

    fields: str | None = None
    zone: str = "UTC"
    seconds: float | None = None

    @classmethod
    def of(cls, when: str | dt.timedelta | float, zone: str = "UTC") -> Recurrence:
        """Return what a text with the five fields of cron means, or a timedelta or seconds.

        Raises:
            InvalidSettings: as the class.
            InvalidMessage: it is neither.
        """
        return cls(when, zone) if isinstance(when, str) else cls(None, zone, check_seconds("every", when))

    def __post_init__(self) -> None:
        if self.seconds is not None:
            if self._interval < _MOMENT:
                raise InvalidSettings(f"every {self.seconds:g} s must be more than 0 s")
            return
        fields = (self.fields or "").strip()
        if not _FIELDS.fullmatch(fields):
            raise InvalidSettings(
                f"{self.fields!r} must be the five fields of cron, minute to weekday, such as '0 3 * * mon-fri'; "
                "weekdays go by their names, since numbers begin with Sunday for some and with Monday for others"
            )
        try:
            never = self.after(dt.datetime.now(dt.UTC)) is None
        except (ValueError, KeyError, OSError) as error:
            raise InvalidSettings(f"{fields!r} in time zone {self.zone!r}: {error}") from None
        if never:
            raise InvalidSettings(f"{fields!r} never comes; mend the day or the month")

    def __str__(self) -> str:
        return f"every {self.seconds:g} s" if self.seconds is not None else f"{self.fields} {self.zone}"

    @property
    def _interval(self) -> dt.timedelta:
        return dt.timedelta(seconds=self.seconds or 0.0)

    @cached_property
    def _triggers(self) -> list[Any]:
        from apscheduler.triggers.cron import CronTrigger  # noqa: PLC0415 - importing outbox must not pay for it

        minute, hour, day, month, weekday = (self.fields or "").split()
        days = [(day, "*"), ("*", weekday)] if day != "*" and weekday != "*" else [(day, weekday)]
        return [
            CronTrigger.from_crontab(f"{minute} {hour} {each} {month} {of_week}", timezone=self.zone)
            for each, of_week in days
        ]

    def local(self, moment: dt.datetime) -> dt.datetime:
        """Return a moment in the time zone."""
        return moment.astimezone(ZoneInfo(self.zone))

    def after(self, moment: dt.datetime) -> dt.datetime | None:
        """Return the first time after a moment, in the time zone; None if there is none."""
        if self.seconds is not None:
            # In whole microseconds, as times are kept: a fraction would make a time follow itself.
            number = (moment - _EPOCH) // self._interval + 1
            return self.local(_EPOCH + number * self._interval)
        # A sum of wall times knows nothing of an hour that comes twice.
        moment, names_hour = moment.astimezone(dt.UTC), "*" not in (self.fields or "").split()[1]
        while True:
            found = [each.get_next_fire_time(None, moment + _MOMENT) for each in self._triggers]
            # By UTC: a wall time that isn't there in spring becomes the one that is.
            times_there = [each.astimezone(dt.UTC) for each in found if each is not None]
            if not times_there:
                return None
            moment = min(times_there)
            if not (names_hour and self.local(moment).fold):
                return self.local(moment)

    def between(self, last: dt.datetime, now: dt.datetime) -> Iterator[dt.datetime]:
        """Yield the times after ``last`` and up to ``now``."""

        def times() -> Iterator[dt.datetime]:
            each = self.after(last)
            while each is not None:
                yield each
                each = self.after(each)

        return takewhile(lambda each: each <= now, times())

    def newest(self, last: dt.datetime, now: dt.datetime) -> dt.datetime | None:
        """Return the last time after ``last`` and up to ``now``, None if there is none; looks at few of them."""
        if self.seconds is not None:
            last = max(last, now - dt.timedelta(seconds=2 * self.seconds))
        for days in _SPANS:
            since = max(last, now - dt.timedelta(days=days))
            if (found := list(self.between(since, now))) or since == last:
                return found[-1] if found else None
        return max(self.between(last, now), default=None)
