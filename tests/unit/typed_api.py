"""Every public call of the producer's side as a user writes it; type-checked, never run.

``assert_type`` says what comes out; a ``type: ignore`` with a code is a mistake that mypy and pyright must find.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, assert_type
from uuid import UUID

import asyncpg
import psycopg
import psycopg2.extensions
from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from outbox import (
    INJECTED,
    Decision,
    Message,
    Orphan,
    Outbox,
    Outgoing,
    Park,
    Resolution,
    Retry,
    Settings,
    Skip,
    Topic,
    Unavailable,
)
from outbox.operator.model import BulkJob


def make(
    engine: Engine,
    async_engine: AsyncEngine,
    sessions: sessionmaker[Session],
    async_sessions: async_sessionmaker[AsyncSession],
) -> None:
    """Outboxes of everything they can be bound to."""
    Outbox(engine)
    Outbox(async_engine, group="orders")
    Outbox(sessions, settings=Settings(queues=4))
    Outbox(async_sessions, settings=Settings.from_env({}))
    Outbox("postgresql://")  # type: ignore[arg-type]


def send(
    outbox: Outbox,
    session: Session,
    async_session: AsyncSession,
    connection: Connection,
    async_connection: AsyncConnection,
    scoped: scoped_session[Session],
    async_scoped: async_scoped_session[AsyncSession],
) -> None:
    """Sending with every carrier and option."""
    assert_type(outbox.send(session, "t", {"a": 1}), UUID)
    outbox.send(async_session, "t", "text", key="k", tag="g", headers={"h": "v"})
    outbox.send(connection, "t", b"bytes", deliver_at=dt.datetime.now(dt.UTC))
    outbox.send(async_connection, "t", {}, delay=dt.timedelta(hours=1), id=UUID(int=1))
    outbox.send(session, "t", {}, delay=5)
    outbox.send(session, "t", {}, delay_level=3)
    outbox.send(session, "t", {}, content_type="application/msgpack")
    outbox.prepare(session, "t", {}, queue=3)
    outbox.send(scoped, "t", {})
    outbox.send(async_scoped, "t", {})
    outbox.send(session, "t")  # type: ignore[call-overload]
    outbox.send("session", "t", {})  # type: ignore[call-overload]
    outbox.send(session, 1, {})  # type: ignore[call-overload]
    outbox.send(session, "t", {}, key=1)  # type: ignore[call-overload]


def send_raw(outbox: Outbox, raw: psycopg.Connection[Any], raw_psycopg2: psycopg2.extensions.connection) -> None:
    """Sending with a driver's own connection, at once."""
    assert_type(outbox.send(raw, "t", {}, key="k"), UUID)
    assert_type(outbox.send(raw_psycopg2, "t", {}), UUID)
    assert_type(outbox.prepare(raw_psycopg2, "t", {}), UUID)
    outbox.rollback(UUID(int=1), within=raw)


async def send_raw_async(
    outbox: Outbox,
    raw: psycopg.AsyncConnection[Any],
    raw_asyncpg: asyncpg.Connection[Any],
    raw_pooled: asyncpg.pool.PoolConnectionProxy[Any],
) -> None:
    """Sending with a driver's own async connection, when it is awaited; what isn't is found."""
    assert_type(await outbox.send(raw, "t", {}), UUID)
    assert_type(await outbox.send(raw_asyncpg, "t", {}), UUID)
    assert_type(await outbox.send(raw_pooled, "t", {}), UUID)
    assert_type(await outbox.prepare(raw_asyncpg, "t", {}, immunity=3), UUID)
    await outbox.commit(UUID(int=1), raw)
    outbox.send(raw, "t", {})  # type: ignore[unused-coroutine]
    outbox.commit(UUID(int=1), raw_asyncpg)  # type: ignore[unused-coroutine]


def decide(outbox: Outbox, session: Session, half_id: UUID) -> None:
    """Preparing and deciding."""
    assert_type(outbox.prepare(session, "t", {}, immunity=60), UUID)
    assert_type(outbox.commit(half_id), Decision | None)
    outbox.commit(half_id, session)
    assert_type(outbox.rollback(half_id), Decision | None)
    outbox.rollback(half_id, within=session)
    outbox.commit("id")  # type: ignore[call-overload]


