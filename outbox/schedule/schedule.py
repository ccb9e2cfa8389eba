"""A schedule: the function that makes the message of each of its times, and what is to be done about times that passed.

The decision is pure (`CronSchedule.due`). It builds on two times of the database: of the last time that is done, and
now. So the hosts' clocks don't matter, and one that jumps does what a worker does that was away for so long.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from outbox.calling.function import CalledFunction
from outbox.errors import InvalidHandler
from outbox.message.answer import SCHEDULED, CalledKind
from outbox.message.content import GROUP_PATTERN, MAX_GROUP
from outbox.schedule.recurrence import Recurrence

#: What becomes of the times that passed while no worker came to them: all are made up for; or one, by the newest of
#: them; or none.
Missed = Literal["one", "all", "skip"]
#: So many of them are made up for in one pass.
MOST_MISSED = 100


class Due(NamedTuple):
    """What is to be done about a schedule: the ``times`` to send the messages of, oldest first.

    Then all times up to ``done`` are done. ``missed`` is the oldest time of which no message is sent. ``more``: there
    are more times than are sent now.
    """

    times: list[dt.datetime]
    done: dt.datetime | None = None
    missed: dt.datetime | None = None
    more: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CronSchedule(CalledFunction):
    """At each time of a recurrence, a message of ``topic``, whose body ``function`` returns.

    ``function(at)`` or ``function(at, session)``, sync or async, takes the time in the schedule's zone. It may return
    an `Outgoing` to say more than the body, or None to send nothing of this time. ``schedule`` is the name by which the
    database knows it. A time that is older than ``grace`` seconds counts as missed. ``send`` sends, in a transaction.

    Raises:
        InvalidHandler: a function that can't be called so, a name that isn't one, or an option that can't work.
        InvalidMessage: the topic isn't a name.
    """

    decorator: ClassVar[str] = "every"
    kind: ClassVar[CalledKind] = SCHEDULED
    forms: ClassVar[tuple[tuple[str, ...], ...]] = (("at", "session"), ("at",))
    timeout: float = 30.0
    recurrence: Recurrence
    send: Callable[..., Any]
    schedule: str = ""
    missed: Missed = "one"
    grace: float = 60.0

    def check(self) -> None:
        """Raise InvalidHandler if an option can't work."""
        name = self.schedule or getattr(self.function, "__name__", "")
        if not re.fullmatch(GROUP_PATTERN, name, re.ASCII) or len(name) > MAX_GROUP:
            raise InvalidHandler(
                f"{self.what}: a schedule needs a name of letters, digits, _ and -, {MAX_GROUP} at most; give name='…'"
            )
        object.__setattr__(self, "schedule", name)
        if self.missed not in get_args(Missed):
            raise InvalidHandler(f"{self.what}: missed = {self.missed!r} must be one of {', '.join(get_args(Missed))}")

    @property
    def what(self) -> str:
        """What it is called in texts."""
        return f"schedule {self.schedule or self.name!r}"

    @property
    def key(self) -> str:
        """What there is one of its kind for: its name."""
        return self.schedule

    @property
    def declared(self) -> Mapping[str, str]:
        """What the database has of its declaration."""
        return {"topic": self.topic, "recurrence": str(self.recurrence), "missed": self.missed}

    def due(self, last: dt.datetime, now: dt.datetime) -> Due:
        """Return what is to be done, in UTC, where all times up to ``last`` are done."""
        if self.missed == "all":
            times = list(islice(self.recurrence.between(last, now), MOST_MISSED + 1))
            return Due(times[:MOST_MISSED], times[:MOST_MISSED][-1] if times else None, None, len(times) > MOST_MISSED)
        last, now = last.astimezone(dt.UTC), now.astimezone(dt.UTC)
        if (newest := self.recurrence.newest(last, now)) is None:
            return Due([])
        first = self.recurrence.after(last)
        if self.missed == "skip" and (now - newest).total_seconds() > self.grace:
            return Due([], newest, first)
        return Due([newest], newest, first if first != newest else None)

    def due_in(self, last: dt.datetime, now: dt.datetime) -> float:
        """Return after how many seconds it is due again, where all times up to ``last`` are done."""
        following = self.recurrence.after(last)
        return float("inf") if following is None else (following - now).total_seconds()
