"""Prepared half messages: decided once, by whoever is first; everybody else waits, and is told."""

from __future__ import annotations

import asyncio
import datetime as dt
import enum
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, create_engine, insert, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import Decision, Outbox, Resolution, Settings
from outbox.database.decision import decide, decide_first
from outbox.errors import AlreadyCommitted, AlreadyDecided, AlreadyRolledBack, HalfNotFound, TransactionRequired
from outbox.message.model import uuid7
from outbox.text import process_name
from tests.kit import tries, wait_until
from tests.producer.bank import (
    KINDS,
    Databases,
    Kind,
    change,
    changes,
    count_of_checks,
    drive,
    halves,
    idle_in_transaction,
    leftovers,
    op_of,
    opened,
    pid_of,
    settle,
    waits_for_a_lock,
    write,
)

COMMITTED, ROLLED_BACK = ("commit", "producer"), ("rollback", "producer")


def prepared(engine: Engine, outbox: Outbox, number: int = 0) -> uuid.UUID:
    """Prepare a half in a transaction of its own."""
    with Session(engine) as session, session.begin():
        return outbox.prepare(session, "t", {"number": number})


# --- prepare ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_prepare_writes_a_half_without_an_op(kind: Kind, url: str, engine: Engine) -> None:
    """A prepared half commits with the change, waits for its check, and has no op; rolled back, it never was."""

    async def act(databases: Databases) -> None:
        outbox = Outbox(databases.engine_for(kind), settings=Settings(immunity=7))
        async with opened(kind, databases) as carrier:
            for number in (1, 2):
                await write(carrier, number)
                outbox.prepare(carrier, "t", {"number": number})
                await settle(carrier.commit() if number == 1 else carrier.rollback())

    drive(url, act)
    (half,) = halves(engine)
    assert (half.body, half.resolution, half.waits, half.fenced) == ({"number": 1}, None, True, False)
    assert dt.timedelta(seconds=6) < half.next_check_at - half.born_at < dt.timedelta(seconds=8)
    assert changes(engine) == {1}


class Topic(enum.StrEnum):
    T = "t"


class OwnDatetime(dt.datetime):
    pass


class OwnUUID(uuid.UUID):
    pass


def test_mixed_classes_in_one_transaction(engine: Engine) -> None:
    """Messages whose values are of different classes of the same kind go together in one statement."""
    outbox = Outbox(engine, settings=Settings(immunity=6))
    later = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)
    own = OwnDatetime(2030, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1)))
    with Session(engine) as session, session.begin():
        outbox.prepare(session, "t", b"{}", key="k", deliver_at=later)
        outbox.prepare(session, Topic.T, "{}", key=Topic.T, tag=Topic.T, deliver_at=own, immunity=2.5)
        outbox.prepare(session, "t", bytearray(b"{}"), id=OwnUUID(int=5), delay=3)
        outbox.prepare(session, "t", {}, id=uuid7(), delay=dt.timedelta(seconds=2.5), immunity=dt.timedelta(seconds=1))
        outbox.send(session, Topic.T, {}, tag="g", headers={Topic.T: Topic.T})
        outbox.send(session, "t", {})
    assert len(halves(engine)) == 6
    assert {half.topic for half in halves(engine)} == {"t"}


@pytest.mark.parametrize("number", [1, 2])
def test_delivery_is_stored(number: int, engine: Engine, outbox: Outbox) -> None:
    """A moment is stored as it is, a delay counts on the database's clock; alone or with other messages."""
    later = dt.datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=dt.timezone(dt.timedelta(hours=-5)))
    with Session(engine) as session, session.begin():
        for _ in range(number):
            outbox.send(session, "t", {"number": 1}, deliver_at=later)
    with Session(engine) as session, session.begin():
        for _ in range(number):
            outbox.send(session, "t", {"number": 2}, delay=3600)
    with Session(engine) as session, session.begin():
        for _ in range(number):
            outbox.send(session, "t", {"number": 3}, delay_level=4)
    for half in halves(engine):
        match half.body["number"]:
            case 1:
                assert half.deliver_at == later
            case 2:
                assert dt.timedelta(hours=1) <= half.deliver_at - half.born_at + dt.timedelta(seconds=1)
                assert half.deliver_at - half.born_at < dt.timedelta(hours=1, seconds=1)
            case 3:
                assert abs(half.deliver_at - half.born_at - dt.timedelta(seconds=30)) < dt.timedelta(seconds=1)


