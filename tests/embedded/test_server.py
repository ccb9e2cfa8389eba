"""The embedded PostgreSQL: it starts, answers, starts again, and keeps a folder that is its caller's."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from outbox import embedded
from outbox.embedded import Server, own
from outbox.errors import EmbeddedError
from tests.embedded.owners import (
    REPORT,
    SEARCHED,
    ask,
    command_lines,
    ended,
    execute,
    libpq,
    nothing_left,
    on_linux,
    postmaster,
)
from tests.kit import wait_until


def test_starts_and_answers() -> None:
    """A server with no arguments answers, is durable, speaks UTF-8, and is gone after the block."""
    with Server() as server:
        assert ask(libpq(server), "SELECT 1") == 1
        assert ask(libpq(server), "SHOW fsync") == "on"
        assert ask(libpq(server), "SHOW server_encoding") == "UTF8"
        assert ask(libpq(server), "SHOW timezone") == "UTC"
        assert ask(libpq(server), "SHOW max_prepared_transactions") == "20"
        assert stat.S_IMODE(server.folder.stat().st_mode) == 0o700
        assert server.url("a b").startswith("postgresql+psycopg://postgres:")
        assert server.url("a b").endswith(f"@127.0.0.1:{server.port}/a%20b")
    assert nothing_left(server.folder)


def test_several_databases(running: Server) -> None:
    """Databases are created, copied from a template with their tables, and dropped under open connections."""
    running.create_database("bank a")
    execute(libpq(running, "bank a"), "CREATE TABLE account AS SELECT 7 AS balance")
    running.create_database("copy", template="bank a")
    assert ask(libpq(running, "copy"), "SELECT balance FROM account") == 7
    with psycopg.connect(libpq(running, "copy")):
        running.drop_database("copy")
    assert not running.has_database("copy")
    assert running.has_database("bank a")
    with pytest.raises(EmbeddedError, match="already exists"):
        running.create_database("bank a")
    with pytest.raises(EmbeddedError, match="1 to 63 bytes"):
        running.create_database("x" * 64)


def test_server_creates_the_named_databases_and_tells_its_progress() -> None:
    """``server()`` yields an embedded server with its databases and reports each step."""
    told: list[str] = []
    with embedded.server(["one", "two"], durable=False, progress=told.append) as server:
        assert isinstance(server, Server)
        assert ask(libpq(server, "two"), "SELECT current_database()") == "two"
        assert ask(libpq(server), "SHOW fsync") == "off"
    steps = [line.split()[0] for line in told]
    assert steps == ["starting", "started", "created", "created", "stopped"]


def test_settings_win_over_defaults(running: Server) -> None:
    """The caller's settings reach PostgreSQL, whatever quotes they hold."""
    with Server(durable=False, settings={"max_connections": "17", "cluster_name": r"it's \ 1"}) as server:
        assert ask(libpq(server), "SHOW max_connections") == "17"
        assert ask(libpq(server), "SHOW cluster_name") == r"it's \ 1"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": "5432"}, "'port' is decided by the embedded server"),
        ({"work mem": "1"}, "'work mem' is not a name"),
        ({"work_mem": "1\nport = 1"}, "'work_mem' must be printable text"),
    ],
)
def test_settings_that_can_not_be_are_refused(settings: dict[str, str], message: str) -> None:
    """A setting that is no setting, or not the caller's to choose, is refused before anything starts."""
    with pytest.raises(EmbeddedError, match=message):
        Server(settings=settings)


def test_failed_start_shows_the_log_and_leaves_nothing(temporary: Path) -> None:
    """When PostgreSQL refuses to start, the error ends with what it said, and the folder is removed."""
    with pytest.raises(EmbeddedError, match=r'(?s)ended while starting.*parameter "work_mem"'):
        Server(settings={"work_mem": "lots"}).start()
    assert not list(temporary.glob("outbox-pg-*"))


