"""Capturing what is sent, without a database; and assertions about it, which are read by a person."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from unittest.mock import ANY, create_autospec
from uuid import UUID

import psycopg
import pydantic
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from outbox import INJECTED, Outbox, Outgoing, Settings
from outbox.errors import AlreadyCommitted, AlreadyRolledBack, HalfNotFound, InvalidMessage
from outbox.message.model import uuid7
from outbox.testing import Partial, SentMessages, assert_not_sent, assert_sent, capture, drain, sent_messages
from tests.testing.shop import send

NOWHERE = "postgresql+psycopg://nobody@nowhere.invalid/nothing"


@dataclass
class Order:
    number: int
    total: Decimal


class OrderModel(pydantic.BaseModel):
    number: int
    total: Decimal


@pytest.fixture
def shop() -> Outbox:
    """An outbox whose database isn't there."""
    return Outbox(create_engine(NOWHERE), settings=Settings())


@pytest.fixture
def sent(shop: Outbox) -> Iterator[SentMessages]:
    """What it sends."""
    with capture(shop) as sent:
        yield sent


def test_what_is_sent_is_kept(shop: Outbox, sent: SentMessages) -> None:
    """With all that was said of it, in order, whatever carries it; the body as a consumer reads it."""
    with Session() as session, session.begin():
        number = shop.send(
            session, "order", Order(7, Decimal("12.50")), key="7", tag="new", headers={"a": "b"}, delay=60
        )
    shop.send(None, "mail", "hello", deliver_at=dt.datetime(2030, 1, 1, tzinfo=dt.UTC))  # type: ignore[call-overload]
    assert [(each.topic, each.body, each.state) for each in sent] == [
        ("order", {"number": 7, "total": "12.50"}, "sent"),
        ("mail", "hello", "sent"),
    ]
    expected: dict[str, Any] = {"key": "7", "tag": "new", "headers": {"a": "b"}, "delay": dt.timedelta(minutes=1)}
    assert assert_sent(sent, "order", body=Order(7, Decimal("12.50")), **expected).id == number
    assert_sent(sent, "order", body=OrderModel(number=7, total=Decimal("12.50")))
    assert_sent(sent, body=Partial(total="12.50", number=ANY), headers=Partial(a="b"))
    assert_sent(sent, times=2)
    assert_sent(sent, times=None)
    assert_not_sent(sent, "order", key="8")
    assert len(sent[:1]) == 1


def test_it_is_checked_as_always(shop: Outbox, sent: SentMessages) -> None:
    """What couldn't be stored is refused, and nothing is kept of it."""
    for topic, body, options in (
        ("a topic", {}, {}),
        ("order", object(), {}),
        ("order", {}, {"key": "k" * 256}),
        ("order", {}, {"delay": -1}),
        ("order", "x" * 5_000_000, {}),
    ):
        with pytest.raises(InvalidMessage):
            shop.send(Session(), topic, body, **options)
    with pytest.raises(InvalidMessage):
        shop.prepare(Session(), "order", {}, immunity=-1)
    assert list(sent) == []


def test_what_does_not_commit_is_undone(shop: Outbox, sent: SentMessages) -> None:
    """A session that rolls back or is closed, and a savepoint, take back what was sent in them."""
    with Session() as session:
        shop.send(session, "order", 1)
        session.rollback()
        shop.send(session, "order", 2)
        with session.begin_nested():
            shop.send(session, "order", 3)
            with pytest.raises(ZeroDivisionError), session.begin_nested():
                shop.send(session, "order", 4)
                raise ZeroDivisionError
        session.commit()
        shop.send(session, "order", 5)
    scoped = scoped_session(sessionmaker())
    shop.send(scoped, "order", 6)
    scoped.rollback()
    shop.send(scoped, "order", 7)
    assert [(each.body, each.state) for each in sent] == [
        (1, "undone"), (2, "sent"), (3, "sent"), (4, "undone"), (5, "undone"), (6, "undone"), (7, "sent")
    ]  # fmt: skip


def test_decorated_functions_and_decisions(shop: Outbox, sent: SentMessages) -> None:
    """Decorated functions run with a session that needs no database; halves are decided once."""

    @shop.transactional(topic="order", key=lambda body: str(body["number"]))
    def order(number: int, session: Session = INJECTED) -> dict[str, int]:
        return {"number": number}

    @shop.two_phase(topic="paid", rollback_on=(ValueError,))
    def pay(number: int, session: Session = INJECTED) -> None:
        if number > 1:
            raise ValueError if number == 2 else ConnectionError

    order(1)
    pay(1)
    with pytest.raises(ValueError):
        pay(2)
    with pytest.raises(ConnectionError):
        pay(3)
    assert_sent(sent, "order", key="1")
    for number, state in ((1, "sent"), (2, "rolled back"), (3, "prepared")):
        assert_sent(sent, "paid", body={"number": number}, state=state)  # type: ignore[arg-type]
    with Session() as session:
        half = shop.prepare(session, "order", {})
        session.commit()
        shop.commit(half, session)
        session.rollback()
        shop.rollback(half)
        with pytest.raises(AlreadyRolledBack):
            shop.commit(half, session)
        with pytest.raises(AlreadyRolledBack):
            shop.rollback(half, session)
    with pytest.raises(HalfNotFound):
        shop.commit(uuid7())
    with Session() as session, session.begin():
        half = shop.prepare(session, "order", {})
        shop.commit(half, session)
    assert shop.commit(half) is not None
    with pytest.raises(AlreadyCommitted):
        shop.rollback(half)


