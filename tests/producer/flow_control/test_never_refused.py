"""What flow control never refuses: decisions, checks, and what a function in two phases has begun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, insert, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import INJECTED, Orphan, Outbox, Resolution, Settings
from outbox.check.check_pass import check_fences
from outbox.errors import OutboxBusy
from outbox.testing import check, drain
from tests.kit.bench import Bench, make_ledger
from tests.producer.backlog import prepare_many, send_many
from tests.producer.bank import change, changes, create_business_tables, halves, messages, op_of
from tests.producer.flow_control.limits import accepted, forget, limited, tell


def test_decisions_and_checks_are_never_refused(engine: Engine, always_counted: None) -> None:
    """In topics that are full by both limits, halves are committed, rolled back, checked and resolved."""
    outbox = limited(engine, max_undecided=3)
    with engine.begin() as connection:
        ids = [outbox.prepare(connection, "t", {"number": number}) for number in range(5)]
    send_many(engine, 5)
    prepare_many(engine, 4, "fenced", fenced=True)
    with pytest.raises(OutboxBusy), engine.begin() as connection:
        outbox.prepare(connection, "t", {"number": 9})

    outbox.commit(ids[0])
    outbox.rollback(ids[1])
    with engine.begin() as connection:
        outbox.commit(ids[2], within=connection)

    @outbox.checker("t")
    def answer(orphan: Orphan) -> Resolution:
        return Resolution.COMMIT if orphan.id == ids[3] else Resolution.UNKNOWN

    check(outbox)
    outbox.operator.rollback(ids[4], by="me", why="test")
    with engine.connect() as connection:
        check_fences(connection, outbox.settings)
    assert [op_of(engine, half_id) for half_id in ids] == [
        ("commit", "producer"),
        ("rollback", "producer"),
        ("commit", "producer"),
        ("commit", "check"),
        ("rollback", "operator"),
    ]
    with engine.begin() as connection:
        outbox.prepare(connection, "fenced", {"number": 9})


def test_functions_in_two_phases(engine: Engine, always_counted: None) -> None:
    """A function isn't run when its half is refused; one that runs already decides, however full the topic became."""
    outbox = limited(engine, "max_undecided", 2, max_undispatched=2)
    ran: list[int] = []

    @outbox.two_phase(topic="t", body=lambda number: {"number": number})
    def act(number: int, session: Session = INJECTED) -> None:
        ran.append(number)
        session.execute(insert(change).values(number=number))
        prepare_many(engine, 2)
        send_many(engine, 2)

    act(1)
    with pytest.raises(OutboxBusy, match="2 counted"):
        act(2)
    assert (ran, changes(engine), messages(engine)) == ([1], {1}, [0, 0, 1])


async def test_async_functions_in_two_phases(url: str, engine: Engine, always_counted: None) -> None:
    """An async function isn't run either when its half is refused."""
    prepare_many(engine, 1)
    async_engine = create_async_engine(url)
    outbox = Outbox(async_engine, settings=Settings(max_undecided=2))
    ran: list[int] = []

    @outbox.two_phase(topic="t", body=lambda number: {"number": number})
    async def act(number: int, session: AsyncSession = INJECTED) -> None:
        ran.append(number)
        await session.execute(insert(change).values(number=number))
        prepare_many(engine, 2)

    await act(1)
    with pytest.raises(OutboxBusy, match="max_undecided"):
        await act(2)
    assert ran == [1]
    await async_engine.dispose()
    assert changes(engine) == {1}


def test_transactional_function(engine: Engine, always_counted: None) -> None:
    """A function whose message is refused has changed nothing; one that sends nothing isn't refused."""
    send_many(engine, 3)
    outbox = limited(engine)

    @outbox.transactional(topic="t")
    def act(number: int, tells: bool, session: Session = INJECTED) -> dict[str, int] | None:
        session.execute(insert(change).values(number=number))
        return {"number": number} if tells else None

    for number, tells in ((1, True), (2, False), (3, True)):
        accepted(lambda: act(number, tells))  # noqa: B023
    assert changes(engine) == {2}


@pytest.mark.parametrize("batch", [1, 10])
@pytest.mark.parametrize("known", [False, True])
def test_consumer_that_sends(batch: int, known: bool, new_engine: Callable[..., Engine], counted_once: None) -> None:
    """A handler whose message is refused is an attempt that failed: retried, until there is room, with one effect."""
    engine = new_engine()
    make_ledger(engine)
    create_business_tables(engine)
    outbox = limited(engine)

    def handle(message: Any, session: Session) -> None:
        session.execute(text("INSERT INTO ledger (message_id, body) VALUES (:id, 'x')"), {"id": message.id})
        outbox.send(session, "next", message.body)

    with Bench(engine, engine, Settings(listen=False)) as bench:
        bench.send({"number": 1})
        consumer = bench.declare(handle, batch=batch)
        send_many(engine, 3, "next")
        if known:
            assert not accepted(lambda: tell(outbox, engine, 0, "next"))
        bench.consume(consumer)
        assert (bench.statuses(), bench.ledger()) == ([("failed", 1)], [])
        ((_, _, error),) = [(row.status, row.attempts, row.error) for row in bench.inbox().values()]
        assert "'next' has reached its limit of 3 undispatched messages" in str(error)
        bench.retry(consumer)
        assert (bench.statuses(), bench.ledger()) == ([("failed", 2)], [])
        bench.dispatch()
        forget(outbox)
        bench.retry(consumer)
        assert (bench.statuses(), bench.ledger()) == ([("consumed", 3)], ["x"])
    assert [half.body["number"] for half in halves(engine) if half.topic == "next"] == [0, 0, 0, 1]


def test_drain_of_a_chain(new_engine: Callable[..., Engine], always_counted: None) -> None:
    """Consumers that pass messages on stay below the limits while dispatch keeps up."""
    engine = new_engine()
    outbox = limited(engine, limit=50)
    passed = []

    @outbox.consumer("t", group="g")
    def on_first(message: Any, session: Session) -> None:
        outbox.send(session, "u", message.body)

    @outbox.consumer("u", group="g")
    def on_second(message: Any, session: Session) -> None:
        passed.append(message.body["number"])

    for number in range(40):
        with engine.begin() as connection:
            outbox.send(connection, "t", {"number": number})
    drain(outbox)
    assert sorted(passed) == list(range(40))
