"""Tables of the first revision, with their rows, become partitioned ones: interrupted, and while all goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError

from outbox import Outbox, Settings
from outbox.consumer import sql
from outbox.consumer.consumer import Consumer
from outbox.database import migration
from outbox.database.execute import Template
from outbox.database.migration import runner
from outbox.database.tables import SEGMENTED
from outbox.dispatch.once import dispatch_once
from outbox.errors import SchemaBusy
from tests.kit import Tables, dispatch_all, send_each, wait_until
from tests.kit.processes import python

NEW = [*(f"producer_{number:04}" for number in range(2, 21)), *(f"consumer_{number:04}" for number in range(2, 12))]
# Those of the first revision.
TABLES = [table for part in SEGMENTED.values() for table in part if table != "delivery"]
# Without the columns of later revisions.
LATER = "ARRAY['at_commit', 'reading', 'order_key', 'turn', 'follows']"
ROWS = f"SELECT md5(string_agg((to_jsonb(t) - {LATER})::text, ',' ORDER BY t::text)), count(*) FROM outbox.{{}} t"


#: Reads the newest offset as of then, without claims.
OFFSET = Template("""
SELECT position, claims, message_id, reading, NULL::boolean, false FROM {s}.consumer_offset
 WHERE consumer_group = %s AND topic = %s AND queue = %s ORDER BY position DESC, claims DESC LIMIT 1
""")


@pytest.fixture
def old(url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """A database at the first revisions, with messages."""
    monkeypatch.setattr(sql, "offset", OFFSET)
    with runner._turn(url, "outbox", 5.0) as (connection, config, _):
        connection.execute(text("CREATE SCHEMA outbox"))
        command.upgrade(config, "producer_0001")
        command.upgrade(config, "consumer_0001")
        # Dispatch and consumers of this release, which stand in for those of then, use these.
        connection.execute(text("ALTER TABLE outbox.half_message ADD COLUMN queue integer"))
        for table in ("consumer_message", "consumer_offset"):
            connection.execute(text(f"ALTER TABLE outbox.{table} ADD COLUMN reading smallint NOT NULL DEFAULT 0"))
        for revision, most in (
            ("producer_0014", None),
            ("producer_0016", None),
            ("producer_0018", 1),
            ("consumer_0010", None),
        ):
            for statement in ScriptDirectory.from_config(config).get_revision(revision).module.UPGRADE[:most]:
                connection.execute(text(statement.format(s="outbox")))
    app = Outbox(engine, settings=Settings())
    send_each(app, "t", *range(20), key="k")
    dispatch_all(engine)
    send_each(app, "t", *range(5), key="k")
    with engine.begin() as connection:
        app.prepare(connection, "t", "prepared")
    consume(engine, app)
    assert Tables(engine).value("SELECT count(*) FROM outbox.consumer_message") == 20
    yield engine


def consume(engine: Engine, app: Outbox) -> int:
    """Consume what there is, with a group of this application; return how many messages that were."""
    if ("t", "g") not in app.subscriptions:
        app.consumer("t", group="g", batch=7)(lambda _message, _session: None)
    consumer, done = Consumer(app.subscriptions["t", "g"], app.settings), 0
    with engine.connect() as connection:
        consumer.start(connection, connection)
        while (counts := consumer.consume_once(connection, connection)).taken:
            done += counts.done
    return done


def content(tables: Tables) -> dict[str, Any]:
    """Return what tells the rows of each table."""
    return {table: tables.rows(ROWS.format(table)) for table in TABLES}


def test_rows_stay_and_the_log_goes_on(url: str, old: Engine) -> None:
    """The same rows are there, and dispatch goes on in the same epoch at the next position."""
    tables = Tables(old)
    before = content(tables)
    assert migration.upgrade(url) == NEW
    assert migration.check(url) == []
    assert content(tables) == before
    assert dispatch_all(old).done == 5
    assert tables.rows("SELECT position FROM outbox.message ORDER BY position") == list(range(1, 26))
    assert tables.value("SELECT max(epoch) FROM outbox.dispatch_cursor") == 0


def test_privileges_and_indexes_come_along(url: str, old: Engine) -> None:
    """Who might use a table may use it still; an index that somebody added serves all partitions."""
    tables, role = Tables(old), f"reader_{old.url.database}"
    tables.run(f"CREATE ROLE {role}")
    tables.run(f"GRANT SELECT, INSERT ON outbox.half_message TO {role}")
    tables.run(f"GRANT UPDATE (xid) ON outbox.op_message TO {role}")
    tables.run("CREATE INDEX half_message_by_key ON outbox.half_message (key)")
    migration.upgrade(url)
    assert tables.value(f"SELECT has_table_privilege('{role}', 'outbox.half_message', 'INSERT')")
    assert tables.value(f"SELECT has_column_privilege('{role}', 'outbox.op_message', 'xid', 'UPDATE')")
    assert tables.value("SELECT indisvalid FROM pg_index WHERE indexrelid = 'outbox.half_message_by_key'::regclass")
    tables.run(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_what_would_be_lost_is_refused(url: str, old: Engine) -> None:
    """Policies and triggers of a table aren't left behind in silence."""
    tables = Tables(old)
    tables.run("CREATE POLICY mine ON outbox.message")
    with pytest.raises(DBAPIError, match="policy mine on"):
        migration.upgrade(url)
    tables.run("DROP POLICY mine ON outbox.message")
    assert migration.upgrade(url) == NEW


