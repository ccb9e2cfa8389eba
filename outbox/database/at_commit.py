"""What a transaction has yet to write: collected without I/O, written in the round trip of its COMMIT.

`add` only remembers. When the caller's root transaction commits, everything that was added goes to the server in one
statement, together with the COMMIT itself; the caller's own ``commit()`` then finds the work done. So adding costs no
round trip, and an item added inside a savepoint that rolled back was never written at all.

An item is a statement, or a value of a `Writer`, which makes statements of all its values when the transaction commits.
This module listens to connections, by SQLAlchemy's ``ConnectionEvents``; items added to a session come from
`outbox.producer.producer`, as a source.
"""

from __future__ import annotations

import inspect
import itertools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial, reduce
from typing import Any, NoReturn, Protocol
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Connection, Engine, RootTransaction, event
from sqlalchemy.exc import DBAPIError

from outbox.database.execute import (
    Row,
    Statement,
    can_chain,
    commit_now,
    driver_of,
    execute,
    goes_on,
    in_transaction,
    is_autocommit,
    is_lost,
)
from outbox.errors import TransactionRequired
from outbox.telemetry.events import AfterCommitFailed
from outbox.telemetry.hooks import emit
from outbox.text import function_name


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
_held: WeakKeyDictionary[RootTransaction, Hold] = WeakKeyDictionary()
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
        _listen(connection)
        transaction = connection.get_transaction()
        if transaction is not None and transaction not in _held:
            _held[transaction] = self
            self._taken.append((connection, transaction, hold_open(driver_of(connection), self)))

    def release(self) -> None:
        """Let the transactions be ended again."""
        while self._taken:
            _, transaction, let = self._taken.pop()
            let()
            del _held[transaction]

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


def items_of(connection: Connection) -> list[Item]:
    """Return what the transaction of a connection has yet to write, without that of its sources."""
    pending = _by_connection.get(connection)
    return [item for item, _ in pending.items] if pending else []


def attach(connection: Connection, source: Source) -> None:
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
            had_events = engine._has_events
            event.listen(engine, "before_cursor_execute", _before_execute)
            event.listen(engine, "commit_twophase", _on_commit_twophase)
            event.listen(engine, "prepare_twophase", _on_prepare_twophase)
            event.listen(engine, "rollback", _on_rollback)
            event.listen(engine, "rollback_twophase", _on_rollback)
            event.listen(engine, "rollback_savepoint", _on_rollback_savepoint)
            event.listen(engine, "commit", _on_commit)
            engine._has_events = had_events
        _hooked.add(engine)


def _before_execute(connection: Connection, _cursor: Any, sql: str, *_: Any) -> None:
    if (hold := _hold_of(connection)) is not None:
        if ending := effects_of(sql)[0]:
            hold.refuse(ending)
        hold.used.add(connection)


def _on_commit(connection: Connection) -> None:
    try:
        _refuse_held(connection, "connection.commit()")
        _close(connection)
        _write(connection, then_commit=True)
    except BaseException:
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
    if is_there := not is_lost(connection):
        getattr(driver_of(connection), "__dict__", {}).pop("rollback", None)
    return is_there


def _on_rollback(connection: Connection, *_: Any) -> None:
    _let_roll_back(connection)
    _by_connection.pop(connection, None)


def _on_rollback_savepoint(connection: Connection, name: str, *_: Any) -> None:
    if (pending := _by_connection.get(connection)) is not None:
        pending.items = [entry for entry in pending.items if name not in entry[1]]


def _hold_of(connection: Connection) -> Hold | None:
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


# --- transactions that the running code isn't to end -----------------------------------------------------------------

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
    return ending, leaves is not None


def hold_open(driver: Any, hold: Hold) -> Callable[[], None]:
    """Refuse what would end a transaction through a connection of psycopg 3's own; return what lets it again.

    That is a call of its methods, or a statement of a cursor that is made meanwhile.
    """
    if not hasattr(driver, "pgconn"):
        return lambda: None

    def transaction(*args: Any, **options: Any) -> Any:
        # On a connection that has yet to begin one, it would be no savepoint.
        begun = in_transaction(driver)
        return type(driver).transaction(driver, *args, **options) if begun else hold.refuse("transaction()")

    def refused(call: str, *_: Any) -> NoReturn:
        hold.refuse(f"{call} of the driver's connection")

    held = {
        "commit": partial(refused, "commit()"),
        "rollback": partial(refused, "rollback()"),
        "set_autocommit": partial(refused, "set_autocommit()"),
        "_set_autocommit": partial(refused, "autocommit"),
        "transaction": transaction,
        "cursor_factory": refusing(driver.cursor_factory),
        "row_factory": driver.row_factory,
        "outbox_hold": hold,
    }
    own = vars(driver)
    before = {name: own[name] for name in held if name in own}
    own.update(held)

    def let() -> None:
        for name in held:
            own.pop(name, None)
        own.update(before)

    return let


@cache
def refusing(kind: type) -> type:
    """Return the class of cursors that refuse, on a connection that is held open, what would end its transaction."""

    def wrapped(name: str) -> Callable[..., Any]:
        plain = getattr(kind, name)

        def run(cursor: Any, query: Any, *args: Any, **options: Any) -> Any:
            hold: Hold | None = getattr(cursor.connection, "outbox_hold", None)
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
