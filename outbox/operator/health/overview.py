"""The overview of all registered databases: numbers, what needs an operator, topics with their groups, charts.

And what runs on them, and what all of this runs on: workers and their handlers, versions, tables, settings.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from outbox.database import migration
from outbox.database.execute import Row, Statement, execute
from outbox.database.migration import chain
from outbox.database.sql import NOW
from outbox.errors import DatabaseUnreached, NotFound, SchemaError
from outbox.operator.databases import read_each
from outbox.operator.health import inspections, sql, stats, workers
from outbox.operator.health.attention import by_weight
from outbox.operator.health.rules import Diagnosis
from outbox.operator.health.silences import Silence, Silences, silenced, silences_in
from outbox.operator.health.subject import Subject, address
from outbox.operator.health.workers import HandlerRow, ProducerRow, WorkerReport, WorkerRow
from outbox.operator.sources import Met, SourceIdentity, identity_of, met_in, source_of
from outbox.text import MASK, class_name, fields_of, message_of, topic_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.operator.databases import AwayDatabase, Database

#: The errors that mean that a database, or its tables, can't be reached.
UNREACHABLE = (DBAPIError, PoolTimeout, SchemaError)
#: From how far back (minutes) samples are read to judge whether a lag grows, and how much is sent at the moment.
_RECENT = 10
_SECONDS = 5.0
#: Up to so many topics and groups, the series of all are read, and the highest of the window are shown.
_FEW = 200
#: The most rows of each list of an overview that is shown.
MOST_ROWS = 200
_TOPIC_RULES = ("half.parked", "op.undispatched", "message.overdue", "delivery.exhausted")
_POSITIONS = ("groups", "topics", "queues", "positions")
_GROUP_RULES = ("message.parked", "retry.overdue", "lease.lapsed", "group.lost")


@dataclass(slots=True, kw_only=True)
class GroupLag(stats.GroupStats):
    """The numbers of a group in one database; ``lag`` is None where the producer's database isn't registered.

    ``rate`` is how many messages a minute the group has consumed lately; None where too little is known. ``eta`` is in
    how many seconds it has caught up, as it goes now; None where it doesn't, or is unknown. ``workers`` consume for it.
    """

    database: str
    workers: int
    rate: float | None = None
    eta: float | None = None

    @property
    def attended(self) -> bool:
        """Does any consume for it? One whose messages an application takes itself has no worker that tells of it."""
        return bool(self.workers or self.taken)


@dataclass(slots=True, kw_only=True)
class SagaNumbers(stats.SagaStats):
    """The flows of a saga that haven't ended, in one database."""

    database: str


@dataclass(slots=True, kw_only=True)
class TopicLag(stats.TopicStats):
    """The numbers of a topic at its producer, and those of each of its groups, wherever these are.

    ``recent`` are the decisions in the window of the overview, as far back as there are samples; None without any.
    Where its producer's database can't be read, or isn't registered, ``database`` is that of a group, and the numbers
    are None.
    """

    database: str
    queues: int | None
    groups: list[GroupLag]
    recent: stats.RecentDecisions | None = None

    def with_groups(self, most: int) -> TopicLag:
        """Return the topic with so many of its groups: those with most to do."""
        return dataclasses.replace(self, groups=sorted(self.groups, key=_left_by, reverse=True)[:most])


@dataclass(frozen=True, slots=True)
class Overview:
    """The health of all registered databases.

    ``tiles``: ``pending`` (committed, and not a message yet), ``oldest_pending`` (age in s), ``undecided``, ``orphans``
    (due for a check), ``parked_halves``, ``dead`` (parked messages that aren't discarded), ``failed`` (will be
    retried), ``scheduled``, ``throughput`` (messages a minute at the moment), ``lag`` (the worst of a group). None is
    what isn't known; what is at least so much is in ``capped``: a count that stopped at its limit, or one without the
    databases that didn't answer. The names of ``series`` are those of `outbox.operator.health.stats.series`.
    ``findings`` need an operator, the heaviest first (`outbox.operator.health.attention`). ``unreachable`` are
    databases that didn't answer. ``left_out`` is how many rows of a list there are beside those that are shown.
    """

    at: dt.datetime
    tiles: dict[str, float | None]
    capped: list[str]
    findings: list[Diagnosis]
    topics: list[TopicLag]
    sagas: list[SagaNumbers]
    series: list[stats.Series]
    workers: list[WorkerRow]
    unreachable: list[str]
    left_out: dict[str, int] = field(default_factory=dict)


