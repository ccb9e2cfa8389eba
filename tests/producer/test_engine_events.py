"""Listening to an engine: what an Outbox's hooks cost those who send nothing, and who else listens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, insert, text
from sqlalchemy.orm import Session

from outbox import Outbox, Settings
from tests.producer.bank import change, halves


@pytest.fixture
def own(engine: Engine) -> Iterator[Engine]:
    """An engine that nobody has listened to yet."""
    own = create_engine(engine.url)
    yield own
    own.dispose()


def test_statements_are_told_only_where_something_was_sent(own: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLAlchemy tells of each statement of an engine with listeners: that would be a quarter of what a send costs."""
    told = []
    original = Connection._invoke_before_exec_event

    def spy(connection: Connection, *arguments: Any) -> Any:
        told.append(connection)
        return original(connection, *arguments)

    monkeypatch.setattr(Connection, "_invoke_before_exec_event", spy)
    outbox = Outbox(own, settings=Settings())
    with Session(own) as session:
        session.execute(insert(change).values(number=1))
        outbox.send(session, "t", {"number": 1})
        session.commit()
        session.execute(insert(change).values(number=2))
        session.commit()
    assert told == []
    assert [half.body["number"] for half in halves(own)] == [1]


@pytest.mark.parametrize("first", [True, False])
def test_listeners_of_the_application_hear_all(first: bool, own: Engine) -> None:
    """Whether they were there before the Outbox or came after it."""
    heard: list[str] = []

    def listen() -> None:
        event.listen(own, "before_cursor_execute", lambda _c, _u, statement, *_: heard.append(statement))
        event.listen(own, "commit", lambda _: heard.append("COMMIT"))

    if first:
        listen()
    outbox = Outbox(own, settings=Settings())
    if not first:
        listen()
    with Session(own) as session:
        outbox.send(session, "t", {"number": 1})
        session.execute(text("SELECT 1"))
        session.commit()
        session.execute(text("SELECT 2"))
        session.commit()
    assert heard == ["SELECT 1", "COMMIT", "SELECT 2", "COMMIT"]
    assert [half.body["number"] for half in halves(own)] == [1]


def test_an_engine_with_options_of_its_own(own: Engine) -> None:
    """One that is made of the Outbox's engine has listeners of its own; what it sends is written, and rolled back."""
    outbox = Outbox(own, settings=Settings())
    with Session(own.execution_options(isolation_level="REPEATABLE READ")) as session:
        outbox.send(session, "t", {"number": 1})
        session.commit()
        outbox.send(session, "t", {"number": 2})
        session.rollback()
        with session.begin_nested() as savepoint:
            outbox.send(session, "t", {"number": 3})
            savepoint.rollback()
        outbox.send(session, "t", {"number": 4})
        session.commit()
    assert [half.body["number"] for half in halves(own)] == [1, 4]


def test_a_connection_that_sent_before(own: Engine) -> None:
    """Its next transactions have their own messages, and none of those that were undone."""
    outbox = Outbox(own, settings=Settings())
    with own.connect() as connection:
        for number, commit in enumerate([True, False, True]):
            transaction = connection.begin()
            outbox.send(connection, "t", {"number": number})
            with connection.begin_nested() as savepoint:
                outbox.send(connection, "t", {"number": 10 + number})
                savepoint.rollback()
            if commit:
                transaction.commit()
            else:
                transaction.rollback()
    assert [half.body["number"] for half in halves(own)] == [0, 2]
