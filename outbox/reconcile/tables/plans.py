"""Spark plans of the tables' comparison: frames of the judge's rows from any source, brought together by their ids.

Processes send each other bytes, texts and numbers (`_wire`): Spark reads a time in the zone of its session, and
knows no bytes of a fixed length. Iceberg tables can be read without a jar (``format = "pyiceberg"``): PyIceberg lists
the files of a scan on the driver, and each task reads one with what PyIceberg knows of deletes and of older schemas.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from outbox.errors import InvalidSettings, ReconcileError, SourceError
from outbox.reconcile.compare import compared
from outbox.reconcile.job import Pair, Part, Range
from outbox.reconcile.judge import Rules
from outbox.reconcile.rows import FOREIGN_ID
from outbox.reconcile.source import PostgresSide
from outbox.reconcile.tables.columns import COLUMNS, FOREIGN, NAMES, TableColumn, ordered, shaped
from outbox.reconcile.tables.declare import ForeignTable

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

#: A source of ours: Iceberg without Spark's own jar.
PYICEBERG = "pyiceberg"
_STRINGS_FOR_NAMES = re.compile(r"jdbc:mariadb:(?!.*ANSI_QUOTES)", re.IGNORECASE)
_CATALOG, _SNAPSHOT = "catalog", "snapshot_id"


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
    """Return what compares two frames of judge's rows and gives the answers (see `spark.tasks.results`)."""
    from pyspark.sql import functions  # noqa: PLC0415 - an extra

    from outbox.reconcile.spark.tasks import ANSWER, answers  # noqa: PLC0415 - an extra

    number = int(producer.sparkSession.conf.get("spark.sql.shuffle.partitions") or 1)
    by = functions.pmod(functions.xxhash64("id"), functions.lit(number)).alias("share")

    def judge(ours: pa.Table, theirs: pa.Table) -> pa.Table:
        sent = ordered(unwired(ours, "producer"), "the producer's table")
        known = ordered(unwired(theirs, "consumer"), "the consumer's table")
        return pa.Table.from_batches(answers(compared(sent, known, rules)))

    return (
        producer.withColumn("share", by)
        .groupBy("share")
        .cogroup(consumer.withColumn("share", by).groupBy("share"))
        .applyInArrow(judge, ANSWER)
    )


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

    from outbox.reconcile.spark.java import cause  # noqa: PLC0415 - an extra

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
    if pa.types.is_timestamp(known.arrow):
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
