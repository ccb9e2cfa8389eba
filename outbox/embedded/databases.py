"""Create and drop databases over a connection of its own; the only part that needs psycopg."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from outbox.embedded.binaries import MEND, OLDEST
from outbox.embedded.errors import EmbeddedError

if TYPE_CHECKING:
    import psycopg

LONGEST_NAME = 63
_CONNECT_LIMIT = 10


def check_server(address: str) -> None:
    """Make sure that the server answers and is new enough.

    Raises:
        EmbeddedError: no connection, or an older version than is supported.

    """
    with _connected(address) as connection:
        if connection.info.server_version < OLDEST * 10_000:
            version = connection.info.parameter_status("server_version")
            raise EmbeddedError(f"the server is PostgreSQL {version}; {OLDEST} or newer is needed")


def exists(address: str, name: str) -> bool:
    """Tell whether the server has a database of this name."""
    with _connected(address) as connection:
        found = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,)).fetchone()
        return found is not None


def create(address: str, name: str, template: str | None = None) -> None:
    """Create a database, by default as a copy of ``template1``; nobody may be connected to the template.

    Raises:
        EmbeddedError: not permitted, exists already, a bad name, or a template in use.

    """
    if not name or len(name.encode()) > LONGEST_NAME or "\0" in name:
        raise EmbeddedError(f"{name!r} can't name a database: it must have 1 to {LONGEST_NAME} bytes")
    with _connected(address) as connection:
        from psycopg import errors, sql  # noqa: PLC0415

        copied = sql.SQL(" TEMPLATE {}").format(sql.Identifier(template)) if template else sql.SQL("")
        try:
            connection.execute(sql.SQL("CREATE DATABASE {}{}").format(sql.Identifier(name), copied))
        except errors.InsufficientPrivilege as error:
            role = connection.info.user
            raise EmbeddedError(
                f"the role {role!r} may not create the database {name!r}; "
                f'mend: ALTER ROLE "{role}" CREATEDB, or use another role'
            ) from error


def drop(address: str, name: str) -> None:
    """Drop a database if it exists, and end whatever is connected to it.

    Raises:
        EmbeddedError: not permitted.

    """
    with _connected(address) as connection:
        from psycopg import sql  # noqa: PLC0415

        connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


@contextmanager
def _connected(address: str) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    try:
        import psycopg  # noqa: PLC0415
    except ImportError as error:
        raise EmbeddedError(f"psycopg can't be imported ({error}); mend: {MEND}") from error
    try:
        with psycopg.connect(address, autocommit=True, connect_timeout=_CONNECT_LIMIT) as connection:
            yield connection
    except psycopg.Error as error:
        raise EmbeddedError(str(error).strip()) from error
