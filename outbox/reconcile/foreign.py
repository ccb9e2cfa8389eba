"""Tables that aren't ours: rows as the judge has them, from a source of any kind; and one of PostgreSQL's as a side.

The columns of such a side are looked up, and its rows checked, first. The user chooses table, query and columns, so the
statements are put together here: names are quoted, values bound, and a query is a subquery. What reads them is in a
transaction that is read only.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from sqlalchemy import Connection

from outbox.database.execute import UNAVAILABLE, Statement, driver_of, execute, sqlstate
from outbox.errors import InvalidSettings, OutboxError, SourceError, SourceLost
from outbox.reconcile.job import Access, Pair, Part, Range, described, hidden
from outbox.reconcile.rows import FOREIGN_ID, SCHEMAS, Finding, fixed_ids, within_calendar
from outbox.reconcile.source import PostgresSide, Snapshot, connected, raise_bare, reaching
from outbox.reconcile.sql import READ_IN_ONE_SNAPSHOT, as_array
from outbox.reconcile.tables import COLUMNS, NAMES, ForeignTable, TableColumn
from outbox.text import summary_of

if TYPE_CHECKING:
    import psycopg

_INTEGERS = frozenset({"smallint", "integer", "bigint"})
_TIMES = frozenset({"timestamp with time zone", "timestamp without time zone", "date"})


# --- columns ---------------------------------------------------------------------------------------------

# An id may be of any type. One that is a UUID is used as it is: 16 bytes, or a text in the one form in which PostgreSQL
# writes it. Any other is hashed whole, so that ids of two sides meet if they are equal to the letter: the digit `e`
# and 31 digits of the SHA-256 of its bytes, or of its text in UTF-8. So it lies behind the ids that have a time in
# them, and before those of business strings, from both of which the judge reads more than that they are equal.
# `key_of` does this here, and `key` in PostgreSQL.

_BYTES_OF_ID = 16


#: What each column is to the judge.
ARROW: Mapping[str, pa.DataType] = {
    **{field.name: field.type for schema in SCHEMAS.values() for field in schema},
    "id": pa.binary(),
}

#: The rows of a foreign side: those of ours, and the id as its table has it, null where that is the UUID itself.
FOREIGN: Mapping[Part, pa.Schema] = {
    # A foreign producer may have no digest of a body.
    part: pa.schema([field.with_nullable(True) for field in [*schema, FOREIGN_ID]])
    for part, schema in SCHEMAS.items()
}

#: The text of a UUID, as PostgreSQL and Python write it; in the syntax of both.
UUID_TEXT = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
#: With what the UUID of a hash begins, and how many of its digits follow.
HASHED, DIGITS_OF_HASH = "e", 31

_UUID = re.compile(UUID_TEXT.replace("$", r"\Z"))


def key_of(id_: str | bytes) -> tuple[bytes, str | None]:
    """Return the 16 bytes of an id, and the id as people read it, unless it is the UUID itself."""
    if isinstance(id_, bytes):
        return (id_, None) if len(id_) == _BYTES_OF_ID else (_hashed(id_), id_.hex())
    return (UUID(id_).bytes, None) if _UUID.match(id_) else (_hashed(id_.encode()), id_)


def _hashed(raw: bytes) -> bytes:
    return bytes.fromhex(HASHED + hashlib.sha256(raw).hexdigest()[:DIGITS_OF_HASH])


#: A table's own words, and what the judge calls them, by the judge's column (`ForeignTable.own_words`).
OwnWords = Mapping[str, Mapping[str, str]]


def words_of(column: TableColumn, own_words: OwnWords) -> dict[str, int]:
    """Return the texts that a column with words may have, and the numbers for which they stand."""
    known, own = dict(column.words or {}), own_words.get(column.name)
    return {each: known[word] for each, word in own.items()} if own else known


def shaped(rows: pa.Table, part: Part, own_words: OwnWords | None = None, called: str | None = None) -> pa.Table:
    """Return rows with the columns of a side (`COLUMNS`) as the judge has them (`FOREIGN`), in the order of their ids.

    ``called`` is what errors call it.

    Raises:
        InvalidSettings: an id is null or there twice, a time is null, a state isn't known; names it and the mend.
    """
    called = called or f"the {part}'s table"
    keys, texts = _ids(rows["id"], called)
    made: dict[str, Any] = {"id": keys, FOREIGN_ID.name: texts}
    for column in COLUMNS[part][1:]:
        if column.name not in rows.column_names:
            default = column.words[column.default] if column.words else column.default
            made[column.name] = pa.repeat(pa.scalar(default, ARROW[column.name]), rows.num_rows)
        elif column.words:
            made[column.name] = _numbers(rows[column.name], column, words_of(column, own_words or {}), called)
        else:
            made[column.name] = _values(rows[column.name].cast(ARROW[column.name]), column, called)
    if part == "producer":
        made["torn"] = pa.repeat(pa.scalar(0, pa.int8()), rows.num_rows)
    return ordered(pa.table(made).select(FOREIGN[part].names).cast(FOREIGN[part]), called)


def ordered(table: pa.Table, called: str) -> pa.Table:
    """Return the rows of a foreign side (`FOREIGN`) in the order of their ids.

    Raises:
        InvalidSettings: an id is there twice.
    """
    table = table.sort_by("id")
    ids = fixed_ids(table)
    if (again := np.flatnonzero(ids[1:] == ids[:-1])).size:
        raise InvalidSettings(f"id {shown(table, int(again[0]))} is twice in {called}; keep one row")
    return table


def shown(table: pa.Table, row: int) -> str:
    """Return the id of a row as people read it."""
    foreign = table[FOREIGN_ID.name][row].as_py()
    return str(UUID(bytes=table["id"][row].as_py())) if foreign is None else foreign


def _values(values: pa.ChunkedArray, column: TableColumn, called: str) -> pa.ChunkedArray:
    if values.null_count and column.required:
        raise InvalidSettings(f"{column.name} is null in {called}; leave such rows out, or give them a value")
    if pa.types.is_timestamp(ARROW[column.name]):
        return within_calendar(values)
    return values if column.default is None else pc.fill_null(values, column.default)


def _numbers(texts: pa.ChunkedArray, column: TableColumn, words: Mapping[str, int], called: str) -> pa.ChunkedArray:
    numbers = pc.index_in(texts, pa.array(list(words), texts.type))
    is_wrong = pc.and_not(pc.is_null(numbers), pc.and_(pc.is_null(texts), column.may_be_null))
    if pc.any(is_wrong).as_py():
        raise unknown_state(column.name, str(texts.filter(is_wrong)[0]), words, called)
    found = pc.take(pa.array(list(words.values()), ARROW[column.name]), numbers)
    return pc.fill_null(found, (column.words or {})[column.default]) if column.may_be_null else found


def unknown_state(name: str, value: str, words: Mapping[str, int], called: str) -> InvalidSettings:
    """Return the error that names a state which isn't known."""
    return InvalidSettings(f"{name} = {value} of {called} must be one of: {', '.join(words)}")


