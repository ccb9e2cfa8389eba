"""The `Outbox` of each of Django's databases, and Django's connection inside a transaction of a worker.

What ``OUTBOX`` in Django's settings leaves out comes from the environment, or is default. An Outbox is declared when
modules are imported, and bound when it is used.

A worker has connections of its own, which SQLAlchemy made. While a function of the application runs, Django's wrapper
of the same database is one around the worker's connection, in an atomic block that the function can't leave; and the
connection makes cursors and values as Django wants them. Both are undone before the worker goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from django.conf import settings as django_settings
from django.db import DEFAULT_DB_ALIAS, Error, close_old_connections, connections, transaction
from sqlalchemy import URL, Dialect, Engine, NullPool, create_engine, event
from sqlalchemy.exc import OperationalError

from outbox.app import Outbox
from outbox.database.at_commit import after_commit
from outbox.database.execute import Statement, driver_of, execute, in_transaction, is_lost
from outbox.database.session import refusing
from outbox.errors import InvalidSettings, TransactionRequired
from outbox.reader import Reader, option, shape_of, unknown_name
from outbox.settings import Settings

if TYPE_CHECKING:
    from sqlalchemy import Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class DjangoSettings:
    """The keys of ``OUTBOX`` that Django alone has; the others are fields of `Settings`, all in capitals."""

    databases: tuple[str, ...] = option(("default",), "The aliases of the databases with outbox tables.")
    group: str = option("default", "The producer group that is written into messages.")
    modules: str = option("messages", "The module of each application with its handlers.")
    console_url: str | None = option(None, "Where the console is; the admin's index links to it.")


class Configuration(NamedTuple):
    """Hold Django's own settings, and those that an `Outbox` takes."""

    own: DjangoSettings
    outbox: Settings


@cache
def configuration() -> Configuration:
    """Return what the settings of the project say; read once.

    Raises:
        InvalidSettings: as `read`.
    """
    return read(getattr(django_settings, "OUTBOX", {}))


def read(written: Mapping[str, Any]) -> Configuration:
    """Return what a mapping such as ``OUTBOX`` says.

    Raises:
        InvalidSettings: a key that is none, or a value that can't be; names it and the mend.
    """
    known = {shape.name.upper() for kind in (DjangoSettings, Settings) for shape in shape_of(kind)}
    if unknown := [key for key in written if key not in known]:
        raise InvalidSettings(
            "; ".join(
                f"OUTBOX.{key} must be in capitals: {key.upper()}"
                if key.upper() in known
                else unknown_name(key, sorted(known), "OUTBOX.")
                for key in unknown
            )
        )
    own_names = {shape.name for shape in shape_of(DjangoSettings)}
    own = {key.lower(): value for key, value in written.items() if key.lower() in own_names}
    others = {key.lower(): value for key, value in written.items() if key.lower() not in own_names}
    reader = Reader()
    return Configuration(
        DjangoSettings(**reader.values(DjangoSettings, own, "OUTBOX.", str.upper)),
        Settings.from_env(**reader.values(Settings, others, "OUTBOX.", str.upper)),
    )


_declared: dict[str, Outbox] = {}
#: What the engine of an Outbox was made of: tests give an alias another database.
_made_of: dict[str, Hashable] = {}
#: The alias of the producer's database, where a group's is another one.
_sources: dict[tuple[str, str, str], list[str]] = {}
_guard = threading.RLock()

#: Keys of a database's settings that say where it is.
_ADDRESS = ("NAME", "USER", "PASSWORD", "HOST", "PORT")
#: What Django passes to psycopg, and libpq doesn't know.
_OF_PSYCOPG = frozenset({"client_encoding", "cursor_factory", "context", "prepare_threshold"})


