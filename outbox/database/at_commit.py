"""What a transaction has yet to write: collected without I/O, written in the round trip of its COMMIT.

`add` only remembers. When the caller's root transaction commits, everything that was added goes to the server in one
statement, together with the COMMIT itself; the caller's own ``commit()`` then finds the work done. So adding costs no
round trip, and an item added inside a savepoint that rolled back was never written at all.

An item is a statement, or a value of a `Writer`, which makes statements of all its values when the transaction commits.
This module listens to connections, by SQLAlchemy's ``ConnectionEvents``; and to sessions, by its ``SessionEvents``. A
session may have no connection yet when something is sent with it: its items wait beside it for the COMMIT of the
connection which carries the business change, as one of its sources, and follow the session's savepoints.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn, Protocol
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Connection, Engine, RootTransaction, event
from sqlalchemy.exc import DBAPIError, UnboundExecutionError

from outbox.database.execute import (
    Row,
    Statement,
    can_chain,
    commit_now,
    execute,
    goes_on,
    is_autocommit,
    is_lost,
)
from outbox.errors import TransactionRequired
from outbox.telemetry.events import AfterCommitFailed
from outbox.telemetry.hooks import emit

if TYPE_CHECKING:
    from sqlalchemy.orm import Session, SessionTransaction


class Writer(Protocol):
    """Makes statements of the values of a transaction that commits; it may also execute some before."""

    def __call__(
        self, connection: Connection, values: Sequence[Any], *, then_commit: bool
    ) -> tuple[list[Statement], list[Statement], list[Callable[[], None]]]:
        """Return the statements for the round trip of the COMMIT, those to run after it, and functions to call then.

        ``values`` are in the order in which they were added. ``then_commit`` is False in a two-phase transaction, which
        only prepares now.
        """


@dataclass(frozen=True, slots=True)
class Item:
    """A value for ``writer``, or a statement if there is none; ``number`` orders all that this process adds."""

    number: int
    value: Any
    writer: Writer | None


class Holder(Protocol):
    """Keeps transactions open while a function of the application's runs in them: `outbox.database.session.Hold`."""

    broken: bool

    def add(self, connection: Connection) -> None:
        """Hold the running transaction of a connection too."""

    def executing(self, connection: Connection, sql: str) -> None:
        """Hear of a statement before it is executed; refuse one that would end the transaction."""

    def rolls_back(self, connection: Connection) -> None:
        """Hear that SQLAlchemy is about to roll a connection back."""

    def refuse(self, call: str) -> NoReturn:
        """Raise because of a call that would end the transaction, or has ended it."""


#: Gives up the items to be written at the commit of the connection.
Source = Callable[[Connection], list[Item]]


@dataclass(slots=True)
class Pending:
    """The items of one connection's transaction, each with the open savepoints it was added in, and their sources.

    ``afterwards`` follow the COMMIT, ``committed`` is called then. ``bytes_sent`` is for callers that count them.
    """

    items: list[tuple[Item, tuple[str, ...]]] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    afterwards: list[Statement] = field(default_factory=list)
    committed: list[Callable[[], None]] = field(default_factory=list)
    bytes_sent: int = 0


_by_connection: WeakKeyDictionary[Connection, Pending] = WeakKeyDictionary()
_hooked: WeakSet[Engine] = WeakSet()
_hooking = threading.Lock()
# Transactions whose items were taken to be written: with their COMMIT, other listeners may yet have their turn.
_written: WeakSet[RootTransaction] = WeakSet()
# Those of them that failed to write at PREPARE: their items are gone, and SQLAlchemy would still commit them.
_not_prepared: WeakSet[RootTransaction] = WeakSet()
# Transactions that the application's code runs in, which isn't to end them.
_held: WeakKeyDictionary[RootTransaction, Holder] = WeakKeyDictionary()
_numbers = itertools.count()


