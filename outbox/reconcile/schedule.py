"""When a worker reconciles what an `Outbox` consumes, as it was declared."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outbox.errors import InvalidSettings
from outbox.message.limits import check_seconds

_AT = re.compile(r"([01]\d|2[0-3]):([0-5]\d)", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """A reconciliation by a timetable: at a time of day, by ``cron``, or every so many seconds; see `Outbox`.

    ``job`` is an `outbox.reconcile.config.JobParts`, and ``config`` a file with the same (`outbox.reconcile.config`).

    Raises:
        InvalidSettings: a name or a timetable that can't be; names the mend.
        InvalidMessage: ``every`` is no duration.
    """

    name: str
    at: str | None = None
    cron: str | None = None
    every: dt.timedelta | float | None = None
    timezone: str = "UTC"
    job: Any = None
    config: Path | None = None
    report: Callable[[Any], object] | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise self.refused("a name has letters, digits, _ and - only, 63 at most")
        if sum(given is not None for given in (self.at, self.cron, self.every)) != 1:
            raise self.refused("say when by one of at, cron and every")
        if self.at is not None and not _AT.fullmatch(self.at):
            raise self.refused(f"at = {self.at!r} must be a time of day, such as '03:00'")
        if self.every is not None and check_seconds("every", self.every) <= 0:
            raise self.refused(f"every = {self.every!r} must be greater than 0")
        if self.cron is not None and not re.fullmatch(r"(\S+\s+){4}[^\s\d]+", self.cron.strip()):
            raise self.refused(
                f"cron = {self.cron!r} must have five fields, minute to weekday, such as '0 3 * * mon-fri'; weekdays "
                "go by their names, since numbers begin with Sunday for some and with Monday for others"
            )

    def refused(self, why: str) -> InvalidSettings:
        """Return the error that names this reconciliation."""
        return InvalidSettings(f"reconciliation {self.name!r}: {why}")

    @property
    def seconds(self) -> float | None:
        """The interval, if it is by one."""
        return None if self.every is None else check_seconds("every", self.every)

    @property
    def fields(self) -> str | None:
        """The fields of cron, if it isn't by an interval."""
        if self.at is None:
            return self.cron
        hour, minute = self.at.split(":")
        return f"{int(minute)} {int(hour)} * * *"
