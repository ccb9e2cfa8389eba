"""Tables that aren't there, are other than expected, or can't be read; invalid indexes; autovacuum that is off.

What the doctor gives as the mend is run, and mends it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Engine, create_engine

from outbox import Settings
from outbox.database import migration
from outbox.database.migration import chain
from outbox.embedded import Server, ServerLike
from outbox.operator.health.examine import Inspected
from tests.doctor.support import READ_ALL, codes, examine, inspected, mend_by_command, mend_by_sql, raw, role, sql, the
from tests.kit import wait_until
from tests.kit.revisions import next_release


@pytest.fixture
def empty_url(server: ServerLike) -> Iterator[str]:
    """A database without tables of ours."""
    server.create_database("doctor_empty")
    yield server.url("doctor_empty")
    server.drop_database("doctor_empty")


def test_not_migrated(empty_url: str) -> None:
    """No tables: the command that installs them is given, and works; nothing that needs them is inspected."""
    report = examine(empty_url)
    assert codes(report) == ["tables.missing"]
    for name in ("tables", "checks", "dispatch", "parked messages", "consuming groups"):
        assert inspected(report, name).outcome is Inspected.SKIPPED
    assert inspected(report, "migrations").outcome is Inspected.FINDING
    assert mend_by_command(empty_url, the(report, "tables.missing").mend.splitlines()[0]).code == 0
    assert codes(examine(empty_url)) == []


def test_in_another_schema(empty_url: str) -> None:
    """The command names the schema that the settings do."""
    settings = Settings(schema="mail")
    finding = the(examine(empty_url, settings), "tables.missing")
    assert "'mail'" in finding.sentence
    assert mend_by_command(empty_url, finding.mend.splitlines()[0]).code == 0
    assert codes(examine(empty_url, settings)) == []
    assert codes(examine(empty_url)) == ["tables.missing"]


@pytest.fixture
def installing(tmp_path: Path) -> Iterator[Callable[[], list[str]]]:
    """A function that installs a later release of this code, with one more revision of the producer's tables."""
    with next_release(tmp_path / "migrations", {"producer": "UPGRADE = ()"}) as install:
        yield install


def test_older(empty_url: str, installing: Callable[[], list[str]]) -> None:
    """Tables of an earlier version: the command upgrades them, and meanwhile nothing reads them."""
    migration.upgrade(empty_url)
    earlier = chain.head("producer")
    installing()
    report = examine(empty_url)
    assert codes(report) == ["tables.older"]
    finding = the(report, "tables.older")
    assert finding.details["database"] == earlier
    assert inspected(report, "checks").why == "the producer's tables are of another version than this code"
    assert inspected(report, "retries").outcome is Inspected.OK
    assert mend_by_command(empty_url, finding.mend).code == 0
    assert codes(examine(empty_url)) == []


def test_newer(engine: Engine) -> None:
    """Tables of a later version: this code is what is old."""
    sql(engine, "UPDATE outbox.outbox_version SET version_num = 'producer_0099' WHERE version_num LIKE 'producer%'")
    report = examine(engine)
    assert codes(report) == ["tables.newer"]
    assert the(report, "tables.newer").mend == "pip install --upgrade outbox-postgres"
    assert inspected(report, "dispatch").outcome is Inspected.SKIPPED


def test_partly(engine: Engine) -> None:
    """Only what both sides share is installed, and neither side."""
    sql(engine, "DELETE FROM outbox.outbox_version")
    sql(engine, "INSERT INTO outbox.outbox_version VALUES ('common_0001')")
    assert codes(examine(engine)) == ["tables.partly"]


def test_differences(engine: Engine) -> None:
    """What is missing or other than expected is named; a table that is gone keeps no other from being inspected."""
    sql(engine, "DROP TABLE outbox.scheduled_message")
    sql(engine, "DROP INDEX outbox.ix_consumer_message_parked")
    sql(engine, "ALTER TABLE outbox.topic ALTER COLUMN queues SET DEFAULT 8")
    sql(engine, "ALTER TABLE outbox.half_message ADD COLUMN colour text")
    report = examine(engine)
    assert codes(report) == ["tables.differ"]
    finding = the(report, "tables.differ")
    differences = "\n".join(finding.details["differences"])
    for what in ("scheduled_message", "ix_consumer_message_parked", "column queues of topic", "column colour"):
        assert what in differences
    assert "and 1 more" in finding.sentence
    assert "scheduled_message" in str(inspected(report, "scheduled messages").why)
    assert inspected(report, "parked messages").outcome is Inspected.OK
    assert mend_by_command(engine, finding.mend.splitlines()[0]).code == 6


