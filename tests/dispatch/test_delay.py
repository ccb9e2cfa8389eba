"""Delayed messages: scheduled, released when due, recalled before. Resent ones: the same id, once more."""

from __future__ import annotations

import datetime as dt
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Connection, Engine

from outbox import Outbox, Settings
from outbox.dispatch.dispatch_pass import dispatch_once, release_due_once
from outbox.errors import ActRefused, NotFound
from outbox.settings import DELAY_LEVELS
from outbox.testing import make_due
from tests.dispatch.support import act, assert_dense, by_key, dispatch_all, messages, run, scalar, send, write_now

AHEAD = "SELECT extract(epoch FROM deliver_at - born_at)::float8 FROM outbox.half_message WHERE id = :id"


def take_back(app: Outbox, half_id: Any) -> None:
    """Recall a message."""
    app.operator.recall(half_id, by="me", why="test")


@pytest.mark.parametrize(
    ("option", "seconds"),
    [
        ({"delay": 90}, 90),
        ({"delay": dt.timedelta(days=400)}, 400 * 86400),
        *(({"delay_level": level}, seconds) for level, seconds in enumerate(DELAY_LEVELS, 1)),
    ],
)
def test_a_delay_counts_from_the_writing(
    app: Outbox, connection: Connection, option: dict[str, Any], seconds: float
) -> None:
    """A delay or level becomes a time of delivery by the database's clock, when the half is written."""
    (half_id,) = send(app, 1, **option)
    assert scalar(connection, AHEAD, id=half_id) == pytest.approx(seconds, abs=1.0)


@pytest.mark.parametrize(("level", "seconds"), [(1, 60), (2, 7200), (3, 7200), (2**70, 7200)])
@pytest.mark.parametrize("call", ["send", "prepare"])
def test_levels_of_ones_own(engine: Engine, connection: Connection, call: str, level: int, seconds: float) -> None:
    """The setting says how long each level is; a level above the last is the last."""
    own = Outbox(engine, settings=Settings(delay_levels=(60, 7200)))
    with connection.begin():
        half_id = getattr(own, call)(connection, "t", 1, delay_level=level)
    assert scalar(connection, AHEAD, id=half_id) == pytest.approx(seconds, abs=1.0)


def test_a_message_ahead_of_its_time_is_scheduled(app: Outbox, connection: Connection, settings: Settings) -> None:
    """Before its time a message is in no queue; when due, a release puts it there, in the order of delivery times."""
    later = dt.datetime.now(dt.UTC) + dt.timedelta(hours=2)
    send(app, "second", key="k0", deliver_at=later)
    send(app, "first", key="k0", deliver_at=later - dt.timedelta(hours=1))
    send(app, "now", key="k0")
    counts = dispatch_all(connection, settings)
    assert (counts.taken, counts.done) == (3, 3)
    assert not release_due_once(connection, settings)
    assert by_key(messages(connection)) == {"k0": ["now"]}
    run(connection, "UPDATE outbox.scheduled_message SET deliver_at = deliver_at - interval '1 day'")
    counts = release_due_once(connection, settings, limit=1)
    assert (counts.taken, counts.done, counts.more) == (1, 1, True)
    while release_due_once(connection, settings, limit=1).more:
        pass
    assert by_key(messages(connection)) == {"k0": ["now", "first", "second"]}
    assert_dense(messages(connection))
    assert scalar(connection, "SELECT count(*) FROM outbox.scheduled_message") == 0


def test_a_time_in_the_past_is_now(app: Outbox, connection: Connection, settings: Settings) -> None:
    """A message whose time has come before its dispatch goes straight to its queue, with the others in order."""
    with connection.begin():
        app.send(connection, "t", 1, key="k0")
        app.send(connection, "t", 2, key="k0", deliver_at=dt.datetime(2000, 1, 1, tzinfo=dt.UTC))
        app.send(connection, "t", 3, key="k0", delay=0)
        app.send(connection, "t", 4, key="k0")
    dispatch_all(connection, settings)
    assert by_key(messages(connection)) == {"k0": [1, 2, 3, 4]}
    assert scalar(connection, "SELECT count(*) FROM outbox.scheduled_message") == 0


@pytest.mark.parametrize("dispatched", [False, True])
def test_recall_before_due(app: Outbox, connection: Connection, settings: Settings, dispatched: bool) -> None:
    """A recalled message never comes out, whether its op had been dispatched or not; the evidence and an audit stay."""
    (half_id,) = send(app, 1, delay=3600)
    if dispatched:
        dispatch_all(connection, settings)
    take_back(app, half_id)
    dispatch_all(connection, settings)
    # Also of what was recalled, which make_due() leaves as it is.
    run(connection, "UPDATE outbox.scheduled_message SET deliver_at = now() - interval '1 s'")
    assert not release_due_once(connection, settings)
    assert messages(connection) == []
    assert (
        scalar(connection, "SELECT recalled_by FROM outbox.scheduled_message WHERE half_id = :id", id=half_id) == "me"
    )
    assert scalar(connection, "SELECT target FROM outbox.audit WHERE action = 'recall'") == str(half_id)


