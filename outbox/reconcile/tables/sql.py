"""Statements that read a foreign table of PostgreSQL's as the judge has its rows, and digest the rows of either side.

The user chooses table, query and columns, so they are put together here: names are quoted, values bound, and a query is
a subquery. What reads them is in a transaction that is read only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import pyarrow as pa

from outbox.database.execute import Statement
from outbox.errors import InvalidSettings
from outbox.reconcile.job import Pair, Part, Range
from outbox.reconcile.sql import Mixing, as_array, last_of
from outbox.reconcile.tables.columns import ARROW, DIGITS_OF_HASH, HASHED, UUID_TEXT, words_of
from outbox.reconcile.tables.declare import (
    COLUMNS,
    NAMES,
    WITHDRAWN,
    ForeignTable,
    InboxState,
    ProducerState,
    TableColumn,
)

_INTEGERS = frozenset({"smallint", "integer", "bigint"})
_TIMES = frozenset({"timestamp with time zone", "timestamp without time zone", "date"})

_DISPATCHED, _CONSUMED = ProducerState.DISPATCHED.value, InboxState.CONSUMED.value
_WITHDRAWN = "({})".format(", ".join(str(each.value) for each in WITHDRAWN))


@dataclass(frozen=True, slots=True)
class KnownTable:
    """A foreign table of a side with the types that its columns have."""

    part: Part
    declared: ForeignTable
    types: Mapping[str, str]

    @property
    def source(self) -> str:
        """Return the columns to read, as SQL."""
        return source_of(self.declared)

    def column(self, name: str) -> str:
        """Return a column of the judge's as the table's own, in SQL."""
        return f"t.{identifier(self.declared.columns[name])}"

    def type(self, name: str) -> str:
        """Return the type of a column of the judge's."""
        return self.types[self.declared.columns[name]]


def identifier(name: str) -> str:
    """Return a name, quoted; what stands for a parameter in it stands for itself."""
    return '"{}"'.format(name.replace('"', '""').replace("%", "%%"))


def source_of(table: ForeignTable) -> str:
    """Return the columns to read of a foreign table, as SQL."""
    if table.table is not None:
        return ".".join(identifier(part) for part in table.table.split(".", 1))
    return "(\n{}\n)".format((table.query or "").replace("%", "%%"))


def describe(table: ForeignTable) -> str:
    """Return the SQL that gives the columns of a foreign table and no row; it has no parameters."""
    return f"SELECT * FROM {source_of(table)} AS t LIMIT 0".replace("%%", "%")


def wrong_types(table: KnownTable) -> str | None:
    """Return the faults of a table's columns."""
    for name, own in table.declared.columns.items():
        if own not in table.types:
            there = ", ".join(table.types) or "none"
            return f"there is no column {own} (columns.{name}); it has {there}"
    for column in COLUMNS[table.part]:
        if column.name not in table.declared.columns or column.name == "id" or column.words:
            continue
        kind, allowed = table.type(column.name), _allowed(column)
        if allowed and kind not in allowed:
            own = table.declared.columns[column.name]
            return f"{own} (columns.{column.name}) is {kind}; cast it to {' or '.join(sorted(allowed))} in a query"
    return None


def _allowed(column: TableColumn) -> frozenset[str]:
    if pa.types.is_timestamp(ARROW[column.name]):
        return _TIMES
    if pa.types.is_boolean(ARROW[column.name]):
        return _INTEGERS | {"boolean"}
    return _INTEGERS if pa.types.is_integer(ARROW[column.name]) else frozenset()


# --- rows ------------------------------------------------------------------------------------------------


def key(column: str, kind: str) -> str:
    """Return the expression of the UUID that an id of a type is to the judge, as `columns.key_of` makes it."""
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


def selected(table: KnownTable, pair: Pair) -> Statement:
    """Read all rows that a foreign table has of a pair.

    Columns: those of `columns.FOREIGN`; a time, an id or a number of a state that isn't known is NULL.
    """
    values: dict[str, object] = {}
    columns = [
        f"{key(table.column('id'), table.type('id'))} AS id",
        f"{_name(table.column('id'), table.type('id'))} AS foreign_id",
    ]
    columns += [f"{_expression(table, column, values)} AS {column.name}" for column in COLUMNS[table.part][1:]]
    if table.part == "producer":
        columns.append("0::int2 AS torn")
    where, of_pair = _of_pair(table, pair)
    return Statement(f"SELECT {', '.join(columns)} FROM {table.source} AS t WHERE {where}", {**values, **of_pair})


