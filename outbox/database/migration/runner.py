"""Run the chain: up and down."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from outbox.database.execute import LOCK_NOT_AVAILABLE, sqlstate
from outbox.database.migration import chain
from outbox.database.migration.chain import connected, read, refuse_newer, set_time_limit, versions
from outbox.database.migration.compare import METADATA
from outbox.database.migration.script import declared
from outbox.errors import InvalidSettings, SchemaBusy
from outbox.reader import variable
from outbox.text import described

if TYPE_CHECKING:
    from alembic.config import Config

    from outbox.database.engines import Bind

logger: logging.Logger = logging.getLogger("outbox.migration")

_TURN_TIMEOUT = 60.0
#: How long (seconds) an upgrade waits for its locks, unless it is told otherwise.
_PATIENCE = 5.0
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
_HOLDERS = text(
    "SELECT DISTINCT pid, usename::text, application_name FROM pg_locks JOIN pg_stat_activity USING (pid)"
    " WHERE relation = to_regclass(:table) AND granted AND pid <> pg_backend_pid() ORDER BY 1 LIMIT 3"
)
#: How long (seconds) a try that holds a lock waits for the others: shorter than PostgreSQL's ``deadlock_timeout``, by
#: which it ends one of those that wait for each other, and that could be a service. And how long one without waits at
#: most, while all that comes later to the table waits behind it.
_TRY, _LONGEST_TRY = 0.5, 5.0
#: Takes sentences about what an upgrade waits for.
Say = Callable[[str], object]
# Alembic keeps what it is doing in module globals.
_one_at_a_time = threading.Lock()


def upgrade(
    bind: Bind,
    parts: Collection[str] | None = None,
    schema: str = "outbox",
    *,
    lock_timeout: float = _PATIENCE,
    say: Say = logger.info,
) -> list[str]:
    """Install the tables of these parts, or bring them to the version of this code, in one transaction.

    ``parts`` None: those that the database has; both, where it has none. Tables that a newer version has upgraded by
    one revision are left as they are: this code can work on them. Upgrades at the same time wait for each other.
    ``lock_timeout`` (seconds) bounds how long it waits for its locks on the tables; ``say`` is told what it waits for.

    Returns:
        The revisions that were run; none when there was nothing to do.

    Raises:
        SchemaBusy: another session held a lock for too long; nothing was changed.
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
        _make_schema(connection, schema)
        if any(installed[branch] not in {None, chain.head(branch)} for branch in branches):
            _lock_tables(connection, schema, lock_timeout, say)
        for branch in branches:
            _alembic().upgrade(config, f"{branch}@head")
    return done


def downgrade(
    bind: Bind,
    parts: Collection[str] = chain.PARTS,
    schema: str = "outbox",
    *,
    lock_timeout: float = _PATIENCE,
    say: Say = logger.info,
) -> list[str]:
    """Remove the tables of these parts and all that is in them, in one transaction.

    The tables that both parts need go with the last one. The schema itself stays: it may have been made, with
    its privileges, by another role.

    Returns:
        The revisions that were undone.

    Raises:
        As `upgrade`.
    """
    parts = chain.check_parts(parts)
    with _turn(bind, schema, lock_timeout) as (connection, config, done):
        installed = read(connection, schema)
        refuse_newer(connection, installed, schema)
        _lock_tables(connection, schema, lock_timeout, say)
        for part in reversed(parts):
            if installed[part]:
                _alembic().downgrade(config, f"{part}@base")
        left = read(connection, schema)
        if left["common"] and not any(left[part] for part in chain.PARTS):
            _alembic().downgrade(config, "common@base")
        if not versions(connection, schema):
            connection.execute(text(f'DROP TABLE IF EXISTS "{schema}".{chain.VERSION_TABLE}'))
    return done


def _make_schema(connection: Connection, schema: str) -> bool:
    """Make the schema unless it is there; return whether it is new."""
    # CREATE SCHEMA IF NOT EXISTS asks for the privilege to create one even where it exists.
    is_new = connection.scalar(text("SELECT to_regnamespace(:name)"), {"name": f'"{schema}"'}) is None
    if is_new:
        connection.execute(text(f'CREATE SCHEMA "{schema}"'))
    return is_new


