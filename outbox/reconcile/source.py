"""PostgreSQL as a source: one snapshot of each database for as long as a comparison reads, and Arrow over COPY (ADBC).

A query may take minutes. A job that is ended cancels those of its threads, and doesn't wait for them. What is lost on
the way is read again (`insist`); with a server its snapshots are lost, and the reader of a snapshot says so. No text
has the password of a URL in it.
"""

from __future__ import annotations

import atexit
import datetime as dt
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, NoReturn, TypeVar
from uuid import UUID

import numpy as np
import pyarrow as pa
from sqlalchemy import Connection, Engine, make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from outbox.database import engines, migration
from outbox.database.execute import (
    CONTENDED,
    SERIALIZATION_FAILURE,
    UNAVAILABLE,
    Backoff,
    Statement,
    execute,
    kind_of,
    sqlstate,
)
from outbox.database.identity import NUMBERS, source_identity
from outbox.database.sql import plan_by_index
from outbox.errors import ErrorKind, OutboxError, SourceError, SourceLost, was_interrupted
from outbox.reconcile import sql
from outbox.reconcile.job import MAX_TIME, Access, Job, Pair, Part, Range, described, hidden, id_at
from outbox.reconcile.rows import PRODUCER, SCHEMAS, Array, fixed_ids, within_calendar
from outbox.reconcile.tables import ProducerState
from outbox.text import class_name, feed_among, summary_of

T = TypeVar("T")

#: So often a lost source is tried at most, with waits (seconds) from _FIRST_WAIT to _LONGEST_WAIT between: most of a
#: minute in all, which a fail-over takes.
MOST_TRIES = 7
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 30.0
#: A reader tries less often: the holder of its snapshot knows better whether there is something to wait for.
_READER_TRIES = 3
#: So many ranges are read by one statement.
_MOST_RANGES = 2_000
# While it waits it asks so often whether it still should.
_ASK_EVERY = 0.2

_guard = threading.Lock()
_cursors: dict[int, Any] = {}


@contextmanager
def cancellable(cursor: Any) -> Iterator[None]:
    """Let other threads cancel what this one does with an ADBC cursor in the block."""
    thread = threading.get_ident()
    with _guard:
        _cursors[thread] = cursor
    try:
        yield
    finally:
        # Under the lock, so that no thread cancels a cursor that is being closed.
        with _guard:
            del _cursors[thread]


def cancel(threads: Collection[int]) -> None:
    """Cancel what these threads (by their identifiers) are reading; those that read nothing are left alone."""
    with _guard:
        for thread in threads:
            if (cursor := _cursors.get(thread)) is not None:
                with suppress(Exception):  # it has just ended
                    cursor.adbc_cancel()


def conninfo(url: str) -> str:
    """Return a SQLAlchemy URL as libpq takes it, password included.

    Not as a URL: SQLAlchemy leaves spaces in a password as they are, which libpq refuses, and quotes in its error.
    """
    parts = make_url(url)
    _, options = parts.get_dialect()().create_connect_args(parts)
    # Not by psycopg, which asks libpq: an executor has none.
    return " ".join(f"{name}={_quoted(str(value))}" for name, value in {**engines.KEEP_ALIVE, **options}.items())


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def raise_bare(error: OutboxError) -> NoReturn:
    """Raise an error with nothing behind it: psycopg's own keep their connection's password. A Ctrl-C stays one."""
    try:
        raise error from None
    except OutboxError:
        if was_interrupted(error):
            raise KeyboardInterrupt from None
        error.__context__ = None
        raise


