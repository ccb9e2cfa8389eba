"""The comparison of two tables: what is digested, what is read, and what of it differs (`outbox.reconcile.columns`)."""

from __future__ import annotations

import datetime as dt
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from outbox.database.execute import Statement, execute
from outbox.database.sql import plan_by_index
from outbox.destination import Destination, whole_at
from outbox.errors import InvalidSettings, OutboxError, SourceError, SourceLost
from outbox.message.masking import NAMES
from outbox.reconcile import sql
from outbox.reconcile.columns import TablesJob
from outbox.reconcile.columns.kinds import JSON, Tolerance, equal_values
from outbox.reconcile.columns.tables import ColumnPair, Cut, KeyedTable, find_table
from outbox.reconcile.digest import mixing_of
from outbox.reconcile.job import Access, NoProgress, Part, Progress, described, hidden
from outbox.reconcile.rows import Array
from outbox.reconcile.source import (
    SessionSettings,
    Snapshots,
    cancel,
    failure_of,
    insist,
    raise_bare,
    reaching,
    rendered,
    snapshot_cursor,
    snapshots_of,
    storage_of,
)
from outbox.text import MASK, counted, summary_of

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")

#: Tables of fewer rows are read as they are. A range should have so many, and there are so many ranges at most; keys of
#: variable length are cut at fewer places.
_FEW_ROWS, _ROWS_OF_RANGE, _MOST_RANGES, _MOST_OF_VARIABLE = 20_000, 100, 65_536, 128
#: Ranges are looked up by an index where they have less than this share of the rows.
_BY_INDEX = 0.125
#: Behind the last of all buckets.
_END = 2**63 - 1
#: How often (seconds) a reader that isn't needed any more is cancelled until it ends.
_CANCEL_EVERY = 0.2


@dataclass(frozen=True, slots=True)
class ComparedColumn:
    """A column of both tables, what it is compared as, and in how many rows it differs."""

    pairing: ColumnPair
    tolerance: Tolerance | None
    masked: bool
    differ: int = 0

    @property
    def name(self) -> str:
        """As people read it: ``left``, or ``left:right`` where the tables call it differently."""
        return self.pairing.name


@dataclass(slots=True)
class TablesResult:
    """What comparing two tables comes to.

    ``differ`` are rows of both tables of which a column differs. ``sample`` has the first differences of each column,
    and the first rows of one table alone (`difference_schema`). ``seconds`` are by stage.
    ``uncompared`` are the columns that ``left`` or ``right`` alone has, where none were named.
    """

    job: TablesJob
    begun_at: dt.datetime
    key: Sequence[ComparedColumn] = ()
    columns: Sequence[ComparedColumn] = ()
    rows: dict[Part, int] = field(default_factory=dict)
    only: Counter[str] = field(default_factory=Counter)
    differ: int = 0
    ranges: int = 0
    differing: int = 0
    rows_read: int = 0
    sample: pa.Table = None
    seconds: dict[str, float] = field(default_factory=dict)
    uncompared: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def compared(self) -> int:
        """How many rows both tables have."""
        return self.rows["producer"] - self.only["only_left"]

    @property
    def equal(self) -> bool:
        """Do both tables have the same rows?"""
        return not (self.differ or self.only.total())

    @property
    def sentence(self) -> str:
        """The verdict for people."""
        found = (
            (self.differ, "in which columns differ"),
            (self.only["only_left"], "of the left alone"),
            (self.only["only_right"], "of the right alone"),
        )
        differs = "; ".join(f"{counted(number, 'row')} {what}" for number, what in found if number)
        return differs or ("equal in what both have" if any(self.uncompared.values()) else "equal")

    @property
    def left_out(self) -> str:
        """The columns that one table alone has, for people; empty if there are none."""
        found = [f"{', '.join(names)} ({side} alone)" for side, names in self.uncompared.items() if names]
        return f"not compared: {', '.join(found)}" if found else ""

    def to_arrow(self) -> pa.Table:
        """Return the sample as a table."""
        return self.sample

    def to_pandas(self) -> pd.DataFrame:
        """Return the sample as a frame of pandas."""
        return self.sample.to_pandas()


