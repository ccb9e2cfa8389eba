"""Which revisions a database has."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from sqlalchemy import Connection, text

from outbox.database.migration import chain
from outbox.database.migration.bind import command, connected, described
from outbox.errors import SchemaMissing, SchemaOutdated, pip_install

if TYPE_CHECKING:
    from outbox.database.migration.bind import Bind


def current(bind: Bind | Connection, schema: str = "outbox") -> dict[str, str | None]:
    """Return the revision of ``common``, ``producer`` and ``consumer`` in a database; None where not installed."""
    if isinstance(bind, Connection):
        return _read_apart(bind, schema)
    with connected(bind) as connection:
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
            f"the {' and '.join(missing)} tables of the outbox are not in {described(connection, schema)}; "
            f"run: {command(connection, 'upgrade', missing, schema)}"
        )
    for branch in ("common", *parts):
        _require_head(connection, branch, revisions[branch], parts, schema)


def refuse_newer(connection: Connection, schema: str) -> None:
    """Make sure that this code knows all revisions in the database.

    Raises:
        SchemaOutdated: it doesn't.
    """
    for branch, revision in read(connection, schema).items():
        if revision and not chain.known(revision):
            raise _newer(connection, branch, revision, schema)


def is_usable_by_older(connection: Connection, parts: Collection[str], schema: str) -> bool:
    """Tell whether these parts, or all that are installed, are there in a version that this code can work on.

    Only where one of them is newer: then there is nothing that this code could upgrade.
    """
    revisions = read(connection, schema)
    present = [revisions[branch] for branch in ("common", *parts)]
    newer = [revision for revision in present if revision and not chain.known(revision)]
    return bool(newer) and all(
        revision is not None and (revision == chain.head(branch) or chain.is_next(revision))
        for branch, revision in zip(("common", *parts), present, strict=True)
    )


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


def _require_head(
    connection: Connection, branch: str, revision: str | None, parts: tuple[str, ...], schema: str
) -> None:
    needed = chain.head(branch)
    if revision == needed or (revision and chain.is_next(revision)):
        return
    if revision and not chain.known(revision):
        raise _newer(connection, branch, revision, schema)
    raise SchemaOutdated(
        f"the {branch} tables of the outbox in {described(connection, schema)} are at {revision}, "
        f"this code needs {needed}; run: {command(connection, 'upgrade', parts, schema)}"
    )


def _newer(connection: Connection, branch: str, revision: str, schema: str) -> SchemaOutdated:
    return SchemaOutdated(
        f"the {branch} tables of the outbox in {described(connection, schema)} are at {revision}, newer than this code "
        f"({chain.head(branch)}) can work on; run: {pip_install()}"
    )
