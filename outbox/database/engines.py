"""Engines for what names a database (an engine or a URL), connections of theirs, runners.

There is one way to open a connection: the application's engine, with all that it has. Passes and acts need psycopg,
inside of an event loop or outside. Where that isn't what the engine has, another one is derived from it, which asks it
for its connect arguments each time, and calls its listeners. An engine that can't be carried over is refused.

A checker or a compensation runs on a connection of its own, so that it can be taken away from a function that doesn't
end.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import URL, Engine, NullPool, create_engine, event
from sqlalchemy.exc import DBAPIError

from outbox.database.dialect import DRIVER_NAME, OF_ASYNCPG, PSYCOPG, parsed_url, url_of
from outbox.database.execute import is_lost
from outbox.errors import InvalidHandler, InvalidSettings, TransactionRequired
from outbox.message.model import Counts
from outbox.text import class_name, database_address

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncEngine

    Bind = Engine | AsyncEngine | URL | str

T = TypeVar("T")

_CONNECT_TIMEOUT = 10
#: Seconds until a peer that fell silent is noticed: KEEP_IDLE + KEEP_COUNT * KEEP_INTERVAL.
KEEP_IDLE, KEEP_INTERVAL, KEEP_COUNT = 10, 5, 3
#: The same as libpq's options of a connection,
KEEP_ALIVE = {
    "keepalives_idle": f"{KEEP_IDLE}",
    "keepalives_interval": f"{KEEP_INTERVAL}",
    "keepalives_count": f"{KEEP_COUNT}",
}
#: and as settings of the server's side.
SERVER_KEEP_ALIVE = {
    "tcp_keepalives_idle": f"{KEEP_IDLE}s",
    "tcp_keepalives_interval": f"{KEEP_INTERVAL}s",
    "tcp_keepalives_count": f"{KEEP_COUNT}",
    "tcp_user_timeout": f"{KEEP_IDLE + KEEP_COUNT * KEEP_INTERVAL}s",
}
#: As often as psycopg executes a statement before it prepares it, unless it is told otherwise.
PREPARE_AFTER = 5
_THRESHOLD = "prepare_threshold"
#: Separators of databases: blanks, lines, or a comma before the next one; a comma between hosts of one URL isn't.
_BETWEEN = re.compile(r",?\s+|,$|,(?=(?:[\w.-]+=)?\w+(?:\+\w+)?://)")


#: Arguments that say how a driver works with results and statements, and nothing of the connection: they are left out.
_OF_STATEMENTS = {*OF_ASYNCPG, "command_timeout", "statement_cache_size", "cursor_factory", "row_factory"}
#: What libpq calls arguments of other drivers',
_LIBPQ = {"database": "dbname", "ssl": "sslmode", "timeout": "connect_timeout", "dsn": "conninfo"}
#: and psycopg's own, which libpq doesn't know.
_OF_PSYCOPG = frozenset({"autocommit", "context", _THRESHOLD})
#: Further engines of the same database, by the one that the application works with: see `know_further`.
_further: WeakKeyDictionary[Engine, tuple[Engine, ...]] = WeakKeyDictionary()


def check_database(what: str, value: object) -> None:
    """Refuse (InvalidHandler) what names no database."""
    # An AsyncEngine has one inside; asking its class would import what may not be installed.
    if not isinstance(getattr(value, "sync_engine", value), Engine | str):
        raise InvalidHandler(f"{what} must be an engine, an async engine or a URL, not {type(value).__name__}")
    if isinstance(value, str):
        parsed_url(value, what, InvalidHandler)


def sync_engine(bind: Engine | AsyncEngine) -> Engine:
    """Return the engine, or that inside of an async one."""
    return bind if isinstance(bind, Engine) else bind.sync_engine


def know_further(bind: Engine | AsyncEngine, engines: Collection[Engine | AsyncEngine]) -> None:
    """Have connections that ``bind`` can't open opened by further engines on its database."""
    if engines:
        _further[sync_engine(bind)] = tuple(map(sync_engine, engines))


