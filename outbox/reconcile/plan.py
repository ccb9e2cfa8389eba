"""Plan a comparison: which ranges need not be read, where the others are cut, whether digests pay, what it costs.

Every choice comes with a sentence, which is shown.

Costs are measured constants. A message is a row of each side: a half with its op and its message, and a row of the
inbox. Times are of processors, of both servers and of this process together, in microseconds;
``python -m benchmarks --only reconcile_cost`` measures them anew. Another machine is slower or faster by a factor,
which changes no choice: only ratios do.

A range differs if one of the differences is in it. Where they are scattered, of which nothing else is known, a range
with ``m`` of them on average has one with the probability 1 - exp(-m), so that the share of sampled ranges that differ
tells m. To digest ranges that differ once more, cut up, saves nothing: a sample chooses their size well enough.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import SystemRandom
from uuid import UUID

from outbox.database.execute import Row, Template, execute
from outbox.reconcile import sql
from outbox.reconcile.job import FIRST_ID, EngineName, Job, Outcome, Pair, Part, Range, Tier, described
from outbox.reconcile.rows import Estimate, Rules
from outbox.reconcile.source import Snapshot, Snapshots, reaching
from outbox.text import counted, duration

#: Rows of a side in a bucket, where nothing is known of the differences: small, so that little is read for one.
_ROWS_OF_BUCKET = 60
#: The same between settled ranges. Most of its rows differed before and will again: all but a few rows around
#: each difference get settled, and the next night reads next to nothing for it.
_ROWS_OF_SMALL_BUCKET = 50
#: Up to so many rows between settled ranges their ids are read to cut them.
_FEW_ROWS = 2_000_000
#: The same where nothing is settled: of so few, the pages of a table that has several topics say little of the rest.
_FEW_UNSETTLED = 100_000
#: Rows of a side in a range that is sampled: so few that what lies together is told from what is scattered.
SAMPLE_ROWS = 100
#: For so many messages one range is sampled, which costs a hundredth of reading them; and so many at least, or none.
_MESSAGES_OF_SAMPLE, _FEWEST_SAMPLES, _MOST_SAMPLES = 3_000, 8, 512
#: Rows of a side in a task: bounds the memory, and is worth a task's overhead.
ROWS_OF_TASK = 400_000
#: Below so many rows of a side, reading them is as fast as digesting them.
_WORTH_DIGESTS = 20_000
#: Points by which the rows of a range are reckoned.
POINTS = 2_000
#: RunIds in one statement: each range is a subquery.
_RANGES_OF_TASK = 200
_BYTES_OF_ROW = 250


#: About how many rows each side has.
Size = dict[Part, int]


def size_of(snapshots: Snapshots) -> Size:
    """Return about how many halves and inbox rows the databases have, by their statistics."""
    return {"producer": rows_of("producer", snapshots.producer), "consumer": rows_of("consumer", snapshots.consumer)}


def rows_of(part: Part, snapshot: Snapshot) -> int:
    """Return about how many rows one of our sides has."""
    with reaching(snapshot.access):
        (((rows, size),),) = execute(snapshot.connection, sql.SIZE[part](snapshot.access.schema))
    return int(rows) or int(size) // _BYTES_OF_ROW


def points(snapshots: Snapshots, size: Size, count: int) -> list[UUID]:
    """Return about ``count`` ids that are evenly spread over the larger side, in order."""
    return _sorted(_read(snapshots, size, sql.SAMPLE, points=count)) if count > 0 else []


def points_between(
    snapshots: Snapshots, size: Size, pair: Pair, gaps: Sequence[Range], settled: int, bucket: int | None
) -> list[UUID]:
    """Return the ids that cut ``gaps`` of a pair into ranges to be digested, in order.

    ``settled`` is how many messages lie in the settled ranges between them, ``bucket`` how many rows of a side a range
    is to have, None if nothing tells.
    """
    larger = max(size.values())
    rows = larger - settled
    if rows > (_FEW_ROWS if settled else _FEW_UNSETTLED):
        return points(snapshots, size, min(larger // (bucket or _ROWS_OF_BUCKET), MOST_BUCKETS) - 1)
    step = max(rows // MOST_BUCKETS, _ROWS_OF_SMALL_BUCKET if settled else bucket or _ROWS_OF_BUCKET)
    return _sorted(_read(snapshots, size, sql.SAMPLE_RANGES, **sql.bounds_of(gaps), step=step, group=pair.group))


def sampled_ranges(
    snapshots: Snapshots, size: Size, pair: Pair, gaps: Sequence[Range], at: Sequence[UUID], rows: int
) -> list[Range]:
    """Return a few small ranges, spread over gaps with about so many rows of a side; none where that is few.

    ``at`` are points that are evenly spread over the larger side.
    """
    count = min(rows // _MESSAGES_OF_SAMPLE, _MOST_SAMPLES)
    if count < _FEWEST_SAMPLES:
        return []
    at = [point for point in at if within(point, gaps)]
    # Anywhere between two of them: what differs may be as evenly spread as they are.
    chance = SystemRandom()
    steps = range(0, len(at) - 1, max(-(-len(at) // count), 1))
    firsts = [UUID(int=chance.randrange(at[step].int, at[step + 1].int)) for step in steps]
    found = _read(snapshots, size, sql.RANGE_ENDS, firsts=sql.as_array(firsts), rows=SAMPLE_ROWS, group=pair.group)
    chosen: list[Range] = []
    before = FIRST_ID
    for first, end in sorted((first, end) for first, end in found if end is not None):
        if first >= before and within(first, gaps) and within(UUID(int=end.int - 1), gaps):
            chosen.append(Range(first, end))
            before = end
    return chosen


def unsampled(messages: int) -> Digesting:
    """Return what it comes to to digest so few messages that nothing was sampled, if hardly any differ."""
    return known_ranges(messages, max(messages // _ROWS_OF_BUCKET, 1), 0, _ROWS_OF_BUCKET)


def between_settled(messages: int, gaps: int) -> Digesting:
    """Return what it comes to to compare so many messages between settled ranges: of each gap one range differs."""
    buckets = max(min(messages // _ROWS_OF_SMALL_BUCKET, MOST_BUCKETS), gaps)
    return known_ranges(messages, buckets, gaps, _ROWS_OF_SMALL_BUCKET)


def within(id_: UUID, ranges: Sequence[Range]) -> bool:
    """Does an id lie in one of these ranges, which are in order?"""
    at = bisect_right(ranges, id_, key=lambda each: each.first) - 1
    return at >= 0 and id_ in ranges[at]


def rows_within(gaps: Sequence[Range], at: Sequence[UUID], size: Size) -> int:
    """Return about how many rows of a side ranges have, by points that are evenly spread over the larger side."""
    return sum(rows for _, rows in weighed(gaps, at, {_larger(size): max(size.values())}))


def _larger(size: Size) -> Part:
    return "producer" if size["producer"] >= size["consumer"] else "consumer"


def _sorted(rows: Iterable[Row]) -> list[UUID]:
    return sorted({row[0] for row in rows})


def _read(snapshots: Snapshots, size: Size, question: Mapping[Part, Template], **values: object) -> Sequence[Row]:
    """Return what a question to the larger side is answered."""
    part = _larger(size)
    snapshot = snapshots.of[part]
    with reaching(snapshot.access):
        return execute(snapshot.connection, question[part](snapshot.access.schema, **values))[0]


def cut(ranges: Iterable[Range], at: Sequence[UUID]) -> list[Range]:
    """Cut ranges, which are in order, at points, which are too."""
    pieces: list[Range] = []
    for first, end in ranges:
        edges = [first, *at[bisect_right(at, first) : len(at) if end is None else bisect_left(at, end)]]
        pieces += [Range(begin, stop) for begin, stop in zip(edges, [*edges[1:], end], strict=True)]
    return pieces


def without(whole: Range, settled: Sequence[Range]) -> list[Range]:
    """Return the rest of a range without those inside it, which are in order and don't overlap."""
    gaps, begin = [], whole.first
    for first, end in settled:
        if first > begin:
            gaps.append(Range(begin, first))
        if end is None:
            return gaps
        begin = end
    if whole.end is None or begin < whole.end:
        gaps.append(Range(begin, whole.end))
    return gaps


