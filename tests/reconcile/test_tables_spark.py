"""Sides that Spark alone can read: Parquet, Iceberg, MariaDB; beside each other, our tables, and foreign ones."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import text

from outbox.errors import InvalidSettings, ReconcileError
from outbox.reconcile.job import NO_DATABASE, EngineName, Job, Outcome, Part, Repair, Window
from outbox.reconcile.rows import to_findings
from outbox.reconcile.run import reconcile
from outbox.reconcile.tables import ForeignTable, InboxState, ProducerState
from tests.reconcile import mariadb as maria
from tests.reconcile.foreign import KNOWN, SENT, tell
from tests.reconcile.test_oracle import oracle
from tests.reconcile.test_tables_oracle import WORDS, agrees, believed, named
from tests.reconcile.town import HOUR, PAIR, Fate, Place, Progress, Town, fate, ids_at

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("spark")]

#: However long Spark takes to start, what is new stays so.
WINDOW = Window(grace=HOUR / 2)
#: A little of all.
FATES = [
    *[fate()] * 40,
    *(
        fate(state=state, status=status, age=age)
        for state in (None, *ProducerState)
        for status in InboxState
        for age in (0.0, HOUR)
    ),
    fate(same_body=False),
    fate(compensated=True),
    fate(sends=5, status=InboxState.NONE),
    *(fate(opinion=word, age=age) for word in (*WORDS, "no_opinion") for age in (0.0, HOUR)),
    fate(opinion="consumed", status=InboxState.PARKED),
]


def rows_of(town: Town, table: str) -> pa.Table:
    """Return the rows of a foreign table in PostgreSQL."""
    with town.consumer.begin() as connection:
        found = connection.execute(text(f"SELECT * FROM {table}")).mappings().all()
    return pa.Table.from_pylist([dict(each) for each in found])


def told(town: Town, ids: str, rows: list[Fate], part: Part = "producer") -> dict[str, Outcome]:
    """Plant messages, tell them in foreign tables, and return what is to be found."""
    town.plant(rows)
    tell(town, ids=ids)
    # Our own tables of a producer have no opinion.
    found = believed(town, PAIR) if part == "producer" else oracle(town, PAIR)
    return {named(id_, ids): outcome for id_, outcome in found.items()}


def parquet(folder: Path, part: Part, rows: pa.Table) -> ForeignTable:
    """Write the rows of a side as a Parquet data set of two files, and return it as a table."""
    of_part = folder / part
    of_part.mkdir()
    half = rows.num_rows // 2
    pq.write_table(rows.slice(0, half), of_part / "1.parquet")
    pq.write_table(rows.slice(half), of_part / "2.parquet")
    return in_spark(part, format="parquet", path=str(of_part))


def in_spark(part: Part, **source: Any) -> ForeignTable:
    """Return the table of a side as Spark reads it from a source."""
    declared = SENT if part == "producer" else KNOWN
    # Expressions of Spark's, where names have more in them than letters.
    columns = {name: f"`{own}`" for name, own in declared.columns.items() if name != "topic"}
    return ForeignTable(columns=columns, states=declared.states, opinions=declared.opinions, **source)


def iceberg(folder: Path, part: Part, rows: pa.Table) -> ForeignTable:
    """Write the rows of a side as an Iceberg table of several snapshots; return it as a table."""
    from pyiceberg.catalog import load_catalog

    properties = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/warehouse"}
    catalog = load_catalog("lake", **properties)
    catalog.create_namespace("legacy")
    table = catalog.create_table(f"legacy.{part}", schema=rows.schema)
    half = rows.num_rows // 2
    table.append(rows.slice(0, half))
    table.append(rows.slice(half))
    # Rows of a third snapshot, gone with the fourth.
    gone = pa.array([77], rows["tries"].type)
    table.append(rows.slice(0, 1).set_column(rows.column_names.index("tries"), "tries", gone))
    table.delete("tries = 77")
    return in_spark(part, format="pyiceberg", path=f"legacy.{part}", options=properties | {"catalog": "lake"})


def lake_job(**options: Any) -> Job:
    """Return a job of two sides that have no database."""
    return Job(NO_DATABASE, NO_DATABASE, (PAIR,), window=WINDOW, record=False, **options)


def beside(town: Town, **options: Any) -> Job:
    """Return a job of a town, without the databases of the sides that Spark reads."""
    job = town.job(**{"window": WINDOW, "record": False} | options)
    changes: dict[str, Any] = dict.fromkeys(job.by_spark, NO_DATABASE)
    return replace(job, **changes)


def test_parquet_and_iceberg_tell_what_our_tables_do(village: Town, tmp_path: Path) -> None:
    """Both sides in a lake, without any database: what is found is what one plain query finds in our tables."""
    expected = told(village, "string", FATES)
    sent, known = rows_of(village, "legacy_sent"), rows_of(village, "legacy_known")
    progress = Progress()
    job = lake_job(
        producer_table=parquet(tmp_path, "producer", sent), consumer_table=iceberg(tmp_path, "consumer", known)
    )
    result = reconcile(job, progress).pairs[0]
    agrees(result, expected)
    assert result.plan.engine == "spark"
    assert any("without a snapshot" in each for each in result.plan.why)
    assert {each.name for each in to_findings(result.findings)} <= set(sent["msg_id"].to_pylist()) | set(
        known['msg "id'].to_pylist()
    )


@pytest.mark.parametrize("part", ["producer", "consumer"])
def test_a_lake_beside_our_own_tables(village: Town, tmp_path: Path, part: Part) -> None:
    """The other side is read from our tables, in a snapshot, and the run is recorded where they are the consumer's."""
    expected = told(village, "text", FATES, part)
    table = "legacy_sent" if part == "producer" else "legacy_known"
    rows = rows_of(village, table)
    job = beside(village, **{f"{part}_table": iceberg(tmp_path, part, rows), "record": True})
    agrees(reconcile(job).pairs[0], expected)
    runs = village.rows("SELECT topic FROM outbox.reconciliation_run WHERE finished_at IS NOT NULL AND error IS NULL")
    assert runs == (["t"] if part == "producer" else [])


