"""A database in which all is well, idle and at work."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from outbox import INJECTED, Message, Orphan, Outbox, Resolution, Settings
from outbox.database import migration
from outbox.embedded import ServerLike
from outbox.operator.health.examine import INSPECTIONS, Inspected
from outbox.worker import Worker
from tests.cli.conftest import run_cli
from tests.doctor.support import examine, inspected, sql
from tests.kit import wait_until


def test_empty_database(durable_url: str) -> None:
    """Nothing is found where nothing is yet; what needs an application is skipped with the reason."""
    report = examine(durable_url)
    assert report.findings == ()
    assert report.healthy
    assert [each.name for each in report.inspections if each.outcome is not Inspected.OK] == ["retention of consumers"]
    assert "application" in str(inspected(report, "retention of consumers").why)


def test_at_work(durable_url: str) -> None:
    """Nothing is found, and everything is seen, while a worker dispatches, checks, consumes and prunes."""
    engine = create_engine(durable_url)
    outbox = Outbox(engine, settings=Settings(check_interval=0.1))

    @outbox.consumer("orders", group="till")
    @outbox.consumer("payments", group="till")
    @outbox.consumer("stock", group="till")
    def handle(message: Message, session: Session) -> None:
        pass

    @outbox.checker("payments")
    def check(orphan: Orphan) -> Resolution:
        return Resolution.COMMIT

    @outbox.two_phase(topic="stock")
    def take(amount: int, session: Session = INJECTED) -> None:
        pass

    with engine.begin() as connection:
        for number in range(50):
            outbox.send(connection, "orders", {"n": number}, key=str(number))
        outbox.send(connection, "orders", {}, delay=3600)
        outbox.prepare(connection, "payments", {}, immunity=0)
        outbox.prepare(connection, "payments", {}, immunity=3600)
    with Worker(outbox):
        take(1)
        wait_until(
            lambda: (
                sql(engine, "SELECT count(*) FROM outbox.consumer_message") == 52
                and sql(engine, "SELECT count(*) FROM outbox.message") == 52
            ),
            "everything was consumed, checked and dispatched",
        )
        report = examine(
            engine, outbox.settings, outbox.checkers, subscriptions=outbox.subscriptions.values(), app="shop:outbox"
        )
    assert report.findings == ()
    assert {each.outcome for each in report.inspections} == {Inspected.OK}
    engine.dispose()


@pytest.mark.parametrize("part", migration.PARTS)
def test_one_side_alone(durable: ServerLike, part: str) -> None:
    """Where only one side's tables are, that side is inspected, and the other isn't missed."""
    durable.create_database("alone")
    url = durable.url("alone")
    try:
        migration.upgrade(url, [part])
        report = examine(url, subscriptions=())
        assert report.findings == ()
        other = "consumer" if part == "producer" else "producer"
        assert inspected(report, "checks").outcome == (Inspected.OK if part == "producer" else Inspected.SKIPPED)
        assert inspected(report, "retries").outcome == (Inspected.OK if part == "consumer" else Inspected.SKIPPED)
        assert inspected(report, "consuming groups").why == f"the {other}'s tables are not in this database"
        assert inspected(report, "tables").outcome is Inspected.OK
    finally:
        durable.drop_database("alone")


def test_by_command(durable_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command leaves with 0, says what it inspected, and writes nothing to stderr."""
    monkeypatch.setenv("OUTBOX_DATABASE_URL", durable_url)
    monkeypatch.delenv("OUTBOX_APP", raising=False)
    result = run_cli("doctor")
    assert (result.code, result.err) == (0, "")
    done_in = f"no problems, no notes; {len(INSPECTIONS) - 1} of {len(INSPECTIONS)} inspections done in 127.0.0.1:"
    assert result.out.splitlines()[-1].startswith(done_in)


def test_doctor_only_reads(durable_url: str) -> None:
    """Nothing is written, no transaction or prepared statement is left behind, and no temporary table stays."""
    engine = create_engine(durable_url)
    left = """SELECT ARRAY[(SELECT sum(n_tup_ins + n_tup_upd + n_tup_del) FROM pg_stat_user_tables),
                           (SELECT count(*) FROM pg_class WHERE relpersistence = 't'),
                           (SELECT count(*) FROM pg_prepared_statements),
                           (SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
                               AND pid <> pg_backend_pid())]"""
    engine = create_engine(durable_url, pool_size=1, max_overflow=0)
    before = sql(engine, left)
    examine(engine)
    wait_until(lambda: sql(engine, left) == before, "nothing is left of the examination")
    engine.dispose()
