"""What runs and what it runs on: workers and their handlers as they report themselves, versions, tables, settings.

Each worker writes a row every few seconds (outbox/worker/report.py). A worker that ends in order deletes its row.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any
from uuid import UUID

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from outbox.database.execute import Row, execute
from outbox.errors import SchemaError
from outbox.operator.health import sql

if TYPE_CHECKING:
    from sqlalchemy import URL

    from outbox.operator.databases import Database, Databases

#: The errors that mean that a database, or its tables, can't be reached.
UNREACHABLE = (DBAPIError, PoolTimeout, SchemaError)

_SECRETS = frozenset({"password", "sslpassword"})


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


@dataclass(frozen=True, slots=True)
class TableSize:
    """One table of ours."""

    name: str
    rows: int
    bytes: int
    dead_rows: int
    vacuumed_at: dt.datetime | None


@dataclass(frozen=True, slots=True)
class DatabaseView:
    """One registered database; the URL has no password, ``oldest_transaction`` (of other sessions) is in seconds."""

    name: str
    url: str
    parts: list[str]
    server_version: str | None
    revisions: dict[str, str | None]
    code_revisions: dict[str, str]
    oldest_transaction: float | None
    tables: list[TableSize]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class System:
    """What the console runs on."""

    version: str
    databases: list[DatabaseView]
    settings: dict[str, Any]


def workers(databases: Databases) -> list[WorkerRow]:
    """Return the workers that run or were not ended in order, those that are alive first."""
    rows = [each.row for database in databases.values() for each in _reports_in(database)]
    return sorted(rows, key=lambda row: not row.alive)


def handlers(databases: Databases) -> list[HandlerRow]:
    """Return what is registered on the living workers, by kind and topic."""
    return [row for database in databases.values() for row in merged(_reports_in(database))]


def _reports_in(database: Database) -> list[WorkerReport]:
    with database.reading() as connection:
        return reports(database.name, execute(connection, sql.WORKERS(database.schema))[0])


def reports(database: str, rows: Iterable[Row]) -> list[WorkerReport]:
    """Return the rows of `sql.WORKERS`, which a database has."""
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
            found.setdefault(json.dumps(handler, sort_keys=True), row).workers.append(worker.row.name)
    return sorted(found.values(), key=lambda row: (row.kind, row.topic, row.group or "", row.name))


def alive(reports: Iterable[WorkerReport]) -> bool:
    """Return whether any worker is alive."""
    return any(worker.row.alive for worker in reports)


def done(reports: Iterable[WorkerReport], duty: str) -> bool:
    """Return whether any living worker has this duty."""
    names = [name for worker in reports if worker.row.alive for name in worker.row.duties]
    return any(name == duty or name.startswith(f"{duty} #") for name in names)


def system(databases: Databases) -> System:
    """Return what all of this runs on; a database that is away hides no other."""
    # Not by an import, which would be one of all that is above this layer.
    version: str = import_module("outbox").__version__
    settings: dict[str, Any] = dataclasses.asdict(next(iter(databases.values())).settings)
    return System(version, [_view(database) for database in databases.values()], settings)


def why_unreachable(error: BaseException) -> str:
    """Return in one line why a database can't be reached; there is no password in it."""
    lines = str(getattr(error, "orig", None) or error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def address(url: URL) -> str:
    """Return a URL without any password."""
    query = {name: value for name, value in url.query.items() if name.lower() not in _SECRETS}
    return url.set(query=query).render_as_string(hide_password=True)


def _view(database: Database) -> DatabaseView:
    from outbox.database import migration  # noqa: PLC0415 - Alembic is slow to import
    from outbox.database.migration import chain  # noqa: PLC0415

    parts = sorted(database.parts)
    heads = {branch: chain.head(branch) for branch in ("common", *parts)}
    view = DatabaseView(database.name, address(database.engine.url), parts, None, {}, heads, None, [])
    schema, now = database.schema, {"idle_transaction": 0.0, "running_transaction": 0.0}
    statements = (sql.SERVER(schema), sql.OPEN_TRANSACTIONS(schema, **now), sql.TABLE_SIZES(schema))
    try:
        with database.reading() as connection:
            ((_, version, *_),), oldest, tables = execute(connection, *statements)
            revisions = migration.current(connection, schema)
    except UNREACHABLE as error:
        return dataclasses.replace(view, error=why_unreachable(error))
    return dataclasses.replace(
        view,
        server_version=version,
        revisions=revisions,
        oldest_transaction=oldest[0][1] if oldest else None,
        tables=[TableSize(*row) for row in tables],
    )