def insist(
    act: Callable[[], T],
    *,
    tries: int = MOST_TRIES,
    waiting: Callable[[], None] = lambda: None,
    lost: Callable[[SourceLost], None] = lambda _: None,
) -> T:
    """Return what an act returns, which may be done twice; do it again where a source is lost over it.

    ``waiting`` is called now and then in between; what it raises ends the wait. ``lost`` is told of the loss.

    Raises:
        SourceLost: it was lost so often.
    """
    backoff = Backoff(_FIRST_WAIT, _LONGEST_WAIT)
    for _ in range(tries - 1):
        try:
            return act()
        except SourceLost as error:
            lost(error)
        until = time.monotonic() + backoff.next()
        while (left := until - time.monotonic()) > 0:
            waiting()
            time.sleep(min(left, _ASK_EVERY))
    return act()


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """What servers call the sessions that read, and for how many seconds one may wait or work at something."""

    name: str = "outbox reconcile"
    seconds: float = MAX_TIME

    @classmethod
    def of_run(cls, run_id: UUID, seconds: float) -> SessionSettings:
        """Return those of a run."""
        return cls(f"outbox reconcile {run_id}", seconds)

    def statement(self) -> Statement:
        """Return what sets it for a transaction."""
        return sql.settings(self.name, self.seconds)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one database looked like at a moment: a connection in a transaction that sees just that.

    ``name`` is what other connections import it by; ``now`` the database's clock at the time, ``lag`` how far a standby
    is behind its primary, None on a primary; both in microseconds. ``settings`` are those of all sessions that read it.
    """

    access: Access
    connection: Connection
    name: str
    now: int
    settings: SessionSettings
    lag: int | None = None


@dataclass(frozen=True, slots=True)
class Snapshots:
    """Those of the sides that have a database, both as a rule.

    The consumer's was taken first: whatever it has consumed, the producer's has sent.
    """

    of: Mapping[Part, Snapshot]

    @property
    def producer(self) -> Snapshot:
        """That of the producer's database."""
        return self.of["producer"]

    @property
    def consumer(self) -> Snapshot:
        """That of the consumer's database."""
        return self.of["consumer"]

    @property
    def lags(self) -> dict[Part, float]:
        """How far (seconds) the standbys among them are behind their primaries."""
        return {part: each.lag / 1e6 for part, each in self.of.items() if each.lag is not None}

    @property
    def held(self) -> bool:
        """Are they still there?"""
        try:
            for each in self.of.values():
                execute(each.connection, sql.NOTHING)
        except SQLAlchemyError as error:
            return kind_of(error) is not ErrorKind.UNAVAILABLE
        return True


@contextmanager
def snapshots_of(
    databases: Mapping[Part, Access],
    *,
    waiting: Callable[[], None] = lambda: None,
    settings: SessionSettings = SessionSettings(),
    foreign: Collection[Part] = (),
    on: Callable[[Part], Connection | None] = lambda _: None,
) -> Iterator[Snapshots]:
    """Take a snapshot of the databases, the consumer's first, and hold them until the end of the block.

    Of ``foreign`` ones our tables aren't read, and needn't be there. ``on`` gives the connection for each, None where
    one is to be opened.

    While they are held, vacuum can't remove what they see: don't hold them longer than it takes to read. ``waiting``
    is called now and then as long as another session has locked a table; what it raises ends the wait. ``settings`` are
    those of the sessions: a server ends a snapshot over which nothing is done for so long.

    Raises:
        SourceLost: a database can't be reached.
        SchemaMissing, SchemaOutdated: it isn't migrated.
    """
    taken: dict[Part, Snapshot] = {}
    with ExitStack() as stack:
        for part, access in sorted(databases.items()):  # by their names, the consumer first
            ours = [] if part in foreign else [part]
            taken[part] = stack.enter_context(snapshot_of(access, ours, on(part), waiting=waiting, settings=settings))
        yield Snapshots(taken)


def engine_of(access: Access) -> Engine:
    """Return an engine that keeps no connections, and doesn't wait for a host for ever."""
    return _engine(access.url, access.engine)


# An engine asks a server that it is new to for its version and settings, which costs half as much as to connect.
@lru_cache(maxsize=256)
def _engine(address: str, source: Engine | None) -> Engine:
    if source is not None:
        return engines.separate_engine(source, hide_parameters=True)
    url = make_url(address)
    keep_alive = {name: value for name, value in engines.KEEP_ALIVE.items() if name not in url.query}
    return engines.engine_of(url.update_query_dict(keep_alive), hide_parameters=True)


def as_time(microseconds: int) -> dt.datetime:
    """Return a database's clock as a time."""
    return dt.datetime.fromtimestamp(microseconds / 1e6, dt.UTC)


def pruned_below(access: Access, part: Part, now: int) -> UUID:
    """Return the id below which a database may have pruned messages, by its clock (microseconds)."""
    settings = access.settings
    retention = settings.retention if part == "producer" else settings.inbox_retention
    return id_at(int(max(now / 1e3 - retention * 1e3, 0.0)))


