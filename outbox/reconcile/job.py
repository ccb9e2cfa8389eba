"""A reconciliation from end to end: two snapshots, all pairs, the measures, a second look, the record, the repair."""

from __future__ import annotations

import datetime as dt
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from uuid import UUID

from outbox.ids import uuid7
from outbox.reconcile import settled as settling
from outbox.reconcile.engine import Engine, LocalEngine
from outbox.reconcile.look import differing, second_look
from outbox.reconcile.measuring import Compared, check_measures, measure_all, under_way
from outbox.reconcile.model import EngineName, Pair
from outbox.reconcile.options import Job
from outbox.reconcile.pairing import FirstLook, Pairing, in_flight
from outbox.reconcile.record import Record
from outbox.reconcile.repair import repair
from outbox.reconcile.result import JobResult, MeasureResult, PairResult, Repaired, to_findings
from outbox.reconcile.rules import as_time
from outbox.reconcile.snapshots import Snapshots, engine_of, taken
from outbox.reconcile.told import Silent, Told, timed


@dataclass(slots=True)
class _Run:
    """One pair of a job on its way."""

    id: UUID
    pair: Pair
    seconds: dict[str, float] = field(default_factory=dict)


def reconcile(job: Job, told: Told | None = None) -> JobResult:
    """Compare producer and consumer, write down what differs, and repair it if the job says so.

    Both databases are read in one snapshot each; what differs is read again before it counts. Without ``job.apply``
    nothing is changed but the record, and that only if ``job.record`` is on.

    Raises:
        SourceError: a source can't be read; what was found until then is in the record.
        InvalidSettings: a measure that can't be computed.
        ReconcileError: Spark doesn't start, or fails.
        SchemaMissing, SchemaOutdated: a database isn't migrated.
    """
    began = time.monotonic()
    teller = told or Silent()
    record = Record(job, uuid7())
    runs = [_Run(uuid7(), pair) for pair in job.pairs]
    try:
        with _engines(job) as engine, _recorded(record, runs):
            with taken(job.producer, job.consumer) as snapshots:
                check_measures(
                    job.measures, job.pairs, snapshots.producer.connection, snapshots.consumer.connection, job.window
                )
                for run in runs:
                    record.begin(run.id, run.pair, job.window)
                looks = [Pairing(job, run.pair, snapshots, engine, teller, run.seconds).look() for run in runs]
                measures = _measures(job, looks, snapshots)
                begun_at = as_time(snapshots.consumer.now)
                for run, look in zip(runs, looks, strict=True):
                    if job.record:
                        settling.keep(snapshots.consumer, run.pair, look.settled, look.fresh)
            results = [_finish(job, run, look, begun_at, teller) for run, look in zip(runs, looks, strict=True)]
            for result in results:
                record.findings(result)
                if job.apply:
                    _repair(job, result, record, teller)
                record.end(result)
    finally:
        record.close()
    return JobResult(begun_at, results, measures, time.monotonic() - began, job.apply)


def _measures(job: Job, looks: list[FirstLook], snapshots: Snapshots) -> list[MeasureResult]:
    if not job.measures:
        return []
    return measure_all(
        job.measures,
        [Compared(pair, under_way(look.told), look.rules.starts) for pair, look in zip(job.pairs, looks, strict=True)],
        snapshots.producer.connection,
        snapshots.consumer.connection,
        job.window,
        job.producer.schema,
    )


def _finish(job: Job, run: _Run, look: FirstLook, begun_at: dt.datetime, teller: Told) -> PairResult:
    found = differing(look.told)
    teller.stage(f"{run.pair}: second look", found.num_rows)
    with timed(run.seconds, "second look"):
        looked = second_look(job, run.pair, found, teller.done)
    counts = Counter(look.counts)
    counts.update(looked.change)
    return PairResult(
        run_id=run.id,
        pair=run.pair,
        window=job.window,
        begun_at=begun_at,
        plan=look.plan,
        counts=+counts,
        findings=looked.findings,
        open=in_flight(look.told),
        healed=looked.healed,
        lag=look.lag,
        seconds=run.seconds,
    )


def _repair(job: Job, result: PairResult, record: Record, teller: Told) -> None:
    def told(news: Sequence[Repaired]) -> None:
        record.acted(result.run_id, news)
        result.repairs.extend(news)
        teller.done(len(result.repairs))

    teller.stage(f"{result.pair}: repair", None)
    producer, consumer = engine_of(job.producer), engine_of(job.consumer)
    try:
        with timed(result.seconds, "repair"):
            repair(job, result.pair, result.run_id, to_findings(result.findings), producer, consumer, told)
    finally:
        producer.dispose()
        consumer.dispose()


@contextmanager
def _engines(job: Job) -> Iterator[Callable[[EngineName], Engine]]:
    """Yield what gives the engine of a name; Spark starts when it is needed first, and ends with the block."""
    with ExitStack() as stack:
        opened: dict[EngineName, Engine] = {EngineName.LOCAL: LocalEngine(job.workers)}

        def engine(name: EngineName) -> Engine:
            if name not in opened:
                from outbox.reconcile.spark.engine import SparkEngine  # noqa: PLC0415 - an extra

                opened[name] = stack.enter_context(SparkEngine(job.spark, job.workers))
            return opened[name]

        yield engine


@contextmanager
def _recorded(record: Record, runs: list[_Run]) -> Iterator[None]:
    """Write into the record why runs ended without a result."""
    try:
        yield
    except BaseException as error:
        for run in runs:
            record.fail(run.id, error)
        raise