@settings(max_examples=tries(10), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    body=st.binary(max_size=50),
    # Also the tag, which may have 127 bytes: a character has four at most.
    key=st.none() | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=31),
    headers=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=9),
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=9),
        max_size=3,
    ),
    number=st.integers(1, 2),
)
def test_what_is_let_through_can_be_stored(
    body: bytes, key: str | None, headers: dict[str, str], number: int, engine: Engine, outbox: Outbox
) -> None:
    """Whatever passes the checks is stored exactly, alone or with others."""
    with Session(engine) as session, session.begin():
        ids = [outbox.send(session, "t", body, key=key, tag=key, headers=headers) for _ in range(number)]
    with engine.connect() as connection:
        for row in connection.execute(
            text("SELECT body, key, tag, headers, sender FROM outbox.half_message WHERE id = ANY(:ids)"), {"ids": ids}
        ):
            assert tuple(row) == (body, key, key, headers or None, process_name())


# --- alone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resolution", [Resolution.COMMIT, Resolution.ROLLBACK])
def test_decide_alone(resolution: Resolution, engine: Engine, outbox: Outbox) -> None:
    """The first decision stands and ends the check; the same again is told so, the opposite is refused."""
    act, opposite = outbox.commit, outbox.rollback
    refusal: type[AlreadyDecided] = AlreadyCommitted
    if resolution is Resolution.ROLLBACK:
        act, opposite, refusal = opposite, act, AlreadyRolledBack
    half_id = prepared(engine, outbox)
    assert count_of_checks(engine) == 1
    first = act(half_id)
    assert isinstance(first, Decision)
    assert (first.half_id, first.resolution, first.decided_by, first.first) == (half_id, resolution, "producer", True)
    assert first.decided_at.tzinfo is not None
    assert count_of_checks(engine) == 0
    again = act(half_id)
    assert again == Decision(half_id, resolution, "producer", first.decided_at, first=False)
    with pytest.raises(refusal, match=rf"half message {half_id} was already .* \(by the producer\)") as error:
        opposite(half_id)
    assert (error.value.half_id, error.value.decided_by) == (half_id, "producer")
    assert op_of(engine, half_id) == (resolution.value, "producer")
    assert idle_in_transaction(engine) == 0


def test_sent_message_is_committed_already(engine: Engine, outbox: Outbox) -> None:
    """A message that was sent is decided: committing it again changes nothing, rolling it back is refused."""
    with Session(engine) as session, session.begin():
        half_id = outbox.send(session, "t", {})
    decision = outbox.commit(half_id)
    assert decision
    assert not decision.first
    with pytest.raises(AlreadyCommitted):
        outbox.rollback(half_id)


@pytest.mark.parametrize("way", ["commit", "rollback"])
def test_unknown_half(way: str, engine: Engine, outbox: Outbox) -> None:
    """An id without a half is HalfNotFound, alone and within, and nothing is written or committed."""
    half_id = uuid7()
    with pytest.raises(HalfNotFound, match=f"no half message {half_id}"):
        getattr(outbox, way)(half_id)
    with Session(engine) as session:
        session.execute(insert(change).values(number=1))
        getattr(outbox, way)(half_id, session)
        with pytest.raises(HalfNotFound):
            session.commit()
    assert (op_of(engine, half_id), changes(engine), leftovers(engine)) == (None, set(), 0)


def test_half_of_a_transaction_not_yet_committed(engine: Engine, outbox: Outbox) -> None:
    """A half can't be decided from outside before its transaction commits."""
    with Session(engine) as session:
        half_id = outbox.prepare(session, "t", {})
        session.flush()
        with pytest.raises(HalfNotFound):
            outbox.commit(half_id)
        session.commit()
    assert outbox.commit(half_id)


