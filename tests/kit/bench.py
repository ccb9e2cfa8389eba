"""The worlds of what is consumed: one producer or two, a consumer, handlers, and a ledger in its database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar
from uuid import UUID

from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Settings
from outbox.compensate.quarantine import quarantine_group
from outbox.consumer.consumer import Consumer
from outbox.consumer.outside.consumer import consumer_of
from outbox.database.identity import renew
from outbox.message.model import Counts
from outbox.operator.databases import Database, Databases
from outbox.operator.operator import Operator
from tests.kit.passes import consume_all, declare, dispatch_all, send_each
from tests.kit.tables import Tables

T = TypeVar("T")

LEDGER = text("INSERT INTO ledger (message_id, body, attempt) VALUES (:id, :body, :attempt)")


def make_ledger(engine: Engine) -> None:
    """Create the table into which handlers write: it takes the same message twice, so that a test can see it."""
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE ledger (n serial PRIMARY KEY, message_id uuid, body text, attempt int)"))


def record(message: Message, session: Session) -> None:
    """Write a message into the ledger."""
    session.execute(LEDGER, {"id": message.id, "body": str(message.body), "attempt": message.attempt})


def but(body: Any, act: Callable[[Message, Session], Any]) -> Callable[[Message, Session], Any]:
    """Return a handler that records every message, and does something more with the one of this body."""

    def handler(message: Message, session: Session) -> Any:
        record(message, session)
        return act(message, session) if message.body == body else None

    return handler


def fail(message: Message, session: Session | None = None) -> None:
    """Fail, in a transaction and outside of one."""
    raise RuntimeError("ill")


class Ward:
    """A handler, in a transaction or outside of one, that fails where it is told to; it writes into the ledger first.

    It fails for the bodies in ``ill``, and for all while what it needs is ``down``. ``calls`` are the bodies of all its
    calls, ``done`` those that it handled, after each of which it does ``afterwards``.
    """

    def __init__(self, *ill: Any, down: bool = False, error: type[BaseException] = RuntimeError) -> None:
        self.ill = set(ill)
        self.down, self.error = down, error
        self.calls: list[Any] = []
        self.done: list[Any] = []
        self.afterwards: Callable[[Any], object] = lambda body: None

    def __call__(self, message: Message, session: Session | None = None) -> None:
        """Handle a message."""
        self.calls.append(message.body)
        if session is not None:
            record(message, session)
        if self.down:
            raise ConnectionError("the provider is down")
        if message.body in self.ill:
            raise self.error("ill")
        self.done.append(message.body)
        self.afterwards(message.body)


@dataclass(frozen=True)
class InboxRow:
    """What an inbox knows about a message."""

    status: str
    attempts: int
    error: str | None


class Bench(Tables):
    """A producer and the consumers of its topic `t`, driven by hand, pass by pass; SQL is on the consumer's side."""

    def __init__(self, producer: Engine, consumer: Engine, settings: Settings) -> None:
        super().__init__(consumer)
        self.settings = settings
        self.producer, self.consumer = producer, consumer
        self.app = Outbox(producer, settings=settings)
        self.sink = Outbox(consumer, settings=settings)
        self.connection = consumer.connect()
        self.source = self.connection if producer is consumer else producer.connect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        self.source.close()

    def send(self, *bodies: Any, **options: Any) -> list[UUID]:
        """Send bodies in one transaction, by default under one key, and dispatch them."""
        options.setdefault("key", "k")
        with self.producer.begin() as connection:
            ids = [self.app.send(connection, options.pop("topic", "t"), body, **options) for body in bodies]
        self.dispatch()
        return ids

    def dispatch(self) -> None:
        """Dispatch and release all there is."""
        dispatch_all(self.producer, self.settings)

    def resend(self, *ids: UUID) -> None:
        """Append messages once more."""
        self.app.operator.resend(ids, by="me", why="test")

    def declare(self, handler: Callable[..., Any] = record, **options: Any) -> Consumer:
        """Return a consumer of topic `t`, as its first pass finds it.

        ``early``: as that of a worker which started before all that has happened so far, when the group was known.
        """
        group, topic = options.pop("group", "g"), options.pop("topic", "t")
        early = options.pop("early", False)
        limits = options.pop("settings", self.settings)
        consumer = declare(self.consumer, topic, group, handler, settings=limits, **options)
        if not early:
            consumer.start(self.connection, self.source)
            quarantine_group(self.connection, self.source, limits.schema, group, consumer.subscription.feed)
        return consumer

    def consume(self, consumer: Consumer) -> Counts:
        """Consume until nothing is left that could be consumed now; async handlers in a loop of their own."""
        return self._made(consumer, lambda connection, source: consume_all(consumer, connection, source))

    def consume_on(self, consumer: Consumer, connection: Connection, source: Connection) -> Counts:
        """Do the same on other connections."""
        return consume_all(consumer, connection, source)

    def retry(self, consumer: Consumer, *, due: bool = True) -> Counts:
        """Make all failures due, and retry them once."""
        if due:
            self.age_retries()
        return self._made(consumer, consumer.retry_once)

    def _made(self, consumer: Consumer, passes: Callable[[Connection, Connection], Counts]) -> Counts:
        if consumer.subscription.is_async and consumer.subscription.transactional:
            return asyncio.run(self.in_loop(lambda connection: passes(connection, connection)))
        return passes(self.connection, self.source)

    async def in_loop(self, act: Callable[[Connection], T]) -> T:
        """Do something on a connection of a loop's own, where both sides are in one database."""
        assert self.producer is self.consumer
        engine = create_async_engine(self.consumer.url)
        try:
            async with engine.connect() as connection:
                return await connection.run_sync(act)
        finally:
            await engine.dispose()

    @contextmanager
    def another(self, **options: Any) -> Iterator[tuple[Connection, Connection]]:
        """Connect to both databases as another worker does; ``options`` are those of its engine on the consumer's."""
        engine = create_engine(self.consumer.url, **options) if options else self.consumer
        with engine.connect() as connection:
            if self.producer is self.consumer:
                yield connection, connection
            else:
                with self.producer.connect() as source:
                    yield connection, source
        if options:
            engine.dispose()

    def ledger(self) -> list[str]:
        """Return the bodies that were recorded, in order."""
        return [str(body) for body in self.rows("SELECT body FROM ledger ORDER BY n")]

    def inbox(self, group: str = "g") -> dict[UUID, InboxRow]:
        """Return the inbox of a group."""
        sql = (
            "SELECT message_id, status, attempts, last_error FROM outbox.consumer_message WHERE consumer_group = :group"
        )
        return {row[0]: InboxRow(*row[1:]) for row in self.rows(sql, group=group)}

    def statuses(self, group: str = "g") -> list[tuple[str, int]]:
        """Return status and attempts of each message in the inbox, in the order of their ids."""
        rows = self.inbox(group)
        return [(rows[id_].status, rows[id_].attempts) for id_ in sorted(rows)]