def _of_pair(table: KnownTable, pair: Pair) -> tuple[str, dict[str, object]]:
    """Return the condition that tells the rows of a pair, and what it binds."""
    names = [name for name in NAMES[table.part] if name in table.declared.columns]
    where = " AND ".join(f"{table.column(name)}::text = %({name})s" for name in names)
    return where or "true", {name: getattr(pair, name) for name in names}


def _expression(table: KnownTable, column: TableColumn, values: dict[str, object]) -> str:
    """Return the expression of a column of the judge's; what it binds is added to ``values``."""
    if column.words:
        words = words_of(column, table.declared.states)
        if column.name not in table.declared.columns:
            return f"{(column.words)[column.default]}::int2"
        values |= {"states": list(words), "numbers": list(words.values())}
        index = f"array_position(%(states)s::text[], {table.column(column.name)}::text)"
        return f"(%(numbers)s::int2[])[{index}]"
    kind = _TYPES[ARROW[column.name]]
    if column.name not in table.declared.columns:
        return "NULL::" + kind if column.default is None else f"({str(column.default).lower()})::{kind}"
    own, declared = table.column(column.name), table.type(column.name)
    if kind == "timestamptz":
        return own if declared == "timestamp with time zone" else f"timezone('UTC', {own}::timestamp)"
    if kind == "bytea":
        return own if declared == "bytea" else f"convert_to({own}::text, 'UTF8')"
    cast = f"{own} <> 0" if kind == "bool" and declared != "boolean" else f"{own}::{kind}"
    return cast if column.default is None else f"coalesce({cast}, {str(column.default).lower()})"


#: The types of columns without words.
_TYPES: Mapping[pa.DataType, str] = {
    pa.int16(): "int2",
    pa.int32(): "int4",
    pa.int64(): "int8",
    pa.bool_(): "bool",
    pa.binary(): "bytea",
    pa.timestamp("us", tz="UTC"): "timestamptz",
}


def rows(table: KnownTable, pair: Pair, ranges: Sequence[Range]) -> Statement:
    """Read the rows of ranges, which are in order and don't overlap, in one pass; columns as `selected`.

    Many single ids are looked up, by an index if the id is a uuid and has one.
    """
    every = selected(table, pair)
    within, values = _within("r.id", ranges)
    return Statement(f"SELECT r.* FROM ({every.sql}) r WHERE {within}", {**dict(every.values), **values})


def _within(id_: str, ranges: Sequence[Range]) -> tuple[str, dict[str, object]]:
    if all(last_of(each) == each.first for each in ranges):
        return f"{id_} = ANY (%(ids)s::uuid[])", {"ids": as_array([each.first for each in ranges])}
    end = ranges[-1].end
    bounds = f"{id_} >= %(first)s::uuid" + (" AND " + f"{id_} < %(end)s::uuid" if end is not None else "")
    values: dict[str, object] = {"first": ranges[0].first, "end": end}
    if len(ranges) == 1:
        return bounds, values
    # Of the edges that an id lies behind, the last is the beginning of a range, or its end.
    edges = [edge for each in ranges for edge in each if edge is not None]
    return f"{bounds} AND width_bucket({id_}, %(edges)s::uuid[]) %% 2 = 1", {**values, "edges": as_array(edges)}


# --- what can't be judged, and digests -------------------------------------------------------------------

_CENSUS = """
SELECT count(*), count(*) - count(r.id), {unique}, {times}, {states}
  FROM ({rows}) r
"""

_TWICE = """
SELECT coalesce(r.foreign_id, r.id::text) FROM ({rows}) r
 GROUP BY 1, r.id HAVING count(*) > 1 ORDER BY 1 LIMIT 1
"""

_UNKNOWN = """
SELECT coalesce({state}::text, 'NULL') FROM {source} AS t
 WHERE {where} AND array_position(%(states)s::text[], {state}::text) IS NULL LIMIT 1
"""

_UNIQUE = """
SELECT EXISTS (
    SELECT FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
     WHERE i.indrelid = %(table)s::regclass AND i.indisunique AND i.indisvalid AND i.indpred IS NULL
       AND i.indnkeyatts = 1 AND a.attname = %(column)s)
"""


