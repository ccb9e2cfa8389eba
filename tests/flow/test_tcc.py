"""Try, confirm, cancel: the anomalies that DTM and Seata list, by calls twice, out of order, at once, and killed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, NullPool, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import Outbox, Participant, Settings
from outbox.errors import BranchCancelled, BranchConfirmed, BranchUnknown, InvalidHandler, InvalidMessage
from outbox.flow.tcc import Branch
from outbox.prune.prune_pass import prune_producer_once
from tests.kit import Tables, wait_until

NOTE = text("INSERT INTO effect (call, branch, body) VALUES (:call, :branch, :body)")


class Shop:
    """A participant that writes each of its effects into a table that takes everything."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings, self.at = engine, settings, Tables(engine)
        self.at.run("CREATE TABLE effect (n serial PRIMARY KEY, call text, branch text, body text)")
        self.participant: Participant[str] = Participant(Outbox(engine, settings=settings), "shop")
        for call, decorator in (
            ("attempt", self.participant.on_try),
            ("confirm", self.participant.on_confirm),
            ("cancel", self.participant.on_cancel),
        ):
            decorator(self._effect(call))
        self.transaction = uuid4()

    def _effect(self, call: str) -> Callable[[Branch[str], Session], None]:
        def effect(branch: Branch[str], session: Session) -> None:
            session.execute(NOTE, {"call": call, "branch": branch.branch, "body": branch.body})

        return effect

    def call(self, call: str, *, transaction: UUID | None = None, branch: str = "") -> Any:
        """Make a call in a transaction of its own; return what it returns, or the error that it raises."""
        with Session(self.engine) as session:
            try:
                return self.call_within(session, call, transaction=transaction, branch=branch)
            except (BranchCancelled, BranchConfirmed, BranchUnknown) as error:
                return type(error)
            finally:
                session.commit()

    def call_within(self, session: Session, call: str, *, transaction: UUID | None = None, branch: str = "") -> Any:
        """Make a call in the transaction of a session."""
        function = getattr(self.participant, call)
        return function(session, transaction or self.transaction, "body", branch=branch)

    def effects(self) -> list[str]:
        """Return what took effect, in order."""
        return list(self.at.rows("SELECT call FROM effect ORDER BY n"))


@pytest.fixture
def shop(engine: Engine, settings: Settings) -> Shop:
    """A participant."""
    return Shop(engine, settings)


@pytest.mark.parametrize(
    ("calls", "results", "effects"),
    [
        ("attempt confirm", [True, True], ["attempt", "confirm"]),
        ("attempt cancel", [True, True], ["attempt", "cancel"]),
        # Duplicates: DTM "repeated requests", Seata "idempotence".
        ("attempt attempt", [True, False], ["attempt"]),
        ("attempt confirm confirm attempt", [True, True, False, False], ["attempt", "confirm"]),
        ("attempt cancel cancel", [True, True, False], ["attempt", "cancel"]),
        # Empty compensation: DTM "null compensation", Seata "empty rollback".
        ("cancel", [False], []),
        ("cancel cancel", [False, False], []),
        # Hanging: DTM "hanging action", Seata "suspension".
        ("cancel attempt", [False, BranchCancelled], []),
        ("cancel attempt cancel", [False, BranchCancelled, False], []),
        ("attempt cancel attempt", [True, True, BranchCancelled], ["attempt", "cancel"]),
        # What a coordinator must not ask for.
        ("confirm", [BranchUnknown], []),
        ("cancel confirm", [False, BranchCancelled], []),
        ("attempt cancel confirm", [True, True, BranchCancelled], ["attempt", "cancel"]),
        ("attempt confirm cancel", [True, True, BranchConfirmed], ["attempt", "confirm"]),
    ],
)
def test_calls_take_effect_once_in_any_order(shop: Shop, calls: str, results: list[Any], effects: list[str]) -> None:
    """Each in a transaction of its own."""
    assert [shop.call(call) for call in calls.split()] == results
    assert shop.effects() == effects