class Branch:
    """A producer's database of its own id, with its application."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.app = Outbox(engine, settings=settings)
        with engine.begin() as connection:
            _, self.id = renew(connection, settings.schema)

    def send(self, *bodies: Any, **options: Any) -> list[UUID]:
        """Send and dispatch messages of topic `t`."""
        ids = send_each(self.app, "t", *bodies, **options)
        dispatch_all(self.engine, self.settings)
        return ids


class Two(Tables):
    """Two branches, and the head office, whose group `g` reads topic `t` from both."""

    def __init__(self, branches: list[Branch], head: Engine, settings: Settings) -> None:
        super().__init__(head)
        self.branches, self.head, self.settings = branches, head, settings
        self.sink = Outbox(head, settings=settings)
        self.connect()

    def connect(self) -> None:
        """Connect to all three."""
        self._open = ExitStack()
        self.connection = self._open.enter_context(self.head.connect())
        self.sources = [self._open.enter_context(each.engine.connect()) for each in self.branches]

    def close(self) -> None:
        """Close the connections."""
        self._open.close()

    def declare(self, handler: Callable[..., Any] = record, **options: Any) -> list[Consumer]:
        """Return the consumers of the group, one for each branch, started."""
        binds = [each.engine for each in self.branches]
        self.sink.consumer("t", group="g", source=binds, **options)(handler)
        consumers = [consumer_of(each, self.settings) for each in self.sink.subscriptions["t", "g"].of_sources()]
        for consumer, source in zip(consumers, self.sources, strict=True):
            consumer.start(self.connection, source)
        return consumers

    def declare_anew(self, handler: Callable[..., Any] = record, **options: Any) -> list[Consumer]:
        """Return the group's consumers as another worker has them."""
        self.sink = Outbox(self.head, settings=self.settings)
        return self.declare(handler, **options)

    def consume(self, consumers: list[Consumer]) -> None:
        """Consume all there is, of one branch and then of the other."""
        for consumer, source in zip(consumers, self.sources, strict=True):
            consume_all(consumer, self.connection, source)

    def operator(self, *without: str) -> Operator:
        """Return an operator of all three databases, but these."""
        engines = {"a": self.branches[0].engine, "b": self.branches[1].engine, "head": self.head}
        parts = frozenset({"producer", "consumer"})
        named = [Database(name, each, self.settings, parts) for name, each in engines.items() if name not in without]
        return Operator(Databases(named))

    def is_blocked(self) -> bool:
        """Tell whether a session waits for a lock of another one."""
        return bool(self.value("SELECT count(*) FROM pg_locks WHERE NOT granted"))

    def ledger(self) -> list[str]:
        """Return the bodies that took effect, in order."""
        return [str(body) for body in self.rows("SELECT body FROM ledger ORDER BY n")]


def address(engine: Engine) -> str:
    """Return the URL of a database."""
    return engine.url.render_as_string(hide_password=False)
