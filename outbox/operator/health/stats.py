"""The numbers by topic and by group, now and over time: what `outbox stats`, the overview and the metrics show.

They are cheap to read. A count that stopped at ``LIMIT`` is named in ``capped``. A worker keeps a sample once a minute.
A counter only grows: its rate is the difference of two samples over the time between them. Where a sample is missing
the rate isn't known; nor is it where a counter has gone back (a restore).
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.consumer.meter import percentile
from outbox.database.execute import Row, Template, execute
from outbox.database.identity import source_identity, sources
from outbox.database.sql import NOW, plan_by_index, read_only
from outbox.dispatch.sql import Cursor, newest_cursor
from outbox.errors import InvalidRequest
from outbox.message.model import Status, behind, number_of
from outbox.operator.databases import Query
from outbox.operator.health import sql
from outbox.operator.health.rules import IN_ORDER, LIMIT, Thresholds
from outbox.text import feed_of, topic_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.settings import Settings

#: How often operators have moved groups in a queue: a part of `GroupStats`.
_MOVES = Query("""
-- group topic moves
SELECT consumer_group, topic, count(*) FROM {s}.consumer_passage GROUP BY 1, 2
""")

_IN_SAMPLE_OF_TOPIC = (
    "messages", "committed", "rolled_back", "checks", "undecided", "parked", "orphans", "undispatched",
    "oldest_undispatched", "scheduled", "exhausted", "capped",
)  # fmt: skip
_IN_SAMPLE_OF_SAGA = ("open", "compensating", "overdue", "oldest_overdue", "capped")
_IN_SAMPLE_OF_GROUP = (
    "consumed", "lag", "oldest_lag", "failed", "waiting", "taken", "parked", "paused", "breaker_open",
    "differences", "unfollowed", "moves", "capped",
)  # fmt: skip


@dataclass(slots=True)
class TopicStats:
    """One topic on the producer's side; ages in seconds. None: unknown, or, of an age, that there is no such message.

    ``undecided``: halves without a decision; of them ``parked`` are over their checks, the first of them ``parked_id``
    since ``oldest_parked`` seconds; ``orphans`` are due for a check, and of these ``unasked`` were never checked so
    far. ``undispatched``: committed, but not a message yet. ``scheduled``: committed for later, the next at
    ``next_due``, or held by a pause of their topic; ``overdue`` of them should have been released, the first
    ``oldest_overdue`` seconds ago. ``messages``: all there ever were. ``committed`` and ``rolled_back``: halves that
    were decided so, as far as dispatch has come; ``checks``: how often a checker or a fence was asked. These three only
    grow, and are counted from the upgrade on that brought them. ``exhausted``: sent again as often as the settings say,
    and still not in a group's inbox; the first of them, ``exhausted_id``, in ``exhausted_group``, since
    ``oldest_exhausted`` seconds.
    """

    topic: str
    undecided: int | None = 0
    parked: int | None = 0
    orphans: int | None = 0
    unasked: int | None = 0
    oldest_undecided: float | None = None
    oldest_parked: float | None = None
    parked_id: UUID | None = None
    undispatched: int | None = 0
    oldest_undispatched: float | None = None
    scheduled: int | None = 0
    next_due: dt.datetime | None = None
    overdue: int | None = 0
    oldest_overdue: float | None = None
    messages: int | None = 0
    committed: int | None = 0
    rolled_back: int | None = 0
    checks: int | None = 0
    exhausted: int | None = 0
    oldest_exhausted: float | None = None
    exhausted_id: UUID | None = None
    exhausted_group: str | None = None
    capped: list[str] = field(default_factory=list)


@dataclass(slots=True)
class GroupStats:
    """One group of a topic on the consumer's side.

    ``consumed``: how far the group has come, over all queues. ``lag``: messages after that; None where the
    topic's producer is in another database. ``oldest_lag``: for how many seconds the first of them has been in its
    queue. ``failed``: will be retried, the oldest due one since ``oldest_due`` seconds; ``overdue`` of them should have
    been retried long ago. ``waiting``: for an earlier message of their key. ``taken``: by clients, under leases that
    may have ended, ``lapsed`` of them long ago. ``parked``: waiting for an operator, and not discarded; the oldest
    message of them, ``parked_id``, since ``oldest_parked`` seconds. ``paused``: by an operator.
    ``breaker_open``: everything fails, and one message at a time is tried. ``lost``: messages that the group had read
    and the producer has lost; ``lost_id`` is one, found with the others ``newest_loss`` seconds ago.
    ``differences``: what the reconciliation that follows the log knows to differ now, with a backlog past the grace
    period; ``unfollowed``: its last pass ended so many seconds ago. Both are None where none follows.
    ``moves``: how often an operator has moved it in a queue; what it then passed by, it hasn't consumed.
    """

    group: str
    topic: str
    consumed: int = 0
    lag: int | None = None
    oldest_lag: float | None = None
    failed: int = 0
    oldest_due: float | None = None
    overdue: int = 0
    waiting: int = 0
    taken: int = 0
    lapsed: int = 0
    parked: int = 0
    oldest_parked: float | None = None
    parked_id: UUID | None = None
    paused: bool = False
    breaker_open: bool = False
    lost: int = 0
    newest_loss: float | None = None
    lost_id: UUID | None = None
    differences: int | None = None
    unfollowed: float | None = None
    moves: int = 0
    capped: list[str] = field(default_factory=list)


@dataclass(slots=True)
class SagaStats:
    """The flows of a saga that haven't ended.

    ``open``: all of them. ``compensating``: its done steps are being undone. ``overdue``: a participant hasn't answered
    in time; the first of them, ``overdue_id``, since ``oldest_overdue`` seconds, for the command ``overdue_message`` of
    step ``overdue_step``.
    """

    saga: str
    open: int = 0
    compensating: int = 0
    overdue: int = 0
    oldest_overdue: float | None = None
    overdue_id: UUID | None = None
    overdue_step: str | None = None
    overdue_message: UUID | None = None
    capped: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Stats:
    """The numbers of one database at one moment of its clock; ``offsets`` are the rows of `sql.OFFSETS`."""

    at: dt.datetime
    topics: list[TopicStats]
    groups: list[GroupStats]
    sagas: list[SagaStats] = field(default_factory=list)
    offsets: list[Row] = field(default_factory=list)


def stats(connection: Connection, settings: Settings, parts: Collection[str], *, seconds: float = 10.0) -> Stats:
    """Return the numbers of the parts (``producer``, ``consumer``) whose tables the database has.

    ``connection`` must not be in a transaction; this runs one that only reads, in which no statement takes longer than
    ``seconds``.
    """
    schema, limits = settings.schema, Thresholds()
    topics: dict[str, TopicStats] = {}
    groups: list[GroupStats] = []
    sagas: list[SagaStats] = []
    heads: list[Row] = []
    offsets: list[Row] = []
    with connection.begin():
        *_, ((at,),) = execute(connection, read_only(seconds), plan_by_index(), NOW)
        if "producer" in parts:
            undecided, scheduled, exhausted, totals, heads = execute(
                connection,
                sql.UNDECIDED(schema, limit=LIMIT),
                sql.SCHEDULED(schema, undispatched=limits.undispatched, limit=LIMIT),
                sql.EXHAUSTED(schema, limit=LIMIT),
                sql.TOTALS(schema),
                sql.HEADS(schema),
            )
            for name, _, position in heads:
                topic = topics.setdefault(name, TopicStats(name))
                topic.messages = (topic.messages or 0) + number_of(position)
            counts = {
                "undecided": sql.UNDECIDED.named(undecided),
                "scheduled": sql.SCHEDULED.named(scheduled),
                "exhausted": sql.EXHAUSTED.named(exhausted),
                "undispatched": undispatched(connection, schema),
            }
            for row in itertools.chain(*counts.values(), sql.TOTALS.named(totals)):
                topic = topics.setdefault(row["topic"], TopicStats(row["topic"]))
                for column, value in row.items():
                    setattr(topic, column, value)
            # The limit is one for all topics: where it is reached, none of the counts is known to be all.
            capped = [count for count, rows in counts.items() if sum(row[count] for row in rows) >= LIMIT]
            for topic in topics.values():
                topic.capped = list(capped)
            rows = sql.SAGAS.named(execute(connection, sql.SAGAS(schema, limit=LIMIT))[0])
            # As of topics, the limit is one for all.
            full = sum(row["open"] for row in rows) >= LIMIT
            sagas = [SagaStats(**row, capped=["open", "compensating", "overdue"] if full else []) for row in rows]
        if "consumer" in parts:
            offsets, failed, lost, followed, moved = execute(
                connection,
                sql.OFFSETS(schema),
                sql.FAILURES(schema, retry=limits.retry, limit=LIMIT),
                sql.LOSSES(schema, lost=limits.lost),
                sql.FOLLOWED(schema, in_order=sorted(IN_ORDER)),
                _MOVES(schema),
            )
            parts_of: dict[tuple[str, str], dict[str, Any]] = defaultdict(dict)
            for row in (*sql.LOSSES.named(lost), *sql.FOLLOWED.named(followed), *_MOVES.named(moved)):
                parts_of[row["group"], row["topic"]] |= row
            groups = [
                GroupStats(
                    **row | parts_of.get((row["group"], row["topic"]), {}),
                    capped=[each.value for each in Status if each.open and row[each] >= LIMIT],
                )
                for row in sql.FAILURES.named(failed)
            ]
            if behind_at := _add_lags(groups, offsets, heads, _feeds_of_others(connection, schema) if heads else ()):
                names = ("groups", "topics", "queues", "positions")
                columns = dict(zip(names, map(list, zip(*behind_at, strict=True)), strict=True))
                rows = sql.WAITING.named(execute(connection, sql.WAITING(schema, **columns))[0])
                ages = {(row["group"], row["topic"]): row["oldest_lag"] for row in rows}
                for group in groups:
                    group.oldest_lag = ages.get((group.group, group.topic))
    return Stats(at, [topics[name] for name in sorted(topics)], groups, sagas, offsets)


def as_sample(stats: Stats, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the statistics as they are kept once a minute, without zeros and unknown numbers.

    ``at``; ``topics`` by name; ``groups`` by topic and name; ``sagas`` by name; ``totals``: the numbers of the series
    in all, which continue those of ``before``, the newest sample. The worker that takes the sample adds ``work``, by
    topic and group (`outbox.operator.health.workers.work_by_group`).
    """
    groups: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for group in stats.groups:
        groups[group.topic][group.group] = _known(group, _IN_SAMPLE_OF_GROUP)
    topics = {topic.topic: _known(topic, _IN_SAMPLE_OF_TOPIC) for topic in stats.topics}
    sagas = {saga.saga: _known(saga, _IN_SAMPLE_OF_SAGA) for saga in stats.sagas}
    sample = {"at": stats.at.isoformat(), "topics": topics, "groups": groups, "sagas": sagas}
    return sample | {"totals": totals(sample, before)}


