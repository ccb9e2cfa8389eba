"""Pauses of a topic's dispatch, as operators see and change them; dispatch and release keep to them."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from outbox.database.execute import Statement, Template, execute
from outbox.errors import ActRefused, InvalidRequest, TopicNotFound
from outbox.message.content import check_topic
from outbox.operator.acts import PAUSE_TOPIC, RESUME_TOPIC, Declaration
from outbox.operator.changes import checked_actor, record_of
from outbox.operator.databases import Database, OverDatabases, Query
from outbox.operator.model import COUNT_LIMIT, Actor


@dataclass(frozen=True, slots=True)
class TopicPause:
    """A topic whose dispatch is paused, or resumed and not done with its held messages.

    ``held`` is how many messages wait, counted up to `COUNT_LIMIT`.
    """

    database: str
    topic: str
    paused_at: dt.datetime
    paused_by: str
    pause_reason: str
    resumed_at: dt.datetime | None
    held: int


_PAUSES = Query("""
-- topic paused_at paused_by pause_reason resumed_at held
SELECT topic, paused_at, paused_by, pause_reason, resumed_at,
       (SELECT count(*) FROM (SELECT FROM {s}.scheduled_message d
                               WHERE d.held_topic = p.topic AND d.recalled_at IS NULL LIMIT %(most)s) h)
  FROM {s}.topic_pause p ORDER BY topic
""")

#: Tell whether a topic is known: by its queues, its undecided halves, or since it is paused. Rows: one or none.
_KNOWN = Template("""
SELECT 1 FROM {s}.topic WHERE name = %(topic)s UNION ALL SELECT 1 FROM {s}.topic_pause WHERE topic = %(topic)s
 UNION ALL (SELECT 1 FROM {s}.half_check WHERE topic = %(topic)s LIMIT 1)
""")

#: Pause a topic, also one that is resumed and not done yet. Rows: one, or none if it is paused already.
_PAUSE = Template("""
INSERT INTO {s}.topic_pause AS p (topic, paused_by, pause_reason) VALUES (%(topic)s, %(by)s, %(why)s)
ON CONFLICT (topic) DO UPDATE
   SET paused_at = clock_timestamp(), paused_by = excluded.paused_by, pause_reason = excluded.pause_reason,
       resumed_at = NULL
 WHERE p.resumed_at IS NOT NULL
RETURNING 1
""")
_RESUME = Template("""
UPDATE {s}.topic_pause SET resumed_at = clock_timestamp() WHERE topic = %(topic)s AND resumed_at IS NULL RETURNING 1
""")


class TopicControls(OverDatabases):
    """Show paused topics to an operator, pause and resume them.

    Raises (both acts):
        TopicNotFound: the database has no such topic.
        ActRefused: there is nothing to change.
        InvalidMessage: the topic isn't a name.
        InvalidRequest: no reason where one is needed, an actor without a name, a text that the audit can't record, or
            several producers' databases are registered and none is named.
        UnknownDatabase: no database of that name.
    """

    def topic_pauses(self, database: str | None = None) -> list[TopicPause]:
        """Return the topics whose dispatch is paused, or not done with held messages."""
        rows = []
        for each in self.databases.having("producer", database):
            with each.reading() as connection:
                found = _PAUSES.read(connection, each.schema, most=COUNT_LIMIT)
            rows += [TopicPause(database=each.name, **row) for row in found]
        return rows

    def pause_topic(
        self, topic: str, *, by: str | Actor, why: str, database: str | None = None, create: bool = False
    ) -> str:
        """Have dispatch hold the new messages of a topic until it is resumed; return a sentence.

        With ``create`` also a topic that has no message so far.
        """
        actor, found = checked_actor(PAUSE_TOPIC, by, why), self._sole_producer(database)
        change = _PAUSE(found.schema, topic=check_topic(topic), by=actor.name, why=why.strip())
        if not _changed(found, PAUSE_TOPIC, actor, why, topic, change, create=create):
            raise ActRefused(f"topic {topic} can't be paused: it is paused already; see outbox topics paused")
        return f"topic {topic} is paused: its new messages are held"

    def resume_topic(self, topic: str, *, by: str | Actor, why: str = "", database: str | None = None) -> str:
        """Have the held messages of a paused topic go out, and then new ones; return a sentence."""
        actor, found = checked_actor(RESUME_TOPIC, by, why), self._sole_producer(database)
        change = _RESUME(found.schema, topic=check_topic(topic))
        if not _changed(found, RESUME_TOPIC, actor, why, topic, change):
            raise ActRefused(f"topic {topic} can't be resumed: its dispatch isn't paused")
        return f"topic {topic} is resumed: held messages go out within a second"

    def _sole_producer(self, name: str | None) -> Database:
        found = self.databases.having("producer", name)
        if len(found) != 1:
            names = ", ".join(each.name for each in found) or "none has the producer's tables"
            raise InvalidRequest(f"name one of the producers' databases: {names}", field="database")
        return found[0]


def _changed(
    database: Database, act: Declaration, actor: Actor, why: str, topic: str, change: Statement, *, create: bool = False
) -> bool:
    with database.acting() as connection:
        known, rows = execute(connection, _KNOWN(database.schema, topic=topic), change)
        if not known and not create:  # which undoes the change
            raise TopicNotFound(
                f"database {database.name} has no topic {topic!r}; see those that it has: outbox stats; to pause one "
                "before its first message is dispatched: create=True (--create)"
            )
        if rows:
            execute(connection, record_of(database.schema, act.name, actor, why, topic))
    return bool(rows)
