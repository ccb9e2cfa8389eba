"""The two tables of a comparison in their databases: their columns looked up, their keys checked, their statements.

The user names tables and columns, so statements are put together here: names are quoted, values bound. What reads them
is in a transaction that is read only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from sqlalchemy import Connection

from outbox.database.execute import Row, Statement, execute
from outbox.errors import InvalidSettings
from outbox.reconcile.columns.kinds import INTEGER, Kind, kinds_of
from outbox.reconcile.foreign import identifier
from outbox.reconcile.job import Part
from outbox.reconcile.source import Snapshot, reaching
from outbox.reconcile.sql import Mixing
from outbox.text import counted

# From PostgreSQL 18 on NULLs of before may be left where a column says NOT NULL.
_COLUMNS = """
SELECT a.attname, CASE WHEN b.typtype = 'e' THEN 'text' ELSE format_type(b.oid, NULL) END,
       a.attnotnull AND NOT EXISTS (SELECT FROM pg_constraint n WHERE n.conrelid = a.attrelid AND n.contype = 'n'
                                       AND a.attnum = ANY (n.conkey) AND NOT n.convalidated),
       b.typname <> 'bpchar' AND b.typtype <> 'e' AND coalesce(c.collname IN ('C', 'POSIX'), true)
  FROM pg_attribute a
  JOIN pg_type t ON t.oid = a.atttypid
  JOIN pg_type b ON b.oid = coalesce(nullif(t.typbasetype, 0), t.oid)
  LEFT JOIN pg_collation c ON c.oid = a.attcollation
 WHERE a.attrelid = to_regclass(%(table)s) AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""

# An index on an expression has a column of number 0. That of a table which others inherit from says nothing of theirs.
_INDEXES = """
SELECT i.indisunique AND i.indimmediate AND NOT (r.relkind = 'r' AND r.relhassubclass), am.amname = 'btree',
       array(SELECT a.attname::text FROM unnest(i.indkey) WITH ORDINALITY k (number, place)
               LEFT JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number
              WHERE k.place <= i.indnkeyatts ORDER BY k.place)
  FROM pg_index i JOIN pg_class r ON r.oid = i.indrelid
  JOIN pg_class x ON x.oid = i.indexrelid JOIN pg_am am ON am.oid = x.relam
 WHERE i.indrelid = to_regclass(%(table)s) AND i.indisvalid AND i.indpred IS NULL
"""


@dataclass(frozen=True, slots=True)
class Column:
    """A column as its table has it; ``is_plain``: of a text, an index on it has the order of its bytes."""

    name: str
    type: str
    not_null: bool
    is_plain: bool


@dataclass(frozen=True, slots=True)
class FoundTable:
    """What a database says of a table: its columns, and its indexes as ``(unique, ordered, columns)``."""

    part: Part
    table: str
    snapshot: Snapshot
    columns: Mapping[str, Column]
    indexes: Sequence[Row]

    def __str__(self) -> str:
        return f"the {self.part}'s table {self.table}"

    def column(self, name: str) -> Column:
        """Return a column.

        Raises:
            InvalidSettings: it isn't there; names those that are.
        """
        if (found := self.columns.get(name)) is None:
            raise InvalidSettings(f"{self} has no column {name}; it has {', '.join(self.columns)}")
        return found


def find_table(part: Part, snapshot: Snapshot, table: str) -> FoundTable:
    """Look a table up in its snapshot.

    Raises:
        InvalidSettings: it isn't there.
        SourceError: the database can't be asked.
    """
    quoted = {"table": _table(table).replace("%%", "%")}
    with reaching(snapshot.access):
        columns, indexes = execute(snapshot.connection, Statement(_COLUMNS, quoted), Statement(_INDEXES, quoted))
    if not columns:
        raise InvalidSettings(f"the {part} has no table {table}; name it as name or schema.name, in the letters it has")
    return FoundTable(part, table, snapshot, {each.name: each for each in (Column(*row) for row in columns)}, indexes)


def _table(name: str) -> str:
    return ".".join(map(identifier, name.split(".", 1)))


