"""Rollback per test: an outbox whose messages are sent and consumed in one transaction, which is undone at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Engine, event

from outbox.database.at_commit import write_now
from outbox.database.dialect import PSYCOPG
from outbox.errors import InvalidHandler, TransactionRequired
from outbox.testing.runners import TransactionRunner, rolled_back

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection
    from sqlalchemy.orm import Session

    from outbox.app import Outbox


@contextmanager
def rolling_back(outbox: Outbox, connection: Connection | None = None) -> Iterator[Connection]:
    """Do all of an outbox in one transaction until the block ends, and undo it then; yield its connection.

    That transaction runs on ``connection``, where the test's own fixture rolls it back, or on one of the outbox's
    engine. The application's sessions must be on it, with ``join_transaction_mode="create_savepoint"``: the sessions of
    the outbox itself are, and so are all of the sessionmaker that it is bound to. When such a session commits, what it
    has sent is written; `drain`, `make_due` and the assertions work inside the transaction too.

    Raises:
        InvalidHandler: the outbox is on an AsyncEngine (use `arolling_back`), or in such a block already.
        TransactionRequired: ``connection`` is in no transaction.
    """
    if not isinstance(outbox.engine, Engine):
        raise InvalidHandler("rolling_back needs an Outbox on a sync engine; use 'async with arolling_back(outbox)'")
    if connection is not None:
        if not connection.in_transaction():
            raise TransactionRequired("rolling_back: the connection is in no transaction; call connection.begin()")
        with _inside(outbox, TransactionRunner(connection, None), connection):
            yield connection
        return
    with outbox.engine.connect() as own:
        transaction = own.begin()
        try:
            with _inside(outbox, TransactionRunner(own, None), own):
                yield own
        finally:
            transaction.rollback()


@asynccontextmanager
async def arolling_back(outbox: Outbox, connection: AsyncConnection | None = None) -> AsyncIterator[AsyncConnection]:
    """Do the same as `rolling_back` for an outbox on an AsyncEngine."""
    from sqlalchemy.ext.asyncio import AsyncEngine  # noqa: PLC0415 - needs greenlet

    loop = asyncio.get_running_loop()
    if not isinstance(outbox.engine, AsyncEngine):
        raise InvalidHandler("arolling_back needs an Outbox on an AsyncEngine; use 'with rolling_back(outbox)'")
    if connection is not None:
        if not connection.in_transaction():
            raise TransactionRequired("arolling_back: the connection is in no transaction; await connection.begin()")
        with _inside(outbox, TransactionRunner(_sync(connection), loop), connection):
            yield connection
        return
    async with outbox.engine.connect() as own:
        transaction = await own.begin()
        try:
            with _inside(outbox, TransactionRunner(_sync(own), loop), own):
                yield own
        finally:
            await transaction.rollback()


def _sync(connection: AsyncConnection) -> Connection:
    assert connection.sync_connection is not None  # noqa: S101 - it is in a transaction
    return connection.sync_connection


@contextmanager
def _inside(outbox: Outbox, runner: TransactionRunner, bind: Connection | AsyncConnection) -> Iterator[None]:
    """Have the outbox's sessions join the transaction, and write what sessions on it send when they commit."""
    from sqlalchemy.orm import Session  # noqa: PLC0415 - importing outbox must not pay for it

    if runner.connection.dialect.driver != PSYCOPG:
        raise InvalidHandler(
            f"messages sent through {runner.connection.dialect.driver} can't be consumed on its connection; "
            "give this test an Outbox on psycopg 3: Outbox(create_engine('postgresql+psycopg://…'))"
        )
    if outbox in rolled_back:
        raise InvalidHandler(f"{outbox!r} is being rolled back already")
    sessions = outbox._producer.sessions
    before: dict[str, Any] = dict(sessions.kw)

    def write(session: Session) -> None:
        if session.bind is runner.connection:
            write_now(runner.connection)

    rolled_back[outbox] = runner
    sessions.configure(bind=bind, join_transaction_mode="create_savepoint")
    # What a flush has sent comes after the first one, what a session without a statement has sent after the second.
    names = "before_commit", "after_commit"
    for name in names:
        event.listen(Session, name, write)
    try:
        yield
    finally:
        for name in names:
            event.remove(Session, name, write)
        sessions.kw = before
        del rolled_back[outbox]
