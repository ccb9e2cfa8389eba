"""The tasks of a comparison as a Spark plan: each executor reads both sides of its ranges itself, nothing is shuffled.

Bytes and numbers are sent to and fro, so that it works through Spark Connect too; whatever else is needed, an
executor imports. A source that can't be read is an answer, not an exception: Spark would try it four times and log the
Java trace of each.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from outbox.errors import SourceError
from outbox.reconcile.compare import Collected, Comparison, Task

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
