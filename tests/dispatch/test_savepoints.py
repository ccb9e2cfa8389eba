"""What a transaction sends is written or forgotten with its savepoints."""

from __future__ import annotations

import warnings

import pytest
from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

from outbox import Outbox, Settings
from tests.dispatch.support import dispatch_all, messages


@pytest.fixture
def sender(engine: Engine) -> Connection:
    """A connection in a transaction."""
    connection = engine.connect()
    connection.begin()
    return connection


def bodies(connection: Connection, settings: Settings) -> list[object]:
    """Dispatch, and return the bodies that came out."""
    dispatch_all(connection, settings)
    return [message.body for message in messages(connection)]


def test_a_savepoint_takes_only_its_own(app: Outbox, sender: Connection, settings: Settings) -> None:
    """A savepoint that rolls back forgets what was sent inside of it, not what came before."""
    with sender:
        app.send(sender, "t", 1, key="k")
        gone = sender.begin_nested()
        app.send(sender, "t", "gone", key="k")
        gone.rollback()
        app.send(sender, "t", 2, key="k")
        with sender.begin_nested():
            app.send(sender, "t", 3, key="k")
        sender.commit()
        assert bodies(sender, settings) == [1, 2, 3]


def test_a_savepoint_before_the_first_send(app: Outbox, sender: Connection, settings: Settings) -> None:
    """A savepoint that began before anything was sent forgets all that was sent inside of it, nested or not."""
    with sender:
        outer = sender.begin_nested()
        app.send(sender, "t", "gone", key="k")
        with sender.begin_nested():
            app.send(sender, "t", "gone too", key="k")
        outer.rollback()
        app.send(sender, "t", 1, key="k")
        sender.commit()
        assert bodies(sender, settings) == [1]


def test_nested_savepoints(app: Outbox, sender: Connection, settings: Settings) -> None:
    """Of nested savepoints, what a released one sent goes with the one around it."""
    with sender:
        app.send(sender, "t", 1, key="k")
        outer = sender.begin_nested()
        app.send(sender, "t", 2, key="k")
        inner = sender.begin_nested()
        app.send(sender, "t", "gone", key="k")
        inner.rollback()
        with sender.begin_nested():
            app.send(sender, "t", 3, key="k")
        outer.commit()
        other = sender.begin_nested()
        with sender.begin_nested():
            app.send(sender, "t", "gone", key="k")
        other.rollback()
        sender.commit()
        assert bodies(sender, settings) == [1, 2, 3]


def test_an_outer_savepoint_ends_with_an_inner_one_open(app: Outbox, sender: Connection, settings: Settings) -> None:
    """Rolling an outer savepoint back while an inner one is open forgets what both sent."""
    with sender:
        app.send(sender, "t", 1, key="k")
        outer = sender.begin_nested()
        app.send(sender, "t", "gone", key="k")
        sender.begin_nested()
        app.send(sender, "t", "gone too", key="k")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SQLAlchemy would rather have the inner one ended first
            outer.rollback()
        sender.commit()
        assert bodies(sender, settings) == [1]


def test_savepoints_of_a_session(app: Outbox, engine: Engine, connection: Connection, settings: Settings) -> None:
    """A session's savepoints do the same."""
    with Session(engine) as session:
        app.send(session, "t", 1, key="k")
        gone = session.begin_nested()
        app.send(session, "t", "gone", key="k")
        gone.rollback()
        with session.begin_nested():
            app.send(session, "t", 2, key="k")
        session.commit()
    assert bodies(connection, settings) == [1, 2]
