"""The overview of all registered databases: numbers, what needs an operator, topics with their groups, charts."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outbox.database.execute import Row, execute
from outbox.operator.health import sql
from outbox.operator.health.backlog import CHECKS_PER_TOPIC, judge_checks, judge_reconciliations
from outbox.operator.health.rules import GROUP_RULES, TOPIC_RULES, Diagnosis, Severity, Subject, at_most
from outbox.operator.health.series import Sample, Series, lag, moments, series, within
from outbox.operator.health.stats import LIMIT, GroupStats, Stats, TopicStats, stats
from outbox.operator.health.system import UNREACHABLE, why_unreachable
from outbox.operator.health.workers import (
    HandlerRow,
    WorkerReport,
    WorkerRow,
    alive,
    done,
    judge_bulk_jobs,
    judge_workers,
    merged,
    reports,
)
from outbox.text import database_address

if TYPE_CHECKING:
    from outbox.operator.databases import Database, Databases

#: From how far back (minutes) samples are read to judge whether a lag grows, and how much is sent at the moment.
_RECENT = 10
_SECONDS = 5.0


@dataclass(slots=True, kw_only=True)
class GroupLag(GroupStats):
    """The numbers of a group in one database; ``lag`` is None where the producer's database isn't registered."""

    database: str


@dataclass(slots=True, kw_only=True)
class TopicLag(TopicStats):
    """The numbers of a topic at its producer, and those of each of its groups, wherever these are."""

    database: str
    queues: int
    groups: list[GroupLag]


@dataclass(frozen=True, slots=True)
class Overview:
    """The health of all registered databases.

    ``tiles`` are by name; a count that stopped at its limit is in ``capped``. ``findings`` need an operator, problems
    come first. ``unreachable`` are databases that didn't answer.
    """

    at: dt.datetime
    tiles: dict[str, float | None]
    capped: list[str]
    findings: list[Diagnosis]
    topics: list[TopicLag]
    series: list[Series]
    workers: list[WorkerRow]
    unreachable: list[str]


@dataclass(slots=True)
class DatabaseHealth:
    """What was read in one database.

    ``checks`` are rows of `sql.CHECKS`, ``runs`` of `sql.LAST_RUNS`; ``queues`` by topic. ``samples`` are those of the
    charts' window, ``recent`` those of the last minutes.
    """

    database: Database
    subject: Subject
    stats: Stats
    workers: list[WorkerReport]
    handlers: list[HandlerRow]
    bulk_jobs: Row
    samples: list[Sample | None]
    recent: list[Sample | None]
    queues: dict[str, int] = field(default_factory=dict)
    checks: list[Row] = field(default_factory=list)
    runs: list[Row] = field(default_factory=list)


class TopicSources:
    """From which producer's database each group reads its topic, as far as the registered databases show it."""

    def __init__(self, databases: Sequence[DatabaseHealth]) -> None:
        self._databases = {each.subject.name: each for each in databases}
        self._producers: dict[str, list[str]] = defaultdict(list)
        for each in databases:
            for topic in each.stats.topics:
                self._producers[topic.topic].append(each.subject.name)

    def of(self, database: str, topic: str, group: str) -> str | None:
        """Return the name of the producer's database of a topic that is consumed in ``database``; None if unknown."""
        producers = self._producers.get(topic, [])
        if database in producers:
            return database
        if len(producers) < 2:
            return producers[0] if producers else None
        reported = {
            handler.options.get("source")
            for handler in self._databases[database].handlers
            if handler.kind == "consumer" and (handler.topic, handler.group) == (topic, group)
        }
        fitting = [name for name in producers if database_address(self._databases[name].subject.url) in reported]
        return fitting[0] if len(fitting) == 1 else None

    def lag(self, database: str, topic: str, group: str, consumed: int) -> int | None:
        """Return how many messages of another database's topic a group has not come to."""
        source = self.of(database, topic, group)
        if source is None:
            return None
        messages = next(each.messages for each in self._databases[source].stats.topics if each.topic == topic)
        return max(messages - consumed, 0)