def weighed(gaps: Sequence[Range], at: Sequence[UUID], size: Size) -> list[tuple[Range, int]]:
    """Cut ranges into pieces that bound a task, by points that are evenly spread over the rows.

    Returns them with the number of rows on both sides that they have, about.
    """
    rows_of_point = sum(size.values()) / max(len(at), 1)
    step = max(int(2 * ROWS_OF_TASK / max(rows_of_point, 1)), 1)

    def index(bound: UUID | None) -> int:
        return len(at) if bound is None else bisect_left(at, bound)

    pieces = cut(gaps, at[::step])
    return [(each, int((index(each.end) - index(each.first)) * rows_of_point)) for each in pieces]


def joined(ranges: Sequence[tuple[Range, int]]) -> list[tuple[Range, int]]:
    """Join neighbours, as long as a task can hold them."""
    result: list[tuple[Range, int]] = []
    for each, rows in ranges:
        if result and result[-1][0].end == each.first and result[-1][1] + rows <= 2 * ROWS_OF_TASK:
            before, rows_before = result.pop()
            result.append((Range(before.first, each.end), rows_before + rows))
        else:
            result.append((each, rows))
    return result


def few_tasks(differing: Sequence[tuple[Range, int]]) -> list[list[Range]]:
    """Return tasks that read scattered ranges together, as many as bound their rows."""
    tasks: list[list[Range]] = []
    ranges: list[Range] = []
    rows = 0
    for each, size in differing:
        if ranges and (rows + size > 2 * ROWS_OF_TASK or len(ranges) == _RANGES_OF_TASK):
            tasks.append(ranges)
            ranges, rows = [], 0
        ranges.append(each)
        rows += size
    return [*tasks, ranges] if ranges else tasks