def _known(row: object, names: Collection[str]) -> dict[str, Any]:
    # A lag of zero is kept: it is something else than a lag that isn't known.
    return {name: value for name in names if (value := getattr(row, name)) or (name == "lag" and value is not None)}


#: Where a group stands in a queue that has more: group, topic, queue, position.
_Behind = tuple[str, str, int, int]


def undispatched(connection: Connection, schema: str, *, each: bool = False) -> list[dict[str, Any]]:
    """Return the rows of `sql.undispatched` after the newest cursor."""
    (cursors,) = execute(connection, newest_cursor(schema))
    cursor = Cursor(*cursors[0]) if cursors else None
    query = sql.undispatched(cursor, each=each)
    values = dataclasses.asdict(cursor) if cursor else {}
    return query.named(execute(connection, query(schema, limit=LIMIT, **values))[0])


def _feeds_of_others(connection: Connection, schema: str) -> Collection[str]:
    """Return the names under which groups keep topics of other databases than this one, which sends as well."""
    ((own, _),), rows = execute(connection, source_identity(schema), sources(schema))
    return {feed_of(topic, number) for topic, number, id_, _ in rows if id_ != own}


def _add_lags(
    groups: Iterable[GroupStats], offsets: Iterable[Row], heads: Iterable[Row], others: Collection[str]
) -> list[_Behind]:
    """Set how far behind the groups are; return where they stand in the queues that have more.

    The messages of the topics that are kept under names in ``others`` are in another database.
    """
    short_of: list[_Behind] = []
    reached: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    ends: dict[str, dict[int, int]] = defaultdict(dict)
    for group, topic, queue, position in offsets:
        reached[group, topic][queue] = position
    for topic, queue, position in heads:
        ends[topic][queue] = position
    for each in groups:
        positions = reached[each.group, each.topic]
        each.consumed = sum(map(number_of, positions.values()))
        if topic_of(each.topic) in ends and each.topic not in others:
            queues = ends[topic_of(each.topic)]
            lags = {queue: behind(positions.get(queue, 0), end) for queue, end in queues.items()}
            each.lag = sum(lags.values())
            at = ((each.group, each.topic, queue, positions.get(queue, 0)) for queue, lag in lags.items() if lag)
            short_of.extend(at)
    return short_of


