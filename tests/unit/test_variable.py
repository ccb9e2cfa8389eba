"""Secrets in the environment: a variable, or the file that another one names."""

from __future__ import annotations

from pathlib import Path

import pytest

from outbox import Settings
from outbox.cli.options import find_url
from outbox.errors import InvalidSettings
from outbox.reader import variable
from tests.cli.conftest import run_cli

URL = "postgresql+psycopg://shop:s3cret@localhost/shop"


def test_value_or_file(tmp_path: Path) -> None:
    """The line break at the end of a file, which editors write, is no part of the secret."""
    path = tmp_path / "url"
    path.write_text(f"{URL}\n")
    assert variable("X", {"X": URL}) == variable("X", {"X_FILE": str(path)}) == URL
    assert variable("X", {}) is variable("X", {"X": "", "X_FILE": ""}) is None


def test_refused(tmp_path: Path) -> None:
    """Both at once, and a file that isn't there; the secret itself is never shown."""
    path = tmp_path / "url"
    path.write_text(URL)
    with pytest.raises(InvalidSettings, match=r"^X and X_FILE are both set; set one of them$"):
        variable("X", {"X": URL, "X_FILE": str(path)})
    with pytest.raises(InvalidSettings, match=r"^X_FILE = '/nowhere' can't be read: No such file or directory$"):
        variable("X", {"X_FILE": "/nowhere"})


def test_url_of_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands find their database so, and the settings don't take the variable for a misspelt one of theirs."""
    path = tmp_path / "url"
    path.write_text(f"{URL}\n")
    monkeypatch.delenv("OUTBOX_DATABASE_URL", raising=False)
    monkeypatch.setenv("OUTBOX_DATABASE_URL_FILE", str(path))
    assert find_url(None).render_as_string(hide_password=False) == URL
    assert Settings.from_env() == Settings.from_env({})
    path.write_text("mysql://shop:s3cret@localhost/shop")
    said = run_cli("db", "current")
    assert "needs PostgreSQL, not 'mysql'" in said.err
    assert "s3cret" not in said.out + said.err
