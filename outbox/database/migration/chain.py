"""The chain of revisions: where its files are, which revision belongs to which part, and which ones a database has.

One folder of revisions, three branches: ``common``, ``producer``, ``consumer``, each a line. The last two depend on
the first, which is therefore installed with either, and only once. A revision's id is its branch and its number there
(``producer_0001``): that tells the part of a revision which is newer than this code.

What the files declare is read from their text. Alembic, which runs them, is slow to import; workers and commands only
want to know which revisions there are.

For the ``env.py`` of a service whose own migrations look at all schemas.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, text

from outbox.database.dialect import command
from outbox.database.engines import separate_engine
from outbox.errors import InvalidSettings, SchemaMissing, SchemaOutdated, pip_install
from outbox.settings import Settings
from outbox.text import described

if TYPE_CHECKING:
    from outbox.database.engines import Bind

VERSION_TABLE = "outbox_version"

#: What may be installed apart.
PARTS = ("producer", "consumer")
#: All branches, in the order of their installation.
BRANCHES = ("common", *PARTS)

_DECLARED = re.compile(r"^(revision|down_revision|depends_on) = (.+)$", re.MULTILINE)


def check_parts(parts: Collection[str]) -> tuple[str, ...]:
    """Return the parts in the order of installation.

    Raises:
        InvalidSettings: no part, or one that doesn't exist.
    """
    named = [parts] if isinstance(parts, str) else parts
    if not named or not set(named) <= set(PARTS):
        raise InvalidSettings(f"parts = {parts!r} must be a list of {' and '.join(map(repr, PARTS))}, at least one")
    return tuple(part for part in PARTS if part in named)


def check_schema(schema: str) -> str:
    """Return the schema's name if it may be put into SQL."""
    return Settings(schema=schema).schema


def folder() -> Path:
    """Return where Alembic finds the chain: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    inside = package / "migrations"
    return inside if inside.is_dir() else package.parent / "migrations"


@cache
def _built_on() -> Mapping[str, tuple[str, ...]]:
    """Return the revisions of this code, each with those that it is built on."""
    result = {}
    for path in (folder() / "versions").glob("*.py"):
        declared = {name: ast.literal_eval(value) for name, value in _DECLARED.findall(path.read_text("utf-8"))}
        before, others = declared["down_revision"], declared["depends_on"] or ()
        result[declared["revision"]] = (*([before] if before else ()), *others)
    return result


def head(branch: str) -> str:
    """Return the newest revision that this code knows of a branch."""
    return history(branch)[0]


def history(branch: str) -> list[str]:
    """Return the revisions of a branch, the newest first."""
    return sorted((revision for revision in _built_on() if revision.startswith(f"{branch}_")), reverse=True)


def known(revision: str) -> bool:
    """Does this code have the revision?"""
    return revision in _built_on()


def is_usable(branch: str, revision: str | None) -> bool:
    """Is it the newest revision of a branch that this code has, or the one that follows it? Ids are numbered."""
    newest, number = head(branch), (revision or "").rpartition("_")[2]
    return revision == newest or (number.isdigit() and int(number) == int(newest.rpartition("_")[2]) + 1)


def applied(versions: Collection[str]) -> set[str]:
    """Return all revisions which the version table's rows stand for: a row implies what it is built on."""
    result, ahead = set[str](), list(filter(known, versions))
    while ahead:
        result.add(revision := ahead.pop())
        ahead += _built_on()[revision]
    return result


def include_name(
    name: str | None, type_: str, _parent_names: Mapping[str, str | None], *, schema: str | None = None
) -> bool:
    """Hide the outbox's schema from autogenerate: ``context.configure(include_name=include_name, …)``.

    ``schema`` is ``OUTBOX_SCHEMA`` or ``outbox`` by default; bind another with `functools.partial`.
    """
    return type_ != "schema" or name != (schema or os.environ.get("OUTBOX_SCHEMA", "outbox"))


def include_object(
    object_: object, _name: str | None, type_: str, _reflected: bool, _compare_to: object, *, schema: str | None = None
) -> bool:
    """Hide the outbox's tables from autogenerate: ``context.configure(include_object=include_object, …)``.

    Slower than `include_name`, which keeps Alembic from reading the tables in the first place.
    """
    return type_ != "table" or getattr(object_, "schema", None) != (schema or os.environ.get("OUTBOX_SCHEMA", "outbox"))


# --- a database and its revisions ----------------------------------------------------------------------------


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


def require(connection: Connection, parts: Collection[str] = PARTS, schema: str = "outbox") -> None:
    """Make sure that this code can work on the tables of these parts in a database.

    They are in the version of this code, or one revision newer: while a deployment rolls, the old code runs on tables
    that the new one has upgraded. Reads only, within the caller's transaction if there is one.

    Raises:
        SchemaMissing: a part isn't installed.
        SchemaOutdated: a part is older than this code, or more than one revision newer.
        Both name the command to run.
    """
    parts = check_parts(parts)
    revisions = _read_apart(connection, schema)
    missing = tuple(part for part in parts if not revisions[part])
    if missing:
        raise SchemaMissing(
            f"the {' and '.join(missing)} tables of the outbox are not in {described(connection.engine.url, schema)}; "
            f"run: {command(connection.engine.url, 'upgrade', missing, schema)}"
        )
    for branch in ("common", *parts):
        revision = revisions[branch]
        if is_usable(branch, revision):
            continue
        if revision and not known(revision):
            raise _newer(connection, branch, revision, schema)
        raise SchemaOutdated(
            f"the {branch} tables of the outbox in {described(connection.engine.url, schema)} are at {revision}, "
            f"this code needs {head(branch)}; run: {command(connection.engine.url, 'upgrade', parts, schema)}"
        )


def refuse_newer(connection: Connection, revisions: Mapping[str, str | None], schema: str) -> None:
    """Make sure that this code knows all revisions in the database.

    Raises:
        SchemaOutdated: it doesn't.
    """
    for branch, revision in revisions.items():
        if revision and not known(revision):
            raise _newer(connection, branch, revision, schema)


def read(connection: Connection, schema: str) -> dict[str, str | None]:
    """Return the newest revision of each branch."""
    rows = versions(connection, schema)
    found = applied(rows)
    result: dict[str, str | None] = {}
    for branch in BRANCHES:
        unknown = [row for row in rows if row not in found and row.startswith(f"{branch}_")]
        result[branch] = next(iter(unknown), None) or next((r for r in history(branch) if r in found), None)
    if any(result[part] for part in PARTS) and not result["common"]:
        # A part that is newer than this code stands for a revision of `common` that we can't tell.
        result["common"] = head("common")
    return result


def versions(connection: Connection, schema: str) -> list[str]:
    """Return the rows of the version table; none where there is no such table."""
    table = f'"{schema}".{VERSION_TABLE}'
    if connection.scalar(text("SELECT to_regclass(:name)"), {"name": table}) is None:
        return []
    return list(connection.scalars(text(f"SELECT version_num FROM {table} ORDER BY 1")))


def _read_apart(connection: Connection, schema: str) -> dict[str, str | None]:
    """Read within the caller's transaction; where there is none, leave none behind."""
    ours = not connection.in_transaction()
    try:
        return read(connection, check_schema(schema))
    finally:
        if ours:
            connection.rollback()


def _newer(connection: Connection, branch: str, revision: str, schema: str) -> SchemaOutdated:
    return SchemaOutdated(
        f"the {branch} tables of the outbox in {described(connection.engine.url, schema)} are at {revision}, newer "
        f"than this code ({head(branch)}) can work on; run: {pip_install()}"
    )