def decorate(outbox: Outbox) -> None:
    """Decorators keep the types of what they decorate."""

    @outbox.transactional(topic="t", key=lambda body: str(body["id"]))
    def place(order: int, price: Decimal, session: Session = INJECTED) -> dict[str, int]:
        return {"id": order}

    assert_type(place(1, Decimal(1)), dict[str, int])
    place("1", Decimal(1))  # type: ignore[arg-type]
    place(1)  # type: ignore[call-arg]
    with_session: Callable[[int, Decimal, Session], dict[str, int]] = place
    with_session(1, Decimal(1), Session())

    @outbox.transactional(topic="t")
    async def place_later(order: int, *, session: AsyncSession = INJECTED) -> Outgoing | None:
        return Outgoing({"id": order}, key=str(order), delay=5) if order else None

    coroutine: Coroutine[Any, Any, Outgoing | None] = place_later(1)
    awaitable: Awaitable[int] = place_later(1)  # type: ignore[assignment]
    del coroutine, awaitable

    def body(order: int) -> dict[str, int]:
        return {"id": order}

    @outbox.two_phase(topic="t", body=body, rollback_on=(ValueError,))
    def pay(order: int, session: Session = INJECTED) -> bool:
        return True

    assert_type(pay(1), bool)

    @outbox.two_phase(topic="t", fenced=False, immunity=dt.timedelta(minutes=1))
    async def charge(card: str) -> str:
        return card

    assert_type(charge, Callable[[str], Coroutine[Any, Any, str]])  # type: ignore[assert-type]


def consume(outbox: Outbox) -> None:
    """Handlers, sync and async."""

    @outbox.consumer("t", group="g")
    def handle(message: Message, session: Session) -> Retry | Park | Skip | None:
        return Skip() if message.body else None

    @outbox.consumer("t", group="h", takes_batch=True, batch=10)
    async def handle_all(messages: list[Message], session: AsyncSession) -> None: ...

    assert_type(handle(Message.__new__(Message), Session()), Retry | Park | Skip | None)
    del handle_all


def carriers(outbox: Outbox) -> None:
    """What a handler may take in place of a session; of the wrong kind, or anything else, it is found."""

    @outbox.consumer("t", group="a")
    def by_connection(message: Message, connection: Connection) -> Skip | None: ...

    @outbox.consumer("t", group="b", pipeline=True, batch=100)
    def by_cursor(message: Message, cursor: psycopg.Cursor) -> None: ...

    @outbox.consumer("t", group="c")
    async def by_async_connection(message: Message, connection: AsyncConnection) -> None: ...

    @outbox.consumer("t", group="d", takes_batch=True, pipeline=True)
    async def by_async_cursor(messages: list[Message], cursor: psycopg.AsyncCursor) -> None: ...

    async def of_plain_cursor(message: Message, cursor: psycopg.Cursor) -> None: ...
    def of_driver(message: Message, connection: psycopg.Connection) -> None: ...

    register = outbox.consumer("t", group="e")
    register(of_plain_cursor)  # type: ignore[type-var]
    register(of_driver)  # type: ignore[type-var]
    del by_connection, by_cursor, by_async_connection, by_async_cursor


@dataclass
class Order:
    """What a body is read as."""

    number: int


def outside_of_transactions(outbox: Outbox) -> None:
    """Handlers without a session, and the options that go with them."""

    @outbox.consumer("t", group="a", model=Order, transactional=False, concurrency=50, timeout=30)
    def handle(message: Message[Order]) -> Retry | None:
        assert_type(message.body, Order)
        return None

    @outbox.consumer("t", group="b", transactional=False, ordered=False)
    async def handle_later(message: Message) -> None: ...

    def of_text(message: Message[str]) -> None: ...
    def with_session(message: Message[Order], session: Session) -> None: ...

    @outbox.consumer("t", group="f", transactional=False, takes_batch=True, batch=10)
    async def handle_all(messages: list[Message]) -> list[Unavailable | None]:
        return [Unavailable("away") for _ in messages]

    outside = outbox.consumer("t", group="c", model=Order, transactional=False)
    outside(of_text)  # type: ignore[arg-type]
    outside(with_session)  # type: ignore[arg-type]
    outbox.consumer("t", group="d", transactional=False, batch=10)  # type: ignore[call-overload]
    outbox.consumer("t", group="e", concurrency=10)  # type: ignore[call-overload]
    del handle, handle_later, handle_all


