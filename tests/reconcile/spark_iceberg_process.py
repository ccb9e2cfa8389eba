"""Streams a topic's log into an Iceberg table until all is there; it kills itself around a commit, if it is to.

Run as ``python -m tests.reconcile.spark_iceberg_process TOPIC FOLDER [before|after BATCH]``; the database is in
``LOG_URL``.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pyiceberg.catalog.sql import SqlCatalog

from outbox.reconcile.job import Spark
from outbox.reconcile.spark.iceberg import appending
from outbox.reconcile.spark.log import LOG, register
from outbox.reconcile.spark.session import session
from tests.reconcile.spark_log_process import run

if TYPE_CHECKING:
    from pyiceberg.table import Table
    from pyspark.sql import DataFrame, SparkSession

Append = Callable[["DataFrame", int], None]


def table_of(folder: Path) -> Table:
    """Return the table, made where it isn't there."""
    catalog = SqlCatalog("lake", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/lake")
    catalog.create_namespace_if_not_exists("sales")
    return catalog.create_table_if_not_exists("sales.orders", schema=LOG)


def stream(spark: SparkSession, topic: str, folder: Path, append: Append, **options: str) -> None:
    """Stream what is there now."""
    register(spark)
    source = spark.readStream.format("outbox").options(topic=topic, **options).load()
    sink = source.writeStream.foreachBatch(append).option("checkpointLocation", str(folder / "checkpoint"))
    run(sink.trigger(availableNow=True))


def main() -> None:
    """Stream."""
    topic, folder, *kill = sys.argv[1:]
    add = appending(lambda: table_of(Path(folder)))

    def append(frame: DataFrame, batch: int) -> None:
        mine = kill[1:] == [str(batch)]
        if mine and kill[0] == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        add(frame, batch)
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)

    with session(Spark(), 2) as opened:
        stream(opened.spark, topic, Path(folder), append, url_env="LOG_URL", max_rows="100")


if __name__ == "__main__":
    main()
