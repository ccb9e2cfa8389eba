"""``outbox run`` and ``outbox demo``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from outbox import Outbox
from outbox.cli.output import Code
from tests.cli.conftest import Cli
from tests.kit import ROOT, wait_until
from tests.kit.warm import warm_python

SHOP = """
import os
from sqlalchemy import create_engine
from outbox import Outbox

outbox = Outbox(create_engine(os.environ["OUTBOX_DATABASE_URL"]))
not_one = 42

@outbox.consumer("orders", group="till")
def handle(message, session):
    pass
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run in, with an application of the test's own name."""
    (tmp_path / "cli_shop.py").write_text(SHOP)
    (tmp_path / "cli_broken.py").write_text("import json\njson.loads('{')\n")
    (tmp_path / "cli_lost.py").write_text("import no_such_module\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.mark.parametrize(
    ("app", "hint"),
    [
        ("cli_shop", "must be MODULE:OBJECT"),
        ("cli_nowhere:outbox", "there is no module 'cli_nowhere' in "),
        ("cli_shop:nothing", "has no 'nothing'; it has cli_shop:outbox"),
        ("cli_shop:not_one", "is a int, not an Outbox"),
        ("cli_broken:outbox", "JSONDecodeError"),
        ("cli_lost:outbox", "ModuleNotFoundError: No module named 'no_such_module' ("),
    ],
)
def test_app_that_is_none(cli: Cli, here: Path, app: str, hint: str) -> None:
    """An --app that can't be used: 78, with the reason and the place."""
    result = cli("run", "--app", app)
    assert (result.code, result.out) == (Code.CONFIG, "")
    assert result.err.startswith(f"error: --app '{app}'")
    assert result.err.count("\n") == 1
    assert hint in result.err


def test_roles_that_are_none(cli: Cli, here: Path) -> None:
    """A role that doesn't exist: 78, with those which do."""
    result = cli("run", "--app", "cli_shop:outbox", "--roles", "dispatch,cook")
    assert result.code == Code.CONFIG
    assert "dispatch, release, check, prune, consume, retry" in result.err.splitlines()[-1]


