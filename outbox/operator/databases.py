"""The databases that an `Operator` works over, each by a name of its own, and connections to them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from sqlalchemy.exc import SQLAlchemyError

from outbox.database import migration
from outbox.database.duty import COUNTED_CONSUMER, COUNTED_PRODUCER, Duty
from outbox.database.execute import Row, Template, execute, kind_of
from outbox.database.sql import PLAN_FOR_VALUES, plan_by_index, read_only, wait_at_most
from outbox.errors import (
    DatabaseUnreached,
    ErrorKind,
    InvalidSettings,
    NotFound,
    OutboxError,
    SchemaMissing,
    UnknownDatabase,
)
from outbox.operator.look.redactor import Redactor
from outbox.settings import Settings
from outbox.text import fields_of, without_addresses

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine


T = TypeVar("T")

_AWAY = frozenset({ErrorKind.UNAVAILABLE, ErrorKind.SCHEMA})
#: Shows bodies unless another one is chosen: it masks what is secret by its name.
MASKED: Redactor = Redactor()
#: How long (seconds) one statement of an operator may run, and wait for a lock.
READ_SECONDS = 5.0
PATIENCE = 10.0


class Caller:
    """The client that something is read for. The request of a console is one with limits; others have none."""

    @property
    def addresses(self) -> bool:
        """May it see at which addresses databases are? If not, it can't search by them either."""
        return True

    def check(self) -> None:
        """Raise if the client has gone: then nothing more is read for it."""

    def search(self) -> None:
        """Count a search of the client; raise if too many of its searches run at once."""


_UNLIMITED = Caller()
#: The client of this thread or task.
CALLER: ContextVar[Caller] = ContextVar("outbox_caller", default=_UNLIMITED)


@dataclass(frozen=True, slots=True)
class Database:
    """A database with outbox tables; ``parts`` are ``producer``, ``consumer`` or both."""

    name: str
    engine: Engine
    settings: Settings
    parts: frozenset[str]

    @property
    def schema(self) -> str:
        """The schema of the outbox tables."""
        return self.settings.schema

    @contextmanager
    def read_only(self, seconds: float = READ_SECONDS) -> Iterator[Connection]:
        """Give a connection in a transaction that only reads, with a time limit on each statement.

        Raises as `Caller.check`.
        """
        CALLER.get().check()
        with self.engine.connect() as connection, connection.begin():
            execute(connection, read_only(seconds), plan_by_index(), PLAN_FOR_VALUES)
            yield connection

    @contextmanager
    def acting(self) -> Iterator[Connection]:
        """Give a connection in a transaction that is committed at the end; it waits `PATIENCE` seconds for a lock."""
        with self.engine.begin() as connection:
            execute(connection, wait_at_most(PATIENCE))
            yield connection


@dataclass(frozen=True, slots=True)
class AwayDatabase:
    """A registered database that couldn't be opened yet, and why; which tables it has is unknown."""

    name: str
    engine: Engine
    settings: Settings
    error: Exception


class Databases(dict[str, Database]):
    """The registered databases by name, in the order in which they were registered.

    ``away`` are those that couldn't be opened yet, by name: their rows are missing in every view.

    Raises:
        InvalidSettings: there is none.
    """

    def __init__(self, databases: Iterable[Database], away: Iterable[AwayDatabase] = ()) -> None:
        super().__init__((database.name, database) for database in databases)
        self.away: dict[str, AwayDatabase] = {each.name: each for each in away}
        if not self:
            raise InvalidSettings("an operator needs at least one database")

    def __missing__(self, name: str) -> Database:
        if name in self.away:
            raise DatabaseUnreached([name])
        raise UnknownDatabase(name, list(self))

    def away_for(self, name: str | None) -> list[str]:
        """Return which databases that couldn't be opened may have some of a list; ``name`` limits it to one."""
        return list(self.away) if name is None else []

    @classmethod
    def open(cls, engines: Mapping[str, Engine], settings: Settings, *, partly: bool = False) -> Databases:
        """Read which tables each database has; ``partly``: those that can't be reached are away.

        Raises:
            SchemaMissing, SchemaOutdated: one has no outbox tables, or not those of this code.
            sqlalchemy.exc.DBAPIError: one can't be reached; ``partly``: none can.
        """
        opened: list[Database] = []
        away: list[AwayDatabase] = []
        for name, engine in engines.items():
            try:
                opened.append(open_database(name, engine, settings))
            except SQLAlchemyError as error:
                if not partly or not is_away(error):
                    raise
                away.append(AwayDatabase(name, engine, settings, error))
        if not opened and away:
            raise away[0].error
        return cls(opened, away)

    def having(self, part: str | None, name: str | None = None) -> list[Database]:
        """Return the databases that have a part (None: any); only the one of this name, if one is given.

        Raises:
            UnknownDatabase: none of this name is registered.
        """
        chosen = self.values() if name is None else [self[name]]
        return [database for database in chosen if part is None or part in database.parts]


