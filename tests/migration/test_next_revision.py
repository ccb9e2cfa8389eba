"""Tables of this code are upgraded by the next release: in steps, interrupted, and while all goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, text

from outbox import Outbox, Settings
from outbox.consumer.consumer import Consumer
from outbox.database import migration
from outbox.database.migration import chain, runner
from outbox.database.tables import SEGMENTED
from outbox.dispatch.dispatch_pass import dispatch_once
from outbox.errors import SchemaBusy, SchemaOutdated
from tests.cli.conftest import run_cli
from tests.kit import Tables, dispatch_all, python, send_each, wait_until
from tests.kit.revisions import next_release

TABLES = [table for part in SEGMENTED.values() for table in part if table != "delivery"]
ROWS = "SELECT md5(string_agg(row, ',' ORDER BY row)) FROM outbox.{} t, CAST(to_jsonb(t) - 'note' AS text) AS row"
INDEXES = """
SELECT indexrelid::regclass::text, indisvalid FROM pg_index JOIN pg_inherits i ON i.inhrelid = indexrelid
 WHERE i.inhparent = to_regclass(:name) ORDER BY 1"""
#: An upgrade by a process of the next release, whose revisions are in the folder of the first argument.
UPGRADE = """
import sys
from pathlib import Path
from outbox.database import migration
from outbox.database.migration import chain
chain.folder = lambda: Path(sys.argv[1])
migration.upgrade(sys.argv[2], lock_timeout=600.0)
"""


@pytest.fixture
def installing(tmp_path: Path) -> Iterator[Callable[[], list[str]]]:
    """A function that installs the next release of this code."""
    with next_release(tmp_path / "migrations") as install:
        yield install


@pytest.fixture
def old(url: str, engine: Engine) -> Engine:
    """A database at the revisions of this code, with messages."""
    migration.upgrade(url)
    app = Outbox(engine, settings=Settings())
    send_each(app, "t", *range(20), key="k")
    dispatch_all(engine)
    send_each(app, "t", *range(5), key="k")
    with engine.begin() as connection:
        app.prepare(connection, "t", "prepared")
    assert consume(engine, app) == 20
    return engine


@pytest.fixture
def new(old: Engine, installing: Callable[[], list[str]]) -> list[str]:
    """The revisions of the next release, which is installed; the database has yet to be upgraded."""
    return installing()


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


def test_up_to_the_next_release(url: str, old: Engine, installing: Callable[[], list[str]]) -> None:
    """The code of before goes on with the tables of after, and all rows are there; the new code needs the upgrade."""
    tables = Tables(old)
    before, heads = content(tables), migration.current(url)
    new = installing()
    with old.connect() as connection, pytest.raises(SchemaOutdated, match=f"this code needs {new[0]}; run: outbox db"):
        migration.require(connection)
    assert migration.current(url) == heads
    assert migration.upgrade(url) == new
    assert migration.upgrade(url) == []
    assert content(tables) == before
    assert all("note" in line or "_tag" in line for line in migration.check(url))
    assert dispatch_all(old).done == 5
    assert tables.rows("SELECT position FROM outbox.message ORDER BY position") == list(range(1, 26))


def test_statements_lead_up_and_down(url: str, old: Engine, new: list[str]) -> None:
    """As plain statements too; what a revision makes anew is undone by what was there before."""
    tables, before = Tables(old), [chain.history(each.partition("_")[0])[1] for each in new]
    body = "SELECT prosrc FROM pg_proc WHERE oid = 'outbox.commit(uuid)'::regprocedure"
    former = tables.value(body)

    def go(start: Collection[str], end: Collection[str]) -> None:
        with old.begin() as connection:
            for statement in migration.statements(start, end):
                connection.exec_driver_sql(statement, execution_options={"no_parameters": True})

    go(before, new)
    assert migration.upgrade(url) == []
    assert tables.value(body) != former
    go(new, before)
    assert tables.value(body) == former
    assert migration.check(url) == [
        f"{each.partition('_')[0]} is at revision {was}, this code has {each}"
        for each, was in zip(new, before, strict=True)
    ]
    printed = run_cli("db", "sql", "--from", before[0], "--to", new[0]).out
    assert printed.startswith(f"-- the outbox from {before[0]} to {new[0]}\nBEGIN;\n")
    assert f"INSERT INTO \"outbox\".outbox_version (version_num) VALUES ('{new[0]}');\nCOMMIT;\n" in printed


def test_an_index_that_was_interrupted_is_built_again(url: str, old: Engine, new: list[str]) -> None:
    """What a killed upgrade has left is mended by the next one."""
    tables, name = Tables(old), "outbox.half_message_default_tag"
    tables.run("CREATE INDEX half_message_default_tag ON outbox.half_message_default (tag, id) WHERE tag IS NOT NULL")
    tables.run(f"UPDATE pg_index SET indisvalid = false WHERE indexrelid = '{name}'::regclass")
    assert migration.upgrade(url) == new
    assert tables.rows(INDEXES, name="outbox.ix_half_message_tag") == [(name, True)]


def test_an_index_of_partitions_is_built_before(url: str, old: Engine, new: list[str]) -> None:
    """While all goes on, on each partition; the revision makes the index of the table of these, and reads no row."""
    tables = Tables(old)
    tables.run("CREATE TABLE outbox.half_message_old PARTITION OF outbox.half_message FOR VALUES FROM (:a) TO (:b)"
               .replace(":a", f"'{UUID(int=1)}'").replace(":b", f"'{UUID(int=2)}'"))  # fmt: skip
    assert migration.upgrade(url, ["producer"]) == [new[0]]
    assert tables.rows(INDEXES, name="outbox.ix_half_message_tag") == [
        ("outbox.half_message_default_tag", True), ("outbox.half_message_old_tag", True),
    ]  # fmt: skip


def test_an_index_of_new_columns_is_built_before(url: str, old: Engine, new: list[str]) -> None:
    """So are the columns of an index that the release before doesn't have."""
    runner._build_before(url, ("consumer",), "outbox", 5.0)
    tables = Tables(old)
    index = "SELECT indisvalid FROM pg_index WHERE indexrelid = 'outbox.consumer_message_default_note'::regclass"
    assert tables.rows(index) == [True]
    assert migration.current(url)["consumer"] != new[1]
    assert migration.upgrade(url, ["consumer"]) == [new[1]]