def shortened(found: Overview) -> Overview:
    """Return an overview with `MOST_ROWS` rows of each list: of topics and groups, those with most to do."""
    lists = {name: getattr(found, name) for name in ("findings", "sagas", "workers")}
    topics, rows = [], MOST_ROWS
    for topic in sorted(found.topics, key=_to_do, reverse=True):
        if rows > 0:
            topics.append(topic.with_groups(rows))
            rows -= len(topics[-1].groups) or 1
    lists["topics"] = sorted(topics, key=lambda topic: (topic.topic, topic.database))
    shown = {name: each[:MOST_ROWS] for name, each in lists.items()}
    left_out = {name: len(getattr(found, name)) - len(each) for name, each in shown.items()}
    left_out["groups"] = sum(len(topic.groups) for topic in found.topics) - sum(len(each.groups) for each in topics)
    return dataclasses.replace(found, **shown, left_out={name: number for name, number in left_out.items() if number})


def _left_by(group: GroupLag) -> int:
    return (group.lag or 0) + group.failed + group.parked


def _to_do(topic: TopicLag) -> int:
    return (topic.undispatched or 0) + (topic.undecided or 0) + sum(map(_left_by, topic.groups))


@dataclass(kw_only=True)
class DatabaseHealth(Subject):
    """Hold the rows read in one database over ``connection``.

    ``before`` is the newest sample that is at least a minute old, ``first`` the oldest one of the charts' window.
    ``samples`` are those of the window, with those topics and groups that have series of their own; ``recent`` those of
    the last minutes, with the groups that may be falling behind. ``queues`` are by topic.
    """

    served: bool = True
    connection: Connection
    numbers: stats.Stats
    before: stats.StatsSample | None
    first: stats.StatsSample | None
    samples: stats.OverTime = ()
    recent: stats.OverTime = ()
    queues: dict[str, int] = field(default_factory=dict)
    identity: SourceIdentity | None = None
    met: Met = field(default_factory=dict)
    silences: list[Silence] = field(default_factory=list)
    findings: list[Diagnosis] = field(default_factory=list)

    def read(self, *statements: Statement) -> list[list[Row]]:
        """Run statements in the transaction of the connection."""
        return execute(self.connection, *statements)

    def grown(self, now: int, name: str, topic: str, group: str | None = None) -> float | None:
        """Return by how much a minute a counter has grown since; None where that isn't known, or it went back."""
        counts = stats.counts(self.before, topic, group)
        if self.before is None or counts is None:
            return None
        more = float(now - counts.get(name, 0))
        return more / ((self.numbers.at - self.before.at).total_seconds() / 60) if more >= 0 else None

    def consumed(self, group: stats.GroupStats) -> float | None:
        """Return how many messages a minute a group consumed lately; what an operator had it pass by is no such."""
        before = stats.counts(self.before, group.topic, group.group) or {}
        if before.get("moves", 0) != group.moves:
            return None
        return self.grown(group.consumed, "consumed", group.topic, group.group)

    def sent(self, topic: stats.TopicStats) -> float | None:
        """Return how many messages a minute came into a topic lately."""
        return self.grown(topic.messages or 0, "messages", topic.topic)

    def judge_all(self) -> Iterator[Diagnosis]:
        """Judge the rows read here."""
        yield from inspections.workers(self)
        yield from inspections.locks(self)
        yield from self.judge(_TOPIC_RULES, map(fields_of, self.numbers.topics))
        if "producer" in self.parts:
            yield from inspections.checks(self)
            yield from inspections.confirming(self)
            yield from inspections.paused_topics(self)
            yield from inspections.schedules(self)
            yield from self.judge(["saga.overdue"], map(fields_of, self.numbers.sagas))
        yield from inspections.bulk_jobs(self)
        yield from self.judge(_GROUP_RULES, map(fields_of, self.numbers.groups))
        if "consumer" in self.parts:
            yield from inspections.stopped_groups(self)
            yield from inspections.reconciliations(self)