def test_tuned_tables_are_no_difference(engine: Engine) -> None:
    """Storage parameters are for operators to set."""
    sql(engine, "ALTER TABLE outbox.half_check SET (autovacuum_vacuum_scale_factor = 0.01, fillfactor = 50)")
    assert codes(examine(engine)) == []


def test_temporary_tables_not_permitted(engine: Engine) -> None:
    """Without that privilege the comparison is skipped, and the GRANT that permits it is given."""
    sql(engine, f"REVOKE TEMPORARY ON DATABASE {engine.url.database} FROM PUBLIC")
    with role(engine, *READ_ALL) as url:
        report = examine(url)
        assert codes(report) == []
        why = str(inspected(report, "tables").why)
        grant = why.partition("; ")[2]
        assert grant == f"GRANT TEMPORARY ON DATABASE {engine.url.database} TO {url.username};"
        sql(engine, grant)
        assert inspected(examine(url), "tables").outcome is Inspected.OK


def test_schema_not_permitted(engine: Engine) -> None:
    """A role that can't even see the version gets the GRANT that it needs."""
    with role(engine) as url:
        report = examine(url)
        assert codes(report) == ["tables.unreadable"]
        assert inspected(report, "checks").why == "it is not known whether the producer's tables are here"
        for grant in the(report, "tables.unreadable").mend.splitlines():
            sql(engine, grant)
        assert codes(examine(url)) == []


def test_table_not_permitted(engine: Engine) -> None:
    """A table that the role may not read is named, and the others are inspected."""
    with role(engine, *READ_ALL, "REVOKE SELECT ON outbox.half_check FROM {role}") as url:
        report = examine(url)
        assert codes(report) == []
        for name in ("checks", "undecided halves", "parked halves"):
            assert inspected(report, name).outcome is Inspected.SKIPPED
            assert inspected(report, name).why == (
                f"the role '{url.username}' may not read it: permission denied for table half_check"
            )
        assert inspected(report, "dispatch").outcome is Inspected.OK


def test_invalid_index_of_ours(engine: Engine) -> None:
    """One that this code knows is built anew; it isn't reported as a difference as well."""
    sql(
        engine,
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'outbox.op_message_default_xid_idx'::regclass",
    )
    report = examine(engine)
    assert codes(report) == ["index.invalid"]
    finding = the(report, "index.invalid")
    assert finding.mend == "REINDEX INDEX CONCURRENTLY outbox.op_message_default_xid_idx;"
    mend_by_sql(engine, finding)
    assert codes(examine(engine)) == []


def test_invalid_index_of_the_application(engine: Engine) -> None:
    """One that CREATE INDEX CONCURRENTLY left behind when it failed is dropped."""
    sql(engine, "INSERT INTO outbox.topic (name, queues) VALUES ('orders', 8), ('bills', 8)")
    with closing(raw(engine.url, autocommit=True)) as connection, pytest.raises(psycopg.errors.UniqueViolation):
        connection.execute('CREATE UNIQUE INDEX CONCURRENTLY "by Queues" ON outbox.topic (queues)')
    report = examine(engine)
    assert codes(report) == ["index.invalid"]
    finding = the(report, "index.invalid")
    assert finding.mend == 'DROP INDEX CONCURRENTLY outbox."by Queues";'
    mend_by_sql(engine, finding)
    assert codes(examine(engine)) == []


def test_index_that_is_being_built(engine: Engine) -> None:
    """An index isn't valid while it is being built, and nothing is wrong with that."""

    def build() -> None:
        with closing(raw(engine.url, autocommit=True)) as connection:
            connection.execute("CREATE INDEX CONCURRENTLY half_message_key ON outbox.half_message_default (key)")

    with engine.connect() as writer:
        sql(writer, "INSERT INTO outbox.half_message (id, producer_group, topic, content_type, body) "
                    "VALUES (gen_random_uuid(), 'g', 't', 'text/plain', '')")  # fmt: skip
        building = threading.Thread(target=build)
        building.start()
        wait_until(
            lambda: sql(engine, "SELECT count(*) FROM pg_stat_progress_create_index WHERE lockers_total > 0"),
            "the index waits for the transaction that writes",
        )
        assert sql(engine, "SELECT count(*) FROM pg_index WHERE NOT indisvalid") == 1
        assert "index.invalid" not in codes(examine(engine))
        writer.rollback()
    building.join()


@pytest.mark.parametrize("option", ["autovacuum_enabled", "toast.autovacuum_enabled"])
@pytest.mark.parametrize("value", ["false", "off"])
def test_autovacuum_off_for_a_table(engine: Engine, option: str, value: str) -> None:
    """Autovacuum that was switched off for one of our tables is switched on again."""
    sql(engine, f"ALTER TABLE outbox.half_message_default SET ({option} = {value}, fillfactor = 90)")
    report = examine(engine)
    assert codes(report) == ["autovacuum.table"]
    assert the(report, "autovacuum.table").details["option"] == option
    mend_by_sql(engine, the(report, "autovacuum.table"))
    assert codes(examine(engine)) == []


