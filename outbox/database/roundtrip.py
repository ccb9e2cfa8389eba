"""Several statements in one round trip, straight on libpq's pipeline mode.

psycopg has a pipeline of its own, which sends and polls for each statement and again for its end. That costs more than
the round trip it saves where the server is near (measured on loopback: an insert with its COMMIT took 336 µs so, 254 µs
as two plain statements, 230 µs this way). Here a round trip is one send and one wait, for which the driver's connection
only has to drive a generator, sync and async alike.

Statements are prepared by psycopg, which also knows when to forget them (it deallocates all after a rollback to a
savepoint); those which it hasn't prepared yet are its to run.

This needs private parts of psycopg, known for the versions in `KNOWN`. Where the version is another one, or a part is
missing or of another shape, statements go the driver's own way (`outbox.database.execute`): slower, and as right.

Sources: libpq documentation, "Pipeline Mode"; psycopg documentation, "Prepared statements" and ``Connection.wait``.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from struct import Struct
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor, errors, generators, postgres, pq
from psycopg.adapt import AdaptersMap, Dumper, PyFormat, Transformer
from psycopg.rows import tuple_row
from psycopg.types.array import ListBinaryDumper, register_all_arrays
from psycopg.types.datetime import TimestamptzBinaryLoader

from outbox.database.dialect import COMMITS, UNPREPARED, Bigints, Byteas, Uuids, numbered
from outbox.telemetry.events import AfterCommitFailed
from outbox.telemetry.hooks import emit
from outbox.text import message_of

if TYPE_CHECKING:
    from psycopg.abc import PQGen
    from psycopg.abc import Transformer as TransformerType
    from psycopg.pq.abc import PGresult

Row = tuple[Any, ...]
Values = Sequence[Any] | Mapping[str, Any]

#: The first version of psycopg whose private parts are known, and the first that isn't known yet; as in pyproject.toml.
KNOWN = ((3, 2), (3, 4))

_DONE = frozenset({pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK})


# --- how values go to the server and come back -----------------------------------------------------------------------

# An application may register dumpers and loaders of its own, for all connections or for one: a list as JSON, a time as
# a class. Our statements would go out with them. So they have adapters of their own, which no application changes; and
# lists go in binary form, since a setting of the server's (``array_nulls``) changes what their text means.

_TEXT_ARRAY = 1009

# An array in binary: dimensions, whether it has a NULL, the type of its elements; of each dimension length and first
# subscript; of each element length and bytes. (PostgreSQL, array_recv in arrayfuncs.c.)
_HEAD = Struct("!iiIii").pack
_LENGTH = Struct("!i").pack
_BIGINT = Struct("!iq").pack
_NULL = _LENGTH(-1)


class _ArrayDumper(Dumper):
    """Dumps a list of one type: psycopg's own looks into each list, and calls a dumper for each element."""

    format = pq.Format.BINARY
    element: int

    def dump(self, obj: Any) -> bytes:
        if not obj:
            return _HEAD(0, 0, self.element, 0, 0)[:12]
        elements = b"".join(self.elements(obj))
        return _HEAD(1, None in obj, self.element, len(obj), 1) + elements

    def elements(self, values: Any) -> list[bytes]:
        raise NotImplementedError


class _UuidsDumper(_ArrayDumper):
    oid, element = 2951, 2950

    def elements(self, values: Uuids) -> list[bytes]:
        length = _LENGTH(16)
        return [length + value.bytes for value in values]


class _BigintsDumper(_ArrayDumper):
    oid, element = 1016, 20

    def elements(self, values: Bigints) -> list[bytes]:
        return [_BIGINT(8, value) for value in values]


class _ByteasDumper(_ArrayDumper):
    oid, element = 1001, 17

    def elements(self, values: Byteas) -> list[bytes]:
        return [_NULL if value is None else _LENGTH(len(value)) + value for value in values]


class _ListDumper(ListBinaryDumper):
    """Dumps a list in binary form, also one that only has NULLs: its type is that of the cast in the statement."""

    def upgrade(self, obj: list[Any], format: PyFormat) -> Any:  # noqa: A002 - psycopg's name
        if not obj or any(each is not None for each in obj):
            return super().upgrade(obj, format)
        dumper = type(self)(self.cls, self._tx)
        dumper.oid = _TEXT_ARRAY
        return dumper


_DUMPERS: Mapping[type, Any] = {list: _ListDumper, Uuids: _UuidsDumper, Bigints: _BigintsDumper, Byteas: _ByteasDumper}


