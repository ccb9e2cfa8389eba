"""How things stand, in numbers that are cheap to get: for the command line and for monitoring.

A count stops at ``LIMIT``; it is then named in ``capped`` and means "at least".
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outbox.database.execute import execute
from outbox.dispatch.sql import newest_cursor, plan_by_index, to_cursor
from outbox.operator.health import stats_sql

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.settings import Settings

LIMIT = 10_000
_SECONDS = 10.0

_OF_TOPIC = ("messages", "undecided", "parked", "orphans", "undispatched", "oldest_undispatched", "scheduled", "capped")
_OF_GROUP = ("consumed", "lag", "failed", "parked", "capped")


@dataclass(slots=True)
class TopicStats:
    """One topic on the producer's side; ages in seconds.

    ``undecided``: halves without a decision; of them ``parked`` are over their checks, ``orphans`` due for one, and of
    these ``unasked`` never checked so far. ``undispatched``: committed, but not a message yet. ``scheduled``: committed
    for later, the next at ``next_due``. ``messages``: all there ever were.
    """

    topic: str
    undecided: int = 0
    parked: int = 0
    orphans: int = 0
    unasked: int = 0
    oldest_undecided: float | None = None
    undispatched: int = 0
    oldest_undispatched: float | None = None
    scheduled: int = 0
    next_due: dt.datetime | None = None
    messages: int = 0
    capped: list[str] = field(default_factory=list)


@dataclass(slots=True)
class GroupStats:
    """One group of a topic on the consumer's side.

    ``consumed``: how far the group has come, over all queues. ``lag``: messages after that; None where the
    topic's producer is in another database. ``failed``: will be retried, the oldest due one since
    ``oldest_due`` seconds. ``parked``: waiting for a human, and not discarded.
    """

    group: str
    topic: str
    consumed: int = 0
    lag: int | None = None
    failed: int = 0
    oldest_due: float | None = None
    parked: int = 0
    capped: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Stats:
    """How things stand in one database at one moment of its clock."""

    at: dt.datetime
    topics: list[TopicStats]
    groups: list[GroupStats]


def stats(connection: Connection, settings: Settings, parts: Collection[str], *, seconds: float = _SECONDS) -> Stats:
    """Return how things stand for the parts (``producer``, ``consumer``) whose tables the database has.

    ``connection`` must not be in a transaction; runs one that only reads, in which no statement takes longer than
    ``seconds``.
    """
    schema = settings.schema
    topics: dict[str, TopicStats] = {}
    heads: dict[str, dict[int, int]] = {}
    groups: list[GroupStats] = []
    with connection.begin():
        *_, ((at,),) = execute(connection, stats_sql.look_only(seconds), plan_by_index(), stats_sql.now())
        if "producer" in parts:
            topics, heads = _topics(connection, schema)
        if "consumer" in parts:
            groups = _groups(connection, schema, heads)
    return Stats(at, [topics[name] for name in sorted(topics)], groups)


def as_sample(stats: Stats) -> dict[str, Any]:
    """Return the statistics as they are kept once a minute, without what is zero or isn't known.

    ``at``; ``topics`` by name; ``groups`` by topic and name.
    """
    groups: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for group in stats.groups:
        groups[group.topic][group.group] = _told(group, _OF_GROUP)
    topics = {topic.topic: _told(topic, _OF_TOPIC) for topic in stats.topics}
    return {"at": stats.at.isoformat(), "topics": topics, "groups": groups}


def _told(of: object, names: Collection[str]) -> dict[str, Any]:
    # A lag of zero is told: it is another thing than one that isn't known.
    return {name: value for name in names if (value := getattr(of, name)) or (name == "lag" and value is not None)}


def _topics(connection: Connection, schema: str) -> tuple[dict[str, TopicStats], dict[str, dict[int, int]]]:
    cursors, undecided, scheduled, positions = execute(
        connection,
        newest_cursor(schema),
        stats_sql.undecided(schema, LIMIT),
        stats_sql.scheduled(schema, LIMIT),
        stats_sql.heads(schema),
    )
    cursor = to_cursor(cursors[0]) if cursors else None
    (undispatched,) = execute(connection, stats_sql.undispatched(schema, cursor, LIMIT))

    heads: dict[str, dict[int, int]] = defaultdict(dict)
    for topic, queue, position in positions:
        heads[topic][queue] = position
    names = {row[0] for rows in (undecided, scheduled, undispatched) for row in rows} | set(heads)
    topics = {name: TopicStats(name, messages=sum(heads.get(name, {}).values())) for name in names}
    for topic, count, parked, orphans, unasked, age in undecided:
        row = topics[topic]
        row.undecided, row.parked, row.orphans, row.unasked, row.oldest_undecided = count, parked, orphans, unasked, age
    for topic, count, next_due in scheduled:
        topics[topic].scheduled, topics[topic].next_due = count, next_due
    for topic, count, age in undispatched:
        topics[topic].undispatched, topics[topic].oldest_undispatched = count, age
    for name, rows in (("undecided", undecided), ("scheduled", scheduled), ("undispatched", undispatched)):
        # The limit is one for all topics: none of the counts is known to be all.
        if sum(row[1] for row in rows) >= LIMIT:
            for stats in topics.values():
                stats.capped.append(name)
    return topics, heads


def _groups(connection: Connection, schema: str, heads: dict[str, dict[int, int]]) -> list[GroupStats]:
    offsets, failures = execute(connection, stats_sql.offsets(schema), stats_sql.failures(schema, LIMIT))
    reached: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    for group, topic, queue, position in offsets:
        reached[group, topic][queue] = position
    groups = []
    for group, topic, failed, parked, oldest_due in failures:
        positions = reached[group, topic]
        lag = None
        if topic in heads:
            lag = sum(max(head - positions.get(queue, 0), 0) for queue, head in heads[topic].items())
        capped = [name for name, count in (("failed", failed), ("parked", parked)) if count >= LIMIT]
        groups.append(GroupStats(group, topic, sum(positions.values()), lag, failed, oldest_due, parked, capped))
    return groups
