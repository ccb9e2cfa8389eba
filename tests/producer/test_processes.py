"""Processes that send report themselves behind a COMMIT, about once a minute, and cost the sender nothing by it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

import outbox as package
from outbox import Outbox, Settings
from outbox.producer import process
from outbox.producer.process import ProcessReport
from outbox.prune.prune_pass import prune_producer_once
from outbox.telemetry.events import AfterCommitFailed
from outbox.telemetry.hooks import TelemetryEvent
from tests.kit import Tables
from tests.producer.bank import halves
from tests.producer.carriers import CARRIERS
from tests.producer.carriers import send as send_by
from tests.producer.proxy import Proxy

ROWS = "SELECT id, name, producer_group, version FROM outbox.producer_process ORDER BY producer_group, name"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each report is due as soon as there is a COMMIT for it."""
    monkeypatch.setattr(process, "REPORT_EVERY", 0.0)
    yield


def send(engine: Engine, outbox: Outbox) -> None:
    """Send a message in a transaction of its own."""
    with Session(engine) as session, session.begin():
        session.execute(text("SELECT 'the business'"))
        outbox.send(session, "t", {"number": 1})


def test_a_process_that_sends_is_seen(engine: Engine) -> None:
    """With its host, process id, group and version; again and again in one row for each group."""
    for group in ("a", "b", "a"):
        outbox = Outbox(engine, group=group, settings=Settings())
        for _ in range(3):
            send(engine, outbox)
    name = f"{socket.gethostname()}:{os.getpid()}"
    # Two Outboxes of one group are two producers, which a process has once.
    found = {row[1:] for row in Tables(engine).rows(ROWS)}
    assert found == {(name, group, package.__version__) for group in ("a", "b")}
    assert Tables(engine).value("SELECT bool_and(seen_at > started_at) FROM outbox.producer_process")
    row = outbox.operator.producers()[0]
    assert (row.name, row.producer_group, row.active, row.instances) == (name, "a", True, 2)


def finish() -> None:
    """Wait until no thread writes a report any more."""
    for thread in threading.enumerate():
        if thread.name == process.THREAD:
            thread.join()


def reported(engine: Engine) -> list[Any]:
    """Return the rows, once no thread writes one any more."""
    finish()
    return Tables(engine).rows(ROWS)


@pytest.mark.parametrize("name", CARRIERS)
async def test_by_every_carrier(name: str, url: str, engine: Engine) -> None:
    """With the COMMIT; or by a connection of its own, which no business transaction waits for."""
    outbox = Outbox(engine, settings=Settings())
    async with CARRIERS[name](url, False) as opened:
        await opened.write(1)
        await send_by(outbox, opened, 1)
        await opened.commit()
    assert len(reported(engine)) == 1


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_an_outbox_of_an_async_engine(driver: str, url: str, engine: Engine) -> None:
    """Its engine belongs to an event loop, and the report goes elsewhere; so does the question which server it is."""
    bound = create_async_engine(url.replace("postgresql+psycopg", f"postgresql+{driver}"))
    outbox = Outbox(bound, settings=Settings())
    outbox._producer._own._known.clear()
    async with CARRIERS["asyncpg"](url, False) as opened:
        await opened.write(1)
        await send_by(outbox, opened, 1)
        await opened.commit()
    await bound.dispose()
    assert len(reported(engine)) == 1


async def test_by_another_driver_what_rolls_back_reports_nothing(url: str, engine: Engine) -> None:
    """SQLAlchemy tells of the COMMIT, whatever the driver."""
    outbox = Outbox(engine, settings=Settings())
    async with CARRIERS["Session on psycopg2"](url, False) as opened:
        await send_by(outbox, opened, 1)
        await opened.rollback()
    assert reported(engine) == []


def test_by_another_driver_where_it_cannot_be_written(url: str, engine: Engine, heard: list[TelemetryEvent]) -> None:
    """The message is out, and the failure is told to hooks alone."""
    tables = Tables(engine)
    tables.run("ALTER TABLE outbox.producer_process RENAME TO producer_process_away")
    try:
        outbox = Outbox(engine, settings=Settings())

        async def act() -> None:
            async with CARRIERS["psycopg2"](url, False) as opened:
                await send_by(outbox, opened, 1)
                await opened.commit()

        asyncio.run(act())
    finally:
        finish()  # or it would be written after all
        tables.run("ALTER TABLE outbox.producer_process_away RENAME TO producer_process")
    assert len(halves(engine)) == 1
    assert [type(event) for event in heard] == [AfterCommitFailed]


