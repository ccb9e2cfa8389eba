"""A topic's log in an Iceberg table: each batch once, whatever happens around the commit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from outbox.reconcile.spark.iceberg import PROPERTY, appending
from tests.kit import tries
from tests.reconcile.spark_iceberg_process import Append, stream, table_of
from tests.reconcile.test_spark_log import ROOT, amounts, cents, log_url, pay  # noqa: F401 - a fixture
from tests.reconcile.test_topic_log import TOPIC
from tests.reconcile.town import Town, url_of

if TYPE_CHECKING:
    from pyiceberg.table import Table
    from pyspark.sql import DataFrame, SparkSession


def check(folder: Path, sent: list[str], paid: list[Decimal]) -> None:
    """See that each message is in the table once, with its amount."""
    rows = table_of(folder).scan().to_arrow()
    assert sorted(rows["message_id"].to_pylist()) == sorted(sent)
    assert cents(rows) == sum(paid)


@pytest.fixture
def run(spark: SparkSession, log_url: str, tmp_path: Path) -> Callable[[Append], None]:  # noqa: F811
    """A function that streams what is there, in batches of 50."""
    return lambda append: stream(spark, TOPIC, tmp_path, append, url=log_url, max_rows="50")


def test_a_batch_that_spark_tells_of_again_is_there_once(
    run: Callable[[Append], None], town: Town, tmp_path: Path
) -> None:
    """The commit was made, and the checkpoint doesn't know of it; the table does, also without its snapshots."""
    from pyspark.errors import StreamingQueryException

    append = appending(lambda: table_of(tmp_path))

    def torn(frame: DataFrame, batch: int) -> None:
        append(frame, batch)
        if batch == 1:
            raise RuntimeError("the driver dies here")

    paid = amounts(120)
    sent = pay(town, paid)
    with pytest.raises(StreamingQueryException, match="the driver dies here"):
        run(torn)
    assert table_of(tmp_path).scan().to_arrow().num_rows == 100
    run(append)
    check(tmp_path, sent, paid)
    table = table_of(tmp_path)
    assert [snapshot.summary["outbox.batch"] for snapshot in table.snapshots() if snapshot.summary] == ["0", "1", "2"]
    (name,) = [name for name in table.properties if name.startswith(PROPERTY)]
    assert table.properties[name] == "[2, 20]"


def test_another_writer_is_no_trouble(run: Callable[[Append], None], town: Town, tmp_path: Path) -> None:
    """A commit that another one overtakes is made again, and leaves the other's rows alone."""
    paid = amounts(40)
    sent = pay(town, paid)
    others: list[int] = []

    def overtaken() -> Table:
        table = table_of(tmp_path)
        if len(others) < 2:
            others.append(1)
            table_of(tmp_path).append(table.scan().to_arrow())  # nothing, but a snapshot
        return table

    run(appending(overtaken))
    assert len(others) == 2
    check(tmp_path, sent, paid)


def test_two_processes_with_one_checkpoint(run: Callable[[Append], None], town: Town, tmp_path: Path) -> None:
    """One of them was taken for dead: the commit of the other one comes first, and is seen."""
    append, others = appending(lambda: table_of(tmp_path)), list[int]()

    def late(frame: DataFrame, batch: int) -> None:
        def overtaken() -> Table:
            table = table_of(tmp_path)
            if not others:
                others.append(batch)
                append(frame, batch)
            return table

        appending(overtaken)(frame, batch)

    paid = amounts(40)
    sent = pay(town, paid)
    run(late)
    check(tmp_path, sent, paid)


def test_a_checkpoint_that_was_put_back_is_refused(run: Callable[[Append], None], town: Town, tmp_path: Path) -> None:
    """Its batches have the numbers of others, so that nothing says which of their messages the table has."""
    from pyspark.errors import StreamingQueryException

    append = appending(lambda: table_of(tmp_path))
    for _ in range(2):
        pay(town, amounts(10))
        run(append)
    for part in ("offsets", "commits"):
        for name in ("1", ".1.crc"):
            (tmp_path / "checkpoint" / part / name).unlink()
    pay(town, amounts(3))
    with pytest.raises(StreamingQueryException, match=r"batch 1 of 13 rows comes after batch 1 of 10 rows"):
        run(append)
    assert table_of(tmp_path).scan().to_arrow().num_rows == 20


@pytest.mark.slow
def test_killed_before_and_after_a_commit(
    spark: SparkSession,
    town: Town,
    log_url: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    """SIGKILL just before the table's commit, and between it and the checkpoint's; at last all is there once."""
    command = [sys.executable, "-m", "tests.reconcile.spark_iceberg_process", TOPIC, str(tmp_path)]
    environment = {**os.environ, "LOG_URL": url_of(town.producer), "PYTHONPATH": str(ROOT)}
    kills = (("before", "0"), *(("after", str(batch)) for batch in range(1, 1 + tries(1))))
    paid, sent = amounts(150 * (len(kills) + 1)), list[str]()
    for number, kill in enumerate(kills):
        sent += pay(town, paid[150 * number : 150 * (number + 1)])
        with subprocess.Popen([*command, *kill], env=environment, cwd=ROOT, stderr=subprocess.PIPE) as process:
            _, said = process.communicate()
        assert process.returncode == -signal.SIGKILL, said
    sent += pay(town, paid[-150:])
    stream(spark, TOPIC, tmp_path, appending(lambda: table_of(tmp_path)), url=log_url, max_rows="100")
    check(tmp_path, sent, paid)
