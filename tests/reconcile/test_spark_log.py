"""A topic's log on Spark: as a table, as a stream into files, and each message once, however often it is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from outbox.reconcile.spark.log import register
from tests.kit import tries, wait_until
from tests.reconcile.spark_log_process import stream
from tests.reconcile.test_topic_log import TOPIC, send
from tests.reconcile.town import Town, url_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
#: How often the stream's processes are killed in the midst of their work.
KILLS = tries(1)


@pytest.fixture
def log_url(town: Town, tmp_path: Path) -> Iterator[str]:
    """The option that names the database: a file, since the session's own environment is older than the database."""
    passwords = tmp_path / "pgpass"
    url = town.producer.url
    passwords.write_text(f"{url.host}:{url.port}:*:{url.username}:{url.password}\n")
    passwords.chmod(0o600)
    yield url._replace(password=None).update_query_dict({"passfile": str(passwords)}).render_as_string()


def lake_of(path: Path, spark: SparkSession) -> pa.Table:
    """Return what a lake has."""
    return spark.read.parquet(str(path)).toArrow()


def cents(table: pa.Table) -> Decimal:
    """Return the sum of the amounts in the bodies."""
    return sum((Decimal(body.decode()) for body in table["body"].to_pylist()), Decimal())


def amounts(number: int) -> list[Decimal]:
    """Return amounts that are no round numbers."""
    return [Decimal(each * 7919 % 100_003) / 100 for each in range(1, number + 1)]


def pay(town: Town, paid: list[Decimal]) -> list[str]:
    """Send amounts; return the ids."""
    return send(town, [str(each).encode() for each in paid])


def test_a_log_is_a_table(spark: SparkSession, town: Town, log_url: str) -> None:
    """All that is kept is read, by several tasks; columns and filters are Spark's."""
    sent = pay(town, amounts(200))
    register(spark)
    frame = spark.read.format("outbox").options(topic=TOPIC, url=log_url, rows_per_partition="20").load()
    assert frame.rdd.getNumPartitions() > 8
    table = frame.toArrow()
    assert sorted(table["message_id"].to_pylist()) == sorted(sent)
    assert cents(table) == sum(amounts(200))
    assert frame.filter("queue = 0").count() == pc.sum(pc.equal(table["queue"], 0)).as_py()


def test_an_option_that_cant_be_is_named(spark: SparkSession, log_url: str) -> None:
    """What Spark raises says what is wrong, and has no password."""
    from pyspark.errors import AnalysisException, PySparkException

    register(spark)
    with pytest.raises((AnalysisException, PySparkException), match="max_row"):
        spark.read.format("outbox").options(topic=TOPIC, url=log_url, max_row="5").load().collect()


def test_a_stream_is_taken_up_where_it_ended(spark: SparkSession, town: Town, log_url: str, tmp_path: Path) -> None:
    """Each run adds what is new, in batches that are bounded; a run without news adds nothing."""
    lake, checkpoint = tmp_path / "lake", tmp_path / "checkpoint"
    paid = amounts(tries(260))
    sent: list[str] = []
    for part in (paid[:150], paid[150:160], [], paid[160:]):
        sent += pay(town, part)
        batches = -(-len(part) // 100)
        assert stream(spark, TOPIC, str(lake), str(checkpoint), url=log_url, max_rows="100") == batches
        table = lake_of(lake, spark)
        assert sorted(table["message_id"].to_pylist()) == sorted(sent)
    assert cents(lake_of(lake, spark)) == sum(paid)


def test_a_log_that_went_back_ends_the_stream(spark: SparkSession, town: Town, log_url: str, tmp_path: Path) -> None:
    """Nothing is added to what was read of another log."""
    from pyspark.errors import StreamingQueryException

    lake, checkpoint = tmp_path / "lake", tmp_path / "checkpoint"
    pay(town, amounts(30))
    stream(spark, TOPIC, str(lake), str(checkpoint), url=log_url)
    newest = "SELECT queue, max(position) FROM {s}.message GROUP BY 1"
    town.at_producer(f"DELETE FROM {{s}}.message WHERE (queue, position) IN ({newest})")
    with pytest.raises(StreamingQueryException, match="went back"):
        stream(spark, TOPIC, str(lake), str(checkpoint), url=log_url)
    assert lake_of(lake, spark).num_rows == 30


@pytest.mark.slow
@pytest.mark.timeout(600 + 60 * KILLS)
def test_each_message_is_in_the_lake_once_whatever_is_killed(
    town: Town, tmp_path: Path, spark: SparkSession, log_url: str
) -> None:
    """The stream's processes are killed while they work, and more is sent; at last the lake equals the tables."""
    chance = random.Random(11)  # noqa: S311 - moments, no secrets
    lake, checkpoint = tmp_path / "lake", tmp_path / "checkpoint"
    paid, sent = list[Decimal](), list[str]()
    command = [sys.executable, "-m", "tests.reconcile.spark_log_process", TOPIC, str(lake), str(checkpoint)]
    environment = {**os.environ, "LOG_URL": url_of(town.producer), "PYTHONPATH": str(ROOT)}

    def send_more() -> None:
        paid.extend(more := amounts(300))
        sent.extend(pay(town, more))

    def begun() -> int:
        return len([*checkpoint.glob("offsets/[0-9]*")])

    killed = 0
    while killed < KILLS:
        send_more()
        before = begun()
        with subprocess.Popen(
            command, env=environment, cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE
        ) as process:
            wait_until(lambda: begun() > before or process.poll() is not None, "a batch has begun")  # noqa: B023
            try:
                _, said = process.communicate(timeout=chance.uniform(0.0, 2.0))
                assert process.returncode == 0, said
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                killed += 1
    send_more()
    stream(spark, TOPIC, str(lake), str(checkpoint), url=log_url, max_rows="100", rows_per_partition="30")
    table = lake_of(lake, spark)
    assert len(table["message_id"].unique()) == table.num_rows == len(sent)
    assert set(table["message_id"].to_pylist()) == set(sent)
    assert cents(table) == sum(paid)
