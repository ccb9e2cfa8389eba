"""What a transaction has yet to write: collected without I/O, written in the round trip of its COMMIT.

`add` only remembers. When the caller's root transaction commits, everything it sent goes to the server in one
statement, together with the COMMIT itself; the caller's own ``commit()`` then finds the work done. So a send
costs no round trip, one function serves `Session` and `AsyncSession`, and what was sent inside a savepoint
that rolled back was never written at all.

Writing at the end has a second reason: the sequence of an op is drawn while the caller holds its row locks, so
that transactions which a lock serialised are dispatched in that order.

Hooks: SQLAlchemy's ``SessionEvents`` hand a session's messages to its connection at the root commit;
``ConnectionEvents`` write them, or forget them with a savepoint or the whole transaction.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any
from uuid import UUID
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import UnboundExecutionError

from outbox.decide import decide_first
from outbox.errors import InvalidMessage, TransactionRequired
from outbox.model import HalfMessage, Preparation, Resolution
from outbox.store import wakeup
from outbox.store.execute import Statement, execute, is_autocommit, is_lost
from outbox.store.halves import write_halves

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
    from sqlalchemy.orm import Session, SessionTransaction

    Carrier = Session | AsyncSession | Connection | AsyncConnection


@dataclass(frozen=True, slots=True)
class Write:
    """A half message to write; prepared, if it comes with a preparation, else committed with the transaction."""

    schema: str
    half: HalfMessage
    preparation: Preparation | None = None
    nudge: bool = False


@dataclass(frozen=True, slots=True)
class Intent:
    """A decision to write; the transaction fails unless it is the first."""

    schema: str
    half_id: UUID
    resolution: Resolution


Item = Write | Intent | Statement


@dataclass(slots=True)
class Pending:
    """The items of one connection's transaction, and how many there were when each open savepoint began."""

    items: list[Item] = field(default_factory=list)
    savepoints: list[int] = field(default_factory=list)


_SESSION_ITEMS = "outbox.pending"
_SESSION_CONNECTION = "outbox.connection"

#: A dispatcher polls by the millisecond for longer than this after its last work, so that only the first message after
#: a pause is worth a nudge (seconds).
_NUDGE_AFTER = 0.1
_last_sent: WeakKeyDictionary[Engine, float] = WeakKeyDictionary()

_by_connection: WeakKeyDictionary[Connection, Pending] = WeakKeyDictionary()
_hooked: WeakSet[Engine] = WeakSet()
_sessions_hooked = False


def add(carrier: Carrier, item: Item, engine: Engine) -> None:
    """Remember an item until the transaction of ``carrier`` commits.

    ``engine`` is used by a session that is bound to several engines and couldn't tell which one is meant.

    Raises:
        TransactionRequired: an AsyncConnection that isn't connected yet.
        InvalidMessage: ``carrier`` is neither a session nor a connection.
    """
    given: Any = carrier
    if hasattr(given, "registry"):  # a scoped_session
        given = given()
    target = getattr(given, "sync_session", None) or getattr(given, "sync_connection", given)
    if isinstance(target, Connection):
        _of_connection(target).items.append(item)
        return
    if target is None:
        raise TransactionRequired("the AsyncConnection isn't connected; use it inside 'async with engine.begin()'")
    from sqlalchemy.orm import Session  # noqa: PLC0415 - whoever passes a session has paid for the import

    if not isinstance(target, Session):
        raise InvalidMessage(
            f"a message is sent with a Session, AsyncSession, Connection or AsyncConnection, not {target!r}"
        )
    _add_to_session(target, item, engine)


def at_commit(connection: Connection, *statements: Statement) -> None:
    """Have statements written in the round trip of this connection's COMMIT, after what was sent on it."""
    _of_connection(connection).items.extend(statements)


def _add_to_session(session: Session, item: Item, engine: Engine) -> None:
    if (connection := session.info.get(_SESSION_CONNECTION)) is not None:
        # Sent by a flush hook inside the commit: the earlier items have moved to the connection already.
        _of_connection(connection).items.append(item)
        return
    if not session.in_transaction():
        session.begin()
    level = session.get_nested_transaction() or session.get_transaction()
    session.info.setdefault(_SESSION_ITEMS, []).append((level, item, engine))


def hook_sessions() -> None:
    """Listen to the events of all sessions, once per process."""
    global _sessions_hooked  # noqa: PLW0603
    if _sessions_hooked:
        return
    from sqlalchemy.orm import Session  # noqa: PLC0415

    event.listen(Session, "before_commit", _hand_to_connection)
    event.listen(Session, "after_soft_rollback", _forget_rolled_back)
    event.listen(Session, "after_transaction_end", _forget_session)
    _sessions_hooked = True


def _hand_to_connection(session: Session) -> None:
    items = session.info.get(_SESSION_ITEMS)
    if not items or session.in_nested_transaction():
        return
    connection = _connection_of(session, items[0][2])
    _of_connection(connection).items.extend(item for _, item, _ in items)
    del session.info[_SESSION_ITEMS]
    session.info[_SESSION_CONNECTION] = connection


