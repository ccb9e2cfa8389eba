"""Clusters of a test's own: streaming replicas that are promoted, base backups that are recovered, folders put back."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outbox import embedded
from outbox.database import migration
from outbox.errors import EmbeddedError, PostgresNotFound
from tests.kit import wait_until

#: The log's tail is lost by a crash only if nothing has written it out by itself.
_SETTINGS = {"wal_writer_delay": "10s", "checkpoint_timeout": "1h", "max_connections": "60", "shared_buffers": "16MB"}


def ask(server: embedded.Server, sql: str, *values: Any, database: str = "postgres") -> Any:
    """Run a statement; return the first value of its first row, if it has one."""
    with psycopg.connect(server.url(database, driver="postgresql"), autocommit=True) as connection:
        cursor = connection.execute(sql.encode(), values or None)
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None


class Clusters:
    """Starts clusters, as copies of one that was made before, and ends them with the test."""

    def __init__(self, stack: ExitStack, base: Path) -> None:
        self._stack = stack
        self._base = base
        self._programs = _programs()

    def new(self, **settings: str) -> embedded.Server:
        """Start a cluster that has the databases of `make_base`."""
        folder = self._folder()
        _copy(self._base, folder)
        return self._start(folder, settings)

    def empty(self) -> embedded.Server:
        """Start a cluster with another system identifier, without databases."""
        return self._start(self._folder(), {})

    def replica(self, primary: embedded.Server) -> embedded.Server:
        """Start a cluster that follows another one, asynchronously."""
        folder = self.backup(primary, "-R")
        return self._start(folder, {})

    def backup(self, server: embedded.Server, *options: str) -> Path:
        """Return a folder for a cluster, with a base backup of a running one."""
        folder, data = self._folder(), server.folder / "data"
        program, url = self._programs / "pg_basebackup", server.url(driver="postgresql")
        command: list[str | Path] = [program, "-D", folder / "data", "-c", "fast", "-d", url, *options]
        subprocess.run(command, check=True, capture_output=True)
        (folder / "lock").touch()
        (folder / "password").write_text((server.folder / "password").read_text())
        _chown(folder, data)
        return folder

    def recover(self, folder: Path, archive: Path, target: str) -> embedded.Server:
        """Start a base backup, and have it recover from an archive up to a restore point."""
        with (folder / "data" / "postgresql.auto.conf").open("a") as conf:
            conf.write(f"restore_command = 'cp {archive}/%f %p'\nrecovery_target_name = '{target}'\n")
            conf.write("recovery_target_action = 'promote'\n")
        (folder / "data" / "recovery.signal").touch()
        _chown(folder, folder / "data")
        server = self._start(folder, {})
        wait_until(lambda: not ask(server, "SELECT pg_is_in_recovery()"), "the recovery has ended")
        return server

    def archive_of(self, server: embedded.Server) -> Path:
        """Have a cluster archive its WAL from now on; return the folder."""
        archive = server.folder / "archive"
        archive.mkdir()
        _chown(archive, server.folder / "data")
        ask(server, "ALTER SYSTEM SET archive_mode = on")
        ask(server, f"ALTER SYSTEM SET archive_command = 'cp %p {archive}/%f'")
        server.restart()
        return archive

    def archive_all(self, server: embedded.Server, archive: Path) -> None:
        """Wait until all that a cluster has written is in its archive."""
        wal = ask(server, "SELECT pg_walfile_name(pg_switch_wal())")
        wait_until((archive / wal).exists, "the WAL is archived")

    def dump(self, server: embedded.Server, database: str) -> bytes:
        """Return a dump of a database, which drops what is there before it restores."""
        url = server.url(database, driver="postgresql")
        command = [str(self._programs / "pg_dump"), "--clean", "--if-exists", "--dbname", url]
        return subprocess.run(command, check=True, capture_output=True).stdout

    def restore(self, server: embedded.Server, database: str, dump: bytes) -> None:
        """Restore a dump in a database."""
        # What --clean writes can't drop the keys of partitions.
        dump = b"DROP SCHEMA IF EXISTS outbox CASCADE;\n" + dump
        options = ["-X", "-q", "-v", "ON_ERROR_STOP=1", "--dbname", server.url(database, driver="postgresql")]
        subprocess.run([self._programs / "psql", *options], input=dump, check=True, capture_output=True)

    def _folder(self) -> Path:
        # Not in the test's own folder, which the server's user may be unable to enter.
        folder = Path(tempfile.mkdtemp(prefix="outbox-failover-"))
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.chmod(0o755)
        return folder

    def _start(self, folder: Path, settings: dict[str, str]) -> embedded.Server:
        server = embedded.Server(folder=folder, durable=False, settings=_SETTINGS | settings)
        server.start()
        self._stack.callback(_end, server)
        return server


def caught_up(replica: embedded.Server, primary: embedded.Server) -> None:
    """Wait until a replica has replayed all that its primary has done."""
    # VACUUM leaves its records in memory, for it changes no data: a commit that does takes them to disk, and over.
    ask(primary, "SELECT pg_logical_emit_message(true, 'tests', '')")
    written = ask(primary, "SELECT pg_current_wal_lsn()::text")
    replayed = "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn"
    wait_until(lambda: ask(replica, replayed, written), "the replica has caught up")


def cut_stream(replica: embedded.Server) -> None:
    """Have a replica receive nothing more: the network between the two is down."""
    receiving = "SELECT count(*) FROM pg_stat_wal_receiver WHERE status = 'streaming'"
    # A replica that has just replayed its base backup may not stream yet, and would begin to after the cut.
    wait_until(lambda: ask(replica, receiving), "the replica streams")
    ask(replica, "ALTER SYSTEM SET primary_conninfo = ''")
    ask(replica, "SELECT pg_reload_conf()")
    wait_until(lambda: not ask(replica, "SELECT count(*) FROM pg_stat_wal_receiver"), "the stream is cut")


def fail_over(primary: embedded.Server, replica: embedded.Server) -> None:
    """Lose a primary at once, and promote its replica."""
    primary.kill()
    ask(replica, "SELECT pg_promote()")


def put_back(server: embedded.Server, copy: Path) -> None:
    """Put the data folder of a cluster back as it was: what a storage does with a volume."""
    server.kill()
    shutil.rmtree(server.folder / "data")
    _copy(copy, server.folder)
    server.start()


def copy_stopped(server: embedded.Server) -> Path:
    """Return a copy of a cluster's data folder, taken while it was stopped."""
    copy = server.folder / "copy"
    server.kill()
    _copy(server.folder, copy)
    server.start()
    return copy


