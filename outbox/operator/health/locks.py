"""Which sessions hold locks of ours; and the act that ends a holder's session.

A lock ends with its transaction, and the server ends a transaction whose client is gone. A lock that is held for long
is that of a handler which takes its time, of a host that the server has yet to miss, of a program that was stopped; or
of an application that uses the same key for itself, perhaps for as long as its session lives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from sqlalchemy.exc import DBAPIError

from outbox.acts.changes import Actor, checked_actor, record_of
from outbox.acts.whole_acts import END
from outbox.database.execute import Row, Statement, execute, lock_key, sqlstate
from outbox.database.sql import GroupQueue
from outbox.dispatch.dispatch_pass import dispatch_lock
from outbox.errors import ActRefused, DatabaseUnreached
from outbox.operator.databases import OverDatabases
from outbox.operator.health import sql

#: The name of the lock that a session holds while it appends messages.
DISPATCH = "dispatch"
_NO_PRIVILEGE = "42501"


@dataclass(frozen=True, slots=True)
class HeldLock:
    """A lock that one transaction, ``age`` seconds old, keeps from all other workers; or one session, of that age.

    ``session`` is PostgreSQL's name of the session, of its start and its ``pid`` (``%c`` in its log): another session
    that is given the same pid has another name. It is the name of a prepared transaction, which has no session (pid 0).
    """

    lock: str
    session: str
    pid: int
    age: float
    state: str
    user: str
    application_name: str
    client: str


@dataclass(frozen=True, slots=True)
class LockRow(HeldLock):
    """A held lock of one of several databases."""

    database: str


def held_locks(
    read: Callable[[Statement], list[list[Row]]], schema: str, parts: Collection[str], seconds: float
) -> list[HeldLock]:
    """Return which sessions have held locks of ours for longer than ``seconds``, or hold them outside a transaction."""
    names = _names(read, schema, parts)
    (rows,) = read(sql.LOCK_HOLDERS(schema, keys=list(names), lock=seconds))
    return [HeldLock(names[key], *facts) for key, *facts in rows]


def _names(read: Callable[[Statement], list[list[Row]]], schema: str, parts: Collection[str]) -> dict[int, str]:
    """Return what our locks are called, by their keys."""
    names = {lock_key("segments", schema, part): f"the {part}'s segments" for part in parts}
    if "producer" in parts:
        names[dispatch_lock(schema)] = DISPATCH
    if "consumer" in parts:
        for group, topic, queue, _ in read(sql.OFFSETS(schema))[0]:
            of_group = f"topic {topic!r} in group {group!r}"
            names[lock_key("group", schema, group, topic)] = f"the start of {of_group}"
            names[lock_key("rate", group, topic, schema)] = f"the rate of {of_group}"
            names[GroupQueue(schema, group, topic, queue).lock] = f"queue {queue} of {of_group}"
    return names


class LockViews(OverDatabases):
    """Show the held locks to an operator, and end a holder."""

    def locks(self, database: str | None = None) -> list[LockRow]:
        """Return which of our locks are held at this moment, and by which sessions, longest first.

        Only sessions that the role of this connection may see: its own role's, or with pg_monitor all.

        Raises:
            UnknownDatabase: no database of that name.
        """
        rows = []
        for each in self.databases.having(None, database):
            with each.read_only() as connection:
                held = held_locks(partial(execute, connection), each.schema, each.parts, 0.0)
            rows += [LockRow(**dataclasses.asdict(lock), database=each.name) for lock in held]
        return sorted(rows, key=lambda row: -row.age)

    def lock_of(self, session: str, database: str | None = None) -> LockRow:
        """Return the lock that a session holds, in one of the databases or the one named.

        Raises:
            ActRefused: it holds none of ours, or not any more.
            DatabaseUnreached: a database can't be read in which it may.
            UnknownDatabase: no database of that name.
        """
        for row in self.locks(database):
            if row.session == session:
                return row
        if away := self.databases.away_for(database):
            raise DatabaseUnreached(away)
        raise ActRefused(_refusal(session))

    def end(self, session: str, *, by: str | Actor, why: str, database: str | None = None) -> str:
        """End the session that holds a lock of dispatch or of a group's queue; return a sentence about it.

        Its transaction rolls back, and another worker goes on. ``session`` is as in `HeldLock`.

        Raises:
            ActRefused: the session holds none of our locks, or not any more; this role may not end it; or it is a
                prepared transaction.
            UnknownDatabase: no database of that name.
            InvalidRequest: no reason, an actor without a name, or a text that the audit can't record.
        """
        actor = checked_actor(END, by, why)
        held = self.lock_of(session, database)
        chosen = self.databases[held.database]
        if not held.pid:
            raise ActRefused(
                f"{session!r} is a prepared transaction, without a session: let its owner end it, by COMMIT PREPARED "
                "or ROLLBACK PREPARED with this name"
            )
        recorded = record_of(chosen.schema, END.name, actor, why, session, dataclasses.asdict(held))
        try:
            with chosen.acting() as connection:
                keys = list(_names(partial(execute, connection), chosen.schema, chosen.parts))
                _, ended = execute(connection, recorded, sql.END_HOLDER(chosen.schema, keys=keys, session=session))
                if not any(row[0] for row in ended):
                    raise ActRefused(_refusal(session))
        except DBAPIError as error:
            if sqlstate(error) != _NO_PRIVILEGE:
                raise
            role = chosen.engine.url.username or "that role"  # a URL may leave it to the environment
            raise ActRefused(
                f"session {session}, which holds the lock of {held.lock}, can't be ended by the role of this "
                f"connection: connect as the session's role, or GRANT pg_signal_backend TO {role}"
            ) from error
        return f"session {session}, which held the lock of {held.lock}, is ended: another worker goes on"


def _refusal(session: str) -> str:
    return (
        f"session {session} can't be ended: it holds no lock of ours (any more); see which sessions do: "
        "outbox lock list"
    )
