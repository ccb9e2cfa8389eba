"""What the tests of compensations share: bank A, which sends transfers; banks that credit them; compensations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Settings
from outbox.compensate.compensate_pass import compensate_once
from outbox.compensate.compensation import Compensation
from outbox.compensate.quarantine import quarantine_group
from outbox.consumer.consumer import Consumer
from outbox.database.engines import EngineRunner, NewRunner
from outbox.message.model import Counts
from tests.kit import Tables, declare
from tests.kit.bench import Bench, record

BOOKS = """
CREATE TABLE IF NOT EXISTS account (balance int);
CREATE TABLE IF NOT EXISTS refund (message_id uuid, amount int);
DELETE FROM account;
DELETE FROM refund;
INSERT INTO account VALUES (1000);
"""
LEDGER = "CREATE TABLE IF NOT EXISTS ledger (n serial PRIMARY KEY, message_id uuid, body text, attempt int)"
#: All that tests leave behind in the tables of the outbox.
CLEAN = """
DO $$ DECLARE name text; BEGIN
    FOR name IN SELECT tablename FROM pg_tables
                 WHERE schemaname = 'outbox' AND position('version' IN tablename) = 0 LOOP
        EXECUTE 'DELETE FROM outbox.' || quote_ident(name);
    END LOOP;
END $$
"""
TAKE = text("UPDATE account SET balance = balance - :amount")
GIVE = text("UPDATE account SET balance = balance + :amount")
REFUND = text("INSERT INTO refund VALUES (:id, :amount)")


def give_back(message: Message, session: Session) -> dict[str, int]:
    """Undo a transfer at bank A."""
    session.execute(GIVE, {"amount": message.body["amount"]})
    session.execute(REFUND, {"id": message.id, "amount": message.body["amount"]})
    return {"given back": message.body["amount"]}


def refuse(message: Message, session: Session) -> None:
    """Fail, as bank B does for an account that isn't there."""
    raise ValueError("no such account")


