"""What a loop of an application's hands over: stored and handled in one transaction, once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Park, Settings, testing
from outbox.consumer.consumer import Consumer
from outbox.database.execute import driver_of
from outbox.errors import InvalidHandler, TransactionRequired
from outbox.relay import Received
from outbox.telemetry.events import InlineFailed, IntakeRefused
from outbox.telemetry.hooks import TelemetryEvent
from outbox.worker.connections import WorkerDatabase
from tests.kit import consume_all, dispatch_all

INSERT = text("INSERT INTO book (n) VALUES (:n)")


class Loop:
    """A service with a loop of its own, whose handler books numbers."""

    def __init__(self, engine: Engine, settings: Settings, **options: Any) -> None:
        self.engine = engine
        self.app = Outbox(engine, settings=settings)
        self.fails: Callable[[Message, Session], Any] = lambda message, session: None
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE book (n int)")

        def book(message: Message, session: Session) -> Any:
            session.execute(INSERT, {"n": message.body["n"]})
            return self.fails(message, session)

        self.app.consumer("taken", group="books", **{"retry_delays": (0.0,), **options})(book)

    def receive(self, n: int, id_: str | None = None, **options: Any) -> bool:
        """Take one message, and commit."""
        received = Received("", b'{"n": %d}' % n, {"ce-id": id_ or str(uuid4())}, content_type="application/json")
        with Session(self.engine) as session, session.begin():
            return self.app.receive(session, received, "taken", group="books", **options)

    @property
    def booked(self) -> list[int]:
        """The numbers that were booked."""
        with self.engine.connect() as connection:
            return list(connection.exec_driver_sql("SELECT n FROM book ORDER BY n").scalars())

    def statuses(self) -> list[tuple[str, int]]:
        """Status and attempts of each row of the inbox."""
        with self.engine.connect() as connection:
            found = connection.exec_driver_sql("SELECT status, attempts FROM outbox.consumer_message ORDER BY 1")
            return [(row.status, row.attempts) for row in found]


@pytest.fixture
def loop(engine: Engine, settings: Settings) -> Loop:
    """A service with its loop."""
    return Loop(engine, settings)


def test_once(loop: Loop) -> None:
    """It is handled where it is received; what comes again, there or to the worker, isn't."""
    given = str(uuid4())
    assert loop.receive(1, given)
    assert not loop.receive(1, given)
    testing.drain(loop.app)
    assert not loop.receive(1, given)
    assert (loop.booked, loop.statuses()) == ([1], [("consumed", 1)])


def test_a_failure_is_the_groups(loop: Loop, heard: list[TelemetryEvent]) -> None:
    """What the handler did is undone, the rest of the transaction stays, and the workers try it again."""
    failures = [ValueError("no"), None]

    def fail(*_: Any) -> None:
        if (error := failures.pop(0)) is not None:
            raise error

    loop.fails = fail
    with Session(loop.engine) as session, session.begin():
        session.execute(INSERT, {"n": 7})
        received = Received("t@1", b'{"n": 1}', content_type="application/json")
        assert not loop.app.receive(session, received, "taken", group="books")
    assert loop.booked == [7]
    (undone,) = [each for each in heard if isinstance(each, InlineFailed)]
    assert "no" in undone.reason
    testing.drain(loop.app)
    assert (loop.booked, loop.statuses()) == ([1, 7], [("consumed", 1)])


@pytest.mark.parametrize("how", ["park", "rollback"])
def test_an_answer_and_a_rollback(loop: Loop, how: str) -> None:
    """Neither undoes what the application did, and the message isn't lost."""
    loop.fails = lambda message, session: Park("no") if how == "park" else session.rollback()
    with Session(loop.engine) as session, session.begin():
        session.execute(INSERT, {"n": 7})
        received = Received("t@1", b'{"n": 1}', content_type="application/json")
        assert not loop.app.receive(session, received, "taken", group="books")
    testing.drain(loop.app)
    assert loop.booked == [7]
    assert loop.statuses() == [("parked", 1 if how == "park" else 2)]


