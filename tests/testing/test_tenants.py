"""Draining for a tenant, and decorated functions that handlers call, behave as in a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import INJECTED, Message, Outbox, Settings, testing


def bodies(engine: Engine, topic: str) -> list[str]:
    """Return what was sent to a topic."""
    with engine.connect() as connection:
        query = text("SELECT convert_from(body, 'UTF8') FROM outbox.half_message WHERE topic = :topic")
        return list(connection.scalars(query, {"topic": topic}))


def test_drain_for_a_tenant(new_database: Callable[[], str]) -> None:
    """What a handler does with the Outbox of its module is done for the tenant, in the handler's transaction."""
    engine = create_engine(new_database())
    outbox = Outbox(settings=Settings())

    @outbox.transactional(topic="second")
    def double(number: int, session: Session = INJECTED) -> dict[str, int]:
        return {"number": 2 * number}

    @outbox.consumer("first", group="g", retry_delays=[])
    def handle(message: Message, session: Any) -> None:
        double(message.body["number"])
        if message.body["number"] < 0:
            raise ValueError("what joined goes with it")

    tenant = outbox.bound_to(engine)
    with engine.begin() as connection:
        tenant.send(connection, "first", {"number": 1})
        tenant.send(connection, "first", {"number": -1})
    counts = testing.drain(tenant)
    assert (counts.done, counts.parked) == (1, 1)
    assert bodies(engine, "second") == ['{"number":2}']
    engine.dispose()


async def test_adrain_joins(new_database: Callable[[], str]) -> None:
    """Also an async handler that the test's loop runs."""
    url = new_database()
    engine = create_engine(url)
    async_engine = create_async_engine(url)
    outbox = Outbox(async_engine, settings=Settings())

    @outbox.transactional(topic="second")
    async def double(number: int, session: AsyncSession = INJECTED) -> dict[str, int]:
        return {"number": 2 * number}

    @outbox.consumer("first", group="g", retry_delays=[])
    async def handle(message: Message, session: AsyncSession) -> None:
        await double(message.body["number"])
        if message.body["number"] < 0:
            raise ValueError("what joined goes with it")

    async with AsyncSession(async_engine) as session, session.begin():
        outbox.send(session, "first", {"number": 1})
        outbox.send(session, "first", {"number": -1})
    counts = await testing.on_loop(testing.drain, outbox)
    assert (counts.done, counts.parked) == (1, 1)
    await async_engine.dispose()
    assert bodies(engine, "second") == ['{"number":2}']
    engine.dispose()
