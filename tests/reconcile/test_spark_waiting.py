"""A cluster that isn't there, or has no place: the run ends, says why, and holds nothing in the databases meanwhile."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyspark
import pytest
from sqlalchemy import text

from outbox.errors import ReconcileError
from outbox.reconcile.job import EngineName, Interrupted, Spark
from outbox.reconcile.spark.engine import SparkEngine
from outbox.reconcile.spark.java import find_java, launcher_home
from outbox.reconcile.spark.session import last_warning
from tests.kit import wait_until
from tests.reconcile.town import IN_SYNC, Progress, Town

# So soon Spark says that nothing takes its job up; it is patient otherwise.
CONF = {"spark.starvation.timeout": "1s"}
HELD = text("SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction' AND pid <> pg_backend_pid()")


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A standalone master of Spark's, without a worker."""
    log = tmp_path_factory.mktemp("master") / "log"
    environment = {**os.environ, "JAVA_HOME": str(launcher_home(find_java())), "SPARK_LOCAL_IP": "127.0.0.1"}
    options = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
    command = [str(Path(pyspark.__file__).parent / "bin" / "spark-class"), "org.apache.spark.deploy.master.Master"]
    with (
        log.open("wb") as stderr,
        subprocess.Popen(
            [*command, *options],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        ) as process,
    ):
        try:
            yield address_in(log, process)
        finally:
            process.terminate()


def address_in(log: Path, process: subprocess.Popen[bytes]) -> str:
    """Return what a master says of its address once it leads."""

    def leads() -> bool:
        assert process.poll() is None, log.read_text()
        return "New state: ALIVE" in log.read_text()

    wait_until(leads, "a master leads")
    found = re.search(r"spark://127\.0\.0\.1:\d+", log.read_text())
    assert found, log.read_text()
    return found[0]


class Watching(Progress):
    """Counts the transactions that idle in both databases while Spark starts, and ends the job after some time."""

    def __init__(self, town: Town) -> None:
        super().__init__()
        self._town = town
        self.held: list[int] = []

    def done(self, steps: int) -> None:
        """Count."""
        super().done(steps)
        if len(self.held) == 6:
            raise Interrupted
        for engine in (self._town.producer, self._town.consumer):
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                self.held.append(int(connection.scalar(HELD) or 0))


def test_nothing_is_held_while_a_cluster_has_no_place(town: Town, master: str) -> None:
    """No database is read before the cluster has run a task; what hears of the progress can end the wait."""
    town.plant([IN_SYNC] * 3)
    watching = Watching(town)
    with pytest.raises(Interrupted):
        town.reconcile(progress=watching, engine=EngineName.SPARK, spark=Spark(master=master))
    assert watching.held == [0] * 6
    assert town.rows("SELECT error FROM outbox.reconciliation_run") == ["interrupted"]


def test_a_cluster_without_a_place_is_told(master: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The wait ends; the error and stderr say what Spark says."""
    waits = Spark(master=master, conf=CONF)
    with SparkEngine(waits, 2) as engine:
        assert engine.session.master.address == master  # it has started by now, however long that took
        engine._options = replace(waits, max_wait=1.0)

        def said() -> None:
            wait_until(lambda: "Initial job has not" in last_warning(engine.session.log), "Spark has said it")

        with pytest.raises(ReconcileError, match=r"has run no task within max_wait = 1\.0s: .*mend: ") as caught:
            engine.start(said)
    assert "Initial job has not accepted any resources" in str(caught.value)
    assert "Initial job has not accepted any resources" in capfd.readouterr().err


def test_a_master_that_is_away_ends_the_run(town: Town) -> None:
    """A master that doesn't answer is named, with what Spark says of it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"spark://127.0.0.1:{taken.getsockname()[1]}"
    # Where the machine is busy, Java has only begun when the wait is over, and Spark has said nothing yet.
    for wait in (8.0, 16.0, 32.0, 64.0):
        told = rf"Spark doesn't start on {address}: .*max_wait = {wait}s"
        with pytest.raises(ReconcileError, match=told) as caught:
            town.reconcile(engine=EngineName.SPARK, spark=Spark(master=address, max_wait=wait))
        if "Failed to connect to master" in str(caught.value):
            break
    else:
        pytest.fail(f"Spark's reason isn't told: {caught.value}")


@pytest.mark.slow
def test_a_master_that_spark_gives_up_is_told(town: Town) -> None:
    """Where Spark itself gives up, its reason is told."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"spark://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(ReconcileError, match="All masters are unresponsive"):
        town.reconcile(engine=EngineName.SPARK, spark=Spark(master=address))