# --- over time ---------------------------------------------------------------------------------------------------

#: The first sample at or after each of these moments, ``within`` seconds, that was taken, and of it what is at a
#: ``path``. Rows: one for each moment, in order: ``(statistics as JSON or NULL,)``.
SAMPLES = Template("""
SELECT (s.stats #> %(path)s::text[])::text
  FROM unnest(%(edges)s::timestamptz[]) WITH ORDINALITY e (edge, number)
  LEFT JOIN LATERAL (SELECT stats FROM {s}.stats_sample
                      WHERE sampled_at >= edge AND sampled_at < edge + make_interval(secs => %(within)s)
                        AND totals ? 'at'
                      ORDER BY sampled_at LIMIT 1) s ON true
 ORDER BY e.number
""")

# What has ten thousand topics is decompressed once a sample, and not for each of those that are asked for.
_PARTS = """coalesce(
                     (SELECT jsonb_object_agg(name, whole #> ARRAY['{kind}', name]) FROM unnest(%({kind})s::text[]) name
                       WHERE whole #> ARRAY['{kind}', name] IS NOT NULL), '{{}}')"""

#: The same of each of these moments in all, and of these ``topics``, and the ``groups`` of topics of these names. Rows:
#: one for each moment, in order: ``(sample as JSON or NULL,)``.
SAMPLES_OF = Template(f"""
SELECT (s.totals || jsonb_build_object('topics', {_PARTS.format(kind="topics")},
                                       'groups', {_PARTS.format(kind="groups")}))::text
  FROM unnest(%(edges)s::timestamptz[]) WITH ORDINALITY e (edge, number)
  LEFT JOIN LATERAL (SELECT totals, stats FROM {{s}}.stats_sample
                      WHERE sampled_at >= edge AND sampled_at < edge + make_interval(secs => %(within)s)
                        AND totals ? 'at'
                      ORDER BY sampled_at LIMIT 1) s ON true
 CROSS JOIN LATERAL (SELECT s.stats || '{{}}' AS whole OFFSET 0) w
 ORDER BY e.number
""")