def read_as(outbox: Outbox) -> None:
    """Handlers of a model: the body has its type, and a handler that doesn't fit is found."""

    @outbox.consumer("t", group="a", model=Order)
    def handle(message: Message[Order], session: Session) -> None:
        assert_type(message.body, Order)

    @outbox.consumer("t", group="b", model=Order, batch=10, retry_delays=[1.0])
    async def handle_later(message: Message[Order], session: AsyncSession) -> Retry | None:
        return Retry() if message.body.number else None

    @outbox.consumer("t", group="c", model=Order, takes_batch=True)
    def handle_all(messages: list[Message[Order]], session: Session) -> None:
        assert_type([message.body for message in messages], list[Order])

    @outbox.consumer("t", group="d", model=list[Order])
    def handle_list(message: Message[list[Order]], session: Session) -> None: ...

    @outbox.consumer("t", group="e", model=Order | None)
    def handle_either(message: Message[Order | None], session: Session) -> None: ...

    def of_text(message: Message[str], session: Session) -> None: ...
    def without_session(message: Message[Order]) -> None: ...
    def of_async_session(message: Message[Order], session: AsyncSession) -> None: ...
    async def of_session(message: Message[Order], session: Session) -> None: ...
    def of_list(messages: list[Message[Order]], session: Session) -> None: ...
    def number(message: Message[Order], session: Session) -> int:
        return 1

    consumer = outbox.consumer("t", group="f", model=Order)
    consumer(of_text)  # type: ignore[arg-type]
    consumer(without_session)  # type: ignore[arg-type]
    consumer(of_async_session)  # type: ignore[type-var]
    consumer(of_session)  # type: ignore[type-var]
    consumer(of_list)  # type: ignore[arg-type]
    consumer(number)  # type: ignore[type-var]
    consumer(3)  # type: ignore[call-overload]
    outbox.consumer("t", group="g", takes_batch=True)(of_session)  # type: ignore[arg-type, type-var]
    outbox.consumer("t", group="h", model=Order, colour="red")  # type: ignore[call-overload]

    orders = outbox.topic("orders", model=Order)
    assert_type(outbox.topic("paid", model=Order, version=2, key=lambda body: str(body.number)), Topic[Order])
    outbox.topic("sent", model=Order, content_type="application/msgpack")
    outbox.topic("lost", model=Order, versions=2)  # type: ignore[call-overload]
    outbox.codec("application/msgpack", encode=bytes, decode=lambda raw: raw[0], show=str)
    outbox.codec("application/msgpack", encode=str, decode=bytes)  # type: ignore[arg-type]

    @outbox.consumer(orders, group="a")
    def handle_declared(message: Message[Order], session: Session) -> None:
        assert_type(message.body, Order)

    outbox.consumer(orders, group="b")(of_text)  # type: ignore[arg-type]
    del handle_declared

    @outbox.checker("t", model=Order, max_checks=3)
    def check(orphan: Orphan[Order]) -> Resolution | None:
        assert_type(orphan.body, Order)
        return Resolution.COMMIT

    @outbox.checker("u")
    async def check_later(orphan: Orphan, session: AsyncSession) -> Resolution:
        return Resolution.UNKNOWN

    outbox.checker("v", model=Order)(of_text)  # type: ignore[arg-type]

    @outbox.compensation("t", model=Order)
    def give_back(message: Message[Order], session: Session) -> dict[str, int]:
        return {"given back": message.body.number}

    outbox.compensation("u", model=Order)(of_text)  # type: ignore[arg-type]
    del handle, handle_later, handle_all, handle_list, handle_either, check, check_later, give_back


def decorate_what_begins_with_its_session(outbox: Outbox, session: Session, async_session: AsyncSession) -> None:
    """Callers don't see the session; they may call the function within theirs."""

    @outbox.transactional(topic="t")
    def place(session: Session, order: int, *, price: Decimal = Decimal(1)) -> dict[str, int]:
        return {"id": order}

    assert_type(place(1), dict[str, int])
    assert_type(place.within(session, 1, price=Decimal(2)), dict[str, int])
    place(session, 1)  # type: ignore[arg-type, call-arg]
    place.within(async_session, 1)  # type: ignore[arg-type]

    @outbox.transactional(topic="t")
    async def place_later(session: AsyncSession, order: int) -> Outgoing:
        return Outgoing({"id": order})

    coroutine: Coroutine[Any, Any, Outgoing] = place_later(1)
    within: Coroutine[Any, Any, Outgoing] = place_later.within(async_session, 1)
    place_later.within(session, 1)  # type: ignore[arg-type, unused-coroutine]

    @outbox.two_phase(topic="t")
    def pay(session: Session, order: int) -> bool:
        return True

    assert_type(pay(1), bool)
    pay()  # type: ignore[call-arg]
    del coroutine, within


def compensate(outbox: Outbox, engine: Engine, async_engine: AsyncEngine) -> None:
    """Compensations, sync and async, and ordering one."""

    @outbox.compensation("t", consumers=[engine, async_engine, "postgresql://bank-b/orders"], model=dict)
    def give_back(message: Message, session: Session) -> dict[str, int]:
        return {"given back": 1}

    @outbox.compensation("u")
    async def give_back_later(message: Message, session: AsyncSession) -> None: ...

    assert_type(give_back(Message.__new__(Message), Session()), dict[str, int])
    assert_type(outbox.operator.compensate(UUID(int=1), by="ada", why="no such account"), BulkJob)
    outbox.operator.compensate(UUID(int=1), by="ada", why="x", acknowledge_delivered=True)
    outbox.operator.compensate(UUID(int=1))  # type: ignore[call-arg]
    outbox.compensation("v", consumers=[1])  # type: ignore[list-item]
    del give_back_later


def reconcile(outbox: Outbox) -> None:
    """A reconciliation by a timetable."""
    outbox.reconciliation(at="03:00", timezone="Europe/Berlin")
    outbox.reconciliation("hourly", every=3600, config="night.toml", report=print)
    outbox.reconciliation("x", at=3)  # type: ignore[arg-type]