@dataclass(frozen=True, slots=True)
class ColumnPair:
    """A column of the left table, the one of the right that it is compared with, and what each is compared as."""

    names: tuple[str, str]
    kinds: tuple[Kind, Kind]

    @property
    def name(self) -> str:
        """As people read it: ``left``, or ``left:right`` where the tables call it differently."""
        return ":".join(dict.fromkeys(self.names))

    @classmethod
    def of(cls, text: str, left: FoundTable, right: FoundTable, *, is_key: bool = False) -> ColumnPair:
        """Return what ``name`` or ``left:right`` names in two tables.

        Raises:
            InvalidSettings: a column isn't there; types that can't be compared, or by which rows aren't told apart.
        """
        name, _, renamed = text.partition(":")
        return cls.named((name, renamed or name), left, right, is_key=is_key)

    @classmethod
    def named(cls, names: tuple[str, str], left: FoundTable, right: FoundTable, *, is_key: bool = False) -> ColumnPair:
        """Return the pair of two columns, by their names alone, in which any letter may be. Raises as `of`."""
        name, ours, theirs = names[0], left.column(names[0]), right.column(names[1])
        kinds = kinds_of(ours.type, theirs.type)
        if kinds is None or (is_key and not kinds[0].is_key):
            mend = "choose another key" if kinds else "compare a view that casts one of them, or leave the column out"
            raise InvalidSettings(
                f"column {name} of {left} is {ours.type}, and {theirs.name} of {right} is {theirs.type}: they can't be "
                f"{'a key' if kinds else 'compared'}; {mend}"
            )
        return cls((name, theirs.name), kinds)


#: NULL is hashed to 0, as is the float 0 with the seed 0.
_SEED = 25_214_903_917

_NULLS = "SELECT {counts} FROM {table} t WHERE {any}"
_TWICE = "SELECT {texts}, count(*) FROM {table} t GROUP BY {values} HAVING count(*) > 1 LIMIT 1"
_COUNT = "SELECT count(*) FROM {table} t"
_SAMPLE = "SELECT {first} FROM {table} t WHERE ({hash} & 9223372036854775807) %% %(step)s = %(rest)s"
# By the column's full name: the text of a column is called as the column.
_SORTED = "SELECT {text}, count(*) FROM unnest(%(sample)s::{type}[]) s (x) GROUP BY s.x ORDER BY s.x{collation}"
_DIGEST = "SELECT {bucket}, count(*), {mix}({hash}) FROM {table} t GROUP BY 1"
_ROWS = "SELECT {bucket} AS bucket, {columns} FROM {rows} t{where} ORDER BY {order}"
_RANGES = """(
SELECT t.* FROM unnest(%(firsts)s::{type}[], %(ends)s::{type}[]) r (first_key, end_key)
 CROSS JOIN LATERAL (SELECT * FROM {table} t WHERE {key} >= r.first_key AND {key} < r.end_key) t{open})"""


