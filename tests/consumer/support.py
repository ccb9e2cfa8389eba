"""What the tests of consumers share: a producer, a consumer, and a ledger in the consumer's database."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self
from uuid import UUID

from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Settings
from outbox.compensate.quarantine import quarantine_group
from outbox.consumer.consumer import Consumer
from outbox.message.model import Counts
from tests.kit import Tables, consume_all, declare, dispatch_all

LEDGER = text("INSERT INTO ledger (message_id, body, attempt) VALUES (:id, :body, :attempt)")


def make_ledger(engine: Engine) -> None:
    """Create the table into which handlers write: it takes the same message twice, so that a test can see it."""
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE ledger (n serial PRIMARY KEY, message_id uuid, body text, attempt int)"))


def record(message: Message, session: Session) -> None:
    """Write a message into the ledger."""
    session.execute(LEDGER, {"id": message.id, "body": str(message.body), "attempt": message.attempt})


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
            quarantine_group(self.connection, self.source, limits.schema, group, topic)
        return consumer

    def consume(self, consumer: Consumer) -> Counts:
        """Consume until nothing is left that could be consumed now."""
        return self.consume_on(consumer, self.connection, self.source)

    def consume_on(self, consumer: Consumer, connection: Connection, source: Connection) -> Counts:
        """Do the same on other connections."""
        return consume_all(consumer, connection, source)

    def retry(self, consumer: Consumer, *, due: bool = True) -> Counts:
        """Make all failures due, and retry them once."""
        if due:
            self.age_retries()
        return consumer.retry_once(self.connection, self.source)

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