@pytest.mark.parametrize("consumer", ["ours", "foreign", "lake"])
def test_an_opinion_is_written_back_from_spark(village: Town, tmp_path: Path, consumer: str) -> None:
    """By the driver, as other repairs; whatever the consumer's side is read from."""
    told(village, "text", [fate(opinion="failed"), *[fate(opinion="consumed")] * 5])
    tables: dict[str, Any] = {"producer_table": SENT}
    if consumer == "foreign":
        tables["consumer_table"] = KNOWN
    if consumer == "lake":
        tables["consumer_table"] = parquet(tmp_path, "consumer", rows_of(village, "legacy_known"))
    policy = {Outcome.OPINION_DIFFERS: Repair.SYNC_OPINION}
    record = {"record": True, "record_in": village.accesses[1]}
    job = beside(village, **tables, **record, engine=EngineName.SPARK, policy=policy, apply=True)
    (repaired,) = reconcile(job).pairs[0].repairs
    assert (repaired.action, repaired.result) == ("sync_opinion", "done")
    assert village.rows("SELECT DISTINCT believed FROM legacy_sent") == ["done"]


def test_a_lake_beside_a_foreign_table_of_a_database(village: Town, tmp_path: Path) -> None:
    """A legacy outbox in PostgreSQL, and what the consumer wrote into a lake: ids of any text meet."""
    expected = told(village, "string", FATES)
    known = parquet(tmp_path, "consumer", rows_of(village, "legacy_known"))
    job = beside(village, producer_table=SENT, consumer_table=known)
    agrees(reconcile(job).pairs[0], expected)