class Town(Bench):
    """Bank A (the producer) and bank B (its consumer's database), in which transfers are rolled back.

    Bank B has a ledger that takes the same message twice, bank A a table of refunds that does.
    """

    def __init__(self, producer: Engine, consumer: Engine, settings: Settings) -> None:
        super().__init__(producer, consumer, settings)
        self.at_a = Tables(producer)
        for engine in {producer, consumer}:
            with engine.begin() as connection:
                connection.exec_driver_sql(CLEAN)
                connection.exec_driver_sql(BOOKS)
                connection.exec_driver_sql(f"DROP TABLE IF EXISTS ledger; {LEDGER}")
        self.compensate_by()

    def compensate_by(
        self, function: Callable[..., Any] = give_back, *others: Any, topic: str = "t", model: Any = None
    ) -> Compensation:
        """Register what rolls a transfer back, in place of what did; ``others`` are consumers beside bank B."""
        app = Outbox(self.producer, settings=self.settings)
        app.compensation(topic, consumers=[self.consumer, *others], model=model)(function)
        self.compensations = app.compensations
        return app.compensations[topic]

    def transfer(self, amount: int = 100, *, dispatched: bool = True, **options: Any) -> UUID:
        """Take money from the account at bank A, and tell bank B of it."""
        options.setdefault("key", "k")
        with self.producer.begin() as connection:
            connection.execute(TAKE, {"amount": amount})
            half_id = self.app.send(connection, "t", {"amount": amount}, **options)
        if dispatched:
            self.dispatch()
        return half_id

    def parked(self, amount: int = 100, **options: Any) -> UUID:
        """Make a transfer that bank B has set aside."""
        half_id = self.transfer(amount)
        self.consume(self.declare(refuse, retry_delays=(), **options))
        assert self.status(half_id) == {"g": "parked"}
        return half_id

    def declare_on(self, connection: Connection, handler: Callable[..., Any] = record, **options: Any) -> Consumer:
        """Return a consumer of topic `t` in another database, as its first pass finds it."""
        group = options.pop("group", "g")
        consumer = declare(connection.engine, "t", group, handler, settings=self.settings, **options)
        consumer.start(connection, self.source)
        quarantine_group(connection, self.source, self.settings.schema, group, consumer.subscription.feed)
        return consumer

    # --- compensations ---------------------------------------------------------------------------------------

    def order(self, half_id: UUID, **options: Any) -> UUID:
        """Order the compensation of a transfer; return the bulk job."""
        return self.app.operator.compensate(half_id, by="ada", why="no such account", **options).id

    def roll_back(self, half_id: UUID, **options: Any) -> str:
        """Order it, and make one pass; return the state of the item."""
        bulk_job_id = self.order(half_id, **options)
        self.work()
        return self.item(bulk_job_id)[0]

    def work(self, new_runner: NewRunner | None = None, **options: Any) -> Counts:
        """Make one pass, as a worker does."""
        with self.producer.connect() as connection:
            return self.work_on(connection, new_runner, **options)

    def work_on(self, connection: Connection, new_runner: NewRunner | None = None, **options: Any) -> Counts:
        """Make one pass on a connection."""
        make = new_runner or (lambda is_async: EngineRunner(self.producer))
        return compensate_once(connection, self.settings, compensations=self.compensations, new_runner=make, **options)

    def age(self) -> None:
        """Make the items due whose time has yet to come."""
        self.at_a.age_bulk_items()

    def cancel(self, bulk_job_id: UUID) -> None:
        """Cancel a bulk job that has begun."""
        sql = "UPDATE outbox.bulk_job SET cancelled_at = clock_timestamp(), cancelled_by = 'bob' WHERE id = :id"
        self.at_a.run(sql, id=bulk_job_id)

    # --- looks -------------------------------------------------------------------------------------------

    def item(self, bulk_job_id: UUID) -> tuple[str, str | None]:
        """Return state and outcome of the only item of a bulk job."""
        sql = "SELECT state, outcome FROM outbox.bulk_item WHERE bulk_job_id = :id"
        ((state, outcome),) = self.at_a.rows(sql, id=bulk_job_id)
        return state, outcome

    def said(self, bulk_job_id: UUID) -> str:
        """Return the outcome of the only item of a bulk job."""
        return self.item(bulk_job_id)[1] or ""

    def status(self, half_id: UUID, engine: Engine | None = None) -> dict[str, str]:
        """Return what the inboxes at bank B, or in another database, say of a message, by group."""
        sql = text("SELECT consumer_group, status FROM outbox.consumer_message WHERE message_id = :id")
        with (engine or self.consumer).begin() as connection:
            rows = connection.execute(sql, {"id": half_id}).all()
        return {str(group): str(status) for group, status in rows}

    def effects(self, half_id: UUID) -> int:
        """Count how often bank B has credited a transfer."""
        return int(self.rows("SELECT count(*) FROM ledger WHERE message_id = :id", id=half_id)[0])

    def refunds(self, half_id: UUID) -> int:
        """Count how often bank A has given the money of a transfer back."""
        return int(self.at_a.rows("SELECT count(*) FROM refund WHERE message_id = :id", id=half_id)[0])

    @property
    def balance(self) -> int:
        """What is in the account at bank A."""
        return int(self.at_a.rows("SELECT balance FROM account")[0])

    def acts(self, half_id: UUID) -> list[tuple[str, str, str, str]]:
        """Return what was recorded about a message at both banks: actor, action, target, reason."""
        sql = "SELECT actor, action, target, reason FROM outbox.audit WHERE target LIKE '%' || :id ORDER BY id"
        there = [] if self.producer is self.consumer else self.rows(sql, id=str(half_id))
        return [*there, *self.at_a.rows(sql, id=str(half_id))]


def settle(town: Town, consumer: Consumer) -> None:
    """Have bank B do all that it can."""
    town.dispatch()
    town.consume(consumer)
    while town.retry(consumer).taken:
        pass


__all__ = ["Town", "give_back", "record", "refuse", "settle"]
