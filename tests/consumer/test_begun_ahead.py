"""The next transaction of a queue, which begins in the round trip of the last COMMIT: what that must not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from outbox import Message
from outbox.consumer.consumer import Consumer
from outbox.consumer.control import gate
from outbox.database import at_commit, session
from outbox.database.execute import Statement, driver_of, goes_on
from outbox.telemetry.events import AfterCommitFailed
from outbox.telemetry.hooks import TelemetryEvent
from tests.consumer.test_carriers import by_async_cursor, by_cursor
from tests.kit.bench import Bench, record


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return whether each COMMIT that was to begin a transaction did so."""
    answers: list[bool] = []

    def note(connection: Connection, *first: Statement) -> Any:
        rows = at_commit.commit_and_begin(connection, *first)
        answers.append(rows is not None)
        return rows

    monkeypatch.setattr(session, "commit_and_begin", note)
    return answers


def add_to_first(monkeypatch: pytest.MonkeyPatch, sql: str) -> None:
    """Have a statement run where a transaction begins that has begun with a COMMIT."""
    commit_and_begin = vars(session)["commit_and_begin"]

    def longer(connection: Connection, *first: Statement) -> Any:
        return commit_and_begin(connection, *first, Statement(sql))

    monkeypatch.setattr(session, "commit_and_begin", longer)