def _ids(ids: pa.ChunkedArray, called: str) -> tuple[pa.Array, pa.Array]:
    keys, texts = [], []
    for value in ids.to_pylist():
        if value is None:
            raise InvalidSettings(f"an id of {called} is null; leave such rows out")
        key, text = key_of(value)
        keys.append(key)
        texts.append(text)
    return pa.array(keys, pa.binary(16)), pa.array(texts, pa.string())


# --- statements ------------------------------------------------------------------------------------------

_CENSUS = """
SELECT count(*), count(*) - count(r.id), {unique}, {times}, {words}
  FROM ({rows}) r
"""

_TWICE = """
SELECT coalesce(r.foreign_id, r.id::text) FROM ({rows}) r
 GROUP BY 1, r.id HAVING count(*) > 1 ORDER BY 1 LIMIT 1
"""

_UNKNOWN = """
SELECT coalesce({column}::text, 'NULL') FROM {source} AS t WHERE {where} AND {number} IS NULL LIMIT 1
"""

# The transaction is open until the audit is written, and waits for no row of another. What was changed before the lock
# is seen by the UPDATE: its snapshot is newer.
_LOCK_ROWS = """
SELECT m.key FROM unnest(%(keys)s::uuid[], %(ids)s::text[]) AS m (key, id) JOIN {rows} AS t ON {id}
 WHERE {where}
   FOR UPDATE OF t SKIP LOCKED
"""

