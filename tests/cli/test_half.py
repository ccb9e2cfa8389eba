"""``outbox half``: undecided halves are found, shown with their history, checked, reset and decided."""

from __future__ import annotations

import getpass
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import text

from outbox import Orphan, Resolution
from outbox.check import sql as check_sql
from outbox.cli import groups
from outbox.cli.exits import Code
from outbox.database.decision import decide, fence_key
from outbox.database.execute import execute
from outbox.operator import databases
from outbox.operator.look import lists_sql
from tests.check.support import Bench, open_bench
from tests.cli.conftest import Cli, Result

COMMIT, ROLLBACK, UNKNOWN = Resolution.COMMIT, Resolution.ROLLBACK, Resolution.UNKNOWN
ROOT = Path(__file__).parents[2]
BECAUSE = ("--reason", "the provider called", "--actor", "ann")
ESCAPE = "\x1b[31mred\x1b[0m"


@pytest.fixture
def bench(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A bench on the database of the command line."""
    monkeypatch.delenv("OUTBOX_APP", raising=False)
    with ExitStack() as stack:
        yield open_bench(url, stack)


def answering(bench: Bench, **checker: Any) -> None:
    """Register a checker that does what the body says."""

    @bench.outbox.checker("paid", **checker)
    def check(orphan: Orphan) -> Any:
        match orphan.body:
            case {"raise": text}:
                raise ValueError(text)
            case {"hang": _}:
                bench.let_go.wait()
            case {"answer": answer}:
                return Resolution(answer)
        return None


@pytest.fixture
def world(bench: Bench) -> dict[str, UUID]:
    """An undecided half in each state, from the oldest to the youngest, and a decided one."""
    answering(bench, max_checks=1)
    parked = bench.prepare(key=ESCAPE, body={"raise": "the till is locked\nsecond line"})
    bench.check()
    bench.outbox.checkers.clear()
    answering(bench)
    waiting = bench.prepare(key="b", body={"answer": "unknown"})
    decided = bench.prepare(body={"answer": "commit"})
    bench.check()
    asked = bench.prepare(key="c", body={})
    with bench.engine.begin() as connection:
        execute(connection, check_sql.claim("outbox", "paid", 1, check_sql.Question(15, 3600, "another")))
    bench.run("UPDATE outbox.half_check SET next_check_at = now() + interval '1 h' WHERE half_id = :id", id=waiting)
    orphan = bench.prepare("refunds", key="d")
    immune = bench.prepare("refunds", key="e", due=False, immunity=3600)
    return {
        "parked": parked,
        "waiting": waiting,
        "asked": asked,
        "orphan": orphan,
        "immune": immune,
        "decided": decided,
    }


def ids(result: Result) -> list[UUID]:
    """Return the ids of a list."""
    return [UUID(row["id"]) for row in result.json["items"]]


def audit(bench: Bench) -> list[tuple[str, str, str, str]]:
    """Return who did what to which half, and why."""
    found = bench.rows("SELECT actor, action, target, reason FROM outbox.audit ORDER BY id")
    return [tuple(row) for row in found]


# --- list ----------------------------------------------------------------------------------------------------------


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


def test_list_once_the_claim_of_a_dead_worker_ran_out(cli: Cli, bench: Bench, world: dict[str, UUID]) -> None:
    """Nobody is being asked any more: it is due, and the last error tells why there is no answer."""
    bench.age(world["asked"])
    (row,) = [row for row in cli("half", "list", "-o", "json").json["items"] if row["id"] == str(world["asked"])]
    assert (row["status"], row["being_asked"]) == ("orphan", False)
    assert row["last_error"] == "asked, and no answer came: the worker died or was cut off"


@pytest.mark.parametrize(
    ("status", "names"),
    [
        ("parked", ["parked"]),
        ("waiting", ["waiting", "asked"]),
        ("orphan", ["orphan"]),
        ("immune", ["immune"]),
    ],
)
def test_list_by_status(cli: Cli, world: dict[str, UUID], status: str, names: list[str]) -> None:
    """Each status finds its halves and no others."""
    assert ids(cli("half", "list", "--status", status, "-o", "json")) == [world[name] for name in names]


def test_list_by_topic_and_age(cli: Cli, bench: Bench, world: dict[str, UUID]) -> None:
    """Topic and age narrow it down; the age is that of the half message, by the database's clock."""
    assert ids(cli("half", "list", "--topic", "refunds", "-o", "json")) == [world["orphan"], world["immune"]]
    assert ids(cli("half", "list", "--older-than", "1h", "-o", "json")) == []
    bench.run("UPDATE outbox.half_message SET born_at = now() - interval '2 h' WHERE key IN ('b', 'd')")
    assert ids(cli("half", "list", "--older-than", "1h", "-o", "json")) == [world["waiting"], world["orphan"]]
    assert ids(cli("half", "list", "--older-than", "1h", "--topic", "refunds", "-o", "json")) == [world["orphan"]]
    assert "2h00m" in cli("half", "list", "--older-than", "90m").out


def test_list_pages(cli: Cli, world: dict[str, UUID]) -> None:
    """Page by page one sees each half once."""
    seen: list[UUID] = []
    arguments: list[str] = []
    while True:
        page = cli("half", "list", "--limit", "2", "-o", "json", *arguments)
        seen += ids(page)
        if page.json["next_page_token"] is None:
            break
        arguments = ["--after", page.json["next_page_token"]]
    assert seen == ids(cli("half", "list", "-o", "json"))
    assert len(seen) == 5
    assert "there may be more: --after" in cli("half", "list", "--limit", "2").err


def test_list_gives_up_and_says_where(cli: Cli, world: dict[str, UUID], monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that finds nothing in its window says where to go on, and finds it there; at the end it says no more."""
    monkeypatch.setattr(lists_sql, "HALF_WINDOW", 2)
    monkeypatch.setattr(groups, "SEARCHED", 2)
    result = cli("half", "list", "--status", "orphan")
    assert result.err.startswith("searched 2 half messages; to search further: --after ")
    arguments: list[str] = []
    found = []
    while True:
        page = cli("half", "list", "--status", "orphan", "-o", "json", *arguments)
        found += ids(page)
        if page.json["next_page_token"] is None:
            break
        arguments = ["--after", page.json["next_page_token"]]
    assert found == [world["orphan"]]


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


def show(cli: Cli, half_id: UUID) -> Any:
    """Return all that is shown of a half."""
    result = cli("half", "show", str(half_id), "-o", "json")
    assert (result.code, result.err) == (0, "")
    return result.json


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
    """For as long as its claim stands it may be being asked; then it is known that the worker died over it."""
    half_id = bench.prepare()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.check.asking_process", url], cwd=ROOT, stdout=subprocess.PIPE, text=True
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
    bench.register(COMMIT)
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


# --- check ---------------------------------------------------------------------------------------------------------


def fenced(bench: Bench) -> UUID:
    """Return a fenced half whose function never began its transaction."""
    half_id = bench.prepare(due=False, immunity=3600)
    bench.run("UPDATE outbox.half_check SET fenced = true WHERE half_id = :id", id=half_id)
    return half_id


def test_check_by_the_next_pass(cli: Cli, bench: Bench) -> None:
    """Without an application a worker is asked to ask: once, with the reason on record."""
    half_id = bench.prepare(due=False, immunity=3600)
    result = cli("half", "check", str(half_id), *BECAUSE, "--yes", "-o", "json")
    assert (result.code, result.json["action"], result.json["message_id"]) == (0, "check", str(half_id))
    assert result.err == f"message {half_id} will be asked about in the next check pass\n"
    assert audit(bench) == [("ann", "check", str(half_id), "the provider called")]
    bench.register(COMMIT)
    bench.check()
    assert bench.op(half_id) == ("commit", "check")
    again = cli("half", "check", str(half_id), *BECAUSE, "--yes")
    assert (again.code, again.out) == (Code.CONFLICT, "")
    assert again.err.count("\n") == 1
    assert "committed" in again.err
    assert len(audit(bench)) == 1


def test_check_of_a_fence(cli: Cli, bench: Bench) -> None:
    """A fence is tried at once, without an application; a function that runs is left alone."""
    half_id = fenced(bench)
    with bench.engine.begin() as function:
        function.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": fence_key("outbox", half_id)})
        result = cli("half", "check", str(half_id), *BECAUSE, "--yes")
    assert (result.code, "without a verdict: its transaction is still running" in result.err) == (0, True)
    result = cli("half", "check", str(half_id), *BECAUSE, "--yes")
    assert (result.code, result.out) == (0, "")
    assert result.err == f"message {half_id} was rolled back by the check of its fence\n"
    assert bench.op(half_id) == ("rollback", "check")
    assert len(audit(bench)) == 2


APP = """
import os
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from outbox import Outbox, Resolution

print("imported")
outbox = Outbox({engine}(os.environ["OUTBOX_DATABASE_URL"]))

@outbox.checker("paid")
{function} check(orphan, session):
    print("asked")
    {execute}session.connection()
    return Resolution(orphan.body["answer"])
"""


@pytest.fixture
def new_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], str]:
    """A function that writes an application into the current folder, and returns what --app takes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(engine: str, function: str, execute: str) -> str:
        name = f"cli_bank_{uuid4().hex}"
        (tmp_path / f"{name}.py").write_text(APP.format(engine=engine, function=function, execute=execute))
        return f"{name}:outbox"

    return write


@pytest.mark.parametrize("answer", ["commit", "rollback", "unknown"])
@pytest.mark.parametrize(
    "kind",
    [("create_engine", "def", ""), ("create_engine", "async def", "await "),
     ("create_async_engine", "async def", "await "), ("create_async_engine", "def", "")],
    ids=["sync", "async checker", "async", "async engine"],
)  # fmt: skip
def test_check_by_the_application(
    cli: Cli, bench: Bench, new_app: Callable[[str, str, str], str], kind: tuple[str, str, str], answer: str
) -> None:
    """With --app its checker is asked here and now, sync or async; what it prints doesn't get among the data."""
    half_id = bench.prepare(body={"answer": answer}, due=False, immunity=3600)
    result = cli("half", "check", str(half_id), *BECAUSE, "--app", new_app(*kind), "-o", "json")
    assert (result.code, result.json["answer"]) == (0, answer), result.err
    assert result.json["seconds"] >= 0
    assert "imported\nasked\n" in result.err
    assert bench.op(half_id) == (None if answer == "unknown" else (answer, "check"))
    assert bench.answers(half_id) == [answer]
    assert audit(bench) == [("ann", "check", str(half_id), "the provider called")]


@pytest.mark.parametrize("kind", [("def", "time.sleep(3600)"), ("async def", "await asyncio.sleep(3600)")], ids=str)
def test_check_by_an_application_that_hangs(bench: Bench, url: str, tmp_path: Path, kind: tuple[str, str]) -> None:
    """A checker that gives no answer keeps the command no longer than its time."""
    function, hang = kind
    (tmp_path / "hanging.py").write_text(
        "import asyncio, os, time\nfrom sqlalchemy import create_engine\nfrom outbox import Outbox\n"
        "outbox = Outbox(create_engine(os.environ['OUTBOX_DATABASE_URL']))\n"
        f"@outbox.checker('paid', timeout=3)\n{function} check(orphan):\n    {hang}\n"
    )
    half_id = bench.prepare()
    done = subprocess.run(
        [sys.executable, "-m", "outbox.cli", "half", "check", str(half_id), *BECAUSE, "--app", "hanging:outbox"],
        env={**os.environ, "OUTBOX_DATABASE_URL": url, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == (f"no verdict on half message {half_id}: no answer within 3 s: the checker was given up\n")
    assert bench.answers(half_id) == ["unknown"]


def test_check_by_the_application_of_the_environment(
    cli: Cli, bench: Bench, new_app: Callable[[str, str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """OUTBOX_APP stands for --app; another database can't be named then, and a topic without a checker is refused."""
    monkeypatch.setenv("OUTBOX_APP", new_app("create_engine", "def", ""))
    half_id, other = bench.prepare(body={"answer": "commit"}), bench.prepare("refunds")
    refused = cli("half", "check", str(half_id), *BECAUSE, "--schema", "second")
    assert (refused.code, "leave out --url and --schema" in refused.err) == (Code.USAGE, True)
    refused = cli("half", "check", str(half_id), *BECAUSE, "--dry-run")
    assert (refused.code, "leave out --dry-run" in refused.err, bench.answers(half_id)) == (Code.USAGE, True, [])
    assert cli("half", "check", str(half_id), *BECAUSE).code == Code.DONE
    no_checker = cli("half", "check", str(other), *BECAUSE, "-o", "json")
    assert (no_checker.code, no_checker.out) == (Code.CONFLICT, "")
    assert "no checker is registered for topic 'refunds'" in no_checker.err
    assert bench.answers(other) == []


def test_check_while_it_is_being_asked(
    cli: Cli, bench: Bench, new_app: Callable[[str, str, str], str], world: dict[str, UUID]
) -> None:
    """Nobody is asked twice at once: 4."""
    result = cli("half", "check", str(world["asked"]), *BECAUSE, "--app", new_app("create_engine", "def", ""))
    assert (result.code, "it is being asked about at this moment" in result.err) == (Code.CONFLICT, True)
    assert audit(bench) == []


def test_check_by_an_application_without_tables(
    cli: Cli, empty_url: str, new_app: Callable[[str, str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its database isn't migrated: 78, with the command to run."""
    monkeypatch.setenv("OUTBOX_DATABASE_URL", empty_url)
    result = cli("half", "check", str(uuid4()), *BECAUSE, "--app", new_app("create_engine", "def", ""))
    assert (result.code, result.out) == (Code.CONFIG, "")
    assert "run: outbox db upgrade" in result.err


# --- reset ---------------------------------------------------------------------------------------------------------


def test_reset(cli: Cli, bench: Bench, world: dict[str, UUID]) -> None:
    """Named halves are checked again from the start, each on record."""
    named = [str(world["parked"]), str(world["waiting"])]
    result = cli("half", "reset", *named, named[0], *BECAUSE, "--yes", "-o", "json")
    assert (result.code, result.json["total"], result.json["done"]) == (0, 2, 2), result.err
    for name in ("parked", "waiting"):
        assert (bench.waits(world[name]).check_times, bench.waits(world[name]).parked) == (0, False)
    assert {row for row in audit(bench) if row[1] == "reset"} == {
        ("ann", "reset", half_id, "the provider called") for half_id in named
    }
    again = cli("half", "reset", named[0], *BECAUSE, "--yes")
    assert (again.code, again.err) == (
        0,
        f"message {named[0]} has all its checks again, the first in the next check pass\n",
    )


def test_reset_in_part(cli: Cli, bench: Bench, world: dict[str, UUID]) -> None:
    """What can be done is done: 5. If nothing can be, the code says why."""
    missing = str(uuid4())
    decided, parked = str(world["decided"]), str(world["parked"])
    result = cli("half", "reset", decided, parked, *BECAUSE, "--yes", "-o", "json")
    assert (result.code, result.json["done"], result.json["skipped"]) == (Code.PARTIAL, 1, 1)
    assert f"skipped: {decided}: it is committed" in result.err
    assert [target for _, action, target, _ in audit(bench) if action == "reset"] == [parked]
    assert cli("half", "reset", missing, *BECAUSE, "--yes").code == Code.NOT_FOUND
    assert cli("half", "reset", decided, *BECAUSE, "--yes").code == Code.CONFLICT
    assert cli("half", "reset", decided, missing, *BECAUSE, "--yes").code == Code.CONFLICT


def test_reset_of_all_that_are_parked(cli: Cli, bench: Bench, world: dict[str, UUID]) -> None:
    """All parked halves of a topic, if one is sure."""
    picked = ("--status", "parked", "--topic")
    refused = cli("half", "reset", *picked, "paid", *BECAUSE)
    assert (refused.code, refused.out) == (Code.USAGE, "")
    assert "there is no terminal to ask at; give --yes if you are sure" in refused.err
    assert audit(bench) == []
    nothing = cli("half", "reset", *picked, "refunds", *BECAUSE, "--yes")
    assert (nothing.code, nothing.err) == (0, "nothing fits: nothing to do\n")
    done = cli("half", "reset", *picked, "paid", *BECAUSE, "--yes", "-o", "json")
    assert (done.code, done.json["done"], done.json["total"]) == (0, 1, 1), done.err
    assert ("ann", "reset", str(world["parked"]), "the provider called") in audit(bench)


@pytest.mark.parametrize("arguments", [[], [str(uuid4()), "--status", "parked"], [str(uuid4()), "--topic", "paid"]])
def test_reset_of_something_else(cli: Cli, arguments: list[str]) -> None:
    """Neither ids nor options that pick halves, or both: wrong usage."""
    result = cli("half", "reset", *arguments, *BECAUSE, "--yes")
    assert (result.code, result.out) == (Code.USAGE, "")
    assert "give ids, or" in result.err or "give ids, options" in result.err


# --- commit and rollback -------------------------------------------------------------------------------------------


def test_commit(cli: Cli, bench: Bench, world: dict[str, UUID]) -> None:
    """Decided for ever; once more, or otherwise, is a conflict."""
    half_id = str(world["parked"])
    result = cli("half", "commit", half_id, *BECAUSE, "--yes", "-o", "json")
    assert result.code == 0, result.err
    assert result.err == f"message {half_id} is committed: it will be sent\n"
    assert (result.json["action"], result.json["message_id"]) == ("commit", half_id)
    assert bench.op(world["parked"]) == ("commit", "operator")
    for act in ("commit", "rollback"):
        again = cli("half", act, half_id, *BECAUSE, "--yes", "-o", "json")
        assert (again.code, again.out) == (Code.CONFLICT, "")
        assert "it is committed" in again.err
    assert [(actor, target, reason) for actor, _, target, reason in audit(bench)] == [
        ("ann", half_id, "the provider called")
    ]
    assert [act["action"] for act in show(cli, world["parked"])["audit"]] == ["commit"]


def test_commit_fenced(cli: Cli, bench: Bench) -> None:
    """A fenced half is committed by force only."""
    half_id = fenced(bench)
    refused = cli("half", "commit", str(half_id), *BECAUSE, "--yes")
    assert (refused.code, refused.err.count("\n")) == (Code.CONFLICT, 1)
    assert bench.op(half_id) is None
    assert cli("half", "commit", str(half_id), *BECAUSE, "--yes", "--force").code == 0
    assert bench.op(half_id) == ("commit", "operator")


class Terminal(io.StringIO):
    """A terminal at which an operator types this."""

    def isatty(self) -> bool:
        """Say that it is one."""
        return True


@pytest.mark.parametrize("typed", ["y\n", "n\n", "\n"])
def test_rollback_asks(cli: Cli, bench: Bench, monkeypatch: pytest.MonkeyPatch, typed: str) -> None:
    """An operator at a terminal is asked, on stderr; without one and without --yes nothing is done."""
    half_id = bench.prepare(key=ESCAPE)
    refused = cli("half", "rollback", str(half_id), *BECAUSE)
    assert (refused.code, refused.out) == (Code.USAGE, "")
    assert "there is no terminal to ask at; give --yes if you are sure" in refused.err
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    asked = cli("half", "rollback", str(half_id), *BECAUSE)
    assert "? [y/N] " in asked.err
    assert "\x1b" not in asked.err
    assert asked.out == ""
    if typed == "y\n":
        assert (asked.code, bench.op(half_id)) == (0, ("rollback", "operator"))
    else:
        assert (asked.code, bench.op(half_id)) == (Code.USAGE, None)
        assert asked.err.endswith("error: nothing was done (rollback)\n")


def test_rollback_of_what_is_not_open(cli: Cli, world: dict[str, UUID]) -> None:
    """A half that is decided is a conflict, one that isn't there is not found."""
    decided = cli("half", "rollback", str(world["decided"]), *BECAUSE, "--yes")
    assert (decided.code, "it is committed" in decided.err) == (Code.CONFLICT, True)
    assert cli("half", "rollback", str(uuid4()), *BECAUSE, "--yes").code == Code.NOT_FOUND


def test_rollback_while_another_decides(cli: Cli, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction that is deciding the half and doesn't end is waited for so long and no longer: 4."""
    monkeypatch.setattr(databases, "PATIENCE", 0.05)
    half_id = bench.prepare()
    with bench.engine.begin() as rival:
        decide(rival, "outbox", half_id, COMMIT)
        for act in ("rollback", "reset", "check"):
            result = cli("half", act, str(half_id), *BECAUSE, "--yes")
            assert (result.code, result.err.count("\n")) == (Code.CONFLICT, 1), result.err
    assert (bench.op(half_id), audit(bench)) == (("commit", "producer"), [])


# --- all acts ------------------------------------------------------------------------------------------------------

ACTS = ("reset", "commit", "rollback")


@pytest.mark.parametrize("act", ACTS)
def test_acts_need_a_reason(cli: Cli, bench: Bench, act: str) -> None:
    """Without a reason, or with an empty one: wrong usage, and nothing is done."""
    half_id = bench.prepare()
    for options in ([], ["--reason", " "], ["--reason", "why", "--actor", ""]):
        for named in ([str(half_id)], ["--status", "parked"]):
            if act == "check" and named == [str(half_id)] and "why" not in options:
                continue  # of one half, nothing is lost by it
            result = cli("half", act, *named, *options, "--yes")
            assert (result.code, result.out) == (Code.USAGE, "")
            assert "--reason" in result.err or "--actor is empty" in result.err
    assert (bench.op(half_id), audit(bench)) == (None, [])


@pytest.mark.parametrize("act", ACTS)
def test_acts_on_unknown_halves(cli: Cli, bench: Bench, act: str) -> None:
    """No such half: 3. No id at all: 2."""
    unknown = cli("half", act, str(uuid4()), *BECAUSE, "--yes")
    assert (unknown.code, unknown.out) == (Code.NOT_FOUND, "")
    assert unknown.err.startswith("error: no registered database ")
    assert cli("half", act, "42", *BECAUSE, "--yes").code == Code.USAGE
    assert audit(bench) == []


def test_actor_by_default(cli: Cli, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who isn't named is on record as user@host, even if the user has no name."""
    monkeypatch.setattr(socket, "gethostname", lambda: "desk")
    monkeypatch.setenv("LOGNAME", "eve")
    half_id = bench.prepare()
    assert cli("half", "reset", str(half_id), "--reason", "why", "--yes").code == 0

    def nameless() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr(getpass, "getuser", nameless)
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert cli("half", "reset", str(half_id), "--reason", "why", "--yes").code == 0
    assert [actor for actor, *_ in audit(bench)] == ["eve@desk", "uid 4711@desk"]


def test_where_only_consumers_are(cli: Cli, empty_url: str) -> None:
    """Halves are in the producer's database: 78 elsewhere."""
    from outbox.database import migration

    migration.upgrade(empty_url, ["consumer"])
    result = cli("half", "list", "--url", empty_url)
    assert (result.code, "name the producer's database" in result.err) == (Code.CONFIG, True)
    for command in (["show", str(uuid4())], ["reset", str(uuid4()), *BECAUSE, "--yes"]):
        assert cli("half", *command, "--url", empty_url).code == Code.NOT_FOUND


# --- stats ---------------------------------------------------------------------------------------------------------


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
