"""From what the caller has (URL, engine, async engine) to a synchronous connection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, make_url, text

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

if TYPE_CHECKING:
    Bind = str | URL | Engine | AsyncEngine


@contextmanager
def connected(bind: Bind) -> Iterator[Connection]:
    """Open a connection in READ COMMITTED: a statement which waited for a lock sees what its holder wrote.

    psycopg's URLs serve synchronous and asynchronous engines alike; of an async engine only the URL is taken.
    """
    if isinstance(bind, Engine):
        with bind.connect() as connection:
            yield connection.execution_options(isolation_level="READ COMMITTED")
        return
    url = bind if isinstance(bind, URL) else make_url(bind) if isinstance(bind, str) else bind.url
    engine = create_engine(url, poolclass=NullPool, isolation_level="READ COMMITTED")
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def described(connection: Connection, schema: str) -> str:
    """Return which database and schema a connection leads to, in words."""
    url = connection.engine.url
    return f"database {url.database!r} on {url.host or 'the local socket'}, schema {schema!r}"


def command(connection: Connection, verb: str, parts: tuple[str, ...], schema: str) -> str:
    """Return the command that mends the tables; the password is masked."""
    url = connection.engine.url.render_as_string(hide_password=True)
    which = "".join(f" --part {part}" for part in parts)
    where = "" if schema == "outbox" else f" --schema {schema}"
    return f"outbox db {verb} --url {url}{which}{where}"


def set_local(connection: Connection, name: str, value: str) -> None:
    """Set a configuration parameter for this transaction."""
    connection.execute(text("SELECT set_config(:name, :value, true)"), {"name": name, "value": value})
