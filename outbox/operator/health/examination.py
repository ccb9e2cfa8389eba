"""An examination: one database, the settings it is used with, and what an application has registered; it only reads."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from outbox.database.execute import Row, Statement, driver_of, execute, is_lost
from outbox.database.sql import read_only
from outbox.dispatch.sql import plan_by_index
from outbox.errors import InvalidSettings
from outbox.operator.health import sql
from outbox.operator.health.rules import Subject

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

    from outbox.check.checker import Checker
    from outbox.consumer.subscription import Subscription


class NotInspected(Exception):
    """Something could not be inspected, or only in part; says why, and how it could be."""


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """What server this is, and its time; ``role`` and ``database`` are quoted for SQL."""

    version_number: int
    version: str
    standby: bool
    role_name: str
    role: str
    database: str
    makes_temporary_tables: bool
    at: dt.datetime


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter as it is for the doctor's session, and where that value comes from (``pg_settings.source``)."""

    name: str
    value: str
    source: str


@dataclass(kw_only=True)
class Examination(Subject):
    """One database under examination.

    The connections of ``engine`` are the application's own if ``own_engine``. ``checkers`` and ``subscriptions`` are
    None where the application isn't known. ``refused``: why the application's settings could not be taken. ``clock``
    is this host's, in seconds since 1970. ``revisions`` are those of the tables, None while they could not be read;
    ``parts`` are those whose tables this code can read. ``prepare_threshold`` is psycopg's, None: it never prepares.

    Raises:
        sqlalchemy.exc.DBAPIError: the database can't be reached.
    """

    engine: Engine
    own_engine: bool = True
    refused: InvalidSettings | None = None
    checkers: Mapping[str, Checker] | None = None
    subscriptions: Collection[Subscription] | None = None
    clock: Callable[[], float] = time.time
    revisions: Mapping[str, str | None] | None = None
    parts: tuple[str, ...] = ()
    prepare_threshold: int | None = None

    def __post_init__(self) -> None:
        self.connection = self.connect()

    def connect(self) -> Connection:
        """Open another connection, which goes to no pool.

        The driver prepares no statements on it: behind a pooler that knows nothing of them, prepared statements are
        what makes the connection fail.
        """
        connection = self.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        connection.detach()
        driver = driver_of(connection)
        self.prepare_threshold, driver.prepare_threshold = driver.prepare_threshold, None
        return connection

    def reconnect(self) -> None:
        """Go on with another connection where the server has cut this one."""
        if is_lost(self.connection):
            self.close()
            self.connection = self.connect()

    def close(self) -> None:
        """Close the connection, whatever state it is in."""
        with suppress(Exception):  # a broken connection may fail in any way
            if is_lost(self.connection):
                self.connection.invalidate()
        with suppress(Exception):
            self.connection.close()

    @cached_property
    def server(self) -> ServerIdentity:
        """What server this is."""
        ((row,),) = self.read(sql.SERVER)
        return ServerIdentity(*row)

    def read(self, *statements: Statement) -> list[list[Row]]:
        """Run statements in a transaction of their own, which can't write."""
        with self.reading() as connection:
            return execute(connection, *statements)

    @contextmanager
    def reading(self, connection: Connection | None = None) -> Iterator[Connection]:
        """Begin a transaction that can't write, and in which no statement takes long."""
        connection = connection or self.connection
        with connection.begin():
            execute(connection, read_only(self.thresholds.statement), plan_by_index())
            yield connection

    def tables(self) -> Sequence[str]:
        """Return the names of our tables that are here."""
        from outbox.database.tables import common_tables, consumer_tables, producer_tables  # noqa: PLC0415 - takes time

        of_part = {"producer": producer_tables, "consumer": consumer_tables}
        made = [common_tables, *(of_part[part] for part in self.parts)]
        return [table.name for make in made for table in make().tables.values()]

    def parameters(self, *names: str) -> dict[str, Parameter]:
        """Return configuration parameters of PostgreSQL by name."""
        (rows,) = self.read(sql.parameters(names))
        return {row[0]: Parameter(*row) for row in rows}

    def set_to(self, parameter: Parameter, value: str) -> str:
        """Return the SQL that sets a parameter for all sessions, or undoes the setting where it was made otherwise."""
        role, database = self.server.role, self.server.database
        match parameter.source:
            case "database":
                return f"ALTER DATABASE {database} RESET {parameter.name};"
            case "user":
                return f"ALTER ROLE {role} RESET {parameter.name};"
            case "database user":
                return f"ALTER ROLE {role} IN DATABASE {database} RESET {parameter.name};"
            case "client":
                return f"leave {parameter.name} out of the connection's options (URL, PGOPTIONS or connect_args)"
            case "command line":
                return f"start the server without {parameter.name} on its command line"
        return f"ALTER SYSTEM SET {parameter.name} = {value}; SELECT pg_reload_conf();"

    def require(self, parts: Collection[str]) -> None:
        """Make sure that the tables of these parts can be read.

        Raises:
            NotInspected: they aren't here, or not as this code knows them.
        """
        for part in parts:
            if part in self.parts or (part == "common" and self.parts):
                continue
            tables = "the outbox's tables" if part == "common" else f"the {part}'s tables"
            if self.revisions is None:
                raise NotInspected(f"it is not known whether {tables} are here")
            if self.revisions[part] is None:
                raise NotInspected(f"{tables} are not in this database")
            raise NotInspected(f"{tables} are of another version than this code")
