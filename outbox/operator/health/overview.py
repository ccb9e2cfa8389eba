"""How things stand in all databases at once: numbers, problems in sentences, topics with their groups, charts.

Where the topics of groups come from: their lag over the border of a database.
"""

from __future__ import annotations

import datetime as dt
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outbox.database.execute import Row, execute
from outbox.operator.health import overview_sql, problems, system
from outbox.operator.health.series import Sample, moments, series, within
from outbox.operator.health.stats import LIMIT, Stats, stats
from outbox.operator.health.system import UNREACHABLE, Reported, why_unreachable
from outbox.operator.model import GroupLag, HandlerRow, Overview, TopicLag
from outbox.worker.report import place

if TYPE_CHECKING:
    from outbox.operator.databases import Database, Databases


class Sources:
    """Where the topics of groups come from, as far as the registered databases tell."""

    def __init__(self, seen: Sequence[Seen]) -> None:
        self._seen = {each.name: each for each in seen}
        self._producers: dict[str, list[str]] = defaultdict(list)
        for each in seen:
            for topic in each.stats.topics:
                self._producers[topic.topic].append(each.name)

    def of(self, database: str, topic: str, group: str) -> str | None:
        """Return the name of the producer's database of a topic that is consumed in ``database``; None if unknown."""
        producers = self._producers.get(topic, [])
        if database in producers:
            return database
        if len(producers) < 2:
            return producers[0] if producers else None
        told = {
            handler.options.get("source")
            for handler in self._seen[database].handlers
            if handler.kind == "consumer" and (handler.topic, handler.group) == (topic, group)
        }
        fitting = [name for name in producers if place(self._seen[name].database.engine.url) in told]
        return fitting[0] if len(fitting) == 1 else None

    def lag(self, database: str, topic: str, group: str, consumed: int) -> int | None:
        """Return how many messages of another database's topic a group has not come to."""
        source = self.of(database, topic, group)
        if source is None:
            return None
        messages = next(each.messages for each in self._seen[source].stats.topics if each.topic == topic)
        return max(messages - consumed, 0)

    def recent_lags(self, database: str, topic: str, group: str) -> list[int]:
        """Return the lag of a group in the samples of the last minutes, as far as it is known."""
        source = self._seen.get(self.of(database, topic, group) or "")
        lags = []
        for number, sample in enumerate(self._seen[database].recent):
            told: Any = sample.groups.get(topic, {}).get(group) if sample else None
            head = source.recent[number] if source else None
            if told is None:
                continue
            if "lag" in told:
                lags.append(told["lag"])
            elif head is not None:
                lags.append(max(head.topics.get(topic, {}).get("messages", 0) - told.get("consumed", 0), 0))
        return lags


#: How far back (minutes) is looked to tell whether a lag grows, and how much is sent at the moment.
_RECENT = 10
_LOOK_SECONDS = 5.0