def is_away(error: Exception) -> bool:
    """Return whether an error means that a database, or its tables, can't be reached, whatever is asked of it."""
    return kind_of(error) in _AWAY


def read_each(
    databases: Iterable[Database],
    read: Callable[[Connection, Database], T],
    unreached: list[str],
    opened: Callable[[Database], AbstractContextManager[Connection]] = Database.read_only,
) -> dict[str, T]:
    """Read, or write, each database but for the ``unreached``, to which more are added; return the results by name."""
    found = {}
    for database in databases:
        if database.name in unreached:
            continue
        try:
            with opened(database) as connection:
                found[database.name] = read(connection, database)
        except (SQLAlchemyError, OutboxError) as error:
            if not is_away(error):
                raise
            unreached.append(database.name)
    return found


def open_database(name: str, engine: Engine, settings: Settings) -> Database:
    """Read which tables a database has.

    Raises:
        SchemaMissing, SchemaOutdated: it has no outbox tables, or not those of this code.
    """
    with engine.connect() as connection:
        revisions = migration.current(connection, settings.schema)
        parts = tuple(part for part in migration.PARTS if revisions[part])
        migration.require(connection, parts or migration.PARTS, settings.schema)
    if not parts:
        raise SchemaMissing(f"database {name!r} has no outbox tables")
    return Database(name, engine, settings, frozenset(parts))


class Query(Template):
    """A template whose rows are known by the names of their columns, which its first line is: a comment.

    A column of JSON (``name:json``) is selected as a text, and decoded.
    """

    def __init__(self, sql: str) -> None:
        columns, _, select = sql.lstrip().partition("\n")
        super().__init__(select)
        self.columns: list[tuple[str, str, str]] = [
            column.partition(":") for column in columns.removeprefix("-- ").split()
        ]

    def named(self, rows: Iterable[Row]) -> list[dict[str, Any]]:
        """Return rows by the names of the columns."""
        return [
            {
                name: json.loads(value) if kind and value is not None else value
                for (name, _, kind), value in zip(self.columns, row, strict=True)
            }
            for row in rows
        ]

    def read(self, connection: Connection, schema: str, **values: Any) -> list[dict[str, Any]]:
        """Run the query alone; return its rows by the names of the columns."""
        return self.named(execute(connection, self(schema, **values))[0])


#: The fields of views that quote errors, or what came of acts.
_TEXT_FIELDS = frozenset({
    "described", "detail", "details", "error", "error_kind", "last_error", "next", "note", "opened_because", "outcome",
    "owner", "pause_reason", "reason", "result", "unreached", "why", "worker",
})  # fmt: skip


def _shown_texts(value: Any) -> Any:
    if type(value) in {list, tuple}:
        return type(value)(map(_shown_texts, value))
    if isinstance(value, Mapping):
        return {name: _shown_text(name, each) for name, each in value.items()}
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = fields_of(value)
    changed = {name: _shown_text(name, each) for name, each in fields.items()}
    return dataclasses.replace(value, **{name: each for name, each in changed.items() if each is not fields[name]})


