"""A server that tests share, and machines without a PostgreSQL of their own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox import embedded
from outbox.embedded import Server, own
from outbox.errors import PostgresNotFound


@pytest.fixture(autouse=True)
def _no_server_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTBOX_DATABASE_URL", raising=False)


@pytest.fixture(scope="package")
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
