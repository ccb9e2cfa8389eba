"""One database under examination: its connections, and what is known of its server and its tables."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from outbox.database.engines import PREPARE_AFTER, discard
from outbox.database.execute import Row, Statement, driver_of, execute, is_lost
from outbox.database.sql import plan_by_index, read_only
from outbox.operator.health import sql
from outbox.operator.health.rules import NotInspected
from outbox.operator.health.subject import Subject

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine, Table

    from outbox.consumer.subscription import Subscription
    from outbox.errors import InvalidSettings


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


@dataclass(kw_only=True)
class Examination(Subject):
    """One database under examination; see `examine`.

    The connections of ``engine`` are the application's own if ``own_engine``. ``revisions`` are those of the tables,
    None while they could not be read. ``prepare_threshold`` is that of ``engine`` (None: it never prepares), or, if
    that isn't the application's, what psycopg does unless it is told otherwise. ``roles`` are what
    the role of the connection is there for (`outbox.operator.health.grants.ROLES`), None where that isn't known.

    Raises:
        sqlalchemy.exc.DBAPIError: the database can't be reached.
    """

    engine: Engine
    own_engine: bool
    refused: InvalidSettings | None
    subscriptions: Collection[Subscription] | None
    roles: Collection[str] | None
    clock: Callable[[], float]
    revisions: Mapping[str, str | None] | None = None
    prepare_threshold: int | None = None

    def __post_init__(self) -> None:
        self.connection: Connection = self.connect()

    def connect(self) -> Connection:
        """Open another connection, which goes to no pool.

        The driver prepares no statements on it: behind a pooler that knows nothing of them, prepared statements are
        what makes the connection fail.
        """
        connection = self.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        connection.detach()
        driver = driver_of(connection)
        prepared, driver.prepare_threshold = driver.prepare_threshold, None
        self.prepare_threshold = prepared if self.own_engine else PREPARE_AFTER
        return connection

    def reconnect(self) -> None:
        """Go on with another connection where the server has cut this one."""
        if is_lost(self.connection):
            discard(self.connection)
            self.connection = self.connect()

    @cached_property
    def server(self) -> ServerIdentity:
        """What server this is."""
        return ServerIdentity(*self.rows(sql.SERVER)[0])

    def read(self, *statements: Statement) -> list[list[Row]]:
        """Run statements in a transaction of their own, which can't write."""
        with self.read_only() as connection:
            return execute(connection, *statements)

    @contextmanager
    def read_only(self, connection: Connection | None = None) -> Iterator[Connection]:
        """Begin a transaction that can't write, and in which no statement takes long."""
        connection = connection or self.connection
        with connection.begin():
            execute(connection, read_only(self.thresholds.statement), plan_by_index())
            yield connection

    def tables(self) -> dict[str, Table]:
        """Return our tables that are here by name."""
        from outbox.database.tables import common_tables, consumer_tables, producer_tables  # noqa: PLC0415 - takes time

        of_part = {"producer": producer_tables, "consumer": consumer_tables}
        made = [common_tables, *(of_part[part] for part in self.parts)]
        return {table.name: table for make in made for table in make().tables.values()}

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
