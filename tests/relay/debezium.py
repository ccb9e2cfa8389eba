"""A real Debezium (embedded) with its outbox event router, which reads ``published``; and a look into the WAL."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import URL, make_url

from tests.kit import ROOT, wait_until
from tests.kit.programs import lacks
from tests.relay import jars

#: The name of slot and publication.
NAME = "outbox"
PUBLICATION = """
CREATE PUBLICATION outbox FOR TABLE outbox.published WITH (publish = 'insert', publish_via_partition_root = true)"""
_PAGE = ROOT / "docs" / "capturing.md"


def settings_of_page(*, log: bool = False) -> dict[str, str]:
    """Return the configuration of the connector, as the page about it has it: for the table, or for the WAL alone."""
    table, others = map(json.loads, re.findall(r"```json\n(.*?)```", _PAGE.read_text("utf-8"), re.DOTALL))
    gone = ("message.prefix.exclude.list", "table.include.list", "transforms.outbox.table.field.event.timestamp")
    kept = {name: value for name, value in table["config"].items() if not (log and name in gone)}
    return {**kept, **(others if log else {})}


_OF_TESTS = {
    "name": "outbox",
    "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
    "offset.flush.interval.ms": "1000",
    "heartbeat.interval.ms": "300",
}
_JAVA = ("java", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
_QUIET = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"


def compiled(folder: Path) -> str:
    """Return the class path of the program that runs Debezium, whose classes come into a folder.

    Where the machine lacks Java or Maven, the test ends here.
    """
    for needed in ("javac", "mvn"):
        if shutil.which(needed) is None:
            lacks(needed, "apt-get install openjdk-17-jdk-headless maven")
    try:
        lib = jars.debezium()
    except SystemExit:
        lacks("Debezium", "Maven couldn't fetch its jars; let it reach Maven Central once")
    source = Path(__file__).with_name("Router.java")
    subprocess.run(["javac", "-nowarn", "-cp", f"{lib}/*", "-d", str(folder), str(source)], check=True)
    return f"{folder}:{lib}/*"


@dataclass(frozen=True)
class RoutedEvent:
    """An event as Debezium hands it to a broker."""

    topic: str
    partition: int | None
    key: str | None
    value: bytes
    headers: Mapping[str, str]
    timestamp: int

    @property
    def id(self) -> str:
        """The id by which repetitions are told."""
        return self.headers["id"]


class Debezium:
    """A Debezium on a database, with its offsets in a folder: it can be killed, and started again."""

    def __init__(self, class_path: str, folder: Path, url: str, *, log: bool = False) -> None:
        self._folder, self._url = folder, url
        self._runs = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._command = (*_JAVA, _QUIET, "-cp", class_path, "Router", str(folder / "settings"))
        address: URL = make_url(url)
        database = {
            "database.hostname": address.host or "",
            "database.port": str(address.port),
            "database.user": address.username or "",
            "database.password": address.password or "",
            "database.dbname": address.database or "",
            "offset.storage.file.filename": str(folder / "offsets"),
        }
        chosen = {**settings_of_page(log=log), **_OF_TESTS, **database}
        (folder / "settings").write_text("".join(f"{name}={value}\n" for name, value in chosen.items()))

    def start(self) -> None:
        """Start it, and wait until it reads."""
        self._runs += 1
        with (self._folder / f"{self._runs}.events").open("wb") as out, (self._folder / "errors").open("ab") as errors:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=out, stderr=errors)
        wait_until(self._reads, "Debezium reads")

    def _reads(self) -> bool:
        self._check()
        return bool(self._lines(self._runs))

    def _check(self) -> None:
        if self._process is not None:
            assert self._process.poll() is None, (self._folder / "errors").read_text()[-3000:]

    def _lines(self, run: int) -> list[bytes]:
        """Return what a run has said, without a line that is cut off."""
        return (self._folder / f"{run}.events").read_bytes().split(b"\n")[:-1]

    @property
    def events(self) -> list[RoutedEvent]:
        """All events so far, those of killed runs too; it hasn't ended by itself."""
        self._check()
        lines = [line for run in range(1, self._runs + 1) for line in self._lines(run)]
        # The first line of a run has no topic. A heartbeat has no header.
        return [_event(found) for line in lines if (found := json.loads(line)).get("headers")]

    @property
    def count(self) -> int:
        """How many lines all runs have written: that many events at most."""
        self._check()
        return sum(len(self._lines(run)) for run in range(1, self._runs + 1))

    def kill(self) -> None:
        """End it by SIGKILL, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _event(line: Mapping[str, Any]) -> RoutedEvent:
    headers = {name: text for name, text in line["headers"].items() if not name.startswith("__debezium")}
    key = None if line["key"] is None else base64.b64decode(line["key"]).decode()
    body = base64.b64decode(line["value"])
    return RoutedEvent(line["topic"], line["partition"], key, body, headers, line["timestamp"])


@contextmanager
def connected(url: str) -> Iterator[psycopg.Connection[Any]]:
    """Connect as the owner, by the driver alone."""
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        yield connection


@contextmanager
def slot(url: str) -> Iterator[None]:
    """Have a publication and a slot, and drop both at the end."""
    with connected(url) as connection:
        connection.execute(PUBLICATION)
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [NAME])
        try:
            yield
        finally:
            connection.execute("DROP PUBLICATION outbox")
            wait_until(lambda: _dropped(connection), "the slot is free, and dropped")


def _dropped(connection: psycopg.Connection[Any]) -> bool:
    try:
        connection.execute("SELECT pg_drop_replication_slot(%s)", [NAME])
    except psycopg.errors.ObjectInUse:  # the server hasn't noticed the end of its reader
        return False
    return True


def inserts(url: str) -> int:
    """Take what the WAL has since the last time, as Debezium would; return how many rows were inserted."""
    with connected(url) as connection:
        changes = connection.execute(
            "SELECT data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL, 'proto_version', '1', "
            "'publication_names', %s)",
            [NAME, NAME],
        ).fetchall()
    kinds = [bytes(data)[:1] for (data,) in changes]
    assert set(kinds) <= {b"B", b"C", b"R", b"I"}, kinds
    return kinds.count(b"I")