def _read(database: Database, window: str, times: list[dt.datetime]) -> DatabaseHealth:
    with database.engine.connect() as connection:
        numbers = stats.stats(connection, database.settings, database.parts, seconds=_SECONDS)
    if not times:
        times += stats.moments(window, numbers.at)
    earlier = stats.BEFORE(database.schema, at=numbers.at, minutes=_RECENT, since=times[0])
    with database.read_only(_SECONDS) as connection:
        before, first = map(stats.StatsSample.read, execute(connection, earlier)[0][0])
        health = DatabaseHealth(
            name=database.name,
            url=database.engine.url,
            settings=database.settings,
            parts=database.parts,
            connection=connection,
            numbers=numbers,
            before=before,
            first=first,
        )
        if "producer" in database.parts:
            health.queues = dict(health.rows(sql.TOPICS))
            health.identity = identity_of(connection, database)
        if "consumer" in database.parts:
            health.met = met_in(connection, database)
        health.silences = silences_in(connection, database.name, database.schema)
        health.findings = list(health.judge_all())
    return health


def _sources(reached: dict[str, DatabaseHealth]) -> stats.SourceOf:
    """Return from which producer's database each group reads its topic, as far as the databases show it."""
    producers: dict[str, dict[str, SourceIdentity]] = defaultdict(dict)
    for name, each in reached.items():
        for topic in each.numbers.topics:
            if each.identity is not None:
                producers[topic.topic][name] = each.identity

    return lambda database, feed: source_of(database, feed, reached[database].met, producers[topic_of(feed)])


def _topics(reached: dict[str, DatabaseHealth], source_of: stats.SourceOf) -> list[TopicLag]:
    """Return the topics of all databases with their groups, wherever these are; and groups whose topic is nowhere."""
    recent = {name: stats.recent_decisions(each.numbers, each.first) for name, each in reached.items()}
    messages = {(name, topic.topic): topic.messages for name, each in reached.items() for topic in each.numbers.topics}
    groups: dict[tuple[str | None, str], list[GroupLag]] = defaultdict(list)
    for name, each in reached.items():
        consuming = workers.consuming(each.workers)
        for group in each.numbers.groups:
            source, topic_name = source_of(name, group.topic), topic_of(group.topic)
            at_work = consuming[f"{topic_name} of {group.group}"]
            row = GroupLag(**fields_of(group), database=name, workers=at_work)
            if row.lag is None and source is not None:
                row.lag = max((messages[source, topic_name] or 0) - group.consumed, 0)
            groups[source, topic_name].append(row)
    topics = [
        TopicLag(
            **fields_of(topic),
            database=name,
            queues=each.queues.get(topic.topic),
            groups=groups.pop((name, topic.topic), []),
            recent=recent[name].get(topic.topic),
        )
        for name, each in reached.items()
        for topic in each.numbers.topics
    ]
    # Their producer isn't registered, or can't be told from others.
    unknown: dict[str, Any] = {each.name: None for each in dataclasses.fields(stats.TopicStats) if each.default == 0}
    for (_, name), rows in groups.items():
        topics.append(TopicLag(name, database=rows[0].database, queues=None, groups=rows, **unknown))
    _add_paces(topics, reached)
    return sorted(topics, key=lambda topic: (topic.topic, topic.database))