def outbox(using: str | None = None) -> Outbox:
    """Return the Outbox on a database of ``DATABASES``, for all that has no function of its own here.

    Raises:
        InvalidSettings: ``OUTBOX`` doesn't name the database, or it isn't PostgreSQL.
    """
    alias = using or DEFAULT_DB_ALIAS
    found = declared(alias)
    address = _address(alias)
    if _made_of.get(alias) != address:
        with _guard:
            if _made_of.get(alias) != address:
                found.unbind()
                found.bind(_engine(alias))
                _bind_sources(alias, found)
                _made_of[alias] = address
    return found


def outboxes() -> list[Outbox]:
    """Return the Outboxes of all databases that ``OUTBOX`` names; a worker serves them together."""
    return [outbox(alias) for alias in configuration().own.databases]


def declared(using: str | None) -> Outbox:
    """Return the Outbox of a database, which may have no engine so far: its declarations stay."""
    alias = using or DEFAULT_DB_ALIAS
    with _guard:
        if alias not in _declared:
            own, settings = configuration()
            if alias not in own.databases:
                raise InvalidSettings(
                    f"database {alias!r} has no outbox; OUTBOX.DATABASES in your settings names "
                    f"{', '.join(own.databases)}: add it there, and run 'manage.py migrate --database {alias}'"
                )
            _declared[alias] = Outbox(group=own.group, settings=settings)
        return _declared[alias]


def set_source(using: str | None, topic: str, group: str, source: str | Sequence[str] | None) -> None:
    """Have a group read a topic from another of Django's databases, or from several."""
    alias = using or DEFAULT_DB_ALIAS
    if source is not None and source != alias:
        _sources[alias, topic, group] = [source] if isinstance(source, str) else list(source)


def _address(alias: str) -> Hashable:
    settings = connections[alias].settings_dict
    return tuple(settings[key] for key in _ADDRESS)


def _bind_sources(alias: str, bound: Outbox) -> None:
    for (own, *key), source in _sources.items():
        topic, group = key
        if own == alias:
            subscription = bound.subscriptions[topic, group]
            bound.subscriptions[topic, group] = replace(subscription, source=[_engine(each) for each in source])


def database_url(alias: str) -> URL:
    """Return the URL of a database of ``DATABASES``, as psycopg takes it.

    Raises:
        InvalidSettings: it isn't PostgreSQL.
    """
    connection: Any = connections[alias]
    if connection.vendor != "postgresql":
        raise InvalidSettings(f"database {alias!r} of DATABASES is {connection.vendor}; the outbox needs PostgreSQL")
    known = {name: value for name, value in connection.get_connection_params().items() if name not in _OF_PSYCOPG}
    role = connection.settings_dict["OPTIONS"].get("assume_role")
    if role:
        known["options"] = f"{known.get('options', '')} -c role={role}".strip()
    user, password, host, port, name = (known.pop(key, None) for key in ("user", "password", "host", "port", "dbname"))
    if host and str(host).startswith("/"):  # a folder of sockets, which has no place before the path of a URL
        known["host"], host = host, None
    return URL.create(
        "postgresql+psycopg",
        username=user,
        password=password,
        host=host,
        port=int(port) if port else None,
        database=name,
        query={key: str(value) for key, value in known.items() if value is not None},
    )


def _engine(alias: str) -> Engine:
    """Return an engine that keeps no connections: requests use Django's, and workers keep those that they open."""
    options = connections[alias].settings_dict["OPTIONS"]
    arguments = {key: options[key] for key in ("prepare_threshold",) if key in options}
    engine = create_engine(database_url(alias), poolclass=NullPool, connect_args=arguments)

    @event.listens_for(engine, "do_connect")
    def as_django(dialect: Dialect, _: object, __: object, parameters: dict[str, Any]) -> None:
        # As Django asks its backend each time, which may draw a new token.
        parameters.update(dialect.create_connect_args(database_url(alias))[1])

    return engine


logger: logging.Logger = logging.getLogger("outbox.django")

#: Where a worker's connection keeps Django's wrapper around it.
_WRAPPER = "outbox.django"