def test_unknown_is_no_decision(engine: Engine, outbox: Outbox) -> None:
    """UNKNOWN is never written."""
    half_id = prepared(engine, outbox)
    with engine.begin() as connection, pytest.raises(ValueError, match="UNKNOWN is not a decision"):
        decide(connection, "outbox", half_id, Resolution.UNKNOWN)
    assert op_of(engine, half_id) is None


def test_decider_is_named(engine: Engine, outbox: Outbox) -> None:
    """A decision by the check or an operator says so to whoever comes second."""
    for by in ("check", "operator"):
        half_id = prepared(engine, outbox)
        with engine.begin() as connection:
            assert decide(connection, "outbox", half_id, Resolution.ROLLBACK, by).first
        with pytest.raises(AlreadyRolledBack, match=rf"\(by the {by}\)") as error:
            outbox.commit(half_id)
        assert error.value.decided_by == by


def test_alone_on_an_async_outbox(url: str, engine: Engine, outbox: Outbox) -> None:
    """An Outbox on an AsyncEngine can't decide alone from sync code; the error says to pass a session."""
    half_id = prepared(engine, outbox)
    async_outbox = Outbox(create_async_engine(url), settings=Settings())
    for decide_alone in (async_outbox.commit, async_outbox.rollback):
        with pytest.raises(TransactionRequired, match=r"await outbox\.run_sync"):
            decide_alone(half_id)
    assert op_of(engine, half_id) is None


# --- within the caller's transaction -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["commit", "rollback"])
def test_decide_within(kind: Kind, way: str, url: str, engine: Engine, outbox: Outbox) -> None:
    """A decision within a transaction commits and vanishes with it, and no second one gets through."""
    half_id = prepared(engine, outbox)
    refused = AlreadyCommitted if way == "commit" else AlreadyRolledBack

    async def act(databases: Databases) -> None:
        bound = Outbox(databases.engine_for(kind), settings=Settings())
        async with opened(kind, databases) as carrier:
            await write(carrier, 1)
            assert getattr(bound, way)(half_id, carrier) is None
            await settle(carrier.rollback())
            assert op_of(engine, half_id) is None
            assert count_of_checks(engine) == 1
            await write(carrier, 2)
            getattr(bound, way)(half_id, carrier)
            assert op_of(engine, half_id) is None
            await settle(carrier.commit())
            assert op_of(engine, half_id) == (way, "producer")
            assert count_of_checks(engine) == 0
            for again in ("commit", "rollback"):
                await write(carrier, 3)
                bound.send(carrier, "t", {"number": 3})
                getattr(bound, again)(half_id, carrier)
                with pytest.raises(refused):
                    await settle(carrier.commit())
                await settle(carrier.rollback())
            await write(carrier, 4)
            await settle(carrier.commit())

    drive(url, act)
    assert changes(engine) == {2, 4}
    assert [half.body["number"] for half in halves(engine)] == [0]
    assert (idle_in_transaction(engine), leftovers(engine)) == (0, 0)


def test_decision_in_a_savepoint(engine: Engine, outbox: Outbox) -> None:
    """A decision inside a savepoint that rolls back is not made."""
    half_id = prepared(engine, outbox)
    with Session(engine) as session, session.begin():
        with session.begin_nested() as savepoint:
            outbox.commit(half_id, session)
            savepoint.rollback()
        outbox.send(session, "t", {"number": 1})
    assert op_of(engine, half_id) is None


def test_prepare_and_decide_in_one_transaction(engine: Engine, outbox: Outbox) -> None:
    """A half may be prepared and decided by the same transaction."""
    with Session(engine) as session, session.begin():
        kept = outbox.prepare(session, "t", {"number": 1})
        dropped = outbox.prepare(session, "t", {"number": 2})
        outbox.rollback(dropped, session)
        outbox.commit(kept, session)
        sent = outbox.send(session, "t", {"number": 3})
    assert [op_of(engine, half_id) for half_id in (kept, dropped, sent)] == [COMMITTED, ROLLED_BACK, COMMITTED]
    assert count_of_checks(engine) == 0