@pytest.mark.parametrize("statements", [[b"COMMIT"], [b"COMMIT", b"BEGIN"]], ids=["ends", "begins again"])
def test_a_handler_that_commits(loop: Loop, statements: list[bytes]) -> None:
    """The broker isn't told: it gives the message again, which has had its effect."""

    def end(_: Message, session: Session) -> None:
        for statement in statements:
            driver_of(session.connection()).pgconn.exec_(statement)

    loop.fails = end
    given = str(uuid4())
    with pytest.raises((TransactionRequired, DBAPIError)):
        loop.receive(1, given)
    assert not loop.receive(1, given)
    testing.drain(loop.app)
    assert loop.booked == [1]


@pytest.mark.parametrize("option", [{"ordered": True}, {"ordered": "key"}, {"tags": ["x"]}, {"rate": 100.0}])
def test_what_only_workers_keep(engine: Engine, settings: Settings, option: dict[str, Any]) -> None:
    """An order, a filter and a rate: the message is stored, and the workers handle it."""
    loop = Loop(engine, settings, **option)
    assert not loop.receive(1)
    assert loop.booked == []
    testing.drain(loop.app)
    assert loop.booked == ([] if "tags" in option else [1])


def test_a_paused_group(loop: Loop) -> None:
    """It handles nothing."""
    assert loop.receive(0)
    loop.app.operator.pause_group("books", by="me", why="test")
    assert not loop.receive(1)
    assert loop.booked == [0]
    loop.app.operator.resume_group("books", by="me", why="test")
    testing.drain(loop.app)
    assert loop.booked == [0, 1]


def test_nothing_is_stored_unless_the_application_commits(loop: Loop) -> None:
    """Message, inbox row and effect are of its transaction."""
    received = Received("t@1", b'{"n": 1}', content_type="application/json")
    with Session(loop.engine) as session:
        assert loop.app.receive(session, received, "taken", group="books")
        session.rollback()
    testing.drain(loop.app)
    assert (loop.booked, loop.statuses()) == ([], [])


def test_what_cannot_be_received(loop: Loop, engine: Engine, settings: Settings, heard: list[TelemetryEvent]) -> None:
    """No such group, one of another kind, no id; and what can't be a message is stored as its bytes."""
    with pytest.raises(InvalidHandler, match="has no handler"):
        loop.app.receive(Session(loop.engine), Received("x", b""), "taken", group="other")
    with loop.engine.begin() as connection, pytest.raises(InvalidHandler, match="id_from"):
        loop.app.receive(connection, Received("", b""), "taken", group="books")
    with loop.engine.begin() as connection:
        assert not loop.app.receive(connection, Received("x", b"{}", {"n": "x" * 20_000}), "taken", group="books")
    assert isinstance(heard[0], IntakeRefused)
    other = Outbox(engine, settings=settings)
    other.consumer("taken", group="books", transactional=False)(lambda message: None)
    with pytest.raises(InvalidHandler, match="has no handler"):
        other.receive(Session(engine), Received("x", b""), "taken", group="books")


def test_a_handler_that_takes_a_connection(engine: Engine, settings: Settings) -> None:
    """The one of the application's transaction."""
    app, handled = Outbox(engine, settings=settings), list[Message]()

    @app.consumer("taken", group="books")
    def book(message: Message, connection: Connection) -> None:
        connection.exec_driver_sql("SELECT 1")
        handled.append(message)

    with engine.begin() as connection:
        received = Received("t@1", b"\xff", {"note": "x"}, key="k")
        assert app.receive(connection, received, "taken", group="books")
    (message,) = handled
    assert (message.body, message.key, message.headers, message.attempt) == (b"\xff", "k", {"note": "x"}, 1)
    testing.drain(app)
    assert len(handled) == 1


def test_a_reset_has_it_handled_again(loop: Loop) -> None:
    """Its inbox row is that of any message which the group has had."""
    assert loop.receive(1)
    testing.drain(loop.app)
    loop.app.operator.reset_group("books", "taken", "first", by="me", why="test")
    testing.drain(loop.app)
    assert loop.booked == [1, 1]


