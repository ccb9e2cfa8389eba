"""A session for the application's code inside a transaction of the framework's.

What an `Outbox` is bound to, and what it needs of that.
"""

from __future__ import annotations

import asyncio
import enum
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from sqlalchemy import event
from sqlalchemy.exc import InvalidRequestError, UnboundExecutionError

from outbox.database.at_commit import (
    Hold,
    Item,
    add,
    attach,
    can_begin_ahead,
    commit_and_begin,
    refuse_autocommit,
    savepoint,
    savepoints,
    tidying,
    write_now,
)
from outbox.database.dialect import is_of_driver
from outbox.database.engines import OUTBOX_ENGINE
from outbox.database.execute import Row, Statement, driver_of
from outbox.errors import InvalidSettings, TransactionRequired
from outbox.message.model import HANDLED

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker
    from sqlalchemy.orm import Session, SessionTransaction, sessionmaker


class CarrierKind(enum.Enum):
    """What a function is given to work with."""

    SESSION = "session"
    CONNECTION = "connection"
    CURSOR = "cursor"


@dataclass(frozen=True, slots=True)
class DeclaredCarrier:
    """What a function takes; ``session`` is the class of its session where that is one of the application's own."""

    kind: CarrierKind = CarrierKind.SESSION
    is_async: bool = False
    session: Callable[..., Any] | None = None


def _caller() -> object:
    """Return the task that is running, or the thread where there is no event loop."""
    # Asked for each transaction of a handler, mostly without a loop: get_running_loop would raise each time.
    loop = asyncio._get_running_loop()
    return (loop and asyncio.current_task(loop)) or threading.get_ident()


@dataclass(slots=True, eq=False)
class RunningTransaction:
    """A transaction that code of the application runs in: one of a decorated function, a handler or a checker.

    ``engine`` is that of the `Outbox` whose database it is in, ``open`` gives its Session or AsyncSession.
    ``connection`` is the one that the framework has opened for it, if it has.
    """

    engine: Engine
    is_async: bool
    open: Callable[[], Any]
    connection: Connection | None = None
    #: How often each message was sent within the running call.
    sent: dict[object, int] = field(default_factory=dict)
    _owner: object = field(default_factory=_caller)

    @classmethod
    def of_carrier(cls, carrier: Any) -> RunningTransaction | None:
        """Return the transaction that the framework has opened for the calling code, if a carrier is of it.

        Also to a task that was begun inside: what counts is that both commit together.
        """
        running = _running.get()
        if running is None or (own := running.connection) is None:
            return None
        target = getattr(carrier, "sync_session", None) or getattr(carrier, "sync_connection", carrier)
        joins = target is own or getattr(target, "bind", None) is own
        return running if joins or (is_of_driver(cast("type", type(target))) and target is driver_of(own)) else None

    @classmethod
    def of_caller(cls) -> RunningTransaction | None:
        """Return that of the calling code.

        A task or a thread that was begun inside it inherits its context, but runs beside it: it has none.
        """
        running = _running.get()
        return running if running is not None and running._owner == _caller() else None

    @contextmanager
    def around(self) -> Iterator[None]:
        """Let the code of a block find it."""
        token = _running.set(self)
        try:
            yield
        finally:
            _running.reset(token)


_running: ContextVar[RunningTransaction | None] = ContextVar("outbox_running", default=None)

#: libpq's PQTRANS_IDLE: the server is in no transaction.
_IDLE = 0

#: Where a connection has the statements that left something behind in its session.
_LEFT = "outbox.left"
_WORKERS = "the worker's, which commits it together with its own rows"