@dataclass(slots=True)
class Seen:
    """What one database says; ``recent`` are its samples of the last minutes, ``samples`` those of the window."""

    database: Database
    stats: Stats
    workers: list[Reported]
    handlers: list[HandlerRow]
    queues: dict[str, int]
    samples: list[Sample | None]
    recent: list[Sample | None]
    unfenced: list[Row] = field(default_factory=list)
    bulk_jobs: Row = (0, None)
    runs: list[Row] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name by which the database is registered."""
        return self.database.name


def overview(databases: Databases, window: str) -> Overview:
    """Return how things stand, with series over ``window``: 1h, 6h, 24h or 7d.

    ``tiles``: ``pending`` (committed, and not a message yet), ``oldest_pending`` (age in s), ``undecided``, ``orphans``
    (due for a check), ``parked_halves``, ``dead`` (parked messages that aren't discarded), ``failed`` (will be
    retried), ``scheduled``, ``throughput`` (messages a minute at the moment), ``lag`` (the worst of a group). None is
    what isn't known. The names of ``series`` are those of `outbox.operator.health.series`.

    Raises:
        InvalidRequest: there is no such window.
    """
    seen: list[Seen] = []
    unseen: dict[str, str] = {}
    # The clock of the first database that answers is that of the charts.
    times: list[dt.datetime] = []
    moments(window, dt.datetime.now(dt.UTC))
    for database in databases.values():
        try:
            found = _look(database, window, times)
        except UNREACHABLE as error:
            unseen[database.name] = why_unreachable(error)
        else:
            seen.append(found)
    sources = Sources(seen)
    topics = _topics(seen, sources)
    tiles, capped = _tiles(seen, topics)
    return Overview(
        at=seen[0].stats.at if seen else dt.datetime.now(dt.UTC),
        tiles=tiles,
        capped=capped,
        problems=problems.problems(seen, unseen, topics, sources),
        topics=topics,
        series=series(times, {each.name: each.samples for each in seen}, sources.of) if times else [],
        workers=[worker.row for each in seen for worker in each.workers],
        unseen=list(unseen),
    )


def _look(database: Database, window: str, times: list[dt.datetime]) -> Seen:
    schema = database.schema
    with database.engine.connect() as connection:
        counted = stats(connection, database.settings, database.parts, seconds=_LOOK_SECONDS)
    if not times:
        times.extend(moments(window, counted.at))
    minute = counted.at.replace(second=0, microsecond=0)
    recent = [minute - dt.timedelta(minutes=back) for back in range(_RECENT, -1, -1)]
    with database.looking(_LOOK_SECONDS) as connection:
        workers, samples, lately, (bulk_jobs,) = execute(
            connection,
            system.statement(schema),
            overview_sql.samples(schema, times, within(window)),
            overview_sql.samples(schema, recent, 60.0),
            overview_sql.open_bulk_jobs(schema, LIMIT),
        )
        reported = system.reported(database.name, workers)
        found = Seen(
            database,
            counted,
            reported,
            system.merged(reported),
            {},
            [Sample.read(text) for (text,) in samples],
            [Sample.read(text) for (text,) in lately],
            bulk_jobs=bulk_jobs,
        )
        if "producer" in database.parts:
            queues, found.unfenced = execute(
                connection, overview_sql.topics(schema), overview_sql.unfenced_orphans(schema, LIMIT)
            )
            found.queues = dict(queues)
        if "consumer" in database.parts and counted.groups:
            pairs = [(group.topic, group.group) for group in counted.groups]
            (runs,) = execute(connection, overview_sql.last_runs(schema, pairs))
            found.runs = [(*row[:4], json.loads(row[4]) if row[4] else None, *row[5:]) for row in runs]
    return found


def _topics(seen: Sequence[Seen], sources: Sources) -> list[TopicLag]:
    """Return the topics of all databases with their groups, wherever these are; and groups whose topic is nowhere."""
    groups: dict[tuple[str | None, str], list[GroupLag]] = defaultdict(list)
    for each in seen:
        for group in each.stats.groups:
            lag = group.lag
            if lag is None:
                lag = sources.lag(each.name, group.topic, group.group, group.consumed)
            row = GroupLag(
                each.name, group.group, group.topic, group.consumed, lag, group.failed, group.oldest_due, group.parked
            )
            groups[sources.of(each.name, group.topic, group.group), group.topic].append(row)
    topics = [
        TopicLag(
            each.name,
            topic.topic,
            each.queues.get(topic.topic, 0),
            topic.messages,
            topic.undecided,
            topic.parked,
            topic.undispatched,
            topic.oldest_undispatched,
            topic.scheduled,
            groups.pop((each.name, topic.topic), []),
        )
        for each in seen
        for topic in each.stats.topics
    ]
    # Their producer isn't registered, or can't be told from others.
    topics += [TopicLag(rows[0].database, topic, 0, 0, 0, 0, 0, None, 0, rows) for (_, topic), rows in groups.items()]
    return sorted(topics, key=lambda topic: (topic.topic, topic.database))


def _tiles(seen: Sequence[Seen], topics: Sequence[TopicLag]) -> tuple[dict[str, float | None], list[str]]:
    of_topics = [topic for each in seen for topic in each.stats.topics]
    of_groups = [group for each in seen for group in each.stats.groups]
    tiles: dict[str, float | None] = dict.fromkeys(
        ("pending", "oldest_pending", "undecided", "orphans", "parked_halves", "dead", "failed", "scheduled",
         "throughput", "lag")
    )  # fmt: skip
    if not seen:
        return tiles, []
    tiles |= {
        "pending": sum(topic.undispatched for topic in of_topics),
        "oldest_pending": _highest(topic.oldest_undispatched for topic in of_topics),
        "undecided": sum(topic.undecided for topic in of_topics),
        "orphans": sum(topic.orphans for topic in of_topics),
        "parked_halves": sum(topic.parked for topic in of_topics),
        "dead": sum(group.parked for group in of_groups),
        "failed": sum(group.failed for group in of_groups),
        "scheduled": sum(topic.scheduled for topic in of_topics),
        "throughput": _throughput(seen),
        "lag": _highest(group.lag for topic in topics for group in topic.groups),
    }
    at_limit = {name for topic in of_topics for name in topic.capped}
    at_limit |= {name for group in of_groups for name in group.capped}
    by_count = {"undispatched": ("pending",), "undecided": ("undecided", "orphans", "parked_halves"),
                "scheduled": ("scheduled",), "failed": ("failed",), "parked": ("dead",)}  # fmt: skip
    return tiles, [tile for name, of in by_count.items() if name in at_limit for tile in of]


def _highest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _throughput(seen: Sequence[Seen]) -> float | None:
    """Return how many messages a minute there were since the newest sample that is at least a minute old."""
    rates = []
    for each in seen:
        if not each.stats.topics:
            continue
        before = next((s for s in reversed(each.recent) if s and (each.stats.at - s.at).total_seconds() >= 60), None)
        if before is None:
            return None
        grown = sum(topic.messages - _before(before, topic.topic) for topic in each.stats.topics)
        rates.append(max(grown, 0) / ((each.stats.at - before.at).total_seconds() / 60))
    return sum(rates) if rates else None


def _before(sample: Sample, topic: str) -> int:
    told: Any = sample.topics.get(topic, {}).get("messages", 0)
    return int(told)
