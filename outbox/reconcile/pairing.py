"""Compare one pair in two snapshots: settled ranges, digests, rows; which sources stand for its two sides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy import Connection

from outbox.database.execute import execute
from outbox.message.model import uuid7_at
from outbox.reconcile import plan, sql
from outbox.reconcile.archive import complete_from, with_archives
from outbox.reconcile.compare import Collected, Comparison, Engine, LocalEngine, Side, Task, timed
from outbox.reconcile.digest import Digested, digested
from outbox.reconcile.job import Access, EngineName, Job, Outcome, Pair, Progress, Range, Tier
from outbox.reconcile.judge import Rules
from outbox.reconcile.record import settled as settling
from outbox.reconcile.rows import ComparisonPlan, Lag, to_uuids
from outbox.reconcile.source import PostgresSide, Snapshots, connected, reaching


def sources(
    job: Job, pair: Pair, producer_now: int, consumer_now: int, snapshots: Snapshots | None = None
) -> tuple[Side, Side]:
    """Return the sources of producer and consumer: their databases, and the archives for what they may have pruned.

    ``producer_now`` and ``consumer_now`` are the databases' clocks in microseconds; without ``snapshots`` the sources
    read what is there at the time."""
    producer = PostgresSide(job.producer, "producer", pair, snapshots.producer.name if snapshots else None)
    consumer = PostgresSide(job.consumer, "consumer", pair, snapshots.consumer.name if snapshots else None)
    if not job.archives:
        return producer, consumer
    return (
        with_archives(producer, job.archives, "producer", pair, pruned_below(job.producer, producer_now)),
        with_archives(consumer, job.archives, "consumer", pair, pruned_below(job.consumer, consumer_now, inbox=True)),
    )


def pruned_below(access: Access, now: int, *, inbox: bool = False) -> UUID:
    """Return the id below which a database may have pruned messages, by its clock (microseconds)."""
    retention = access.settings.inbox_retention if inbox else access.settings.retention
    return uuid7_at(max(now / 1e6 - retention, 0.0))


def judged_from(job: Job, pair: Pair, producer_now: int) -> UUID:
    """Return the id from which on the producer's side is complete: what it lacks there, it never had."""
    horizon = pruned_below(job.producer, producer_now)
    return complete_from(job.archives, pair, horizon) if job.archives else horizon


def rules_of(job: Job, pair: Pair, snapshots: Snapshots) -> Rules:
    """Return the rules as of two snapshots."""
    with reaching(job.consumer):
        return _rules(job, pair, snapshots.consumer.connection, snapshots.producer.now, snapshots.consumer.now)


def rules_now(job: Job, pair: Pair) -> Rules:
    """Return the rules as of now. Read them before the inbox: a message behind the offset then has its row there."""
    with connected(job.producer) as producer:
        (((producer_now,),),) = execute(producer, sql.CLOCK)
    with connected(job.consumer) as consumer:
        (((consumer_now,),),) = execute(consumer, sql.CLOCK)
        return _rules(job, pair, consumer, producer_now, consumer_now)


def _rules(job: Job, pair: Pair, consumer: Connection, producer_now: int, consumer_now: int) -> Rules:
    offsets, starts = execute(consumer, *sql.positions(job.consumer.schema, pair))
    return Rules(
        producer_now=producer_now,
        consumer_now=consumer_now,
        grace=int(job.window.grace * 1e6),
        horizon=judged_from(job, pair, producer_now).bytes,
        offsets=dict(offsets),
        starts=dict(starts),
        max_resends=job.max_resends,
    )


T = TypeVar("T")

#: Clean ranges that are read for their lags.
_SAMPLED = 12


@dataclass(frozen=True, slots=True)
class FirstPass:
    """What one reading of both sides found, in one snapshot of each (`rows.FINDING`)."""

    rules: Rules
    plan: ComparisonPlan
    counts: Counter[Outcome]
    findings: pa.Table
    lag: Lag | None
    settled: settling.SettledRanges
    fresh: Sequence[settling.SettledRange]