@contextmanager
def django_within(connection: Connection, using: str | None) -> Iterator[None]:
    """Have the ORM work in the transaction of a worker's connection until the block ends.

    What it registers with ``transaction.on_commit`` is called after the worker's COMMIT.

    Raises:
        TransactionRequired: the block ended normally, although Django has marked its transaction for a rollback.
        sqlalchemy.exc.OperationalError: the connection was lost.
    """
    alias, driver = using or DEFAULT_DB_ALIAS, driver_of(connection)
    if not in_transaction(driver):
        # The first statement begins the transaction; Django's would commit by itself.
        execute(connection, Statement("SELECT 1"))
    # Those of other databases that this thread has used: no request ends here, which would close them.
    close_old_connections()
    wrapper, usual = _wrapper_of(connection, alias), connections[alias]
    with _as_django_makes(driver, wrapper):
        connections[alias] = wrapper
        try:
            _set_time_zone(driver, wrapper)
            with transaction.atomic(alias, savepoint=False):
                yield
            if wrapper.needs_rollback:
                raise TransactionRequired(
                    "an error has spoilt the transaction, and was caught: what the handler did can't be kept; let the "
                    "error through, or catch it around an atomic() of its own"
                ) from wrapper.rollback_exc
        except Error as error:
            if not is_lost(connection):
                raise
            lost = error.__cause__ if isinstance(error.__cause__, Exception) else error
            raise OperationalError(None, None, lost, connection_invalidated=True) from error
        finally:
            connections[alias] = usual
            wrapper.connection = None
    for _, function, _ in wrapper.run_on_commit:
        after_commit(connection, partial(_call, function))


def _wrapper_of(connection: Connection, alias: str) -> Any:
    """Return Django's wrapper around a worker's connection, as it is at the begin of an atomic block."""
    driver = driver_of(connection)
    wrapper: Any = connection.info.get(_WRAPPER)
    if wrapper is None:
        wrapper = connection.info[_WRAPPER] = connections.create_connection(alias)
        # A checker's connection passes from thread to thread, one at a time.
        wrapper.inc_thread_sharing()
        wrapper._close = _refuse_close
    wrapper.connection = driver
    wrapper.autocommit, wrapper.in_atomic_block, wrapper.commit_on_exit = False, True, True
    wrapper.needs_rollback, wrapper.rollback_exc, wrapper.closed_in_transaction = False, None, False
    wrapper.savepoint_ids, wrapper.atomic_blocks, wrapper.run_on_commit = [], [], []
    wrapper.queries_log.clear()
    return wrapper


def _refuse_close() -> None:
    raise TransactionRequired("the connection is the worker's, and a handler can't close it: its transaction goes on")


@contextmanager
def _as_django_makes(driver: Any, wrapper: Any) -> Iterator[None]:
    """Give a connection the cursors and the types of Django's own, for a while."""
    parameters = wrapper.get_connection_params()
    if "context" not in parameters or not hasattr(driver, "_adapters"):
        raise InvalidSettings(
            "handlers use the ORM through psycopg 3, and your database's ENGINE uses another driver; install psycopg 3"
        )
    before = driver.cursor_factory, driver._adapters
    driver.cursor_factory, driver._adapters = refusing(parameters["cursor_factory"]), parameters["context"]
    try:
        yield
    finally:
        driver.cursor_factory, driver._adapters = before


def _set_time_zone(driver: Any, wrapper: Any) -> None:
    """Have the server use Django's time zone for the rest of the transaction."""
    name = wrapper.timezone_name
    if name and driver.info.parameter_status("TimeZone") != name:
        with wrapper.cursor() as cursor:
            cursor.execute("SELECT set_config('TimeZone', %s, true)", [name])


def _call(function: Callable[[], object]) -> None:
    """Call what waited for the COMMIT, which nothing can undo: an error is logged, and the others go on."""
    try:
        function()
    except Exception:
        name = getattr(function, "__qualname__", function)
        logger.exception("%s failed, which on_commit() was given", name, extra={"outbox_event": "on_commit.failed"})