def is_unique(table: KnownTable) -> Statement | None:
    """Ask whether the server keeps a table from having an id twice. Rows: ``(boolean,)``; None: it can't know."""
    if table.declared.table is None:
        return None
    named = source_of(table.declared).replace("%%", "%")
    return Statement(_UNIQUE, {"table": named, "column": table.declared.columns["id"]})


def census(table: KnownTable, pair: Pair, *, unique: bool) -> Statement:
    """Count the rows of a pair. Rows: ``(rows, without an id, of these different ids, without a time, without a state
    that is known)``."""
    every = selected(table, pair)
    (worded,) = (column.name for column in COLUMNS[table.part] if column.words)
    times = [column.name for column in COLUMNS[table.part] if column.required and column.name != "id"]
    sql = _CENSUS.format(
        rows=every.sql,
        unique="count(r.id)" if unique else "count(DISTINCT r.id)",
        times=f"count(*) - count(r.{times[0]})" if times else "0::int8",
        states=f"count(*) - count(r.{worded})",
    )
    return Statement(sql, every.values)


def twice(table: KnownTable, pair: Pair) -> Statement:
    """Read one of the ids that are there more than once. Rows: ``(text,)``."""
    every = selected(table, pair)
    return Statement(_TWICE.format(rows=every.sql), every.values)


def unknown_states(table: KnownTable, pair: Pair, name: str) -> Statement:
    """Read one of the states that aren't known. Rows: ``(text,)``."""
    where, of_pair = _of_pair(table, pair)
    sql = _UNKNOWN.format(state=table.column(name), source=table.source, where=where)
    return Statement(sql, {**dict(selected(table, pair).values), **of_pair})


_SAMPLE = "SELECT r.id FROM ({rows}) r WHERE {one} %% %(step)s = 0"

_NOW = "statement_timestamp()"
# What needn't be read: sent, meant for the group and left as it is; taken back; left out by the group.
_PLAIN: Mapping[Part, Sequence[str]] = {
    "producer": (
        f"r.state = {_DISPATCHED} AND r.addressed AND NOT r.compensated AND r.torn = 0 AND r.at <= {_NOW}",
        f"r.state IN {_WITHDRAWN} AND NOT r.compensated AND r.torn = 0",
        f"r.state = {_DISPATCHED} AND NOT r.addressed AND NOT r.compensated AND r.torn = 0",
    ),
    "consumer": (
        f"r.status = {_CONSUMED} AND r.effects IN (-1, 1)"
        f" AND coalesce(greatest(r.received_at, r.changed_at) <= {_NOW}, true)",
    ),
}

_DIGEST = """
SELECT width_bucket(r.id, %(bounds)s::uuid[]), count(*), sum({mixed}) FILTER (WHERE {plain}){counts}
  FROM ({rows}) r GROUP BY 1
"""


def sample(every: Statement, mixing: Mixing, step: int) -> Statement:
    """Read about every ``step``-th id of the rows of a side, chosen by a hash. Rows: ``(id,)``, in no order."""
    one = mixing.one.format(id="r.id")
    return Statement(_SAMPLE.format(rows=every.sql, one=one), {**dict(every.values), "step": step})


def digests(part: Part, every: Statement, bounds: Sequence[UUID], mixing: Mixing, *, bodies: bool) -> Statement:
    """Digest the rows of a side, of ours or of a foreign one, by bucket; bucket n begins with the n-th of ``bounds``.

    Rows: ``(bucket, rows, sum of hashes of the plain ones, plain ones, …)``; of the producer then also how many were
    taken back and are left out by the group. With ``bodies`` the digests of bodies are in the hashes. A sum and no
    exclusive or: of rows that are there twice nothing would be left.
    """
    hashed = (mixing.two if bodies else mixing.one).format(id="r.id", digest="r.digest")
    counts = "".join(f", count(*) FILTER (WHERE {plain})" for plain in _PLAIN[part])
    sql = _DIGEST.format(mixed=hashed, plain=_PLAIN[part][0], counts=counts, rows=every.sql)
    return Statement(sql, {**dict(every.values), "bounds": as_array(bounds)})


def refused(part: Part, table: ForeignTable, why: str) -> InvalidSettings:
    """Return the error that names a side's table."""
    return InvalidSettings(f"{part}.tables ({table}): {why}")
