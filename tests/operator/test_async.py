"""Every act and decision from async code, on an Outbox with an AsyncEngine of psycopg or asyncpg."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from outbox import Orphan, Outbox, Resolution, Settings
from outbox.errors import ActRefused, AlreadyCommitted, CheckRefused, TransactionRequired
from outbox.operator import model
from outbox.operator.model import PageRequest
from tests.kit import Tables, dispatch_all

Act = Callable[[Outbox, Tables], Awaitable[None]]


@pytest.fixture(params=["psycopg", "asyncpg"])
def run(request: pytest.FixtureRequest, new_database: Callable[[], str], new_engine: Callable[..., Engine]) -> Any:
    """A function that runs async code on an Outbox with an AsyncEngine of this driver."""
    url = new_database()
    observer = create_engine(url, isolation_level="AUTOCOMMIT")
    request.addfinalizer(observer.dispose)

    def run(act: Act) -> None:
        async def on_a_loop() -> None:
            engine = create_async_engine(make_url(url).set(drivername=f"postgresql+{request.param}"))
            await act(Outbox(engine, settings=Settings()), Tables(observer))
            await engine.dispose()

        asyncio.run(on_a_loop())

    return run


async def prepare(outbox: Outbox, topic: str = "paid") -> Any:
    """Prepare a half in a transaction of its own; return its id."""
    engine: Any = outbox.engine
    async with AsyncSession(engine) as session, session.begin():
        return outbox.prepare(session, topic, {"number": 1})


def test_decisions(run: Callable[[Act], None]) -> None:
    """Committed and rolled back alone, as on a sync engine: the first decision wins, and is returned."""

    async def act(outbox: Outbox, tables: Tables) -> None:
        one, two = await prepare(outbox), await prepare(outbox)
        first = await outbox.run_sync(outbox.commit, one)
        again = await outbox.run_sync(outbox.commit, one)
        assert first is not None
        assert again is not None
        assert (first.first, again.first, again.resolution) == (True, False, Resolution.COMMIT)
        with pytest.raises(AlreadyCommitted):
            await outbox.run_sync(outbox.rollback, one)
        await outbox.run_sync(outbox.rollback, two)
        assert tables.ops() == {one: "commit", two: "rollback"}

    run(act)


def test_acts_of_operators(run: Callable[[Act], None]) -> None:
    """Lists, views, single acts with their audit, bulk jobs, and health."""

    async def act(outbox: Outbox, tables: Tables) -> None:
        await outbox.run_sync(outbox.declare_topic, "paid", 3)
        half_id = await prepare(outbox)
        operator = outbox.operator
        await outbox.run_sync(operator.commit, half_id, by="ann", why="the provider says so", force=True)
        assert tables.op(half_id) == ("commit", "operator")
        with pytest.raises(ActRefused):
            await outbox.run_sync(operator.rollback, half_id, by="ann", why="too late")
        await asyncio.to_thread(dispatch_all, tables.observer)
        await outbox.run_sync(operator.resend, half_id, by="ann")
        page = await outbox.run_sync(operator.messages, model.MessageFilter(), PageRequest())
        view = await outbox.run_sync(operator.message, half_id)
        overview = await outbox.run_sync(operator.overview)
        assert (len(page.items), view.id, bool(overview)) == (1, half_id, True)
        job = await outbox.run_sync(lambda: operator.compensate(half_id, by="ann", why="no such account"))
        assert (await outbox.run_sync(operator.bulk_job, job.id)).id == job.id
        assert tables.value("SELECT count(*) FROM outbox.audit") == 3
        assert tables.value("SELECT queues FROM outbox.topic") == 3

    run(act)


@pytest.mark.parametrize("kind", ["plain", "async", "async without session"])
def test_check_now(kind: str, run: Callable[[Act], None]) -> None:
    """A checker is asked at once; an async one on the caller's loop, which isn't blocked by the wait for it."""

    async def act(outbox: Outbox, tables: Tables) -> None:
        asked_in: list[Any] = []

        def plain(orphan: Orphan, session: Any) -> Resolution:
            asked_in.append(threading.current_thread())
            return Resolution.COMMIT

        async def asynchronous(orphan: Orphan, session: AsyncSession) -> Resolution:
            asked_in.append(asyncio.get_running_loop())
            await session.execute(text("SELECT 1"))
            return Resolution.COMMIT

        async def alone(orphan: Orphan) -> Resolution:
            asked_in.append(asyncio.get_running_loop())
            return Resolution.COMMIT

        checker: Any = {"plain": plain, "async": asynchronous}.get(kind, alone)
        outbox.checker("paid")(checker)
        half_id = await prepare(outbox)
        answer = await outbox.run_sync(outbox.operator.check_now, half_id, by="ann")
        assert (answer.resolution, tables.op(half_id)) == (Resolution.COMMIT, ("commit", "check"))
        assert (asked_in == [asyncio.get_running_loop()]) is (kind != "plain")

    run(act)


def test_outside_run_sync(run: Callable[[Act], None]) -> None:
    """Called directly, each of them says how it is awaited, and does nothing."""

    async def act(outbox: Outbox, tables: Tables) -> None:
        half_id = await prepare(outbox)
        for call in (
            lambda: outbox.commit(half_id),
            lambda: outbox.declare_topic("paid", 3),
            outbox.operator.overview,
            lambda: outbox.operator.resend(half_id, by="ann"),
            lambda: outbox.operator.check_now(half_id, by="ann"),
        ):
            # Also after something inside run_sync has read which tables there are.
            with pytest.raises(TransactionRequired, match=r"await outbox\.run_sync\(function, \.\.\.\)"):
                call()
            await outbox.run_sync(outbox.operator.system)
        assert tables.ops() == {}

    run(act)


def test_on_a_sync_engine(new_engine: Callable[..., Engine]) -> None:
    """An async caller of an Outbox with a sync engine awaits the same, in a thread that doesn't block its loop."""
    outbox = Outbox(new_engine(), settings=Settings())

    @outbox.checker("paid")
    async def check(orphan: Orphan) -> Resolution:
        return Resolution.COMMIT

    async def act() -> None:
        threads = await outbox.run_sync(threading.get_ident), threading.get_ident()
        assert threads[0] != threads[1]
        await outbox.run_sync(outbox.declare_topic, "paid", 3)

    asyncio.run(act())
    with outbox.engine.begin() as connection:  # type: ignore[union-attr]  # it is a sync one
        half_id = outbox.prepare(connection, "paid", {})
    with pytest.raises(CheckRefused, match="needs an event loop"):
        outbox.operator.check_now(half_id, by="ann")
