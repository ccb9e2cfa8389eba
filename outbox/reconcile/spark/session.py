"""A Spark session for a reconciliation: the one that is there already, or one of ours, quiet and offline.

One of ours starts Java for itself and ends it. Executors that aren't threads of the driver get this package as a zip,
in the version that the driver has.
"""

from __future__ import annotations

import argparse
import hashlib
import ipaddress
import os
import re
import shlex
import signal
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from importlib.resources import as_file, files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import make_url

import outbox
from outbox.errors import InvalidSettings, ReconcileError, pip_install
from outbox.reconcile.job import Spark
from outbox.reconcile.spark.java import cause, find_java, launcher_home
from outbox.text import duration

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A process can have one Spark context. Two jobs at once would share it, and the first to end would stop it.
_ONE_AT_A_TIME = threading.RLock()

_LOOPBACK = "127.0.0.1"
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
# sh, bash, env and dirname, which Spark's scripts call.
_TOOLS = ("/usr/bin", "/bin")


@dataclass(frozen=True, slots=True)
class Session:
    """A Spark session, and where it runs. ``log`` is the file in which one of ours has its warnings."""

    spark: SparkSession
    master: Master
    log: Path | None = None


@contextmanager
def session(options: Spark, workers: int) -> Iterator[Session]:
    """Open a Spark session that has this package on its executors.

    A session that is active in this process, and under spark-submit the master that it has chosen, are taken as they
    are: the application's own session is neither stopped nor changed. One of ours ends with the block, and the
    Java process with it. In one process there is one at a time: another thread waits.

    In the environment of this process only what PySpark itself sets for its use stays (``SPARK_AUTH_SOCKET_TIMEOUT``,
    ``SPARK_BUFFER_SIZE``).

    Raises:
        InvalidSettings: the options contradict each other, or what is there already.
        ReconcileError: Spark isn't installed, finds no Java, or doesn't start.
    """
    try:
        import pyspark  # noqa: F401, PLC0415 - an extra
    except ImportError:
        raise ReconcileError(f"Spark isn't installed; mend: {pip_install('spark')}") from None
    with (
        _ONE_AT_A_TIME,
        tempfile.TemporaryDirectory(prefix="outbox-spark-") as folder,
        _chosen(options, workers, Path(folder)) as opened,
    ):
        if opened.master.connect:
            opened.spark.addArtifacts(str(package_zip(Path(folder))), pyfile=True)
        elif not opened.master.in_process:
            context = opened.spark.sparkContext
            # An executor that joins later fetches it then: it must be there as long as the context.
            context.addPyFile(str(package_zip(Path(context._temp_dir))))
        yield opened


def _chosen(options: Spark, workers: int, folder: Path) -> AbstractContextManager[Session]:
    if (active := _active()) is not None:
        return _borrowed(active, options)
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        return _submitted(options, workers)
    defaults = spark_defaults()
    master = master_of(options, workers, defaults)
    if master.connect:
        return _connected(options, master)
    return _launched(options, workers, folder, master, defaults)


@contextmanager
def _launched(
    options: Spark, workers: int, folder: Path, master: Master, defaults: Mapping[str, str]
) -> Iterator[Session]:
    """Start Java and a session in it; both end with the block. The user's own settings go before ours.

    While it starts, and only then, this process has other values of JAVA_HOME, PATH, SPARK_LOCAL_IP and
    PYSPARK_PYTHON.
    """
    from pyspark.sql import SparkSession  # noqa: PLC0415 - an extra

    with as_file(files(__package__) / "log4j2.properties") as log_config:
        log = folder / "spark.log"
        ours = _settings(options, workers) | _local_settings(master, folder, log_config, log)
        theirs = {**defaults, **options.conf}
        # Of Java's options both, the user's last.
        java_options = f"{ours[_JAVA_OPTIONS]} {theirs.get(_JAVA_OPTIONS, '')}".rstrip()
        settings = {**ours, "spark.master": master.address, **theirs, _JAVA_OPTIONS: java_options}
        with _environment(_launch_environment(master)), _own_interrupts():
            try:
                with _ending_java_after(options.max_wait) as late:
                    spark = SparkSession.builder.config(map={**settings}).getOrCreate()
            except Exception as error:
                why = f"it took longer than max_wait = {duration(options.max_wait)}" if late.is_set() else cause(error)
                _end_java()
                raise ReconcileError(f"Spark doesn't start on {master}: {why}{last_warning(log)}") from None
        try:
            yield Session(spark, master, log)
        finally:
            with _own_interrupts():
                try:
                    spark.stop()
                finally:
                    _end_java()