def choose_engine(job: Job) -> tuple[EngineName, str]:
    """Return the engine for a job, and why."""
    if job.by_spark:
        return EngineName.SPARK, f"engine spark: it alone can read {' and '.join(map(str, job.by_spark.values()))}"
    if job.engine is not EngineName.AUTO:
        return job.engine, f"engine {job.engine}, as asked"
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        return EngineName.SPARK, "engine spark: it was submitted to one"
    if "spark.master" in job.spark.conf:
        return EngineName.SPARK, "engine spark: one is named"
    return EngineName.LOCAL, "engine local: on one machine Spark is no faster, and takes seconds to start"


def choose_tier(job: Job, rows: int) -> tuple[Tier, str]:
    """Return the tier for about so many rows of a side that aren't settled, and why."""
    if job.by_spark:
        return Tier.FULL, "every row is read: Spark's sources have no digests"
    if job.tier is not Tier.AUTO:
        return job.tier, f"tier {job.tier}, as asked"
    if rows < _WORTH_DIGESTS:
        return Tier.FULL, f"every row is read: about {rows:,} rows a side are too few for digests to pay"
    return Tier.DIGEST, f"digests first: about {rows:,} rows a side"


# --- what it costs ---------------------------------------------------------------------------------------

#: A message that is digested by a scan of both sides.
SCANNED = 1.6
#: The same by the indexes, as a range between settled ones is.
RESCANNED = 1.8
#: A range that is digested: a row of each table, made, sent, and compared with the others.
BUCKET = 40.0
#: A row of either side that is read and judged.
ROW = 2.3
#: A range that is read by itself: looked up in each table.
RANGE = 185.0
#: Seconds until anything is read: connections, snapshots, what is settled, samples.
FIXED = 0.15

#: Bytes to and from a server: of a row of either side, and of the digests of a range with its bounds.
BYTES_OF_ROW, BYTES_OF_BUCKET = 63, 600