@contextmanager
def reaching(access: Access) -> Iterator[None]:
    """Turn what a database, or the way to it, goes wrong with into a `SourceError` without its password.

    It is a `SourceLost` where it may be read again.
    """
    try:
        yield
    except SQLAlchemyError as error:
        text = summary_of(getattr(error, "orig", None) or error)
        again = kind_of(error) is ErrorKind.UNAVAILABLE or sqlstate(error) == SERIALIZATION_FAILURE
        raise_bare((SourceLost if again else SourceError)(f"{described(access.url)}: {hidden(text, access.url)}"))


@contextmanager
def connected(access: Access) -> Iterator[Connection]:
    """Open a transaction on a connection of its own, for a question or two; `SourceError` if it can't be asked."""
    with reaching(access), engine_of(access).begin() as connection:
        yield connection


def located(job: Job, *, unmet: bool = True) -> Job | None:
    """Return a job whose pairs have the feeds that their groups have of this producer's topics.

    Of a topic that no group has read from it, that is the next feed, of which there is nothing; not ``unmet``: None.

    Raises:
        SourceError: a database can't be asked.
    """
    if job.tables:
        return job
    with connected(job.producer) as connection:
        ((source, _),) = execute(connection, source_identity(job.producer.schema))[0]
    topics = dict.fromkeys(pair.topic for pair in job.pairs)
    with connected(job.consumer) as connection:
        known = execute(connection, *(NUMBERS(job.consumer.schema, topic) for topic in topics))
    if not unmet and not all(any(each == source for _, each in rows) for rows in known):
        return None
    return job.from_feeds({topic: feed_among(rows, topic, source) for topic, rows in zip(topics, known, strict=True)})


@contextmanager
def snapshot_of(
    access: Access,
    parts: Sequence[Part],
    on: Connection | None = None,
    *,
    waiting: Callable[[], None] = lambda: None,
    settings: SessionSettings = SessionSettings(),
) -> Iterator[Snapshot]:
    """Take a snapshot of one database, whose tables of these parts are read, as `snapshots_of` does.

    It is taken ``on`` a connection that is in no transaction; None opens one for that.
    """
    with ExitStack() as stack:
        with reaching(access):
            connection = stack.enter_context(engine_of(access).connect()) if on is None else on
            if parts:
                migration.require(connection, tuple(parts), access.schema)
            connection.rollback()
            while (snapshot := _begin(access, parts, connection, settings)) is None:
                waiting()
        try:
            yield snapshot
        finally:
            # Nothing was written; what went wrong before is to be told, also where the connection is lost.
            with suppress(SQLAlchemyError):
                connection.rollback()


def _begin(access: Access, parts: Sequence[Part], connection: Connection, settings: SessionSettings) -> Snapshot | None:
    """Begin the transaction of a snapshot; None where a lock couldn't be had for a moment."""
    connection.begin()
    try:
        locks = [sql.KEEP[part](access.schema) for part in parts]
        execute(connection, sql.READ_IN_ONE_SNAPSHOT, sql.WAIT_A_MOMENT, *locks, sql.WAIT_AS_EVER)
    except DBAPIError as error:
        if sqlstate(error) not in CONTENDED:
            raise
        connection.rollback()
        return None
    _, ((name,),), ((now, lag),) = execute(connection, settings.statement(), sql.EXPORT_SNAPSHOT, sql.CLOCK_AND_LAG)
    return Snapshot(access, connection, name, now, settings, lag)


#: Reads what a statement says.
Ask = Callable[[Statement], pa.Table]


