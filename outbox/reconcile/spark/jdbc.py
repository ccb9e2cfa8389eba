"""The tasks of a comparison read by Spark's own JDBC source, with the driver that the user has.

Each task is one partition of either side, read with the statement of the Arrow path; then both sides of a task are
brought together by its number, and judged by what judges them everywhere. Each connection sees what is there when it
reads: a snapshot can't be shared. What differs only for that reason is gone at the second look.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Literal, cast

import pyarrow as pa
from sqlalchemy import URL, make_url

from outbox.errors import InvalidSettings
from outbox.reconcile.compare import Comparison, Task, compared
from outbox.reconcile.judge import Rules
from outbox.reconcile.rows import CONSUMER, PRODUCER
from outbox.reconcile.source import PostgresSide, rendered
from outbox.reconcile.spark.tasks import ANSWER_DDL, answered, from_wire
from outbox.reconcile.sql import plain_rows, plan_for_rows_of_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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