@contextmanager
def _submitted(options: Spark, workers: int) -> Iterator[Session]:
    """Start a session in the Java process of spark-submit, which has chosen the master; it ends with the block."""
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415 - an extra
    from pyspark.sql import SparkSession  # noqa: PLC0415 - an extra

    SparkContext._ensure_initialized()
    chosen: dict[str, str] = dict(SparkConf().getAll())
    settings = {**_settings(options, workers), **chosen, **options.conf}
    with _own_interrupts():
        spark = SparkSession.builder.config(map={**settings}).getOrCreate()
    try:
        yield _checked(Session(spark, Master(str(spark.sparkContext.master))), options)
    finally:
        spark.stop()


@contextmanager
def _borrowed(active: SparkSession, options: Spark) -> Iterator[Session]:
    from pyspark.sql.utils import is_remote  # noqa: PLC0415 - an extra

    # Of its own settings, in the same application: a setting here isn't seen there.
    spark = active.newSession()
    master = Master(f"sc://{spark.client.host}" if is_remote() else str(spark.sparkContext.master))
    for name, value in options.conf.items():
        spark.conf.set(name, value)
    try:
        yield _checked(Session(spark, master), options)
    finally:
        if master.connect:
            spark.stop()


@contextmanager
def _connected(options: Spark, master: Master) -> Iterator[Session]:
    from pyspark.sql import SparkSession  # noqa: PLC0415 - an extra

    # PySpark marks the whole process as a client, and the next session could be no other.
    with _environment({}, also=("SPARK_CONNECT_MODE_ENABLED", "SPARK_REMOTE")):
        try:
            address = options.remote or os.environ["SPARK_REMOTE"]
            spark = SparkSession.builder.remote(address).config(map=dict(options.conf)).create()
        except ImportError as error:
            raise ReconcileError(
                f"Spark Connect needs more than is installed; mend: pip install 'pyspark[connect]' ({error})"
            ) from None
        except Exception as error:
            raise ReconcileError(f"no session at {master}: {cause(error)}") from None
        try:
            yield Session(spark, master)
        finally:
            spark.stop()


def _active() -> SparkSession | None:
    from pyspark import SparkContext  # noqa: PLC0415 - an extra
    from pyspark.sql import SparkSession  # noqa: PLC0415 - an extra
    from pyspark.sql.utils import is_remote  # noqa: PLC0415 - an extra

    if is_remote():
        return SparkSession.getActiveSession()
    context = SparkContext._active_spark_context
    # A context without session, or whose session is of another thread, is as much the application's own.
    return None if context is None else SparkSession.getActiveSession() or SparkSession(context)


def _checked(opened: Session, options: Spark) -> Session:
    address = (options.remote or options.master or "").partition(";")[0]
    if address and Master(address.rstrip("/")) != opened.master:
        raise InvalidSettings(
            f"this process has a Spark session on {opened.master} already, and {address} is asked for; mend: leave out "
            "master and remote"
        )
    return opened


def _settings(options: Spark, workers: int) -> dict[str, str]:
    """Return what every session of ours is given, wherever it runs."""
    return {
        "spark.app.name": "outbox reconcile",
        "spark.ui.enabled": str(options.ui).lower(),
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(4 * workers),
        "spark.sql.catalogImplementation": "in-memory",
        # The findings of all tasks come to the driver; without limit, as in this process.
        "spark.driver.maxResultSize": "0",
    }