def test_an_index_that_was_interrupted_is_built_again(url: str, old: Engine) -> None:
    """What a killed upgrade has left is mended by the next one."""
    tables = Tables(old)
    tables.run("CREATE INDEX op_message_sequence_0002 ON outbox.op_message (sequence)")
    tables.run("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'outbox.op_message_sequence_0002'::regclass")
    assert migration.upgrade(url) == NEW
    assert migration.check(url) == []


def test_an_index_of_partitions_is_built_before(url: str, engine: Engine) -> None:
    """While all goes on, on each partition; the revision makes the index of the table of these, and reads no row."""
    with runner._turn(url, "outbox", 5.0) as (connection, config, _):
        connection.execute(text("CREATE SCHEMA outbox"))
        command.upgrade(config, "producer_0008")
    tables = Tables(engine)
    tables.run("CREATE TABLE outbox.half_message_old PARTITION OF outbox.half_message FOR VALUES FROM (:a) TO (:b)"
               .replace(":a", f"'{UUID(int=1)}'").replace(":b", f"'{UUID(int=2)}'"))  # fmt: skip
    assert migration.upgrade(url, ["producer"]) == [f"producer_{number:04}" for number in range(9, 21)]
    assert migration.check(url) == []
    sql = """SELECT indexrelid::regclass::text, indisvalid FROM pg_index JOIN pg_inherits i ON i.inhrelid = indexrelid
              WHERE i.inhparent = 'outbox.ix_half_message_conversation'::regclass ORDER BY 1"""
    assert tables.rows(sql) == [
        ("outbox.half_message_default_conversation", True), ("outbox.half_message_old_conversation", True),
    ]  # fmt: skip


def test_totals_are_taken_over(url: str) -> None:
    """What was counted in the newest cursor, and of checks, is the sum of rows then; and the way back."""
    engine = create_engine(url)
    tables = Tables(engine)
    with runner._turn(url, "outbox", 5.0) as (connection, config, _):
        connection.execute(text("CREATE SCHEMA outbox"))
        command.upgrade(config, "producer_0017")
    for totals in ('{"a": [1, 0]}', '{"a": [2, 1], "b": [0, 4]}'):
        tables.run(
            "INSERT INTO outbox.dispatch_cursor (next_xid, in_flight, system_identifier, totals) SELECT '9', '{}',"
            " system_identifier, CAST(:totals AS jsonb) FROM pg_control_system()", totals=totals
        )  # fmt: skip
    tables.run("INSERT INTO outbox.check_total (topic, checks) VALUES ('a', 3), ('a', 4), ('c', 5)")
    assert migration.upgrade(url, ["producer"])[0] == "producer_0018"
    sums = "SELECT topic, sum(committed)::int, sum(rolled_back)::int, sum(checks)::int FROM outbox.topic_total"
    assert tables.rows(f"{sums} GROUP BY topic ORDER BY topic") == [("a", 2, 1, 7), ("b", 0, 4, 0), ("c", 0, 0, 5)]
    with runner._turn(url, "outbox", 5.0) as (_, config, _):
        command.downgrade(config, "producer_0017")
    assert tables.value("SELECT totals FROM outbox.dispatch_cursor ORDER BY id DESC LIMIT 1") == {
        "a": [2, 1], "b": [0, 4], "c": [0, 0],
    }  # fmt: skip
    assert tables.rows("SELECT topic, checks FROM outbox.check_total WHERE checks > 0 ORDER BY 1") == [
        ("a", 7),
        ("c", 5),
    ]
    engine.dispose()