def overview(databases: Databases, window: str) -> Overview:
    """Return the health of all databases, with series over ``window``: 1h, 6h, 24h or 7d.

    ``tiles``: ``pending`` (committed, and not a message yet), ``oldest_pending`` (age in s), ``undecided``, ``orphans``
    (due for a check), ``parked_halves``, ``dead`` (parked messages that aren't discarded), ``failed`` (will be
    retried), ``scheduled``, ``throughput`` (messages a minute at the moment), ``lag`` (the worst of a group). None is
    what isn't known. The names of ``series`` are those of `outbox.operator.health.series`.

    Raises:
        InvalidRequest: there is no such window.
    """
    reached: list[DatabaseHealth] = []
    findings: list[Diagnosis] = []
    # The clock of the first database that answers is that of the charts.
    times: list[dt.datetime] = []
    moments(window, dt.datetime.now(dt.UTC))
    for database in databases.values():
        subject = Subject(name=database.name, url=database.engine.url, settings=database.settings)
        try:
            reached.append(_read(database, subject, window, times))
        except UNREACHABLE as error:
            findings.append(subject.finding("database.unreachable", {"error": why_unreachable(error)}))
    by_name = {each.subject.name: each for each in reached}
    sources = TopicSources(reached)
    topics = _topics(reached, sources)
    tiles, capped = _tiles(reached, topics)
    for each in reached:
        findings += _judge(each)
    for topic in topics:
        findings += _judge_lags(topic, by_name, sources)
    return Overview(
        at=reached[0].stats.at if reached else dt.datetime.now(dt.UTC),
        tiles=tiles,
        capped=capped,
        findings=sorted(findings, key=lambda finding: finding.severity is not Severity.PROBLEM),
        topics=topics,
        series=series(times, {name: each.samples for name, each in by_name.items()}, sources.of) if times else [],
        workers=[worker.row for each in reached for worker in each.workers],
        unreachable=[name for name in databases if name not in by_name],
    )


def _read(database: Database, subject: Subject, window: str, times: list[dt.datetime]) -> DatabaseHealth:
    schema, thresholds = database.schema, subject.thresholds
    with database.engine.connect() as connection:
        numbers = stats(connection, database.settings, database.parts, seconds=_SECONDS, thresholds=thresholds)
    if not times:
        times.extend(moments(window, numbers.at))
    minute = numbers.at.replace(second=0, microsecond=0)
    recent_times = [minute - dt.timedelta(minutes=back) for back in range(_RECENT, -1, -1)]
    with database.reading(_SECONDS) as connection:
        rows, samples, recent, (bulk_jobs,) = execute(
            connection,
            sql.WORKERS(schema),
            sql.SAMPLES(schema, edges=times, within=within(window)),
            sql.SAMPLES(schema, edges=recent_times, within=60.0),
            sql.OPEN_BULK_JOBS(schema, limit=LIMIT),
        )
        workers = reports(database.name, rows)
        health = DatabaseHealth(
            database,
            subject,
            numbers,
            workers,
            merged(workers),
            bulk_jobs,
            [Sample.read(text) for (text,) in samples],
            [Sample.read(text) for (text,) in recent],
        )
        if "producer" in database.parts:
            grace = thresholds.check * database.settings.check_interval
            queues, health.checks = execute(
                connection, sql.TOPICS(schema), sql.CHECKS(schema, grace=grace, limit=CHECKS_PER_TOPIC)
            )
            health.queues = dict(queues)
        if "consumer" in database.parts:
            (health.runs,) = execute(connection, sql.LAST_RUNS(schema))
    return health


def _topics(reached: Sequence[DatabaseHealth], sources: TopicSources) -> list[TopicLag]:
    """Return the topics of all databases with their groups, wherever these are; and groups whose topic is nowhere."""
    groups: dict[tuple[str | None, str], list[GroupLag]] = defaultdict(list)
    for each in reached:
        for group in each.stats.groups:
            row = GroupLag(**_fields(group), database=each.subject.name)
            if row.lag is None:
                row.lag = sources.lag(each.subject.name, group.topic, group.group, group.consumed)
            groups[sources.of(each.subject.name, group.topic, group.group), group.topic].append(row)
    topics = [
        TopicLag(
            **_fields(topic),
            database=each.subject.name,
            queues=each.queues.get(topic.topic, 0),
            groups=groups.pop((each.subject.name, topic.topic), []),
        )
        for each in reached
        for topic in each.stats.topics
    ]
    # Their producer isn't registered, or can't be told from others.
    topics += [TopicLag(topic, database=rows[0].database, queues=0, groups=rows) for (_, topic), rows in groups.items()]
    return sorted(topics, key=lambda topic: (topic.topic, topic.database))


