"""What the console runs on: versions, revisions, tables, settings. A database that is away hides no other."""

from __future__ import annotations

import dataclasses
import datetime as dt
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from outbox.database.execute import execute
from outbox.errors import SchemaError
from outbox.operator.health import sql

if TYPE_CHECKING:
    from sqlalchemy import URL

    from outbox.operator.databases import Database, Databases

#: The errors that mean that a database, or its tables, can't be reached.
UNREACHABLE = (DBAPIError, PoolTimeout, SchemaError)

_SECRETS = frozenset({"password", "sslpassword"})


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
    from outbox.database import migration  # noqa: PLC0415 - Alembic is slow to import
    from outbox.database.migration import chain  # noqa: PLC0415

    parts = sorted(database.parts)
    heads = {branch: chain.head(branch) for branch in ("common", *parts)}
    view = DatabaseView(database.name, address(database.engine.url), parts, None, {}, heads, None, [])
    try:
        with database.reading() as connection:
            ((_, version, *_),), oldest, tables = execute(
                connection,
                sql.SERVER(),
                sql.OPEN_TRANSACTIONS(idle=0.0, running=0.0),
                sql.TABLE_SIZES(database.schema),
            )
            revisions = migration.current(connection, database.schema)
    except UNREACHABLE as error:
        return dataclasses.replace(view, error=why_unreachable(error))
    return dataclasses.replace(
        view,
        server_version=version,
        revisions=revisions,
        oldest_transaction=oldest[0][1] if oldest else None,
        tables=[TableSize(*row) for row in tables],
    )
