"""The console as a server of its own: what it is told, what it tells, and what it refuses."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy import URL

from outbox.console import AllowAll, Basic, Bearer, Principal, Role, hash_password, hash_token
from outbox.console.app import ConsoleConfig, app_of, authorizer_of, named_databases, serve
from outbox.console.auth import AnyOf, TrustedHeader
from outbox.errors import InvalidSettings, SchemaMissing
from tests.console.web import Asker, Shop, bearer
from tests.console.web import console_of as app_over
from tests.kit import PATIENCE

URL_A = "postgresql+psycopg://ann:hunter2@db.test/bank_a"
HASH = hash_password("x", cost=4)
_SERVE = "from outbox.console.app import ConsoleConfig, serve; "


def text_of(url: URL) -> str:
    """A URL with its password."""
    return url.render_as_string(hide_password=False)


@pytest.fixture(scope="module")
def served(museum: Shop) -> Iterator[tuple[str, str, subprocess.Popen[str]]]:
    """A console as a newcomer starts it, with nothing but a database: its address and what it told."""
    environ = {**os.environ, "OUTBOX_DATABASE_URL": text_of(museum.engine.url), "OUTBOX_CONSOLE_PORT": "0"}
    code = f"{_SERVE}serve(ConsoleConfig.from_env())"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stderr is not None
        told = ""
        while not re.search(r"^ {4}\S+$", told, re.MULTILINE):
            line = process.stderr.readline()
            assert line, told
            told += line
        yield re.findall(r"http://\S+", told)[0], told, process
        process.send_signal(signal.SIGINT)
        assert process.wait(60) is not None


def test_a_newcomer_logs_in_with_the_token_that_was_printed(served: tuple[str, str, subprocess.Popen[str]]) -> None:
    """It tells where it is and a token; that is typed into the page, and is in no link."""
    url, told, _ = served
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url)
    token = re.findall(r"^ {4}(\S+)$", told, re.MULTILINE)[0]
    assert token not in url
    with httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE) as browser:
        assert browser.get("/").headers["location"] == "/login?next=%2F"
        assert "Log in" in browser.get("/login").text
        assert browser.post("/login", data={"token": "wrong"}).status_code == 401
        assert browser.post("/login", data={"token": token}).headers["location"] == "/"
        page = browser.get("/")
        assert (page.status_code, "server" in page.headers) == (200, False)
        meta = browser.get("/api/v1/meta").json()
        assert (meta["role"], meta["databases"][0]["name"]) == ("admin", "console_museum")


def test_without_authentication_it_listens_on_this_machine_only() -> None:
    """A public bind with nobody asked who they are is refused; the message names both ways out."""
    for host in ("0.0.0.0", "::", "192.0.2.1", "console.test"):  # noqa: S104
        with pytest.raises(InvalidSettings, match=r"OUTBOX_CONSOLE_USERS.*127\.0\.0\.1") as refused:
            serve(ConsoleConfig({"a": URL_A}, host=host))
        assert "hunter2" not in str(refused.value)
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        assert authorizer_of(ConsoleConfig({"a": URL_A}, host=host))[1]
    public = ConsoleConfig({"a": URL_A}, host="0.0.0.0", tokens={hash_token("x"): Principal.of("ci")})  # noqa: S104
    assert authorizer_of(public)[1] is None


def test_a_port_that_is_taken_is_told(museum: Shop) -> None:
    """The address and why."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        config = ConsoleConfig({"a": text_of(museum.engine.url)}, port=other.getsockname()[1])
        with pytest.raises(InvalidSettings, match=r"can't listen on 127\.0\.0\.1 port"):
            serve(config)


def test_everything_comes_from_the_environment(tmp_path: Path) -> None:
    """Each variable is read; secrets also from files; options go before."""
    users = tmp_path / "users"
    users.write_text(f"ann:admin:{HASH}\nbob:viewer:{HASH}\n")
    environ = {
        "OUTBOX_DATABASE_URL": "ignored",
        "OUTBOX_CONSOLE_DATABASES": f"a={URL_A} postgresql://db.test/bank_b",
        "OUTBOX_CONSOLE_HOST": "0.0.0.0",  # noqa: S104
        "OUTBOX_CONSOLE_PORT": "9000",
        "OUTBOX_CONSOLE_READ_ONLY": "1",
        "OUTBOX_CONSOLE_ALLOWED_HOSTS": "a.test, b.test",
        "OUTBOX_CONSOLE_TRUSTED_PROXIES": "10.0.0.0/8",
        "OUTBOX_CONSOLE_ENV": "prod",
        "OUTBOX_CONSOLE_USERS_FILE": str(users),
        "OUTBOX_CONSOLE_TOKENS": f"ci:operator:{hash_token('x')}",
        "OUTBOX_CONSOLE_USER_HEADER": "X-User",
        "OUTBOX_CONSOLE_USER_ROLES": "ann=admin",
        "OUTBOX_CONSOLE_ROOT_PATH": "/tools/",
        "OUTBOX_CONSOLE_PAYLOAD": "hidden",
    }
    config = ConsoleConfig.from_env(environ, port=9001, host=None)
    assert dict(config.databases) == {"a": URL_A, "bank_b": "postgresql://db.test/bank_b"}
    assert (config.host, config.port, config.read_only, config.env) == ("0.0.0.0", 9001, True, "prod")  # noqa: S104
    assert (config.allowed_hosts, config.root_path) == (("a.test", "b.test"), "/tools")
    assert config.payload == "hidden"
    assert config.users == {"ann": (HASH, Role.ADMIN), "bob": (HASH, Role.VIEWER)}
    way, _ = authorizer_of(config)
    assert isinstance(way, AnyOf)
    console = app_of(config, way).state.console
    assert (console.read_only, console.environment, len(console.trust.proxies)) == (True, "prod", 1)
    assert "hunter2" not in repr(config)
    assert HASH not in repr(config)