def _shown_text(name: object, value: Any) -> Any:
    return without_addresses(value) if name in _TEXT_FIELDS else _shown_texts(value)


class OverDatabases:
    """Be the base of an operator's views and acts over the registered databases, whose ``redactor`` shows bodies.

    Without ``addresses``, nothing shown says where databases are: only their names are.
    """

    addresses: bool = True

    def __init__(self, databases: Databases, redactor: Redactor | None = None) -> None:
        self.databases = databases
        self.redactor: Redactor = redactor or MASKED

    def shown(self, value: T) -> T:
        """Return a value as it may be shown."""
        found: T = value if self.addresses else without_addresses(value)
        return found

    def shown_texts(self, value: T) -> T:
        """Return a view, or a page of rows, as it may be shown: its texts of failures and acts may name a host."""
        found: T = value if self.addresses else _shown_texts(value)
        return found

    def first_of(self, part: str | None, find: Callable[[Database], T | None], missing: OutboxError) -> T:
        """Return the result of the first database that has one, of those with a part; raise ``missing`` if none has.

        Raises:
            DatabaseUnreached: none of those that can be reached has it.
        """
        unreached = list(self.databases.away)
        for database in self.databases.having(part):
            try:
                found = find(database)
            except (SQLAlchemyError, OutboxError) as error:
                if not is_away(error):
                    raise
                unreached.append(database.name)
            else:
                if found is not None:
                    return found
        raise DatabaseUnreached(unreached) if unreached else missing

    def not_found(self, message_id: UUID) -> NotFound | DatabaseUnreached:
        """Return the error for a message that no database knows which can be reached."""
        if self.databases.away:
            return DatabaseUnreached(list(self.databases.away))
        return NotFound(
            f"no registered database ({', '.join(self.databases)}) knows message {message_id}; "
            "is it in another one, or was it pruned?"
        )


# --- what the database role of an operator does --------------------------------------------------------

DUTIES = (
    Duty(
        "look",
        "Shows what the console shows.",
        f"""
        producer: viewer operator admin
        {COUNTED_PRODUCER}
        SELECT ON audit bulk_job bulk_item worker silence stats_sample check_history compensation delivery_cursor
        SELECT ON half_error producer_process topic_pause cron_schedule intake_range
        SELECT(id number) ON published
        consumer: viewer operator admin
        {COUNTED_CONSUMER}
        SELECT ON audit bulk_job bulk_item worker silence stats_sample attempt_history dead_letter_note
        SELECT ON reconciliation_finding segment_hold consumer_passage reread_message group_control
        """,
    ),
    Duty(
        "order",
        "Writes down what an operator orders.",
        """
        producer: operator admin
        INSERT ON audit half_message op_message
        INSERT UPDATE ON bulk_job bulk_item topic_pause
        INSERT DELETE ON silence
        UPDATE ON cron_schedule
        USAGE ON op_sequence
        consumer: operator admin
        INSERT ON audit
        INSERT UPDATE ON bulk_job bulk_item group_control
        INSERT DELETE ON silence
        INSERT UPDATE DELETE ON dead_letter_note
        """,
    ),
    Duty(
        "groups",
        "Moves groups; deletes groups, topics and schedules.",
        """
        producer: admin
        DELETE ON message check_history delivery delivery_cursor half_error scheduled_message half_message topic_total
        DELETE ON topic topic_pause cron_schedule
        SELECT(id) DELETE ON published
        INSERT ON audit
        SELECT DELETE ON topic_growth
        UPDATE DELETE ON op_message
        consumer: admin
        DELETE ON group_control dead_letter_note consumer_message reread_message segment_hold log_loss
        SELECT DELETE ON rate_grant consumer_start reconciliation_settled reconciliation_mark
        INSERT ON audit
        INSERT UPDATE DELETE ON consumer_offset
        SELECT INSERT DELETE ON consumer_lease
        INSERT DELETE ON consumer_passage
        """,
    ),
)
