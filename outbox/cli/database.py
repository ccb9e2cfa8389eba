"""Which database: from options and environment to a connection."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, make_url

from outbox.cli.exits import Code, Failure
from outbox.settings import Settings

URL_VARIABLE = "OUTBOX_DATABASE_URL"
_EXAMPLE = "postgresql+psycopg://user:password@host:5432/database"
_CONNECT_TIMEOUT = 10

UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="The database, postgresql+psycopg://user@host/name. "
        "Default: OUTBOX_DATABASE_URL, the better place for a password.",
    ),
]
SchemaOption = Annotated[
    str | None,
    typer.Option(
        "--schema", metavar="NAME", help="The schema of the outbox tables. Default: OUTBOX_SCHEMA, or outbox."
    ),
]


def find_url(given: str | None, option: str = "--url", *variables: str) -> URL:
    """Return the URL of the option, else that of the environment: of the first of these variables that is set.

    Raises:
        Failure: none given, one that can't be read, another database than PostgreSQL, another driver than psycopg 3.
    """
    names = variables or (URL_VARIABLE,)
    text = given or next(filter(None, map(os.environ.get, names)), None)
    if not text:
        raise Failure(f"no database: give {option} {_EXAMPLE}, or set {names[0]}", Code.USAGE)
    try:
        url = make_url(text)
    except Exception:
        # Whatever SQLAlchemy says may quote the password.
        raise Failure(f"the URL {_masked(text)!r} can't be read; it must look like {_EXAMPLE}", Code.CONFIG) from None
    backend, _, driver = url.drivername.partition("+")
    if backend not in {"postgresql", "postgres"}:
        raise Failure(f"the outbox needs PostgreSQL, not {backend!r}; the URL must look like {_EXAMPLE}", Code.CONFIG)
    if driver not in {"", "psycopg", "psycopg_async"}:
        raise Failure(f"the outbox needs the driver psycopg (3), not {driver!r}; write {_EXAMPLE}", Code.CONFIG)
    return url.set(drivername="postgresql+psycopg")


def find_settings(schema: str | None) -> Settings:
    """Return the settings of the environment, with the schema of the option if given."""
    return Settings.from_env(schema=schema) if schema else Settings.from_env()


@contextmanager
def opened(url: URL, settings: Settings) -> Iterator[tuple[Connection, tuple[str, ...]]]:
    """Open a connection to a migrated database; yield it with the parts (``producer``, ``consumer``) found there.

    Raises:
        Failure: the database is unavailable.
        SchemaMissing, SchemaOutdated: it isn't migrated.
    """
    from outbox import migration  # noqa: PLC0415 - Alembic is slow to import

    with engine_of(url).connect() as connection:
        revisions = migration.current(connection, settings.schema)
        parts = tuple(part for part in migration.PARTS if revisions[part])
        migration.require(connection, parts or migration.PARTS, settings.schema)
        yield connection, parts


@contextmanager
def producer_opened(url: URL, settings: Settings) -> Iterator[Connection]:
    """Open a connection to a migrated database that has the producer's tables.

    Raises:
        Failure: the database is unavailable, or only the consumer's tables are in it.
        SchemaMissing, SchemaOutdated: it isn't migrated.
    """
    with opened(url, settings) as (connection, parts):
        if "producer" not in parts:
            raise Failure(
                f"only the consumer's tables are in {where(url, settings.schema)}; name the producer's database",
                Code.CONFIG,
            )
        yield connection


def engine_of(url: URL) -> Engine:
    """Return an engine that keeps no connections, and doesn't wait for a host for ever.

    Raises:
        Failure: the driver isn't there.
    """
    limit = {} if "connect_timeout" in url.query else {"connect_timeout": _CONNECT_TIMEOUT}
    try:
        return create_engine(url, poolclass=NullPool, connect_args=limit)
    except ImportError as error:
        raise Failure(f"the driver can't be loaded: {error}; pip install 'outbox[binary]'", Code.CONFIG) from error


def where(url: URL, schema: str) -> str:
    """Return which database and schema is meant, in words."""
    return f"database {url.database!r} on {url.host or 'the local socket'}, schema {schema!r}"


def _masked(text: str) -> str:
    """Return the text without what may be a password."""
    return re.sub(r"(?<=://)(.*)@", "***@", text) if "://" in text else re.sub(r".*@", "***@", text)
