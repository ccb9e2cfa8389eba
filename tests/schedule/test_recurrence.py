"""The times of a schedule: fields of cron by the clocks of a zone, both ways of summer time, and intervals."""

from __future__ import annotations

import datetime as dt
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.errors import InvalidMessage, InvalidSettings
from outbox.schedule.recurrence import Recurrence

BERLIN = "Europe/Berlin"
#: The nights in which the clocks of Berlin are put forward and back.
SPRING, AUTUMN = "2026-03-29T00:00:00+01:00", "2026-10-25T00:00:00+02:00"


def times(when: str | float, start: str, number: int, zone: str = BERLIN) -> list[str]:
    """Return the first times after a moment, without their year."""
    recurrence, moment, found = Recurrence.of(when, zone), dt.datetime.fromisoformat(start), []
    for _ in range(number):
        following = recurrence.after(moment)
        assert following is not None
        moment = following
        found.append(recurrence.local(moment).isoformat(timespec="minutes")[5:])
    return found


@pytest.mark.parametrize(
    ("when", "start", "expected"),
    [
        # An hour that is skipped counts as the next one; one that comes twice counts once where it is named.
        ("30 2 * * *", SPRING, ["03-29T03:30+02:00", "03-30T02:30+02:00"]),
        ("30 2 * * *", AUTUMN, ["10-25T02:30+02:00", "10-26T02:30+01:00"]),
        ("15 2 * * *", "2026-03-29T03:05:00+02:00", ["03-29T03:15+02:00", "03-30T02:15+02:00"]),
        ("0 1-3 * * *", SPRING, ["03-29T01:00+01:00", "03-29T03:00+02:00", "03-30T01:00+02:00"]),
        ("0 1-3 * * *", AUTUMN, ["10-25T01:00+02:00", "10-25T02:00+02:00", "10-25T03:00+01:00", "10-26T01:00+01:00"]),
        # What comes each hour comes each hour.
        ("30 * * * *", "2026-10-25T01:40:00+02:00", ["10-25T02:30+02:00", "10-25T02:30+01:00", "10-25T03:30+01:00"]),
        ("30 * * * *", "2026-03-29T01:00:00+01:00", ["03-29T01:30+01:00", "03-29T03:30+02:00"]),
        # Of a day of the month and a weekday either suffices.
        ("0 0 13 * fri", "2026-11-01T00:00:00+01:00", ["11-06T00:00+01:00", "11-13T00:00+01:00", "11-20T00:00+01:00"]),
        ("0 0 13 * tue", "2026-11-09T00:00:00+01:00", ["11-10T00:00+01:00", "11-13T00:00+01:00", "11-17T00:00+01:00"]),
        ("0 12 * * mon-wed", "2026-11-29T00:00:00+01:00", ["11-30T12:00+01:00", "12-01T12:00+01:00"]),
        ("0 0 29 2 *", "2026-01-01T00:00:00+01:00", ["02-29T00:00+01:00"]),
        # Midnight after a day of 23 hours.
        ("0 0 * * *", "2026-03-29T12:00:00+02:00", ["03-30T00:00+02:00", "03-31T00:00+02:00"]),
        # Intervals are counted from 1970 on, whatever the clocks do.
        (21_600.0, AUTUMN, ["10-25T02:00+02:00", "10-25T07:00+01:00", "10-25T13:00+01:00"]),
    ],
)
def test_the_times(when: str | float, start: str, expected: list[str]) -> None:
    """By the clocks of the zone."""
    assert times(when, start, len(expected)) == expected


#: Minutes, hours and days as fields, and what they mean.
MINUTES = {"0": {0}, "30": {30}, "*/20": {0, 20, 40}, "*": set(range(60)), "7,8": {7, 8}}
HOURS = {"0": {0}, "2": {2}, "1-4": {1, 2, 3, 4}, "*/3": set(range(0, 24, 3)), "*": set(range(24))}
DAYS = {"*": set(range(1, 32)), "29": {29}}
#: Zones with changes at night, at midnight and by half an hour; and the days around two changes of most of them.
ZONES = (BERLIN, "America/New_York", "Africa/Cairo", "Australia/Lord_Howe", "America/Nuuk", "Asia/Kolkata")
STARTS = st.sampled_from([(2026, 3, 7), (2026, 3, 28), (2026, 4, 4), (2026, 4, 23), (2026, 10, 24), (2026, 10, 30)])


