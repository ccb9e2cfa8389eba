"""What ``outbox run`` writes to stderr."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine

from outbox import Outbox
from tests.kit import wait_until

ROOT = Path(__file__).parents[2]
SHOP = """
import os
from sqlalchemy import create_engine
from outbox import Outbox, Settings
{setup}
engine = create_engine(os.environ["OUTBOX_DATABASE_URL"])
outbox = Outbox(engine, settings=Settings(retry_delays=()))

@outbox.consumer("orders", group="till")
def handle(message, session):
    raise ZeroDivisionError("no\\nmoney")
"""
OWN = """
import logging, sys
handler = logging.StreamHandler(sys.stderr)
handler.setFormatter(logging.Formatter("OWN %(name)s %(message)s"))
logging.getLogger().addHandler(handler)
"""


class Run:
    """A worker as a process, and what it has written so far."""

    def __init__(self, folder: Path, url: str, *options: str) -> None:
        self.log = folder / "stderr"
        with self.log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "outbox.cli", "run", "--app", "log_shop:outbox", *options],
                cwd=folder, stdout=subprocess.DEVNULL, stderr=stderr,
                env={**os.environ, "OUTBOX_DATABASE_URL": url, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip

    def lines(self) -> list[str]:
        """Return the lines that are whole."""
        return [line for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def find(self, text: str) -> str | None:
        """Return the first line with a text."""
        assert self.process.poll() is None or any(text in line for line in self.lines()), self.log.read_text()
        return next((line for line in self.lines() if text in line), None)

    def wait_for(self, text: str) -> str:
        """Return the first line with a text, once it is there."""
        wait_until(lambda: self.find(text), text)
        return self.find(text) or ""


@contextmanager
def running(folder: Path, url: str, *options: str, setup: str = "") -> Iterator[Run]:
    """Run a worker whose handler fails, until the block ends."""
    (folder / "log_shop.py").write_text(SHOP.format(setup=setup))
    run = Run(folder, url, *options)
    try:
        yield run
    finally:
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(60) == 0, run.log.read_text()


def send(url: str) -> str:
    """Send a message; return its id."""
    engine: Engine = create_engine(url)
    with engine.begin() as connection:
        message_id = Outbox(engine).send(connection, "orders", {})
    engine.dispose()
    return str(message_id)


def test_json(tmp_path: Path, url: str) -> None:
    """Each line is an object; a failure has its ids and traceback; and only what is worth a line is there."""
    with running(tmp_path, url, "--log-format", "json", setup=OWN) as run:
        message_id = send(url)
        parked: dict[str, Any] = json.loads(run.wait_for("message.parked"))
    assert parked["outbox_event"] == "message.parked"
    assert (parked["level"], parked["logger"]) == ("ERROR", "outbox.consumer")
    assert (parked["message_id"], parked["group"], parked["topic"]) == (message_id, "till", "orders")
    assert parked["traceback"].endswith("ZeroDivisionError: no\nmoney")
    records = [json.loads(line) for line in run.lines()]
    assert {"worker.started", "worker.stopping", "worker.stopped"} <= {each.get("outbox_event") for each in records}
    assert {each["logger"].partition(".")[0] for each in records} == {"outbox"}


def test_text(tmp_path: Path, url: str) -> None:
    """The default: sentences, with the traceback below."""
    with running(tmp_path, url) as run:
        message_id = send(url)
        line = run.wait_for("parked message")
    assert f"ERROR outbox.consumer: group 'till' parked message {message_id} of topic 'orders' (attempt 1):" in line
    assert "ZeroDivisionError: no" in "".join(run.lines())
    assert "alembic" not in run.log.read_text()


def test_what_the_application_sets_up_is_left(tmp_path: Path, url: str) -> None:
    """Its own handlers stay; a level then is that of the outbox."""
    with running(tmp_path, url, "--log-level", "info", setup=OWN) as run:
        assert run.wait_for("worker started").startswith("OWN outbox.worker ")
    assert all(line.startswith("OWN outbox") for line in run.lines())


def test_a_level(tmp_path: Path, url: str) -> None:
    """At ERROR nothing is told of a worker that starts and stops."""
    with running(tmp_path, url, "--log-level", "error") as run:
        send(url)
        run.wait_for("parked message")
    assert "worker started" not in run.log.read_text()


@pytest.mark.parametrize("option", [["--log-format", "xml"], ["--http", "9100"], ["--http", "127.0.0.1:99999"]])
def test_options_that_are_none(tmp_path: Path, url: str, option: list[str]) -> None:
    """They are refused before anything starts."""
    (tmp_path / "log_shop.py").write_text(SHOP.format(setup=""))
    run = Run(tmp_path, url, *option)
    assert run.process.wait(60) != 0
    assert "Traceback" not in run.log.read_text()
    assert option[1] in run.log.read_text()
