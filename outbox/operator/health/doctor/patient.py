"""What is looked at: one database, the settings it is used with, and what an application has registered."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from shlex import quote
from typing import TYPE_CHECKING, Protocol

from outbox.database.execute import Row, Statement, driver_of, execute
from outbox.dispatch.sql import plan_by_index
from outbox.errors import InvalidSettings
from outbox.operator.health.doctor import sql
from outbox.operator.health.stats_sql import look_only
from outbox.settings import Settings

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

#: How many rows are looked at, where rows are counted.
ROWS = 10_000


class CheckerRules(Protocol):
    """What is asked of a registered checker."""

    @property
    def immunity(self) -> float:
        """How long (seconds) a half is left alone."""

    @property
    def interval(self) -> float:
        """The pause (seconds) between two checks."""

    @property
    def max_checks(self) -> int:
        """How often it is asked."""


class SubscriptionRules(Protocol):
    """What is asked of a registered consumer."""

    @property
    def topic(self) -> str:
        """What it reads."""

    @property
    def group(self) -> str:
        """Its name."""

    @property
    def retry_delays(self) -> tuple[float, ...]:
        """Seconds before each retry."""

    @property
    def threads(self) -> int:
        """Consuming threads of a worker, each with a connection."""


@dataclass(frozen=True, slots=True)
class Limits:
    """From where on something is a finding, and how long a ``statement`` may take; durations are seconds.

    ``idle_transaction``, ``running_transaction`` and ``prepared_transaction``: a transaction open for so long, while
    idle, while it works, or prepared by two-phase commit. ``undispatched``: what waits so long for a worker that should
    take it at once. ``retry``: a retry so much overdue. ``clock``: a clock so far off. ``held_transactions``: a
    replication slot or standby that keeps what so many transactions left from being vacuumed; ``held_wal``: bytes of
    WAL kept by a slot. ``connections``: how many more must be possible; None: what one more worker needs.
    """

    idle_transaction: float = 300.0
    running_transaction: float = 3600.0
    prepared_transaction: float = 300.0
    undispatched: float = 60.0
    retry: float = 300.0
    clock: float = 5.0
    held_transactions: int = 1_000_000
    held_wal: int = 10 * 1024**3
    connections: int | None = None
    statement: float = 5.0


class Unseen(Exception):
    """Something could not be looked at, or not all of it; says why, and how it could be."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where we are, and when; ``role`` and ``database`` are quoted for SQL."""

    version_number: int
    version: str
    standby: bool
    role_name: str
    role: str
    database: str
    at: dt.datetime


@dataclass
class Patient:
    """One database under examination.

    ``connect`` opens another connection that belongs to nobody else; ``prepare_threshold`` is that of psycopg on the
    engine's connections, which are the application's own if ``own_engine``. ``checkers`` and ``subscriptions`` are None
    where the application isn't known. ``revisions`` are those of the tables, None while they could not be read.
    """

    engine: Engine
    connection: Connection
    connect: Callable[[], Connection]
    settings: Settings
    refused: InvalidSettings | None = None
    checkers: Mapping[str, CheckerRules] | None = None
    subscriptions: Collection[SubscriptionRules] | None = None
    app: str = "MODULE:OBJECT"
    own_engine: bool = True
    prepare_threshold: int | None = None
    limits: Limits = field(default_factory=Limits)
    clock: Callable[[], float] = time.time
    revisions: Mapping[str, str | None] | None = None
    parts: tuple[str, ...] = ()

    @cached_property
    def server(self) -> Server:
        """Where we are."""
        ((row,),) = self.read(sql.server())
        return Server(*row)

    @property
    def schema(self) -> str:
        """The schema of the tables."""
        return self.settings.schema

    def read(self, *statements: Statement) -> list[list[Row]]:
        """Run statements in a transaction of their own, which can't write."""
        with self.reading() as connection:
            return execute(connection, *statements)

    @contextmanager
    def reading(self, connection: Connection | None = None) -> Iterator[Connection]:
        """Begin a transaction that can't write, and in which no statement takes long."""
        connection = connection or self.connection
        with connection.begin():
            execute(connection, look_only(self.limits.statement), plan_by_index())
            yield connection

    def tables(self) -> Sequence[str]:
        """Return the names of our tables that are here."""
        from outbox.database.tables import common_tables, consumer_tables, producer_tables  # noqa: PLC0415 - takes time

        of_part = {"producer": producer_tables, "consumer": consumer_tables}
        made = [common_tables, *(of_part[part] for part in self.parts)]
        return [table.name for make in made for table in make().tables.values()]

    def command(self, line: str) -> str:
        """Return a command of ours for this database; a password in its URL is masked."""
        url = quote(self.engine.url.render_as_string(hide_password=True))
        return f"outbox {line} --url {url}{'' if self.schema == 'outbox' else f' --schema {self.schema}'}"

    def worker(self, roles: str = "") -> str:
        """Return the command that runs a worker."""
        return f"outbox run --app {self.app}{f' --roles {roles}' if roles else ''}"


def unprepared(connection: Connection) -> int | None:
    """Keep the driver from preparing statements on a connection of ours; return when it would have (None: never).

    Behind a pooler that knows nothing of them, prepared statements are what makes the connection fail.
    """
    driver = driver_of(connection)
    threshold: int | None = driver.prepare_threshold
    driver.prepare_threshold = None
    return threshold