def test_what_has_failed_is_the_workers(engine: Engine, settings: Settings) -> None:
    """A broker that gives it again goes around no delay, and around no count of attempts."""
    loop, called = Loop(engine, settings, retry_delays=(3600.0,)), list[int]()

    def fail(message: Message, _: Session) -> None:
        called.append(message.attempt)
        raise ValueError("no")

    loop.fails, given = fail, str(uuid4())
    assert not loop.receive(1, given)
    dispatch_all(engine, settings)
    consumer = Consumer(loop.app.subscriptions["taken", "books"], settings)
    with WorkerDatabase(engine).connect() as connection:
        consumer.start(connection, connection)
        consume_all(consumer, connection, connection)
    assert [loop.receive(1, given) for _ in range(3)] == [False] * 3
    assert (len(called), loop.statuses()) == (2, [("failed", 1)])


@pytest.mark.parametrize("fails", [True, False])
def test_a_group_begins_before_its_first_message(engine: Engine, settings: Settings, fails: bool) -> None:
    """By its start, which leaves out what is there already, and not this one."""
    app = Outbox(engine, settings=settings)
    with engine.begin() as connection:
        for number in range(5):
            app.send(connection, "taken", {"n": 100 + number})
    dispatch_all(engine, settings)
    loop = Loop(engine, settings, start="now")
    failures = [ValueError("no")] if fails else []

    def fail(*_: Any) -> None:
        if failures:
            raise failures.pop()

    loop.fails = fail
    assert loop.receive(1) is not fails
    testing.drain(loop.app)
    assert loop.booked == [1]


def test_tenants(new_engine: Callable[[], Engine], settings: Settings) -> None:
    """Each is received in its own database, whichever is active, and its handler sends there."""
    declared, engines = Outbox(settings=settings), [new_engine(), new_engine()]

    @declared.consumer("taken", group="books")
    def book(message: Message, session: Session) -> None:
        declared.send(session, "booked", message.body)

    first, second = (declared.bound_to(each) for each in engines)
    with first.active(), engines[1].begin() as connection:
        received = Received("t@1", b'{"n": 1}', content_type="application/json")
        assert second.receive(connection, received, "taken", group="books")
    for engine, count in zip(engines, (0, 2), strict=True):
        with engine.connect() as connection:
            assert connection.exec_driver_sql("SELECT count(*) FROM outbox.half_message").scalar_one() == count


def test_in_async_code(new_engine: Callable[[], Engine], settings: Settings) -> None:
    """Handlers with a session or a connection, sync or async; one with a cursor is left to the workers."""
    url = new_engine().url.render_as_string(hide_password=False)
    engine = create_async_engine(url)
    app, called = Outbox(engine, settings=settings), list[str]()

    @app.consumer("taken", group="plain")
    def plain(_: Message, session: Session) -> None:
        session.execute(text("SELECT 1"))
        called.append("plain")

    @app.consumer("taken", group="awaited")
    async def awaited(_: Message, session: AsyncSession) -> None:
        await session.execute(text("SELECT 1"))
        called.append("awaited")

    @app.consumer("taken", group="cursor")
    def by_cursor(_: Message, cursor: psycopg.Cursor[Any]) -> None:
        cursor.execute("SELECT 1")
        called.append("cursor")

    async def receive() -> list[bool]:
        received = Received("t@1", b"x")
        async with AsyncSession(engine) as session, session.begin():
            with pytest.raises(TransactionRequired, match="run_sync"):
                app.receive(session, received, "taken", group="plain")  # type: ignore[arg-type]  # what is tested
            groups = "plain", "awaited", "cursor"
            return [await session.run_sync(app.receive, received, "taken", group=group) for group in groups]

    async def run() -> list[bool]:
        try:
            return await receive()
        finally:
            await engine.dispose()

    assert asyncio.run(run()) == [True, True, False]
    assert called == ["plain", "awaited"]


def test_an_async_handler_of_a_plain_session(engine: Engine, settings: Settings) -> None:
    """It is left to the workers."""
    app = Outbox(engine, settings=settings)

    @app.consumer("taken", group="books")
    async def book(message: Message, session: AsyncSession) -> None: ...

    with engine.begin() as connection:
        assert not app.receive(connection, Received("t@1", b"x"), "taken", group="books")