def psycopg_engine(bind: Bind, *, is_async: bool = False) -> Engine | None:
    """Return the engine of psycopg 3 that was given for a database: a sync one, or one for code inside ``run_sync``."""
    if isinstance(bind, str | URL):
        return None
    own = sync_engine(bind)
    known = (own, *_further.get(own, ()))
    return next((e for e in known if e.dialect.driver == PSYCOPG and e.dialect.is_async is is_async), None)


def usable_anywhere(engine: Engine) -> Engine:
    """Return the engine; of an async one, which belongs to an event loop, one that connects alike and keeps nothing."""
    return engine_of(engine) if engine.dialect.is_async else engine


def address_of(bind: Bind) -> str:
    """Return what tells two databases apart; no password."""
    url = url_of(bind)
    found: dict[str, Any] = url.translate_connect_args(database="dbname") | dict(url.query)
    if not isinstance(bind, str | URL):
        if (own := _arguments(sync_engine(bind))) is None:
            return f"{database_address(url)}#{id(bind)}"  # only its creator knows
        found = own
    parts = found.get("host") or "local", found.get("port") or 5432, found.get("dbname") or found.get("database")
    host, port, database = (",".join(map(str, each)) if isinstance(each, list | tuple) else each for each in parts)
    options = url.difference_update_query(["password", "sslpassword"]).query
    return f"{host}:{port}/{database}?{sorted(options.items())}"


def address_of_connections(bind: Engine | AsyncEngine) -> str:
    """Return where an engine's connections lead; its own address where a listener may send them on to another one."""
    engine = sync_engine(bind)
    return f"{address_of(bind)}#{id(engine)}" if engine.dialect.dispatch.do_connect else address_of(bind)


def named_url(text: str) -> tuple[str, str]:
    """Return name and URL of ``name=url``; the name of an URL alone is empty."""
    name, equals, url = text.partition("=")
    return (name, url) if equals and "://" not in name else ("", text)


def named_urls(text: str) -> list[tuple[str, str]]:
    """Return the names and URLs of databases, of which each is ``name=url`` or an URL."""
    return [named_url(word) for word in _BETWEEN.split(text) if word]


def engine_of(bind: Bind, timeout: int | None = _CONNECT_TIMEOUT, *, is_async: bool = False, **options: Any) -> Engine:
    """Return an engine of psycopg as it is, else an `engine_like` it, with ``options``; raise as `separate_engine`."""
    return psycopg_engine(bind, is_async=is_async) or engine_like(bind, timeout, is_async=is_async, **options)


def engine_like(bind: Bind, timeout: int | None = _CONNECT_TIMEOUT, **options: Any) -> Engine:
    """Return `separate_engine` with what listens to an application's engine, and its execution options."""
    engine: Any = separate_engine(bind, timeout, **options)
    if not isinstance(bind, str | URL):
        own = sync_engine(bind)  # listeners get objects of SQLAlchemy's, of whichever driver
        # Joined, as by `Engine.execution_options`: what listens to this engine isn't heard on the other.
        engine.dispatch, engine._has_events = engine.dispatch._join(own.dispatch), own._has_events
        engine._execution_options = own.get_execution_options()  # without one more listener to the other engine
    return engine  # type: ignore[no-any-return]


def separate_engine(
    bind: Bind,
    timeout: int | None = _CONNECT_TIMEOUT,
    *,
    name: str = "outbox",
    is_async: bool = False,
    **options: Any,
) -> Engine:
    """Return an engine of psycopg whose connections are made as those of ``bind``, but aren't of its pool.

    It keeps none, unless ``options`` name another pool. For a URL it is by `arguments_of`. ``is_async``: for code
    inside ``run_sync``.

    Raises:
        InvalidSettings: the engine opens its connections in a way that can't be carried over.
    """
    url, arguments = arguments_of(url_of(bind), name, timeout)
    options = {"poolclass": NullPool, "connect_args": arguments} | options
    own = None
    if not isinstance(bind, str | URL):
        own = psycopg_engine(bind, is_async=is_async) or sync_engine(bind)
        json: Any = own.dialect
        options |= {"json_serializer": json._json_serializer, "json_deserializer": json._json_deserializer}
        if own.dialect.driver == PSYCOPG:
            del arguments[_THRESHOLD]  # as the application says
        if own.dialect.driver == PSYCOPG and own.dialect.is_async is is_async:
            options["creator"] = own.pool._creator
        else:
            _as_psycopg(own, _static_arguments(own))  # refused at once, if at all
    if is_async:
        from sqlalchemy.ext.asyncio import create_async_engine  # noqa: PLC0415 - needs greenlet

        engine = create_async_engine(url, **options).sync_engine
    else:
        engine = create_engine(url, **options)
    if own is not None:
        if "creator" not in options:
            event.listen(engine, "do_connect", partial(_connect_as, own, arguments))
        event.listen(engine, "connect", partial(_hear, own, "connect"))
        if own.pool.dispatch.checkout:
            event.listen(engine, "checkout", partial(_hear, own, "checkout"))
    return engine


