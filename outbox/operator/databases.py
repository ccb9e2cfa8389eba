"""The databases that an `Operator` works over, each by a name of its own, and connections to them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.database import migration
from outbox.database.execute import Row, Template, execute
from outbox.database.sql import plan_by_index, read_only, wait_at_most
from outbox.errors import InvalidSettings, MessageNotFound, SchemaMissing, UnknownDatabase
from outbox.settings import Settings

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

#: How long (seconds) one statement of an operator may run, and wait for a lock.
READ_SECONDS = 5.0
PATIENCE = 10.0


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
    def reading(self, seconds: float = READ_SECONDS) -> Iterator[Connection]:
        """Give a connection in a transaction that only reads, with a time limit on each statement."""
        with self.engine.connect() as connection, connection.begin():
            execute(connection, read_only(seconds), plan_by_index())
            yield connection

    @contextmanager
    def acting(self) -> Iterator[Connection]:
        """Give a connection in a transaction that is committed at the end; it waits `PATIENCE` seconds for a lock."""
        with self.engine.begin() as connection:
            execute(connection, wait_at_most(PATIENCE))
            yield connection


class Databases(dict[str, Database]):
    """The registered databases by name, in the order in which they were registered.

    Raises:
        InvalidSettings: there is none.
    """

    def __init__(self, databases: Iterable[Database]) -> None:
        super().__init__((database.name, database) for database in databases)
        if not self:
            raise InvalidSettings("an operator needs at least one database")

    def __missing__(self, name: str) -> Database:
        raise UnknownDatabase(name, list(self))

    @classmethod
    def open(cls, engines: Mapping[str, Engine], settings: Settings) -> Databases:
        """Read which tables each database has.

        Raises:
            SchemaMissing, SchemaOutdated: one has no outbox tables, or not those of this code.
        """
        return cls([open_database(name, engine, settings) for name, engine in engines.items()])

    def having(self, part: str | None, name: str | None = None) -> list[Database]:
        """Return the databases that have a part (None: any); only the one of this name, if one is given.

        Raises:
            UnknownDatabase: none of this name is registered.
        """
        chosen = self.values() if name is None else [self[name]]
        return [database for database in chosen if part is None or part in database.parts]


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

    What is JSON (``name:json``) is selected as a text, and decoded.
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


class OverDatabases:
    """The base of what an operator sees and does over the registered databases."""

    def __init__(self, databases: Databases) -> None:
        self.databases = databases

    def not_found(self, message_id: UUID) -> MessageNotFound:
        """Return the error for a message that no database knows."""
        return MessageNotFound(
            f"no registered database ({', '.join(self.databases)}) knows message {message_id}; "
            "is it in another one, or was it pruned?"
        )
