"""The messages that a group hasn't consumed yet: to come, after its offsets, or failed and to be retried.

A message that isn't dispatched yet, or is scheduled, is to come: the group hasn't consumed it from its commit on.

Offsets and failures are read in the group's database, what stands in the queues in its producer's. So a page costs what
it shows, and the look at all failures of the group, however many messages were consumed before. A parked
message is a dead letter, and isn't listed here.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.acts.changes import MessageStatus
from outbox.database.execute import Row, execute, query
from outbox.errors import InvalidRequest
from outbox.message.model import Status
from outbox.operator.databases import read_each
from outbox.operator.health import stats
from outbox.operator.look import inbox_sql, message_sql
from outbox.operator.look.inbox_sql import FIRST_ID, LAST_ID, InboxQuery
from outbox.operator.look.message_sql import UnreadQueue
from outbox.operator.look.paging import After, Part, SortOrder, merged_parts, numbered
from outbox.operator.model import MessageFilter, MessageRow, Page, PageRequest
from outbox.operator.sources import Met, SourceIdentity, identity_of, met_in, source_of
from outbox.text import topic_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.operator.databases import Database, Databases

#: How many messages of each queue one search looks at, where the filter has more conditions.
WINDOW = 1_000
_LAST_POSITION = 2**63 - 1
_TOPICS = "SELECT name, queues FROM {s}.topic WHERE name = ANY (%(topics)s::text[]) ORDER BY name"
#: What an inbox has of messages that are not consumed yet and will be by themselves; each is a part of the list.
_UNFINISHED = [each for each in Status if each.alone]


@dataclass(frozen=True, slots=True)
class _Found:
    """A message, and where it was found: at a position of a queue, or (0) among those to come or failed."""

    row: MessageRow
    position: int


_NEWEST: SortOrder[_Found] = SortOrder(
    key=lambda found: (found.row.id,), shape=(int, UUID), position=lambda found: (found.position, found.row.id)
)


@dataclass(frozen=True, slots=True)
class _GroupState:
    """How far a group has read the queues of topics, as its database keeps them, and the sources met there."""

    offsets: Mapping[str, Mapping[int, int]]
    met: Met


@dataclass(frozen=True, slots=True)
class _Producer:
    """How many queues each topic of a producer's database has, and which source it is."""

    topics: Mapping[str, int]
    identity: SourceIdentity


@dataclass(frozen=True, slots=True)
class _QueuePart:
    """A queue that a group reads: the databases of the group and of the producer, and the group's offset.

    ``feed`` is the name under which the group keeps the topic.
    """

    consumer: str
    producer: str
    feed: str
    queue: int
    offset: int

    @property
    def name(self) -> str:
        """The name of this part of the list."""
        return json.dumps([self.consumer, self.producer, self.feed, self.queue])

    @property
    def topic(self) -> str:
        """The topic of the producer."""
        return topic_of(self.feed)


def unconsumed(databases: Databases, criteria: MessageFilter, page: PageRequest) -> Page[MessageRow]:
    """Return a page of the messages that the filter's group hasn't consumed yet, the newest first.

    Within a queue, the order is that of the positions. What the group's filter will leave out is listed until the group
    has come to it.

    Raises:
        InvalidRequest: no database that can be read knows the group, or which one has a topic that it reads; or of
            several that have it, which one it reads from.
    """
    if page.number != 1:
        return numbered(page, lambda each: unconsumed(databases, criteria, each))
    search = _Search(databases, criteria)
    if search.unreached and page.token:
        # The parts of the list are others than those of the token: it is tried again as it is.
        return Page([], page.token, complete=False, unreached=search.unreached)
    found = merged_parts(search.parts, page, criteria, _NEWEST, search.read)
    return Page(
        [each.row for each in found.items],
        found.next_page_token,
        found.total,
        found.complete,
        found.searched,
        [*search.unreached, *search.unregistered, *found.unreached],
    )


