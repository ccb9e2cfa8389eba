"""Decorated service functions: what `@transactional` sends, and what both decorators leave as it was."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
from typing import Any

import pydantic
import pytest
from sqlalchemy import Engine, insert
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session, sessionmaker

from outbox import INJECTED, Outbox, Outgoing, Settings
from outbox.errors import InvalidHandler, InvalidMessage, TransactionRequired
from tests.producer.bank import Account, accounts, change, changes, halves, idle_in_transaction, messages
from tests.producer.caller import Caller, Crash, Declined


@dataclasses.dataclass
class Placed:
    number: int


class PlacedModel(pydantic.BaseModel):
    number: int


# --- @transactional ----------------------------------------------------------------------------------------


def test_transactional_sends_what_is_returned(caller: Caller, engine: Engine) -> None:
    """Whatever is returned is sent and handed to the caller, of an Outgoing the body; None sends nothing."""
    results: list[Any] = [
        {"number": 0},
        Placed(1),
        PlacedModel(number=2),
        Outgoing({"number": 3}, key="own", tag="own", headers={"a": "b"}, delay=60),
        None,
    ]
    placed = caller.decorate(
        caller.outbox.transactional(topic="t", key=lambda body: f"key {type(body).__name__}", tag="tag"),
        lambda _, number: results[number],
    )
    for number, result in enumerate(results):
        assert placed(number) is (result.body if isinstance(result, Outgoing) else result)
    assert changes(engine) == {0, 1, 2, 3, 4}
    assert messages(engine) == [0, 1, 2, 3]
    assert [(half.key, half.tag) for half in halves(engine)] == [
        ("key dict", "tag"),
        ("key Placed", "tag"),
        ("key PlacedModel", "tag"),
        ("own", "own"),
    ]
    assert halves(engine)[3].headers == {"a": "b"}
    assert halves(engine)[3].deliver_at is not None


@pytest.mark.parametrize("error", [Declined, Crash, KeyboardInterrupt])
def test_transactional_raises(error: type[BaseException], caller: Caller, engine: Engine) -> None:
    """An exception reaches the caller; neither change nor what was sent by hand stays."""

    def fail(session: Any, number: int) -> None:
        caller.outbox.send(session, "t", {"number": number})
        raise error(number)

    with pytest.raises(error):
        caller.decorate(caller.outbox.transactional(topic="t"), fail)(1)
    assert (changes(engine), halves(engine), idle_in_transaction(engine)) == (set(), [], 0)


def test_transactional_result_that_cannot_be_sent(caller: Caller, engine: Engine) -> None:
    """A result without an encoding, or a key that isn't text, fails the whole transaction."""
    for result, key in ((object(), None), ({"number": 1}, lambda body: body["number"])):
        with pytest.raises(InvalidMessage):
            caller.decorate(caller.outbox.transactional(topic="t", key=key), lambda *_, result=result: result)(1)
    assert (changes(engine), halves(engine)) == (set(), [])


@pytest.mark.parametrize("passed", ["by name", "by position"])
def test_transactional_joins_the_callers_transaction(passed: str, caller: Caller, engine: Engine) -> None:
    """Called with a session it commits nothing itself: the caller's end decides."""
    placed: Any = None

    @caller.outbox.transactional(topic="t")
    def place(number: int, session: Session = INJECTED) -> dict[str, int]:
        session.add(Account(id=number, owner=str(number)))
        session.flush()
        return {"number": number}

    @caller.outbox.transactional(topic="t")
    async def place_async(number: int, session: AsyncSession = INJECTED) -> dict[str, int]:
        session.add(Account(id=number, owner=str(number)))
        await session.flush()
        return {"number": number}

    placed = place_async if caller.asynchronous else place

    async def act() -> None:
        assert isinstance(caller.bind, AsyncEngine)
        for number, end in ((1, "commit"), (2, "rollback")):
            async with AsyncSession(caller.bind) as session:
                given: Any = {"session": session} if passed == "by name" else {}
                await placed(number, *(() if given else (session,)), **given)
                assert accounts(engine) == {1} - {number}
                await getattr(session, end)()

    if caller.runner:
        caller.runner.run(act())
    else:
        assert isinstance(caller.bind, Engine)
        for number, end in ((1, "commit"), (2, "rollback")):
            with Session(caller.bind) as session:
                given: Any = {"session": session} if passed == "by name" else {}
                placed(number, *(() if given else (session,)), **given)
                assert accounts(engine) == {1} - {number}
                getattr(session, end)()
    assert (accounts(engine), messages(engine)) == ({1}, [1])


