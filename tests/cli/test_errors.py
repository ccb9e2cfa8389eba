"""What can be expected to go wrong: one line on stderr, an exit code, no traceback, no password."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.exc import OperationalError

from outbox import Outbox, __version__
from outbox.cli.output import Code, if_away
from outbox.embedded import ServerLike
from tests.cli.conftest import Cli, Result
from tests.cli.conftest import command as command_line

COMMANDS = (
    ("db", "current"),
    ("db", "check"),
    ("db", "upgrade"),
    ("stats",),
    ("messages", "list"),
    ("messages", "show", "01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11"),
    ("half", "list"),
    ("half", "show", "01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11"),
    ("half", "check", "01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11", "--yes", "--reason", "why"),
    ("half", "reset", "--status", "parked", "--yes", "--reason", "why"),
    ("half", "commit", "01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11", "--yes", "--reason", "why"),
)


def check_failure(result: Result, code: Code) -> str:
    """Make sure that there is one line of error and no data; return the line."""
    assert (result.code, result.out) == (code, ""), result.err
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert "hunter2" not in result.err
    return result.err


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_unreachable_database(cli: Cli, command: tuple[str, ...]) -> None:
    """Nobody listens there: 69."""
    line = check_failure(cli(*command, "--url", "postgresql+psycopg://me:hunter2@127.0.0.1:1/shop"), Code.UNAVAILABLE)
    assert "the database is unavailable" in line
    assert "Connection refused" in line


AWAY = "north=postgresql+psycopg://me:hunter2@127.0.0.1:1/shop"


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (("messages", "list"), "order-7"),
        (("messages", "list", "-o", "json"), "order-7"),
        (("messages", "show", "{id}"), "written"),
        (("messages", "conversation", "{id}"), "{id}"),
        (("inbox", "list"), "billing"),
        (("dead", "groups"), "billing"),
        (("audit", "list"), "ann"),
        (("group", "list"), "billing"),
        (("topics", "paused"), "orders"),
        (("handlers",), "kind"),
        (("workers",), "busy"),
        (("producers",), "name"),
        (("lock", "list"), "lock"),
        (("bulk", "list"), "act"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
def test_what_can_be_read_is_shown(cli: Cli, engine: Engine, command: tuple[str, ...], shown: str) -> None:
    """Of two databases one is away: the other's is shown, it is named, and the exit code says that it isn't all."""
    outbox = Outbox(engine)
    with engine.begin() as connection:
        message_id = str(outbox.send(connection, "orders", {}, key="order-7"))
        for statement in (
            "INSERT INTO outbox.consumer_offset (consumer_group, topic, queue, position, starts) "
            "VALUES ('billing', 'orders', 0, 0, 0)",
            "INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status, "
            "attempts, last_error, error_kind) VALUES ('billing', gen_random_uuid(), 'orders', 0, 1, 'parked', 1, 'E', "
            "'E')",
            "INSERT INTO outbox.worker (id, name, version, roles, started_at, seen_at, duties, handlers) "
            "VALUES (gen_random_uuid(), 'busy', '1', '[]', now(), now(), '{}', '[]')",
        ):
            connection.execute(text(statement))
    outbox.operator.pause_topic("orders", create=True, by="ann", why="x")
    result = cli(*(word.format(id=message_id) for word in command), "--database", AWAY)
    assert (result.code, shown.format(id=message_id) in result.out) == (Code.UNAVAILABLE, True), result.out + result.err
    assert "north can't be reached" in result.err
    assert "hunter2" not in result.out + result.err


def test_an_act_needs_all_databases(cli: Cli, engine: Engine) -> None:
    """What one that is away knows may speak against it; nothing is done."""
    result = cli("topics", "pause", "orders", "--reason", "x", "--yes", "--database", AWAY)
    assert (result.code, result.out) == (Code.UNAVAILABLE, "")
    assert Outbox(engine).operator.topic_pauses() == []


def test_no_such_database_and_wrong_password(cli: Cli, url: str) -> None:
    """The server is there, but doesn't let us in: 69 as well."""
    check_failure(cli("stats", "--url", make_url(url).set(database="nope").render_as_string(False)), Code.UNAVAILABLE)
    address = make_url(url).set(password="hunter2").render_as_string(False)  # noqa: S106
    assert "authentication failed" in check_failure(cli("stats", "--url", address), Code.UNAVAILABLE)


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("garbage", "'garbage' can't be read"),
        ("postgresql://me:hunter2@host:port/shop", "'postgresql://me:***@host:port/shop' can't be read"),
        ("mysql://me:hunter2@host/shop", "needs PostgreSQL, not 'mysql'"),
        ("postgresql+psycopg2://me:hunter2@host/shop", "needs the driver psycopg (3), not 'psycopg2'"),
        ("postgresql+asyncpg://me:hunter2@host/shop", "not 'asyncpg'; write postgresql+psycopg://"),
    ],
)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_bad_url(cli: Cli, command: tuple[str, ...], url: str, hint: str) -> None:
    """A URL that can't work: 78, with the form that does."""
    line = check_failure(cli(*command, "--url", url), Code.CONFIG)
    assert hint in line
    assert re.search(r"postgresql\+psycopg://user(:\*\*\*)?@host:5432/database", line)