def _local_settings(master: Master, folder: Path, log_config: Path, log: Path) -> dict[str, str]:
    """Return what a driver of ours needs: its files in ``folder``, and no port that others can reach."""
    settings = {
        "spark.local.dir": str(folder),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        _JAVA_OPTIONS: f'"-Dlog4j2.configurationFile={log_config.as_uri()}" "-Doutbox.spark.log={log}"',
        "spark.driver.memory": "1g",
    }
    if master.on_this_host:
        settings |= {"spark.driver.host": _LOOPBACK, "spark.driver.bindAddress": _LOOPBACK}
    package = Path(outbox.__file__).parents[1]
    if master.in_process and package.is_dir():
        # Also where the package isn't installed but lies in the folder that the driver was started from.
        settings["spark.executorEnv.PYTHONPATH"] = str(package)
    return settings


def _launch_environment(master: Master) -> dict[str, str]:
    environment = {
        "JAVA_HOME": str(launcher_home(find_java())),
        "PATH": os.pathsep.join(filter(None, [os.environ.get("PATH"), *_TOOLS])),
    }
    if master.on_this_host:
        environment["SPARK_LOCAL_IP"] = _LOOPBACK
        environment["PYSPARK_PYTHON"] = os.environ.get("PYSPARK_PYTHON", sys.executable)
    return environment


@contextmanager
def _environment(changed: Mapping[str, str], also: tuple[str, ...] = ()) -> Iterator[None]:
    """Change variables of the environment for the block; they, and those in ``also``, are as before afterwards."""
    before = {name: os.environ.get(name) for name in (*changed, *also)}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name in before:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


@contextmanager
def _own_interrupts() -> Iterator[None]:
    # Spark installs a handler of its own, for good, and a worker that drains on Ctrl-C would lose its own.
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)


@contextmanager
def _ending_java_after(seconds: float) -> Iterator[threading.Event]:
    """End Java if the block takes longer, and set the event: a queue of YARN may have no place for days."""
    from pyspark import SparkContext  # noqa: PLC0415 - an extra

    late = threading.Event()

    def end() -> None:
        late.set()
        gateway: Any = SparkContext._gateway
        if gateway is not None and gateway.proc is not None:
            gateway.proc.kill()

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()


def last_warning(log: Path | None) -> str:
    """Return what Spark's last error was, or its last warning, to be put behind an error of ours.

    Nothing where it said nothing, or has another log.
    """
    try:
        lines = log.read_text("utf-8", "replace").splitlines() if log is not None else []
    except OSError:  # there is none
        lines = []
    lines = [line.removeprefix("Spark: ") for line in lines if line.startswith("Spark: ")]
    # A Spark that gives up warns of what it can't do any more.
    worst = [line for line in lines if line.startswith("ERROR ")] or lines
    return f"; Spark says: {worst[-1]}" if worst else ""


def _end_java() -> None:
    # SparkContext keeps its Java process for the next session: 400 MB in a worker that sleeps until the next night.
    from pyspark import SparkContext  # noqa: PLC0415 - an extra

    gateway: Any = SparkContext._gateway
    SparkContext._gateway = SparkContext._jvm = None
    # One that failed to start may have stayed, if Java ended under it.
    SparkContext._active_spark_context = None
    if gateway is None:
        return
    with suppress(Exception):  # a Java that is gone already is what is wanted
        gateway.shutdown()
    if gateway.proc is not None:
        gateway.proc.stdin.close()
        gateway.proc.wait()


def package_zip(folder: Path) -> Path:
    """Write the package into ``folder``; the name of the zip is the hash of its files."""
    contents = sorted(_sources(files("outbox"), "outbox"))
    digest = hashlib.sha256(repr(contents).encode()).hexdigest()[:16]
    path = folder / f"outbox-{digest}.zip"
    if not path.exists():
        new = path.with_suffix(".new")
        with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in contents:
                # A zip has no older time. A fixed one makes the same zip of the same files.
                archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content)
        new.replace(path)
    return path


