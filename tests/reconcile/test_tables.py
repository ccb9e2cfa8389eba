"""Tables that aren't ours, in PostgreSQL: a hand-written system's own ones by mapping; what can't be done with them."""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from sqlalchemy import Engine, create_engine, text

from outbox.cli.output import Code
from outbox.database.execute import execute
from outbox.errors import ActRefused, InvalidSettings
from outbox.operator.databases import Databases
from outbox.reconcile.config import job_of, read_mapping
from outbox.reconcile.foreign import key, key_of, known_table, table_side
from outbox.reconcile.job import FIRST_ID, Access, Outcome, Pair, Range, Repair, Tier, Window
from outbox.reconcile.record.orders import ReconciliationOrders
from outbox.reconcile.record.write import detail_of
from outbox.reconcile.rows import FINDING, to_findings
from outbox.reconcile.run import reconcile
from outbox.reconcile.source import connected
from outbox.reconcile.tables import ForeignTable, InboxState
from tests.cli.conftest import run_cli
from tests.reconcile.foreign import KNOWN, SENT, foreign_job, run, tell
from tests.reconcile.town import HOUR, PAIR, Progress, Town, explain, fate, ids_at, kinds, url_of

#: As a team writes them that has no framework.
PRODUCER_MSG = """
CREATE TABLE producer_msg (
    msg_id varchar(64) PRIMARY KEY, topic varchar(64) NOT NULL, content text, status smallint NOT NULL,
    send_times int NOT NULL DEFAULT 0, create_time timestamp NOT NULL, update_time timestamp NOT NULL)
"""
CONSUMER_MSG = """
CREATE TABLE consumer_msg (
    id bigserial PRIMARY KEY, msg_id varchar(64) NOT NULL UNIQUE, consumer varchar(64) NOT NULL,
    status varchar(16) NOT NULL, retry_times int NOT NULL, create_time timestamp NOT NULL,
    update_time timestamp NOT NULL)
"""
JOB = """
[producer]
url_env = "ACCOUNT_URL"

[producer.tables]
table = "producer_msg"
columns = { id = "msg_id", at = "update_time", state = "status", sends = "send_times", topic = "topic" }
states = { 0 = "undecided", 1 = "dispatched", 2 = "rolled_back" }

[consumer]
url_env = "ORDER_URL"

[consumer.tables]
query = "SELECT * FROM consumer_msg"
states = { DONE = "consumed", RETRY = "failed", DEAD = "parked" }

[consumer.tables.columns]
id = "msg_id"
status = "status"
attempts = "retry_times"
received_at = "create_time"
changed_at = "update_time"
group = "consumer"

[[pair]]
topic = "payment"
group = "order"

[window]
grace = "1m"
"""


@pytest.fixture
def two(new_engine: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Engine, Engine]:
    """The databases of two services with such tables, filled, and none of our own; a job that compares them."""
    account, order = new_engine(), new_engine()
    for engine in (account, order):
        run(engine, "DROP SCHEMA outbox CASCADE")
    run(
        account,
        PRODUCER_MSG,
        """INSERT INTO producer_msg
           SELECT 'pay-' || i, 'payment', '{}', 1, 1, now() AT TIME ZONE 'UTC' - interval '1 hour',
                  now() AT TIME ZONE 'UTC' - interval '1 hour' FROM generate_series(1, 3000) i""",
        """INSERT INTO producer_msg SELECT 'x', 'another', '{}', 1, 1, create_time, update_time
           FROM producer_msg LIMIT 1""",
    )
    run(
        order,
        CONSUMER_MSG,
        """INSERT INTO consumer_msg (msg_id, consumer, status, retry_times, create_time, update_time)
           SELECT 'pay-' || i, 'order', 'DONE', 1, now() AT TIME ZONE 'UTC' - interval '1 hour',
                  now() AT TIME ZONE 'UTC' - interval '1 hour' FROM generate_series(1, 3000) i""",
    )
    monkeypatch.setenv("ACCOUNT_URL", url_of(account))
    monkeypatch.setenv("ORDER_URL", url_of(order))
    for name in ("PRODUCER_URL", "CONSUMER_URL", "RECORD_URL", "DATABASE_URL"):
        monkeypatch.delenv(f"OUTBOX_{name}", raising=False)
    (tmp_path / "night.toml").write_text(JOB)
    return account, order