def test_transactional_functions_call_each_other(outbox: Outbox, engine: Engine) -> None:
    """A transactional function that passes its session on shares one transaction with the called one."""

    @outbox.transactional(topic="t")
    def inner(number: int, session: Session = INJECTED) -> dict[str, int]:
        session.add(Account(id=number, owner=str(number)))
        if number < 0:
            raise Declined
        return {"number": number}

    @outbox.transactional(topic="t")
    def outer(number: int, session: Session = INJECTED) -> dict[str, int]:
        inner(10 * number, session)
        inner(100 * number, session=session)
        return {"number": number}

    outer(1)
    with pytest.raises(Declined):
        outer(-1)
    assert (accounts(engine), messages(engine)) == ({10, 100}, [10, 100, 1])


@pytest.mark.parametrize("explicit", [None, INJECTED], ids=["None", "INJECTED"])
@pytest.mark.parametrize("by_position", [True, False])
def test_no_session_given_in_so_many_words(explicit: Any, by_position: bool, outbox: Outbox, engine: Engine) -> None:
    """Passing None or INJECTED, by name or position, is the same as passing nothing."""

    @outbox.transactional(topic="t")
    def place(number: int, session: Session = INJECTED) -> dict[str, int]:
        session.execute(insert(change).values(number=number))
        return {"number": number}

    place(1, explicit) if by_position else place(1, session=explicit)
    assert (changes(engine), messages(engine)) == ({1}, [1])


def test_session_anywhere_among_the_parameters(outbox: Outbox, engine: Engine) -> None:
    """The session's parameter may come first, be positional-only or keyword-only, and have any name."""

    class Service:
        @outbox.transactional(topic="t")
        def first(self, session: Session, number: int) -> dict[str, int]:
            session.execute(insert(change).values(number=number))
            return {"number": number}

        @outbox.transactional(topic="t")
        def second(self, number: int, db: Session = INJECTED, /, **more: int) -> dict[str, int]:
            db.execute(insert(change).values(number=number))
            return {"number": number, **more}

        @outbox.transactional(topic="t")
        def third(self, *numbers: int, db: Session = INJECTED) -> dict[str, int]:
            db.execute(insert(change).values(number=numbers[0]))
            return {"number": numbers[0]}

    service: Any = Service()
    service.first(number=1)
    service.second(2, more=9)
    service.third(3, 4)
    assert (changes(engine), messages(engine)) == ({1, 2, 3}, [1, 2, 3])
    with pytest.raises(TypeError, match="number"):
        service.first()
    with pytest.raises(TypeError, match="unexpected"):
        service.third(5, nope=1)


def test_own_session_factory(engine: Engine) -> None:
    """The sessions are made by the factory that the Outbox was given, with its class and options."""

    class Own(Session):
        pass

    outbox = Outbox(sessionmaker(engine, class_=Own, info={"tenant": 7}), settings=Settings())

    @outbox.transactional(topic="t")
    def place(session: Session = INJECTED) -> dict[str, int]:
        assert isinstance(session, Own)
        return {"number": session.info["tenant"]}

    place()
    assert messages(engine) == [7]


# --- a function that begins with its session ------------------------------------------------------------------


@pytest.mark.parametrize("decorator", ["transactional", "two_phase"])
def test_a_leading_session_is_left_out_by_callers(decorator: str, caller: Caller, engine: Engine) -> None:
    """It is injected, whatever its name; the signature that callers see begins after it."""

    def place(db: Session, number: int, *, note: str = "") -> dict[str, Any]:
        db.execute(insert(change).values(number=number))
        return {"number": number, "note": note}

    async def place_async(db: AsyncSession, number: int, *, note: str = "") -> dict[str, Any]:
        await db.execute(insert(change).values(number=number))
        return {"number": number, "note": note}

    decorated = getattr(caller.outbox, decorator)(topic="t")(place_async if caller.asynchronous else place)
    assert list(inspect.signature(decorated).parameters) == ["number", "note"]
    assert inspect.iscoroutinefunction(decorated) is caller.asynchronous
    placed = caller.sync(decorated)
    assert placed(1, note="a") == {"number": 1, "note": "a"}
    assert placed(number=2) == {"number": 2, "note": ""}
    assert changes(engine) == {1, 2}
    assert len(messages(engine)) == 2
    with pytest.raises(TypeError):
        placed(1, 2)


