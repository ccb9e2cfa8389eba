"""Who works here and what it runs on, as the console shows it."""

from __future__ import annotations

from functools import partial
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError

from outbox import Outbox, Settings, __version__
from outbox.consumer.meter import BOUNDS
from outbox.operator.databases import Database, Databases
from outbox.operator.groups import Groups
from outbox.operator.health.overview import HealthViews
from outbox.operator.health.subject import Subject, address
from tests.operator.health import consume, dispatch, handler, hold_back, open_databases, report, send, sql


def test_workers_and_what_they_have(engine: Engine) -> None:
    """Living workers come first; a handler that all have the same way is one row, one that differs another."""
    mail = handler("consumer", "paid", "mail", batch=1)
    report(engine, number=1, handlers=[mail, handler("compensation", "paid")])
    report(engine, number=2, handlers=[mail])
    report(engine, number=3, handlers=[handler("consumer", "paid", "mail", batch=100)])
    report(engine, number=4, handlers=[handler("checker", "order")])
    sql(engine, "UPDATE outbox.worker SET seen_at = seen_at - interval '1 minute' WHERE id = :id", id=UUID(int=4))
    databases = open_databases(bank=engine)
    assert [(row.name, row.alive, row.database) for row in HealthViews(databases).workers()] == [
        ("host:1", True, "bank"), ("host:2", True, "bank"), ("host:3", True, "bank"), ("host:4", False, "bank"),
    ]  # fmt: skip
    assert [
        (row.kind, row.topic, row.group, row.options, row.workers) for row in HealthViews(databases).handlers()
    ] == [
        ("compensation", "paid", None, {}, ["host:1"]),
        ("consumer", "paid", "mail", {"batch": 1}, ["host:1", "host:2"]),
        ("consumer", "paid", "mail", {"batch": 100}, ["host:3"]),
    ]


def worked(seconds: float, done: int, calls: dict[str, int], **more: Any) -> dict[str, Any]:
    """Return what a worker reports of a handler of group mail."""
    least = {"failed": 0, "in_flight": 0, "looked": None, "lag": None, "waiting_since": None}
    numbers = {"topic": "paid", "group": "mail", "seconds": seconds, "done": done, "calls": calls, **least, **more}
    return {"handler": numbers}


def test_what_handlers_do(engine: Engine) -> None:
    """Numbers of all living workers are added up; the lag is the one seen last, and of the dead none counts."""
    mail, since = handler("consumer", "paid", "mail"), "2026-01-01T00:00:00+00:00"
    tell = partial(report, engine, ["consume paid of mail"], [mail])
    tell(number=1, health=worked(300.0, 600, {"10": 95, "40": 5}, failed=2, looked=9.0, lag=9, waiting_since=since))
    tell(
        number=2,
        health=worked(100.0, 100, {"10": 95, "40": 5}, failed=1, in_flight=3, looked=1.0, lag=7, waiting_since=since),
    )
    tell(number=3, health=worked(300.0, 9000, {"70": 900}, looked=0.0, lag=0))
    tell(number=4, health={})
    # Its report is the older one by a second, and what it saw is the newer by seven.
    sql(engine, "UPDATE outbox.worker SET seen_at = seen_at - interval '1 second' WHERE id = :id", id=UUID(int=2))
    sql(engine, "UPDATE outbox.worker SET seen_at = seen_at - interval '1 minute' WHERE id = :id", id=UUID(int=3))
    databases = open_databases(bank=engine)
    (row,) = HealthViews(databases).handlers()
    assert row.workers == ["host:1", "host:2", "host:4"]
    found = row.numbers
    assert found is not None
    assert (found.seconds, found.rate, found.failures, found.in_flight, found.lag) == (300.0, 3.0, 3, 3, 7)
    assert found.p50 is not None
    assert found.p95 is not None
    assert BOUNDS[9] < found.p50 < found.p95 <= BOUNDS[10]
    with engine.connect() as connection:
        age = text("SELECT extract(epoch FROM clock_timestamp() - CAST(:since AS timestamptz))::float8")
        assert found.oldest_lag is not None
        assert found.oldest_lag <= connection.execute(age, {"since": since}).scalar_one()


def test_a_handler_without_a_report_has_no_numbers(engine: Engine) -> None:
    """Checkers have none, nor do consumers of workers that run an older release."""
    report(engine, handlers=[handler("consumer", "paid", "mail"), handler("checker", "paid")])
    assert [row.numbers for row in HealthViews(open_databases(bank=engine)).handlers()] == [None, None]


