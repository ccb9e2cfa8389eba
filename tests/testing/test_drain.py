"""The helper for the tests of services."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Outgoing, Settings
from outbox.errors import InvalidHandler
from outbox.message.model import uuid7
from outbox.testing import drain


def test_drain_runs_chains_across_databases(new_engine: Callable[..., Engine], settings: Settings) -> None:
    """What was sent arrives in the other database, and so does what its handler sends back."""
    here, there = new_engine(), new_engine()
    shop, bank = Outbox(here, settings=settings), Outbox(there, settings=settings)
    heard: list[object] = []

    @bank.consumer("order", group="bank", source=here)
    def pay(message: Message, session: Session) -> None:
        bank.send(session, "paid", {"order": message.body["id"]})

    @shop.consumer("paid", group="shop", source=there.url.render_as_string(hide_password=False))
    def ship(message: Message, session: Session) -> None:
        heard.append(message.body)

    with Session(here) as session, session.begin():
        shop.send(session, "order", {"id": 7})
    assert drain(shop, bank).done == 2
    assert heard == [{"order": 7}]
    assert not drain(shop, bank)


def test_drain_refuses_async_handlers(engine: Engine, settings: Settings) -> None:
    """An async handler needs an event loop, which a Worker has and drain doesn't."""
    outbox = Outbox(engine, settings=settings)

    @outbox.consumer("order", group="g")
    async def handle(message: Message, session: AsyncSession) -> None:
        """Never called."""

    with pytest.raises(InvalidHandler, match="async handler of 'order'"):
        drain(outbox)


def test_an_outgoing_message_may_bring_its_id(engine: Engine, settings: Settings) -> None:
    """A service that must store the message's id makes it first and returns it with the body."""
    outbox = Outbox(engine, settings=settings)
    seen: list[object] = []
    outbox.consumer("order", group="g")(lambda message, session: seen.append(message.id))
    message_id = uuid7()

    @outbox.transactional(topic="order")
    def order(session: Session | None = None) -> Outgoing:
        return Outgoing({"id": 7}, id=message_id)

    order()
    drain(outbox)
    assert seen == [message_id]