def _connection_of(session: Session, engine: Engine) -> Connection:
    try:
        return session.connection()
    except UnboundExecutionError:
        return session.connection(bind_arguments={"bind": engine})


def _forget_rolled_back(session: Session, previous: SessionTransaction) -> None:
    items = session.info.get(_SESSION_ITEMS)
    if items:
        session.info[_SESSION_ITEMS] = [entry for entry in items if not _inside(entry[0], previous)]


def _inside(level: SessionTransaction | None, ended: SessionTransaction) -> bool:
    while level is not None:
        if level is ended:
            return True
        level = level.parent
    return False


def _forget_session(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is None:
        session.info.pop(_SESSION_ITEMS, None)
        session.info.pop(_SESSION_CONNECTION, None)


def _of_connection(connection: Connection) -> Pending:
    pending = _by_connection.get(connection)
    if pending is None:
        if connection.engine not in _hooked:
            _hook_engine(connection.engine)
        pending = _by_connection[connection] = Pending()
    return pending


def _hook_engine(engine: Engine) -> None:
    hooks: dict[str, Callable[..., Any]] = {
        "commit": _on_commit,
        "prepare_twophase": _on_prepare_twophase,
        "rollback": _on_rollback,
        "rollback_twophase": _on_rollback,
        "savepoint": _on_savepoint,
        "rollback_savepoint": _on_rollback_savepoint,
        "release_savepoint": _on_release_savepoint,
    }
    for name, hook in hooks.items():
        event.listen(engine, name, hook)
    _hooked.add(engine)


def _on_commit(connection: Connection) -> None:
    if (pending := _by_connection.pop(connection, None)) is None:
        return
    try:
        _write(connection, pending.items, then_commit=True)
    except BaseException:
        # SQLAlchemy takes a failed commit for one that the server has rolled back; here COMMIT never got there.
        if not is_lost(connection):
            connection.dialect.do_rollback(connection.connection)
        raise


def _on_prepare_twophase(connection: Connection, *_: Any) -> None:
    if (pending := _by_connection.pop(connection, None)) is not None:
        _write(connection, pending.items, then_commit=False)


def _on_rollback(connection: Connection, *_: Any) -> None:
    _by_connection.pop(connection, None)


def _on_savepoint(connection: Connection, name: str | None) -> None:
    if (pending := _by_connection.get(connection)) is not None:
        pending.savepoints.append(len(pending.items))


def _on_rollback_savepoint(connection: Connection, name: str, *_: Any) -> None:
    if (pending := _by_connection.get(connection)) is None:
        return
    depth = _depth(connection, name)
    # Begun before anything was sent: nothing of what followed stays.
    del pending.items[pending.savepoints[-depth] if depth <= len(pending.savepoints) else 0 :]
    del pending.savepoints[-depth:]


def _on_release_savepoint(connection: Connection, name: str, *_: Any) -> None:
    if (pending := _by_connection.get(connection)) is not None:
        del pending.savepoints[-_depth(connection, name) :]


def _depth(connection: Connection, name: str) -> int:
    """Return how many savepoints end with this one: itself, and those begun inside of it.

    SQLAlchemy tells the name of a savepoint when it ends, not yet when it begins.
    """
    depth, nested = 1, connection.get_nested_transaction()
    while nested is not None and nested._savepoint != name:
        depth, nested = depth + 1, nested._previous_nested
    return depth


def _write(connection: Connection, items: list[Item], *, then_commit: bool) -> None:
    if is_autocommit(connection):
        raise TransactionRequired(
            "the connection is in AUTOCOMMIT mode: message and business change would not commit together; "
            "use a connection with transactions"
        )
    writes = [item for item in items if isinstance(item, Write)]
    intents = [item for item in items if isinstance(item, Intent)]
    statements = [
        write_halves(schema, [(write.half, write.preparation) for write in group])
        for schema, group in groupby(writes, key=lambda write: write.schema)
    ]
    if intents:
        # A decision must be known to be the first before COMMIT goes out, so it has its own round trip.
        if statements:
            execute(connection, *statements)
            statements = []
        for intent in intents:
            decide_first(connection, intent.schema, intent.half_id, intent.resolution)
    statements += [item for item in items if isinstance(item, Statement)]
    if statements:
        nudge = wakeup.nudge(writes[0].schema) if then_commit and _is_worth_a_nudge(connection, writes) else None
        execute(connection, *statements, then_commit=then_commit, afterwards=nudge)


def _is_worth_a_nudge(connection: Connection, writes: list[Write]) -> bool:
    """Tell whether dispatchers may be asleep. NOTIFY locks database-wide at commit: never in the transaction itself."""
    if not any(write.nudge for write in writes):
        return False
    now = time.monotonic()
    earlier = _last_sent.get(connection.engine, 0.0)
    _last_sent[connection.engine] = now
    return now - earlier > _NUDGE_AFTER