def test_port_taken_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that somebody takes between the look and the start is given up for another one."""
    with socket.create_server((own.HOST, 0)) as taken:
        ports = iter([taken.getsockname()[1], own.free_port()])
        monkeypatch.setattr(own, "free_port", lambda: next(ports))
        with Server(durable=False) as server:
            assert server.port != taken.getsockname()[1]
            assert ask(libpq(server), "SELECT 1") == 1


def test_two_at_once() -> None:
    """Two servers of one process have nothing in common."""
    with Server(durable=False) as one, Server(durable=False) as two:
        one.create_database("bank")
        assert one.port != two.port
        assert not two.has_database("bank")
    assert nothing_left(one.folder)
    assert nothing_left(two.folder)


def test_restart_keeps_port_and_data() -> None:
    """A restart cuts the connections; port, password and data stay."""
    with Server(durable=False) as server:
        execute(libpq(server), "CREATE TABLE kept AS SELECT 1 AS n")
        url, before = libpq(server), postmaster(server.folder)
        for mode in ("fast", "immediate"):
            with psycopg.connect(url) as connection:
                server.restart(mode)
                with pytest.raises(psycopg.OperationalError):
                    connection.execute("SELECT 1")
            assert ask(url, "SELECT n FROM kept") == 1
        assert postmaster(server.folder) != before


def test_kill_forgets_no_commit() -> None:
    """After SIGKILL of every process the server starts again, with all that was committed, durable or not."""
    with Server(durable=False) as server:
        url = libpq(server)
        execute(url, "CREATE TABLE kept (n int)")
        with closing(psycopg.connect(url, autocommit=True)) as busy:
            # A backend that computes doesn't notice by itself that the server is gone.
            busy.pgconn.send_query(b"SELECT count(*) FROM generate_series(1, 1e12)")
            busy_pid = busy.info.backend_pid
            execute(url, "INSERT INTO kept VALUES (1)")
            server.kill()
            assert ended(busy_pid)
            with pytest.raises(psycopg.OperationalError):
                psycopg.connect(url)
            server.start()
        assert ask(url, "SELECT n FROM kept") == 1


@on_linux
def test_server_killed_by_somebody_else() -> None:
    """A server of which somebody killed the first process only can be started again, and stopped."""
    with Server(durable=False) as server, closing(psycopg.connect(libpq(server), autocommit=True)) as busy:
        busy.pgconn.send_query(b"SELECT count(*) FROM generate_series(1, 1e12)")
        busy_pid, first = busy.info.backend_pid, postmaster(server.folder)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: ended(first), "first process gone")
        server.start()
        assert ended(busy_pid)
        assert ask(libpq(server), "SELECT 1") == 1
        os.kill(postmaster(server.folder), signal.SIGKILL)
    assert nothing_left(server.folder)


def test_calls_out_of_order(running: Server) -> None:
    """A server that isn't started, or is started already, says so."""
    with pytest.raises(EmbeddedError, match="not started"):
        Server().url()
    with pytest.raises(EmbeddedError, match="not started"):
        Server().restart()
    with pytest.raises(EmbeddedError, match="running already"):
        running.start()
    Server().stop()


def test_starts_again_after_stop() -> None:
    """A stopped server can be started again, with a new folder if it was temporary."""
    server = Server(durable=False)
    with server:
        first = server.folder
    with server:
        assert server.folder != first
        assert ask(libpq(server), "SELECT 1") == 1


def test_kept_folder(tmp_path: Path) -> None:
    """A folder named by the caller keeps data and password from one run to the next."""
    folder = tmp_path / "kept"
    with embedded.server(["bank"], folder=folder) as server:
        execute(libpq(server, "bank"), "CREATE TABLE account AS SELECT 7 AS balance")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with embedded.server(["bank"], folder=folder) as server:
        assert ask(libpq(server, "bank"), "SELECT balance FROM account") == 7
    assert stat.S_IMODE((folder / "password").stat().st_mode) == 0o600
    assert not any(str(folder) in line for line in command_lines())


def test_kept_folder_has_one_server(tmp_path: Path) -> None:
    """A second server on the same folder is refused, in this process and in another; the first goes on."""
    folder = tmp_path / "kept"
    with Server(folder=folder, durable=False) as first:
        with pytest.raises(EmbeddedError, match="in use by another server"):
            Server(folder=folder).start()
        script = "Server(folder=Path(sys.argv[1])).start()"
        other = subprocess.run(
            [sys.executable, "-c", REPORT + script, str(folder)],
            check=False,
            env={**os.environ, "PYTHONPATH": SEARCHED},
            capture_output=True,
            text=True,
        )
        assert "in use by another server" in other.stderr
        assert ask(libpq(first), "SELECT 1") == 1


def test_kept_folder_of_somebody_else(tmp_path: Path) -> None:
    """A folder with other things in it, or with data of another version, is refused and left alone."""
    (tmp_path / "diary").touch()
    with pytest.raises(EmbeddedError, match="not empty"):
        Server(folder=tmp_path).start()
    assert [path.name for path in tmp_path.iterdir()] == ["diary"]
    old = tmp_path / "old"
    (old / "data").mkdir(parents=True)
    (old / "lock").touch()
    (old / "data" / "PG_VERSION").write_text("9\n")
    with pytest.raises(EmbeddedError, match="data of PostgreSQL 9"):
        Server(folder=old).start()


def test_password_stays_secret(running: Server) -> None:
    """The password is in the URL, and nowhere else that others can see; nobody gets in without it."""
    password = libpq(running).split(":")[2].partition("@")[0]
    assert len(password) >= 24
    assert password not in repr(running)
    assert password not in (running.folder / "server.log").read_text()
    assert password not in "\n".join(command_lines())
    files = [path for path in running.folder.rglob("*") if path.is_file()]
    assert not [path for path in files if password.encode() in path.read_bytes()]
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(libpq(running).replace(password, "guess"))
