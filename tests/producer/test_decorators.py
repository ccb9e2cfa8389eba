"""`@transactional` and `@two_phase`: what the function returns or raises decides, and the function stays itself."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import pydantic
import pytest
from sqlalchemy import Connection, Engine, create_engine, insert, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from outbox import INJECTED, Outbox, Outgoing, Resolution, Settings
from outbox.database.decision import decide, fence_key
from outbox.errors import AlreadyCommitted, AlreadyRolledBack, InvalidHandler, InvalidMessage, TransactionRequired
from tests.producer.bank import Account, accounts, change, changes, halves, idle_in_transaction, messages, op_of


class Declined(Exception):
    """An outcome that is known: nothing happened."""


class Crash(BaseException):
    """What no `except Exception` catches."""


@dataclasses.dataclass
class Placed:
    number: int


class PlacedModel(pydantic.BaseModel):
    number: int


class Caller:
    """Decorated functions, sync or async, called alike."""

    def __init__(self, outbox: Outbox, bind: Engine | AsyncEngine, asynchronous: bool) -> None:
        self.outbox = outbox
        self.bind = bind
        self.asynchronous = asynchronous
        self.runner = asyncio.Runner() if asynchronous else None

    def decorate(self, decorator: Any, body: Callable[[Any, int], Any]) -> Callable[..., Any]:
        """Decorate a function of a session and a number that does ``body``; return it, callable from sync code."""
        if self.runner is None:

            def function(number: int, session: Session = INJECTED) -> Any:
                session.execute(insert(change).values(number=number))
                return body(session, number)

            return decorator(function)  # type: ignore[no-any-return]

        async def async_function(number: int, session: AsyncSession = INJECTED) -> Any:
            await session.execute(insert(change).values(number=number))
            return body(session, number)

        return self.sync(decorator(async_function))

    def sync(self, function: Any) -> Callable[..., Any]:
        """Return an async function as one that can be called here."""
        runner = self.runner
        if runner is None:
            return function  # type: ignore[no-any-return]
        return lambda *args, **kwargs: runner.run(function(*args, **kwargs))


@pytest.fixture(params=["sync", "async"])
def caller(request: pytest.FixtureRequest, url: str, engine: Engine) -> Iterator[Caller]:
    """Sync functions on an Engine, and async ones on an AsyncEngine."""
    if request.param == "sync":
        yield Caller(Outbox(engine, settings=Settings()), engine, asynchronous=False)
        return
    async_engine = create_async_engine(url)
    caller = Caller(Outbox(async_engine, settings=Settings()), async_engine, asynchronous=True)
    yield caller
    assert caller.runner
    caller.runner.run(async_engine.dispose())
    caller.runner.close()


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


# --- @two_phase, fenced ------------------------------------------------------------------------------------


def the_half(engine: Engine) -> Any:
    """Return the only half message there is."""
    (half,) = halves(engine)
    return half


def test_two_phase_returned(caller: Caller, engine: Engine) -> None:
    """Returned: the op is written with the change, the result reaches the caller, nothing waits for a check."""
    seen: list[Any] = []

    def body(_: Any, number: int) -> str:
        seen.append(the_half(engine))
        return f"result {number}"

    pay = caller.decorate(caller.outbox.two_phase(topic="t", key=lambda body: str(body["number"]), tag="g"), body)
    assert pay(1) == "result 1"
    (before,), after = seen, the_half(engine)
    assert (before.resolution, before.waits, before.fenced, before.body) == (None, True, True, {"number": 1})
    assert (after.id, after.resolution, after.decided_by, after.waits) == (before.id, "commit", "producer", False)
    assert (after.key, after.tag, changes(engine)) == ("1", "g", {1})


def test_two_phase_body_from_the_arguments(caller: Caller, engine: Engine) -> None:
    """The body is made of the arguments before the function runs, without the session."""
    pay = caller.decorate(
        caller.outbox.two_phase(topic="t", body=lambda number: {"number": 10 * number}), lambda *_: None
    )
    pay(number=1)
    assert the_half(engine).body == {"number": 10}


def test_two_phase_commit_fails_with_the_change(caller: Caller, engine: Engine) -> None:
    """The op is in the transaction of the change: when its COMMIT fails, the half stays undecided."""
    pay = caller.decorate(
        caller.outbox.two_phase(topic="t"), lambda session, number: session.add(Account(id=1, owner="x"))
    )
    with engine.begin() as connection:
        connection.execute(insert(Account).values(id=1, owner="taken"))
    with pytest.raises(IntegrityError):
        pay(1)
    half = the_half(engine)
    assert (half.resolution, half.waits, changes(engine)) == (None, True, set())


@pytest.mark.parametrize("error", [Declined, Crash])
def test_two_phase_raised_a_known_outcome(error: type[BaseException], caller: Caller, engine: Engine) -> None:
    """One of `rollback_on`: the change is rolled back, the half too, and the exception reaches the caller as it was."""
    raised = error("no")

    def fail(*_: Any) -> None:
        raise raised

    with pytest.raises(error) as caught:
        caller.decorate(caller.outbox.two_phase(topic="t", rollback_on=(error,)), fail)(1)
    assert caught.value is raised
    half = the_half(engine)
    assert (half.resolution, half.decided_by, half.waits) == ("rollback", "producer", False)
    assert (changes(engine), idle_in_transaction(engine)) == (set(), 0)


@pytest.mark.parametrize("error", [Declined, Crash])
def test_two_phase_raised_something_else(error: type[BaseException], caller: Caller, engine: Engine) -> None:
    """Any other exception: unknown. The half waits for its check, the change is gone, the exception is the original."""
    raised = error("no")

    def fail(*_: Any) -> None:
        raise raised

    with pytest.raises(error) as caught:
        caller.decorate(caller.outbox.two_phase(topic="t", rollback_on=(LookupError,)), fail)(1)
    assert caught.value is raised
    half = the_half(engine)
    assert (half.resolution, half.waits, half.fenced, changes(engine)) == (None, True, True, set())
    assert fence_is_free(engine, half.id)


def test_two_phase_refuses_a_session(caller: Caller, engine: Engine) -> None:
    """It must own its transaction, so a given session is refused before anything is written."""
    pay = caller.decorate(caller.outbox.two_phase(topic="t"), lambda *_: None)
    given: Any = AsyncSession(caller.bind) if isinstance(caller.bind, AsyncEngine) else Session(caller.bind)
    with pytest.raises(InvalidHandler, match="was given a session; it must own its transaction"):
        pay(1, session=given)
    with pytest.raises(InvalidHandler):
        pay(1, given)
    pay(2, None)
    assert [half.body for half in halves(engine)] == [{"number": 2}]


def test_two_phase_body_that_cannot_be_sent(caller: Caller, engine: Engine) -> None:
    """When the half can't be prepared, the function isn't run."""
    ran: list[int] = []
    pay = caller.decorate(
        caller.outbox.two_phase(topic="t", body=lambda number: object()), lambda _, number: ran.append(number)
    )
    with pytest.raises(InvalidMessage):
        pay(1)
    assert (ran, halves(engine)) == ([], [])


def test_two_phase_missing_argument(caller: Caller, engine: Engine) -> None:
    """A call that doesn't fit the signature is a TypeError before anything is written."""
    pay = caller.decorate(caller.outbox.two_phase(topic="t"), lambda *_: None)
    with pytest.raises(TypeError, match="number"):
        pay()
    assert halves(engine) == []


