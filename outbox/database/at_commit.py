"""What a transaction has yet to write: collected without I/O, written in the round trip of its COMMIT.

`add` only remembers. When the caller's root transaction commits, everything it sent goes to the server in one
statement, together with the COMMIT itself; the caller's own ``commit()`` then finds the work done. So a send
costs no round trip, and what was sent inside a savepoint that rolled back was never written at all.

Writing at the end has a second reason: the sequence of an op is drawn while the caller holds its row locks, so
that transactions which a lock serialised are dispatched in that order.

Here are the connections, by SQLAlchemy's ``ConnectionEvents``; what is sent with a session comes from
`outbox.producer.carriers`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Connection, Engine, event

from outbox.database import sql
from outbox.database.decision import decide_first, write_halves
from outbox.database.execute import Statement, execute, is_autocommit, is_lost
from outbox.errors import TransactionRequired
from outbox.message.model import HalfMessage, Preparation, Resolution
from outbox.producer.flow_control import FlowControl


@dataclass(frozen=True, slots=True)
class Write:
    """A half message to write; prepared, if it comes with a preparation, else committed with the transaction.

    ``flow`` may refuse it: None where no limit is set.
    """

    schema: str
    half: HalfMessage
    preparation: Preparation | None = None
    nudge: bool = False
    flow: FlowControl | None = None

    def refuse_now(self, engine: Engine) -> None:
        """Raise, without I/O, if the message would be refused when it is written on a connection of ``engine``.

        Raises:
            OutboxBusy: its topic is known to be full.
        """
        if self.flow is not None:
            self.flow.refuse_now(engine.pool, self.half.topic, prepared=self.preparation is not None)


@dataclass(frozen=True, slots=True)
class Intent:
    """A decision to write; the transaction fails unless it is the first."""

    schema: str
    half_id: UUID
    resolution: Resolution


Item = Write | Intent | Statement


#: An item with its place in the order of everything sent by this process.
Numbered = tuple[int, Item]
#: Gives up what is to be written at the commit of the connection.
Source = Callable[[Connection], list[Numbered]]


@dataclass(slots=True)
class Pending:
    """The items of one connection's transaction, each with the open savepoints it was sent in, and their sources."""

    items: list[tuple[Numbered, tuple[str, ...]]] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)


#: A dispatcher polls by the millisecond for longer than this after its last work, so that only the first message after
#: a pause is worth a nudge (seconds).
_NUDGE_AFTER = 0.1
_last_sent: WeakKeyDictionary[Engine, float] = WeakKeyDictionary()

_by_connection: WeakKeyDictionary[Connection, Pending] = WeakKeyDictionary()
_hooked: WeakSet[Engine] = WeakSet()
_numbers = itertools.count()


def numbered(item: Item) -> Numbered:
    """Return the item with the next number."""
    return next(_numbers), item


def add(connection: Connection, *items: Numbered) -> None:
    """Remember items until this connection's transaction commits; begins one, as executing a statement would.

    Raises:
        TransactionRequired: the connection is in AUTOCOMMIT mode, or its transaction is prepared already.
    """
    if not connection.in_transaction():
        connection.begin()
    refuse_autocommit(connection)
    if getattr(connection.get_transaction(), "_is_prepared", False):
        raise TransactionRequired("the transaction is prepared (two-phase) and takes no more messages; send before")
    inside = savepoints(connection)
    of_connection(connection).items.extend((item, inside) for item in items)


def at_commit(connection: Connection, *statements: Statement) -> None:
    """Have statements written in the round trip of this connection's COMMIT, after what was sent on it."""
    inside = savepoints(connection)
    of_connection(connection).items.extend((numbered(statement), inside) for statement in statements)


def attach(connection: Connection, source: Source) -> None:
    """Ask ``source`` for more items when this connection commits."""
    if source not in (sources := of_connection(connection).sources):
        sources.append(source)