DIFFERENT = {
    "pay-7": "missing",
    "pay-8": "consumed_though_rolled_back",
    "pay-9": "phantom",
    "pay-10": "parked",
    "pay-11": "failed",
    "pay-12": "undecided",
}


def make_different(account: Engine, order: Engine) -> None:
    """Have six messages differ."""
    run(
        account,
        "UPDATE producer_msg SET status = 2 WHERE msg_id = 'pay-8'",
        "DELETE FROM producer_msg WHERE msg_id = 'pay-9'",
        "UPDATE producer_msg SET status = 0 WHERE msg_id = 'pay-12'",
    )
    run(
        order,
        "DELETE FROM consumer_msg WHERE msg_id IN ('pay-7', 'pay-12')",
        "UPDATE consumer_msg SET status = 'DEAD', retry_times = 16 WHERE msg_id = 'pay-10'",
        "UPDATE consumer_msg SET status = 'RETRY' WHERE msg_id = 'pay-11'",
    )


@pytest.mark.parametrize("tier", ["full", "digest"])
def test_tables_written_by_hand_are_reconciled(two: tuple[Engine, Engine], tmp_path: Path, tier: str) -> None:
    """From the command line, by a file: in sync, then each difference under its own id, in each form of the report."""
    arguments = ("reconcile", "--config", str(tmp_path / "night.toml"), "--tier", tier)
    result = run_cli(*arguments)
    assert result.code == Code.DONE, result.err
    assert "in sync" in result.out
    assert "nothing is recorded: the consumer's tables aren't ours" in result.err
    make_different(*two)

    result = run_cli(*arguments, "-o", "json", "--findings", str(tmp_path / "findings"))

    assert result.code == Code.PROBLEMS, result.err
    (pair,) = json.loads(result.out)["pairs"]
    assert {each["foreign_id"]: each["kind"] for each in pair["findings"]} == DIFFERENT
    assert pair["counts"]["consumed"] == 3000 - len(DIFFERENT)
    if tier == "digest":
        assert pair["plan"]["rows_read"] < 2 * 3000 / 2
    found = ds.dataset(tmp_path / "findings", partitioning="hive").to_table()
    assert dict(zip(found["message_id"].to_pylist(), found["kind"].to_pylist(), strict=True)) == DIFFERENT
    page = tmp_path / "report.html"
    shown = run_cli(*arguments, "--html", str(page))
    assert all(each in shown.out and each in page.read_text() for each in DIFFERENT)