def fence_is_free(engine: Engine, half_id: UUID) -> bool:
    """Tell whether somebody else could take the fence of a half now."""
    with engine.connect() as connection:
        return bool(
            connection.scalar(text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": fence_key("outbox", half_id)})
        )


def test_fence_stands_while_the_function_runs(caller: Caller, engine: Engine) -> None:
    """From the first statement of the business transaction to its end nobody else gets the lock on the half."""
    free: list[bool] = []
    pay = caller.decorate(
        caller.outbox.two_phase(topic="t"), lambda *_: free.append(fence_is_free(engine, the_half(engine).id))
    )
    pay(1)
    free.append(fence_is_free(engine, the_half(engine).id))
    assert free == [False, True]


def test_late_commit_fails(caller: Caller, engine: Engine) -> None:
    """When somebody rolled the half back while the function ran, its commit fails and the change is rolled back."""

    def meanwhile(*_: Any) -> None:
        with engine.begin() as connection:
            decide(connection, "outbox", the_half(engine).id, Resolution.ROLLBACK, "check")

    with pytest.raises(AlreadyRolledBack, match="by the check"):
        caller.decorate(caller.outbox.two_phase(topic="t"), meanwhile)(1)
    assert (changes(engine), the_half(engine).resolution) == (set(), "rollback")
    assert idle_in_transaction(engine) == 0


def test_late_commit_of_a_committed_half_fails_too(caller: Caller, engine: Engine) -> None:
    """An operator who committed the half meanwhile has decided it; the change isn't made a second time beside it."""

    def meanwhile(*_: Any) -> None:
        with engine.begin() as connection:
            decide(connection, "outbox", the_half(engine).id, Resolution.COMMIT, "operator")

    with pytest.raises(AlreadyCommitted, match="by the operator"):
        caller.decorate(caller.outbox.two_phase(topic="t"), meanwhile)(1)
    assert changes(engine) == set()


def test_function_is_not_run_when_the_half_is_decided_already(
    caller: Caller, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half that was rolled back before the business transaction began stops it at once."""
    from outbox.producer import decorators

    ran: list[int] = []
    take = decorators._take_fence

    def slow_start(session: Session, schema: str, half_id: UUID) -> None:
        with engine.begin() as connection:
            decide(connection, schema, half_id, Resolution.ROLLBACK, "check")
        take(session, schema, half_id)

    monkeypatch.setattr(decorators, "_take_fence", slow_start)
    with pytest.raises(AlreadyRolledBack, match="by the check"):
        caller.decorate(caller.outbox.two_phase(topic="t"), lambda _, number: ran.append(number))(1)
    assert (ran, changes(engine)) == ([], set())


def test_rollback_that_fails_does_not_hide_the_exception(
    caller: Caller, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """The function's own exception reaches the caller with a note, when the half couldn't be rolled back."""

    def fail(*_: Any) -> None:
        with engine.begin() as connection:
            decide(connection, "outbox", the_half(engine).id, Resolution.COMMIT, "operator")
        raise Declined("no money")

    with pytest.raises(Declined, match="no money") as caught:
        caller.decorate(caller.outbox.two_phase(topic="t", rollback_on=(Declined,)), fail)(1)
    (note,) = caught.value.__notes__
    assert str(the_half(engine).id) in note
    assert "already committed" in note
    assert f"half message {the_half(engine).id} was not rolled back" in caplog.text
    assert changes(engine) == set()


@pytest.mark.parametrize("error", [Declined, RuntimeError, Crash])
def test_lost_connection_does_not_hide_the_exception(
    error: type[BaseException], caller: Caller, engine: Engine
) -> None:
    """The connection is lost while the function raises: its own exception reaches the caller, and still decides."""

    def body(session: Any, number: int) -> Any:
        with engine.begin() as connection:
            connection.execute(
                text(
                    "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND state = 'idle in transaction'"
                )
            )
        raise error("its own")

    function = caller.decorate(caller.outbox.two_phase(topic="t", rollback_on=(Declined,)), body)
    with pytest.raises(error, match="its own"):
        function(1)
    (half,) = halves(engine)
    assert half.resolution == ("rollback" if error is Declined else None)
    assert changes(engine) == set()


def test_fence_is_per_half_and_schema() -> None:
    """Fences of different halves and schemas don't get in each other's way, and stay the same everywhere."""
    one, two = UUID(int=1), UUID(int=2)
    keys = {fence_key(schema, half) for schema in ("outbox", "second") for half in (one, two)}
    assert len(keys) == 4
    assert all(-(2**63) <= key < 2**63 for key in keys)
    assert fence_key("outbox", one) == fence_key("outbox", UUID(int=1))


# --- @two_phase, unfenced ----------------------------------------------------------------------------------


def unfenced(caller: Caller, body: Callable[[str], Any], **options: Any) -> Callable[..., Any]:
    """Decorate a function of a card that does ``body``, without a fence."""
    decorate = caller.outbox.two_phase(topic="t", fenced=False, **options)
    if not caller.asynchronous:

        @decorate
        def charge(card: str, amount: int = 5) -> Any:
            return body(card)

        return charge

    @decorate
    async def charge_async(card: str, amount: int = 5) -> Any:
        return body(card)

    return caller.sync(charge_async)


def test_unfenced_returned(caller: Caller, engine: Engine) -> None:
    """Without a fence the function takes no session, holds no transaction, and its return commits the half."""
    during: list[Any] = []

    def body(card: str) -> str:
        during.append(
            (idle_in_transaction(engine), the_half(engine).resolution, fence_is_free(engine, the_half(engine).id))
        )
        return card.upper()

    assert unfenced(caller, body, immunity=60)("visa") == "VISA"
    assert during == [(0, None, True)]
    half = the_half(engine)
    assert (half.body, half.resolution, half.waits) == ({"card": "visa", "amount": 5}, "commit", False)


@pytest.mark.parametrize(("rollback_on", "resolution"), [((Declined,), "rollback"), ((), None)])
def test_unfenced_raised(rollback_on: Any, resolution: str | None, caller: Caller, engine: Engine) -> None:
    """A known exception rolls back, any other leaves the half to a checker, which isn't told that a fence stood."""

    def fail(_: str) -> None:
        raise Declined

    with pytest.raises(Declined):
        unfenced(caller, fail, rollback_on=rollback_on)("visa")
    half = the_half(engine)
    assert (half.resolution, half.fenced) == (resolution, None if resolution else False)


def test_unfenced_success_is_never_rolled_back(caller: Caller, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rollback_on` is about the function: when only the decision fails after it returned, the half stays undecided."""
    from outbox.producer.producer import Producer

    decide_now = Producer.decide_now

    def lost(producer: Producer, session: Session, half_id: UUID, resolution: Resolution) -> Any:
        if resolution is Resolution.COMMIT:
            raise ConnectionError("the database went away")
        return decide_now(producer, session, half_id, resolution)

    monkeypatch.setattr(Producer, "decide_now", lost)
    with pytest.raises(ConnectionError):
        unfenced(caller, lambda card: card, rollback_on=(Exception,))("visa")
    half = the_half(engine)
    assert (half.resolution, half.waits) == (None, True)


def test_unfenced_decided_meanwhile(caller: Caller, engine: Engine) -> None:
    """A half that was rolled back while the function ran is told to the caller; one that was committed is fine."""

    def meanwhile(resolution: Resolution) -> Callable[[str], str]:
        def body(card: str) -> str:
            undecided = next(half for half in halves(engine) if half.resolution is None)
            with engine.begin() as connection:
                decide(connection, "outbox", undecided.id, resolution, "operator")
            return card

        return body

    assert unfenced(caller, meanwhile(Resolution.COMMIT))("visa") == "visa"
    with pytest.raises(AlreadyRolledBack, match="by the operator"):
        unfenced(caller, meanwhile(Resolution.ROLLBACK))("visa")


def test_two_phase_with_one_connection(url: str, engine: Engine) -> None:
    """A pool of one connection is enough: the phases don't need two at a time."""
    small = create_engine(url, pool_size=1, max_overflow=0, pool_timeout=5)
    outbox = Outbox(small, settings=Settings())

    @outbox.two_phase(topic="t", rollback_on=(Declined,))
    def pay(number: int, session: Session = INJECTED) -> None:
        connection: Connection = session.connection()
        connection.execute(insert(change).values(number=number))
        if number < 0:
            raise Declined

    pay(1)
    with pytest.raises(Declined):
        pay(-1)
    small.dispose()
    assert changes(engine) == {1}
    assert {op_of(engine, half.id) for half in halves(engine)} == {("commit", "producer"), ("rollback", "producer")}