def test_what_holds_a_handler_back(engine: Engine) -> None:
    """Its group's state: by topic, of consumers alone."""
    topics = "paid", "sent", "lost", "left"
    report(engine, handlers=[handler("checker", "paid"), *(handler("consumer", topic, "mail") for topic in topics)])
    hold_back(engine)
    rows = HealthViews(open_databases(bank=engine)).handlers()
    assert {(row.kind, row.topic): row.state for row in rows} == {
        ("checker", "paid"): None,
        ("consumer", "paid"): "paused",
        ("consumer", "sent"): "open",
        ("consumer", "lost"): "half_open",
        ("consumer", "left"): "running",
    }


def test_a_real_worker(engine: Engine) -> None:
    """What a running worker reports is what is shown."""
    from outbox.worker import Worker
    from tests.kit import wait_until

    app = Outbox(engine, settings=Settings())
    app.consumer("paid", group="mail")(lambda message, session: None)
    databases = open_databases(bank=engine)
    with Worker(app):
        (row,) = wait_until(lambda: HealthViews(databases).workers(), "the worker has reported")
        assert (row.version, row.alive, "consume paid of mail" in row.duties) == (__version__, True, True)
        (found,) = HealthViews(databases).handlers()
        assert (found.kind, found.topic, found.group, found.workers) == ("consumer", "paid", "mail", [row.name])
        assert found.numbers is not None
        assert (found.numbers.failures, found.numbers.in_flight, found.numbers.p50) == (0, 0, None)
    assert HealthViews(databases).workers() == []


def test_what_it_runs_on(engine: Engine) -> None:
    """Versions, revisions, the tables with their sizes, the oldest transaction of others, the settings."""
    send(engine, 50)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE outbox.half_message"))
    with engine.connect() as other:
        other.execute(text("SELECT 1"))
        found = HealthViews(open_databases(bank=engine)).system()
    (view,) = found.databases
    assert (found.version, view.name, view.parts, view.error) == (__version__, "bank", ["consumer", "producer"], None)
    assert view.revisions == view.code_revisions
    assert view.server_version
    assert view.oldest_transaction is not None
    tables = {table.name: table for table in view.tables}
    assert {"half_message", "consumer_message", "worker", "stats_sample"} <= set(tables)
    assert (tables["half_message"].rows, tables["half_message"].bytes > 8192) == (50, True)
    assert found.settings["retention"] == Settings().retention


def test_a_database_that_is_away(engine: Engine) -> None:
    """It is shown with the reason; the others as ever."""
    gone = create_engine(engine.url.set(database="gone", password="hunter2"))  # noqa: S106
    parts = frozenset({"producer"})
    both = Databases([Database("gone", gone, Settings(), parts), Database("bank", engine, Settings(), parts)])
    away, here = HealthViews(both).system().databases
    assert (away.server_version, bool(away.error)) == (None, True)
    assert (here.error, "hunter2" in repr(away)) == (None, False)
    with pytest.raises(DBAPIError):
        HealthViews(both).workers()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql+psycopg://me:hunter2@host:5433/bank", "postgresql+psycopg://me:***@host:5433/bank"),
        ("postgresql+psycopg:///bank?password=hunter2&host=x", "postgresql+psycopg:///bank?host=x"),
        ("postgresql+psycopg://host/bank?sslpassword=hunter2", "postgresql+psycopg://host/bank"),
    ],
)
def test_an_address_has_no_password(url: str, shown: str) -> None:
    """Wherever it was written; nor have the options of the commands that mend."""
    assert address(make_url(url)) == shown
    assert shown in Subject(name="bank", url=make_url(url), settings=Settings()).options


@pytest.mark.parametrize("sent", [1, 3])
def test_a_group_without_a_worker(engine: Engine, sent: int) -> None:
    """Its state says so whatever its lag; what consumes has a duty for it: a worker, or a server of other clients."""
    groups = Groups(open_databases(bank=engine))

    def states() -> set[tuple[str, int]]:
        return {(row.state, row.workers) for row in groups.groups()}

    send(engine, sent)
    dispatch(engine)
    consume(engine, engine, limit=1)
    assert states() == {("unattended", 0)}
    report(engine, ["dispatch", "consume paid of mailer"])
    assert states() == {("unattended", 0)}
    # A worker with several lanes has as many duties.
    report(engine, ["consume paid of mail #1", "consume paid of mail #2"], number=2)
    report(engine, ["consume paid of mail"], number=3)
    sql(engine, "UPDATE outbox.worker SET seen_at = seen_at + interval '1 day'")
    assert states() == {("running", 2)}
    hold_back(engine)
    assert states() == {("paused", 2)}
    sql(engine, "DELETE FROM outbox.group_control")
    sql(engine, "UPDATE outbox.worker SET seen_at = seen_at - interval '2 days'")
    assert states() == {("unattended", 0)}
    # The application takes the messages of such a group itself: no worker tells of it.
    sql(engine, "UPDATE outbox.consumer_message SET status = 'taken', lease = 1, next_attempt_at = now()")
    assert states() == {("running", 0)}
