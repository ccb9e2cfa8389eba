"""The log of a topic as a stream of Spark into Parquet files, against one reader that writes the same files.

And how far behind the stream is while another process sends and dispatches at a steady rate: from a message's birth to
the moment in which Spark's sink has committed the file that it is in.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import create_engine

from benchmarks.lab import Benchmark, Lab
from benchmarks.measure import Figure, compared, interleave
from benchmarks.reconcile import books_of, rows_of
from benchmarks.reconcile_fill import TOPIC
from benchmarks.reconcile_follow import ended, send_steadily
from benchmarks.usage import Usage, processor_seconds
from outbox import Outbox, Settings
from outbox.reader import Reader
from outbox.reconcile.job import Spark
from outbox.reconcile.spark.log import LOG, LogOptions, register
from outbox.reconcile.spark.session import session
from outbox.worker import Worker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_URL = "OUTBOX_BENCH_LOG_URL"
#: The filled log has gaps, where messages were rolled back after they had their numbers.
_OPTIONS = {"topic": TOPIC, "url_env": _URL, "on_pruned": "skip"}
#: Messages a second while the lag is measured, and how often (seconds) Spark looks for more.
_STEADY, _TRIGGER = 500, 1
#: Seconds until Spark's first batches are done and its Java has compiled what it runs.
_WARM_UP = 30


def run(lab: Lab) -> Iterator[Figure]:
    """Stream a day's log, with bodies of 150 bytes, several times into folders of their own; then new messages."""
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
    yield from _behind(lab, lab.scale(180, 20))


def _behind(lab: Lab, seconds: int) -> Iterator[Figure]:
    """Stream what another process sends, for so long, and tell how far behind the lake was."""
    context = get_context("spawn")
    end = context.Event()
    sender = context.Process(target=_send, args=(lab.urls["producer"], end), daemon=True)
    sender.start()
    with ended([sender], end), tempfile.TemporaryDirectory() as folder, session(Spark(), 2) as opened:
        register(opened.spark)

        def cpu() -> float:
            return processor_seconds(os.getpid()) - processor_seconds(int(sender.pid or 0))

        query = _query(opened.spark, Path(folder), {"processingTime": f"{_TRIGGER} second"}, start="now")
        time.sleep(_WARM_UP)
        since, before = time.time(), cpu()
        time.sleep(seconds)
        until, after = time.time(), cpu()
        query.stop()
        query.awaitTermination()
        lags = [lag for at, lag in _lags(Path(folder) / "lake") if since < at < until]
    of_hundred = statistics.quantiles(lags, n=100)
    yield Figure(
        f"behind at {len(lags) / seconds:,.0f} messages/s, a trigger of {_TRIGGER} s: median, 99 of 100, longest",
        f"{of_hundred[49]:.2f} s, {of_hundred[98]:.2f} s, {max(lags):.2f} s",
    )
    yield Figure("processor of Spark and its Python meanwhile", f"{(after - before) / seconds:.0%}")


def _send(url: str, end: Any) -> None:
    engine = create_engine(url)
    outbox = Outbox(engine, settings=Settings())
    with Worker(outbox, roles=["dispatch"]):
        send_steadily(outbox, engine, _STEADY, end)


def _lags(lake: Path) -> Iterator[tuple[float, float]]:
    """Return when each message got into the lake, and how long (seconds) after its birth.

    The sink has committed a file when the record of its batch is there: ``_spark_metadata/7``, of which each tenth,
    ``9.compact``, repeats those before.
    """
    seen: set[str] = set()
    records = (path for path in (lake / "_spark_metadata").iterdir() if path.name.split(".")[0].isdecimal())
    for record in sorted(records, key=lambda path: int(path.name.split(".")[0])):
        at = record.stat().st_mtime
        paths = {Path(json.loads(line)["path"]).name for line in record.read_text().splitlines()[1:]}
        for name in paths - seen:
            for id_ in pq.read_table(lake / name, columns=["message_id"])["message_id"].to_pylist():
                yield at, at - (UUID(id_).int >> 80) / 1000
        seen |= paths


def _rate(write: Callable[[Path], int], folder: Path) -> float:
    with tempfile.TemporaryDirectory(dir=folder) as mine:
        began = time.perf_counter()
        rows = write(Path(mine))
        return rows / (time.perf_counter() - began)


def _stream(spark: SparkSession, to: Path) -> int:
    query = _query(spark, to, {"availableNow": True})
    query.awaitTermination()
    return sum(each["numInputRows"] for each in query.recentProgress)


def _query(spark: SparkSession, to: Path, trigger: dict[str, Any], **options: str) -> StreamingQuery:
    source = spark.readStream.format("outbox").options(**_OPTIONS, **options).load()
    sink = source.writeStream.format("parquet").option("path", str(to / "lake"))
    return sink.option("checkpointLocation", str(to / "checkpoint")).trigger(**trigger).start()


def _read(to: Path) -> int:
    log, rows = Reader(form="text").read(LogOptions, _OPTIONS).log(), 0
    with pq.ParquetWriter(to / "log.parquet", LOG) as file:
        for stretch in log.stretches(log.first(), log.end(), 50_000):
            for batch in log.read(stretch):
                file.write_table(pa.Table.from_batches([batch], LOG))
                rows += batch.num_rows
    return rows


BENCHMARK = Benchmark(run, ("producer", "consumer"))
