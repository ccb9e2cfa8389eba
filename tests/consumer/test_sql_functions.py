"""Receiving in SQL: a consumer in whatever language handles each message once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import Engine

from outbox.errors import InvalidMessage
from outbox.message.content import check_group
from outbox.message.model import uuid7
from tests.kit import wait_until
from tests.kit.bench import Bench

RECEIVE = "SELECT outbox.receive('g', %s, 't', 0, %s)"


@pytest.fixture
def dsn(engine: Engine) -> str:
    """The test's database, for a driver."""
    return engine.url.set(drivername="postgresql").render_as_string(hide_password=False)


@pytest.fixture
def connection(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection of the driver's own."""
    with psycopg.connect(dsn) as connection:
        yield connection


def is_new(connection: psycopg.Connection[Any], message_id: UUID, position: int = 1) -> bool:
    """Receive a message; tell whether it is to be handled."""
    row = connection.execute(RECEIVE, (message_id, position)).fetchone()
    assert row is not None
    return bool(row[0])


def test_new_and_known(connection: psycopg.Connection[Any], bench: Bench) -> None:
    """A message is new until a transaction that received it has committed."""
    message_id = uuid7()
    assert is_new(connection, message_id)
    connection.rollback()
    assert is_new(connection, message_id)
    assert not is_new(connection, message_id)
    connection.commit()
    assert not is_new(connection, message_id)
    assert bench.statuses() == [("consumed", 1)]
    assert connection.execute("SELECT outbox.receive('h', %s, 't', 0, 1)", (message_id,)).fetchone() == (True,)


@pytest.mark.parametrize("commits", [True, False])
def test_rivals(commits: bool, connection: psycopg.Connection[Any], dsn: str, bench: Bench) -> None:
    """The second to receive a message waits for the first, and handles it if that one rolls back."""
    message_id = uuid7()
    assert is_new(connection, message_id)
    told: list[bool] = []

    def second() -> None:
        with psycopg.connect(dsn) as rival:
            told.append(is_new(rival, message_id))

    thread = threading.Thread(target=second)
    thread.start()
    wait_until(bench.waiting, "the second waits")
    connection.commit() if commits else connection.rollback()
    thread.join()
    assert told == [not commits]


@pytest.mark.parametrize(
    ("status", "new"), [("failed", True), ("parked", False), ("quarantined", False), ("consumed", False)]
)
def test_what_the_inbox_says(status: str, new: bool, connection: psycopg.Connection[Any], bench: Bench) -> None:
    """A message that an operator has given another go is to be handled, one that was set aside isn't."""
    message_id = uuid7()
    connection.execute(
        "INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts,"
        " next_attempt_at) VALUES ('g', %s, 't', 0, 1, %s, 3, CASE WHEN %s = 'failed' THEN now() END)",
        (message_id, status, status),
    )
    connection.commit()
    assert is_new(connection, message_id) is new
    connection.commit()
    assert bench.statuses() == [("consumed", 4) if new else (status, 3)]


def test_row_that_is_taken_back_meanwhile(connection: psycopg.Connection[Any], dsn: str, bench: Bench) -> None:
    """A quarantine that is lifted while the message is received leaves it to be handled."""
    message_id = uuid7()
    with psycopg.connect(dsn) as other:
        other.execute(
            "INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts)"
            " VALUES ('g', %s, 't', 0, 1, 'quarantined', 0)",
            (message_id,),
        )
        told: list[bool] = []
        thread = threading.Thread(target=lambda: told.append(is_new(connection, message_id)))
        thread.start()
        wait_until(bench.waiting, "the receiver waits for the quarantine")
        other.execute("DELETE FROM outbox.consumer_message")
        other.commit()
        thread.join()
    assert told == [True]


def test_digest_and_offset(connection: psycopg.Connection[Any], bench: Bench) -> None:
    """The inbox has the digest that the reconciliation compares; the offset moves forward only."""
    (message_id,) = bench.send({"number": 1})
    bench.dispatch()
    row = connection.execute(
        "SELECT h.topic, m.queue, position, body FROM outbox.message m JOIN outbox.half_message h ON h.id = m.half_id"
    ).fetchone()
    assert row is not None
    topic, queue, position, body = row
    receive = "SELECT outbox.receive('g', %s, %s, %s, %s, %s)"
    connection.execute(receive, (message_id, topic, queue, position, body))
    same = "SELECT c.body_digest = h.body_digest FROM outbox.consumer_message c, outbox.half_message h"
    assert connection.execute(same).fetchone() == (True,)

    def moves(to: int) -> bool:
        move = "SELECT outbox.move_offset('g', %s, %s, %s, %s)"
        return connection.execute(move, (topic, queue, to, message_id)).fetchone() == (True,)

    assert [moves(position + step) for step in (0, 0, -1, 1)] == [True, False, False, True]
    newest = "SELECT position, message_id FROM outbox.consumer_offset ORDER BY position DESC LIMIT 1"
    assert connection.execute(newest).fetchone() == (position + 1, message_id)


@pytest.mark.parametrize("group", ["", "a b", "x" * 120, "x" * 121, "%|-_", "a.b", None])
def test_groups(group: str | None, connection: psycopg.Connection[Any]) -> None:
    """A group's name is one by the rules of Python, and refused in its words."""
    try:
        check_group(group or "")
    except InvalidMessage as error:
        with pytest.raises(psycopg.Error) as refused:
            connection.execute("SELECT outbox.receive(%s, %s, 't', 0, 1)", (group, uuid7()))
        assert (refused.value.sqlstate, refused.value.diag.message_primary) == ("OX001", str(error))
    else:
        connection.execute("SELECT outbox.receive(%s, %s, 't', 0, 1)", (group, uuid7()))


def test_repeatable_read_tells_of_a_rival(connection: psycopg.Connection[Any], dsn: str) -> None:
    """In a transaction with one snapshot a message that came in meanwhile is an error, never a second effect."""
    message_id = uuid7()
    connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    connection.execute("SELECT 1 FROM outbox.consumer_message")
    with psycopg.connect(dsn) as rival:
        assert is_new(rival, message_id)
    with pytest.raises(psycopg.errors.SerializationFailure):
        is_new(connection, message_id)
    with suppress(psycopg.Error):
        connection.rollback()


def test_python_and_sql_in_one_inbox(connection: psycopg.Connection[Any], bench: Bench) -> None:
    """A consumer in Python doesn't handle what the same group has received in SQL."""
    first, _ = bench.send("one", "two")
    bench.dispatch()
    assert is_new(connection, first)
    connection.commit()
    bench.consume(bench.declare())
    assert bench.ledger() == ["two"]


def test_read_again(connection: psycopg.Connection[Any], bench: Bench) -> None:
    """After a reset each message is to be handled once more, as one that is new since; the offset knows the passage."""
    first, second = bench.send("one", "two")
    queue, *positions = bench.rows("SELECT DISTINCT queue FROM outbox.message") + bench.rows(
        "SELECT position FROM outbox.message ORDER BY 1"
    )

    def receive(message_id: UUID, position: int) -> bool:
        receive = "SELECT outbox.receive('g', %s, 't', %s, %s)"
        return connection.execute(receive, (message_id, queue, position)).fetchone() == (True,)

    def move() -> bool:
        move = "SELECT outbox.move_offset('g', 't', %s, %s, %s)"
        return connection.execute(move, (queue, positions[1], second)).fetchone() == (True,)

    assert (receive(first, positions[0]), receive(second, positions[1]), move()) == (True, True, True)
    connection.commit()
    bench.sink.operator.reset_group("g", "t", "first", by="ada", why="a test")
    assert [receive(first, positions[0]) for _ in range(2)] == [True, False]
    assert [receive(second, positions[1]) for _ in range(2)] == [True, False]
    assert move()
    connection.commit()
    earlier = "SELECT message_id, passage, status FROM outbox.reread_message ORDER BY message_id"
    assert connection.execute(earlier).fetchall() == [(first, 0, "consumed"), (second, 0, "consumed")]
    passages = """
        SELECT DISTINCT passage FROM outbox.consumer_message
         UNION ALL SELECT max(passage) FROM outbox.consumer_offset"""
    assert connection.execute(passages).fetchall() == [(1,), (1,)]
