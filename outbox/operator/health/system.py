"""What the console runs on: versions, revisions, tables, settings. A database that is away hides no other.

Who works here, and what is registered there: as the workers themselves report it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from outbox.database.execute import Row, Statement, execute
from outbox.errors import SchemaError
from outbox.operator.health import overview_sql
from outbox.operator.model import DatabaseView, HandlerRow, System, TableSize, WorkerRow
from outbox.worker.report import ALIVE

if TYPE_CHECKING:
    from sqlalchemy import URL

    from outbox.operator.databases import Database, Databases

#: What it is like when a database, or its tables, can't be reached.
UNREACHABLE = (DBAPIError, PoolTimeout, SchemaError)

_SECRETS = frozenset({"password", "sslpassword"})


def system(databases: Databases) -> System:
    """Return what all of this runs on."""
    # Not by an import, which would be one of all that is above this layer.
    version: str = import_module("outbox").__version__
    views = [_view(database) for database in databases.values()]
    settings: dict[str, Any] = dataclasses.asdict(next(iter(databases.values())).settings)
    return System(version, views, settings)


def why_unreachable(error: BaseException) -> str:
    """Return in one line why a database can't be reached; there is no password in it."""
    lines = str(getattr(error, "orig", None) or error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def address(url: URL) -> str:
    """Return a URL without any password."""
    query = {name: value for name, value in url.query.items() if name.lower() not in _SECRETS}
    return url.set(query=query).render_as_string(hide_password=True)


def _view(database: Database) -> DatabaseView:
    from outbox.database.migration import chain  # noqa: PLC0415 - Alembic is slow to import

    view = DatabaseView(
        database.name,
        address(database.engine.url),
        sorted(database.parts),
        None,
        {},
        {branch: chain.head(branch) for branch in ("common", *sorted(database.parts))},
        None,
        [],
    )
    try:
        return _read(database, view)
    except UNREACHABLE as error:
        return dataclasses.replace(view, error=why_unreachable(error))


def _read(database: Database, view: DatabaseView) -> DatabaseView:
    from outbox.database import migration  # noqa: PLC0415

    with database.looking() as connection:
        ((version,),), ((oldest,),), tables = execute(
            connection,
            overview_sql.server_version(),
            overview_sql.oldest_transaction(),
            overview_sql.tables(database.schema),
        )
        revisions = migration.current(connection, database.schema)
    return dataclasses.replace(
        view,
        server_version=version,
        revisions=revisions,
        oldest_transaction=oldest,
        tables=[TableSize(*row) for row in tables],
    )


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
    rows = [each.row for database in databases.values() for each in _read_workers(database)]
    return sorted(rows, key=lambda row: not row.alive)


def handlers(databases: Databases) -> list[HandlerRow]:
    """Return what is registered on the living workers, by kind and topic."""
    return [row for database in databases.values() for row in merged(_read_workers(database))]


def statement(schema: str) -> Statement:
    """Read the workers; `reported` takes the rows."""
    return overview_sql.workers(schema, ALIVE)


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


def _read_workers(database: Database) -> list[Reported]:
    with database.looking() as connection:
        (rows,) = execute(connection, statement(database.schema))
    return reported(database.name, rows)
