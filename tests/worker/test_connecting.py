"""One way to open a connection: the application's engine with all that it has, whatever needs the connection.

The URL alone leads nowhere: neither its host nor its role exist. What an engine has beside it says where the database
is, and leaves a mark on the session.
"""

from __future__ import annotations

import multiprocessing
import pickle
import ssl
import threading
from collections.abc import Iterator
from typing import Any

import asyncpg
import psycopg
import psycopg2
import pytest
from sqlalchemy import URL, Connection, Engine, NullPool, StaticPool, create_engine, event, make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine

from outbox import Outbox, Settings
from outbox.console.connections import own_engine
from outbox.database.engines import LoopRunner, address_of, connect_url, engine_of, start_loop
from outbox.errors import InvalidSettings
from outbox.message.model import Counts
from outbox.operator.health.examine import examine
from outbox.reconcile.config import own_access, subscribed
from outbox.reconcile.job import FIRST_ID, Access, Pair, Range
from outbox.reconcile.source import PostgresSide, connected
from outbox.worker import Worker
from outbox.worker.connections import AsyncRunner, OwnRunner, WorkerDatabase
from tests.kit import wait_until
from tests.worker.conftest import Bench

Bind = Engine | AsyncEngine
MARK = "carried"
_MARK = text("SELECT current_setting('outbox_test.mark', true)")
_OPTION = f"-c outbox_test.mark={MARK}"
_NAMES = """
SELECT DISTINCT application_name FROM pg_stat_activity
 WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
"""


def real(url: URL, driver: str) -> dict[str, Any]:
    """Return the arguments that lead to the database, and leave the mark."""
    database = "database" if driver == "asyncpg" else "dbname"
    found: dict[str, Any] = {"host": url.host, "port": url.port, "user": url.username, database: url.database}
    found = {name: value for name, value in found.items() if value is not None} | dict(url.query)
    if url.password:
        found["password"] = url.password
    if driver == "asyncpg":
        return found | {"server_settings": {"outbox_test.mark": MARK, "application_name": MARK}}
    return found | {"options": _OPTION, "application_name": MARK}


def made(url: URL, driver: str, how: str, *, is_async: bool) -> Bind:
    """Return an engine that opens its connections by connect_args, a listener, or a creator."""
    arguments = real(url, driver)
    nowhere = URL.create(f"postgresql+{driver}", "no_such_role", "wrong", "127.0.0.1", 1, "nowhere")
    options: dict[str, Any] = {"connect_args": arguments} if how == "connect_args" else {}
    if how == "creator":
        module: Any = {"psycopg": psycopg, "psycopg2": psycopg2, "asyncpg": asyncpg}[driver]
        connect = psycopg.AsyncConnection.connect if (driver, is_async) == ("psycopg", True) else module.connect
        options["async_creator" if is_async else "creator"] = lambda: connect(**arguments)
    engine: Bind = (create_async_engine if is_async else create_engine)(nowhere, **options)
    if how == "do_connect":

        @event.listens_for(engine.sync_engine if isinstance(engine, AsyncEngine) else engine, "do_connect")
        def token(_: object, __: object, ___: object, parameters: dict[str, Any]) -> None:
            parameters.update(arguments)

    return engine


DRIVERS = [("psycopg", False), ("psycopg", True), ("psycopg2", False), ("asyncpg", True)]
ENGINES = [(*driver, how) for driver in DRIVERS for how in ("connect_args", "do_connect")] + [
    ("psycopg", False, "creator")
]


@pytest.fixture(params=ENGINES, ids=lambda each: f"{each[0]}{'-async' * each[1]}-{each[2]}")
def bind(bench: Bench, request: pytest.FixtureRequest) -> Iterator[Bind]:
    """An engine whose URL alone leads nowhere."""
    driver, is_async, how = request.param
    engine = made(bench.engine.url, driver, how, is_async=is_async)
    yield engine
    if isinstance(engine, Engine):
        engine.dispose()


def marked(connection: Connection) -> bool:
    """Has the session the mark?"""
    return bool(connection.execute(_MARK).scalar() == MARK)


def by_runner(kind: type[OwnRunner], database: WorkerDatabase) -> bool:
    """Has a connection of a worker's runner the mark?"""
    seen: list[bool] = []

    def one_pass(connection: Connection, _: Connection) -> Counts:
        seen.append(marked(connection))
        return Counts()

    runner = kind(database, None, threading.Event())
    runner.run(one_pass)
    runner.end()
    return seen == [True]


def _in_child(bind: Bind, answers: Any) -> None:
    connection = WorkerDatabase(bind).connect()
    answers.send(marked(connection))
    connection.close()