def test_the_settings_come_from_the_environment(museum: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the tables too: a schema that isn't there is named."""
    monkeypatch.setenv("OUTBOX_SCHEMA", "letters")
    console = app_of(ConsoleConfig({"a": text_of(museum.engine.url)}), AllowAll()).state.console
    with pytest.raises(SchemaMissing, match="letters"):
        console.source()
    console.source.close()


def test_each_way_in_alone() -> None:
    """Users, tokens, or the header of a proxy."""
    databases = {"a": URL_A}
    users = ConsoleConfig(databases, users={"ann": (HASH, Role.ADMIN)})
    assert isinstance(authorizer_of(users)[0], Basic)
    tokens = ConsoleConfig(databases, tokens={hash_token("x"): Principal.of("ci")})
    assert isinstance(authorizer_of(tokens)[0], Bearer)
    header = ConsoleConfig(databases, user_header="X-User", trusted_proxies=("10.0.0.1",))
    assert isinstance(authorizer_of(header)[0], TrustedHeader)


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({}, "no database"),
        ({"PORT": "many"}, "OUTBOX_CONSOLE_PORT = 'many' must be a whole number"),
        ({"PORT": "70000"}, "OUTBOX_CONSOLE_PORT = '70000' must be from 0 to 65535"),
        ({"READ_ONLY": "maybe"}, "OUTBOX_CONSOLE_READ_ONLY = 'maybe'"),
        ({"USERS": "ann:secret"}, "OUTBOX_CONSOLE_USERS must be name:role:hash"),
        ({"TOKENS": "ci:root:x"}, "where role is one of viewer, operator, admin; entry 1 isn't"),
        ({"USERS_FILE": "/nowhere"}, "'/nowhere' can't be read"),
        ({"DATABASES": "a=b a=c"}, "two databases are named 'a'"),
        ({"DATABASES": "postgresql://one.test:hunter2/x"}, "one can't be read"),
        ({"PAYLOAD": "naked"}, "OUTBOX_CONSOLE_PAYLOAD = 'naked' must be one of"),
        ({"METRICS": "yes"}, "OUTBOX_CONSOLE_METRICS = 'yes' must be one of"),
        ({"ROOT_PATH": "tools"}, "root_path 'tools' must begin with a slash"),
        ({"USER_HEADER": "X-User"}, "believed of trusted_proxies only"),
        ({"PROT": "1"}, "OUTBOX_CONSOLE_PROT is unknown; did you mean"),
    ],
)
def test_settings_that_can_not_be_are_refused(environ: dict[str, str], told: str) -> None:
    """Each is told with its name, and a secret without its value."""
    given = {f"OUTBOX_CONSOLE_{name}": text for name, text in environ.items()}
    with pytest.raises(InvalidSettings) as refused:
        ConsoleConfig.from_env(given | ({"OUTBOX_DATABASE_URL": URL_A} if environ else {}))
    assert told in str(refused.value)
    assert "secret" not in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_databases_have_names() -> None:
    """By name=url, or by the name of the database."""
    assert named_databases(f"{URL_A} b=postgresql:///x?host=/run") == {
        "bank_a": URL_A,
        "b": "postgresql:///x?host=/run",
    }
    several = "postgresql://one.test,two.test/x"
    assert named_databases(f"a={several},b={several}\nc={several}, {several},") == dict.fromkeys("abcx", several)
    with pytest.raises(ValueError, match="can't be read") as refused:
        named_databases("hunter2")
    assert "hunter2" not in str(refused.value)


def test_metrics_are_off_unless_asked_for(museum: Shop, ask: Asker) -> None:
    """Off by default; else for who may look, or for everybody."""
    statuses = {"off": (404, 404), "authenticated": (401, 200), "open": (200, 200)}
    for switch, expected in statuses.items():
        http = ask(app_over(museum.outbox, metrics=switch))
        answers = [http.ask("GET", "/metrics", headers=headers) for headers in ({}, bearer("viewer"))]
        if switch == "off":
            assert {answer.status_code for answer in answers} <= {303, 401, 404}
            continue
        assert tuple(answer.status_code for answer in answers) == expected, switch
        assert 'outbox_dead_messages{database="console_museum",group="billing",topic="orders"} 3.0' in answers[1].text
        assert "outbox_undecided_halves" in answers[1].text


def test_probes_tell_nothing(museum: Shop, ask: Asker) -> None:
    """Anybody may ask, under any name, and hears no more than that it is well."""
    http = ask(app_over(museum.outbox), base_url="http://10.1.2.3")
    for path in ("/healthz", "/readyz"):
        assert http.ask("GET", path).json() == {"status": "ok"}
