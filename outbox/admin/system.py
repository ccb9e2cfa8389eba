"""What the console runs on: versions, revisions, tables, settings. A database that is away hides no other."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from outbox.admin.model import DatabaseView, System, TableSize
from outbox.errors import SchemaError
from outbox.store import overview as store
from outbox.store.execute import execute

if TYPE_CHECKING:
    from sqlalchemy import URL

    from outbox.admin.databases import Database, Databases

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
    from outbox.migration import chain  # noqa: PLC0415 - Alembic is slow to import

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
    from outbox import migration  # noqa: PLC0415

    with database.looking() as connection:
        ((version,),), ((oldest,),), tables = execute(
            connection, store.server_version(), store.oldest_transaction(), store.tables(database.schema)
        )
        revisions = migration.current(connection, database.schema)
    return dataclasses.replace(
        view,
        server_version=version,
        revisions=revisions,
        oldest_transaction=oldest,
        tables=[TableSize(*row) for row in tables],
    )