@pytest.mark.parametrize("tier", ["full", "digest"])
def test_a_database_of_another_encoding(
    two: tuple[Engine, Engine], tmp_path: Path, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An id is the same text on both sides, whatever bytes it has there."""
    account, order = two
    latin = account.url.set(database=f"{account.url.database}_latin")
    outside = account.execution_options(isolation_level="AUTOCOMMIT")
    other = create_engine(latin)
    try:
        run(
            outside,
            f"CREATE DATABASE {latin.database} ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0",
        )
        hour = "now() AT TIME ZONE 'UTC' - interval '1 hour'"
        row = f"'payment', '{{}}', 1, 1, {hour}, {hour}"
        run(other, PRODUCER_MSG, f"INSERT INTO producer_msg VALUES ('bär', {row}), ('größe', {row})")
        run(order, "DELETE FROM consumer_msg WHERE msg_id > 'pay-1'", "UPDATE consumer_msg SET msg_id = 'bär'")
        monkeypatch.setenv("ACCOUNT_URL", url_of(other))
        result = run_cli("reconcile", "--config", str(tmp_path / "night.toml"), "--tier", tier, "-o", "json")
        (pair,) = json.loads(result.out)["pairs"]
        assert {each["foreign_id"]: each["kind"] for each in pair["findings"]} == {"größe": "missing"}, result.err
        assert pair["counts"]["consumed"] == 1
    finally:
        other.dispose()
        run(outside, f"DROP DATABASE IF EXISTS {latin.database} WITH (FORCE)")


def test_a_run_is_recorded_where_a_database_is_named(two: tuple[Engine, Engine], town: Town, tmp_path: Path) -> None:
    """With the readable id beside the key."""
    make_different(*two)
    run_cli("reconcile", "--config", str(tmp_path / "night.toml"), "--record", url_of(town.consumer))
    rows = town.rows("SELECT detail ->> 'foreign_id' || ' ' || kind FROM outbox.reconciliation_finding")
    assert sorted(rows) == sorted(f"{id_} {kind}" for id_, kind in DIFFERENT.items())
    (run_id,) = town.rows("SELECT id FROM outbox.reconciliation_run")
    orders = ReconciliationOrders(Databases.open({"shop": town.consumer}, town.settings))
    with pytest.raises(ActRefused, match="tables of the producer and consumer that aren't the outbox's"):
        orders.repair(run_id, by="me", why="test")


def test_what_heals_at_the_second_look(village: Town) -> None:
    """A message that was on its way is no difference, also between foreign tables."""
    village.plant([fate()] * 5)
    tell(village, ids="string")
    village.run("""CREATE TABLE late AS TABLE legacy_known; DELETE FROM legacy_known WHERE true""")
    arrive = Progress(
        lambda title: village.run("INSERT INTO legacy_known TABLE late") if "second look" in title else None
    )
    result = reconcile(foreign_job(village, "producer", "consumer"), arrive).pairs[0]
    assert (result.in_sync, result.healed) == (True, 5)


@pytest.mark.parametrize("tier", [Tier.FULL, Tier.DIGEST])
def test_a_window_is_one_of_our_ids(village: Town, tier: Tier) -> None:
    """Beside tables of ours, which tell what lies in it; between foreign ones it is refused."""
    now, old = village.plant([fate(status=InboxState.NONE)] * 2, ids=[*ids_at(HOUR), *ids_at(5 * HOUR)])
    tell(village)
    window = Window(since=_before(now), grace=60.0)
    for part in ("producer", "consumer"):
        job = foreign_job(village, part, tier=tier, window=window)
        assert [each.id for each in to_findings(reconcile(job).pairs[0].findings)] == [now]
    with pytest.raises(InvalidSettings, match="a window is one of ids that begin with a time"):
        foreign_job(village, "producer", "consumer", window=window)
    assert old < now


def _before(id_: UUID) -> dt.datetime:
    return dt.datetime.fromtimestamp((id_.int >> 80) / 1000, dt.UTC) - dt.timedelta(minutes=1)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (
            "INSERT INTO legacy_sent TABLE legacy_sent",
            r"producer.tables \(table legacy_sent\): id order/.* is there twice",
        ),
        ("UPDATE legacy_sent SET msg_id = NULL", "1 ids are null; leave such rows out by a query"),
        ("UPDATE legacy_sent SET changed = NULL", r"the time \(columns.at\) of 1 rows is null"),
        (
            "UPDATE legacy_sent SET status = 17",
            "state = 17 of the producer's table legacy_sent must be one of: 0, 1, 2",
        ),
        ("UPDATE legacy_sent SET status = NULL", "state = NULL of the producer's"),
        ("ALTER TABLE legacy_sent DROP changed", r"no column changed \(columns.at\); it has msg_id, status"),
        ("ALTER TABLE legacy_sent ALTER changed TYPE text", r"changed \(columns.at\) is text; cast it to date or time"),
        ("DROP TABLE legacy_sent", 'relation "legacy_sent" does not exist'),
    ],
)
@pytest.mark.parametrize("tier", [Tier.FULL, Tier.DIGEST])
def test_rows_that_cant_be_judged(village: Town, statement: str, said: str, tier: Tier) -> None:
    """Nothing is guessed: the side, the table, what is wrong and the mend are told, by either tier."""
    village.plant([fate()])
    tell(village, ids="string")
    village.run(statement)
    with pytest.raises(InvalidSettings, match=said):
        reconcile(foreign_job(village, "producer", "consumer", tier=tier))


@pytest.mark.parametrize("tier", [Tier.FULL, Tier.DIGEST])
@pytest.mark.parametrize(
    ("local", "status"),
    [
        ("UPDATE legacy_sent SET changed = changed + interval '8 hours'", InboxState.NONE),
        ("UPDATE legacy_sent SET changed = changed + interval '8 hours'", InboxState.CONSUMED),
        ("UPDATE legacy_known SET came = came + interval '8 hours'", InboxState.FAILED),
        ("UPDATE legacy_known SET changed = changed + interval '8 hours'", InboxState.CONSUMED),
    ],
)
def test_times_that_cant_be(village: Town, tier: Tier, local: str, status: InboxState) -> None:
    """A table in local time isn't in sync: each of its rows is told, whatever the other side says."""
    ids = village.plant([fate(status=status)] * 20)
    tell(village)
    village.run(local)
    result = reconcile(foreign_job(village, "producer", "consumer", tier=tier)).pairs[0]
    assert {id_: kind.label for id_, kind in kinds(result).items()} == dict.fromkeys(ids, "ahead_of_clock")
    assert not result.in_sync


#: What PostgreSQL has and Python doesn't, and whether it is to come.
STRANGE = {
    "infinity": True,
    "294276-12-31": True,
    "20000-01-01": True,
    "0044-03-15 BC": False,
    "4713-01-02 BC": False,
    "-infinity": False,
}


@pytest.mark.parametrize("tier", [Tier.FULL, Tier.DIGEST])
@pytest.mark.parametrize("time", STRANGE)
def test_times_that_python_does_not_have(village: Town, tier: Tier, time: str) -> None:
    """What is to come is told as ahead of its clock; what is long ago is old; in foreign tables and in ours."""
    sent, known = village.plant([fate(status=InboxState.NONE), fate(status=InboxState.FAILED)])
    village.run(f"UPDATE outbox.message SET visible_at = '{time}' WHERE half_id = :id", id=sent)
    village.run(f"UPDATE outbox.consumer_message SET received_at = '{time}', changed_at = '{time}'")
    tell(village)
    expected = (
        {sent: "ahead_of_clock", known: "ahead_of_clock"} if STRANGE[time] else {sent: "missing", known: "failed"}
    )
    for parts in (("producer", "consumer"), ()):
        result = reconcile(foreign_job(village, *parts, tier=tier)).pairs[0]
        assert {id_: kind.label for id_, kind in kinds(result).items()} == expected
        assert all(detail_of(finding) for finding in to_findings(result.findings))


def test_ids_that_are_twice_on_both_sides_are_no_less_wrong(village: Town) -> None:
    """Of which an exclusive or of hashes would tell nothing."""
    village.plant([fate()])
    tell(village, ids="string")
    village.run("INSERT INTO legacy_sent TABLE legacy_sent; INSERT INTO legacy_known TABLE legacy_known")
    for tier in (Tier.FULL, Tier.DIGEST):
        with pytest.raises(InvalidSettings, match="is there twice; keep one row by a query"):
            reconcile(foreign_job(village, "producer", "consumer", tier=tier))


_TEXT = "01975a5e-0c6f-7a3e-8000-5d0e6f0c1a2b"
_BYTES = (b"", b"\x00\xff", bytes(range(16)), b"x" * 17)


@pytest.mark.parametrize("id_", ["", "4711", "order/ä", _TEXT, _TEXT.upper(), f"{_TEXT}\n", "%s '\\", "\n", *_BYTES])
def test_an_id_is_the_same_to_python_and_postgresql(town: Town, id_: str | bytes) -> None:
    """The rule is written twice, in the languages of both; it is one rule."""
    kind = "bytea" if isinstance(id_, bytes) else "text"
    column = key("v.id", kind)
    with town.producer.connect() as connection:
        found = connection.execute(text(f"SELECT {column} FROM (SELECT CAST(:id AS {kind})) v (id)"), {"id": id_})
        assert found.scalar_one() == UUID(bytes=key_of(id_)[0])


def test_single_ids_are_found_by_an_index(village: Town) -> None:
    """Where the id is a uuid: the second look at a few of many rows reads no others."""
    village.plant([fate()] * 50)
    tell(village)
    village.run("ALTER TABLE legacy_sent ADD PRIMARY KEY (msg_id); SET enable_seqscan = off")
    access, ids = village.accesses[0], village.rows("SELECT msg_id FROM legacy_sent LIMIT 3")
    side = table_side(access, "producer", SENT, PAIR, None)
    ranges = [Range(each, UUID(int=each.int + 1)) for each in sorted(ids)]
    with connected(access) as connection:
        connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
        plan = "\n".join(row[0] for row in execute(connection, explain(side.statement(ranges)))[0])
    assert "legacy_sent_pkey" in plan
    assert side.read(ranges).num_rows == 3


def test_a_query_can_change_nothing(village: Town) -> None:
    """Whatever a query calls is in a transaction that is read only."""
    tell(village)
    village.run("""CREATE FUNCTION sneaky() RETURNS SETOF legacy_known LANGUAGE sql AS
                   'INSERT INTO legacy_known DEFAULT VALUES RETURNING *'""")
    table = replace(KNOWN, query="SELECT * FROM sneaky()")
    with pytest.raises(Exception, match="read-only transaction"):
        reconcile(foreign_job(village, "consumer", consumer_table=table))
    assert village.rows("SELECT count(*) FROM legacy_known") == [0]


def test_the_types_of_columns_are_looked_up(village: Town) -> None:
    """An enum is text, a domain what it is made of."""
    village.run("CREATE TYPE mood AS ENUM ('DONE'); CREATE TABLE odd AS SELECT 'DONE'::mood AS m, 'a'::text AS i")
    table = ForeignTable(table="odd", columns={"id": "i", "status": "m"}, states={"DONE": "consumed"})
    access = village.accesses[1]
    with connected(access) as connection:
        assert known_table(connection, access, "consumer", table).types["i"] == "text"
    found = table_side(access, "consumer", table, PAIR, None).read([Range(FIRST_ID, None)])
    assert found["status"].to_pylist() == [InboxState.CONSUMED]
    assert found["foreign_id"].to_pylist() == ["a"]


def test_an_id_is_recorded_without_what_postgresql_refuses() -> None:
    """A source of Spark's may have a NUL in a text, which no table of ours can hold."""
    row = {"id": b"e" * 16, "outcome": int(Outcome.PHANTOM), "foreign_id": "a\0b"}
    (finding,) = to_findings(pa.Table.from_pylist([row], schema=FINDING))
    assert (finding.name, detail_of(finding)["foreign_id"]) == ("a\0b", "ab")


def test_an_executor_needs_no_libpq() -> None:
    """What a task imports to read a side works where psycopg doesn't."""
    modules = ("foreign", "rows", "source", "spark.frames")
    imported = ", ".join(f"outbox.reconcile.{name}" for name in modules)
    code = f"import sys; sys.modules['psycopg'] = None; import {imported}"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- what a job can't be ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"apply": True}, "apply: nothing can be repaired in tables that aren't ours"),
        ({"pairs": (PAIR, Pair("t", "h"))}, "nothing tells the rows of several pairs apart; name the group among"),
        ({"pairs": (Pair("t", "g", tags=["a"]),)}, "map the column addressed instead"),
        (
            {"consumer_table": replace(KNOWN, columns={"id": "a", "stats": "b"})},
            "columns.stats is none of the consumer's",
        ),
        ({"producer_table": replace(SENT, columns={"id": "a"}, states={})}, "columns lacks at, which the judge needs"),
        (
            {"producer_table": replace(SENT, states={"1": "sent"})},
            "states.1 = 'sent' must be one of: undecided, rolled",
        ),
        ({"consumer_table": replace(KNOWN, columns={"id": "a"})}, "states are those of the column status"),
    ],
)
def test_what_cant_be_done_with_foreign_tables(village: Town, changes: dict[str, Any], said: str) -> None:
    """It is refused before anything is read, with the mend."""
    with pytest.raises(InvalidSettings, match=said):
        foreign_job(village, "producer", "consumer", **changes)