def test_not_before_its_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is gone within a minute isn't seen; nor does one report with every message."""
    monkeypatch.setattr(process, "REPORT_EVERY", 3600.0)
    outbox = Outbox(engine, settings=Settings())
    send(engine, outbox)
    assert Tables(engine).rows(ROWS) == []
    outbox._producer._report.due_at = 0.0
    send(engine, outbox)
    sql = "SELECT xmin::text, seen_at FROM outbox.producer_process"
    before = Tables(engine).rows(sql)
    send(engine, outbox)
    assert Tables(engine).rows(sql) == before != []


def test_what_rolls_back_reports_nothing(engine: Engine) -> None:
    """The report is no part of the business transaction, and comes with its COMMIT alone."""
    outbox = Outbox(engine, settings=Settings())
    with Session(engine) as session:
        outbox.send(session, "t", {})
        session.rollback()
    assert Tables(engine).rows(ROWS) == []


def test_no_round_trip_more(proxy: Proxy, through: Engine) -> None:
    """The report goes with the COMMIT."""
    outbox = Outbox(through, settings=Settings(listen=False))
    for _ in range(8):  # the driver prepares what it has seen often
        send(through, outbox)

    def trips() -> int:
        before = proxy.round_trips
        send(through, outbox)
        return proxy.round_trips - before

    with_report = trips()
    outbox._producer._report.due_at = float("inf")
    assert with_report == trips()


def test_where_it_cannot_be_written_messages_go_out(engine: Engine) -> None:
    """Before the upgrade that makes its table, and for a role that may not write there."""
    tables = Tables(engine)
    tables.run("ALTER TABLE outbox.producer_process RENAME TO producer_process_away")
    try:
        outbox = Outbox(engine, settings=Settings())
        for _ in range(8):
            send(engine, outbox)
    finally:
        tables.run("ALTER TABLE outbox.producer_process_away RENAME TO producer_process")
    assert len(halves(engine)) == 8


def test_its_lock_keeps_no_send(engine: Engine) -> None:
    """Whoever holds the row of a process keeps its next report, and no message: that is committed by then."""
    outbox = Outbox(engine, settings=Settings())
    send(engine, outbox)
    lossy = create_engine(engine.url, connect_args={"options": "-c lock_timeout=100"})
    with engine.begin() as connection:
        connection.execute(text("SELECT FROM outbox.producer_process FOR UPDATE"))
        with Session(lossy) as session, session.begin():
            outbox.send(session, "t", {})
    lossy.dispose()
    assert len(halves(engine)) == 2


def test_a_forked_process_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its parent's memory, and an id and a name of its own."""
    report = ProcessReport("outbox", "g")
    first, again = report.statement().values, report.statement().values
    monkeypatch.setattr(os, "getpid", lambda: 7)
    forked = report.statement().values
    assert isinstance(first, dict)
    assert isinstance(again, dict)
    assert isinstance(forked, dict)
    assert (first["id"] == again["id"], first["id"] == forked["id"]) == (True, False)
    assert forked["name"].endswith(":7")


def test_instances_of_a_group(engine: Engine) -> None:
    """Two processes of a group are two instances, one that is silent none; a day later it is forgotten."""
    script = (
        "import sys; from sqlalchemy import create_engine; from outbox import Outbox, Settings;"
        "from outbox.producer import process; process.REPORT_EVERY = 0.0; engine = create_engine(sys.argv[1]);"
        "outbox = Outbox(engine, group='shop', settings=Settings());"
        "c = engine.connect(); outbox.send(c, 't', {}); c.commit()"
    )
    for _ in range(2):
        url = engine.url.render_as_string(hide_password=False)
        subprocess.run([sys.executable, "-c", script, url], check=True, timeout=60)
    operator = Outbox(engine, settings=Settings()).operator
    assert [(row.producer_group, row.instances) for row in operator.producers()] == [("shop", 2)] * 2
    silent = operator.producers()[0].id
    age = "UPDATE outbox.producer_process SET seen_at = seen_at - CAST(:age AS interval) WHERE id = :id"
    Tables(engine).run(age, age="10 minutes", id=silent)
    assert [(row.active, row.instances) for row in operator.producers()] == [(True, 1), (False, 1)]
    Tables(engine).run(age, age="1 day", id=silent)
    with engine.connect() as connection:
        prune_producer_once(connection, Settings())
    assert [row.id for row in operator.producers()] != [silent]
    assert len(operator.producers()) == 1