class JoinedSession:
    """One session, joined to the transaction that runs on a connection; made when it is first asked for.

    The application's code can't commit: ``session.commit()`` only flushes. Its ``session.rollback()`` undoes the
    transaction, which `rolled_back` tells. ``is_async``: an AsyncSession for code that runs inside ``run_sync``.
    ``takes`` says what the code is given, where it isn't a plain session.
    """

    def __init__(self, connection: Connection, *, is_async: bool, takes: DeclaredCarrier | None = None) -> None:
        self._connection = connection
        self._transaction = connection.get_nested_transaction() or connection.get_transaction()
        self._driver = driver_of(connection)
        self._libpq = self._driver.pgconn
        self._set = connection._execution_options, self._driver.prepare_threshold
        self._is_async = is_async
        self._takes = takes or DeclaredCarrier(is_async=is_async)
        self._kind = self._takes.kind
        self._opened: Any = None
        self._session: Session | None = None
        self._cursors: list[Any] = []
        self._in_pipeline = False
        engine = connection.info.get(OUTBOX_ENGINE, connection.engine)
        self._running = RunningTransaction(engine, is_async, self.open, connection)
        self._token: Token[Any] = _running.set(self._running)
        self._handled: Token[Any] = HANDLED.set(None)
        self._left: list[str] = connection.info.setdefault(_LEFT, [])
        if self._left:  # by a function that failed: not all of it was rolled back
            self._tidy_up()
        self._hold = Hold(_WORKERS, left=self._left)
        self._hold.add(connection)

    def open(self) -> Any:
        """Return the Session or AsyncSession.

        Raises:
            TransactionRequired: the statements of this transaction travel together, and a session needs their answers.
        """
        if self._in_pipeline:
            raise TransactionRequired(
                "a handler with pipeline=True has no session, whose statements need their answers at once; send by "
                "outbox.send(cursor.connection, …), or declare the handler without pipeline=True"
            )
        if self._opened is None:
            from sqlalchemy.orm import Session  # noqa: PLC0415 - importing outbox must not pay for it

            own = self._takes.session
            if self._is_async:
                from sqlalchemy.ext.asyncio import AsyncSession  # noqa: PLC0415 - importing outbox must not pay for it

                make = own or AsyncSession
                self._opened = make(join_transaction_mode="rollback_only", expire_on_commit=False)
                self._session = self._opened.sync_session
                self._session.bind = self._connection
            else:
                make = own or Session
                self._opened = self._session = make(self._connection, join_transaction_mode="rollback_only")
        return self._opened

    def call(self, function: Callable[..., Any], argument: Any) -> Any:
        """Call a function of the application's with an argument and what it takes, and wait for it if it is async.

        A message sent from then on, by the function or by a flush of the session, is caused by the argument.
        """
        HANDLED.set(argument)
        self._hold.function = function
        self._running.sent.clear()
        try:
            result = function(argument, self.open() if self._kind is CarrierKind.SESSION else self._other())
            answer = wait_for(result) if self._is_async else result
            if self._left and not (self.rolled_back or self.ended):
                self.flush()
                self._tidy_up()
            return answer
        finally:
            # What a function has set for the connection's statements isn't for those of the next message.
            self._connection._execution_options, self._driver.prepare_threshold = self._set
            if self._cursors and not self._in_pipeline:  # there, its answers are yet to come
                self._close_cursors()

    def _tidy_up(self) -> None:
        """Take away what the function left in the session, in the transaction: a pooler may give it to others then."""
        done = self._driver.cursor().execute(tidying(self._left))
        if self._is_async:
            wait_for(done)
        self._left.clear()

    def _other(self) -> Any:
        """Return a cursor for this call alone, whatever that does to it; or the connection."""
        if self._kind is CarrierKind.CONNECTION:
            return self._async_connection() if self._is_async else self._connection
        cursor = self._driver.cursor()
        self._cursors.append(cursor)
        return cursor

    def _close_cursors(self) -> None:
        """Close the cursors: a function that still has one would write into the next transaction on the connection."""
        while self._cursors:
            closing = self._cursors.pop().close()
            if self._is_async:
                wait_for(closing)

    def _async_connection(self) -> AsyncConnection:
        from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine  # noqa: PLC0415 - needs greenlet

        return AsyncConnection(AsyncEngine(self._connection.engine), self._connection)

    @contextmanager
    def pipeline(self) -> Iterator[None]:
        """Have the statements of cursors travel together until the block ends; one by one where libpq can't do that.

        Raises:
            psycopg.Error: that of a statement, of whichever call; at a later one, a read, or the end of the block.
        """
        from psycopg import Pipeline  # noqa: PLC0415 - importing outbox must not pay for the driver

        if not Pipeline.is_supported():
            yield
            return
        pipeline = self._driver.pipeline()
        self._in_pipeline = True
        try:
            with _awaited(pipeline) if self._is_async else pipeline:
                yield
        finally:
            self._in_pipeline = False

    @property
    def rolled_back(self) -> bool:
        """Did the application's code roll the session back?"""
        return self._transaction is None or not self._transaction.is_active

    @property
    def ended(self) -> bool:
        """Did the application's code end the transaction in SQL or through the driver, which SQLAlchemy can't see?

        libpq knows it without I/O; it is asked for each message, and so directly.
        """
        return self._libpq.transaction_status == _IDLE and not self.rolled_back

    def flush(self) -> None:
        """Write what the session has yet to write."""
        if self._session is not None:
            self._session.flush()

    def finish(self) -> None:
        """Flush, and hand the messages sent with the session to the connection, to be written at its commit."""
        if self._session is not None:
            self._session.commit()

    def close(self) -> None:
        """Forget the session; its transaction is the caller's."""
        _running.reset(self._token)
        HANDLED.reset(self._handled)
        self._hold.release()
        root = self._connection.get_transaction()
        if root is not None and not root.is_active:  # its COMMIT was refused: the connection is to be free
            root.rollback()
        self._close_cursors()
        if self._session is not None:
            self._session.close()
            # A task or a thread that still has it would write into whatever runs on the connection next.
            self._session.bind = None


