"""Cursors, offsets and checks are rewritten as a whole: what counts is the same then, and nothing else is left."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Connection, Engine, text

from outbox import Outbox
from outbox.database.execute import Statement, execute
from outbox.dispatch.dispatch_pass import dispatch_once
from outbox.prune import rewrite as module
from outbox.prune.prune_pass import prune_consumer_once, prune_producer_once
from outbox.prune.rewrite import CHECKS, CURSORS, OFFSETS, Rewritten, rewrite
from tests.dispatch.support import assert_dense, dispatch_all, messages
from tests.kit import Tables, wait_until
from tests.prune.yard import YOUNG

NEWEST = """
SELECT to_jsonb(o)::text FROM (
    SELECT DISTINCT ON (consumer_group, topic, queue) * FROM outbox.consumer_offset
     ORDER BY consumer_group, topic, queue, position DESC, starts DESC) o
"""
WRITE_OFFSETS = """
INSERT INTO outbox.consumer_offset (consumer_group, topic, queue, position, starts, message_id)
SELECT 'g' || g % 3, 't' || g % 2, g % 5, n, c, CASE WHEN n % 2 = 0 THEN gen_random_uuid() END
  FROM generate_series(0, 29) g, generate_series(0, 9) n, generate_series(0, 1) c
"""
OF_ONE = "consumer_group = 'g1' AND topic = 't1'"
ALL = "SELECT to_jsonb(t)::text FROM outbox.{} t ORDER BY 1"


class Rewriting(Tables):
    """A producer and an inbox, of which tables are rewritten."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.app = Outbox(engine, settings=YOUNG)
        self.connection = engine.connect()

    def send(self, body: object = 0) -> UUID:
        """Send a message and dispatch."""
        with self.observer.begin() as connection:
            half_id = self.app.send(connection, "t", body, key="k")
        dispatch_all(self.connection, YOUNG)
        return half_id

    def rewrite(self, rewritten: Rewritten) -> int | None:
        """Rewrite a table."""
        return rewrite(self.connection, "outbox", rewritten)

    def all(self, table: str) -> list[str]:
        """Return all columns of all rows."""
        return self.rows(ALL.format(table))


@pytest.fixture
def tables(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rewriting]:
    """The tables, on a machine that may be slow."""
    monkeypatch.setattr(module, "WAIT", 30.0)
    tables = Rewriting(engine)
    yield tables
    tables.connection.close()


def test_the_newest_cursor_stays(tables: Rewriting) -> None:
    """It is the same in all its columns, also that of a batch that was cut; the next one has a higher number."""
    for _ in range(3):
        tables.send()
    tables.run(
        "INSERT INTO outbox.dispatch_cursor (id, next_xid, in_flight, target, after_sequence, until_sequence, log,"
        " epoch, system_identifier) OVERRIDING SYSTEM VALUE SELECT id + 1, next_xid, ARRAY['7', '9']::xid8[],"
        " '10:20:10,14', 3, 4, log, 7, system_identifier FROM outbox.dispatch_cursor ORDER BY id DESC LIMIT 1"
    )
    (newest,) = tables.rows("SELECT to_jsonb(t)::text FROM outbox.dispatch_cursor t ORDER BY id DESC LIMIT 1")
    cursors = len(tables.all("dispatch_cursor"))
    assert tables.rewrite(CURSORS) == cursors - 1
    assert tables.all("dispatch_cursor") == [newest]
    assert tables.rewrite(CURSORS) == 0
    last = tables.value("SELECT id FROM outbox.dispatch_cursor")
    tables.run("UPDATE outbox.dispatch_cursor SET target = NULL, after_sequence = NULL, until_sequence = NULL")
    tables.send()
    assert tables.value("SELECT max(id) FROM outbox.dispatch_cursor") > last


def test_the_newest_offset_of_each_queue_stays(tables: Rewriting) -> None:
    """Of all groups and topics, in all columns, whether a group has read a message there or not."""
    tables.run(WRITE_OFFSETS)
    newest = tables.rows(NEWEST)
    assert len(newest) == 30
    assert tables.rewrite(OFFSETS) == 600 - 30
    assert tables.all("consumer_offset") == sorted(newest)
    assert tables.rewrite(OFFSETS) == 0


def test_checks_stay_and_dead_ones_go(tables: Rewriting) -> None:
    """While an old snapshot is held, the checks of decided halves leave nothing in the way of a pass."""
    with tables.observer.connect().execution_options(isolation_level="REPEATABLE READ") as pinned:
        pinned.exec_driver_sql("SELECT pg_current_snapshot()")
        with tables.observer.begin() as connection:
            halves = [tables.app.prepare(connection, "t", "x", key="k") for _ in range(300)]
        tables.run(
            "UPDATE outbox.half_check SET parked_at = now(), reason = E'a \"reason\"\\n\\\\', check_times = 15,"
            " last_answer = 'unknown', last_error = 'é', checked_at = now() WHERE half_id = :id",
            id=halves[0],
        )
        for each in halves[2:]:
            tables.app.rollback(each)
        checks = tables.all("half_check")
        assert len(checks) == 2
        small = Rewritten(CHECKS.table, CHECKS.counts, size=8192)
        assert tables.rewrite(small) is not None
        assert tables.all("half_check") == checks
        assert tables.value("SELECT pg_relation_size('outbox.half_check')") == 8192
        tables.app.commit(halves[1])
    assert len(tables.all("half_check")) == 1


