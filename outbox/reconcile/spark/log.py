"""A topic's log as a source of Spark, ``format("outbox")``: as a table, and as a stream with an exact offset.

An offset says of each queue which message was the last: its position, and its id as a witness. The numbers of a queue
are dense, so that what was pruned before it was read is counted; and a log that went back (a fail-over to a replica
that was behind, a restore, storage that was put back) has another message there, or none. Positions become visible in
their order, so nothing can appear below the end of a queue.

A checkpoint has such an offset. Each batch lies between two of them, so it is the same however often it is begun again,
and a sink that writes each batch once (files, Delta, Iceberg) has each message once. PySpark calls these classes in
processes of its own, which get them pickled.

Into an Iceberg table of any catalog PyIceberg writes, without a jar. Spark tells of a batch again where it died before
its checkpoint said that the batch is written. So the commit that appends a batch also writes into the table's
properties which batch of which query it was: both are there, or neither. The properties outlive snapshots that expire
and files that are compacted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

import pyarrow as pa
import pyarrow.compute as pc
import pyspark
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from outbox.consumer.sql import beginnings, heads
from outbox.database.execute import Template, execute, read_log
from outbox.errors import InvalidSettings, MessagesPruned, SourceError, SourceLost
from outbox.message.compression import decompress
from outbox.message.content import check_topic
from outbox.message.model import behind, read_headers
from outbox.reader import Reader, option
from outbox.reconcile.config import Address
from outbox.reconcile.job import Access, described
from outbox.reconcile.rows import within_calendar
from outbox.reconcile.source import (
    MOST_TRIES,
    adbc_connection,
    connected,
    conninfo,
    failure_of,
    insist,
    raise_bare,
    rendered,
)

try:
    from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
except ImportError:
    raise ImportError(
        f"format('outbox') needs the Python data sources of Spark 4.3, and this is PySpark {pyspark.__version__}; the "
        "reconciliation and comparisons of frames work on it"
    ) from None

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.table import Table
    from pyspark.sql import DataFrame, SparkSession

#: What a message is as a row; ``headers`` are those of the sender, ``body`` as it was before it was compressed.
LOG: pa.Schema = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("queue", pa.int32(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
        pa.field("message_id", pa.string(), nullable=False),
        pa.field("send_number", pa.int16(), nullable=False),
        pa.field("born_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("visible_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("key", pa.string()),
        pa.field("tag", pa.string()),
        pa.field("headers", pa.map_(pa.string(), pa.string()), nullable=False),
        pa.field("content_type", pa.string(), nullable=False),
        pa.field("body", pa.binary(), nullable=False),
    ]
)

#: How large (bytes) a body may be that was stored compressed.
_LARGEST_BODY = 256 * 1024 * 1024


class QueueEnd(TypedDict):
    """The last message of a queue that is read; ``id`` is empty where nothing is known of it."""

    position: int
    id: str


#: The end of each queue, by its number as text: what a checkpoint has as JSON.
LogOffset = dict[str, QueueEnd]


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Which log is read, and how; the database is named as in a file, by ``url`` without a password or ``url_env``."""

    topic: str = option(help="The topic.")
    url: str | None = option(None, "The producer's database, without a password.")
    url_env: str | None = option(None, "The environment variable that has the URL of the producer's database.")
    schema: str | None = option(None, "The schema of the outbox tables.")
    start: Literal["first", "now"] = option(
        "first", "Where a new stream begins: with the oldest message, or after now."
    )
    on_pruned: Literal["stop", "skip"] = option(
        "stop", "What happens where messages were pruned before they were read."
    )
    max_rows: int | None = option(None, "How many messages a batch of a stream has at most.", least=1)
    rows_per_partition: int = option(50_000, "How many messages a task reads at most.", least=1)

    def __post_init__(self) -> None:
        check_topic(self.topic)

    def log(self) -> TopicLog:
        """Return the log.

        Raises:
            InvalidSettings: the database isn't named, or in a way that can't be kept secret.
        """
        address = Address(self.url, self.url_env, self.schema)
        return TopicLog(address.access("outbox", os.environ), self.topic, self.on_pruned)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Messages of one queue behind a position, up to another: so many ``rows``, unless some were pruned since."""

    queue: int
    after: int
    until: int
    rows: int


_AT = Template("""
SELECT w.queue, w.position, w.id, m.half_id::text, (SELECT position FROM {s}.message n
                                                   WHERE n.topic = %(topic)s AND n.queue = w.queue
                                                   ORDER BY position DESC LIMIT 1)
  FROM unnest(%(queues)s::int[], %(positions)s::int8[], %(ids)s::text[]) AS w (queue, position, id)
  LEFT JOIN {s}.message m ON m.topic = %(topic)s AND m.queue = w.queue AND m.position = w.position
 WHERE w.position > 0
