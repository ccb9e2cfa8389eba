"""Comparisons on Spark: ids that tasks read by ranges, sources that Spark alone can read, and frames of any origin.

Where both sides are in PostgreSQL each executor reads both sides of its ranges itself, and nothing is shuffled. Where
Spark alone can read a side (a lake, a warehouse, another kind of database) each side becomes a frame of the judge's
rows: what Spark reads is mapped column by column, what PostgreSQL has is read over Arrow by the tasks, in a snapshot.
Rows of the same id are brought together by one shuffle, as are those of two frames that `compare` is given: they come
from wherever Spark reads, and have the columns `PRODUCER_COLUMNS` and `CONSUMER_COLUMNS` of `outbox.reconcile.tables`.

Processes send each other bytes, texts and numbers (`_wire`), so that it works through Spark Connect too: Spark reads a
time in the zone of its session, and knows no bytes of a fixed length. Whatever else is needed, an executor imports. A
source that can't be read is an answer, not an exception: Spark would try it four times and log the Java trace of each.

Iceberg tables can be read without a jar (``format = "pyiceberg"``): PyIceberg lists the files of a scan on the driver,
and each task reads one with what PyIceberg knows of deletes and of older schemas.
"""

from __future__ import annotations

import datetime as dt
import itertools
import pickle
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from outbox.errors import InvalidSettings, ReconcileError, SourceError
from outbox.reconcile.foreign import ARROW, FOREIGN, ordered, shaped
from outbox.reconcile.job import KINDS, Outcome, Pair, Part, Range, Spark
from outbox.reconcile.report import FINDINGS, named
from outbox.reconcile.rows import FOREIGN_ID, Both, Collected, Comparison, Rules, Side, compared, judge
from outbox.reconcile.source import PostgresSide, storage_of
from outbox.reconcile.spark.session import Session, cause, refuse_loopback, run, session, translating
from outbox.reconcile.tables import (
    COLUMNS,
    CONSUMER_COLUMNS,
    INTEGERS,
    NAMES,
    PRODUCER_COLUMNS,
    ForeignTable,
    TableColumn,
)
from outbox.text import duration

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

# Each partition costs a fifth of a second in this process, which has few cores; so many for each of them even out
# what one has to do more than another. On a cluster each task is one: how many cores it will have isn't known yet.
_OF_CORE = 4


class SparkEngine(ExitStack):
    """Runs tasks on Spark, which starts at the latest when there is something to run, and ends with the block if it is
    one of ours.

    ``workers`` tasks run at once where Spark is started in this process; on a cluster as many as the application has
    cores. Of several ``jobs`` at once each has ``workers`` tasks at most, wherever they run: each task has a session of
    either database, and how many these have in all is bounded.
    """

    def __init__(self, options: Spark, workers: int, jobs: int | None = None) -> None:
        super().__init__()
        self._options = options
        self._workers = workers
        self._jobs = jobs

    @cached_property
    def session(self) -> Session:
        """The session; it is opened at first use."""
        return self.enter_context(session(self._options, self._workers * (self._jobs or 1)))

    def start(self, waiting: Callable[[], None]) -> None:
        """Start Spark, and wait until it has run a task: a cluster may have no free place, or no Python with libraries.

        ``waiting`` is called now and then; what it raises ends the wait.

        Raises:
            ReconcileError: Spark doesn't start, fails, or has run nothing for as long as the options allow.
        """
        opened, most = self.session, self._options.max_wait
        until = time.monotonic() + most

        def wait(_: float) -> None:
            waiting()
            if time.monotonic() > until:
                raise ReconcileError(
                    f"Spark on {opened.master} has run no task within max_wait = {duration(most)}: it has no worker, "
                    "or none with as much memory and as many cores free as an executor wants; mend: see its web page, "
                    "ask for less (spark.executor.memory, spark.cores.max), or wait longer"
                )

        with translating():
            run(opened, opened.spark.range(0, 1, 1, 1).mapInArrow(ready, "id long"), wait)

    def run(
        self, comparison: Comparison, tasks: Sequence[Sequence[Range]], done: Callable[[int], None]
    ) -> Iterator[Collected]:
        """Yield the result of all tasks.

        Raises:
            InvalidSettings: executors on other hosts would look for a database on their own; a table lacks a column,
                or an option of its source isn't there.
            SourceError: a side can't be read.
            ReconcileError: Spark doesn't start, or fails, or a row can't be judged; without what `options_env` names.
        """
        if not tasks:
            return
        opened, both = self.session, (comparison.producer, comparison.consumer)
        for side in both:
            if isinstance(side, PostgresSide):
                refuse_loopback(opened.master, side.access.resolved().url)
        partitions, lakes = len(tasks), [side for side in both if isinstance(side, LakeSide)]
        if self._jobs is not None:
            partitions = min(partitions, self._workers)
        elif opened.master.in_process:
            partitions = min(partitions, _OF_CORE * opened.spark.sparkContext.defaultParallelism)
        with translating([secret for side in lakes for secret in side.secrets]):
            if lakes:
                frame = shuffled(opened.spark, comparison, [each for task in tasks for each in task])
            else:
                frame = planned(opened.spark, comparison, tasks, partitions)
            answers = run(opened, frame, lambda share: done(int(share * len(tasks))), comparison.title)
        yield results(answers)
        done(len(tasks))


