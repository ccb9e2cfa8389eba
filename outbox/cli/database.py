"""Which database: from options and environment to a connection."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, make_url

from outbox.cli.exits import Code, Failure
from outbox.errors import pip_install
from outbox.settings import Settings

if TYPE_CHECKING:
    from outbox.operator.service import Admin

URL_VARIABLE = "OUTBOX_DATABASE_URL"
DATABASES_VARIABLE = "OUTBOX_CONSOLE_DATABASES"
_EXAMPLE = "postgresql+psycopg://user:password@host:5432/database"
_CONNECT_TIMEOUT = 10
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", re.ASCII)

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
DatabaseOption = Annotated[
    list[str] | None,
    typer.Option(
        "--database",
        metavar="NAME=URL",
        help="One more database, under a name; may be given again. Default: those of OUTBOX_CONSOLE_DATABASES, "
        "NAME=URL separated by blanks or lines. A password belongs there, or into ~/.pgpass.",
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


def find_databases(given: str | None, named: Sequence[str] | None = None) -> dict[str, URL]:
    """Return the databases of the options, else of the environment, by name.

    The one of ``--url`` has the name of the database. It may be left out where others are named, and is the same as
    one of them where it is in the same place.

    Raises:
        Failure: none is given, one can't be used, or two of them are one.
    """
    source = "--database" if named else DATABASES_VARIABLE
    databases: dict[str, URL] = {}
    for text in named or _named_in_environment():
        name, url = _split(text, source)
        address = find_url(url, f"{source} {name}")
        name = name or address.database or ""
        if not _NAME.fullmatch(name):
            raise Failure(f"{source}: {name!r} can't be the name of a database here; write NAME=URL", Code.USAGE)
        if name in databases:
            raise Failure(f"{source}: two databases have the name {name!r}", Code.USAGE)
        databases[name] = address
        if (other := _same(databases[name], databases, name)) is not None:
            raise Failure(f"{source}: {other!r} and {name!r} are one database; leave one out", Code.USAGE)
    if databases and not given and not os.environ.get(URL_VARIABLE):
        return databases
    own = find_url(given)
    if _same(own, databases) is None:
        name = own.database or "database"
        if name in databases:
            raise Failure(f"{source}: the name {name!r} is that of the database of --url", Code.USAGE)
        databases = {name: own, **databases}
    return databases


def _named_in_environment() -> list[str]:
    """Return the databases of the environment, or of the file that it names; URLs may have commas in them."""
    text = os.environ.get(DATABASES_VARIABLE, "")
    if path := os.environ.get(f"{DATABASES_VARIABLE}_FILE"):
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise Failure(f"{DATABASES_VARIABLE}_FILE {path!r} can't be read: {error.strerror}", Code.CONFIG) from None
    return [word for word in re.split(r"\s+|,(?=[\w.-]+=\w+[+:])", text) if word]


def _split(text: str, source: str) -> tuple[str, str]:
    """Return name (none: that of the database) and URL of a text."""
    name, equals, url = text.partition("=")
    if not equals or "://" in name:
        name, url = "", text
    if "://" not in url:
        shown = f"{name}=…" if name else text
        raise Failure(f"{source} {shown!r} must be NAME=URL, such as shop={_EXAMPLE}", Code.USAGE)
    return name, url


def _same(url: URL, databases: Mapping[str, URL], but: str = "") -> str | None:
    def place(url: URL) -> tuple[object, ...]:
        return url.host, url.port or 5432, url.database, tuple(sorted(url.query.items()))

    return next((name for name, other in databases.items() if name != but and place(other) == place(url)), None)


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
    from outbox.database import migration  # noqa: PLC0415 - Alembic is slow to import

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


@contextmanager
def admin_over(urls: Mapping[str, URL], settings: Settings) -> Iterator[Admin]:
    """Give an admin over these databases, whose connections are closed in the end.

    Raises:
        Failure: one is unavailable.
        SchemaMissing, SchemaOutdated: one isn't migrated.
    """
    from outbox.operator.service import Admin  # noqa: PLC0415 - what the other commands needn't import

    with ExitStack() as stack:
        engines = {name: engine_of(url, keep=True) for name, url in urls.items()}
        for engine in engines.values():
            stack.callback(engine.dispose)
        yield Admin.open(engines, settings)


def engine_of(url: URL, *, keep: bool = False) -> Engine:
    """Return an engine that doesn't wait for a host for ever, and keeps no connections unless it is told to.

    Raises:
        Failure: the driver isn't there.
    """
    limit = {} if "connect_timeout" in url.query else {"connect_timeout": _CONNECT_TIMEOUT}
    try:
        return create_engine(
            url, connect_args=limit, **({"pool_size": 2, "pool_pre_ping": True} if keep else {"poolclass": NullPool})
        )
    except ImportError as error:
        raise Failure(f"the driver can't be loaded: {error}; {pip_install('binary')}", Code.CONFIG) from error


def where(url: URL, schema: str) -> str:
    """Return which database and schema is meant, in words."""
    return f"database {url.database!r} on {url.host or 'the local socket'}, schema {schema!r}"


def _masked(text: str) -> str:
    """Return the text without what may be a password."""
    return re.sub(r"(?<=://)(.*)@", "***@", text) if "://" in text else re.sub(r".*@", "***@", text)