def test_a_repair_that_is_only_a_report_is_no_repair(village: Town) -> None:
    """A policy may be there: the report says what would be done by hand."""
    job = foreign_job(village, "producer", policy={Outcome.PHANTOM: Repair.ALERT})
    assert job.policy == {Outcome.PHANTOM: Repair.ALERT}


COLUMNS = {"id": "a", "at": "b"}


@pytest.mark.parametrize(
    ("producer", "said"),
    [
        ({"columns": COLUMNS}, "give either table or query, or the format of a source that Spark reads"),
        ({"table": "t", "query": "SELECT 1", "columns": COLUMNS}, "give either table or query"),
        ({"table": "t", "path": "p", "columns": COLUMNS}, "path and options are those of a source of Spark's"),
        ({"format": "parquet", "table": "t", "columns": COLUMNS}, "is named by path and options"),
        ({"query": "DELETE FROM t", "columns": COLUMNS}, "query must be a single SELECT"),
        ({"query": "SELECT 1; SELECT 2", "columns": COLUMNS}, "leave out the semicolon"),
        ({"table": "t"}, "say which column has the id"),
        ({"table": "t", "columns": {"id": ""}}, "columns.id = '' is no name of a column"),
        ({"format": "jdbc", "options": {"password": "x"}, "columns": COLUMNS}, "options.password has a secret"),
        (
            {"format": "jdbc", "options": {"url": "jdbc:mysql://h/d?password=hunter2"}, "columns": COLUMNS},
            "options.url has a secret",
        ),
        ({"table": "t", "column": COLUMNS}, "producer.tables.column is unknown; did you mean columns"),
    ],
)
def test_declarations_that_cant_be(producer: dict[str, Any], said: str) -> None:
    """What a file says of a table is checked as the file is read; no secret is shown."""
    with pytest.raises(InvalidSettings, match=said) as caught:
        read_mapping({"producer": {"tables": producer}})
    assert "hunter2" not in str(caught.value)


def test_where_the_database_is_named() -> None:
    """By the file, or by an option; a side that Spark reads has none, and a record has no tables."""
    url = "postgresql+psycopg://u@h/d"
    tables = {"table": "t", "columns": COLUMNS}
    values = read_mapping({"producer": {"url": url, "tables": tables}, "consumer": {"url": url}})
    job = job_of({**values, "pairs": (PAIR,)})
    assert isinstance(job.producer, Access)
    assert job.tables == {"producer": ForeignTable(table="t", columns=COLUMNS)}
    assert "producer" not in read_mapping({"producer": {"tables": tables}})
    lake = {"format": "parquet", "path": "p", "columns": COLUMNS}
    assert read_mapping({"producer": {"tables": lake}})["producer_table"].by_spark
    with pytest.raises(InvalidSettings, match=r"producer\.url: parquet p is read by Spark; leave the URL out"):
        read_mapping({"producer": {"url": url, "tables": lake}})
    with pytest.raises(InvalidSettings, match=r"record\.tables: runs are recorded in the outbox's own tables"):
        read_mapping({"record": {"url": url, "tables": tables}})