def test_what_heals_between_two_looks_is_no_difference(village: Town, tmp_path: Path) -> None:
    """A source without a snapshot is read again: what has come into it meanwhile was on its way."""
    village.plant([fate()] * 3)
    tell(village, ids="string")
    sent, known = rows_of(village, "legacy_sent"), rows_of(village, "legacy_known")
    table = parquet(tmp_path, "consumer", known.slice(0, 2))

    def arrive(title: str) -> None:
        if "second look" in title:
            pq.write_table(known.slice(2), tmp_path / "consumer" / "3.parquet")

    job = lake_job(producer_table=parquet(tmp_path, "producer", sent), consumer_table=table)
    result = reconcile(job, Progress(arrive)).pairs[0]
    assert (result.in_sync, result.healed, result.counts[Outcome.CONSUMED]) == (True, 1, 3)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"columns": {"id": "msg_id", "at": "nowhere"}, "states": {}}, InvalidSettings, "nowhere"),
        (
            {"columns": {"id": "msg_id", "at": "msg_id"}, "states": {}},
            InvalidSettings,
            "columns.at is string, not a timestamp",
        ),
        ({"path": "/nowhere/at/all"}, InvalidSettings, "/nowhere/at/all"),
        ({"states": {"5": "dispatched"}}, ReconcileError, "state = 0 of the producer's parquet .* must be one of: 5"),
        (
            {"format": "jdbc", "path": None, "options": {"url": "jdbc:mariadb://h/d", "dbtable": "t"}},
            InvalidSettings,
            "write jdbc:mysql",
        ),
        ({"options_env": {"mergeSchema": "OUTBOX_NOT_SET"}}, InvalidSettings, "OUTBOX_NOT_SET isn't set"),
    ],
)
def test_what_cant_be_read_is_named(
    village: Town, tmp_path: Path, changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    """The side, the source, and what is wrong with it, in one line."""
    village.plant([fate(), fate(state=ProducerState.UNDECIDED, status=InboxState.NONE)])
    tell(village, ids="string")
    table = parquet(tmp_path, "producer", rows_of(village, "legacy_sent"))
    job = beside(village, producer_table=replace(table, **{"opinions": {}} | changes))
    with pytest.raises(error, match=said) as caught:
        reconcile(job)
    assert "\n" not in str(caught.value)


def test_an_id_that_is_twice_in_a_lake(village: Town, tmp_path: Path) -> None:
    """It is named: which of the rows counts can't be known."""
    village.plant([fate()])
    tell(village, ids="string")
    rows = rows_of(village, "legacy_sent")
    table = parquet(tmp_path, "producer", pa.concat_tables([rows, rows]))
    job = beside(village, producer_table=table)
    with pytest.raises(ReconcileError, match=f"id {rows['msg_id'][0]} is twice in the producer's table"):
        reconcile(job)


def test_a_legacy_outbox_in_mariadb(village: Town, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The producer of a service on MariaDB, its consumer one of ours: by JDBC, the password from the environment."""
    ids = village.plant([fate(), fate(), fate(status=InboxState.NONE), fate(state=None), fate(same_body=False)])
    states = ["SENT", "SENT", "SENT", None, "SENT"]
    moment = f"{dt.datetime.now(dt.UTC) - dt.timedelta(hours=1):%Y-%m-%d %H:%M:%S}"
    with maria.mariadb(
        tmp_path,
        "CREATE TABLE outbox (id binary(16), topic varchar(40), state varchar(20), tries int, made datetime)",
        *(
            f"INSERT INTO outbox VALUES (x'{id_.hex}', 't', '{state}', 1, '{moment}')"
            for id_, state in zip(ids, states, strict=True)
            if state
        ),
        f"INSERT INTO outbox VALUES (x'{ids_at(HOUR)[0].hex}', 'another topic', 'SENT', 1, '{moment}')",
    ) as server:
        monkeypatch.setenv("LEGACY_PASSWORD", maria.PASSWORD)
        table = ForeignTable(
            format="jdbc",
            options={"url": server.url, "user": "reader", "dbtable": "outbox", "driver": "org.mariadb.jdbc.Driver"},
            options_env={"password": "LEGACY_PASSWORD"},
            columns={"id": "id", "at": "made", "state": "state", "sends": "tries", "topic": "topic"},
            states={"SENT": "dispatched", "NEW": "undecided"},
        )
        job = beside(village, producer_table=table)
        result = reconcile(job).pairs[0]
        found = {each.id: each.outcome for each in to_findings(result.findings)}
        assert found == {ids[2]: Outcome.MISSING, ids[3]: Outcome.PHANTOM}
        assert result.counts[Outcome.CONSUMED] == 3
        monkeypatch.setenv("LEGACY_PASSWORD", "wrong-pa55word")
        with pytest.raises(ReconcileError, match="Access denied for user 'reader'") as caught:
            reconcile(job)
    assert maria.PASSWORD not in str(caught.value)
    assert "wrong-pa55word" not in str(caught.value)


def test_places_stay_out_of_it(village: Town) -> None:
    """The group's offset is of our log: a foreign producer without positions has nothing beyond it."""
    village.plant([fate(status=InboxState.NONE, place=Place.AHEAD)])
    tell(village)
    columns = {name: own for name, own in SENT.columns.items() if name not in {"position", "queue"}}
    job = beside(village, producer_table=replace(SENT, columns=columns))
    assert reconcile(job).pairs[0].differences == {Outcome.MISSING: 1}