def difference_schema(key: Sequence[str]) -> pa.Schema:
    """Return the columns of differences: the key by its columns, the kind, the column that differs, both values.

    All are texts, as PostgreSQL writes them in UTC. The kind is ``differs``; or ``only_left`` or ``only_right`` of a
    row that one table alone has, without a column and values.
    """
    text = pa.string()
    fields = {"key": pa.struct(dict.fromkeys(key, text).items()), "kind": text}
    return pa.schema(list({**fields, "column": text, "left": text, "right": text}.items()))


def compare_tables(
    job: TablesJob, progress: Progress | None = None, *, parquet: Destination | None = None
) -> TablesResult:
    """Compare two tables; ``parquet`` gets all differences, as a file that appears when it is whole.

    A database that is lost over it is read again, from the beginning.

    Raises:
        InvalidSettings: a table or column isn't there, types can't be compared, a key is NULL or there twice.
        SourceError: a database can't be read.
        OSError: the file can't be written.
    """
    hears: Progress = progress or NoProgress()
    waiting = partial(hears.done, 0)
    return insist(
        partial(_compared, job, hears, parquet),
        waiting=waiting,
        lost=lambda error: hears.say(f"{error}; the comparison is begun again"),
    )


def _compared(job: TablesJob, progress: Progress, parquet: Destination | None) -> TablesResult:
    result, began = TablesResult(job, dt.datetime.now(dt.UTC)), time.monotonic()
    databases: dict[Part, Access] = {"producer": job.producer, "consumer": job.consumer}
    settings = SessionSettings("outbox reconcile tables", job.max_time)
    with ExitStack() as stack:
        taken = snapshots_of(databases, waiting=partial(progress.done, 0), settings=settings, foreign=databases.keys())
        snapshots = stack.enter_context(taken)
        for each in snapshots.of.values():
            with reaching(each.access):
                execute(each.connection, sql.limits(job.max_time))
        progress.stage("keys", None)
        tables = _tables(job, snapshots, result)
        stack.enter_context(_without_values([*result.key, *result.columns]))
        schema = difference_schema([each.name for each in result.key])
        found = _Differences(result, schema, stack, parquet)
        shown = MASK if any(each.masked for each in result.key) else None
        _of_both(tables, lambda table: table.check_keys(shown))
        cut, buckets, by_index = _plan(tables, result, progress)
        result.seconds["digests"] = time.monotonic() - began
        if buckets is None or buckets:
            progress.stage("rows", result.rows_read)
            read = [
                stack.enter_context(
                    _ahead(_batches(table, table.rows(cut, buckets, by_index=of_index), settings, of_index))
                )
                for table, of_index in zip(tables, by_index, strict=True)
            ]
            result.rows_read = 0
            for left, right in aligned(*read):
                found.judge(left, right)
                progress.done(result.rows_read)
        found.end()
    result.seconds["rows"] = time.monotonic() - began - result.seconds["digests"]
    return result


@contextmanager
def _without_values(columns: Sequence[ComparedColumn]) -> Iterator[None]:
    """Take what a database quotes out of its errors, where a column is masked: a value that can't be cast is quoted."""
    try:
        yield
    except SourceError as error:
        if isinstance(error, SourceLost) or not any(each.masked for each in columns):
            raise
        raise_bare(SourceError(re.sub(r'"[^"]*("|\Z)', f'"{MASK}"', str(error))))


# --- what is compared ------------------------------------------------------------------------------------


