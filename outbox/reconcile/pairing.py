"""Compare one pair in snapshots of its databases; which sources stand for its two sides, and what they can.

Tables of ours are digested, and what was in sync is settled for the next run. A foreign table of PostgreSQL's is
digested too, and nothing is settled: its rows don't tell when they were written. What Spark alone can read
(`spark.frames`) has no digests and no snapshot: every row is read. Whatever they are, the rows are judged by the same
rules, and what differs is read again by the same second look.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, cast
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy import Connection

from outbox.database.execute import execute
from outbox.reconcile import plan, sql
from outbox.reconcile.digest import PairDigester, ProducerDigests, SideDigester, digested, mixing_of, united
from outbox.reconcile.foreign import TableSide, table_side
from outbox.reconcile.job import FIRST_ID, EngineName, Job, Outcome, Pair, Part, Progress, Range, Tier
from outbox.reconcile.plan import Digested, doubts_of
from outbox.reconcile.record import settled as settling
from outbox.reconcile.rows import (
    EARLY,
    FINDING,
    Collected,
    Comparison,
    ComparisonPlan,
    Estimate,
    Lag,
    PairResult,
    Rules,
    Side,
    beyond,
    differing,
    in_flight,
    to_uuids,
)
from outbox.reconcile.source import (
    PostgresSide,
    ProducerSide,
    Snapshots,
    as_time,
    cancel,
    connected,
    insist,
    pruned_below,
    reaching,
)
from outbox.reconcile.sql import PORTABLE
from outbox.text import duration

if TYPE_CHECKING:
    from outbox.reconcile.spark.frames import SparkEngine

# --- engines ---------------------------------------------------------------------------------------------

#: Progress is reported at least so often (seconds); what listens to it may end the job.
_TELL_EVERY = 0.5
#: A read that is being cancelled may be about to send its next statement: it is cancelled again.
_CANCEL_EVERY = 0.1


class Engine(Protocol):
    """Runs tasks, in any order, some at the same time; each exactly once as far as its result is concerned."""

    def run(
        self, comparison: Comparison, tasks: Sequence[Sequence[Range]], done: Callable[[int], None]
    ) -> Iterator[Collected]:
        """Yield results of one or several tasks each.

        ``done`` is called with how many of the tasks are finished.

        Raises:
            SourceError: a side can't be read.
        """
        ...


class LocalEngine:
    """Threads of this process: reading and comparing release Python's lock."""

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def run(
        self, comparison: Comparison, tasks: Sequence[Sequence[Range]], done: Callable[[int], None]
    ) -> Iterator[Collected]:
        """Yield the result of each task as it is finished; a caller that ends this early waits for none of them."""
        threads: list[int] = []
        with ThreadPoolExecutor(
            self._workers, "reconcile", initializer=lambda: threads.append(threading.get_ident())
        ) as pool:
            pending = {pool.submit(comparison, task) for task in tasks}
            try:
                while pending:
                    finished, pending = wait(pending, _TELL_EVERY, FIRST_COMPLETED)
                    for future in finished:
                        yield future.result()
                    done(len(tasks) - len(pending))
            finally:
                running = {future for future in pending if not future.cancel()}
                while running:
                    cancel(threads)
                    running = wait(running, _CANCEL_EVERY).not_done


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Add the duration of the block to those of the stages, also if it fails."""
    began = time.monotonic()
    try:
        yield
    finally:
        seconds[stage] = seconds.get(stage, 0.0) + time.monotonic() - began


# --- sides and rules -------------------------------------------------------------------------------------


def sources(job: Job, pair: Pair, **options: Any) -> tuple[Side, Side]:
    """Return the sources of producer and consumer; ``options`` are what `side_of` takes besides."""
    return side_of(job, pair, "producer", **options), side_of(job, pair, "consumer", **options)


def side_of(
    job: Job,
    pair: Pair,
    part: Part,
    snapshots: Snapshots | None = None,
    engine: Engine | None = None,
    waiting: Callable[[], None] = lambda: None,
) -> Side:
    """Return the source of a side; without ``snapshots`` it reads the rows there at the time.

    ``engine`` reads what Spark alone can read, and calls ``waiting`` now and then.
    """
    table, snapshot = job.tables.get(part), snapshots.of.get(part) if snapshots else None
    if table is None:
        kind = ProducerSide if part == "producer" else PostgresSide
        return kind(job.databases[part], part, pair, *((snapshot.name, snapshot.settings) if snapshot else ()))
    if not table.by_spark:
        return table_side(job.databases[part], part, table, pair, snapshot)
    from outbox.reconcile.spark.frames import LakeSide  # noqa: PLC0415 - of a few jobs alone

    return LakeSide(cast("SparkEngine", engine).session, part, table, pair, job.window.range, waiting)


#: Of each database its clock, and how far it is behind its primary, as `sql.CLOCK_AND_LAG` reads them.
Clocks = Mapping[Part, tuple[int, int | None]]


def rules_of(job: Job, pair: Pair, snapshots: Snapshots) -> Rules:
    """Return the rules as of snapshots."""
    clocks = {part: (each.now, each.lag) for part, each in snapshots.of.items()}
    if "consumer" in job.tables:
        return rules_at(job, clocks)
    with reaching(job.consumer):
        return rules_at(job, clocks, group_of(job, pair, snapshots.consumer.connection))


def rules_now(
    job: Job, pair: Pair, opened: Callable[[Part], AbstractContextManager[Connection]] | None = None
) -> Rules:
    """Return the rules as of now. Read them before the inbox: a message behind the offset then has its row there.

    ``opened`` gives the connections to the databases; None opens some.
    """
    clocks: dict[Part, tuple[int, int | None]] = {}
    group: Mapping[str, Any] = {}
    for part, access in job.databases.items():
        with opened(part) if opened else connected(access) as connection:
            ((clocks[part],),) = execute(connection, sql.CLOCK_AND_LAG)
            if part == "consumer" and part not in job.tables:
                group = group_of(job, pair, connection)
    return rules_at(job, clocks, group)


def rules_at(job: Job, clocks: Clocks, group: Mapping[str, Any] | None = None) -> Rules:
    """Return the rules as of clocks; ``group`` is what `group_of` has read, None where the consumer isn't ours.

    A side without a database has the clock of the other, and without any it is that of this host.
    """
    here = next(iter(clocks.values()), (int(time.time() * 1e6), None))[0]
    now: dict[Part, int] = {part: clocks[part][0] if part in clocks else here for part in ("producer", "consumer")}
    # What a standby doesn't show yet is on its way.
    lag = max((lag or 0 for _, lag in clocks.values()), default=0)
    return Rules(
        producer_now=now["producer"],
        consumer_now=now["consumer"],
        grace=int(job.window.grace * 1e6) + lag,
        # Below it the producer may have pruned.
        horizon=None if "producer" in job.tables else pruned_below(job.producer, "producer", now["producer"]).bytes,
        max_resends=job.max_resends,
        **{"offsets": None, **(group or {})},
    )


def group_of(job: Job, pair: Pair, consumer: Connection) -> dict[str, Any]:
    """Return the fields of `Rules` that our tables of a consumer tell: where the group is."""
    offsets, starts, lost, skipped, again = execute(consumer, *sql.positions(job.consumer.schema, pair))
    # A foreign producer without positions doesn't tell what lies beyond an offset.
    table = job.tables.get("producer")
    return {
        "offsets": dict(offsets) if table is None or "position" in table.columns else None,
        "starts": dict(starts),
        "lost": frozenset(id_.bytes for (id_,) in lost),
        "skipped": tuple(skipped),
        "again": frozenset(id_.bytes for (id_,) in again),
    }


# --- the second look -------------------------------------------------------------------------------------

# A difference counts only if it is still there when both sides are read again. Two databases have no snapshot in
# common. In the first look the consumer's is the older one, so that it knows nothing the producer's doesn't; what it
# consumed in between looks missing. The second look reads the differing messages again, the producer's side first, and
# goes on until two looks in a row say the same of a message.

#: Reads messages again: those that differ or are in flight (`rows.FINDING`), and how many others have which outcome.
SecondRead = Callable[[list[UUID]], tuple[pa.Table, Counter[Outcome]]]

#: So many messages are read again at once.
BATCH = 2_000
#: A message on which both sides are at work is different at each read; after so many it is reported as it is.
_MOST_READS = 4


def recheck(
    findings: pa.Table, read_again: SecondRead, done: Callable[[int], None] = lambda _: None, batch: int | None = None
) -> tuple[pa.Table, pa.Table, Counter[Outcome]]:
    """Read differences (`rows.FINDING`) again, until two reads in a row agree; ``batch`` of them at once.

    Returns those that are still there, and what of them is in flight now; and how the counts change.
    """
    confirmed: list[pa.Table] = [FINDING.empty_table()]
    opened: list[pa.Table] = [FINDING.empty_table()]
    change: Counter[Outcome] = Counter()
    batch = batch or BATCH
    for start in range(0, findings.num_rows, batch):
        outcomes = _outcomes(findings.slice(start, batch))
        change.subtract(outcomes.values())
        for attempt in range(_MOST_READS):
            findings_now, others = read_again(sorted(outcomes))
            still = differing(findings_now)
            opened.append(in_flight(findings_now))
            change.update(others)
            before, outcomes = outcomes, _outcomes(still)
            if outcomes == before or not outcomes or attempt == _MOST_READS - 1:
                break
        change.update(outcomes.values())
        confirmed.append(still)
        done(min(start + batch, findings.num_rows))
    return pa.concat_tables(confirmed), pa.concat_tables(opened), change


def _outcomes(table: pa.Table) -> dict[UUID, Outcome]:
    return dict(zip(to_uuids(table), map(Outcome, table["outcome"].to_pylist()), strict=True))


def read_again(
    job: Job,
    pair: Pair,
    ids: list[UUID],
    engine: Engine | None = None,
    waiting: Callable[[], None] = lambda: None,
) -> tuple[pa.Table, Counter[Outcome]]:
    """Read messages again (`SecondRead`), on connections of its own; once more where a source is lost over it.

    ``engine`` and ``waiting`` are as in `sources`.
    """

    def read() -> tuple[pa.Table, Counter[Outcome]]:
        rules = rules_now(job, pair)
        return Comparison(*sources(job, pair, engine=engine, waiting=waiting), rules).again(ids)

    return insist(read, waiting=waiting)


# --- what a first look leaves ----------------------------------------------------------------------------

#: All that is needed to judge a message of a backlog once more.
_POSITION = ("id", "outcome", "queue", "position")


@dataclass(slots=True)
class Backlog:
    """What the first look found beyond the group's offset: perhaps millions, and each the same difference.

    The first ``most`` of them, in the order of their ids, are in ``listed`` (`rows.FINDING`). Of the others nothing but
    the place is kept, which is all that decides whether they are still there.
    """

    most: int
    listed: pa.Table = field(default_factory=FINDING.empty_table)
    others: list[pa.Table] = field(default_factory=list)

    def take(self, table: pa.Table) -> pa.Table:
        """Take the backlog out of a table of findings (`rows.FINDING`); return the rest of it."""
        is_ahead = pc.equal(table["outcome"], int(Outcome.UNCONSUMED))
        if pc.any(is_ahead).as_py():
            both = pa.concat_tables([self.listed, table.filter(is_ahead)]).sort_by("id")
            self.listed = both.slice(0, self.most)
            if both.num_rows > self.most:
                self.others.append(both.slice(self.most).select(_POSITION))
        return table.filter(pc.invert(is_ahead))

    @property
    def positions(self) -> pa.Table:
        """All of it: ``id``, ``outcome``, ``queue`` and ``position``."""
        return pa.concat_tables([self.listed.select(_POSITION), *self.others])

    def parted(self, rules: Rules) -> tuple[pa.Table, pa.Table]:
        """Return what the group still hasn't come to, by rules of a later time, and the others."""
        positions = self.positions
        still = beyond(rules, *(positions[name].to_numpy() for name in ("queue", "position")))
        return positions.filter(pa.array(still)), positions.filter(pa.array(~still))


