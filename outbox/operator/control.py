"""What holds groups back, as operators see and change it: pauses, rates over all workers, breakers.

Each is a row that the group's workers look at every half second (`outbox.consumer.control.gate`); an act writes it
together with its row in the audit.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.acts.changes import Actor, Declaration, checked_actor, record_of
from outbox.acts.whole_acts import PAUSE_GROUP, RESUME_GROUP, SET_RATE
from outbox.consumer.control.sql import pause
from outbox.database.execute import Statement, Template, execute
from outbox.database.sql import GROUP_QUEUES, topic_sql
from outbox.errors import ActRefused, DatabaseUnreached, InvalidHandler, InvalidRequest, NotFound
from outbox.message.limits import rate_of, rate_text
from outbox.operator.databases import Database, Databases, OverDatabases, Query
from outbox.operator.health.sql import GROUP_STATE
from outbox.operator.health.workers import GroupState
from outbox.text import topic_of

if TYPE_CHECKING:
    from sqlalchemy import Connection


@dataclass(frozen=True, slots=True)
class GroupControl:
    """What holds a group of a topic back.

    ``rate`` is messages a second, as an operator has set it; None: as its handler declares. ``opened_because`` is the
    error at which its breaker opened, ``openings`` how often that has happened, ``trial_at`` when a message is tried.
    """

    database: str
    group: str
    topic: str
    state: GroupState
    paused_at: dt.datetime | None
    paused_by: str | None
    pause_reason: str | None
    rate: float | None
    opened_at: dt.datetime | None
    trial_at: dt.datetime | None
    opened_because: str | None
    openings: int

    @property
    def because(self) -> str:
        """Why the group stands still: the reason of its pause, or the error at which its breaker opened."""
        return (self.pause_reason if self.paused_at else self.opened_because) or ""

    @property
    def rate_text(self) -> str:
        """The rate as it is written; empty where no operator has set one."""
        return "" if self.rate is None else rate_text(self.rate)


_CONTROLS = Query(f"""
-- group topic state paused_at paused_by pause_reason rate opened_at trial_at opened_because openings
{GROUP_QUEUES}
SELECT g.consumer_group, g.topic,
       {GROUP_STATE},
       c.paused_at, c.paused_by, c.pause_reason, c.rate, c.opened_at, c.trial_at, c.opened_because,
       coalesce(c.openings, 0)
  FROM (SELECT DISTINCT consumer_group, {topic_sql("topic")} AS topic FROM place) g
  LEFT JOIN {{s}}.group_control c ON c.consumer_group = g.consumer_group AND c.topic = g.topic
 ORDER BY 1, 2
""")

_RESUME = Template("""
UPDATE {s}.group_control
   SET paused_at = NULL, paused_by = NULL, pause_reason = NULL,
       trial_at = CASE WHEN opened_at IS NOT NULL THEN clock_timestamp() END
 WHERE consumer_group = %(group)s AND topic = ANY (%(topics)s::text[])
   AND (paused_at IS NOT NULL OR opened_at IS NOT NULL)
RETURNING topic
""")
_RATE = Template("""
INSERT INTO {s}.group_control AS c (consumer_group, topic, rate)
SELECT %(group)s, t, %(rate)s FROM unnest(%(topics)s::text[]) t
ON CONFLICT (consumer_group, topic) DO UPDATE SET rate = excluded.rate
 WHERE c.rate IS DISTINCT FROM excluded.rate
RETURNING topic
""")


def controls_in(connection: Connection, database: Database) -> list[GroupControl]:
    """Return each group of each topic that a database knows, with what holds it back."""
    return [GroupControl(database=database.name, **row) for row in _CONTROLS.read(connection, database.schema)]


def no_group(databases: Databases, what: str, name: str | None) -> NotFound | DatabaseUnreached:
    """Return the error that no database of this name, or none at all, ``what``: or one can't be read that may."""
    if away := databases.away_for(name):
        return DatabaseUnreached(away)
    return NotFound(f"no registered database ({', '.join(databases)}) {what}")


def knowing(databases: Databases, having: Sequence[str], group: str, topic: str | None, name: str | None) -> Database:
    """Return the one database that knows a group, of those ``having`` it where ``name`` limited the search to one.

    Raises:
        NotFound: none does.
        DatabaseUnreached: none does, and one can't be read that may.
        InvalidRequest: several do.
    """
    if not having:
        raise _unknown_group(databases, group, topic, name)
    if len(having) > 1:
        names = ", ".join(having)
        raise InvalidRequest(f"several databases know group {group!r}; name one of: {names}", field="database")
    return databases[having[0]]


def _unknown_group(
    databases: Databases, group: str, topic: str | None, name: str | None
) -> NotFound | DatabaseUnreached:
    of_topic = f" of topic {topic!r}" if topic else ""
    return no_group(databases, f"knows group {group!r}{of_topic}; see those of: outbox group list", name)


