"""A session for the application's code inside a transaction of the framework's, which that code isn't to end.

And what an `Outbox` is bound to, and what it needs of that.
"""

from __future__ import annotations

import asyncio
import enum
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial, reduce
from typing import TYPE_CHECKING, Any, NoReturn, cast
from weakref import ref

from sqlalchemy.exc import InvalidRequestError

from outbox.database.at_commit import (
    HOLD,
    can_begin_ahead,
    commit_and_begin,
    keep_open,
    let_end,
    savepoint,
    sent_of,
    unscoped,
    write_now,
)
from outbox.database.dialect import is_of_driver
from outbox.database.engines import OUTBOX_ENGINE
from outbox.database.execute import Row, Statement, driver_of, in_transaction
from outbox.errors import InvalidSettings, TransactionRequired
from outbox.message.model import HANDLED
from outbox.text import function_name

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine, RootTransaction
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker
    from sqlalchemy.orm import Session, sessionmaker


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

#: libpq's PQTRANS_IDLE: the server is in no transaction; PQTRANS_INTRANS and PQTRANS_INERROR: it is in one.
_IDLE, _BEGUN = 0, (2, 3)

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
        running = RunningTransaction(engine, is_async, self.open, connection)
        self._sent = running.sent  # not what has it: that knows this one, and each message would leave a circle
        self._token: Token[Any] = _running.set(running)
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
        self._sent.clear()
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
        if self._connection.get_transaction() is None and self._libpq.transaction_status in _BEGUN:
            undone = self._driver.rollback()  # what was written by the driver after a rollback of the session
            if self._is_async:
                wait_for(undone)
        self._close_cursors()
        if self._session is not None:
            self._session.close()
            # A task or a thread that still has it would write into whatever runs on the connection next.
            self._session.bind = None


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


# --- transactions that the running code isn't to end -----------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Hold:
    """Keeps transactions open while a function of the application's runs in them, which isn't to end them.

    ``owner`` names the owner of the transactions, and with what they are committed. ``broken``: one has ended all the
    same. ``used``: the connections that have executed something through SQLAlchemy. ``left`` gets the statements that
    leave something behind in the session. Savepoints are the function's own.
    """

    owner: str
    function: Any = None
    left: list[str] | None = None
    broken: bool = False
    _taken: list[tuple[Connection, RootTransaction, Callable[[], None]]] = field(default_factory=list)
    used: set[Connection] = field(default_factory=set)

    def add(self, connection: Connection) -> None:
        """Hold the running transaction of a connection until `release`, if there is one that isn't held."""
        driver = driver_of(connection)
        # psycopg's own cursors tell of SQLAlchemy's statements, too: it need not tell of each again.
        is_heard = self.left is not None and getattr(type(driver).cursor, "__module__", "").startswith("psycopg.")
        if (transaction := keep_open(connection, self, statements=not is_heard)) is not None:
            self._taken.append((connection, transaction, hold_open(driver, self)))

    def release(self, of: Connection | None = None) -> None:
        """Let the transactions be ended again, or that of one connection."""
        for taken in [each for each in self._taken if of is None or each[0] is of]:
            self._taken.remove(taken)
            _, transaction, let = taken
            let()
            let_end(transaction)

    def rolls_back(self, connection: Connection) -> None:
        """Let SQLAlchemy roll a connection back: another user of its pool may have it at once, and knows of no hold."""
        if self.left is not None:
            getattr(driver_of(connection), "__dict__", {}).pop("rollback", None)
            return
        self.broken = True
        self.release(connection)

    def executing(self, connection: Connection, sql: str) -> None:
        """Hear of a statement before it is executed; refuse one that would end the transaction."""
        if ending := effects_of(sql)[0]:
            self.refuse(ending)
        self.used.add(connection)

    @property
    def has_ended(self) -> bool:
        """Has a transaction ended, by any call, also by one that a driver doesn't tell of?"""
        return self.broken or any(
            not transaction.is_active or (connection in self.used and not in_transaction(driver_of(connection)))
            for connection, transaction, _ in self._taken
        )

    def refuse(self, call: str) -> NoReturn:
        """Raise because of a call that would end the transaction, or has ended it.

        Raises:
            TransactionRequired: names the function and the call.
        """
        name = self.function if isinstance(self.function, str) else function_name(self.function)
        raise TransactionRequired(
            f"{call} inside {name}: the transaction is {self.owner}. Remove the call: it is committed when the "
            "function returns, and rolled back when it raises; session.begin_nested() undoes a part of it"
        )


