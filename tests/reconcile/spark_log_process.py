"""Streams a topic's log into Parquet files until all is there that was when it began; it may be killed at any time.

Run as ``python -m tests.reconcile.spark_log_process TOPIC LAKE CHECKPOINT``; the database is in ``LOG_URL``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from outbox.reconcile.job import Spark
from outbox.reconcile.spark.log import register
from outbox.reconcile.spark.session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.listener import StreamingQueryProgress
    from pyspark.sql.streaming.readwriter import DataStreamWriter


def stream(spark: SparkSession, topic: str, lake: str, checkpoint: str, **options: str) -> int:
    """Stream what is there now; return in how many batches."""
    register(spark)
    source = spark.readStream.format("outbox").options(topic=topic, **options).load()
    sink = source.writeStream.format("parquet").option("path", lake).option("checkpointLocation", checkpoint)
    return len([each for each in run(sink.trigger(availableNow=True)) if each["numInputRows"]])


def run(sink: DataStreamWriter) -> Sequence[StreamingQueryProgress]:
    """Run a stream to its end, and return its progress.

    A Python that Spark starts for it has ten seconds until it must connect (PythonWorkerFactory of Spark). On a machine
    that is too busy for that the query ends before it has begun, and is begun again, as whoever runs one would.
    """
    from pyspark.errors import StreamingQueryException

    while True:
        query = sink.start()
        try:
            query.awaitTermination()
        except StreamingQueryException as error:
            if "Python worker failed to connect back" not in str(error):
                raise
        else:
            return query.recentProgress


def main() -> None:
    """Stream; what goes wrong is told while Spark is still there to say it."""
    from pyspark.errors import PySparkException

    with session(Spark(conf={"spark.sql.shuffle.partitions": "1"}), 2) as opened:
        try:
            stream(opened.spark, *sys.argv[1:], url_env="LOG_URL", max_rows="100", rows_per_partition="30")
        except PySparkException as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
