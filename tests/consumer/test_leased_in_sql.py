"""Leased messages settled in SQL: by a service in whatever language, by the handle that came with the message."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine

from outbox.errors import LeaseEnded
from outbox.message.model import uuid7
from outbox.telemetry.events import MessageFailed, MessageParked
from outbox.telemetry.hooks import TelemetryEvent
from tests.consumer.test_leased import bodies, end_leases, leased
from tests.kit import wait_until
from tests.kit.bench import Bench


@pytest.fixture
def connection(engine: Engine) -> Iterator[psycopg.Connection[Any]]:
    """A connection of the driver's own, each statement a transaction."""
    dsn = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield connection


def said(connection: psycopg.Connection[Any], call: str, *values: Any) -> Any:
    """Return what a function of the schema returns."""
    row = connection.execute(f"SELECT outbox.{call}", values).fetchone()
    assert row is not None
    return row[0]


def test_acknowledged_with_the_change_of_another_language(connection: psycopg.Connection[Any], bench: Bench) -> None:
    """It commits or rolls back with its transaction; a second time it is told that it counted the first time."""
    group = leased(bench)
    bench.send("a")
    (taken,) = group.take()
    connection.execute("CREATE TABLE effect (id text)")
    with pytest.raises(ZeroDivisionError), connection.transaction():
        assert said(connection, "acknowledge(%s)", taken.handle)
        connection.execute("INSERT INTO effect VALUES ('lost')")
        raise ZeroDivisionError
    with connection.transaction():
        assert said(connection, "acknowledge(%s)", taken.handle) is True
        connection.execute("INSERT INTO effect VALUES ('a')")
    assert said(connection, "acknowledge(%s)", taken.handle) is False
    assert taken.acknowledge() is False
    assert connection.execute("SELECT id FROM effect").fetchall() == [("a",)]
    assert bench.statuses() == [("consumed", 1)]


def test_an_acknowledged_one_lets_the_next_of_its_key_go(connection: psycopg.Connection[Any], bench: Bench) -> None:
    """What waits for it is handed out by the next take."""
    group = leased(bench, ordered="key")
    bench.send("1")
    (first,) = group.take()
    bench.send("2")
    assert group.take() == []
    assert said(connection, "acknowledge(%s)", first.handle)
    assert bodies(group.take()) == ["2"]


@pytest.mark.parametrize(
    ("call", "what"),
    [("acknowledge(%s)", "acknowledged"), ("extend(%s, 60)", "extended"), ("fail(%s, 'ill', 0)", "failed")],
)
@pytest.mark.parametrize("settled", ["its lease has ended", "by another take", "by a failure"])
def test_no_word_counts_after_the_lease(
    call: str, what: str, settled: str, connection: psycopg.Connection[Any], bench: Bench
) -> None:
    """Each of them raises, and changes nothing: the message may be in other hands."""
    group = leased(bench)
    (id_,) = bench.send("a")
    (taken,) = group.take()
    if settled == "by a failure":
        said(connection, "fail(%s, 'ill', 0)", taken.handle)
    else:
        end_leases(bench)
    if settled == "by another take":
        assert bodies(group.take()) == ["a"]
    before = connection.execute("SELECT * FROM outbox.consumer_message").fetchall()
    with pytest.raises(psycopg.Error, match=f"message {id_} of topic 't' can't be {what} by group 'g'") as ended:
        said(connection, call, taken.handle)
    assert ended.value.sqlstate == "OX005"
    assert connection.execute("SELECT * FROM outbox.consumer_message").fetchall() == before


def test_extended_it_keeps_its_handle(connection: psycopg.Connection[Any], bench: Bench) -> None:
    """The lease ends as long from now as it says, under the same handle; with 0 it ends now."""
    group = leased(bench)
    bench.send("a")
    (taken,) = group.take(invisible=1000)
    until = said(connection, "extend(%s, 3600)", taken.handle)
    assert (until - taken.until).total_seconds() > 1800
    assert group.take() == []
    said(connection, "extend(%s, 0)", taken.handle)
    (again,) = group.take()
    assert again.attempt == 2
    with pytest.raises(LeaseEnded):
        taken.acknowledge()


