"""The numbers of one database, by topic and by group: what `outbox stats`, the overview and the metrics show.

They are cheap to read. A count that stopped at ``LIMIT`` is named in ``capped``.
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.database.execute import Row, execute
from outbox.database.sql import NOW, plan_by_index, read_only
from outbox.dispatch.sql import Cursor, newest_cursor
from outbox.operator.health import sql
from outbox.operator.health.rules import LIMIT, Thresholds

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.settings import Settings

#: The columns of `sql.UNDECIDED`, `sql.undispatched` and `sql.SCHEDULED` after the topic, as fields of `TopicStats`.
UNDECIDED = ("undecided", "parked", "orphans", "unasked", "oldest_undecided", "oldest_parked", "parked_id")
UNDISPATCHED = ("undispatched", "oldest_undispatched")
SCHEDULED = ("scheduled", "next_due", "overdue", "oldest_overdue")
_FAILURES = ("failed", "oldest_due", "overdue", "parked", "oldest_parked", "parked_id")

_IN_SAMPLE_OF_TOPIC = (
    "messages", "undecided", "parked", "orphans", "undispatched", "oldest_undispatched", "scheduled", "capped",
)  # fmt: skip
_IN_SAMPLE_OF_GROUP = ("consumed", "lag", "failed", "parked", "capped")


@dataclass(slots=True)
class TopicStats:
    """One topic on the producer's side; ages in seconds.

    ``undecided``: halves without a decision; of them ``parked`` are over their checks, the first of them ``parked_id``
    since ``oldest_parked`` seconds; ``orphans`` are due for a check, and of these ``unasked`` were never checked so
    far. ``undispatched``: committed, but not a message yet. ``scheduled``: committed for later, the next at
    ``next_due``; ``overdue`` of them should have been released, the first ``oldest_overdue`` seconds ago. ``messages``:
    all there ever were.
    """

    topic: str
    undecided: int = 0
    parked: int = 0
    orphans: int = 0
    unasked: int = 0
    oldest_undecided: float | None = None
    oldest_parked: float | None = None
    parked_id: UUID | None = None
    undispatched: int = 0
    oldest_undispatched: float | None = None
    scheduled: int = 0
    next_due: dt.datetime | None = None
    overdue: int = 0
    oldest_overdue: float | None = None
    messages: int = 0
    capped: list[str] = field(default_factory=list)


@dataclass(slots=True)
class GroupStats:
    """One group of a topic on the consumer's side.

    ``consumed``: how far the group has come, over all queues. ``lag``: messages after that; None where the
    topic's producer is in another database. ``failed``: will be retried, the oldest due one since
    ``oldest_due`` seconds; ``overdue`` of them should have been retried long ago. ``parked``: waiting for an operator,
    and not discarded; the oldest message of them, ``parked_id``, since ``oldest_parked`` seconds.
    """

    group: str
    topic: str
    consumed: int = 0
    lag: int | None = None
    failed: int = 0
    oldest_due: float | None = None
    overdue: int = 0
    parked: int = 0
    oldest_parked: float | None = None
    parked_id: UUID | None = None
    capped: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Stats:
    """The numbers of one database at one moment of its clock."""

    at: dt.datetime
    topics: list[TopicStats]
    groups: list[GroupStats]


def stats(
    connection: Connection,
    settings: Settings,
    parts: Collection[str],
    *,
    seconds: float = 10.0,
    thresholds: Thresholds | None = None,
) -> Stats:
    """Return the numbers of the parts (``producer``, ``consumer``) whose tables the database has.

    ``connection`` must not be in a transaction; this runs one that only reads, in which no statement takes longer than
    ``seconds``. ``thresholds`` say what is overdue.
    """
    schema, limits = settings.schema, thresholds or Thresholds()
    topics: dict[str, TopicStats] = {}
    groups: list[GroupStats] = []
    heads: list[Row] = []
    with connection.begin():
        *_, ((at,),) = execute(connection, read_only(seconds), plan_by_index(), NOW)
        if "producer" in parts:
            undecided, scheduled, heads = execute(
                connection,
                sql.UNDECIDED(schema, limit=LIMIT),
                sql.SCHEDULED(schema, grace=limits.undispatched, limit=LIMIT),
                sql.HEADS(schema),
            )
            counts = {UNDECIDED: undecided, SCHEDULED: scheduled, UNDISPATCHED: undispatched(connection, schema)}
            for topic, _, position in heads:
                topics.setdefault(topic, TopicStats(topic)).messages += position
            for columns, rows in counts.items():
                add_topics(topics, columns, rows)
            # The limit is one for all topics: where it is reached, none of the counts is known to be all.
            capped = [columns[0] for columns, rows in counts.items() if sum(row[1] for row in rows) >= LIMIT]
            for each in topics.values():
                each.capped = list(capped)
        if "consumer" in parts:
            offsets, failed = execute(
                connection, sql.OFFSETS(schema), sql.FAILURES(schema, grace=limits.retry, limit=LIMIT)
            )
            groups = failures(failed)
            _add_lags(groups, offsets, heads)
    return Stats(at, [topics[name] for name in sorted(topics)], groups)


def as_sample(stats: Stats) -> dict[str, Any]:
    """Return the statistics as they are kept once a minute, without what is zero or isn't known.

    ``at``; ``topics`` by name; ``groups`` by topic and name.
    """
    groups: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for group in stats.groups:
        groups[group.topic][group.group] = _known(group, _IN_SAMPLE_OF_GROUP)
    topics = {topic.topic: _known(topic, _IN_SAMPLE_OF_TOPIC) for topic in stats.topics}
    return {"at": stats.at.isoformat(), "topics": topics, "groups": groups}


def _known(row: object, names: Collection[str]) -> dict[str, Any]:
    # A lag of zero is kept: it is something else than a lag that isn't known.
    return {name: value for name in names if (value := getattr(row, name)) or (name == "lag" and value is not None)}


def undispatched(connection: Connection, schema: str) -> list[Row]:
    """Return the rows of `sql.undispatched`, with the newest cursor."""
    (cursors,) = execute(connection, newest_cursor(schema))
    return execute(connection, sql.undispatched(schema, Cursor(*cursors[0]) if cursors else None, LIMIT))[0]


def add_topics(topics: dict[str, TopicStats], columns: Collection[str], rows: Iterable[Row]) -> list[TopicStats]:
    """Set these fields of topics by rows that begin with the topic; return all topics."""
    for topic, *values in rows:
        row = topics.setdefault(topic, TopicStats(topic))
        for name, value in zip(columns, values, strict=True):
            setattr(row, name, value)
    return list(topics.values())


def failures(rows: Iterable[Row]) -> list[GroupStats]:
    """Return the rows of `sql.FAILURES`."""
    groups = [GroupStats(group, topic, **dict(zip(_FAILURES, values, strict=True))) for group, topic, *values in rows]
    for each in groups:
        each.capped = [name for name in ("failed", "parked") if getattr(each, name) >= LIMIT]
    return groups


def _add_lags(groups: Iterable[GroupStats], offsets: Iterable[Row], heads: Iterable[Row]) -> None:
    reached: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    ends: dict[str, dict[int, int]] = defaultdict(dict)
    for group, topic, queue, position in offsets:
        reached[group, topic][queue] = position
    for topic, queue, position in heads:
        ends[topic][queue] = position
    for each in groups:
        positions = reached[each.group, each.topic]
        each.consumed = sum(positions.values())
        if each.topic in ends:
            each.lag = sum(max(end - positions.get(queue, 0), 0) for queue, end in ends[each.topic].items())
