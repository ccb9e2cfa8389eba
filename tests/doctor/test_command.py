"""``outbox doctor``: what it prints, and with which code it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import Engine

from outbox import Outbox
from outbox.cli.output import Code
from outbox.operator.health.examine import INSPECTIONS
from tests.cli.conftest import Result, run_cli
from tests.doctor.support import ONE_SIDED, dispatch_all, sql
from tests.kit.warm import warm_python

SHOP = """
import os
from sqlalchemy import create_engine
from outbox import Outbox, Resolution, Settings

print("the shop is open")
outbox = Outbox(create_engine(os.environ["SHOP_DATABASE"]), settings=Settings(check_interval=7))

@outbox.checker("payments")
def check(orphan):
    return Resolution.UNKNOWN

@outbox.consumer("orders", group="till", threads=3)
def handle(message, session):
    pass
"""
STRICT = """
from outbox import Outbox, Settings
outbox = Outbox(None, settings=Settings(inbox_retention=10))
"""


@pytest.fixture(autouse=True)
def environment(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The test's database in the environment, and applications in the folder."""
    url = engine.url.render_as_string(hide_password=False)
    monkeypatch.setenv("OUTBOX_DATABASE_URL", url)
    monkeypatch.setenv("SHOP_DATABASE", url)
    for name in ("OUTBOX_APP", "OUTBOX_SCHEMA"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "doctor_shop.py").write_text(SHOP)
    (tmp_path / "doctor_strict.py").write_text(STRICT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("doctor_shop", "doctor_strict"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def found(result: Result) -> list[str]:
    """Return the codes of what was found, but for what is known of the tests' server."""
    assert isinstance(result.json["findings"], list)
    known = (each["code"] for each in result.json["findings"] if not each["code"].startswith("durability."))
    return sorted(code for code in known if code not in ONE_SIDED)


def test_findings_as_table(engine: Engine, outbox: Outbox) -> None:
    """Problems come first, each with its code, its sentence and the mend; the last line counts."""
    with engine.begin() as connection:
        half_id = outbox.prepare(connection, "payments", {})
    sql(engine, "UPDATE outbox.half_check SET next_check_at = now() - interval '5 minutes'")
    result = run_cli("doctor")
    assert (result.code, result.err) == (Code.PROBLEMS, "")
    lines = result.out.splitlines()
    start = lines.index("PROBLEM  checker.missing")
    assert lines[start + 1].startswith("  1 undecided half of topic 'payments', such as ")
    assert lines[start + 2].startswith("  mend: register one with @outbox.checker('payments')")
    assert lines[start + 3].startswith(f"        or decide one by hand: outbox half commit|rollback {half_id}")
    assert f"; {len(INSPECTIONS) - 1} of {len(INSPECTIONS)} inspections done in " in lines[-1]
    assert result.out.index("PROBLEM") < result.out.index("NOTE  durability.full_page_writes")
    assert str(engine.url.password) not in result.out


def test_findings_as_json(engine: Engine, outbox: Outbox) -> None:
    """One JSON object on stdout: all findings with their details, and all inspections."""
    with engine.begin() as connection:
        half_id = outbox.prepare(connection, "payments", {})
    sql(engine, "UPDATE outbox.half_check SET parked_at = now(), reason = 'over'")
    result = run_cli("doctor", "-o", "json")
    assert (result.code, result.err) == (Code.PROBLEMS, "")
    assert result.out.count("\n") == 1
    shown = result.json
    assert set(shown) == {"database", "schema", "at", "healthy", "findings", "inspections"}
    assert shown["healthy"] is False
    (parked,) = (each for each in shown["findings"] if each["code"] == "half.parked")
    assert set(parked) == {"code", "severity", "sentence", "mend", "details", "page", "query", "database", "silenced"}
    assert parked["severity"] == "problem"
    assert parked["details"] == {"topic": "payments", "halves": 1, "half_id": str(half_id),
                                 "age": parked["details"]["age"]}  # fmt: skip
    outcomes = {each["name"]: (each["outcome"], each["why"]) for each in shown["inspections"]}
    assert outcomes["parked halves"] == ("finding", None)
    assert outcomes["dispatch"] == ("ok", None)
    assert outcomes["retention of consumers"] == ("skipped", "the application and its consumers aren't known")
    assert len(outcomes) == len(INSPECTIONS)
    assert str(engine.url.password) not in result.out


def test_application(engine: Engine, outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --app its own database, settings and checkers are inspected; what it prints is no part of the data."""
    with engine.begin() as connection:
        outbox.prepare(connection, "payments", {}, immunity=3600)
        outbox.prepare(connection, "stock", {}, immunity=3600)
    monkeypatch.delenv("OUTBOX_DATABASE_URL")
    result = run_cli("doctor", "--app", "doctor_shop:outbox", "-o", "json")
    assert (result.code, result.err) == (Code.PROBLEMS, "the shop is open\n")
    assert found(result) == ["checker.missing"]
    (finding,) = (each for each in result.json["findings"] if each["code"] == "checker.missing")
    assert "topic 'stock'" in finding["sentence"]
    assert "doctor_shop:outbox registers no checker" in finding["sentence"]
    assert "outbox run --app doctor_shop:outbox" in finding["mend"]
    monkeypatch.setenv("OUTBOX_APP", "doctor_shop:outbox")
    assert found(run_cli("doctor", "-o", "json")) == ["checker.missing"]


def test_settings_of_the_application(engine: Engine, outbox: Outbox) -> None:
    """The application's check interval tells when a check is late, not that of the environment."""
    with engine.begin() as connection:
        outbox.prepare(connection, "payments", {})
    sql(engine, "UPDATE outbox.half_check SET next_check_at = now() - interval '30 seconds'")
    assert found(run_cli("doctor", "-o", "json")) == []
    assert found(run_cli("doctor", "--app", "doctor_shop:outbox", "-o", "json")) == ["check.late"]


def test_another_database_than_the_applications(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --url it is that database, whatever the application's is."""
    monkeypatch.setenv("SHOP_DATABASE", "postgresql+psycopg://me@127.0.0.1:1/shop")
    assert run_cli("doctor", "--app", "doctor_shop:outbox").code == Code.UNAVAILABLE
    url = engine.url.render_as_string(hide_password=False)
    assert found(run_cli("doctor", "--app", "doctor_shop:outbox", "--url", url, "-o", "json")) == []


def test_schema(engine: Engine) -> None:
    """With --schema it is that schema, also of an application."""
    for app in ((), ("--app", "doctor_shop:outbox")):
        result = run_cli("doctor", "--schema", "mail", "-o", "json", *app)
        assert result.json["schema"] == "mail"
        assert found(result) == ["tables.missing"]


def test_unreachable() -> None:
    """Nobody listens there: 69, and no report."""
    result = run_cli("doctor", "--url", "postgresql+psycopg://me:hunter2@127.0.0.1:1/shop", "-o", "json")
    assert (result.code, result.out) == (Code.UNAVAILABLE, "")
    assert result.err.startswith("error: the database is unavailable: ")
    assert result.err.count("\n") == 1
    assert "hunter2" not in result.err


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (("--url", "mysql://me@host/shop"), Code.CONFIG, "needs PostgreSQL"),
        (("--schema", "no; schema"), Code.CONFIG, "must match"),
        (("--app", "nowhere:outbox"), Code.CONFIG, "there is no module 'nowhere'"),
        (("--app", "doctor_shop:nothing"), Code.CONFIG, "it has doctor_shop:outbox"),
        (("-o", "yaml"), Code.USAGE, "Usage: outbox doctor"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], code: Code, error: str) -> None:
    """What can't be inspected has the exit codes of everywhere else."""
    result = run_cli("doctor", *arguments)
    assert (result.code, result.out) == (code, "")
    assert error in result.err


def test_no_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither option, variable nor application: wrong usage."""
    monkeypatch.delenv("OUTBOX_DATABASE_URL")
    assert run_cli("doctor").code == Code.USAGE


def test_contradicting_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of the environment that contradict each other are a finding, and not the end."""
    monkeypatch.setenv("OUTBOX_INBOX_RETENTION", "10")
    result = run_cli("doctor", "-o", "json")
    assert result.code == Code.PROBLEMS
    assert found(result) == ["settings.refused"]
    monkeypatch.setenv("OUTBOX_INBOX_RETENTION", "soon")
    assert found(run_cli("doctor", "-o", "json")) == ["settings.refused"]


def test_contradicting_settings_of_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an application keep it from being imported: a finding where the database is known, else 78."""
    result = run_cli("doctor", "--app", "doctor_strict:outbox", "-o", "json")
    assert found(result) == ["settings.refused"]
    assert result.code == Code.PROBLEMS
    monkeypatch.delenv("OUTBOX_DATABASE_URL")
    result = run_cli("doctor", "--app", "doctor_strict:outbox")
    assert (result.code, result.out) == (Code.CONFIG, "")
    assert "inbox_retention = 10 s is shorter than retention" in result.err


def test_names_steer_no_terminal(engine: Engine, outbox: Outbox) -> None:
    """What a name may hold is written out."""
    with engine.begin() as connection:
        outbox.send(connection, "orders", {})
    dispatch_all(engine, outbox)
    sql(engine, "INSERT INTO outbox.consumer_offset VALUES (E'\\x1b[31mred', 'orders', 0, 0, 0)")
    sql(engine, "INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status, "
                "attempts) VALUES (E'\\x1b[31mred', gen_random_uuid(), 'orders', 0, 1, 'parked', 1)")  # fmt: skip
    result = run_cli("doctor")
    assert "message.parked" in result.out
    assert "\x1b" not in result.out


def test_process(engine: Engine) -> None:
    """As a process of its own: one object on stdout, nothing on stderr."""
    done = subprocess.run(
        [warm_python(), "-m", "outbox.cli", "doctor", "-o", "json"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    shown = json.loads(done.stdout)
    assert done.returncode == (Code.DONE if shown["healthy"] else Code.PROBLEMS)


def test_help() -> None:
    """The help says what is inspected, and when the exit code is 6."""
    result = run_cli("doctor", "--help")
    assert (result.code, result.err) == (0, "")
    for word in ("pooler", "autovacuum", "replication slots", "The exit code is 6", "OUTBOX_APP"):
        assert word in result.out
