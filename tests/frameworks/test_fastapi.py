"""FastAPI under uvicorn: an answer of success only after the COMMIT, and handlers on the loop of the application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import pytest
from fastapi import BackgroundTasks, Depends, FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from sqlalchemy import create_engine, make_url
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Settings, Worker
from outbox.asgi import TransactionMiddleware, request_session
from outbox.errors import TransactionRequired
from tests.frameworks.conftest import NOTE, SELL, Shop, serving
from tests.kit import wait_until

DRIVERS = ["psycopg", "asyncpg"]
RequestSession = Annotated[Session, Depends(request_session)]


def application(shop: Shop, driver: str, dependency: Callable[[Outbox], Any]) -> FastAPI:
    """Return an application that sells numbers, with a session from this dependency, and a worker in its lifespan."""
    outbox = Outbox(settings=Settings())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine = create_async_engine(make_url(shop.url).set(drivername=f"postgresql+{driver}"))
        outbox.bind(engine)
        app.state.lock = asyncio.Lock()

        async with Worker(outbox):
            yield
        await engine.dispose()

    app = FastAPI(lifespan=lifespan)
    app.state.outbox = outbox

    @outbox.consumer("sold", group="counting")
    async def count(message: Message, session: AsyncSession) -> None:
        async with app.state.lock:
            await session.execute(NOTE, {"number": message.body["number"]})

    injected = dependency(outbox)

    @app.post("/sales/{number}", status_code=201)
    async def sell(number: int, session: AsyncSession = injected) -> dict[str, int]:
        await session.execute(SELL, {"number": number})
        outbox.send(session, "sold", {"number": number})
        if number < 0:
            raise HTTPException(404, "no such number")
        if number == 0:
            raise LookupError("the application fails")
        return {"number": number}

    return app


def by_yield(scope: Any) -> Callable[[Outbox], Any]:
    """Return a dependency that commits after its yield, in this scope."""

    def dependency(outbox: Outbox) -> Any:
        async def session() -> AsyncIterator[AsyncSession]:
            made: Any = outbox.new_session()
            async with made, made.begin():
                yield made

        return Depends(session, scope=scope)

    return dependency


def by_middleware(_: Outbox) -> Any:
    """Return the dependency on the session of `TransactionMiddleware`."""
    return Depends(request_session)


def test_the_trap_of_yield(shop: Shop) -> None:
    """What the pages warn of: FastAPI commits after it has answered, so that a COMMIT that fails was a 201 before."""
    with serving(application(shop, "psycopg", by_yield(None))) as client:
        answers = [client.post("/sales/7").status_code for _ in range(2)]
    assert (answers, shop.sales()) == ([201, 201], [7])


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("way", ["scope", "middleware"])
def test_success_is_told_after_the_commit(way: str, driver: str, shop: Shop) -> None:
    """With scope="function" and with the middleware: 500 if the COMMIT fails; what failed has no row or message."""
    app = application(shop, driver, by_yield("function") if way == "scope" else by_middleware)
    if way == "middleware":
        app.add_middleware(TransactionMiddleware, outbox=app.state.outbox)
    with serving(app) as client:
        answers = [client.post(f"/sales/{number}") for number in (7, 7, -1, 0, 8)]
        assert [answer.status_code for answer in answers] == [201, 500, 404, 500, 201]
        assert shop.wait_for_effects(2) == [7, 8]
    assert (shop.sales(), shop.sent()) == ([7, 8], ['{"number":7}', '{"number":8}'])


# --- the middleware -----------------------------------------------------------------------------------------


@pytest.fixture
def plain_app(shop: Shop) -> Iterator[FastAPI]:
    """An application on a sync engine, whose endpoints use their session in unusual ways."""
    engine = create_engine(shop.url)
    outbox = Outbox(engine, settings=Settings())
    app = FastAPI()
    app.add_middleware(TransactionMiddleware, outbox=outbox)

    @app.post("/plain/{number}", status_code=201)
    def plain(number: int, session: RequestSession) -> dict[str, int]:
        session.execute(SELL, {"number": number})
        outbox.send(session, "sold", {"number": number})
        return {"number": number}

    @app.post("/streamed/{number}")
    def streamed(number: int, session: RequestSession) -> StreamingResponse:
        session.execute(SELL, {"number": number})

        def lines() -> Iterator[str]:
            yield f"{shop.sales()}\n"
            session.execute(SELL, {"number": 1000 + number})
            yield "end\n"

        return StreamingResponse(lines())

    @app.post("/later/{number}")
    async def later(number: int, session: RequestSession, tasks: BackgroundTasks) -> None:
        session.execute(SELL, {"number": number})

        async def task() -> None:
            with pytest.raises(TransactionRequired, match="the response has begun"):
                await request_session()
            outcome.append(shop.sales())

        outcome: list[list[int]] = app.state.outcome
        tasks.add_task(task)

    @app.get("/none")
    def none() -> dict[str, int]:
        return {"connections": shop.connections("application_name <> 'observer'")}

    app.state.outcome = []
    yield app
    engine.dispose()


def test_plain_endpoints(shop: Shop, plain_app: FastAPI) -> None:
    """A sync engine and plain functions, which FastAPI runs in threads, are committed alike."""
    with serving(plain_app) as client:
        answers = [client.post(f"/plain/{number}").status_code for number in (1, 1, 2)]
    assert (answers, shop.sales(), len(shop.sent())) == ([201, 500, 201], [1, 2], 2)


def test_a_stream_begins_after_the_commit(shop: Shop, plain_app: FastAPI) -> None:
    """Its first line sees what the request did; what is done while it goes on isn't committed any more."""
    with serving(plain_app) as client:
        assert client.post("/streamed/5").text == "[5]\nend\n"
    assert shop.sales() == [5]


def test_a_task_in_the_background_comes_after_the_commit(shop: Shop, plain_app: FastAPI) -> None:
    """It sees what was committed, and gets no session of the request any more."""
    with serving(plain_app) as client:
        assert client.post("/later/6").status_code == 200
        wait_until(lambda: plain_app.state.outcome, "the task has run")
    assert plain_app.state.outcome == [[6]]


def test_a_request_without_a_session(shop: Shop, plain_app: FastAPI) -> None:
    """No connection is opened for it."""
    before = shop.connections()
    with serving(plain_app) as client:
        assert client.get("/none").status_code == 200
        assert shop.connections() == before


def test_without_the_middleware() -> None:
    """Asked for outside of a request, the session is refused with the line to add."""
    with pytest.raises(TransactionRequired, match=r"app\.add_middleware\(TransactionMiddleware, outbox=outbox\)"):
        asyncio.run(request_session())