_WRITE_OPINION = """
UPDATE {table} AS t SET {column} = %(word)s
  FROM unnest(%(keys)s::uuid[], %(ids)s::text[], %(seen)s::int2[], %(in_state)s::int2[]) AS m (key, id, seen, in_state)
 WHERE {id} AND {opinion} = m.seen AND {state} = m.in_state AND {where}
RETURNING m.key
"""

_UNIQUE = """
SELECT EXISTS (
    SELECT FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
     WHERE i.indrelid = %(table)s::regclass AND i.indisunique AND i.indisvalid AND i.indpred IS NULL
       AND i.indnkeyatts = 1 AND a.attname = %(column)s)
"""

#: The types of columns without words.
_TYPES: Mapping[pa.DataType, str] = {
    pa.int16(): "int2",
    pa.int32(): "int4",
    pa.int64(): "int8",
    pa.bool_(): "bool",
    pa.binary(): "bytea",
    pa.timestamp("us", tz="UTC"): "timestamptz",
}


@dataclass(frozen=True, slots=True)
class KnownTable:
    """A foreign table of a side with the types that its columns have, and the statements that read it."""

    part: Part
    declared: ForeignTable
    types: Mapping[str, str]

    def __str__(self) -> str:
        return f"the {self.part}'s {self.declared}"

    def refused(self, why: str) -> InvalidSettings:
        """Return the error that names the table."""
        return InvalidSettings(f"{self.part}.tables ({self.declared}): {why}")

    def column(self, name: str) -> str:
        """Return a column of the judge's as the table's own, in SQL."""
        return f"t.{identifier(self.declared.columns[name])}"

    def type(self, name: str) -> str:
        """Return the type of a column of the judge's."""
        return self.types[self.declared.columns[name]]

    @property
    def worded(self) -> list[TableColumn]:
        """The columns that have words: the state and the opinion, or the status."""
        return [column for column in COLUMNS[self.part] if column.words]

    def check_types(self) -> None:
        """Check the table's columns.

        Raises:
            InvalidSettings: a column isn't there, or is of a type that can't be used.
        """
        for name, own in self.declared.columns.items():
            if own not in self.types:
                there = ", ".join(self.types) or "none"
                raise self.refused(f"there is no column {own} (columns.{name}); it has {there}")
        for column in COLUMNS[self.part]:
            if column.name not in self.declared.columns or column.name == "id" or column.words:
                continue
            kind, allowed = self.type(column.name), _allowed(column)
            if allowed and kind not in allowed:
                own, choices = self.declared.columns[column.name], " or ".join(sorted(allowed))
                raise self.refused(f"{own} (columns.{column.name}) is {kind}; cast it to {choices} in a query")

    def rows(self, pair: Pair) -> Statement:
        """Read all rows that the table has of a pair.

        Columns: those of `FOREIGN`; a time, an id or a number of a state that isn't known is NULL.
        """
        values: dict[str, object] = {}
        id_, kind = self.column("id"), self.type("id")
        columns = [f"{key(id_, kind)} AS id", f"{_name(id_, kind)} AS foreign_id"]
        columns += [f"{self._expression(column, values)} AS {column.name}" for column in COLUMNS[self.part][1:]]
        if self.part == "producer":
            columns.append("0::int2 AS torn")
        where, of_pair = self._of_pair(pair)
        sql = f"SELECT {', '.join(columns)} FROM {_source(self.declared)} AS t WHERE {where}"
        return Statement(sql, {**values, **of_pair})

    def rows_within(self, pair: Pair, ranges: Sequence[Range]) -> Statement:
        """Read the rows of ranges, which are in order and don't overlap, in one pass; columns as `rows`.

        Many single ids are looked up, by an index if the id is a uuid and has one.
        """
        every, (within, values) = self.rows(pair), _within("r.id", ranges)
        return Statement(f"SELECT r.* FROM ({every.sql}) r WHERE {within}", {**dict(every.values), **values})

    def is_unique(self) -> Statement | None:
        """Ask whether the server keeps the table from having an id twice. Rows: ``(boolean,)``; None: it can't know."""
        if self.declared.table is None:
            return None
        named = _source(self.declared).replace("%%", "%")
        return Statement(_UNIQUE, {"table": named, "column": self.declared.columns["id"]})

    def census(self, pair: Pair, *, unique: bool) -> Statement:
        """Count the rows of a pair.

        Rows: ``(rows, without an id, of these different ids, without a time, *without a word that is known)``, of each
        of the columns with words.
        """
        every = self.rows(pair)
        times = [column.name for column in COLUMNS[self.part] if column.required and column.name != "id"]
        sql = _CENSUS.format(
            rows=every.sql,
            unique="count(r.id)" if unique else "count(DISTINCT r.id)",
            times=f"count(*) - count(r.{times[0]})" if times else "0::int8",
            words=", ".join(f"count(*) - count(r.{column.name})" for column in self.worded),
        )
        return Statement(sql, every.values)

    def twice(self, pair: Pair) -> Statement:
        """Read one of the ids that are there more than once. Rows: ``(text,)``."""
        every = self.rows(pair)
        return Statement(_TWICE.format(rows=every.sql), every.values)

    def unknown_word(self, pair: Pair, column: TableColumn) -> Statement:
        """Read one of the words of a column that aren't known. Rows: ``(text,)``."""
        values: dict[str, object] = {}
        number, (where, of_pair) = self._expression(column, values), self._of_pair(pair)
        own, source = self.column(column.name), _source(self.declared)
        return Statement(_UNKNOWN.format(column=own, number=number, source=source, where=where), {**values, **of_pair})

    def lock(self, pair: Pair, found: Sequence[Finding]) -> Statement:
        """Lock the rows of messages that no other transaction has. Rows: ``(id,)``, of those that are locked now."""
        where, of_pair = self._of_pair(pair)
        sql = _LOCK_ROWS.format(rows=_source(self.declared), id=_is_id(self.column("id"), self.type("id")), where=where)
        return Statement(sql, {**self._ids_of(found), **of_pair})

    def _ids_of(self, found: Sequence[Finding]) -> dict[str, object]:
        is_hex = self.type("id") == "bytea"
        names = [each.foreign_id or (each.id.hex if is_hex else str(each.id)) for each in found]
        return {"keys": [each.id for each in found], "ids": names}

    def write_opinion(self, pair: Pair, word: str, found: Sequence[Finding]) -> Statement:
        """Write a word into the rows of messages whose state and opinion are as they were found.

        Rows: ``(id,)``, of those in which it was written.
        """
        values: dict[str, object] = {}
        state, opinion = (self._expression(each, values) for each in self.worded)
        where, of_pair = self._of_pair(pair)
        values |= {
            "word": word,
            **self._ids_of(found),
            "seen": [each.opinion for each in found],
            "in_state": [each.state for each in found],
        }
        sql = _WRITE_OPINION.format(
            table=_source(self.declared),
            column=identifier(self.declared.columns["opinion"]),
            id=_is_id(self.column("id"), self.type("id")),
            state=state,
            opinion=opinion,
            where=where,
        )
        return Statement(sql, {**values, **of_pair})

    def _of_pair(self, pair: Pair) -> tuple[str, dict[str, object]]:
        """Return the condition that tells the rows of a pair, and what it binds."""
        names = [name for name in NAMES[self.part] if name in self.declared.columns]
        where = " AND ".join(f"{self.column(name)}::text = %({name})s" for name in names)
        return where or "true", {name: getattr(pair, name) for name in names}

    def _expression(self, column: TableColumn, values: dict[str, object]) -> str:
        """Return the expression of a column of the judge's; what it binds is added to ``values``."""
        there = column.name in self.declared.columns
        if column.words:
            if not there:
                return f"{(column.words)[column.default]}::int2"
            words, own = words_of(column, self.declared.own_words), self.column(column.name)
            values |= {f"{column.name}_words": list(words), f"{column.name}_numbers": list(words.values())}
            index = f"array_position(%({column.name}_words)s::text[], {own}::text)"
            number = f"(%({column.name}_numbers)s::int2[])[{index}]"
            default = f"{column.words[column.default]}::int2"
            return f"CASE WHEN {own} IS NULL THEN {default} ELSE {number} END" if column.may_be_null else number
        kind = _TYPES[ARROW[column.name]]
        if not there:
            return "NULL::" + kind if column.default is None else f"({str(column.default).lower()})::{kind}"
        own, declared = self.column(column.name), self.type(column.name)
        if kind == "timestamptz":
            return own if declared == "timestamp with time zone" else f"timezone('UTC', {own}::timestamp)"
        if kind == "bytea":
            return own if declared == "bytea" else f"convert_to({own}::text, 'UTF8')"
        cast = f"{own} <> 0" if kind == "bool" and declared != "boolean" else f"{own}::{kind}"
        return cast if column.default is None else f"coalesce({cast}, {str(column.default).lower()})"