def test_both_decisions_in_one_transaction(engine: Engine, outbox: Outbox) -> None:
    """Two decisions on one half in one transaction contradict each other: it fails as a whole."""
    half_id = prepared(engine, outbox)
    with Session(engine) as session:
        session.execute(insert(change).values(number=1))
        outbox.commit(half_id, session)
        outbox.rollback(half_id, session)
        with pytest.raises(AlreadyCommitted):
            session.commit()
    assert (op_of(engine, half_id), changes(engine)) == (None, set())


# --- races of real connections -----------------------------------------------------------------------------


def race(
    engine: Engine, first: Callable[[Any], Any], second: Callable[[Any], Any], first_commits: bool
) -> tuple[Any, bool]:
    """Let the first act and stay in its transaction, the second act meanwhile; return the second's result.

    Also whether the second was really seen waiting before the first ended.
    """
    pids: list[int] = []
    begun = threading.Event()

    def rival() -> Any:
        with engine.connect() as connection:
            pids.append(pid_of(connection))
            begun.set()
            result = second(connection)
            connection.commit()
            return result

    with ThreadPoolExecutor(1) as pool, engine.connect() as connection:
        connection.begin()
        first(connection)
        future = pool.submit(rival)
        begun.wait(30)
        waited = wait_until(lambda: waits_for_a_lock(engine, pids[0]) or future.done(), "the rival waits") and (
            not future.done()
        )
        connection.commit() if first_commits else connection.rollback()
        try:
            return future.result(30), waited
        except AlreadyDecided as error:
            return error, waited


RESOLUTIONS = [Resolution.COMMIT, Resolution.ROLLBACK]


@pytest.mark.parametrize("winner", RESOLUTIONS)
@pytest.mark.parametrize("loser", RESOLUTIONS)
def test_loser_waits_and_is_told(winner: Resolution, loser: Resolution, engine: Engine, outbox: Outbox) -> None:
    """Of two connections that decide one half, the second waits for the first's end and learns its decision."""
    half_id = prepared(engine, outbox)
    result, waited = race(
        engine,
        lambda connection: decide_first(connection, "outbox", half_id, winner),
        lambda connection: decide(connection, "outbox", half_id, loser, "operator"),
        first_commits=True,
    )
    assert waited
    assert (result.resolution, result.decided_by, result.first) == (winner, "producer", False)
    assert op_of(engine, half_id) == (winner.value, "producer")


@pytest.mark.parametrize("loser", RESOLUTIONS)
def test_rival_wins_when_the_first_rolls_back(loser: Resolution, engine: Engine, outbox: Outbox) -> None:
    """When the first rolls back, its decision never was, and the waiting one is made."""
    half_id = prepared(engine, outbox)
    result, waited = race(
        engine,
        lambda connection: decide_first(connection, "outbox", half_id, Resolution.COMMIT),
        lambda connection: decide(connection, "outbox", half_id, loser, "check"),
        first_commits=False,
    )
    assert waited
    assert (result.resolution, result.decided_by, result.first) == (loser, "check", True)
    assert op_of(engine, half_id) == (loser.value, "check")
    assert count_of_checks(engine) == 0