def unscoped(carrier: Any) -> Any:
    """Return a session or connection, of a scoped_session the one of this scope."""
    return carrier() if hasattr(carrier, "registry") and not isinstance(carrier, type) else carrier


# --- sent with a session ------------------------------------------------------------------------------------------

#: Where a session has the messages sent with it, and what holds its transaction.
_SENT, _HOLD = "outbox.sent", "outbox.hold"
_ENDED = "a rollback, commit or close"


@dataclass(frozen=True, slots=True)
class SentItem:
    """An item, the engine of its Outbox, and the transaction or savepoint of the session that it was sent in."""

    item: Item
    engine: Engine
    level: SessionTransaction | None


@dataclass(slots=True, eq=False)
class SentWith:
    """The messages sent with a session's transaction and not written yet, and the connections of that transaction.

    ``connections`` holds each connection with the savepoints that were open when the session began to use it,
    ``chosen`` the connection for an Outbox whose own engine the session doesn't use. Which it is counts at the
    COMMIT: the flush before it may be the first to use that engine.
    """

    entries: list[SentItem] = field(default_factory=list)
    connections: dict[Engine, tuple[Connection, tuple[str, ...]]] = field(default_factory=dict)
    chosen: dict[Engine, Connection] = field(default_factory=dict)
    committing: bool = False
    bytes_sent: int = 0

    def target(self, engine: Engine) -> Connection | None:
        """Return the connection that carries the messages of an Outbox on ``engine``."""
        if engine in self.connections:
            return self.connections[engine][0]
        return self.chosen.get(engine) or next((connection for connection, _ in self.connections.values()), None)

    def take(self, connection: Connection) -> list[Item]:
        """Give up the items to be written at the commit of ``connection``."""
        taken = [entry.item for entry in self.entries if self.target(entry.engine) is connection]
        self.entries = [entry for entry in self.entries if self.target(entry.engine) is not connection]
        return taken


def certain(session: Session, sent: SentWith, engine: Engine) -> Connection | Engine | None:
    """Return what will carry the messages of an Outbox on ``engine``; None while only the COMMIT will tell.

    A session that was given several engines, or chooses by code of its own, may yet come to use the Outbox's.
    """
    from sqlalchemy.orm import Session  # noqa: PLC0415 - a caller that passes a session has paid for the import

    if engine in sent.connections:
        return sent.connections[engine][0]
    # SQLAlchemy 2.0 keeps the engines of single classes to itself.
    binds = getattr(session, "binds", None) or getattr(session, "_Session__binds", None)
    if binds or type(session).get_bind is not Session.get_bind:
        return None
    return sent.target(engine) or session.bind


@cache
def hook_sessions() -> None:
    """Listen to the events of all sessions, once per process."""
    from sqlalchemy.orm import Session  # noqa: PLC0415 - importing outbox must not pay for it

    event.listen(Session, "after_begin", _on_begin)
    event.listen(Session, "before_commit", _before_commit)
    event.listen(Session, "after_commit", _after_commit)
    event.listen(Session, "after_transaction_end", _on_end)