@pytest.mark.parametrize("options", [{}, {"ordered": True}, {"ordered": "key"}, {"batch": 2}], ids=str)
@pytest.mark.parametrize("kind", ["session", "cursor", "async"])
def test_a_commit_begins_the_next_transaction(
    bench: Bench, begun: list[bool], kind: str, options: dict[str, Any]
) -> None:
    """That of the last message that is known begins none, and leaves the connection free."""
    bench.send(1, 2, 3, 4)
    handlers: dict[str, Callable[..., Any]] = {"session": record, "cursor": by_cursor, "async": by_async_cursor}
    consumer = bench.declare(handlers[kind], **options)
    bench.consume(consumer)
    assert bench.ledger() == ["1", "2", "3", "4"]
    assert bench.statuses() == [("consumed", 1)] * 4
    assert begun == [True] * (4 // options.get("batch", 1) - 1)
    assert not bench.connection.in_transaction()


def test_each_has_a_transaction_of_its_own(bench: Bench) -> None:
    """What one message has done is visible to others while the next one is handled, and stays if that fails."""
    seen: list[list[str]] = []

    def handler(message: Message, session: Session) -> None:
        seen.append(bench.ledger())
        record(message, session)
        if message.body == 3:
            raise RuntimeError("ill")

    bench.send(1, 2, 3, 4)
    bench.consume(bench.declare(handler))
    assert seen == [[], ["1"], ["1", "2"], ["1", "2"]]
    assert bench.ledger() == ["1", "2", "4"]
    assert [status for status, _ in bench.statuses()] == ["consumed", "consumed", "failed", "consumed"]


def test_a_look_up_that_fails_undoes_nothing(
    bench: Bench, begun: list[bool], heard: list[TelemetryEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The COMMIT before it is done: the worker is told of it, and begins the next transaction anew."""
    add_to_first(monkeypatch, "SELECT 1 / 0")
    bench.send(1, 2, 3)
    bench.consume(bench.declare())
    assert bench.ledger() == ["1", "2", "3"]
    assert bench.statuses() == [("consumed", 1)] * 3
    assert begun == [False, False]
    assert sum(isinstance(event, AfterCommitFailed) for event in heard) == 2


def test_a_server_that_goes_behind_the_commit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message is consumed, though nobody had the answer; and isn't again."""
    bench.send(1, 2, 3)
    consumer = bench.declare()
    with monkeypatch.context() as patch:
        add_to_first(patch, "SELECT pg_terminate_backend(pg_backend_pid())")
        with bench.consumer.connect() as other, pytest.raises(DBAPIError):
            bench.consume_on(consumer, other, other)
    assert bench.ledger() == ["1"]
    bench.consume(consumer)
    assert bench.ledger() == ["1", "2", "3"]
    assert bench.statuses() == [("consumed", 1)] * 3


def test_who_stops_leaves_the_queue_to_others(bench: Bench, begun: list[bool]) -> None:
    """A worker that stops between two messages ends the transaction that it has begun."""
    bench.send(1, 2, 3)
    first = bench.declare()
    first._stopping = lambda: bool(begun)
    assert first.consume_once(bench.connection, bench.source).done == 1
    assert begun == [True]
    assert not bench.connection.in_transaction()
    with bench.consumer.connect() as other:
        bench.consume_on(bench.declare(), other, other)
    assert bench.ledger() == ["1", "2", "3"]


def test_what_came_after_the_look_is_handled_with_the_rest(
    bench: Bench, begun: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that is read, and wasn't there when the worker looked: its transaction isn't begun in vain."""
    waiting_queues = Consumer.waiting_queues

    def later(self: Consumer, connection: Connection, source: Connection) -> Any:
        waiting = waiting_queues(self, connection, source)
        bench.send(2)
        return waiting

    monkeypatch.setattr(Consumer, "waiting_queues", later)
    consumer = bench.declare()
    bench.send(1)
    assert consumer.consume_once(bench.connection, bench.source).done == 2
    assert bench.ledger() == ["1", "2"]
    assert begun == [True]


def test_a_pause_between_two_messages(bench: Bench, begun: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at whether the group is paused is made outside of the transaction that has begun."""
    monkeypatch.setattr(gate, "READ_EVERY", 0.0)

    def handler(message: Message, session: Session) -> None:
        record(message, session)
        if message.body == 2:
            bench.sink.operator.pause_group("g", by="me", why="test")

    bench.send(1, 2, 3)
    bench.consume(bench.declare(handler))
    assert bench.ledger() == ["1", "2"]
    assert begun == [True, True]
    assert not bench.connection.in_transaction()


def test_a_group_with_a_rate_begins_nothing_ahead(bench: Bench, begun: list[bool]) -> None:
    """What it may handle is asked for before each message, in a transaction of its own."""
    bench.send(1, 2, 3)
    bench.consume(bench.declare(rate="1000/s"))
    assert bench.ledger() == ["1", "2", "3"]
    assert begun == []


@pytest.mark.parametrize("what", ["begin", "commit"])
def test_who_listens_is_told_of_each_transaction(bench: Bench, begun: list[bool], what: str) -> None:
    """An application may make settings where a transaction begins, and must see each COMMIT that it listens for."""
    told: list[Connection] = []
    listening = create_engine(bench.consumer.url)
    event.listen(listening, what, told.append)
    bench.send(1, 2, 3)
    consumer = bench.declare()
    with listening.connect() as connection:
        bench.consume_on(consumer, connection, connection)
    listening.dispose()
    assert bench.ledger() == ["1", "2", "3"]
    assert begun == []
    assert len(told) >= 3


def test_a_handler_that_ends_the_transaction_is_blamed(bench: Bench, begun: list[bool]) -> None:
    """Also where its transaction has begun with the COMMIT before."""

    def handler(message: Message, session: Session) -> None:
        record(message, session)
        if message.body == 2:
            psycopg.ClientCursor(driver_of(session.connection())).execute("COMMIT")

    bench.send(1, 2, 3)
    bench.consume(bench.declare(handler))
    assert [status for status, _ in bench.statuses()] == ["consumed", "parked", "consumed"]
    assert begun[0]


def test_nothing_goes_on_where_something_comes_afterwards(bench: Bench) -> None:
    """What a COMMIT has done afterwards is in no transaction that somebody may undo."""
    with bench.consumer.connect() as connection:
        connection.begin()

        def write(*_: Any, **__: Any) -> Any:
            return [], [Statement("INSERT INTO ledger (body) VALUES ('afterwards')")], []

        at_commit.add(connection, at_commit.new_item(1, write))
        assert at_commit.commit_and_begin(connection, Statement("SELECT 1")) is None
        assert not goes_on(connection)
        assert not connection.in_transaction()
    assert bench.ledger() == ["afterwards"]
