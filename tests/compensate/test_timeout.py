"""A compensation that takes too long has failed: what it did is undone, and the others go on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Settings
from outbox.errors import InvalidHandler, InvalidMessage
from outbox.worker.connections import Runners, WorkerDatabase
from tests.compensate.support import GIVE, REFUND, Town, give_back
from tests.kit import wait_until

LIMIT = 0.3


@pytest.fixture
def runners(town: Town) -> Iterator[Runners]:
    """Connections as a worker makes them."""
    made = Runners(WorkerDatabase(town.producer), threading.Event())
    yield made
    made.end()


def declare(town: Town, function: object, timeout: float = LIMIT, topic: str = "t") -> None:
    """Register a compensation with a time limit, beside those of other topics."""
    app = Outbox(town.producer, settings=town.settings)
    app.compensation(topic, consumers=[town.consumer], timeout=timeout)(function)  # type: ignore[call-overload]  # either kind
    town.compensations = {**town.compensations, **app.compensations}


def undone(town: Town) -> bool:
    """Tell whether the server has rolled back what a compensation wrote, and waits for nobody."""
    sql = """SELECT NOT EXISTS (SELECT FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
                                 WHERE c.relname IN ('compensation', 'refund') AND l.pid <> pg_backend_pid())"""
    return bool(town.at_a.value(sql))


def test_a_plain_function_that_hangs(town: Town, runners: Runners, released: threading.Event) -> None:
    """It loses its connection; when it comes back, it can commit nothing; and the next attempt is a good one."""
    errors: list[BaseException] = []

    def hang(message: Message, session: Session) -> None:
        give_back(message, session)
        released.wait()
        try:
            give_back(message, session)
        except BaseException as error:
            errors.append(error)
            raise

    half_id = town.parked()
    declare(town, hang)
    bulk_job_id = town.order(half_id)
    assert town.work(runners).failed == 1
    assert town.item(bulk_job_id)[0] == "pending"
    said = "FunctionTimedOut: it took longer than 0.3 s, and was given up (attempt 1 of 5)"
    assert town.said(bulk_job_id).endswith(said)
    wait_until(lambda: undone(town), "the server has undone it")
    assert (town.refunds(half_id), town.balance) == (0, 900)
    released.set()
    wait_until(lambda: not any(each.is_alive() for each in town.compensations["t"].left_behind), "the thread has ended")
    assert errors, "its connection is gone"
    assert (town.refunds(half_id), town.balance, town.item(bulk_job_id)[0]) == (0, 900, "pending")
    declare(town, give_back, 30)
    town.age()
    assert town.work(runners).done == 1
    assert (town.refunds(half_id), town.balance) == (1, 1000)


def test_a_coroutine_function_that_hangs(town: Town, runners: Runners) -> None:
    """It is cancelled; what it wrote is undone."""
    ended: list[BaseException] = []

    async def hang(message: Message, session: AsyncSession) -> None:
        await session.execute(GIVE, {"amount": 100})
        await session.execute(REFUND, {"id": message.id, "amount": 100})
        try:
            await asyncio.Event().wait()
        except BaseException as error:
            ended.append(error)
            raise

    half_id = town.parked()
    declare(town, hang, 2.0)
    bulk_job_id = town.order(half_id)
    assert town.work(runners).failed == 1
    assert "FunctionTimedOut: it took longer than 2 s" in town.said(bulk_job_id)
    wait_until(lambda: not any(each.is_alive() for each in town.compensations["t"].left_behind), "its thread has ended")
    assert [type(error) for error in ended] == [asyncio.CancelledError]
    wait_until(lambda: undone(town), "the server has undone it")
    assert (town.refunds(half_id), town.balance) == (0, 900)


def test_a_topic_whose_compensation_hangs_rests(
    town: Town, runners: Runners, released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its items wait without an attempt, those of other topics are carried out; when a thread is back, it goes on."""
    monkeypatch.setattr("outbox.calling.engine.MOST_LEFT_BEHIND", 1)
    calls: list[Message] = []

    def hang(message: Message, session: Session) -> None:
        calls.append(message)
        released.wait()

    declare(town, hang)
    declare(town, give_back, 30, "u")
    ids = [town.transfer(), town.transfer()]
    with town.producer.begin() as connection:
        other = town.app.send(connection, "u", {"amount": 1})
    town.dispatch()
    jobs, fine = [town.order(each) for each in ids], town.order(other)
    assert town.work(runners).done == 1
    assert town.item(fine)[0] == "done"
    assert len(calls) == 1
    assert sum("hangs in every thread that it may have" in town.said(each) for each in jobs) == 1
    released.set()
    wait_until(lambda: not any(each.is_alive() for each in town.compensations["t"].left_behind), "the thread has ended")
    town.age()
    assert town.work(runners).done == 2


def test_the_limit_is_declared(town: Town) -> None:
    """By default that of the settings; a limit that isn't one is refused."""
    app = Outbox(town.producer, settings=Settings(compensation_timeout=7))
    app.compensation("t")(give_back)
    app.compensation("u", timeout=1.5)(give_back)
    assert (app.compensations["t"].timeout, app.compensations["u"].timeout) == (7, 1.5)
    with pytest.raises(InvalidHandler, match=r"compensation of 'v': timeout = 0\.0 must be greater than 0"):
        app.compensation("v", timeout=0)(give_back)
    with pytest.raises(InvalidMessage, match="timeout"):
        app.compensation("v", timeout=-1)(give_back)
