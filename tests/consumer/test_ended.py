"""Handlers that end more than themselves: the process, their task, or the transaction that they run in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox import Message
from tests.kit import at_once, consume_all
from tests.kit.bench import Bench, Ward, but, record


class Abort(BaseException):
    """What a library raises past every ``except Exception``."""


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("raised", [SystemExit, asyncio.CancelledError, Abort])
def test_an_exit_is_a_failure_of_its_message(bench: Bench, raised: type[BaseException], batch: int) -> None:
    """An exit or a cancellation that a handler raises by itself fails its message; the others are consumed."""

    consumer = bench.declare(Ward(2, error=raised), batch=batch)
    ids = bench.send(1, 2, 3)
    assert bench.consume(consumer).failed == 1
    assert bench.ledger() == ["1", "3"]
    row = bench.inbox()[ids[1]]
    assert (row.status, row.attempts) == ("failed", 1)
    assert raised.__name__ in str(row.error)
    assert bench.retry(consumer).failed == 1


def test_the_end_of_the_process_is_nobody_s_failure(bench: Bench) -> None:
    """Ctrl-C reaches the main thread wherever it is: the pass ends, and its message costs no attempt."""
    ward = Ward(2, error=KeyboardInterrupt)
    consumer = bench.declare(ward)
    bench.send(1, 2, 3)
    with pytest.raises(KeyboardInterrupt):
        bench.consume(consumer)
    assert bench.statuses() == [("consumed", 1)]
    ward.ill.clear()
    bench.consume(consumer)
    assert bench.ledger() == ["1", "2", "3"]
    assert bench.statuses() == [("consumed", 1)] * 3


def test_an_interrupt_in_another_thread_is_a_failure(bench: Bench) -> None:
    """Nobody sends Ctrl-C to a thread: there it is the handler's own exception."""

    consumer = bench.declare(Ward(1, error=KeyboardInterrupt))
    bench.send(1)
    (counts,) = at_once(lambda: bench.consume(consumer))
    assert counts.failed == 1


async def test_a_task_that_is_cancelled_ends_the_pass(bench: Bench) -> None:
    """The cancellation of the task that consumes passes through the handler, whose message costs no attempt."""
    inside = asyncio.Event()

    async def handler(message: Message, session: AsyncSession) -> None:
        await session.run_sync(lambda sync: record(message, sync))
        inside.set()
        await asyncio.Event().wait()

    consumer = bench.declare(handler)
    bench.send(1)
    task = asyncio.ensure_future(bench.in_loop(lambda connection: consume_all(consumer, connection, connection)))
    await asyncio.wait_for(inside.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.statuses() == []
    assert bench.ledger() == []


def by_sql(*statements: str) -> Callable[[Session], None]:
    """Return an act that executes statements which SQLAlchemy takes for any others."""

    def act(session: Session) -> None:
        for each in statements:
            session.execute(text(each))

    return act


def by_driver(name: str) -> Callable[[Session], None]:
    """Return an act that calls a method of the driver's connection."""
    return lambda session: getattr(session.connection().connection.dbapi_connection, name)()


def past_the_driver(*statements: bytes) -> Callable[[Session], None]:
    """Return an act that goes past the cursors of the connection: libpq's own calls tell nobody."""

    def act(session: Session) -> None:
        for each in statements:
            session.connection().connection.driver_connection.pgconn.exec_(each)  # type: ignore[union-attr]

    return act


#: How a handler tries to end the transaction.
REFUSED: dict[str, Callable[[Session], None]] = {
    "ROLLBACK": by_sql("ROLLBACK"),
    "COMMIT": by_sql("COMMIT"),
    "COMMIT and on": by_sql("COMMIT", "BEGIN"),
    "COMMIT among others": by_sql("SELECT 1; COMMIT; BEGIN"),
    "COMMIT AND CHAIN": by_sql("COMMIT AND CHAIN"),
    "rollback by the driver": by_driver("rollback"),
    "commit by the driver": by_driver("commit"),
}

#: How one does end it, and which of its effects the database keeps: of message 2, whose handler does so after its
#: effect, and of the one before it in the same batch.
ENDS: dict[str, tuple[Callable[[Session], None], bool]] = {
    "ROLLBACK": (past_the_driver(b"ROLLBACK"), False),
    "COMMIT": (past_the_driver(b"COMMIT"), True),
    "COMMIT and on": (past_the_driver(b"COMMIT", b"BEGIN"), True),
}


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("end", REFUSED)
def test_a_handler_cannot_end_the_transaction(bench: Bench, end: str, batch: int) -> None:
    """It is refused before the server hears of it: its message has failed, its effect is undone, others' are kept."""

    def handler(message: Message, session: Session) -> None:
        record(message, session)
        if message.body == 2 and message.attempt == 1:
            REFUSED[end](session)

    consumer = bench.declare(handler, batch=batch)
    ids = bench.send(1, 2, 3)
    with bench.another(isolation_level="AUTOCOMMIT") as there:
        bench.consume_on(consumer, *there)
        row = bench.inbox()[ids[1]]
        assert (row.status, row.attempts, bench.ledger()) == ("failed", 1, ["1", "3"])
        assert "the transaction is the worker's" in str(row.error)
        assert "test_a_handler_cannot_end_the_transaction" in str(row.error)
        bench.age_retries()
        consumer.retry_once(*there)
    assert bench.ledger() == ["1", "3", "2"]


@pytest.mark.parametrize("mode", ["AUTOCOMMIT", "READ COMMITTED"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("end", ENDS)
def test_a_handler_that_ends_the_transaction(bench: Bench, end: str, batch: int, mode: Any) -> None:
    """Its message is parked and not run again, since nobody knows what it left behind; so is what ran before it in the
    same transaction. No effect comes twice, and no message is recorded as consumed whose effect is gone.
    """
    act, kept = ENDS[end]

    consumer = bench.declare(but(2, lambda _, session: act(session)), batch=batch)
    ids = bench.send(1, 2, 3)
    with bench.another(isolation_level=mode) as there:
        bench.consume_on(consumer, *there)
        bench.age_retries()
        consumer.retry_once(*there)
    inbox, ledger = bench.inbox(), bench.ledger()
    assert (inbox[ids[1]].status, inbox[ids[1]].attempts) == ("parked", 1)
    assert "ended the transaction" in str(inbox[ids[1]].error)
    assert ledger.count("2") == int(kept)
    for id_, body in zip(ids, ("1", "2", "3"), strict=True):
        assert ledger.count(body) <= 1
        if inbox[id_].status == "consumed":
            assert ledger.count(body) == 1
    if batch == 1:
        assert [inbox[id_].status for id_ in ids] == ["consumed", "parked", "consumed"]


@pytest.mark.parametrize("mode", ["AUTOCOMMIT", "READ COMMITTED"])
@pytest.mark.parametrize("end", ENDS)
def test_a_retry_that_ends_the_transaction(bench: Bench, end: str, mode: Any) -> None:
    """The same where a message fails first, and its retry ends the transaction."""
    act, kept = ENDS[end]

    def handler(message: Message, session: Session) -> None:
        if message.attempt == 1:
            raise RuntimeError("not today")
        record(message, session)
        act(session)

    consumer = bench.declare(handler)
    (id_,) = bench.send(1)
    bench.consume(consumer)
    with bench.another(isolation_level=mode) as there:
        for _ in range(3):
            bench.age_retries()
            consumer.retry_once(*there)
    assert (bench.inbox()[id_].status, bench.inbox()[id_].attempts) == ("parked", 2)
    assert bench.ledger() == ["1"] * kept