@cache
def own_adapters() -> AdaptersMap:
    """Return the adapters of our statements."""
    adapters = AdaptersMap(types=postgres.types)
    postgres.register_default_adapters(adapters)
    register_all_arrays(adapters)
    for kind, dumper in _DUMPERS.items():
        adapters.register_dumper(kind, dumper)
    return adapters


class _OwnCursor(Cursor[Any]):
    adapters = property(lambda _: own_adapters())


class _OwnAsyncCursor(AsyncCursor[Any]):
    adapters = property(lambda _: own_adapters())


def own_cursor(raw: Connection[Any] | AsyncConnection[Any]) -> Any:
    """Return a cursor of the driver's own kind with our adapters, not of the kind that the connection makes."""
    kind: Any = _OwnAsyncCursor if isinstance(raw, AsyncConnection) else _OwnCursor
    return kind(raw, row_factory=tuple_row)


def rows_of(cursor: Any) -> list[Row]:
    """Return the rows of what a cursor of ours has executed."""
    return loaded(cursor.pgresult, Transformer(cursor)) if cursor.description else []


# --- one round trip --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Query:
    sql: bytes
    names: tuple[str, ...]
    formats: tuple[PyFormat, ...]


@dataclass(slots=True)
class _Sending:
    """One statement with its values dumped, the name it is prepared under (None: it isn't), and its answer."""

    query: _Query
    values: Sequence[Any]
    types: Sequence[int]
    formats: Sequence[pq.Format] | None
    name: bytes | None = None
    result: PGresult | None = None

    def rows(self, transformer: TransformerType) -> list[Row]:
        if self.result is None or self.result.status != pq.ExecStatus.TUPLES_OK:
            return []
        return loaded(self.result, transformer)


class _NearTimes(TimestamptzBinaryLoader):
    """Loads a time that Python doesn't have, infinity among them, as the first or the last that it has."""

    def load(self, data: Any) -> dt.datetime:
        try:
            return super().load(data)
        except psycopg.DataError:  # it is shown as near as it can be
            ends = dt.datetime.min.replace(tzinfo=dt.UTC), dt.datetime.max.replace(tzinfo=dt.UTC)
            return ends[int.from_bytes(data, signed=True) > 0]


def loaded(result: PGresult, transformer: TransformerType) -> list[Row]:
    """Return the rows of an answer; all of them can be shown, whatever was written into a table by hand."""
    transformer.set_pgresult(result, format=pq.Format.BINARY)
    try:
        return transformer.load_rows(0, result.ntuples, tuple)
    except psycopg.DataError:  # one of them has such a time: all are loaded once more
        adapters = AdaptersMap(own_adapters())
        adapters.register_loader("timestamptz", _NearTimes)
        near = Transformer(SimpleNamespace(adapters=adapters, connection=transformer.connection))
        near.set_pgresult(result, format=pq.Format.BINARY)
        return near.load_rows(0, result.ntuples, tuple)