@contextmanager
def holding(carrier: Any, function: str, decorator: str) -> Iterator[None]:
    """Keep the code of a block, which is a call of a decorated function, from ending the transaction of its session.

    Raises:
        TransactionRequired: it tried to, or has rolled it back and goes on, or returns.
    """
    session: Session = getattr(unscoped(carrier), "sync_session", unscoped(carrier))
    hold: Hold | None = session.info.get(HOLD)
    if is_outermost := hold is None:
        hold = session.info[HOLD] = Hold(f"@{decorator}'s, which commits it together with the message")
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
            del session.info[HOLD]
            hold.release()


# Comments, which PostgreSQL nests: to four levels.
_COMMENT = reduce(lambda inner, _: rf"/\*(?:(?!/\*|\*/).|{inner})*\*/", range(4), "(?!)")
# What looks like a statement's begin and is none: comments, texts, names, the body of a function.
_NO_CODE = re.compile(
    rf"""--[^\n\r]*|{_COMMENT}|\be'(?:[^'\\]|\\.|'')*'|'[^']*'|"[^"]*"|(?<![\w$])\$(\w*)\$.*?\$\1\$"""
    r"""|\bbegin\s+atomic\b(?:.*?;)?\s*end\b""",
    re.DOTALL | re.IGNORECASE,
)
_ENDS = re.compile(
    r"\s*(?:(?:commit|end|abort|rollback)\b(?!(?:\s+(?:work|transaction))?\s+to\b)|prepare\s+transaction\b)",
    re.IGNORECASE,
)
# What outlives the transaction. A setting may be for the transaction alone.
_TEMPORARY = re.compile(
    r"\b(?:create|into)\s+(?:(?:local|global|or\s+replace)\s+)*temp(?:orary)?\b(?![^;]*\bon\s+commit\s+drop\b)"
    r"|\bpg_temp\b",
    re.DOTALL | re.IGNORECASE,
)
_LEAVES = re.compile(
    r"(?:^|;)\s*(?:set\s+(?!local\b|transaction\b|constraints\b)|(?:reset|listen|prepare|deallocate|discard|load|do)\b)",
    re.IGNORECASE,
)
_LEAVES_BY_CALL = re.compile(
    r"\bset_config\s*\((?![^()]*,\s*true\s*\))|\bpg_(?:try_)?advisory_(?:un)?lock|\bwith\s+hold\b"
    r"|\bupdate\s+(?:pg_catalog\s*\.\s*)?pg_settings\b",
    re.IGNORECASE,
)
# What may be the name of a setting of the application's own, which PostgreSQL lists nowhere.
_OWN_SETTING = re.compile(r"\b[a-z_]\w*\.\w+", re.IGNORECASE | re.ASCII)
#: From so many characters on, a statement isn't remembered.
_LONG = 10_000
#: What a cursor runs statements by.
_RUNS = ("execute", "executemany", "stream", "copy")
_ITERATED = ("stream", "copy")

_ENDED = "a rollback, commit or close"

#: Note the settings of the session before they are changed.
_NOTE = """
SELECT set_config('outbox.before', json_build_object(
       'session_authorization', session_user, 'role', current_setting('role'), 'set',
       (SELECT coalesce(json_object_agg(name, setting), '{}') FROM pg_settings WHERE source = 'session'))::text, true)
"""
# A setting that is as it was noted is left alone: it may have been made for this transaction.
_TIDY_UP = """
DO $$
DECLARE
    each record;
    before CONSTANT json = nullif(current_setting('outbox.before', true), '');
BEGIN
    PERFORM set_config(name, before->>name, false) FROM unnest('{session_authorization,role}'::text[]) name
      WHERE current_setting(name) <> before->>name;
    PERFORM set_config(name, wanted, false)
       FROM (SELECT name, setting, coalesce(before->'set'->>name, reset_val) AS wanted FROM pg_settings
              WHERE before IS NOT NULL AND context IN ('user', 'superuser') AND name NOT LIKE 'transaction%') s
      WHERE setting IS DISTINCT FROM wanted;
    PERFORM set_config(name, '', false) FROM unnest('{own}'::text[]) name WHERE current_setting(name, true) <> '';
    FOR each IN SELECT format('DEALLOCATE %I', name) AS act FROM pg_prepared_statements WHERE from_sql
                 UNION ALL SELECT format('CLOSE %I', name) FROM pg_cursors WHERE is_holdable LOOP
        EXECUTE each.act;
    END LOOP;
    PERFORM pg_advisory_unlock_all();
    EXECUTE 'UNLISTEN *';
    {discard}
END $$
"""


def tidying(left: Sequence[str]) -> str:
    """Return the statement that takes away what statements, with their values, have left behind in the session.

    It is for the same transaction or a later one.
    """
    own = ",".join(sorted({name for each in left for name in _OWN_SETTING.findall(each)}))
    discard = "EXECUTE 'DISCARD TEMP';" if any(map(_TEMPORARY.search, left)) else ""
    return _TIDY_UP.replace("{own}", f"{{{own}}}").replace("{discard}", discard)