@dataclass(frozen=True, slots=True)
class Cut:
    """How both tables are cut into buckets, by the same values of the first column of the key.

    Bucket n begins with the n-th of ``bounds``, and bucket 0 has what lies before. ``parts`` (a power of two for each
    bucket; nothing where each is whole) are into how many a bucket is cut by a hash of the whole key, since rows may
    have the first column in common. The number of a part is the bucket's times 2^32, and its own.
    """

    bounds: Sequence[str] = ()
    parts: Sequence[int] = ()

    @classmethod
    def of(cls, sample: Sequence[tuple[str, int]], most: int) -> Cut:
        """Cut by sorted values of a sample, with how often each is in it; into so many buckets at most, and parts."""
        share = max(1, sum(number for _, number in sample) // most)
        bounds, sizes = list[str](), [0]
        for value, number in sample:
            if not bounds or sizes[-1] + number > share:
                bounds.append(value)
                sizes.append(number)
            else:
                sizes[-1] += number
        parts = [1 << max(size - 1, 0).bit_length() for size in sizes]
        return cls(bounds, parts if max(parts) > 1 else ())

    def range_of(self, bucket: int) -> int:
        """Return the number of the range of keys in which a bucket lies."""
        return bucket >> 32 if self.parts else bucket

    def values(self) -> dict[str, object]:
        """Return what the expression of a bucket binds."""
        bound: dict[str, object] = {"bounds": array_of(self.bounds)} if self.bounds else {}
        return bound | ({"masks": array_of([str(each - 1) for each in self.parts])} if self.parts else {})

    def ranges(self, buckets: Collection[int]) -> tuple[list[tuple[str, str]], bool, bool]:
        """Return the ranges of keys that buckets have; whether the first of all is among them, and the last."""
        numbers = sorted(set(map(self.range_of, buckets)))
        last, found = len(self.bounds), list[tuple[str, str]]()
        inner = [each for each in numbers if 0 < each < last]
        for _, run in groupby(enumerate(inner), lambda pair: pair[1] - pair[0]):
            together = [number for _, number in run]
            found.append((self.bounds[together[0] - 1], self.bounds[together[-1]]))
        return found, 0 in numbers, last in numbers


@dataclass(frozen=True, slots=True)
class KeyedTable:
    """One of the two tables, with its columns as they are compared, and the statements that read it."""

    found: FoundTable
    key: Sequence[tuple[str, Kind]]
    columns: Sequence[tuple[str, Kind]]
    mixing: Mixing

    @property
    def connection(self) -> Connection:
        """That of its snapshot."""
        return self.found.snapshot.connection

    @property
    def table(self) -> str:
        """The table, in SQL."""
        return _table(self.found.table)

    def ask(self, statement: Statement) -> list[Row]:
        """Return the rows of a statement in the snapshot.

        Raises:
            SourceError: the database can't be asked.
        """
        with reaching(self.found.snapshot.access):
            return execute(self.connection, statement)[0]

    def check_keys(self, shown: str | None) -> None:
        """See that each row has a key of its own; ``shown`` stands for a key that is masked, None shows it.

        The database's own indexes say so at no cost; else the table is read for it.

        Raises:
            InvalidSettings: a key is NULL, or there twice; names it.
            SourceError: the database can't be asked.
        """
        names = [name for name, _ in self.key]
        open_ = [name for name in names if not self.found.columns[name].not_null]
        if open_:
            where = [f"{_column(name)} IS NULL" for name in open_]
            counts = ", ".join(f"count(*) FILTER (WHERE {each})" for each in where)
            found = self.ask(Statement(_NULLS.format(counts=counts, table=self.table, any=" OR ".join(where)), {}))[0]
            for name, number in zip(open_, found, strict=True):
                if number:
                    rows = counted(number, "row")
                    raise InvalidSettings(
                        f"the key {name} of {self.found} is NULL in {rows}; compare a view without them"
                    )
        if self._is_unique():
            return
        texts, values = (", ".join(each) for each in (self._written(self.key), self._values(self.key)))
        for row in self.ask(Statement(_TWICE.format(texts=texts, table=self.table, values=values), {})):
            key = shown or ", ".join(f"{name} = {value}" for name, value in zip(names, row, strict=False))
            raise InvalidSettings(
                f"{self.found} has {row[-1]:,} rows of the key {key}; name all columns of its key, or compare a view "
                "that keeps one of them"
            )

    def _is_unique(self) -> bool:
        # Of a column that is cast two values may become one: then an index on it says nothing.
        names = {name for name, kind in self.key if self._is_own(name, kind)}
        whole = len(names) == len(self.key)
        return whole and any(unique and set(columns) <= names for unique, _, columns in self.found.indexes)

    def _is_own(self, name: str, kind: Kind) -> bool:
        own = kinds_of(self.found.columns[name].type, self.found.columns[name].type)
        return own is not None and own[0] is kind

    @property
    def has_index(self) -> bool:
        """Can ranges of the first column of the key be looked up in an index?"""
        name, kind = self.key[0]
        found = self.found.columns[name]
        by_value = found.is_plain and self._is_own(name, kind) and "timezone" not in kind.value
        return by_value and any(ordered and columns[0] == name for _, ordered, columns in self.found.indexes)

    def count(self) -> Statement:
        """Count the rows. Rows: ``(number,)``."""
        return Statement(_COUNT.format(table=self.table), {})

    def sample(self, step: int) -> Statement:
        """Read the first column of about every ``step``-th key, chosen by a hash. Rows: ``(text,)``, in no order.

        Of keys that both tables have each side chooses others.
        """
        (first, *_), hashed = self._written(self.key), self._hash(self.key)
        values = {"step": step, "rest": step // 2 if self.found.part == "consumer" else 0}
        return Statement(_SAMPLE.format(first=first, table=self.table, hash=hashed), values)

    def sorted(self, sample: Sequence[str]) -> Statement:
        """Sort values of the first column of a key as the databases do. Rows: ``(text, how often)``."""
        kind = self.key[0][1]
        collation = ' COLLATE "C"' if kind.type == "text" else ""
        text = (kind.text or "{value}::text").format(value="s.x")
        return Statement(_SORTED.format(text=text, type=kind.type, collation=collation), {"sample": array_of(sample)})

    def digests(self, cut: Cut) -> Statement:
        """Digest the rows by bucket. Rows: ``(bucket, rows, mix of their hashes)``."""
        hashed = self._hash([*self.key, *self.columns])
        bucket = self._bucket(cut)
        text = _DIGEST.format(bucket=bucket, mix=self.mixing.mix, hash=hashed, table=self.table)
        return Statement(text, cut.values())

    def rows(self, cut: Cut, buckets: Collection[int] | None, *, by_index: bool) -> Statement:
        """Read the rows of buckets, or all, in the order of their buckets; ``by_index`` looks their ranges up.

        Columns: ``bucket``, ``k0``, … of the key and ``c0``, … of the columns, all of them texts.
        """
        kind, bucket, values = self.key[0][1], self._bucket(cut), cut.values()
        named = [*zip(self._written(self.key), _names("k", self.key), strict=True)]
        named += zip(self._written(self.columns), _names("c", self.columns), strict=True)
        rows, where = self.table, ""
        if buckets is not None:
            values["buckets"], where = array_of(map(str, buckets)), f" WHERE {bucket} = ANY (%(buckets)s::int8[])"
        if buckets is not None and by_index:
            ranges, with_first, with_last = cut.ranges(buckets)
            values |= {"firsts": array_of(each for each, _ in ranges), "ends": array_of(each for _, each in ranges)}
            key, open_ = self._ordered, ""
            for is_there, sign, at in ((with_first, "<", 0), (with_last, ">=", -1)):
                if is_there:
                    name = f"bound{at % 2}"
                    values[name] = cut.bounds[at]
                    open_ += f"\n UNION ALL SELECT * FROM {self.table} t WHERE {key} {sign} %({name})s::{kind.type}"
            rows = _RANGES.format(type=kind.type, table=self.table, key=key, open=open_)
        # By the key itself an index may give the order; it is that of the buckets too, where each of them is whole.
        order = self._ordered if cut.bounds and not cut.parts else "1"
        columns = ", ".join(f"{text} AS {name}" for text, name in named)
        return Statement(_ROWS.format(bucket=bucket, columns=columns, rows=rows, where=where, order=order), values)

    @property
    def _ordered(self) -> str:
        """The first column of the key, as an index has it: an integer isn't cast."""
        name, kind = self.key[0]
        return _column(name) if kind is INTEGER else kind.expression(_column(name))

    def _bucket(self, cut: Cut) -> str:
        if not cut.bounds:
            return "0::int8"
        first, type_ = self._values(self.key)[0], self.key[0][1].type
        bucket = f"width_bucket({first}, %(bounds)s::{type_}[])::int8"
        if not cut.parts:
            return bucket
        part = f"{self._hash(self.key)} & (%(masks)s::int8[])[{bucket} + 1]"
        return f"(({bucket} << 32) | ({part}))"

    def _hash(self, columns: Sequence[tuple[str, Kind]]) -> str:
        if self.mixing.xor:
            parts = ", ".join(kind.digested(_column(name)) for name, kind in columns)
            # Of a record it is a sum, in which two rows that swap a value may leave the same: so it is hashed again.
            return f"hash_record_extended(ROW(int8send(hash_record_extended(ROW({parts}), {_SEED}))), 0)"
        return f"('x' || substr(md5(ROW({', '.join(self._written(columns))})::text), 1, 16))::bit(64)::int8"

    @staticmethod
    def _values(columns: Sequence[tuple[str, Kind]]) -> list[str]:
        return [kind.expression(_column(name)) for name, kind in columns]

    @staticmethod
    def _written(columns: Sequence[tuple[str, Kind]]) -> list[str]:
        return [kind.written(_column(name)) for name, kind in columns]


def _column(name: str) -> str:
    return f"t.{identifier(name)}"


def _names(letter: str, columns: Sequence[object]) -> list[str]:
    return [f"{letter}{number}" for number in range(len(columns))]


def array_of(texts: Iterable[str]) -> str:
    """Return texts as PostgreSQL reads an array of any type."""
    escaped = (each.replace("\\", "\\\\").replace('"', '\\"') for each in texts)
    return "{{{}}}".format(",".join(f'"{each}"' for each in escaped))
