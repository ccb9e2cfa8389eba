"""A topic's log as a source of Spark, ``format("outbox")``: as a table, and as a stream with an exact offset.

A checkpoint has of each queue which message was the last that was read. Each batch lies between two such offsets, so it
is the same however often it is begun again, and a sink that writes each batch once (files, Delta, Iceberg) has each
message once. PySpark calls these classes in processes of its own, which get them pickled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from outbox.reader import Reader
from outbox.reconcile.spark.topic_log import LOG, LogOffset, LogOptions, as_offset

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Have a session know ``format("outbox")``, whose options are the fields of `LogOptions`.

    The executors need this package; see docs/spark.md.
    """
    spark.dataSource.register(OutboxSource)


class OutboxSource(DataSource):
    """The log of one topic; a row for each message that was dispatched (`outbox.reconcile.spark.topic_log.LOG`).

    Raises (all of its methods):
        InvalidSettings: an unknown option, or one that can't be right; names it and the mend.
    """

    @classmethod
    def name(cls) -> str:
        """Return what the format is called."""
        return "outbox"

    def schema(self) -> StructType:
        """Return the columns."""
        return from_arrow_schema(LOG)

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - the columns are always the same
        """Return what reads the whole log as it is now."""
        return TableReader(self._options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802 - Spark's name
        """Return what reads the log batch by batch."""
        return StreamReader(self._options)

    @property
    def _options(self) -> LogOptions:
        return Reader(form="text").read(LogOptions, dict(self.options))


class TableReader(DataSourceReader):
    """Reads all that is kept of a log."""

    def __init__(self, options: LogOptions) -> None:
        self._log, self._rows = options.log(), options.rows_per_partition

    def partitions(self) -> Sequence[InputPartition]:
        """Return what each task reads."""
        return _partitions(self._log.stretches(self._log.first(), self._log.end(), self._rows))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a partition."""
        return self._log.read(partition.value)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a log batch by batch."""

    def __init__(self, options: LogOptions) -> None:
        self._options, self._log = options, options.log()
        self._end: LogOffset | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return where a stream without a checkpoint begins."""
        # Also asked where it begins now: a database that was never there is told by it, and not waited for.
        first = self._log.first()
        return _as_json(first if self._options.start == "first" else self._log.end())

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return how much a batch may have."""
        most = self._options.max_rows
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Read up to the newest message, in as many batches as it takes."""
        self._end = self._log.end()

    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return where the next batch ends.

        Raises:
            SourceError: the log went back.
        """
        begin = as_offset(start)
        self._log.check(begin)
        # A queue that came with a growth is read from its beginning.
        end = begin | (self._log.end() if self._end is None else self._end)
        return _as_json(self._log.bounded(begin, end, limit.max_rows) if isinstance(limit, ReadMaxRows) else end)

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return where the log ends, for the progress of the query."""
        return _as_json(self._log.end())

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        """Return what each task of a batch reads; a batch may have been planned before a crash, and long ago."""
        begin, until = as_offset(start), as_offset(end)
        self._log.check(begin)
        self._log.check(until)
        return _partitions(self._log.stretches(begin, until, self._options.rows_per_partition))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a partition."""
        return self._log.read(partition.value)


def _partitions(stretches: Sequence[Any]) -> Sequence[InputPartition]:
    return [InputPartition(each) for each in stretches]


def _as_json(offset: LogOffset) -> dict[str, Any]:
    return cast("dict[str, Any]", offset)
