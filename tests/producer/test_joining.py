"""A decorated function that is called inside another one joins its transaction; what the caller gets is his own."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, insert
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import INJECTED, Outbox, Outgoing, Settings
from tests.producer.bank import Account, accounts, change, changes, halves, messages


class Declined(Exception):
    """The outer function fails."""


def declare(outbox: Outbox, **options: Any) -> Any:
    """Return a decorated function of an Outbox."""

    @outbox.transactional(topic="t", **options)
    def inner(number: int, session: Session = INJECTED) -> dict[str, int]:
        session.execute(insert(change).values(number=number))
        return {"number": number}

    return inner


@pytest.mark.parametrize("joins", [True, False])
def test_a_nested_call_joins(joins: bool, outbox: Outbox, engine: Engine) -> None:
    """It is committed, or rolled back, with the function around it; with joins=False by itself."""
    inner = declare(outbox, joins=joins)

    @outbox.transactional(topic="t")
    def outer(number: int, session: Session = INJECTED) -> dict[str, int]:
        inner(10 * number)
        if number < 0:
            raise Declined
        return {"number": number}

    outer(1)
    with pytest.raises(Declined):
        outer(-1)
    assert changes(engine) == ({10} if joins else {10, -10})
    assert messages(engine) == ([10, 1] if joins else [10, 1, -10])


def test_it_joins_a_session_that_the_function_around_it_was_given(outbox: Outbox, engine: Engine) -> None:
    """Three functions deep, the end of the caller's session decides about all."""
    inner = declare(outbox)

    @outbox.transactional(topic="t")
    def outer(number: int, session: Session = INJECTED) -> dict[str, int]:
        inner(10 * number)
        return {"number": number}

    with Session(engine) as session:
        outer(1, session)
        session.rollback()
        outer(2, session)
        session.commit()
    assert (changes(engine), messages(engine)) == ({20}, [20, 2])


def test_it_joins_a_two_phase_function(outbox: Outbox, engine: Engine) -> None:
    """The business transaction of a fenced function is one that can be joined."""
    inner = declare(outbox)

    @outbox.two_phase(topic="t")
    def pay(number: int, session: Session = INJECTED) -> None:
        inner(number)
        raise Declined

    with pytest.raises(Declined):
        pay(1)
    assert (changes(engine), [half.resolution for half in halves(engine)]) == (set(), [None])


def test_it_joins_nothing_of_another_database(outbox: Outbox, engine: Engine, url: str) -> None:
    """A function of an Outbox with another engine has a transaction of its own."""
    other = create_engine(url)
    inner = declare(Outbox(other, settings=Settings()))

    @outbox.transactional(topic="t")
    def outer(number: int, session: Session = INJECTED) -> None:
        inner(number)
        raise Declined

    with pytest.raises(Declined):
        outer(1)
    assert changes(engine) == {1}
    other.dispose()


def test_what_runs_beside_the_function_joins_nothing(outbox: Outbox, engine: Engine) -> None:
    """A thread or a task that inherits the context must not share the session with the function that began it."""
    inner = declare(outbox)

    @outbox.transactional(topic="t")
    def outer(session: Session = INJECTED) -> None:
        import contextvars

        thread = threading.Thread(target=contextvars.copy_context().run, args=(inner, 1))
        thread.start()
        thread.join()
        raise Declined

    with pytest.raises(Declined):
        outer()
    assert changes(engine) == {1}


async def test_async_functions_join(url: str, engine: Engine) -> None:
    """Awaited in the same task, an async function joins; a task of its own has a transaction of its own."""
    async_engine = create_async_engine(url)
    outbox = Outbox(async_engine, settings=Settings())

    @outbox.transactional(topic="t")
    async def inner(number: int, session: AsyncSession = INJECTED) -> dict[str, int]:
        await session.execute(insert(change).values(number=number))
        return {"number": number}

    @outbox.transactional(topic="t")
    async def outer(number: int, session: AsyncSession = INJECTED) -> dict[str, int]:
        await inner(10 * number)
        await asyncio.gather(inner(100 * number), inner(1000 * number))
        if number < 0:
            raise Declined
        return {"number": number}

    await outer(1)
    with pytest.raises(Declined):
        await outer(-1)
    await async_engine.dispose()
    assert changes(engine) == {10, 100, 1000, -100, -1000}
    assert sorted(messages(engine)) == [-1000, -100, 1, 10, 100, 1000]


def test_after_the_function_nothing_is_joined(outbox: Outbox, engine: Engine) -> None:
    """Neither after a return nor after an exception does anything of the transaction stay behind."""
    inner = declare(outbox)

    @outbox.transactional(topic="t")
    def outer(number: int, session: Session = INJECTED) -> None:
        if number < 0:
            raise Declined

    outer(1)
    inner(1)
    with pytest.raises(Declined):
        outer(-1)
    inner(2)
    assert changes(engine) == {1, 2}


# --- what is sent, and what the caller gets ------------------------------------------------------------------


def test_message_makes_the_body_of_the_result(outbox: Outbox, engine: Engine) -> None:
    """The caller gets the function's own object, usable after the commit; the body is what was made of it."""

    @outbox.transactional(
        topic="t", key=lambda body: body["owner"], message=lambda a: {"number": a.id, "owner": a.owner}
    )
    def open_account(number: int, session: Session = INJECTED) -> Account:
        account = Account(id=number, owner="ann")
        session.add(account)
        return account

    account = open_account(7)
    assert (type(account), account.id, account.owner) == (Account, 7, "ann")
    (half,) = halves(engine)
    assert (half.body, half.key, accounts(engine)) == ({"number": 7, "owner": "ann"}, "ann", {7})


def test_message_may_say_more_or_nothing(outbox: Outbox, engine: Engine) -> None:
    """It may return an Outgoing, or None to send nothing; what it raises undoes the transaction."""

    def message(number: int | None) -> Outgoing | None:
        if number == 3:
            raise Declined
        return Outgoing({"number": number}, tag="own") if number != 2 else None

    @outbox.transactional(topic="t", tag="tag", message=message)
    def place(number: int, session: Session = INJECTED) -> int | None:
        session.execute(insert(change).values(number=number))
        return number

    assert (place(1), place(2)) == (1, 2)
    with pytest.raises(Declined):
        place(3)
    assert (changes(engine), [(half.body, half.tag) for half in halves(engine)]) == ({1, 2}, [({"number": 1}, "own")])


@pytest.mark.parametrize("joined", [True, False])
def test_an_outgoing_is_not_for_the_caller(joined: bool, outbox: Outbox, engine: Engine) -> None:
    """A function that returns an Outgoing hands its body to the caller, in a transaction of its own or of another."""

    @outbox.transactional(topic="t")
    def place(session: Session = INJECTED) -> Outgoing:
        return Outgoing({"number": 1}, key="k")

    with Session(engine) as session, session.begin():
        by_name: Any = place  # for type checkers, a session that comes first is passed by `within`
        returned: Any = by_name(session=session) if joined else place()
    assert returned == {"number": 1}
    assert [half.key for half in halves(engine)] == ["k"]