def new_item(value: Any, writer: Writer | None = None) -> Item:
    """Return an item with the next number."""
    return Item(next(_numbers), value, writer)


def add(connection: Connection, *items: Item) -> None:
    """Remember items until this connection's transaction commits; begins one, as executing a statement would.

    Raises:
        TransactionRequired: the connection is in AUTOCOMMIT mode, or its transaction is prepared or committed already,
            or failed at that.
    """
    if not connection.in_transaction():
        connection.begin()
    refuse_autocommit(connection)
    if getattr(connection.get_transaction(), "_is_prepared", False):
        raise TransactionRequired("the transaction is prepared (two-phase) and takes no more messages; send before")
    if connection.get_transaction() in _written:
        _refuse_not_prepared(connection)
        raise TransactionRequired(
            "the transaction has written its messages and takes no more: a listener for 'commit' or 'prepare_twophase' "
            "sends too late; send before, or in a listener that was added before the Outbox was made"
        )
    inside = savepoints(connection)
    pending_of(connection).items.extend((item, inside) for item in items)


def at_commit(connection: Connection, *statements: Statement) -> None:
    """Have statements written in the round trip of this connection's COMMIT, after what writers make."""
    inside = savepoints(connection)
    pending_of(connection).items.extend((new_item(statement), inside) for statement in statements)


def after_commit(connection: Connection, function: Callable[[], None]) -> None:
    """Have a function called once this connection's transaction has committed, and never if it doesn't.

    The function must not raise: no caller could undo a COMMIT. In a two-phase transaction it isn't called, since its
    COMMIT isn't seen here; nor after `write_now`, which is for what tests roll back.
    """
    pending_of(connection).committed.append(function)


def behind_commit(connection: Connection, statement: Statement) -> None:
    """Have a statement follow this connection's COMMIT in its round trip; it may fail, or be left out.

    It is left out through other drivers than psycopg 3, and where `after_commit` calls nothing.
    """
    pending_of(connection).afterwards.append(statement)


def announce(connection: Connection, statement: Statement) -> None:
    """Run a statement in a transaction of its own, which comes after one that is committed; its failure fails nothing.

    ``connection`` is in no transaction.

    Raises:
        sqlalchemy.exc.DBAPIError: the connection was lost.
    """
    try:
        with connection.begin():
            execute(connection, statement, then_commit=True)
    except DBAPIError as error:
        if is_lost(connection):
            raise
        emit(AfterCommitFailed(reason=str(error.orig), error=error))


def write_now(connection: Connection) -> None:
    """Write the items added so far, in a transaction that goes on."""
    _write(connection, then_commit=False)


def can_begin_ahead(connection: Connection) -> bool:
    """Tell whether `commit_and_begin` can be called: not in a savepoint, nor past listeners of the application's.

    One for "begin" may make settings that each transaction needs.
    """
    listeners = connection.dispatch
    has_listeners = listeners.begin or any(function is not _on_commit for function in listeners.commit)
    return not has_listeners and not connection.in_nested_transaction() and can_chain(connection)


def commit_and_begin(connection: Connection, *first: Statement) -> list[list[Row]] | None:
    """Commit, and begin the next transaction in the same round trip, with its first statements; return their rows.

    To SQLAlchemy it is the same transaction that goes on. None: it has committed, and nothing goes on, since there was
    something to do afterwards, or one of the statements failed.

    Raises:
        sqlalchemy.exc.DBAPIError: it couldn't commit; to be rolled back.
    """
    transaction = connection.get_transaction()
    assert transaction is not None  # noqa: S101 - the caller has begun it
    rows = _write(connection, then_commit=True, following=first)
    if len(rows) == len(first) and goes_on(connection):
        return rows
    transaction.rollback()
    return None


@contextmanager
def savepoint(connection: Connection) -> Iterator[None]:
    """Be in a savepoint as in a transaction of its own: items added inside are written when it is released."""
    write_now(connection)
    with connection.begin_nested() as nested:
        yield
        if nested.is_active:
            write_now(connection)


