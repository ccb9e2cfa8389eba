"""Compare one pair of which Spark alone can read a side: a lake, a warehouse, another kind of database.

Each side becomes a frame of the judge's rows: what Spark reads is mapped column by column; what PostgreSQL has is read
over Arrow by the tasks, in a snapshot. Both are brought together by their ids in one shuffle. A source of Spark's has
no snapshot and no digests: every row is read, and the second look reads the source as a whole.

Processes send each other bytes, texts and numbers (`_wire`): Spark reads a time in the zone of its session, and
knows no bytes of a fixed length. Iceberg tables can be read without a jar (``format = "pyiceberg"``): PyIceberg lists
the files of a scan on the driver, and each task reads one with what PyIceberg knows of deletes and of older schemas.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from outbox.database.execute import execute
from outbox.errors import InvalidSettings, OutboxError, ReconcileError, SourceError
from outbox.reconcile import plan
from outbox.reconcile.compare import BATCH, Comparison, Side, compared, timed
from outbox.reconcile.job import Outcome, Pair, Part, Range
from outbox.reconcile.judge import Rules
from outbox.reconcile.pairing import AnyPairing, Backlog, FirstPass, rules_now, rules_of, side_of
from outbox.reconcile.rows import FOREIGN_ID
from outbox.reconcile.source import PostgresSide, insist, raise_bare
from outbox.reconcile.sql import PORTABLE
from outbox.reconcile.tables import sql
from outbox.reconcile.tables.columns import ARROW, FOREIGN, ordered, shaped
from outbox.reconcile.tables.declare import COLUMNS, NAMES, ForeignTable, TableColumn
from outbox.reconcile.tables.side import TableSide, census

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from outbox.reconcile.spark.engine import SparkEngine
    from outbox.reconcile.spark.session import Session

#: Rows of PostgreSQL's in a task.
_ROWS_OF_TASK = 400_000
#: A source of ours: Iceberg without Spark's own jar.
PYICEBERG = "pyiceberg"
_STRINGS_FOR_NAMES = re.compile(r"jdbc:mariadb:(?!.*ANSI_QUOTES)", re.IGNORECASE)
_CATALOG, _SNAPSHOT = "catalog", "snapshot_id"


@dataclass(slots=True)
class LakePairing(AnyPairing):
    """One pair, being compared on Spark; databases are read in snapshots."""

    def compare(self) -> FirstPass:
        """Compare, and return the findings.

        Raises:
            InvalidSettings: a table lacks a column, or an option of its source isn't there.
            SourceError: a database can't be read.
            ReconcileError: Spark can't read a source, or a row can't be judged; without what `options_env` names.
        """
        from outbox.reconcile.spark.engine import results, run, translating  # noqa: PLC0415 - an extra

        with self._without_secrets():
            opened, rules = self._spark, rules_of(self.job, self.pair, self.snapshots)
            tier, engine = self.choose(0)
            for part, table in self.job.by_spark.items():
                self.because(f"the {part}'s {table} is read as it is at the time, without a snapshot")
            self.progress.stage(f"{self.pair}: rows", 100)
            with timed(self.seconds, "compare"), translating():
                frame = judged(self._frame("producer"), self._frame("consumer"), rules)
                answers = run(opened, frame, lambda share: self.progress.done(int(share * 100)))
                self.progress.done(100)
            collected = results(answers)
        backlog = Backlog(self.job.max_findings)
        collected = replace(collected, findings=[backlog.take(each) for each in collected.findings])
        planned = self.planned(tier, engine, ranges=1, rows_read=collected.rows_read)
        result = self.result(planned, rules, collected, collected.lag(sampled=False))
        # All at once: however few they are, a source is read as a whole.
        return FirstPass(result, backlog, rules, self._again, batch=sys.maxsize)

    @property
    def _spark(self) -> Session:
        return cast("SparkEngine", self.engine).session

    def _frame(self, part: Part) -> DataFrame:
        if part in self.job.by_spark:
            return self._lake(part).frame()
        from outbox.reconcile.spark.session import refuse_loopback  # noqa: PLC0415 - an extra

        snapshot = self.snapshots.of[part]
        refuse_loopback(self._spark.master, snapshot.access.resolved().url)
        side = side_of(self.job, self.pair, part, snapshot)
        rows = census(side, snapshot.connection) if isinstance(side, TableSide) else plan.rows_of(part, snapshot)
        whole = self.job.window.range
        points: list[UUID] = []
        if rows > _ROWS_OF_TASK:
            statement = sql.sample(side.statement([whole]), PORTABLE, _ROWS_OF_TASK)
            points = sorted(id_ for (id_,) in execute(snapshot.connection, statement)[0])
        return of_database(self._spark.spark, side, plan.cut([whole], points))

    def _lake(self, part: Part) -> LakeSide:
        whole = self.job.window.range
        return LakeSide(self._spark, part, self.job.by_spark[part], self.pair, whole, lambda: self.progress.done(0))

    def _again(self, ids: list[UUID]) -> tuple[pa.Table, Counter[Outcome]]:
        """Read messages again (`compare.SecondRead`)."""

        def read() -> tuple[pa.Table, Counter[Outcome]]:
            rules = rules_now(self.job, self.pair)
            return Comparison(self._side_now("producer"), self._side_now("consumer"), rules).again(ids)

        with self._without_secrets():
            return insist(read, waiting=lambda: self.progress.done(0))

    def _side_now(self, part: Part) -> Side:
        if part in self.job.by_spark:
            return self._lake(part)
        return _InBatches(side_of(self.job, self.pair, part, None), lambda: self.progress.done(0))

    @contextmanager
    def _without_secrets(self) -> Iterator[None]:
        """Leave secrets out of what goes wrong in the block."""
        secrets = [value for table in self.job.by_spark.values() for value in table.secrets().values()]
        try:
            yield
        except OutboxError as error:
            text = str(error)
            for secret in sorted(filter(None, secrets), key=len, reverse=True):
                text = text.replace(secret, "***")
            if text == str(error):
                raise
            raise_bare(ReconcileError(text))


@dataclass(frozen=True, slots=True)
class LakeSide:
    """One side of a pair that Spark alone can read, as it is at the time. ``waiting`` is called while it is read."""

    session: Session
    part: Part
    table: ForeignTable
    pair: Pair
    within: Range
    waiting: Callable[[], None]

    def frame(self) -> DataFrame:
        """Return its rows."""
        return of_table(self.session.spark, self.part, self.table, self.pair, self.within)

    def read(self, ranges: Sequence[Range]) -> pa.Table:
        """Return the rows of single ids, sorted by id.

        Raises:
            InvalidSettings: an id is there twice.
            ReconcileError: Spark can't read the source.
        """
        from outbox.reconcile.spark.engine import run, translating  # noqa: PLC0415 - an extra

        with translating():
            frame = only(self.frame(), self.part, [each.first.bytes for each in ranges])
            rows = run(self.session, frame, lambda _: self.waiting())
        return ordered(unwired(rows, self.part), f"the {self.part}'s {self.table}")


@dataclass(frozen=True, slots=True)
class _InBatches:
    """A side in PostgreSQL, which is asked for so many ids at once only. ``waiting`` is called in between."""

    side: PostgresSide
    waiting: Callable[[], None]

    def read(self, ranges: Sequence[Range]) -> pa.Table:
        """Return the rows of the ranges, sorted by id."""
        tables = [self.side.schema.empty_table()]
        for start in range(0, len(ranges), BATCH):
            tables.append(self.side.read(ranges[start : start + BATCH]))
            self.waiting()
        return pa.concat_tables(tables)


# --- frames of the judge's rows --------------------------------------------------------------------------


def _wire(part: Part) -> pa.Schema:
    """Return the columns of a side as they travel."""
    return pa.schema([field.with_type(_wired(field.type)) for field in FOREIGN[part]])


def _wired(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.int64()
    return pa.binary() if pa.types.is_fixed_size_binary(kind) else kind


def _sent(table: pa.Table, part: Part) -> Iterator[pa.RecordBatch]:
    """Yield rows of a side, ours or a foreign one, as they travel."""
    if FOREIGN_ID.name not in table.column_names:
        table = table.append_column(FOREIGN_ID, pa.nulls(table.num_rows, FOREIGN_ID.type))
    schema = _wire(part)
    yield from table.select(schema.names).cast(schema).to_batches(max_chunksize=50_000)


def unwired(table: pa.Table, part: Part) -> pa.Table:
    """Return rows that travelled as the judge has them (`columns.FOREIGN`), in no order."""
    return table.select(FOREIGN[part].names).cast(FOREIGN[part])


def judged(producer: DataFrame, consumer: DataFrame, rules: Rules) -> DataFrame:
    """Return what compares two frames of judge's rows and gives the answers (see `spark.engine.results`)."""
    from outbox.reconcile.spark.engine import ANSWER, answers  # noqa: PLC0415 - an extra
    from outbox.reconcile.spark.frames import brought_together  # noqa: PLC0415 - an extra

    def judge(ours: pa.Table, theirs: pa.Table) -> pa.Table:
        sent = ordered(unwired(ours, "producer"), "the producer's table")
        known = ordered(unwired(theirs, "consumer"), "the consumer's table")
        return pa.Table.from_batches(answers(compared(sent, known, rules)))

    return brought_together(producer, consumer, judge, ANSWER)