# --- tasks as a plan -----------------------------------------------------------------------------------------

#: The columns of an answer.
ANSWER = "answer binary"
#: Findings in an answer: Spark has one of its values as a whole in memory, several times.
_ROWS_OF_ANSWER = 10_000


def planned(
    spark: SparkSession, comparison: Comparison, tasks: Sequence[Sequence[Range]], partitions: int
) -> DataFrame:
    """Return what runs the tasks and gives their answers (see `results`)."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            for batch in batches:
                for number in batch["id"].to_pylist():
                    yield from answers(comparison(tasks[number]))
        except SourceError as error:
            yield _sent(error)
            # Whose input isn't read to its end is thrown away, and the next task begins with all the imports.
            deque(batches, maxlen=0)

    return spark.range(0, len(tasks), 1, partitions).mapInArrow(run, ANSWER)


def ready(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pass rows on: an executor that does so has a Python, this package and its libraries."""
    yield from batches


def answers(result: Collected) -> Iterator[pa.RecordBatch]:
    """Yield a result as it goes to the driver."""
    yield _sent(replace(result, findings=[]))
    rows = result.table
    for start in range(0, rows.num_rows, _ROWS_OF_ANSWER):
        # Taken, not sliced: a slice is pickled with all that it was cut from.
        some = rows.take(np.arange(start, min(start + _ROWS_OF_ANSWER, rows.num_rows)))
        yield _sent(Collected(findings=[some]))


def _sent(answer: Collected | SourceError) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"answer": [pickle.dumps(answer)]})


def results(sent: pa.Table) -> Collected:
    """Return the result of answers as they came from Spark; raise the `SourceError` that is one of them."""
    collected = Collected()
    for value in sent["answer"]:
        answer: Collected | SourceError = pickle.loads(value.as_py())  # noqa: S301 - from our own executors
        if isinstance(answer, SourceError):
            raise answer
        collected.add(answer)
    return collected


# --- two frames ------------------------------------------------------------------------------------------

_TIME = pa.timestamp("us", tz="UTC")


#: The columns of what `compare` returns: ``message_id`` as the frames have it, its ``kind``, what either side says.
COMPARED: pa.Schema = pa.schema(
    [
        FINDINGS.field(name)
        for name in FINDINGS.names
        if name not in {"run", "began_at", "producer", "consumer", "topic", "feed", "group", "action", "result"}
    ]
)


