"""What a handler gets beside its message, by its declaration; and that the transaction is the framework's in each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any, NewType, Protocol

import psycopg
import pytest
from psycopg.rows import dict_row
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Settings
from outbox.errors import InvalidHandler
from tests.consumer.test_ended import ENDS
from tests.kit.bench import LEDGER, Bench, record

if TYPE_CHECKING:
    from decimal import Decimal as Unread

    from sqlalchemy.orm import Session as CheckedSession

WRITE = "INSERT INTO ledger (message_id, body, attempt) VALUES (%s, %s, %s)"


class OwnSession(Session):
    """A session class of the application's own."""


class OtherSession(Session):
    """One that can't be joined to a transaction."""

    def __init__(self, tenant: str) -> None:
        super().__init__()
        self.tenant = tenant


class HasExecute(Protocol):
    """What an application may know of its session."""

    def execute(self, statement: Any) -> Any:
        """Execute a statement."""


Alias = NewType("Alias", Session)


def by_connection(message: Message, connection: Connection) -> None:
    """Write a message into the ledger."""
    connection.execute(LEDGER, {"id": message.id, "body": str(message.body), "attempt": message.attempt})


def by_cursor(message: Message, cursor: psycopg.Cursor) -> None:
    """Write a message into the ledger."""
    cursor.execute(WRITE, (message.id, str(message.body), message.attempt))


async def by_async_session(message: Message, session: AsyncSession) -> None:
    """Write a message into the ledger."""
    await session.execute(LEDGER, {"id": message.id, "body": str(message.body), "attempt": message.attempt})


async def by_async_connection(message: Message, connection: AsyncConnection) -> None:
    """Write a message into the ledger."""
    await connection.execute(LEDGER, {"id": message.id, "body": str(message.body), "attempt": message.attempt})


async def by_async_cursor(message: Message, cursor: psycopg.AsyncCursor) -> None:
    """Write a message into the ledger."""
    await cursor.execute(WRITE, (message.id, str(message.body), message.attempt))


#: Each kind of handler, with the options that it needs.
KINDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "session": (record, {}),
    "connection": (by_connection, {}),
    "cursor": (by_cursor, {}),
    "pipeline": (by_cursor, {"pipeline": True}),
    "async session": (by_async_session, {}),
    "async connection": (by_async_connection, {}),
    "async cursor": (by_async_cursor, {}),
    "async pipeline": (by_async_cursor, {"pipeline": True}),
}


# --- the declaration decides -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_takes_effect_once(bench: Bench, kind: str, batch: int) -> None:
    """Whatever a handler takes, its effect commits with the inbox rows."""
    handler, options = KINDS[kind]
    consumer = bench.declare(handler, batch=batch, **options)
    bench.send(1, 2, 3, 4)
    bench.consume(consumer)
    assert bench.ledger() == ["1", "2", "3", "4"]
    assert bench.statuses() == [("consumed", 1)] * 4


def test_the_annotation_decides(bench: Bench) -> None:
    """A handler gets an instance of what its parameter is annotated as; without an annotation that says, a session."""
    got: list[Any] = []

    def plain(message: Message, session: Session) -> None:
        got.append((session, Session))

    def connection(message: Message, connection: Connection) -> None:
        got.append((connection, Connection))

    def cursor(message: Message, cursor: psycopg.Cursor[dict[str, Any]]) -> None:
        got.append((cursor, psycopg.Cursor))

    def own(message: Message, session: OwnSession) -> None:
        got.append((session, OwnSession))

    def bare(message, session):  # type: ignore[no-untyped-def]
        got.append((session, Session))

    def anything(message: Message, *rest: Any) -> None:
        got.append((rest[0], Session))

    def optional(message: Message, session: Session | None = None) -> None:
        got.append((session, Session))

    def either(message: Message, work: AsyncConnection | Connection) -> None:
        got.append((work, Connection))

    def annotated(message: Message, work: Annotated[Connection, "of the worker"]) -> None:
        got.append((work, Connection))

    def alias(message: Message, work: Alias) -> None:
        got.append((work, Session))

    def protocol(message: Message, work: HasExecute) -> None:
        got.append((work, Session))

    def checked(message: Message, session: CheckedSession) -> None:
        got.append((session, Session))

    class Handler:
        def __call__(self, message: Message, connection: Connection) -> None:
            assert message.body == 1
            got.append((connection, Connection))

        def method(self, message: Message, connection: Connection) -> None:
            self(message, connection)

    @functools.wraps(connection)
    def wrapped(*args: Any) -> None:
        connection(*args)

    of_partial = functools.partial(connection)
    handlers: list[Callable[..., Any]] = [
        plain,
        connection,
        cursor,
        own,
        bare,
        anything,
        optional,
        either,
        annotated,
        alias,
        protocol,
        checked,
    ]
    handlers += [Handler(), Handler().method, wrapped, of_partial]
    bench.send(1)
    for number, handler in enumerate(handlers):
        bench.consume(bench.declare(handler, group=f"g{number}"))
    assert len(got) == len(handlers)
    assert all(isinstance(instance, kind) for instance, kind in got)


