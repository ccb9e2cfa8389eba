"""Silences: for a time, an operator wants not to hear of a rule; a maintenance window is one that begins later.

A silence is of one rule, and may be limited to a database, a topic, a group. It has an end, an author, a reason. What
it covers is still found, and shown as silenced: it needs no attention, and the doctor's exit code leaves it out.
One that is limited to a database is kept there: consoles and the doctor may call that database by different names. Each
other one is written into every database that can be reached when it begins, so that the doctor of each finds it.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

from outbox.acts.changes import Actor, checked_actor, record_of
from outbox.acts.whole_acts import LIFT_SILENCE, SILENCE
from outbox.database.execute import Row, Template, execute
from outbox.errors import ActRefused, DatabaseUnreached, InvalidRequest, NotFound
from outbox.operator.databases import Database, OverDatabases, Query, read_each
from outbox.operator.health.rules import RULES, Diagnosis
from outbox.text import counted, duration, topic_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

T = TypeVar("T")
#: The codes of rules, as findings have them.
CODES = frozenset(code.partition("/")[0] for code in RULES)
#: The longest silence, in seconds: what is silent for longer is forgotten.
LONGEST_SILENCE = 90 * 86_400.0

_OPEN = Query("""
-- id rule of_database topic group begins_at ends_at author reason active
SELECT id, rule, of_database, topic, consumer_group, begins_at, ends_at, author, reason, begins_at <= clock_timestamp()
  FROM {s}.silence WHERE ends_at > clock_timestamp() ORDER BY begins_at, id
""")
# One that is said again counts from then on: there are never two of the same at a time. One of another time stays.
_SILENCE = Template("""
WITH new AS (
    SELECT t.at, t.at + make_interval(secs => %(lasts)s) AS ends
      FROM (SELECT coalesce(%(begins)s::timestamptz, clock_timestamp()) AS at) t),
ended AS (
    DELETE FROM {s}.silence USING new
     WHERE ends_at < clock_timestamp() OR begins_at < new.ends AND ends_at > new.at
           AND (rule, of_database IS NULL, topic, consumer_group)
               IS NOT DISTINCT FROM (%(rule)s, %(of_database)s::text IS NULL, %(topic)s, %(group)s))
INSERT INTO {s}.silence (rule, of_database, topic, consumer_group, begins_at, ends_at, author, reason)
SELECT %(rule)s, %(of_database)s, %(topic)s, %(group)s, new.at, new.ends, %(by)s, %(why)s FROM new
RETURNING begins_at, ends_at, ends_at > clock_timestamp()
""")
# A wider silence than the limits goes while it silences what has them; a wider window that is planned is of others too.
_LIFT = Template("""
DELETE FROM {s}.silence
 USING (SELECT clock_timestamp() AS at) AS now
 WHERE rule = %(rule)s AND ends_at > now.at AND (begins_at <= now.at OR %(planned)s)
   AND (%(of_database)s::text IS NULL OR CASE WHEN of_database IS NULL THEN begins_at <= now.at ELSE %(here)s END)
   AND (%(topic)s::text IS NULL OR topic = %(topic)s OR topic IS NULL AND begins_at <= now.at)
   AND (%(group)s::text IS NULL OR consumer_group = %(group)s OR consumer_group IS NULL AND begins_at <= now.at)
RETURNING of_database, topic, consumer_group, begins_at, ends_at
""")


@dataclass(frozen=True, slots=True)
class Silence:
    """A silence that hasn't ended: of a rule, in a database, of a topic, of a group, as far as they are named.

    ``database`` keeps it.
    """

    columns: ClassVar[str] = (
        "rule of=of_database topic group begins=begins_at ends=ends_at by=author reason active in=database"
    )
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

    @property
    def silenced(self) -> bool:
        """Return true: as on a finding that is silenced, it can be lifted."""
        return True

    def covers(self, finding: Diagnosis) -> bool:
        """Return whether a finding is silenced now."""
        topic = finding.details.get("topic")
        limits = (
            (self.of_database, finding.database),
            (self.topic, topic and topic_of(topic)),
            (self.group, finding.details.get("group")),
        )
        about = all(limit in {None, found} for limit, found in limits)
        return self.active and self.rule == finding.code and about


def check_rule(code: str) -> None:
    """Raise NotFound unless there is a rule with this code."""
    if code not in CODES:
        raise NotFound(f"there is no rule {code!r}; see the codes that `outbox doctor` prints")


def silences_in(connection: Connection, name: str, schema: str) -> list[Silence]:
    """Return the silences that the database of this name keeps, and that haven't ended."""
    # Consoles and the doctor may call a database differently: the limit is the database that keeps it.
    return [
        Silence(name, **row | {"of_database": row["of_database"] and name}) for row in _OPEN.read(connection, schema)
    ]


