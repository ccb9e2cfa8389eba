"""Dispatch waits for nobody: open, idle, prepared transactions delay their own messages only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, text

from outbox import Outbox, Settings, embedded
from outbox.database import migration
from outbox.database.execute import Row, Statement, execute
from outbox.database.tables import SEGMENTED
from outbox.dispatch import dispatch_pass
from outbox.dispatch import sql as dispatch_sql
from outbox.dispatch.dispatch_pass import dispatch_once
from tests.dispatch.support import (
    assert_dense,
    by_key,
    dispatch_all,
    messages,
    next_batch,
    rows_read,
    scalar,
    scans,
    send,
    table_scans,
    write_now,
)

TABLES = {"op_message", "half_message", "message", "scheduled_message", "dispatch_cursor"}


def test_the_very_first_batch_waits_for_no_writer(
    app: Outbox, engine: Engine, connection: Connection, settings: Settings
) -> None:
    """On a new database, the first pass goes past a transaction that has written an op and sits idle."""
    with engine.connect() as idle:
        idle.begin()
        write_now(app, idle, "idle", key="k0")
        with connection.begin():
            connection.execute(text("SET lock_timeout = '5s'"))
        send(app, "other", key="k1")
        assert dispatch_all(connection, settings).done == 1
        idle.commit()
    assert dispatch_all(connection, settings).done == 1
    assert by_key(messages(connection)) == {"k0": ["idle"], "k1": ["other"]}


@pytest.mark.parametrize("commits", [True, False])
def test_an_idle_writer_delays_only_its_own(
    commits: bool, app: Outbox, engine: Engine, connection: Connection, settings: Settings
) -> None:
    """A written op whose transaction stays open over many batches stalls no other; it comes out only if committed."""
    with engine.connect() as idle:
        idle.begin()
        write_now(app, idle, "idle", key="k0")
        for n in range(50):
            send(app, n, key="k1")
            assert dispatch_once(connection, settings, limit=10).done == 1
        idle.commit() if commits else idle.rollback()
    send(app, 50, key="k1")
    assert dispatch_once(connection, settings).done == 1 + commits
    assert by_key(messages(connection)) == {**({"k0": ["idle"]} if commits else {}), "k1": list(range(51))}


@pytest.fixture
def two_phase(spare_server: embedded.Server) -> Iterator[Engine]:
    """An engine on a migrated database of a server that takes prepared transactions."""
    spare_server.create_database("two_phase")
    migration.upgrade(spare_server.url("two_phase"))
    engine = create_engine(spare_server.url("two_phase"))
    yield engine
    engine.dispose()
    spare_server.drop_database("two_phase")


def test_a_prepared_transaction_delays_only_its_own(two_phase: Engine, settings: Settings) -> None:
    """A transaction between PREPARE and COMMIT PREPARED stalls nobody; one that is rolled back then is never seen."""
    app = Outbox(two_phase, settings=settings)
    with two_phase.connect() as connection, two_phase.connect() as kept, two_phase.connect() as dropped:
        outcomes = []
        for number, writer in enumerate((kept, dropped)):
            outcome = writer.begin_twophase()
            app.send(writer, "t", "two-phase", key=f"k{number}")
            outcome.prepare()
            outcomes.append(outcome)
        assert scalar(connection, "SELECT count(*) FROM pg_prepared_xacts") == 2
        for n in range(10):
            send(app, n, key="k9")
            assert dispatch_once(connection, settings).done == 1
        outcomes[0].commit()
        outcomes[1].rollback()
        assert dispatch_all(connection, settings).done == 1
        assert by_key(messages(connection)) == {"k0": ["two-phase"], "k9": list(range(10))}


def test_a_pinned_transaction_costs_nothing(
    app: Outbox, engine: Engine, connection: Connection, settings: Settings
) -> None:
    """A transaction open for the whole run doesn't make a pass read more rows, however long the run gets."""
    costs = []
    with engine.connect() as pinned:
        pinned.begin()
        pinned.execute(text("SELECT pg_current_xact_id()"))
        for _ in range(3):
            for n in range(40):
                send(app, *range(5), key=f"k{n % 20}")
                dispatch_all(connection, settings)
            send(app, *range(5), key="k0")
            nodes = scans(connection, next_batch(connection, settings, 100))
            with connection.begin():
                blocks = blocks_of_idle_pass(connection, settings)
            costs.append([rows_read(nodes, table) for table in sorted(TABLES)] + [blocks])
            dispatch_all(connection, settings)
        pinned.rollback()
    assert costs[0] == costs[1] == costs[2], costs
    assert costs[0][sorted(TABLES).index("op_message")] <= 10