def _sync_of_async(message: Message, session: AsyncSession) -> None: ...
def _driver(message: Message, connection: psycopg.Connection) -> None: ...
def _server_cursor(message: Message, cursor: psycopg.ServerCursor) -> None: ...
def _async_cursor(message: Message, cursor: psycopg.AsyncCursor) -> None: ...
def _number(message: Message, number: int) -> None: ...
def _of_checkers(message: Message, amount: Unread) -> None: ...
def _other_session(message: Message, session: OtherSession) -> None: ...
async def _async_of_sync(message: Message, session: Session) -> None: ...
async def _async_of_cursor(message: Message, cursor: psycopg.Cursor) -> None: ...


SYNC = "sqlalchemy.orm.Session, sqlalchemy.Connection or psycopg.Cursor"
ASYNC = "sqlalchemy.ext.asyncio.AsyncSession, sqlalchemy.ext.asyncio.AsyncConnection or psycopg.AsyncCursor"


@pytest.mark.parametrize(
    ("handler", "parameter", "told"),
    [
        (_sync_of_async, "session", f"a plain def gets {SYNC}"),
        (_driver, "connection", f"annotated as psycopg.Connection, and a plain def gets {SYNC}"),
        (_server_cursor, "cursor", f"annotated as psycopg.ServerCursor, and a plain def gets {SYNC}"),
        (_async_cursor, "cursor", f"a plain def gets {SYNC}"),
        (_number, "number", f"annotated as builtins.int, and a plain def gets {SYNC}"),
        (_of_checkers, "amount", "name 'Unread' is not defined); import what it names outside of 'if TYPE_CHECKING'"),
        (_other_session, "session", "which can't be made by (connection, join_transaction_mode=…)"),
        (_async_of_sync, "session", f"an async def gets {ASYNC}"),
        (_async_of_cursor, "cursor", f"an async def gets {ASYNC}"),
    ],
)
def test_a_wrong_annotation_is_refused(handler: Callable[..., Any], parameter: str, told: str, bench: Bench) -> None:
    """At the registration, naming the handler, the parameter, and what is possible."""
    app = Outbox(bench.consumer, settings=Settings())
    with pytest.raises(InvalidHandler) as refused:
        app.consumer("t", group="g")(handler)
    error = str(refused.value)
    assert f"consumer of 't' in group 'g': the handler {__name__}.{handler.__name__}" in error
    assert f"parameter {parameter!r}" in error
    assert told in error
    assert not app.subscriptions


@pytest.mark.parametrize("handler", [record, by_connection, by_async_session])
def test_a_pipeline_needs_a_cursor(bench: Bench, handler: Callable[..., Any]) -> None:
    """Of a session each statement waits for its answer: ``pipeline=True`` says what to declare instead."""
    with pytest.raises(InvalidHandler, match=r"second parameter is annotated as psycopg\.(Async)?Cursor"):
        bench.app.consumer("t", group="g", pipeline=True)(handler)


def test_a_pipeline_is_for_transactions(bench: Bench) -> None:
    """A handler outside of transactions has no statements of ours."""
    with pytest.raises(InvalidHandler, match="pipeline="):
        Outbox(bench.consumer).consumer("t", group="g", transactional=False, pipeline=True)(lambda message: None)  # type: ignore[call-overload]


# --- the transaction is the framework's ------------------------------------------------------------------------------


def test_each_message_has_a_cursor_of_its_own(bench: Bench) -> None:
    """What a handler does to its cursor is gone with the message, and so is the cursor."""
    seen: list[Any] = []

    def handler(message: Message, cursor: psycopg.Cursor) -> None:
        by_cursor(message, cursor)
        seen.append(cursor.execute("SELECT 1 AS one").fetchone())
        cursor.row_factory = dict_row  # type: ignore[assignment]
        seen.append(cursor)

    consumer = bench.declare(handler, batch=2)
    bench.send(1, 2)
    bench.consume(consumer)
    assert seen[0] == seen[2] == (1,)
    for cursor in seen[1::2]:
        with pytest.raises(psycopg.InterfaceError, match="closed"):
            cursor.execute("SELECT 1")