class RoundTrip:
    """Statements for one round trip on a driver's connection; `run` is a generator for ``connection.wait``.

    Each is ``(sql, values)`` with psycopg's placeholders. ``ready`` is False while psycopg has yet to prepare one, and
    where it doesn't say what it has prepared.
    """

    def __init__(
        self, connection: Connection[Any] | AsyncConnection[Any], statements: Sequence[tuple[str, Values]]
    ) -> None:
        self.statements = statements
        self._connection = connection
        context: Any = SimpleNamespace(adapters=own_adapters(), connection=connection)
        # One for all: it keeps the dumpers and loaders that it has found.
        self._transformer = Transformer(context)
        self._sent = [self._dump(sql, values) for sql, values in statements]
        self.ready: bool = True
        if connection.prepare_threshold is not None:
            names = _prepared(connection)
            self.ready = names is not None
            committed = False
            for (sql, _), sending in zip(statements, self._sent, strict=True):
                if sql in UNPREPARED:
                    committed = committed or sql in COMMITS
                    continue
                sending.name = names.get((sending.query.sql, tuple(sending.types))) if names else None
                # What follows the COMMIT may go unprepared: it has run before it in most cases, or is rare.
                self.ready = self.ready and (committed or sending.name is not None)

    def run(self, *, committed: bool = False) -> PQGen[list[list[Row]]]:
        """Send all, wait for all, and return the rows of each.

        What follows a COMMIT that succeeded, here or before (``committed``), may fail, also when the Sync commits it,
        or with the connection: it must not make a transaction look failed that is done.

        Raises:
            psycopg.Error: that of the first statement which failed; the server skipped what came after it.
        """
        libpq = self._connection.pgconn
        libpq.enter_pipeline_mode()
        collected, error, rows = False, None, None
        try:
            for sending in self._sent:
                self._send(sending)
            libpq.pipeline_sync()
            yield from generators.send(libpq)
            error = yield from self._fetch()
            collected = True
        except psycopg.Error as lost:
            if not (committed or self._has_committed()):
                raise
            error = lost
            rows = self._rows()  # before it is closed, which crashes libpq's wrapper in psycopg 3.2.0
            _take_for_committed(self._connection)
        finally:
            if collected:
                libpq.exit_pipeline_mode()
            else:
                # Answers are under way that no caller will collect: nothing can be done on this connection any more.
                libpq.finish()
        if error is not None:
            if not (committed or self._has_committed()):
                raise error
            emit(AfterCommitFailed(reason=message_of(error), error=error))
        return self._rows() if rows is None else rows

    def _rows(self) -> list[list[Row]]:
        return [sending.rows(self._transformer) for sending in self._sent]

    def _has_committed(self) -> bool:
        """Has the server said so?"""
        return any(each.result is not None and each.result.command_status == b"COMMIT" for each in self._sent)

    def _dump(self, sql: str, values: Values) -> _Sending:
        query, transformer = _parse(sql), self._transformer
        ordered = [values[name] for name in query.names] if isinstance(values, Mapping) else values
        dumped = transformer.dump_sequence(ordered, query.formats) if query.names else []
        # It has those of the statement that it has dumped last.
        return _Sending(
            query, dumped, transformer.types or () if dumped else (), transformer.formats if dumped else None
        )

    def _send(self, sending: _Sending) -> None:
        libpq, values, formats = self._connection.pgconn, sending.values, sending.formats
        if sending.name is not None:
            libpq.send_query_prepared(sending.name, values, formats, pq.Format.BINARY)
        else:
            libpq.send_query_params(sending.query.sql, values, sending.types, formats, pq.Format.BINARY)

    def _fetch(self) -> PQGen[errors.Error | None]:
        libpq = self._connection.pgconn
        error: errors.Error | None = None
        try:
            for sending in self._sent:
                result = (yield from generators.fetch_many(libpq))[-1]
                if result.status in _DONE:
                    sending.result = result
                elif result.status != pq.ExecStatus.PIPELINE_ABORTED:
                    error = error or errors.error_from_result(result, self._connection.info.encoding)
            # The Sync commits what no COMMIT does. If that fails (a deferred constraint, a full queue of
            # notifications), the error comes before its own answer.
            while (result := (yield from generators.fetch_many(libpq))[-1]).status != pq.ExecStatus.PIPELINE_SYNC:
                error = error or errors.error_from_result(result, self._connection.info.encoding)
        except psycopg.Error as lost:
            if error is None:
                raise
            raise error from lost  # why the server has ended the connection
        return error


def _take_for_committed(connection: Connection[Any] | AsyncConnection[Any]) -> None:
    """Have a lost connection commit nothing more without an error: its last transaction is committed."""

    async def nothing() -> None:
        pass

    is_async = isinstance(connection, psycopg.AsyncConnection)
    connection.commit = nothing if is_async else lambda: None  # type: ignore[method-assign]


def is_known() -> bool:
    """Tell whether the private parts of this psycopg are known."""
    version = tuple(int(number) for number in re.findall(r"\d+", psycopg.__version__)[:2])
    return KNOWN[0] <= version < KNOWN[1] and hasattr(generators, "send") and hasattr(generators, "fetch_many")


def _prepared(connection: Connection[Any] | AsyncConnection[Any]) -> Mapping[Any, bytes] | None:
    """Return the names of the statements that psycopg has prepared on a connection; None if it doesn't tell."""
    names = getattr(getattr(connection, "_prepared", None), "_names", None)
    if not isinstance(names, Mapping) or not isinstance(next(iter(names.values()), b""), bytes):
        return None
    return names


@lru_cache(maxsize=1000)
def _parse(sql: str) -> _Query:
    """Turn psycopg's placeholders into PostgreSQL's; ``%b`` asks for binary values."""
    text, names, binary = numbered(sql)
    return _Query(text.encode(), names, tuple(PyFormat.BINARY if is_binary else PyFormat.AUTO for is_binary in binary))
