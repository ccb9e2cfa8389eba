"""A database: how it is reached (by URL, engine, async engine), and which revisions it has."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, text

from outbox.database.dialect import command
from outbox.database.engines import separate_engine
from outbox.database.migration import chain
from outbox.errors import SchemaMissing, SchemaOutdated, pip_install
from outbox.text import described

if TYPE_CHECKING:
    from outbox.database.engines import Bind


@contextmanager
def connected(bind: Bind) -> Iterator[Connection]:
    """Open a connection in READ COMMITTED: a statement which waited for a lock sees what its holder wrote.

    An engine that is async, or a URL, gets an engine of its own for that, which connects alike.
    """
    if isinstance(bind, Engine):
        with bind.connect() as connection:
            yield connection.execution_options(isolation_level="READ COMMITTED")
        return
    engine = separate_engine(bind, isolation_level="READ COMMITTED")
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def set_local(connection: Connection, name: str, value: str) -> None:
    """Set a configuration parameter for this transaction."""
    connection.execute(text("SELECT set_config(:name, :value, true)"), {"name": name, "value": value})


def set_time_limit(connection: Connection, name: str, seconds: float) -> None:
    """Set a configuration parameter that is a time limit for this transaction."""
    set_local(connection, name, f"{max(int(seconds * 1000), 1)}ms")


def current(bind: Bind | Connection, schema: str = "outbox") -> dict[str, str | None]:
    """Return the revision of ``common``, ``producer`` and ``consumer`` in a database; None where not installed."""
    with nullcontext(bind) if isinstance(bind, Connection) else connected(bind) as connection:
        return _read_apart(connection, schema)


def require(connection: Connection, parts: Collection[str] = chain.PARTS, schema: str = "outbox") -> None:
    """Make sure that this code can work on the tables of these parts in a database.

    They are in the version of this code, or one revision newer: while a deployment rolls, the old code runs on tables
    that the new one has upgraded. Reads only, within the caller's transaction if there is one.

    Raises:
        SchemaMissing: a part isn't installed.
        SchemaOutdated: a part is older than this code, or more than one revision newer.
        Both name the command to run.
    """
    parts = chain.check_parts(parts)
    revisions = _read_apart(connection, schema)
    missing = tuple(part for part in parts if not revisions[part])
    if missing:
        raise SchemaMissing(
            f"the {' and '.join(missing)} tables of the outbox are not in {described(connection.engine.url, schema)}; "
            f"run: {command(connection.engine.url, 'upgrade', missing, schema)}"
        )
    for branch in ("common", *parts):
        revision = revisions[branch]
        if chain.is_usable(branch, revision):
            continue
        if revision and not chain.known(revision):
            raise _newer(connection, branch, revision, schema)
        raise SchemaOutdated(
            f"the {branch} tables of the outbox in {described(connection.engine.url, schema)} are at {revision}, "
            f"this code needs {chain.head(branch)}; run: {command(connection.engine.url, 'upgrade', parts, schema)}"
        )


def refuse_newer(connection: Connection, revisions: Mapping[str, str | None], schema: str) -> None:
    """Make sure that this code knows all revisions in the database.

    Raises:
        SchemaOutdated: it doesn't.
    """
    for branch, revision in revisions.items():
        if revision and not chain.known(revision):
            raise _newer(connection, branch, revision, schema)


def read(connection: Connection, schema: str) -> dict[str, str | None]:
    """Return the newest revision of each branch."""
    rows = versions(connection, schema)
    applied = chain.applied(rows)
    result: dict[str, str | None] = {}
    for branch in chain.BRANCHES:
        unknown = [row for row in rows if row not in applied and row.startswith(f"{branch}_")]
        result[branch] = next(iter(unknown), None) or next((r for r in chain.history(branch) if r in applied), None)
    if any(result[part] for part in chain.PARTS) and not result["common"]:
        # A part that is newer than this code stands for a revision of `common` that we can't tell.
        result["common"] = chain.head("common")
    return result


def versions(connection: Connection, schema: str) -> list[str]:
    """Return the rows of the version table; none where there is no such table."""
    table = f'"{schema}".{chain.VERSION_TABLE}'
    if connection.scalar(text("SELECT to_regclass(:name)"), {"name": table}) is None:
        return []
    return list(connection.scalars(text(f"SELECT version_num FROM {table} ORDER BY 1")))


def _read_apart(connection: Connection, schema: str) -> dict[str, str | None]:
    """Read within the caller's transaction; where there is none, leave none behind."""
    ours = not connection.in_transaction()
    try:
        return read(connection, chain.check_schema(schema))
    finally:
        if ours:
            connection.rollback()


def _newer(connection: Connection, branch: str, revision: str, schema: str) -> SchemaOutdated:
    return SchemaOutdated(
        f"the {branch} tables of the outbox in {described(connection.engine.url, schema)} are at {revision}, newer "
        f"than this code ({chain.head(branch)}) can work on; run: {pip_install()}"
    )
