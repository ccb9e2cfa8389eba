"""Drain until quiet: what is due, what is made due by choice, and what never comes to an end."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import INJECTED, Counts, Message, Orphan, Outbox, Resolution, Retry, Settings
from outbox.errors import InvalidHandler, InvalidMessage
from outbox.testing import NotQuiet, advance, assert_sent, bulk, check, drain, make_due, on_loop, sent_messages
from tests.kit import Tables
from tests.testing.shop import add_points, points, send


def test_what_is_due_later_is_left_alone(shop: Outbox, engine: Engine) -> None:
    """Unless it is made due: all, or a kind, or a message; what is made due is done by the next drain."""
    shop.consumer("order", group="points")(add_points)
    send(shop, engine, "alice", delay=3600)
    send(shop, engine, "bob", delay=3600)
    assert not drain(shop)
    make_due(shop, delayed=False)
    assert not drain(shop)
    alice = next(each.id for each in asyncio.run(on_loop(sent_messages, shop)) if each.body["customer"] == "alice")
    make_due(shop, ids=[alice])
    assert drain(shop).done == 1
    assert points(engine) == ["alice"]
    assert drain(shop, delayed=True).done == 1
    assert points(engine) == ["alice", "bob"]


def test_what_is_made_due_keeps_its_order(shop: Outbox, engine: Engine) -> None:
    """The messages of a key come out by their times of delivery, as they would have without the test."""
    came: list[str] = []
    shop.consumer("order", group="points")(lambda message, _: came.append(message.body["customer"]))
    for customer, hours in (("carol", 3), ("alice", 1), ("dave", 4), ("bob", 2)):
        send(shop, engine, customer, key="k", delay=3600 * hours)
    make_due(shop)
    drain(shop)
    assert came == ["alice", "bob", "carol", "dave"]


def test_a_delayed_message_that_nobody_has_dispatched(shop: Outbox, engine: Engine) -> None:
    """It is dispatched before it is made due; a recalled one stays away."""
    shop.consumer("order", group="points")(add_points)
    send(shop, engine, "alice", delay=3600)
    make_due(shop)
    assert drain(shop).done == 1
    send(shop, engine, "bob", delay=3600)
    drain(shop)
    half = Tables(engine).value("SELECT half_id FROM outbox.scheduled_message")
    shop.operator.recall(half, by="me", why="test")
    assert not drain(shop, delayed=True)


def test_failures_are_retried_until_they_are_consumed_or_parked(shop: Outbox, engine: Engine) -> None:
    """In order and out of it."""
    attempts: dict[tuple[str, str], int] = {}

    def handle(group: str, message: Message) -> Retry | None:
        attempts[group, message.body["customer"]] = message.attempt
        return Retry() if message.attempt < 3 or message.body["customer"] == "mallory" else None

    shop.consumer("order", group="plain", retry_delays=[9] * 4)(lambda message, _: handle("plain", message))
    shop.consumer("order", group="ordered", retry_delays=[9] * 4, ordered=True)(
        lambda message, _: handle("ordered", message)
    )
    send(shop, engine, "mallory", key="k")
    send(shop, engine, "alice", key="k")
    assert drain(shop).failed == 3
    counts = drain(shop, failed=True)
    assert (counts.done, counts.parked) == (2, 2)
    assert set(attempts.items()) == {
        (("plain", "mallory"), 5), (("plain", "alice"), 3), (("ordered", "mallory"), 5), (("ordered", "alice"), 3)
    }  # fmt: skip


def test_orphans_are_checked(shop: Outbox, engine: Engine) -> None:
    """By their fence or by their checker, once a round; what came of it is consumed. A function that runs is left."""
    shop.consumer("order", group="points")(add_points)
    ages: list[float] = []

    @shop.checker("order")
    def was_paid(orphan: Orphan) -> Resolution:
        ages.append(orphan.age.total_seconds())
        return Resolution.COMMIT if orphan.body["customer"] == "alice" else Resolution.UNKNOWN

    @shop.two_phase(topic="paid")
    def pay(number: int, session: Session = INJECTED) -> None:
        if number == 1:
            raise ConnectionError
        assert not drain(shop, orphans=True)

    with pytest.raises(ConnectionError):
        pay(1)
    pay(2)
    with Session(engine) as session, session.begin():
        for customer in ("alice", "mallory"):
            shop.prepare(session, "order", {"customer": customer})
    assert not drain(shop)
    assert drain(shop, orphans=True).done == 1
    assert points(engine) == ["alice"]
    decided = "SELECT resolution FROM outbox.op_message o JOIN outbox.half_message h ON h.id = o.half_id"
    assert Tables(engine).rows(f"{decided} WHERE h.topic = 'paid' ORDER BY h.id") == ["rollback", "commit"]
    ages.clear()
    advance(shop, 7200)
    drain(shop)
    assert [age > 7200 for age in ages] == [True]


def test_what_never_becomes_quiet(shop: Outbox, engine: Engine) -> None:
    """The error says who goes on, with what."""

    @shop.consumer("order", group="echo")
    def echo(message: Message, session: Session) -> None:
        shop.send(session, "order", message.body)

    shop.consumer("mail", group="stuck", ordered=True, on_exhausted="block")(lambda message, session: Retry())
    send(shop, engine, "alice")
    with pytest.raises(NotQuiet, match=r"(?s)after 5 rounds.*group 'echo' took 1 of topic 'order'.*give rounds=…"):
        drain(shop, rounds=5)
    del shop.subscriptions["order", "echo"]
    with Session(engine) as session, session.begin():
        shop.send(session, "mail", {})
    drain(shop)
    with pytest.raises(NotQuiet, match=r"group 'stuck' took 1 of topic 'mail'"):
        drain(shop, failed=True, rounds=20)


@pytest.mark.parametrize("by", [-1, "1h"])
def test_time_goes_forward(shop: Outbox, by: float) -> None:
    """By a number of seconds, or a timedelta."""
    with pytest.raises(InvalidMessage, match="by "):
        advance(shop, by)


def test_databases_of_one_side(shop: Outbox, engine: Engine) -> None:
    """Where only the consumer's tables are, there is nothing to dispatch, and the rest works."""
    Tables(engine).run(
        "DROP TABLE outbox.half_message, outbox.op_message, outbox.message, outbox.scheduled_message CASCADE"
    )
    make_due(shop)
    with pytest.warns(UserWarning, match="consumes nothing"):
        assert drain(shop, delayed=True, failed=True, orphans=True) == Counts()


