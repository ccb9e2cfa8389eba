"""Send: what a message costs the business transaction that it is sent with."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from benchmarks import bank, handmade
from benchmarks.lab import Benchmark, Lab
from benchmarks.measure import Arm, Figure, compared, interleave, rate
from outbox import Outbox, Settings

Tell = Callable[[Session, list[dict[str, Any]]], None]


def run(lab: Lab) -> list[Figure]:
    """Measure one and ten messages a transaction, sync and async, and count what goes over the wire."""
    engine = lab.engine("main")
    bank.open_bank(engine)
    handmade.create(engine)
    count, rounds = lab.scale(20, 10), lab.scale(120, 4)
    figures = []
    for messages, bars in ((1, (0.85, 0.95)), (10, (None, None))):
        lab.say(f"send: {messages} a transaction")
        # An engine for each arm: hooks of ours must not slow down arms that don't use them.
        engines = {name: lab.engine("main") for name in ("ours", "hand", "bare")}
        tells = _tells(Outbox(engines["ours"], settings=Settings()), messages)
        arms: dict[str, Arm] = {
            name: partial(rate, count, partial(_transactions, engines[name], tell, messages, count))
            for name, tell in tells.items()
        }
        figures += _figures(f"transaction with {messages} sent", interleave(arms, rounds), bars)
    lab.say("send: AsyncSession")
    figures += _figures("the same, AsyncSession", _measure_async(lab, count, rounds), (0.85, 0.95))
    figures.append(_wire(lab, Outbox(engine, settings=Settings())))
    return figures


def _tells(outbox: Outbox, messages: int) -> dict[str, Tell]:
    def ours(session: Session, orders: list[dict[str, Any]]) -> None:
        for order in orders:
            outbox.send(session, bank.TOPIC, order, key=order["receiver"])

    def by_hand(session: Session, orders: list[dict[str, Any]]) -> None:
        if messages == 1:
            session.execute(handmade.INSERT, handmade.values(bank.TOPIC, orders[0]["receiver"], orders[0]))
        else:
            session.execute(handmade.INSERT_ALL, handmade.columns(bank.TOPIC, orders))

    return {"ours": ours, "hand": by_hand, "bare": lambda _session, _orders: None}


def _business(session: Session, tell: Tell, messages: int) -> None:
    orders = [bank.new_order() for _ in range(messages)]
    order = orders[0]
    session.execute(bank.MOVE, {"account_id": order["sender"], "moved": -order["amount"]})
    session.execute(bank.NOTE, {"account_id": order["sender"], "amount": -order["amount"]})
    tell(session, orders)


def _transactions(engine: Engine, tell: Tell, messages: int, count: int) -> None:
    for _ in range(count):
        with Session(engine) as session, session.begin():
            _business(session, tell, messages)


def _measure_async(lab: Lab, count: int, rounds: int) -> dict[str, list[float]]:
    engines = {name: create_async_engine(lab.urls["main"]) for name in ("ours", "hand", "bare")}
    with asyncio.Runner() as runner:
        arms: dict[str, Arm] = {}
        for name, tell in _tells(Outbox(engines["ours"], settings=Settings()), 1).items():
            work = partial(_transactions_async, engines[name], tell, count)
            arms[name] = partial(rate, count, partial(_run, runner, work))
        results = interleave(arms, rounds)
        for engine in engines.values():
            runner.run(engine.dispose())
    return results


def _run(runner: asyncio.Runner, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    runner.run(work())


async def _transactions_async(engine: AsyncEngine, tell: Tell, count: int) -> None:
    for _ in range(count):
        async with AsyncSession(engine) as session, session.begin():
            await session.run_sync(_business, tell, 1)


def _figures(what: str, results: dict[str, list[float]], bars: tuple[float | None, float | None]) -> list[Figure]:
    ours, hand, bare = results["ours"], results["hand"], results["bare"]
    return [
        compared(what, "", ours, "without", bare, bars[0]),
        compared(what, "", ours, "hand-written INSERT", hand, bars[1]),
        compared(f"{what} by hand", "", hand, "without", bare, None),
    ]


def _wire(lab: Lab, outbox: Outbox) -> Figure:
    """Count statements and round trips of one transaction, as libpq saw them."""
    tells = {messages: _tells(outbox, messages) for messages in (1, 100)}
    bare = _traced(lab.engine("main"), tells[1]["bare"], 1)
    one = _traced(lab.engine("main"), tells[1]["ours"], 1)
    hundred = _traced(lab.engine("main"), tells[100]["ours"], 100)
    hand = _traced(lab.engine("main"), tells[1]["hand"], 1)
    more = (one[0] - bare[0], hundred[0] - bare[0])
    return Figure(
        "statements a transaction pays for 1, for 100 messages",
        f"{more[0]}, {more[1]} ({one[1] - bare[1]:+d}, {hundred[1] - bare[1]:+d} round trips)",
        f"{hand[0] - bare[0]} ({hand[1] - bare[1]:+d} round trips)",
        bar="1, 1",
        met=more == (1, 1),
    )


def _traced(engine: Engine, tell: Tell, messages: int) -> tuple[int, int]:
    """Return how many statements one transaction sent, and how often it waited for the server."""
    # Until the driver has prepared its statements, one for each size of the integers in them.
    _transactions(engine, tell, messages, 100)
    with tempfile.NamedTemporaryFile("r") as log, Session(engine) as session:
        raw: Any = session.connection().connection.driver_connection
        session.rollback()
        raw.pgconn.trace(log.fileno())
        with session.begin():
            _business(session, tell, messages)
        raw.pgconn.untrace()
        log.seek(0)
        kinds = [line.split("\t")[3] for line in log.read().splitlines() if line.count("\t") >= 3]
    return kinds.count("Execute") + kinds.count("Query"), kinds.count("ReadyForQuery")


BENCHMARK = Benchmark(run)