def _add_paces(topics: Iterable[TopicLag], reached: Mapping[str, DatabaseHealth]) -> None:
    """Set how fast each group consumes, and in how long it has caught up with what is sent meanwhile."""
    for topic in topics:
        sent = None if topic.messages is None else reached[topic.database].sent(topic)
        for group in topic.groups:
            group.rate = reached[group.database].consumed(group)
            if group.lag and group.rate is not None and sent is not None and group.rate > sent:
                group.eta = group.lag / (group.rate - sent) * 60


@dataclass(frozen=True, slots=True)
class _Charted:
    """Of what in one database samples are read: topics, and topics whose groups count.

    ``lagging`` are those whose groups may be falling behind, and at their producers.
    """

    topics: set[str] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)
    lagging: set[str] = field(default_factory=set)


def _charted(topics: Sequence[TopicLag], reached: Mapping[str, DatabaseHealth], most: int) -> dict[str, _Charted]:
    """Return by database of what samples are read: of all there is, or of what has the highest numbers now."""
    pairs = [(topic, group) for topic in topics for group in topic.groups]
    found = {name: _Charted() for name in reached}
    shown_topics, shown_pairs = topics, pairs
    if len(topics) + len(pairs) > _FEW:
        by_topic: Sequence[Callable[[TopicLag], float]] = (
            lambda topic: topic.undispatched or 0,
            lambda topic: (topic.messages is not None and reached[topic.database].sent(topic)) or 0,
        )
        by_group: Sequence[Callable[[tuple[TopicLag, GroupLag]], float]] = (
            lambda pair: pair[1].lag or 0,
            lambda pair: pair[1].rate or 0,
            lambda pair: pair[1].parked,
        )
        shown_topics = [topic for key in by_topic for topic in nlargest(most, topics, key)]
        shown_pairs = [pair for key in by_group for pair in nlargest(most, pairs, key)]
    for topic in shown_topics:
        found[topic.database].topics.add(topic.topic)
    for topic, group in shown_pairs:
        found[topic.database].topics.add(topic.topic)
        found[group.database].groups.add(group.topic)
    for topic, group in pairs:
        if (group.lag or 0) >= reached[group.database].thresholds.lag:
            found[topic.database].lagging.add(topic.topic)
            found[group.database].lagging.add(group.topic)
    return found


def _add_samples(
    database: Database, health: DatabaseHealth, charted: _Charted, times: list[dt.datetime], window: str
) -> None:
    """Read how the numbers were at the moments of the window, and in the last minutes."""
    minute = health.numbers.at.replace(second=0, microsecond=0)
    minutes = [minute - dt.timedelta(minutes=back) for back in range(_RECENT, -1, -1)] if charted.lagging else []
    lagging = list(charted.lagging)
    names = {"topics": list(charted.topics), "groups": list(charted.groups)}
    within = min(stats.WITHIN, stats.WINDOWS[window][1])
    of_window = stats.SAMPLES_OF(database.schema, edges=times, within=within, **names)
    of_minutes = stats.SAMPLES_OF(database.schema, edges=minutes, within=60.0, topics=lagging, groups=lagging)
    with database.read_only(_SECONDS) as connection:
        samples, recent = execute(connection, of_window, of_minutes)
    health.samples, health.recent = ([stats.StatsSample.read(text) for (text,) in rows] for rows in (samples, recent))


def _judge_lags(topic: TopicLag, reached: dict[str, DatabaseHealth], source_of: stats.SourceOf) -> Iterator[Diagnosis]:
    recent = {name: each.recent for name, each in reached.items()}
    for group in topic.groups:
        each = reached[group.database]
        if not group.lag or not workers.alive(each.workers):
            continue
        details = {"group": group.group, "topic": group.topic, "lag": group.lag}
        details |= {} if group.oldest_lag is None else {"age": group.oldest_lag}
        if not group.attended:
            yield each.finding("group.unconsumed", details)
            continue
        values = stats.lag(recent, group.database, group.topic, group.group, source_of)
        lags = [value for value in values if value is not None]
        grows = len(lags) >= each.thresholds.growing and lags == sorted(lags) and lags[0] < lags[-1] <= group.lag
        if grows and group.lag >= each.thresholds.lag:
            yield each.finding("group.lag", details | {"grown": int(lags[-1] - lags[0])})


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


