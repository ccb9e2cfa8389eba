"""What was sent with a session and isn't written yet; and sessions whose transaction a function isn't to end.

A session may have no connection when something is sent with it: its items wait beside it, by ``SessionEvents``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import InvalidRequestError, UnboundExecutionError

from outbox.database import at_commit
from outbox.database.at_commit import Hold, Item, refuse_autocommit, savepoints
from outbox.database.session import unscoped

if TYPE_CHECKING:
    from sqlalchemy.orm import Session, SessionTransaction

#: Where a session has what was sent with it, and what holds its transaction.
_SENT, _HOLD = "outbox.sent", "outbox.hold"
_ENDED = "a rollback, commit or close"
_sessions_hooked = False


@dataclass(frozen=True, slots=True)
class Entry:
    """An item, the engine of its Outbox, and the transaction or savepoint of the session that it was sent in."""

    item: Item
    engine: Engine
    level: SessionTransaction | None


@dataclass(slots=True, eq=False)
class Sent:
    """What was sent with a session's transaction and isn't written yet, and the connections of that transaction.

    ``connections`` holds each connection with the savepoints that were open when the session began to use it,
    ``chosen`` the connection for an Outbox whose own engine the session doesn't use. Which it is counts at the
    COMMIT: the flush before it may be the first to use that engine.
    """

    entries: list[Entry] = field(default_factory=list)
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
        """Give up what is to be written at the commit of ``connection``."""
        taken = [entry for entry in self.entries if self.target(entry.engine) is connection]
        if taken:
            self.entries = [entry for entry in self.entries if self.target(entry.engine) is not connection]
        return [entry.item for entry in taken]


def certain(session: Session, sent: Sent, engine: Engine) -> Connection | Engine | None:
    """Return what will carry the messages of an Outbox on ``engine``; None while only the COMMIT will tell.

    A session that was given several engines, or chooses by code of its own, may yet come to use the Outbox's.
    """
    from sqlalchemy.orm import Session  # noqa: PLC0415 - whoever passes a session has paid for the import

    if engine in sent.connections:
        return sent.connections[engine][0]
    # SQLAlchemy 2.0 keeps the engines of single classes to itself.
    binds = getattr(session, "binds", None) or getattr(session, "_Session__binds", None)
    if binds or type(session).get_bind is not Session.get_bind:
        return None
    return sent.target(engine) or session.bind


def hook_sessions() -> None:
    """Listen to the events of all sessions, once per process."""
    global _sessions_hooked  # noqa: PLW0603 - once a process
    if _sessions_hooked:
        return
    from sqlalchemy.orm import Session  # noqa: PLC0415 - importing outbox must not pay for it

    event.listen(Session, "after_begin", _on_begin)
    event.listen(Session, "before_commit", _before_commit)
    event.listen(Session, "after_commit", _after_commit)
    event.listen(Session, "after_transaction_end", _on_end)
    _sessions_hooked = True


def sent_of(session: Session) -> Sent:
    """Return what was sent with a session's transaction."""
    sent: Sent | None = session.info.get(_SENT)
    if sent is None:
        sent = session.info[_SENT] = Sent()
    return sent


def _on_begin(session: Session, _: SessionTransaction, connection: Connection) -> None:
    sent = sent_of(session)
    if connection.engine not in sent.connections:
        sent.connections[connection.engine] = connection, savepoints(connection)
        if sent.entries:
            at_commit.attach(connection, sent.take)
    if (hold := session.info.get(_HOLD)) is not None:
        refuse_autocommit(connection)
        hold.add(connection)


def _before_commit(session: Session) -> None:
    if (hold := session.info.get(_HOLD)) is not None and session.get_nested_transaction() is None:
        hold.refuse("session.commit()")
    sent = sent_of(session)
    sent.committing = True
    assign(session, sent)


def assign(session: Session, sent: Sent) -> None:
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
        at_commit.attach(connection, sent.take)


def _after_commit(session: Session) -> None:
    sent = sent_of(session)
    released = session.get_nested_transaction()
    if released is not None:
        outer = released.parent
        while outer is not None and outer.parent is not None and not outer.nested:
            outer = outer.parent
        sent.entries = [
            Entry(entry.item, entry.engine, outer) if entry.level is released else entry for entry in sent.entries
        ]
        return
    # Left are those of a session which joined a transaction that goes on.
    for connection in {sent.target(entry.engine) for entry in sent.entries}:
        if connection is not None and connection.in_transaction():
            at_commit.add(connection, *sent.take(connection))


def _on_end(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is None and (hold := session.info.get(_HOLD)) is not None:
        hold.broken = True
    sent: Sent | None = session.info.get(_SENT)
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
                at_commit.add(connection, *sent.take(connection))
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
