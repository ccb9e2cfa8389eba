"""Silences: for a time, an operator wants not to hear of a rule; a maintenance window is one that begins later.

A silence is of one rule, and may be limited to a database, a topic, a group. It has an end, an author, a reason. What
it covers is still found, and shown as silenced: it needs no attention, and the doctor's exit code leaves it out.
A silence is kept in one of the databases, and counts for all; while that one is away, nothing is silenced by it.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from outbox.acts.changes import Actor, checked_actor, record_of
from outbox.acts.whole_acts import LIFT_SILENCE, SILENCE
from outbox.database.execute import Template, execute
from outbox.errors import ActRefused, InvalidRequest
from outbox.operator.databases import OverDatabases, Query
from outbox.operator.health.rules import RULES, Diagnosis
from outbox.text import duration, topic_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: The codes of rules, as findings have them.
CODES = frozenset(code.partition("/")[0] for code in RULES)
#: The longest silence, in seconds: what is silent for longer is forgotten.
LONGEST_SILENCE = 90 * 86_400.0

_OPEN = Query("""
-- id rule of_database topic group begins_at ends_at author reason active
SELECT id, rule, of_database, topic, consumer_group, begins_at, ends_at, author, reason, begins_at <= clock_timestamp()
  FROM {s}.silence WHERE ends_at > clock_timestamp() ORDER BY begins_at, id
""")
# One that is said again counts from then on: there are never two of the same.
_SILENCE = Template("""
WITH ended AS (
    DELETE FROM {s}.silence
     WHERE (rule, of_database, topic, consumer_group)
           IS NOT DISTINCT FROM (%(rule)s, %(of_database)s, %(topic)s, %(group)s) OR ends_at < clock_timestamp())
INSERT INTO {s}.silence (rule, of_database, topic, consumer_group, begins_at, ends_at, author, reason)
SELECT %(rule)s, %(of_database)s, %(topic)s, %(group)s, b.at, b.at + make_interval(secs => %(lasts)s), %(by)s, %(why)s
  FROM (SELECT coalesce(%(begins)s::timestamptz, clock_timestamp()) AS at) b
RETURNING ends_at, ends_at > clock_timestamp()
""")
_LIFT = Template("""
DELETE FROM {s}.silence
 WHERE rule = %(rule)s AND ends_at > clock_timestamp()
   AND (%(of_database)s::text IS NULL OR of_database = %(of_database)s)
   AND (%(topic)s::text IS NULL OR topic = %(topic)s) AND (%(group)s::text IS NULL OR consumer_group = %(group)s)
RETURNING 1
""")


@dataclass(frozen=True, slots=True)
class Silence:
    """A silence that hasn't ended: of a rule, in a database, of a topic, of a group, as far as they are named."""

    columns: ClassVar[str] = "rule of=of_database topic group begins=begins_at ends=ends_at by=author reason active"
    database: str
    id: int
    rule: str
    of_database: str | None
    topic: str | None
    group: str | None
    begins_at: dt.datetime
    ends_at: dt.datetime
    author: str
    reason: str
    active: bool

    def covers(self, finding: Diagnosis) -> bool:
        """Return whether a finding is silenced now."""
        topic = finding.details.get("topic")
        about = {finding.database, topic and topic_of(topic), finding.details.get("group")}
        limits = {self.of_database, self.topic and topic_of(self.topic), self.group} - {None}
        return self.active and self.rule == finding.code and limits <= about


def silences_in(connection: Connection, name: str, schema: str) -> list[Silence]:
    """Return the silences that the database of this name keeps, and that haven't ended."""
    return [Silence(name, **row) for row in _OPEN.read(connection, schema)]


def silenced(findings: Iterable[Diagnosis], silences: Sequence[Silence]) -> list[Diagnosis]:
    """Return the findings, each with the silence that covers it."""

    def words(finding: Diagnosis) -> str:
        found = next((each for each in silences if each.covers(finding)), None)
        return "" if found is None else f"until {found.ends_at:%Y-%m-%d %H:%M} UTC by {found.author}: {found.reason}"

    return [dataclasses.replace(each, silenced=words(each)) for each in findings] if silences else list(findings)


class Silences(OverDatabases):
    """Show an operator the silences, and begin and lift them.

    Raises (of the acts):
        InvalidRequest: there is no such rule; or no reason, or no length.
        ActRefused: there is nothing to lift, or the silence would have ended already.
        UnknownDatabase: no database of that name.
    """

    def silences(self, database: str | None = None) -> list[Silence]:
        """Return the silences and maintenance windows that haven't ended, those that begin first before the others."""
        found = []
        for each in self.databases.having(None, database):
            with each.read_only() as connection:
                found += silences_in(connection, each.name, each.schema)
        return sorted(found, key=lambda row: row.begins_at)

    def silence(
        self,
        rule: str,
        lasts: float,
        *,
        by: str | Actor,
        why: str,
        begins: dt.datetime | None = None,
        topic: str | None = None,
        group: str | None = None,
        database: str | None = None,
    ) -> str:
        """Have a rule need no attention for ``lasts`` seconds, from now or from ``begins`` on; return a sentence.

        ``topic``, ``group`` and ``database`` limit it. One of the same limits is replaced.
        """
        actor = checked_actor(SILENCE, by, why)
        if rule not in CODES:
            raise InvalidRequest(f"there is no rule {rule!r}; see the codes that `outbox doctor` prints", "rule")
        if not 0 < lasts <= LONGEST_SILENCE:
            raise InvalidRequest(f"lasts = {lasts:g} s must be more than 0, and {LONGEST_SILENCE:g} at most", "lasts")
        if begins is not None and begins.tzinfo is None:
            raise InvalidRequest(f"begins = {begins} must have a time zone", "begins")
        limits = {"of_database": database, "topic": topic, "group": group}
        chosen = self.databases.having(None, database)[0]
        values = {"rule": rule, "lasts": lasts, "begins": begins, "by": actor.name, "why": why.strip(), **limits}
        with chosen.acting() as connection:
            (((ends_at, ahead),),) = execute(connection, _SILENCE(chosen.schema, **values))
            if not ahead:
                raise ActRefused(f"rule {rule} isn't silenced: that would have ended at {ends_at} already")
            result = {name: value for name, value in limits.items() if value} | {"until": ends_at.isoformat()}
            execute(connection, record_of(chosen.schema, SILENCE.name, actor, why, rule, result))
        return f"rule {rule} is silenced for {duration(lasts)}, until {ends_at:%Y-%m-%d %H:%M:%S %Z}"

    def lift_silence(
        self,
        rule: str,
        *,
        by: str | Actor,
        why: str = "",
        topic: str | None = None,
        group: str | None = None,
        database: str | None = None,
    ) -> str:
        """Lift the silences of a rule, or those of them that have these limits, before their end; return a sentence."""
        actor = checked_actor(LIFT_SILENCE, by, why)
        lifted = 0
        for each in self.databases.values():
            values = {"rule": rule, "of_database": database, "topic": topic, "group": group}
            with each.acting() as connection:
                (rows,) = execute(connection, _LIFT(each.schema, **values))
                if rows:
                    execute(
                        connection, record_of(each.schema, LIFT_SILENCE.name, actor, why, rule, {"lifted": len(rows)})
                    )
            lifted += len(rows)
        if not lifted:
            raise ActRefused(f"rule {rule} isn't silenced; see what is: outbox rule silences")
        return f"rule {rule} isn't silenced any more"
