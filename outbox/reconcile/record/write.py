"""Runs and findings, written into the consumer's database as they happen."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from sqlalchemy import Engine

from outbox.database.execute import Statement, execute
from outbox.message.model import uuid7
from outbox.reader import plain
from outbox.reconcile.job import Interrupted, Job, hidden
from outbox.reconcile.record import sql
from outbox.reconcile.rows import Finding, PairResult, Repaired, to_findings
from outbox.reconcile.source import engine_of, reaching
from outbox.text import summary_of

if TYPE_CHECKING:
    pass


T = TypeVar("T")

_BATCH = 2_000


@dataclass(frozen=True, slots=True)
class RunIds:
    """What a job is called in the record, and its runs, one for each pair; ``schedule`` is that which began it."""

    job: UUID
    runs: tuple[UUID, ...]
    schedule: str | None = None

    @classmethod
    def new(cls, job: Job, schedule: str | None = None) -> RunIds:
        """Return new ones for a job."""
        return cls(uuid7(), tuple(uuid7() for _ in job.pairs), schedule)

    def begin(self, job: Job, number: int) -> Statement:
        """Return what writes that the pair of this number is being compared: without an end, it died over it."""
        pair, window = job.pairs[number], job.window
        values = {"id": self.runs[number], "job": self.job, "topic": pair.topic, "group": pair.group}
        values |= {"since": window.since, "until": window.until, "schedule": self.schedule}
        return sql.begin_run(job.consumer.schema, values)


class Record:
    """The record of one job; does nothing where ``job.record`` is off."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._schema = job.consumer.schema
        self._engine: Engine | None = engine_of(job.consumer) if job.record else None

    def close(self) -> None:
        """Close all connections."""
        if self._engine is not None:
            self._engine.dispose()

    def begin(self, ids: RunIds) -> None:
        """Write that all pairs are being compared, of those that it isn't written of."""
        self._write(*(ids.begin(self._job, number) for number in range(len(ids.runs))))

    def reopen(self, run_id: UUID) -> None:
        """Write that what a run found is being repaired: without an end, it died over it."""
        self._write(sql.reopen_run(self._schema, run_id))

    def fail(self, run_id: UUID, error: BaseException) -> None:
        """Write why a run ended before its time."""
        stopped = isinstance(error, KeyboardInterrupt | Interrupted)
        self._write(sql.fail_run(self._schema, run_id, "interrupted" if stopped else why_of(error, self._job)))

    def findings(self, result: PairResult) -> None:
        """Write the differences of a pair, before anything is done about them."""
        for some in _batches(to_findings(result.findings), _BATCH):
            rows = [
                (each.id, each.outcome.label, json.dumps(detail_of(each)), self._job.repair_of(each.outcome).value)
                for each in some
            ]
            self._write(sql.write_findings(self._schema, result.run_id, rows))

    def acted(self, run_id: UUID, repairs: Sequence[Repaired]) -> None:
        """Write what was done about differences."""
        for some in _batches(repairs, _BATCH):
            rows = [(each.id, each.action.value, each.result) for each in some]
            self._write(sql.mark_acted(self._schema, run_id, rows))

    def end(self, result: PairResult) -> None:
        """Write how a pair ended."""
        counts = {outcome.label: number for outcome, number in sorted(result.counts.items()) if number}
        seconds = {name: round(seconds, 3) for name, seconds in result.seconds.items()}
        plan = plain(result.plan) | {"healed": result.healed, "seconds": seconds}
        self._write(sql.end_run(self._schema, result.run_id, counts, plan))

    def _write(self, *statements: Statement) -> None:
        if self._engine is None:
            return
        with reaching(self._job.consumer), self._engine.begin() as connection:
            execute(connection, *statements)


def why_of(error: BaseException, job: Job) -> str:
    """Return in one line what went wrong with a job, without a password."""
    text = " ".join(summary_of(error).split())
    return hidden(hidden(text, job.producer.url), job.consumer.url)


def detail_of(finding: Finding) -> dict[str, Any]:
    """Return what either side says of a difference, as JSON can hold it; without what it doesn't say."""
    values = {name: value for name, value in plain(finding).items() if name not in {"id", "outcome"}}
    return {
        name: value
        for name, value in values.items()
        if value is not None and value is not False and value not in {"none", ""}
    }


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while some := list(islice(iterator, size)):
        yield some