def test_whatever_opens_a_connection_opens_it_as_the_engine_does(bind: Bind) -> None:
    """Passes, listeners, the console, the doctor, the reconciliation, forked processes."""
    database = WorkerDatabase(bind)
    assert by_runner(OwnRunner, database)
    for engine in (own_engine(bind), engine_of(bind)):
        with engine.connect() as connection:
            assert marked(connection)
        engine.dispose()
    outbox = Outbox(bind, settings=Settings())
    outbox.consumer("paid", group="mail")(lambda message, session: None)
    (values,) = subscribed(outbox, {})
    assert values["producer"] == values["consumer"] == own_access(outbox)
    with connected(values["producer"]) as connection:
        assert marked(connection)
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(bind, theirs))
    child.start()
    assert ours.poll(60)
    assert ours.recv() is True
    child.join()
    report = examine(bind, Settings(), roles=["worker"])
    assert not {finding.code for finding in report.findings} & {"database-unreachable", "tables-missing"}


def test_what_needs_the_arguments_themselves_gets_them_as_they_are_now(bind: Bind) -> None:
    """ADBC, and Spark's executors, connect by a URL that has what the listeners say."""
    side = PostgresSide(own_access(Outbox(bind, settings=Settings())), "producer", Pair("paid", "mail"))
    if address_of(bind).partition("#")[2]:
        with pytest.raises(InvalidSettings, match="connects by a creator"):
            pickle.dumps(side)
        with pytest.raises(InvalidSettings, match="connects by a creator"):
            side.read([Range(FIRST_ID, None)])
        return
    assert side.read([Range(FIRST_ID, None)]).num_rows == 0
    sent = pickle.loads(pickle.dumps(side))  # noqa: S301 - made here
    assert isinstance(sent.access, Access)
    assert sent.access.engine is None
    with connected(sent.access) as connection:
        assert marked(connection)


@pytest.mark.parametrize(("driver", "is_async", "how"), [*ENGINES[:-1], ("psycopg", True, "creator")])
def test_event_loops_connect_as_the_engine_does(bench: Bench, driver: str, is_async: bool, how: str) -> None:
    """Async handlers of any engine, and async checkers asked by an operator."""
    bind = made(bench.engine.url, driver, how, is_async=is_async)
    loop, thread = start_loop("test")
    seen: list[bool] = []

    def one_pass(connection: Connection, _: Connection) -> Counts:
        seen.append(marked(connection))
        return Counts()

    LoopRunner(bind, loop).run(one_pass)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    assert seen == [True]


@pytest.mark.parametrize(("driver", "is_async", "how"), ENGINES[:-1])
def test_loops_of_a_worker(bench: Bench, driver: str, is_async: bool, how: str) -> None:
    """Async handlers."""
    assert by_runner(AsyncRunner, WorkerDatabase(made(bench.engine.url, driver, how, is_async=is_async)))


@pytest.mark.parametrize(("driver", "is_async"), DRIVERS)
@pytest.mark.parametrize("of_source", [False, True])
def test_a_worker_has_only_connections_of_the_engine(
    bench: Bench, driver: str, is_async: bool, of_source: bool
) -> None:
    """Plain and async handlers, dispatch, checks, the listener: also where the engine is that of the ``source``."""
    bind = made(bench.engine.url, driver, "do_connect", is_async=is_async)
    outbox = Outbox(bench.engine if of_source else bind, settings=Settings())
    options: dict[str, Any] = {"source": bind} if of_source else {}
    outbox.consumer("paid", group="plain", **options)(bench.handle)
    outbox.consumer("paid", group="loop", **options)(bench.handle_async)
    bench.send(count=3)
    with Worker(outbox) as worker:
        wait_until(lambda: len(bench.effects()) == 6, "all are handled")
        wait_until(worker.is_ready, "the worker reports")
        names = set(bench.rows(_NAMES))
        assert MARK in names
        assert of_source or names <= {MARK, ""}, names


def test_session_listeners_are_heard_on_connections_of_another_driver(bench: Bench) -> None:
    """What sets a session up, sets up all of them; of the listeners that came later too."""
    bind = create_async_engine(bench.engine.url.set(drivername="postgresql+asyncpg"))
    database = WorkerDatabase(bind)

    @event.listens_for(bind.sync_engine, "connect")
    def mark(connection: Any, _: object) -> None:
        cursor = connection.cursor()
        cursor.execute(f"SET outbox_test.mark = '{MARK}'")
        cursor.close()

    assert by_runner(OwnRunner, database)
    assert by_runner(AsyncRunner, database)


def of_another_driver(connection: Any, _: object) -> None:
    """Use what only asyncpg's connections have."""
    connection.run_async(lambda driver: driver.set_type_codec("json"))