class _Search:
    """Hold the facts read before a group's messages: its queues, and the databases that couldn't be read."""

    def __init__(self, databases: Databases, criteria: MessageFilter) -> None:
        self.databases = databases
        self.group = str(criteria.group)
        self.criteria = replace(criteria, group=None, status=())
        self.unreached: list[str] = list(databases.away)
        #: Where the sources are that aren't registered.
        self.unregistered: list[str] = []
        groups = read_each(databases.having("consumer"), self._state_of_group, self.unreached)
        topics = {topic_of(feed) for state in groups.values() for feed in state.offsets}
        queues = read_each(databases.having("producer"), partial(_queues, topics=sorted(topics)), self.unreached)
        known = {name: state for name, state in groups.items() if state.offsets}
        if not known and not self.unreached:
            raise InvalidRequest(
                f"no registered database ({', '.join(databases)}) has offsets of a group {self.group!r}"
                + (f" of topic {criteria.topic!r}" if criteria.topic else "")
                + "; see the groups in the overview, or register the group's database",
                field="group",
            )
        self.sources = {
            (name, feed): self._source(name, feed, queues, state.met)
            for name, state in known.items()
            for feed in state.offsets
        }
        if self.unregistered and not any(self.sources.values()):
            raise InvalidRequest(
                f"group {self.group!r} reads {', '.join(self.unregistered)}, which isn't registered "
                f"({', '.join(databases)})",
                field="group",
            )
        self.queue_parts = {
            part.name: part
            for name, state in known.items()
            for feed, offsets in state.offsets.items()
            if (producer := self._chosen(name, feed)) is not None
            for queue in range(queues[producer].topics[topic_of(feed)])
            for part in [_QueuePart(name, producer, feed, queue, offsets.get(queue, 0))]
        }
        self.topics: defaultdict[str, set[str]] = defaultdict(set)
        for part in self.queue_parts.values():
            self.topics[json.dumps([part.producer])].add(part.topic)
        self.parts = [*self.topics, *self.queue_parts]
        for name, state in known.items():
            feeds = state.offsets if self.criteria.topic else [None]
            self.parts += (json.dumps([name, status, feed]) for feed in feeds for status in _UNFINISHED)

    def _state_of_group(self, connection: Connection, database: Database) -> _GroupState:
        offsets: defaultdict[str, dict[int, int]] = defaultdict(dict)
        read = inbox_sql.offsets(database.schema, self.group, self.criteria.topic)
        for topic, queue, position in execute(connection, read)[0]:
            if self.criteria.topic in {None, topic, topic_of(topic)}:
                offsets[topic][queue] = position
        return _GroupState(offsets, met_in(connection, database))

    def _source(self, consumer: str, feed: str, queues: Mapping[str, _Producer], met: Met) -> str | None:
        """Return the producer's database; None where it may be one that can't be read."""
        topic = topic_of(feed)
        having = {name: each.identity for name, each in queues.items() if topic in each.topics}
        source = source_of(consumer, feed, met, having)
        if source is None and feed in met and not any(each.id == met[feed].id for each in having.values()):
            self.unregistered.append(f"{feed} at {met[feed].address or met[feed].id}")
            return None
        if source is None and self.criteria.database in having:
            return self.criteria.database
        if source is None and having:
            raise InvalidRequest(
                f"several databases have topic {topic!r}, and it isn't known from which one group {self.group!r} "
                f"reads; name one of: {', '.join(having)}",
                field="database",
            )
        if source is None and not self.unreached:
            raise InvalidRequest(
                f"no registered database ({', '.join(self.databases)}) has the messages of topic {topic!r}, which "
                f"group {self.group!r} reads; register that of its producer, or name another topic",
                field="topic",
            )
        return source

    def _chosen(self, consumer: str, feed: str) -> str | None:
        """Return the producer's database of a topic as it is kept, if the filter is about it, too."""
        source = self.sources.get((consumer, feed))
        return source if self.criteria.database in {None, source} else None

    def read(self, after: Mapping[str, After], limit: int) -> dict[str, Part[_Found]]:
        """Return the next messages of each part of the list."""
        # Those to come first: a message dispatched in between is found twice, and not never.
        found = {name: self._to_come(name, after[name], limit) for name in self.topics if name in after}
        going_on = [part for name, part in self.queue_parts.items() if name in after]
        for producer in {part.producer for part in going_on}:
            found |= self._after_offsets(
                producer, [each for each in going_on if each.producer == producer], after, limit
            )
        queued = {each.row.id for name in found.keys() - self.topics.keys() for each in found[name].rows}
        for name in self.topics.keys() & found.keys():
            found[name].rows[:] = [each for each in found[name].rows if each.row.id not in queued]
        return found | {name: self._unfinished(name, after[name], limit) for name in after.keys() - found.keys()}

    def _to_come(self, name: str, after: After, limit: int) -> Part[_Found]:
        """Read on in what a producer's database has committed of the group's topics, and is in no queue yet."""
        (producer,), below = json.loads(name), after[1] if after else LAST_ID
        criteria = replace(self.criteria, status=tuple(each for each in MessageStatus if each.to_come))

        def find(connection: Connection, database: Database) -> tuple[list[Row], list[UUID]]:
            schema = database.schema
            late = message_sql.scheduled_below(schema, below=below, limit=WINDOW)
            scheduled = [half_id for (half_id,) in execute(connection, late)[0]]
            last = scheduled[-1] if len(scheduled) == WINDOW else FIRST_ID
            ops = [row["half_id"] for row in stats.undispatched(connection, schema, each=True)]
            ids = [each for each in (*scheduled, *ops) if last <= each < below]
            return execute(connection, message_sql.messages_of(schema, criteria, ids))[0], scheduled

        if not (read := read_each([self.databases[producer]], find, [])):
            return Part([], unread=True)
        rows, scheduled = read[producer]
        found = [_Found(MessageRow(producer, *row), 0) for row in rows if row[1] in self.topics[name]]
        found.sort(key=lambda each: each.row.id, reverse=True)
        ends = [each.row.id for each in found[limit - 1 : limit]] + scheduled[WINDOW - 1 :]
        return Part(found[:limit], len(rows), (0, max(ends)) if ends else None)

    def _after_offsets(
        self, producer: str, going_on: Sequence[_QueuePart], after: Mapping[str, After], limit: int
    ) -> dict[str, Part[_Found]]:
        """Read on in queues of a producer's database, and leave out the resent messages that the group has."""
        # All of the group's queues: an earlier send may be in one whose list has ended.
        queue_parts = [each for each in self.queue_parts.values() if each.producer == producer]
        belows = {each.name: (after[each.name] or (_LAST_POSITION,))[0] for each in going_on}
        queues = [UnreadQueue(each.topic, each.queue, each.offset, belows.get(each.name, 0)) for each in queue_parts]
        window = limit if replace(self.criteria, database=None, topic=None) == MessageFilter() else max(WINDOW, limit)

        def list_queues(connection: Connection, database: Database) -> list[Row]:
            return execute(connection, message_sql.list_after_offsets(database.schema, self.criteria, queues, window))[
                0
            ]

        away: list[str] = []
        rows: defaultdict[str, list[Row]] = defaultdict(list)
        for number, *row in read_each([self.databases[producer]], list_queues, away).get(producer, ()):
            rows[queue_parts[number].name].append(tuple(row))
        parts = {}
        for consumer in {each.consumer for each in going_on}:
            names = [each.name for each in going_on if each.consumer == consumer]
            met = self._met(consumer, [row[1] for name in names for row in rows[name] if row[2] is not None], away)
            for name in names:
                unread = [
                    _Found(MessageRow(producer, *row), position)
                    for position, message_id, *row in rows[name]
                    if row[0] is not None and message_id not in met
                ]
                stopped = rows[name][-1][:2] if len(rows[name]) == window else None
                parts[name] = Part(unread[:limit], len(rows[name]), stopped)
        return {name: Part([], unread=True) for name in parts} if away else parts

    def _met(self, consumer: str, ids: list[UUID], away: list[str]) -> set[UUID]:
        """Return which messages the group has consumed, unread off or failed."""

        def find(connection: Connection, database: Database) -> set[UUID]:
            return {row[0] for row in execute(connection, inbox_sql.met(database.schema, group=self.group, ids=ids))[0]}

        return read_each([self.databases[consumer]], find, away).get(consumer, set())

    def _unfinished(self, name: str, after: After, limit: int) -> Part[_Found]:
        """Read on in what the group has failed and will retry, or in what waits for that."""
        consumer, status, feed = json.loads(name)
        query = InboxQuery(status=(Status(status),), group=self.group, topic=feed)
        below = (after[1], self.group) if after else None

        def list_failed(connection: Connection, database: Database) -> list[Row]:
            return execute(connection, inbox_sql.list_inbox(database.schema, query, status, below, limit))[0]

        away: list[str] = []
        failed = [
            (row[3], row[4]) for row in read_each([self.databases[consumer]], list_failed, away).get(consumer, ())
        ]
        ids: defaultdict[str, list[UUID]] = defaultdict(list)
        for message_id, topic in failed:
            if (producer := self._chosen(consumer, topic)) is not None:
                ids[producer].append(message_id)

        def list_messages(connection: Connection, database: Database) -> list[MessageRow]:
            found = message_sql.messages_of(database.schema, self.criteria, ids[database.name])
            return [MessageRow(database.name, *row) for row in execute(connection, found)[0]]

        producers = [self.databases[producer] for producer in ids]
        rows = [row for found in read_each(producers, list_messages, away).values() for row in found]
        rows.sort(key=lambda row: row.id, reverse=True)
        stopped = (0, failed[-1][0]) if len(failed) == limit else None
        return Part([], unread=True) if away else Part([_Found(row, 0) for row in rows], len(failed), stopped)


def _queues(connection: Connection, database: Database, topics: list[str]) -> _Producer:
    rows = query(connection, database.schema, _TOPICS, topics=topics)
    return _Producer(dict(rows), identity_of(connection, database))
