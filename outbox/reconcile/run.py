"""A reconciliation from end to end: two snapshots, all pairs, the measures, a second look, the record, the repair.

Lost parts are taken up again: a reader by its snapshot; a pair whose snapshots went with their server, or
that a standby had to end, from its beginning; and a run that died by the next one, from the ranges of each pair that
were in sync.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy import Connection

from outbox.database import migration
from outbox.database.execute import execute
from outbox.errors import InvalidSettings, OutboxError, ReconcileError, SourceError, SourceLost
from outbox.reconcile import plan, sql
from outbox.reconcile.job import HEALED, EngineName, Job, NoProgress, Outcome, Pair, Progress, described
from outbox.reconcile.measure.compute import Compared, check_measures, in_transit, measure_all
from outbox.reconcile.measure.result import MeasureResult
from outbox.reconcile.pairing import (
    Common,
    Engine,
    FirstPass,
    ForeignPairing,
    LocalEngine,
    Pairing,
    by_queue,
    read_again,
    recheck,
    rules_now,
    timed,
)
from outbox.reconcile.record.settled import keep
from outbox.reconcile.record.write import Record, RunIds
from outbox.reconcile.repair import repair
from outbox.reconcile.report import gravest, listed_of
from outbox.reconcile.rows import ComparisonPlan, JobResult, PairResult, Repaired, differing, to_findings, to_uuids
from outbox.reconcile.source import (
    SessionSettings,
    Snapshots,
    connected,
    engine_of,
    insist,
    located,
    reaching,
    snapshots_of,
)
from outbox.text import duration


def reconcile(job: Job, progress: Progress | None = None, ids: RunIds | None = None) -> JobResult:
    """Compare producer and consumer, write down what differs, and repair it if the job says so.

    Both databases are read in one snapshot each, new ones for each pair; what differs is read again before it counts.
    Without ``job.apply`` nothing is changed but the record, and that only if ``job.record`` is on. ``ids`` are those
    that are in it already.

    Raises:
        SourceError: a source can't be read; the findings until then are in the record.
        InvalidSettings: a measure that can't be computed.
        ReconcileError: Spark doesn't start, or fails.
        SchemaMissing, SchemaOutdated: a database isn't migrated.
        sqlalchemy.exc.DBAPIError: a connection was lost over a repair. The next job finds repaired findings healed.
    """
    result = compare(job, progress, ids)
    if job.apply:
        mend(job, result, progress)
    return result


def compare(
    job: Job, progress: Progress | None = None, ids: RunIds | None = None, engine: Engine | None = None
) -> JobResult:
    """Compare, and write down what differs; repair nothing. ``ids``: those that are in the record already.

    ``engine`` is one that other jobs have too; without it the job has one of its own.

    Raises as `reconcile`.
    """
    began = time.monotonic()
    progress, ids = _Limited(progress or NoProgress(), job.max_time), ids or RunIds.new(job)
    # One that can't be asked now is told of below, with the record of that.
    with suppress(SourceError):
        job = located(job) or job
    job = _recordable(job, progress)
    record = Record(job)
    # What a snapshot is held for is reading alone, not the time until a cluster has a place.
    with recorded(record, ids.runs, ids), record.alive(ids.runs):
        progress.stage("databases", None)
        _check_databases(job)
        with engine_for(job, progress) if engine is None else nullcontext(engine) as running:
            passes: list[FirstPass] = []
            measured: dict[int, MeasureResult] = {}
            common = Common(job)
            for run_id, pair in zip(ids.runs, job.pairs, strict=True):
                comparison = _PairComparison(run_id, job, pair, running, progress, common)
                first, values = comparison.insist(record, None if passes else ids)
                passes.append(first)
                measured |= values
            measures = [measured[number] for number in sorted(measured)]
            results = [first.result for first in passes]
            for first in passes:
                _confirm(job, first, progress)
        for result in results:
            record.findings(result, job.policy, job.tables)
            record.measures(result.run_id, [each for each in measures if each.pair == result.pair])
        for result in results:
            record.end(result)
    seconds = time.monotonic() - began
    return JobResult(passes[0].result.begun_at, results, measures, seconds, policy=job.policy, labels=job.labels)


def foresee(job: Job, progress: Progress | None = None) -> list[tuple[Pair, ComparisonPlan]]:
    """Return how each pair would be compared, and what that would cost; compare nothing, and write nothing.

    Raises:
        SourceError: a source can't be read.
        SchemaMissing, SchemaOutdated: a database isn't migrated.
        InvalidSettings: a side isn't ours.
    """
    for part in job.tables:
        raise InvalidSettings(f"what it costs to read {part}.tables isn't known before; compare without --dry-run")
    _check_databases(replace(job, apply=False, record=False))
    job = located(job) or job
    progress, common = _Limited(progress or NoProgress(), job.max_time), Common(job)
    waiting = functools.partial(progress.done, 0)

    def take(run_id: UUID, pair: Pair) -> ComparisonPlan:
        settings = SessionSettings.of_run(run_id, job.max_time)
        with snapshots_of(job.databases, waiting=waiting, settings=settings) as snapshots:
            return Pairing(run_id, job, pair, LocalEngine(1), progress, snapshots, common).foresee()

    return [
        (pair, insist(functools.partial(take, run_id, pair), waiting=waiting, lost=lambda _: common.forget()))
        for run_id, pair in zip(RunIds.new(job).runs, job.pairs, strict=True)
    ]


def mend(job: Job, result: JobResult, progress: Progress | None = None) -> None:
    """Repair what `compare` found, by the policy of the job; what became of it is added to the result.

    Raises:
        SourceError: the record can't be written.
        sqlalchemy.exc.DBAPIError: a connection was lost. The next job finds repaired findings healed.
    """
    began, result.applied = time.monotonic(), True
    record, progress = Record(job), _Limited(progress or NoProgress(), job.max_time)
    for pair in result.pairs:
        with recorded(record, [pair.run_id]):
            record.reopen(pair.run_id)
            with record.alive([pair.run_id]):
                _repair(job, pair, record, progress)
            record.end(pair)
    result.seconds += time.monotonic() - began


def repair_found(
    job: Job,
    pair: Pair,
    run_id: UUID,
    kinds: Mapping[UUID, Outcome],
    *,
    why: str = "",
    origin: Mapping[str, str] | None = None,
) -> dict[UUID, str]:
    """Repair what an earlier run has found, as far as it is still of this kind; return the result of each.

    Both sides of each message are read once more, so that what the earlier run saw may be old.

    Raises as `mend`.
    """
    (pair,) = (each for each in (located(job) or job).pairs if each.names == pair.names)
    found, _ = read_again(job, pair, sorted(kinds))
    now = {finding.id: finding for finding in to_findings(differing(found))}
    results = dict.fromkeys(kinds.keys() - now.keys(), HEALED)
    same = []
    for message_id, finding in now.items():
        if finding.outcome is kinds[message_id]:
            same.append(finding)
        else:
            results[message_id] = f"refused: it is {finding.outcome.label} by now; run the reconciliation again"
    engines = engine_of(job.producer), engine_of(job.consumer)
    repaired = repair(job, pair, run_id, same, *engines, why=why, origin=origin)
    return results | {each.id: each.result for each in repaired}


def _recordable(job: Job, progress: Progress) -> Job:
    """Return the job; one that records nothing, which is said, where no database has our tables for it."""
    if not job.record or job.record_in is not None or "consumer" not in job.tables:
        return job
    progress.say(
        "nothing is recorded: the consumer's tables aren't ours; name a database for the record (--record, "
        "OUTBOX_RECORD_URL, [record] in a file, [job.record] in a fleet's)"
    )
    return replace(job, record=False)


def _check_databases(job: Job) -> None:
    """See that all databases are there, and can be written to as far as the job does: one missing later was lost.

    Raises:
        SourceLost: one can't be reached.
        InvalidSettings: one is a standby.
        SchemaMissing, SchemaOutdated: where the record is to be isn't migrated.
    """
    for part, access in job.databases.items():
        with connected(access) as connection:
            ((is_standby,),) = execute(connection, sql.IS_STANDBY)[0]
        # A side that isn't ours is written to at the producer alone.
        if is_standby and job.apply and not (part == "consumer" and part in job.tables):
            raise InvalidSettings(
                f"the {part} ({described(access.url)}) is a standby, in which nothing can be repaired; compare without "
                "apply, or name its primary"
            )
        if is_standby and job.record and access == job.recorder:
            raise InvalidSettings(
                f"the {part} ({described(access.url)}) is a standby, in which no run can be recorded; name another "
                "database for the record (--record, OUTBOX_RECORD_URL, [record] in a file), or record nothing"
            )
    if job.record:
        with connected(job.recorder) as connection:
            migration.require(connection, ("consumer",), job.recorder.schema)


@dataclass(frozen=True, slots=True)
class _PairComparison:
    """One read of a pair, with its measures, in snapshots of its own."""

    run_id: UUID
    job: Job
    pair: Pair
    engine: Engine
    progress: Progress
    common: Common

    def insist(self, record: Record, begin: RunIds | None) -> tuple[FirstPass, dict[int, MeasureResult]]:
        """Take it, from the beginning where a database is lost over it; keep what is settled by it.

        Returns the measures of the pair too, by their number in the job. Where the record is to be begun with it,
        ``begin`` has its ids.
        """
        waiting = functools.partial(self.progress.done, 0)
        first, measured = insist(lambda: self._take(record, begin), waiting=waiting, lost=self._lost)
        if self.job.record and (settled := first.settled) is not None:
            written = insist(lambda: keep(self.job.recorder, self.pair, settled, first.fresh), waiting=waiting)
            if not written:
                self._say("another run was faster; which ranges are in sync is written by that one")
        return first, measured

    def _take(self, record: Record, begin: RunIds | None) -> tuple[FirstPass, dict[int, MeasureResult]]:
        job, settings = self.job, SessionSettings.of_run(self.run_id, self.job.max_time)
        waiting = functools.partial(self.progress.done, 0)
        self.progress.stage(f"{self.pair}: snapshots", None)
        # Of each pair anew: while a snapshot is held, vacuum can't remove what it sees.
        with snapshots_of(job.databases, waiting=waiting, settings=settings, foreign=job.tables) as snapshots:
            if begin is not None:
                if job.measures:
                    check_measures(job.measures, job.pairs, *self._connections(snapshots), job.window)
                record.begin(begin)
            try:
                first = self._pairing(snapshots).compare()
                if not (mine := {number: each for number, each in enumerate(job.measures) if each.of(self.pair.names)}):
                    return first, {}
                found = [Compared(self.pair, arriving(first), first.rules.starts)]
                both = self._connections(snapshots)
                with reaching(job.producer):  # where the bodies are; a SELECT of the user's names its own side
                    values = measure_all(mine.values(), found, *both, job.window, job.producer.schema)
                return first, dict(zip(mine, values, strict=True))
            except SourceError as error:
                # A reader only knows that it can't read: where the server went, that is why, and it may be back.
                if isinstance(error, SourceLost) or snapshots.held:
                    raise
                raise SourceLost(str(error)) from None

    def _pairing(self, snapshots: Snapshots) -> Pairing:
        """Return what compares the pair: it depends on what its sides can."""
        kind = ForeignPairing if self.job.tables else Pairing
        return kind(self.run_id, self.job, self.pair, self.engine, self.progress, snapshots, self.common)

    def _connections(self, snapshots: Snapshots) -> tuple[Connection, Connection]:
        return snapshots.producer.connection, snapshots.consumer.connection

    def _lost(self, error: SourceLost) -> None:
        # Rows read with the lost snapshots may be rows that the server has lost with them.
        self.common.forget()
        self._say(f"{error}; the comparison is begun again, with new snapshots")

    def _say(self, sentence: str) -> None:
        self.progress.say(f"{self.pair}: {sentence}")


def arriving(first: FirstPass) -> list[UUID]:
    """Return the ids of what is on its way as far as measures go: all that lies beyond the offset is."""
    # What took effect in an earlier passage of the group isn't on its way, also where this read fails.
    coming = (each for each in in_transit(first.result.findings) if each.bytes not in first.rules.again)
    return [*coming, *to_uuids(first.backlog.positions)]


def _confirm(job: Job, first: FirstPass, progress: Progress) -> None:
    """Take the second look, and list as many of the differences as the job wants listed.

    What lies beyond the group's offset is looked at by where the offset is now: only what it has passed is read again.
    """
    result, backlog = first.result, first.backlog
    found, positions = differing(result.findings), backlog.positions
    progress.stage(f"{result.pair}: second look", found.num_rows + positions.num_rows)
    with timed(result.seconds, "second look"):
        if positions.num_rows:
            positions, passed = backlog.parted(insist(lambda: rules_now(job, result.pair)))
            found = pa.concat_tables([found, passed], promote_options="default").sort_by("id")
        ahead = positions.num_rows
        progress.done(ahead)
        confirmed, opened, change = recheck(found, first.again, lambda steps: progress.done(ahead + steps), first.batch)
    result.counts.update(change)
    result.counts = +result.counts
    result.open = pa.concat_tables([result.open, opened]).sort_by("id")
    result.healed = found.num_rows - confirmed.num_rows
    result.backlog = by_queue(confirmed, positions)
    still = pc.is_in(backlog.listed["id"], value_set=positions["id"].combine_chunks())
    result.findings = gravest(pa.concat_tables([confirmed, backlog.listed.filter(still)]), job.max_findings)
    result.left_out = sum(result.differences.values()) - result.findings.num_rows
    if result.left_out:
        progress.say(f"{result.pair}: {listed_of(result)}")


def _repair(job: Job, result: PairResult, record: Record, progress: Progress) -> None:
    def write_down(news: Sequence[Repaired]) -> None:
        record.acted(result.run_id, news)
        result.repairs.extend(news)
        progress.done(len(result.repairs))

    progress.stage(f"{result.pair}: repair", None)
    engines = engine_of(job.producer), engine_of(job.consumer)
    with timed(result.seconds, "repair"):
        repair(job, result.pair, result.run_id, to_findings(result.findings), *engines, write_down)


@contextmanager
def engine_for(job: Job, progress: Progress, jobs: int | None = None) -> Iterator[Engine]:
    """Yield the engine of a job, or of so many ``jobs`` like it at once; Spark has started by then.

    It ends with the block.
    """
    if plan.choose_engine(job)[0] is EngineName.LOCAL:
        yield LocalEngine(job.workers)
        return
    from outbox.reconcile.spark.frames import SparkEngine  # noqa: PLC0415 - an extra

    progress.stage("Spark starts", None)
    with SparkEngine(job.spark, job.workers, jobs) as engine:
        engine.start(functools.partial(progress.done, 0))
        yield engine


class _Limited(NoProgress):
    """A progress that ends a job which takes longer than so many seconds."""

    def __init__(self, progress: Progress, seconds: float) -> None:
        self._progress = progress
        self._seconds = seconds
        self._until = time.monotonic() + seconds

    def stage(self, title: str, total: int | None) -> None:
        """A stage begins."""
        self._check()
        self._progress.stage(title, total)

    def done(self, steps: int) -> None:
        """Steps are done."""
        self._check()
        self._progress.done(steps)

    def say(self, sentence: str) -> None:
        """Something was decided."""
        self._progress.say(sentence)

    def _check(self) -> None:
        if time.monotonic() > self._until:
            raise ReconcileError(
                f"it took longer than max_time = {duration(self._seconds)}; mend: allow more, take a smaller window, "
                "or compare with more workers"
            )


@contextmanager
def recorded(record: Record, runs: Iterable[UUID], ids: RunIds | None = None) -> Iterator[None]:
    """Write into the record why these runs ended before their time; that they began too, where there are ``ids``."""
    try:
        yield
    except BaseException as error:
        # This is the error to tell, also where the record can't be written any more.
        with suppress(OutboxError):
            if ids is not None:
                # Once, as `fail`: where it is the record that can't be reached, the run doesn't wait for it.
                record.begin(ids, tries=1)
            for run_id in runs:
                record.fail(run_id, error)
        raise