def _sources(folder: Traversable, name: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        path = f"{name}/{entry.name}"
        if entry.is_dir() and entry.name != "__pycache__":
            yield from _sources(entry, path)
        elif entry.is_file() and not entry.name.endswith(".pyc"):
            yield path, entry.read_bytes()


# --- where Spark runs, and which databases its executors reach from there ----------------------------------


@dataclass(frozen=True, slots=True)
class Master:
    """A master (``local[2]``, ``spark://host:7077``, ``yarn``) or a Spark Connect server, of whose address no token."""

    address: str

    @property
    def connect(self) -> bool:
        """Is it a Spark Connect server?"""
        return self.address.startswith("sc://")

    @property
    def in_process(self) -> bool:
        """Are the executors threads of the driver's own Java process?"""
        return self.address.startswith("local") and not self.address.startswith("local-cluster")

    @property
    def on_this_host(self) -> bool:
        """Do driver and executors see the same loopback? Of Kubernetes that is never known."""
        if self.address.startswith("local"):
            return True
        kind, _, rest = self.address.partition("://")
        hosts = [re.sub(r":\d+$", "", address).strip("[]") for address in rest.partition("/")[0].split(",")]
        return kind in {"spark", "sc"} and all(map(is_loopback, hosts))

    def __str__(self) -> str:
        return self.address


def master_of(options: Spark, workers: int, defaults: Mapping[str, str]) -> Master:
    """Return where to start Spark: as asked, else as its own configuration says, else in this process.

    ``defaults`` is what `spark_defaults` found.

    Raises:
        InvalidSettings: both a master and a Spark Connect server are asked for, or what is named is no such server.
    """
    if options.master and options.remote:
        raise InvalidSettings("Spark has either a master or a Spark Connect server (remote); leave one of them out")
    master = options.master or options.conf.get("spark.master")
    if remote := options.remote or (None if master else os.environ.get("SPARK_REMOTE")):
        # What follows the ; may be a token.
        address = remote.partition(";")[0].rstrip("/")
        if not address.startswith("sc://"):
            raise InvalidSettings(
                f"remote = {address!r} isn't the address of a Spark Connect server; write sc://host:15002"
            )
        return Master(address)
    arguments = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    arguments.add_argument("--master", nargs="?")
    submitted, _ = arguments.parse_known_args(shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", "")))
    found = master or submitted.master or os.environ.get("MASTER") or defaults.get("spark.master")
    return Master(found or f"local[{workers}]")


def spark_defaults() -> dict[str, str]:
    """Return what ``spark-defaults.conf`` says, which ours must not override; nothing where there is none."""
    folder = os.environ.get("SPARK_CONF_DIR") or Path(os.environ.get("SPARK_HOME", "/nonexistent"), "conf")
    try:
        lines = Path(folder, "spark-defaults.conf").read_text().splitlines()
    except OSError:  # there is none
        return {}
    pairs = (re.split(r"[\s=]+", line.strip(), maxsplit=1) for line in lines if not line.lstrip().startswith("#"))
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def refuse_loopback(master: Master, url: str) -> None:
    """Refuse (`InvalidSettings`) a database on a loopback address if the executors are, or may be, on other hosts."""
    if master.on_this_host:
        return
    parts = make_url(url)
    query = parts.query.get("host", ())
    named = [*([parts.host] if parts.host else []), *([query] if isinstance(query, str) else query)]
    if not named and ("service" in parts.query or "PGHOST" in os.environ or "PGSERVICE" in os.environ):
        # The executors' own environment says where it is.
        return
    for host in ",".join(named).split(","):
        if is_loopback(host):
            raise InvalidSettings(
                f"the database on {host or 'the local socket'} can't be read from {master}: there each executor would "
                "look on its own host; mend: name the database by an address that the executors reach"
            )


def is_loopback(host: str) -> bool:
    """Does this name or address (empty or a path: a local socket) mean the host itself?"""
    if not host or host.startswith(("/", "@")) or host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".").endswith(".localhost")
