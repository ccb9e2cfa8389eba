"""Start Spark's Java process for a session of ours, quietly, and end it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import outbox
from outbox.errors import ReconcileError
from outbox.reconcile.job import Spark
from outbox.reconcile.spark.java import cause, find_java, launcher_home
from outbox.reconcile.spark.place import Place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOOPBACK = "127.0.0.1"
# sh, bash, env and dirname, which Spark's scripts call.
_TOOLS = ("/usr/bin", "/bin")


def session_settings(options: Spark, workers: int) -> dict[str, str]:
    """Return what every session of ours is given, wherever it runs."""
    settings = {
        "spark.app.name": "outbox reconcile",
        "spark.ui.enabled": str(options.ui).lower(),
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(4 * workers),
        "spark.sql.catalogImplementation": "in-memory",
        # The findings of all tasks come to the driver; without limit, as in this process.
        "spark.driver.maxResultSize": "0",
    }
    if options.jdbc_jar is not None:
        settings["spark.jars"] = str(options.jdbc_jar)
    return settings


def local_settings(place: Place, folder: Path, log_config: Path) -> dict[str, str]:
    """Return what a driver of ours needs: its files in ``folder``, and no port that others can reach."""
    settings = {
        "spark.local.dir": str(folder),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.driver.extraJavaOptions": f'"-Dlog4j2.configurationFile={log_config.as_uri()}"',
        "spark.driver.memory": "1g",
    }
    if place.on_this_host:
        settings |= {"spark.driver.host": _LOOPBACK, "spark.driver.bindAddress": _LOOPBACK}
    package = Path(outbox.__file__).parents[1]
    if place.in_process and package.is_dir():
        # Also where the package isn't installed but lies in the folder that the driver was started from.
        settings["spark.executorEnv.PYTHONPATH"] = str(package)
    return settings


@contextmanager
def started(place: Place, folder: Path, ours: Mapping[str, str], given: Mapping[str, str]) -> Iterator[SparkSession]:
    """Start Java and a session in it; both end with the block. ``given`` goes before ``ours``.

    While it starts, and only then, this process has other values of JAVA_HOME, PATH, SPARK_LOCAL_IP and
    PYSPARK_PYTHON.

    Raises:
        ReconcileError: it doesn't start.
    """
    from pyspark.sql import SparkSession  # noqa: PLC0415

    with as_file(files(__package__) / "log4j2.properties") as log_config:
        settings = dict(ours) | local_settings(place, folder, log_config) | {"spark.master": place.address}
        settings = merged(settings, given)
        with _environment(_launch_environment(place)), _own_interrupts():
            try:
                spark = SparkSession.builder.config(map={**settings}).getOrCreate()
            except Exception as error:
                said = cause(error)  # asks Java
                _end_java()
                raise ReconcileError(f"Spark doesn't start on {place}: {said}") from None
        try:
            yield spark
        finally:
            with _own_interrupts():
                spark.stop()
                _end_java()


def merged(ours: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Return ours and what was given, which wins; of Java's options both are kept, those given last."""
    result = {**ours, **given}
    options = "spark.driver.extraJavaOptions"
    if options in ours and options in given:
        result[options] = f"{ours[options]} {given[options]}"
    return result


@contextmanager
def submitted(ours: Mapping[str, str], given: Mapping[str, str]) -> Iterator[SparkSession]:
    """Start a session in the Java process of spark-submit, which has chosen the master; it ends with the block."""
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415
    from pyspark.sql import SparkSession  # noqa: PLC0415

    SparkContext._ensure_initialized()
    chosen: dict[str, str] = dict(SparkConf().getAll())
    with _own_interrupts():
        spark = SparkSession.builder.config(map={**merged({**ours, **chosen}, given)}).getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def _launch_environment(place: Place) -> dict[str, str]:
    path = os.environ.get("PATH", "")
    missing = [tool for tool in _TOOLS if tool not in path.split(os.pathsep)]
    environment = {
        "JAVA_HOME": str(launcher_home(find_java())),
        "PATH": os.pathsep.join([*filter(None, [path]), *missing]),
    }
    if place.on_this_host:
        environment["SPARK_LOCAL_IP"] = _LOOPBACK
        environment["PYSPARK_PYTHON"] = os.environ.get("PYSPARK_PYTHON", sys.executable)
    return environment


@contextmanager
def _environment(changed: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        restore(before)


def restore(before: Mapping[str, str | None]) -> None:
    """Give variables of the environment back the values that they had; None: there was none."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _own_interrupts() -> Iterator[None]:
    # Spark installs a handler of its own, for good, and a worker that drains on Ctrl-C would lose its own.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _end_java() -> None:
    # SparkContext keeps its Java process for the next session: 400 MB in a worker that sleeps until the next night.
    from pyspark import SparkContext  # noqa: PLC0415

    gateway: Any = SparkContext._gateway
    SparkContext._gateway = SparkContext._jvm = None
    if gateway is None:
        return
    with suppress(Exception):
        gateway.shutdown()
    if gateway.proc is not None:
        gateway.proc.stdin.close()
        gateway.proc.wait()
