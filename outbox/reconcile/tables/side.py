"""A foreign table of PostgreSQL's as a side of a comparison: its columns are looked up, and its rows checked, first.

Both sides are digested by what reads their rows, whatever they are, in the same buckets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

import pyarrow as pa
from sqlalchemy import Connection

from outbox.database.execute import UNAVAILABLE, Row, Statement, driver_of, execute, sqlstate
from outbox.errors import InvalidSettings, OutboxError, SourceError, SourceLost
from outbox.reconcile.digest import Digested
from outbox.reconcile.job import Access, Outcome, Pair, Part, Range, described, hidden
from outbox.reconcile.source import PostgresSide, Snapshot, Snapshots, connected, raise_bare, reaching
from outbox.reconcile.sql import READ_IN_ONE_SNAPSHOT, Mixing
from outbox.reconcile.tables import sql
from outbox.reconcile.tables.columns import FOREIGN, ordered, unknown_state, words_of
from outbox.reconcile.tables.declare import COLUMNS, ForeignTable
from outbox.reconcile.tables.sql import KnownTable
from outbox.text import summary_of

if TYPE_CHECKING:
    import psycopg


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSide(PostgresSide):
    """One side of a pair in a foreign table; a value that can be sent to another process."""

    table: KnownTable

    @property
    def schema(self) -> pa.Schema:
        """The columns of its rows."""
        return FOREIGN[self.part]

    @property
    def locks(self) -> Sequence[Statement]:
        """Nothing: a table that isn't ours is pruned by others, in ways of their own."""
        return ()

    def statement(self, ranges: Sequence[Range]) -> Statement:
        """Return the statement that reads ranges."""
        return sql.rows(self.table, self.pair, ranges)

    def read(self, ranges: Sequence[Range]) -> pa.Table:
        """Return the rows of the ranges, sorted by id (`columns.FOREIGN`).

        Raises:
            SourceError: they can't be read, or an id is there twice.
        """
        try:
            return ordered(PostgresSide.read(self, ranges), f"the {self.part}'s {self.table.declared}")
        except InvalidSettings as error:
            raise_bare(SourceError(str(error)))


def table_side(access: Access, part: Part, table: ForeignTable, pair: Pair, snapshot: Snapshot | None) -> TableSide:
    """Return the side that a foreign table is, as of a snapshot if there is one.

    Raises:
        InvalidSettings: there is no such table or column, or a column has a type that can't be used.
        SourceError: the database can't be asked.
    """
    if snapshot is None:
        with connected(access) as connection:
            execute(connection, READ_IN_ONE_SNAPSHOT)
            return TableSide(access, part, pair, table=known_table(connection, access, part, table))
    known = known_table(snapshot.connection, access, part, table)
    return TableSide(access, part, pair, snapshot.name, snapshot.settings, table=known)


def known_table(connection: Connection, access: Access, part: Part, table: ForeignTable) -> KnownTable:
    """Look up the columns of a foreign table, in the transaction that is open.

    Raises as `table_side`.
    """
    # Of the driver's process alone: an executor, to which a side is sent, has no libpq.
    from psycopg import Error, adapters  # noqa: PLC0415 - see above

    try:
        with reaching(access), connection.begin_nested(), driver_of(connection).cursor() as cursor:
            # The user's own text: nothing is bound in it.
            cursor.execute(sql.describe(table))
            columns = cursor.description
    except Error as error:
        raise_bare(_failure(error, access, part, table))
    types = adapters.types
    kinds = {name: (types.get(oid) or types["text"]).regtype for name, oid in (column[:2] for column in columns)}
    known = KnownTable(part, table, kinds)
    if wrong := sql.wrong_types(known):
        raise sql.refused(part, table, wrong)
    return known


def _failure(error: psycopg.Error, access: Access, part: Part, table: ForeignTable) -> OutboxError:
    why, state = hidden(summary_of(error), access.url), sqlstate(error)
    if not state or UNAVAILABLE.match(state):
        return SourceLost(f"{described(access.url)}: {why}")
    return sql.refused(part, table, f"{why} ({described(access.url)})")