@dataclass(frozen=True, slots=True)
class FrameRules:
    """What the outcome of a message depends on besides its rows.

    ``now`` is when both frames were read, ``grace`` (seconds) how long a message may be on its way. ``offsets`` are the
    positions up to which the group has read each queue: None, and it has read everything; ``starts`` those after which
    it began. What only the consumer has, and received before ``pruned_before``, isn't judged.

    Raises:
        InvalidSettings: a time without a time zone, or a negative grace.
    """

    now: dt.datetime
    grace: float = 300.0
    offsets: Mapping[int, int] | None = None
    starts: Mapping[int, int] = field(default_factory=dict)
    pruned_before: dt.datetime | None = None
    max_resends: int = 3

    def __post_init__(self) -> None:
        for name in ("now", "pruned_before"):
            moment = getattr(self, name)
            if moment is not None and moment.tzinfo is None:
                raise InvalidSettings(f"{name} = {moment!r} has no time zone; write datetime.now(UTC), say")
        if self.grace < 0:
            raise InvalidSettings(f"grace = {self.grace!r} must be 0 or more")

    @property
    def rules(self) -> Rules:
        """The rules of the judge."""
        now = int(self.now.timestamp() * 1_000_000)
        return Rules(
            producer_now=now,
            consumer_now=now,
            grace=int(self.grace * 1_000_000),
            horizon=None,
            offsets=None if self.offsets is None else dict(self.offsets),
            starts=dict(self.starts),
            max_resends=self.max_resends,
        )


def compare(
    producer: DataFrame, consumer: DataFrame, rules: FrameRules, *, every: bool = False, partitions: int | None = None
) -> DataFrame:
    """Return the differences between two frames and the messages in flight, or ``every`` message (`COMPARED`).

    The frames are those of one topic and one group. Ids are texts, bytes or integers, the same on both sides to the
    letter (`foreign.key_of`); an integer is the text of its digits. One that is there twice on a
    side fails the job, and is named. ``partitions`` is how many tasks compare, each of which has its share of both
    frames in memory; None: as many as Spark shuffles into.

    Raises:
        InvalidSettings: a frame lacks a column (``received_at`` too where ``pruned_before`` is given), has one of
            another type, or ids of the frames differ in type; names the frame, the column, and the mend.
    """
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 - an extra

    types = _checked(producer, "producer", PRODUCER_COLUMNS), _checked(consumer, "consumer", CONSUMER_COLUMNS)
    if rules.pruned_before is not None and "received_at" not in types[1]:
        raise InvalidSettings("pruned_before needs the column received_at in the consumer's frame; add it")
    for name in ("id", "digest"):
        if len({each[name] for each in types if name in each}) > 1:
            ours, theirs = (each[name] for each in types)
            raise InvalidSettings(f"{name} is {ours} in the producer's frame and {theirs} in the consumer's; cast one")
    pruned_before = rules.pruned_before
    of_judge = rules.rules

    def judged(ours: pa.Table, theirs: pa.Table) -> pa.Table:
        sent = shaped(ours, "producer", called="the producer's frame")
        known = shaped(theirs, "consumer", called="the consumer's frame")
        _, found = judge(Both(sent, known), of_judge, every=True)
        if pruned_before is not None:
            found = _unjudged(found, pruned_before)
        if not every:
            found = found.filter(_is_reported(found["outcome"]))
        columns = named(found)
        return pa.table([columns[name] for name in COMPARED.names], schema=COMPARED)

    def known(frame: DataFrame, columns: Sequence[TableColumn]) -> DataFrame:
        # Of an integer its digits, before it decides where the row goes.
        id_ = frame["id"].cast("string") if dict(frame.dtypes)["id"] in INTEGERS else frame["id"]
        return frame.select(*(each.name for each in columns if each.name in frame.columns)).withColumn("id", id_)

    sent, received = known(producer, PRODUCER_COLUMNS), known(consumer, CONSUMER_COLUMNS)
    return brought_together(sent, received, judged, from_arrow_schema(COMPARED), partitions)


