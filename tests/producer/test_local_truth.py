"""What a `@two_phase` function raised is stored with its half, and the caller learns message and decision."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import pytest
from psycopg import OperationalError
from sqlalchemy import Engine, NullPool, create_engine, event, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox import Outbox, Outgoing, Resolution, Settings, outcomes, testing
from outbox.database.decision import decide
from outbox.errors import AlreadyCommitted, AlreadyRolledBack, InvalidMessage
from outbox.message.declared import TwoPhaseDecorator
from outbox.producer.decorators import CallOutcome
from tests.kit import Tables
from tests.producer.bank import changes, halves, idle_in_transaction
from tests.producer.caller import Caller, Crash, Declined


def errors(engine: Engine) -> list[tuple[UUID, str, str]]:
    """Return what is stored of functions that raised: the half, the kind, and the first line."""
    rows = Tables(engine).rows("SELECT half_id, error_kind, error FROM outbox.half_error ORDER BY raised_at")
    return [(half_id, kind, error.partition("\n")[0]) for half_id, kind, error in rows]


def unfenced(decorate: TwoPhaseDecorator, body: Callable[..., Any]) -> Callable[[int], Any]:
    """Decorate a function that has no session."""

    def charge(number: int) -> Any:
        return body()

    return decorate(charge)


def raising(error: BaseException) -> Callable[..., None]:
    """Return the body of a function that raises."""

    def fail(*_: Any) -> None:
        raise error

    return fail


def the_call(calls: list[CallOutcome]) -> tuple[UUID | None, Resolution | None]:
    """Return message and decision of the only call."""
    (call,) = calls
    assert call.topic == "t"
    return call.message_id, call.resolution


@pytest.mark.parametrize("fenced", [True, False])
@pytest.mark.parametrize("rollback_on", [(Declined,), ()])
def test_what_was_raised_is_stored(caller: Caller, engine: Engine, fenced: bool, rollback_on: Any) -> None:
    """With the rollback, or alone where the half is left to the check; and the caller learns which of them it was."""
    decorate = caller.outbox.two_phase(topic="t", fenced=fenced, rollback_on=rollback_on)
    if fenced:
        pay = caller.decorate(decorate, raising(Declined("no money")))
    elif caller.asynchronous:

        async def charge(number: int) -> None:
            raise Declined("no money")

        pay = caller.sync(decorate(charge))
    else:
        pay = unfenced(decorate, raising(Declined("no money")))
    with outcomes() as calls, pytest.raises(Declined):
        pay(1)
    (half,), ((half_id, kind, error),) = halves(engine), errors(engine)
    assert (half_id, error) == (half.id, "tests.producer.caller.Declined: no money")
    assert kind.startswith("Declined in test_local_truth.py:")
    assert half.resolution == ("rollback" if rollback_on else None)
    assert the_call(calls) == (half.id, Resolution.ROLLBACK if rollback_on else Resolution.UNKNOWN)


def test_a_call_that_returns_stores_nothing(caller: Caller, engine: Engine) -> None:
    """Its outcome is the commit."""
    pay = caller.decorate(caller.outbox.two_phase(topic="t"), lambda *_: "paid")
    with outcomes() as calls:
        assert pay(1) == "paid"
    (half,) = halves(engine)
    assert (the_call(calls), errors(engine)) == ((half.id, Resolution.COMMIT), [])


def test_a_commit_that_fails_is_stored(caller: Caller, engine: Engine, deferred: Engine) -> None:
    """What the COMMIT of the business change refused is the error of the call, too."""
    pay = caller.decorate(caller.outbox.two_phase(topic="t"), lambda *_: None)
    with outcomes() as calls, pytest.raises(Exception, match="negative"):
        pay(-1)
    ((half_id, _, error),) = errors(deferred)
    assert the_call(calls) == (half_id, Resolution.UNKNOWN)
    assert "negative" in error


@pytest.mark.parametrize(
    ("resolution", "raised"), [(Resolution.COMMIT, AlreadyCommitted), (Resolution.ROLLBACK, AlreadyRolledBack)]
)
def test_a_decision_of_others_is_the_outcome(
    resolution: Resolution, raised: type[Exception], caller: Caller, engine: Engine
) -> None:
    """The late COMMIT fails on it, and takes the change along; that is no error of the function."""

    def meanwhile(*_: Any) -> None:
        with engine.begin() as connection:
            decide(connection, "outbox", halves(engine)[0].id, resolution, "operator")

    pay = caller.decorate(caller.outbox.two_phase(topic="t"), meanwhile)
    with outcomes() as calls, pytest.raises(raised, match="by the operator"):
        pay(1)
    assert (the_call(calls), errors(engine)) == ((halves(engine)[0].id, resolution), [])
    assert (changes(engine), idle_in_transaction(engine)) == (set(), 0)


def test_a_rollback_that_comes_too_late_keeps_the_error(
    caller: Caller, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator has committed what the function then refuses: the caller gets the error with a note; it is kept."""

    def refuse(*_: Any) -> None:
        with engine.begin() as connection:
            decide(connection, "outbox", halves(engine)[0].id, Resolution.COMMIT, "operator")
        raise Declined("no money")

    pay = caller.decorate(caller.outbox.two_phase(topic="t", rollback_on=(Declined,)), refuse)
    with outcomes() as calls, pytest.raises(Declined, match="no money") as caught:
        pay(1)
    ((half_id, _, error),) = errors(engine)
    assert error.endswith("no money")
    assert the_call(calls) == (half_id, Resolution.COMMIT)
    (note,) = caught.value.__notes__
    assert str(half_id) in note
    assert "already committed" in note
    assert f"half message {half_id} was not rolled back" in caplog.text
    assert changes(engine) == set()


