"""Runs and findings, written into the consumer's database as they happen."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from threading import Event, Thread
from typing import Any, Protocol
from uuid import UUID

from outbox.database.execute import Statement, execute, statement
from outbox.errors import OutboxError
from outbox.message.model import uuid7
from outbox.reader import plain
from outbox.reconcile.job import DONE, Access, Interrupted, Outcome, Part, Repair, Window, counts_as_json, hidden
from outbox.reconcile.measure.result import MeasureResult
from outbox.reconcile.record.timetable import HEARTBEAT
from outbox.reconcile.report import measure_as_json
from outbox.reconcile.rows import DIGESTS, Finding, PairResult, Repaired, to_findings
from outbox.reconcile.source import MOST_TRIES, connected, insist
from outbox.text import class_name, storable, summary_of

_BATCH = 2_000
#: Of so many keys of a measure its sums are kept; all totals are.
_KEYS = 100

_BEGIN = """
INSERT INTO {s}.reconciliation_run (id, job_id, topic, consumer_group, window_start, window_end, schedule, ordered_by)
VALUES (%(id)s, %(job)s, %(topic)s, %(group)s, %(since)s::timestamptz, %(until)s::timestamptz, %(schedule)s,
        %(ordered_by)s)
ON CONFLICT (id) DO NOTHING
"""

_ALIVE = """
UPDATE {s}.reconciliation_run
   SET plan = coalesce(plan, jsonb_build_object()) || jsonb_build_object('alive_at', clock_timestamp())
 WHERE id = ANY (%(ids)s::uuid[]) AND finished_at IS NULL
"""

_REOPEN = """
UPDATE {s}.reconciliation_run
   SET applied = true, finished_at = NULL,
       plan = coalesce(plan, jsonb_build_object()) || jsonb_build_object('alive_at', clock_timestamp())
 WHERE id = %(id)s
"""

_END = """
UPDATE {s}.reconciliation_run
   SET finished_at = clock_timestamp(), counts = %(counts)s::jsonb, plan = %(plan)s::jsonb
 WHERE id = %(id)s
"""

_MEASURES = "UPDATE {s}.reconciliation_run SET measures = %(measures)s::jsonb WHERE id = %(id)s"

_FAIL = "UPDATE {s}.reconciliation_run SET finished_at = clock_timestamp(), error = %(error)s WHERE id = %(id)s"

#: Write the findings of a run that it doesn't have yet; with the values of `of_findings`.
FINDINGS = """
INSERT INTO {s}.reconciliation_finding (run_id, message_id, kind, detail, action)
SELECT %(run)s, n.*
  FROM unnest(%(ids)s::uuid[], %(kinds)s::text[], %(details)s::jsonb[], %(actions)s::text[]) AS n (message, k, d, a)
 WHERE NOT EXISTS (SELECT FROM {s}.reconciliation_finding f WHERE f.run_id = %(run)s AND f.message_id = n.message)
"""

# What was done stays so: another worker that comes to it would take it for something else.
_ACTED = f"""
UPDATE {{s}}.reconciliation_finding f
   SET action = a.action, result = a.result, acted_at = clock_timestamp()
  FROM unnest(%(ids)s::uuid[], %(actions)s::text[], %(results)s::text[]) AS a (id, action, result)
 WHERE f.run_id = %(id)s AND f.message_id = a.id AND f.result IS DISTINCT FROM '{DONE}'
"""


class Recorded(Protocol):
    """What has runs in the record: a job, of each of its pairs; a fleet, one of `timetable.FLEET`."""

    @property
    def names(self) -> Sequence[tuple[str, str]]:
        """Its pairs, by topic and group."""

    @property
    def accesses(self) -> Sequence[Access]:
        """All databases that it speaks to."""

    @property
    def recorder(self) -> Access:
        """The database that has its record."""

    @property
    def window(self) -> Window:
        """Which messages it compares."""

    @property
    def record(self) -> bool:
        """Is there to be a record?"""


@dataclass(frozen=True, slots=True)
class RunIds:
    """What a job is called in the record, and its runs, one for each pair.

    ``schedule`` is that which began it, ``ordered_by`` the operator. A job that a message asks for is called as that.
    """

    job: UUID
    runs: tuple[UUID, ...]
    schedule: str | None = None
    ordered_by: str | None = None

    @classmethod
    def new(
        cls,
        job: Recorded,
        schedule: str | None = None,
        *,
        message_id: UUID | None = None,
        ordered_by: str | None = None,
    ) -> RunIds:
        """Return new ones for a job; ``message_id`` is that of the message that asks for it."""
        return cls(message_id or uuid7(), tuple(uuid7() for _ in job.names), schedule, ordered_by)

    def begin(self, job: Recorded) -> list[Statement]:
        """Return what writes that the pairs are being compared, where it isn't written: without an end, it died."""
        known: dict[str, object] = {"job": self.job, "since": job.window.since, "until": job.window.until}
        known |= {"schedule": self.schedule, "ordered_by": self.ordered_by}
        return [
            statement(job.recorder.schema, _BEGIN, {**known, "id": run_id, "topic": topic, "group": group})
            for run_id, (topic, group) in zip(self.runs, job.names, strict=True)
        ]