#: Rows of a side in a range; smaller ones are never worth a digest, and larger ones hardly cheaper.
_SIZES = (30, 45, 60, 90, 120, 180, 250, 350, 500, 700, 1_000, 1_400, 2_000, 2_800, 4_000, 5_600, 8_000)
#: So many ranges take a tenth of the time until anything is read: they may be small, so that little is read for one.
_FEWEST_BUCKETS = 300
#: Beyond so many ranges at once, to number a row's range takes longer than reading does.
MOST_BUCKETS = 65_536


@dataclass(frozen=True, slots=True)
class Sample:
    """What a few small ranges, evenly spread, have told: so many of them differ, of ``rows`` rows of a side each."""

    ranges: int
    differing: int
    rows: float

    @property
    def density(self) -> float:
        """Differences in a row, if they are scattered; half of one where none was seen.

        Where all differ, any number may be in them; half a range is taken as in sync.
        """
        differing = min(max(self.differing, 0.5), self.ranges - 0.5)
        return -math.log(1 - differing / self.ranges) / self.rows

    def __str__(self) -> str:
        return f"{self.differing:,} of {self.ranges:,} sampled ranges of {self.rows:,.0f} rows differ"


@dataclass(frozen=True, slots=True)
class Digesting:
    """How a comparison by digests is expected to go: the rows of a side in a range, and what it comes to.

    ``micros`` is the work of all processors.
    """

    size: int
    micros: float
    rows: int
    buckets: int

    @property
    def pays(self) -> bool:
        """Is there any reason for digests?"""
        return self.buckets > 0


def reading(rows: float, ranges: float) -> float:
    """Return what it costs to read so many rows of both sides, in so many ranges."""
    return ROW * rows + RANGE * ranges


def estimate(micros: float, rows: float, buckets: int, workers: int) -> Estimate:
    """Return what to expect: both servers work at once, and so do the readers, up to two."""
    sent = BYTES_OF_ROW * rows + BYTES_OF_BUCKET * buckets
    return Estimate(round(rows), round(sent), FIXED + micros / 1e6 / min(workers, 2))


def everything(messages: float) -> Digesting:
    """Return what it comes to if all of so many messages are read."""
    return Digesting(0, reading(2 * messages, 1), round(2 * messages), 0)


def known_ranges(messages: float, ranges: int, differing: int, size: int) -> Digesting:
    """Return what it comes to if so many ranges are digested, and so many of them read."""
    rows = min(2 * size * differing, 2 * messages)
    micros = RESCANNED * messages + BUCKET * ranges + reading(rows, differing)
    return Digesting(size, micros, round(rows), ranges)


def spares(digests: Digested, gaps: int) -> bool:
    """Does it cost less to read the ranges that differ than to read everything, which lies in so many gaps?"""
    some = joined(digests.differing)
    return not some or reading(digests.rows_differing, len(some)) < reading(digests.rows, gaps)


def first_digests(messages: float, density: float) -> Digesting:
    """Return the best way to compare so many messages with so many scattered differences in a row of a side.

    It is `everything` where digests don't pay.
    """
    best = everything(messages)
    for size in _SIZES:
        buckets = max(messages / size, 1.0)
        if buckets > MOST_BUCKETS and size != _SIZES[-1]:
            continue
        if buckets < _FEWEST_BUCKETS and size != _SIZES[0]:
            break
        differing = buckets * -math.expm1(-density * size)
        rows = min(2 * size * differing, 2 * messages)  # the only range of a few isn't full
        micros = SCANNED * messages + BUCKET * buckets + reading(rows, differing)
        if micros < best.micros:
            best = Digesting(size, micros, round(rows), round(buckets))
    return best