async def _test_async(url: str, settings: Settings) -> None:
    engine = create_async_engine(url)
    shop = Outbox(engine, settings=settings)
    lock, loops, heard = asyncio.Lock(), set[object](), list[str]()

    @shop.consumer("order", group="async")
    async def handle(message: Message, session: AsyncSession) -> None:
        loops.add(asyncio.get_running_loop())
        async with lock:
            await asyncio.sleep(0)
        if message.attempt == 1:
            raise ValueError

    shop.consumer("order", group="plain")(lambda message, session: heard.append(message.body["customer"]))

    @shop.checker("order")
    async def was_paid(orphan: Orphan) -> Resolution:
        loops.add(asyncio.get_running_loop())
        return Resolution.COMMIT

    async def put(customer: str) -> UUID:
        async with AsyncSession(engine) as session, session.begin():
            shop.send(session, "order", {"customer": customer}, delay=60)
            return shop.prepare(session, "order", {"customer": customer})

    with pytest.raises(InvalidHandler, match=r"await on_loop\(drain, …\) for an AsyncEngine"):
        drain(shop)
    half = await put("alice")
    assert (await on_loop(check, shop)).done == 1
    assert_sent(await on_loop(sent_messages, shop), "order", times=2)
    counts = await on_loop(drain, shop)
    assert (counts.done, counts.failed) == (1, 1)
    await on_loop(make_due, shop, ids=[half])
    assert (await on_loop(drain, shop)).done == 1
    await put("bob")
    await on_loop(advance, shop, 3600)
    counts = await on_loop(drain, shop, delayed=True, failed=True, orphans=True)
    assert (counts.done, counts.failed) == (6, 3)
    assert sorted(heard) == ["alice", "alice", "bob", "bob"]
    assert loops == {asyncio.get_running_loop()}
    assert not await on_loop(bulk, shop)
    await engine.dispose()


def test_async(engine: Engine, settings: Settings) -> None:
    """All of it on an AsyncEngine: what is async runs on the loop of the test, with its locks."""
    asyncio.run(_test_async(engine.url.render_as_string(hide_password=False), settings))
