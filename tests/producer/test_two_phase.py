"""`@two_phase`: what the function returns or raises decides its half message, with a fence and without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Connection, Engine, create_engine, insert, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from outbox import INJECTED, Outbox, Resolution, Settings
from outbox.database.decision import decide, fence_key
from outbox.errors import AlreadyRolledBack, InvalidHandler, InvalidMessage
from tests.producer.bank import Account, change, changes, halves, idle_in_transaction, op_of
from tests.producer.caller import Caller, Crash, Declined


def the_half(engine: Engine) -> Any:
    """Return the only half message there is."""
    (half,) = halves(engine)
    return half


def fence_is_free(engine: Engine, half_id: UUID) -> bool:
    """Tell whether somebody else could take the fence of a half now."""
    with engine.connect() as connection:
        return bool(
            connection.scalar(text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": fence_key("outbox", half_id)})
        )


# --- with a fence ---------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("known", [True, False])
def test_two_phase_raises(error: type[BaseException], known: bool, caller: Caller, engine: Engine) -> None:
    """The change is rolled back, and the exception reaches the caller as it was.

    One of `rollback_on` rolls back the half, too. Any other says nothing about it: the half waits for its check.
    """
    raised = error("no")

    def fail(*_: Any) -> None:
        raise raised

    rollback_on = (error,) if known else (LookupError,)
    with pytest.raises(error) as caught:
        caller.decorate(caller.outbox.two_phase(topic="t", rollback_on=rollback_on), fail)(1)
    assert caught.value is raised
    assert (changes(engine), idle_in_transaction(engine)) == (set(), 0)
    half = the_half(engine)
    told = half.resolution, half.decided_by, half.waits
    assert told == (("rollback", "producer", False) if known else (None, None, True))
    assert known or (half.fenced and fence_is_free(engine, half.id))


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


def test_fence_stands_while_the_function_runs(caller: Caller, engine: Engine) -> None:
    """From the first statement of the business transaction to its end nobody else gets the lock on the half."""
    free: list[bool] = []
    pay = caller.decorate(
        caller.outbox.two_phase(topic="t"), lambda *_: free.append(fence_is_free(engine, the_half(engine).id))
    )
    pay(1)
    free.append(fence_is_free(engine, the_half(engine).id))
    assert free == [False, True]


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


# --- without a fence ------------------------------------------------------------------------------------


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
