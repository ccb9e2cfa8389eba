"""What is declared of a reconciliation; when it is due by that, by how its last run ended, and by the database's clock.

And the messages by which its runs are asked for.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from outbox.database.execute import Statement, Template, execute, statement
from outbox.database.sql import plan_by_index
from outbox.errors import InvalidSettings
from outbox.message.content import check_seconds
from outbox.message.ids import derived_id
from outbox.reconcile.job import PASS_EVERY
from outbox.schedule.recurrence import Recurrence

if TYPE_CHECKING:
    from sqlalchemy import Connection

_NAME, _TIME_OF_DAY = re.compile(r"[A-Za-z0-9_-]{1,63}", re.ASCII), re.compile(r"([01]\d|2[0-3]):([0-5]\d)", re.ASCII)

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


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """A reconciliation by a timetable: at a time of day, by ``cron``, or every so many seconds; see `Outbox`.

    Or one without an end, which ``follows`` the log: True, or how many seconds there are between its passes. ``job`` is
    a mapping with what a file can say, and ``config`` such a file (`outbox.reconcile.config`); or ``fleet`` is the file
    or folder of a fleet (`outbox.reconcile.fleet.config`).

    Raises:
        InvalidSettings: a name or a timetable that can't be, or a fleet with a job; names the mend.
        InvalidMessage: ``every`` is no duration.
    """

    name: str
    at: str | None = None
    cron: str | None = None
    every: dt.timedelta | float | None = None
    timezone: str = "UTC"
    job: Mapping[str, Any] | None = None
    config: Path | str | None = None
    report: Callable[[Any], object] | None = None
    fleet: Path | str | None = None
    follows: dt.timedelta | float | bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise self.refused("a name has letters, digits, _ and - only, 63 at most")
        if self.fleet is not None and (self.job is not None or self.config is not None):
            raise self.refused("fleet says all that is compared, its [job] how; leave job and config out")
        ways = [each is not None for each in (self.at, self.cron, self.every)]
        if sum([*ways, self.follows is not False]) != 1:
            raise self.refused("say when by one of at, cron, every and follows")
        if self.follows is not False and self.fleet is not None:
            raise self.refused("a fleet is compared by a timetable; say when by one of at, cron and every")
        if self.follows is not False and self.pass_every <= 0:
            raise self.refused(f"follows = {self.follows!r} must be greater than 0")
        if self.at is not None and not _TIME_OF_DAY.fullmatch(self.at):
            raise self.refused(f"at = {self.at!r} must be a time of day, such as '03:00'")
        if self.every is not None and check_seconds("every", self.every) <= 0:
            raise self.refused(f"every = {self.every!r} must be greater than 0")
        try:
            _ = self.recurrence
        except InvalidSettings as error:
            raise self.refused(str(error)) from None

    def refused(self, why: str) -> InvalidSettings:
        """Return the error that names this reconciliation."""
        return InvalidSettings(f"reconciliation {self.name!r}: {why}")

    @property
    def seconds(self) -> float | None:
        """The interval, if it is by one."""
        return None if self.every is None else check_seconds("every", self.every)

    @property
    def pass_every(self) -> float:
        """The time (seconds) between two passes of one that follows; 0 of one by a timetable."""
        if isinstance(self.follows, bool):
            return PASS_EVERY if self.follows else 0.0
        return check_seconds("follows", self.follows)

    @property
    def recurrence(self) -> Recurrence | None:
        """Its times, if it isn't by an interval."""
        if self.at is not None:
            hour, minute = self.at.split(":")
            return Recurrence(f"{int(minute)} {int(hour)} * * *", self.timezone)
        return None if self.cron is None else Recurrence(self.cron, self.timezone)


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


# --- messages that ask for a run ---------------------------------------------------------------------------

# Each message of the internal topic asks the workers for one run of a reconciliation. Its key, and the group that
# handles it, are called as the reconciliation: so its runs come one after the other. A run by the timetable is asked
# for by a message with a `deliver_at`, whose id is made of that time: many workers, and one of them again, make one of
# it. An operator asks for a run by a message that is delivered at once.

TOPIC = "outbox.reconcile"
_SEND = Template(f"""
WITH half AS (
    INSERT INTO {{s}}.half_message (id, producer_group, topic, key, content_type, body, deliver_at)
    VALUES (%(id)s, 'outbox', '{TOPIC}', %(key)s, 'application/json', %(body)s, %(at)s::timestamptz)
    ON CONFLICT DO NOTHING RETURNING id
)
INSERT INTO {{s}}.op_message (half_id, resolution, decided_by) SELECT id, 'commit', 'producer' FROM half
""")
#: No id that bears a time: such an id would lie among messages that are long pruned, where a run is a month after the
#: last one.
_NO_TIME = UUID(int=0)
_DAY = 86_400


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What a message asks for: a run of a reconciliation, which is known by its name and the first pair it compares.

    ``by`` is the operator that ordered the run, and ``why``; None: it is one of the timetable.
    """

    schedule: str
    topic: str
    group: str
    by: str | None = None
    why: str = ""
    dry_run: bool = False

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> RunRequest:
        """Return what the body of a message asks for."""
        return cls(**body)

    @property
    def pair(self) -> tuple[str, str]:
        """The first pair of topic and group that is compared."""
        return self.topic, self.group

    def send(self, schema: str, message_id: UUID, deliver_at: dt.datetime | None = None) -> Statement:
        """Write the message, unless its id is there: by any of these statements, once."""
        body = json.dumps(asdict(self), ensure_ascii=False).encode()
        return _SEND(schema, id=message_id, key=self.schedule, body=body, at=deliver_at)

    def scheduled_id(self, last: LastRun, due: dt.datetime) -> UUID:
        """Return the id of the message by which the run after ``last`` is asked for, which is due at a time.

        One that is overdue is asked for once more each day: its message may have been parked, or recalled.
        """
        overdue = max(last.now - due, dt.timedelta())
        # One that was never run is due since the first look at it, of which no row tells.
        since = "first" if last.began is None else due.isoformat()
        day = last.now.timestamp() // _DAY if last.began is None else overdue.days
        return derived_id(_NO_TIME, "reconcile", self.schedule, *self.pair, since, int(day))
