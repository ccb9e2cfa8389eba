"""Everything that a message can be sent with, behind one face: write, send, commit, roll back, a savepoint."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, Protocol

import asyncpg
import psycopg
import psycopg2
import psycopg2.extensions
import pytest
from sqlalchemy import Engine, create_engine, insert, text
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from outbox import Outbox
from tests.producer.bank import change, settle


class Opened(Protocol):
    """An open session or connection."""

    carrier: Any

    async def write(self, number: int) -> None:
        """Make the business change."""

    async def commit(self) -> None:
        """Commit the transaction."""

    async def rollback(self) -> None:
        """Roll the transaction back."""

    async def savepoint(self) -> Callable[[], Any]:
        """Open a savepoint and return what rolls it back."""

    async def pid(self) -> int:
        """Return the process of the server that serves it."""


async def send(outbox: Outbox, opened: Opened, number: int, **options: Any) -> Any:
    """Send a message about a number, and wait where that has to be waited for."""
    return await settle(outbox.send(opened.carrier, "t", {"number": number}, **options))


class OfSqlAlchemy:
    """A session or connection of SQLAlchemy's, sync or async."""

    def __init__(self, carrier: Any) -> None:
        self.carrier = carrier
        # SQLModel's sessions warn of their `execute`.
        self._execute = getattr(carrier, "exec", None) or carrier.execute

    async def write(self, number: int) -> None:
        await settle(self._execute(insert(change).values(number=number)))

    async def commit(self) -> None:
        await settle(self.carrier.commit())

    async def rollback(self) -> None:
        await settle(self.carrier.rollback())

    async def savepoint(self) -> Callable[[], Any]:
        nested = await settle(self.carrier.begin_nested())
        return nested.rollback  # type: ignore[no-any-return]

    async def pid(self) -> int:
        return int((await settle(self._execute(text("SELECT pg_backend_pid()")))).scalar_one())


class OfDbapi:
    """A connection of psycopg, sync or async, or of psycopg2."""

    def __init__(self, carrier: Any) -> None:
        self.carrier = carrier

    async def _run(self, sql: str) -> Any:
        cursor = self.carrier.cursor()
        await settle(cursor.execute(sql))
        return await settle(cursor.fetchone()) if cursor.description else None

    async def write(self, number: int) -> None:
        await self._run(f"INSERT INTO change VALUES ({number})")

    async def commit(self) -> None:
        await settle(self.carrier.commit())

    async def rollback(self) -> None:
        await settle(self.carrier.rollback())

    async def savepoint(self) -> Callable[[], Any]:
        await self._run("SAVEPOINT one")
        return lambda: self._run("ROLLBACK TO one")

    async def pid(self) -> int:
        return int((await self._run("SELECT pg_backend_pid()"))[0])


class OfAsyncpg:
    """A connection of asyncpg's, which needs its transactions opened."""

    def __init__(self, carrier: Any, *, autocommit: bool) -> None:
        self.carrier = carrier
        self._autocommit = autocommit
        self._transaction: Any = None

    async def _begin(self) -> None:
        if self._transaction is None and not self._autocommit:
            self._transaction = self.carrier.transaction()
            await self._transaction.start()

    async def write(self, number: int) -> None:
        await self._begin()
        await self.carrier.execute("INSERT INTO change VALUES ($1)", number)

    async def commit(self) -> None:
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            await transaction.commit()

    async def rollback(self) -> None:
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            await transaction.rollback()

    async def savepoint(self) -> Callable[[], Any]:
        await self._begin()
        nested = self.carrier.transaction()
        await nested.start()
        return nested.rollback  # type: ignore[no-any-return]

    async def pid(self) -> int:
        await self._begin()
        return int(await self.carrier.fetchval("SELECT pg_backend_pid()"))


def _through(url: str, driver: str) -> str:
    return url.replace("postgresql+psycopg", f"postgresql+{driver}")


@contextmanager
def _engine(url: str, autocommit: bool) -> Any:
    engine = create_engine(url, **({"isolation_level": "AUTOCOMMIT"} if autocommit else {}))
    try:
        yield engine
    finally:
        engine.dispose()


@asynccontextmanager
async def _async_engine(url: str, autocommit: bool) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(url, **({"isolation_level": "AUTOCOMMIT"} if autocommit else {}))
    try:
        yield engine
    finally:
        await engine.dispose()


def _sync(driver: str, make: Callable[[Engine], Any]) -> Any:
    @asynccontextmanager
    async def opened(url: str, autocommit: bool) -> AsyncIterator[Opened]:
        with _engine(_through(url, driver), autocommit) as engine, make(engine) as carrier:
            yield OfSqlAlchemy(carrier)

    return opened


