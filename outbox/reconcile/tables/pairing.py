"""Compare one pair of which a foreign table is a side at least, in two snapshots of PostgreSQL.

Nothing is settled for the next night: a foreign table's rows don't tell when they were written. Both sides are
digested by what reads their rows, whatever they are, in the same buckets, and only ranges that differ are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from uuid import UUID

from outbox.database.execute import Row, Statement, execute
from outbox.reconcile import plan
from outbox.reconcile.compare import Comparison, timed
from outbox.reconcile.digest import Digested, mixing_of
from outbox.reconcile.job import Outcome, Part, Range, Tier
from outbox.reconcile.judge import Rules
from outbox.reconcile.pairing import Backlog, FirstPass, SnapshotPairing, rules_of, sources
from outbox.reconcile.rows import ComparisonPlan
from outbox.reconcile.source import PostgresSide, Snapshot, reaching
from outbox.reconcile.sql import Mixing
from outbox.reconcile.tables import sql
from outbox.reconcile.tables.side import TableSide, census

#: Rows of a side in a bucket, and buckets at most: what is read of a foreign table costs a pass over it, however little
#: it is, so that they need not be small.
_ROWS_OF_BUCKET = 100
_MOST_BUCKETS = 65_536


@dataclass(slots=True)
class TablePairing(SnapshotPairing):
    """One pair of which a side at least has a foreign table, being compared."""

    def compare(self) -> FirstPass:
        """Compare, and return the findings.

        Raises:
            InvalidSettings: a foreign table lacks a column, or has a row that can't be judged.
            SourceError: a side can't be read.
        """
        rules = rules_of(self.job, self.pair, self.snapshots)
        both = sources(self.job, self.pair, self.snapshots)
        by_part: dict[Part, PostgresSide] = {side.part: side for side in both if isinstance(side, PostgresSide)}
        comparison = Comparison(*both, rules)
        self.tell_lags()
        with timed(self.seconds, "plan"):
            size = self._sizes(by_part)
            tier, why = plan.choose_tier(self.job, max(size.values()))
            self.because(why)
            engine, why = plan.choose_engine(self.job)
            self.because(why)
            mixing = replace(mixing_of(self.snapshots), mix="sum")
            points = self._points(by_part, size, mixing)
        digests = Digested([], [])
        if tier is Tier.DIGEST:
            with timed(self.seconds, "digest"):
                self.progress.stage(f"{self.pair}: digests", None)
                digests = self._digests(by_part, mixing, plan.cut([self.job.window.range], points), rules)
        if tier is Tier.DIGEST and plan.spares(digests, 1):
            self.because(f"{digests}: only they are read")
            clean, tasks = digests.clean, plan.few_tasks(plan.joined(digests.differing))
        else:
            if tier is Tier.DIGEST:
                self.because(f"{digests}: everything is read")
            clean, tasks = [], plan.few_tasks(plan.weighed([self.job.window.range], points, size))
        backlog = Backlog(self.job.max_findings)
        collected = self.judged(comparison, tasks, backlog)
        lags, foreign = self.snapshots.lags, tuple(self.job.tables)
        planned = ComparisonPlan(tier, engine, tuple(self.why), ranges=0, standby_lag=lags, foreign=foreign)
        result = self.result(planned, tasks, digests, collected, collected.lag(sampled=False))
        result.counts = sum((counts for _, counts in clean), result.counts)
        return FirstPass(result, backlog, rules, None, ())

    def _snapshot(self, part: Part) -> Snapshot:
        return self.snapshots.producer if part == "producer" else self.snapshots.consumer

    def _read(self, part: Part, statement: Statement) -> list[Row]:
        snapshot = self._snapshot(part)
        with reaching(snapshot.access):
            return execute(snapshot.connection, statement)[0]

    def _sizes(self, by_part: dict[Part, PostgresSide]) -> plan.Size:
        """Return how many rows a foreign side has, and about how many one of ours; see that they can be judged."""
        return {
            part: census(side, self._snapshot(part).connection)
            if isinstance(side, TableSide)
            else plan.rows_of(part, self._snapshot(part))
            for part, side in by_part.items()
        }

    def _points(self, by_part: dict[Part, PostgresSide], size: plan.Size, mixing: Mixing) -> list[UUID]:
        """Return ids that are evenly spread over the larger foreign side, in order."""
        part = max((part for part, side in by_part.items() if isinstance(side, TableSide)), key=lambda part: size[part])
        buckets = min(size[part] // _ROWS_OF_BUCKET, _MOST_BUCKETS)
        if buckets < 2:
            return []
        statement = sql.sample(by_part[part].statement([self.job.window.range]), mixing, size[part] // buckets)
        return sorted(id_ for (id_,) in self._read(part, statement))

    def _digests(
        self, by_part: dict[Part, PostgresSide], mixing: Mixing, buckets: Sequence[Range], rules: Rules
    ) -> Digested:
        bounds = [bucket.first for bucket in buckets]
        bodies = all(
            "digest" in side.table.declared.columns for side in by_part.values() if isinstance(side, TableSide)
        )

        def digest(part: Part) -> dict[int, Row]:
            every = by_part[part].statement([self.job.window.range])
            statement = sql.digests(part, every, bounds, mixing, bodies=bodies)
            return {row[0]: row[1:] for row in self._read(part, statement)}

        with ThreadPoolExecutor(1, thread_name_prefix="digest") as pool:
            ours = pool.submit(digest, "producer")
            theirs = digest("consumer")
            sent = ours.result()
        result, horizon = Digested([], []), rules.horizon
        for number, bucket in enumerate(buckets, 1):
            of_producer, of_consumer = sent.get(number, _NOTHING_SENT), theirs.get(number, _NOTHING_KNOWN)
            pruned = horizon is not None and bucket.end is not None and bucket.end.bytes <= horizon
            counts = _clean(of_producer, of_consumer, pruned=pruned)
            if counts is None:
                result.differing.append((bucket, int(of_producer[0]) + int(of_consumer[0])))
            else:
                result.clean.append((bucket, counts))
        return result


_NOTHING_SENT: Row = (0, None, 0, 0, 0)
_NOTHING_KNOWN: Row = (0, None, 0)


def _clean(of_producer: Row, of_consumer: Row, *, pruned: bool) -> Counter[Outcome] | None:
    """Return the counts of a bucket by its digests (`sql.digests`); None if it isn't clean."""
    sent, sent_sum, plain, back, left_out = of_producer
    known, known_sum, consumed = of_consumer
    if not sent and pruned:
        return +Counter({Outcome.UNJUDGED: int(known)})
    agree = sent == plain + back + left_out and known == consumed == plain and (sent_sum or 0) == (known_sum or 0)
    if not agree:
        return None
    counts = {Outcome.CONSUMED: int(plain), Outcome.ROLLED_BACK: int(back), Outcome.LEFT_OUT: int(left_out)}
    return +Counter(counts)
