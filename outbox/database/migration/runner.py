"""Run the chain: up, down, or written out as SQL."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from outbox.database.execute import LOCK_NOT_AVAILABLE, sqlstate
from outbox.database.migration import chain
from outbox.database.migration.compare import METADATA
from outbox.database.migration.state import connected, read, refuse_newer, set_time_limit, versions
from outbox.errors import SchemaBusy
from outbox.text import described

if TYPE_CHECKING:
    from alembic.config import Config

    from outbox.database.engines import Bind

_TURN_TIMEOUT = 60.0
_IS_VALID = text("SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(:name)")
_PARTITIONS = text(
    "SELECT c.relname::text FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid JOIN pg_class p"
    " ON p.oid = i.inhparent WHERE p.oid = to_regclass(:table) AND p.relkind = 'p' ORDER BY 1"
)
_IS_THERE = text("SELECT to_regclass(:table) IS NOT NULL")
# Partitions are reached through their tables.
_TABLES = text(
    "SELECT relname::text FROM pg_class WHERE relnamespace = to_regnamespace(:schema) AND relname = ANY(:names)"
    " AND relkind IN ('r', 'p') ORDER BY 1"
)
#: How long (seconds) one try waits for each lock: shorter than PostgreSQL's ``deadlock_timeout``, after which it would
#: end one of those who wait for each other, and that could be a service.
_TRY = 0.5
# Alembic keeps what it is doing in module globals.
_one_at_a_time = threading.Lock()


def upgrade(
    bind: Bind, parts: Collection[str] | None = None, schema: str = "outbox", *, lock_timeout: float = 5.0
) -> list[str]:
    """Install the tables of these parts, or bring them to the version of this code, in one transaction.

    ``parts`` None: those that the database has; both, where it has none. Tables that a newer version has upgraded by
    one revision are left as they are: this code can work on them. Upgrades at the same time wait for each other.
    ``lock_timeout`` (seconds) bounds how long it waits for its locks on the tables.

    Returns:
        The revisions that were run; none when there was nothing to do.

    Raises:
        SchemaBusy: somebody else held a lock for too long; nothing was changed.
        SchemaOutdated: the database is newer than this code can work on.
        InvalidSettings: a part or a schema name that isn't one.
    """
    named = None if parts is None else chain.check_parts(parts)
    _build_before(bind, named or chain.PARTS, chain.check_schema(schema), lock_timeout)
    with _turn(bind, schema, lock_timeout) as (connection, config, done):
        installed = read(connection, schema)
        which = named or tuple(part for part in chain.PARTS if installed[part]) or chain.PARTS
        branches = ("common", *which)
        newer = any(revision and not chain.known(revision) for revision in map(installed.get, branches))
        if newer and all(chain.is_usable(branch, installed[branch]) for branch in branches):
            return done
        refuse_newer(connection, installed, schema)
        # CREATE SCHEMA IF NOT EXISTS asks for the privilege to create one even where it exists.
        if connection.scalar(text("SELECT to_regnamespace(:name)"), {"name": f'"{schema}"'}) is None:
            connection.execute(text(f'CREATE SCHEMA "{schema}"'))
        if any(installed[branch] not in {None, chain.head(branch)} for branch in branches):
            _lock_tables(connection, schema, lock_timeout)
        for branch in branches:
            _alembic().upgrade(config, f"{branch}@head")
    return done


def downgrade(
    bind: Bind, parts: Collection[str] = chain.PARTS, schema: str = "outbox", *, lock_timeout: float = 5.0
) -> list[str]:
    """Remove the tables of these parts and all that is in them, in one transaction.

    The tables that both parts need go with the last one. The schema itself stays: it may have been made, with
    its privileges, by somebody else.

    Returns:
        The revisions that were undone.

    Raises:
        As `upgrade`.
    """
    parts = chain.check_parts(parts)
    with _turn(bind, schema, lock_timeout) as (connection, config, done):
        installed = read(connection, schema)
        refuse_newer(connection, installed, schema)
        _lock_tables(connection, schema, lock_timeout)
        for part in reversed(parts):
            if installed[part]:
                _alembic().downgrade(config, f"{part}@base")
        left = read(connection, schema)
        if left["common"] and not any(left[part] for part in chain.PARTS):
            _alembic().downgrade(config, "common@base")
        if not versions(connection, schema):
            connection.execute(text(f'DROP TABLE IF EXISTS "{schema}".{chain.VERSION_TABLE}'))
    return done


def sql(parts: Collection[str] = chain.PARTS, schema: str = "outbox") -> str:
    """Return the SQL that installs these parts into an empty database, as one transaction.

    The same version of this package always returns the same text.
    """
    parts = chain.check_parts(parts)
    config = _config(schema=chain.check_schema(schema))
    config.output_buffer = written = io.StringIO()
    with _one_at_a_time:
        _alembic().upgrade(config, "heads" if parts == chain.PARTS else f"{parts[0]}@head", sql=True)
    return written.getvalue()


def _lock_tables(connection: Connection, schema: str, patience: float) -> None:
    """Lock all tables that are there, before the first of them is altered.

    A revision that has altered one table and waits for the next would meet a service that has the next one and waits
    for the first. Nobody's order is that of all others, so a try gives back what it has got as soon as it must wait,
    and those who wait for that go on before the next one.

    Raises:
        DBAPIError: the locks couldn't be had within ``patience`` seconds.
    """
    names = [table.name for make in METADATA.values() for table in make(schema).tables.values()]
    there = connection.scalars(_TABLES, {"schema": f'"{schema}"', "names": names}).all()
    if not there:
        return
    tables = ", ".join(f'ONLY "{schema}".{name}' for name in there)
    lock, gives_up = text(f"LOCK TABLE {tables} IN ACCESS EXCLUSIVE MODE"), time.monotonic() + patience
    set_time_limit(connection, "lock_timeout", min(_TRY, patience))
    while True:
        try:
            with connection.begin_nested():
                connection.execute(lock)
            break
        except DBAPIError as error:
            if sqlstate(error) != LOCK_NOT_AVAILABLE or time.monotonic() >= gives_up:
                raise
    set_time_limit(connection, "lock_timeout", patience)


def _before(what: str, branch: str, revision: str) -> list[tuple[str, str]]:
    """Return what a branch's revisions after this one want to be there beforehand.

    ``BEFORE``: indexes, as name and target. ``COLUMNS_BEFORE``: the columns of these, as table and definition.
    """
    from alembic.script import ScriptDirectory  # noqa: PLC0415 - slow to import

    scripts = ScriptDirectory(chain.folder())
    newer = reversed(list(takewhile(lambda each: each != revision, chain.history(branch))))
    modules = [script.module for each in newer if (script := scripts.get_revision(each))]
    return [each for module in modules for each in getattr(module, what, ())]


def _build_before(bind: Bind, parts: tuple[str, ...], schema: str, lock_timeout: float) -> None:
    """Build the indexes for which the next revisions look, in tables that have rows, without keeping anybody out.

    One that was interrupted is built again.
    """
    with connected(bind) as connection:
        known = {
            branch: revision
            for branch, revision in read(connection, schema).items()
            if branch in ("common", *parts) and revision and chain.known(revision)
        }
        missing = [index for installed in known.items() for index in _before("BEFORE", *installed)]
        if not missing:
            return
        connection.rollback()
        if columns := [column for installed in known.items() for column in _before("COLUMNS_BEFORE", *installed)]:
            with _turn(bind, schema, lock_timeout) as (altering, _, _):
                for table, column in columns:
                    altering.execute(text(f'ALTER TABLE "{schema}".{table} ADD COLUMN IF NOT EXISTS {column}'))
        connection.execution_options(isolation_level="AUTOCOMMIT")
        for name, target in [leaf for index in missing for leaf in _on_partitions(connection, schema, *index)]:
            valid = connection.scalar(_IS_VALID, {"name": f'"{schema}".{name}'})
            if valid is False:
                connection.execute(text(f'DROP INDEX CONCURRENTLY IF EXISTS "{schema}".{name}'))
            if not valid:
                connection.execute(text(f'CREATE INDEX CONCURRENTLY IF NOT EXISTS {name} ON "{schema}".{target}'))


def _on_partitions(connection: Connection, schema: str, name: str, target: str) -> list[tuple[str, str]]:
    """Return an index as it is, or those on the partitions of its table, which none can be built for at once.

    The index of the table, which a revision makes, takes them over. That of a partition which a revision before it is
    yet to make is built by its own revision.
    """
    table = target.partition(" ")[0]
    if not connection.scalar(_IS_THERE, {"table": f'"{schema}".{table}'}):
        return []
    leaves = connection.scalars(_PARTITIONS, {"table": f'"{schema}".{table}'}).all()
    what = name.removeprefix(f"ix_{table}_")
    return [(f"{leaf}_{what}", target.replace(table, leaf, 1)) for leaf in leaves] or [(name, target)]


@contextmanager
def _turn(bind: Bind, schema: str, lock_timeout: float) -> Iterator[tuple[Connection, Config, list[str]]]:
    """Yield a connection in a transaction, with Alembic's configuration and a list of the revisions that are run."""
    schema, done = chain.check_schema(schema), list[str]()

    def note(step: Any, **_: object) -> None:
        done.append(step.up_revision_id)

    with connected(bind) as connection:
        try:
            with connection.begin():
                set_time_limit(connection, "lock_timeout", _TURN_TIMEOUT)
                turn = text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))")
                connection.execute(turn, {"name": f"outbox migration {schema}"})
                set_time_limit(connection, "lock_timeout", lock_timeout)
                with _one_at_a_time:
                    yield connection, _config(connection=connection, schema=schema, on_version_apply=note), done
        except DBAPIError as error:
            if sqlstate(error) != LOCK_NOT_AVAILABLE:
                raise
            raise SchemaBusy(
                f"the outbox tables in {described(connection.engine.url, schema)} can't be changed now: another "
                "transaction holds a lock on them (another upgrade, or long work on these tables; see pg_locks). "
                "Nothing was changed; try again when it has ended"
            ) from error


@contextmanager
def in_turn(schema: str) -> Iterator[Config]:
    """Yield Alembic's configuration for the chain while nobody else in this process uses Alembic on it."""
    with _one_at_a_time:
        yield _config(schema=schema)


def _alembic() -> Any:
    from alembic import command  # noqa: PLC0415 - slow to import, and who imports this package mostly reads

    return command


def _config(**attributes: object) -> Config:
    """Return Alembic's configuration for the chain, with what ``env.py`` needs to know."""
    from alembic.config import Config  # noqa: PLC0415 - as above

    result = Config()
    # The path is no format string: Alembic would read a % in it.
    result.set_main_option("script_location", str(chain.folder()).replace("%", "%%"))
    result.attributes.update(attributes)
    return result
