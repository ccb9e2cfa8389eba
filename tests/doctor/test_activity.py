"""Transactions that stay open, and replication that nothing reads: what holds vacuum back."""

from __future__ import annotations

import dataclasses
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import psycopg
import pytest
from psycopg import pq
from sqlalchemy import Engine, create_engine

from outbox.embedded import Server
from outbox.operator.health.examine import Inspected
from outbox.operator.health.rules import Thresholds
from tests.doctor.support import READ_ALL, codes, examine, inspected, mend_by_sql, raw, role, sql, the
from tests.kit import wait_until

AT_ONCE = Thresholds(idle_transaction=0, running_transaction=0, prepared_transaction=0)


def test_idle_transaction(engine: Engine) -> None:
    """The oldest one is named by its pid and application, never by its query; the SQL ends it."""
    with closing(raw(engine.url, application_name="tea break")) as idle, closing(raw(engine.url)) as later:
        idle.execute("SELECT 'hunter2'")
        later.execute("SELECT 'hunter2'")
        report = examine(engine, thresholds=AT_ONCE)
        assert codes(report) == ["transaction.open"]
        finding = the(report, "transaction.open")
        assert finding.details["pid"] == idle.info.backend_pid
        assert (finding.details["state"], finding.details["count"]) == ("idle in transaction", 2)
        assert "application 'tea break'; 1 more" in finding.sentence
        assert "hunter2" not in repr(report)
        mend_by_sql(engine, finding)
        with pytest.raises(psycopg.errors.AdminShutdown):
            idle.execute("SELECT 1")
        assert the(examine(engine, thresholds=AT_ONCE), "transaction.open").details["pid"] == later.info.backend_pid


def test_young_transaction(engine: Engine) -> None:
    """A transaction is none of the doctor's business while it is young."""
    with closing(raw(engine.url)) as young:
        young.execute("SELECT 1")
        assert codes(examine(engine)) == []


def test_aborted_transaction(engine: Engine) -> None:
    """One that failed, and that was not rolled back, holds nothing any more."""
    with closing(raw(engine.url)) as failed:
        with pytest.raises(psycopg.errors.DivisionByZero):
            failed.execute("SELECT 1 / 0")
        assert sql(engine, "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction (aborted)'") == 1
        assert codes(examine(engine, thresholds=AT_ONCE)) == []


def test_running_transaction(engine: Engine) -> None:
    """One that works may take longer than one that idles."""
    with closing(raw(engine.url)) as holder, closing(raw(engine.url)) as working:
        holder.execute("SELECT pg_advisory_lock(1)")
        holder.commit()
        thread = threading.Thread(target=lambda: working.execute("SELECT pg_advisory_xact_lock(1)"))
        thread.start()
        wait_until(
            lambda: sql(engine, "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND pid = :pid",
                        pid=working.info.backend_pid),
            "it works",
        )  # fmt: skip
        assert codes(examine(engine, thresholds=Thresholds(idle_transaction=0))) == []
        report = examine(engine, thresholds=Thresholds(running_transaction=0))
        assert the(report, "transaction.open").details["state"] == "active"
        holder.execute("SELECT pg_advisory_unlock(1)")
        holder.commit()
        thread.join()


def test_transaction_in_another_database(new_database: Callable[[], str], engine: Engine) -> None:
    """What is open elsewhere holds nothing back here."""
    with closing(raw(new_database())) as other:
        other.execute("SELECT 1")
        assert codes(examine(engine, thresholds=AT_ONCE)) == []


def test_without_the_privilege(engine: Engine) -> None:
    """Sessions that are hidden are no crash and no clean bill: the GRANT that shows them is given, and works."""
    with role(engine, *READ_ALL) as url, closing(raw(engine.url)) as idle:
        idle.execute("SELECT 1")
        report = examine(url, thresholds=AT_ONCE)
        assert codes(report) == []
        seen = inspected(report, "open transactions")
        assert seen.outcome is Inspected.SKIPPED
        grant = str(seen.why).partition("; ")[2]
        assert grant == f"GRANT pg_monitor TO {url.username};"
        sql(engine, grant)
        assert the(examine(url, thresholds=AT_ONCE), "transaction.open").details["pid"] == idle.info.backend_pid


def test_own_transactions_are_seen_anyway(engine: Engine) -> None:
    """Without the privilege a role sees its own sessions; what else there is, the doctor says it can't see."""
    with role(engine, *READ_ALL) as url, closing(raw(url)) as idle:
        idle.execute("SELECT 1")
        report = examine(url, thresholds=AT_ONCE)
        assert the(report, "transaction.open").details["pid"] == idle.info.backend_pid
        seen = inspected(report, "open transactions")
        assert seen.outcome is Inspected.FINDING
        assert "pg_monitor" in str(seen.why)


