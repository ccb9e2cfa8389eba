"""An operator pauses the dispatch of a topic, resumes it, and deletes a topic that is gone.

Dispatch and release keep to a pause. A deletion takes what the producer's database keeps of a topic for ever. Prune
keeps the newest message of each queue, since the next position is counted from it, and so each topic that there ever
was stays in the lists. A topic is gone when nothing else of it is left: its groups are deleted, no worker has a handler
for it, nothing of it is undecided or scheduled, and of its messages only those are there that prune keeps.

**Races.** Dispatch's lock is held, so that no batch appends messages meanwhile. A sender that commits before or after
makes the topic anew: it begins with position 1. A group that no registered database knows, and that had read the topic,
finds that the log went back (`outbox.consumer.log_loss`).
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from outbox.acts.changes import Declaration, checked_actor, record_of, unless_locked
from outbox.acts.whole_acts import DELETE_TOPIC, PAUSE_TOPIC, RESUME_TOPIC
from outbox.database.execute import Statement, Template, execute
from outbox.database.sql import GROUP_QUEUES, JOINED_SOURCE, take_lock, topic_sql
from outbox.dispatch.dispatch_pass import dispatch_lock
from outbox.errors import ActRefused, DatabaseUnreached, InvalidRequest, NotFound
from outbox.message.content import check_any_topic
from outbox.operator.databases import Query
from outbox.operator.groups import Groups, busy
from outbox.operator.health.workers import merged, workers_in
from outbox.operator.model import COUNT_LIMIT
from outbox.operator.sources import identity_of
from outbox.prune.segments_sql import DELETE_LOCKED
from outbox.text import counted

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.acts.changes import Actor
    from outbox.operator.databases import Database


@dataclass(frozen=True, slots=True)
class TopicPause:
    """A topic whose dispatch is paused, or resumed and not done with its held messages.

    ``held`` is how many messages wait, counted up to `COUNT_LIMIT`.
    """

    columns: ClassVar[str] = "topic held> paused=paused_at by=paused_by because=pause_reason resumed=resumed_at"
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

#: Read how many queues a topic has. Rows: ``(queues,)`` or none.
_TOPIC_QUEUES = Template("SELECT queues FROM {s}.topic WHERE name = %s")

# Prune keeps the newest message of each queue, with all that was sent of its half.
#: Read what there is of a topic. Rows: ``(queues, messages that prune keeps, queues that have others or younger ones,
#: something is undecided, something is scheduled)``.
_LEFT_OF_TOPIC = Template("""
WITH newest AS MATERIALIZED (
    SELECT n AS queue, m.*
      FROM {s}.topic t CROSS JOIN generate_series(0, t.queues - 1) n
     CROSS JOIN LATERAL (SELECT half_id, visible_at FROM {s}.message m WHERE m.topic = t.name AND m.queue = n
                          ORDER BY position DESC LIMIT 1) m
     WHERE t.name = %(topic)s
)
SELECT t.queues, (SELECT count(*) FROM newest),
       (SELECT count(*) FROM newest n
         WHERE n.visible_at >= clock_timestamp() - make_interval(secs => %(age)s)
            OR EXISTS (SELECT FROM {s}.message m WHERE m.topic = t.name AND m.queue = n.queue
                          AND m.half_id <> ALL (ARRAY(SELECT half_id FROM newest)))),
       EXISTS (SELECT FROM {s}.half_check c WHERE c.topic = t.name),
       EXISTS (SELECT FROM {s}.scheduled_message d JOIN {s}.half_message h ON h.id = d.half_id
                WHERE h.topic = t.name AND d.recalled_at IS NULL)
  FROM {s}.topic t WHERE t.name = %(topic)s
""")

#: Each deletes some of the rows that a topic leaves behind. The first has at most one message for each queue.
_FORGET_TOPIC = (
    Template(f"""
WITH locked AS MATERIALIZED (
    SELECT half_id FROM {{s}}.op_message
     WHERE half_id IN (SELECT half_id FROM {{s}}.message WHERE topic = %(topic)s) FOR UPDATE
), {DELETE_LOCKED}
SELECT count(*) FROM halves"""),
    Template("DELETE FROM {s}.delivery_cursor WHERE topic = %(topic)s"),
    Template("DELETE FROM {s}.topic_total WHERE topic = %(topic)s"),
    Template("DELETE FROM {s}.topic_pause WHERE topic = %(topic)s"),
    Template("DELETE FROM {s}.topic_growth WHERE topic = %(topic)s"),
    Template("DELETE FROM {s}.topic WHERE name = %(topic)s"),
)

#: Read which groups there are of a topic from a source. Rows: ``(group,)``.
_GROUPS_OF_TOPIC = Template(f"""{GROUP_QUEUES}
SELECT DISTINCT p.consumer_group
  FROM place p {JOINED_SOURCE}
 WHERE {topic_sql("p.topic")} = %(topic)s AND (s.id IS NULL OR s.id = %(source)s)
 ORDER BY 1
