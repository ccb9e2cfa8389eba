"""Send statements to the server: several in one round trip, sync and async alike; and what its errors mean."""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast
from weakref import WeakKeyDictionary

from sqlalchemy import Connection
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.util import await_only

from outbox.database.dialect import (
    BEGIN,
    COMMIT,
    COMMIT_AND_CHAIN,
    PSYCOPG,
    UNPREPARED,
    check_driver,
    tables_missing,
    translated,
)
from outbox.errors import ErrorKind, OutboxError, SchemaError
from outbox.message.model import Counts
from outbox.telemetry.events import BatchTooLarge
from outbox.telemetry.hooks import emit
from outbox.text import message_of

if TYPE_CHECKING:
    from sqlalchemy import URL, Engine

    from outbox.database.roundtrip import RoundTrip

Row = tuple[Any, ...]
T = TypeVar("T")
B = TypeVar("B", bound="Counts | tuple[int, *tuple[Any, ...]] | None")

_PQTRANS_INTRANS = 2


@dataclass(frozen=True, slots=True)
class Statement:
    """One SQL statement with its bound values.

    ``lossy`` names values that are texts about a failure: what the database or its client can't hold of them is written
    out, since recording a failure must never fail. ``answered`` is called with its rows.
    """

    sql: str
    values: Sequence[Any] | Mapping[str, Any] = ()
    lossy: tuple[str, ...] = ()
    answered: Callable[[list[Row]], None] | None = None


@cache
def in_schema(template: str, schema: str) -> str:
    """Return the SQL with ``{s}`` replaced by the (checked) name of the schema."""
    return template.replace("{s}", f'"{schema}"')


def statement(schema: str, template: str, values: Mapping[str, Any], **parts: str) -> Statement:
    """Return a statement of a template: each ``{name}`` of ``parts`` is replaced, in their order, and then ``{s}``."""
    for name, text in parts.items():
        template = template.replace(f"{{{name}}}", text)
    return Statement(in_schema(template, schema), values)


class Template:
    """SQL of one form, with ``{s}`` for the schema: called with that and the values that it binds, a `Statement`."""

    def __init__(self, sql: str, *, lossy: tuple[str, ...] = ()) -> None:
        self.sql = sql
        self.lossy = lossy

    def __call__(self, schema: str, /, *values: Any, **named: Any) -> Statement:
        """Return the statement; its values are by name where the SQL names them."""
        return Statement(in_schema(self.sql, schema), named or values, self.lossy)


