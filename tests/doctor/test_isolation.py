"""What can't be seen, takes too long or breaks stops nothing else; settings that are refused are a finding."""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Settings
from outbox.embedded import Server
from outbox.errors import InvalidSettings
from outbox.operator.health.examination import Examination
from outbox.operator.health.examine import HealthReport, Inspected, Inspection
from outbox.operator.health.examine import examine as examine_database
from outbox.operator.health.rules import Diagnosis, Severity, Thresholds
from tests.doctor.support import codes, examine, inspected, sql, the
from tests.kit import wait_until

module = importlib.import_module("outbox.operator.health.examine")


def with_inspection(monkeypatch: pytest.MonkeyPatch, inspection: Inspection) -> None:
    """Have the doctor begin with this inspection."""
    monkeypatch.setattr(module, "INSPECTIONS", (inspection, *module.INSPECTIONS))


def test_inspection_that_is_broken(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect in one inspection is named as one, what it had found before stays, and the others go on."""

    def broken(_: Examination) -> Iterator[Diagnosis]:
        yield Diagnosis("found.before", Severity.NOTE, "It was found.", "mend it")
        raise ZeroDivisionError("oops")

    with_inspection(monkeypatch, Inspection("broken", broken))
    report = examine(engine)
    assert "found.before" in codes(report)
    assert inspected(report, "broken").outcome is Inspected.FINDING
    assert "this inspection failed, which is a defect: ZeroDivisionError: oops" in str(inspected(report, "broken").why)
    assert inspected(report, "checks").outcome is Inspected.OK


def test_connection_that_is_cut(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the server ends the doctor's session, it goes on with another one."""

    def cut(examination: Examination) -> Iterator[Diagnosis]:
        from outbox.database.execute import Statement

        ((row,),) = examination.read(Statement("SELECT pg_backend_pid()"))
        sql(engine, "SELECT pg_terminate_backend(:pid, 5000)", pid=row[0])
        examination.read(Statement("SELECT 1"))
        yield from ()

    with_inspection(monkeypatch, Inspection("cut", cut))
    report = examine(engine)
    assert "connection" in str(inspected(report, "cut").why)
    assert inspected(report, "server version").outcome is Inspected.OK
    assert inspected(report, "checks").outcome is Inspected.OK


def test_server_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no server any more there is nothing to report, and the error says so."""
    with Server(durable=False) as server:

        def stop(_: Examination) -> Iterator[Diagnosis]:
            server.kill()
            yield from ()

        with_inspection(monkeypatch, Inspection("stop", stop))
        with pytest.raises(OperationalError):
            examine(server.url())


def test_table_that_is_locked(engine: Engine) -> None:
    """Where a lock keeps the doctor from a table it gives up soon, and looks at the others."""
    with engine.connect() as holder:
        sql(holder, "LOCK TABLE outbox.half_check IN ACCESS EXCLUSIVE MODE")
        report = examine(engine, thresholds=Thresholds(statement=0.2))
        holder.rollback()
    assert codes(report) == []
    for name in ("tables", "checks", "undecided halves", "parked halves"):
        assert inspected(report, name).why == "it took longer than 0.2 s"
    assert inspected(report, "dispatch").outcome is Inspected.OK


def test_doctor_blocks_nothing(engine: Engine) -> None:
    """While it inspects, the doctor holds no lock that a producer, a worker or a migration would wait for long.

    (To read where a sequence is, PostgreSQL itself locks the sequence as who takes a number does.)
    """
    modes: set[str] = set()
    done = threading.Event()

    def watch() -> None:
        with engine.connect() as connection:
            while not done.is_set():
                rows = sql(connection, "SELECT array_agg(DISTINCT mode) FROM pg_locks WHERE pid <> pg_backend_pid() "
                                       "AND relation IN (SELECT oid FROM pg_class WHERE relnamespace = "
                                       "'outbox'::regnamespace AND relkind <> 'S')")  # fmt: skip
                modes.update(rows or [])

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        wait_until(lambda: bool(examine(engine).inspections) and bool(modes), "the doctor was at work")
    finally:
        done.set()
        watching.join()
    assert modes == {"AccessShareLock"}


def test_refused_settings(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of the environment that contradict each other are a finding; the rest is inspected with the defaults."""
    monkeypatch.setenv("OUTBOX_INBOX_RETENTION", "10")
    report = examine_database(engine)
    assert codes(report) == ["settings.refused"]
    assert "inbox_retention = 10 s is shorter than retention" in the(report, "settings.refused").sentence
    assert inspected(report, "checks").outcome is Inspected.OK
    monkeypatch.delenv("OUTBOX_INBOX_RETENTION")
    assert codes(examine_database(engine)) == []


def test_schema_that_is_none(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the schema's name is what is refused, there is nothing to inspect."""
    monkeypatch.setenv("OUTBOX_SCHEMA", "no; schema")
    with pytest.raises(InvalidSettings, match="must match"):
        examine_database(engine)


def test_retries_that_outlast_the_inbox(engine: Engine) -> None:
    """A consumer's own retries may contradict the retention, which the settings by themselves can't tell."""
    outbox = Outbox(engine, settings=Settings())

    @outbox.consumer("orders", group="till")
    def fine(message: Message, session: Session) -> None:
        pass

    @outbox.consumer("orders", group="slow", retry_delays=[86_400] * 10)
    def slow(message: Message, session: Session) -> None:
        pass

    report = examine(engine, outbox.settings, outbox.checkers, subscriptions=outbox.subscriptions.values())
    assert codes(report) == ["settings.retries"]
    finding = the(report, "settings.retries")
    assert finding.details["group"] == "slow"
    mended = Settings(inbox_retention=finding.details["needed"])
    assert codes(examine(engine, mended, subscriptions=outbox.subscriptions.values())) == []


@pytest.mark.parametrize("kind", ["engine", "URL", "text", "postgresql://"])
def test_what_may_be_examined(engine: Engine, kind: str) -> None:
    """An engine, a URL or its text; the report is the same."""
    text = engine.url.render_as_string(hide_password=False)
    binds = {
        "engine": engine, "URL": engine.url, "text": text,
        "postgresql://": text.replace("postgresql+psycopg", "postgresql"),
    }  # fmt: skip
    report = examine(binds[kind])  # type: ignore[arg-type]
    assert codes(report) == []
    assert report.database.endswith(f"/{engine.url.database}")


def test_async_engine(engine: Engine) -> None:
    """Of an AsyncEngine the URL is taken."""

    async def ask() -> HealthReport:
        async_engine = create_async_engine(engine.url)
        report = await asyncio.to_thread(examine_database, async_engine, Settings())
        await async_engine.dispose()
        return report

    assert codes(asyncio.run(ask())) == []


def test_engine_that_commits_by_itself(engine: Engine) -> None:
    """An application's engine may be in AUTOCOMMIT mode, or isolate its transactions more."""
    for level in ("AUTOCOMMIT", "SERIALIZABLE"):
        other = create_engine(engine.url, isolation_level=level)
        assert codes(examine(other)) == []
        other.dispose()