#: The newest sample that was taken a minute before ``at`` or earlier, at most ``minutes``; and the first one since
#: ``since``. Rows: one: ``(statistics as JSON or NULL, the same)``.
BEFORE = Template("""
SELECT (SELECT stats::text FROM {s}.stats_sample
         WHERE sampled_at > %(at)s::timestamptz - make_interval(mins => %(minutes)s)
           AND (totals ->> 'at')::timestamptz <= %(at)s::timestamptz - interval '1 minute'
         ORDER BY sampled_at DESC LIMIT 1),
       (SELECT stats::text FROM {s}.stats_sample
         WHERE sampled_at >= %(since)s::timestamptz AND totals ? 'at' ORDER BY sampled_at LIMIT 1)
""")

#: Find an offset of a group in a topic, from whichever source. Rows: one, or none.
HAS_OFFSET = Template("""
SELECT 1 FROM {s}.consumer_offset
 WHERE consumer_group = %(group)s
   AND (topic = %(topic)s OR topic > %(topic)s || '@' AND topic < %(topic)s || 'A') LIMIT 1
""")

#: For each window: how long it is, and the step of its values (seconds).
WINDOWS: Mapping[str, tuple[int, int]] = {
    "1h": (3600, 60),
    "6h": (6 * 3600, 300),
    "24h": (24 * 3600, 900),
    "7d": (7 * 24 * 3600, 7200),
}
#: A sample stands for a moment if it was taken so many seconds after it, and before the next moment.
WITHIN = 300.0
#: The most topics, and groups, that have series of their own: those with the highest values.
MOST_SERIES = 12