def _tiles(
    reached: Sequence[DatabaseHealth], topics: Sequence[TopicLag], *, whole: bool
) -> tuple[dict[str, float | None], list[str]]:
    tiles: dict[str, float | None] = dict.fromkeys((*_SUMS, "oldest_pending", "throughput", "lag"))
    capped = []
    for tile, (kind, number, count) in _SUMS.items() if reached else ():
        rows = [row for each in reached for row in getattr(each.numbers, kind)]
        tiles[tile] = sum(getattr(row, number) for row in rows)
        capped += [tile] if any(count in row.capped for row in rows) else []
    waiting = [topic.oldest_undispatched for topic in topics if topic.oldest_undispatched is not None]
    lags = [group.lag for topic in topics for group in topic.groups if group.lag is not None]
    tiles |= {"oldest_pending": max(waiting, default=None), "lag": max(lags, default=None)}
    tiles["throughput"] = _throughput(reached)
    if not whole:
        # Of what couldn't be read there may be more, so that none isn't known.
        tiles = {name: value or None for name, value in tiles.items()}
        capped = [name for name, value in tiles.items() if value]
    return tiles, capped


def _throughput(reached: Sequence[DatabaseHealth]) -> float | None:
    """Return how many messages a minute there were since the newest sample that is at least a minute old."""
    rates: list[float | None] = []
    for each in reached:
        if each.numbers.topics and each.before is None:
            return None
        rates += [each.sent(topic) for topic in each.numbers.topics]
    return None if None in rates or not rates else sum(filter(None, rates))


# --- processes and their system ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TableSize:
    """One table of ours."""

    name: str
    rows: int
    bytes: int
    dead_rows: int
    vacuumed_at: dt.datetime | None


@dataclass(slots=True)
class DatabaseView:
    """One registered database; the URL has no password, ``oldest_transaction`` (of other sessions) is in seconds."""

    name: str
    url: str
    parts: list[str]
    server_version: str | None = None
    revisions: dict[str, str | None] = field(default_factory=dict)
    code_revisions: dict[str, str] = field(default_factory=dict)
    oldest_transaction: float | None = None
    tables: list[TableSize] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class System:
    """Describe the system that the console runs on."""

    version: str
    databases: list[DatabaseView]
    settings: dict[str, Any]


def _reports_in(database: Database) -> list[WorkerReport]:
    with database.read_only() as connection:
        return workers.workers_in(connection, database)


def why_unreachable(error: BaseException) -> str:
    """Return in one line why a database can't be reached; there is no password in it."""
    lines = message_of(getattr(error, "orig", None) or error).strip().splitlines()
    return lines[0] if lines else class_name(error)


def _unreachable(database: Database | AwayDatabase, error: BaseException) -> Diagnosis:
    subject = Subject(name=database.name, url=database.engine.url, settings=database.settings)
    return subject.finding("database.unreachable", {"error": why_unreachable(error)})


def _view(database: Database) -> DatabaseView:
    parts = sorted(database.parts)
    heads = {branch: chain.head(branch) for branch in ("common", *parts)}
    view = DatabaseView(database.name, address(database.engine.url), parts, code_revisions=heads)
    schema, now = database.schema, {"idle_transaction": 0.0, "running_transaction": 0.0}
    statements = (sql.SERVER(schema), sql.OPEN_TRANSACTIONS(schema, **now), sql.TABLE_SIZES(schema))
    try:
        with database.read_only() as connection:
            ((_, view.server_version, *_),), oldest, tables = execute(connection, *statements)
            view.revisions = migration.current(connection, schema)
    except UNREACHABLE as error:
        view.error = why_unreachable(error)
    else:
        view.oldest_transaction = oldest[0][1] if oldest else None
        view.tables = [TableSize(*row) for row in tables]
    return view