def test_unmigrated(cli: Cli, here: Path, empty_url: str) -> None:
    """A worker doesn't start without its tables: 78, with the command to run."""
    done = subprocess.run(
        [warm_python(), "-m", "outbox.cli", "run", "--app", "cli_shop:outbox"],
        env={**os.environ, "OUTBOX_DATABASE_URL": empty_url, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (Code.CONFIG, "")
    assert "run: outbox db upgrade --url" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def consume_until_sigterm(url: str, *arguments: str) -> str:
    """Run a worker until a message is consumed, and end it: with 0 and nothing on stdout; return its log."""
    process = subprocess.Popen(
        [warm_python(), "-m", "outbox.cli", "run", "--app", *arguments],
        env={**os.environ, "OUTBOX_DATABASE_URL": url, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        engine = create_engine(url)
        with engine.begin() as connection:
            Outbox(engine).send(connection, "orders", {})
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            query = text("SELECT count(*) FROM outbox.consumer_message WHERE status = 'consumed'")
            wait_until(lambda: connection.scalar(query) == 1, "the message is consumed")
        engine.dispose()
    finally:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, ""), err
    return err


def test_runs_until_sigterm(here: Path, url: str) -> None:
    """The worker does its work, and SIGTERM ends it with 0 and nothing on stdout."""
    log = consume_until_sigterm(url, "cli_shop:outbox")
    assert "INFO outbox.worker: worker started" in log


def test_a_service_that_speaks_sql_only_needs_no_application(url: str, tmp_path: Path) -> None:
    """`--url` without `--app`: what SQL has sent is dispatched, now and when it is due, and it says so."""
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("SELECT outbox.send('paid', '{}'), outbox.send('paid', '{}', delay => '0.2 s')"))
    log = tmp_path / "log"
    with log.open("w") as stderr, worker_process(["--url", url], stderr=stderr) as process, engine.connect() as reader:
        reader.execution_options(isolation_level="AUTOCOMMIT")
        count = text("SELECT count(*) FROM outbox.message")
        wait_until(lambda: reader.scalar(count) == 2, "both are dispatched")
        duties = wait_until(lambda: reader.scalar(text("SELECT duties FROM outbox.worker")), "it reports")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    engine.dispose()
    assert {"dispatch", "release", "prune"} <= set(duties)
    assert not {duty for duty in duties if duty.startswith(("check", "consume", "retry"))}


@contextmanager
def worker_process(arguments: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """`outbox run`, without what the environment says."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")}
    command = [warm_python(), "-m", "outbox.cli", "run", *arguments]
    process = subprocess.Popen(command, env={**env, "PYTHONPATH": str(ROOT)}, text=True, **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ([], "give --app MODULE:OBJECT; or --url"),
        (["--app", "cli_shop:outbox", "--url", "postgresql://h/d"], "give --bind URL with --app"),
        (["--bind", "postgresql://h/d", "--url", "postgresql://h/d"], "give --bind URL with --app"),
    ],
)
def test_a_worker_has_either_an_application_or_a_database(cli: Cli, arguments: list[str], hint: str) -> None:
    """Anything else is wrong usage; a forgotten --app doesn't start a worker that consumes nothing."""
    result = cli("run", *arguments)
    assert (result.code, result.out) == (Code.USAGE, "")
    assert hint in result.err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--transfers", "0"], "transfers = 0 must be between"),
        (["--opening-balance", "much"], "'much' is not an amount"),
    ],
)
def test_demo_options(cli: Cli, arguments: list[str], hint: str) -> None:
    """What the demo can't be asked to do is wrong usage."""
    result = cli("demo", *arguments)
    assert (result.code, result.out) == (Code.USAGE, "")
    assert hint in result.err


def test_demo_has_the_options_of_the_example() -> None:
    """The command line offers each option of the example, with the same default."""
    import dataclasses

    from examples.bank_transfer.options import DemoOptions
    from outbox.cli.processes import DemoChoices

    offered = {f.name: f.default for f in dataclasses.fields(DemoChoices)}
    assert offered == {f.name: f.default for f in dataclasses.fields(DemoOptions) if f.name != "json"}


TENANTS = """
import os
from sqlalchemy import create_engine
from outbox import Outbox

outbox = Outbox(group="shop")

@outbox.consumer("orders", group="till")
def handle(message, session):
    pass

def make():
    outbox.bind(create_engine(os.environ["OUTBOX_DATABASE_URL"]))
    return outbox

def make_two():
    engine = create_engine(os.environ["OUTBOX_DATABASE_URL"])
    return {"one": outbox.bound_to(engine), "other": outbox.bound_to(engine)}

def fail():
    raise LookupError("no such tenant")

none = []
"""


@pytest.fixture
def tenants(here: Path) -> Path:
    """The folder, with an application that has no database when it is imported."""
    (here / "cli_tenants.py").write_text(TENANTS)
    return here


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["outbox"], "has no database yet: give --bind URL, or name a function"),
        (["make"], "is a function, not an Outbox; to have it called, write cli_tenants:make()"),
        (["fail()"], "LookupError: no such tenant ("),
        (["none"], "is empty: there is no Outbox in it"),
        (["make_two()", "--bind", "postgresql://localhost/x"], "--bind is for one Outbox, and --app"),
    ],
)
def test_app_without_a_database(cli: Cli, tenants: Path, url: str, arguments: list[str], hint: str) -> None:
    """What is missing, and how to give it: 78, in one line."""
    app, *more = arguments
    result = cli("run", "--app", f"cli_tenants:{app}", *more)
    assert (result.code, result.out) == (Code.CONFIG, "")
    assert hint in result.err
    assert result.err.count("\n") == 1


def test_a_command_for_one_outbox(cli: Cli, tenants: Path, url: str) -> None:
    """The doctor looks at one database at a time."""
    result = cli("doctor", "--app", "cli_tenants:make_two()")
    assert result.code == Code.CONFIG
    assert "has 2 Outboxes, and this command takes one" in result.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["cli_tenants:make()"],
        ["cli_tenants:make_two()"],
        ["cli_tenants:outbox", "--bind", "{url}"],
        ["cli_tenants:outbox", "--bind", "north={url}", "--bind", "south={url}"],
    ],
)
def test_runs_what_is_bound_later(tenants: Path, url: str, arguments: list[str]) -> None:
    """An application that a function makes, several Outboxes, and databases of the command line all have a worker."""
    consume_until_sigterm(url, *(each.format(url=url) for each in arguments))