def test_decisions_about_other_halves_are_errors(caller: Caller, engine: Engine, outbox: Outbox) -> None:
    """A function that trips over another half's decision has failed; its own half is undecided."""
    with engine.begin() as connection:
        other = outbox.prepare(connection, "other", {})
    outbox.rollback(other)
    pay = caller.decorate(caller.outbox.two_phase(topic="t"), raising(AlreadyRolledBack(other, "producer")))
    with outcomes() as calls, pytest.raises(AlreadyRolledBack):
        pay(1)
    ((half_id, _, error),) = errors(engine)
    assert the_call(calls) == (half_id, Resolution.UNKNOWN)
    assert str(other) in error


@pytest.mark.parametrize("rollback_on", [(Crash,), ()])
def test_what_no_handler_catches(caller: Caller, engine: Engine, rollback_on: Any) -> None:
    """It is stored with the rollback that it stands for, and else passes at once: the process may be ending."""
    pay = caller.decorate(caller.outbox.two_phase(topic="t", rollback_on=rollback_on), raising(Crash("killed")))
    with pytest.raises(Crash):
        pay(1)
    assert [error.endswith("killed") for *_, error in errors(engine)] == ([True] if rollback_on else [])


@pytest.fixture
def refused(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Engine]:
    """An engine whose database lacks the table, as before its upgrade; or whose role may not write there."""
    if request.param == "missing":
        tables = Tables(engine)
        tables.run("ALTER TABLE outbox.half_error RENAME TO half_error_away")
        yield engine
        tables.run("ALTER TABLE outbox.half_error_away RENAME TO half_error")
        return
    role = "truthful"
    with engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN PASSWORD '{role}'"))
        connection.execute(text(f"GRANT USAGE ON SCHEMA outbox TO {role}"))
        connection.execute(text(f"GRANT ALL ON ALL TABLES IN SCHEMA outbox TO {role}"))
        connection.execute(text(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA outbox TO {role}"))
        connection.execute(text(f"REVOKE ALL ON outbox.half_error FROM {role}"))
    own = create_engine(engine.url.set(username=role, password=role))
    yield own
    own.dispose()
    with engine.begin() as connection:
        connection.execute(text(f"DROP OWNED BY {role}"))
        connection.execute(text(f"DROP ROLE {role}"))


@pytest.mark.parametrize("refused", ["missing", "may not"], indirect=True)
def test_the_rollback_goes_before_its_reason(refused: Engine, engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Where the reason can't be stored, the half is rolled back all the same, and the log says so."""
    outbox = Outbox(refused, settings=Settings())
    for rollback_on in ((Declined,), ()):
        decorate = outbox.two_phase(topic="t", fenced=False, rollback_on=rollback_on)
        pay = unfenced(decorate, raising(Declined("no money")))
        with pytest.raises(Declined) as caught:
            pay(1)
        assert not getattr(caught.value, "__notes__", [])
    assert sorted(str(half.resolution) for half in halves(engine)) == ["None", "rollback"]
    assert caplog.text.count("could not be stored with it") == 2


def test_stored_in_any_encoding(engine: Engine) -> None:
    """What the client's encoding has no code for is written out; NUL and broken surrogates go, and it has a bound."""
    narrow = create_engine(engine.url, client_encoding="latin1")
    decorate = Outbox(narrow, settings=Settings()).two_phase(topic="t", fenced=False)
    pay = unfenced(decorate, raising(Declined("no €\0\ud800" + "x" * 9000)))
    with pytest.raises(Declined):
        pay(1)
    narrow.dispose()
    ((_, kind, error),) = errors(engine)
    assert r"no \u20ac\ud800xxx" in error
    assert (len(kind) <= 200, len(error) <= 2000) == (True, True)


def test_a_secret_that_pydantic_quotes_is_not_stored(engine: Engine, outbox: Outbox) -> None:
    """As in the errors of handlers."""
    from pydantic import BaseModel

    secret = "-".join(["4111", "secret"])

    class Card(BaseModel):
        number: int

    @outbox.two_phase(topic="t", rollback_on=(ValueError,), fenced=False, body=dict)
    def pay() -> None:
        Card.model_validate({"number": secret})

    with pytest.raises(ValueError, match="4111"):
        pay()
    assert "4111" not in Tables(engine).value("SELECT error FROM outbox.half_error")
    assert "number" in Tables(engine).value("SELECT error FROM outbox.half_error")


def test_the_database_is_away(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """The function's own exception reaches the caller; that nothing could be stored is one record."""
    lossy = create_engine(engine.url, poolclass=NullPool)
    outbox = Outbox(lossy, settings=Settings())

    def refuse(*_: Any) -> None:
        raise OperationalError("no route to host")

    @outbox.two_phase(topic="t", rollback_on=(Declined,))
    def pay(session: Session) -> None:
        session.connection()
        event.listen(lossy, "do_connect", refuse)
        raise RuntimeError("its own")

    with outcomes() as calls, pytest.raises(RuntimeError, match="its own"):
        pay()
    assert the_call(calls) == (halves(engine)[0].id, Resolution.UNKNOWN)
    assert caplog.text.count("could not be stored with it") == 1


# --- outcomes -----------------------------------------------------------------------------------------------


def test_outcomes_of_nested_calls(caller: Caller, engine: Engine) -> None:
    """In the order in which they began, whatever comes of each; blocks may be nested, too."""
    asynchronous = caller.asynchronous
    outbox = caller.outbox

    @outbox.transactional(topic="t")
    def inner(session: Session) -> dict[str, int]:
        return {"n": 1}

    @outbox.transactional(topic="t")
    async def inner_async(session: Any) -> dict[str, int]:
        return {"n": 1}

    if asynchronous:

        @outbox.two_phase(topic="t", rollback_on=(Declined,))
        async def outer_async(session: Any, number: int) -> None:
            with outcomes() as inside:
                await inner_async()
            assert [call.resolution for call in inside] == [None]
            raise Declined

        outer = caller.sync(outer_async)
    else:

        @outbox.two_phase(topic="t", rollback_on=(Declined,))
        def outer_sync(session: Session, number: int) -> None:
            with outcomes() as inside:
                inner()
            assert [call.resolution for call in inside] == [None]
            raise Declined

        outer = outer_sync
    with outcomes() as calls, pytest.raises(Declined):
        outer(1)
    assert [call.function.rpartition(".")[2].partition("_")[0] for call in calls] == ["outer", "inner"]
    assert [call.resolution for call in calls] == [Resolution.ROLLBACK, None]
    assert calls[0].message_id == halves(engine)[0].id
    assert calls[1].message_id is not None  # of what vanished with the transaction of the first


def test_outcomes_of_transactional(engine: Engine, outbox: Outbox) -> None:
    """The message that it sent, and the COMMIT of its own transaction; nothing where it sent nothing, or failed."""

    @outbox.transactional(topic="t")
    def order(session: Session, content: Any) -> Any:
        if content == "fail":
            raise Declined
        return content

    with outcomes() as calls:
        order({"n": 1})
        order(Outgoing({"n": 2}))
        order(None)
        with pytest.raises(Declined):
            order("fail")
    assert [(call.message_id, call.resolution) for call in calls] == [
        *((half.id, Resolution.COMMIT) for half in sorted(halves(engine), key=lambda half: half.body["n"])),
        (None, Resolution.COMMIT),
        (None, None),
    ]


def test_outcomes_of_tasks(caller: Caller, engine: Engine) -> None:
    """Tasks that begin in a block tell it their calls; those of other blocks beside it don't."""
    if caller.runner is None:
        pytest.skip("for async functions")

    @caller.outbox.two_phase(topic="t")
    async def pay(session: AsyncSession, number: int) -> int:
        return number

    async def one(number: int) -> list[CallOutcome]:
        with outcomes() as calls:
            await pay(number)
        return calls

    async def both() -> tuple[list[CallOutcome], list[list[CallOutcome]]]:
        with outcomes() as calls:
            own = list(await asyncio.gather(one(1), one(2)))
        return calls, own

    calls, own = caller.runner.run(both())
    assert {call.message_id for call in calls} == {half.id for half in halves(engine)}
    assert [len(each) for each in own] == [1, 1]


def test_no_half_no_message(engine: Engine, outbox: Outbox) -> None:
    """A call whose half was refused has neither."""
    pay = unfenced(outbox.two_phase(topic="t", fenced=False, body=lambda number: object()), lambda: None)
    with outcomes() as calls, pytest.raises(InvalidMessage):
        pay(1)
    assert the_call(calls) == (None, None)


def test_outcomes_where_sending_is_captured(engine: Engine, outbox: Outbox) -> None:
    """In a test without a database the outcomes are the same, and nothing is stored."""

    @outbox.two_phase(topic="t", rollback_on=(Declined,), fenced=False)
    def pay(error: str) -> None:
        if error:
            raise {"known": Declined, "unknown": RuntimeError}[error]

    with testing.capture(outbox) as messages, outcomes() as calls:
        for error, kind in {"": None, "known": Declined, "unknown": RuntimeError}.items():
            if kind is None:
                pay(error)
            else:
                with pytest.raises(kind):
                    pay(error)
    assert [call.resolution for call in calls] == [Resolution.COMMIT, Resolution.ROLLBACK, Resolution.UNKNOWN]
    assert [call.message_id for call in calls] == [message.id for message in messages]
    assert (halves(engine), errors(engine)) == ([], [])