class HealthViews(Silences):
    """Show an operator the health of databases, and of the processes on them."""

    def overview(self, window: str = "1h", most: int = stats.MOST_SERIES) -> Overview:
        """Return the health of all databases, with series over ``window``: 1h, 6h, 24h or 7d.

        Of topics and groups, ``most`` have series of their own: those with the highest values; of more than two
        hundred, those with the highest values now.

        Raises:
            InvalidRequest: there is no such window.
        """
        reached: dict[str, DatabaseHealth] = {}
        findings = [_unreachable(each, each.error) for each in self.databases.away.values()]
        # The clock of the first database that answers is that of the charts.
        times: list[dt.datetime] = []
        stats.moments(window, dt.datetime.now(dt.UTC))
        for name, database in self.databases.items():
            try:
                reached[name] = _read(database, window, times)
            except UNREACHABLE as error:
                findings.append(_unreachable(database, error))
        source_of = _sources(reached)
        topics = _topics(reached, source_of)
        self._add_ages(topics, reached, source_of)
        for name, charted in _charted(topics, reached, most).items():
            try:
                _add_samples(self.databases[name], reached[name], charted, times, window)
            except UNREACHABLE:  # it has no series; that it is away is a finding of the next overview
                continue
        unreachable = [name for name in (*self.databases, *self.databases.away) if name not in reached]
        tiles, capped = _tiles(list(reached.values()), topics, whole=not unreachable)
        for each in reached.values():
            findings += each.findings
        for topic in topics:
            findings += _judge_lags(topic, reached, source_of)
        silences = [silence for each in reached.values() for silence in each.silences]
        samples = {name: each.samples for name, each in reached.items()}
        return Overview(
            at=next((each.numbers.at for each in reached.values()), dt.datetime.now(dt.UTC)),
            tiles=tiles,
            capped=capped,
            findings=self.shown(by_weight(silenced(findings, silences))),
            topics=topics,
            sagas=[
                SagaNumbers(**fields_of(saga), database=name)
                for name, each in reached.items()
                for saga in each.numbers.sagas
            ],
            series=stats.series(times, samples, source_of, whole=not unreachable, most=most) if times else [],
            workers=self.shown([one.row for each in reached.values() for one in each.workers if one.row.is_worker]),
            unreachable=unreachable,
        )

    def _add_ages(
        self, topics: Sequence[TopicLag], reached: Mapping[str, DatabaseHealth], source_of: stats.SourceOf
    ) -> None:
        """Set since when the groups wait whose producer's messages are in another database, as far as it answers."""
        lagging: dict[tuple[str, str], dict[tuple[str, str], GroupLag]] = defaultdict(dict)
        for group in (group for topic in topics for group in topic.groups if group.lag and group.oldest_lag is None):
            if (source := source_of(group.database, group.topic)) is not None:
                lagging[source, group.database][group.group, group.topic] = group
        for (source, name), groups in lagging.items():
            offsets = reached[name].numbers.offsets
            at = {(group, topic, queue): position for group, topic, queue, position in offsets}
            positions = [
                (*pair, queue, at.get((*pair, queue), 0))
                for pair in groups
                for queue in range(reached[source].queues.get(topic_of(pair[1]), 0))
            ]
            columns = dict(zip(_POSITIONS, map(list, zip(*positions, strict=True)), strict=True)) if positions else {}
            try:
                with self.databases[source].read_only(_SECONDS) as connection:
                    rows = sql.WAITING.read(connection, self.databases[source].schema, **columns) if positions else ()
            except UNREACHABLE:  # its ages stay unknown; that it is away is a finding of the next overview
                continue
            for row in rows:
                groups[row["group"], row["topic"]].oldest_lag = row["oldest_lag"]

    def producers_of(self, topic: str) -> list[str]:
        """Return the names of the databases that have the messages of a topic, as far as they can be read."""
        found = []
        for each in self.databases.having("producer"):
            try:
                with each.read_only() as connection:
                    topics = {name for name, *_ in execute(connection, sql.TOPICS(each.schema))[0]}
            except UNREACHABLE:  # the caller says that it isn't known
                continue
            found += [each.name] if topic_of(topic) in topics else []
        return found

    def work(self, topic: str, group: str, database: str | None = None, window: str = "1h") -> list[stats.Series]:
        """Return what the handlers of a group did in the minutes of ``window``: 1h, or one of each step of 6h, 24h, 7d.

        ``consumed`` and ``failed`` (messages and attempts a minute), and within how many seconds half of the calls
        ended (``p50``), and nearly all (``p95``). None where no sample was taken, or no worker had the group, and
        percentiles where there was no call. What all workers of all databases did is joined.

        Raises:
            InvalidRequest: there is no such window.
            UnknownDatabase: no database of that name.
            DatabaseUnreached: a database that may have the group can't be read.
            NotFound: neither an offset nor a sample knows the group.
        """
        times: list[dt.datetime] = []
        is_known = False

        def read(connection: Connection, each: Database) -> list[Row]:
            nonlocal is_known
            ((now,),) = execute(connection, NOW)[0]
            times[:] = times or stats.moments(window, now)[1:]
            path = ["work", topic, group]
            # A later sample would be of another minute than that of its moment.
            samples = stats.SAMPLES(each.schema, edges=times, within=60.0, path=path)
            rows, offsets = execute(connection, samples, stats.HAS_OFFSET(each.schema, group=group, topic=topic))
            is_known |= bool(offsets) or any(text for (text,) in rows)
            return rows

        unreached = self.databases.away_for(database)
        found = read_each(self.databases.having("consumer", database), read, unreached)
        if unreached:
            # A sum without what is there would be too low.
            raise DatabaseUnreached(unreached)
        if not is_known:
            raise NotFound(f"no group {group!r} of topic {topic!r} is known; see those of: outbox group list")
        minutes = zip(*([text and json.loads(text) for (text,) in rows] for rows in found.values()), strict=True)
        return stats.work(times, [workers.joined(filter(None, each)) for each in minutes])

    def workers(self) -> list[WorkerRow]:
        """Return the workers that run or were not ended in order, those that are alive first."""
        rows = [each.row for database in self.databases.values() for each in _reports_in(database)]
        return self.shown(sorted(rows, key=lambda row: not row.alive))

    def producers(self) -> list[ProducerRow]:
        """Return the processes that have sent within the last day, by producer group, with its active instances."""
        found = []
        for database in self.databases.having("producer"):
            with database.read_only() as connection:
                rows = sql.PRODUCERS.read(connection, database.schema)
            found += [ProducerRow(database.name, **row) for row in rows]
        # A message says by this name where it was sent.
        return found if self.addresses else [dataclasses.replace(row, name=MASK) for row in found]

    def handlers(self) -> list[HandlerRow]:
        """Return the functions registered on the living workers, by kind and topic."""
        rows = []
        for database in self.databases.values():
            with database.read_only() as connection:
                found = workers.merged(workers.workers_in(connection, database))
                held = sql.GROUP_STATES.read(connection, database.schema) if "consumer" in database.parts else []
            states = {(row["group"], row["topic"]): row["state"] for row in held}
            for row in found:
                state = states.get((row.group, row.topic), "running") if row.kind == "consumer" else None
                rows.append(dataclasses.replace(row, state=state))
        return self.shown(rows)

    def system(self) -> System:
        """Return what all of this runs on; a database that is away hides no other."""
        # Not by an import, which would be one of all that is above this layer.
        version: str = import_module("outbox").__version__
        settings: dict[str, Any] = dataclasses.asdict(next(iter(self.databases.values())).settings)
        views = [_view(database) for database in self.databases.values()]
        views += [
            DatabaseView(away.name, address(away.engine.url), [], error=why_unreachable(away.error))
            for away in self.databases.away.values()
        ]
        return System(version, self.shown(views), settings)