def lock_key(*parts: object) -> int:
    """Return the 64-bit key of an advisory lock; the parts begin with its purpose and the schema.

    Advisory locks share one namespace per database, hence a hash and not a small number.
    """
    text = "\0".join(str(part) for part in ("outbox", *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def driver_of(connection: Connection) -> Any:
    """Return the driver's own connection, also where it is detached from its pool."""
    return connection.dialect.get_driver_connection(cast("Any", connection.connection.dbapi_connection))


def in_transaction(driver: Any) -> bool:
    """Tell, without I/O, whether a driver's own connection is in a transaction on the server."""
    if hasattr(driver, "is_in_transaction"):  # asyncpg's
        return bool(driver.is_in_transaction())
    return bool(driver.info.transaction_status)  # 0 is PQTRANS_IDLE


def is_closed(driver: Any) -> bool:
    """Tell whether a driver's own connection has ended."""
    if hasattr(driver, "is_closed"):  # asyncpg's
        return bool(driver.is_closed())
    return bool(getattr(driver, "closed", False))


def encodings_of(driver: Any) -> set[str]:
    """Return the encodings other than UTF-8 that texts pass on their way into a table: the client's, the server's."""
    libpq = getattr(driver, "pgconn", None)
    names = b"client_encoding", b"server_encoding"
    if libpq is not None and all(libpq.parameter_status(name) == b"UTF8" for name in names):  # asked for each send
        return set()
    return {_parameter(driver, name) for name in ("client_encoding", "server_encoding")} - {"UTF8", ""}


def _parameter(driver: Any, name: str) -> str:
    """Return a parameter of the server's as it was reported to the driver; "" if it wasn't."""
    if (libpq := getattr(driver, "pgconn", None)) is not None:
        return (libpq.parameter_status(name.encode()) or b"").decode()
    if hasattr(driver, "get_settings"):  # asyncpg's
        return getattr(driver.get_settings(), name, "")
    return driver.info.parameter_status(name) or ""


def is_autocommit(connection: Connection) -> bool:
    """Tell whether the driver would commit the next statement by itself."""
    # Of asyncpg it is SQLAlchemy's adapter that knows.
    adapted: Any = connection.connection.dbapi_connection
    return bool(getattr(adapted, "autocommit", False)) and not in_transaction(driver_of(connection))


def is_lost(connection: Connection) -> bool:
    """Tell whether the server has gone away under this connection."""
    return connection.closed or connection.invalidated or is_closed(driver_of(connection))


def encodings(connection: Connection) -> set[str]:
    """Return the encodings other than UTF-8 that texts pass on their way into a table: the client's, the server's."""
    return encodings_of(driver_of(connection))


def _written_out(statement: Statement) -> Statement:
    """Return the statement with its lossy texts in ASCII: all encodings have that, and each lacks other characters."""
    values = dict(cast("Mapping[str, Any]", statement.values))
    for name in statement.lossy:
        match values[name]:
            case str(text):
                values[name] = _ascii(text)
            case [*texts]:
                values[name] = [_ascii(text) for text in texts]
    return replace(statement, values=values)


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()


def execute(
    connection: Connection,
    *statements: Statement,
    then_commit: bool = False,
    prepare_before: bool = False,
    afterwards: Sequence[Statement] = (),
    following: Sequence[Statement] = (),
) -> list[list[Row]]:
    """Run statements on the caller's connection, in order, in one round trip; return the rows of each.

    ``then_commit`` adds COMMIT to the round trip and is for the moment in which the caller commits anyway.
    In the pipeline an error skips all that follows, COMMIT included (PostgreSQL, "Pipeline Mode"). Rows come
    in binary format. ``prepare_before`` is for a transaction that must be one round trip also where the driver has yet
    to prepare a statement: each is run before, in a transaction of its own, in which it must do nothing. ``afterwards``
    follow the COMMIT in a transaction of their own; they may fail or be left out, and nothing must depend on them.
    ``following`` are the first statements of the next transaction, which the COMMIT begins then, and which stays open;
    their rows come last. They may fail too: the next transaction is in an error then (`goes_on`), or there is none.

    Where the caller has begun a transaction on a connection in AUTOCOMMIT mode (as the worker's are), BEGIN joins the
    first round trip; the driver would take one of its own for it.

    All this is psycopg 3's. Through another driver, each statement is a round trip, the caller's COMMIT one more, and
    ``afterwards`` are left out.

    Raises:
        sqlalchemy.exc.DBAPIError: as SQLAlchemy would have raised it.
        InvalidSettings: a driver that messages can't be sent through.
        SchemaMissing: a table of ours isn't there.
    """
    if connection.dialect.driver != PSYCOPG:
        return _answered(statements, _execute_by_dbapi(connection, statements))
    import psycopg  # noqa: PLC0415 - importing outbox must not pay for the driver

    driver = driver_of(connection)
    if any(statement.lossy for statement in statements) and encodings(connection):
        statements = tuple(_written_out(each) if each.lossy else each for each in statements)
    pairs = [(statement.sql, statement.values) for statement in statements]
    idle = not in_transaction(driver)
    begins = idle and driver.autocommit and connection.in_transaction()
    if begins:
        pairs.insert(0, (BEGIN, ()))
    if then_commit:
        pairs.append((COMMIT_AND_CHAIN if following else COMMIT, ()))
    last = [(each.sql, each.values) for each in (*afterwards, *following)]
    try:
        trip = _round_trip(driver, pairs + last)
        if prepare_before and begins and trip is not None and not trip.ready:
            _send(connection, driver, [(each.sql, each.values) for each in statements], None)
            trip = _round_trip(driver, pairs + last)
        # Once on each connection the driver takes its own way: to begin as told, or to prepare statements new to it.
        # With a driver whose private parts are unknown it always does.
        by_driver = trip is None or not trip.ready or (idle and not driver.autocommit)
        if by_driver and trip is not None:
            trip = _round_trip(driver, last)
        rows = _send(connection, driver, pairs if by_driver else [], trip)
    except psycopg.Error as error:
        _raise_as_sqlalchemy(connection, error, statements)
    first, done = rows[int(begins) : int(begins) + len(statements)], len(rows) - len(following)
    return _answered(statements, first) + (rows[done:] if following else [])


def _answered(statements: Sequence[Statement], rows: list[list[Row]]) -> list[list[Row]]:
    for each, found in zip(statements, rows, strict=True):
        if each.answered is not None:
            each.answered(found)
    return rows


def goes_on(connection: Connection) -> bool:
    """Tell, without I/O, whether a transaction is open on psycopg's connection in which nothing has failed."""
    return bool(driver_of(connection).pgconn.transaction_status == _PQTRANS_INTRANS)


def can_chain(connection: Connection) -> bool:
    """Tell whether `execute` can send ``following`` behind the COMMIT of a connection."""
    return connection.dialect.driver == PSYCOPG and round_trip_kind() is not None


def _execute_by_dbapi(connection: Connection, statements: Sequence[Statement]) -> list[list[Row]]:
    """Run statements one by one, past SQLAlchemy's own cursor events and logs: the values are the caller's payload."""
    dialect = connection.dialect
    check_driver(dialect)
    rows: list[list[Row]] = []
    try:
        cursor = connection.connection.cursor()
        try:
            for statement in statements:
                cursor.execute(*translated(statement.sql, statement.values, dialect.driver))
                rows.append([tuple(row) for row in cursor.fetchall()] if cursor.description else [])
        finally:
            cursor.close()
    except dialect.loaded_dbapi.Error as error:
        _raise_as_sqlalchemy(connection, error, statements)
    return rows


def commit_now(connection: Connection) -> None:
    """Commit, at the moment in which SQLAlchemy is about to, so that functions that wait for the COMMIT learn of it.

    After an `execute` with ``then_commit`` through psycopg 3, it has been committed already.

    Raises:
        sqlalchemy.exc.DBAPIError: as SQLAlchemy would have raised it.
    """
    dialect = connection.dialect
    if dialect.driver == PSYCOPG:
        return
    try:
        dialect.do_commit(connection.connection)
    except dialect.loaded_dbapi.Error as error:
        _raise_as_sqlalchemy(connection, error, ())


def query(connection: Connection, schema: str, template: str, **values: Any) -> list[Row]:
    """Run the statement of a template, alone; return its rows."""
    return execute(connection, Statement(in_schema(template, schema), values))[0]


def read_source(source: Connection, *statements: Statement) -> list[list[Row]]:
    """Read from the producer's database: in the running transaction if there is one on it, else in none or its own."""
    if not statements:
        return []
    if source.in_transaction() or is_autocommit(source):
        return execute(source, *statements)
    with source.begin():
        return execute(source, *statements)


#: The SQL of the value of `synchronous_commit` that waits for disk and standbys, where the setting waits for less.
SYNCHRONOUSLY = "coalesce(nullif(nullif(current_setting('synchronous_commit'), 'off'), 'local'), 'on')"

# A message in the log is all that a role which only reads may write. What statements before it have seen was committed
# before the log's end of now. That standbys have it, where they must, is only known of a commit of one's own.
#: At the end of a transaction: commit once all that it has read is on disk, and on synchronous standbys. A
#: standby only has what is.
_WAIT_FOR_DISK = Statement(f"""
SELECT pg_logical_emit_message(true, 'outbox', ''), set_config('synchronous_commit', {SYNCHRONOUSLY}, true)
 WHERE CASE WHEN pg_is_in_recovery() THEN false
            ELSE current_setting('synchronous_standby_names') <> ''
                 OR pg_current_wal_flush_lsn() < pg_current_wal_insert_lsn() END
""")


def read_log(connection: Connection | None, source: Connection, *statements: Statement) -> list[list[Row]]:
    """Read what a consumer builds on from the producer's database, which the second connection is on.

    Where that is another one than the consumer's, this waits until it can't forget what was read: dispatch needn't have
    (`outbox.dispatch.dispatch_pass`). In a transaction that the caller has begun on it, its COMMIT waits. None: what is
    read is kept elsewhere.
    """
    if source is connection:
        return read_source(source, *statements)
    return read_source(source, *statements, _WAIT_FOR_DISK)[:-1]


def _round_trip(driver: Any, pairs: Sequence[tuple[str, Any]]) -> RoundTrip | None:
    kind = round_trip_kind()
    return None if kind is None else kind(driver, pairs)


@cache
def round_trip_kind() -> type[RoundTrip] | None:
    """Return the class of round trips; None where the driver is one that can't be driven so."""
    from outbox.database.roundtrip import RoundTrip, is_known  # noqa: PLC0415 - imports the driver

    return RoundTrip if is_known() else None


def _send(
    connection: Connection, driver: Any, before: Sequence[tuple[str, Any]], trip: RoundTrip | None
) -> list[list[Row]]:
    """Run statements one by one as the driver does, then others in one round trip; return the rows of each."""
    import psycopg  # noqa: PLC0415 - importing outbox must not pay for the driver

    from outbox.database.roundtrip import own_cursor  # noqa: PLC0415 - the same

    work = [(own_cursor(driver), *each) for each in before]
    if not isinstance(driver, psycopg.AsyncConnection):
        return _run(driver, work, trip)
    adapted = cast("Any", connection.connection.dbapi_connection)
    return cast("list[list[Row]]", adapted.run_async(lambda raw: _run_async(raw, work, trip)))


def _run(raw: Any, before: Sequence[tuple[Any, str, Any]], trip: RoundTrip | None) -> list[list[Row]]:
    from outbox.database.roundtrip import rows_of  # noqa: PLC0415 - as `_send`

    rows: list[list[Row]] = []
    for cursor, sql, values in before:
        cursor.execute(sql, values, prepare=sql not in UNPREPARED, binary=True)
        rows.append(rows_of(cursor))
    if trip is not None and trip.statements:
        with raw.lock:
            rows += raw.wait(trip.run(committed=bool(before)))
    return rows


async def _run_async(raw: Any, before: Sequence[tuple[Any, str, Any]], trip: RoundTrip | None) -> list[list[Row]]:
    from outbox.database.roundtrip import rows_of  # noqa: PLC0415 - as `_send`

    rows: list[list[Row]] = []
    for cursor, sql, values in before:
        await cursor.execute(sql, values, prepare=sql not in UNPREPARED, binary=True)
        rows.append(rows_of(cursor))
    if trip is not None and trip.statements:
        async with raw.lock:
            rows += await raw.wait(trip.run(committed=bool(before)))
    return rows


def _raise_as_sqlalchemy(connection: Connection, error: Any, statements: Sequence[Statement]) -> NoReturn:
    """Raise the driver's error as SQLAlchemy does, with the values hidden: they are the caller's payload."""
    raise_if_missing(connection.engine.url, error, statements)
    dialect = connection.dialect
    disconnected = dialect.is_disconnect(error, connection.connection.dbapi_connection, None)
    if disconnected:
        connection.invalidate(error)
    raise DBAPIError.instance(
        None,
        None,
        error,
        dialect.loaded_dbapi.Error,
        hide_parameters=True,
        connection_invalidated=disconnected,
        dialect=dialect,
    ) from error


def raise_if_missing(url: URL, error: BaseException, statements: Sequence[Statement]) -> None:
    """Raise SchemaMissing if an error of a driver's means that tables of ours aren't in the database of ``url``."""
    what = _primary_message(error)
    if sqlstate(error) in _MISSING and (schema := _schema_in(what, statements)):
        raise tables_missing(url, what, _parts_in(what), schema) from error


def _primary_message(error: BaseException) -> str:
    """Return what the server said, without the details."""
    if (diagnostics := getattr(error, "diag", None)) is not None:
        return diagnostics.message_primary or ""
    # asyncpg's, as SQLAlchemy's adapter raises it.
    return str(getattr(error.__cause__, "message", error))


def _parts_in(message: str) -> tuple[str, ...]:
    """Return the part with the table which a message names; an upgrade that doesn't name it adds no part."""
    from outbox.database.tables import consumer_tables, producer_tables  # noqa: PLC0415 - only where it has failed

    parts = {"producer": producer_tables(), "consumer": consumer_tables()}
    tables = {table.name: part for part, metadata in parts.items() for table in metadata.tables.values()}
    return tuple(part for table, part in tables.items() if re.search(rf"\b{table}\b", message))[:1]


def _schema_in(message: str, statements: Sequence[Statement]) -> str | None:
    """Return the schema of ours that a message names; the user's deferred triggers, run by COMMIT, miss others."""
    schemas = {schema for statement in statements for schema in re.findall(r'"(\w+)"\.', statement.sql)}
    return next((schema for schema in schemas if re.search(rf"\b{schema}\b", message)), None)


# --- errors: one classification for every way in ---------------------------------------------------------

# No such table, schema, or object of another kind.
_MISSING = frozenset({"42P01", "3F000", "42704"})

LOCK_NOT_AVAILABLE = "55P03"

STATEMENT_CANCELLED = "57014"

INSUFFICIENT_PRIVILEGE = "42501"
#: On a standby too, where the replay of the primary's log needs what a statement reads to be gone.
SERIALIZATION_FAILURE = "40001"
#: Another transaction was in the way; the same statement may succeed later: lock, deadlock, serialization failure.
CONTENDED = frozenset({LOCK_NOT_AVAILABLE, "40P01", SERIALIZATION_FAILURE})

_STATES = {
    **dict.fromkeys(CONTENDED, ErrorKind.CONFLICT),
    STATEMENT_CANCELLED: ErrorKind.TIMEOUT,
    "25006": ErrorKind.READ_ONLY,
}
#: Classes of SQLSTATE of what can't be reached, or is lost: connection exception, invalid authorization, invalid
#: catalog name, insufficient resources, operator intervention (57P; 57014 is a cancelled statement).
UNAVAILABLE = re.compile(r"08|28|3D|53|57P")
_DATA = "22"
# The driver's classes for a connection that can't be made or is lost; such an error has no SQLSTATE. What the driver
# refuses to send has none either.
_LOST = frozenset({"OperationalError", "ConnectionTimeout", "InterfaceError"})


def sqlstate(error: BaseException | None) -> str:
    """Return the SQLSTATE of an error of SQLAlchemy or of the driver; "" where there is none."""
    with suppress(Exception):  # the attributes may be code of an application's exception
        original = getattr(error, "orig", error)
        return str(getattr(original, "sqlstate", None) or getattr(original, "pgcode", None) or "")
    return ""


def kind_of(error: BaseException) -> ErrorKind | None:
    """Return what an error means; None for one that is neither the outbox's nor the database's."""
    if not issubclass(type(error), (OutboxError, PoolTimeout, DBAPIError, ArgumentError, NoSuchModuleError)):
        return None  # an application's exception may lie about its class, or fail where it is asked
    match error:
        case OutboxError():
            return error.kind
        case PoolTimeout():
            return ErrorKind.UNAVAILABLE
        case DBAPIError():
            state = sqlstate(error)
            lost = error.connection_invalidated or (not state and type(error.orig).__name__ in _LOST)
            if lost or UNAVAILABLE.match(state):
                usual = ErrorKind.UNAVAILABLE
            else:
                usual = ErrorKind.USAGE if state.startswith(_DATA) else ErrorKind.INTERNAL
            return _STATES.get(state, usual)
        case ArgumentError() | NoSuchModuleError():
            return ErrorKind.SETTINGS
    return None


# --- what asks for statements one by one, on whatever connection -----------------------------------------------------

#: A statement for the connection; or what gets its rows elsewhere, and may block.
Work = Statement | Callable[[], list[Row]]
#: Yields the work to do, gets the rows of each, and returns what comes of them: for sync and async connections.
Steps = Generator[Work, list[Row], T]


def run_steps(steps: Steps[T], do: Callable[[Work], list[Row]]) -> T:
    """Do what ``steps`` ask for, one by one."""
    try:
        work = next(steps)
        while True:
            work = steps.send(do(work))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # what the generator returns


def run_on(connection: Connection, steps: Steps[T]) -> T:
    """Do what ``steps`` ask for on a connection of SQLAlchemy's."""

    def do(work: Work) -> list[Row]:
        if isinstance(work, Statement):
            return execute(connection, work)[0]
        return await_only(asyncio.to_thread(work)) if connection.dialect.is_async else work()

    return run_steps(steps, do)


# --- batches ---------------------------------------------------------------------------------------------------------
#
# A batch that a limit of the server cuts off (``statement_timeout``, ``transaction_timeout``, ``lock_timeout``), or
# that fails by its size (memory) or by one of its rows, would fail so for ever. So it is tried with half of the rows,
# down to one. The next one begins with what went well, and takes an eighth more after each that was full.

# What fails with any number of rows: no connection or no server (08, 28, 3D, 57P), a statement that can't be run (0A,
# 3F, 42), a database that takes no writes; and tables that dispatch isn't to work on (SchemaError).
_WHATEVER_THE_SIZE = re.compile(r"08|0A|25006|28|3D|3F|42|57P")
#: The server's own limits of time: a statement that was cancelled, a transaction that was idle, or open, for too long,
#: and a lock that was waited for.
CUT_OFF = frozenset({"57014", "25P03", "25P04", "55P03"})

_sizes: WeakKeyDictionary[Engine, dict[tuple[str, ...], int]] = WeakKeyDictionary()


def batch_sizes(engine: Engine) -> dict[tuple[str, ...], int]:
    """Return how many rows a batch of each name takes at most on a database, of those that have failed.

    It outlives the connections: what a batch fails by may cost it its own.
    """
    return _sizes.setdefault(engine, {})


def by_size(bind: Connection | Engine, name: tuple[str, ...], most: int, attempt: Callable[[int], B]) -> B:
    """Have a batch done with so many rows at most, and with half of them while it fails, down to one.

    ``attempt`` gets the number of rows. It returns counts, or first how many it took. It works in transactions of its
    own on ``bind``, and may be called again after any that it has committed. ``name`` begins with what events call it.

    Raises:
        Exception: what one row alone raised, or any number of them would; or the connection was lost: the next batch is
            smaller then, if that may help.
    """
    sizes = batch_sizes(bind.engine)
    while True:
        size = min(sizes.get(name, most), most)
        try:
            result = attempt(size)
        except Exception as error:
            lost = isinstance(bind, Connection) and is_lost(bind)
            if not _fails_by_size(error, lost=lost):
                raise
            sizes[name] = max(size // 2, 1)
            if size == 1:
                raise
            emit(BatchTooLarge(batch=name[0], size=size, reason=message_of(error).partition("\n")[0], error=error))
            if lost:
                raise
        else:
            taken = result.taken if isinstance(result, Counts) else cast("Any", result or (0,))[0]
            if name in sizes and taken >= size:
                sizes[name] = size + max(size // 8, 1)
            return result


def _fails_by_size(error: Exception, *, lost: bool) -> bool:
    """Tell whether fewer rows may help; a lost connection may be the batch's doing, though the server said nothing."""
    state = sqlstate(error) or sqlstate(error.__cause__)
    late = isinstance(error.__cause__, TimeoutError)
    return not isinstance(error, SchemaError) and not _WHATEVER_THE_SIZE.match(state) and bool(state or late or lost)


class Backoff:
    """Waits in seconds that double from ``first`` to ``cap``, each shortened by up to half at random.

    The randomness keeps all that wait for the same database from coming back in the same moment. Not thread-safe.
    """

    def __init__(self, first: float, cap: float) -> None:
        self._first = min(first, cap)
        self._cap = cap
        self._next = self._first

    def next(self) -> float:
        """Return the next wait."""
        wait, self._next = self._next, min(self._next * 2, self._cap)
        return wait * random.uniform(0.5, 1)  # noqa: S311 - jitter, no secret

    def reset(self) -> None:
        """Begin with the first wait again."""
        self._next = self._first