def test_a_recall_that_rolls_back(app: Outbox, engine: Engine, connection: Connection, settings: Settings) -> None:
    """A recall is part of the caller's transaction, and undone with it."""
    (half_id,) = send(app, 1, delay=3600)
    dispatch_all(connection, settings)
    with engine.connect() as caller, caller.begin() as transaction:
        act(caller, settings, "recall", half_id)
        transaction.rollback()
    make_due(app)
    assert release_due_once(connection, settings).done == 1
    assert scalar(connection, "SELECT count(*) FROM outbox.audit") == 0


def test_recall_when_due_but_not_out(app: Outbox, connection: Connection, settings: Settings) -> None:
    """A message that is due can be recalled until a release has put it into its queue, and not after."""
    kept, late = send(app, 1, 2, delay=3600)
    dispatch_all(connection, settings)
    make_due(app, ids=[late])
    release_due_once(connection, settings)
    with pytest.raises(ActRefused, match="is out already"):
        take_back(app, late)
    make_due(app)
    take_back(app, kept)
    assert not release_due_once(connection, settings)
    assert [message.body for message in messages(connection)] == [2]


def test_recalls_that_are_refused(app: Outbox, connection: Connection, settings: Settings) -> None:
    """What can't be recalled is refused by name: twice, at once, undecided, rolled back, unknown, not committed yet."""
    (once,) = send(app, 1, delay=3600)
    take_back(app, once)
    with pytest.raises(ActRefused, match="it was recalled"):
        take_back(app, once)
    (plain,) = send(app, 1)
    with pytest.raises(ActRefused, match="it has no delivery time"):
        take_back(app, plain)
    with connection.begin():
        undecided = app.prepare(connection, "t", 1, delay=3600)
    with pytest.raises(ActRefused, match="not decided yet"):
        take_back(app, undecided)
    app.rollback(undecided)
    with pytest.raises(ActRefused, match="rolled back"):
        take_back(app, undecided)
    with pytest.raises(NotFound):
        take_back(app, uuid4())
    assert scalar(connection, "SELECT count(*) FROM outbox.audit") == 1
    assert dispatch_all(connection, settings).done == 1


def test_a_recall_of_what_is_not_committed(
    app: Outbox, engine: Engine, connection: Connection, settings: Settings
) -> None:
    """A message whose transaction is still open isn't there yet, and isn't harmed by the attempt."""
    with engine.connect() as writer:
        writer.begin()
        half_id = write_now(app, writer, 1, delay=3600)
        with pytest.raises(NotFound):
            take_back(app, half_id)
        writer.commit()
    dispatch_all(connection, settings)
    assert scalar(connection, "SELECT count(*) FROM outbox.scheduled_message WHERE recalled_at IS NULL") == 1


def test_a_released_message_is_not_scheduled_again(app: Outbox, connection: Connection, settings: Settings) -> None:
    """A late dispatch of other ops in the same transaction as a released message leaves that one alone."""
    send(app, 1, 2, 3, key="k0", delay=3600)
    dispatch_all(connection, settings, 1)
    make_due(app)
    release_due_once(connection, settings)
    send(app, 4, key="k0")
    dispatch_all(connection, settings, 1)
    assert not release_due_once(connection, settings)
    assert by_key(messages(connection)) == {"k0": [1, 2, 3, 4]}


def test_resend_appends_under_the_same_id(app: Outbox, connection: Connection, settings: Settings) -> None:
    """A resent message has the next send number; what was never dispatched isn't resent, and each act is audited."""
    one, two = send(app, 1, 2, key="k0")
    dispatch_all(connection, settings)
    (undispatched,) = send(app, 3, key="k0")
    (scheduled,) = send(app, 4, key="k0", delay=3600)
    with connection.begin():
        assert act(connection, settings, "resend", two, one, undispatched, scheduled, uuid4()) == 2
    assert app.operator.resend(one, by="me", why="test") == f"message {one} is sent again (send 3)"
    with pytest.raises(ActRefused, match="waits for dispatch"):
        app.operator.resend([one, undispatched], by="me", why="one of two can't be: none is")
    found = messages(connection)
    assert_dense(found)
    assert [(message.id, message.send_number) for message in found] == [
        (one, 1),
        (two, 1),
        (one, 2),
        (two, 2),
        (one, 3),
    ]
    assert dispatch_once(connection, settings).done == 2
    audited = "SELECT count(*) FROM outbox.audit WHERE action = 'resend' AND target = :id"
    assert scalar(connection, audited, id=str(one)) == 2
    assert scalar(connection, audited, id=str(undispatched)) == 0


def test_resend_of_a_recalled_or_rolled_back_message(app: Outbox, connection: Connection, settings: Settings) -> None:
    """Neither a recalled nor a rolled back message can be resent."""
    (recalled,) = send(app, 1, delay=3600)
    take_back(app, recalled)
    with connection.begin():
        rolled_back = app.prepare(connection, "t", 1)
    app.rollback(rolled_back)
    dispatch_all(connection, settings)
    with connection.begin():
        assert act(connection, settings, "resend", recalled, rolled_back) == 0
    assert messages(connection) == []
