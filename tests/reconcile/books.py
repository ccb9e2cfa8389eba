"""Two businesses with books, for the tests of measures: a producer that debits, a consumer that credits."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from decimal import Decimal
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Engine, text

from outbox import Outbox, Settings
from outbox.reconcile.job import FIRST_ID, Access, Pair, Range, Window
from outbox.reconcile.measure import Measure
from outbox.reconcile.measure.compute import Compared, in_transit, measure_all
from outbox.reconcile.measure.result import MeasureResult, MeasureRow
from outbox.reconcile.rows import Collected, Comparison, Rules
from outbox.reconcile.source import PostgresSide
from tests.kit import dispatch_all

PAIR = Pair("transfer", "bank")
#: Topic and group of a measure.
OF_PAIR = (PAIR.topic, PAIR.group)
IN_FLIGHT = {"account": "to.account", "currency": "currency", "transfers": "*", "amount": "amount"}
SUM = "SELECT account, currency, count(*) AS transfers, sum(amount) AS amount FROM {} GROUP BY account, currency"
SETTINGS = Settings()


def money(**changes: Any) -> Measure:
    """Return the measure of the tests: transfers and their amount, by account and currency."""
    declared: dict[str, Any] = {
        "name": "money",
        "topic": PAIR.topic,
        "group": PAIR.group,
        "by": ("account", "currency"),
        "values": ("transfers", "amount"),
        "producer": SUM.format("debit"),
        "consumer": SUM.format("credit"),
        "in_flight": IN_FLIGHT,
    }
    return Measure(**declared | changes)


class Books:
    """The databases of a producer and of a consumer, with their business tables."""

    def __init__(self, producer: Engine, consumer: Engine) -> None:
        self.producer, self.consumer = producer, consumer
        self.outbox = Outbox(producer, settings=SETTINGS)

    def create(self) -> None:
        """Create the business tables."""
        columns = "(message_id uuid, account text, currency text, amount numeric, at timestamptz DEFAULT now())"
        for engine, tables in ((self.producer, ("debit", "refused")), (self.consumer, ("credit",))):
            with engine.begin() as connection:
                for table in tables:
                    connection.execute(text(f"CREATE TABLE {table} {columns}"))

    def empty(self) -> None:
        """Empty all tables that tests write into."""
        ours = ("half_message", "half_check", "op_message", "message", "scheduled_message", "compensation")
        for engine, tables in (
            (self.producer, ("debit", "refused", *(f"outbox.{table}" for table in ours))),
            (self.consumer, ("credit", "outbox.consumer_message")),
        ):
            with engine.begin() as connection:
                connection.execute(text("SET LOCAL lock_timeout = '10s'"))
                connection.execute(text(f"TRUNCATE {', '.join(tables)}"))

    def transfer(self, account: str | None, amount: object, currency: str | None = "EUR", **sent: Any) -> UUID:
        """Debit at the producer, and send the message in the same transaction; return its id."""
        body = {"to": {"account": account}, "currency": currency, "amount": amount}
        with self.producer.begin() as connection:
            id_ = self.outbox.send(connection, sent.pop("topic", PAIR.topic), sent.pop("body", body), **sent)
            self._book(connection, "debit", id_, account, amount, currency)
        return id_

    def refuse(self, account: str, amount: object) -> UUID:
        """Debit at the producer, and then roll the message back, with the books saying so."""
        with self.producer.begin() as connection:
            id_ = self.outbox.prepare(connection, PAIR.topic, {"to": {"account": account}, "amount": amount})
            self._book(connection, "debit", id_, account, amount, "EUR")
        self.outbox.rollback(id_)
        with self.producer.begin() as connection:
            self._book(connection, "refused", id_, account, amount, "EUR")
        return id_

    def dispatch(self) -> None:
        """Dispatch all there is."""
        dispatch_all(self.producer, SETTINGS)

    def credit(self, ids: Iterable[UUID], *, status: str = "consumed", booked: bool = True) -> None:
        """Have the consumer take these transfers: write its inbox rows, and book."""
        with self.producer.connect() as source, self.consumer.begin() as connection:
            for id_ in ids:
                debit = text("SELECT account, amount, currency FROM debit WHERE message_id = :id")
                account, amount, currency = source.execute(debit, {"id": id_}).one()
                self.inbox(connection, id_, status)
                if booked:
                    self._book(connection, "credit", id_, account, amount, currency)

    def inbox(self, connection: Connection, id_: UUID, status: str) -> None:
        """Write an inbox row."""
        connection.execute(
            text(
                "INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status, "
                "attempts, next_attempt_at) VALUES (:group, :id, :topic, 0, 1, :status, 1, "
                "CASE WHEN :status = 'failed' THEN now() END)"
            ),
            {"group": PAIR.group, "id": id_, "topic": PAIR.topic, "status": status},
        )

    def run(self, engine: Engine, sql: str, **values: Any) -> None:
        """Run a statement."""
        with engine.begin() as connection:
            connection.execute(text(sql), values)

    @contextmanager
    def snapshots(self) -> Iterator[tuple[Connection, Connection]]:
        """Open the transactions of a comparison: the producer's and the consumer's, whose snapshot is the first."""
        with ExitStack() as stack:
            connections = []
            for engine in (self.consumer, self.producer):
                connection = stack.enter_context(engine.connect())
                connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY"))
                connection.execute(text("SELECT 1 FROM outbox.audit"))
                connections.append(connection)
            yield connections[1], connections[0]

    def in_transit(self, pair: Pair = PAIR) -> list[UUID]:
        """Return what a full comparison finds to be under way; without a grace period, so that all is told."""
        producer, consumer = (
            Access(engine.url.render_as_string(hide_password=False), SETTINGS)
            for engine in (self.producer, self.consumer)
        )
        found = Collected()
        rules = Rules(producer_now=2**62, consumer_now=2**62, grace=0)
        sides = PostgresSide(producer, "producer", pair), PostgresSide(consumer, "consumer", pair)
        found.add(Comparison(*sides, rules)((Range(FIRST_ID, None),)))
        return in_transit(found.table)

    def measure(
        self, *measures: Measure, pair: Pair = PAIR, ids: Sequence[UUID] | None = None, window: Window | None = None
    ) -> list[MeasureResult]:
        """Compare, and compute measures."""
        compared = Compared(pair, self.in_transit(pair) if ids is None else ids)
        with self.snapshots() as (producer, consumer):
            return measure_all(measures, [compared], producer, consumer, window or Window())

    def _book(self, connection: Connection, table: str, id_: UUID, account: Any, amount: Any, currency: Any) -> None:
        insert = (
            f"INSERT INTO {table} (message_id, account, currency, amount) VALUES (:id, :account, :currency, :amount)"
        )
        exact = None if amount is None else Decimal(str(amount))
        connection.execute(text(insert), {"id": id_, "account": account, "currency": currency, "amount": exact})


def row(result: MeasureResult, *key: str | None, value: str = "amount") -> MeasureRow:
    """Return one row of a result."""
    (found,) = (row for row in result.rows if row.key == key and row.value == value)
    return found


def at(id_: UUID) -> dt.datetime:
    """Return when an id was made."""
    return dt.datetime.fromtimestamp((id_.int >> 80) / 1000, dt.UTC)
