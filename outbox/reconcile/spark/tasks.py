"""The tasks of a comparison as a Spark plan: each executor reads both sides of its ranges itself, nothing is shuffled.

What is sent is bytes and numbers, so that it works through Spark Connect too; whatever else is needed, an executor
imports. A source that can't be read is an answer, not an exception: Spark would try it four times and log the Java
trace of each.

Arrow tables as Spark carries them: the one place that knows how their types are called there.

Spark has no binary of fixed size, and needs a time zone of the session for its times; so ids travel as binary and
times as microseconds.
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
    """Return the results (`RESULT`) of answers as they came from Spark.

    Raises:
        SourceError: one of them is that a source can't be read.
    """
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
