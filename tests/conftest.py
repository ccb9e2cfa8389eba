"""One PostgreSQL for the whole run; each test gets databases of its own, as new as a clone of a migrated template."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from sqlalchemy import Engine, NullPool, create_engine, make_url
from sqlalchemy.exc import OperationalError

from outbox import Settings, embedded
from outbox.database import migration
from outbox.embedded import ServerLike
from outbox.telemetry.hooks import TelemetryEvent, add_hook
from tests.kit import tries, wait_until
from tests.kit.databases import Databases

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadFileScheduling

# A parent that ignores SIGINT, such as a shell that runs the suite in the background, has its children ignore it too.
# The processes that tests start must have the disposition that they would have at a terminal.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests start hundreds of processes, each of which would compile all modules of the project for itself. And each process
# of a run would compile all tests again, with their assertions explained, which takes longer than all else before them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Java compiles the more the longer a program is to run. A Spark of the tests lives for seconds, and its Java takes half
# as much of a processor when it only compiles quickly; a fifth of the rest is the proof that Spark's own classes are
# well formed.
_QUICKLY = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
os.environ.setdefault("SPARK_SUBMIT_OPTS", _QUICKLY)
os.environ.setdefault("SPARK_LAUNCHER_OPTS", os.environ["SPARK_SUBMIT_OPTS"])


# No example fails because the machine is busy.
hypothesis_settings.register_profile(
    "busy", deadline=None, max_examples=tries(25), suppress_health_check=[HealthCheck.too_slow]
)
hypothesis_settings.load_profile("busy")

#: Memory as a folder, on Linux; and how much of it the databases of a run may need (bytes).
_MEMORY = "/dev/shm"  # noqa: S108 - a folder of its own is made there
_ROOM = 8 << 30

_HERE = Path(__file__).parent
#: What a real browser is tested by.
BROWSER = "tests/console/browser/"
#: Modules of the reconciliation that share a Spark session.
SHARE_SPARK = (
    *(
        "test_columns_spark",
        "test_fleet_spark",
        "test_lost",
        "test_spark_frames",
        "test_spark_iceberg",
        "test_spark_log",
    ),
    "test_tables_spark",
)

#: The fast tier, ``-m fast``: of each folder the files that go its main way, which take two minutes together. A test in
#: them that is `slow` isn't of this tier.
FAST = (
    *(f"check/test_{name}" for name in ("fence", "peer_table", "totals")),
    *(f"cli/test_{name}" for name in ("audit", "db", "dead", "groups", "inbox", "looking", "sagas", "topics")),
    *(f"compensate/test_{name}" for name in ("request", "rollback", "worker")),
    *(f"console/test_{name}" for name in ("api_acts", "charts", "groups", "pages_bulk", "pages_look", "sagas")),
    *(f"consumer/test_{name}" for name in ("by_key.", "declaration", "exactly_once", "outside.", "results", "retry")),
    *(f"delivery/test_{name}" for name in ("callbacks", "confirm", "parked", "pruned")),
    *(f"dispatch/test_{name}" for name in ("delay", "many_topics", "order")),
    *(f"docs/test_{name}" for name in ("doors", "order_balance", "pages")),
    *(f"doctor/test_{name}" for name in ("healthy", "locks")),
    *(f"examples/test_{name}" for name in ("banks", "orders")),
    "flow/test_tcc",
    "frameworks/test_flask",
    *(f"house/test_{name}" for name in ("django", "house", "limits", "prose")),
    "migration/test_require",
    *(f"operator/test_{name}" for name in ("act_table", "bulk_jobs_run", "fates", "findings", "looking_message.")),
    *(f"producer/test_{name}" for name in ("atomic", "bind", "decide", "joining", "round_trips", "two_phase")),
    "producer/flow_control/test_transactions",
    *(f"prune/test_{name}" for name in ("prune", "records", "segments")),
    *(f"reconcile/test_{name}" for name in ("fleet_totals", "java", "job", "report_json", "report_text")),
    *(f"telemetry/test_{name}" for name in ("hooks", "otel")),
    *(f"testing/test_{name}" for name in ("capture", "check", "drain", "rollback")),
    *(f"unit/test_{name}" for name in ("codec", "ids", "limits", "public", "reader", "settings", "text", "topic")),
    *(f"worker/test_{name}" for name in ("duty", "loop", "worker")),
)

#: Files and folders that are exhaustive, or take more than about ten seconds; ``-m "not slow"`` is all but them. Single
#: tests of other files are marked where they stand.
SLOW = (
    *(f"check/test_{name}" for name in ("asking", "checker", "kill", "operator", "peer_rules", "stateful")),
    "cli/half/",
    *(f"cli/test_{name}" for name in ("console", "run")),
    *(f"compensate/test_{name}" for name in ("kill", "races")),
    *(
        f"console/{name}"
        for name in ("browser/", "test_clients", "test_pages_hostile", "test_schema", "test_standalone")
    ),
    *(f"consumer/test_{name}" for name in ("kill", "leased_model")),
    *(f"dispatch/test_{name}" for name in ("restore", "rivals", "schedule", "stress")),
    "django/",
    *(f"doctor/test_{name}" for name in ("activity", "command", "isolation", "pooler", "server")),
    "embedded/",
    "failover/",
    *(f"flow/test_{name}" for name in ("replay", "saga")),
    "grants/",
    *(f"examples/test_{name}" for name in ("audit", "command", "demo", "faults", "order_payment", "orphans", "tcc")),
    *(f"migration/test_{name}" for name in ("alembic", "chain", "quiet", "races", "user_project")),
    *(f"operator/test_{name}" for name in ("acts.", "looking_inbox", "looking_lists", "looking_messages")),
    *(
        f"producer/test_{name}"
        for name in ("carriers", "commit_fails", "flow_counts", "identity", "savepoints", "sql_functions")
    ),
    "producer/test_versions",
    *(f"reconcile/test_{name}" for name in ("cli", "columns.", "columns_spark", "edges", "follow", "lost")),
    *(f"reconcile/test_{name}" for name in ("many_pairs", "measure", "nights")),
    *(f"reconcile/test_{name}" for name in ("oracle", "repair", "second_look", "secrets", "settled", "spark")),
    *(f"reconcile/test_{name}" for name in ("standby", "tiers")),
    *(f"relay/test_{name}" for name in ("capturing", "intake", "kafka", "rabbit", "targets")),
    *(f"rocketmq/conformance/test_{name}" for name in ("conformance", "restarting")),
    *(f"rocketmq/test_{name}" for name in ("crowd", "examples", "killed")),
    *(f"worker/test_{name}" for name in ("bulk", "check", "connecting", "outages", "processes", "reconcile")),
    *(f"worker/test_{name}" for name in ("repairs", "signals")),
)


#: Whose engines have connections that were used before; where tests count connections they have new ones.
WARM = ("check/", "consumer/", "dispatch/", "operator/")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Don't even import the files of which the fast tier has no test: that takes as long as a third of it."""
    file = collection_path.suffix == ".py" and collection_path.is_relative_to(_HERE)
    return True if file and config.option.markexpr == "fast" and not _named(collection_path, FAST) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow, and put it first: then no process works on a long file when the others have ended."""
    for item in items:
        if _named(item.path, SLOW):
            item.add_marker(pytest.mark.slow)
        if _named(item.path, FAST) and not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.fast)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def _named(path: Path, names: tuple[str, ...]) -> bool:
    return path.relative_to(_HERE).as_posix().startswith(names)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """With ``--dist loadfile``, one process has all files of the browser, and one those that share a Spark session."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class OneOfEach(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(BROWSER):
                return BROWSER
            scope: str = super()._split_scope(nodeid)
            return "Spark" if Path(scope).stem in SHARE_SPARK else scope

    return OneOfEach(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is collected and imported lives as long as the run: the garbage collector needn't look at it again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test in an event loop of its own, and fail one that hangs."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), 120))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let pytest-xdist send what was logged: also errors with texts that no encoding holds are."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(scope="session")
def server() -> Iterator[ServerLike]:
    """A server that is fast and forgets everything when the machine loses power.

    Nobody vacuums unless a test does: statistics, plans and transaction ids are what the tests make of them.
    """
    settings = {"autovacuum_naptime": "1d", "max_wal_size": "256MB"}
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", _memory())
            running = stack.enter_context(embedded.server([], durable=False, settings=settings))
        if isinstance(running, embedded.Server):
            _log_in_fast(running)
        yield running


def _memory() -> str | None:
    """Return a folder in memory with room for databases: making and removing their files is slow on some disks."""
    with suppress(OSError):
        if shutil.disk_usage(_MEMORY).free > _ROOM and not os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC:
            return _MEMORY
    return None


def _log_in_fast(server: embedded.Server) -> None:
    """Have the server check passwords by MD5: SCRAM takes 4,096 rounds for each of the suite's many connections."""
    rules = server.folder / "data" / "pg_hba.conf"
    rules.write_text(rules.read_text().replace("scram-sha-256", "md5"))
    url = make_url(server.url())
    engine = create_engine(url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with engine.connect() as connection:
        connection.exec_driver_sql("SELECT pg_reload_conf()")
        connection.exec_driver_sql("SET password_encryption = 'md5'")
        connection.exec_driver_sql(f"ALTER ROLE postgres PASSWORD '{url.password}'")

    def logs_in() -> bool:
        try:
            engine.connect().close()
        except OperationalError:  # it hasn't read the file so far
            return False
        return True

    wait_until(logs_in, "the server takes the password")


@pytest.fixture(scope="session")
def template(server: ServerLike) -> str:
    """The name of a database with all tables of both sides."""
    server.create_database("template_outbox")
    migration.upgrade(server.url("template_outbox"))
    return "template_outbox"


@pytest.fixture(scope="session")
def databases(server: ServerLike, template: str) -> Iterator[Databases]:
    """Clones of the template, which are used again."""
    databases = Databases(server, template)
    yield databases
    databases.close()


@pytest.fixture
def new_database(server: ServerLike, databases: Databases) -> Iterator[Callable[[], str]]:
    """A function that gives another migrated database and returns its URL."""
    names: list[str] = []

    def make() -> str:
        names.append(databases.take())
        return server.url(names[-1])

    yield make
    for name in names:
        databases.give_back(name)


@pytest.fixture
def new_engine(
    request: pytest.FixtureRequest, new_database: Callable[[], str], databases: Databases
) -> Iterator[Callable[..., Engine]]:
    """A function that makes another migrated database and returns an engine on it."""
    engines: list[Engine] = []
    kept: list[tuple[str, Engine]] = []

    def make(**options: Any) -> Engine:
        if not options and _named(request.path, WARM):
            kept.append(databases.take_engine())
            return kept[-1][1].execution_options()  # an engine of the test's own, with the connections of the other
        engine = create_engine(new_database(), **options)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.dispose()
    for name, engine in kept:
        databases.give_back(name, engine)


@pytest.fixture
def url(new_database: Callable[[], str]) -> str:
    """The URL of a migrated database of this test's own."""
    return new_database()


@pytest.fixture
def engine(new_engine: Callable[..., Engine]) -> Engine:
    """An engine on a migrated database of this test's own."""
    return new_engine()


@pytest.fixture
def settings() -> Settings:
    """The defaults, whatever the environment says."""
    return Settings()


@pytest.fixture
def heard() -> Iterator[list[TelemetryEvent]]:
    """The events that a hook gets."""
    got: list[TelemetryEvent] = []
    remove = add_hook(got.append)
    yield got
    remove()


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """What functions that hang wait for; set in the end, so that no thread outlives its test."""
    event = threading.Event()
    yield event
    event.set()