def keep_open(connection: Connection, holder: Holder, *, statements: bool) -> RootTransaction | None:
    """Have a holder asked about the end of a connection's transaction; None if there is none, or it has a holder.

    ``statements``: it hears of each statement.
    """
    _listen(connection)
    transaction = connection.get_transaction()
    if transaction is None or transaction in _held:
        return None
    if statements and _before_execute not in connection.engine.dispatch.before_cursor_execute:
        with _hooking:
            _add_listeners(connection.engine, before_cursor_execute=_before_execute)
    _held[transaction] = holder
    return transaction


def let_end(transaction: RootTransaction) -> None:
    """Let a transaction that was kept open be ended again."""
    del _held[transaction]


def items_of(connection: Connection) -> list[Item]:
    """Return what the transaction of a connection has yet to write, without that of its sources."""
    pending = _by_connection.get(connection)
    return [item for item, _ in pending.items] if pending else []


def _attach(connection: Connection, source: Source) -> None:
    """Take more items from ``source`` when this connection commits."""
    if source not in (sources := pending_of(connection).sources):
        sources.append(source)


def pending_of(connection: Connection) -> Pending:
    """Return what the transaction of a connection has yet to write."""
    pending = _by_connection.get(connection)
    if pending is None:
        _listen(connection)
        pending = _by_connection[connection] = Pending()
    return pending


def _listen(connection: Connection) -> None:
    """Have the events of one connection told (`hook`)."""
    hook(connection.engine)
    connection._has_events = True


def savepoints(connection: Connection) -> tuple[str, ...]:
    """Return the names of the savepoints that a connection is inside of, the innermost first.

    SQLAlchemy's event tells the name of a savepoint when it ends, but not when it begins.
    """
    names = []
    nested = connection.get_nested_transaction()
    while nested is not None:
        names.append(nested._savepoint)
        nested = nested._previous_nested
    return tuple(names)


def hook(engine: Engine) -> None:
    """Listen to the events of an engine's connections, once; they come from connections that have something to write.

    Where an engine has listeners, SQLAlchemy tells of each statement too: more than a quarter of what a send would cost
    (in instructions of the client, of a transaction with two statements of its own). So the engine's flag is put back,
    and set on the connections that it matters for. A listener of the application's sets it again.
    """
    if engine in _hooked:
        return
    with _hooking:
        # An engine that is made of another one has its listeners, which that may be calling now, in another thread.
        if _on_commit not in engine.dispatch.commit:
            _add_listeners(
                engine,
                commit_twophase=_on_commit_twophase,
                prepare_twophase=_on_prepare_twophase,
                rollback=_on_rollback,
                rollback_twophase=_on_rollback,
                rollback_savepoint=_on_rollback_savepoint,
                commit=_on_commit,
            )
        _hooked.add(engine)


def _add_listeners(engine: Engine, **listeners: Callable[..., None]) -> None:
    had_events = engine._has_events
    for name, function in listeners.items():
        event.listen(engine, name, function)
    engine._has_events = had_events


def _before_execute(connection: Connection, _cursor: Any, sql: str, *_: Any) -> None:
    if (hold := _hold_of(connection)) is not None:
        hold.executing(connection, sql)


def _on_commit(connection: Connection) -> None:
    try:
        _refuse_held(connection, "connection.commit()")
        _close(connection)
        _write(connection, then_commit=True)
    except BaseException:
        _sent.clear()  # what was to nudge hasn't
        # SQLAlchemy takes a failed commit for one that the server has rolled back; here COMMIT never got there.
        if _let_roll_back(connection):
            connection.dialect.do_rollback(connection.connection)
        raise