@dataclass(frozen=True, slots=True)
class PostgresSide:
    """One side of a pair in PostgreSQL; a value that can be sent to another process.

    ``snapshot`` is the name under which a transaction that is still open has exported what it sees; None reads what
    is there at the time. ``settings`` are those of its sessions.
    """

    access: Access
    part: Part
    pair: Pair
    snapshot: str | None = None
    settings: SessionSettings = SessionSettings()

    def statement(self, ranges: Sequence[Range]) -> Statement:
        """Return the statement that reads ranges."""
        return sql.rows(self.part, self.access.schema, self.pair, ranges)

    @property
    def schema(self) -> pa.Schema:
        """The columns of its rows."""
        return SCHEMAS[self.part]

    @property
    def has_bodies(self) -> bool:
        """Do its rows tell the digests of bodies?"""
        return True

    @property
    def locks(self) -> Sequence[Statement]:
        """What keeps its rows where they are, while they are read."""
        return (sql.KEEP[self.part](self.access.schema),)

    def read(self, ranges: Sequence[Range]) -> pa.Table:
        """Return the rows of the ranges, sorted by id (`rows.SCHEMAS`).

        Raises:
            SourceLost: the connection was lost several times, or the snapshot is gone.
            SourceError: they can't be read.
        """
        if not ranges:
            return self.schema.empty_table()
        if len(ranges) > _MOST_RANGES:
            starts = range(0, len(ranges), _MOST_RANGES)
            return pa.concat_tables([self.read(ranges[start : start + _MOST_RANGES]) for start in starts])
        reached: list[bool] = []
        try:
            return insist(partial(self._read, ranges, reached), tries=_READER_TRIES)
        except SourceLost as error:
            if reached:
                raise
            # Nothing was lost: this host has no way to it, and the holder of the snapshot knows whether it is there.
            raise_bare(SourceError(str(error)))

    def _read(self, ranges: Sequence[Range], reached: list[bool]) -> pa.Table:
        """Read once; ``reached`` has something in it once there was a connection."""
        access, before = self.access.resolved(), len(reached)
        try:
            with self.session(access, reached) as ask:
                return shaped(self.fetch(ask, ranges), self.schema)
        except SourceLost:
            raise
        except Exception as error:
            raise_bare(failure_of(error, access, connected=len(reached) > before))

    def fetch(self, ask: Ask, ranges: Sequence[Range]) -> pa.Table:
        """Return the rows of ranges, in any order; ``ask`` reads in the snapshot."""
        return ask(self.statement(ranges))

    @contextmanager
    def session(self, access: Access, reached: list[bool]) -> Iterator[Ask]:
        """Open an ADBC connection, and yield what reads in the snapshot; ``reached`` gets one more once it is open."""
        first = *self.locks, self.settings.statement(), sql.PLAN_FOR_ROWS
        with snapshot_cursor(access, self.snapshot, first, lambda: reached.append(True)) as cursor:
            yield partial(self.ask, cursor)

    def ask(self, cursor: Any, statement: Statement) -> pa.Table:
        """Return what a statement says, on a cursor of ADBC's."""
        cursor.execute(rendered(statement))
        return cursor.fetch_arrow_table()


@contextmanager
def snapshot_cursor(
    access: Access, snapshot: str | None, first: Iterable[Statement], reached: Callable[[], None] = lambda: None
) -> Iterator[Any]:
    """Open an ADBC cursor that reads in a snapshot, by its name, after some ``first`` statements.

    ``reached`` is told once there is a connection. The snapshot None reads what is there at the time.

    Raises:
        SourceLost: the snapshot is gone.
    """
    with adbc_connection(conninfo(access.url)) as connection, connection.cursor() as cursor, cancellable(cursor):
        reached()
        # ADBC begins a transaction by itself; settings for it must come before the first query.
        cursor.execute(rendered(sql.READ_IN_ONE_SNAPSHOT))
        cursor.execute(rendered(sql.AS_UTF8))
        if snapshot is not None:
            _import(cursor, access, snapshot)
        for statement in first:
            cursor.execute(rendered(statement))
        yield cursor


def _import(cursor: Any, access: Access, snapshot: str) -> None:
    try:
        cursor.execute(rendered(Statement(sql.IMPORT_SNAPSHOT, {"name": snapshot})))
    except Exception as error:
        # How a server puts it depends on its version.
        if UNAVAILABLE.match(sqlstate(error)) or not sqlstate(error):
            raise
        raise_bare(SourceLost(f"{described(access.url)}: the snapshot that is read is gone"))


def failure_of(error: Exception, access: Access, *, connected: bool = True) -> SourceError:
    """Return what to raise in place of an error of ADBC's; one that may be read again where it wasn't ``connected``."""
    # Whatever the driver says may quote the URL.
    text = hidden(summary_of(error), access.url)
    state = sqlstate(error)
    lost = UNAVAILABLE.match(state) or (not state and class_name(error) == "OperationalError")
    again = not connected or lost or state == SERIALIZATION_FAILURE
    return (SourceLost if again else SourceError)(f"{described(access.url)} can't be read: {text}")


