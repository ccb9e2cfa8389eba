"""The tasks of a comparison as a Spark plan: each executor reads both sides of its ranges itself, nothing is shuffled.

What is sent is bytes and numbers, so that it works through Spark Connect too; whatever else is needed, an executor
imports. A source that can't be read is an answer, not an exception: Spark would try it four times and log the Java
trace of each. Spark has no binary of fixed size, and needs a time zone of the session for its times; so ids travel as
binary and times as microseconds.

Or Spark's own JDBC source reads, with the driver that the user has: each task is one partition of either side, read
with the statement of the Arrow path; then both sides of a task are brought together by its number, and judged by what
judges them everywhere. Each connection sees what is there when it reads: a snapshot can't be shared. What differs only
for that reason is gone at the second look.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from outbox.errors import SourceError
from outbox.reconcile.compare import RESULT, Comparison, Task

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
from functools import reduce
from typing import TYPE_CHECKING, Literal, cast

from sqlalchemy import URL, make_url

from outbox.errors import InvalidSettings
from outbox.reconcile.compare import compared
from outbox.reconcile.judge import Rules
from outbox.reconcile.rows import CONSUMER, PRODUCER
from outbox.reconcile.source import PostgresSide, rendered
from outbox.reconcile.sql import plain_rows, plan_for_rows_of_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def wire_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema in which a table of ``schema`` travels."""
    return pa.schema([pa.field(field.name, _wire_type(field.type)) for field in schema])


def ddl(schema: pa.Schema) -> str:
    """Return the schema in which a table of ``schema`` travels, as Spark writes it."""
    return ", ".join(f"`{field.name}` {_name(field.type)}" for field in wire_schema(schema))


def to_wire(table: pa.Table) -> pa.Table:
    """Return the table as it travels."""
    return table.cast(wire_schema(table.schema))