def _tables(job: TablesJob, snapshots: Snapshots, result: TablesResult) -> list[KeyedTable]:
    """Look up both tables; the columns of the result are known then.

    Raises:
        InvalidSettings: as `compare_tables`.
    """
    left = find_table("producer", snapshots.producer, job.left)
    right = find_table("consumer", snapshots.consumer, job.right)
    key = [ColumnPair.of(text, left, right, is_key=True) for text in job.key]
    if job.columns:
        columns = [ColumnPair.of(text, left, right) for text in job.columns]
    else:
        own, theirs = (tuple(each.names[at] for each in key) for at in (0, 1))
        both = [name for name in left.columns if name in right.columns and name not in own]
        columns = [ColumnPair.named((name, name), left, right) for name in both]
        result.uncompared = {
            "left": [name for name in left.columns if name not in {*both, *own}],
            "right": [name for name in right.columns if name not in {*both, *theirs}],
        }
    amounts = dict(text.split("=", 1) for text in job.tolerances)
    known = {name for each in (*key, *columns) for name in each.names}
    for what, names in (("tolerances", amounts), ("masks", job.masks), ("shown", job.shown)):
        if unknown := [name for name in names if name not in known]:
            raise InvalidSettings(f"{what}: {unknown[0]} is none of the compared columns: {', '.join(sorted(known))}")
    if strict := [name for each in key for name in each.names if name in amounts]:
        raise InvalidSettings(f"tolerances: {strict[0]} is of the key, by which rows are found; leave it out")

    def compared(pairing: ColumnPair) -> ComparedColumn:
        name = next((name for name in pairing.names if name in amounts), "")
        tolerance = Tolerance.parse(name, amounts[name], pairing.kinds[0].measure) if name else None
        masked = any(name in job.masks or (NAMES.masks(name) and name not in job.shown) for name in pairing.names)
        return ComparedColumn(pairing, tolerance, masked)

    result.key, result.columns = [compared(each) for each in key], [compared(each) for each in columns]
    _check_encodings(snapshots, key)
    mixing = mixing_of(snapshots)
    return [
        KeyedTable(
            table,
            [(each.names[at], each.kinds[at]) for each in key],
            [(each.names[at], each.kinds[at]) for each in columns],
            mixing,
        )
        for at, table in enumerate((left, right))
    ]


def _check_encodings(snapshots: Snapshots, key: Sequence[ColumnPair]) -> None:
    """See that both databases order texts in one way: by their bytes, which depend on the encoding."""
    if not any(each.kinds[0].type == "text" for each in key):
        return
    found = []
    for each in snapshots.of.values():
        with reaching(each.access):
            found += [str(row[0]) for row in execute(each.connection, Statement("SHOW server_encoding"))[0]]
    if len(set(found)) > 1:
        raise InvalidSettings(
            f"the databases have the encodings {' and '.join(found)}, in which texts have another order; choose a "
            "key of another type"
        )


def _of_both(tables: Sequence[KeyedTable], act: Callable[[KeyedTable], T]) -> list[T]:
    """Do it to both tables at once: each has a connection of its own."""
    with ThreadPoolExecutor(1, thread_name_prefix="columns") as pool:
        first = pool.submit(act, tables[0])
        second = act(tables[1])
        return [first.result(), second]


def _plan(
    tables: Sequence[KeyedTable], result: TablesResult, progress: Progress
) -> tuple[Cut, Collection[int] | None, list[bool]]:
    """Return how the tables are cut, which buckets are read (None: all), and of which table by an index."""
    numbers = [int(rows[0][0]) for rows in _of_both(tables, lambda table: table.ask(table.count()))]
    result.rows = dict(zip(("producer", "consumer"), numbers, strict=True))
    result.rows_read = sum(numbers)
    if max(numbers) < _FEW_ROWS:
        return Cut(), None, [False, False]
    progress.stage("digests", None)
    cut = _cut(tables, max(numbers))
    result.ranges = max(len(cut.bounds) + 1, sum(cut.parts))
    digests = [
        {int(bucket): each for bucket, *each in rows}
        for rows in _of_both(tables, lambda table: table.ask(table.digests(cut)))
    ]
    ours, theirs = digests
    differing = [bucket for bucket in ours.keys() | theirs.keys() if ours.get(bucket) != theirs.get(bucket)]
    result.differing = len(differing)
    result.rows_read = sum(each[bucket][0] for each in digests for bucket in differing if bucket in each)
    touched = {cut.range_of(bucket) for bucket in differing}
    in_touched = [sum(row[0] for bucket, row in each.items() if cut.range_of(bucket) in touched) for each in digests]
    progress.say(
        f"{len(differing):,} of {counted(result.ranges, 'range')} differ; {counted(result.rows_read, 'row')} are read"
    )
    by_index = [
        table.has_index and rows < _BY_INDEX * number
        for table, rows, number in zip(tables, in_touched, numbers, strict=True)
    ]
    return cut, differing, by_index