def silenced(findings: Iterable[Diagnosis], silences: Sequence[Silence]) -> list[Diagnosis]:
    """Return the findings, each with the silence that covers it."""

    def words(finding: Diagnosis) -> str:
        found = next((each for each in silences if each.covers(finding)), None)
        return "" if found is None else f"until {found.ends_at:%Y-%m-%d %H:%M} UTC by {found.author}: {found.reason}"

    return [dataclasses.replace(each, silenced=words(each)) for each in findings] if silences else list(findings)


class Silences(OverDatabases):
    """Show an operator the silences, and begin and lift them.

    Raises (of the acts):
        NotFound: there is no such rule.
        InvalidRequest: no reason, or no length.
        ActRefused: there is nothing to lift, or the silence would have ended already.
        UnknownDatabase: no database of that name.
        DatabaseUnreached: no database that would keep it can be reached.
    """

    def silences(self, database: str | None = None) -> list[Silence]:
        """Return the silences and maintenance windows that haven't ended, those that begin first before the others."""
        found = []
        for each in self.databases.having(None, database):
            with each.read_only() as connection:
                found += silences_in(connection, each.name, each.schema)
        return self.shown_texts(sorted(found, key=lambda row: row.begins_at))

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

        ``topic``, ``group`` and ``database`` limit it. Those of the same limits that overlap it are replaced. The
        sentence names the databases that couldn't be reached, and don't keep it.
        """
        actor = checked_actor(SILENCE, by, why)
        check_rule(rule)
        if not 0 < lasts <= LONGEST_SILENCE:
            raise InvalidRequest(f"lasts = {lasts:g} s must be more than 0, and {LONGEST_SILENCE:g} at most", "lasts")
        if begins is not None and begins.tzinfo is None:
            raise InvalidRequest(f"begins = {begins} must have a time zone", "begins")
        limits = {"of_database": database, "topic": topic and topic_of(topic), "group": group}
        values = {"rule": rule, "lasts": lasts, "begins": begins, "by": actor.name, "why": why.strip(), **limits}
        ends: list[dt.datetime] = []

        def write(connection: Connection, keeper: Database) -> None:
            (((begins_at, ends_at, ahead),),) = execute(connection, _SILENCE(keeper.schema, **values))
            if not ahead and not ends:
                raise ActRefused(f"rule {rule} isn't silenced: that would have ended at {ends_at} already")
            # By the clock of the first database: it is one silence, wherever it is kept.
            values["begins"] = begins_at
            ends.append(ends_at)
            result = {name: value for name, value in limits.items() if value} | {"until": ends_at.isoformat()}
            execute(connection, record_of(keeper.schema, SILENCE.name, actor, why, rule, result))

        _, without = self._in_each(database, write)
        return f"rule {rule} is silenced for {duration(lasts)}, until {ends[0]:%Y-%m-%d %H:%M:%S %Z}{without}"

    def lift_silence(
        self,
        rule: str,
        *,
        by: str | Actor,
        why: str = "",
        topic: str | None = None,
        group: str | None = None,
        database: str | None = None,
        planned: bool = False,
    ) -> str:
        """Lift silences of a rule before their end; return a sentence that says how many.

        Without limits it lifts all that silence the rule now. With limits it lifts those that have them, and those
        without, which silence what has them as well. ``planned``: also windows that haven't begun and have the limits.
        """
        actor = checked_actor(LIFT_SILENCE, by, why)
        check_rule(rule)
        if database is not None:
            _ = self.databases[database]
        values = {"rule": rule, "of_database": database, "topic": topic and topic_of(topic), "group": group}

        def write(connection: Connection, keeper: Database) -> list[Row]:
            here = keeper.name == database
            (rows,) = execute(connection, _LIFT(keeper.schema, **values, here=here, planned=planned))
            if rows:
                result = {"lifted": len(rows)}
                execute(connection, record_of(keeper.schema, LIFT_SILENCE.name, actor, why, rule, result))
            return rows

        written, without = self._in_each(None, write)
        # One that several databases keep is one; of two databases' own, each is one.
        if not (lifted := {(of and name, *rest) for name, rows in written.items() for of, *rest in rows}):
            left = "" if planned else ", and windows that haven't begun are lifted where you say so (planned)"
            raise ActRefused(f"rule {rule} isn't silenced; see what is: outbox rule silences{left}{without}")
        return f"{counted(len(lifted), 'silence')} of rule {rule} lifted{without}"

    def _in_each(self, database: str | None, write: Callable[[Connection, Database], T]) -> tuple[dict[str, T], str]:
        """Write into each database that can be reached; return the results, and a text that names the others."""
        unreached = self.databases.away_for(database)
        written = read_each(self.databases.having(None, database), write, unreached, Database.acting)
        if not written:
            raise DatabaseUnreached(unreached)
        return written, f"; not in {', '.join(unreached)}, which can't be reached" if unreached else ""
