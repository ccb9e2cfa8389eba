"""The log of a topic as a stream of Spark into Parquet files, against one reader that writes the same files."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.lab import Benchmark, Lab
from benchmarks.measure import Figure, compared, interleave
from benchmarks.reconcile import books_of, rows_of
from benchmarks.reconcile_fill import TOPIC
from benchmarks.usage import Usage
from outbox.reader import Reader
from outbox.reconcile.job import Spark
from outbox.reconcile.spark.log import register
from outbox.reconcile.spark.session import session
from outbox.reconcile.spark.topic_log import LOG, LogOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_URL = "OUTBOX_BENCH_LOG_URL"
#: What is filled has gaps, where messages were rolled back after they had their numbers.
_OPTIONS = {"topic": TOPIC, "url_env": _URL, "on_pruned": "skip"}


def run(lab: Lab) -> Iterator[Figure]:
    """Stream a day's log, with bodies of 150 bytes, several times into folders of their own."""
    rows, rounds = rows_of(lab, lab.scale(2_000_000, 100_000)), lab.scale(3, 1)
    books = books_of(lab)
    os.environ[_URL] = lab.urls["producer"]
    with closing(lab.psycopg("producer")) as connection, tempfile.TemporaryDirectory() as folder:
        books.prepare(rows, int(time.time() * 1000))
        books.fill(1, rows, in_bulk=True)
        books.vacuum()
        with session(Spark(), 2) as opened, Usage(os.getpid(), connection.info.backend_pid) as usage:
            register(opened.spark)
            costs: list[float] = []

            def stream() -> float:
                before = usage.seconds
                value = _rate(lambda to: _stream(opened.spark, to), Path(folder))
                costs.append(usage.seconds - before)
                return value

            arms = {"stream": stream, "reader": lambda: _rate(_read, Path(folder))}
            found = interleave(arms, rounds)
        what, against = f"stream of {rows / 1e6:g} million messages into Parquet", "one reader in this process"
        yield compared(what, "rows", found["stream"], against, found["reader"], None)
        micros = min(costs) / rows * 1e6
        yield Figure("CPU of Spark, its Python and PostgreSQL a message", f"{micros:.1f} µs")
        yield Figure("peak memory of Spark and its Python", f"{usage.peak:,.0f} MiB")
    books.empty()


def _rate(write: Callable[[Path], int], folder: Path) -> float:
    with tempfile.TemporaryDirectory(dir=folder) as mine:
        began = time.perf_counter()
        rows = write(Path(mine))
        return rows / (time.perf_counter() - began)


def _stream(spark: SparkSession, to: Path) -> int:
    source = spark.readStream.format("outbox").options(**_OPTIONS).load()
    sink = source.writeStream.format("parquet").option("path", str(to / "lake"))
    query = sink.option("checkpointLocation", str(to / "checkpoint")).trigger(availableNow=True).start()
    query.awaitTermination()
    return sum(each["numInputRows"] for each in query.recentProgress)


def _read(to: Path) -> int:
    log, rows = Reader(form="text").read(LogOptions, _OPTIONS).log(), 0
    with pq.ParquetWriter(to / "log.parquet", LOG) as file:
        for stretch in log.stretches(log.first(), log.end(), 50_000):
            for batch in log.read(stretch):
                file.write_table(pa.Table.from_batches([batch], LOG))
                rows += batch.num_rows
    return rows


BENCHMARK = Benchmark(run, ("producer", "consumer"))
