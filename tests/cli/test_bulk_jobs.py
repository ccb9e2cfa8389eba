"""``outbox bulk``: bulk jobs, what became of each of their messages, watched and cancelled."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, create_engine, make_url, text

from outbox import testing
from outbox.cli.output import Code
from outbox.embedded import ServerLike
from outbox.message.model import Status
from outbox.operator.model import InboxFilter, Selector
from outbox.operator.operator import Operator
from outbox.settings import Settings
from tests.cli.books import Books
from tests.cli.conftest import Cli

ROOT = Path(__file__).parents[2]


@pytest.fixture
def operator(engine: Engine) -> Operator:
    """The service layer over the same database."""
    return Operator.open({"shop": engine}, Settings())


def order(operator: Operator, action: str = "retry", **options: Any) -> str:
    """Order a bulk job on all dead letters, which nobody carries out."""
    selector = Selector(inbox=InboxFilter(status=(Status.PARKED,), discarded=False))
    preview = operator.preview(action, selector)
    bulk_job = operator.start(action, selector, by="bea", why="because", token=preview.token, **options)
    return str(bulk_job.id)


def test_list_and_show(cli: Cli, books: Books, operator: Operator) -> None:
    """Bulk jobs with their counts, and the items of one."""
    ids = books.parked("looks wrong", "looks wrong")
    bulk_job = order(operator)
    result = cli("bulk", "list", "-o", "json")
    assert (result.code, result.err) == (0, "")
    (row,) = result.json["items"]
    assert (row["id"], row["action"], row["state"], row["pending"]) == (bulk_job, "retry", "waiting", 2)
    assert cli("bulk", "list", "--state", "waiting", "-o", "id").out.split() == [bulk_job]
    assert cli("bulk", "list", "--state", "done", "-o", "id").out == ""
    shown = cli("bulk", "show", bulk_job, "-o", "json").json
    assert (shown["bulk_job"]["requested_by"], shown["bulk_job"]["reason"]) == ("bea", "because")
    assert {item["message_id"] for item in shown["items"]["items"]} == {str(each) for each in ids}
    table = cli("bulk", "show", bulk_job).out
    assert all(f"till/{each}" in table for each in ids)
    assert set(cli("bulk", "show", bulk_job, "-o", "id").out.split()) == {f"till/{each}" for each in ids}


def test_watch_and_run(cli: Cli, books: Books, operator: Operator) -> None:
    """A watch with --run carries out what nobody else does; its items are exported as CSV."""
    books.parked("looks wrong", "looks wrong", "looks wrong")
    bulk_job = order(operator)
    result = cli("bulk", "watch", bulk_job, "--run")
    assert (result.code, result.out) == (0, ""), result.err
    assert "3 done" in result.err
    rows = list(csv.DictReader(io.StringIO(cli("bulk", "show", bulk_job, "--state", "done", "-o", "csv").out)))
    assert [row["state"] for row in rows] == ["done"] * 3
    assert cli("bulk", "show", bulk_job, "--state", "failed", "-o", "csv").out.count("\n") == 1


def test_what_changed_meanwhile_is_skipped(cli: Cli, books: Books, operator: Operator) -> None:
    """What can't be done any more is told by its message: 5, and 4 where it was all."""
    ids = books.parked("looks wrong", "looks wrong")
    part = order(operator, "discard")
    assert cli("dead", "retry", f"till/{ids[0]}", "--yes").code == 0
    result = cli("bulk", "watch", part, "--run", "-o", "json")
    assert (result.code, result.json["state"]) == (Code.PARTIAL, "partly")
    assert (result.json["done"], result.json["skipped"]) == (1, 1)
    assert f"skipped: till/{ids[0]}: " in result.err
    (late,) = books.parked("looks wrong")  # and so is the retried one, which was due
    assert cli("dead", "discard", f"till/{ids[0]}", "--yes", "--reason", "x").code == 0
    none = order(operator)
    assert cli("dead", "discard", f"till/{late}", "--yes", "--reason", "x").code == 0
    assert cli("bulk", "watch", none, "--run").code == Code.CONFLICT


