"""The workers of a database and what is registered on them, as they report it themselves; and what is wrong with them.

Each worker writes a row every few seconds (outbox/worker/report.py). A worker that ends in order deletes its row.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.database.execute import Row, execute
from outbox.database.sql import ALIVE
from outbox.operator.health import sql
from outbox.text import duration

if TYPE_CHECKING:
    from outbox.operator.databases import Database, Databases
    from outbox.operator.health.rules import Diagnosis, Subject

#: What no worker does where none is alive, by the part of the tables.
_UNDONE = {"producer": "dispatched, checked or pruned", "consumer": "consumed"}


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker as it reported last; ``alive`` if that was within three of its reports. ``duties`` by name: health."""

    database: str
    id: UUID
    name: str
    version: str
    roles: list[str]
    started_at: dt.datetime
    seen_at: dt.datetime
    alive: bool
    duties: dict[str, Any]


@dataclass(frozen=True, slots=True)
class HandlerRow:
    """What is registered for a topic on the living workers; ``kind``: consumer, checker, compensation, reconciliation.

    ``workers`` are the names of those that have it.
    """

    database: str
    kind: str
    topic: str
    name: str
    group: str | None
    options: dict[str, Any]
    workers: list[str]


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What one worker reported last, ``seconds`` ago; ``handlers`` are as `outbox.worker.report` writes them."""

    row: WorkerRow
    handlers: list[dict[str, Any]]
    seconds: float

    def does(self, duty: str) -> bool:
        """Return whether this worker is alive and has a duty of this name."""
        return self.row.alive and any(name == duty or name.startswith(f"{duty} #") for name in self.row.duties)


def workers(databases: Databases) -> list[WorkerRow]:
    """Return the workers that run or were not ended in order, those that are alive first."""
    rows = [each.row for database in databases.values() for each in _read(database)]
    return sorted(rows, key=lambda row: not row.alive)


def handlers(databases: Databases) -> list[HandlerRow]:
    """Return what is registered on the living workers, by kind and topic."""
    return [row for database in databases.values() for row in merged(_read(database))]


def reports(database: str, rows: Iterable[Row]) -> list[WorkerReport]:
    """Return the rows of `sql.WORKERS` as what the workers of a database have reported."""
    return [
        WorkerReport(
            WorkerRow(database, id_, name, version, json.loads(roles), started_at, seen_at, alive_, json.loads(duties)),
            json.loads(registered),
            seconds,
        )
        for id_, name, version, roles, started_at, seen_at, alive_, duties, registered, seconds in rows
    ]


def merged(reports: Iterable[WorkerReport]) -> list[HandlerRow]:
    """Return each handler once, with the living workers that have it; one that differs between them more than once."""
    found: dict[str, HandlerRow] = {}
    for worker in reports:
        for handler in worker.handlers if worker.row.alive else ():
            kind, topic, name, group = (handler.get(key) for key in ("kind", "topic", "name", "group"))
            options = handler.get("options", {})
            row = HandlerRow(worker.row.database, str(kind), str(topic), str(name), group, options, [])
            row = found.setdefault(json.dumps(handler, sort_keys=True), row)
            row.workers.append(worker.row.name)
    return sorted(found.values(), key=lambda row: (row.kind, row.topic, row.group or "", row.name))


def alive(reports: Iterable[WorkerReport]) -> bool:
    """Return whether any worker is alive."""
    return any(worker.row.alive for worker in reports)


def done(reports: Iterable[WorkerReport], duty: str) -> bool:
    """Return whether any living worker has this duty."""
    return any(worker.does(duty) for worker in reports)


def judge_workers(subject: Subject, reports: Sequence[WorkerReport], parts: Collection[str]) -> Iterator[Diagnosis]:
    """Judge the workers and their duties; ``parts`` are those whose tables the database has."""
    if not alive(reports):
        last = min((worker.seconds for worker in reports), default=None)
        yield subject.finding(
            "worker.none",
            {"last_seen": last},
            since="" if last is None else f"; the last one was seen {duration(last)} ago",
            undone=" and ".join(text for part, text in _UNDONE.items() if part in parts),
        )
        return
    for worker in reports:
        if not worker.row.alive and worker.seconds < subject.thresholds.worker_lost:
            yield subject.finding("worker.lost", {"worker": worker.row.name, "age": worker.seconds})
        for name, health in worker.row.duties.items() if worker.row.alive else ():
            if failures := health.get("failures"):
                details = {"worker": worker.row.name, "duty": name, "failures": failures}
                yield subject.finding("duty.failing", details | {"error": health.get("last_error")})
    if "producer" in parts and not done(reports, "dispatch"):
        yield subject.finding("duty.missing/dispatch", {"duty": "dispatch"})


def judge_bulk_jobs(subject: Subject, reports: Sequence[WorkerReport], jobs: int, age: float) -> Iterator[Diagnosis]:
    """Judge the bulk jobs that haven't finished: how many there are, and the age (seconds) of the oldest."""
    if jobs and age > ALIVE and alive(reports) and not done(reports, "bulk"):
        yield subject.finding("duty.missing/bulk", {"duty": "bulk", "jobs": jobs, "age": age})


def _read(database: Database) -> list[WorkerReport]:
    with database.reading() as connection:
        (rows,) = execute(connection, sql.WORKERS(database.schema))
    return reports(database.name, rows)