def _lock_tables(connection: Connection, schema: str, patience: float, say: Say) -> None:
    """Lock all tables that are there, before the first of them is altered.

    A revision that has altered one table and waits for the next would meet a service that has the next one and waits
    for the first. So each try locks table by table, and gives all back when it has had to wait for `_TRY` seconds with
    a lock in hand: nothing waits for it longer than that. The next try begins with the table that it waited for: with
    no lock in hand it may queue there for as long as the transactions before it take.

    Raises:
        SchemaBusy: the locks couldn't be had within ``patience`` seconds.
    """
    names = [table.name for make in METADATA.values() for table in make(schema).tables.values()]
    left = list(connection.scalars(_TABLES, {"schema": f'"{schema}"', "names": names}))
    gives_up, tables, longest = time.monotonic() + patience, len(left), _TRY
    while left:
        order, savepoint, until = list(left), connection.begin_nested(), time.monotonic() + longest
        try:
            while left:
                wait = min(until, gives_up) - time.monotonic()
                set_time_limit(connection, "lock_timeout", max(wait, 0.001))
                connection.execute(text(f'LOCK TABLE ONLY "{schema}".{left[0]} IN ACCESS EXCLUSIVE MODE'))
                until = time.monotonic() + _TRY if left == order else until
                left.pop(0)
        except DBAPIError as error:
            if sqlstate(error) != LOCK_NOT_AVAILABLE:
                raise
            savepoint.rollback()
            locked, table = len(order) - len(left), f"{schema}.{left[0]}"
            holders = connection.execute(_HOLDERS, {"table": f'"{schema}".{left[0]}'}).all()
            by = ", ".join(f"pid {pid} of {user!r}, application {name!r}" for pid, user, name in holders) or "no more"
            how_far = f"{locked} of {tables} tables were locked, then {table} was in use by {by}"
            if time.monotonic() >= gives_up:
                raise _busy(connection, schema, patience, how_far) from error
            say(f"{how_far}: trying again")
            longest = _TRY if locked else min(2 * longest, _LONGEST_TRY)
            left = [left[0], *(name for name in order if name != left[0])]
    set_time_limit(connection, "lock_timeout", patience)


def _busy(connection: Connection, schema: str, patience: float, more: str) -> SchemaBusy:
    return SchemaBusy(
        f"the outbox tables in {described(connection.engine.url, schema)} can't be changed now: another transaction "
        f"holds a lock on them ({more}). Nothing was changed; try again when it has ended, or wait longer than "
        f"{patience:g} s: --lock-timeout SECONDS"
    )


def _before(what: str, branch: str, revision: str) -> list[tuple[str, str]]:
    """Return what a branch's revisions after this one want to be there beforehand.

    ``BEFORE``: indexes, as name and target. ``COLUMNS_BEFORE``: the columns of these, as table and definition.
    """
    newer = reversed(list(takewhile(lambda each: each != revision, chain.history(branch))))
    return [index for each in newer for index in declared(each).get(what, ())]


def _build_before(bind: Bind, parts: tuple[str, ...], schema: str, lock_timeout: float) -> None:
    """Build the indexes for which the next revisions look, in tables that have rows, without keeping sessions out.

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
            why = "another upgrade, or long work on these tables; see pg_locks"
            raise _busy(connection, schema, lock_timeout, why) from error


@contextmanager
def turn_of_environment(schema: str) -> Iterator[Connection]:
    """Yield a connection for the command ``alembic``, to the database that ``OUTBOX_DATABASE_URL`` names.

    It has the turn among upgrades, and a transaction, with the schema in it; that goes again if no revision was run.

    Raises:
        InvalidSettings: no database is named.
        SchemaBusy: as `upgrade`.
    """
    url = variable("OUTBOX_DATABASE_URL")
    if not url:
        raise InvalidSettings(
            "no database: set OUTBOX_DATABASE_URL to postgresql+psycopg://user:***@host:5432/database"
        )
    with _turn(url, schema, _PATIENCE) as (connection, _, _), connection.begin_nested() as made:
        is_new = _make_schema(connection, schema)
        yield connection
        if is_new and not versions(connection, schema):
            made.rollback()


def _alembic() -> Any:
    from alembic import command  # noqa: PLC0415 - slow to import, and most importers of this package only read

    return command


def _config(**attributes: object) -> Config:
    """Return Alembic's configuration for the chain, with what ``env.py`` needs to know."""
    from alembic.config import Config  # noqa: PLC0415 - as above

    result = Config()
    # The path is no format string: Alembic would read a % in it.
    result.set_main_option("script_location", str(chain.folder()).replace("%", "%%"))
    result.attributes.update(attributes)
    return result
