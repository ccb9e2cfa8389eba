"""The workers: each writes a row every few seconds (outbox/worker/report.py), and deletes it at its end."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.database.execute import execute
from outbox.operator.health.sql import WORKERS

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.database.execute import Row
    from outbox.operator.databases import Database


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
class ProducerRow:
    """A process that sends, as it reported last: ``name`` is its host and process id.

    ``active`` if it has sent within `outbox.database.sql.SENDS_LATELY` seconds; ``instances`` is how many active
    processes its producer group has.
    """

    database: str
    id: UUID
    name: str
    producer_group: str
    version: str
    started_at: dt.datetime
    seen_at: dt.datetime
    active: bool
    instances: int


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What one worker reported last, ``seconds`` ago; ``handlers`` are as `outbox.worker.report` writes them."""

    row: WorkerRow
    handlers: list[dict[str, Any]]
    seconds: float


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


def workers_in(connection: Connection, database: Database) -> list[WorkerReport]:
    """Return what the workers of a database report."""
    return reports(database.name, execute(connection, WORKERS(database.schema))[0])


def reports(database: str, rows: Iterable[Row]) -> list[WorkerReport]:
    """Return the rows of `sql.WORKERS`, which a database has."""
    return [
        WorkerReport(handlers=row.pop("handlers"), seconds=row.pop("seconds"), row=WorkerRow(database, **row))
        for row in WORKERS.named(rows)
    ]


def merged(reports: Iterable[WorkerReport]) -> list[HandlerRow]:
    """Return each handler once, with the living workers that have it; one that differs between them more than once."""
    found: dict[str, HandlerRow] = {}
    for worker in reports:
        for handler in worker.handlers if worker.row.alive else ():
            kind, topic, name, group = (handler.get(key) for key in ("kind", "topic", "name", "group"))
            options = handler.get("options", {})
            row = HandlerRow(worker.row.database, str(kind), str(topic), str(name), group, options, [])
            found.setdefault(json.dumps(handler, sort_keys=True), row).workers.append(worker.row.name)
    return sorted(found.values(), key=lambda row: (row.kind, row.topic, row.group or "", row.name))


def source_of(
    database: str, topic: str, group: str, producers: Mapping[str, str | None], reports: Iterable[WorkerReport]
) -> str | None:
    """Return from which producer's database a group of another one reads a topic, as far as the databases show it.

    ``producers`` are those that have the topic, with their addresses; ``reports`` are those of the group's database.
    Where several could be it, its living workers tell.
    """
    if database in producers or len(producers) < 2:
        return database if database in producers else next(iter(producers), None)
    reported = {
        handler.options.get("source")
        for handler in merged(reports)
        if (handler.kind, handler.topic, handler.group) == ("consumer", topic, group)
    }
    fitting = [name for name, address in producers.items() if address in reported]
    return fitting[0] if len(fitting) == 1 else None


def alive(reports: Iterable[WorkerReport]) -> bool:
    """Return whether any worker is alive."""
    return any(worker.row.alive for worker in reports)


def done(reports: Iterable[WorkerReport], duty: str) -> bool:
    """Return whether any living worker has this duty."""
    names = [name for worker in reports if worker.row.alive for name in worker.row.duties]
    return any(name == duty or name.startswith(f"{duty} #") for name in names)
