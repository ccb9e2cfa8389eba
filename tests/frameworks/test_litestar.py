"""Litestar under uvicorn: the same middleware, dependency and worker as anywhere else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from litestar import Litestar, post
from litestar.di import NamedDependency, Provide
from litestar.exceptions import NotFoundException
from litestar.middleware import DefineMiddleware
from litestar.params import FromPath
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from outbox import Message, Outbox, Settings, Worker
from outbox.asgi import TransactionMiddleware, request_session
from tests.frameworks.conftest import NOTE, SELL, Shop, serving


def application(shop: Shop, driver: str) -> Litestar:
    """Return an application that sells numbers, with a worker in its lifespan."""
    outbox, lock = Outbox(settings=Settings()), asyncio.Lock()

    @asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        engine = create_async_engine(make_url(shop.url).set(drivername=f"postgresql+{driver}"))
        outbox.bind(engine)
        async with Worker(outbox):
            yield
        await engine.dispose()

    @outbox.consumer("sold", group="counting")
    async def count(message: Message, session: AsyncSession) -> None:
        async with lock:
            await session.execute(NOTE, {"number": message.body["number"]})

    @post("/sales/{number:int}", dependencies={"session": Provide(request_session)})
    async def sell(number: FromPath[int], session: NamedDependency[AsyncSession]) -> dict[str, int]:
        await session.execute(SELL, {"number": number})
        outbox.send(session, "sold", {"number": number})
        if number == 404:
            raise NotFoundException("no such number")
        if number == 0:
            raise LookupError("the application fails")
        return {"number": number}

    return Litestar(
        [sell],
        lifespan=[lifespan],
        middleware=[DefineMiddleware(TransactionMiddleware, outbox=outbox)],
        logging_config=None,
    )


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_success_is_told_after_the_commit(driver: str, shop: Shop) -> None:
    """201 for what is committed, dispatched and handled; an error for what failed, which has no row and no message."""
    with serving(application(shop, driver)) as client:
        answers = [client.post(f"/sales/{number}").status_code for number in (7, 7, 404, 0, 8)]
        assert answers == [201, 500, 404, 500, 201]
        assert shop.wait_for_effects(2) == [7, 8]
    assert (shop.sales(), shop.sent()) == ([7, 8], ['{"number":7}', '{"number":8}'])