def brought_together(
    producer: DataFrame,
    consumer: DataFrame,
    judge: Callable[[pa.Table, pa.Table], pa.Table],
    columns: StructType | str,
    partitions: int | None = None,
) -> DataFrame:
    """Return what ``judge`` makes of the rows of two frames, by shares of their ids; its answer has these columns.

    ``partitions`` is how many shares there are; None: as many as Spark shuffles into.
    """
    from pyspark.sql import functions  # noqa: PLC0415 - an extra

    number = partitions or int(producer.sparkSession.conf.get("spark.sql.shuffle.partitions") or 1)
    by = functions.pmod(functions.xxhash64("id"), functions.lit(number)).alias("share")
    frames = {"ours": producer, "theirs": consumer}

    def of(side: str, frame: DataFrame) -> DataFrame:
        rows = {
            name: functions.struct(*each.columns) if name == side else functions.lit(None).cast(each.schema)
            for name, each in frames.items()
        }
        return frame.select(by, functions.lit(side).alias("side"), *(row.alias(name) for name, row in rows.items()))

    def judged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for share in _shares(batches):
            yield from judge(_side(share, "ours"), _side(share, "theirs")).to_batches()

    # No cogroup, which takes Arrow from Spark 4 on only; a sort, which spills to disk, brings shares together as well.
    both = of("ours", producer).union(of("theirs", consumer))
    return both.repartition(number, "share").sortWithinPartitions("share").mapInArrow(judged, columns)


