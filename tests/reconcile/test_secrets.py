"""A password is known to the connections, and appears nowhere else."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from urllib.parse import quote

import pytest
from sqlalchemy import URL, Engine, make_url

from outbox import Settings
from outbox.errors import OutboxError, SchemaMissing, SourceError
from outbox.reconcile.job import FIRST_ID, Access, Outcome, Range, Tier, hidden
from outbox.reconcile.rows import Comparison, Rules
from outbox.reconcile.run import reconcile
from outbox.reconcile.source import PostgresSide, snapshots_of
from outbox.reconcile.tables import InboxState
from tests.reconcile.town import IN_SYNC, PAIR, Progress, Town, fate, kinds, url_of
from tests.unit.test_secrets_shown import said

#: Part of every password, and letters that no way of quoting changes.
MARK = "S3cr3t"
PASSWORDS = [
    f"{MARK}",
    f"{MARK} with spaces and + signs",
    f"@:/?#[]{MARK}!$&()*,;=",
    f"100%{MARK}%20%zz",
    f'it\'s "{MARK}" \\ back\\\\slash',
    f"ünïcödé {MARK} 秘密",
]

Role = Callable[[str], str]


@pytest.fixture
def role(town: Town) -> Iterator[Role]:
    """A function that makes a role of a password, which may do everything in both databases; returns its name."""
    made: list[str] = []

    def run(sql: str) -> None:
        with town.producer.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            driver = connection.connection.driver_connection
            assert driver is not None
            driver.execute(sql)

    def make(password: str) -> str:
        name = f"keeper_{len(made)}_{town.producer.url.database}"
        escaped = password.replace("'", "''")
        run(f"CREATE ROLE {name} LOGIN SUPERUSER PASSWORD '{escaped}'")
        made.append(name)
        return name

    yield make
    for name in made:
        run(f"DROP ROLE {name}")


def as_role(engine: Engine, name: str, password: str) -> str:
    """Return the URL of a database for a role."""
    return engine.url.set(username=name, password=password).render_as_string(hide_password=False)


@pytest.mark.parametrize("password", PASSWORDS)
def test_any_password_connects_and_is_shown_nowhere(
    town: Town, role: Role, password: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Both drivers take the password as it is; what describes a job, its plan, its record and its log don't show it."""
    caplog.set_level(logging.DEBUG)
    name = role(password)
    missing, _ = town.plant([fate(status=InboxState.NONE), IN_SYNC])
    accesses = [Access(as_role(engine, name, password), Settings()) for engine in (town.producer, town.consumer)]
    job = replace(town.job(), producer=accesses[0], consumer=accesses[1])
    told = Progress()

    results = [reconcile(replace(job, tier=tier), told) for tier in (Tier.FULL, Tier.DIGEST)]

    assert [kinds(result.pairs[0]) for result in results] == [{missing: Outcome.MISSING}] * 2
    with snapshots_of(job.databases) as snapshots:
        side = PostgresSide(accesses[0], "producer", PAIR, snapshots.producer.name)
        comparison = Comparison(side, side, Rules(0, 0, 0))
        shown = [
            job,
            accesses,
            side,
            comparison,
            snapshots,
            results,
            told.said,
            side.statement([Range(FIRST_ID, None)]),
        ]
        assert pickle.loads(pickle.dumps(comparison)) == comparison  # noqa: S301 - made here
    recorded = town.rows("SELECT r::text FROM outbox.reconciliation_run r")
    assert len(recorded) == 2
    for text in (*map(repr, shown), *map(str, shown), *recorded, caplog.text):
        assert MARK not in text


def test_a_password_among_the_options_of_a_url(town: Town, role: Role) -> None:
    """libpq takes a password there too: it connects, and isn't shown either."""
    password = f"{MARK} @+%"
    url = town.producer.url.set(username=role(password), password=None).update_query_dict({"password": password})
    access = Access(url.render_as_string(hide_password=False), Settings())
    assert MARK in access.url
    assert PostgresSide(access, "producer", PAIR).read([Range(FIRST_ID, None)]).num_rows == 0
    assert MARK not in repr(access)
    assert MARK not in hidden(f"what is wrong with {access.url}?", access.url)


