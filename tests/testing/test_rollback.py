"""Rollback per test: everything of an outbox in one transaction, of which nothing is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from outbox import INJECTED, Message, Outbox, Retry, Settings
from outbox.errors import AlreadyCommitted, InvalidHandler, TransactionRequired
from outbox.testing import advance, arolling_back, check, drain, make_due, on_loop, rolling_back
from tests.kit import Tables
from tests.testing.shop import POINTS, add_points, add_points_async, points, send

COUNTS = """SELECT (SELECT count(*) FROM outbox.half_message) + (SELECT count(*) FROM outbox.message)
                 + (SELECT count(*) FROM outbox.consumer_message) + (SELECT count(*) FROM points)"""


def test_what_is_sent_is_consumed_and_undone(shop: Outbox, engine: Engine) -> None:
    """From the send to the handler's effect in one transaction; a chain of messages too; nothing stays."""
    shop.consumer("order", group="points")(add_points)

    @shop.consumer("order", group="mail")
    def mail(message: Message, session: Session) -> None:
        shop.send(session, "mail", message.body)

    mailed: list[Any] = []
    shop.consumer("mail", group="g")(lambda message, session: mailed.append(message.body))
    with rolling_back(shop) as connection:
        send(shop, connection, "alice", key="a")
        send(shop, connection, "bob")
        assert drain(shop).done == 6
        assert points(connection) == ["alice", "bob"]
        assert not drain(shop)
    assert sorted(body["customer"] for body in mailed) == ["alice", "bob"]
    assert Tables(engine).value(COUNTS) == 0
    send(shop, engine, "carol")
    assert drain(shop).done == 3
    assert points(engine) == ["carol"]


def test_the_tests_own_transaction(shop: Outbox, engine: Engine) -> None:
    """A fixture that has its own connection and sessions keeps them; it ends the transaction itself."""
    shop.consumer("order", group="points")(add_points)
    with engine.connect() as connection:
        with pytest.raises(TransactionRequired, match="in no transaction"), rolling_back(shop, connection):
            pass
        transaction = connection.begin()
        with (
            rolling_back(shop, connection) as same,
            Session(connection, join_transaction_mode="create_savepoint") as session,
        ):
            assert same is connection
            shop.send(session, "order", {"customer": "alice"})
            session.commit()
            shop.send(session, "order", {"customer": "bob"})
            session.rollback()
            drain(shop)
            assert session.scalars(text("SELECT customer FROM points")).all() == ["alice"]
        transaction.rollback()
    assert Tables(engine).value(COUNTS) == 0


def test_a_failed_attempt_is_undone_and_retried(shop: Outbox) -> None:
    """An attempt is a savepoint: what it did is undone, the failure is written down, the retry can be made due."""
    attempts: list[int] = []

    @shop.consumer("order", group="points")
    def handle(message: Message, session: Session) -> Retry | None:
        add_points(message, session)
        shop.send(session, "mail", {})
        attempts.append(message.attempt)
        if message.attempt == 1:
            raise ValueError("no")
        return Retry() if message.attempt == 2 else None

    with rolling_back(shop) as connection:
        send(shop, connection, "alice")
        assert drain(shop).failed == 1
        assert points(connection) == []
        assert not drain(shop)
        make_due(shop)
        assert drain(shop).failed == 1
        assert drain(shop, failed=True).done == 1
        assert points(connection) == ["alice"]
        assert connection.scalar(text("SELECT count(*) FROM outbox.half_message WHERE topic = 'mail'")) == 1
    assert attempts == [1, 2, 3]


@pytest.mark.parametrize("batch", [{"batch": 10}, {"batch": 10, "takes_batch": True}, {"ordered": True}])
def test_batches_and_ordered_groups(shop: Outbox, batch: dict[str, Any]) -> None:
    """One bad message of a batch is found out as in a worker, and so is what an ordered group does."""
    declare: Any = shop.consumer

    def handle(messages: Any, session: Session) -> None:
        for message in messages if isinstance(messages, list) else [messages]:
            add_points(message, session)
            if message.body["customer"] == "bob" and message.attempt == 1:
                raise ValueError("no")

    declare("order", group="points", **batch)(handle)
    with rolling_back(shop) as connection:
        for customer in ("alice", "bob", "carol"):
            send(shop, connection, customer, key="k")
        drain(shop, failed=True)
        assert points(connection) == ["alice", "bob", "carol"]


def test_delayed_messages_and_time_that_passes(shop: Outbox) -> None:
    """A message that is due in two hours isn't there after one."""
    shop.consumer("order", group="points")(add_points)
    with rolling_back(shop) as connection:
        send(shop, connection, "alice", delay=7200)
        drain(shop)
        advance(shop, 3600)
        drain(shop)
        assert points(connection) == []
        advance(shop, 3601)
        drain(shop)
        assert points(connection) == ["alice"]
        send(shop, connection, "bob", delay=7200)
        drain(shop, delayed=True)
        assert points(connection) == ["alice", "bob"]