""")


@dataclass(frozen=True, slots=True)
class TopicContents:
    """What there is of a topic: ``last_messages`` are those that prune keeps for ever, one of each queue.

    ``living`` says what speaks against a deletion, a clause each; ``groups`` are those that are to be deleted before,
    with their databases, ``workers`` have handlers for it.
    """

    database: str
    topic: str
    queues: int
    last_messages: int
    living: list[str]
    groups: list[tuple[str, str]]
    workers: list[str]

    @property
    def refusal(self) -> str:
        """Why the act would be refused; empty where it wouldn't."""
        groups = [f"its group {group} ({database}) is there" for group, database in self.groups]
        return "; ".join([*self.living, *groups, *(f"{worker} has handlers for it" for worker in self.workers)])


class Topics(Groups):
    """The acts of an operator on topics as a whole.

    Raises (of a pause, and its end):
        NotFound: the database has no such topic.
        ActRefused: there is nothing to change.
        InvalidMessage: the topic isn't a name.
        InvalidRequest: no reason where one is needed, an actor without a name, what the audit can't record, or several
            producers' databases are registered and none is named.
        UnknownDatabase: no database of that name.
    """

    def topic_pauses(self, database: str | None = None) -> list[TopicPause]:
        """Return the topics whose dispatch is paused, or not done with held messages."""
        rows = []
        for each in self.databases.having("producer", database):
            with each.read_only() as connection:
                found = _PAUSES.read(connection, each.schema, most=COUNT_LIMIT)
            rows += [TopicPause(database=each.name, **row) for row in found]
        return self.shown_texts(rows)

    def pause_topic(
        self, topic: str, *, by: str | Actor, why: str, database: str | None = None, create: bool = False
    ) -> str:
        """Have dispatch hold the new messages of a topic until it is resumed; return a sentence.

        With ``create`` also a topic that has no message so far.
        """
        actor, found = checked_actor(PAUSE_TOPIC, by, why), self._sole_producer(database)
        change = _PAUSE(found.schema, topic=check_any_topic(topic), by=actor.name, why=why.strip())
        if not _changed(found, PAUSE_TOPIC, actor, why, topic, change, create=create):
            raise ActRefused(f"topic {topic} can't be paused: it is paused already; see outbox topics paused")
        return f"topic {topic} is paused: its new messages are held"

    def resume_topic(self, topic: str, *, by: str | Actor, why: str = "", database: str | None = None) -> str:
        """Have the held messages of a paused topic go out, and then new ones; return a sentence."""
        actor, found = checked_actor(RESUME_TOPIC, by, why), self._sole_producer(database)
        change = _RESUME(found.schema, topic=check_any_topic(topic))
        if not _changed(found, RESUME_TOPIC, actor, why, topic, change):
            raise ActRefused(f"topic {topic} can't be resumed: its dispatch isn't paused")
        return f"topic {topic} is resumed: held messages go out within a second"

    def _sole_producer(self, name: str | None) -> Database:
        if away := self.databases.away_for(name):
            raise DatabaseUnreached(away)  # it may be the one that is meant
        found = self.databases.having("producer", name)
        if len(found) != 1:
            names = ", ".join(each.name for each in found) or "none has the producer's tables"
            raise InvalidRequest(f"name one of the producers' databases: {names}", field="database")
        return found[0]

    def preview_delete_topic(self, topic: str, *, database: str | None = None) -> TopicContents:
        """Return what there is of a topic, and what speaks against its deletion; writes nothing.

        Raises:
            NotFound: no database that can be read has it.
            DatabaseUnreached: a database can't be read that may have it, or a group of it.
            InvalidRequest: several databases have it.
        """
        producer = self._producer_of(topic, database)
        with producer.read_only() as connection:
            queues, last_messages, living = _left(connection, producer, topic)
        groups, workers = self._users(producer, topic)
        return TopicContents(producer.name, topic, queues, last_messages, living, groups, workers)

    def delete_topic(self, topic: str, *, by: str | Actor, why: str, database: str | None = None) -> str:
        """Delete a topic that is gone; return a sentence about it.

        Its last messages, its number of queues and its counts are forgotten. The next message to it makes it anew.

        Raises:
            NotFound, DatabaseUnreached: as `preview_delete_topic`.
            ActRefused: it isn't gone, or dispatch is busy.
            InvalidRequest: no reason, or several databases have it.
        """
        actor, producer = checked_actor(DELETE_TOPIC, by, why), self._producer_of(topic, database)
        groups, workers = self._users(producer, topic)
        if groups:
            names = ", ".join(f"{group} ({at})" for group, at in groups)
            raise ActRefused(f"topic {topic!r} isn't gone: delete its groups first (outbox group delete): {names}")
        if workers:
            raise ActRefused(f"topic {topic!r} isn't gone: {', '.join(workers)} has handlers for it")
        schema = producer.schema
        with unless_locked(partial(busy, "dispatch")), producer.acting() as connection:
            execute(connection, take_lock(dispatch_lock(schema)))
            queues, last_messages, living = _left(connection, producer, topic)
            if living:
                raise ActRefused(f"topic {topic!r} isn't gone: {'; '.join(living)}")
            result = {"queues": queues, "messages": last_messages}
            record = record_of(schema, DELETE_TOPIC.name, actor, why, topic, result)
            execute(connection, *(each(schema, topic=topic) for each in _FORGET_TOPIC), record)
        messages = counted(last_messages, "last message")
        return f"topic {topic!r} is deleted, with its {messages}; the next message to it makes it anew"

    def _producer_of(self, topic: str, name: str | None) -> Database:
        having = []
        for each in self.databases.having("producer", name):
            with each.read_only() as connection:
                having += [each] if execute(connection, _TOPIC_QUEUES(each.schema, topic))[0] else []
        if len(having) > 1:
            names = ", ".join(each.name for each in having)
            raise InvalidRequest(f"several databases have topic {topic!r}; name one of: {names}", field="database")
        if not having:
            if away := self.databases.away_for(name):
                raise DatabaseUnreached(away)
            raise NotFound(f"no registered database ({', '.join(self.databases)}) has topic {topic!r}")
        return having[0]

    def _users(self, producer: Database, topic: str) -> tuple[list[tuple[str, str]], list[str]]:
        """Return the groups of a producer's topic, each with its database, and the workers with handlers for it."""
        if self.databases.away:
            raise DatabaseUnreached(list(self.databases.away))
        groups: list[tuple[str, str]] = []
        workers: set[str] = set()
        with producer.read_only() as connection:
            source = identity_of(connection, producer).id
        for each in self.databases.values():
            with each.read_only() as connection:
                handlers = merged(workers_in(connection, each))
                if "consumer" in each.parts:
                    rows = execute(connection, _GROUPS_OF_TOPIC(each.schema, topic=topic, source=source))[0]
                    groups += [(group, each.name) for (group,) in rows]
            workers.update(worker for handler in handlers if handler.topic == topic for worker in handler.workers)
        return groups, sorted(workers)


