"""Who works here, and what is registered there: as the workers themselves report it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.admin.model import HandlerRow, WorkerRow
from outbox.report import ALIVE
from outbox.store import overview as store
from outbox.store.execute import Row, Statement, execute

if TYPE_CHECKING:
    from outbox.admin.databases import Database, Databases


@dataclass(frozen=True, slots=True)
class Reported:
    """What one worker reported last, ``seconds`` ago."""

    row: WorkerRow
    handlers: list[dict[str, Any]]
    seconds: float

    def does(self, duty: str) -> bool:
        """Is this worker alive, with a duty of this name?"""
        return self.row.alive and any(name == duty or name.startswith(f"{duty} #") for name in self.row.duties)


def workers(databases: Databases) -> list[WorkerRow]:
    """Return the workers that run or were not ended in order, those that are alive first."""
    rows = [each.row for database in databases.values() for each in _read(database)]
    return sorted(rows, key=lambda row: not row.alive)


def handlers(databases: Databases) -> list[HandlerRow]:
    """Return what is registered on the living workers, by kind and topic."""
    return [row for database in databases.values() for row in merged(_read(database))]


def statement(schema: str) -> Statement:
    """Read the workers; `reported` takes the rows."""
    return store.workers(schema, ALIVE)


def reported(database: str, rows: Iterable[Row]) -> list[Reported]:
    """Return what the workers of a database have reported."""
    return [
        Reported(
            WorkerRow(
                database, id_, name, version, json.loads(roles), started_at, seen_at, alive, json.loads(duties)
            ),
            json.loads(told),
            seconds,
        )
        for id_, name, version, roles, told, duties, started_at, seen_at, alive, seconds in rows
    ]  # fmt: skip


def merged(workers: Iterable[Reported]) -> list[HandlerRow]:
    """Return each handler once, with the living workers that have it; one that differs between them more than once."""
    found: dict[str, HandlerRow] = {}
    for worker in workers:
        if not worker.row.alive:
            continue
        for told in worker.handlers:
            row = found.setdefault(
                json.dumps(told, sort_keys=True),
                HandlerRow(
                    worker.row.database,
                    told["kind"],
                    told["topic"],
                    told["name"],
                    told.get("group"),
                    told.get("options", {}),
                    [],
                ),
            )
            row.workers.append(worker.row.name)
    return sorted(found.values(), key=lambda row: (row.kind, row.topic, row.group or "", row.name))


def _read(database: Database) -> list[Reported]:
    with database.looking() as connection:
        (rows,) = execute(connection, statement(database.schema))
    return reported(database.name, rows)