Values = list[float | None]


@dataclass(frozen=True, slots=True)
class Series:
    """Values over time, for a chart: one for each of ``times``, None where nothing is known."""

    name: str
    unit: str
    times: list[dt.datetime]
    values: list[float | None]


@dataclass(frozen=True, slots=True)
class RecentDecisions:
    """How many halves of a topic were committed and rolled back, and how many checks were put, in so many seconds."""

    seconds: float
    committed: int
    rolled_back: int
    checks: int


#: The producer's database of a topic that a group of another database consumes; None if that isn't known.
SourceOf = Callable[[str, str], str | None]


@dataclass(frozen=True, slots=True)
class StatsSample:
    """The numbers of one database at one moment: ``topics`` by name, ``groups`` by topic and name; see `as_sample`.

    Of topics and groups, a sample may have been read in part; ``totals`` are of all there were.
    """

    at: dt.datetime
    topics: Mapping[str, Mapping[str, Any]]
    groups: Mapping[str, Mapping[str, Mapping[str, Any]]]
    totals: Mapping[str, Any]

    @classmethod
    def read(cls, text: str | None) -> StatsSample | None:
        """Return the sample of a row; None where it is empty: the worker that began it did not finish it."""
        stored = {} if text is None else json.loads(text)
        if "at" not in stored:
            return None
        return cls(dt.datetime.fromisoformat(stored["at"]), *(stored.get(name, {}) for name in _OF_SAMPLE))


@dataclass(frozen=True, slots=True)
class _Kind:
    """One series in all, and one for each topic or group: of which number of a sample, or of its rate."""

    name: str
    number: str
    of_groups: bool = False
    unit: str = "messages"
    rate: bool = False
    total: bool = True
    parts: bool = True


_KINDS = (
    _Kind("throughput", "messages", unit="messages/min", rate=True),
    _Kind("committed", "committed", unit="halves/min", rate=True, parts=False),
    _Kind("rolled_back", "rolled_back", unit="halves/min", rate=True, parts=False),
    _Kind("checks", "checks", unit="checks/min", rate=True, parts=False),
    _Kind("backlog", "undispatched"),
    _Kind("undecided", "undecided", unit="halves", parts=False),
    _Kind("consumed", "consumed", of_groups=True, unit="messages/min", rate=True),
    _Kind("lag", "lag", of_groups=True, total=False),
    _Kind("failed", "failed", of_groups=True, parts=False),
    _Kind("dead", "parked", of_groups=True),
)

#: What is counted of the work of a group in a minute: by which names, of which part of a sample.
_WORK = (("consumed", "done", "messages"), ("failed", "failed", "attempts"))

#: Of what a sample has numbers: the rest of a `StatsSample`.
_OF_SAMPLE = ("topics", "groups", "totals")
#: The samples of a database at some moments; None is a gap. And those of each database.
OverTime = Sequence[StatsSample | None]
Samples = Mapping[str, OverTime]


