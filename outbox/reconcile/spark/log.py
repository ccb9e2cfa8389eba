"""A topic's log as a source of Spark, ``format("outbox")``: as a table, and as a stream with an exact offset.

An offset says of each queue which message was the last: its position, and its id as a witness. The numbers of a queue
are dense, so that what was pruned before it was read is counted; and a log that went back (a fail-over to a replica
that was behind, a restore, storage that was put back) has another message there, or none. Positions become visible in
their order, so nothing can appear below the end of a queue.

A checkpoint has such an offset. Each batch lies between two of them, so it is the same however often it is begun again,
and a sink that writes each batch once (files, Delta, Iceberg) has each message once. PySpark calls these classes in
processes of its own, which get them pickled.
"""

from __future__ import annotations

import datetime as dt
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

import pyarrow as pa
import pyarrow.compute as pc
import pyspark
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from outbox.consumer.sql import heads
from outbox.consumer.start import StartPosition, start_positions
from outbox.database.execute import Statement, Template, execute, read_log, statement
from outbox.errors import InvalidRequest, InvalidSettings, MessagesPruned, SourceError, SourceLost
from outbox.message.compression import decompress
from outbox.message.content import check_topic
from outbox.message.limits import start_from_text
from outbox.message.model import Start, behind, read_headers
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
    from pyspark.sql import datasource
    from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
except ImportError:
    raise ImportError(
        f"format('outbox') needs the Python data sources of Spark 4.3, and this is PySpark {pyspark.__version__}; the "
        "reconciliation and comparisons of frames work on it"
    ) from None

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

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

#: Where each column of a message is: ``h`` is its half message.
_COLUMNS: Mapping[str, str] = {
    **dict.fromkeys(LOG.names, "h."),
    **dict.fromkeys(("topic", "queue", "position", "send_number", "visible_at"), "m."),
}
#: How each column is selected that isn't of the same name and type.
_SELECTED: Mapping[str, str] = {"message_id": "m.half_id::text", "headers": "h.headers::text"}

#: How large (bytes) a body may be that was stored compressed.
_LARGEST_BODY = 256 * 1024 * 1024


class QueueEnd(TypedDict):
    """The last message of a queue that is read; ``id`` is empty where nothing is known of it."""

    position: int
    id: str


#: The end of each queue, by its number as text: what a checkpoint has as JSON.
LogOffset = dict[str, QueueEnd]


def _start(text: str) -> Start:
    try:
        return start_from_text(text)
    except InvalidRequest:
        raise ValueError("first, now, a position, QUEUE:POSITION,… or a time such as 2026-03-01T00:00:00Z") from None


def _columns(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if len({*names} & _COLUMNS.keys()) < len(names):
        raise ValueError(f"columns of a log, each once: {', '.join(LOG.names)}")
    return names


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Which log is read, and how; the database is named as in a file, by ``url`` without a password or ``url_env``."""

    topic: str = option(help="The topic.")
    url: str | None = option(None, "The producer's database, without a password.")
    url_env: str | None = option(None, "The environment variable that has the URL of the producer's database.")
    schema: str | None = option(None, "The schema of the outbox tables.")
    start: Start = option(
        "first",
        "Where a table or a new stream begins: first (the oldest message), now, QUEUE:POSITION,… or a time.",
        parse=_start,
    )
    end: Start = option("now", "Where a table ends, before a position or a time; a stream has no end.", parse=_start)
    columns: tuple[str, ...] = option(tuple(LOG.names), "The columns, by commas; only those are read.", parse=_columns)
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
        return TopicLog(address.access("outbox", os.environ), self.topic, self.on_pruned, self.columns)


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

_OF_STRETCH = "m.topic = %(topic)s AND m.queue = %(queue)s AND m.position > %(after)s AND m.position <= %(until)s"
_COUNT = Template(f"SELECT count(*) FROM {{s}}.message m WHERE {_OF_STRETCH}")


class Condition(NamedTuple):
    """What a column must fulfil: a comparison with a value, ``IN`` a tuple of values, or that it is (not) NULL."""

    column: str
    operator: str
    value: Any = ()

    def sql(self, name: str) -> str:
        """Return it as SQL, whose value is bound by that name.

        A message without its half fulfils what is asked of the half, since it must be told of.
        """
        table = _COLUMNS[self.column]
        column = "m.half_id" if self.column == "message_id" else f"{table}{self.column}"
        value = f"%({name})s::{_sql_type(self.column)}"
        if self.operator == "IN":
            compared = f"{column} = ANY ({value}[])"
        else:
            compared = f"{column} {self.operator}{'' if self.operator.startswith('IS') else f' {value}'}"
        return f"({compared} OR h.id IS NULL)" if table == "h." else compared

    @property
    def bound(self) -> Any:
        """The value as it is bound."""
        return list(map(_written, self.value)) if self.operator == "IN" else _written(self.value)

    def allows(self, value: object) -> bool:
        """Tell whether a value that isn't NULL fulfils it."""
        return bool(_OPERATORS[self.operator](value, self.value))


def _written(value: object) -> object:
    return value.isoformat() if isinstance(value, dt.datetime) else value


def _sql_type(column: str) -> str:
    kind = LOG.field(column).type
    if pa.types.is_timestamp(kind):
        return "timestamptz"
    return "uuid" if column == "message_id" else "int8" if pa.types.is_integer(kind) else "text"


_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    **{"=": operator.eq, ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le},
    **{"IN": lambda value, values: value in values, "IS NOT NULL": lambda *_: True, "IS NULL": lambda *_: False},
}