def from_wire(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the table of ``schema`` that travelled, from its columns of these names."""
    return table.select(schema.names).cast(schema)


def _wire_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    if pa.types.is_timestamp(kind):
        return pa.int64()
    return kind


def _name(kind: pa.DataType) -> str:
    return _NAMES[kind]


_NAMES = {
    pa.int8(): "tinyint",
    pa.int16(): "smallint",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.bool_(): "boolean",
    pa.binary(): "binary",
    pa.string(): "string",
}


#: A `RESULT`, or in a row of its own what a source said.
ANSWER = RESULT.append(pa.field("failure", pa.string()))
ANSWER_DDL = ddl(ANSWER)


def planned(spark: SparkSession, comparison: Comparison, tasks: Sequence[Task], partitions: int) -> DataFrame:
    """Return what runs the tasks and gives their answers (`ANSWER`)."""
    answer = _answering(pickle.dumps(comparison), [pickle.dumps(task) for task in tasks])
    return spark.range(0, len(tasks), 1, partitions).mapInArrow(answer, ANSWER_DDL)


def results(answers: pa.Table) -> pa.Table:
    """Return the results (`RESULT`) of answers as they came from Spark."""
    for failure in answers["failure"].drop_null().to_pylist():
        raise SourceError(failure)
    return from_wire(answers, RESULT)


def answered(result: pa.Table) -> pa.Table:
    """Return a result as it goes to the driver."""
    return to_wire(result.append_column(ANSWER.field("failure"), pa.nulls(result.num_rows, pa.string())))


def failed(error: SourceError) -> pa.Table:
    """Return the answer that a source can't be read."""
    row = {"id": bytes(16), "outcome": 0, "part": 0, "failure": str(error)}
    return to_wire(pa.Table.from_pylist([row], schema=ANSWER))


def _answering(
    comparison: bytes, tasks: Sequence[bytes]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def answer(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:

        for batch in batches:
            for answer in answers(comparison, (tasks[number] for number in batch["id"].to_pylist())):
                yield from answer.to_batches()

    return answer


def answers(comparison: bytes, tasks: Iterator[bytes]) -> Iterator[pa.Table]:
    """Run tasks on an executor; yield their answers, and none after a failure."""
    compare: Comparison = pickle.loads(comparison)  # noqa: S301 - from our own driver
    try:
        for task in tasks:
            yield answered(compare(pickle.loads(task)))  # noqa: S301
    except SourceError as error:
        yield failed(error)


_DRIVER = "org.postgresql.Driver"
# What libpq and the driver call by the same name, and by different ones.
_SAME = ("sslmode", "sslrootcert", "sslcert", "sslkey", "options", "gssencmode")
_OTHER = {"application_name": "ApplicationName", "connect_timeout": "connectTimeout"}
_SECRET = ("password", "sslpassword")


def reads_by_jdbc(comparison: Comparison) -> bool:
    """Can Spark's JDBC source read both sides?"""
    return isinstance(comparison.producer, PostgresSide) and isinstance(comparison.consumer, PostgresSide)


def planned_by_jdbc(spark: SparkSession, comparison: Comparison, tasks: Sequence[Task], partitions: int) -> DataFrame:
    """Return what runs the tasks and gives their answers (`tasks.ANSWER`).

    Raises:
        InvalidSettings: the driver can't reach a database in the way its URL says.
    """
    merged = _merged(tasks, partitions)
    producer = _read(spark, cast("PostgresSide", comparison.producer), PRODUCER, merged)
    consumer = _read(spark, cast("PostgresSide", comparison.consumer), CONSUMER, merged)
    return (
        producer.groupBy("task").cogroup(consumer.groupBy("task")).applyInArrow(_judging(comparison.rules), ANSWER_DDL)
    )


def judged(rules: bytes, producer: pa.Table, consumer: pa.Table) -> pa.Table:
    """Judge both sides of one task, on an executor; return its answer."""
    unpickled: Rules = pickle.loads(rules)  # noqa: S301 - from our own driver
    return answered(
        compared(from_wire(producer, PRODUCER).sort_by("id"), from_wire(consumer, CONSUMER).sort_by("id"), unpickled)
    )


def jdbc_options(url: str) -> dict[str, str]:
    """Return Spark's options for a database; user and password are options of their own, which Spark shows nowhere.

    Raises:
        InvalidSettings: the URL says something that the driver can't do; names it and the mend.
    """
    parts = make_url(url)
    host = parts.host or _query(parts, "host")
    if not host or host.startswith("/") or "," in host:
        raise InvalidSettings(
            f"Spark's JDBC source needs one host in the URL of database {parts.database!r}, it can't use "
            f"{host or 'the local socket'}; mend: name it, or leave out the driver jar"
        )
    known = {*_SAME, *_OTHER, *_SECRET, "host", "port", "user"}
    if strange := sorted(set(parts.query) - known):
        raise InvalidSettings(
            f"Spark's JDBC source doesn't know {', '.join(strange)} in the URL of database {parts.database!r}; "
            "mend: leave it out there, or leave out the driver jar"
        )
    named = f"[{host}]" if ":" in host else host
    options = {
        "url": f"jdbc:postgresql://{named}:{parts.port or _query(parts, 'port') or 5432}/{parts.database}",
        "driver": _DRIVER,
        "fetchsize": "10000",
    }
    options |= {name: value for name in _SAME if (value := _query(parts, name))}
    options |= {theirs: value for ours, theirs in _OTHER.items() if (value := _query(parts, ours))}
    options |= {name: value for name in _SECRET if (value := _query(parts, name))}
    named_users = {"user": parts.username or _query(parts, "user"), "password": parts.password}
    return options | {name: value for name, value in named_users.items() if value}


def _query(url: URL, name: str) -> str | None:
    value = url.query.get(name)
    return value[0] if isinstance(value, tuple) else value


def _merged(tasks: Sequence[Task], partitions: int) -> list[Task]:
    # Ranges of one partition are in order and don't overlap, as those of a task.
    groups = [
        tasks[number * len(tasks) // partitions : (number + 1) * len(tasks) // partitions]
        for number in range(partitions)
    ]
    return [
        Task(number, tuple(sorted((each for task in group for each in task.ranges), key=lambda each: each.first)))
        for number, group in enumerate(groups)
    ]


def _read(spark: SparkSession, side: PostgresSide, schema: pa.Schema, tasks: Sequence[Task]) -> DataFrame:
    from pyspark.sql import functions  # noqa: PLC0415

    # A setting of the session: JDBC commits each statement, and a transaction's would be gone before the query.
    options = jdbc_options(side.access.url) | {"sessionInitStatement": plan_for_rows_of_session().sql}
    columns = {field.name: _kind(field.type) for field in schema}
    parts = [
        spark.read.format("jdbc")
        .options(**options, query=rendered(plain_rows(side.statement(task.ranges), columns)))
        .load()
        .withColumn("task", functions.lit(task.number))
        for task in tasks
    ]
    return reduce(lambda some, more: some.unionAll(more), parts)


def _kind(kind: pa.DataType) -> Literal["id", "time", "plain"]:
    if pa.types.is_fixed_size_binary(kind):
        return "id"
    return "time" if pa.types.is_timestamp(kind) else "plain"


def _judging(rules: Rules) -> Callable[[pa.Table, pa.Table], pa.Table]:
    sent = pickle.dumps(rules)

    def judge(producer: pa.Table, consumer: pa.Table) -> pa.Table:

        return judged(sent, producer, consumer)

    return judge
