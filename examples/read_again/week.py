"""A week of orders, a release of billing that is wrong from Monday on, and a reset of its group on Friday."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from typing import Any
from uuid import UUID

from rich.console import Console
from sqlalchemy import Engine, ForeignKey, func, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outbox import Message, Outbox, Park
from outbox.database.tables import consumer_tables
from outbox.operator.operator import Operator
from outbox.testing import drain

TOPIC, GROUP = "order-paid", "billing"
DAYS = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
_PRICES = ("19.90", "5.00", "7.49", "120.01")
#: Sent on Wednesday; the wrong release can't read it.
_ODD_PRICE = "1 200.50"

_TIMES = {
    "half_message": ("born_at",),
    "op_message": ("decided_at",),
    "message": ("visible_at",),
    "consumer_message": ("received_at", "changed_at"),
    "attempt_history": ("failed_at",),
}
INBOX, EARLIER = (consumer_tables("outbox").tables[f"outbox.{name}"] for name in ("consumer_message", "reread_message"))


class Base(DeclarativeBase):
    """The tables of the shop."""


class Order(Base):
    """An order that is paid."""

    __tablename__ = "shop_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    price: Mapped[str]


class Invoice(Base):
    """What billing has made of it. It is written by the order's number: once more is no second invoice."""

    __tablename__ = "invoice"
    order_id: Mapped[int] = mapped_column(ForeignKey(Order.id), primary_key=True)
    cents: Mapped[int]


def bill(message: Message, session: Session) -> None:
    """Write the invoice; one that is there is corrected."""
    price = Decimal(message.body["price"].replace(" ", ""))
    session.merge(Invoice(order_id=message.body["order"], cents=int(price * 100)))


def bill_wrongly(message: Message, session: Session) -> Park | None:
    """The release of Monday: whole amounts only, and a space is too much for it."""
    price = message.body["price"]
    if " " in price:
        return Park(f"not a price: {price!r}")
    session.merge(Invoice(order_id=message.body["order"], cents=int(price.partition(".")[0]) * 100))
    return None


class Shop:
    """Orders and billing, in one database."""

    def __init__(self, engine: Engine, console: Console) -> None:
        self.engine, self.console = engine, console
        self.operator = Operator.open({"shop": engine}, Outbox(engine).settings)
        self.ids: list[UUID] = []
        Base.metadata.create_all(engine)

    def sell(self, *prices: str) -> None:
        """Sell something for each of these prices."""
        app = Outbox(self.engine)
        for price in prices:
            with Session(self.engine) as session, session.begin():
                session.add(order := Order(price=price))
                session.flush()
                sent = {"order": order.id, "price": price}
                self.ids.append(app.send(session, TOPIC, sent, key=f"order-{order.id}"))

    def work(self, handler: Callable[..., Any]) -> None:
        """Have a release of billing handle all there is."""
        app = Outbox(self.engine)
        app.consumer(TOPIC, group=GROUP, retry_delays=())(handler)
        drain(app)

    def sleep(self) -> None:
        """Let a day pass: all rows get a day older."""
        with self.engine.begin() as connection:
            for table, columns in _TIMES.items():
                older = ", ".join(f"{each} = {each} - interval '1 day'" for each in columns)
                connection.execute(text(f"UPDATE outbox.{table} SET {older}"))

    def wrong(self) -> list[int]:
        """Return the orders without an invoice, or with a wrong one."""
        with Session(self.engine) as session:
            invoices = {row.order_id: row.cents for row in session.scalars(select(Invoice))}
            orders = session.scalars(select(Order).order_by(Order.id))
            return [each.id for each in orders if invoices.get(each.id) != Decimal(each.price.replace(" ", "")) * 100]

    def inbox(self) -> Counter[tuple[int, str]]:
        """Count what the inbox says, by reading and status."""
        return self._count(INBOX)

    def before(self) -> Counter[tuple[int, str]]:
        """Count what it said of messages that were handled again since."""
        return self._count(EARLIER)

    def _count(self, table: Any) -> Counter[tuple[int, str]]:
        query = select(table.c.passage, table.c.status, func.count()).group_by(table.c.passage, table.c.status)
        with self.engine.begin() as connection:
            return Counter({(passage, status): number for passage, status, number in connection.execute(query)})

    def tell(self, what: str, counts: Counter[tuple[int, str]]) -> None:
        """Print counts."""
        parts = (f"{number} {status} in passage {passage}" for (passage, status), number in sorted(counts.items()))
        self.console.print(f"{what}: {', '.join(parts) or 'nothing'}.")


def run(engine: Engine, console: Console) -> int:
    """Live through the week; return the exit code."""
    shop = Shop(engine, console)
    for day in DAYS:
        if day != "Sunday":
            shop.sleep()
        shop.sell(*_PRICES, *([_ODD_PRICE] if day == "Wednesday" else []))
        shop.work(bill if day == "Sunday" else bill_wrongly)
    console.print(f"Friday evening: {len(shop.wrong())} of {len(shop.ids)} orders are billed wrongly, or not at all.")
    shop.tell("The inbox", shop.inbox())
    with engine.begin() as connection:
        now: dt.datetime = connection.execute(text("SELECT clock_timestamp() AT TIME ZONE 'UTC'")).scalar_one()
    monday = dt.datetime.combine(now.date() - dt.timedelta(days=4), dt.time(), dt.UTC)

    console.print("\nThe handler is mended, and the group is moved back:")
    console.print(f"  outbox group reset {GROUP} --topic {TOPIC} --to {monday.isoformat()}", highlight=False)
    preview = shop.operator.preview_reset(GROUP, TOPIC, monday)
    console.print(f"It would read {preview.messages} messages again, in {len(preview.queues)} queues.")
    console.print(shop.operator.reset_group(GROUP, TOPIC, monday, by="ada", why="Monday's release lost the cents"))
    shop.work(bill)

    console.print(f"\nAfterwards {len(shop.wrong())} orders are billed wrongly.")
    shop.tell("The inbox", shop.inbox())
    shop.tell("What it said before", shop.before())
    _tell_audit(shop)
    _tell_story(shop)
    return 1 if shop.wrong() else 0


def _tell_audit(shop: Shop) -> None:
    with shop.engine.begin() as connection:
        acts = connection.execute(text("SELECT actor, action, target, reason FROM outbox.audit ORDER BY id")).all()
    for actor, action, target, reason in acts:
        shop.console.print(f"The audit: {actor} {action} {target}: {reason}.", highlight=False)


def _tell_story(shop: Shop) -> None:
    """Print the way of the message of Wednesday that the wrong release had parked."""
    with shop.engine.begin() as connection:
        (parked,) = connection.scalars(select(EARLIER.c.message_id).where(EARLIER.c.status == "parked"))
    shop.console.print(f"\nMessage {parked}:", highlight=False)
    timeline = shop.operator.message(parked).timeline
    for event in timeline:
        shop.console.print(f"  {(timeline[-1].at - event.at).days} days ago: {event.title}", highlight=False)