@pytest.mark.parametrize("password", PASSWORDS[1:4:2])
@pytest.mark.parametrize("wrong", ["password", "port", "host", "database", "option"])
def test_what_goes_wrong_is_told_without_the_password(
    town: Town, password: str, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither an error of either driver, nor what is chained behind it, nor a log at DEBUG has the password."""
    caplog.set_level(logging.DEBUG)
    good = town.accesses[0]
    access = Access(_spoilt(town.producer.url, wrong, password).render_as_string(hide_password=False), Settings())

    failures: list[Callable[[], object]] = [
        lambda: PostgresSide(access, "producer", PAIR).read([Range(FIRST_ID, None)]),
        lambda: reconcile(replace(town.job(), producer=access)),
        lambda: reconcile(replace(town.job(), consumer=access)),
        lambda: reconcile(replace(town.job(), producer=good, consumer=access, record=False)),
    ]

    for fail in failures:
        with pytest.raises(SourceError) as caught:
            fail()
        assert MARK not in said(caught.value)
        assert str(make_url(access.url).database) in str(caught.value)
    assert MARK not in caplog.text
    for recorded in town.rows("SELECT r::text FROM outbox.reconciliation_run r"):
        assert MARK not in recorded


def _spoilt(url: URL, wrong: str, password: str) -> URL:
    match wrong:
        case "password":
            return url.set(password=password)
        case "port":
            return url.set(password=password, port=1)
        case "host":
            return url.set(password=password, host="nowhere.invalid")
        case "database":
            return url.set(username="nobody", password=password, database="no_such_database")
    return url.set(password=password).update_query_dict({"sslmode": "nonsense"})


def test_a_database_without_tables_is_told_without_the_password(town: Town, role: Role) -> None:
    """The error that names the mend names the database, not the password."""
    password = PASSWORDS[3]
    url = town.consumer.url.set(database="postgres")
    access = Access(
        url.set(username=role(password), password=password).render_as_string(hide_password=False), Settings()
    )
    with pytest.raises(OutboxError) as caught:
        reconcile(replace(town.job(), producer=access))
    assert isinstance(caught.value, SchemaMissing)
    assert MARK not in said(caught.value)


@pytest.mark.parametrize("password", PASSWORDS[1:5:3])
def test_what_fails_on_the_way_is_recorded_without_the_password(town: Town, role: Role, password: str) -> None:
    """A producer that turns the readers away after the snapshots were taken: the run's record says so, and no more."""
    name = role(password)
    job = replace(town.job(), producer=Access(as_role(town.producer, name, password), Settings()))
    town.plant([IN_SYNC])

    def lock_out(title: str) -> None:
        if "rows" in title:
            town.at_producer(f"ALTER ROLE {name} PASSWORD 'another'")

    with pytest.raises(SourceError) as caught:
        reconcile(job, Progress(lock_out))

    assert "password authentication failed" in str(caught.value)
    assert MARK not in said(caught.value)
    ((finished, error),) = town.rows("SELECT finished_at IS NOT NULL, error FROM outbox.reconciliation_run")
    assert finished
    assert "password authentication failed" in error
    assert MARK not in error


def test_a_password_is_hidden_however_it_is_written() -> None:
    """As it is, quoted for a URL by anybody's rules, and quoted for libpq's own strings."""
    for password in PASSWORDS:
        url = URL.create("postgresql+psycopg", "u", password, "h", database="d").render_as_string(hide_password=False)
        libpq = password.replace("\\", "\\\\").replace("'", "\\'")
        for written in (password, quote(password), quote(password, safe=""), libpq, url):
            assert MARK not in hidden(f"before {written} behind", url)
        assert hidden("nothing", url) == "nothing"


def test_the_urls_of_the_tests_have_passwords(town: Town) -> None:
    """The server of the tests asks for passwords, or a wrong one would prove nothing."""
    assert town.producer.url.password
    with pytest.raises(SourceError, match="password authentication failed"):
        PostgresSide(Access(url_of(town.producer).replace("@", "x@"), Settings()), "producer", PAIR).read(
            [Range(FIRST_ID, None)]
        )