def census(side: TableSide, connection: Connection) -> int:
    """Return how many rows a foreign side has of its pair, having seen that each of them can be judged.

    Raises:
        InvalidSettings: an id is null or there twice, a time is null, or a state isn't known.
        SourceError: they can't be read.
    """
    table, pair = side.table, side.pair

    def refused(why: str) -> InvalidSettings:
        return sql.refused(side.part, table.declared, why)

    def ask(statement: Statement) -> tuple[object, ...]:
        with reaching(side.access):
            rows = execute(connection, statement)[0]
        return tuple(rows[0]) if rows else (None,)

    by_index = sql.is_unique(table)
    is_unique = by_index is not None and bool(ask(by_index)[0])
    rows, without_id, ids, without_time, without_state = map(_number, ask(sql.census(table, pair, unique=is_unique)))
    if without_id:
        raise refused(f"{without_id:,} ids are null; leave such rows out by a query")
    if ids < rows:
        raise refused(f"id {ask(sql.twice(table, pair))[0]} is there twice; keep one row by a query")
    if without_time:
        raise refused(f"the time (columns.at) of {without_time:,} rows is null; give it a value by a query")
    if without_state:
        (worded,) = (column for column in COLUMNS[side.part] if column.words)
        value = ask(sql.unknown_states(table, pair, worded.name))[0]
        called = f"the {side.part}'s {table.declared}"
        why = unknown_state(worded.name, str(value), words_of(worded, table.declared.states), called)
        raise refused(f"{why}; say in states what it is")
    return rows


def _number(value: object) -> int:
    return int(str(value))


# --- digests of any two sides ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SideDigester:
    """Digests two sides in PostgreSQL, ours or foreign ones, whose ids lie in a range."""

    snapshots: Snapshots
    by_part: Mapping[Part, PostgresSide]
    within: Range
    mixing: Mixing

    def _read(self, part: Part, statement: Statement) -> list[Row]:
        snapshot = self.snapshots.of[part]
        with reaching(snapshot.access):
            return execute(snapshot.connection, statement)[0]

    def points(self, part: Part, step: int) -> list[UUID]:
        """Return about each ``step``-th id of a side, in order."""
        statement = sql.sample(self.by_part[part].statement([self.within]), self.mixing, step)
        return sorted(id_ for (id_,) in self._read(part, statement))

    def digest(self, buckets: Sequence[Range], horizon: bytes | None) -> Digested:
        """Digest both sides by bucket; ``horizon`` is the id below which the producer may have pruned."""
        bounds = [bucket.first for bucket in buckets]
        tables = [side.table.declared for side in self.by_part.values() if isinstance(side, TableSide)]
        bodies = all("digest" in table.columns for table in tables)

        def digest(part: Part) -> dict[int, Row]:
            every = self.by_part[part].statement([self.within])
            statement = sql.digests(part, every, bounds, self.mixing, bodies=bodies)
            return {row[0]: row[1:] for row in self._read(part, statement)}

        with ThreadPoolExecutor(1, thread_name_prefix="digest") as pool:
            ours = pool.submit(digest, "producer")
            theirs = digest("consumer")
            sent = ours.result()
        result = Digested([], [])
        for number, bucket in enumerate(buckets, 1):
            of_producer, of_consumer = sent.get(number, _NOTHING_SENT), theirs.get(number, _NOTHING_KNOWN)
            pruned = horizon is not None and bucket.end is not None and bucket.end.bytes <= horizon
            counts = _clean(of_producer, of_consumer, pruned=pruned)
            if counts is None:
                result.differing.append((bucket, int(of_producer[0]) + int(of_consumer[0])))
            else:
                result.clean.append((bucket, counts))
        return result


_NOTHING_SENT: Row = (0, None, 0, 0, 0)
_NOTHING_KNOWN: Row = (0, None, 0)


def _clean(of_producer: Row, of_consumer: Row, *, pruned: bool) -> Counter[Outcome] | None:
    """Return the counts of a bucket by its digests (`sql.digests`); None if it isn't clean."""
    sent, sent_sum, plain, back, left_out = of_producer
    known, known_sum, consumed = of_consumer
    if not sent and pruned:
        return +Counter({Outcome.UNJUDGED: int(known)})
    agree = sent == plain + back + left_out and known == consumed == plain and (sent_sum or 0) == (known_sum or 0)
    if not agree:
        return None
    counts = {Outcome.CONSUMED: int(plain), Outcome.ROLLED_BACK: int(back), Outcome.LEFT_OUT: int(left_out)}
    return +Counter(counts)
