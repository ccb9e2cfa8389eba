"""The plugin for pytest, in runs of their own: found by its entry point, lazy, and at home with pytest-xdist."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.kit import ROOT

ENTRY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
PLUGIN = "outbox.pytest_plugin"

SERVICE_TESTS = """
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from outbox import Outbox, Settings
from outbox.testing import assert_sent, drain

shop = Outbox(create_engine({url!r}), settings=Settings())
handled = []
shop.consumer("order", group="g")(lambda message, session: handled.append(message.body))


@pytest.fixture
def session(outbox_rollback):
    with Session(outbox_rollback(shop), join_transaction_mode="create_savepoint") as session:
        yield session


@pytest.mark.parametrize("number", range(8))
def test_rolled_back(session, number):
    assert session.scalar(text("SELECT count(*) FROM outbox.half_message")) == 0
    shop.send(session, "order", {{"number": number}}, key="k")
    session.commit()
    drain(shop)
    assert handled.pop() == {{"number": number}}
    assert not handled


def test_captured(outbox_capture):
    sent = outbox_capture(shop)
    shop.send(Session(), "order", 1)
    assert_sent(sent, "order", body=1)
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a folder, with the plugin as its entry point would load it."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", PLUGIN, *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_entry_point_names_the_plugin() -> None:
    """As the module is called: a conftest that names it too doesn't load it twice."""
    assert ENTRY == {PLUGIN: PLUGIN}


def test_a_run_that_does_not_use_it_pays_nothing(tmp_path: Path) -> None:
    """Nothing is imported beside the plugin itself, nothing is said, and no name of a fixture is taken from a test."""
    (tmp_path / "test_nothing.py").write_text(
        "import sys\n\ndef test_nothing(request):\n"
        "    ours = {name for name in sys.modules if name.partition('.')[0] == 'outbox'}\n"
        "    assert ours == {'outbox', 'outbox.pytest_plugin'}\n"
        "    assert not {'sqlalchemy', 'psycopg', 'asyncio'} & set(sys.modules)\n"
    )
    ran = run(tmp_path, "-W", "error")
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout
    fixtures = run(tmp_path, "--fixtures").stdout
    assert [line.split(" ")[0] for line in fixtures.splitlines() if "pytest_plugin.py" in line] == [
        "outbox_capture",
        "outbox_rollback",
    ]


@pytest.mark.parametrize("options", [(), ("-p", "xdist", "-n", "2")])
def test_a_services_tests(tmp_path: Path, url: str, options: tuple[str, ...]) -> None:
    """Also in two processes on one database: who drains waits for the other one's rollback."""
    (tmp_path / "test_service.py").write_text(SERVICE_TESTS.format(url=url))
    ran = run(tmp_path, *options)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "9 passed" in ran.stdout
