"""``outbox messages resend``, ``recall`` and ``rollback``."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from outbox import Message, testing
from outbox.cli.output import Code
from tests.cli.books import Books
from tests.cli.conftest import Cli, run_cli
from tests.kit import wait_until

ROOT = Path(__file__).parents[2]
BECAUSE = ("--reason", "mail lost its inbox", "--actor", "ann", "--yes")


def sends(books: Books, *ids: object) -> list[int]:
    """Return how often messages were sent."""
    query = "SELECT count(*) FROM outbox.message WHERE half_id = :id"
    return [books.rows(query, id=each)[0][0] for each in ids]


def test_resend_what_fits(cli: Cli, books: Books) -> None:
    """What options pick is shown, and run as a bulk job; what isn't dispatched isn't picked."""
    ids = books.send({"n": 1}, {"n": 2}, key="a")
    (other,) = books.send({"n": 1}, key="b")
    books.work()
    (waiting,) = books.send({"n": 3}, key="a")
    shown = cli("messages", "resend", "--key", "a", "--dry-run", "-o", "json").json
    assert (shown["eligible"], {row["message_id"] for row in shown["sample"]}) == (2, {str(each) for each in ids})
    result = cli("messages", "resend", "--key", "a", *BECAUSE)
    assert (result.code, result.out) == (0, ""), result.err
    assert "2 done" in result.err
    assert sends(books, *ids, other, waiting) == [2, 2, 1, 0]
    assert cli("messages", "resend", "--where", "n=1", "--limit", "1", *BECAUSE).code == 0
    assert sends(books, *ids, other) == [2, 2, 2]
    assert {entry[1] for entry in books.audited()} >= {"resend"}


def test_resend_from_stdin_in_part(cli: Cli, books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids come from stdin; one that can't be sent again is told, the others are sent."""
    ids = books.send({}, {})
    books.work()
    (late,) = books.send({})
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{ids[0]}\n{ids[1]}\n{late}\n"))
    result = cli("messages", "resend", "-", *BECAUSE)
    assert sends(books, *ids, late) == [2, 2, 0]
    assert "waits for dispatch" in result.err
    assert result.code == Code.PARTIAL


def compensated(books: Books, undone: list[Any]) -> None:
    """Register what rolls an order back."""

    @books.outbox.compensation("orders")
    def undo(message: Message, session: Any) -> Any:
        undone.append(message.body)
        return {"undone": message.body}


def test_rollback_waits_for_a_worker(cli: Cli, books: Books) -> None:
    """The command waits until a worker has done it, and tells what came of it."""
    undone: list[Any] = []
    compensated(books, undone)
    (one,) = books.parked("no account 17")
    done = threading.Event()

    def work() -> None:
        while not done.wait(0.05):
            testing.bulk(books.outbox)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        result = run_cli("messages", "compensate", str(one), *BECAUSE, "-o", "json")
    finally:
        done.set()
        worker.join()
    assert result.code == 0, result.err
    assert (result.json["action"], result.json["state"], result.json["total"]) == ("compensate", "done", 1)
    assert undone == [{"do": "park", "why": "no account 17"}]
    assert books.statuses(one) == ["quarantined"]
    assert cli("messages", "compensate", str(one), *BECAUSE).code == Code.CONFLICT
    assert undone == [{"do": "park", "why": "no account 17"}]


def test_rollback_without_waiting(cli: Cli, books: Books) -> None:
    """With --no-wait the id of the bulk job is all there is on stdout; it can be watched later."""
    undone: list[Any] = []
    compensated(books, undone)
    (one,) = books.parked("no account 17")
    assert cli("messages", "compensate", str(one), "--yes").code == Code.USAGE
    preview = cli("messages", "compensate", str(one), "--dry-run", "-o", "json").json
    assert (preview["action"], preview["eligible"]) == ("compensate", 1)
    ordered = cli("messages", "compensate", str(one), "--no-wait", *BECAUSE)
    assert ordered.code == 0, ordered.err
    bulk_job = ordered.out.strip()
    assert f"outbox bulk watch {bulk_job}" in ordered.err
    assert undone == []
    testing.bulk(books.outbox)
    watched = cli("bulk", "watch", bulk_job, "-o", "json")
    assert (watched.code, watched.json["state"]) == (0, "done")
    assert len(undone) == 1


def test_rollback_of_what_took_effect(cli: Cli, books: Books) -> None:
    """A message that a group has handled isn't rolled back, unless that is acknowledged."""
    undone: list[Any] = []
    compensated(books, undone)
    (one,) = books.send({"do": "nothing"})
    books.work()
    refused = cli("messages", "compensate", str(one), *BECAUSE, "--no-wait")
    if refused.code == 0:
        testing.bulk(books.outbox)
        refused = cli("bulk", "watch", refused.out.strip())
    assert refused.code == Code.CONFLICT
    assert undone == []
    ordered = cli("messages", "compensate", str(one), "--acknowledge-delivered", "--no-wait", *BECAUSE)
    assert ordered.code == 0, ordered.err
    testing.bulk(books.outbox)
    assert cli("bulk", "watch", ordered.out.strip()).code == 0
    assert len(undone) == 1


def test_interrupted(books: Books, url: str, cli: Cli) -> None:
    """Ctrl-C leaves 130 and the command to watch it with; what was done is done, and the rest goes on from there."""
    ids = books.parked(*["looks wrong"] * 6)
    process = subprocess.Popen(
        [sys.executable, "-m", "outbox.cli", "dead", "retry", "--all", "--rate", "1", *BECAUSE],
        env={**os.environ, "OUTBOX_DATABASE_URL": url, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_until(lambda: "failed" in books.statuses(*ids), "the first is retried")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out) == (Code.INTERRUPTED, ""), err
    assert "Traceback" not in err
    command = err.splitlines()[-1].partition("to watch it: ")[2].split()
    assert command[:3] == ["outbox", "bulk", "watch"]
    assert "parked" in books.statuses(*ids)
    assert cli("bulk", "cancel", command[3], "--yes", "--actor", "ann").code == 0
    watched = cli("bulk", "watch", command[3], "-o", "json")
    assert watched.code == Code.PARTIAL
    assert watched.json["done"] + watched.json["cancelled"] == 6
    assert books.statuses(*ids).count("failed") == watched.json["done"]


def test_edit(cli: Cli, books: Books, tmp_path: Path) -> None:
    """The body comes from a file; what is wrong with it is said, and the copy's id printed."""
    (one,) = books.parked("no such form")
    new = tmp_path / "new.json"
    new.write_text('{"do": "nothing"')
    edit = ("messages", "edit", str(one), "--body", str(new), *BECAUSE, "-o", "json")
    assert "the body isn't JSON" in cli(*edit).err
    new.write_text('{"do": "nothing"}')
    assert cli(*edit, "--dry-run").code == 0
    assert "must be one of quarantine, discard, leave" in cli(*edit, "--original", "burn").err
    result = cli(*edit)
    assert result.code == 0, result.err
    books.work()
    shown = cli("messages", "show", str(one), "-o", "json").json
    assert shown["copies"] == [result.json["id"]]
    assert shown["inbox"][0]["status"] == "quarantined"
    assert cli("messages", "show", result.json["id"], "-o", "json").json["inbox"][0]["status"] == "consumed"
    assert cli(*edit).code == Code.CONFLICT