# --- what digests tell -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Digested:
    """Ranges, sorted into clean ones with their counts, and others with the number of their rows on both sides.

    ``doubted`` of them looked different table by table, of which ``excused`` are clean by the judge's rows.
    """

    clean: list[tuple[Range, Counter[Outcome]]] = field(default_factory=list)
    differing: list[tuple[Range, int]] = field(default_factory=list)
    doubted: int = 0
    excused: int = 0

    def add(self, bucket: Range, counts: Counter[Outcome] | None, rows: int) -> None:
        """Add a range with the counts of its messages, if it is clean, or None; ``rows`` are those of both sides."""
        if counts is None:
            self.differing.append((bucket, rows))
        else:
            self.clean.append((bucket, counts))

    @property
    def buckets(self) -> int:
        """How many ranges were digested."""
        return len(self.clean) + len(self.differing)

    @property
    def rows(self) -> int:
        """How many rows of the producer's topic and the inbox are in all ranges, about."""
        return self.rows_differing + 2 * sum(counts.total() for _, counts in self.clean)

    @property
    def rows_differing(self) -> int:
        """How many of them are in ranges that differ."""
        return sum(rows for _, rows in self.differing)

    def __str__(self) -> str:
        share = self.rows_differing / max(self.rows, 1)
        sentence = f"{len(self.differing):,} of {self.buckets:,} ranges differ, with {share:.1%} of the rows"
        if self.doubted:
            sentence += (
                f" ({self.doubted:,} looked different by what is of other topics, in a shared table, skipped, expired "
                f"or sent again, and were digested joined: {self.excused:,} are in sync)"
            )
        return sentence


# --- what can't be true ------------------------------------------------------------------------------------

#: Clocks that differ by more (seconds) than it takes to open two snapshots.
_SAME_CLOCK = 60.0
#: What says nothing of the sides: it may be known to either of them alone.
_EITHER = {Outcome.IN_FLIGHT}
#: Outcomes of messages that one side alone has; those of the producer's may be so, if the last are among them.
_CONSUMER_ALONE = {Outcome.UNJUDGED, Outcome.PHANTOM, Outcome.LOST}
_NOT_THERE = {Outcome.MISSING, Outcome.RESEND_EXHAUSTED, Outcome.UNCONSUMED}
_PRODUCER_ALONE = {
    Outcome.ROLLED_BACK,
    Outcome.LEFT_OUT,
    Outcome.UNDISPATCHED,
    Outcome.UNDECIDED,
    Outcome.TORN,
    *_NOT_THERE,
}


def doubts_of(job: Job, pair: Pair, rules: Rules, counts: Mapping[Outcome, int], early: int) -> Iterator[str]:
    """Yield sentences about a comparison that came to these counts.

    ``early`` messages that were read took effect before they were sent.
    """
    if len(job.databases) == 2 and (apart := abs(rules.producer_now - rules.consumer_now) / 1e6) > _SAME_CLOCK:
        ahead = "producer" if rules.producer_now > rules.consumer_now else "consumer"
        yield (
            f"the {ahead}'s clock is {duration(apart)} ahead of the other's: what is late, and what is on its way, is "
            "judged by both; set the clocks"
        )
    if early:
        yield (
            f"{counted(early, 'message')} took effect before it was sent, by more than the grace period: the clocks of "
            "the sides differ, or one has its times in local time; a query can put them into UTC"
        )
    yield from _nothing_read(job, pair, rules, +Counter(counts))


def _nothing_read(job: Job, pair: Pair, rules: Rules, counts: Counter[Outcome]) -> Iterator[str]:
    found = counts.keys() - _EITHER
    if not counts:
        yield (
            f"neither {_named(job, 'producer')} nor {_named(job, 'consumer')} has a message of topic {pair.topic!r} "
            f"and group {pair.group!r} in the window: see that names, window and databases are those that are meant"
        )
    elif found and found <= _CONSUMER_ALONE:
        yield (
            f"{_named(job, 'producer')} has none of {counted(counts.total(), 'message')}: see that it is the producer "
            f"of topic {pair.topic!r}"
        )
    elif found & _NOT_THERE and found <= _PRODUCER_ALONE:
        offset = "" if "consumer" in job.tables or rules.offsets else f", in which group {pair.group!r} has no offset"
        yield (
            f"{_named(job, 'consumer')} has none of {counted(counts.total(), 'message')}{offset}: see that it is the "
            f"consumer, and that group {pair.group!r} is its name there"
        )


def _named(job: Job, part: Part) -> str:
    table = job.tables.get(part)
    return f"the {part}'s {table}" if table else f"the {part} ({described(job.databases[part].url)})"