def by_queue(*tables: pa.Table) -> Counter[int]:
    """Return how many messages of tables of findings lie beyond the group's offset, by queue."""
    backlog: Counter[int] = Counter()
    for table in tables:
        queues = table.filter(pc.equal(table["outcome"], int(Outcome.UNCONSUMED)))["queue"].to_numpy()
        numbers, counts = np.unique(queues, return_counts=True)
        backlog.update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))
    return backlog


@dataclass(frozen=True, slots=True)
class FirstPass:
    """What one read of both sides found, in one snapshot of each: a result before its second look.

    Its ``findings`` are messages in flight and differences, without the ``backlog``. ``again`` reads messages once
    more, ``batch`` of them at once. ``fresh`` are ranges that are settled from now on; without ``settled`` nothing can
    be.
    """

    result: PairResult
    backlog: Backlog
    rules: Rules
    again: SecondRead
    batch: int = BATCH
    settled: settling.SettledRanges | None = None
    fresh: Sequence[settling.SettledRange] = ()


@dataclass(slots=True)
class Common:
    """Share among the pairs of a job: the sizes of the tables, the settled ranges, the digests of the producer.

    It is read when the first pair needs it, and used for all: their snapshots are newer, and what was written since is
    found by the next run, whose mark is of this time.
    """

    job: Job
    size: plan.Size = field(default_factory=dict)
    settled: dict[tuple[str, str], settling.SettledRanges] = field(default_factory=dict)
    _digests: ProducerDigests | None = None

    def forget(self) -> None:
        """Forget all that was read, since its snapshots are lost."""
        self.settled.clear()
        self._digests = None

    def prepare(self, snapshots: Snapshots) -> None:
        """See what there is, and what of it is settled."""
        if self.settled:
            return
        self.size = plan.size_of(snapshots)
        trusts = self.job.record and self.job.tier is not Tier.FULL
        keep_for = self.job.keep_for if trusts else 0.0
        for pair in self.job.pairs:
            self.settled[pair.names] = settling.load(
                snapshots, pair, self.job.window.range, keep_for, self.job.record_in
            )

    def gaps(self, pair: Pair) -> list[Range]:
        """Return what of the window isn't settled."""
        return plan.without(self.job.window.range, [each for each, _ in self.settled[pair.names].ranges])

    def digests(self, snapshots: Snapshots, pair: Pair, bucket: int | None) -> ProducerDigests:
        """Return the digests of the producer; they are read with those of the first consumer.

        Each of them has ``bucket`` rows of a side, as suits the first. A pair with measures has its own: what is under
        way for them is what was in the very snapshot.
        """
        if self._digests is None or any(each.of(pair.names) for each in self.job.measures):
            gaps = {pair.names: self.gaps(pair) for pair in self.job.pairs}
            open_ = united(gap for each in gaps.values() for gap in each)
            settled = min(self.settled.values(), key=lambda each: each.counts.total()).counts.total()
            edges = {edge for each in gaps.values() for gap in each for edge in gap if edge is not None}
            at = sorted(edges.union(plan.points_between(snapshots, self.size, pair, open_, settled, bucket)))
            self._digests = ProducerDigests(gaps, self.job.pairs, plan.cut(open_, at), mixing_of(snapshots))
        return self._digests


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a pair is going to be compared, by what can be known before the first digest.

    ``gaps`` are the unsettled ranges; ``points`` are ids, evenly spread over all rows, None where they aren't read yet.
    ``digesting`` is what it comes to, None where that can't be known; ``sample`` told how big the ranges are that are
    digested.
    """

    tier: Tier
    engine: EngineName
    gaps: Sequence[Range]
    size: plan.Size
    points: Sequence[UUID] | None = None
    digesting: plan.Digesting | None = None
    sample: plan.Sample | None = None


#: Clean ranges that are read for their lags.
_SAMPLED = 12
#: Rows of a foreign side in a bucket, and buckets at most: what is read of a foreign table costs a pass over it,
#: however little it is, so that they need not be small.
_ROWS_OF_FOREIGN_BUCKET, _MOST_FOREIGN_BUCKETS = 100, 65_536


@dataclass(slots=True)
class Pairing:
    """One pair of our tables, being compared in snapshots; ``seconds`` collects durations, ``why`` the decisions."""

    run_id: UUID
    job: Job
    pair: Pair
    engine: Engine
    progress: Progress
    snapshots: Snapshots
    common: Common
    seconds: dict[str, float] = field(default_factory=dict, kw_only=True)
    why: list[str] = field(default_factory=list, kw_only=True)

    def because(self, sentence: str) -> None:
        """Say why something is done, and keep it for the report."""
        self.why.append(sentence)
        self.progress.say(f"{self.pair}: {sentence}")

    def choose(self, rows: int) -> tuple[Tier, EngineName]:
        """Return tier and engine for about so many rows of a side; say why, and how far standbys are behind."""
        for part, lag in self.snapshots.lags.items():
            self.because(f"the {part} is a standby, {duration(lag)} behind: the grace period is longer by that")
        tier, why = plan.choose_tier(self.job, rows)
        self.because(why)
        engine, why = plan.choose_engine(self.job)
        self.because(why)
        return tier, engine

    def foresee(self) -> ComparisonPlan:
        """Return how the pair would be compared, and what that would come to; nothing but a few ranges is read."""
        return self._plan(self.strategy(self._comparison()), ranges=0)

    def compare(self) -> FirstPass:
        """Compare, and return the findings.

        Raises:
            InvalidSettings: a foreign table lacks a column, or has a row that can't be judged.
            SourceError: a side can't be read.
            ReconcileError: Spark can't read a side.
        """
        began, comparison = time.monotonic(), self._comparison()
        strategy = self.strategy(comparison)
        digests, clean = self.digests(comparison, strategy), list[settling.SettledRange]()
        if digests.buckets and plan.spares(digests, len(strategy.gaps)):
            self.because(f"{digests}: only they are read")
            clean, tasks = digests.clean, plan.few_tasks(plan.joined(digests.differing))
        else:
            if digests.buckets:
                self.because(f"{digests}: everything is read")
            points = strategy.points
            if points is None:
                points = plan.points(self.snapshots, strategy.size, plan.POINTS)
            tasks = plan.few_tasks(plan.weighed(strategy.gaps, points, strategy.size))
        backlog = Backlog(self.job.max_findings)
        collected = self._judged(comparison, tasks, backlog)
        lag = self._lag(comparison, collected, clean)
        sent = collected.bytes_read + plan.BYTES_OF_BUCKET * digests.buckets
        settled = self.common.settled.get(self.pair.names)
        known = settled.counts if settled is not None else Counter[Outcome]()
        rules, counts = comparison.rules, sum((counts for _, counts in clean), known + collected.counts)
        doubts = tuple(doubts_of(self.job, self.pair, rules, counts, collected.lags[EARLY]))
        for doubt in doubts:
            self.progress.say(f"{self.pair}: {doubt}")
        planned = self._plan(
            strategy,
            ranges=sum(map(len, tasks)),
            buckets=digests.buckets,
            differing=len(digests.differing),
            rows_read=collected.rows_read,
            doubts=doubts,
            came=strategy.digesting and Estimate(collected.rows_read, sent, time.monotonic() - began),
        )
        found = collected.table
        result = PairResult(
            self.run_id,
            self.pair,
            self.job.window,
            as_time(rules.consumer_now),
            planned,
            counts,
            found,
            in_flight(found),
            lag=lag,
            seconds=self.seconds,
        )
        fresh = () if settled is None else settling.settled_by(digests.clean, to_uuids(found))
        again = functools.partial(read_again, self.job, self.pair, engine=self.engine, waiting=self._waiting)
        # What Spark alone can read is read as a whole, however few they are.
        batch = sys.maxsize if self.job.by_spark else BATCH
        return FirstPass(result, backlog, rules, again, batch, settled, fresh)

    def _comparison(self) -> Comparison:
        rules = rules_of(self.job, self.pair, self.snapshots)
        options = {"snapshots": self.snapshots, "engine": self.engine, "waiting": self._waiting}
        title = f"{self.pair}: {' → '.join(self.job.labels)}"
        return Comparison(*sources(self.job, self.pair, **options), rules, title)

    def _waiting(self) -> None:
        self.progress.done(0)

    def _judged(self, comparison: Comparison, tasks: Sequence[Sequence[Range]], backlog: Backlog) -> Collected:
        """Read and judge the rows of tasks; what lies beyond the group's offset goes to the backlog."""
        collected = Collected()
        if tasks:
            self.progress.stage(f"{self.pair}: rows", len(tasks))
            with timed(self.seconds, "compare"):
                for result in self.engine.run(comparison, tasks, self.progress.done):
                    collected.add(replace(result, findings=[backlog.take(each) for each in result.findings]))
        return collected

    def _plan(self, strategy: Strategy, **more: Any) -> ComparisonPlan:
        if (digesting := strategy.digesting) is not None:
            workers = self.job.workers
            more["expected"] = plan.estimate(digesting.micros, digesting.rows, digesting.buckets, workers)
            more["settled"] = len(self.common.settled[self.pair.names].ranges)
        lags, foreign, table = self.snapshots.lags, tuple(self.job.tables), self.job.producer_table
        writable = table is not None and table.unwritable is None
        return ComparisonPlan(
            strategy.tier,
            strategy.engine,
            tuple(self.why),
            standby_lag=lags,
            foreign=foreign,
            writable=writable,
            **more,
        )

    def strategy(self, comparison: Comparison) -> Strategy:
        """Choose how the pair is compared."""
        self.progress.stage(f"{self.pair}: plan", None)
        with timed(self.seconds, "plan"):
            self.common.prepare(self.snapshots)
            size, settled = self.common.size, self._settled()
            messages = max(max(size.values()) - settled.counts.total(), 0)
            (tier, engine), gaps = self.choose(messages), self.common.gaps(self.pair)
            # Gaps between settled ranges are scattered anyhow: their clean parts aren't worth reading.
            if tier is Tier.DIGEST and settled.ranges:
                between = plan.between_settled(messages, len(gaps))
                return Strategy(tier, engine, gaps, size, digesting=between)
            points = plan.points(self.snapshots, size, plan.POINTS)
            messages = plan.rows_within(gaps, points, size)
        if tier is not Tier.DIGEST or not gaps:
            return Strategy(tier, engine, gaps, size, points, plan.everything(messages))
        sample = self._draw(gaps, points, messages, comparison.rules)
        digesting = plan.first_digests(messages, sample.density) if sample else plan.unsampled(messages)
        return Strategy(tier, engine, gaps, size, points, digesting, sample)

    def _draw(self, gaps: Sequence[Range], points: Sequence[UUID], messages: int, rules: Rules) -> plan.Sample | None:
        """Digest a few small ranges, so that nothing is digested in vain where nearly all differ."""
        with timed(self.seconds, "sample"):
            ranges = plan.sampled_ranges(self.snapshots, self.common.size, self.pair, gaps, points, messages)
            if not ranges:
                return None
            found = self._digester(rules).digest(ranges, ranges)
        sample = plan.Sample(found.buckets, len(found.differing), plan.SAMPLE_ROWS)
        self.because(str(sample))
        return sample

    def _digester(self, rules: Rules) -> PairDigester:
        horizon = UUID(bytes=rules.horizon or FIRST_ID.bytes)
        return PairDigester(self.snapshots, self.pair, mixing_of(self.snapshots), horizon)

    def _settled(self) -> settling.SettledRanges:
        settled = self.common.settled[self.pair.names]
        if settled.ranges or settled.forgotten:
            self.because(
                f"{len(settled.ranges):,} ranges with {settled.counts.total():,} messages were in sync and "
                f"nothing was written in them since: not read ({settled.forgotten:,} others were touched)"
            )
        return settled

    def digests(self, comparison: Comparison, strategy: Strategy) -> Digested:
        """Digest what isn't settled; nothing where that doesn't pay."""
        if strategy.digesting is None or not strategy.digesting.pays:
            if strategy.sample is not None:
                self.because("digests wouldn't pay: everything is read")
            return Digested()
        with timed(self.seconds, "digest"):
            bucket = strategy.digesting.size if strategy.sample else None
            of_producer = self.common.digests(self.snapshots, self.pair, bucket)
            self.progress.stage(f"{self.pair}: digests", None)
            return digested(self.snapshots, self.pair, of_producer, self._digester(comparison.rules).horizon)

    def _lag(self, comparison: Comparison, collected: Collected, clean: Sequence[settling.SettledRange]) -> Lag | None:
        """Return the lags; where digests spared the rows, with those of some of the clean ranges."""
        step = max(len(clean) // _SAMPLED, 1)
        # Of a foreign table each sample would cost a pass.
        clean = [] if self.job.tables else clean
        some = [each for each, counts in clean[::step] if counts[Outcome.CONSUMED]][:_SAMPLED]
        if some:
            with timed(self.seconds, "lag"):
                for sampled in LocalEngine(1).run(comparison, [some], lambda _: None):
                    collected.lags.update(sampled.lags)
        return collected.lag(sampled=bool(some))


@dataclass(slots=True)
class ForeignPairing(Pairing):
    """One pair of which a side at least has a table that isn't ours, being compared."""

    def strategy(self, comparison: Comparison) -> Strategy:
        """Choose how the pair is compared, having seen that the rows of foreign tables can be judged."""
        self.progress.stage(f"{self.pair}: plan", None)
        with timed(self.seconds, "plan"):
            digester = self._side_digester(comparison)
            size = {part: self._rows(side) for part, side in digester.by_part.items()}
            tier, engine = self.choose(max(size.values(), default=0))
            for name, table in self.job.by_spark.items():
                self.because(f"the {name}'s {table} is read as it is at the time, without a snapshot")
            points: list[UUID] = []
            if size:
                # Of the larger foreign side; of ours where Spark reads that one.
                part = max(self.job.tables.keys() & size.keys() or size, key=lambda part: size[part])
                # Without digests some points for each task are enough, and none where one task reads all.
                rows, few = (
                    (_ROWS_OF_FOREIGN_BUCKET, 2) if tier is Tier.DIGEST else (max(plan.ROWS_OF_TASK // 10, 1), 10)
                )
                buckets = min(size[part] // rows, _MOST_FOREIGN_BUCKETS)
                points = digester.points(part, size[part] // buckets) if buckets >= few else []
        return Strategy(tier, engine, [self.job.window.range], size, points)

    def digests(self, comparison: Comparison, strategy: Strategy) -> Digested:
        """Digest both sides by what reads their rows, in the same buckets."""
        if strategy.tier is not Tier.DIGEST:
            return Digested()
        with timed(self.seconds, "digest"):
            self.progress.stage(f"{self.pair}: digests", None)
            buckets = plan.cut(strategy.gaps, strategy.points or ())
            raw = comparison.rules.horizon
            return self._side_digester(comparison).digest(buckets, None if raw is None else UUID(bytes=raw))

    def _side_digester(self, comparison: Comparison) -> SideDigester:
        both = (comparison.producer, comparison.consumer)
        by_part = {side.part: side for side in both if isinstance(side, PostgresSide)}
        mixing = PORTABLE if self.job.by_spark else mixing_of(self.snapshots)
        return SideDigester(self.snapshots, by_part, [self.job.window.range], replace(mixing, mix="sum"))

    def _rows(self, side: PostgresSide) -> int:
        snapshot = self.snapshots.of[side.part]
        return side.census(snapshot.connection) if isinstance(side, TableSide) else plan.rows_of(side.part, snapshot)
