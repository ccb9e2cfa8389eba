"""Through a connection pooler: it is found out by what it does, and everything else is seen through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from sqlalchemy import URL, Engine, NullPool, create_engine, text
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Settings, Worker
from outbox.database.engines import engine_of
from outbox.database.execute import driver_of
from outbox.errors import InvalidSettings
from outbox.operator.health.examine import Inspected
from outbox.operator.health.inspections import shares_processes, trouble_with_prepared
from outbox.operator.health.rules import Severity
from outbox.testing import drain
from tests.doctor.relay import relay
from tests.doctor.support import codes, dispatch_all, examine, inspected, raw, sql, the
from tests.kit import wait_until

QUIET = Settings(listen=False)


@contextmanager
def application(url: URL, **connect_args: Any) -> Iterator[Engine]:
    """An engine as an application has it."""
    engine = create_engine(url, connect_args=connect_args)
    yield engine
    engine.dispose()


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        ((10, 10), (11, 11), False),
        ((10, 10), (10, 10), True),
        ((10, 11), (12, 12), True),
        ((10, 10), (11, 12), True),
        ((10, 11), (11, 10), True),
    ],
)
def test_what_the_processes_tell(first: tuple[int, ...], second: tuple[int, ...], shared: bool) -> None:
    """One process for two connections, or two for one, is transaction pooling; one for each isn't."""
    assert shares_processes(first, second) is shared


@pytest.mark.parametrize(
    ("threshold", "tracked", "can_close", "trouble"),
    [
        (None, False, False, None),
        (5, True, True, None),
        (5, True, False, "older than 17"),
        (5, False, True, "knows nothing of them"),
        (0, False, False, "knows nothing of them"),
    ],
)
def test_when_prepared_statements_are_trouble(
    threshold: int | None, tracked: bool, can_close: bool, trouble: str | None
) -> None:
    """They need a pooler that knows them, and a libpq that tells it which are dropped; or aren't used at all."""
    found = trouble_with_prepared(threshold, tracked=tracked, can_close=can_close)
    assert (found is None) if trouble is None else (trouble in str(found))


def test_no_pooler(engine: Engine) -> None:
    """Straight to the server, prepared statements and LISTEN are fine."""
    report = examine(engine)
    assert codes(report) == []
    assert inspected(report, "pooler").outcome is Inspected.OK


def test_session_pooler(engine: Engine) -> None:
    """A pooler that gives a client a connection for as long as it stays is no trouble."""
    with relay(engine.url, transaction=False) as url, application(url) as through:
        assert codes(examine(through)) == []


def test_transaction_pooler(engine: Engine) -> None:
    """One that knows nothing of prepared statements: both are findings, and all else is inspected through it."""
    with relay(engine.url) as url, application(url) as through:
        report = examine(through, subscriptions=())
        assert codes(report) == ["pooler.listen", "pooler.prepared_statements"]
        prepared = the(report, "pooler.prepared_statements")
        assert prepared.severity is Severity.PROBLEM
        assert (prepared.details["prepare_threshold"], prepared.details["tracked"]) == (5, False)
        assert the(report, "pooler.listen").severity is Severity.NOTE
        assert {each.outcome for each in report.inspections if each.name not in {"pooler", "durability"}} == {
            Inspected.OK
        }


def test_what_the_finding_warns_of(engine: Engine) -> None:
    """Behind such a pooler a client really fails: over what another has prepared, or what it has prepared elsewhere."""
    with relay(engine.url) as url:
        first, second = (raw(url, prepare_threshold=0, autocommit=True) for _ in range(2))
        try:
            # Both count their statements alike; sooner or later two of one number meet in a connection of the pooler's,
            # or a client gets another connection between preparing a statement and running it.
            with pytest.raises((psycopg.errors.DuplicatePreparedStatement, psycopg.errors.InvalidSqlStatementName)):
                for number in range(1000):
                    first.execute(f"SELECT {number}")
                    second.execute(f"SELECT {number}")
        finally:
            first.close()
            second.close()


def test_mended(engine: Engine) -> None:
    """With what the findings say, nothing is found any more."""
    with relay(engine.url) as url:
        with application(url, prepare_threshold=None) as through:
            assert codes(examine(through)) == ["pooler.listen"]
            assert codes(examine(through, QUIET)) == []
        with application(url) as through:
            assert codes(examine(through, QUIET)) == ["pooler.prepared_statements"]


def test_address_alone(engine: Engine) -> None:
    """Without the application's engine it isn't known whether it prepares statements: that is a note."""
    with relay(engine.url) as url:
        finding = the(examine(url), "pooler.prepared_statements")
        assert finding.severity is Severity.NOTE
        assert "unless your engine says prepare_threshold=None" in finding.sentence


@pytest.mark.skipif(not psycopg.capabilities.has_send_close_prepared(), reason="libpq is older than 17")
def test_pooler_that_knows_prepared_statements(engine: Engine) -> None:
    """One that manages them under names of its own is fine with them, which a client of it shows."""
    with relay(engine.url, tracking=True) as url, application(url) as through:
        connections = [raw(url, prepare_threshold=0, autocommit=True) for _ in range(3)]
        try:
            for number in range(9):
                assert connections[number % 3].execute("SELECT 1").fetchone() == (1,)
        finally:
            for connection in connections:
                connection.close()
        assert codes(examine(through, QUIET)) == []
        assert codes(examine(through)) == ["pooler.listen"]