@dataclass(slots=True)
class Pairing:
    """One pair, being compared. ``engine`` gives the engine of a name; ``seconds`` collects durations."""

    job: Job
    pair: Pair
    snapshots: Snapshots
    engine: Callable[[EngineName], Engine]
    progress: Progress
    seconds: dict[str, float]
    why: list[str] = field(default_factory=list)

    def compare(self) -> FirstPass:
        """Compare, and return what was found."""
        rules = rules_of(self.job, self.pair, self.snapshots)
        producer, consumer = sources(self.job, self.pair, rules.producer_now, rules.consumer_now, self.snapshots)
        comparison = Comparison(producer, consumer, rules)
        with timed(self.seconds, "plan"):
            size = plan.size_of(self.snapshots)
            settled = self._settled()
            rows = max(size.larger - sum(settled.counts.values()), 0)
            tier = self._because(plan.choose_tier(self.job, rows))
            gaps = plan.without(self.job.window.range, [each for each, _ in settled.ranges])
            engine = self._because(plan.choose_engine(self.job))
        digests = self._digests(size, gaps, settled, UUID(bytes=rules.horizon)) if tier is Tier.DIGEST else None
        clean, tasks = self._tasks(size, gaps, digests, bool(settled.ranges))
        collected = self._compare(engine, comparison, tasks)
        counts = settled.counts + collected.counts
        for _, some in clean:
            counts.update(some)
        findings = collected.table
        return FirstPass(
            rules=rules,
            plan=ComparisonPlan(
                tier=tier,
                engine=engine,
                why=tuple(self.why),
                ranges=sum(len(task.ranges) for task in tasks),
                buckets=0 if digests is None else len(digests.clean) + len(digests.differing),
                differing=0 if digests is None else len(digests.differing),
                settled=len(settled.ranges),
                rows_read=collected.rows_read,
            ),
            counts=counts,
            findings=findings,
            lag=self._lag(comparison, collected, clean),
            settled=settled,
            fresh=settling.settled_by([] if digests is None else digests.clean, to_uuids(findings)),
        )

    def _settled(self) -> settling.SettledRanges:
        trusts = self.job.record and self.job.tier is not Tier.FULL and not self.job.archives
        settled = settling.load(self.snapshots, self.pair, self.job.window.range, self.job.keep_for if trusts else 0.0)
        if settled.ranges or settled.forgotten:
            self._because(
                (
                    None,
                    f"{len(settled.ranges):,} ranges with {sum(settled.counts.values()):,} messages were in sync and "
                    f"nothing was written in them since: not read ({settled.forgotten:,} others were touched)",
                )
            )
        return settled

    def _digests(
        self, size: plan.Size, gaps: Sequence[Range], settled: settling.SettledRanges, horizon: UUID
    ) -> Digested:
        with timed(self.seconds, "digest"):
            points = plan.points_between(self.snapshots, size, gaps, settled.counts.total())
            buckets = plan.cut(gaps, points)
            self.progress.stage(f"{self.pair}: digests", None)
            return digested(self.snapshots, self.pair, gaps, buckets, horizon) if buckets else Digested([], [])

    def _tasks(
        self, size: plan.Size, gaps: Sequence[Range], digests: Digested | None, scattered: bool
    ) -> tuple[list[settling.SettledRange], list[Task]]:
        """Return the ranges that are clean by their digests, and the tasks that read what is left."""
        if digests is not None:
            total, differing = digests.rows
            share = differing / total if total else 0.0
            buckets = len(digests.clean) + len(digests.differing)
            found = f"{len(digests.differing):,} of {buckets:,} ranges differ, with {share:.1%} of the rows"
            # Gaps between settled ranges are scattered anyhow: what is clean in them isn't worth reading.
            if scattered or share <= plan.READ_ALL_ABOVE:
                self._because((None, f"{found}: only they are read"))
                return digests.clean, plan.few_tasks(plan.joined(digests.differing))
            self._because((None, f"{found}: everything is read"))
        points = plan.points(self.snapshots, size, plan.POINTS)
        return [], plan.few_tasks(plan.weighed(gaps, points, size))

    def _compare(self, engine: EngineName, comparison: Comparison, tasks: Sequence[Task]) -> Collected:
        collected = Collected()
        if not tasks:
            return collected
        self.progress.stage(f"{self.pair}: rows", len(tasks))
        with timed(self.seconds, "compare"):
            for result in self.engine(engine).run(comparison, tasks, self.progress.done):
                collected.add(result)
        return collected

    def _lag(self, comparison: Comparison, collected: Collected, clean: Sequence[settling.SettledRange]) -> Lag | None:
        """Return the lags; where digests spared the rows, with those of some of the clean ranges."""
        step = max(len(clean) // _SAMPLED, 1)
        some = [each for each, counts in clean[::step] if counts[Outcome.CONSUMED]][:_SAMPLED]
        if not some:
            return collected.lag(sampled=False)
        with timed(self.seconds, "lag"):
            sampled = Collected()
            for result in LocalEngine(1).run(comparison, [Task(0, tuple(some))], lambda _: None):
                sampled.add(result)
        collected.lags.update(sampled.lags)
        return collected.lag(sampled=True)

    def _because(self, choice: tuple[T, str]) -> T:
        self.why.append(choice[1])
        self.progress.say(f"{self.pair}: {choice[1]}")
        return choice[0]


def in_flight(findings: pa.Table) -> pa.Table:
    """Return the messages in flight of a table of findings."""
    return findings.filter(pc.equal(findings["outcome"], int(Outcome.IN_FLIGHT)))