class Record:
    """Writes that runs began, are at work, and ended, their findings and repairs; nothing where the record is off.

    All that is written may be written twice, and is where the database is lost over it.
    """

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded

    def begin(self, ids: RunIds, *, tries: int = MOST_TRIES) -> None:
        """Write that all pairs are being compared, of those that it isn't written of.

        Raises:
            SourceLost: the database was lost ``tries`` times.
        """
        self._execute(*ids.begin(self._recorded), tries=tries)

    def fail(self, run_id: UUID, error: BaseException | str) -> None:
        """Write why a run ended before its time; its counts until then stay."""
        if isinstance(error, BaseException):
            stopped = isinstance(error, KeyboardInterrupt | Interrupted)
            error = "interrupted" if stopped else why_of(error, self._recorded)
        values = {"id": run_id, "error": error}
        # Once: a run that ends for an error isn't kept waiting.
        self._execute(replace(statement(self._schema, _FAIL, values), lossy=("error",)), tries=1)

    @contextmanager
    def alive(self, runs: Sequence[UUID]) -> Iterator[None]:
        """Say every `HEARTBEAT` that these runs are at work, until the end of the block."""
        beat = statement(self._schema, _ALIVE, {"ids": list(runs)})
        ended = Event()

        def heart() -> None:
            while not ended.wait(HEARTBEAT):
                with suppress(
                    OutboxError
                ):  # what the run itself writes tells what is wrong; the next beat may be heard
                    self._execute(beat, tries=1)

        thread = Thread(target=heart, name="outbox-reconcile-heart", daemon=True)
        if self._recorded.record:
            thread.start()
        try:
            yield
        finally:
            ended.set()

    def close(self, run_id: UUID, counts: Mapping[Outcome, int], plan: Mapping[str, Any]) -> None:
        """Write what a run has counted, and how it went: it is over."""
        self._write(_END, run_id, counts=json.dumps(counts_as_json(counts)), plan=json.dumps(plan))

    @property
    def _schema(self) -> str:
        return self._recorded.recorder.schema

    def _write(self, template: str, run_id: UUID, **values: object) -> None:
        self._execute(statement(self._schema, template, {"id": run_id, **values}))

    def _execute(self, *statements: Statement, tries: int = MOST_TRIES) -> None:
        def write() -> None:
            with connected(self._recorded.recorder) as connection:
                execute(connection, *statements)

        if self._recorded.record:
            insist(write, tries=tries)

    def reopen(self, run_id: UUID) -> None:
        """Write that what a run found is being repaired: without an end, it died over it."""
        self._write(_REOPEN, run_id)

    def findings(self, result: PairResult, policy: Mapping[Outcome, Repair], foreign: Collection[Part] = ()) -> None:
        """Write the differences of a pair, before anything is done about them; ``foreign`` are sides not ours."""
        for start in range(0, result.findings.num_rows, _BATCH):
            some = list(to_findings(result.findings.slice(start, _BATCH)))
            self._execute(statement(self._schema, FINDINGS, of_findings(result.run_id, some, policy, foreign)))

    def measures(self, run_id: UUID, found: Sequence[MeasureResult]) -> None:
        """Write the sums of a pair's measures: all totals, and first of all the keys that don't add up."""
        shown = [measure_as_json(each, _KEYS) for each in found]
        self._write(_MEASURES, run_id, measures=json.dumps(shown))

    def acted(self, run_id: UUID, repairs: Sequence[Repaired]) -> None:
        """Write the repairs of differences."""
        for start in range(0, len(repairs), _BATCH):
            self._execute(acted(self._schema, run_id, repairs[start : start + _BATCH]))

    def end(self, result: PairResult) -> None:
        """Write how a pair ended."""
        seconds = {name: round(seconds, 3) for name, seconds in result.seconds.items()}
        outcome = {
            "healed": result.healed,
            "left_out": result.left_out,
            "backlog": dict(sorted(result.backlog.items())),
        }
        self.close(result.run_id, result.counts, plain(result.plan) | outcome | {"seconds": seconds})


def of_findings(
    run_id: UUID, found: Sequence[Finding], policy: Mapping[Outcome, Repair], foreign: Collection[Part] = ()
) -> dict[str, object]:
    """Return what statements bind that write findings of a run."""
    return {
        "run": run_id,
        "ids": [each.id for each in found],
        "kinds": [each.outcome.label for each in found],
        "details": [json.dumps(detail_of(each)) for each in found],
        "actions": [each.outcome.repair(policy, foreign).value for each in found],
    }


def acted(schema: str, run_id: UUID, repairs: Sequence[Repaired]) -> Statement:
    """Return the writer of the repairs of a run's differences."""
    values = {
        "id": run_id,
        "ids": [each.id for each in repairs],
        "actions": [each.action.value for each in repairs],
        "results": [each.result for each in repairs],
    }
    return statement(schema, _ACTED, values)


def why_of(error: BaseException, recorded: Recorded) -> str:
    """Return in one line what went wrong with a job, without a password; of an error of ours what it says alone."""
    own = f"{type(error).__module__}.{class_name(error)}: " if isinstance(error, OutboxError) else ""
    text = " ".join(summary_of(error).removeprefix(own).split())
    for access in recorded.accesses:
        text = hidden(text, access.url)
    return text


def detail_of(finding: Finding) -> dict[str, Any]:
    """Return what either side says of a difference, as JSON can hold it; without what it doesn't say."""
    detail = {
        name: value
        for name, value in plain(finding).items()
        if name not in {"id", "outcome", *DIGESTS}
        and value is not None
        and value is not False
        # That the producer believes the consumer not to know it is an opinion, too.
        and (name == "opinion" or value not in {"none", ""})
    }
    # Of another origin than PostgreSQL, it may have in it what PostgreSQL refuses.
    return detail | {name: storable(value) for name, value in detail.items() if name == "foreign_id"}
