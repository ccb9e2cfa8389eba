"""Compare one pair in two snapshots: settled ranges, digests, rows; the first look."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from outbox.reconcile import plan
from outbox.reconcile.compare import Collected, Comparison, Task
from outbox.reconcile.digest import Digested, digested
from outbox.reconcile.engine import Engine, LocalEngine, Told, timed
from outbox.reconcile.judge import Rules
from outbox.reconcile.model import EngineName, Outcome, Pair, Range, Tier, to_uuids
from outbox.reconcile.options import Job
from outbox.reconcile.record import settled as settling
from outbox.reconcile.result import Lag, PlanTold
from outbox.reconcile.sides import rules_of, sides
from outbox.reconcile.source import Snapshots

T = TypeVar("T")

#: Clean ranges that are read for their lags.
_SAMPLED = 12


@dataclass(frozen=True, slots=True)
class FirstLook:
    """What one look at both sides found, in one snapshot of each (`rows.FINDING`)."""

    rules: Rules
    plan: PlanTold
    counts: Counter[Outcome]
    told: pa.Table
    lag: Lag | None
    settled: settling.Settled
    fresh: Sequence[settling.Kept]


@dataclass(slots=True)
class Pairing:
    """One pair, being compared. ``engine`` gives the engine of a name; ``seconds`` collects durations."""

    job: Job
    pair: Pair
    snapshots: Snapshots
    engine: Callable[[EngineName], Engine]
    teller: Told
    seconds: dict[str, float]
    why: list[str] = field(default_factory=list)

    def look(self) -> FirstLook:
        """Compare, and return what was found.

        Raises:
            SourceError: a source can't be read.
        """
        rules = rules_of(self.job, self.pair, self.snapshots)
        producer, consumer = sides(self.job, self.pair, rules.producer_now, rules.consumer_now, self.snapshots)
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
        told = collected.table
        return FirstLook(
            rules=rules,
            plan=PlanTold(
                tier=tier,
                engine=engine,
                why=tuple(self.why),
                ranges=sum(len(task.ranges) for task in tasks),
                buckets=0 if digests is None else len(digests.clean) + len(digests.differing),
                differing=0 if digests is None else len(digests.differing),
                kept=len(settled.ranges),
                rows_read=collected.rows_read,
            ),
            counts=counts,
            told=told,
            lag=self._lag(comparison, collected, clean),
            settled=settled,
            fresh=settling.settled_by([] if digests is None else digests.clean, to_uuids(told)),
        )

    def _settled(self) -> settling.Settled:
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

    def _digests(self, size: plan.Size, gaps: Sequence[Range], settled: settling.Settled, horizon: UUID) -> Digested:
        with timed(self.seconds, "digest"):
            points = plan.points_between(self.snapshots, size, gaps, settled.counts.total())
            buckets = plan.cut(gaps, points)
            self.teller.stage(f"{self.pair}: digests", None)
            return digested(self.snapshots, self.pair, gaps, buckets, horizon) if buckets else Digested([], [])

    def _tasks(
        self, size: plan.Size, gaps: Sequence[Range], digests: Digested | None, scattered: bool
    ) -> tuple[list[settling.Kept], list[Task]]:
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
        collected = Collected.empty()
        if not tasks:
            return collected
        self.teller.stage(f"{self.pair}: rows", len(tasks))
        with timed(self.seconds, "compare"):
            for result in self.engine(engine).run(comparison, tasks, self.teller.done):
                collected.add(result)
        return collected

    def _lag(self, comparison: Comparison, collected: Collected, clean: Sequence[settling.Kept]) -> Lag | None:
        """Return the lags; where digests spared the rows, with those of some of the clean ranges."""
        step = max(len(clean) // _SAMPLED, 1)
        some = [each for each, counts in clean[::step] if counts[Outcome.CONSUMED]][:_SAMPLED]
        if not some:
            return collected.lag(sampled=False)
        with timed(self.seconds, "lag"):
            sampled = Collected.empty()
            for result in LocalEngine(1).run(comparison, [Task(0, tuple(some))], lambda _: None):
                sampled.add(result)
        collected.lags.update(sampled.lags)
        return collected.lag(sampled=True)

    def _because(self, choice: tuple[T, str]) -> T:
        self.why.append(choice[1])
        self.teller.say(f"{self.pair}: {choice[1]}")
        return choice[0]


def in_flight(told: pa.Table) -> pa.Table:
    """Return the messages in flight of a table of findings."""
    return told.filter(pc.equal(told["outcome"], int(Outcome.IN_FLIGHT)))