def test_a_lock_that_cannot_be_had(
    tables: Rewriting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pass gives up, and says so; when the table has grown, what was replaced goes row by row."""
    caplog.set_level(logging.DEBUG, "outbox.prune")
    monkeypatch.setattr(module, "WAIT", 0.1)
    for _ in range(3):
        tables.send()
    before = tables.all("dispatch_cursor")
    with tables.observer.connect() as reader, reader.begin():
        reader.execute(text("SELECT count(*) FROM outbox.dispatch_cursor"))
        assert tables.rewrite(CURSORS) == 0
        assert [getattr(record, "outbox_event", "") for record in caplog.records] == ["table.busy"]
        assert tables.all("dispatch_cursor") == before
        monkeypatch.setattr(module, "_OVERDUE", 0)
        assert tables.rewrite(CURSORS) is None
        prune_producer_once(tables.connection, YOUNG)
        assert len(tables.all("dispatch_cursor")) == 1


def test_too_many_are_left_alone(tables: Rewriting, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go row by row; so they do when they become too many under the lock."""
    tables.run(WRITE_OFFSETS)
    newest = tables.rows(NEWEST)
    monkeypatch.setattr(module, "_FEW", 29)
    assert tables.rewrite(OFFSETS) is None
    prune_consumer_once(tables.connection, tables.connection, YOUNG, "g1", "t1")
    assert tables.value(f"SELECT count(*) FROM outbox.consumer_offset WHERE {OF_ONE}") == 5
    assert tables.rows(NEWEST) == newest
    left = len(tables.all("consumer_offset"))
    monkeypatch.setattr(module, "_FEW", 30)
    more = "INSERT INTO outbox.consumer_offset VALUES ('g', 't', 7, 1, 1)"

    def meanwhile(connection: Connection, *statements: Statement, **options: Any) -> Any:
        if len(statements) > 1:
            tables.run(more)
        return execute(connection, *statements, **options)

    monkeypatch.setattr(module, "execute", meanwhile)
    tables.rewrite(OFFSETS)
    assert len(tables.all("consumer_offset")) == left + 1


@pytest.mark.parametrize("word", ["outbox.kept", "TRUNCATE"])
def test_dispatch_waits_and_goes_on(tables: Rewriting, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    """A dispatcher that comes while the cursors are rewritten reads the one that was put back: nothing comes twice."""
    sent = [tables.send(each) for each in range(3)]
    with tables.observer.begin() as connection:
        sent.append(tables.app.send(connection, "t", 3, key="k"))
    done: list[int] = []

    def dispatch() -> None:
        with tables.observer.connect() as connection:
            done.append(dispatch_once(connection, YOUNG).done)

    dispatcher = threading.Thread(target=dispatch)

    def one_by_one(connection: Connection, *statements: Statement, **options: Any) -> Any:
        results = []
        for each in statements:
            results += execute(connection, each, **options)
            if word in each.sql and not each.sql.startswith("\nSELECT bool_and") and dispatcher.ident is None:
                dispatcher.start()
                wait_until(lambda: tables.waiting() or done, "the dispatcher waits for the table")
                assert not done
        return results

    monkeypatch.setattr(module, "execute", one_by_one)
    assert tables.rewrite(CURSORS)
    dispatcher.join()
    assert done == [1]
    found = messages(tables.connection)
    assert_dense(found)
    assert [each.id for each in found] == sent


def test_a_role_that_owns_nothing(tables: Rewriting, engine: Engine) -> None:
    """What was replaced goes row by row."""
    role = f"pruner_{engine.url.database}"
    for _ in range(3):
        tables.send()
    tables.run(f"CREATE ROLE {role}; GRANT USAGE ON SCHEMA outbox TO {role}")
    tables.run(f"GRANT SELECT, UPDATE, DELETE ON ALL TABLES IN SCHEMA outbox TO {role}")
    tables.run(f"GRANT INSERT ON outbox.topic_total TO {role}")
    try:
        tables.connection.execute(text(f"SET ROLE {role}"))
        tables.connection.commit()
        assert tables.rewrite(CURSORS) is None
        prune_producer_once(tables.connection, YOUNG)
        tables.connection.execute(text("RESET ROLE"))
        tables.connection.commit()
    finally:
        tables.run(f"DROP OWNED BY {role}; DROP ROLE {role}")
    assert len(tables.all("dispatch_cursor")) == 1
