"""A MariaDB for the tests: of Debian's packages, installed or unpacked, in a folder of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from examples.bank_transfer.brokers import unpacked
from examples.bank_transfer.ports import free_port
from tests.kit import wait_until
from tests.kit.programs import lacks

#: Where the packages mariadb-server, mariadb-server-core and libmariadb-java are.
ROOT = unpacked("usr/sbin/mariadbd")
JAR = ROOT / "usr/share/java/mariadb-java-client.jar"
_SERVER, _SHARE = ROOT / "usr/sbin/mariadbd", ROOT / "usr/share/mysql"
PASSWORD = "S3cret-reader-7319"  # noqa: S105

_TABLES = ("mysql_system_tables.sql", "mysql_performance_tables.sql", "mysql_system_tables_data.sql")


def is_there() -> bool:
    """Is there a MariaDB, and the driver's jar?"""
    return _SERVER.is_file() and _SHARE.is_dir() and JAR.is_file()


@dataclass(frozen=True)
class MariaDB:
    """A server that runs: with a database ``legacy``, which the role ``reader`` may read."""

    port: int

    @property
    def url(self) -> str:
        """The address of the database for JDBC, in the dialect that Spark knows."""
        return f"jdbc:mysql://127.0.0.1:{self.port}/legacy?permitMysqlScheme"


@contextmanager
def mariadb(folder: Path, *statements: str) -> Iterator[MariaDB]:
    """Start a server whose database holds what the statements (one line each) write; end it with the block."""
    if not is_there():
        lacks(
            "MariaDB", "apt-get install mariadb-server libmariadb-java, or name its folder in OUTBOX_TEST_DEBIAN_ROOT"
        )
    data = folder / "data"
    data.mkdir()
    port = free_port()
    libraries = ":".join(map(str, (ROOT / "usr/lib").glob("*-linux-gnu")))
    environment = {**os.environ, "LD_LIBRARY_PATH": libraries} if Path("/") != ROOT else dict(os.environ)
    command = [str(_SERVER), "--no-defaults", "--user=root", f"--datadir={data}", f"--lc-messages-dir={_SHARE}"]
    command.append("--innodb-use-native-aio=0")
    tables = "".join((_SHARE / name).read_text() for name in _TABLES)
    subprocess.run(
        [*command, "--bootstrap"],
        input=f"CREATE DATABASE mysql;\nUSE mysql;\n{tables}\nCREATE DATABASE legacy;\n",
        env=environment,
        text=True,
        check=True,
        capture_output=True,
    )
    role = f"CREATE USER 'reader'@'%' IDENTIFIED BY '{PASSWORD}'", "GRANT SELECT ON legacy.* TO 'reader'@'%'"
    first = folder / "first.sql"
    first.write_text("".join(f"{each};\n" for each in ("USE legacy", *statements, *role)))
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [
                *command,
                f"--port={port}",
                "--bind-address=127.0.0.1",
                f"--socket={folder / 's'}",
                f"--init-file={first}",
            ],
            env=environment,
            stdout=log,
            stderr=log,
        )
        try:
            wait_until(lambda: b"ready for connections" in (folder / "log").read_bytes(), "MariaDB has started")
            yield MariaDB(port)
        finally:
            server.terminate()
            server.wait(30)