@dataclass(frozen=True, slots=True)
class TopicLog:
    """The log of a topic, or what of it fulfils some conditions; a value that can be sent to another process."""

    access: Access
    topic: str
    on_pruned: Literal["stop", "skip"] = "stop"
    columns: tuple[str, ...] = tuple(LOG.names)
    conditions: tuple[Condition, ...] = ()

    def begin(self, start: Start) -> LogOffset:
        """Return the offset before a start, in each queue: what lies behind it is of its time or position, or later.

        Where the log begins is asked first, so a database that refuses isn't waited for: it was never there.

        Raises:
            InvalidSettings: there is no such topic.
            SourceLost: the database isn't there, or was lost several times.
            MessagesPruned: some that may be meant were pruned, and that isn't to be skipped.
        """
        first = self._found("first", tries=1)
        begins = first if start == "first" else self._found(start)
        for each in begins:
            self._check_pruned(each.queue, each.position, each.missing)
        return _offset_of(begins)

    def first(self) -> LogOffset:
        """Return the offset before the oldest message that is kept; as `begin`."""
        return self.begin("first")

    def end(self, before: Start = "now") -> LogOffset:
        """Return the offset behind the newest message, or behind the last one before a time or a position; as `begin`.

        Pruned messages lie before it: nothing is said of them.
        """
        return _offset_of(self._found(before))

    def _found(self, start: Start, *, tries: int = MOST_TRIES) -> list[StartPosition]:
        def ask() -> list[StartPosition]:
            with connected(self.access) as connection:
                return start_positions(None, connection, self.access.schema, self.topic, start)

        if found := insist(ask, tries=tries):
            return found
        raise InvalidSettings(
            f"there is no topic {self.topic!r} in {described(self.access.url)}; nothing was ever sent to it"
        )

    def within(self, start: LogOffset, end: LogOffset) -> tuple[LogOffset, LogOffset]:
        """Return what lies between two offsets as far as the conditions on queues and positions allow.

        Not those on times: a clock may have gone back, and a filter is to be exact.
        """
        of_queues = [each for each in self.conditions if each.column == "queue"]
        end = {queue: each for queue, each in end.items() if all(of.allows(int(queue)) for of in of_queues)}
        for _, sign, value in (each for each in self.conditions if each.column == "position"):
            if sign in {"=", ">", ">="}:
                bound = self.end(_existing(value + (sign == ">")))
                start = {queue: max(each, bound[queue], key=_reached) for queue, each in start.items()}
            if sign in {"=", "<", "<="}:
                bound = self.end(_existing(value + (sign != "<")))
                end = {queue: min(each, bound[queue], key=_reached) for queue, each in end.items()}
        return start, end

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
                    yield batch.select(self.columns)
                if self.conditions:  # counted afterwards: so nothing that is pruned meanwhile is missed
                    (counted,) = self._query(_COUNT(self.access.schema, **self._of(stretch)))
                    rows = counted["count"][0].as_py()
                break
            except SourceLost:
                tries += 1
                if tries == MOST_TRIES:
                    raise
                insist(self._ask)
        self._check_pruned(stretch.queue, stretch.after, stretch.rows - rows)

    def _of(self, stretch: Stretch) -> dict[str, Any]:
        return {"topic": self.topic, "queue": stretch.queue, "after": stretch.after, "until": stretch.until}

    def _batches(self, stretch: Stretch) -> Iterator[pa.RecordBatch]:
        columns = dict.fromkeys(("position", *self.columns))
        if "body" in columns:  # its compression is in the headers
            columns |= dict.fromkeys(("headers",))
        of_half = [each for each in (*columns, *(of.column for of in self.conditions)) if _COLUMNS[each] == "h."]
        if of_half:
            columns |= dict.fromkeys(("message_id", "content_type"))
        selected = ", ".join(f"{_SELECTED.get(each, _COLUMNS[each] + each)} AS {each}" for each in columns)
        sql = f"SELECT {selected} FROM {{s}}.message m"
        if of_half:
            sql += " LEFT JOIN {s}.half_message h ON h.id = m.half_id"
        named = {f"value_{number}": each for number, each in enumerate(self.conditions)}
        sql += f" WHERE {' AND '.join([_OF_STRETCH, *(each.sql(name) for name, each in named.items())])}"
        values = self._of(stretch) | {name: each.bound for name, each in named.items()}
        for batch in self._query(statement(self.access.schema, f"{sql} ORDER BY m.position", values)):
            yield self._shaped(batch)

    def _query(self, query: Statement) -> Iterator[pa.RecordBatch]:
        access = self.access.resolved()
        try:
            with adbc_connection(conninfo(access.url)) as connection, connection.cursor() as cursor:
                cursor.execute(rendered(query))
                yield from (batch for batch in cursor.fetch_record_batch() if batch.num_rows)
        except SourceError:
            raise
        except (GeneratorExit, KeyboardInterrupt):
            raise
        except Exception as error:
            raise_bare(failure_of(error, access))

    def _shaped(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = {name: batch[name] for name in batch.schema.names}
        if "content_type" in columns and batch["content_type"].null_count:
            torn = batch.filter(pc.is_null(batch["content_type"]))["message_id"][0]
            raise SourceError(
                f"message {torn} of topic {self.topic!r} has no half message: reconcile, which tells more"
            )
        if "headers" in columns:
            headers, encodings = zip(*map(read_headers, batch["headers"].to_pylist()), strict=True)
            columns["headers"] = pa.array([list(each.items()) for each in headers], LOG.field("headers").type)
            if "body" in columns and any(encodings):
                packed = zip(batch["body"].to_pylist(), encodings, strict=True)
                bodies = [decompress(body, encoding, _LARGEST_BODY) for body, encoding in packed]
                columns["body"] = pa.array(bodies, pa.binary())
        columns |= {name: within_calendar(columns[name]) for name in ("born_at", "visible_at") if name in columns}
        schema = schema_of(("position", *self.columns))
        return pa.RecordBatch.from_arrays([columns[field.name].cast(field.type) for field in schema], schema=schema)

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

    def _rows(self, template: Template, **values: Any) -> list[Any]:
        def ask() -> list[Any]:
            with connected(self.access) as connection:
                return read_log(None, connection, template(self.access.schema, topic=self.topic, **values))[0]

        return insist(ask)


_MOST = 2**63 - 1


def _existing(position: int) -> int:
    """Return the position nearest to a number that there can be."""
    return min(max(position, 1), _MOST)


def _offset_of(found: Iterable[StartPosition]) -> LogOffset:
    return {str(each.queue): {"position": each.position, "id": str(each.message_id or "")} for each in found}


def _reached(end: QueueEnd) -> int:
    return end["position"]


def schema_of(columns: Iterable[str]) -> pa.Schema:
    """Return these columns of a log, each once."""
    return pa.schema([LOG.field(name) for name in dict.fromkeys(columns)])


def _position(offset: LogOffset, queue: str) -> int:
    """Return up to where a queue is read; one that came with a growth from its beginning."""
    end = offset.get(queue)
    return end["position"] if end else 0


def as_offset(value: Mapping[str, Any]) -> LogOffset:
    """Return an offset as a checkpoint has it."""
    return {queue: {"position": int(each["position"]), "id": str(each["id"])} for queue, each in value.items()}


# --- Spark's source --------------------------------------------------------------------------------------


def register(spark: SparkSession) -> None:
    """Have a session know ``format("outbox")``, whose options are the fields of `LogOptions`, and push filters into it.

    The executors need this package; see docs/spark.md.
    """
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(OutboxSource)


class OutboxSource(DataSource):
    """The log of one topic; a row for each message that was dispatched (`LOG`).

    Raises (all of its methods):
        InvalidSettings: an unknown option or column, or one that can't be right; names it and the mend.
    """

    @classmethod
    def name(cls) -> str:
        """Return what the format is called."""
        return "outbox"

    def schema(self) -> StructType:
        """Return the columns."""
        return from_arrow_schema(schema_of(self._options.columns))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return what reads the log as it is now; only the columns of the schema are read."""
        return TableReader(*self._of(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return what reads the log batch by batch; only the columns of the schema are read."""
        return StreamReader(*self._of(schema))

    @property
    def _options(self) -> LogOptions:
        return Reader(form="text").read(LogOptions, dict(self.options))

    def _of(self, schema: StructType) -> tuple[LogOptions, pa.Schema]:
        whole = {field.name: field.dataType.simpleString() for field in from_arrow_schema(LOG)}
        for field in schema:
            if (expected := whole.get(field.name)) != field.dataType.simpleString():
                raise InvalidSettings(
                    f"column {field.name!r} of schema() is {field.dataType.simpleString()}, and of a log it is "
                    f"{expected or 'none'}; a log has {', '.join(' '.join(each) for each in whole.items())}"
                )
        narrow = pa.schema([LOG.field(each.name).with_nullable(each.nullable) for each in schema])
        return replace(self._options, columns=tuple(schema.names)), narrow


class LogReader:
    """Reads stretches of a log as rows of a schema: its own, or one that says the same of fewer columns."""

    def __init__(self, options: LogOptions, schema: pa.Schema | None = None) -> None:
        self._options, self._log = options, options.log()
        self._schema = schema_of(options.columns) if schema is None else schema

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a partition."""
        for batch in self._log.read(partition.value):
            yield pa.RecordBatch.from_arrays(batch.columns, schema=self._schema)


class TableReader(LogReader, DataSourceReader):
    """Reads what is kept of a log, between a start and an end, and of that what fulfils the filters of a query."""

    def pushFilters(self, filters: Sequence[datasource.Filter]) -> Iterable[datasource.Filter]:  # noqa: N802 - Spark's name
        """Have the database leave out what a query doesn't want; return the filters that Spark must see to itself."""
        pairs = [(each, condition_of(each)) for each in filters]
        self._log = replace(self._log, conditions=tuple(condition for _, condition in pairs if condition))
        return [each for each, condition in pairs if condition is None]

    def partitions(self) -> Sequence[InputPartition]:
        """Return what each task reads."""
        begin = self._log.begin(self._options.start)
        start, end = self._log.within(begin, self._log.end(self._options.end))
        return list(map(InputPartition, self._log.stretches(start, end, self._options.rows_per_partition)))


_COMPARED: Mapping[type[datasource.Filter], str] = {
    datasource.EqualTo: "=",
    datasource.In: "IN",
    datasource.GreaterThan: ">",
    datasource.GreaterThanOrEqual: ">=",
    datasource.LessThan: "<",
    datasource.LessThanOrEqual: "<=",
    datasource.IsNotNull: "IS NOT NULL",
    datasource.IsNull: "IS NULL",
}


def condition_of(filter_: datasource.Filter) -> Condition | None:
    """Return a filter of Spark's as a condition; None: the database would answer it otherwise, or can't."""
    (column, *inside), sign = (
        filter_.attribute if hasattr(filter_, "attribute") else ("",),
        _COMPARED.get(type(filter_)),
    )
    if inside or sign is None or column in {"headers", "body", ""}:
        return None
    if sign.startswith("IS"):
        return Condition(column, sign)
    value: Any = filter_.value  # type: ignore[attr-defined]  # those above have one
    if not all(_is_of(column, sign, each) for each in (value if sign == "IN" else (value,))):
        return None
    return Condition(column, sign, tuple(value) if sign == "IN" else value)


def _is_of(column: str, sign: str, value: object) -> bool:
    """Tell whether a value can be compared in the database as Spark compares it."""
    kind = LOG.field(column).type
    if pa.types.is_integer(kind):
        return type(value) is int and abs(value) <= _MOST
    if pa.types.is_timestamp(kind):
        return isinstance(value, dt.datetime) and value.tzinfo is not None
    if not isinstance(value, str) or "\0" in value or sign not in {"=", "IN"}:  # texts are ordered by a collation
        return False
    return column != "message_id" or re.fullmatch(_ID, value) is not None


_ID = re.compile(r"[\da-f]{8}(?:-[\da-f]{4}){3}-[\da-f]{12}")


class StreamReader(LogReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a log batch by batch."""

    _end: LogOffset | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return where a stream without a checkpoint begins."""
        return self._log.begin(self._options.start)

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