def _connect_as(own: Engine, more: Mapping[str, Any], dialect: Any, *_: object) -> Any:
    return dialect.connect(**{**more, **connect_arguments(own)})


def _hear(own: Engine, name: str, connection: Any, *values: object) -> None:
    """Have an application's listeners to its pool hear of a connection that was made like the pool's.

    Those of today: some may have come since. SQLAlchemy's own are of the other dialect.
    """
    for listener in getattr(own.pool.dispatch, name):
        if not listener.__module__.startswith("sqlalchemy."):
            try:
                listener(connection, *values)
            except AttributeError as error:  # what only another driver's connections have
                _refuse(own, f"its listener to {name!r}, which failed ({error})", error)
    connection.commit()  # what a listener has begun
    connection.autocommit = False


def connect_arguments(engine: Engine) -> dict[str, Any]:
    """Return with which arguments psycopg connects as an engine does now, its listeners (a new token, say) heard.

    Raises:
        InvalidSettings: it opens its connections in a way that can't be carried over.
    """
    arguments, positional = _static_arguments(engine), list[Any]()
    for listener in engine.dialect.dispatch.do_connect:
        if (connection := listener(engine.dialect, None, positional, arguments)) is not None:
            with suppress(Exception):  # it isn't used in any case
                connection.close()
            _refuse(engine, "a listener to 'do_connect' that makes the connection")
    if positional:
        _refuse(engine, "a listener to 'do_connect' that gives positional arguments")
    return _as_psycopg(engine, arguments)


def _arguments(engine: Engine) -> dict[str, Any] | None:
    """Return the arguments with which an engine connects, before its listeners; None if a creator connects.

    SQLAlchemy has them nowhere but in the function that its pool calls.
    """
    creator: Any = engine.pool._creator
    names = getattr(getattr(creator, "__code__", None), "co_freevars", ())
    return dict(creator.__closure__[names.index("cparams")].cell_contents) if "cparams" in names else None


def _static_arguments(engine: Engine) -> dict[str, Any]:
    if (arguments := _arguments(engine)) is None:
        _refuse(engine, "a creator")
    return arguments


