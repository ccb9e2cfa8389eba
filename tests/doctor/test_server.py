"""A server that is too old, a standby, read-only, careless, full, or of another time."""

from __future__ import annotations

import datetime as dt
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from sqlalchemy import URL, Engine, create_engine
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Settings
from outbox.database import migration
from outbox.embedded import Server
from outbox.embedded.external import URL_VARIABLE
from outbox.operator.health.examination import Examination, ServerIdentity
from outbox.operator.health.examine import Inspected
from outbox.operator.health.rules import Severity, Thresholds
from tests.doctor.support import READ_ALL, codes, examine, inspected, mend_by_sql, raw, role, sql, the
from tests.kit import make_odd_schema, wait_until

ours_to_set_up = pytest.mark.skipif(URL_VARIABLE in os.environ, reason="the user's server is set up as it is")


@pytest.mark.parametrize(
    ("number", "version", "found"), [(120_022, "12.22", True), (130_000, "13.0", False), (180_001, "18.1", False)]
)
def test_version(engine: Engine, monkeypatch: pytest.MonkeyPatch, number: int, version: str, found: bool) -> None:
    """Before 13 there is no xid8. (There is no such server here: the rule is tested, not the server.)"""
    server = ServerIdentity(number, version, False, "me", "me", "bank", True, dt.datetime.now(dt.UTC))
    monkeypatch.setattr(Examination, "server", server)
    assert codes(examine(engine)) == (["server.version"] if found else [])


def test_standby(tmp_path: Path) -> None:
    """A server in recovery is recognised, and everything else is still inspected."""
    with Server(folder=tmp_path / "kept", durable=False) as server:
        server.create_database("bank")
        migration.upgrade(server.url("bank"))
        data = next(path.parent for path in server.folder.rglob("PG_VERSION") if (path.parent / "global").is_dir())
    (data / "standby.signal").touch()
    with Server(folder=tmp_path / "kept", durable=False) as server:
        report = examine(server.url("bank"))
        assert codes(report) == ["server.standby"]
        assert not report.healthy
        assert "standby" in str(inspected(report, "tables").why)
        for name in ("checks", "dispatch", "parked messages", "consuming groups", "replication", "pooler"):
            assert inspected(report, name).outcome is Inspected.OK


@pytest.mark.parametrize("where", ["ALTER DATABASE {database}", "ALTER ROLE {role}"])
def test_read_only(engine: Engine, where: str) -> None:
    """Where it was set is where the SQL takes it back, in spite of it."""
    with role(engine, "ALTER SCHEMA outbox OWNER TO {role}", "GRANT {role} TO CURRENT_USER") as url:
        place = where.format(database=engine.url.database, role=url.username)
        sql(engine, f"GRANT SELECT ON ALL TABLES IN SCHEMA outbox TO {url.username}")
        sql(engine, f"ALTER DATABASE {engine.url.database} OWNER TO {url.username}")
        sql(engine, f"{place} SET default_transaction_read_only = on")
        try:
            report = examine(url)
            assert codes(report) == ["server.read_only"]
            mend_by_sql(url.render_as_string(hide_password=False), the(report, "server.read_only"))
            assert codes(examine(url)) == []
        finally:
            with closing(raw(engine.url, autocommit=True)) as connection:
                connection.execute("SET default_transaction_read_only = off")
                connection.execute(f"ALTER DATABASE {engine.url.database} OWNER TO CURRENT_USER".encode())
                connection.execute("ALTER SCHEMA outbox OWNER TO CURRENT_USER")


@ours_to_set_up
def test_careless_server(engine: Engine) -> None:
    """A server without fsync is a problem; without full pages it may be right, on some file systems."""
    report = examine(engine)
    assert the(report, "durability.fsync").severity is Severity.PROBLEM
    assert the(report, "durability.fsync").mend == "ALTER SYSTEM SET fsync = on; SELECT pg_reload_conf();"
    assert the(report, "durability.full_page_writes").severity is Severity.NOTE
    assert [finding.severity for finding in report.findings] == [Severity.PROBLEM, Severity.NOTE]


def test_asynchronous_commit(engine: Engine) -> None:
    """A server that answers a commit before it is durable can forget what others have consumed."""
    sql(engine, f"ALTER DATABASE {engine.url.database} SET synchronous_commit = off")
    report = examine(engine.url)
    assert codes(report) == ["durability.synchronous_commit"]
    mend_by_sql(engine, the(report, "durability.synchronous_commit"))
    assert codes(examine(engine.url)) == []


@pytest.mark.parametrize("value", ["local", "remote_write", "remote_apply"])
def test_other_ways_of_committing(engine: Engine, value: str) -> None:
    """What is durable here is durable enough."""
    sql(engine, f"ALTER DATABASE {engine.url.database} SET synchronous_commit = {value}")
    assert codes(examine(engine.url)) == []


def test_asynchronous_commit_for_all(odd: Server, parameters_kept: None) -> None:
    """Where the configuration file says so, the SQL overrides it."""
    report = examine(odd.url("odd"))
    mend_by_sql(odd.url("odd"), the(report, "durability.synchronous_commit"))
    wait_until(
        lambda: "durability.synchronous_commit" not in codes(examine(odd.url("odd"))), "new sessions commit durably"
    )


