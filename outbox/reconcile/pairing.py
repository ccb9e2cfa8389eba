"""Compare one pair in two snapshots: settled ranges, digests, rows; which sources stand for its two sides."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy import Connection

from outbox.database.execute import Row, execute
from outbox.reconcile import plan, sql
from outbox.reconcile.compare import Collected, Comparison, Engine, LocalEngine, Side, Task, timed
from outbox.reconcile.digest import Digested, ProducerDigests, cost, digested, mixing_of, united
from outbox.reconcile.digest.levels import PairDigester, narrowed
from outbox.reconcile.job import FIRST_ID, EngineName, Job, Outcome, Pair, Part, Progress, Range, Tier
from outbox.reconcile.judge import Rules, beyond
from outbox.reconcile.record import settled as settling
from outbox.reconcile.rows import FINDING, ComparisonPlan, Estimate, Lag, PairResult, to_uuids
from outbox.reconcile.source import PostgresSide, Snapshot, Snapshots, as_time, connected, pruned_below, reaching
from outbox.reconcile.tables.side import table_side
from outbox.text import duration


def sources(job: Job, pair: Pair, snapshots: Snapshots | None = None) -> tuple[Side, Side]:
    """Return the sources of producer and consumer; without ``snapshots`` they read the rows there at the time."""
    return (
        side_of(job, pair, "producer", snapshots.producer if snapshots else None),
        side_of(job, pair, "consumer", snapshots.consumer if snapshots else None),
    )


def side_of(job: Job, pair: Pair, part: Part, snapshot: Snapshot | None) -> Side:
    """Return the source of one side, as of a snapshot if there is one."""
    access = job.databases[part]
    if (table := job.tables.get(part)) is not None:
        return table_side(access, part, table, pair, snapshot)
    return PostgresSide(access, part, pair, *((snapshot.name, snapshot.settings) if snapshot else ()))


def rules_of(job: Job, pair: Pair, snapshots: Snapshots) -> Rules:
    """Return the rules as of two snapshots."""
    with reaching(job.consumer):
        times = ((each.now, each.lag) for each in (snapshots.producer, snapshots.consumer))
        return rules_by(job, pair, snapshots.consumer.connection, *times)


def rules_now(job: Job, pair: Pair) -> Rules:
    """Return the rules as of now. Read them before the inbox: a message behind the offset then has its row there."""
    with connected(job.producer) as producer:
        ((of_producer,),) = execute(producer, sql.CLOCK_AND_LAG)
    with connected(job.consumer) as consumer:
        ((of_consumer,),) = execute(consumer, sql.CLOCK_AND_LAG)
        return rules_by(job, pair, consumer, of_producer, of_consumer)


def rules_by(job: Job, pair: Pair, consumer: Connection, of_producer: Row, of_consumer: Row) -> Rules:
    """Return the rules; of each database its clock and lag are given, as `sql.CLOCK_AND_LAG` reads them."""
    (producer_now, producer_lag), (consumer_now, consumer_lag) = of_producer, of_consumer
    rules = Rules(
        producer_now=producer_now,
        consumer_now=consumer_now,
        # What a standby doesn't show yet is on its way.
        grace=int(job.window.grace * 1e6) + max(producer_lag or 0, consumer_lag or 0),
        horizon=horizon_of(job, producer_now),
        offsets=None,
        max_resends=job.max_resends,
    )
    return rules if "consumer" in job.tables else of_group(rules, job, pair, consumer)


def horizon_of(job: Job, now: int) -> bytes | None:
    """Return the id below which the producer may have pruned; None where its tables aren't ours."""
    if "producer" in job.tables:
        return None
    return pruned_below(job.producer, "producer", now).bytes


def of_group(rules: Rules, job: Job, pair: Pair, consumer: Connection) -> Rules:
    """Return rules with all that our tables of a consumer say of where the group is."""
    offsets, starts, lost, skipped, again = execute(consumer, *sql.positions(job.consumer.schema, pair))
    # A foreign producer without positions doesn't tell what lies beyond an offset.
    table = job.tables.get("producer")
    return replace(
        rules,
        offsets=dict(offsets) if table is None or "position" in table.columns else None,
        starts=dict(starts),
        lost=frozenset(id_.bytes for (id_,) in lost),
        skipped=tuple(skipped),
        again=frozenset(id_.bytes for (id_,) in again),
    )


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


#: Clean ranges that are read for their lags.
_SAMPLED = 12