def _left(connection: Connection, producer: Database, topic: str) -> tuple[int, int, list[str]]:
    """Return the number of queues of a topic, of messages that prune keeps, and what else is left of it."""
    settings = producer.settings
    age = max(settings.retention, settings.undelivered_retention)
    ((queues, last_messages, waiting, undecided, scheduled),) = execute(
        connection, _LEFT_OF_TOPIC(producer.schema, topic=topic, age=age)
    )[0]
    living = []
    if waiting:
        living.append(f"prune has yet to delete messages of {counted(waiting, 'queue')}")
    if undecided:
        living.append("a half message of it is undecided")
    if scheduled:
        living.append("a message of it is scheduled")
    return queues, last_messages, living


def _changed(
    database: Database, act: Declaration, actor: Actor, why: str, topic: str, change: Statement, *, create: bool = False
) -> bool:
    with database.acting() as connection:
        known, rows = execute(connection, _KNOWN(database.schema, topic=topic), change)
        if not known and not create:  # which undoes the change
            raise NotFound(
                f"database {database.name} has no topic {topic!r}; see those that it has: outbox stats; to pause one "
                "before its first message is dispatched: create=True (--create)"
            )
        if rows:
            execute(connection, record_of(database.schema, act.name, actor, why, topic))
    return bool(rows)