# --- connections -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "place"), [("role", "ALTER ROLE {role}"), ("database", "ALTER DATABASE {database}")])
def test_limit_of_role_and_of_database(engine: Engine, limit: str, place: str) -> None:
    """A role or a database that may have few connections: one more worker doesn't fit; the SQL makes room for it."""
    with role(engine, *READ_ALL) as url, ExitStack() as stack:
        limited = place.format(role=url.username, database=engine.url.database)
        sql(engine, f"{limited} CONNECTION LIMIT 12")
        for _ in range(5):
            stack.enter_context(closing(raw(url)))
        report = examine(url)
        assert codes(report) == ["connections.few"]
        finding = the(report, "connections.few")
        assert finding.details["limited_by"] == limit
        assert finding.details["needed"] == 9
        # Those of this test's own engine count for the database only.
        assert finding.details["left"] <= 7
        mend_by_sql(engine, finding)
        assert codes(examine(url)) == []


def test_superuser_is_not_limited(engine: Engine) -> None:
    """Superusers are held back by neither limit."""
    sql(engine, f"ALTER DATABASE {engine.url.database} CONNECTION LIMIT 3")
    assert codes(examine(engine)) == []


def test_connections_of_the_server(odd: Server) -> None:
    """Superusers may have all that max_connections allows; others less, by what is reserved."""
    engine = create_engine(odd.url("odd"))
    with ExitStack() as stack, role(engine, *READ_ALL) as url:
        # 12 less 3 reserved, less one of `role`.
        assert the(examine(url), "connections.few").details["left"] == 8
        assert "connections.few" not in codes(examine(engine))
        for _ in range(4):
            stack.enter_context(closing(raw(engine.url)))
        finding = the(examine(engine), "connections.few")
        assert (finding.details["limited_by"], finding.details["needed"]) == ("max_connections", 9)
        assert finding.mend.startswith("ALTER SYSTEM SET max_connections = ")
    engine.dispose()


def test_connections_that_are_needed(engine: Engine) -> None:
    """A worker of the application needs one for each consuming thread, and for each checker that is asked."""
    outbox = Outbox(engine, settings=Settings(checks_in_flight=7))

    @outbox.consumer("orders", group="till", threads=6)
    def handle(message: Message, session: Session) -> None:
        pass

    with role(engine, *READ_ALL) as url:
        sql(engine, f"ALTER ROLE {url.username} CONNECTION LIMIT 16")
        report = examine(url, outbox.settings, outbox.checkers, subscriptions=outbox.subscriptions.values())
        assert the(report, "connections.few").details["needed"] == 4 + 7 + 6
        for group in ("mail", "payments"):
            outbox.consumer("orders", group=group, transactional=False, concurrency=50)(lambda _: None)
        report = examine(url, outbox.settings, outbox.checkers, subscriptions=outbox.subscriptions.values())
        # However many handlers run at once, such a group has one; they share one to prune.
        assert the(report, "connections.few").details["needed"] == 4 + 7 + 6 + 2 + 1
        assert codes(examine(url, thresholds=Thresholds(connections=16))) == []


def test_last_connection(engine: Engine) -> None:
    """Where there isn't even a second connection, what needs one says so, and the rest is inspected."""
    with role(engine, *READ_ALL) as url:
        sql(engine, f"ALTER ROLE {url.username} CONNECTION LIMIT 1")
        report = examine(url)
        assert codes(report) == ["connections.few"]
        assert "too many connections for role" in str(inspected(report, "pooler").why)
        assert "too many connections for role" in str(inspected(report, "tables").why)
        assert inspected(report, "checks").outcome is Inspected.OK


# --- clock -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ahead", "word"), [(42.0, "ahead of"), (-4200.0, "behind")])
def test_clock(engine: Engine, ahead: float, word: str) -> None:
    """The finding says which way the host's clock is wrong, and how much."""
    report = examine(engine, clock=lambda: time.time() + ahead)
    assert codes(report) == ["clock.skew"]
    finding = the(report, "clock.skew")
    assert word in finding.sentence
    assert abs(finding.details["ahead"] - ahead) < 2
    assert report.healthy is False


def test_clock_that_is_a_little_off(engine: Engine) -> None:
    """A second is nothing to tell; how much is, can be set."""
    assert codes(examine(engine, clock=lambda: time.time() + 1)) == []
    assert codes(examine(engine, clock=lambda: time.time() + 60, thresholds=Thresholds(clock=120))) == []


def test_slow_round_trip_is_no_skew(engine: Engine) -> None:
    """Half of the round trip is what can't be known: an answer that takes 20 seconds proves nothing about 8."""
    steps: Iterator[float] = (number * 20.0 for number in range(100))
    began = time.time() - 2
    assert codes(examine(engine, clock=lambda: began + next(steps) % 40)) == []


def test_address_shows_no_password(engine: Engine) -> None:
    """The report names the database, and no secret."""
    url: URL = engine.url
    report = examine(engine)
    assert report.database == f"{url.host}:{url.port}/{url.database}"
    assert str(url.password) not in repr(report)


def test_a_search_path_with_functions_of_its_own(engine: Engine) -> None:
    """A schema before pg_catalog that replaces what PostgreSQL means is found; no other is."""
    with engine.begin() as connection:
        make_odd_schema(connection)
        sql(connection, "CREATE FUNCTION odd.max(point) RETURNS int LANGUAGE sql AS 'SELECT 1'")
    for path, found in (("odd,pg_catalog", True), ("pg_catalog,odd", False), ("odd", False)):
        url = engine.url.update_query_dict({"options": f"-csearch_path={path}"})
        findings = [each for each in examine(url).findings if each.code == "search_path.shadows"]
        assert bool(findings) is found, path
        for finding in findings:
            assert finding.details == {"schema": "odd", "names": "clock_timestamp, now, ="}