""")

# The message so many behind a position, if there are so many up to the end.
_STEP = Template("""
SELECT w.queue, m.position, m.half_id::text
  FROM unnest(%(queues)s::int[], %(positions)s::int8[], %(ends)s::int8[], %(steps)s::int8[])
       AS w (queue, position, until, step)
 CROSS JOIN LATERAL (SELECT position, half_id FROM {s}.message n
                      WHERE n.topic = %(topic)s AND n.queue = w.queue AND n.position > w.position
                        AND n.position <= w.until
                      ORDER BY position OFFSET w.step - 1 LIMIT 1) m
""")

_CUTS = Template("""
SELECT position, number FROM (
    SELECT position, row_number() OVER (ORDER BY position) AS number, count(*) OVER () AS rows FROM {s}.message
     WHERE topic = %(topic)s AND queue = %(queue)s AND position > %(after)s AND position <= %(until)s) m
 WHERE number %% %(size)s = 0 OR number = rows ORDER BY position
""")

_MESSAGES = Template("""
SELECT m.topic, m.queue, m.position, m.half_id::text AS message_id, m.send_number, h.born_at, m.visible_at,
       h.key, h.tag, h.headers::text AS headers, h.content_type, h.body
  FROM {s}.message m LEFT JOIN {s}.half_message h ON h.id = m.half_id
 WHERE m.topic = %(topic)s AND m.queue = %(queue)s AND m.position > %(after)s AND m.position <= %(until)s
 ORDER BY m.position
