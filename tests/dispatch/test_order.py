"""Order: what a lock serialised comes out in that order, whatever the xids and whatever the batch size."""

from __future__ import annotations

import pytest
from sqlalchemy import Connection, Engine, text

from outbox import Outbox, Settings
from outbox.dispatch.dispatch_pass import dispatch_once
from tests.dispatch.support import assert_dense, by_key, dispatch_all, messages, send, write_now

LOCK = text("UPDATE counter SET value = value + 1 WHERE key = :key RETURNING value")
XID = text("SELECT pg_current_xact_id()::text::bigint")


def bump(app: Outbox, connection: Connection, key: str) -> int:
    """Count a key up under its row lock, and send the number."""
    value = int(connection.execute(LOCK, {"key": key}).scalar_one())
    app.send(connection, "t", value, key=key)
    return value


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 1000])
def test_a_lower_xid_that_commits_later_comes_out_later(
    app: Outbox, engine: Engine, connection: Connection, settings: Settings, limit: int
) -> None:
    """Transactions that get their xids in one order and a key's row lock in the other come out in the lock's order."""
    rivals = [engine.connect() for _ in range(6)]
    try:
        for rival in rivals:
            rival.begin()
        xids = [rival.execute(XID).scalar_one() for rival in rivals]
        assert xids == sorted(xids)
        for rival in reversed(rivals):
            bump(app, rival, "k0")
            bump(app, rival, "k1")
            rival.commit()
    finally:
        for rival in rivals:
            rival.close()
    total = dispatch_all(connection, settings, limit)
    found = messages(connection)
    assert_dense(found)
    assert by_key(found) == {"k0": [1, 2, 3, 4, 5, 6], "k1": [1, 2, 3, 4, 5, 6]}
    assert total.done == 12


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_a_lower_xid_that_commits_in_the_middle_of_a_cut(
    app: Outbox, engine: Engine, connection: Connection, settings: Settings, limit: int
) -> None:
    """A transaction that ends while an older backlog is being cut waits for the end of that backlog, and isn't lost."""
    with engine.connect() as late:
        late.begin()
        late.execute(XID)
        for _ in range(6):
            with engine.begin() as other:
                bump(app, other, "k0")
        assert dispatch_once(connection, settings, limit=limit).taken == limit
        bump(app, late, "k0")
        late.commit()
        for _ in range(6):
            with engine.begin() as other:
                bump(app, other, "k0")
        dispatch_all(connection, settings, limit)
    assert by_key(messages(connection))["k0"] == list(range(1, 14))


def test_an_op_drawn_early_and_committed_late_is_not_lost(
    app: Outbox, engine: Engine, connection: Connection, settings: Settings
) -> None:
    """An op whose sequence and xid are both below everything dispatched meanwhile still comes out, once."""
    with engine.connect() as early:
        early.begin()
        write_now(app, early, "early", key="k9")
        for n in range(30):
            send(app, n, key="k1")
            dispatch_once(connection, settings, limit=1 + n % 3)
        early.commit()
    dispatch_all(connection, settings, 2)
    found = messages(connection)
    assert_dense(found)
    assert by_key(found) == {"k1": list(range(30)), "k9": ["early"]}


def test_a_transaction_writes_before_and_after_a_batch(
    app: Outbox, engine: Engine, connection: Connection, settings: Settings
) -> None:
    """Ops that one open transaction wrote before and after a dispatched batch come out together, in their order."""
    with engine.connect() as writer:
        writer.begin()
        write_now(app, writer, 1, key="k0")
        send(app, "other", key="k1")
        assert dispatch_once(connection, settings).done == 1
        write_now(app, writer, 2, key="k0")
        assert dispatch_once(connection, settings).done == 0
        writer.commit()
    assert dispatch_once(connection, settings).done == 2
    assert by_key(messages(connection)) == {"k0": [1, 2], "k1": ["other"]}


def test_savepoints_have_no_xid_of_their_own(
    app: Outbox, engine: Engine, connection: Connection, settings: Settings
) -> None:
    """What was written inside a savepoint is found by its transaction, and vanishes if the savepoint rolled back."""
    with engine.connect() as writer:
        writer.begin()
        with writer.begin_nested():
            write_now(app, writer, "kept", key="k0")
        gone = writer.begin_nested()
        write_now(app, writer, "gone", key="k0")
        gone.rollback()
        send(app, "other", key="k1")
        assert dispatch_once(connection, settings).done == 1
        writer.commit()
    assert dispatch_all(connection, settings).done == 1
    assert by_key(messages(connection)) == {"k0": ["kept"], "k1": ["other"]}


def test_messages_of_one_transaction_keep_their_order(app: Outbox, connection: Connection, settings: Settings) -> None:
    """A transaction that sends many messages under one key has them in the order of its calls, however it is cut."""
    send(app, *range(100), key="k0")
    dispatch_all(connection, settings, 7)
    assert by_key(messages(connection))["k0"] == list(range(100))
