"""A bank on clusters of its own: one side debits and sends, the other one credits; money is counted by message."""

from __future__ import annotations

from collections import Counter
from uuid import UUID

from sqlalchemy import Connection, Engine, NullPool, create_engine, text
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Settings
from outbox.consumer.consumer import Consumer
from outbox.dispatch.dispatch_pass import Dispatcher
from outbox.embedded import ServerLike
from outbox.worker.connections import WorkerDatabase
from tests.kit import Tables, consume_all, declare, dispatch_all

#: The databases of both sides, and the tables that each of them has.
DATABASES = ("debiting", "crediting")
TABLES = "CREATE TABLE debit (message_id uuid); CREATE TABLE credit (message_id uuid)"
CREDIT = text("INSERT INTO credit (message_id) VALUES (:id)")
SETTINGS = Settings(queues=2)


def credit(message: Message, session: Session) -> None:
    """Credit a transfer; the table takes one twice, so that a test can see it."""
    session.execute(CREDIT, {"id": message.id})


class Bank:
    """The debiting side in one database, the crediting side in another, or in the same one."""

    def __init__(self, producer: ServerLike, consumer: ServerLike, database: str = "crediting") -> None:
        self.settings = SETTINGS
        #: Does dispatch wait for the disk? Are the consumer's connections a worker's?
        self.durable, self.by_worker = True, False
        self._database = database
        self._engines: list[Engine] = []
        self.use(producer, consumer)

    def use(self, producer: ServerLike, consumer: ServerLike) -> None:
        """Go on with these clusters, as workers that connect again."""
        self.close()
        self.producer = self._engine(producer, "debiting")
        same = producer is consumer and self._database == "debiting"
        self.consumer = self.producer if same else self._engine(consumer, self._database)
        self.app = Outbox(self.producer, settings=self.settings)
        self.group: Consumer = declare(self.consumer, "transfer", "crediting", credit, settings=self.settings, batch=5)

    def _engine(self, server: ServerLike, database: str) -> Engine:
        self._engines.append(create_engine(server.url(database), poolclass=NullPool))
        return self._engines[-1]

    def close(self) -> None:
        """Close all connections."""
        for engine in self._engines:
            engine.dispose()

    def debit(self, count: int) -> None:
        """Debit and send, each in a transaction of its own."""
        with self.producer.connect() as connection:
            for number in range(count):
                with connection.begin():
                    id_ = self.app.send(connection, "transfer", {"amount": 1}, key=f"account {number % 5}")
                    connection.execute(text("INSERT INTO debit VALUES (:id)"), {"id": id_})

    def dispatch(self) -> None:
        """Dispatch all there is."""
        if self.durable:
            dispatch_all(self.producer, self.settings)
            return
        with self.producer.connect() as connection:
            dispatcher = Dispatcher(self.settings, durable=False)
            while dispatcher.once(connection).more:
                pass

    def consume(self) -> None:
        """Consume all there is."""
        with self._connected(self.consumer) as connection:
            if self.consumer is self.producer:
                self.group.start(connection, connection)
                consume_all(self.group, connection, connection)
                return
            with self._connected(self.producer) as source:
                self.group.start(connection, source)
                consume_all(self.group, connection, source)

    def _connected(self, engine: Engine) -> Connection:
        return WorkerDatabase(engine).connect() if self.by_worker else engine.connect()

    def work(self, count: int) -> None:
        """Debit, dispatch and credit."""
        self.debit(count)
        self.dispatch()
        self.consume()

    def debits(self) -> set[UUID]:
        """Return the transfers that the producer has, which are durable."""
        return set(Tables(self.producer).rows("SELECT message_id FROM debit"))

    def credits(self) -> Counter[UUID]:
        """Return how often each transfer was credited."""
        return Counter(Tables(self.consumer).rows("SELECT message_id FROM credit"))

    def lost(self) -> set[UUID]:
        """Return what the consumer has found the producer to have lost."""
        return set(Tables(self.consumer).rows("SELECT unnest(message_ids) FROM outbox.log_loss"))

    def uncredited(self) -> set[UUID]:
        """Return the durable transfers that were never credited."""
        return self.debits() - set(self.credits())
