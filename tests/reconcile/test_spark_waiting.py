"""A cluster that has no place: the run ends, says why, and holds nothing in the databases meanwhile."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyspark
import pytest
from sqlalchemy import text

from outbox.errors import ReconcileError
from outbox.reconcile.job import EngineName, Interrupted, Spark
from outbox.reconcile.spark.frames import SparkEngine
from outbox.reconcile.spark.session import find_java, launcher_home
from tests.kit import wait_until
from tests.reconcile.town import IN_SYNC, Progress, Town

# So soon Spark says that nothing takes its job up; it is patient otherwise.
CONF = {"spark.starvation.timeout": "1s"}
HELD = text("SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction' AND pid <> pg_backend_pid()")


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A standalone master of Spark's, without a worker."""
    folder = tmp_path_factory.mktemp("master")
    log = folder / "log"
    environment = {**os.environ, "JAVA_HOME": str(launcher_home(find_java(), folder)), "SPARK_LOCAL_IP": "127.0.0.1"}
    options = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
    command = [str(Path(pyspark.__file__).parent / "bin" / "spark-class"), "org.apache.spark.deploy.master.Master"]
    with (
        log.open("wb") as stderr,
        subprocess.Popen(
            [*command, *options], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr
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
        town.reconcile(progress=watching, engine=EngineName.SPARK, spark=Spark({"spark.master": master}))
    assert watching.held == [0] * 6
    assert town.rows("SELECT error FROM outbox.reconciliation_run") == ["interrupted"]


def test_a_cluster_without_a_place_is_told(master: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The wait ends, and the error says what to do; stderr has what Spark says."""
    with SparkEngine(Spark({"spark.master": master, **CONF}), 2) as engine:
        assert engine.session.master.address == master  # it has started by now, however long that took
        engine._options = replace(engine._options, max_wait=1.0)
        told: list[str] = []

        def said() -> None:
            def is_told() -> bool:
                told.append(capfd.readouterr().err)
                return "Initial job has not accepted any resources" in "".join(told)

            wait_until(is_told, "Spark has said it")

        with pytest.raises(ReconcileError, match=r"has run no task within max_wait = 1\.0s: .*mend: "):
            engine.start(said)