def _as_psycopg(engine: Engine, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a driver's connect arguments as psycopg's.

    Raises:
        InvalidSettings: one of them can't be put so.
    """
    from psycopg import ProgrammingError  # noqa: PLC0415 - importing outbox must not pay for the driver
    from psycopg.conninfo import conninfo_to_dict, make_conninfo  # noqa: PLC0415 - as above

    found = {_LIBPQ.get(name, name): value for name, value in arguments.items() if name not in _OF_STATEMENTS}
    own = {name: found.pop(name) for name in _OF_PSYCOPG & found.keys()}
    if callable(password := found.get("password")):
        found["password"] = password()
    if settings := dict(found.pop("server_settings", None) or {}):
        found["application_name"] = settings.pop("application_name", None)
        escaped = {name: re.sub(r"([\\\s])", r"\\\1", value) for name, value in settings.items()}
        found["options"] = " ".join(f"-c {name}={value}" for name, value in escaped.items())
    found = {name: ",".join(map(str, each)) if isinstance(each, list) else each for name, each in found.items()}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, str | int | None):
            _refuse(engine, f"{name} of type {class_name(value)}")
    refusal = ""
    try:
        found = conninfo_to_dict(make_conninfo(found.pop("conninfo", None) or "", **found))
    except ProgrammingError as error:
        refusal = str(error).strip()
    # Not within the except: what libpq says of anything but options quotes the string, with the password in it.
    if refusal:
        is_option = refusal.startswith("invalid connection option")
        _refuse(engine, refusal if is_option else "a connection string that libpq can't read")
    return own | found


def connect_url(engine: Engine) -> URL:
    """Return a URL by which a program connects as an engine does now: with its token, as long as that is good.

    Raises:
        InvalidSettings: it opens its connections in a way that can't be carried over.
    """
    usable = next((e for e in (engine, *_further.get(engine, ())) if _arguments(e) is not None), engine)
    found = {name: str(value) for name, value in connect_arguments(usable).items() if name not in _OF_PSYCOPG}
    user, password, database = (found.pop(name, None) for name in ("user", "password", "dbname"))
    host = None if re.search("[/,]", found.get("host", "/")) else found.pop("host")
    port = int(found.pop("port")) if host and "port" in found else None
    return URL.create(DRIVER_NAME, user, password, host, port, database, found)


def _refuse(engine: Engine, what: str, error: Exception | None = None) -> NoReturn:
    raise InvalidSettings(
        f"{engine!r} connects by {what}, which can't be carried over to psycopg 3: give the Outbox of this engine one "
        "more on its database, whose connections are made alike: Outbox(engine, engines=[…]), by "
        "create_engine('postgresql+psycopg://…') for plain code, by create_async_engine() for async handlers"
    ) from error


def arguments_of(url: URL, name: str, timeout: int | None = None) -> tuple[URL, dict[str, Any]]:
    """Return the URL and the driver's arguments by which a URL alone is connected to.

    Nothing is prepared on the server, since there may be any transaction pooler in between; ``prepare_threshold=5`` in
    the URL says otherwise. ``name`` is what the server calls the connection (``application_name``), and ``timeout`` for
    how many seconds a host is waited for, unless the URL or the environment says so.

    Raises:
        InvalidSettings: a ``prepare_threshold`` that isn't a number.
    """
    arguments: dict[str, Any] = {"prepare_threshold": None, "fallback_application_name": name}
    if timeout is not None and "connect_timeout" not in url.query:
        arguments["connect_timeout"] = timeout
    if (prepared := url.query.get(_THRESHOLD)) is not None:
        if not isinstance(prepared, str) or not prepared.isdecimal():
            raise InvalidSettings(f"{_THRESHOLD} = {prepared!r} in the URL must be a number, such as 5")
        arguments[_THRESHOLD] = int(prepared)
    return url.difference_update_query([_THRESHOLD]), arguments


def calling_engine(bind: Engine | AsyncEngine) -> Engine:
    """Return the engine on which calling code does its acts: of an AsyncEngine, that of code inside ``run_sync``.

    Raises:
        TransactionRequired: it is an AsyncEngine, and the code isn't inside ``run_sync``.
    """
    if isinstance(bind, Engine):
        return engine_of(bind)
    from sqlalchemy.util.concurrency import in_greenlet  # noqa: PLC0415 - needs greenlet

    if not in_greenlet():
        raise TransactionRequired(
            "this Outbox is bound to an AsyncEngine: await outbox.run_sync(function, ...), such as "
            "outbox.run_sync(outbox.commit, half_id), or outbox.run_sync(lambda: outbox.operator.resend(...))"
        )
    return engine_of(bind, is_async=True)


async def run_from_async(bind: Engine | AsyncEngine, work: Callable[[], T]) -> T:
    """Do work that uses an engine without an await: on the caller's loop for an AsyncEngine, else in a thread."""
    if isinstance(bind, Engine):
        return await asyncio.to_thread(work)
    from sqlalchemy.util import greenlet_spawn  # noqa: PLC0415 - needs what only async callers have installed

    return await greenlet_spawn(work)


def connect(engine: Engine) -> Connection:
    """Open a connection that works, in the mode in which `execute` begins transactions itself, READ COMMITTED."""
    try:
        return _connect(engine)
    except DBAPIError as error:
        if not error.connection_invalidated:
            raise
    # The pool gave us one that the server had closed, and knows by now that its others are as old.
    return _connect(engine)


def _connect(engine: Engine) -> Connection:
    connection = engine.connect()
    try:
        connection.commit()  # what listeners have begun, to the engine's connections or the driver's
        connection.connection.commit()
        connection = connection.execution_options(isolation_level="AUTOCOMMIT")
        with connection.begin():
            connection.exec_driver_sql("SELECT 1")
    except BaseException:
        discard(connection)
        raise
    return connection


def discard(connection: Connection) -> None:
    """Close a connection, broken or not."""
    with suppress(Exception):  # whatever a broken connection says to its end
        if is_lost(connection):
            # Or else the pool would first try to roll it back, and log that it can't.
            connection.invalidate()
    with suppress(Exception):  # it is given up in any case
        connection.close()


# --- runners ---------------------------------------------------------------------------------------------

#: One pass over some work. It gets a connection to the database, and one to the producer's database; the same object
#: twice where both are one. Neither is in a transaction.
Pass = Callable[["Connection", "Connection"], Counts]


class Runner(Protocol):
    """Runs passes, one at a time, on a connection of its own."""

    def run(self, one_pass: Pass) -> Counts:
        """Run a pass; may return empty counts without running it when the worker ends."""

    def end(self) -> None:
        """Close the connection, or cut it off under a pass that runs on: what that did is rolled back."""


#: Makes a runner, for async functions (True) or plain ones.
NewRunner = Callable[[bool], Runner]


#: Where a connection of a runner has the engine of its `Outbox`, which may be another one: of an application's driver.
OUTBOX_ENGINE = "outbox.engine"


def know_engine(connection: Connection, bind: Bind) -> None:
    """Let code that runs on a connection know the engine of the Outbox for which it was opened."""
    if not isinstance(bind, str | URL):
        connection.info[OUTBOX_ENGINE] = sync_engine(bind)


class EngineRunner:
    """Runs passes with plain functions; its connection goes back to the engine's pool after each pass."""

    def __init__(self, bind: Bind) -> None:
        self._bind = bind
        self._engine = engine_of(bind)

    def run(self, one_pass: Pass) -> Counts:
        """Run a pass on a connection of the pool."""
        # Whatever level the application has chosen: a pass reads what others have written until it had its locks.
        with self._engine.connect().execution_options(isolation_level="READ COMMITTED") as connection:
            know_engine(connection, self._bind)
            return one_pass(connection, connection)

    def end(self) -> None:
        """Do nothing: a pass that runs on keeps its connection until it ends."""


def start_loop(name: str) -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    """Start an event loop in a thread of its own, which runs until the loop is stopped."""
    # With a factory, it doesn't become the loop of the calling thread too.
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    loop = runner.get_loop()

    def serve() -> None:
        with runner:
            loop.run_forever()

    thread = threading.Thread(target=serve, name=name, daemon=True)
    thread.start()
    return loop, thread


class LoopRunner:
    """Runs passes with async functions on an event loop, for a thread that waits for them; each on a new connection."""

    def __init__(self, bind: Bind, loop: asyncio.AbstractEventLoop) -> None:
        self._bind = bind
        self._loop = loop

    def run(self, one_pass: Pass) -> Counts:
        """Run a pass as a task of the loop."""
        return asyncio.run_coroutine_threadsafe(self._run(one_pass), self._loop).result()

    async def _run(self, one_pass: Pass) -> Counts:
        from sqlalchemy.util import greenlet_spawn  # noqa: PLC0415 - needs greenlet

        return await greenlet_spawn(self._inside, one_pass)

    def _inside(self, one_pass: Pass) -> Counts:
        with engine_like(self._bind, is_async=True).connect() as connection:
            know_engine(connection, self._bind)
            return one_pass(connection, connection)

    def end(self) -> None:
        """Do nothing: the connection was closed with its pass."""
