"""``outbox half list``, ``show`` and ``stats``: undecided halves are found, and shown with their history."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from outbox import Resolution
from outbox.cli.output import Code
from tests.check.support import Bench
from tests.cli.conftest import Cli
from tests.cli.half.halves import ESCAPE, answering, fenced, ids, show
from tests.kit import ROOT
from tests.kit.warm import warm_python


def test_list(cli: Cli, world: dict[str, UUID]) -> None:
    """All undecided halves, the oldest first, each with how it stands."""
    result = cli("half", "list", "-o", "json")
    assert (result.code, result.err) == (0, "")
    assert result.json["next_page_token"] is None
    names = ["parked", "waiting", "asked", "orphan", "immune"]
    assert ids(result) == [world[name] for name in names]
    shown = dict(zip(names, result.json["items"], strict=True))
    status = {name: row["status"] for name, row in shown.items()}
    assert status == {name: "waiting" if name == "asked" else name for name in names}
    assert [name for name in names if shown[name]["being_asked"]] == ["asked"]
    assert {shown[name]["topic"] for name in names} == {"paid", "refunds"}
    assert [shown[name]["checks"] for name in names] == [1, 1, 1, 0, 0]
    assert (shown["parked"]["last_answer"], shown["parked"]["last_error"]) == (
        "unknown",
        "ValueError: the till is locked",
    )
    assert shown["parked"]["reason"] == "no verdict in 1 checks; the last one: ValueError: the till is locked"
    assert (shown["waiting"]["last_answer"], shown["waiting"]["last_error"]) == ("unknown", None)
    assert (shown["asked"]["last_answer"], shown["asked"]["last_error"]) == (None, None)
    waits = {name: datetime.fromisoformat(row["next_check_at"]) - datetime.now(UTC) for name, row in shown.items()}
    assert timedelta(seconds=3000) < waits["immune"] <= timedelta(seconds=3600)
    assert waits["orphan"] < timedelta()
    assert all(row["age"] >= 0 and row["fenced"] is False for row in shown.values())


def test_list_as_table(cli: Cli, world: dict[str, UUID]) -> None:
    """For people: durations, no traceback, nothing that steers the terminal."""
    result = cli("half", "list")
    assert (result.code, result.err) == (0, "")
    header, *lines = result.out.splitlines()
    assert header.split("  ")[0] == "id"
    for name, words in {
        "parked": ["parked", "ValueError: the till is locked", "no verdict in 1 checks"],
        "waiting": ["waiting", "unknown", "in 59m"],
        "asked": ["waiting", "(being asked)", "in 59m"],
        "orphan": ["orphan", "due"],
        "immune": ["immune", "in 59m"],
    }.items():
        (line,) = [line for line in lines if str(world[name]) in line]
        assert all(word in line for word in words), line
    assert "second line" not in result.out
    assert "\x1b" not in result.out


def test_list_once_the_lease_of_a_dead_worker_ran_out(cli: Cli, bench: Bench, world: dict[str, UUID]) -> None:
    """Nobody is being asked any more: it is due, and the last error tells why there is no answer."""
    bench.age(world["asked"])
    (row,) = [row for row in cli("half", "list", "-o", "json").json["items"] if row["id"] == str(world["asked"])]
    assert (row["status"], row["being_asked"]) == ("orphan", False)
    assert row["last_error"] == "asked, and no answer came: the worker died or was cut off"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("--older-than", "yesterday"), "--older-than = 'yesterday' must be a duration"),
        (("--status", "lost"), "'lost'"),
        (("--after", "42"), "page token"),
    ],
)
def test_list_of_something_else(cli: Cli, arguments: tuple[str, ...], hint: str) -> None:
    """What can't be read is wrong usage, with the mend."""
    result = cli("half", "list", *arguments)
    assert (result.code, result.out) == (Code.USAGE, "")
    assert hint in result.err


def test_list_without_the_half_message(cli: Cli, bench: Bench, world: dict[str, UUID]) -> None:
    """A check whose half message is gone is shown all the same."""
    bench.run("DELETE FROM outbox.half_message WHERE id = :id", id=world["orphan"])
    (row,) = [row for row in cli("half", "list", "-o", "json").json["items"] if row["id"] == str(world["orphan"])]
    assert (row["topic"], row["key"], row["born_at"], row["age"]) == ("refunds", None, None, None)
    assert cli("half", "list").code == 0
    assert cli("half", "show", str(world["orphan"]), "-o", "json").json["half"] is None


# --- show ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "answer", "error"),
    [
        ({"answer": "commit"}, "commit", None),
        ({"answer": "rollback"}, "rollback", None),
        ({"answer": "unknown"}, "unknown", None),
        ({"raise": "boo"}, "unknown", "ValueError: boo"),
        ({}, "unknown", "the checker returned None, which is not a Resolution"),
        ({"hang": 1}, "unknown", "no answer within 2 s: the checker was given up"),
    ],
)
def test_show_what_the_checker_answered(cli: Cli, bench: Bench, body: Any, answer: str, error: str | None) -> None:
    """Each check with its time, worker, answer, duration and error, also once the half is decided."""
    answering(bench, timeout=2)
    half_id = bench.prepare(key="k", body=body)
    bench.check()
    shown = show(cli, half_id)
    (entry,) = shown["history"]
    assert (entry["asked"], entry["answer"], entry["state"]) == ("checker", answer, "answered")
    assert (entry["error"] or "").partition("\n")[0] == (error or "")
    assert ("Traceback" in (entry["error"] or "")) == ("raise" in body)
    assert entry["seconds"] >= 0
    assert ":" in entry["worker"]
    assert entry["asked_at"] > shown["half"]["born_at"]
    status = {"commit": "committed", "rollback": "rolled_back", "unknown": "undecided"}[answer]
    assert (shown["status"], (shown["check"] or {"status": None})["status"]) == (
        status,
        "waiting" if answer == "unknown" else None,
    )
    assert (shown["op"] or {}).get("decided_by") == (None if answer == "unknown" else "check")
    assert (shown["check"] is None) == (answer != "unknown")
    out = cli("half", "show", str(half_id)).out
    assert f"checker  {answer}" in out
    assert (error or "") in out
    assert "Traceback" not in out
    way = cli("messages", "show", str(half_id), "-o", "json").json
    assert way["history"] == shown["history"]
    assert cli("messages", "show", str(half_id)).out == out


