"""Compare one pair of which Spark alone can read a side: a lake, a warehouse, another kind of database.

Each side becomes a frame of the judge's rows: what Spark reads is mapped column by column; what PostgreSQL has is read
over Arrow by the tasks, in a snapshot. Both are brought together by their ids in one shuffle. A source of Spark's has
no snapshot and no digests: every row is read, and what differs is read again, until two readings in a row agree.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from outbox.database.execute import execute
from outbox.errors import OutboxError, ReconcileError
from outbox.reconcile import plan
from outbox.reconcile.compare import Collected, compared, timed
from outbox.reconcile.job import Outcome, Part, Range, Tier
from outbox.reconcile.judge import Rules
from outbox.reconcile.pairing import AnyPairing, horizon_of, in_flight, of_group, side_of
from outbox.reconcile.report import gravest
from outbox.reconcile.rows import ComparisonPlan, PairResult, to_uuids
from outbox.reconcile.source import (
    PostgresSide,
    SessionSettings,
    Snapshot,
    as_time,
    connected,
    raise_bare,
    reaching,
    snapshot_of,
)
from outbox.reconcile.sql import CLOCK_AND_LAG, LAST_ID, PORTABLE
from outbox.reconcile.tables import plans, sql
from outbox.reconcile.tables.columns import FOREIGN, ordered
from outbox.reconcile.tables.side import TableSide, census

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from outbox.reconcile.spark.engine import SparkEngine

#: Rows of PostgreSQL's in a task.
_ROWS_OF_TASK = 400_000
#: So many ids are asked for at once.
_BATCH = 2_000
#: A message at which both sides are at work is different at each reading; after so many it is reported as it is.
_MOST_READINGS = 4


@dataclass(slots=True)
class LakePairing(AnyPairing):
    """One pair, being compared on Spark."""

    def compare(self) -> PairResult:
        """Compare, take the second look, and return the findings.

        Raises:
            InvalidSettings: a table lacks a column, or an option of its source isn't there.
            SourceError: a database can't be read.
            ReconcileError: Spark can't read a source, or a row can't be judged; without what `options_env` names.
        """
        with ExitStack() as stack:
            spark = cast("SparkEngine", self.engine)
            secrets = [value for table in self.job.by_spark.values() for value in table.secrets().values()]
            stack.enter_context(_without(secrets))
            self.because("every row is read: Spark's sources have no digests")
            engine, why = plan.choose_engine(self.job)
            self.because(why)
            for part, table in self.job.by_spark.items():
                self.because(f"the {part}'s {table} is read as it is at the time, without a snapshot")
            snapshots = {part: self._snapshot(stack, part) for part in reversed(self.job.databases)}
            rules = self._rules(snapshots)
            begun_at = as_time(rules.consumer_now)
            collected = self._first(spark, snapshots, rules)
            found = collected.table
        differing = found.filter(pc.greater_equal(found["outcome"], int(Outcome.TORN)))
        with _without(secrets):
            confirmed, opened, change = self._second(spark, differing)
        collected.counts.update(change)
        result = PairResult(
            run_id=self.run_id,
            pair=self.pair,
            window=self.job.window,
            begun_at=begun_at,
            plan=ComparisonPlan(
                Tier.FULL,
                engine,
                tuple(self.why),
                ranges=1,
                rows_read=collected.rows_read,
                standby_lag={part: each.lag / 1e6 for part, each in snapshots.items() if each.lag is not None},
                foreign=tuple(self.job.tables),
            ),
            counts=+collected.counts,
            findings=gravest(confirmed, self.job.max_findings),
            open=pa.concat_tables([in_flight(found), opened]).sort_by("id"),
            healed=differing.num_rows - confirmed.num_rows,
            lag=collected.lag(sampled=False),
            seconds=self.seconds,
        )
        result.left_out = sum(result.differences.values()) - result.findings.num_rows
        return result

    def _snapshot(self, stack: ExitStack, part: Part) -> Snapshot:
        settings = SessionSettings.of_run(self.run_id, self.job.max_time)
        ours: list[Part] = [] if part in self.job.tables else [part]
        access = self.job.databases[part]
        snapshot = snapshot_of(access, ours, waiting=lambda: self.progress.done(0), settings=settings)
        return stack.enter_context(snapshot)

    def _rules(self, snapshots: Mapping[Part, Snapshot]) -> Rules:
        rules = self._rules_at({part: (each.now, each.lag) for part, each in snapshots.items()})
        if "consumer" in self.job.tables:
            return rules
        with reaching(self.job.consumer):
            return of_group(rules, self.job, self.pair, snapshots["consumer"].connection)

    def _rules_now(self) -> Rules:
        times: dict[Part, tuple[int, int | None]] = {}
        for part, access in self.job.databases.items():
            with connected(access) as connection:
                ((now, lag),) = execute(connection, CLOCK_AND_LAG)[0]
                times[part] = now, lag
        rules = self._rules_at(times)
        if "consumer" in self.job.tables:
            return rules
        with connected(self.job.consumer) as connection:
            return of_group(rules, self.job, self.pair, connection)

    def _rules_at(self, times: Mapping[Part, tuple[int, int | None]]) -> Rules:
        """Return rules without what our tables say of the group; of each database its clock and lag are given.

        Without any database it is the clock of this host.
        """
        here = int(time.time() * 1e6)
        now = {part: times.get(part, (next(iter(times.values()), (here, None))[0], None)) for part in FOREIGN}
        lag = max(lag or 0 for _, lag in now.values())
        return Rules(
            producer_now=now["producer"][0],
            consumer_now=now["consumer"][0],
            grace=int(self.job.window.grace * 1e6) + lag,
            horizon=horizon_of(self.job, now["producer"][0]),
            offsets=None,
            max_resends=self.job.max_resends,
        )

    # --- the first look ----------------------------------------------------------------------------------

    def _first(self, spark: SparkEngine, snapshots: Mapping[Part, Snapshot], rules: Rules) -> Collected:
        from outbox.reconcile.spark.engine import run, translating  # noqa: PLC0415 - an extra
        from outbox.reconcile.spark.tasks import results  # noqa: PLC0415 - an extra

        opened = spark.session
        self.progress.stage(f"{self.pair}: rows", 100)
        with timed(self.seconds, "compare"), translating(opened):
            both = {part: self._frame(spark, part, snapshots.get(part)) for part in FOREIGN}
            frame = plans.judged(both["producer"], both["consumer"], rules)
            answers = run(opened, frame, lambda share: self.progress.done(int(share * 100)))
            self.progress.done(100)
        return results(answers)

    def _frame(self, spark: SparkEngine, part: Part, snapshot: Snapshot | None) -> DataFrame:
        if snapshot is None:
            return self._mapped(spark, part)
        from outbox.reconcile.spark.session import refuse_loopback  # noqa: PLC0415 - an extra

        refuse_loopback(spark.session.master, snapshot.access.resolved().url)
        side = self._side(part, snapshot)
        rows = census(side, snapshot.connection) if isinstance(side, TableSide) else plan.rows_of(part, snapshot)
        whole = self.job.window.range
        points: list[UUID] = []
        if rows > _ROWS_OF_TASK:
            statement = sql.sample(side.statement([whole]), PORTABLE, _ROWS_OF_TASK)
            points = sorted(id_ for (id_,) in execute(snapshot.connection, statement)[0])
        return plans.of_database(spark.session.spark, side, plan.cut([whole], points))

    def _mapped(self, spark: SparkEngine, part: Part) -> DataFrame:
        table = self.job.by_spark[part]
        return plans.of_table(spark.session.spark, part, table, self.pair, self.job.window.range)

    def _side(self, part: Part, snapshot: Snapshot | None) -> PostgresSide:
        """Return the side of a database, as of a snapshot if there is one."""
        return cast("PostgresSide", side_of(self.job, self.pair, part, snapshot))

    # --- the second look ---------------------------------------------------------------------------------

    def _second(self, spark: SparkEngine, found: pa.Table) -> tuple[pa.Table, pa.Table, Counter[Outcome]]:
        """Read differences again, until two readings in a row agree.

        Returns those that are still there, and what of them is in flight now; and how the counts change.
        """
        outcomes, opened = _outcomes(found), found.slice(0, 0)
        change: Counter[Outcome] = Counter()
        change.subtract(outcomes.values())
        self.progress.stage(f"{self.pair}: second look", found.num_rows)
        with timed(self.seconds, "second look"):
            for reading in range(_MOST_READINGS if outcomes else 0):
                collected = self._again(spark, sorted(outcomes))
                rows = collected.table
                found = rows.filter(pc.greater_equal(rows["outcome"], int(Outcome.TORN)))
                opened = pa.concat_tables([opened, in_flight(rows)])
                change.update({each: number for each, number in collected.counts.items() if not each.differs})
                before, outcomes = outcomes, _outcomes(found)
                if outcomes == before or not outcomes or reading == _MOST_READINGS - 1:
                    break
        change.update(outcomes.values())
        self.progress.done(found.num_rows)
        return found, opened, change

    def _again(self, spark: SparkEngine, ids: Sequence[UUID]) -> Collected:
        rules = self._rules_now()
        # What the consumer has consumed meanwhile, the producer had sent before.
        both = {part: self._read_again(spark, part, ids) for part in FOREIGN}
        return compared(both["producer"], both["consumer"], rules)

    def _read_again(self, spark: SparkEngine, part: Part, ids: Sequence[UUID]) -> pa.Table:
        from outbox.reconcile.spark.engine import run, translating  # noqa: PLC0415 - an extra

        if part in self.job.by_spark:
            with translating(spark.session):
                frame = plans.only(self._mapped(spark, part), part, [each.bytes for each in ids])
                rows = run(spark.session, frame, lambda _: self.progress.done(0))
            return ordered(plans.unwired(rows, part), f"the {part}'s {self.job.tables[part]}")
        side = self._side(part, None)
        tables = []
        for start in range(0, len(ids), _BATCH):
            tables.append(side.read([_only(each) for each in ids[start : start + _BATCH]]))
            self.progress.done(0)
        return pa.concat_tables([side.schema.empty_table(), *tables])


@contextmanager
def _without(secrets: Sequence[str]) -> Iterator[None]:
    """Leave secrets out of what goes wrong in the block."""
    try:
        yield
    except OutboxError as error:
        text = str(error)
        for secret in sorted(filter(None, secrets), key=len, reverse=True):
            text = text.replace(secret, "***")
        if text == str(error):
            raise
        raise_bare(ReconcileError(text))


def _only(id_: UUID) -> Range:
    return Range(id_, None if id_ == LAST_ID else UUID(int=id_.int + 1))


def _outcomes(table: pa.Table) -> dict[UUID, Outcome]:
    return dict(zip(to_uuids(table), map(Outcome, table["outcome"].to_pylist()), strict=True))
