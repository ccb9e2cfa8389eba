"""What a compensation declares: how the local transaction behind a message of a topic is undone.

And the databases in which such a message may take effect: the producer's own, if it has inboxes, and the consumers'.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from outbox.calling.function import CalledFunction
from outbox.compensate.sql import has_inbox
from outbox.database.dialect import url_of
from outbox.database.engines import address_of, check_database, connect, discard, engine_of
from outbox.database.execute import CONTENDED, execute, sqlstate
from outbox.errors import InvalidHandler, SchemaError
from outbox.message.answer import COMPENSATION, CalledKind
from outbox.text import database_address, summary_of

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Compensation(CalledFunction):
    """The compensation of a topic.

    ``function(message, session)``, sync or async, undoes in the session's transaction the business change that the
    message was sent with. ``consumers`` are the databases, beside the producer's own, in which groups consume the
    topic. ``when`` says which orders it follows: operators' alone, or the policy's too, for messages that a known group
    has parked ``after`` seconds ago.

    Raises:
        InvalidHandler: a function that can't be called so, or consumers that are none.
        InvalidMessage: the topic isn't a name.
    """

    decorator: ClassVar[str] = "compensation"
    kind: ClassVar[CalledKind] = COMPENSATION
    settings: ClassVar[Mapping[str, str]] = {"timeout": "compensation_timeout"}
    timeout: float = 30.0
    # A URL may hold a password.
    consumers: Collection[Engine | AsyncEngine | str] = field(default=(), repr=False)
    when: Literal["ordered", "parked"] = "ordered"
    after: float = 0.0

    def check(self) -> None:
        """Raise InvalidHandler if an option can't work."""
        if self.when not in {"ordered", "parked"}:
            raise InvalidHandler(f"{self.what}: when = {self.when!r} must be 'ordered' or 'parked'")
        if self.after and self.when != "parked":
            raise InvalidHandler(
                f"{self.what}: after says how long a message stays parked before; it needs when='parked'"
            )
        # A lone one would be read letter by letter.
        if isinstance(self.consumers, str) or not isinstance(self.consumers, Collection):
            raise InvalidHandler(f"{self.what}: consumers is a collection of databases; write [database]")
        object.__setattr__(self, "consumers", tuple(self.consumers))
        for number, consumer in enumerate(self.consumers, 1):
            check_database(f"{self.what}: number {number} of consumers", consumer)


T = TypeVar("T")

#: After how long (seconds) an item is tried again for which a row was locked, or a database couldn't be asked.
BUSY = 5.0
UNREACHABLE = 30.0


class Postponed(Exception):
    """Nothing can be done about an item now; ``seconds`` until it is tried again."""

    def __init__(self, why: str, seconds: float) -> None:
        super().__init__(why)
        self.seconds = seconds


class InboxDatabase:
    """One database with inboxes, by the name that is shown for it."""

    def __init__(self, name: str, connect: Callable[[], Connection]) -> None:
        self.name = name
        self._connect = connect
        self._connection: Connection | None = None
        self._failure: str | None = None

    def run(self, act: Callable[[Connection], T]) -> T:
        """Run an act on a connection that isn't in a transaction.

        Raises:
            Postponed: the database can't be asked now, or a row to change is locked.
        """
        if self._failure is not None:
            raise Postponed(self._failure, UNREACHABLE)
        try:
            if self._connection is None:
                self._connection = self._connect()
            return act(self._connection)
        except (DBAPIError, SchemaError) as error:
            if sqlstate(error) in CONTENDED:
                raise Postponed(
                    f"another transaction has the message in database {self.name} at this moment", BUSY
                ) from error
            self._failed(error)
            raise Postponed(str(self._failure), UNREACHABLE) from error

    def named(self, groups: Sequence[str]) -> list[str]:
        """Return what groups of this database are called in texts."""
        return [f"{group} (database {self.name})" for group in groups]

    def close(self) -> None:
        """Give the connection back."""
        connection, self._connection = self._connection, None
        if connection is not None:
            discard(connection)

    def _failed(self, error: Exception) -> None:
        """Don't ask it again in this pass: each attempt to reach it may take long."""
        first, _, _ = summary_of(getattr(error, "orig", None) or error).partition("\n")
        self._failure = f"database {self.name}: {first}"
        self.close()


class _OwnDatabase(InboxDatabase):
    """The producer's database, by the connection of the pass: if that is lost, so is the pass."""

    def close(self) -> None:
        """Leave the connection to the pass."""

    def _failed(self, error: Exception) -> None:
        raise error


class InboxDatabases:
    """The databases with inboxes of one pass; connections stay open to its end."""

    def __init__(self, own: Connection, schema: str) -> None:
        url = own.engine.url
        self._own = _OwnDatabase(database_address(url), lambda: own)
        self._own_address = address_of(url)
        self._schema = schema
        self._has_inbox: bool | None = None
        self._others: dict[str, InboxDatabase] = {}

    def of(self, compensation: Compensation) -> list[InboxDatabase]:
        """Return the databases in which messages of a compensation's topic may take effect."""
        if self._has_inbox is None:
            self._has_inbox = self._own.run(self._has_inboxes)
        databases: list[InboxDatabase] = [self._own] if self._has_inbox else []
        for consumer in compensation.consumers:
            address = address_of(consumer)
            if address == self._own_address:
                continue
            if address not in self._others:
                self._others[address] = InboxDatabase(database_address(url_of(consumer)), partial(_connect, consumer))
            databases.append(self._others[address])
        return databases

    def close(self) -> None:
        """Give all connections back."""
        for database in self._others.values():
            database.close()

    def _has_inboxes(self, connection: Connection) -> bool:
        with connection.begin():
            (((has,),),) = execute(connection, has_inbox(self._schema))
        return bool(has)


def _connect(bind: Engine | AsyncEngine | str) -> Connection:
    return connect(engine_of(bind))
