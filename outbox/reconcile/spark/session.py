"""A Spark session for a reconciliation: the one that is there already, or one of ours, quiet and offline."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outbox.errors import InvalidSettings, ReconcileError, pip_install
from outbox.reconcile.job import Spark
from outbox.reconcile.spark.java import cause
from outbox.reconcile.spark.launch import restore, session_settings, started, submitted
from outbox.reconcile.spark.place import Place, connect_place, place_of, spark_defaults
from outbox.reconcile.spark.ship import ship

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A process can have one Spark context. Two jobs at once would share it, and the first to end would stop it.
_ONE_AT_A_TIME = threading.RLock()


@dataclass(frozen=True, slots=True)
class Session:
    """A Spark session, and where it runs."""

    spark: SparkSession
    place: Place

    @property
    def cores(self) -> int:
        """How many tasks run at once, in a place that is in this process."""
        return self.spark.sparkContext.defaultParallelism

    @property
    def ui(self) -> str | None:
        """The address of Spark's web page; None without one."""
        return None if self.place.connect else self.spark.sparkContext.uiWebUrl


@contextmanager
def session(options: Spark, workers: int) -> Iterator[Session]:
    """Open a Spark session that has this package on its executors.

    A session that is active in this process, and under spark-submit the master that it has chosen, are taken as they
    are: the session of somebody else is neither stopped nor changed. One of ours ends with the block, and the
    Java process with it. In one process there is one at a time: another thread waits.

    In the environment of this process only what PySpark itself sets for its use stays (``SPARK_AUTH_SOCKET_TIMEOUT``,
    ``SPARK_BUFFER_SIZE``).

    Raises:
        InvalidSettings: the options contradict each other, or what is there already.
        ReconcileError: Spark isn't installed, finds no Java, or doesn't start.
    """
    try:
        import pyspark  # noqa: F401, PLC0415
    except ImportError:
        raise ReconcileError(f"Spark isn't installed; mend: {pip_install('spark')}") from None
    with (
        _ONE_AT_A_TIME,
        tempfile.TemporaryDirectory(prefix="outbox-spark-") as folder,
        _chosen(options, workers, Path(folder)) as opened,
    ):
        ship(opened.spark, opened.place, Path(folder))
        if opened.place.connect and options.jdbc_jar is not None:
            opened.spark.addArtifacts(str(options.jdbc_jar))
        yield opened


def _chosen(options: Spark, workers: int, folder: Path) -> AbstractContextManager[Session]:
    if options.jdbc_jar is not None and not options.jdbc_jar.is_file():
        raise InvalidSettings(f"jdbc_jar = {options.jdbc_jar} is no file; name the jar of the PostgreSQL driver")
    if (active := _active()) is not None:
        return _borrowed(active, options)
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        return _submitted(options, workers)
    defaults = spark_defaults()
    place = place_of(options, workers, defaults)
    if place.connect:
        return _connected(options, place)
    return _launched(options, workers, folder, place, defaults)


@contextmanager
def _launched(options: Spark, workers: int, folder: Path, place: Place, defaults: dict[str, str]) -> Iterator[Session]:
    with started(place, folder, session_settings(options, workers), defaults | dict(options.conf)) as spark:
        yield Session(spark, place)


@contextmanager
def _submitted(options: Spark, workers: int) -> Iterator[Session]:
    with submitted(session_settings(options, workers), options.conf) as spark:
        yield _checked(Session(spark, Place(str(spark.sparkContext.master))), options)


@contextmanager
def _borrowed(active: SparkSession, options: Spark) -> Iterator[Session]:
    # Of its own settings, in the same application: what is set here isn't seen there.
    spark = active.newSession()
    place = _place(spark)
    for name, value in options.conf.items():
        spark.conf.set(name, value)
    try:
        yield _checked(Session(spark, place), options)
    finally:
        if place.connect:
            spark.stop()


@contextmanager
def _connected(options: Spark, place: Place) -> Iterator[Session]:
    from pyspark.sql import SparkSession  # noqa: PLC0415

    # PySpark marks the whole process as a client, and the next session could be no other.
    before = {name: os.environ.get(name) for name in ("SPARK_CONNECT_MODE_ENABLED", "SPARK_REMOTE")}
    try:
        try:
            address = options.remote or os.environ["SPARK_REMOTE"]
            spark = SparkSession.builder.remote(address).config(map=dict(options.conf)).create()
        except ImportError as error:
            raise ReconcileError(
                f"Spark Connect needs more than is installed; mend: pip install 'pyspark[connect]' ({error})"
            ) from None
        except Exception as error:
            raise ReconcileError(f"no session at {place}: {cause(error)}") from None
        try:
            yield Session(spark, place)
        finally:
            spark.stop()
    finally:
        restore(before)


def _active() -> SparkSession | None:
    from pyspark import SparkContext  # noqa: PLC0415
    from pyspark.sql import SparkSession  # noqa: PLC0415
    from pyspark.sql.utils import is_remote  # noqa: PLC0415

    if is_remote():
        return SparkSession.getActiveSession()
    context = SparkContext._active_spark_context
    # A context without session, or whose session is of another thread, is as much somebody else's.
    return None if context is None else SparkSession.getActiveSession() or SparkSession(context)


def _place(spark: SparkSession) -> Place:
    from pyspark.sql.utils import is_remote  # noqa: PLC0415

    if is_remote():
        return connect_place(f"sc://{spark.client.host}")
    return Place(str(spark.sparkContext.master))


def _checked(opened: Session, options: Spark) -> Session:
    asked = options.remote or options.master
    if asked is not None and Place(asked.partition(";")[0].rstrip("/")) != opened.place:
        raise InvalidSettings(
            f"this process has a Spark session on {opened.place} already, and {asked.partition(';')[0]} is asked "
            "for; mend: leave out master and remote"
        )
    return opened