def test_failures_follow_the_groups_table(
    connection: psycopg.Connection[Any], bench: Bench, heard: list[TelemetryEvent]
) -> None:
    """The next take writes the attempt with its reason, and parks the message after the last one."""
    group = leased(bench, retry_delays=(60.0,))
    (id_,) = bench.send("a")
    (taken,) = group.take()
    said(connection, "fail(%s, %s, 3600)", taken.handle, "no stock of 17")
    assert group.take() == []
    end_leases(bench)
    (again,) = group.take()
    assert (again.body, again.attempt) == ("a", 2)
    said(connection, "fail(%s, %s, 0)", again.handle, None)
    assert group.take() == []
    (row,) = connection.execute("SELECT status, attempts, last_error FROM outbox.consumer_message").fetchall()
    assert row == ("parked", 2, "no reason")
    history = "SELECT attempt, status, error, error_kind FROM outbox.attempt_history ORDER BY attempt"
    assert connection.execute(history).fetchall() == [
        (1, "failed", "no stock of 17", "no stock of …"),
        (2, "parked", "no reason", "no reason"),
    ]
    assert [type(each) for each in heard if isinstance(each, MessageFailed | MessageParked)] == [
        MessageFailed,
        MessageParked,
    ]
    assert bench.inbox()[id_].status == "parked"


def test_a_lease_that_lapses_after_a_failure_says_so(connection: psycopg.Connection[Any], bench: Bench) -> None:
    """The reason of an earlier failure isn't taken for that of a lease that merely ended."""
    group = leased(bench)
    bench.send("a")
    (taken,) = group.take()
    said(connection, "fail(%s, 'ill', 0)", taken.handle)
    assert len(group.take()) == 1
    end_leases(bench)
    assert len(group.take()) == 1
    history = "SELECT error FROM outbox.attempt_history ORDER BY attempt"
    assert [error for (error,) in connection.execute(history)] == [
        "ill",
        "taken, and not settled before the lease ended",
    ]


@pytest.mark.parametrize(
    ("call", "values"),
    [
        ("acknowledge(%s)", (None,)),
        ("acknowledge(%s)", ("",)),
        ("acknowledge(%s)", ("no handle",)),
        ("acknowledge(%s)", ("MDAwMDAwMDAgMSBnIHQ",)),
        ("extend(%s, -1)", ("x",)),
        ("extend(%s, 43201)", ("x",)),
        ("extend(%s, NULL)", ("x",)),
        ("fail(%s, 'ill', 'NaN')", ("x",)),
        ("fail(%s, 'ill', NULL)", ("x",)),
    ],
)
def test_what_is_no_handle_or_time_is_refused(call: str, values: tuple[Any], connection: Any) -> None:
    """Each of them is told what is wrong with it."""
    with pytest.raises(psycopg.Error) as refused:
        said(connection, call, *values)
    assert refused.value.sqlstate == "OX001"


def test_the_rights_that_the_page_names_are_enough(connection: psycopg.Connection[Any], bench: Bench) -> None:
    """They are of one table; without them nothing is settled."""
    group = leased(bench)
    bench.send("a", "b", "c")
    first, second, third = group.take(3)
    calls = ((first, "acknowledge(%s)"), (second, "extend(%s, 60)"), (third, "fail(%s, 'ill', 0)"))
    role = f"packer_{uuid7().hex}"
    connection.execute(f"CREATE ROLE {role}")
    try:
        connection.execute(f"GRANT USAGE ON SCHEMA outbox TO {role}")
        connection.execute(f"SET ROLE {role}")
        for taken, call in calls:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                said(connection, call, taken.handle)
        connection.execute("RESET ROLE")
        connection.execute(f"GRANT SELECT, UPDATE ON outbox.consumer_message TO {role}")
        connection.execute(f"SET ROLE {role}")
        for taken, call in calls:
            said(connection, call, taken.handle)
    finally:
        connection.execute("RESET ROLE")
        connection.execute(f"DROP OWNED BY {role}")
        connection.execute(f"DROP ROLE {role}")
    assert sorted(bench.statuses()) == [("consumed", 1), ("taken", 0), ("taken", 0)]


def test_two_that_settle_at_once(connection: psycopg.Connection[Any], engine: Engine, bench: Bench) -> None:
    """The second one waits for the first, and is told what became of it."""
    group = leased(bench)
    bench.send("a")
    (taken,) = group.take()
    dsn = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(dsn) as first, ThreadPoolExecutor(1) as threads:
        first.execute("SELECT outbox.acknowledge(%s)", (taken.handle,))
        second = threads.submit(said, connection, "acknowledge(%s)", taken.handle)
        wait_until(bench.waiting, "the second waits")
        first.commit()
        assert second.result() is False


def test_a_row_that_is_not_there(connection: psycopg.Connection[Any], bench: Bench) -> None:
    """A handle of a message that the inbox doesn't have is that of a lease that ended."""
    group = leased(bench)
    bench.send("a")
    (taken,) = group.take()
    lease = taken._lease._replace(message_id=uuid7())
    with pytest.raises(psycopg.Error) as refused:
        said(connection, "acknowledge(%s)", lease.handle)
    assert refused.value.sqlstate == "OX005"
