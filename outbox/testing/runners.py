"""Where the passes of a test run, and on which connections.

Plain functions run on connections of the outbox's engine, in the thread that runs the passes; async ones on the event
loop of the test that waits for them. All of an outbox that is rolled back runs in one transaction: its messages are
sent and consumed in it, and it is undone at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, event

from outbox.database.at_commit import write_now
from outbox.database.dialect import PSYCOPG
from outbox.database.engines import EngineRunner, LoopRunner, NewRunner, Pass, Runner, address_of, engine_of
from outbox.database.execute import execute
from outbox.database.session import begin
from outbox.errors import InvalidHandler, TransactionRequired
from outbox.message.model import Counts
from outbox.testing import sql

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
    from sqlalchemy.orm import Session

    from outbox.app import Outbox


P = ParamSpec("P")
T = TypeVar("T")


class TransactionRunner:
    """Runs passes inside the transaction of one connection; ``loop`` is the one that an async connection belongs to."""

    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop | None) -> None:
        self.connection = connection
        self.loop = loop

    def run(self, one_pass: Pass) -> Counts:
        """Run a pass; from a thread other than the loop's, if there is a loop."""
        if self.loop is None:
            return self._run(one_pass)
        return run_on(self.loop, self._spawn(one_pass))

    def _run(self, one_pass: Pass) -> Counts:
        # The writes that wait for a COMMIT, which will never come.
        write_now(self.connection)
        try:
            return one_pass(self.connection, self.connection)
        finally:
            if self.connection.in_transaction():
                execute(self.connection, sql.STAY_IDLE)

    async def _spawn(self, one_pass: Pass) -> Counts:
        from sqlalchemy.util import greenlet_spawn  # noqa: PLC0415 - needs greenlet

        return await greenlet_spawn(self._run, one_pass)

    def end(self) -> None:
        """Do nothing: the connection is the test's."""


def run_on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Wait in this thread for a coroutine on an event loop, in another one."""
    return asyncio.run_coroutine_threadsafe(work, loop).result()


#: Outboxes that a test rolls back.
rolled_back: WeakKeyDictionary[Outbox, TransactionRunner] = WeakKeyDictionary()


#: The loop that awaits the call of this thread, until `PassRunners` have taken it.
_awaiting: ContextVar[asyncio.AbstractEventLoop | None] = ContextVar("outbox_testing", default=None)


def _taken() -> asyncio.AbstractEventLoop | None:
    loop = _awaiting.get()
    _awaiting.set(None)  # not for the functions that run meanwhile
    return loop


@dataclass(frozen=True, slots=True)
class PassRunners:
    """Makes the runners of one call of ``act``, such as "drain"; ``loop`` is that of the test which waits for it."""

    act: str
    loop: asyncio.AbstractEventLoop | None = field(default_factory=_taken)

    def of(self, outbox: Outbox, what: str | None = None) -> Runner:
        """Return a runner for the database of an outbox; ``what`` names the async function that is to run.

        Raises:
            InvalidHandler: it needs an event loop, and there is none.
        """
        if (inside := rolled_back.get(outbox)) is not None:
            if what is not None and inside.loop is None:
                raise InvalidHandler(
                    f"{self.act} can't run {what} on a sync connection; roll back with arolling_back()"
                )
            if inside.loop is not self.loop and inside.loop is not None:
                raise InvalidHandler(f"{self.act} can't use an AsyncConnection; await on_loop({self.act}, …)")
            return inside
        if self.loop is None and what is not None:
            raise InvalidHandler(f"{self.act} can't run {what}; await on_loop({self.act}, …), or run a Worker")
        if self.loop is None and not isinstance(outbox.engine, Engine):
            raise InvalidHandler(
                f"{self.act} needs an Outbox on a sync engine; await on_loop({self.act}, …) for an AsyncEngine, or run "
                "a Worker"
            )
        if self.loop is not None and what is not None:
            return LoopRunner(outbox.engine, self.loop)
        return EngineRunner(outbox.engine)

    def new(self, outbox: Outbox, what: str) -> NewRunner:
        """Return what makes runners for functions of one kind, as `active` does; ``what`` names an async one."""
        return lambda is_async: self.active(outbox, what if is_async else None)

    def active(self, outbox: Outbox, what: str | None = None) -> ActiveRunner:
        """Return a runner as `of` does, whose passes work for the outbox."""
        return ActiveRunner(self.of(outbox, what), outbox)


@dataclass(frozen=True, slots=True)
class ActiveRunner:
    """Runs passes that work for an outbox, as a worker does: it is `active`, and its middlewares see them."""

    runner: Runner
    outbox: Outbox

    def run(self, one_pass: Pass) -> Counts:
        """Run a pass."""

        def active_pass(connection: Connection, source: Connection) -> Counts:
            with self.outbox.active():
                return one_pass(connection, source)

        return self.runner.run(active_pass)

    def end(self) -> None:
        """End the runner."""
        self.runner.end()


def read(runner: Runner, function: Callable[[Connection], T]) -> T:
    """Return what a function of a connection returns, which is called in a transaction."""
    results: list[T] = []

    def one_pass(connection: Connection, _: Connection) -> Counts:
        with begin(connection):
            results.append(function(connection))
        return Counts()

    runner.run(one_pass)
    return results[0]


@contextmanager
def source_connection(bind: Engine | AsyncEngine | str | None, connection: Connection) -> Iterator[Connection]:
    """Yield a connection to a producer's database: ``connection`` if that is the consumer's."""
    if bind is None:
        yield connection
        return
    address = address_of(bind)
    for outbox, inside in rolled_back.items():
        if address_of(outbox.engine) == address:
            yield inside.connection
            return
    engine = engine_of(bind)
    with engine.connect() as source:
        yield source
    if engine is not bind:
        engine.dispose()


async def on_loop(function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Call a function of this kit, such as `drain`, for any outbox: ``await on_loop(drain, outbox, delayed=True)``.

    It is called once, in another thread, and so are plain handlers; async functions run on the loop that awaits this.
    """
    loop = asyncio.get_running_loop()

    def call() -> T:
        _awaiting.set(loop)
        return function(*args, **options)

    return await asyncio.to_thread(call)


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