def only(frame: DataFrame, part: Part, keys: Sequence[bytes]) -> DataFrame:
    """Return the rows of a frame with these ids (16 bytes)."""
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 - an extra

    ids = pa.array(keys, pa.binary())

    def chosen(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch.filter(pc.is_in(batch["id"], value_set=ids))

    return frame.mapInArrow(chosen, from_arrow_schema(_wire(part)))


def of_database(spark: SparkSession, side: PostgresSide, ranges: Sequence[Range]) -> DataFrame:
    """Return the rows of a side in PostgreSQL; each range is read by a task."""
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 - an extra

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch["id"].to_pylist():
                yield from _sent(side.read([ranges[number]]), side.part)

    tasks = spark.range(0, len(ranges), 1, len(ranges))
    return tasks.mapInArrow(read, from_arrow_schema(_wire(side.part)))


# --- what Spark reads ------------------------------------------------------------------------------------


def of_table(spark: SparkSession, part: Part, table: ForeignTable, pair: Pair, within: Range) -> DataFrame:
    """Return the rows that a foreign table has of a pair, whose ids lie in a range.

    Raises:
        InvalidSettings: the source can't be found, a column isn't there, or is of a type that can't be used.
        SourceError: a database can't be reached by JDBC.
    """
    from pyspark.errors import AnalysisException  # noqa: PLC0415 - an extra
    from pyspark.sql import functions  # noqa: PLC0415 - an extra
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 - an extra

    from outbox.reconcile.spark.session import cause  # noqa: PLC0415 - an extra

    # What has no zone is in UTC, in whatever zone the application is.
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    try:
        frame = _loaded(spark, table)
        own = {name: functions.expr(column) for name, column in table.columns.items()}
        for name in NAMES[part]:
            if name in own:
                frame = frame.where(own[name].cast("string") == getattr(pair, name))
        kinds = dict(frame.select(*(column.alias(name) for name, column in own.items())).dtypes)
        columns = [
            _cast(own[column.name], column, kinds[column.name], part, table).alias(column.name)
            for column in COLUMNS[part]
            if column.name in own
        ]
        mapped = frame.select(*columns)
    except AnalysisException as error:
        kind = SourceError if "FAILED_JDBC" in str(error) else InvalidSettings
        raise kind(f"{part}.tables ({table}): {cause(error)}") from None
    states, called = dict(table.states), f"the {part}'s {table}"

    def shape(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                yield from _sent(_inside(shaped(pa.Table.from_batches([batch]), part, states, called), within), part)

    return mapped.mapInArrow(shape, from_arrow_schema(_wire(part)))


def _inside(rows: pa.Table, within: Range) -> pa.Table:
    first, end = (None if edge is None else pa.scalar(edge.bytes, pa.binary()) for edge in within)
    ids = rows["id"].cast(pa.binary())
    inside = pc.greater_equal(ids, first)
    return rows.filter(inside if end is None else pc.and_(inside, pc.less(ids, end)))


def _cast(column: Column, known: TableColumn, kind: str, part: Part, table: ForeignTable) -> Column:
    """Return a column with the type that `columns.shaped` takes; times as microseconds since 1970."""
    from pyspark.sql import functions  # noqa: PLC0415 - an extra

    if known.name in {"id", "digest"}:
        return column if kind == "binary" else column.cast("string")
    if known.words:
        return column.cast("string")
    if pa.types.is_timestamp(ARROW[known.name]):
        if not kind.startswith("timestamp") and kind != "date":
            raise InvalidSettings(
                f"{part}.tables ({table}): columns.{known.name} is {kind}, not a timestamp; convert it, as in "
                f'"timestamp_millis({table.columns[known.name]})"'
            )
        return functions.unix_micros(column.cast("timestamp"))
    return column.cast(known.types[-1])


def _loaded(spark: SparkSession, table: ForeignTable) -> DataFrame:
    options = {**table.options, **table.secrets()}
    if table.format == PYICEBERG:
        return _of_iceberg(spark, table, options)
    if _STRINGS_FOR_NAMES.match(options.get("url", "")):
        raise InvalidSettings(
            f"tables ({table}): of a URL that begins with jdbc:mariadb Spark quotes names as MariaDB does strings, so "
            "that each row has the names of its columns in it; write jdbc:mysql://…?permitMysqlScheme instead"
        )
    return spark.read.format(table.format or "").options(**options).load(table.path)


def _of_iceberg(spark: SparkSession, table: ForeignTable, options: Mapping[str, str]) -> DataFrame:
    """Return the rows of an Iceberg table, as of its newest snapshot unless the options name one.

    Other options are properties of its catalog.
    """
    try:
        from pyiceberg.catalog import load_catalog  # noqa: PLC0415 - of the user's own
        from pyiceberg.exceptions import NoSuchTableError  # noqa: PLC0415 - of the user's own
        from pyiceberg.expressions import AlwaysTrue  # noqa: PLC0415 - of the user's own
        from pyiceberg.io.pyarrow import ArrowScan  # noqa: PLC0415 - of the user's own
    except ImportError:
        raise ReconcileError("format pyiceberg needs PyIceberg; mend: pip install 'pyiceberg[pyarrow]'") from None
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 - an extra

    properties: dict[str, Any] = dict(options)
    snapshot, named = properties.pop(_SNAPSHOT, None), properties.pop(_CATALOG, "default")
    try:
        found = load_catalog(named, **properties).load_table(table.path or "")
    except NoSuchTableError as error:
        raise InvalidSettings(f"tables ({table}): {error}") from None
    # A superset of the used columns: an expression has the names of its columns in it.
    used = " ".join(table.columns.values()).lower()
    names = [name for name in found.schema().column_names if name.lower() in used and "." not in name]
    scan = found.scan(selected_fields=tuple(names or ["*"]), snapshot_id=snapshot and int(snapshot))
    files, metadata, io, schema = list(scan.plan_files()), found.metadata, found.io, scan.projection()
    arrow = pa.schema([field.with_type(_plain(field.type)) for field in schema.as_arrow()])

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch["id"].to_pylist():
                rows = ArrowScan(metadata, io, schema, AlwaysTrue()).to_table([files[number]])
                yield from _storage(rows).cast(arrow).to_batches(max_chunksize=50_000)

    tasks = spark.range(0, len(files), 1, max(len(files), 1))
    return tasks.mapInArrow(read, from_arrow_schema(arrow))


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the type as Spark can have it, which knows neither uuids nor large texts."""
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_fixed_size_binary(kind) or pa.types.is_large_binary(kind):
        return pa.binary()
    return pa.string() if pa.types.is_large_string(kind) else kind


def _storage(rows: pa.Table) -> pa.Table:
    columns = [
        pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
        if isinstance(column.type, pa.BaseExtensionType)
        else column
        for column in rows.columns
    ]
    return pa.table(columns, names=rows.column_names)
