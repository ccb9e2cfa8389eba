"""The tasks of a comparison as a Spark plan: each executor reads both sides of its ranges itself, nothing is shuffled.

Bytes and numbers are sent to and fro, so that it works through Spark Connect too; whatever else is needed, an
executor imports. A source that can't be read is an answer, not an exception: Spark would try it four times and log the
Java trace of each.

Or Spark's own JDBC source reads, with the driver that the user has: each task is one partition of either side, read
with the statement of the Arrow path; then both sides of a task are brought together by its number, and judged by what
judges them everywhere. Each connection sees what is there when it reads: a snapshot can't be shared. What differs only
for that reason is gone at the second look.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import numpy as np
import pyarrow as pa
from sqlalchemy import make_url

from outbox.errors import InvalidSettings, SourceError
from outbox.reconcile.compare import Collected, Comparison, Task, compared
from outbox.reconcile.rows import CONSUMER, PRODUCER, SCHEMAS
from outbox.reconcile.source import PostgresSide, rendered
from outbox.reconcile.sql import PLAN_FOR_ROWS_EVER

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: The columns of an answer.
ANSWER = "answer binary"
#: Findings in an answer: Spark has one of its values as a whole in memory, several times.
_ROWS_OFANSWER = 10_000


def planned(spark: SparkSession, comparison: Comparison, tasks: Sequence[Task], partitions: int) -> DataFrame:
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
    for start in range(0, rows.num_rows, _ROWS_OFANSWER):
        # Taken, not sliced: a slice is pickled with all that it was cut from.
        some = rows.take(np.arange(start, min(start + _ROWS_OFANSWER, rows.num_rows)))
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


#: What libpq calls an option, and what the driver does.
_OPTIONS = {
    name: name for name in ("user", "password", "sslmode", "sslrootcert", "sslcert", "sslkey", "sslpassword", "options")
} | {"gssencmode": "gssencmode", "application_name": "ApplicationName", "connect_timeout": "connectTimeout"}


def planned_by_jdbc(spark: SparkSession, comparison: Comparison, tasks: Sequence[Task], partitions: int) -> DataFrame:
    """Return what runs the tasks and gives their answers (see `results`); databases are as in `jdbc_options`."""
    # Ranges of one partition are in order and don't overlap, as those of a task.
    edges = [number * len(tasks) // partitions for number in range(partitions + 1)]
    merged = [
        Task(number, tuple(sorted(each for task in tasks[first:end] for each in task.ranges)))
        for number, (first, end) in enumerate(pairwise(edges))
    ]
    rules = comparison.rules

    def judge(producer: pa.Table, consumer: pa.Table) -> pa.Table:
        ours, theirs = (
            table.select(schema.names).cast(schema).sort_by("id")
            for table, schema in ((producer, PRODUCER), (consumer, CONSUMER))
        )
        return pa.Table.from_batches(answers(compared(ours, theirs, rules)))

    producer = _read(spark, cast("PostgresSide", comparison.producer), merged).groupBy("task")
    consumer = _read(spark, cast("PostgresSide", comparison.consumer), merged).groupBy("task")
    return producer.cogroup(consumer).applyInArrow(judge, ANSWER)


def jdbc_options(url: str) -> dict[str, str]:
    """Return Spark's options for a database; user and password are options of their own, which Spark shows nowhere.

    Raises:
        InvalidSettings: the URL says something that the driver can't do; names it and the mend.
    """
    parts = make_url(url)
    query = {name: value if isinstance(value, str) else value[0] for name, value in parts.query.items()}
    address = {name: query.pop(name, None) for name in ("host", "port")}
    host, port = parts.host or address["host"], parts.port or address["port"] or "5432"
    if not host or host.startswith("/") or "," in host:
        raise InvalidSettings(
            f"Spark's JDBC source needs one host in the URL of database {parts.database!r}, it can't use "
            f"{host or 'the local socket'}; mend: name it, or leave out the driver jar"
        )
    if strange := sorted(query.keys() - _OPTIONS.keys()):
        raise InvalidSettings(
            f"Spark's JDBC source doesn't know {', '.join(strange)} in the URL of database {parts.database!r}; "
            "mend: leave it out there, or leave out the driver jar"
        )
    named = f"[{host}]" if ":" in host else host
    query |= {name: value for name, value in (("user", parts.username), ("password", parts.password)) if value}
    return {
        "url": f"jdbc:postgresql://{named}:{port}/{parts.database}",
        "driver": "org.postgresql.Driver",
        "fetchsize": "10000",
        **{_OPTIONS[name]: value for name, value in query.items() if value},
    }


def _read(spark: SparkSession, side: PostgresSide, tasks: Sequence[Task]) -> DataFrame:
    from pyspark.sql import functions  # noqa: PLC0415 - an extra

    # A setting of the session: JDBC commits each statement, and a transaction's would be gone before the query.
    settings = f"{rendered(side.settings.statement(local=False))};{PLAN_FOR_ROWS_EVER}"
    options = jdbc_options(side.access.resolved().url) | {"sessionInitStatement": settings}
    columns = ", ".join(map(_column, SCHEMAS[side.part]))
    parts = []
    for task in tasks:
        rows = side.statement(task.ranges)
        query = rendered(replace(rows, sql=f"SELECT {columns} FROM ({rows.sql}) r"))
        table = spark.read.format("jdbc").options(**options, query=query).load()
        parts.append(table.withColumn("task", functions.lit(task.number)))
    return reduce(lambda some, more: some.unionAll(more), parts)


def _column(field: pa.Field) -> str:
    """Return a column as Spark can have it, which knows neither uuid nor times without the zone of its session."""
    if pa.types.is_fixed_size_binary(field.type):
        return f'uuid_send(r."{field.name}") AS "{field.name}"'
    if pa.types.is_timestamp(field.type):
        own = f'r."{field.name}"'
        near = f"least(greatest({own}, '0001-01-01 00:00Z'), '9999-12-31 23:59:59.999999Z')"  # as `within_calendar`
        return f'CASE WHEN {own} IS NOT NULL THEN (extract(epoch FROM {near}) * 1000000)::int8 END AS "{field.name}"'
    return f'r."{field.name}"'
