"""What a role lacks is found before it fails: by the doctor, and by a worker when it starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from sqlalchemy import Engine

from outbox import Outbox, Worker
from outbox.database import migration
from outbox.errors import PrivilegeMissing
from outbox.operator.health.examine import HealthReport, Inspected
from outbox.operator.health.grants import require_privileges, statements
from outbox.operator.health.rules import Severity
from tests.cli.conftest import run_cli
from tests.doctor.support import examine, inspected, mend_by_sql, the
from tests.grants.town import Town, succeed
from tests.kit import wait_until


def application(town: Town, topic: str = "t") -> Outbox:
    """Return a service that consumes a topic from the producer's database."""
    outbox = Outbox(town.at["consumer"], settings=town.settings)
    outbox.consumer(topic, group="g", source=town.at["producer"])(succeed)
    return outbox


def ask(outbox: Outbox) -> HealthReport:
    """Ask the doctor of an application."""
    assert isinstance(outbox.engine, Engine)
    return examine(outbox.engine, outbox.settings, subscriptions=outbox.subscriptions.values())


@pytest.fixture
def mailer(town: Town) -> Iterator[str]:
    """A role that consumes the topic `t`, and may see no other."""
    with town.acting_as("consumer", topics=["t"]) as name:
        yield name


@pytest.mark.usefixtures("mailer")
def test_nothing_is_missing(town: Town) -> None:
    """With its GRANTs nothing is found, and a worker consumes."""
    outbox = application(town)
    report = ask(outbox)
    assert inspected(report, "privileges").outcome is Inspected.OK
    town.dispatched(3)
    with Worker(outbox, roles=["consume", "retry", "prune", "bulk"]):
        wait_until(lambda: town.consumer.value("SELECT count(*) FROM outbox.consumer_message") == 3, "all is consumed")


@pytest.mark.parametrize(
    ("part", "table", "privilege"), [("producer", "half_message", "SELECT"), ("consumer", "consumer_offset", "DELETE")]
)
def test_a_privilege(town: Town, mailer: str, part: str, table: str, privilege: str) -> None:
    """One that is taken away is named with its GRANT, in either database; a worker doesn't start without it."""
    engine = town.owned["producer" if part == "producer" else "consumer"]
    with closing(town.admin("producer" if part == "producer" else "consumer")) as admin:
        admin.execute(f"REVOKE {privilege} ON outbox.{table} FROM {mailer}".encode())
    outbox = application(town)
    finding = the(ask(outbox), "privilege.missing")
    assert finding.severity is Severity.PROBLEM
    assert finding.details["missing"] == [f"{privilege} ON {table}"]
    assert f"outbox db grants --role consumer --to {mailer} --part {part}" in finding.mend
    with (
        pytest.raises(
            PrivilegeMissing, match=f"lacks {privilege} ON {table}.*--role consumer --to {mailer} --part {part}"
        ),
        Worker(outbox),
    ):
        pass
    mend_by_sql(engine, finding)
    assert inspected(ask(outbox), "privileges").outcome is Inspected.OK


def test_a_topic(town: Town, mailer: str) -> None:
    """A group whose topic is hidden would wait for ever: the doctor says so, and a worker doesn't start."""
    outbox = application(town, "secret")
    finding = the(ask(outbox), "topic.hidden")
    assert (finding.severity, finding.details["topic"], finding.details["role"]) == (Severity.PROBLEM, "secret", mailer)
    mend = f"outbox db grants --role consumer --to {mailer} --part producer --topic secret"
    assert mend in finding.mend
    with pytest.raises(PrivilegeMissing, match="row security hides its topics secret") as refused, Worker(outbox):
        pass
    assert mend in str(refused.value)
    printed = run_cli(*mend.split()[1:]).out
    with closing(town.admin("producer")) as admin:
        for statement in printed.split(";\n")[:-1]:
            admin.execute(statement.encode())
    assert inspected(ask(outbox), "privileges").outcome is Inspected.OK


def test_a_worker_of_two_roles(town: Town, mailer: str) -> None:
    """What lacks is printed for both: no role of ours both dispatches and consumes."""
    with town.at["producer"].connect() as connection, pytest.raises(PrivilegeMissing) as refused:
        require_privileges(connection, "outbox", {"dispatch", "consume"}, "producer", ["secret"])
    of_worker, of_consumer = str(refused.value).partition("this prints: ")[2].split(" and ")
    assert of_worker == f"outbox db grants --role worker --to {mailer} --part producer"
    assert of_consumer == f"outbox db grants --role consumer --to {mailer} --part producer --topic secret"


def test_a_role_that_is_told_of_what_is_parked(town: Town, mailer: str) -> None:
    """It writes a message for that where it consumes: a worker whose role may not send there doesn't start."""
    migration.upgrade(town.owned["consumer"], ["producer"])
    with closing(town.admin("consumer")) as admin:
        for statement in statements("consumer", mailer, "producer"):
            admin.execute(statement.encode())
        outbox = application(town)
        outbox.on_parked("t")(lambda letter, session: None)
        with (
            pytest.raises(PrivilegeMissing, match=r"lacks .*INSERT ON op_message.*--part producer"),
            Worker(outbox, roles=["consume"]),
        ):
            pass
        for statement in statements("producer", mailer, "producer"):
            admin.execute(statement.encode())
    with Worker(outbox, roles=["consume"]):
        pass


def test_by_address_alone(town: Town, mailer: str) -> None:
    """Without the application, what the role is there for is said; or else not known, where it isn't the owner."""
    url = town.at["consumer"].url
    assert "--role" in str(inspected(examine(url, town.settings), "privileges").why)
    assert inspected(examine(town.owned["consumer"], town.settings), "privileges").outcome is Inspected.OK
    assert inspected(examine(url, town.settings, roles=["consumer"]), "privileges").outcome is Inspected.OK
    finding = the(examine(url, town.settings, roles=["operator"]), "privilege.missing")
    assert "INSERT ON bulk_job" in finding.details["missing"]
    shown = run_cli("doctor", "--url", url.render_as_string(hide_password=False), "--role", "operator")
    assert f"The role {mailer} is to act as operator" in shown.out
    assert "did you mean viewer?" in run_cli("doctor", "--url", str(url), "--role", "viever").err


def test_source_that_is_away(town: Town, mailer: str) -> None:
    """A source that can't be reached is said not to have been inspected."""
    outbox = Outbox(town.at["consumer"], settings=town.settings)
    outbox.consumer("t", group="g", source="postgresql+psycopg://nobody@127.0.0.1:1/shop")(succeed)
    assert "127.0.0.1:1/shop, which the groups read, was not inspected" in str(inspected(ask(outbox), "privileges").why)


def test_printed() -> None:
    """The command prints a transaction for each database that has something to grant; and refuses what it can't."""
    shown = run_cli("db", "grants", "--role", "producer", "--to", "Shop", "--schema", "mail").out
    assert shown.startswith("-- Shop as producer, in the producer's database\nBEGIN;\n")
    assert 'GRANT USAGE ON SEQUENCE "mail".op_sequence TO "Shop";\n' in shown
    assert "consumer" not in shown
    assert "superuser" in run_cli("db", "grants", "--role", "operator", "--to", "ada").out
    for refused in (
        ["--role", "consumr", "--to", "a"],
        ["--role", "viewer", "--to", "a", "--topic", "t"],
        ["--role", "viewer", "--to", "a\nb"],
    ):
        assert run_cli("db", "grants", *refused).code == 2
