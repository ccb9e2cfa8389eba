"""``outbox console``: as a newcomer starts it, and what people log in with."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import make_url

from outbox.cli.output import Code
from outbox.console.app import ConsoleConfig
from outbox.console.auth import PasswordHash, hash_token
from tests.cli.books import Terminal
from tests.cli.conftest import Cli
from tests.kit import PATIENCE
from tests.kit.warm import warm_python

ROOT = Path(__file__).parents[2]
NAMES = re.compile("OUTBOX_CONSOLE_")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the console is configured."""
    for name in filter(NAMES.match, list(os.environ)):
        monkeypatch.delenv(name)


def run(*arguments: str, program: tuple[str, ...] = ("-m", "outbox.cli"), **environment: str) -> Any:
    """Run a command in a process of its own."""
    return subprocess.run(
        [sys.executable, *program, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@contextmanager
def served(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Start a console; give its process, what it told until it listened, and its address."""
    process = subprocess.Popen(
        [warm_python(), "-m", "outbox.cli", "console", "--port", "0", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr
    told = ""
    try:
        while not (address := re.search(r"http://\S+/", told)):
            line = process.stderr.readline()
            assert line, told
            told += line
        yield process, told, address[0]
    finally:
        process.kill()
        process.communicate()


def test_a_newcomer(url: str, tmp_path: Path) -> None:
    """It tells which databases, where it listens, the token to log in with, and how to end it; Ctrl-C does."""
    with served(OUTBOX_DATABASE_URL=url) as (process, told, address):
        name = make_url(url).database
        assert f"{name} (producer and consumer): database '{name}'" in told
        assert "Ctrl-C ends it" in told
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
        assert process.stderr
        lines = [process.stderr.readline() for _ in range(3)]
        token = lines[2].strip()
        assert re.fullmatch(r"[\w-]{20,}", token), lines
        assert httpx.get(f"{address}api/v1/meta", timeout=PATIENCE).status_code == 401
        let_in = httpx.get(f"{address}api/v1/meta", headers={"Authorization": f"Bearer {token}"}, timeout=PATIENCE)
        assert let_in.status_code == 200, let_in.text
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert err.endswith("the console has stopped\n")
    password = make_url(url).password
    assert not password or str(password) not in told + err


def test_configured(url: str, cli: Cli, tmp_path: Path) -> None:
    """With users and tokens of files there is no token to tell; SIGTERM ends it as well."""
    made = cli("console", "token", "nightly", "--role", "viewer", "-o", "json").json
    (tmp_path / "tokens").write_text(made["entry"] + "\n")
    (tmp_path / "databases").write_text(f"shop={url}\n")
    environment = {
        "OUTBOX_CONSOLE_TOKENS_FILE": str(tmp_path / "tokens"),
        "OUTBOX_CONSOLE_DATABASES_FILE": str(tmp_path / "databases"),
    }
    options = ("--read-only", "--environment", "staging", "--root-path", "/outbox/")
    with served(*options, **environment, OUTBOX_DATABASE_URL="") as (process, told, address):
        assert "shop (producer and consumer)" in told
        assert address.endswith("/outbox/")
        headers = {"Authorization": f"Bearer {made['token']}"}
        meta = httpx.get(f"{address}api/v1/meta", headers=headers, timeout=PATIENCE).json()
        assert (meta["read_only"], meta["principal"]) == (True, "nightly")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "token" not in told + err


def refused(cli: Cli, code: Code, *arguments: str) -> str:
    """Make sure that a console doesn't start; return what it told."""
    result = cli("console", *arguments)
    assert (result.code, result.out) == (code, ""), result.err
    assert "hunter2" not in result.err
    assert "Traceback" not in result.err
    return result.err


def test_refused(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would let everybody in, or can't be used, is refused before it listens: 78."""
    assert "can be reached from other machines" in refused(cli, Code.CONFIG, "--host", "0.0.0.0")  # noqa: S104
    assert "root_path" in refused(cli, Code.CONFIG, "--root-path", "outbox")
    monkeypatch.setenv("OUTBOX_CONSOLE_USERS", "ann:operator:hunter2")
    assert "hash-password" in refused(cli, Code.CONFIG)
    monkeypatch.setenv("OUTBOX_CONSOLE_USERS", "hunter2")
    assert "name:role:hash" in refused(cli, Code.CONFIG)
    monkeypatch.delenv("OUTBOX_CONSOLE_USERS")
    monkeypatch.setenv("OUTBOX_CONSOLE_ALLOW_HOSTS", "x")
    assert "OUTBOX_CONSOLE_ALLOW_HOSTS is unknown" in refused(cli, Code.CONFIG)


def test_unusable_databases(cli: Cli, empty_url: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No database: 2; none that can be reached: 69; without tables: 78, with the command to run."""
    away = "postgresql+psycopg://me:hunter2@127.0.0.1:1/shop"
    assert "the database is unavailable" in refused(cli, Code.UNAVAILABLE, "--url", away)
    assert "outbox db upgrade --url" in refused(cli, Code.CONFIG, "--url", empty_url)
    monkeypatch.delenv("OUTBOX_DATABASE_URL")
    assert "give --url" in refused(cli, Code.USAGE)


def test_port_in_use(url: str) -> None:
    """A port that somebody has: 78, in words."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run("console", "--port", str(port), OUTBOX_DATABASE_URL=url)
    assert (done.returncode, done.stdout) == (Code.CONFIG, "")
    assert f"error: can't listen on 127.0.0.1 port {port}: Address already in use" in done.stderr
    assert "Traceback" not in done.stderr


WITHOUT = """
import sys
from outbox.cli import app

class Missing:
    name = ""
    def find_spec(self, name, *_):
        if name.partition(".")[0] == self.name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, missing := Missing())
for missing.name, arguments in (("uvicorn", ["console"]), ("fastapi", ["console"]), ("fastapi", ["messages", "list"])):
    try:
        app(arguments, prog_name="outbox")
    except SystemExit as left:
        print(missing.name, *arguments, int(left.code), file=sys.stderr)
"""


def test_without_the_extra(url: str) -> None:
    """Where the extra isn't installed: 78, with the command that installs it; and no other command minds."""
    done = run(program=("-c", WITHOUT), OUTBOX_DATABASE_URL=url)
    lines = done.stderr.splitlines()
    assert lines[1::2] == ["uvicorn console 78", "fastapi console 78"], done.stderr
    assert lines[4:] == ["fastapi messages list 0"]
    for line in lines[0:4:2]:
        assert line.startswith("error: outbox console needs ")
        assert line.endswith("pip install 'outbox-postgres[console]'")


def test_hash_password(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The password comes from stdin, never from an option; what is printed can be used as it is."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("hunter2\n"))
    plain = cli("console", "hash-password")
    assert (plain.code, plain.err) == (0, "")
    assert PasswordHash.read(plain.out.strip()).matches("hunter2")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hunter2"))
    entry = cli("console", "hash-password", "ann", "--role", "operator").out.strip()
    config = ConsoleConfig.from_env({"OUTBOX_CONSOLE_USERS": entry, "OUTBOX_DATABASE_URL": "postgresql://x/y"})
    hashed, role = config.users["ann"]
    assert (role, PasswordHash.read(hashed).matches("hunter2")) == ("operator", True)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert cli("console", "hash-password").code == Code.USAGE
    assert cli("console", "hash-password", "a:b").code == Code.USAGE


@pytest.mark.parametrize(("again", "code"), [("hunter2", Code.DONE), ("hunter3", Code.USAGE)])
def test_hash_password_asks_twice(cli: Cli, monkeypatch: pytest.MonkeyPatch, again: str, code: Code) -> None:
    """At a terminal it is asked for twice, and isn't shown."""
    answers = iter(["hunter2", again])

    def asked(_: str, stream: Any = None) -> str:
        assert stream is sys.stderr
        return next(answers)

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("getpass.getpass", asked)
    result = cli("console", "hash-password")
    assert result.code == code
    assert "hunter" not in result.out + result.err


def test_token(cli: Cli) -> None:
    """The entry is for the file, the token for who gets it, and each is another one."""
    result = cli("console", "token", "nightly", "--role", "operator")
    token = result.err.strip().rpartition(" ")[2]
    assert (result.code, result.out) == (0, f"nightly:operator:{hash_token(token)}\n")
    config = ConsoleConfig.from_env({"OUTBOX_CONSOLE_TOKENS": result.out, "OUTBOX_DATABASE_URL": "postgresql://x/y"})
    assert [principal.id for principal in config.tokens.values()] == ["nightly"]
    assert cli("console", "token", "nightly").err != result.err


def test_help(cli: Cli) -> None:
    """Each new command has a help of its own, with an example."""
    commands: list[str] = [
        *(f"messages {name}" for name in ("resend", "recall", "compensate", "export")),
        *(f"dead {name}" for name in ("groups", "list", "retry", "discard", "restore")),
        *(f"inbox {name}" for name in ("list", "retry", "park")),
        *(f"bulk {name}" for name in ("list", "show", "watch", "cancel")),
        *("audit list", "audit export", "console", "console hash-password", "console token", "workers", "handlers"),
    ]
    check: Callable[[str], Any] = lambda text: cli(*text.split(), "--help")  # noqa: E731
    for each in commands:
        result = check(each)
        assert (result.code, result.err) == (0, "")
        assert f"Usage: outbox {each}" in result.out
        assert "Example" in result.out, each


def test_what_happens_is_told_on_stderr(url: str) -> None:
    """As one JSON object a line, if that is asked for: a wrong token, and a login."""
    with served("--log-format", "json", OUTBOX_DATABASE_URL=url) as (process, _, address):
        assert process.stderr
        token = [process.stderr.readline() for _ in range(3)][2].strip()
        for sent in ("wrong", token):
            httpx.post(f"{address}login", data={"token": sent}, trust_env=False, timeout=PATIENCE)
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=60)
    records = [json.loads(line) for line in rest.splitlines() if line.startswith("{")]
    assert [(each["level"], each["outbox_event"]) for each in records] == [
        ("WARNING", "login.failed"), ("INFO", "login.succeeded")]  # fmt: skip
    assert token not in rest