def totals(sample: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the numbers of a sample in all; a counter grows by what its parts have grown since ``before``.

    So neither a group that begins at the end of its topic, nor one that is moved or deleted makes a peak. Where all
    have gone back the counter stays; ``back``, how often that has happened to each, tells that the rate isn't known.
    """
    past_totals = (before or {}).get("totals", {})
    found: dict[str, Any] = {"back": dict(past_totals.get("back", {}))}
    for kind in _KINDS:
        parts = _parts(kind, sample)
        if not kind.total or not parts:
            continue
        numbers = {part: each.get(kind.number, 0) for part, each in parts.items()}
        if not kind.rate or before is None or "at" not in before:
            found[kind.number] = sum(numbers.values())
        else:
            past = _parts(kind, before)
            # A topic that wasn't there had no messages. A group that wasn't there may begin anywhere.
            known = [part for part in numbers if _goes_on(past.get(part), parts[part]) or not kind.of_groups]
            grown = [numbers[part] - past.get(part, {}).get(kind.number, 0) for part in known]
            more = [each for each in grown if each >= 0]
            found[kind.number] = past_totals.get(kind.number, 0) + sum(more)
            if not more and past.keys() & numbers.keys():
                found["back"][kind.number] = found["back"].get(kind.number, 0) + 1
    return found


def _goes_on(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> bool:
    """Tell whether a group was there, and wasn't moved by an operator since."""
    return before is not None and before.get("moves") == after.get("moves")


def _parts(kind: _Kind, sample: Mapping[str, Any]) -> Mapping[object, Mapping[str, Any]]:
    if not kind.of_groups:
        topics: Mapping[object, Mapping[str, Any]] = sample["topics"]
        return topics
    return {(topic, group): each for topic, groups in sample["groups"].items() for group, each in groups.items()}


def moments(window: str, now: dt.datetime) -> list[dt.datetime]:
    """Return the moments of a window, and one more before its first, since a rate needs two.

    Raises:
        InvalidRequest: there is no such window.
    """
    if window not in WINDOWS:
        raise InvalidRequest(f"window = {window!r} must be one of {', '.join(WINDOWS)}", "window")
    seconds, step = WINDOWS[window]
    last = int(now.timestamp()) // step * step
    return [dt.datetime.fromtimestamp(last - step * back, dt.UTC) for back in range(seconds // step, -1, -1)]


def series(
    times: list[dt.datetime], samples: Samples, source_of: SourceOf, *, whole: bool = True, most: int = MOST_SERIES
) -> list[Series]:
    """Return the series of a window; ``times`` has one moment more before them.

    Unless the samples are the ``whole``, those of all databases, nothing is known in all.

    In all: ``throughput``, ``consumed`` (messages a minute), ``committed``, ``rolled_back`` (halves a minute),
    ``checks`` (a minute), ``backlog``, ``undecided``, ``failed``, ``dead``; of the
    topics and groups with the highest values ``throughput/TOPIC``, ``backlog/TOPIC``, ``consumed/TOPIC/GROUP``,
    ``lag/TOPIC/GROUP`` and ``dead/TOPIC/GROUP``.
    """
    if all(not each or each[-1] is None for each in samples.values()):
        # The sample of this moment is still to be taken.
        times, samples = times[:-1], {name: each[:-1] for name, each in samples.items()}
    known = {name: each for name, each in samples.items() if any(each)}
    found: dict[str, tuple[str, Values]] = {}
    for kind in _KINDS:
        if kind.total:
            total = _sum(_numbers(kind, each, in_all) for each in known.values() if (in_all := _in_all(kind, each)))
            found[kind.name] = (kind.unit, total if whole and total else [None] * len(times))
        if kind.parts:
            in_each = [_values(kind, known, name, source_of) for name in known]
            names = sorted({part for each in in_each for part in each})
            parts = {part: _sum(each[part] for each in in_each if part in each) for part in names}
            found |= {f"{kind.name}/{part}": (kind.unit, parts[part]) for part in _highest(parts, most)}
    return [Series(name, unit, times[1:], values[1:]) for name, (unit, values) in found.items()]


def work(times: list[dt.datetime], minutes: Sequence[Mapping[str, Any] | None]) -> list[Series]:
    """Return the series of what the handlers of a group did in each minute, from their sums; None is a gap."""

    def made(name: str, unit: str, value: Callable[[Mapping[str, Any]], float | None]) -> Series:
        return Series(name, unit, times, [None if each is None else value(each) for each in minutes])

    counts = [made(name, f"{unit}/min", itemgetter(key)) for name, key, unit in _WORK]
    return counts + [made(f"p{share}", "s", partial(_within, share / 100)) for share in (50, 95)]


def _within(share: float, minute: Mapping[str, Any]) -> float | None:
    return percentile(minute["calls"], share)


def recent_decisions(now: Stats, first: StatsSample | None) -> dict[str, RecentDecisions]:
    """Return by topic the decisions since a sample; nothing where they are unknown."""
    if first is None:
        return {}
    seconds, found = (now.at - first.at).total_seconds(), {}
    for topic in now.topics:
        before = first.topics.get(topic.topic, {})
        grown = [getattr(topic, name) - before.get(name, 0) for name in ("committed", "rolled_back", "checks")]
        if seconds > 0 and min(grown) >= 0:
            found[topic.topic] = RecentDecisions(seconds, *grown)
    return found


def _values(kind: _Kind, known: Samples, name: str, source_of: SourceOf) -> dict[str, Values]:
    """Return the values of each topic, or of each group, of one database."""
    samples = [sample for sample in known[name] if sample]
    if not kind.of_groups:
        topics = {topic for sample in samples for topic in sample.topics}
        return {topic: _numbers(kind, known[name], _of(known[name], topic)) for topic in topics}
    pairs = {(topic, group) for sample in samples for topic in sample.groups for group in sample.groups[topic]}
    if kind.number == "lag":
        return {f"{topic}/{group}": lag(known, name, topic, group, source_of) for topic, group in pairs}
    return {f"{topic}/{group}": _numbers(kind, known[name], _of(known[name], topic, group)) for topic, group in pairs}


_Counts = Mapping[str, Any]


def _in_all(kind: _Kind, samples: OverTime) -> list[_Counts | None]:
    """Return the numbers in all; nothing where there is none of this kind."""
    known: list[_Counts | None] = [None if sample is None else sample.totals for sample in samples]
    return known if any(kind.number in each for each in known if each) else []


def _of(samples: OverTime, topic: str, group: str | None = None) -> list[_Counts | None]:
    return [counts(sample, topic, group) for sample in samples]


def _numbers(kind: _Kind, samples: OverTime, known: Sequence[_Counts | None]) -> Values:
    values: Values = [None if each is None else each.get(kind.number, 0) for each in known]
    if not kind.rate:
        return values
    # Between two moments it may have gone back, and beyond where it was again; or an operator has moved the group.
    restarts = [sample and sample.totals.get("back", {}).get(kind.number) for sample in samples]
    moves = [None if each is None else each.get("moves") for each in known]
    return _rates(samples, values, list(zip(restarts, moves, strict=True)))


def counts(sample: StatsSample | None, topic: str, group: str | None = None) -> Mapping[str, Any] | None:
    """Return the numbers of a topic, or of one of its groups, in a sample; None where they aren't known."""
    if sample is None:
        return None
    # A topic that wasn't there had no messages. A group that wasn't there may begin anywhere.
    return sample.topics.get(topic, {}) if group is None else sample.groups.get(topic, {}).get(group)


def _rates(samples: OverTime, counts: Values, marks: Sequence[object]) -> Values:
    """Return by how much a minute counts have grown, where they are known, and ``marks`` are the same."""
    rates: Values = [None]
    each_pair = itertools.pairwise(zip(samples, counts, marks, strict=True))
    for (before, earlier, mark), (after, later, same_mark) in each_pair:
        if before is None or after is None or earlier is None or later is None:
            rates.append(None)
            continue
        minutes = (after.at - before.at).total_seconds() / 60
        is_known = minutes > 0 and later >= earlier and mark == same_mark
        rates.append((later - earlier) / minutes if is_known else None)
    return rates


def lag(known: Samples, name: str, topic: str, group: str, source_of: SourceOf) -> Values:
    """Return the lag of a group in the samples of a database, with those of its topic's producer."""
    source = source_of(name, topic)
    heads = known.get(source) if source else None
    values: Values = []
    for sample, head in zip(known[name], heads or [None] * len(known[name]), strict=True):
        own, messages = counts(sample, topic, group), (counts(head, topic_of(topic)) or {}).get("messages")
        behind = None if own is None or messages is None else max(messages - own.get("consumed", 0), 0)
        values.append(own.get("lag", behind) if own else behind)
    return values


def _sum(found: Iterable[Values]) -> Values:
    """Add up values; unknown where one of them is."""
    return [None if None in row else sum(filter(None, row)) for row in zip(*found, strict=True)]


def _highest(parts: Mapping[str, Values], most: int) -> list[str]:
    """Return the parts with the highest values, in the order of their names."""
    by_height = sorted(parts, key=lambda part: -max((value for value in parts[part] if value is not None), default=0))
    return sorted(by_height[:most])
