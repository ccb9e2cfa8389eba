"""The console's own connections: few, named, with a time limit, and the operator over them."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine, QueuePool, event
from sqlalchemy.exc import DBAPIError

from outbox.app import Outbox
from outbox.console.events import DatabaseMissing
from outbox.database.dialect import url_of
from outbox.database.engines import separate_engine
from outbox.errors import InvalidSettings, SchemaError
from outbox.message.content import NO_CODECS, Codecs
from outbox.operator.databases import AwayDatabase, Database, Databases, open_database
from outbox.operator.operator import Operator
from outbox.settings import Settings
from outbox.telemetry.hooks import emit
from outbox.text import summary_of

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.pool import ConnectionPoolEntry

    from outbox.database.engines import Bind
    from outbox.message.topic import Topic
    from outbox.operator.look.redactor import Redactor

    Source = Outbox | Operator | Bind | Mapping[str, Bind]

POOL = 3
#: How long (seconds) a request waits for one of the connections, and a connection for its server.
POOL_WAIT = 5.0
_CONNECT_WAIT = 5
#: How long (seconds) one statement of an act may run, its waiting for locks included; queries have a shorter limit.
ACT_SECONDS = 15.0
#: How long (seconds) a database that couldn't be reached is left alone.
_AGAIN = 10.0

# Bound to the transaction, so that it works through a transaction pooler.
_BEGIN = "SELECT set_config('application_name', %s, true), set_config('statement_timeout', %s, true)"


def own_engine(source: Bind, *, read_only: bool = False) -> Engine:
    """Return an engine with a small pool, whose connections are made as those of ``source``."""
    options: dict[str, Any] = {
        "pool_size": POOL,
        "max_overflow": 0,
        "pool_timeout": POOL_WAIT,
        "pool_pre_ping": True,
        "pool_recycle": 1800,
        "hide_parameters": True,
        "poolclass": QueuePool,
    }
    engine = separate_engine(source, _CONNECT_WAIT, **options)

    @event.listens_for(engine, "begin")
    def name_and_limit(connection: Connection) -> None:
        connection.exec_driver_sql(_BEGIN, ("outbox console", f"{int(ACT_SECONDS * 1000)}ms"))

    return engine.execution_options(postgresql_readonly=True) if read_only else engine


class OperatorSource:
    """Gives what operators see and do; it connects at the first request, to those of the databases that can be reached.

    The others are tried again from time to time: an operator needs the console most when one of them is down.
    The connections of an `Operator` as the ``source`` are the application's. ``databases`` are further ones.

    Raises:
        InvalidSettings: two databases of one name, none at all, or further ones beside an `Operator`.
    """

    def __init__(
        self,
        source: Source,
        databases: Mapping[str, Bind] | None = None,
        settings: Settings | None = None,
        redactor: Redactor | None = None,
        codecs: Codecs | None = None,
        topics: Mapping[str, Topic[Any]] | None = None,
        *,
        read_only: bool = False,
    ) -> None:
        self._engines: dict[str, Engine] = {}
        self._opened: dict[str, Database] = {}
        #: The names of the databases that couldn't be opened yet, and why so (None: not tried).
        self.missing: dict[str, Exception | None] = {}
        self._operator: Operator | None = None
        self._last_try, self._lock = -_AGAIN, threading.Lock()
        self._redactor, further = redactor, dict(databases or {})
        self._codecs, self._topics = NO_CODECS if codecs is None else codecs, topics
        if isinstance(source, Operator):
            if further or redactor or settings or codecs:
                raise InvalidSettings(
                    "an Operator has its databases, settings, redactor and codecs already; pass them to it"
                )
            self._operator = _read_only_twin(source) if read_only else source
            return
        if isinstance(source, Outbox):
            self._codecs = source.codecs if codecs is None else codecs
            self._topics = source.topics if topics is None else topics
            settings, source = settings or source.settings, source.engine
        binds = dict(source) if isinstance(source, Mapping) else {url_of(source).database or "outbox": source}
        if duplicates := sorted(binds.keys() & further.keys()):
            raise InvalidSettings(f"two databases are named {duplicates[0]!r}; each needs a name of its own")
        self._engines = {name: own_engine(bind, read_only=read_only) for name, bind in (binds | further).items()}
        if not self._engines:
            raise InvalidSettings("the console needs at least one database")
        self._settings, self.missing = settings or Settings.from_env(), dict.fromkeys(self._engines)

    def __call__(self) -> Operator:
        """Return what operators see and do.

        Raises:
            SchemaMissing, SchemaOutdated: no database could be opened, and that is why.
            sqlalchemy.exc.DBAPIError: none could be reached.
        """
        with self._lock:
            due = time.monotonic() - self._last_try >= _AGAIN
            if self._operator is None or (self.missing and due):
                self._operator = self._open()
            return self._operator

    def close(self) -> None:
        """Close the console's own connections; they are opened again when they are needed.

        One that a request has at the time is closed after the request.
        """
        for engine in self._engines.values():
            pool = engine.pool
            engine.dispose()
            # To this disposed pool, a running request still gives its connection back: it would stay open there.
            event.listen(pool, "checkin", _close_returned)
            pool.dispose()  # of connections that came back before the listener was there

    def _open(self) -> Operator:
        missing: dict[str, Exception] = {}
        for name in self.missing:
            try:
                self._opened[name] = open_database(name, self._engines[name], self._settings)
            except (DBAPIError, SchemaError) as error:
                repeated = self.missing[name] is not None
                emit(DatabaseMissing(database=name, reason=summary_of(error), repeated=repeated, error=error))
                missing[name] = error
        self.missing, self._last_try = dict(missing), time.monotonic()
        if not self._opened:
            self.close()
            raise next(iter(missing.values()))
        in_order = [self._opened[name] for name in self._engines if name in self._opened]
        away = [AwayDatabase(name, self._engines[name], self._settings, error) for name, error in missing.items()]
        return Operator(Databases(in_order, away), self._redactor, self._codecs, self._topics)


def _close_returned(_: object, record: ConnectionPoolEntry) -> None:
    record.invalidate()


def _read_only_twin(operator: Operator) -> Operator:
    databases = [
        replace(each, engine=each.engine.execution_options(postgresql_readonly=True))
        for each in operator.databases.values()
    ]
    return Operator(Databases(databases), operator.redactor, operator.codecs, operator.topics)