def refused_engines(url: URL) -> Iterator[tuple[Bind, str]]:
    """Return engines whose way to connect psycopg can't have, and what of it."""
    asyncpg_url = url.set(drivername="postgresql+asyncpg")
    yield made(url, "asyncpg", "creator", is_async=True), "a creator"
    yield made(url, "psycopg", "creator", is_async=True), "a creator"
    yield made(url, "psycopg2", "creator", is_async=False), "a creator"
    yield (create_async_engine(asyncpg_url, connect_args={"ssl": ssl.create_default_context()}), "of type SSLContext")
    yield create_async_engine(asyncpg_url, connect_args={"connection_class": asyncpg.Connection}), "connection_class"
    yield create_async_engine(asyncpg_url, connect_args={"ssl": True}), "sslmode of type bool"
    yield create_async_engine(asyncpg_url, connect_args={"direct_tls": True}), "direct_tls of type bool"
    yield create_async_engine(asyncpg_url, connect_args={"password": object}), "password of type object"
    yield create_async_engine(asyncpg_url, connect_args={"passfile_of": "x"}), 'option "passfile_of"'
    other = create_async_engine(asyncpg_url)
    event.listen(other.sync_engine, "do_connect", lambda *_: object())
    yield other, "a listener to 'do_connect'"
    other = create_async_engine(asyncpg_url)
    event.listen(other.sync_engine, "do_connect", lambda _dialect, _record, arguments, _: arguments.append("a dsn"))
    yield other, "a listener to 'do_connect' that gives positional arguments"
    yield create_async_engine(asyncpg_url, connect_args={"dsn": "password=my S3CRET host=x"}), "a connection string"
    other = create_async_engine(asyncpg_url)
    event.listen(other.sync_engine, "connect", of_another_driver)
    yield other, "its listener to 'connect'"


@pytest.mark.parametrize("number", range(13))
def test_what_can_not_be_carried_over_is_refused_and_mended_by_a_further_engine(bench: Bench, number: int) -> None:
    """Never in silence: the error names it and the mend, and the mend works."""
    bind, what = list(refused_engines(bench.engine.url))[number]
    outbox = Outbox(bind, settings=Settings())
    outbox.consumer("paid", group="plain")(bench.handle)
    with pytest.raises(InvalidSettings, match="can't be carried over") as refused, Worker(outbox):
        pass
    assert what in str(refused.value)
    assert "engines=" in str(refused.value)
    outbox.unbind()
    outbox.bind(bind, engines=[create_engine(bench.engine.url)])
    bench.send()
    with Worker(outbox):
        wait_until(bench.effects, "the message is handled")


def test_async_handlers_of_a_creator_are_refused_at_the_start(bench: Bench) -> None:
    """A sync creator makes no connection for an event loop; a further engine does."""
    bind = made(bench.engine.url, "psycopg", "creator", is_async=False)
    outbox = Outbox(bind, settings=Settings())
    outbox.consumer("paid", group="loop")(bench.handle_async)
    with pytest.raises(InvalidSettings, match="create_async_engine"), Worker(outbox):
        pass
    outbox.unbind()
    outbox.bind(bind, engines=[create_async_engine(bench.engine.url, poolclass=NullPool)])
    bench.send()
    with Worker(outbox):
        wait_until(bench.effects, "the message is handled")


async def test_code_inside_run_sync_connects_as_asyncpg_does(bench: Bench) -> None:
    """Acts of an operator from async code, whose own engine has another driver."""
    bind = made(bench.engine.url, "asyncpg", "do_connect", is_async=True)
    assert isinstance(bind, AsyncEngine)
    outbox = Outbox(async_sessionmaker(bind), settings=Settings())
    await outbox.run_sync(outbox.operator.overview)
    await bind.dispose()


def test_arguments_of_asyncpg_are_put_as_libpq_has_them() -> None:
    """TLS, settings, several hosts, times; a password that is a function is asked each time."""
    engine = create_async_engine(
        "postgresql+asyncpg://u@/d",
        connect_args={
            "host": ["a", "b"],
            "port": [1, 2],
            "password": lambda: "token",
            "ssl": "verify-full",
            "server_settings": {"search_path": "a b\\c", "application_name": "x"},
            "timeout": 3,
            "statement_cache_size": 0,
            "command_timeout": 60,
        },
    )
    url = connect_url(engine.sync_engine)
    assert (url.username, url.password, url.database) == ("u", "token", "d")
    assert dict(url.query) == {
        "host": "a,b",
        "port": "1,2",
        "sslmode": "verify-full",
        "options": r"-c search_path=a\ b\\c",
        "application_name": "x",
        "connect_timeout": "3",
    }


def test_tls_of_asyncpg_is_never_less_for_psycopg() -> None:
    """What was asked of the connection is asked of ours."""
    engine = create_async_engine("postgresql+asyncpg://u@h/d", connect_args={"ssl": "require"})
    assert dict(connect_url(engine.sync_engine).query) == {"sslmode": "require"}


def test_two_databases_are_two_by_what_the_engines_connect_with() -> None:
    """Their URLs may be one: a source must not be taken for the own database."""
    url = "postgresql+psycopg://"
    a, b = (create_engine(url, connect_args={"host": "h", "dbname": name}) for name in "ab")
    assert address_of(a) != address_of(b)
    assert address_of(a) == address_of("postgresql://h/a")
    c, d = (create_engine(url, creator=lambda: None, poolclass=StaticPool) for _ in "cd")
    assert address_of(c) == address_of(c) != address_of(d)
    assert address_of(make_url("postgresql://h:5432/a")) == address_of(create_async_engine("postgresql+asyncpg://h/a"))