def test_a_leading_session_within_the_callers_transaction(caller: Caller, engine: Engine) -> None:
    """`within` joins, and so does a session in its place or by its name; stacked, both send."""

    def place(session: Session, number: int) -> dict[str, int]:
        session.execute(insert(change).values(number=number))
        return {"number": number}

    async def place_async(session: AsyncSession, number: int) -> dict[str, int]:
        await session.execute(insert(change).values(number=number))
        return {"number": number}

    inner = caller.outbox.transactional(topic="t")(place_async if caller.asynchronous else place)
    decorated: Any = caller.outbox.transactional(topic="u")(inner)

    def joined(session: Any) -> list[Any]:
        return [decorated.within(session, 1), decorated(session, 2), decorated(3, session=session)]

    async def joined_async() -> None:
        assert isinstance(caller.bind, AsyncEngine)
        for commits in (False, True):
            async with AsyncSession(caller.bind) as session:
                for each in joined(session):
                    await each
                await (session.commit() if commits else session.rollback())

    if caller.runner is not None:
        caller.runner.run(joined_async())
    else:
        assert isinstance(caller.bind, Engine)
        for commits in (False, True):
            with Session(caller.bind) as session:
                joined(session)
                (session.commit if commits else session.rollback)()
    assert changes(engine) == {1, 2, 3}
    assert sorted(half.topic for half in halves(engine)) == ["t", "t", "t", "u", "u", "u"]


# --- what decorating leaves as it was ------------------------------------------------------------------------


@pytest.mark.parametrize("decorator", ["transactional", "two_phase"])
def test_function_stays_itself(decorator: str, caller: Caller) -> None:
    """Name, module, docstring, annotations, signature, kind and attributes are those of the function."""
    decorate = getattr(caller.outbox, decorator)(topic="t")

    def place(order: int, *lines: str, note: str = "", session: Session = INJECTED) -> dict[str, int]:
        """Place an order."""
        return {"order": order}

    async def place_async(order: int, *lines: str, note: str = "", session: AsyncSession = INJECTED) -> dict[str, int]:
        """Place an order."""
        return {"order": order}

    function: Any = place_async if caller.asynchronous else place
    function.marker = "kept"
    decorated = decorate(function)
    assert inspect.signature(decorated) == inspect.signature(function)
    assert inspect.iscoroutinefunction(decorated) is caller.asynchronous
    for name in functools.WRAPPER_ASSIGNMENTS:
        assert getattr(decorated, name, None) == getattr(function, name, None)
    assert decorated.marker == "kept"
    assert inspect.unwrap(decorated) is function


@pytest.mark.parametrize("decorator", ["transactional", "two_phase"])
def test_function_without_a_session(decorator: str, outbox: Outbox) -> None:
    """A function that couldn't take its session is refused when it is decorated, by its name."""

    def nowhere(order: int) -> None: ...

    def twice(one: Session = INJECTED, two: Session = INJECTED) -> None: ...

    for function in (nowhere, twice):
        with pytest.raises(InvalidHandler, match=rf"@{decorator}: .*{function.__name__} must take its session in one"):
            getattr(outbox, decorator)(topic="t")(function)


@pytest.mark.parametrize("decorator", ["transactional", "two_phase"])
def test_topic_is_checked_at_once(decorator: str, outbox: Outbox) -> None:
    """A topic that isn't a name is refused when the decorator is made, not at the first call."""
    with pytest.raises(InvalidMessage, match="topic 'a b'"):
        getattr(outbox, decorator)(topic="a b")


@pytest.mark.parametrize("decorator", ["transactional", "two_phase"])
def test_wrong_kind_of_function(decorator: str, caller: Caller) -> None:
    """A sync function on an AsyncEngine, or the other way round, is refused with what to write instead."""

    def place(session: Session = INJECTED) -> None: ...

    async def place_async(session: AsyncSession = INJECTED) -> None: ...

    decorate = getattr(caller.outbox, decorator)(topic="t")
    with pytest.raises(TransactionRequired, match="'async def'" if caller.asynchronous else "plain 'def'"):
        if caller.asynchronous:
            decorate(place)()
        else:
            asyncio.run(decorate(place_async)())
