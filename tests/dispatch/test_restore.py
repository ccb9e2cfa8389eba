"""A restore into another cluster: its transaction ids mean something else, nothing is lost or doubled."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, create_engine, text

from outbox import Outbox, Settings, embedded
from outbox.dispatch.dispatch_pass import dispatch_once, release_due_once
from outbox.errors import SequenceBehind
from outbox.message.model import Counts
from tests.dispatch.support import (
    WAITING,
    act,
    assert_dense,
    by_key,
    dispatch_all,
    flush,
    messages,
    next_batch,
    rows_read,
    run,
    scalar,
    scans,
    send,
    write_now,
)
from tests.kit import wait_until


def pg_dump() -> Path:
    """Return the program, of the binaries that run the servers."""
    program = embedded.find_binaries().folder / "pg_dump"
    if not program.exists():
        pytest.skip("these PostgreSQL binaries have no pg_dump")
    return program


@pytest.fixture
def move(spare_server: embedded.Server, engine: Engine) -> Iterator[Callable[[], Engine]]:
    """A function that dumps the test's database and restores it into another cluster, by pg_dump and psql."""
    made: list[Engine] = []

    def restore() -> Engine:
        source = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
        dump = subprocess.run([pg_dump(), "--dbname", source], capture_output=True, check=True)
        spare_server.create_database("restored")
        target = spare_server.url("restored", driver="postgresql")
        psql: list[str | Path] = [pg_dump().with_name("psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", "--dbname", target]
        subprocess.run(psql, input=dump.stdout, check=True, capture_output=True, env={**os.environ, "PGOPTIONS": ""})
        made.append(create_engine(spare_server.url("restored")))
        return made[-1]

    yield restore
    for restored in made:
        restored.dispose()
        spare_server.drop_database("restored")


def burn_xids(engine: Engine, count: int) -> None:
    """Make the cluster's next transaction id go up."""
    with engine.connect() as connection, connection.begin():
        subtransaction = "BEGIN UPDATE counter SET value = value; EXCEPTION WHEN division_by_zero THEN END;"
        connection.execute(text(f"DO $$ BEGIN FOR n IN 1..{count} LOOP {subtransaction} END LOOP; END $$"))


def next_xid(connection: Connection) -> int:
    """Return the cluster's next transaction id."""
    return int(scalar(connection, "SELECT pg_snapshot_xmax(pg_current_snapshot())::text"))


@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_restore_into_a_cluster_with_lower_xids(
    app: Outbox, engine: Engine, settings: Settings, move: Callable[[], Engine], limit: int
) -> None:
    """Dispatched, undispatched, cut, scheduled, recalled: each is after the restore what it was before, once."""
    with engine.connect() as connection:
        burn_xids(engine, 2000)
        send(app, *range(10), key="k0")
        dispatch_all(connection, settings)
        (gone, _) = send(app, "recalled", "scheduled", key="k1", delay=3600)
        (released,) = send(app, "released", key="k2", delay=3600)
        dispatch_all(connection, settings)
        with connection.begin():
            act(connection, settings, "recall", gone)
        run(connection, "UPDATE outbox.scheduled_message SET deliver_at = now() WHERE half_id = :id", id=released)
        release_due_once(connection, settings)
        send(app, *range(10, 20), key="k0")
        dispatch_once(connection, settings, limit=4)
        send(app, *range(20, 23), key="k0")
        before = messages(connection)
        old_xid = next_xid(connection)

    restored = move()
    moved = Outbox(restored, settings=settings)
    with restored.connect() as connection, restored.connect() as early:
        early.begin()
        early.execute(text("SELECT pg_current_xact_id()"))
        assert next_xid(connection) < old_xid, "the test wants a cluster with lower xids"
        moved.send(early, "t", "begun before the re-base", key="k3")
        assert dispatch_once(connection, settings, limit=limit).more
        send(moved, 23, key="k0")
        flush(early)
        early.commit()
        dispatch_all(connection, settings, limit)
        send(moved, 24, key="k0")
        dispatch_all(connection, settings, limit)
        found = messages(connection)
        assert_dense(found)
        assert by_key(found) == {"k0": list(range(25)), "k2": ["released"], "k3": ["begun before the re-base"]}
        assert set(before) <= set(found), "a position changed"
        assert scalar(connection, "SELECT count(*) FROM outbox.scheduled_message WHERE recalled_at IS NULL") == 1
        run(connection, "UPDATE outbox.scheduled_message SET deliver_at = now()")
        assert release_due_once(connection, settings).done == 1
        assert by_key(messages(connection))["k1"] == ["scheduled"]


def pretend_restored(connection: Connection) -> None:
    """Have the cursor say that it was written in another cluster, with much higher xids."""
    run(connection, "UPDATE outbox.op_message SET xid = (xid::text::bigint + 1000000)::text::xid8")
    run(connection, "UPDATE outbox.dispatch_cursor SET system_identifier = system_identifier - 1")


def test_a_writer_that_is_open_at_the_re_base_stalls_no_other(
    app: Outbox, engine: Engine, connection: Connection, settings: Settings
) -> None:
    """The re-base waits for an open writer, but in short turns, between which others can send."""
    send(app, 1, key="k0")
    dispatch_all(connection, settings)
    pretend_restored(connection)
    done = threading.Event()

    def dispatch() -> None:
        with engine.connect() as other:
            while not done.is_set():
                dispatch_once(other, settings)

    with engine.connect() as idle:
        idle.begin()
        write_now(app, idle, "idle", key="k1")
        thread = threading.Thread(target=dispatch)
        thread.start()
        try:
            wait_until(lambda: scalar(connection, WAITING) == 1, "the re-base waits for the open writer")
            for n in range(2, 5):
                send(app, n, key="k0")
            idle.commit()
            wait_until(lambda: len(messages(connection)) == 5, "all is dispatched after the writer's end")
        finally:
            done.set()
            idle.close()
            thread.join()
    assert by_key(messages(connection)) == {"k0": [1, 2, 3, 4], "k1": ["idle"]}


def test_after_a_restore_a_pass_does_not_read_the_old_ops(
    app: Outbox, connection: Connection, settings: Settings
) -> None:
    """Ops from before a restore, whose xids are ahead of this cluster's, cost later passes nothing."""
    send(app, *range(2000), key="k0")
    dispatch_all(connection, settings)
    pretend_restored(connection)
    dispatch_all(connection, settings, 300)
    send(app, 2000, key="k0")
    nodes = scans(connection, next_batch(connection, settings, 100))
    assert rows_read(nodes, "op_message") <= 10
    dispatch_all(connection, settings)
    assert by_key(messages(connection))["k0"] == list(range(2001))


def test_a_second_restore_in_the_middle_of_the_first_re_base(
    app: Outbox, connection: Connection, settings: Settings
) -> None:
    """A re-base that is cut short by yet another restore starts over."""
    send(app, *range(20), key="k0")
    dispatch_once(connection, settings, limit=5)
    pretend_restored(connection)
    for _ in range(3):
        dispatch_once(connection, settings, limit=2)
    pretend_restored(connection)
    send(app, *range(20, 25), key="k0")
    dispatch_all(connection, settings, 2)
    found = messages(connection)
    assert_dense(found)
    assert by_key(found)["k0"] == list(range(25))


def test_a_switch_over_without_its_sequences_stops_dispatch_until_they_are_set(
    app: Outbox, connection: Connection, settings: Settings
) -> None:
    """Logical replication carries rows alone. What came now would count as of before: dispatch says what mends it."""
    send(app, *range(5), key="k0")
    dispatch_all(connection, settings)
    pretend_restored(connection)
    run(connection, "ALTER SEQUENCE outbox.op_sequence RESTART")
    run(connection, "ALTER TABLE outbox.dispatch_cursor ALTER id RESTART")
    send(app, 5, key="k0")
    with pytest.raises(SequenceBehind, match=r"outbox.op_sequence is at 1, .* is 5: .* run: ") as refused:
        dispatch_once(connection, settings)
    _, _, mend = str(refused.value).partition("run: ")
    run(connection, mend)
    send(app, *range(6, 9), key="k0")
    dispatch_all(connection, settings, 2)
    assert by_key(messages(connection))["k0"][:5] == list(range(5))
    assert sorted(by_key(messages(connection))["k0"]) == list(range(9))


def test_the_newest_cursor_is_the_newest_whatever_its_sequence_says(
    app: Outbox, connection: Connection, settings: Settings
) -> None:
    """A re-base ends, and each batch after it moves on, though its sequence would draw lower ids than those there."""
    send(app, *range(5), key="k0")
    dispatch_all(connection, settings)
    run(connection, "ALTER TABLE outbox.dispatch_cursor ALTER id RESTART")
    pretend_restored(connection)
    for n in range(5, 9):
        send(app, n, key="k0")
        dispatch_all(connection, settings, 1)
    assert by_key(messages(connection))["k0"] == list(range(9))
    assert dispatch_once(connection, settings) == Counts()