def identifier(name: str) -> str:
    """Return a name, quoted; what stands for a parameter in it stands for itself."""
    return '"{}"'.format(name.replace('"', '""').replace("%", "%%"))


def _source(table: ForeignTable) -> str:
    """Return the columns to read of a foreign table, as SQL."""
    if table.table is not None:
        return ".".join(identifier(part) for part in table.table.split(".", 1))
    return "(\n{}\n)".format((table.query or "").replace("%", "%%"))


def _allowed(column: TableColumn) -> frozenset[str]:
    if pa.types.is_timestamp(ARROW[column.name]):
        return _TIMES
    if pa.types.is_boolean(ARROW[column.name]):
        return _INTEGERS | {"boolean"}
    return _INTEGERS if pa.types.is_integer(ARROW[column.name]) else frozenset()


def key(column: str, kind: str) -> str:
    """Return the expression of the UUID that an id of a type is to the judge, as `key_of` makes it."""
    if kind == "uuid":
        return column
    if kind == "bytea":
        return f"CASE WHEN octet_length({column}) = 16 THEN encode({column}, 'hex')::uuid ELSE {_hash(column)} END"
    text = f"{column}::text"
    hashed = _hash(f"convert_to({text}, 'UTF8')")
    return hashed if kind in _INTEGERS else f"CASE WHEN {_is_uuid(text)} THEN {text}::uuid ELSE {hashed} END"


