"""When something is due again and again: by the five fields of cron in a time zone, or every so many seconds.

APScheduler computes which times the fields name, on a clock without a zone: with one it leaves times out where clocks
are put forward (found in 3.11: midnight after a day of 23 hours). What these times are on the clocks of the zone is
said here. An hour that is skipped counts as the next one; and where the clocks are put back, an hour that is named
comes once: cron(8) of Debian says so of jobs at a fixed time. Of a day of the month and a weekday, either suffices
(POSIX, ``crontab``). Weekdays go by their names, since numbers begin with Sunday for some and with Monday for others.

Moments are in UTC: two times of one zone compare by their clocks, which go back.
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
#: By how much clocks are changed at most: near a change, times are looked for so much earlier and later.
_CHANGE = dt.timedelta(hours=3)
#: The shortest interval: each message is a transaction.
_SHORTEST = dt.timedelta(milliseconds=10)
#: From how long ago on (days) the newest time is looked for, the shortest first: a lull may have had a million times.
_SPANS = (1 / 24, 1, 32, 366)


@dataclass(frozen=True)
class Recurrence:
    """Times that come again and again: ``fields`` of cron in time zone ``zone``, or every so many ``seconds``.

    Intervals are counted from 1970 on (UTC), so that the times are the same for each worker.

    Raises:
        InvalidSettings: fields that can't be read, or that never come; no such time zone; an interval of under 10 ms.
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
        if isinstance(when, str):
            return cls(" ".join(when.split()), zone)
        return cls(None, zone, check_seconds("every", when))

    def __post_init__(self) -> None:
        fields = (self.fields or "").strip()
        if self.seconds is not None and self._interval < _SHORTEST:
            raise InvalidSettings(f"every {self.seconds:g} s must be 0.01 s or more")
        if self.seconds is None and not _FIELDS.fullmatch(fields):
            raise InvalidSettings(
                f"{self.fields!r} must be the five fields of cron, minute to weekday, such as '0 3 * * mon-fri'; "
                "weekdays go by their names, since numbers begin with Sunday for some and with Monday for others"
            )
        try:
            never = self.after(dt.datetime.now(dt.UTC)) is None
        except (ValueError, KeyError, OSError, TypeError) as error:
            raise InvalidSettings(f"{fields or str(self)!r} in time zone {self.zone!r}: {error}") from None
        if never:
            raise InvalidSettings(f"{fields!r} never comes; mend the day or the month")

    def __str__(self) -> str:
        if self.seconds is None:
            return f"{self.fields} {self.zone}"
        return f"every {self.seconds:.6f}".rstrip("0").rstrip(".") + " s"

    @property
    def _interval(self) -> dt.timedelta:
        return dt.timedelta(seconds=self.seconds or 0.0)

    @cached_property
    def _triggers(self) -> list[Any]:
        from apscheduler.triggers.cron import CronTrigger  # noqa: PLC0415 - importing outbox must not pay for it

        minute, hour, day, month, weekday = (self.fields or "").split()
        days = [(day, "*"), ("*", weekday)] if day != "*" and weekday != "*" else [(day, weekday)]
        return [
            CronTrigger.from_crontab(f"{minute} {hour} {each} {month} {of_week}", timezone="UTC")
            for each, of_week in days
        ]

    def local(self, moment: dt.datetime) -> dt.datetime:
        """Return a moment on the clocks of the time zone."""
        return moment.astimezone(ZoneInfo(self.zone))

    def after(self, moment: dt.datetime) -> dt.datetime | None:
        """Return the first time after a moment, in UTC; None if there is none."""
        moment = moment.astimezone(dt.UTC)
        clock = self.local(moment)
        if self.seconds is not None:
            # In whole microseconds, as times are kept: a fraction would make a time follow itself.
            return _EPOCH + ((moment - _EPOCH) // self._interval + 1) * self._interval
        wall = self._wall_after(clock.replace(tzinfo=dt.UTC))
        if wall is None:
            return None
        found = self._moments(wall)[0]
        if not (self._changes_at(moment) or self._changes_at(found)):
            return found
        # The clocks change near one of them: wall times come in another order, twice, or under another name.
        best, wall = None, self._wall_after(clock.replace(tzinfo=dt.UTC) - _CHANGE)
        while wall is not None and (best is None or wall <= self._wall(best) + _CHANGE):
            for each in self._moments(wall):
                if each > moment and (best is None or each < best):
                    best = each
            wall = self._wall_after(wall)
        return best

    def _wall(self, moment: dt.datetime) -> dt.datetime:
        return self.local(moment).replace(tzinfo=dt.UTC)

    def _wall_after(self, wall: dt.datetime) -> dt.datetime | None:
        """Return the next time that the fields name, on a clock that shows UTC."""
        found = [each.get_next_fire_time(None, wall + _MOMENT) for each in self._triggers]
        return min((each for each in found if each is not None), default=None)

    def _moments(self, wall: dt.datetime) -> list[dt.datetime]:
        """Return when the clocks of the zone show a time: once, or, where each hour is meant, twice."""
        zone = ZoneInfo(self.zone)
        first = wall.replace(tzinfo=zone, fold=0).astimezone(dt.UTC)
        again = wall.replace(tzinfo=zone, fold=1).astimezone(dt.UTC)
        comes_twice = again > first and "*" in (self.fields or "").split()[1]
        return [first, again] if comes_twice else [first]

    def _changes_at(self, moment: dt.datetime) -> bool:
        return self.local(moment - 2 * _CHANGE).utcoffset() != self.local(moment + 2 * _CHANGE).utcoffset()

    def between(self, last: dt.datetime, now: dt.datetime) -> Iterator[dt.datetime]:
        """Yield the times after ``last`` and up to ``now``, in UTC."""

        def times() -> Iterator[dt.datetime]:
            each = self.after(last)
            while each is not None:
                yield each
                each = self.after(each)

        now = now.astimezone(dt.UTC)
        return takewhile(lambda each: each <= now, times())

    def newest(self, last: dt.datetime, now: dt.datetime) -> dt.datetime | None:
        """Return the last time after ``last`` and up to ``now``, in UTC; None if there is none. It looks at few."""
        last, now = last.astimezone(dt.UTC), now.astimezone(dt.UTC)
        if self.seconds is not None:
            last = max(last, now - 2 * self._interval)
        for days in _SPANS:
            since = max(last, now - dt.timedelta(days=days))
            if (found := list(self.between(since, now))) or since == last:
                return found[-1] if found else None
        return max(self.between(last, now), default=None)