def _async(driver: str, make: Callable[[AsyncEngine], Any]) -> Any:
    @asynccontextmanager
    async def opened(url: str, autocommit: bool) -> AsyncIterator[Opened]:
        async with _async_engine(_through(url, driver), autocommit) as engine, make(engine) as carrier:
            yield OfSqlAlchemy(carrier)

    return opened


@contextmanager
def _scoped(engine: Engine) -> Any:
    session = scoped_session(sessionmaker(engine))
    try:
        yield session
    finally:
        session.remove()


@asynccontextmanager
async def _async_scoped(engine: AsyncEngine) -> AsyncIterator[Any]:
    session = async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: 1)
    try:
        yield session
    finally:
        await session.remove()


def _sqlmodel(engine: Engine) -> Any:
    sqlmodel = pytest.importorskip("sqlmodel", reason="the oldest libraries are tried without it")
    return sqlmodel.Session(engine)


def _async_sqlmodel(engine: AsyncEngine) -> Any:
    pytest.importorskip("sqlmodel", reason="the oldest libraries are tried without it")
    from sqlmodel.ext.asyncio.session import AsyncSession as SqlModelSession

    return SqlModelSession(engine)


@asynccontextmanager
async def _flask(url: str, autocommit: bool) -> AsyncIterator[Opened]:
    flask = pytest.importorskip("flask", reason="the oldest libraries are tried without it")
    import flask_sqlalchemy

    app = flask.Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = url
    if autocommit:
        app.config["SQLALCHEMY_ENGINE_OPTIONS"] = {"isolation_level": "AUTOCOMMIT"}
    db = flask_sqlalchemy.SQLAlchemy(app)
    with app.app_context():
        try:
            yield OfSqlAlchemy(db.session)
        finally:
            db.session.remove()
            db.engine.dispose()


def _dsn(url: str) -> str:
    return url.replace("postgresql+psycopg", "postgresql")


@asynccontextmanager
async def _psycopg(url: str, autocommit: bool) -> AsyncIterator[Opened]:
    connection = psycopg.connect(_dsn(url), autocommit=autocommit)
    try:
        yield OfDbapi(connection)
    finally:
        connection.close()


@asynccontextmanager
async def _psycopg_async(url: str, autocommit: bool) -> AsyncIterator[Opened]:
    connection = await psycopg.AsyncConnection.connect(_dsn(url), autocommit=autocommit)
    try:
        yield OfDbapi(connection)
    finally:
        await connection.close()


@asynccontextmanager
async def _psycopg2(url: str, autocommit: bool) -> AsyncIterator[Opened]:
    connection = psycopg2.connect(_dsn(url))
    connection.autocommit = autocommit
    try:
        yield OfDbapi(connection)
    finally:
        connection.close()


@asynccontextmanager
async def _asyncpg(url: str, autocommit: bool) -> AsyncIterator[Opened]:
    connection = await asyncpg.connect(_dsn(url))
    try:
        yield OfAsyncpg(connection, autocommit=autocommit)
    finally:
        await connection.close()


@asynccontextmanager
async def _asyncpg_pool(url: str, autocommit: bool) -> AsyncIterator[Opened]:
    async with AsyncExitStack() as ended:
        pool = await ended.enter_async_context(asyncpg.create_pool(_dsn(url), min_size=1, max_size=1))
        connection = await ended.enter_async_context(pool.acquire())
        yield OfAsyncpg(connection, autocommit=autocommit)


#: By name: opens a session or connection on a database in no transaction, ``(url, autocommit)``.
CARRIERS: dict[str, Any] = {
    **{f"Session on {driver}": _sync(driver, Session) for driver in ("psycopg", "psycopg2")},
    **{f"Connection on {driver}": _sync(driver, Engine.connect) for driver in ("psycopg", "psycopg2")},
    **{f"AsyncSession on {driver}": _async(driver, AsyncSession) for driver in ("psycopg", "asyncpg")},
    **{f"AsyncConnection on {driver}": _async(driver, AsyncEngine.connect) for driver in ("psycopg", "asyncpg")},
    "scoped_session on psycopg2": _sync("psycopg2", _scoped),
    "async_scoped_session on asyncpg": _async("asyncpg", _async_scoped),
    "SQLModel on psycopg": _sync("psycopg", _sqlmodel),
    "SQLModel on asyncpg": _async("asyncpg", _async_sqlmodel),
    "Flask-SQLAlchemy": _flask,
    "psycopg": _psycopg,
    "async psycopg": _psycopg_async,
    "psycopg2": _psycopg2,
    "asyncpg": _asyncpg,
    "asyncpg pool": _asyncpg_pool,
}
#: Those of a driver itself, which send at once.
RAW = ("psycopg", "async psycopg", "psycopg2", "asyncpg", "asyncpg pool")