@pytest.mark.parametrize("table", ["message", "consumer_message"])
def test_killed_in_the_middle(url: str, old: Engine, new: list[str], tmp_path: Path, table: str) -> None:
    """An upgrade that is killed while it waits for its locks has changed nothing; the next one goes on."""
    tables = Tables(old)
    before = content(tables)
    (tmp_path / "upgrade.py").write_text(UPGRADE)
    runner._build_before(url, migration.PARTS, "outbox", 5.0)
    with old.connect() as reader, reader.begin():
        reader.execute(text(f"SELECT count(*) FROM outbox.{table}"))
        folder, paths = tmp_path / "migrations", f"{tmp_path}:{chain.folder().parent}"
        with python("upgrade", str(folder), old, PYTHONPATH=f"{paths}:{Path(__file__).parents[2]}") as process:
            wait_until(tables.waiting, "the upgrade waits for a table")
            process.kill()
        tables.cut("wait_event_type = 'Lock'")
        with pytest.raises(SchemaBusy):
            migration.upgrade(url, lock_timeout=0.05)
    assert content(tables) == before
    assert migration.upgrade(url) == new
    assert content(tables) == before


@pytest.mark.parametrize(
    ("held", "wanted"),
    [("consumer_message", "consumer_offset"), ("consumer_offset", "consumer_message"), ("message", "half_message")],
)
def test_nobody_is_waited_for_in_a_circle(url: str, old: Engine, new: list[str], held: str, wanted: str) -> None:
    """A service that has one table and wants another gets it while an upgrade waits for the first one."""
    runner._build_before(url, migration.PARTS, "outbox", 5.0)
    with ThreadPoolExecutor(1) as pool:
        with old.connect() as service, service.begin():
            service.execute(text(f"SELECT count(*) FROM outbox.{held}"))
            upgrade = pool.submit(migration.upgrade, url, lock_timeout=60.0)
            wait_until(Tables(old).waiting, "the upgrade waits for a table")
            service.execute(text(f"SELECT count(*) FROM outbox.{wanted}"))
            assert not upgrade.done()
        assert upgrade.result() == new


def test_senders_and_consumers_go_on(url: str, old: Engine, new: list[str]) -> None:
    """Nothing that is sent while the tables are upgraded is lost, or consumed twice."""
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
        assert migration.upgrade(url, lock_timeout=60.0) == new
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