def _fields(row: Any) -> dict[str, Any]:
    return {each.name: getattr(row, each.name) for each in dataclasses.fields(row)}


# --- what needs an operator --------------------------------------------------------------------------------------


def _judge(each: DatabaseHealth) -> Iterator[Diagnosis]:
    subject = each.subject
    yield from judge_workers(subject, each.workers, each.database.parts)
    yield from subject.judge(TOPIC_RULES, each.stats.topics, LIMIT)
    # Where no worker is alive, that is what has to be mended.
    if alive(each.workers):
        yield from judge_checks(subject, each.checks, None, each.workers)
    jobs, age = each.bulk_jobs
    yield from judge_bulk_jobs(subject, each.workers, at_most(jobs, LIMIT), age)
    yield from subject.judge(GROUP_RULES, each.stats.groups, LIMIT)
    declared = any(handler.kind == "reconciliation" for handler in each.handlers)
    yield from judge_reconciliations(subject, each.runs, declared=declared)


def _judge_lags(topic: TopicLag, databases: dict[str, DatabaseHealth], sources: TopicSources) -> Iterator[Diagnosis]:
    for group in topic.groups:
        each = databases[group.database]
        if not group.lag or not alive(each.workers):
            continue
        details = {"group": group.group, "topic": group.topic, "lag": group.lag}
        if not done(each.workers, f"consume {group.topic} of {group.group}"):
            yield each.subject.finding("group.unconsumed", details)
            continue
        thresholds = each.subject.thresholds
        recent = {name: health.recent for name, health in databases.items()}
        values = lag(recent, group.database, group.topic, group.group, sources.of)
        lags = [value for value in values if value is not None]
        grows = len(lags) >= thresholds.growing and lags == sorted(lags) and lags[0] < lags[-1] <= group.lag
        if grows and group.lag >= thresholds.lag:
            yield each.subject.finding("group.lag", details | {"grown": int(lags[-1] - lags[0])})


# --- tiles -------------------------------------------------------------------------------------------------------

#: The tiles that are sums: over which rows, of which of their numbers, and by which count that number is capped.
_SUMS = {
    "pending": ("topics", "undispatched", "undispatched"),
    "undecided": ("topics", "undecided", "undecided"),
    "orphans": ("topics", "orphans", "undecided"),
    "parked_halves": ("topics", "parked", "undecided"),
    "scheduled": ("topics", "scheduled", "scheduled"),
    "dead": ("groups", "parked", "parked"),
    "failed": ("groups", "failed", "failed"),
}


def _tiles(reached: Sequence[DatabaseHealth], topics: Sequence[TopicLag]) -> tuple[dict[str, float | None], list[str]]:
    tiles: dict[str, float | None] = dict.fromkeys((*_SUMS, "oldest_pending", "throughput", "lag"))
    capped = []
    for tile, (kind, number, count) in _SUMS.items() if reached else ():
        rows = [row for each in reached for row in getattr(each.stats, kind)]
        tiles[tile] = sum(getattr(row, number) for row in rows)
        capped += [tile] if any(count in row.capped for row in rows) else []
    waiting = [topic.oldest_undispatched for topic in topics if topic.oldest_undispatched is not None]
    lags = [group.lag for topic in topics for group in topic.groups if group.lag is not None]
    tiles |= {"oldest_pending": max(waiting, default=None), "lag": max(lags, default=None)}
    tiles["throughput"] = _throughput(reached)
    return tiles, capped


def _throughput(reached: Sequence[DatabaseHealth]) -> float | None:
    """Return how many messages a minute there were since the newest sample that is at least a minute old."""
    rates = []
    for each in reached:
        if not each.stats.topics:
            continue
        before = next((s for s in reversed(each.recent) if s and (each.stats.at - s.at).total_seconds() >= 60), None)
        if before is None:
            return None
        messages = {name: numbers.get("messages", 0) for name, numbers in before.topics.items()}
        grown = sum(topic.messages - messages.get(topic.topic, 0) for topic in each.stats.topics)
        rates.append(max(grown, 0) / ((each.stats.at - before.at).total_seconds() / 60))
    return sum(rates) if rates else None