def test_cancel(cli: Cli, books: Books, operator: Operator) -> None:
    """Cancelled is what is left; a second time there is nothing to cancel."""
    ids = books.parked("looks wrong")
    bulk_job = order(operator)
    assert cli("bulk", "cancel", bulk_job).code == Code.USAGE
    assert cli("bulk", "cancel", bulk_job, "--dry-run", "-o", "json").json["state"] == "waiting"
    result = cli("bulk", "cancel", bulk_job, "--yes", "--actor", "ann", "--reason", "wrong topic", "-o", "json")
    assert result.code == 0, result.err
    assert (result.json["state"], result.json["cancelled"], result.json["cancelled_by"]) == ("cancelled", 1, "ann")
    assert cli("bulk", "cancel", bulk_job, "--yes").code == Code.CONFLICT
    assert cli("bulk", "watch", bulk_job).code == Code.CONFLICT
    assert books.statuses(*ids) == ["parked"]


@pytest.mark.parametrize("command", [("show",), ("watch",), ("cancel", "--yes")])
def test_unknown(cli: Cli, command: tuple[str, ...]) -> None:
    """No such bulk job: 3; no id at all: 2."""
    result = cli("bulk", *command, str(uuid4()))
    assert (result.code, result.out, result.err.count("\n")) == (Code.NOT_FOUND, "", 1)
    assert cli("bulk", *command, "42").code == Code.USAGE


def test_workers_and_handlers(cli: Cli) -> None:
    """Where no worker runs, the lists are empty, and that is no failure."""
    for command in ("workers", "handlers"):
        result = cli(command, "-o", "json")
        assert (result.code, result.err, result.json) == (0, "", {"items": []})
        assert cli(command).code == 0


def test_the_bar_is_for_terminals(books: Books, operator: Operator, url: str) -> None:
    """At a terminal a bar shows how it goes, on stderr; stdout has the data and nothing else."""
    books.parked("looks wrong", "looks wrong")
    bulk_job = order(operator)
    ours, theirs = os.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "outbox.cli", "bulk", "watch", bulk_job, "--run", "-o", "json"],
            env={**os.environ, "OUTBOX_DATABASE_URL": url, "PYTHONPATH": str(ROOT), "TERM": "xterm"},
            stdout=subprocess.PIPE, stderr=theirs, text=True, check=False,
        )  # fmt: skip
        os.close(theirs)
        told = os.read(ours, 100_000).decode()
    finally:
        os.close(ours)
    assert (done.returncode, json.loads(done.stdout)["done"]) == (0, 2), told
    assert "retry 2 parked messages" in told
    assert "━" in told
    assert "2/2" in told or "0/2" in told


def test_watch_waits_for_the_database(books: Books, operator: Operator, url: str, server: ServerLike) -> None:
    """A database that goes away during a watch is waited for."""
    books.parked("looks wrong")
    bulk_job = order(operator)
    database = make_url(url).database
    for engine in (books.engine, operator.databases["shop"].engine):
        engine.dispose()
    control = create_engine(server.url(), isolation_level="AUTOCOMMIT")
    process = subprocess.Popen(
        [sys.executable, "-m", "outbox.cli", "bulk", "watch", bulk_job],
        env={**os.environ, "OUTBOX_DATABASE_URL": url, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr
        assert "no worker with the role bulk runs" in process.stderr.readline()
        with control.connect() as connection:
            connection.execute(text(f"ALTER DATABASE {database} ALLOW_CONNECTIONS false"))
            connection.execute(
                text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"),
                {"name": database},
            )
            assert process.stderr.readline().endswith("trying again\n")
            connection.execute(text(f"ALTER DATABASE {database} ALLOW_CONNECTIONS true"))
        testing.bulk(books.outbox)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
        control.dispose()
    assert (process.returncode, out) == (0, ""), err
    assert "1 done" in err
