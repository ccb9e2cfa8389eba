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

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import errors, pq
from psycopg.adapt import PyFormat, Transformer
from psycopg.generators import fetch_many, send

from outbox.database.execute import COMMIT, UNPREPARED, Row, in_order, numbered
from outbox.telemetry.events import AfterCommitFailed
from outbox.telemetry.hooks import emit

if TYPE_CHECKING:
    from psycopg import AsyncConnection, Connection
    from psycopg.abc import PQGen
    from psycopg.abc import Transformer as TransformerType
    from psycopg.pq.abc import PGresult

Values = Sequence[Any] | Mapping[str, Any]

#: The first version of psycopg whose private parts are known, and the first that isn't known yet; as in pyproject.toml.
KNOWN = ((3, 2), (3, 4))

_DONE = frozenset({pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK})


@dataclass(frozen=True, slots=True)
class _Query:
    sql: bytes
    names: tuple[str, ...]
    formats: tuple[PyFormat, ...]


@dataclass(slots=True)
class _Sending:
    """One statement with its values dumped, the name it is prepared under (None: it isn't), and its answer."""

    query: _Query
    transformer: TransformerType | None = None
    values: Sequence[Any] = ()
    name: bytes | None = None
    result: PGresult | None = None

    def key(self) -> tuple[bytes, tuple[int, ...]]:
        """What psycopg knows a prepared statement by."""
        return self.query.sql, () if self.transformer is None else tuple(self.transformer.types or ())

    def rows(self, connection: Connection[Any] | AsyncConnection[Any]) -> list[Row]:
        if self.result is None or self.result.status != pq.ExecStatus.TUPLES_OK:
            return []
        if self.transformer is None:
            self.transformer = Transformer(connection)
        self.transformer.set_pgresult(self.result, format=pq.Format.BINARY)
        return self.transformer.load_rows(0, self.result.ntuples, tuple)


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
        self._sent = [self._dump(sql, values) for sql, values in statements]
        self.ready: bool = True
        if connection.prepare_threshold is not None:
            names = _prepared(connection)
            self.ready = names is not None
            committed = False
            for (sql, _), sending in zip(statements, self._sent, strict=True):
                if sql in UNPREPARED:
                    committed = committed or sql == COMMIT
                    continue
                sending.name = names.get(sending.key()) if names else None
                # What follows the COMMIT is rare and goes unprepared.
                self.ready = self.ready and (committed or sending.name is not None)

    def run(self, *, committed: bool = False) -> PQGen[list[list[Row]]]:
        """Send all, wait for all, and return the rows of each.

        What follows a COMMIT that succeeded, here or before (``committed``), may fail: it must not make a transaction
        look failed that is done.

        Raises:
            psycopg.Error: that of the first statement which failed; the server skipped what came after it.
        """
        libpq = self._connection.pgconn
        libpq.enter_pipeline_mode()
        collected = False
        try:
            for sending in self._sent:
                self._send(sending)
            libpq.pipeline_sync()
            yield from send(libpq)
            error = yield from self._fetch()
            collected = True
        finally:
            if collected:
                libpq.exit_pipeline_mode()
            else:
                # Answers are under way that nobody will collect: nothing can be done on this connection any more.
                libpq.finish()
        if error is not None:
            done = [sending.result.command_status for sending in self._sent if sending.result is not None]
            if not committed and b"COMMIT" not in done:
                raise error
            emit(AfterCommitFailed(reason=str(error), error=error))
        return [sending.rows(self._connection) for sending in self._sent]

    def _dump(self, sql: str, values: Values) -> _Sending:
        query = _parse(sql)
        if not query.names:
            return _Sending(query)
        transformer = Transformer(self._connection)
        return _Sending(query, transformer, transformer.dump_sequence(in_order(query.names, values), query.formats))

    def _send(self, sending: _Sending) -> None:
        libpq, transformer = self._connection.pgconn, sending.transformer
        types, formats = ((), ()) if transformer is None else (transformer.types, transformer.formats)
        if sending.name is not None:
            libpq.send_query_prepared(sending.name, sending.values, formats, pq.Format.BINARY)
        else:
            libpq.send_query_params(sending.query.sql, sending.values, types, formats, pq.Format.BINARY)

    def _fetch(self) -> PQGen[errors.Error | None]:
        libpq = self._connection.pgconn
        error: errors.Error | None = None
        for sending in self._sent:
            result = (yield from fetch_many(libpq))[-1]
            if result.status in _DONE:
                sending.result = result
            elif result.status != pq.ExecStatus.PIPELINE_ABORTED:
                error = error or errors.error_from_result(result, self._connection.info.encoding)
        yield from fetch_many(libpq)  # the sync
        return error


def is_known() -> bool:
    """Tell whether the private parts of this psycopg are known."""
    version = tuple(int(number) for number in re.findall(r"\d+", psycopg.__version__)[:2])
    return KNOWN[0] <= version < KNOWN[1]


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