@pytest.mark.parametrize("kind", ["cursor", "pipeline"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("end", ["ROLLBACK", "SELECT 1; COMMIT", "rollback by the driver", "commit by the driver"])
def test_a_cursor_cannot_end_the_transaction(bench: Bench, end: str, batch: int, kind: str) -> None:
    """Its message has failed, as that of a session; its effect is undone, and the others' are kept."""

    def handler(message: Message, cursor: psycopg.Cursor) -> None:
        by_cursor(message, cursor)
        if message.body == 2 and end.endswith("by the driver"):
            getattr(cursor.connection, end.partition(" ")[0])()
        elif message.body == 2:
            cursor.execute(end)

    consumer = bench.declare(handler, batch=batch, pipeline=kind == "pipeline")
    ids = bench.send(1, 2, 3)
    bench.consume(consumer)
    assert bench.ledger() == ["1", "3"]
    assert bench.inbox()[ids[1]].status == "failed"
    assert "the transaction is the worker's" in str(bench.inbox()[ids[1]].error)


@pytest.mark.parametrize("kind", ["cursor", "pipeline"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("end", ["ROLLBACK", "COMMIT", "COMMIT and on"])
def test_a_cursor_that_ends_the_transaction(bench: Bench, end: str, batch: int, kind: str) -> None:
    """One that goes past the connection's cursors: its message is parked, no effect comes twice, and none is missing
    that is recorded.
    """
    _, kept = ENDS[end]

    def handler(message: Message, cursor: psycopg.Cursor) -> None:
        by_cursor(message, cursor)
        if message.body != 2:
            return
        own = psycopg.ClientCursor(cursor.connection) if kind == "cursor" else psycopg.Cursor(cursor.connection)
        own.execute(end.partition(" ")[0])
        if end.endswith("and on"):
            own.execute("BEGIN")

    consumer = bench.declare(handler, batch=batch, pipeline=kind == "pipeline")
    ids = bench.send(1, 2, 3)
    with bench.another(isolation_level="AUTOCOMMIT") as there:
        bench.consume_on(consumer, *there)
        bench.age_retries()
        consumer.retry_once(*there)
    inbox, ledger = bench.inbox(), bench.ledger()
    assert inbox[ids[1]].status == "parked"
    assert "ended the transaction" in str(inbox[ids[1]].error)
    assert ledger.count("2") == int(kept)
    for id_, body in zip(ids, ("1", "2", "3"), strict=True):
        assert ledger.count(body) <= 1
        if inbox[id_].status == "consumed":
            assert ledger.count(body) == 1


@pytest.mark.parametrize("mode", ["AUTOCOMMIT", "READ COMMITTED"])
@pytest.mark.parametrize("swallowed", [False, True])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("through", ["a connection", "a session"])
def test_a_connection_cannot_be_committed(bench: Bench, through: str, batch: int, swallowed: bool, mode: Any) -> None:
    """``connection.commit()`` of a handler undoes all and is told, also where the handler doesn't let it be known."""

    def commit(message: Message, connection: Connection) -> None:
        if message.body == 2:
            try:
                connection.commit()
            except Exception:
                if not swallowed:
                    raise

    def of_connection(message: Message, connection: Connection) -> None:
        by_connection(message, connection)
        commit(message, connection)

    def of_session(message: Message, session: Session) -> None:
        record(message, session)
        commit(message, session.connection())

    consumer = bench.declare(of_connection if through == "a connection" else of_session, batch=batch)
    ids = bench.send(1, 2, 3)
    with bench.another(isolation_level=mode) as there:
        bench.consume_on(consumer, *there)
        bench.age_retries()
        consumer.retry_once(*there)
    assert bench.ledger() == ["1", "3"]
    row = bench.inbox()[ids[1]]
    assert (row.status, row.attempts) == ("failed", 2)
    assert ("rolled the session back" if swallowed else "the transaction is the worker's") in str(row.error)


@pytest.mark.parametrize("batch", [1, 4])
def test_a_connection_that_is_rolled_back(bench: Bench, batch: int) -> None:
    """``connection.rollback()`` is a failure of its message, which undoes nothing of the others."""

    def handler(message: Message, connection: Connection) -> None:
        by_connection(message, connection)
        if message.body == 2:
            connection.rollback()

    consumer = bench.declare(handler, batch=batch)
    ids = bench.send(1, 2, 3)
    bench.consume(consumer)
    assert bench.ledger() == ["1", "3"]
    assert bench.inbox()[ids[1]].status == "failed"


def test_a_connection_takes_savepoints(bench: Bench) -> None:
    """What is rolled back to a savepoint is gone, and the rest is kept."""

    def handler(message: Message, connection: Connection) -> None:
        by_connection(message, connection)
        with connection.begin_nested() as undone:
            by_connection(message, connection)
            undone.rollback()

    consumer = bench.declare(handler, batch=2)
    bench.send(1, 2)
    bench.consume(consumer)
    assert bench.ledger() == ["1", "2"]


async def _commit_async(message: Message, connection: AsyncConnection) -> None:
    await by_async_connection(message, connection)
    await connection.commit()


async def _end_async(message: Message, cursor: psycopg.AsyncCursor) -> None:
    await by_async_cursor(message, cursor)
    await cursor.connection.commit()


@pytest.mark.parametrize(
    ("handler", "options", "status", "kept"),
    [
        (_commit_async, {}, "failed", []),
        (_end_async, {}, "failed", []),
        (_end_async, {"pipeline": True}, "failed", []),
    ],
)
def test_the_same_of_async_handlers(
    bench: Bench, handler: Callable[..., Coroutine[Any, Any, None]], options: Any, status: str, kept: list[str]
) -> None:
    """A commit of a connection undoes all, and so does one of the driver's."""
    consumer = bench.declare(handler, **options)
    (id_,) = bench.send(1)
    bench.consume(consumer)
    bench.retry(consumer)
    assert bench.ledger() == kept
    assert bench.inbox()[id_].status == status


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_and_an_error_undo_each_kind(bench: Bench, kind: str) -> None:
    """What raises is undone and blamed, the rest of its batch is kept; a retry then succeeds."""
    handler, options = KINDS[kind]

    @functools.wraps(handler)
    def once(message: Message, carrier: Any) -> None:
        handler(message, carrier)
        if message.body == 2 and message.attempt == 1:
            raise RuntimeError("not today")

    @functools.wraps(handler)
    async def async_once(message: Message, carrier: Any) -> None:
        await handler(message, carrier)
        if message.body == 2 and message.attempt == 1:
            raise RuntimeError("not today")

    consumer = bench.declare(async_once if kind.startswith("async") else once, batch=4, **options)
    bench.send(1, 2, 3)
    bench.consume(consumer)
    bench.retry(consumer)
    assert bench.ledger() == ["1", "3", "2"]
    assert bench.statuses() == [("consumed", 1), ("consumed", 2), ("consumed", 1)]


def test_what_a_handler_sends_by_its_carrier(bench: Bench) -> None:
    """A message that is sent with a connection, or with that of a cursor, commits with the effect, or vanishes."""

    def of_connection(message: Message, connection: Connection) -> None:
        bench.sink.send(connection, "next", message.body)
        if message.body == 2:
            raise RuntimeError("not today")

    def of_cursor(message: Message, cursor: psycopg.Cursor) -> None:
        bench.sink.send(cursor.connection, "next", message.body)
        if message.body == 2:
            raise RuntimeError("not today")

    ids = bench.send(1, 2, 3)
    for group, handler, options in (
        ("a", of_connection, {}),
        ("b", of_cursor, {}),
        ("c", of_cursor, {"pipeline": True}),
    ):
        bench.consume(bench.declare(handler, group=group, batch=3, **options))
        sent = bench.rows("SELECT headers ->> 'outbox-cause' FROM outbox.half_message WHERE topic = 'next'")
        assert sorted(map(str, sent)) == sorted([str(ids[0]), str(ids[2])])
        bench.run("DELETE FROM outbox.half_message WHERE topic = 'next'")


def test_text_is_still_text(bench: Bench) -> None:
    """A connection executes what SQLAlchemy makes, and its errors fail the message."""

    def handler(message: Message, connection: Connection) -> None:
        connection.execute(text("SELECT 1 / :zero"), {"zero": 0})

    consumer = bench.declare(handler)
    (id_,) = bench.send(1)
    bench.consume(consumer)
    assert "division by zero" in str(bench.inbox()[id_].error)