@contextmanager
def adbc_connection(address: str) -> Iterator[Any]:
    """Open an ADBC connection to what `conninfo` returned."""
    database, counting = _adbc_database(address)
    with counting:
        connection = database.adbc_clone()
    try:
        yield connection
    finally:
        with counting:
            connection.close()


@cache
def _adbc_database(address: str) -> tuple[Any, threading.Lock]:
    """Return what connections of this process are cloned from, which keeps none to the server itself; and a lock.

    To know the types, ADBC reads the catalog of all tables first, which takes longer than most of what is read here.
    It counts the connections of a database, and has no lock for that.
    """
    from adbc_driver_postgresql import dbapi  # noqa: PLC0415 - loads a library that not every process needs

    database = dbapi.connect(address, autocommit=True)
    database.adbc_connection.close()
    atexit.register(database.close)  # it would fail to do so by itself then
    return database, threading.Lock()


_PLACEHOLDER = re.compile(r"%\((\w+)\)s|%%")


def rendered(statement: Statement) -> str:
    """Return a statement with its values in it: ADBC copies only what has no parameters."""
    values = statement.values
    if not isinstance(values, Mapping):
        return statement.sql
    return _PLACEHOLDER.sub(lambda match: literal(values[match[1]]) if match[1] else "%", statement.sql)


def literal(value: object) -> str:
    """Return a value as SQL.

    Without psycopg, which needs a libpq: an executor has none but ADBC's own.

    Raises:
        TypeError: the value is of a type that no statement of a reconciliation has.
    """
    if value is None:
        return "NULL"
    if isinstance(value, bool | int):
        return str(value).lower() if value is True or value is False or value >= 0 else f" {value}"
    if isinstance(value, str | UUID):
        text = str(value).replace("'", "''")
        # E'' means the same, whatever standard_conforming_strings says.
        return "E'{}'".format(text.replace("\\", "\\\\")) if "\\" in text else f"'{text}'"
    if isinstance(value, list | tuple):
        return literal("{{{}}}".format(",".join(map(_item, value))))
    raise TypeError(f"{value!r} is of {type(value).__name__}, which no statement of a reconciliation has")


def _item(value: object) -> str:
    """Return an item of an array as the text of an array has it."""
    if value is None:
        return "NULL"
    if isinstance(value, str):
        return '"{}"'.format(value.replace("\\", "\\\\").replace('"', '\\"'))
    if isinstance(value, bool | int | UUID):
        return str(value).lower()
    raise TypeError(f"an array of {type(value).__name__} is in no statement of a reconciliation")