def _is_uuid(text: str) -> str:
    # Its length first: to match takes longer than all the rest.
    return f"octet_length({text}) = 36 AND {text} ~ '{UUID_TEXT}'"


def _hash(raw: str) -> str:
    return f"('{HASHED}' || substr(encode(sha256({raw}), 'hex'), 1, {DIGITS_OF_HASH}))::uuid"


def _name(column: str, kind: str) -> str:
    """Return the expression of an id as people read it; NULL where it is the UUID itself."""
    if kind == "uuid":
        return "NULL::text"
    if kind == "bytea":
        return f"CASE WHEN octet_length({column}) <> 16 THEN encode({column}, 'hex') END"
    return f"CASE WHEN NOT ({_is_uuid(f'{column}::text')}) THEN {column}::text END"


def _is_id(column: str, kind: str) -> str:
    """Return the condition that a column has the id of a row of ``m``; an index can serve it."""
    if kind == "uuid":
        return f"{column} = m.key"
    if kind == "bytea":
        return f"{column} = decode(m.id, 'hex')"
    return f"{column} = m.id::{kind}" if kind in _INTEGERS else f"{column}::text = m.id"


def _within(id_: str, ranges: Sequence[Range]) -> tuple[str, dict[str, object]]:
    if all(each.last == each.first for each in ranges):
        return f"{id_} = ANY (%(ids)s::uuid[])", {"ids": as_array([each.first for each in ranges])}
    end = ranges[-1].end
    bounds = f"{id_} >= %(first)s::uuid" + (" AND " + f"{id_} < %(end)s::uuid" if end is not None else "")
    values: dict[str, object] = {"first": ranges[0].first, "end": end}
    if len(ranges) == 1:
        return bounds, values
    # Of the edges that an id lies behind, the last is the beginning of a range, or its end.
    edges = [edge for each in ranges for edge in each if edge is not None]
    return f"{bounds} AND width_bucket({id_}, %(edges)s::uuid[]) %% 2 = 1", {**values, "edges": as_array(edges)}


