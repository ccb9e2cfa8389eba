"""Django's connection inside a transaction of a worker: the ORM's changes commit with inbox row and offset.

A worker has connections of its own, which SQLAlchemy made. While a function of the application runs, Django's wrapper
of the same database is one around the worker's connection, in an atomic block that the function can't leave; and the
connection makes cursors and values as Django wants them. Both are undone before the worker goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from django.db import DEFAULT_DB_ALIAS, Error, close_old_connections, connections, transaction
from sqlalchemy.exc import OperationalError

from outbox.database.at_commit import after_commit
from outbox.database.execute import Statement, driver_of, execute, in_transaction, is_lost
from outbox.database.session import refusing
from outbox.errors import InvalidSettings, TransactionRequired

if TYPE_CHECKING:
    from sqlalchemy import Connection

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