@pytest.mark.parametrize(
    ("before", "first", "second", "commits", "result", "effects"),
    [
        ("", "attempt", "attempt", True, False, ["attempt"]),
        ("", "attempt", "attempt", False, True, ["attempt"]),
        ("", "attempt", "cancel", True, True, ["attempt", "cancel"]),
        ("", "attempt", "cancel", False, False, []),
        ("", "cancel", "attempt", True, BranchCancelled, []),
        ("", "cancel", "attempt", False, True, ["attempt"]),
        ("", "attempt", "confirm", True, True, ["attempt", "confirm"]),
        ("", "attempt", "confirm", False, BranchUnknown, []),
        ("", "cancel", "confirm", True, BranchCancelled, []),
        ("", "cancel", "confirm", False, BranchUnknown, []),
        ("attempt", "confirm", "confirm", True, False, ["attempt", "confirm"]),
        ("attempt", "confirm", "cancel", True, BranchConfirmed, ["attempt", "confirm"]),
        ("attempt", "confirm", "cancel", False, True, ["attempt", "cancel"]),
        ("attempt", "cancel", "confirm", True, BranchCancelled, ["attempt", "cancel"]),
        ("attempt", "cancel", "confirm", False, True, ["attempt", "confirm"]),
        ("attempt", "cancel", "cancel", True, False, ["attempt", "cancel"]),
    ],
)
def test_two_calls_at_once(
    shop: Shop, before: str, first: str, second: str, commits: bool, result: Any, effects: list[str]
) -> None:
    """The second waits for the end of the first; where that is killed in the middle, nothing of it is left."""
    if before:
        shop.call(before)
    results: list[Any] = []
    session = Session(shop.engine)
    shop.call_within(session, first)
    pid = session.execute(text("SELECT pg_backend_pid()")).scalar_one()
    thread = threading.Thread(target=lambda: results.append(shop.call(second)))
    thread.start()
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    wait_until(lambda: shop.at.value(waiting) == 1, "the second call waits")
    if commits:
        session.commit()
    else:
        shop.at.run("SELECT pg_terminate_backend(:pid)", pid=pid)
        session.invalidate()
    session.close()
    thread.join()
    assert results == [result]
    assert shop.effects() == effects


def test_a_confirm_with_an_older_snapshot_is_not_told_a_lie(shop: Shop) -> None:
    """A transaction at REPEATABLE READ can't see a try that has committed since it began: it is to begin again."""
    with Session(shop.engine) as session:
        session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
        session.execute(text("SELECT 1"))
        assert shop.call("attempt")
        with pytest.raises(OperationalError, match="could not serialize"):
            shop.call_within(session, "confirm")
    assert shop.call("confirm")


@pytest.mark.parametrize("call", ["attempt", "confirm", "cancel"])
@pytest.mark.parametrize(
    ("transaction", "branch", "said"),
    [
        ("b3b2cbb6-6c4b-4b5e-8f0e-2b1a6c1d9b11", "", "transaction_id must be a UUID, not str: 'b3b2"),
        (7, "", "transaction_id must be a UUID, not int: 7"),
        (UUID(int=0), "", "transaction_id must be a UUID, not UUID"),
        (uuid4(), None, "branch None must be a str"),
        (uuid4(), 7, "branch must be a str, not int: 7"),
        (uuid4(), " ", "branch ' ' must be a str without spaces around it"),
        (uuid4(), "a\n", "branch 'a\\n' must be a str without spaces"),
        (uuid4(), "a\0b", "branch has a NUL character"),
        (uuid4(), "b" * 256, "has 256 bytes; at most 255 are allowed"),
    ],
)
def test_ids_and_branches_are_checked(shop: Shop, call: str, transaction: Any, branch: Any, said: str) -> None:
    """Before anything is written down."""
    with pytest.raises(InvalidMessage) as error, Session(shop.engine) as session, session.begin():
        getattr(shop.participant, call)(session, transaction, "body", branch=branch)
    assert said in str(error.value)
    assert shop.at.value("SELECT count(*) FROM outbox.tcc_branch") == 0


def test_an_unknown_branch_is_told_beside_those_that_there_are(shop: Shop) -> None:
    """A slip in its name is seen at once; nothing is left of the call."""
    for branch in ("room", "car"):
        shop.call("attempt", branch=branch)
    with Session(shop.engine) as session, session.begin():
        with pytest.raises(BranchUnknown, match=r"'rooms', .* was never tried"):
            shop.call_within(session, "confirm", branch="rooms")
        with pytest.raises(BranchUnknown, match=r"was never tried$"):
            shop.call_within(session, "confirm", transaction=uuid4())
    assert shop.at.value("SELECT count(*) FROM outbox.tcc_branch") == 2
    assert shop.call("confirm", branch="room")


def test_branches_and_participants_are_apart(shop: Shop, settings: Settings) -> None:
    """Each has a row of its own."""
    assert [shop.call("attempt", branch=branch) for branch in ("a", "b", "a")] == [True, True, False]
    other: Participant[str] = Participant(shop.participant.outbox, "other")
    other.on_try(lambda branch, session: None)
    with Session(shop.engine) as session, session.begin():
        assert other.attempt(session, shop.transaction, "", branch="a")
    assert shop.call("attempt", transaction=uuid4(), branch="a")


def test_a_try_that_refuses_leaves_nothing(shop: Shop) -> None:
    """Neither its row nor its effect, so that the cancel that follows is an empty one."""
    refusing: Participant[str] = Participant(shop.participant.outbox, "refusing")

    @refusing.on_try
    def refuse(branch: Branch[str], session: Session) -> None:
        session.execute(NOTE, {"call": "try", "branch": "", "body": ""})
        raise ValueError("sold out")

    with pytest.raises(ValueError, match="sold out"), Session(shop.engine) as session, session.begin():
        refusing.attempt(session, shop.transaction, "")
    with Session(shop.engine) as session, session.begin():
        assert refusing.cancel(session, shop.transaction, "") is False
    assert shop.effects() == []