""")


@dataclass(frozen=True, slots=True)
class TopicLog:
    """The log of a topic; a value that can be sent to another process."""

    access: Access
    topic: str
    on_pruned: Literal["stop", "skip"] = "stop"

    def first(self) -> LogOffset:
        """Return the offset before the oldest message that is kept, in each queue.

        It is what a new stream asks first, so a database that refuses isn't waited for: it was never there.

        Raises:
            InvalidSettings: there is no such topic.
            SourceLost: the database isn't there.
        """
        rows = self._rows(beginnings, tries=1)
        return {str(queue): {"position": max(position - 1, 0), "id": ""} for queue, position in rows}

    def end(self) -> LogOffset:
        """Return the offset behind the newest message.

        Raises:
            InvalidSettings: there is no such topic.
            SourceLost: the database was lost several times.
        """
        rows = self._rows(heads)
        return {str(queue): {"position": position, "id": str(id_ or "")} for queue, position, id_, *_ in rows}

    def bounded(self, start: LogOffset, end: LogOffset, rows: int) -> LogOffset:
        """Return an offset that lies at most so many messages behind ``start``, a fair share of them in each queue."""
        ahead = {queue: behind(_position(start, queue), each["position"]) for queue, each in end.items()}
        if (total := sum(ahead.values())) <= rows:
            return end
        steps = {queue: number * rows // total for queue, number in ahead.items()}
        # The loss by rounding goes to the longest, so that each batch has something.
        longest = max(ahead, key=ahead.__getitem__)
        steps[longest] += rows - sum(steps.values())
        queues = [queue for queue, step in steps.items() if step]
        found = self._rows(
            _STEP,
            queues=list(map(int, queues)),
            positions=[_position(start, queue) for queue in queues],
            ends=[end[queue]["position"] for queue in queues],
            steps=[steps[queue] for queue in queues],
        )
        moved: LogOffset = {str(queue): {"position": position, "id": id_} for queue, position, id_ in found}
        # Where pruned messages are counted among those ahead, there are fewer than so many.
        ends = {queue: moved.get(queue, end[queue]) for queue in queues}
        return start | ends

    def check(self, offset: LogOffset) -> None:
        """See that the log still is the one that was read up to an offset.

        Raises:
            SourceError: it went back; names the queue, the position, and the mend.
        """
        known = {queue: each for queue, each in offset.items() if each["position"] > 0}
        rows = self._rows(
            _AT,
            queues=list(map(int, known)),
            positions=[each["position"] for each in known.values()],
            ids=[each["id"] for each in known.values()],
        )
        for queue, position, expected, found, last in rows:
            # Pruned messages aren't there, and newer ones are.
            is_other = expected and found is not None and found != expected
            if is_other or (expected and (last is None or last < position)):
                raise SourceError(
                    f"the log of topic {self.topic!r} in {described(self.access.url)} went back: in queue {queue} "
                    f"message {expected} stood at position {position}, and now "
                    f"{f'{found} does' if found else 'nothing does'}. Messages read behind that may never have been "
                    "sent; see what the fail-over or the restore has lost, take it out of what was written, and begin "
                    "with a new checkpoint"
                )

    def stretches(self, start: LogOffset, end: LogOffset, size: int) -> list[Stretch]:
        """Return what lies between two offsets, in parts of at most so many messages.

        Raises:
            MessagesPruned: some of it was pruned, and that isn't to be skipped.
        """
        parts: list[Stretch] = []
        for queue, last in sorted(end.items(), key=lambda each: int(each[0])):
            after, until = _position(start, queue), last["position"]
            if until <= after:
                continue
            cuts = self._rows(_CUTS, queue=int(queue), after=after, until=until, size=size)
            self._check_pruned(int(queue), after, behind(after, until) - (cuts[-1][1] if cuts else 0))
            before = 0
            for position, number in cuts:
                parts.append(Stretch(int(queue), after, position, number - before))
                after, before = position, number
        return parts

    def read(self, stretch: Stretch) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a stretch in order; the driver holds one batch of them at a time.

        Raises:
            MessagesPruned: some of it was pruned since, and that isn't to be skipped.
            SourceLost: the database was lost several times.
            SourceError: it can't be read, or a message has no half message.
        """
        rows, tries, after = 0, 0, stretch.after
        while True:
            try:
                for batch in self._batches(replace(stretch, after=after)):
                    rows, after = rows + batch.num_rows, batch["position"][-1].as_py()
                    yield batch
                break
            except SourceLost:
                tries += 1
                if tries == MOST_TRIES:
                    raise
                insist(self._ask)
        self._check_pruned(stretch.queue, stretch.after, stretch.rows - rows)

    def _batches(self, stretch: Stretch) -> Iterator[pa.RecordBatch]:
        query = rendered(
            _MESSAGES(
                self.access.schema, topic=self.topic, queue=stretch.queue, after=stretch.after, until=stretch.until
            )
        )
        access = self.access.resolved()
        try:
            with adbc_connection(conninfo(access.url)) as connection, connection.cursor() as cursor:
                cursor.execute(query)
                for batch in cursor.fetch_record_batch():
                    if batch.num_rows:
                        yield self._shaped(batch)
        except SourceError:
            raise
        except (GeneratorExit, KeyboardInterrupt):
            raise
        except Exception as error:
            raise_bare(failure_of(error, access))

    def _shaped(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch["content_type"].null_count:
            torn = batch.filter(pc.is_null(batch["content_type"]))["message_id"][0]
            raise SourceError(
                f"message {torn} of topic {self.topic!r} has no half message: reconcile, which tells more"
            )
        headers, encodings = zip(*map(read_headers, batch["headers"].to_pylist()), strict=True)
        bodies = batch["body"]
        if any(encodings):
            packed = zip(bodies.to_pylist(), encodings, strict=True)
            bodies = pa.array([decompress(body, encoding, _LARGEST_BODY) for body, encoding in packed], pa.binary())
        columns = {name: batch[name] for name in LOG.names} | {
            "headers": pa.array([list(each.items()) for each in headers], LOG.field("headers").type),
            "body": bodies,
            **{name: within_calendar(batch[name]) for name in ("born_at", "visible_at")},
        }
        return pa.RecordBatch.from_arrays([columns[field.name].cast(field.type) for field in LOG], schema=LOG)

    def _check_pruned(self, queue: int, after: int, missing: int) -> None:
        if missing > 0 and self.on_pruned == "stop":
            raise MessagesPruned(
                f"of topic {self.topic!r}, queue {queue}, {missing} messages behind position {after} were pruned "
                "before they were read; find out which (the producer's retention is too short for this stream), "
                "then go on with on_pruned=skip"
            )

    def _ask(self) -> None:
        with connected(self.access) as connection:
            execute(connection, heads(self.access.schema, topic=self.topic))

    def _rows(self, template: Template, *, tries: int = MOST_TRIES, **values: Any) -> list[Any]:
        """Return the rows of a statement; a topic that isn't there is told."""

        def ask() -> list[Any]:
            with connected(self.access) as connection:
                return read_log(None, connection, template(self.access.schema, topic=self.topic, **values))[0]

        rows = insist(ask, tries=tries)
        if not rows and template in (heads, beginnings):
            raise InvalidSettings(
                f"there is no topic {self.topic!r} in {described(self.access.url)}; nothing was ever sent to it"
            )
        return rows


def _position(offset: LogOffset, queue: str) -> int:
    """Return up to where a queue is read; one that came with a growth from its beginning."""
    end = offset.get(queue)
    return end["position"] if end else 0


def as_offset(value: Mapping[str, Any]) -> LogOffset:
    """Return an offset as a checkpoint has it."""
    return {queue: {"position": int(each["position"]), "id": str(each["id"])} for queue, each in value.items()}


# --- Spark's source --------------------------------------------------------------------------------------


def register(spark: SparkSession) -> None:
    """Have a session know ``format("outbox")``, whose options are the fields of `LogOptions`.

    The executors need this package; see docs/spark.md.
    """
    spark.dataSource.register(OutboxSource)


class OutboxSource(DataSource):
    """The log of one topic; a row for each message that was dispatched (`LOG`).

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
        return list(map(InputPartition, self._log.stretches(self._log.first(), self._log.end(), self._rows)))

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
        return first if self._options.start == "first" else self._log.end()

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
        return self._log.bounded(begin, end, limit.max_rows) if isinstance(limit, ReadMaxRows) else end

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return where the log ends, for the progress of the query."""
        return self._log.end()

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        """Return what each task of a batch reads; a batch may have been planned before a crash, and long ago."""
        begin, until = as_offset(start), as_offset(end)
        self._log.check(begin)
        self._log.check(until)
        return list(map(InputPartition, self._log.stretches(begin, until, self._options.rows_per_partition)))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a partition."""
        return self._log.read(partition.value)


# --- into an Iceberg table --------------------------------------------------------------------------------

#: The property of a query, before its id.
PROPERTY = "outbox.stream."
#: So often a batch is tried where others write into the table at the same time.
_TRIES = 10
_RETRIES = "commit.retry.num-retries"
# What Spark calls the id of a query, which its checkpoint keeps.
_QUERY = "sql.streaming.queryId"


class _Written(NamedTuple):
    """The last batch of a query that is in a table, and how many rows it has."""

    batch: int
    rows: int


def appending(load: Callable[[], Table]) -> Callable[[DataFrame, int], None]:
    """Return the function for ``foreachBatch`` that appends each batch to the Iceberg table that ``load`` returns.

    A batch is collected in the driver: bound it by ``max_rows`` of the source. The columns of the frame must be those
    of the table. The function raises:

        SourceError: the checkpoint is older than the table; or another query that has it writes too.
        pyiceberg.exceptions.CommitFailedException: others write into the table all the time.
    """

    def append(frame: DataFrame, batch: int) -> None:
        from pyiceberg.exceptions import CommitFailedException  # noqa: PLC0415 - an extra

        if (query := frame.sparkSession.sparkContext.getLocalProperty(_QUERY)) is None:
            raise SourceError("no stream called this function; give it to foreachBatch of a writeStream")
        rows = frame.toArrow()
        name = f"{PROPERTY}{query}"
        for left in reversed(range(_TRIES)):
            table = load()
            # In memory alone: PyIceberg's own retry would append to what another process has just written, unseen.
            table.properties[_RETRIES] = "0"
            if _is_there(table, name, batch, rows.num_rows):
                return
            try:
                with table.transaction() as transaction:
                    transaction.append(_as(table, rows), {"outbox.query": query, "outbox.batch": str(batch)})
                    transaction.set_properties({name: json.dumps(_Written(batch, rows.num_rows))})
                return
            except CommitFailedException:
                # Another one was faster; it may have been another process with this checkpoint.
                if not left:
                    raise

    return append


def _as(table: Table, rows: pa.Table) -> pa.Table:
    """Return rows in the types of a table: Iceberg has no integer of 16 bits."""
    schema = table.schema().as_arrow()
    return rows.select(schema.names).cast(schema)


def _is_there(table: Table, name: str, batch: int, rows: int) -> bool:
    """Is a batch in the table already?

    Raises:
        SourceError: a later one is, or another one of this number.
    """
    if (text := table.properties.get(name)) is None:
        return False
    last = _Written(*json.loads(text))
    if batch > last.batch:
        return False
    if last != (batch, rows):
        raise SourceError(
            f"batch {batch} of {rows} rows comes after batch {last.batch} of {last.rows} rows, which is in the table: "
            "the checkpoint was put back, or two processes have it. Begin with a new checkpoint and a new table, or "
            "put back the table too"
        )
    return True
