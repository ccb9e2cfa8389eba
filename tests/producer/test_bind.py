"""An Outbox that gets its database later, or one for each tenant: what is declared before works after."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, insert
from sqlalchemy.orm import Session, sessionmaker

from outbox import INJECTED, Message, Outbox, Settings
from outbox.errors import InvalidMessage, InvalidSettings, NotBound
from tests.producer.bank import change, changes, halves, messages
from tests.producer.conftest import SECOND_SCHEMA


def declare(outbox: Outbox) -> Any:
    """Return a decorated function of an Outbox."""

    @outbox.transactional(topic="t")
    def place(number: int, session: Session = INJECTED) -> dict[str, int]:
        session.execute(insert(change).values(number=number))
        return {"number": number}

    return place


def test_what_is_declared_before_the_bind_works_after_it(engine: Engine) -> None:
    """Decorated functions, two-phase ones and sends work as soon as the Outbox has its database."""
    outbox = Outbox(settings=Settings())
    place = declare(outbox)

    @outbox.two_phase(topic="t")
    def pay(number: int, session: Session = INJECTED) -> None:
        session.execute(insert(change).values(number=number))

    outbox.bind(engine)
    place(1)
    pay(2)
    with Session(engine) as session, session.begin():
        outbox.send(session, "t", {"number": 3})
    assert (changes(engine), messages(engine)) == ({1, 2}, [1, 2, 3])
    assert (outbox.engine, outbox.url) == (engine, engine.url)


def test_used_before_the_bind(engine: Engine) -> None:
    """Whatever needs the database says in one sentence what is missing, and nothing is written."""
    outbox = Outbox(group="shop", settings=Settings())
    place = declare(outbox)

    @outbox.two_phase(topic="t")
    def pay(number: int, session: Session = INJECTED) -> None: ...

    with Session(engine) as session, session.begin():
        for use in (
            lambda: place(1),
            lambda: place(1, session=session),
            lambda: pay(1),
            lambda: outbox.send(session, "t", {}),
            lambda: outbox.declare_topic("t", 8),
            lambda: outbox.engine,
            lambda: outbox.operator,
        ):
            with pytest.raises(NotBound, match=r"group 'shop' has no database yet: call outbox\.bind\(engine\)"):
                use()
    assert (changes(engine), halves(engine)) == (set(), [])
    assert repr(outbox) == "Outbox(not bound, group='shop', subscriptions=[])"


def test_declarations_are_checked_before_the_bind() -> None:
    """A name that isn't one is refused at its declaration, database or not."""
    with pytest.raises(InvalidMessage):
        Outbox(group="a b", settings=Settings())
    outbox = Outbox(settings=Settings())
    with pytest.raises(InvalidMessage):
        outbox.transactional(topic="a b")


def test_bound_twice(engine: Engine, url: str) -> None:
    """The same engine or factory again changes nothing; another one is refused, until it is unbound."""
    outbox, other, factory = Outbox(settings=Settings()), create_engine(url), sessionmaker(engine)
    outbox.bind(engine)
    outbox.bind(engine)
    for second in (other, factory):
        with pytest.raises(InvalidSettings, match=r"is bound already, and can't be bound to .* call unbind\(\) first"):
            outbox.bind(second)
    assert outbox.engine is engine
    outbox.unbind()
    outbox.bind(factory)
    outbox.bind(factory)
    other.dispose()


def test_a_bind_that_fails_leaves_it_unbound(engine: Engine) -> None:
    """What is no engine, and an engine of another database system, are refused; the right one is taken after that."""
    outbox = Outbox(settings=Settings())
    with pytest.raises(InvalidSettings):
        outbox.bind("postgresql://localhost")  # type: ignore[arg-type]
    with pytest.raises(InvalidSettings):
        outbox.bind(create_engine("sqlite://"))
    outbox.bind(engine)


def test_tenants_share_what_is_declared(engine: Engine) -> None:
    """Handlers and checkers that are declared on one, before or after, are those of all."""
    outbox = Outbox(group="shop", settings=Settings())
    one = outbox.bound_to(engine)

    def handle(message: Message, session: Session) -> None: ...

    outbox.consumer("t", group="late")(handle)
    one.checker("t")(lambda orphan: None)
    two = outbox.bound_to(engine, schema=SECOND_SCHEMA)
    assert set(two.subscriptions) == {("t", "late")} == set(one.subscriptions)
    assert set(outbox.checkers) == {"t"} == set(two.checkers)
    assert (two.group, two.settings.schema, one.settings.schema) == ("shop", SECOND_SCHEMA, "outbox")


def test_a_decorated_function_works_for_the_active_tenant(engine: Engine) -> None:
    """The innermost active tenant has the message; outside of all there is no database; an Outbox's own comes first."""
    outbox = Outbox(settings=Settings())
    place = declare(outbox)
    one, two = outbox.bound_to(engine), outbox.bound_to(engine, schema=SECOND_SCHEMA)
    with one.active():
        place(1)
        with two.active():
            place(2)
            with Session(engine) as session, session.begin():
                one.send(session, "t", {"number": 10})
        place(3)
    with pytest.raises(NotBound):
        place(4)
    with two.active(), pytest.raises(NotBound):
        declare(Outbox(settings=Settings()))(5)
    assert (messages(engine), messages(engine, SECOND_SCHEMA)) == ([1, 10, 3], [2])


async def test_each_task_has_its_own_tenant(engine: Engine) -> None:
    """Two requests at once, each for a tenant of its own, don't mix."""
    outbox = Outbox(settings=Settings())
    place = declare(outbox)
    tenants = {1: outbox.bound_to(engine), 2: outbox.bound_to(engine, schema=SECOND_SCHEMA)}
    meet = asyncio.Barrier(2)

    async def request(number: int) -> None:
        with tenants[number].active():
            await meet.wait()
            await asyncio.to_thread(place, number)
            await meet.wait()

    await asyncio.gather(request(1), request(2))
    assert (messages(engine), messages(engine, SECOND_SCHEMA)) == ([1], [2])