def sent_of(session: Session) -> SentWith:
    """Return the messages sent with a session's transaction."""
    sent: SentWith | None = session.info.get(_SENT)
    if sent is None:
        sent = session.info[_SENT] = SentWith()
    return sent


def _on_begin(session: Session, _: SessionTransaction, connection: Connection) -> None:
    sent = sent_of(session)
    if connection.engine not in sent.connections:
        sent.connections[connection.engine] = connection, savepoints(connection)
        if sent.entries:
            attach(connection, sent.take)
    if (hold := session.info.get(_HOLD)) is not None:
        refuse_autocommit(connection)
        hold.add(connection)


def _before_commit(session: Session) -> None:
    if (hold := session.info.get(_HOLD)) is not None and session.get_nested_transaction() is None:
        hold.refuse("session.commit()")
    sent = sent_of(session)
    sent.committing = True
    assign(session, sent)


def assign(session: Session, sent: SentWith) -> None:
    """Make sure that each entry has a connection, for the case that no flush is going to use the Outbox's engine."""
    for engine in {entry.engine for entry in sent.entries}:
        if engine in sent.connections:
            refuse_autocommit(sent.connections[engine][0])
            continue
        try:
            connection = session.connection()
        except UnboundExecutionError:  # a session with engines by table has none for no table
            connection = session.connection(bind_arguments={"bind": engine})
        refuse_autocommit(connection)
        sent.chosen[engine] = connection
        attach(connection, sent.take)


def _after_commit(session: Session) -> None:
    sent = sent_of(session)
    released = session.get_nested_transaction()
    if released is not None:
        outer = released.parent
        while outer is not None and outer.parent is not None and not outer.nested:
            outer = outer.parent
        sent.entries = [
            SentItem(entry.item, entry.engine, outer) if entry.level is released else entry for entry in sent.entries
        ]
        return
    # Left are those of a session which joined a transaction that goes on.
    for connection in {sent.target(entry.engine) for entry in sent.entries}:
        if connection is not None and connection.in_transaction():
            add(connection, *sent.take(connection))


