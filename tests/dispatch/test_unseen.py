"""Committed ops whose halves dispatch can't see: it stops at what may be hidden, and tells of what is gone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Connection, Engine, create_engine, make_url

from outbox import Outbox, Settings
from outbox.dispatch.dispatch_pass import dispatch_once, dispatch_passed, newest_sends, release_due_once, resend
from outbox.errors import HalfNotFound, HalvesHidden
from outbox.operator.health.examine import examine
from outbox.testing import make_due
from tests.dispatch.support import dispatch_all, messages, run, scalar, send


@pytest.fixture
def half_blind(engine: Engine, connection: Connection) -> Iterator[Connection]:
    """A connection of a role from which row security hides the halves with the tag ``secret``."""
    for statement in (
        "CREATE ROLE half_blind LOGIN PASSWORD 'secret'",
        "GRANT USAGE ON SCHEMA outbox TO half_blind",
        "GRANT ALL ON ALL TABLES IN SCHEMA outbox TO half_blind",
        "ALTER TABLE outbox.half_message ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY open ON outbox.half_message USING (tag IS DISTINCT FROM 'secret')",
    ):
        run(connection, statement)
    role = create_engine(make_url(engine.url).set(username="half_blind", password="secret"))  # noqa: S106 - as made above
    with role.connect() as connected:
        yield connected
    role.dispose()
    for statement in (
        "DROP POLICY open ON outbox.half_message",
        "ALTER TABLE outbox.half_message DISABLE ROW LEVEL SECURITY",
        "DROP OWNED BY half_blind",
        "DROP ROLE half_blind",
    ):
        run(connection, statement)


_COLUMNS = "id, producer_group, topic, key, tag, headers, content_type, body, deliver_at, born_at"


def delete(connection: Connection, half_id: UUID) -> None:
    """Delete a half, as somebody does by hand who has a backup."""
    run(connection, "CREATE TABLE backup AS SELECT * FROM outbox.half_message WHERE id = :id", id=half_id)
    run(connection, "DELETE FROM outbox.half_message WHERE id = :id", id=half_id)


def put_back(connection: Connection) -> None:
    """Put the deleted half back."""
    run(connection, f"INSERT INTO outbox.half_message ({_COLUMNS}) SELECT {_COLUMNS} FROM backup")


@pytest.mark.parametrize("later", [False, True])
def test_hidden_halves_stop_dispatch(
    engine: Engine, connection: Connection, half_blind: Connection, settings: Settings, later: bool
) -> None:
    """A role that doesn't see all halves dispatches none past the first that is hidden: none is lost, in order."""
    app = Outbox(engine, settings=settings)
    app.declare_topic("t", 1)
    options: dict[str, Any] = {"delay": 3600} if later else {}
    for n in range(3):
        send(app, n, tag="secret" if n == 1 else None, **options)
    if later:
        dispatch_all(connection, settings)
        make_due(app)
    one_pass = release_due_once if later else dispatch_once
    for _ in range(2):
        with pytest.raises(HalvesHidden, match="row security hides 1 committed"):
            one_pass(half_blind, settings)
        assert messages(connection) == []
    assert one_pass(connection, settings).done == 3
    assert [message.body for message in messages(connection)] == [0, 1, 2]


def test_hidden_halves_in_a_backlog(
    engine: Engine, connection: Connection, half_blind: Connection, settings: Settings
) -> None:
    """The same inside a backlog that is cut: what comes before is dispatched, and nothing after."""
    app = Outbox(engine, settings=settings)
    app.declare_topic("t", 1)
    for n in range(6):
        send(app, n, tag="secret" if n == 3 else None)
    dispatch_once(half_blind, settings, limit=2)
    with pytest.raises(HalvesHidden):
        dispatch_once(half_blind, settings, limit=2)
    dispatch_all(connection, settings, limit=2)
    assert [message.body for message in messages(connection)] == list(range(6))


@pytest.mark.parametrize("later", [False, True])
def test_a_half_that_is_gone(
    engine: Engine, connection: Connection, settings: Settings, later: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A half that somebody deleted stops no other; log, audit and doctor tell of it, and put back it is dispatched."""
    app = Outbox(engine, settings=settings)
    app.declare_topic("t", 1)
    options: dict[str, Any] = {"delay": 3600} if later else {}
    ids = send(app, 0, 1, 2, **options)
    if later:
        dispatch_all(connection, settings)
        make_due(app)
    delete(connection, ids[1])
    with caplog.at_level(logging.ERROR, "outbox.dispatch"):
        (release_due_once if later else dispatch_once)(connection, settings)
    assert [message.body for message in messages(connection)] == [0, 2]
    assert [getattr(record, "half_id", None) for record in caplog.records] == [str(ids[1])]
    assert scalar(connection, "SELECT action FROM outbox.audit WHERE target = :id", id=str(ids[1])) == "half missing"
    assert dispatch_once(connection, settings).taken == 0
    (finding,) = (each for each in examine(engine, settings).findings if each.code == "half.missing")
    assert finding.details["half_id"] == ids[1]
    put_back(connection)
    if later:
        run(connection, "UPDATE outbox.half_message SET deliver_at = NULL")
    with connection.begin():
        assert dispatch_passed(connection, settings, [ids[1]], actor="me", reason="test")[0] == [ids[1]]
    assert [message.body for message in messages(connection)] == [0, 2, 1]
    assert not [each for each in examine(engine, settings).findings if each.code == "half.missing"]


def test_a_resend_of_a_half_that_is_gone(engine: Engine, connection: Connection, settings: Settings) -> None:
    """A resend of a message whose half somebody deleted is refused, and the audit doesn't say that it was done."""
    app = Outbox(engine, settings=settings)
    (id_,) = send(app, 1)
    dispatch_all(connection, settings)
    delete(connection, id_)
    with pytest.raises(HalfNotFound), connection.begin():
        resend(connection, settings, newest_sends(connection, settings, [id_]), actor="me", reason="test")
    assert scalar(connection, "SELECT count(*) FROM outbox.audit") == 0
