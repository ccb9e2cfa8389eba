"""Sending: a business transaction with and without a message, in each library's way to write it with the rest."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from benchmarks import bank, handmade
from benchmarks.lab import Lab
from benchmarks.peers.business import asyncpg_url, libpq_url, new_order
from benchmarks.peers.contest import Arm, Bar, Costs, contest
from benchmarks.usage import ServerProcesses
from outbox import Outbox, Settings

#: What sends an order in the transaction of a session.
Send = Callable[[Session, dict[str, Any]], object]
AsyncSend = Callable[[AsyncSession, dict[str, Any]], Awaitable[object]]

SENDING = "business transaction, a message sent with it"
WITHOUT, WITHOUT_ASYNC = "without a message, Session", "without a message, AsyncSession"
BARS = (
    Bar("send ÷ hand-written single INSERT, by rate", "ours", "hand-written INSERT", 0.95),
    Bar("send ÷ hand-written single INSERT, by CPU", "ours", "hand-written INSERT", 0.95, by_cpu=True),
)
#: Which transaction without a message each arm is compared with.
BARE = {
    **dict.fromkeys(("ours", "hand-written INSERT", "pgmq", "procrastinate"), WITHOUT),
    **dict.fromkeys(("ours, AsyncSession", "PgQueuer", "faststream-outbox"), WITHOUT_ASYNC),
}


def contests(lab: Lab, server: ServerProcesses, stack: ExitStack) -> Iterator[tuple[str, dict[str, Costs]]]:
    """Yield the costs of the transactions; of the databases, those in which the arms of handling are installed."""
    runner = stack.enter_context(asyncio.Runner())
    arms = {**_sync_arms(lab, stack), **_async_arms(lab, runner, stack)}
    yield SENDING, contest(arms, lab.scale(300, 100), lab.scale(15, 2), server, lab.say)


def _sync_arms(lab: Lab, stack: ExitStack) -> dict[str, Arm]:
    import procrastinate

    outbox = Outbox(lab.engine("ours"), settings=Settings())
    with lab.engine("pgmq").begin() as connection:
        connection.execute(text("SELECT pgmq.create('sent')"))
    connector = procrastinate.SyncPsycopgConnector(conninfo=libpq_url(lab.urls["procrastinate"]))
    app = procrastinate.App(connector=connector)
    stack.enter_context(app.open())

    @app.task(name="sent", queue="sent")
    def sent(**order: Any) -> None:
        """Never run."""

    def by_ours(session: Session, order: dict[str, Any]) -> None:
        outbox.send(session, "sent", order, key=str(order["receiver"]))

    def by_hand(session: Session, order: dict[str, Any]) -> None:
        session.execute(handmade.INSERT, handmade.values("sent", str(order["receiver"]), order))

    def by_pgmq(session: Session, order: dict[str, Any]) -> None:
        session.execute(text("SELECT pgmq.send('sent', CAST(:body AS jsonb))"), {"body": json.dumps(order)})

    def by_procrastinate(session: Session, order: dict[str, Any]) -> None:
        driver = session.connection().connection.driver_connection
        sent.configure(connection=driver).defer(**order)

    sends: dict[str, tuple[str, Send]] = {
        WITHOUT: ("hand", lambda *_: None),
        "ours": ("ours", by_ours),
        "hand-written INSERT": ("hand", by_hand),
        "pgmq": ("pgmq", by_pgmq),
        "procrastinate": ("procrastinate", by_procrastinate),
    }
    return {name: _arm(lab, database, send) for name, (database, send) in sends.items()}


def _arm(lab: Lab, database: str, send: Send) -> Arm:
    # An engine for each: hooks of one library must not slow down the others.
    engine = lab.engine(database)

    def handle(messages: int) -> None:
        for _ in range(messages):
            order = new_order()
            with Session(engine) as session, session.begin():
                _business(session, order)
                send(session, order)

    return Arm(lambda _: None, handle)


def _business(session: Session, order: dict[str, Any]) -> None:
    session.execute(bank.MOVE, {"account_id": order["receiver"], "moved": order["amount"]})
    session.execute(bank.NOTE, {"account_id": order["receiver"], "amount": order["amount"]})


def _dispose(runner: asyncio.Runner, engine: AsyncEngine) -> None:
    runner.run(engine.dispose())


def _async_arms(lab: Lab, runner: asyncio.Runner, stack: ExitStack) -> dict[str, Arm]:
    from faststream_outbox import OutboxBroker, make_outbox_table
    from pgqueuer.queries import Queries
    from sqlalchemy import MetaData

    engines = {
        name: create_async_engine(asyncpg_url(lab.urls[name])) for name in ("ours", "hand", "pgqueuer", "faststream")
    }
    for engine in engines.values():
        stack.callback(_dispose, runner, engine)
    outbox = Outbox(engines["ours"], settings=Settings())
    table = make_outbox_table(MetaData(), table_name="relay")
    broker = OutboxBroker(engines["faststream"], outbox_table=table, logger=None)

    async def by_ours(session: AsyncSession, order: dict[str, Any]) -> None:
        outbox.send(session, "sent", order, key=str(order["receiver"]))

    async def by_pgqueuer(session: AsyncSession, order: dict[str, Any]) -> None:
        driver: Any = (await (await session.connection()).get_raw_connection()).driver_connection
        queries: Any = Queries.from_asyncpg_connection(driver)
        await queries.enqueue("sent", json.dumps(order).encode())

    async def by_faststream(session: AsyncSession, order: dict[str, Any]) -> None:
        await broker.publish(order, queue="sent", session=session)

    async def by_none(session: AsyncSession, order: dict[str, Any]) -> None:
        pass

    sends: dict[str, tuple[str, AsyncSend]] = {
        WITHOUT_ASYNC: ("hand", by_none),
        "ours, AsyncSession": ("ours", by_ours),
        "PgQueuer": ("pgqueuer", by_pgqueuer),
        "faststream-outbox": ("faststream", by_faststream),
    }

    def arm(database: str, send: AsyncSend) -> Arm:
        async def handle(messages: int) -> None:
            for _ in range(messages):
                order = new_order()
                async with AsyncSession(engines[database]) as session, session.begin():
                    await session.run_sync(_business, order | {"amount": float(order["amount"])})
                    await send(session, order)

        return Arm(lambda _: None, lambda messages: runner.run(handle(messages)))

    return {name: arm(database, send) for name, (database, send) in sends.items()}