@pytest.mark.parametrize("tracking", [False, True])
def test_nothing_is_left_on_the_server(engine: Engine, tracking: bool) -> None:
    """What the doctor tries leaves no prepared statement on a server connection that others get."""
    with relay(engine.url, tracking=tracking) as url:
        examine(create_engine(url, poolclass=NullPool))
        with raw(url, prepare_threshold=None, autocommit=True) as connection:
            rows = connection.execute("SELECT name FROM pg_prepared_statements WHERE name NOT LIKE 'POOL%'").fetchall()
            assert rows == []


def test_pool_of_the_application_that_is_small(engine: Engine) -> None:
    """An application whose pool has one connection is examined through it, and keeps it."""
    small = create_engine(engine.url, pool_size=1, max_overflow=0, pool_timeout=1)
    assert codes(examine(small)) == []
    with small.connect():
        pass
    small.dispose()


def test_pool_of_the_application_that_is_empty(engine: Engine) -> None:
    """One that has none to spare shows SQLAlchemy's error."""
    from sqlalchemy.exc import TimeoutError as PoolTimeout

    small = create_engine(engine.url, pool_size=1, max_overflow=0, pool_timeout=0.1)
    with small.connect(), pytest.raises(PoolTimeout):
        examine(small)
    small.dispose()


def test_a_url_alone_prepares_nothing(engine: Engine) -> None:
    """By any pooler, connections of a URL leave no statement behind; the URL can say that they are to be prepared."""
    with relay(engine.url) as url:
        through = engine_of(url)
        for _ in range(3):
            with through.connect() as connection:
                for number in range(8):
                    assert connection.exec_driver_sql("SELECT %s::int", (number,)).scalar() == number
        with raw(url, prepare_threshold=None, autocommit=True) as connection:
            assert connection.execute("SELECT count(*) FROM pg_prepared_statements").fetchone() == (0,)
    direct = engine_of(
        engine.url.update_query_dict({"prepare_threshold": "2", "application_name": "mine"}), name="ours"
    )
    with direct.connect() as connection:
        assert driver_of(connection).prepare_threshold == 2
        assert connection.exec_driver_sql("SELECT current_setting('application_name')").scalar() == "mine"
    with engine_of(engine.url, name="ours").connect() as connection:
        assert connection.exec_driver_sql("SELECT current_setting('application_name')").scalar() == "ours"
    with pytest.raises(InvalidSettings, match="prepare_threshold = 'often' in the URL must be a number"):
        engine_of(engine.url.update_query_dict({"prepare_threshold": "often"}))


@pytest.mark.parametrize("tracking", [False, True])
def test_worker_by_url(engine: Engine, new_engine: Callable[..., Engine], tracking: bool) -> None:
    """A worker whose source is a URL behind a pooler consumes, also where the pooler knows nothing of statements."""
    sender = Outbox(engine, settings=QUIET)
    with relay(engine.url, tracking=tracking) as url:
        own = new_engine()
        outbox = Outbox(own, settings=QUIET, group="shop")
        outbox.consumer("t", group="mail", source=url.render_as_string(hide_password=False), threads=2)(handle)
        with Worker(outbox):
            for number in range(30):
                with engine.begin() as connection:
                    sender.send(connection, "t", number, key=str(number))
                dispatch_all(engine, sender)
            wait_until(lambda: sql(own, "SELECT count(*) FROM outbox.consumer_message") == 30, "all came")
            names = sql(own, "SELECT string_agg(DISTINCT application_name, ' ') FROM pg_stat_activity")
            assert {"outbox/mail/consume", "outbox/shop/upkeep", "outbox/shop/bulk"} <= set(names.split())


def handle(message: Message, session: Session) -> None:
    """Do nothing, with success."""


def test_what_a_handler_leaves_reaches_no_other_client(engine: Engine) -> None:
    """The pooler gives the session to others after the COMMIT: what was left is taken away before that."""
    with relay(engine.url) as url, application(url, prepare_threshold=None) as through:
        outbox = Outbox(through, settings=QUIET)

        @outbox.consumer("t", group="g")
        def handler(message: Message, session: Session) -> None:
            for each in ("SET search_path = pg_temp", "LISTEN news", "SELECT pg_advisory_lock(4711)"):
                session.execute(text(each))

        with Session(through) as session:
            outbox.send(session, "t", 1)
            session.commit()
        assert drain(outbox).done == 1
        with raw(url, prepare_threshold=None, autocommit=True) as other:
            left = "SELECT current_setting('search_path'), count(*) FROM pg_locks WHERE objid = 4711"
            assert other.execute(left).fetchone() == ('"$user", public', 0)
            assert other.execute("SELECT count(*) FROM pg_listening_channels()").fetchone() == (0,)