def test_no_url(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither option nor variable: wrong usage."""
    monkeypatch.delenv("OUTBOX_DATABASE_URL")
    assert "give --url" in check_failure(cli("stats"), Code.USAGE)


@pytest.mark.parametrize(
    ("misspelt", "right"), [("OUTBOX_DATABSE_URL", "OUTBOX_DATABASE_URL"), ("OUTBOX_RETENTON", "OUTBOX_RETENTION")]
)
def test_misspelt_variable(cli: Cli, monkeypatch: pytest.MonkeyPatch, misspelt: str, right: str) -> None:
    """A variable that is no setting is named with the nearest that is one, also where it is why the URL is missing."""
    monkeypatch.setenv(misspelt, "5")
    for command in (("stats",), ("messages", "list"), ("db", "current")):
        assert f"{misspelt} is unknown; did you mean {right}?" in check_failure(cli(*command), Code.CONFIG)
    monkeypatch.delenv("OUTBOX_DATABASE_URL")
    assert f"did you mean {right}?" in check_failure(cli("stats"), Code.CONFIG)


@pytest.mark.parametrize("form", ["postgres://", "postgresql://"])
def test_other_forms_of_the_url(cli: Cli, url: str, form: str) -> None:
    """What libpq and hosting providers call PostgreSQL works as well."""
    assert cli("stats", "--url", url.replace("postgresql+psycopg://", form)).code == Code.DONE


@pytest.mark.parametrize("command", [c for c in COMMANDS if c[1:] not in {("current",), ("upgrade",)}], ids=" ".join)
def test_unmigrated_database(cli: Cli, empty_url: str, command: tuple[str, ...]) -> None:
    """No tables: 78, with the command to run."""
    line = check_failure(cli(*command, "--url", empty_url), Code.CONFIG)
    assert "run: outbox db upgrade --url postgresql+psycopg://" in line
    password = make_url(empty_url).password
    assert not password or password not in line


def test_database_newer_than_code(cli: Cli, engine: Engine) -> None:
    """Tables of a newer version: 78."""
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox.outbox_version SET version_num = 'producer_0099' "
                                "WHERE version_num LIKE 'producer%'"))  # fmt: skip
    assert "newer than this code" in check_failure(cli("stats"), Code.CONFIG)


def test_contradicting_settings(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings in the environment that contradict each other: 78."""
    monkeypatch.setenv("OUTBOX_INBOX_RETENTION", "10")
    assert "inbox_retention" in check_failure(cli("stats"), Code.CONFIG)


def test_bad_schema(cli: Cli) -> None:
    """A name that is no schema's never gets into SQL: 78."""
    assert "must match" in check_failure(cli("stats", "--schema", 'x"; DROP TABLE y'), Code.CONFIG)


def test_not_permitted(cli: Cli, url: str, engine: Engine) -> None:
    """A role that may not read the tables: 1, in one line."""
    role = f"reader_{make_url(url).database}"
    with engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN PASSWORD 'hunter2'"))
    try:
        address = make_url(url).set(username=role, password="hunter2").render_as_string(False)  # noqa: S106
        assert "permission denied" in check_failure(cli("stats", "--url", address), Code.FAILED)
    finally:
        with engine.begin() as connection:
            connection.execute(text(f"DROP ROLE {role}"))


@pytest.mark.parametrize(
    "arguments",
    [("nonsense",), ("db", "nonsense"), ("stats", "--watch", "0"), ("db", "upgrade", "--part", "both")],
)
def test_wrong_usage(cli: Cli, arguments: tuple[str, ...]) -> None:
    """What the command line doesn't know: 2, with the usage."""
    result = cli(*arguments)
    assert (result.code, result.out) == (Code.USAGE, "")
    assert "Usage: outbox" in result.err


def test_debug_prints_the_traceback(cli: Cli) -> None:
    """With --debug the traceback comes before the line; the code stays."""
    result = cli("--debug", "stats", "--url", "postgresql+psycopg://me@127.0.0.1:1/shop")
    assert result.code == Code.UNAVAILABLE
    assert "Traceback (most recent call last)" in result.err
    assert result.err.splitlines()[-1].startswith("error: the database is unavailable")


def test_help_names_every_exit_code(cli: Cli) -> None:
    """The help lists the exit codes, and every command has a help of its own."""
    text_ = cli("--help").out
    for code in Code:
        assert f"{code.value:>3}  {code.meaning}" in text_
    for command in ("db upgrade", "db downgrade", "db current", "db check", "db sql", "run", "stats", "messages list",
                    "messages show", "half list", "half show", "half check", "half reset", "half commit",
                    "half rollback", "demo", "version"):  # fmt: skip
        result = cli(*command.split(), "--help")
        assert (result.code, result.err) == (0, "")
        assert f"Usage: outbox {command}" in result.out


def test_help_says_how_a_time_is_written(cli: Cli) -> None:
    """A filter's may count back from now; the moment when an act begins is no duration, and is refused as one."""
    assert "As 90s, 15m" in cli("messages", "list", "--help").out
    begins = (
        " ".join(cli("rule", "silence", "--help").out.split()).partition("--begins TIME")[2].partition("--reason")[0]
    )
    assert begins.endswith("Default: now. As 2026-01-31T12:00:00+00:00. ")
    said = cli("rule", "silence", "worker.none", "--begins", "30m", "--lasts", "1h", "--reason", "why")
    assert said.code == Code.USAGE
    assert "--begins" in said.err


def test_options_are_in_small_letters() -> None:
    """Typer 0.27 takes a metavar for the option's name where they differ by case alone: those names are written out."""

    def options(command: Any) -> Iterator[str]:
        for parameter in command.params:
            if parameter.param_type_name == "option":
                yield from (*parameter.opts, *parameter.secondary_opts)
        for below in getattr(command, "commands", {}).values():
            yield from options(below)

    found = list(options(command_line()))
    assert len(found) > 100
    assert [name for name in found if name != name.lower()] == []


def test_version(cli: Cli) -> None:
    """The first line is this package's version."""
    assert cli("version").out.splitlines()[0] == f"outbox {__version__}"


def watch(url: str) -> subprocess.Popen[str]:
    """Start a watch that prints JSON."""
    return subprocess.Popen(
        [sys.executable, "-m", "outbox.cli", "stats", "--watch", "0.1", "-o", "json"],
        env={**os.environ, "OUTBOX_DATABASE_URL": url, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_watch_waits_for_the_database(url: str, server: ServerLike) -> None:
    """A watch that has worked goes on by itself when the database is back."""
    process = watch(url)
    assert process.stdout
    assert process.stderr
    database = make_url(url).database
    admin = create_engine(server.url(), isolation_level="AUTOCOMMIT")
    try:
        with admin.connect() as connection:
            assert process.stdout.readline()
            connection.execute(text(f"ALTER DATABASE {database} ALLOW_CONNECTIONS false"))
            away = process.stderr.readline()
            assert away.startswith("the database is unavailable")
            assert away.endswith("trying again\n")
            connection.execute(text(f"ALTER DATABASE {database} ALLOW_CONNECTIONS true"))
        process.stderr.close()
        for _ in range(3):
            assert process.stdout.readline()
    finally:
        admin.dispose()
        process.kill()
        process.wait()
        process.stdout.close()


def test_interrupted(url: str) -> None:
    """Ctrl-C ends a watch with 130, after whole lines of JSON."""
    process = watch(url)
    assert process.stdout
    lines = [process.stdout.readline(), process.stdout.readline()]
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == Code.INTERRUPTED
    assert err == "interrupted\n"
    assert all(
        line.startswith('{"at": "') and line.endswith("}\n") for line in [*lines, *rest.splitlines(keepends=True)]
    )


def interrupted() -> NoReturn:
    """Fail as a command does whose connection a Ctrl-C has closed: by the ROLLBACK after it."""
    try:
        raise KeyboardInterrupt
    finally:
        raise OperationalError("ROLLBACK", {}, psycopg.OperationalError("the connection is closed"))


def test_a_ctrl_c_is_never_taken_for_an_outage(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither told as one, nor waited for as one: by a command, and by a loop that waits."""
    monkeypatch.setattr("outbox.database.migration.current", lambda *_: interrupted())
    result = cli("db", "current")
    assert (result.code, result.err) == (Code.INTERRUPTED, "error: interrupted\n")
    with pytest.raises(OperationalError) as outage:
        interrupted()
    with pytest.raises(OperationalError):
        if_away(outage.value)