def _on_commit_twophase(connection: Connection, xid: Any, is_prepared: bool) -> None:
    try:
        _refuse_held(connection, "connection.commit()")
        if not is_prepared:
            _refuse_not_prepared(connection)
            _close(connection)
            _write(connection, then_commit=False)
    except BaseException:
        if _let_roll_back(connection):
            connection.dialect.do_rollback_twophase(connection, xid, is_prepared=False)
        raise


def _on_prepare_twophase(connection: Connection, *_: Any) -> None:
    _refuse_held(connection, "prepare()")
    _refuse_not_prepared(connection)
    try:
        _close(connection)
        _write(connection, then_commit=False)
    except BaseException:
        # Unlike a failed commit, a failed PREPARE leaves a transaction that the caller may prepare again, or commit.
        if (transaction := connection.get_transaction()) is not None:
            _not_prepared.add(transaction)
        raise


def _let_roll_back(connection: Connection) -> bool:
    """Let SQLAlchemy roll a transaction back that is held open; tell whether the connection is there to do so."""
    if (is_there := not is_lost(connection)) and (hold := _hold_of(connection)) is not None:
        hold.rolls_back(connection)
    return is_there


def _on_rollback(connection: Connection, *_: Any) -> None:
    _let_roll_back(connection)
    _by_connection.pop(connection, None)


def _on_rollback_savepoint(connection: Connection, name: str, *_: Any) -> None:
    if (pending := _by_connection.get(connection)) is not None:
        pending.items = [entry for entry in pending.items if name not in entry[1]]


def _hold_of(connection: Connection) -> Holder | None:
    return None if (transaction := connection.get_transaction()) is None else _held.get(transaction)


def _refuse_held(connection: Connection, call: str) -> None:
    if (hold := _hold_of(connection)) is not None:
        hold.refuse(call)


def _close(connection: Connection) -> None:
    """Take no more items for the running transaction: its own are being written."""
    if (transaction := connection.get_transaction()) is not None:
        _written.add(transaction)


def _refuse_not_prepared(connection: Connection) -> None:
    if connection.get_transaction() in _not_prepared:
        raise TransactionRequired(
            "the transaction could not be prepared (two-phase), and its messages are lost: roll it back"
        )


def refuse_autocommit(connection: Connection) -> None:
    """Make sure that the driver doesn't commit each statement by itself.

    Raises:
        TransactionRequired: it does.
    """
    if is_autocommit(connection):
        raise TransactionRequired(
            "the connection is in AUTOCOMMIT mode: message and business change would not commit together; "
            "use a connection with transactions"
        )


def _write(connection: Connection, *, then_commit: bool, following: Sequence[Statement] = ()) -> list[list[Row]]:
    """Write the items added, and commit then; return the rows of what follows in the next transaction."""
    rows: list[list[Row]] = []
    if (pending := _by_connection.pop(connection, None)) is None:
        return rows
    items = [item for item, _ in pending.items]
    for source in pending.sources:
        items += source(connection)
    items.sort(key=lambda item: item.number)
    statements: list[Statement] = []
    afterwards = list(pending.afterwards) if then_commit else []
    committed = list(pending.committed)
    for writer in {item.writer: None for item in items if item.writer is not None}:
        values = [item.value for item in items if item.writer is writer]
        made, behind, waiting = writer(connection, values, then_commit=then_commit)
        statements += made
        afterwards += behind
        committed += waiting
    statements += [item.value for item in items if item.writer is None]
    waited_for = committed if then_commit else []
    # What waits for the COMMIT must know that it succeeded, so it is sent here although there is nothing to write.
    if statements or afterwards or waited_for:
        # What comes afterwards isn't to be undone with the next transaction.
        following = () if afterwards else following
        rows = execute(connection, *statements, then_commit=then_commit, afterwards=afterwards, following=following)
        rows = rows[len(statements) :]
    if waited_for:
        commit_now(connection)
    for function in waited_for:
        function()
    return rows


# --- what wakes dispatchers -------------------------------------------------------------------------------------

#: Where ops are written: the address of a database, and the schema.
OpsAddress = tuple[str, str]


