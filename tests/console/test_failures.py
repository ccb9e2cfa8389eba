"""When something is broken: what is told, to whom, and what still works."""

from __future__ import annotations

import logging
from collections.abc import Callable
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import Engine, NullPool, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import create_async_engine

from outbox import Settings
from outbox.console import connections
from outbox.console.connections import OperatorSource, own_engine
from outbox.console.problems import as_problem
from outbox.database.execute import driver_of
from outbox.errors import (
    AlreadyCommitted,
    BulkJobTooLarge,
    CompensationRefused,
    HalfNotFound,
    OutboxBusy,
    OutboxError,
    SchemaMissing,
)
from tests.console.web import Asker, Http, Shop, console_of

_SHOWN = "SELECT current_setting('application_name'), current_setting('statement_timeout'), current_database()"
DEAD = "postgresql+psycopg://nobody@127.0.0.1:1/nothing"


def failing(engine: Engine, *statements: str) -> Exception:
    """The error of the last of these statements."""
    with engine.connect() as connection, pytest.raises(DBAPIError) as raised:
        for statement in statements:
            connection.execute(text(statement))
    return raised.value


def slug(error: Exception) -> str | None:
    """The kind of problem that an error becomes."""
    problem = as_problem(error)
    return problem.slug if problem else None


def test_errors_of_the_database_say_how_to_go_on(museum: Shop) -> None:
    """A query that took too long, a lock, a value that can't be held, a write where only reading is allowed."""
    slow = as_problem(failing(museum.engine, "SET LOCAL statement_timeout = 10", "SELECT pg_sleep(10)"))
    assert slow is not None
    assert (slow.status_code, slow.slug) == (503, "query-timeout")
    assert "narrow" in slow.detail
    assert slug(failing(museum.engine, "SELECT '9'::int8 * 9223372036854775807")) == "invalid"
    assert slug(failing(museum.engine, "SET TRANSACTION READ ONLY", "DELETE FROM outbox.audit")) == "read-only"
    assert slug(failing(museum.engine, "SELECT 1/0")) == "invalid"
    assert slug(failing(museum.engine, "SELECT nonsense")) is None
    assert slug(PoolTimeout()) == "unavailable"


def test_errors_of_the_outbox_have_their_kind() -> None:
    """Each error that an operator can cause is a kind of problem; others nobody expected."""
    some = uuid4()
    kinds = {
        HalfNotFound(some): "not-found",
        AlreadyCommitted(some, "check"): "already-decided",
        CompensationRefused("no"): "compensation-refused",
        BulkJobTooLarge("no"): "too-large",
        OutboxBusy("orders", "halves", 2, 1, "max"): "unavailable",
        SchemaMissing("no tables"): "unavailable",
        OutboxError("?"): None,
        ValueError("?"): None,
    }
    assert {type(error): slug(error) for error in kinds} == {type(error): kind for error, kind in kinds.items()}


def test_a_database_that_is_down_is_told_as_such(make_console: Callable[..., Http]) -> None:
    """503 with a time to come back, no address and no password; the probe says no more than that."""
    http = make_console({"bank_a": DEAD})
    answer = http.get("/messages")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert answer.json()["type"] == "urn:outbox:problem:unavailable"
    ready = http.as_role(None).ask("GET", "/readyz", headers={"Host": "10.0.0.1"})
    assert (ready.status_code, ready.json()["detail"]) == (503, "not ready")
    assert "nobody" not in answer.text + ready.text
    assert "127.0.0.1:1" not in answer.text + ready.text


def test_one_database_that_is_down_hides_no_other(museum: Shop, make_console: Callable[..., Http]) -> None:
    """What can be reached is shown, and the other is named."""
    http = make_console(museum.outbox, databases={"bank_b": DEAD})
    assert http.get("/messages").status_code == 200
    reached = {each["name"]: each["reached"] for each in http.get("/meta").json()["databases"]}
    assert reached == {"console_museum": True, "bank_b": False}
    assert http.ask("GET", "/readyz").status_code == 503


def test_a_database_that_comes_back_is_found(museum: Shop, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database that couldn't be reached, or wasn't migrated, is tried again."""
    monkeypatch.setattr(connections, "_AGAIN", 0.0)
    engine = own_engine(url)
    with engine.begin() as connection:
        connection.execute(text("ALTER SCHEMA outbox RENAME TO hidden"))
    opened = OperatorSource({"a": museum.engine, "b": url}, settings=Settings())
    assert list(opened().databases) == ["a"]
    assert list(opened.missing) == ["b"]
    with engine.begin() as connection:
        connection.execute(text("ALTER SCHEMA hidden RENAME TO outbox"))
    assert list(opened().databases) == ["a", "b"]
    assert not opened.missing
    opened.close()
    engine.dispose()


def test_a_connection_that_a_request_has_is_closed_after_the_request(museum: Shop) -> None:
    """The console may be closed meanwhile; nothing is left open, and what is asked later is answered."""
    source = OperatorSource({"a": museum.engine}, settings=Settings())
    engine = source().databases["a"].engine
    with engine.begin() as connection:
        driver = driver_of(connection)
        source.close()
        assert not driver.closed
        assert connection.scalar(text("SELECT 1")) == 1
    assert driver.closed
    with engine.begin() as connection:
        later = driver_of(connection)
    assert not later.closed
    with engine.begin() as connection:
        assert driver_of(connection) is later
    source.close()
    assert later.closed


def test_what_nobody_expected_is_told_to_the_log_only(
    museum: Shop, ask: Asker, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller gets the id of the request; the log has the traceback under it."""

    def broken() -> None:
        raise RuntimeError("the secret of the house")

    with caplog.at_level(logging.ERROR, "outbox.console"):
        answer = ask(console_of(museum.outbox, authorizer=broken)).get("/meta")
    assert (answer.status_code, answer.json()["type"]) == (500, "urn:outbox:problem:internal")
    assert "secret" not in answer.text
    (record,) = caplog.records
    assert "the secret of the house" in record.getMessage()
    assert answer.headers["x-request-id"] in record.getMessage()


def test_the_console_has_connections_of_its_own(museum: Shop) -> None:
    """They are made as the application's are, have a name and a limit, and aren't taken from its pool."""
    conninfo = museum.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    sources = (
        create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(conninfo, autocommit=True)),
        create_engine(museum.engine.url, isolation_level="AUTOCOMMIT", poolclass=NullPool),
        create_async_engine(museum.engine.url),
        conninfo,
    )
    for source in sources:
        engine = own_engine(source)
        with engine.connect() as connection:
            shown = connection.execute(text(_SHOWN)).one()
            assert tuple(shown) == ("outbox console", "15s", "console_museum")
            connection.execute(text("CREATE TEMP TABLE gone (id int)"))
            connection.rollback()
            assert connection.execute(text("SELECT to_regclass('gone')")).scalar() is None
        engine.dispose()


def test_a_console_that_only_reads_has_transactions_that_can_not_write(museum: Shop) -> None:
    """The database refuses, whatever the code does."""
    engine = own_engine(museum.engine, read_only=True)
    assert slug(failing(engine, "DELETE FROM outbox.audit")) == "read-only"
    engine.dispose()