def storage_of(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column without the type that an extension gives it, such as that of uuids."""
    if not isinstance(column.type, pa.BaseExtensionType):
        return column
    return pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)


def shaped(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return a table with the columns and types of a schema, sorted by id."""
    columns: list[Any] = []
    for field in schema:
        column = storage_of(table[field.name]).cast(field.type)
        columns.append(within_calendar(column) if pa.types.is_timestamp(field.type) else column)
    result = pa.Table.from_arrays(columns, schema=schema)
    ids = fixed_ids(result)
    return result if (ids[:-1] <= ids[1:]).all() else result.sort_by("id")


@contextmanager
def in_savepoint(connection: Connection, seconds: float, *, by_index: bool = False) -> Iterator[None]:
    """Read within the caller's transaction, in a savepoint that is undone at the end.

    So that no setting is left behind, and a statement which fails doesn't end the transaction. ``seconds`` is how long
    each statement may take; 0 is as long as it wants.
    """
    savepoint = connection.begin_nested()
    try:
        execute(connection, sql.limits(seconds), *([plan_by_index()] if by_index else []))
        yield
    finally:
        if not connection.invalidated:
            savepoint.rollback()


# --- the producer, table by table --------------------------------------------------------------------------

# A server joins millions of rows at three times the cost of reading them. Most messages were sent once, or rolled back:
# their rows are made of those of the tables. All others are named by the server, or left over from the join, and their
# rows are read as `sql.rows` joins them.

#: More ranges are small ones, of which each would be looked up in each table.
_FEW_RANGES = 8
#: So many ids are read by themselves at once.
_ODD_AT_ONCE = 20_000


@dataclass(frozen=True, slots=True)
class ProducerSide(PostgresSide):
    """The producer's side of a pair, in tables of ours."""

    def fetch(self, ask: Ask, ranges: Sequence[Range]) -> pa.Table:
        """Return the rows of ranges (`rows.PRODUCER`), in any order."""
        if len(ranges) > _FEW_RANGES or all(each.first == each.last for each in ranges):
            return PostgresSide.fetch(self, ask, ranges)
        of_tables = {name: _ordered(ask(each)) for name, each in sql.raw(self.access.schema, self.pair, ranges).items()}
        plain, odd = joined(**{name.replace(" ", "_"): table for name, table in of_tables.items()})
        parts = [plain]
        for start in range(0, len(odd), _ODD_AT_ONCE):
            some = [Range.only(UUID(bytes=id_.ljust(16, b"\0"))) for id_ in odd[start : start + _ODD_AT_ONCE].tolist()]
            parts.append(shaped(ask(self.statement(some)), PRODUCER))
        return pa.concat_tables(parts)


def joined(halves: pa.Table, messages: pa.Table, rolled_back: pa.Table, odd: pa.Table) -> tuple[pa.Table, Array]:
    """Join what `sql.raw` reads, each in the order of its ids.

    Returns the rows (`rows.PRODUCER`) of messages that were sent once and of halves that were rolled back, and the ids
    of all others, in order.
    """
    ids, ids_sent, ids_odd = fixed_ids(halves), fixed_ids(messages), fixed_ids(odd)
    sent, without_half = _indexes_in(ids, ids_sent)
    back, _ = _indexes_in(ids, fixed_ids(rolled_back))
    was_sent, was_rolled_back = sent >= 0, back >= 0
    is_odd = (was_sent == was_rolled_back) | (_indexes_in(ids, ids_odd)[0] >= 0)
    is_plain = ~is_odd
    rows, was_sent = halves.filter(pa.array(is_plain)), was_sent[is_plain]
    queues, positions, times = (
        np.where(was_sent, _values(messages, name, sent[is_plain]), other)
        for name, other in (("queue", 0), ("position", 0), ("at", _values(rolled_back, "at", back[is_plain])))
    )
    states = np.where(was_sent, ProducerState.DISPATCHED.value, ProducerState.ROLLED_BACK.value)
    columns: dict[str, Any] = {
        "id": rows["id"],
        "state": states,
        "sends": was_sent,
        "queue": queues,
        "position": positions,
        "at": pa.array(times).cast(PRODUCER.field("at").type),
        "digest": rows["digest"],
        "addressed": rows["addressed"],
        "compensated": np.zeros(len(states), bool),
        "opinion": np.full(len(states), -1, np.int8),
        "torn": np.zeros(len(states), np.int8),
    }
    return shaped(pa.table(columns), PRODUCER), np.unique(
        np.concatenate([ids[is_odd], ids_sent[without_half], ids_odd])
    )


def _ordered(table: pa.Table) -> pa.Table:
    """Return what was read, in the order of its ids."""
    table = table.set_column(0, PRODUCER.field("id"), storage_of(table["id"]).cast(PRODUCER.field("id").type))
    ids = fixed_ids(table)
    if (ids[:-1] <= ids[1:]).all():
        return table
    # As two numbers: to compare sixteen bytes takes ten times as long.
    halves = np.ascontiguousarray(ids).view(">u8").reshape(-1, 2).astype("u8")
    return table.take(pa.array(np.lexsort((halves[:, 1], halves[:, 0]))))


def _indexes_in(ids: Array, others: Array) -> tuple[Array, Array]:
    """Return where each id is among others, both in order, -1 where it isn't; and which of the others are no ids."""
    nearest = np.searchsorted(ids, others)
    alone = nearest == len(ids)
    alone[~alone] = ids[nearest[~alone]] != others[~alone]
    indexes = np.full(len(ids), -1)
    indexes[nearest[~alone]] = np.flatnonzero(~alone)
    return indexes, alone


def _values(table: pa.Table, name: str, indexes: Array) -> Array:
    """Return the numbers that a column has at indexes; any where the place is -1."""
    column = table[name]
    values = (column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column).to_numpy()
    found: Array = values[indexes] if len(values) else np.zeros(len(indexes), np.int64)
    return found