_NO_EFFECTS: tuple[str | None, bool] = None, False


def effects_of(sql: str) -> tuple[str | None, bool]:
    """Return the command in statements that ends the transaction, and whether they leave something in the session."""
    return (_effects if len(sql) < _LONG else _effects.__wrapped__)(sql)


@lru_cache(maxsize=1000)
def _effects(sql: str) -> tuple[str | None, bool]:
    code = _NO_CODE.sub(" ", sql)
    found = (_ENDS.match(each) for each in code.split(";"))
    ending = next((" ".join(each[0].split()).upper() for each in found if each), None)
    # Calls also in texts, which may be the code of a block; and without them, which may look like the end of a call.
    called = _LEAVES_BY_CALL.search(sql) or _LEAVES_BY_CALL.search(code)
    leaves = _LEAVES.search(code) or called or _TEMPORARY.search(sql)
    return (ending, leaves is not None) if ending or leaves else _NO_EFFECTS


def hold_open(driver: Any, hold: Hold) -> Callable[[], None]:
    """Refuse what would end a transaction through a connection of psycopg 3's own; return what lets it again.

    That is a call of its methods, or a statement of a cursor that is made meanwhile. The methods are put on the
    connection itself: what traces it may have a class that stands before psycopg's. They are made once for each.
    """
    if not hasattr(driver, "pgconn"):
        return lambda: None
    own = vars(driver)
    methods = own.get(_METHODS) or own.setdefault(_METHODS, _held_methods(driver))
    held = {**methods, _HELD_BY: hold}
    cursors, rows, before = driver.cursor_factory, driver.row_factory, {name: own[name] for name in own.keys() & held}
    own.update(held)
    driver.cursor_factory = refusing(cursors)

    def let() -> None:
        driver.cursor_factory, driver.row_factory = cursors, rows
        for name in held:
            own.pop(name, None)
        own.update(before)

    return let


#: Where a driver's connection has the `Hold` that keeps its transaction open, and the methods that refuse to end it.
_HELD_BY, _METHODS = "outbox_hold", "outbox_held_methods"


def _held_methods(driver: Any) -> dict[str, Callable[..., Any]]:
    # By a weak reference: they are kept by the connection, which would be in a circle with them.
    plain, here = driver.__class__.transaction, ref(driver)

    def refused(call: str, *_: Any) -> None:
        vars(here())[_HELD_BY].refuse(f"{call} of the driver's connection")

    def transaction(*args: Any, **options: Any) -> Any:
        # On a connection that has yet to begin one, it would be no savepoint.
        begun = in_transaction(here())
        return plain(here(), *args, **options) if begun else vars(here())[_HELD_BY].refuse("transaction()")

    calls = {"_set_autocommit": "autocommit"} | {name: f"{name}()" for name in ("commit", "rollback", "set_autocommit")}
    return {"transaction": transaction, **{name: partial(refused, call) for name, call in calls.items()}}


@cache
def refusing(kind: type) -> type:
    """Return the class of cursors that refuse, on a connection that is held open, what would end its transaction."""

    def wrapped(name: str) -> Callable[..., Any]:
        plain = getattr(kind, name)

        def run(cursor: Any, query: Any, *args: Any, **options: Any) -> Any:
            # Almost all statements: it is to cost them next to nothing.
            if query.__class__ is str and len(query) < _LONG and _effects(query) is _NO_EFFECTS:
                return plain(cursor, query, *args, **options)
            hold: Hold | None = getattr(cursor.connection, _HELD_BY, None)
            if hold is None or query is _NOTE:
                return plain(cursor, query, *args, **options)
            sql = _text_of(query, cursor)
            ending, leaves = effects_of(sql)
            if ending:
                hold.refuse(ending)
            if leaves and hold.left is not None:
                hold.left.append(f"{sql} {args} {options}")
                if len(hold.left) == 1 and name not in _ITERATED:
                    noted = cursor.connection.cursor().execute(_NOTE)
                    if inspect.isawaitable(noted):
                        return _after(noted, partial(plain, cursor, query, *args, **options))
            return plain(cursor, query, *args, **options)

        return run

    return type(kind.__name__, (kind,), {"__slots__": (), **{name: wrapped(name) for name in _RUNS}})


async def _after(first: Any, then: Callable[[], Any]) -> Any:
    await first
    return await then()


def _text_of(query: Any, cursor: Any) -> str:
    if isinstance(query, str | bytes):
        return query if isinstance(query, str) else query.decode(errors="replace")
    return str(query.as_string(cursor)) if hasattr(query, "as_string") else "".join(getattr(query, "strings", ()))