def _on_end(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is None and (hold := session.info.get(_HOLD)) is not None:
        hold.broken = True
    sent: SentWith | None = session.info.get(_SENT)
    if sent is None:
        return
    if transaction.nested:
        sent.committing = False
        sent.entries = [entry for entry in sent.entries if not _is_inside(entry.level, transaction)]
    elif transaction.parent is None:
        del session.info[_SENT]
        # Closing a session that joined a transaction in mode "rollback_only" leaves what it wrote to that transaction.
        for connection, begun_in in sent.connections.values() if sent.entries else ():
            if connection.in_transaction() and set(begun_in) <= set(savepoints(connection)):
                add(connection, *sent.take(connection))
        sent.entries.clear()


@contextmanager
def holding(carrier: Any, function: str, decorator: str) -> Iterator[None]:
    """Keep the code of a block, which is a call of a decorated function, from ending the transaction of its session.

    Raises:
        TransactionRequired: it tried to, or has rolled it back and goes on, or returns.
    """
    session: Session = getattr(unscoped(carrier), "sync_session", unscoped(carrier))
    hold: Hold | None = session.info.get(_HOLD)
    if is_outermost := hold is None:
        hold = session.info[_HOLD] = Hold(f"@{decorator}'s, which commits it together with the message")
        for connection, _ in sent_of(session).connections.values():
            hold.add(connection)
    outer, hold.function = hold.function, function
    try:
        yield
        if hold.has_ended or not session.is_active:
            hold.refuse(_ENDED)
    except InvalidRequestError as error:
        # What a closed session says to the statement after its end.
        if hold.broken and type(error) is InvalidRequestError:
            hold.refuse(_ENDED)
        raise
    finally:
        hold.function = outer
        if is_outermost:
            del session.info[_HOLD]
            hold.release()


def _is_inside(level: SessionTransaction | None, ended: SessionTransaction) -> bool:
    while level is not None:
        if level is ended:
            return True
        level = level.parent
    return False


def wait_for(awaitable: Any) -> Any:
    """Wait for an awaitable of the application's inside ``run_sync``."""
    from sqlalchemy.util import await_only  # noqa: PLC0415 - importing outbox must not pay for it

    return await_only(awaitable)


@contextmanager
def _awaited(manager: AbstractAsyncContextManager[object]) -> Iterator[None]:
    """Be inside of an async context manager of the driver's inside ``run_sync``."""
    wait_for(manager.__aenter__())
    try:
        yield
    except BaseException as error:
        if not wait_for(manager.__aexit__(type(error), error, error.__traceback__)):
            raise
    else:
        wait_for(manager.__aexit__(None, None, None))


def begin(connection: Connection) -> AbstractContextManager[object]:
    """Begin a transaction; inside one that is running, a savepoint.

    That is so where a test consumes in the transaction that it will roll back.
    """
    return savepoint(connection) if connection.in_transaction() else connection.begin()


def commit(connection: Connection) -> None:
    """Commit what `begin` began for the application's code; if that fails, end it, so that the connection is free.

    SQLAlchemy leaves a transaction whose COMMIT failed on its connection, also at the end of a with block.
    """
    nested = connection.get_nested_transaction()
    transaction = nested or connection.get_transaction()
    assert transaction is not None  # noqa: S101 - the caller has begun it
    try:
        if nested is not None:
            write_now(connection)
        transaction.commit()
    except BaseException:
        transaction.rollback()
        raise


class Transactions:
    """Transactions that follow each other on a connection; each may have begun in the round trip of the last COMMIT.

    What else is done on the connection is to be done when none has begun so (`end`), or it ends with that one.
    """

    def __init__(self) -> None:
        self._open: ExitStack | None = None
        self._rows: list[list[Row]] | None = None

    @property
    def has_begun(self) -> bool:
        """Has the next one begun?"""
        return self._open is not None

    @contextmanager
    def next(self, connection: Connection) -> Iterator[list[list[Row]] | None]:
        """Be in the next transaction, and commit it at the end unless that was done.

        The block gets the rows of its first statements; None if it hasn't begun with a COMMIT.
        """
        rows, self._rows = self._rows, None
        with self._open or ExitStack() as stack:
            self._open = None
            if rows is None:
                stack.enter_context(begin(connection))
            try:
                yield rows
            except BaseException:
                self._rows = None
                raise
            if self._rows is not None:
                self._open = stack.pop_all()

    def commit(self, connection: Connection, *first: Statement) -> None:
        """Commit in the block of `next`; begin the next one with its first statements, if there are any."""
        if first and can_begin_ahead(connection):
            self._rows = commit_and_begin(connection, *first)
        else:
            commit(connection)

    def end(self) -> None:
        """End the transaction that has begun, if one has: no step goes on with it."""
        if self._open is not None:
            stack, self._open, self._rows = self._open, None, None
            stack.close()


if TYPE_CHECKING:
    Bind = Engine | AsyncEngine | sessionmaker[Session] | async_sessionmaker[AsyncSession]


def factories(bind: Bind) -> tuple[Engine | AsyncEngine, Engine, Any, Any]:
    """Return (engine, its sync engine, sync session factory, async session factory).

    Raises:
        InvalidSettings: it isn't an engine or a session factory on one.
    """
    from sqlalchemy import URL, Engine  # noqa: PLC0415 - importing outbox must not pay for it
    from sqlalchemy.orm import sessionmaker  # noqa: PLC0415 - importing outbox must not pay for it

    kind: Any = Engine
    factory: Any = sessionmaker
    if is_async := not isinstance(bind, Engine | sessionmaker):
        from sqlalchemy.ext import asyncio as of_asyncio  # noqa: PLC0415 - importing outbox must not pay for it

        kind, factory = of_asyncio.AsyncEngine, of_asyncio.async_sessionmaker
    engine: Any = bind.kw.get("bind") if isinstance(bind, factory) else bind
    if not isinstance(engine, kind):
        mend = "create_engine(url)" if isinstance(bind, str | URL) else "an engine, or a session factory on one"
        raise InvalidSettings(f"an Outbox is bound to an engine or a session factory, not {bind!r}; give it {mend}")
    sessions = bind if isinstance(bind, factory) else factory(engine, expire_on_commit=False)
    return (engine, engine.sync_engine, None, sessions) if is_async else (engine, engine, sessions, None)