def test_activity_is_not_tracked(engine: Engine) -> None:
    """A session that doesn't tell what it does can't be judged."""
    with closing(raw(engine.url, options="-c track_activities=off")) as quiet:
        quiet.execute("SELECT 1")
        report = examine(engine, thresholds=AT_ONCE)
        assert codes(report) == []
        assert "track_activities" in str(inspected(report, "open transactions").why)


def test_prepared_transaction(engine: Engine) -> None:
    """A forgotten two-phase transaction is named, with the SQL that ends it either way, whatever is in its name."""
    with closing(raw(engine.url)) as forgetful:
        forgetful.execute("CREATE TABLE half_done ()")
        forgetful.execute("PREPARE TRANSACTION 'it''s %s'")
        forgetful.commit()
    assert codes(examine(engine)) == []
    report = examine(engine, thresholds=AT_ONCE)
    assert codes(report) == ["transaction.prepared"]
    finding = the(report, "transaction.prepared")
    assert finding.details["gid"] == "it's %s"
    roll_back = finding.mend.splitlines()[1].partition(": ")[2]
    mend_by_sql(engine, dataclasses.replace(finding, mend=roll_back))
    assert codes(examine(engine, thresholds=AT_ONCE)) == []


# --- replication: on a server of its own, since slots belong to all databases ------------------------------


@contextmanager
def standby(url: str, xmin: int, slot: str | None = None) -> Iterator[None]:
    """Speak as a standby with hot_standby_feedback does: stream, and ask that rows since ``xmin`` be kept."""
    with closing(raw(url, replication="true", autocommit=True, application_name="reports")) as connection:
        lsn = raw_value(url, "SELECT pg_current_wal_flush_lsn()")
        libpq = connection.pgconn
        name = f"SLOT {slot} " if slot else ""
        libpq.send_query(f"START_REPLICATION {name}PHYSICAL {lsn}".encode())
        result = libpq.get_result()
        assert result is not None
        assert result.status == pq.ExecStatus.COPY_BOTH
        libpq.put_copy_data(b"h" + struct.pack("!qIIII", 0, xmin, 0, 0, 0))
        libpq.flush()
        yield


def raw_value(url: str, statement: str) -> object:
    """Return one value."""
    with closing(raw(url, autocommit=True)) as connection:
        row = connection.execute(statement.encode()).fetchone()
        assert row is not None
        return row[0]


@pytest.fixture
def streaming() -> Iterator[str]:
    """The URL of a database on a server without anybody else's slots."""
    with Server(durable=False, settings={"wal_level": "logical"}) as server:
        server.create_database("streaming")
        yield server.url("streaming")


def test_replication(streaming: str) -> None:
    """Slots that keep WAL or rows, and standbys that keep rows, are found; a slot that nothing reads is dropped."""
    engine = create_engine(streaming)
    strict = Thresholds(held_transactions=0, held_wal=0)
    none = "SELECT count(*) FROM pg_stat_replication WHERE backend_xmin IS NOT NULL"
    now = int(sql(engine, "SELECT (pg_current_xact_id()::text::int8 % 4294967296)::text"))
    sql(engine, "CREATE TABLE later ()")

    with standby(streaming, now):
        wait_until(lambda: sql(engine, none), "the standby's wish arrived")
        report = examine(engine, thresholds=strict)
        assert "standby.horizon" in codes(report)
        assert the(report, "standby.horizon").details["standby"] == "reports"
        assert "standby.horizon" not in codes(examine(engine))
    wait_until(lambda: not sql(engine, none), "the standby is gone")

    sql(engine, "SELECT pg_create_physical_replication_slot('lost', true)")
    with standby(streaming, now, "lost"):
        wait_until(lambda: sql(engine, "SELECT count(xmin) FROM pg_replication_slots"), "the slot keeps rows")
        assert the(examine(engine, thresholds=strict), "slot.horizon").details["active"] is True
    wait_until(lambda: not sql(engine, "SELECT bool_or(active) FROM pg_replication_slots"), "the slot is free")
    sql(engine, "CREATE TABLE more AS SELECT generate_series(1, 10000)")
    report = examine(engine, thresholds=strict)
    assert {"slot.horizon", "slot.wal"} <= set(codes(report))
    finding = the(report, "slot.wal")
    assert "'lost' (not in use)" in finding.sentence
    assert not {"slot.horizon", "slot.wal"} & set(codes(examine(engine)))

    drop = finding.mend.splitlines()[1].partition(": ")[2]
    sql(engine, drop)
    assert not {"slot.horizon", "slot.wal"} & set(codes(examine(engine, thresholds=strict)))
    engine.dispose()


def test_time_in_sentences(engine: Engine) -> None:
    """Ages are by the database's clock, so this host's doesn't matter."""
    with closing(raw(engine.url)) as idle:
        idle.execute("SELECT 1")
        report = examine(engine, thresholds=AT_ONCE, clock=lambda: time.time() + 86_400)
        assert the(report, "transaction.open").details["age"] < 3600