def of_connection(connection: Connection) -> Pending:
    """Return what the connection's transaction has yet to write; its engine is listened to from now on."""
    pending = _by_connection.get(connection)
    if pending is None:
        hook(connection.engine)
        pending = _by_connection[connection] = Pending()
    return pending


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
    """Listen to the events of an engine's connections, once."""
    if engine in _hooked:
        return
    hooks: dict[str, Callable[..., Any]] = {
        "commit": _on_commit,
        "commit_twophase": _on_commit_twophase,
        "prepare_twophase": _on_prepare_twophase,
        "rollback": _on_rollback,
        "rollback_twophase": _on_rollback,
        "rollback_savepoint": _on_rollback_savepoint,
    }
    for name, listener in hooks.items():
        event.listen(engine, name, listener)
    _hooked.add(engine)


def _on_commit(connection: Connection) -> None:
    if (pending := _by_connection.pop(connection, None)) is None:
        return
    try:
        _write(connection, pending, then_commit=True)
    except BaseException:
        # SQLAlchemy takes a failed commit for one that the server has rolled back; here COMMIT never got there.
        if not is_lost(connection):
            connection.dialect.do_rollback(connection.connection)
        raise


def _on_commit_twophase(connection: Connection, xid: Any, is_prepared: bool) -> None:
    if (pending := _by_connection.pop(connection, None)) is None or is_prepared:
        return
    try:
        _write(connection, pending, then_commit=False)
    except BaseException:
        if not is_lost(connection):
            connection.dialect.do_rollback_twophase(connection, xid, is_prepared=False)
        raise


def _on_prepare_twophase(connection: Connection, *_: Any) -> None:
    if (pending := _by_connection.pop(connection, None)) is not None:
        _write(connection, pending, then_commit=False)


def _on_rollback(connection: Connection, *_: Any) -> None:
    _by_connection.pop(connection, None)


def _on_rollback_savepoint(connection: Connection, name: str, *_: Any) -> None:
    if (pending := _by_connection.get(connection)) is not None:
        pending.items = [entry for entry in pending.items if name not in entry[1]]


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


def _write(connection: Connection, pending: Pending, *, then_commit: bool) -> None:
    ordered = [item for item, _ in pending.items]
    for source in pending.sources:
        ordered += source(connection)
    if not ordered:
        return
    items = [item for _, item in sorted(ordered, key=lambda entry: entry[0])]
    writes = [item for item in items if isinstance(item, Write)]
    intents = [item for item in items if isinstance(item, Intent)]
    if writes or intents:
        refuse_autocommit(connection)
    for flow in {write.flow for write in writes}:
        if flow is not None:
            flow.admit(connection, {(w.half.topic, w.preparation is not None) for w in writes if w.flow is flow})
    by_schema: dict[str, list[tuple[HalfMessage, Preparation | None]]] = {}
    for write in writes:
        by_schema.setdefault(write.schema, []).append((write.half, write.preparation))
    statements = [write_halves(schema, halves) for schema, halves in by_schema.items()]
    if intents:
        # A decision must be known to be the first before COMMIT goes out, so it has its own round trip.
        if statements:
            execute(connection, *statements)
            statements = []
        for intent in intents:
            decide_first(connection, intent.schema, intent.half_id, intent.resolution)
    statements += [item for item in items if isinstance(item, Statement)]
    if statements:
        nudge = sql.nudge(writes[0].schema) if then_commit and _is_worth_a_nudge(connection, writes) else None
        execute(connection, *statements, then_commit=then_commit, afterwards=nudge)


def _is_worth_a_nudge(connection: Connection, writes: list[Write]) -> bool:
    """Tell whether dispatchers may be asleep. NOTIFY locks database-wide at commit: never in the transaction itself."""
    if not any(write.nudge for write in writes):
        return False
    now = time.monotonic()
    earlier = _last_sent.get(connection.engine, 0.0)
    _last_sent[connection.engine] = now
    return now - earlier > _NUDGE_AFTER