def test_autovacuum_off_for_other_tables(engine: Engine) -> None:
    """Tables of the application are not inspected."""
    sql(engine, "CREATE TABLE half_message () WITH (autovacuum_enabled = off)")
    sql(engine, "CREATE TABLE outbox.mine () WITH (autovacuum_enabled = off)")
    assert codes(examine(engine)) == []


@pytest.mark.usefixtures("parameters_kept")
def test_autovacuum_off_for_all(odd: Server) -> None:
    """Autovacuum that is off, and the counters that it needs: the SQL switches them on."""
    engine = create_engine(odd.url("odd"))
    report = examine(engine)
    assert {"autovacuum.off", "autovacuum.track_counts"} <= set(codes(report))
    for code in ("autovacuum.off", "autovacuum.track_counts"):
        mend_by_sql(engine, the(report, code))
        wait_until(lambda code=code: code not in codes(examine(engine)), f"{code} is mended")  # type: ignore[misc]
    engine.dispose()


def test_sequences_behind_their_tables(engine: Engine) -> None:
    """Each sequence and identity column of ours is looked at; what the doctor says sets each of them right."""
    with engine.connect() as connection:
        named = set(connection.exec_driver_sql(_SEQUENCES).scalars())
    fill = dict(re.findall(r"(\w+)\.(\w+)", " ".join(named)))
    assert len(named) >= 7
    for table, column in fill.items():
        sql(engine, f"INSERT INTO outbox.{table} ({_FILLED[table][0]}) {_FILLED[table][1]}")
        sequence = "outbox.op_sequence" if table == "op_message" else f"outbox.{table}_{column}_seq"
        sql(engine, f"ALTER SEQUENCE {sequence} RESTART")
    report = examine(engine)
    behind = [finding for finding in report.findings if finding.code == "sequence.behind"]
    # Dispatch numbers its cursors by itself.
    assert {finding.details["column"] for finding in behind} == named - {"dispatch_cursor.id"}
    for finding in behind:
        mend_by_sql(engine, finding)
    assert "sequence.behind" not in codes(examine(engine))


#: The columns of ours that a sequence numbers, as the catalog knows them.
_SEQUENCES = """
SELECT DISTINCT coalesce(i.relname, c.relname) || '.' || a.attname
  FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
  LEFT JOIN pg_attrdef d ON (d.adrelid, d.adnum) = (c.oid, a.attnum)
  LEFT JOIN pg_inherits h ON h.inhrelid = c.oid LEFT JOIN pg_class i ON i.oid = h.inhparent
 WHERE c.relnamespace = 'outbox'::regnamespace AND (a.attidentity <> '' OR pg_get_expr(d.adbin, d.adrelid) ~ 'nextval')
"""
_FILLED = {
    "audit": ("actor, action, target", "VALUES ('a', 'b', 'c'), ('a', 'b', 'd')"),
    "silence": (
        "rule, begins_at, ends_at, author, reason",
        "SELECT 'half.old', now(), now() + interval '1 h', 'a', 'b' FROM generate_series(1, 2)",
    ),
    "check_history": ("half_id, asked, worker", "SELECT gen_random_uuid(), 'fence', 'w' FROM generate_series(1, 2)"),
    "topic_total": ("topic, checks", "VALUES ('t', 1), ('t', 2)"),
    "op_message": (
        "half_id, resolution, decided_by",
        "SELECT gen_random_uuid(), 'rollback', 'check' FROM generate_series(1, 2)",
    ),
    "intake_range": (
        "topic, source, published, queue, first, last",
        "SELECT 't', 's', 't', 0, n, n FROM generate_series(1, 2) n",
    ),
    "published": (
        "id, aggregatetype, type, payload, timestamp, content_type, headers, queue, position, send_number",
        "SELECT gen_random_uuid(), 't', 't', '', now(), '', '{}', 0, 1, 1 FROM generate_series(1, 2)",
    ),
    "dispatch_cursor": ("next_xid, in_flight, system_identifier", "VALUES ('1', '{}', 1), ('1', '{}', 1)"),
    "log_loss": (
        "consumer_group, topic, queue, position, agreed, message_ids",
        "VALUES ('g', 't', 0, 1, 0, '{}'), ('g', 't', 0, 2, 0, '{}')",
    ),
    "reconciliation_finding": ("run_id, kind", "SELECT gen_random_uuid(), 'missing' FROM generate_series(1, 2)"),
}
