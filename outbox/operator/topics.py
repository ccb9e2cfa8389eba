"""An operator deletes a topic that is gone: what its producer's database keeps of it for ever goes, and its statistics.

Prune keeps the newest message of each queue, since the next position is counted from it, and so each topic that there
ever was stays in the lists. A topic is gone when nothing else of it is left: its groups are deleted, no worker has a
handler for it, nothing of it is undecided or scheduled, and of its messages only those are there that prune keeps.

**Races.** Dispatch's lock is held, so that no batch appends messages meanwhile. A sender that commits before or after
makes the topic anew: it begins with position 1. A group that no registered database knows, and that had read the topic,
finds that the log went back (`outbox.consumer.log_loss`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from outbox.database.execute import execute
from outbox.database.sql import take_lock
from outbox.dispatch.once import dispatch_lock
from outbox.errors import ActRefused, DatabaseUnreached, InvalidRequest, TopicNotFound
from outbox.operator import groups_sql as sql
from outbox.operator.acts import DELETE_TOPIC
from outbox.operator.changes import checked_actor, record_of, unless_locked
from outbox.operator.groups import Groups, busy
from outbox.operator.health.workers import merged, workers_in
from outbox.text import counted

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.operator.databases import Database
    from outbox.operator.model import Actor


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


class Topics(Groups):
    """The acts of an operator on topics as a whole."""

    def preview_delete_topic(self, topic: str, *, database: str | None = None) -> TopicContents:
        """Return what there is of a topic, and what speaks against its deletion; writes nothing.

        Raises:
            TopicNotFound: no database that can be read has it.
            DatabaseUnreached: a database can't be read that may have it, or a group of it.
            InvalidRequest: several databases have it.
        """
        producer = self._producer_of(topic, database)
        with producer.reading() as connection:
            queues, last_messages, living = _left(connection, producer, topic)
        groups, workers = self._users(topic)
        return TopicContents(producer.name, topic, queues, last_messages, living, groups, workers)

    def delete_topic(self, topic: str, *, by: str | Actor, why: str, database: str | None = None) -> str:
        """Delete a topic that is gone; return a sentence about it.

        Its last messages, its number of queues and its counts are forgotten. The next message to it makes it anew.

        Raises:
            TopicNotFound, DatabaseUnreached: as `preview_delete_topic`.
            ActRefused: it isn't gone, or dispatch is busy.
            InvalidRequest: no reason, or several databases have it.
        """
        actor, producer = checked_actor(DELETE_TOPIC, by, why), self._producer_of(topic, database)
        groups, workers = self._users(topic)
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
            execute(connection, *(each(schema, topic=topic) for each in sql.forget_topic), record)
        messages = counted(last_messages, "last message")
        return f"topic {topic!r} is deleted, with its {messages}; the next message to it makes it anew"

    def _producer_of(self, topic: str, name: str | None) -> Database:
        having = []
        for each in self.databases.having("producer", name):
            with each.reading() as connection:
                having += [each] if execute(connection, sql.topic_queues(each.schema, topic))[0] else []
        if len(having) > 1:
            names = ", ".join(each.name for each in having)
            raise InvalidRequest(f"several databases have topic {topic!r}; name one of: {names}", field="database")
        if not having:
            if away := self.databases.away_for(name):
                raise DatabaseUnreached(away)
            raise TopicNotFound(f"no registered database ({', '.join(self.databases)}) has topic {topic!r}")
        return having[0]

    def _users(self, topic: str) -> tuple[list[tuple[str, str]], list[str]]:
        """Return the groups of the topic, each with its database, and the workers that have handlers for it."""
        if self.databases.away:
            raise DatabaseUnreached(list(self.databases.away))
        groups: list[tuple[str, str]] = []
        workers: set[str] = set()
        for each in self.databases.values():
            with each.reading() as connection:
                handlers = merged(workers_in(connection, each))
                if "consumer" in each.parts:
                    rows = execute(connection, sql.groups_of_topic(each.schema, topic=topic))[0]
                    groups += [(group, each.name) for (group,) in rows]
            workers.update(worker for handler in handlers if handler.topic == topic for worker in handler.workers)
        return groups, sorted(workers)


def _left(connection: Connection, producer: Database, topic: str) -> tuple[int, int, list[str]]:
    """Return the number of queues of a topic, of messages that prune keeps, and what else is left of it."""
    settings = producer.settings
    age = max(settings.retention, settings.undelivered_retention)
    ((queues, last_messages, waiting, undecided, scheduled),) = execute(
        connection, sql.left_of_topic(producer.schema, topic=topic, age=age)
    )[0]
    living = []
    if waiting:
        living.append(f"prune has yet to delete messages of {counted(waiting, 'queue')}")
    if undecided:
        living.append("a half message of it is undecided")
    if scheduled:
        living.append("a message of it is scheduled")
    return queues, last_messages, living
