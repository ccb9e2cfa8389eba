"""What the tests of the doctor share: ask it, find a finding, and do what it says."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
from sqlalchemy import URL, Connection, Engine, make_url, text

from outbox import Outbox, Settings
from outbox.dispatch.dispatch_pass import dispatch_once
from outbox.operator.health.examine import HealthReport, InspectionResult
from outbox.operator.health.examine import examine as examine_database
from outbox.operator.health.rules import Diagnosis
from tests.cli.conftest import Result, run_cli

#: What the doctor rightly finds about the server of the tests, which forgets everything when the machine crashes.
CARELESS = frozenset({"durability.fsync", "durability.full_page_writes"})


def examine(bind: Engine | URL | str, settings: Settings | None = None, *rest: Any, **more: Any) -> HealthReport:
    """Ask the doctor, whatever the environment says."""
    return examine_database(bind, settings or Settings(), *rest, **more)


#: What the doctor rightly notes of most tests, which send without a consumer, or declare one and send nothing.
ONE_SIDED = frozenset({"topic.silent", "topic.unread"})


def codes(report: HealthReport) -> list[str]:
    """Return what was found, but for what is known of the server and of the tests."""
    return sorted(finding.code for finding in report.findings if finding.code not in CARELESS | ONE_SIDED)


def the(report: HealthReport, code: str) -> Diagnosis:
    """Return the one finding of this code."""
    (finding,) = (finding for finding in report.findings if finding.code == code)
    return finding


def inspected(report: HealthReport, name: str) -> InspectionResult:
    """Return what came of an inspection."""
    (found,) = (each for each in report.inspections if each.name == name)
    return found


def mend_by_sql(bind: Engine | str, finding: Diagnosis) -> None:
    """Run the first line of the mend as psql would: statement by statement, each by itself."""
    url = bind.url if isinstance(bind, Engine) else make_url(bind)
    with closing(raw(url, autocommit=True)) as connection:
        for statement in finding.mend.splitlines()[0].split(";"):
            if statement.strip():
                connection.execute(statement.encode())


def mend_by_command(bind: Engine | str, line: str, *more: str) -> Result:
    """Run a command of ours that a mend gives, with the password that it masks."""
    url = bind.url.render_as_string(hide_password=False) if isinstance(bind, Engine) else bind
    _, _, command = line.rpartition(": outbox ") if ": outbox " in line else line.partition("outbox ")
    arguments = [url if part.startswith("postgresql+psycopg://") else part for part in shlex.split(command)]
    return run_cli(*arguments, *more)


def raw(url: URL | str, **options: Any) -> psycopg.Connection[Any]:
    """Return a connection of the driver's own."""
    address = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    return psycopg.connect(address, **options)


@contextmanager
def role(engine: Engine, *grants: str, attributes: str = "") -> Iterator[URL]:
    """Yield the URL of a role that may log in, and what the grants say (``{role}`` is its name)."""
    name = f"doctor_{engine.url.database}"
    with closing(raw(engine.url, autocommit=True)) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'hunter2' {attributes}".encode())
        try:
            for grant in grants:
                connection.execute(grant.format(role=name).encode())
            yield engine.url.set(username=name, password="hunter2")  # noqa: S106
        finally:
            connection.execute(f"DROP OWNED BY {name}".encode())
            connection.execute(f"DROP ROLE {name}".encode())


READ_ALL = ("GRANT USAGE ON SCHEMA outbox TO {role}", "GRANT SELECT ON ALL TABLES IN SCHEMA outbox TO {role}")


def sql(bind: Engine | Connection, statement: str, **values: Any) -> Any:
    """Run a statement and commit it; return its first value if it has one."""
    if isinstance(bind, Engine):
        with bind.begin() as connection:
            return sql(connection, statement, **values)
    result = bind.execute(text(statement), values)
    return result.scalar() if result.returns_rows else None


def dispatch_all(engine: Engine, outbox: Outbox) -> None:
    """Dispatch what is committed."""
    with engine.connect() as connection:
        while dispatch_once(connection, outbox.settings):
            pass