def test_ended_branches_are_pruned(shop: Shop, settings: Settings) -> None:
    """After the retention; one that is only tried stays."""
    shop.call("attempt")
    shop.call("attempt", branch="open")
    shop.call("confirm")
    shop.call("cancel", branch="empty")
    for days, left in ((89, 3), (2, 1)):
        shop.at.run(f"UPDATE outbox.tcc_branch SET changed_at = changed_at - interval '{days} days'")
        with shop.engine.connect() as connection:
            prune_producer_once(connection, settings)
        assert shop.at.value("SELECT count(*) FROM outbox.tcc_branch") == left


class AsyncShop:
    """The shop, of which two functions are async and one is plain; each call is in a transaction of its own."""

    def __init__(self, shop: Shop) -> None:
        self.engine = create_async_engine(shop.engine.url, poolclass=NullPool)
        self.participant: Participant[str] = Participant(Outbox(self.engine, settings=shop.settings), "async-shop")
        self.transaction = shop.transaction

        @self.participant.on_try
        async def reserve(branch: Branch[str], session: AsyncSession) -> None:
            await session.execute(NOTE, {"call": "attempt", "branch": branch.branch, "body": branch.body})

        @self.participant.on_confirm
        async def take(branch: Branch[str], session: AsyncSession) -> None:
            await session.execute(NOTE, {"call": "confirm", "branch": branch.branch, "body": branch.body})

        @self.participant.on_cancel
        def release(branch: Branch[str], session: Session) -> None:
            session.execute(NOTE, {"call": "cancel", "branch": branch.branch, "body": branch.body})

    async def call(self, call: str) -> Any:
        """Make a call; return what it returns, or the error that it raises."""
        async with AsyncSession(self.engine) as session, session.begin():
            try:
                return await getattr(self.participant, call)(session, self.transaction, "body")
            except (BranchCancelled, BranchConfirmed, BranchUnknown) as error:
                return type(error)

    async def calls(self, calls: str) -> list[Any]:
        """Make calls one after another."""
        return [await self.call(call) for call in calls.split()]


@pytest.mark.parametrize(
    ("calls", "results", "effects"),
    [
        ("attempt attempt confirm confirm", [True, False, True, False], ["attempt", "confirm"]),
        ("attempt cancel cancel", [True, True, False], ["attempt", "cancel"]),
        ("cancel attempt", [False, BranchCancelled], []),
        ("confirm", [BranchUnknown], []),
        ("attempt confirm cancel", [True, True, BranchConfirmed], ["attempt", "confirm"]),
    ],
)
def test_async_participants(shop: Shop, calls: str, results: list[Any], effects: list[str]) -> None:
    """The same, awaited, with an AsyncSession; a plain function gets the Session inside of it."""
    assert asyncio.run(AsyncShop(shop).calls(calls)) == results
    assert shop.effects() == effects


def test_async_calls_at_once(shop: Shop) -> None:
    """Of ten tasks that try, one takes effect; what is undone leaves nothing."""
    of = AsyncShop(shop)

    async def at_once() -> list[Any]:
        return await asyncio.gather(*(of.call("attempt") for _ in range(10)))

    async def undone() -> None:
        async with AsyncSession(of.engine) as session:
            assert await of.participant.confirm(session, of.transaction, "body")
            await session.rollback()

    assert sorted(asyncio.run(at_once())) == [False] * 9 + [True]
    asyncio.run(undone())
    assert asyncio.run(of.call("cancel"))
    assert shop.effects() == ["attempt", "cancel"]


def test_an_async_function_needs_an_async_session(shop: Shop) -> None:
    """A plain session is refused, and nothing is left of the call."""
    of = AsyncShop(shop)
    refused = pytest.raises(InvalidHandler, match="call it with an AsyncSession, not with Session")
    with refused, Session(shop.engine) as session, session.begin():
        of.participant.attempt(session, of.transaction, "body")
    assert asyncio.run(of.call("attempt"))


def test_what_can_not_be_declared(shop: Shop) -> None:
    """A second function, one that takes something else; and one that is missing."""
    with pytest.raises(InvalidHandler, match="participant 'shop': the function to be tried is declared already"):
        shop.participant.on_try(lambda branch, session: None)
    other: Participant[str] = Participant(shop.participant.outbox, "other")
    with pytest.raises(InvalidHandler, match="must take"):
        other.on_try(lambda branch: None)
    with pytest.raises(InvalidHandler, match="declare all three functions"), Session(shop.engine) as session:
        other.attempt(session, uuid4(), "")
