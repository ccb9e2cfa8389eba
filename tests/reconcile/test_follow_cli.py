"""``outbox reconcile follow``: in the foreground until it is stopped, with the exit code of what is left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from outbox.reconcile.tables import InboxState
from tests.kit import ROOT, wait_until
from tests.reconcile.town import HOUR, IN_SYNC, Town, fate, ids_at, url_of

OPEN = "SELECT count(*) FROM outbox.reconciliation_finding WHERE result IS NULL"
PASSES = "SELECT coalesce(max((plan ->> 'passes')::int), 0) FROM outbox.reconciliation_run"


@contextmanager
def following(town: Town, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run the command."""
    sides = ["--producer", url_of(town.producer), "--consumer", url_of(town.consumer)]
    command = [sys.executable, "-m", "outbox.cli", "reconcile", "follow", *sides, "--topic", "t", "--group", "g"]
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, *options], cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 6), (signal.SIGTERM, 6)])
def test_it_tells_until_it_is_stopped(town: Town, number: int, code: int) -> None:
    """A difference is a line of JSON; stopped, it says so, and the code is that of differences."""
    ids = town.plant([IN_SYNC] * 3 + [fate(status=InboxState.NONE)], ids=ids_at(HOUR, 4))
    with following(town, "--since", "1d", "--every", "1", "-o", "json") as process:
        wait_until(lambda: town.rows(OPEN) == [1], "it is found")
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        process.send_signal(number)
        _, errors = process.communicate(timeout=300)
    assert (told["event"], told["kind"], told["message_ids"]) == (
        "reconcile.differences_found",
        "missing",
        [str(ids[3])],
    )
    assert (process.returncode, "stopped; when it is started again" in errors) == (code, True), errors


def test_in_sync_the_code_is_0(town: Town) -> None:
    """Nothing is told, and nothing is left."""
    town.plant([IN_SYNC] * 3, ids=ids_at(HOUR, 3))
    with following(town, "--since", "1d", "--every", "1") as process:
        wait_until(lambda: town.rows(PASSES)[0] > 1, "it has looked")
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=300)
    assert (process.returncode, out) == (0, ""), errors


def test_a_record_is_needed(town: Town) -> None:
    """It goes on from its record, so that there must be one."""
    with following(town, "--no-record") as process:
        _, errors = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "record = false is of a run that ends" in errors