def test_async_functions(settings: Settings) -> None:
    """An AsyncSession is followed too."""
    shop = Outbox(create_async_engine(NOWHERE), settings=settings)

    @shop.transactional(topic="order")
    async def order(number: int, session: AsyncSession = INJECTED) -> Outgoing:
        if number == 2:
            raise ValueError(number)
        return Outgoing({"number": number}, key="k")

    async def run() -> None:
        await order(1)
        async with AsyncSession() as session:
            shop.send(session, "order", {"number": 3})
        with pytest.raises(ValueError, match="2"):
            await order(2)

    with capture(shop) as sent:
        asyncio.run(run())
    assert [(each.body["number"], each.state) for each in sent] == [(1, "sent"), (3, "undone")]


def test_a_drivers_own_connection(shop: Outbox, sent: SentMessages) -> None:
    """It is captured at the call; where a send is awaited, this one is too."""
    plain: psycopg.Connection = create_autospec(psycopg.Connection, instance=True)
    later: psycopg.AsyncConnection = create_autospec(psycopg.AsyncConnection, instance=True)

    async def run() -> None:
        half = await shop.prepare(later, "order", 2)
        await shop.commit(half, later)

    half = shop.prepare(plain, "order", 1)
    shop.commit(half, plain)
    asyncio.run(run())
    assert [(each.body, each.state) for each in sent] == [(1, "sent"), (2, "sent")]


def test_a_capture_ends(engine: object, shop: Outbox, settings: Settings) -> None:
    """After the block all is as before; captures may be nested, the inner one takes."""
    with capture(shop) as outer:
        with capture(shop) as inner:
            shop.send(Session(), "order", 1)
        shop.send(Session(), "order", 2)
    assert ([each.body for each in inner], [each.body for each in outer]) == ([1], [2])
    with Session() as session:
        shop.send(session, "order", 3)
    assert len(outer) == 1
    assert not {"send", "decide"} & vars(shop._producer).keys()


def test_what_is_in_the_database(url: str, settings: Settings) -> None:
    """The same assertions read the database of an outbox."""
    engine = create_engine(url)
    shop = Outbox(engine, settings=settings)
    send(shop, engine, "alice", key="a", headers={"x": "y"})
    with Session(engine) as session, session.begin():
        half = shop.prepare(session, "paid", {})
        other = shop.prepare(session, "paid", {"n": 2})
    shop.rollback(half)
    assert_sent(shop, "order", body={"customer": "alice"}, key="a", headers={"x": "y"})
    assert_sent(shop, "paid", state="rolled back")
    assert assert_sent(shop, "paid", state="prepared").id == other
    assert_not_sent(shop, "paid")
    with pytest.warns(UserWarning, match="consumes nothing"):
        drain(shop)
    assert len(sent_messages(shop)) == 3
    engine.dispose()


REPORT = """\
expected 1 message(s) sent with topic='order', key='7', body={'number': 7, 'lines': [1, 2], 'total': '12.50'}
there are 0
messages sent (3):
  1. mail body='hello'
  2. order key='7' body={'number': 7, 'lines': [1, 2], 'total': '12.05'}
  3. order (undone) key='8' body={'number': 7, 'lines': [1, 2], 'total': '12.50'}
the nearest is 2; it differs in:
  body (- expected, + sent):
    - {'lines': [1, 2], 'number': 7, 'total': '12.50'}
    ?                                              -
    + {'lines': [1, 2], 'number': 7, 'total': '12.05'}
    ?                                             +"""


def test_a_failed_assertion_says_what_was_there(shop: Outbox, sent: SentMessages) -> None:
    """What was sent instead, and how the nearest differs; what was undone is called so."""
    body = {"number": 7, "lines": [1, 2], "total": "12.50"}
    shop.send(Session(), "mail", "hello")
    with Session() as session:
        shop.send(session, "order", {**body, "total": "12.05"}, key="7")
        session.commit()
        shop.send(session, "order", body, key="8")
    with pytest.raises(AssertionError) as failed:
        assert_sent(sent, topic="order", body=body, key="7")
    assert str(failed.value) == REPORT
    with pytest.raises(AssertionError, match=r"differs in:\n  key .*\n    - '8'\n    \+ '7'$"):
        assert_sent(sent, "order", body=Partial(total="12.05"), key="8")
    with pytest.raises(AssertionError, match=r"(?s)body.*- \{'total': '1'\}.*\+ \{'total': '12.05'\}"):
        assert_sent(sent, "order", body=Partial(total="1"))
    with pytest.raises(
        AssertionError, match=r"expected no message sent with topic='mail'\nthere is 1\n.*\n \*1\. mail"
    ):
        assert_not_sent(sent, "mail")
    with pytest.raises(AssertionError, match="nothing was sent at all"):
        assert_sent(SentMessages(), "order")
    with pytest.raises(AssertionError, match="state: it is 'undone'"):
        assert_sent(sent, "order", body=Partial(total="12.50"), times=None)


def test_a_long_list_is_cut(shop: Outbox, sent: SentMessages) -> None:
    """The newest are shown."""
    for number in range(30):
        shop.send(Session(), "order", number, id=UUID(int=number + 1))
    with pytest.raises(AssertionError, match=r"messages sent \(30\):\n  … 10 older ones\n  11\. order body=10\n"):
        assert_sent(sent, "order", body=99)