def _shares(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield the rows of each share, of batches that are sorted by it."""
    parts: list[pa.RecordBatch] = []
    for batch in batches:
        turns = np.flatnonzero(np.diff(batch["share"].to_numpy())) + 1
        for first, end in itertools.pairwise([0, *turns.tolist(), len(batch)] if len(batch) else []):
            part = batch.slice(first, end - first)
            if parts and part["share"][0] != parts[0]["share"][0]:
                yield pa.Table.from_batches(parts)
                parts = []
            parts.append(part)
    if parts:
        yield pa.Table.from_batches(parts)


def _side(share: pa.Table, side: str) -> pa.Table:
    """Return the rows of one side of a share, which its column of this name has."""
    rows = share.filter(pc.equal(share["side"], side))[side]
    return pa.Table.from_batches(
        [pa.RecordBatch.from_struct_array(chunk) for chunk in rows.chunks], schema=pa.schema(list(rows.type))
    )


def _is_reported(outcomes: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.or_(pc.equal(outcomes, int(Outcome.IN_FLIGHT)), pc.greater_equal(outcomes, int(KINDS[0])))


def _unjudged(found: pa.Table, before: dt.datetime) -> pa.Table:
    """Return findings with what only the consumer has, and received before a time, as not to be judged."""
    old = pc.and_(pc.is_null(found["state"]), pc.less(found["received_at"], pa.scalar(before, _TIME)))
    outcomes = pc.if_else(pc.fill_null(old, False), pa.scalar(int(Outcome.UNJUDGED), pa.int8()), found["outcome"])
    return found.set_column(found.column_names.index("outcome"), "outcome", outcomes)


def _checked(frame: DataFrame, side: str, columns: Sequence[TableColumn]) -> dict[str, str]:
    """Return the types of a frame's columns as far as they are known; `InvalidSettings` where one can't be used."""
    types = dict(frame.dtypes)
    for column in columns:
        kind = types.get(column.name)
        if kind is None and column.required:
            there = ", ".join(types) or "none"
            raise InvalidSettings(f"the {side}'s frame has no column {column.name}; rename or add one (it has {there})")
        if kind is not None and kind not in column.types:
            raise InvalidSettings(
                f"column {column.name} of the {side}'s frame is {kind}; cast it to {' or '.join(column.types)}"
            )
    known = {column.name: types[column.name] for column in columns if column.name in types}
    return known | {"id": "string" if known["id"] in INTEGERS else known["id"]}


# --- a side that Spark alone can read --------------------------------------------------------------------

#: A source of ours: Iceberg without Spark's own jar.
PYICEBERG = "pyiceberg"
_STRINGS_FOR_NAMES = re.compile(r"jdbc:mariadb:(?!.*ANSI_QUOTES)", re.IGNORECASE)
_CATALOG, _SNAPSHOT = "catalog", "snapshot_id"


@dataclass(frozen=True, slots=True)
class LakeSide:
    """One side of a pair that Spark alone can read, as it is at the time. ``waiting`` is called while it is read."""

    session: Session
    part: Part
    table: ForeignTable
    pair: Pair
    within: Range
    waiting: Callable[[], None]

    @property
    def secrets(self) -> Collection[str]:
        """What no error may say."""
        return self.table.secrets().values()

    def frame(self) -> DataFrame:
        """Return its rows."""
        return of_table(self.session.spark, self.part, self.table, self.pair, self.within)

    def read(self, ranges: Sequence[Range]) -> pa.Table:
        """Return the rows of single ids, sorted by id.

        Raises:
            InvalidSettings: an id is there twice.
            ReconcileError: Spark can't read the source.
        """
        with translating(self.secrets):
            frame = only(self.frame(), self.part, [each.first.bytes for each in ranges])
            rows = run(self.session, frame, lambda _: self.waiting())
            return ordered(unwired(rows, self.part), f"the {self.part}'s {self.table}")


def _wire(part: Part) -> pa.Schema:
    """Return the columns of a side as they travel."""
    return pa.schema([field.with_type(_wired(field.type)) for field in FOREIGN[part]])


def _wired(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.int64()
    return pa.binary() if pa.types.is_fixed_size_binary(kind) else kind


def _travelling(table: pa.Table, part: Part) -> Iterator[pa.RecordBatch]:
    """Yield rows of a side, ours or a foreign one, as they travel."""
    if FOREIGN_ID.name not in table.column_names:
        table = table.append_column(FOREIGN_ID, pa.nulls(table.num_rows, FOREIGN_ID.type))
    schema = _wire(part)
    yield from table.select(schema.names).cast(schema).to_batches(max_chunksize=50_000)


def unwired(table: pa.Table, part: Part) -> pa.Table:
    """Return rows that travelled as the judge has them (`foreign.FOREIGN`), in no order."""
    return table.select(FOREIGN[part].names).cast(FOREIGN[part])


def shuffled(spark: SparkSession, comparison: Comparison, ranges: Sequence[Range]) -> DataFrame:
    """Return what brings the rows of both sides together and gives the answers (see `results`).

    Each of the ranges of a side in PostgreSQL is read by a task.
    """
    rules = comparison.rules

    def frame(side: Side) -> DataFrame:
        return side.frame() if isinstance(side, LakeSide) else of_database(spark, cast("PostgresSide", side), ranges)

    def judge(ours: pa.Table, theirs: pa.Table) -> pa.Table:
        sent = ordered(unwired(ours, "producer"), "the producer's table")
        known = ordered(unwired(theirs, "consumer"), "the consumer's table")
        return pa.Table.from_batches(answers(compared(sent, known, rules)))

    return brought_together(frame(comparison.producer), frame(comparison.consumer), judge, ANSWER)


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
                yield from _travelling(side.read([ranges[number]]), side.part)

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
    words, called = {name: dict(own) for name, own in table.own_words.items()}, f"the {part}'s {table}"

    def shape(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                yield from _travelling(
                    _inside(shaped(pa.Table.from_batches([batch]), part, words, called), within), part
                )

    return mapped.mapInArrow(shape, from_arrow_schema(_wire(part)))


def _inside(rows: pa.Table, within: Range) -> pa.Table:
    first, end = (None if edge is None else pa.scalar(edge.bytes, pa.binary()) for edge in within)
    ids = rows["id"].cast(pa.binary())
    inside = pc.greater_equal(ids, first)
    return rows.filter(inside if end is None else pc.and_(inside, pc.less(ids, end)))


def _cast(column: Column, known: TableColumn, kind: str, part: Part, table: ForeignTable) -> Column:
    """Return a column with the type that `foreign.shaped` takes; times as microseconds since 1970."""
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
                plain = pa.table(list(map(storage_of, rows.columns)), names=rows.column_names)
                yield from plain.cast(arrow).to_batches(max_chunksize=50_000)

    tasks = spark.range(0, len(files), 1, max(len(files), 1))
    return tasks.mapInArrow(read, from_arrow_schema(arrow))


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the type as Spark can have it, which knows neither uuids nor large texts."""
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_fixed_size_binary(kind) or pa.types.is_large_binary(kind):
        return pa.binary()
    return pa.string() if pa.types.is_large_string(kind) else kind