def model(fields: tuple[str, str, str], zone: str, last: dt.datetime, now: dt.datetime) -> list[dt.datetime]:
    """Go through each minute that clocks could show."""
    minute, hour, day = fields
    found, wall = set[dt.datetime](), last.replace(second=0, microsecond=0) - dt.timedelta(days=2)
    while wall <= now + dt.timedelta(days=2):
        if wall.minute in MINUTES[minute] and wall.hour in HOURS[hour] and wall.day in DAYS[day]:
            first, again = (wall.replace(tzinfo=ZoneInfo(zone), fold=fold).astimezone(dt.UTC) for fold in (0, 1))
            # In a gap the clock before the change counts, and the other one would be earlier.
            found |= {first, again} if "*" in hour and again > first else {first}
        wall += dt.timedelta(minutes=1)
    return sorted(each for each in found if last < each <= now)


@given(
    st.tuples(*map(st.sampled_from, (sorted(MINUTES), sorted(HOURS), sorted(DAYS)))),
    st.sampled_from(ZONES),
    STARTS,
    st.integers(0, 86_400),
    st.integers(0, 40 * 3600),
)
def test_a_model_of_the_times(
    fields: tuple[str, str, str], zone: str, day: tuple[int, int, int], after: int, seconds: int
) -> None:
    """As clocks show them, minute by minute; the newest is the last, and no later look finds another one."""
    recurrence = Recurrence(" ".join((*fields, "*", "*")), zone)
    last = dt.datetime(*day, tzinfo=dt.UTC) + dt.timedelta(seconds=after)
    now = last + dt.timedelta(seconds=seconds)
    found = list(recurrence.between(last, now))
    assert found == model(fields, zone, last, now)
    assert recurrence.newest(last, now) == (found[-1] if found else None)
    for middle in found[:3]:
        assert list(recurrence.between(middle, now)) == [each for each in found if each > middle]


@pytest.mark.parametrize("when", ["* * * * *", "0 0 1 1 *", 1.0])
def test_the_newest_of_a_long_lull(when: str | float) -> None:
    """It is found without going through all that were missed: of a schedule by the second, a hundred million."""
    now = dt.datetime(2026, 11, 30, 12, 0, 30, tzinfo=dt.UTC)
    newest = Recurrence.of(when).newest(now - dt.timedelta(days=1100), now)
    assert newest is not None
    assert Recurrence.of(when).after(newest) > now  # type: ignore[operator]  # there is one


@pytest.mark.parametrize(
    ("when", "zone", "why"),
    [
        ("0 3 * *", "UTC", "must be the five fields of cron"),
        ("0 3 * * 1", "UTC", "weekdays go by their names"),
        ("61 3 * * *", "UTC", "higher than the maximum value"),
        ("0 0 30 2 *", "UTC", "never comes; mend the day or the month"),
        ("0 3 * * *", "Mars/Olympus", "in time zone 'Mars/Olympus'"),
        (0.0, "UTC", "every 0 s must be 0.01 s or more"),
        (60.0, "Mars/Olympus", "in time zone 'Mars/Olympus'"),
    ],
)
def test_what_is_none(when: str | float, zone: str, why: str) -> None:
    """It is refused where it is declared, with the mend."""
    with pytest.raises(InvalidSettings, match=why):
        Recurrence.of(when, zone)


def test_neither_fields_nor_a_length() -> None:
    """It is refused as a length of time."""
    with pytest.raises(InvalidMessage, match="must be a timedelta or seconds"):
        Recurrence.of(None)  # type: ignore[arg-type]  # it is what is refused