class GroupControls(OverDatabases):
    """Show an operator all that holds groups back, and change it.

    A ``topic`` limits an act to that topic of the group; without one it is done for all that the group consumes.

    Raises (all of its acts):
        NotFound: no registered database has such a group.
        ActRefused: there is nothing to change.
        InvalidRequest: no reason where one is needed, an actor without a name, a text that the audit can't record, or
            several databases have the group and none is named.
        UnknownDatabase: no database of that name.
    """

    def controls(self, database: str | None = None) -> list[GroupControl]:
        """Return each group of each topic with what holds it back."""
        rows = []
        for each in self.databases.having("consumer", database):
            with each.read_only() as connection:
                rows += controls_in(connection, each)
        return self.shown_texts(rows)

    def pause_group(
        self, group: str, *, by: str | Actor, why: str, topic: str | None = None, database: str | None = None
    ) -> str:
        """Have workers handle nothing of a group until it is resumed; return a sentence."""
        actor = checked_actor(PAUSE_GROUP, by, why)
        found, topics = self._topics_of(group, topic, database)
        change = pause(found.schema, group=group, topics=topics, by=actor.name, why=why.strip())
        paused = _changed(found, PAUSE_GROUP, actor, why, group, change)
        if not paused:
            raise ActRefused(f"{_named(group, topics)} can't be paused: it is paused already; see outbox group list")
        return f"{_named(group, paused)} is paused: workers begin nothing more of it within a second"

    def resume_group(
        self, group: str, *, by: str | Actor, why: str = "", topic: str | None = None, database: str | None = None
    ) -> str:
        """Have a paused group go on, and one that its breaker has stopped try a message at once; return a sentence."""
        actor = checked_actor(RESUME_GROUP, by, why)
        found, topics = self._topics_of(group, topic, database)
        resumed = _changed(found, RESUME_GROUP, actor, why, group, _RESUME(found.schema, group=group, topics=topics))
        if not resumed:
            raise ActRefused(
                f"{_named(group, topics)} can't be resumed: it isn't paused, and no breaker has stopped it"
            )
        return f"{_named(group, resumed)} is resumed: workers go on within a second"

    def set_rate(
        self,
        group: str,
        rate: str | float | None,
        *,
        by: str | Actor,
        why: str = "",
        topic: str | None = None,
        database: str | None = None,
    ) -> str:
        """Have all workers together handle so many messages of a group a second, at each topic; return a sentence.

        ``rate`` is as that of `Outbox.consumer`, "100/s" or a number; None or "declared": as its handler declares.
        """
        actor = checked_actor(SET_RATE, by, why)
        try:
            chosen = None if rate in {None, "declared"} else rate_of(rate)
        except InvalidHandler as error:
            raise InvalidRequest(str(error), field="rate") from None
        found, topics = self._topics_of(group, topic, database)
        text = "as its handler declares" if chosen is None else rate_text(chosen)
        change = _RATE(found.schema, group=group, topics=topics, rate=chosen)
        changed = _changed(found, SET_RATE, actor, why, group, change, {"rate": text})
        if not changed:
            raise ActRefused(f"the rate of {_named(group, topics)} is {text} already")
        return f"the rate of {_named(group, changed)} is {text}: workers keep to it within a second"

    def control_of(self, group: str, topic: str | None = None, database: str | None = None) -> GroupControl:
        """Return what holds one group of a topic back; without one, of the first topic that it consumes.

        Raises:
            NotFound: there is none.
        """
        for row in self.controls(database):
            if row.group == group and topic in {None, row.topic}:
                return row
        raise _unknown_group(self.databases, group, topic, database)

    def _topics_of(self, group: str, topic: str | None, name: str | None) -> tuple[Database, list[str]]:
        """Return the database that has a group, and which topics it consumes there."""
        having: dict[str, list[str]] = {}
        for row in self.controls(name):
            if row.group == group and (topic is None or topic_of(topic) == row.topic):
                having.setdefault(row.database, []).append(row.topic)
        database = knowing(self.databases, list(having), group, topic, name)
        return database, having[database.name]


def _changed(
    database: Database,
    act: Declaration,
    actor: Actor,
    why: str,
    group: str,
    change: Statement,
    result: dict[str, str] | None = None,
) -> list[str]:
    """Run what changes rows, and record it; return the topics of those that it changed."""
    with database.acting() as connection:
        (rows,) = execute(connection, change)
        topics = sorted(topic for (topic,) in rows)
        for topic in topics:
            execute(connection, record_of(database.schema, act.name, actor, why, f"{group}/{topic}", result))
    return topics


def _named(group: str, topics: Sequence[str]) -> str:
    return f"group {group} of topic{'s' if len(topics) > 1 else ''} {', '.join(topics)}"
