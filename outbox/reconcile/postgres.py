"""PostgreSQL as a source: Arrow over COPY (ADBC), no driver jar, all readers on one snapshot of their database.

Statements beside the caller's: with settings of their own, and failing alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
from psycopg import sql

from outbox.consumer.queue import like
from outbox.database.execute import Statement, execute
from outbox.dispatch.sql import plan_by_index
from outbox.errors import SourceError
from outbox.reconcile import sql as store
from outbox.reconcile.measure import sql as measure_sql
from outbox.reconcile.model import CONSUMER, PRODUCER, Access, Pair, Range, fixed_ids
from outbox.reconcile.source import cancellable, conninfo, hidden, place, tell
from outbox.text import summary_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

_PLACEHOLDER = re.compile(r"%\((\w+)\)s|%%")


def between(pair: Pair) -> store.Between:
    """Return a pair as the statements want it."""
    return store.Between(
        pair.topic,
        pair.group,
        None if pair.tags is None else sorted(pair.tags),
        None if pair.keys is None else [like(pattern) for pattern in sorted(pair.keys)],
        None if pair.effect is None else pair.effect.quoted,
    )


@dataclass(frozen=True, slots=True)
class PostgresSide:
    """One side of a pair in PostgreSQL; a value that can be sent to another process.

    ``snapshot`` is the name under which a transaction that is still open has exported what it sees; None reads what
    is there at the time.
    """

    access: Access
    part: Literal["producer", "consumer"]
    pair: Pair
    snapshot: str | None = None

    def statement(self, ranges: Sequence[Range]) -> Statement:
        """Return the statement that reads ranges."""
        rows = store.producer_rows if self.part == "producer" else store.consumer_rows
        return rows(self.access.schema, between(self.pair), ranges)

    def read(self, ranges: Sequence[Range]) -> pa.Table:
        """Return the rows of the ranges, sorted by id (`rows.PRODUCER` or `rows.CONSUMER`).

        Raises:
            SourceError: the database can't be read.
        """
        schema = PRODUCER if self.part == "producer" else CONSUMER
        if not ranges:
            return schema.empty_table()
        try:
            return shaped(self._fetch(rendered(self.statement(ranges))), schema)
        except Exception as error:
            # Whatever the driver says may quote the URL.
            text = hidden(summary_of(error), self.access.url)
            tell(SourceError(f"{place(self.access.url)} can't be read: {text}"))

    def _fetch(self, query: str) -> pa.Table:
        from adbc_driver_postgresql import dbapi  # noqa: PLC0415 - loads a library that not every process needs

        # ADBC begins a transaction by itself; what is set for it must come before the first query.
        with (
            dbapi.connect(conninfo(self.access.url)) as connection,
            connection.cursor() as cursor,
            cancellable(cursor),
        ):
            cursor.execute(rendered(store.read_in_one_snapshot()))
            if self.snapshot is not None:
                cursor.execute(rendered(store.import_snapshot(self.snapshot)))
            cursor.execute(rendered(store.plan_for_scans()))
            cursor.execute(rendered(store.plan_for_rows()))
            cursor.execute(query)
            return cursor.fetch_arrow_table()


def rendered(statement: Statement) -> str:
    """Return a statement with its values in it, quoted by psycopg: ADBC copies only what has no parameters."""
    values = statement.values
    if not isinstance(values, Mapping):
        return statement.sql

    def literal(match: re.Match[str]) -> str:
        return sql.Literal(values[match[1]]).as_string(None) if match[1] else "%"

    return _PLACEHOLDER.sub(literal, statement.sql)


def shaped(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return a table with the columns and types of a schema, sorted by id."""
    columns: list[Any] = []
    for field in schema:
        column = table[field.name]
        if isinstance(column.type, pa.BaseExtensionType):
            column = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
        columns.append(column.cast(field.type))
    result = pa.Table.from_arrays(columns, schema=schema)
    return result if _is_sorted(result) else result.sort_by("id")


def _is_sorted(table: pa.Table) -> bool:
    ids = fixed_ids(table)
    return bool((ids[:-1] <= ids[1:]).all())


@contextmanager
def aside(connection: Connection, seconds: float, *, by_index: bool = False) -> Iterator[None]:
    """Read within the caller's transaction, in a savepoint that is undone at the end.

    So that no setting is left behind, and a statement which fails doesn't end the transaction. ``seconds`` is how long
    each statement may take; 0 is as long as it wants.
    """
    savepoint = connection.begin_nested()
    try:
        execute(connection, measure_sql.limits(seconds), *([plan_by_index()] if by_index else []))
        yield
    finally:
        if not connection.invalidated:
            savepoint.rollback()
