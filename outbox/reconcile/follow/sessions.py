"""The two connections on which a follower reads, pass after pass, and the sides that read on them.

A pass takes its snapshots on them for as long as it reads. Many rows are read by COPY, on connections that import
these snapshots, as a run reads; what is little on the connections themselves, which costs a tenth of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from uuid import UUID

import pyarrow as pa
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from outbox.database.engines import discard
from outbox.database.execute import driver_of, execute
from outbox.reconcile import sql
from outbox.reconcile.compare import Comparison, Side
from outbox.reconcile.job import Access, Job, Outcome, Pair, Part, Range
from outbox.reconcile.pairing import rules_now
from outbox.reconcile.rows import SCHEMAS
from outbox.reconcile.source import PostgresSide, SessionSettings, Snapshot, Snapshots, engine_of, reaching, snapshot_on

#: From so many rows on, COPY by another connection is cheaper.
_WORTH_COPY = 4_000


@dataclass(frozen=True, slots=True)
class ConnectedSide:
    """One side of a pair, read on a connection that is in a transaction."""

    connection: Connection
    access: Access
    part: Part
    pair: Pair

    def read(self, ranges: Sequence[Range]) -> pa.Table:
        """Return the rows of the ranges, sorted by id (`rows.SCHEMAS`).

        Raises:
            SourceError: they can't be read.
        """
        schema = SCHEMAS[self.part]
        if not ranges:
            return schema.empty_table()
        with reaching(self.access):
            _, rows = execute(
                self.connection, sql.PLAN_FOR_ROWS, sql.rows(self.part, self.access.schema, self.pair, ranges)
            )
        if not rows:
            return schema.empty_table()
        ids, *columns = zip(*sorted(rows), strict=True)
        arrays = [pa.array([id_.bytes for id_ in ids], schema[0].type)]
        arrays += [pa.array(column, of.type) for column, of in zip(columns, list(schema)[1:], strict=True)]
        return pa.Table.from_arrays(arrays, schema=schema)


@dataclass(slots=True)
class Sessions:
    """The connections of a follower. They are opened when they are needed, and again after one was lost."""

    job: Job
    settings: SessionSettings
    _open: dict[Part, Connection] = field(default_factory=dict)

    def close(self) -> None:
        """Close the connections."""
        for connection in self._open.values():
            discard(connection)
        self._open.clear()

    @property
    def backends(self) -> list[int]:
        """The processes of the servers behind the open connections."""
        return [int(driver_of(connection).info.backend_pid) for connection in self._open.values()]

    @contextmanager
    def snapshots(self, waiting: Callable[[], None]) -> Iterator[Snapshots]:
        """Take snapshots as `source.snapshots_of` does, and give them back at the end of the block."""
        with ExitStack() as stack, self._closed_on_error():
            of_consumer, of_producer = (
                stack.enter_context(
                    snapshot_on(
                        self._connection(part),
                        self.job.databases[part],
                        [part],
                        waiting=waiting,
                        settings=self.settings,
                    )
                )
                for part in ("consumer", "producer")
            )
            yield Snapshots({"consumer": of_consumer, "producer": of_producer})

    def read_again(self, pair: Pair, ids: list[UUID]) -> tuple[pa.Table, Counter[Outcome]]:
        """Read messages as they are now (`compare.SecondRead`); nothing is in a transaction before or after."""
        with self._closed_on_error():
            try:
                rules = rules_now(self.job, pair, self._opened)
                return Comparison(self._side("producer", pair), self._side("consumer", pair), rules).again(ids)
            finally:
                for connection in self._open.values():
                    with suppress(SQLAlchemyError):  # what went wrong before is to be told
                        connection.rollback()

    @contextmanager
    def _opened(self, part: Part) -> Iterator[Connection]:
        with reaching(self.job.databases[part]):
            yield self._connection(part)

    def _side(self, part: Part, pair: Pair) -> ConnectedSide:
        return ConnectedSide(self._connection(part), self.job.databases[part], part, pair)

    def _connection(self, part: Part) -> Connection:
        if part not in self._open:
            access = self.job.databases[part]
            with reaching(access):
                # READ COMMITTED, whatever the server's default: outside of a snapshot a statement sees what is there.
                self._open[part] = engine_of(access).connect().execution_options(isolation_level="READ COMMITTED")
        return self._open[part]

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise


def readers_of(snapshots: Snapshots, pair: Pair, rows: int) -> tuple[Side, Side]:
    """Return what reads about so many rows of both sides, the producer's first, in snapshots."""

    def side(part: Part, snapshot: Snapshot) -> Side:
        if rows >= _WORTH_COPY:
            return PostgresSide(snapshot.access, part, pair, snapshot.name, snapshot.settings)
        return ConnectedSide(snapshot.connection, snapshot.access, part, pair)

    return side("producer", snapshots.producer), side("consumer", snapshots.consumer)