@dataclass(frozen=True, slots=True)
class FirstPass:
    """What one reading of both sides found, in one snapshot of each: a result before its second look.

    Its ``findings`` are messages in flight and differences, without the ``backlog``. ``fresh`` are ranges that are
    settled from now on; without ``settled`` nothing can be.
    """

    result: PairResult
    backlog: Backlog
    rules: Rules
    settled: settling.SettledRanges | None
    fresh: Sequence[settling.SettledRange]


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

    ``gaps`` are the unsettled ranges; ``points`` are ids, evenly spread over all rows, if they were read. ``probe``
    told how big the ranges are that are digested.
    """

    tier: Tier
    engine: EngineName
    gaps: Sequence[Range]
    digesting: cost.Digesting
    points: Sequence[UUID] = ()
    probe: cost.Probe | None = None


@dataclass(slots=True)
class AnyPairing:
    """One pair, being compared; ``seconds`` collects durations, ``why`` the decisions."""

    run_id: UUID
    job: Job
    pair: Pair
    engine: Engine
    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict, kw_only=True)
    why: list[str] = field(default_factory=list, kw_only=True)

    def because(self, sentence: str) -> None:
        """Say why something is done, and keep it for the report."""
        self.why.append(sentence)
        self.progress.say(f"{self.pair}: {sentence}")


@dataclass(slots=True)
class SnapshotPairing(AnyPairing):
    """One pair, being compared in two snapshots."""

    snapshots: Snapshots

    def judged(self, comparison: Comparison, tasks: Sequence[Task], backlog: Backlog) -> Collected:
        """Read and judge the rows of tasks; what lies beyond the group's offset goes to the backlog.

        Raises:
            SourceError: a side can't be read.
        """
        collected = Collected()
        if tasks:
            self.progress.stage(f"{self.pair}: rows", len(tasks))
            with timed(self.seconds, "compare"):
                for result in self.engine.run(comparison, tasks, self.progress.done):
                    collected.add(replace(result, findings=[backlog.take(each) for each in result.findings]))
        return collected

    def tell_lags(self) -> None:
        """Say how far the sides that are read on standbys are behind."""
        for part, lag in self.snapshots.lags.items():
            self.because(f"the {part} is a standby, {duration(lag)} behind: the grace period is longer by that")

    def result(
        self, planned: ComparisonPlan, tasks: Sequence[Task], digests: Digested, collected: Collected, lag: Lag | None
    ) -> PairResult:
        """Return the findings of reading, and how the plan was carried out."""
        return PairResult(
            self.run_id,
            self.pair,
            self.job.window,
            as_time(self.snapshots.consumer.now),
            replace(
                planned,
                ranges=sum(len(task.ranges) for task in tasks),
                buckets=digests.buckets,
                differing=len(digests.differing),
                rows_read=collected.rows_read,
            ),
            collected.counts,
            collected.table,
            in_flight(collected.table),
            lag=lag,
            seconds=self.seconds,
        )


@dataclass(slots=True)
class Pairing(SnapshotPairing):
    """One pair of our own tables, being compared."""

    common: Common

    def foresee(self) -> ComparisonPlan:
        """Return how the pair would be compared, and what that would come to; nothing but a few ranges is read."""
        strategy = self._strategy(rules_of(self.job, self.pair, self.snapshots))
        return self._plan(strategy)

    def compare(self) -> FirstPass:
        """Compare, and return the findings."""
        began = time.monotonic()
        rules = rules_of(self.job, self.pair, self.snapshots)
        producer, consumer = sources(self.job, self.pair, self.snapshots)
        comparison = Comparison(producer, consumer, rules)
        strategy = self._strategy(rules)
        settled = self.common.settled[self.pair.names]
        digests = self._digests(strategy, UUID(bytes=rules.horizon or FIRST_ID.bytes))
        clean: list[settling.SettledRange] = []
        if digests.buckets and plan.spares(digests, len(strategy.gaps)):
            self.because(f"{digests}: only they are read")
            clean, tasks = digests.clean, plan.few_tasks(plan.joined(digests.differing))
        else:
            if digests.buckets:
                self.because(f"{digests}: everything is read")
            points = strategy.points or plan.points(self.snapshots, self.common.size, plan.POINTS)
            tasks = plan.few_tasks(plan.weighed(strategy.gaps, points, self.common.size))
        backlog = Backlog(self.job.max_findings)
        collected = self.judged(comparison, tasks, backlog)
        sent = collected.bytes_read + cost.BYTES_OF_BUCKET * digests.buckets
        lag = self._lag(comparison, collected, clean)
        came = Estimate(collected.rows_read, sent, time.monotonic() - began)
        result = self.result(replace(self._plan(strategy), came=came), tasks, digests, collected, lag)
        result.counts = sum((counts for _, counts in clean), settled.counts + result.counts)
        listed = to_uuids(result.findings)
        return FirstPass(result, backlog, rules, settled, settling.settled_by(digests.clean, listed))

    def _plan(self, strategy: Strategy) -> ComparisonPlan:
        digesting = strategy.digesting
        return ComparisonPlan(
            tier=strategy.tier,
            engine=strategy.engine,
            why=tuple(self.why),
            ranges=0,
            settled=len(self.common.settled[self.pair.names].ranges),
            standby_lag=self.snapshots.lags,
            expected=cost.estimate(digesting.micros, digesting.rows, digesting.buckets, self.job.workers),
        )

    def _strategy(self, rules: Rules) -> Strategy:
        """Choose how the pair is compared."""
        self.tell_lags()
        with timed(self.seconds, "plan"):
            self.common.prepare(self.snapshots)
            size, settled = self.common.size, self._settled()
            tier, why = plan.choose_tier(self.job, max(max(size.values()) - settled.counts.total(), 0))
            self.because(why)
            gaps = self.common.gaps(self.pair)
            engine, why = plan.choose_engine(self.job)
            self.because(why)
            # Gaps between settled ranges are scattered anyhow: their clean parts aren't worth reading.
            if tier is Tier.DIGEST and settled.ranges:
                messages = max(max(size.values()) - settled.counts.total(), 0)
                return Strategy(tier, engine, gaps, plan.between_settled(messages, len(gaps)))
            points = plan.points(self.snapshots, size, plan.POINTS)
            messages = plan.rows_within(gaps, points, size)
        if tier is not Tier.DIGEST or not gaps:
            return Strategy(tier, engine, gaps, cost.everything(messages), points)
        probe = self._probe(gaps, points, messages, UUID(bytes=rules.horizon or FIRST_ID.bytes))
        digesting = cost.first_digests(messages, probe.density) if probe else plan.unprobed(messages)
        return Strategy(tier, engine, gaps, digesting, points, probe)

    def _probe(self, gaps: Sequence[Range], points: Sequence[UUID], messages: int, horizon: UUID) -> cost.Probe | None:
        """Digest a few small ranges, so that nothing is digested in vain where nearly all differ."""
        with timed(self.seconds, "probe"):
            ranges = plan.probes(self.snapshots, self.common.size, self.pair, gaps, points, messages)
            if not ranges:
                return None
            found = self._digester(horizon).digest(ranges, ranges)
        probe = cost.Probe(found.buckets, len(found.differing), plan.ROWS_OF_PROBE)
        self.because(str(probe))
        return probe

    def _digester(self, horizon: UUID) -> PairDigester:
        return PairDigester(self.snapshots, self.pair, self.common.size, mixing_of(self.snapshots), horizon)

    def _settled(self) -> settling.SettledRanges:
        settled = self.common.settled[self.pair.names]
        if settled.ranges or settled.forgotten:
            self.because(
                f"{len(settled.ranges):,} ranges with {settled.counts.total():,} messages were in sync and "
                f"nothing was written in them since: not read ({settled.forgotten:,} others were touched)"
            )
        return settled

    def _digests(self, strategy: Strategy, horizon: UUID) -> Digested:
        if not strategy.digesting.pays:
            if strategy.probe is not None:
                self.because("digests wouldn't pay: everything is read")
            return Digested([], [])
        with timed(self.seconds, "digest"):
            bucket = strategy.digesting.size if strategy.probe else None
            of_producer = self.common.digests(self.snapshots, self.pair, bucket)
            self.progress.stage(f"{self.pair}: digests", None)
            first = digested(self.snapshots, self.pair, of_producer, horizon)
            return narrowed(self._digester(horizon), first, strategy.probe, self.because)

    def _lag(self, comparison: Comparison, collected: Collected, clean: Sequence[settling.SettledRange]) -> Lag | None:
        """Return the lags; where digests spared the rows, with those of some of the clean ranges."""
        step = max(len(clean) // _SAMPLED, 1)
        some = [each for each, counts in clean[::step] if counts[Outcome.CONSUMED]][:_SAMPLED]
        if some:
            with timed(self.seconds, "lag"):
                for sampled in LocalEngine(1).run(comparison, [Task(0, tuple(some))], lambda _: None):
                    collected.lags.update(sampled.lags)
        return collected.lag(sampled=bool(some))


def in_flight(findings: pa.Table) -> pa.Table:
    """Return the messages in flight of a table of findings."""
    return findings.filter(pc.equal(findings["outcome"], int(Outcome.IN_FLIGHT)))