def test_show_a_check_whose_worker_was_killed(cli: Cli, bench: Bench, url: str) -> None:
    """For as long as its lease stands it may be being asked; then it is known that the worker died over it."""
    half_id = bench.prepare()
    process = subprocess.Popen(
        [warm_python(), "-m", "tests.check.asking_process", url], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    try:
        assert process.stdout.readline() == f"asked about {half_id}\n"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    shown = show(cli, half_id)
    assert (shown["history"][0]["answer"], shown["history"][0]["state"]) == (None, "being_asked")
    check = shown["check"]
    assert (check["status"], check["being_asked"], check["last_error"]) == ("waiting", True, None)
    assert "checker  (being asked)" in cli("half", "show", str(half_id)).out
    assert "Asked the checker: being asked" in cli("messages", "show", str(half_id)).out
    bench.age()
    bench.run("UPDATE outbox.check_history SET asked_at = asked_at - interval '41 s'")
    shown = show(cli, half_id)
    assert (shown["history"][0]["answer"], shown["history"][0]["state"]) == (None, "no_answer")
    assert shown["check"]["last_error"] == "asked, and no answer came: the worker died or was cut off"
    assert "checker  (no answer)" in cli("half", "show", str(half_id)).out
    assert "Asked the checker: no answer" in cli("messages", "show", str(half_id)).out
    bench.register(Resolution.COMMIT)
    bench.check()
    assert [entry["state"] for entry in show(cli, half_id)["history"]] == ["no_answer", "answered"]


def test_show_fenced(cli: Cli, bench: Bench) -> None:
    """A fence's checks are in the history as well."""
    half_id = fenced(bench)
    assert show(cli, half_id)["check"]["fenced"] is True
    bench.age_and_check()
    shown = show(cli, half_id)
    assert [(entry["asked"], entry["answer"]) for entry in shown["history"]] == [("fence", "rollback")]
    assert "fence  rollback" in cli("half", "show", str(half_id)).out


def test_show_body(cli: Cli, world: dict[str, UUID]) -> None:
    """The body is shown only when it is asked for."""
    half_id = str(world["parked"])
    assert "body" not in cli("half", "show", half_id, "-o", "json").json
    assert "second line" not in cli("half", "show", half_id).out
    expected = {"raise": "the till is locked\nsecond line"}
    assert cli("half", "show", half_id, "--body", "-o", "json").json["body"] == expected
    assert json.dumps(expected) in cli("half", "show", half_id, "--body").out


def test_show_as_table(cli: Cli, bench: Bench, world: dict[str, UUID]) -> None:
    """For people: how it stands, its checks, what operators did; nothing that steers the terminal."""
    bench.outbox.operator.commit(world["parked"], by="ann", why=f"phoned {ESCAPE}")
    out = cli("half", "show", str(world["parked"])).out
    assert [line.split()[0] for line in out.splitlines() if line.startswith(("message", "Checks", "What"))] == [
        "message", "Checks", "What",
    ]  # fmt: skip
    for words in ("Committed by the operator", "ValueError: the till is locked", "phoned"):
        assert words in out
    assert "\x1b" not in out
    waiting = cli("half", "show", str(world["waiting"])).out
    assert "next check at" in waiting
    assert "operator" not in waiting


def test_show_unknown(cli: Cli) -> None:
    """No trace of it: 3. No id at all: 2."""
    unknown = cli("half", "show", str(uuid4()), "-o", "json")
    assert (unknown.code, unknown.out) == (Code.NOT_FOUND, "")
    assert unknown.err.startswith("error: no registered database ")
    assert cli("half", "show", "42").code == Code.USAGE


def test_looking_writes_nothing(cli: Cli, bench: Bench, world: dict[str, UUID]) -> None:
    """List and show run in read-only transactions."""
    snapshot = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text"
    before = bench.value(snapshot)
    for command in (["list"], ["list", "--status", "parked"], ["show", str(world["parked"]), "--body"]):
        assert cli("half", *command).code == 0
    assert bench.value(snapshot) == before


def test_stats_of_orphans(cli: Cli, world: dict[str, UUID]) -> None:
    """Halves that are due for a check are orphans; those that never were checked are counted apart."""
    paid, refunds = cli("stats", "-o", "json").json["topics"]
    names = ("undecided", "parked", "orphans", "unasked")
    assert [paid[name] for name in names] == [3, 1, 0, 0]
    assert [refunds[name] for name in names] == [2, 0, 1, 1]
    header, line = [line.split() for line in cli("stats").out.splitlines() if "topic" in line or "refunds" in line][:2]
    assert dict(zip(header, line, strict=False))["unasked"] == "1"


def test_stats_of_orphans_that_were_asked(cli: Cli, bench: Bench, world: dict[str, UUID]) -> None:
    """An orphan that was asked before is due again, but not unasked."""
    bench.age()
    paid, refunds = cli("stats", "-o", "json").json["topics"]
    assert [(row["orphans"], row["unasked"]) for row in (paid, refunds)] == [(2, 0), (2, 2)]