@dataclass(frozen=True, slots=True)
class LocalDispatcher:
    """A dispatcher that runs in this process: what wakes it, from any thread, and whether it is at its post."""

    wake: Callable[[], None]
    is_there: Callable[[], bool]


#: From so many sends on that came within so many seconds of the one before, one is nudged for only if the last nudge is
#: older than the last number: a dispatcher that has so much to do looks again by itself, and a nudge costs an eighth of
#: a lone send.
MANY, NO_PAUSE, NUDGE_EVERY = 8, 0.003, 0.01
#: When this process sent to an address last, and nudged last, and how many sends have come without a pause.
_sent: dict[OpsAddress, tuple[float, float, int]] = {}


def nudges_now(address: OpsAddress) -> bool:
    """Take note of a transaction that sends; tell whether dispatchers are to be nudged for it."""
    now, (sent, nudged, fast) = time.monotonic(), _sent.get(address, (0.0, 0.0, 0))
    fast = fast + 1 if now - sent <= NO_PAUSE else 0
    due = fast < MANY or now - nudged > NUDGE_EVERY
    _sent[address] = now, now if due else nudged, fast
    return due


#: The dispatchers of this process. A fork has none of their threads.
_dispatchers: dict[OpsAddress, LocalDispatcher] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_dispatchers.clear)


def dispatcher_here(address: OpsAddress) -> LocalDispatcher | None:
    """Return the dispatcher of an address that this process has; None if there is none at its post."""
    found = _dispatchers.get(address)
    return found if found is not None and found.is_there() else None


def begin_here(address: OpsAddress, dispatcher: LocalDispatcher) -> None:
    """Have senders of this process call a dispatcher; of several the newest."""
    _dispatchers[address] = dispatcher


def end_here(address: OpsAddress, dispatcher: LocalDispatcher) -> None:
    """Have senders call it no more."""
    if _dispatchers.get(address) is dispatcher:
        del _dispatchers[address]


# --- sent with a session ------------------------------------------------------------------------------------------


def unscoped(carrier: Any) -> Any:
    """Return a session or connection, of a scoped_session the one of this scope."""
    return carrier() if hasattr(carrier, "registry") and not isinstance(carrier, type) else carrier


#: Where a session has the messages sent with it, and what holds its transaction.
_SENT, HOLD = "outbox.sent", "outbox.hold"


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


def add_with(session: Session, sent: SentWith, item: Item, engine: Engine) -> None:
    """Remember an item until the session's transaction commits; it is of an Outbox on ``engine``."""
    level = session.get_nested_transaction() or session.get_transaction()
    sent.entries.append(SentItem(item, engine, level))
    for connection, _ in sent.connections.values():
        _attach(connection, sent.take)
    if sent.committing and not sent.connections:
        # Sent by a flush hook in a transaction without a statement so far: no later event would pick it up.
        _assign(session, sent)


def _on_begin(session: Session, _: SessionTransaction, connection: Connection) -> None:
    sent = sent_of(session)
    if connection.engine not in sent.connections:
        sent.connections[connection.engine] = connection, savepoints(connection)
        if sent.entries:
            _attach(connection, sent.take)
    if (hold := session.info.get(HOLD)) is not None:
        refuse_autocommit(connection)
        hold.add(connection)


def _before_commit(session: Session) -> None:
    if (hold := session.info.get(HOLD)) is not None and session.get_nested_transaction() is None:
        hold.refuse("session.commit()")
    sent = sent_of(session)
    sent.committing = True
    _assign(session, sent)


def _assign(session: Session, sent: SentWith) -> None:
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
        _attach(connection, sent.take)


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
    if transaction.parent is None and (hold := session.info.get(HOLD)) is not None:
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


def _is_inside(level: SessionTransaction | None, ended: SessionTransaction) -> bool:
    while level is not None:
        if level is ended:
            return True
        level = level.parent
    return False
