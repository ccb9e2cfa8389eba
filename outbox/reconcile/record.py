"""Runs and findings, written into the consumer's database as they happen."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy import Engine

from outbox.reconcile.model import Pair, Window
from outbox.reconcile.options import Job
from outbox.reconcile.result import Finding, PairResult, Repaired, to_findings
from outbox.reconcile.snapshots import engine_of, reaching
from outbox.store import reconcile_record as store
from outbox.store.execute import Statement, execute
from outbox.text import summary_of

T = TypeVar("T")

_BATCH = 2_000


class Record:
    """The record of one job; does nothing where ``job.record`` is off."""

    def __init__(self, job: Job, job_id: UUID) -> None:
        self._job, self._id = job, job_id
        self._schema = job.consumer.schema
        self._engine: Engine | None = engine_of(job.consumer) if job.record else None

    def close(self) -> None:
        """Close all connections."""
        if self._engine is not None:
            self._engine.dispose()

    def begin(self, run_id: UUID, pair: Pair, window: Window) -> None:
        """Write that a pair is being compared: without an end, it died over it."""
        values = {"id": run_id, "job": self._id, "topic": pair.topic, "group": pair.group}
        values |= {"since": window.since, "until": window.until, "applied": self._job.apply}
        self._write(store.begin_run(self._schema, values))

    def fail(self, run_id: UUID, error: BaseException) -> None:
        """Write why a run ended without a result."""
        self._write(store.end_run(self._schema, run_id, {}, None, summary_of(error)))

    def findings(self, result: PairResult) -> None:
        """Write the differences of a pair, before anything is done about them."""
        for some in _batches(to_findings(result.findings), _BATCH):
            rows = [
                store.FindingRow(
                    finding.id,
                    finding.outcome.label,
                    detail_of(finding),
                    self._job.policy.action(finding.outcome).value,
                )
                for finding in some
            ]
            self._write(store.write_findings(self._schema, result.run_id, rows))

    def acted(self, run_id: UUID, repairs: Sequence[Repaired]) -> None:
        """Write what was done about differences."""
        for some in _batches(repairs, _BATCH):
            self._write(
                store.mark_acted(
                    self._schema,
                    run_id,
                    [each.id for each in some],
                    [each.action.value for each in some],
                    [each.result for each in some],
                )
            )

    def end(self, result: PairResult) -> None:
        """Write how a pair ended."""
        counts = {outcome.label: number for outcome, number in sorted(result.counts.items()) if number}
        plan = result.plan
        told = {
            "tier": plan.tier.value,
            "engine": plan.engine.value,
            "why": list(plan.why),
            "ranges": plan.ranges,
            "buckets": plan.buckets,
            "differing": plan.differing,
            "kept": plan.kept,
            "rows_read": plan.rows_read,
            "healed": result.healed,
            "seconds": {name: round(seconds, 3) for name, seconds in result.seconds.items()},
        }
        self._write(store.end_run(self._schema, result.run_id, counts, told, None))

    def _write(self, *statements: Statement) -> None:
        if self._engine is None:
            return
        with reaching(self._job.consumer), self._engine.begin() as connection:
            execute(connection, *statements)


def detail_of(finding: Finding) -> dict[str, Any]:
    """Return what either side says of a difference, as JSON can hold it; without what it doesn't say."""
    values = {
        "state": None if finding.state is None else finding.state.name.lower(),
        "sends": finding.sends,
        "queue": finding.queue,
        "position": finding.position,
        "at": _iso(finding.at),
        "compensated": finding.compensated or None,
        "status": finding.status.name.lower() if finding.status else None,
        "attempts": finding.attempts,
        "received_at": _iso(finding.received_at),
        "changed_at": _iso(finding.changed_at),
        "effects": finding.effects,
        "producer_digest": finding.producer_digest.hex() if finding.producer_digest else None,
        "consumer_digest": finding.consumer_digest.hex() if finding.consumer_digest else None,
    }
    return {name: value for name, value in values.items() if value is not None}


def _iso(moment: dt.datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(dt.UTC).isoformat()


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while some := list(islice(iterator, size)):
        yield some