def _cut(tables: Sequence[KeyedTable], rows: int) -> Cut:
    ranges = max(1, min(rows // _ROWS_OF_RANGE, _MOST_RANGES))
    # Both tables are sampled, so that no range of either is large; each gives half of the places.
    step = max(1, 2 * rows // ranges)
    found = _of_both(tables, lambda table: table.ask(table.sample(step)))
    sample = tables[0].ask(tables[0].sorted([str(row[0]) for table in found for row in table]))
    is_variable = tables[0].key[0][1].type in {"text", "numeric", "bytea"}
    return Cut.of([(str(text), int(number)) for text, number in sample], _MOST_OF_VARIABLE if is_variable else ranges)


# --- what is read ----------------------------------------------------------------------------------------


def _batches(
    table: KeyedTable, statement: Statement, settings: SessionSettings, by_index: bool
) -> Generator[pa.Table, None, None]:
    """Yield the rows of a statement in the snapshot of a table, as they come.

    Raises:
        SourceLost: the connection was lost, or the snapshot is gone.
        SourceError: they can't be read.
    """
    snapshot = table.found.snapshot
    access, reached = snapshot.access.resolved(), list[bool]()
    first = [settings.statement(), sql.limits(settings.seconds), *([plan_by_index()] if by_index else [])]
    try:
        with snapshot_cursor(access, snapshot.name, first, lambda: reached.append(True)) as cursor:
            cursor.execute(rendered(statement))
            for batch in _received(cursor, access.url):
                rows = pa.Table.from_batches([batch])
                texts = [storage_of(column).cast(pa.string()) for column in rows.columns[1:]]
                yield pa.table([rows["bucket"].cast(pa.int64()), *texts], names=rows.column_names)
    except OutboxError:
        raise
    except Exception as error:
        raise_bare(failure_of(error, access, connected=bool(reached)))


def _received(cursor: Any, url: str) -> Iterator[pa.RecordBatch]:
    try:
        yield from cursor.fetch_record_batch()
    except OSError as error:
        # It is Arrow's, without a state: whether the connection is lost, the connection tells.
        kind = SourceError
        try:
            cursor.connection.rollback()
            cursor.execute("SELECT 1")
        except Exception:  # the first error is the one to tell
            kind = SourceLost
        raise_bare(kind(f"{described(url)} can't be read: {hidden(summary_of(error), url)}"))


@contextmanager
def _ahead(rows: Generator[pa.Table, None, None]) -> Iterator[Callable[[], pa.Table | None]]:
    """Yield what returns the next of some tables, None behind the last; the one after it is read meanwhile."""
    with ThreadPoolExecutor(1, thread_name_prefix="columns") as pool:
        thread = pool.submit(get_ident).result()
        ahead: list[Future[pa.Table | None]] = [pool.submit(next, rows, None)]

        def following() -> pa.Table | None:
            found = ahead[0].result()
            ahead[:] = [] if found is None else [pool.submit(next, rows, None)]
            return found

        try:
            yield following
        finally:
            while wait(ahead, _CANCEL_EVERY).not_done:
                cancel([thread])
            pool.submit(rows.close).result()


def aligned(
    left: Callable[[], pa.Table | None], right: Callable[[], pa.Table | None]
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Yield the rows of both tables by shares: each share has all rows of its buckets, by whose order they come."""
    tables, held, last = (left, right), [list[pa.Table](), list[pa.Table]()], [-1, -1]
    while min(last) < _END:
        at = last.index(min(last))
        batch = tables[at]()
        if batch is None:
            last[at] = _END
        elif batch.num_rows:
            held[at].append(batch)
            last[at] = batch["bucket"][-1].as_py()
        ours, theirs = (_taken(each, min(last)) for each in held)
        if ours.num_rows or theirs.num_rows:
            yield ours, theirs


def _taken(held: list[pa.Table], end: int) -> pa.Table:
    """Take the rows of buckets before one out of those that are held."""
    if not held:
        return pa.table({})
    rows = pa.concat_tables(held)
    number = int(np.searchsorted(rows["bucket"].to_numpy(), end))
    held[:] = [rows.slice(number)] if number < rows.num_rows else []
    return rows.slice(0, number)


# --- what differs ----------------------------------------------------------------------------------------


class _Differences:
    """Judges shares of both tables, counts what differs, keeps the sample, and writes the file if there is one."""

    def __init__(self, result: TablesResult, schema: pa.Schema, stack: ExitStack, parquet: Destination | None) -> None:
        self._result, self._schema = result, schema
        self._sample: list[pa.Table] = [schema.empty_table()]
        self._numbers: Counter[tuple[str, str | None]] = Counter()
        self._keys = [f"k{number}" for number in range(len(result.key))]
        names = [*self._keys, *(f"c{number}" for number in range(len(result.columns)))]
        self._empty = pa.schema([(name, pa.string()) for name in names]).empty_table()
        self._writer: Any = None
        if parquet is not None:
            import pyarrow.parquet as pq  # noqa: PLC0415 - of this form alone

            file = stack.enter_context(whole_at(parquet))
            self._writer = stack.enter_context(pq.ParquetWriter(file, schema, compression="zstd"))

    def judge(self, left: pa.Table, right: pa.Table) -> None:
        """Judge the rows of both tables of some ranges."""
        result = self._result
        result.rows_read += left.num_rows + right.num_rows
        ours, theirs = (
            (each.drop_columns("bucket") if each.num_columns else self._empty).append_column(
                "here", pa.repeat(True, each.num_rows)
            )
            for each in (left, right)
        )
        joined = ours.join(
            theirs, self._keys, join_type="full outer", left_suffix=".l", right_suffix=".r", use_threads=False
        )
        is_left, is_right = pc.is_valid(joined["here.l"]), pc.is_valid(joined["here.r"])
        for kind, alone in (("only_left", pc.invert(is_right)), ("only_right", pc.invert(is_left))):
            rows = joined.filter(alone)
            result.only[kind] += rows.num_rows
            self._add(kind, None, rows)
        both = joined.filter(pc.and_(is_left, is_right))
        differs = np.zeros(both.num_rows, bool)
        for number, column in enumerate(result.columns):
            rows = _unequal(both, number, column)
            differs[rows] = True
            values = f"c{number}.l", f"c{number}.r"
            self._add("differs", column, both.select([*self._keys, *values]).take(pa.array(rows)), *values)
        result.differ += int(differs.sum())

    def _add(self, kind: str, column: ComparedColumn | None, rows: pa.Table, *values: str) -> None:
        number = rows.num_rows
        if not number:
            return
        nothing, masked = pa.nulls(number, pa.string()), pa.repeat(MASK, number)
        keys = [
            masked if each.masked else rows[key].combine_chunks()
            for key, each in zip(self._keys, self._result.key, strict=True)
        ]
        shown, name = [nothing, nothing], nothing
        if column is not None:
            shown = [masked if column.masked else rows[each] for each in values]
            name = pa.repeat(column.name, number)
        key = pa.StructArray.from_arrays(keys, names=[each.name for each in self._result.key])
        table = pa.table([key, pa.repeat(kind, number), name, *shown], schema=self._schema)
        known_as = kind, None if column is None else column.name
        if (left_over := self._result.job.sample - self._numbers[known_as]) > 0:
            # Taken, not sliced: a slice keeps all that it was cut from.
            self._sample.append(table.take(pa.array(range(min(left_over, number)))))
        self._numbers[known_as] += number
        if self._writer is not None:
            self._writer.write_table(table)

    def end(self) -> None:
        """Put the counts and the sample into the result."""
        result = self._result
        result.sample = pa.concat_tables(self._sample).combine_chunks()
        result.columns = [replace(each, differ=self._numbers["differs", each.name]) for each in result.columns]


def _unequal(rows: pa.Table, number: int, column: ComparedColumn) -> Array:
    """Return which rows differ in a column, of those that both tables have."""
    ours, theirs = rows[f"c{number}.l"], rows[f"c{number}.r"]
    other = pc.fill_null(pc.not_equal(ours, theirs), False)
    found: Array = np.flatnonzero(pc.or_(other, pc.xor(pc.is_null(ours), pc.is_null(theirs))).to_numpy())
    kind, tolerance = column.pairing.kinds[0], column.tolerance
    if not len(found) or (tolerance is None and kind is not JSON):
        return found
    one, another = (values.take(pa.array(found)).to_pylist() for values in (ours, theirs))
    differing: Array = found[~equal_values(kind, tolerance, one, another)]
    return differing