# --- a side ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSide(PostgresSide):
    """One side of a pair in a foreign table; a value that can be sent to another process."""

    table: KnownTable

    @property
    def schema(self) -> pa.Schema:
        """The columns of its rows."""
        return FOREIGN[self.part]

    @property
    def has_bodies(self) -> bool:
        """Do its rows tell the digests of bodies?"""
        return "digest" in self.table.declared.columns

    @property
    def locks(self) -> Sequence[Statement]:
        """Nothing: a table that isn't ours is pruned by others, in ways of their own."""
        return ()

    def statement(self, ranges: Sequence[Range]) -> Statement:
        """Return the statement that reads ranges."""
        return self.table.rows_within(self.pair, ranges)

    def read(self, ranges: Sequence[Range]) -> pa.Table:
        """Return the rows of the ranges, sorted by id (`FOREIGN`).

        Raises:
            SourceError: they can't be read, or an id is there twice.
        """
        try:
            return ordered(PostgresSide.read(self, ranges), str(self.table))
        except InvalidSettings as error:
            raise_bare(SourceError(str(error)))

    def census(self, connection: Connection) -> int:
        """Return how many rows it has of its pair, having seen that each of them can be judged.

        Raises:
            InvalidSettings: an id is null or there twice, a time is null, or a state isn't known.
            SourceError: they can't be read.
        """
        table, pair = self.table, self.pair

        def ask(statement: Statement) -> tuple[object, ...]:
            with reaching(self.access):
                rows = execute(connection, statement)[0]
            return tuple(rows[0]) if rows else (None,)

        by_index = table.is_unique()
        is_unique = by_index is not None and bool(ask(by_index)[0])
        rows, no_id, ids, no_time, *no_word = (int(str(each)) for each in ask(table.census(pair, unique=is_unique)))
        if no_id:
            raise table.refused(f"{no_id:,} ids are null; leave such rows out by a query")
        if ids < rows:
            raise table.refused(f"id {ask(table.twice(pair))[0]} is there twice; keep one row by a query")
        if no_time:
            raise table.refused(f"the time (columns.at) of {no_time:,} rows is null; give it a value by a query")
        for column in (column for column, number in zip(table.worded, no_word, strict=True) if number):
            value, words = str(ask(table.unknown_word(pair, column))[0]), words_of(column, table.declared.own_words)
            why = unknown_state(column.name, value, words, str(table))
            raise table.refused(f"{why}; say in {'opinions' if column.may_be_null else 'states'} what it is")
        return rows


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
            cursor.execute(f"SELECT * FROM {_source(table)} AS t LIMIT 0".replace("%%", "%"))
            columns = cursor.description
    except Error as error:
        raise_bare(_failure(error, access, KnownTable(part, table, {})))
    types = adapters.types
    kinds = {name: (types.get(oid) or types["text"]).regtype for name, oid in (column[:2] for column in columns)}
    known = KnownTable(part, table, kinds)
    known.check_types()
    return known


def _failure(error: psycopg.Error, access: Access, table: KnownTable) -> OutboxError:
    why, state = hidden(summary_of(error), access.url), sqlstate(error)
    if not state or UNAVAILABLE.match(state):
        return SourceLost(f"{described(access.url)}: {why}")
    return table.refused(f"{why} ({described(access.url)})")