def test_decorators_and_decisions(engine: Engine, shop: Outbox) -> None:
    """The outbox's own sessions join: of decorators, of both phases, and of a decision alone."""
    shop.consumer("order", group="points")(add_points)

    @shop.transactional(topic="order")
    def order(customer: str, session: Session = INJECTED) -> dict[str, str]:
        return {"customer": customer}

    @shop.two_phase(topic="order")
    def pay(customer: str, session: Session = INJECTED) -> None:
        if customer == "mallory":
            raise ValueError(customer)

    with rolling_back(shop) as connection:
        order("alice")
        pay("bob")
        with pytest.raises(ValueError, match="mallory"):
            pay("mallory")
        with Session(connection, join_transaction_mode="create_savepoint") as session, session.begin():
            half = shop.prepare(session, "order", {"customer": "carol"})
        decision = shop.commit(half)
        assert decision is not None
        assert decision.first
        with pytest.raises(AlreadyCommitted):
            shop.rollback(half)
        drain(shop)
        assert points(connection) == ["alice", "bob", "carol"]
        with pytest.raises(InvalidHandler, match="can't see a transaction that is rolled back"):
            check(shop)
        with pytest.raises(InvalidHandler, match="can't see a transaction that is rolled back"):
            drain(shop, orphans=True)
    assert Tables(engine).value(COUNTS) == 0


def test_the_applications_sessionmaker_joins(engine: Engine, settings: Settings) -> None:
    """What an application opens by the factory that its outbox is bound to is rolled back, during the block only."""
    sessions = sessionmaker(engine)
    outbox = Outbox(sessions, settings=settings)
    with engine.begin() as connection:
        connection.execute(text(POINTS))
    outbox.consumer("order", group="points")(add_points)

    def order(customer: str) -> UUID:
        with sessions.begin() as session:
            return outbox.send(session, "order", {"customer": customer})

    with rolling_back(outbox) as connection:
        order("alice")
        drain(outbox)
        assert points(connection) == ["alice"]
        with pytest.raises(InvalidHandler, match="rolled back already"), rolling_back(outbox):
            pass
    assert Tables(engine).value(COUNTS) == 0
    order("bob")
    drain(outbox)
    assert points(engine) == ["bob"]


def test_two_outboxes_of_two_databases(new_engine: Callable[..., Engine], settings: Settings) -> None:
    """A consumer reads from the transaction of its producer, which is rolled back too."""
    here, there = new_engine(), new_engine()
    with there.begin() as connection:
        connection.execute(text(POINTS))
    shop, bank = Outbox(here, settings=settings), Outbox(there, settings=settings)
    bank.consumer("order", group="points", source=here)(add_points)
    with rolling_back(shop) as sends, rolling_back(bank) as consumes:
        send(shop, sends, "alice")
        assert drain(shop, bank).done == 1
        assert points(consumes) == ["alice"]
    assert points(there) == []


def test_what_waits_for_a_commit_elsewhere(shop: Outbox) -> None:
    """What is sent in SQL or through the driver's connection has no op before a COMMIT; here it is consumed."""
    shop.consumer("order", group="points")(add_points)
    with rolling_back(shop) as connection:
        raw: psycopg.Connection = connection.connection.driver_connection  # type: ignore[assignment]
        shop.send(raw, "order", {"customer": "alice"})
        connection.execute(text("""SELECT outbox.send('order', '{"customer": "bob"}')"""))
        shop.send(connection, "order", {"customer": "carol"})
        drain(shop)
        assert points(connection) == ["alice", "bob", "carol"]


def test_another_driver_is_refused(url: str, settings: Settings) -> None:
    """Passes work on psycopg 3; messages of another driver's connection are seen after its COMMIT only."""
    shop = Outbox(create_engine(url.replace("+psycopg", "+psycopg2")), settings=settings)
    with pytest.raises(InvalidHandler, match="sent through psycopg2 can't be consumed"), rolling_back(shop):
        pass


async def _test_async(url: str, settings: Settings) -> None:
    engine = create_async_engine(url)
    outbox = Outbox(engine, settings=settings)
    outbox.consumer("order", group="points")(add_points_async)
    heard: list[Any] = []
    outbox.consumer("order", group="plain")(lambda message, session: heard.append(message.body["customer"]))

    @outbox.transactional(topic="order")
    async def order(customer: str, session: AsyncSession = INJECTED) -> dict[str, str]:
        return {"customer": customer}

    async with arolling_back(outbox) as connection:
        await order("alice")
        with pytest.raises(InvalidHandler, match=r"await on_loop\(drain"):
            drain(outbox)
        assert (await on_loop(drain, outbox)).done == 2
        assert (await connection.scalars(text("SELECT customer FROM points"))).all() == ["alice"]
    async with engine.connect() as connection:
        assert (await connection.scalars(text("SELECT customer FROM points"))).all() == []
    assert heard == ["alice"]
    await engine.dispose()


def test_async(shop: Outbox, url: str, settings: Settings, engine: Engine) -> None:
    """The same for an outbox on an AsyncEngine, with handlers of both kinds."""
    import asyncio

    asyncio.run(_test_async(engine.url.render_as_string(hide_password=False), settings))