@pytest.mark.parametrize("first_commits", [True, False])
def test_late_commit_against_a_check(first_commits: bool, engine: Engine, outbox: Outbox) -> None:
    """A producer whose COMMIT meets a check's rollback waits for it, and keeps its change only if that rolled back."""
    half_id = prepared(engine, outbox)

    def late(connection: Any) -> None:
        connection.execute(insert(change).values(number=1))
        outbox.commit(half_id, connection)
        outbox.send(connection, "t", {"number": 1})
        connection.commit()

    result, waited = race(
        engine,
        lambda connection: decide(connection, "outbox", half_id, Resolution.ROLLBACK, "check"),
        late,
        first_commits=first_commits,
    )
    assert waited
    assert isinstance(result, AlreadyRolledBack) == first_commits
    assert changes(engine) == (set() if first_commits else {1})
    assert op_of(engine, half_id) == (("rollback", "check") if first_commits else COMMITTED)
    assert len([half for half in halves(engine) if half.id != half_id]) == (0 if first_commits else 1)
    assert idle_in_transaction(engine) == 0


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_race_under_a_stricter_isolation(level: Any, engine: Engine, outbox: Outbox) -> None:
    """A loser that can't see the winner's op gets a serialization failure, never a wrong answer."""
    half_id = prepared(engine, outbox)
    strict = create_engine(engine.url, isolation_level=level)
    with strict.connect() as connection:
        connection.execute(text("SELECT 1 FROM change"))
        outbox.rollback(half_id)
        connection.execute(insert(change).values(number=1))
        outbox.commit(half_id, connection)
        with pytest.raises(OperationalError, match="serialize"):
            connection.commit()
        connection.rollback()
        outbox.commit(half_id, connection)
        with pytest.raises(AlreadyRolledBack):
            connection.commit()
    strict.dispose()
    assert (changes(engine), op_of(engine, half_id)) == (set(), ROLLED_BACK)


def test_many_deciders_at_once(engine: Engine, outbox: Outbox) -> None:
    """Of sixteen deciders at once exactly one is first, and all others report what it decided."""
    halves_ = [prepared(engine, outbox, n) for n in range(5)]
    barrier = threading.Barrier(8)

    def decide_all(decider: int) -> list[tuple[uuid.UUID, Resolution, bool]]:
        told = []
        for half_id in halves_:
            barrier.wait(30)
            try:
                decision = (outbox.commit if decider % 2 else outbox.rollback)(half_id)
                assert decision
                told.append((half_id, decision.resolution, decision.first))
            except AlreadyCommitted:
                told.append((half_id, Resolution.COMMIT, False))
            except AlreadyRolledBack:
                told.append((half_id, Resolution.ROLLBACK, False))
        return told

    with ThreadPoolExecutor(8) as pool:
        told = [entry for answers in pool.map(decide_all, range(8)) for entry in answers]
    for half_id in halves_:
        answers = [(resolution, first) for id_, resolution, first in told if id_ == half_id]
        assert len(answers) == 8
        assert len({resolution for resolution, _ in answers}) == 1
        assert [first for _, first in answers].count(True) == 1
        assert op_of(engine, half_id) == (answers[0][0].value, "producer")


async def test_async_commit_race(url: str, engine: Engine, outbox: Outbox) -> None:
    """An AsyncSession that loses waits without blocking its event loop, and is told."""
    half_id = prepared(engine, outbox)
    async_engine = create_async_engine(url)
    bound = Outbox(async_engine, settings=Settings())
    pids: list[int] = []

    async def late() -> None:
        async with AsyncSession(async_engine) as session, session.begin():
            await write(session, 1)
            pids.append(await session.scalar(text("SELECT pg_backend_pid()")) or 0)
            bound.commit(half_id, session)

    with engine.connect() as rival:
        rival.begin()
        decide(rival, "outbox", half_id, Resolution.ROLLBACK, "operator")
        task = asyncio.create_task(late())
        await asyncio.to_thread(
            wait_until, lambda: task.done() or (pids and waits_for_a_lock(engine, pids[0])), "the loser waits"
        )
        assert not task.done()
        rival.commit()
        with pytest.raises(AlreadyRolledBack, match="operator"):
            await task
    await async_engine.dispose()
    assert changes(engine) == set()


def test_lock_timeout_while_waiting(engine: Engine, outbox: Outbox) -> None:
    """A decider that waits too long, by its own lock_timeout, fails as SQLAlchemy's error and leaves no decision."""
    half_id = prepared(engine, outbox)
    with engine.connect() as first:
        first.begin()
        decide(first, "outbox", half_id, Resolution.COMMIT)
        with engine.connect() as second:
            second.execute(text("SET LOCAL lock_timeout = '50ms'"))
            second.execute(insert(change).values(number=1))
            outbox.rollback(half_id, second)
            with pytest.raises(DBAPIError, match="lock timeout"):
                second.commit()
        first.rollback()
    assert (op_of(engine, half_id), changes(engine)) == (None, set())
