"""What a consumer declares: where it begins, how many messages a second, and when it stops as everything fails."""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from outbox.errors import InvalidHandler, InvalidRequest
from outbox.message.content import check_seconds
from outbox.message.model import Start

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*/\s*(s|min|h)")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
#: Beyond these a rate is a slip of the pen: one message a week, and more than any database takes.
_SLOWEST, _FASTEST = 1 / (7 * 86400), 1e7
_PAIR = re.compile(r"(\d+):(\d+)")
_BY_QUEUE = re.compile(r"\d+:\d+(,\d+:\d+)*")
#: The values of a `Start`, as errors name them.
STARTS = "'first' or 'now', a datetime with a time zone, a position (1 or more), or positions by queue"


@dataclass(frozen=True, slots=True)
class Breaker:
    """When a group stops because everything fails, and how it finds out that something works again.

    It opens once ``failures`` attempts of the group at a topic have failed within ``window`` (timedelta or seconds),
    and none has succeeded meanwhile, counted over all workers. Open, the group handles nothing, so no message uses up
    its attempts. After ``trial_after`` (timedelta or seconds) one message is handled by one worker: if that succeeds,
    the breaker is closed and the group goes on; if not, the next one is tried after ``trial_after`` again.

    Raises:
        InvalidHandler: a number that can't work.
        InvalidMessage: a duration isn't one.
    """

    failures: int = 10
    window: dt.timedelta | float = 60.0
    trial_after: dt.timedelta | float = 30.0

    def __post_init__(self) -> None:
        if isinstance(self.failures, bool) or not isinstance(self.failures, int) or not 1 <= self.failures <= 10_000:
            raise InvalidHandler(f"Breaker: failures = {self.failures!r} must be between 1 and 10000")
        for name in ("window", "trial_after"):
            if (seconds := check_seconds(name, getattr(self, name))) == 0:
                raise InvalidHandler(f"Breaker: {name} must be longer than nothing")
            object.__setattr__(self, name, seconds)

    def __str__(self) -> str:
        window, trial_after = self.seconds
        return f"{self.failures} failures in {window:g} s, a trial after {trial_after:g} s"

    @property
    def seconds(self) -> tuple[float, float]:
        """The window and the time before a trial, in seconds."""
        return check_seconds("window", self.window), check_seconds("trial_after", self.trial_after)


def rate_of(value: str | float) -> float:
    """Return a rate in messages a second: ``"100/s"``, ``"30/min"``, ``"5/h"``, or a number of messages a second.

    Raises:
        InvalidHandler: it isn't a rate, or beyond one message a week and ten millions a second.
    """
    rate = math.nan
    if isinstance(value, str) and (match := _RATE.fullmatch(value.strip())):
        rate = float(match[1]) / _SECONDS[match[2]]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        rate = float(value)
    if not _SLOWEST <= rate <= _FASTEST:
        raise InvalidHandler(
            f"rate {value!r} must be messages a second, a minute or an hour, such as '100/s', '30/min' or '5/h'; to "
            "stop a group, pause it"
        )
    return rate


def rate_text(rate: float) -> str:
    """Return a rate in messages a second as it is written: in the unit in which it is at least one."""
    unit = next((unit for unit in _SECONDS if rate * _SECONDS[unit] >= 1), "h")
    return f"{rate * _SECONDS[unit]:.6g}/{unit}"


def is_start(value: object) -> bool:
    """Tell whether a value says where a group begins."""
    if isinstance(value, Mapping):
        return all(_is_number(queue, 0) and _is_number(position, 1) for queue, position in value.items())
    if isinstance(value, dt.datetime):
        return value.tzinfo is not None
    return _is_number(value, 1) or (isinstance(value, str) and value in {"first", "now"})


def _is_number(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def start_from_text(text: str) -> Start:
    """Return the start that a text is: ``first``, ``now``, a position, ``QUEUE:POSITION,…``, or a time in ISO 8601.

    Raises:
        InvalidRequest: it is none of these.
    """
    try:
        if text in {"first", "now"}:
            start: object = text
        elif _BY_QUEUE.fullmatch(text):
            start = {int(queue): int(position) for queue, position in _PAIR.findall(text)}
        else:
            start = int(text) if text.isdecimal() else dt.datetime.fromisoformat(text)
    except ValueError:
        start = None
    if not is_start(start):
        raise InvalidRequest(f"{text!r} must be {STARTS} (QUEUE:POSITION,…), or how long ago (3d, 1h30m)", field="to")
    return cast("Start", start)