def test_an_index_of_new_columns_is_built_before(url: str, engine: Engine) -> None:
    """So are the columns of an index that the release before doesn't have."""
    with runner._turn(url, "outbox", 5.0) as (connection, config, _):
        connection.execute(text("CREATE SCHEMA outbox"))
        command.upgrade(config, "consumer_0010")
    runner._build_before(url, ("consumer",), "outbox", 5.0)
    tables = Tables(engine)
    sql = "SELECT indisvalid FROM pg_index WHERE indexrelid = 'outbox.consumer_message_default_held'::regclass"
    assert tables.rows(sql) == [True]
    assert migration.current(url)["consumer"] == "consumer_0010"
    assert migration.upgrade(url, ["consumer"]) == ["consumer_0011"]
    assert migration.check(url) == []


@pytest.mark.parametrize("table", ["message", "consumer_message"])
def test_killed_in_the_middle(url: str, old: Engine, table: str) -> None:
    """An upgrade that is killed while it holds its locks has changed nothing; the next one goes on."""
    tables = Tables(old)
    before = content(tables)
    with old.connect() as reader, reader.begin():
        reader.execute(text(f"SELECT count(*) FROM outbox.{table}"))
        with python("outbox.cli", "db", "upgrade", "--lock-timeout", "600", "--url", old) as process:
            wait_until(tables.waiting, "the upgrade waits for a table")
            process.kill()
        tables.cut("wait_event_type = 'Lock'")
        with pytest.raises(SchemaBusy):
            migration.upgrade(url, lock_timeout=0.05)
    assert content(tables) == before
    assert migration.upgrade(url) == NEW
    assert content(tables) == before


@pytest.mark.parametrize(
    ("held", "wanted"),
    [("consumer_message", "consumer_offset"), ("consumer_offset", "consumer_message"), ("message", "half_message")],
)
def test_nobody_is_waited_for_in_a_circle(url: str, old: Engine, held: str, wanted: str) -> None:
    """A service that has one table and wants another gets it while an upgrade waits for the first one."""
    with ThreadPoolExecutor(1) as pool:
        with old.connect() as service, service.begin():
            service.execute(text(f"SELECT count(*) FROM outbox.{held}"))
            upgrade = pool.submit(migration.upgrade, url, lock_timeout=60.0)
            wait_until(Tables(old).waiting, "the upgrade waits for a table")
            service.execute(text(f"SELECT count(*) FROM outbox.{wanted}"))
            assert not upgrade.done()
        assert upgrade.result() == NEW


def test_senders_and_consumers_go_on(url: str, old: Engine) -> None:
    """Nothing that is sent while the tables are converted is lost, or consumed twice."""
    migrated = threading.Event()
    sent: list[object] = []
    consumed: list[int] = []
    problems: list[BaseException] = []

    def work() -> None:
        engine = create_engine(url)
        app = Outbox(engine, settings=Settings())
        try:
            after = 0
            while after < 20:
                sent.extend(send_each(app, "t", "meanwhile", key="k"))
                with engine.connect() as connection:
                    dispatch_once(connection, Settings())
                consumed.append(consume(engine, app))
                after += migrated.is_set()
        except BaseException as error:
            problems.append(error)
        engine.dispose()

    workers = [threading.Thread(target=work) for _ in range(3)]
    for each in workers:
        each.start()
    wait_until(lambda: len(sent) > 10 or problems, "messages are sent")
    try:
        assert migration.upgrade(url, lock_timeout=60.0) == NEW
    finally:
        migrated.set()
        for each in workers:
            each.join()
    assert problems == []
    dispatch_all(old)
    consumed.append(consume(old, Outbox(old, settings=Settings())))
    assert set(Tables(old).messages()) >= set(sent)
    assert sum(consumed) == Tables(old).value("SELECT count(*) FROM outbox.message") - 20
    assert sum(consumed) == Tables(old).value("SELECT count(*) FROM outbox.consumer_message") - 20
    queue = "SELECT position FROM outbox.message WHERE queue = (SELECT queue FROM outbox.message LIMIT 1)"
    positions = Tables(old).rows(queue)
    assert sorted(positions) == list(range(1, len(positions) + 1))