def _copy(source: Path, target: Path) -> None:
    """Copy what makes a folder of an embedded server, to the same owner: ``cp`` needs a tenth of Python's time."""
    target.mkdir(exist_ok=True)
    subprocess.run(["cp", "-a", *(source / name for name in ("lock", "password", "data")), target], check=True)
    (target / "data" / "postmaster.pid").unlink(missing_ok=True)
    owner = (source / "data").stat()
    shutil.chown(target, owner.st_uid, owner.st_gid)


def _chown(folder: Path, like: Path) -> None:
    """Give a folder to the user that another one belongs to."""
    for path in (folder, *folder.rglob("*")):
        shutil.chown(path, like.stat().st_uid, like.stat().st_gid)


def _programs() -> Path:
    """Return the folder of PostgreSQL's programs; a test that has too few of them is left out."""
    try:
        folder = embedded.find_binaries().folder
    except PostgresNotFound as error:
        pytest.skip(str(error))
    if not (folder / "pg_basebackup").exists():
        pytest.skip("these PostgreSQL binaries have no pg_basebackup")
    return folder


def _end(server: embedded.Server) -> None:
    with suppress(EmbeddedError):
        server.kill()  # an orderly end would write out what nobody wants
    server.stop()


@contextmanager
def base_cluster(*databases: str, sql: str) -> Iterator[Path]:
    """Make the cluster that others are copies of: its databases have our tables, and what the SQL makes."""
    _programs()
    folder = Path(tempfile.mkdtemp(prefix="outbox-failover-"))
    try:
        folder.chmod(0o755)
        server = embedded.Server(folder=folder, durable=False, settings=_SETTINGS)
        with server:
            for database in databases:
                server.create_database(database)
                migration.upgrade(server.url(database))
                ask(server, sql, database=database)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def clusters(base: Path) -> Iterator[Clusters]:
    """Give clusters that end with the block."""
    with ExitStack() as stack:
        yield Clusters(stack, base)