def blocks_of_idle_pass(connection: Connection, settings: Settings) -> int:
    """Return the number of blocks that an idle pass looks at."""
    sql = dispatch_sql.newest_cursor(settings.schema).sql
    plan = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {sql}").scalar_one()
    top = plan[0]["Plan"]
    return 10 * round(int(top["Shared Hit Blocks"] + top["Shared Read Blocks"]) / 40)


@pytest.mark.parametrize("cut", [False, True])
def test_a_bulk_load_is_read_by_index(
    app: Outbox, engine: Engine, connection: Connection, settings: Settings, cut: bool
) -> None:
    """Right after a bulk load, with statistics of empty tables, a pass reads by index, and a cut only its own part."""
    with connection.begin():
        for table in sorted(TABLES - {"dispatch_cursor"}):
            leaf = f"{table}_default" if table in SEGMENTED["producer"] else table
            connection.execute(text(f"ALTER TABLE outbox.{leaf} SET (autovacuum_enabled = false)"))
            connection.execute(text(f"ANALYZE outbox.{table}"))
    for n in range(100):
        send(app, *range(100), key=f"k{n % 10}")
    if cut:
        assert dispatch_once(connection, settings, limit=1000).more
    nodes = scans(connection, next_batch(connection, settings, 1000))
    bad = [node for node in nodes if node["Node Type"] == "Seq Scan" and node["Relation Name"] in TABLES]
    assert not bad, bad
    assert rows_read(nodes, "half_message") <= 1000
    # The end of a queue is looked up once, not once for each message.
    assert rows_read(nodes, "message") <= settings.queues
    # An uncut snapshot is read once, and its end looked up; what is left is read in the order of its dispatch.
    assert rows_read(nodes, "op_message") <= 1 + (1000 if cut else 10_000)
    dispatch_all(connection, settings, 1000)
    assert len(messages(connection)) == 10_000
    assert_dense(messages(connection))


def test_an_idle_pass_writes_nothing(app: Outbox, connection: Connection, settings: Settings) -> None:
    """A pass with nothing to do takes no transaction id and appends no cursor."""
    send(app, 1)
    dispatch_all(connection, settings)
    before = scalar(connection, "SELECT max(id) FROM outbox.dispatch_cursor")
    for _ in range(5):
        assert not dispatch_once(connection, settings)
    assert scalar(connection, "SELECT max(id) FROM outbox.dispatch_cursor") == before


def test_an_idle_pass_after_a_bulk_load(
    app: Outbox, connection: Connection, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With statistics of empty tables, a pass with nothing to do looks no row up in vain."""
    with connection.begin():
        connection.execute(text("ALTER TABLE outbox.op_message_default SET (autovacuum_enabled = false)"))
        connection.execute(text("ANALYZE outbox.op_message"))
    send(app, *range(5000))
    dispatch_all(connection, settings)
    nodes: list[dict[str, Any]] = []

    def explained(connection: Connection, *statements: Statement, **how: Any) -> list[list[Row]]:
        for number, statement in enumerate(statements):
            if "dispatch_cursor" in statement.sql:
                execute(connection, *statements[:number])
                nodes.extend(table_scans(connection, statement))
        return execute(connection, *statements, **how)

    monkeypatch.setattr(dispatch_pass, "execute", explained)
    assert not dispatch_once(connection, settings)
    assert nodes
    assert rows_read(nodes, "op_message") <= 1
