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
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import text

from outbox import Orphan, Resolution
from outbox.check import sql as check_sql
from outbox.cli.exits import Code
from outbox.database.decision import decide, fence_key
from outbox.database.execute import execute
from outbox.operator import old_halves, undecided
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
    return [UUID(row["id"]) for row in result.json["halves"]]


def audit(bench: Bench) -> list[tuple[str, str, str, str]]:
    """Return who did what to which half, and why."""
    found = bench.rows("SELECT actor, action, target, reason FROM outbox.audit ORDER BY id")
    return [tuple(row) for row in found]


# --- list ----------------------------------------------------------------------------------------------------------


def test_list(cli: Cli, world: dict[str, UUID]) -> None:
    """All undecided halves, the oldest first, each with how it stands."""
    result = cli("half", "list", "-o", "json")
    assert (result.code, result.err) == (0, "")
    assert result.json["next"] is None
    names = ["parked", "waiting", "asked", "orphan", "immune"]
    assert ids(result) == [world[name] for name in names]
    shown = dict(zip(names, result.json["halves"], strict=True))
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
    assert 3000 < shown["immune"]["next_check_in"] <= 3600
    assert shown["orphan"]["next_check_in"] < 0
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
    (row,) = [row for row in cli("half", "list", "-o", "json").json["halves"] if row["id"] == str(world["asked"])]
    assert (row["status"], row["being_asked"]) == ("orphan", False)
    assert row["last_error"] == "asked, and no answer came: the worker died or was cut off"


@pytest.mark.parametrize(
    ("status", "names"),
    [
        ("all", ["parked", "waiting", "asked", "orphan", "immune"]),
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
        if page.json["next"] is None:
            break
        arguments = ["--after", page.json["next"]]
    assert seen == ids(cli("half", "list", "-o", "json"))
    assert len(seen) == 5
    assert "there may be more: --after" in cli("half", "list", "--limit", "2").err


def test_list_gives_up_and_says_where(cli: Cli, world: dict[str, UUID], monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that finds nothing in its window says where to go on, and finds it there; at the end it says no more."""
    monkeypatch.setattr(old_halves, "BROWSE_WINDOW", 2)
    result = cli("half", "list", "--status", "orphan")
    assert result.err == f"looked at 100000 half messages; to search further: --after {world['waiting']}\n"
    arguments: list[str] = []
    pages = []
    while True:
        page = cli("half", "list", "--status", "orphan", "-o", "json", *arguments)
        pages.append(ids(page))
        if page.json["next"] is None:
            break
        arguments = ["--after", page.json["next"]]
    assert pages == [[], [world["orphan"]], []]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("--older-than", "yesterday"), "must be a duration: 90s, 15m, 2h, 3d"),
        (("--after", "42"), "--after '42' is not a message id"),
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
    (row,) = [row for row in cli("half", "list", "-o", "json").json["halves"] if row["id"] == str(world["orphan"])]
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
    status = {"commit": "committed", "rollback": "rolled_back", "unknown": "waiting"}[answer]
    assert shown["status"] == status
    assert (shown["op"] or {}).get("decided_by") == (None if answer == "unknown" else "check")
    assert (shown["check"] is None) == (answer != "unknown")
    out = cli("half", "show", str(half_id)).out
    assert f"checker  {answer}" in out
    assert (error or "") in out
    assert "Traceback" not in out
    way = cli("messages", "show", str(half_id), "-o", "json").json
    assert way["history"] == shown["history"]
    assert f"by its checker: {answer}{', ' + error if error else ''}" in cli("messages", "show", str(half_id)).out


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
    assert (shown["status"], shown["check"]["being_asked"], shown["check"]["last_error"]) == ("waiting", True, None)
    assert "(being asked)" in cli("half", "show", str(half_id)).out
    assert "by its checker: (being asked)" in cli("messages", "show", str(half_id)).out
    bench.age()
    bench.run("UPDATE outbox.check_history SET asked_at = asked_at - interval '41 s'")
    shown = show(cli, half_id)
    assert (shown["history"][0]["answer"], shown["history"][0]["state"]) == (None, "no_answer")
    assert shown["check"]["last_error"] == "asked, and no answer came: the worker died or was cut off"
    assert "(no answer)" in cli("half", "show", str(half_id)).out
    assert "by its checker: (no answer)" in cli("messages", "show", str(half_id)).out
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
    bench.outbox.resolve(world["parked"], COMMIT, actor="ann", reason=f"phoned {ESCAPE}")
    out = cli("half", "show", str(world["parked"])).out
    assert [line.split()[0] for line in out.splitlines() if line.startswith(("half", "Checks", "What"))] == [
        "half", "Checks", "What",
    ]  # fmt: skip
    for words in ("committed", "decided by", "operator", "ValueError: the till is locked", "ann  commit  phoned"):
        assert words in out
    assert "\x1b" not in out
    waiting = cli("half", "show", str(world["waiting"])).out
    assert "next check at" in waiting
    assert "What operators did" not in waiting


def test_show_unknown(cli: Cli) -> None:
    """No trace of it: 3. No id at all: 2."""
    unknown = cli("half", "show", str(uuid4()), "-o", "json")
    assert (unknown.code, unknown.out) == (Code.NOT_FOUND, "")
    assert unknown.err.startswith("error: no half message ")
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
    result = cli("half", "check", str(half_id), *BECAUSE, "-o", "json")
    assert (result.code, result.json) == (0, {"id": str(half_id), "asked": "next_pass"})
    assert result.err == f"half message {half_id} will be checked by the next pass of a worker\n"
    assert audit(bench) == [("ann", "check", str(half_id), "the provider called")]
    bench.register(COMMIT)
    bench.check()
    assert bench.op(half_id) == ("commit", "check")
    again = cli("half", "check", str(half_id), *BECAUSE)
    assert (again.code, again.out) == (Code.CONFLICT, "")
    assert again.err == f"error: half message {half_id} was already committed (by the check)\n"
    assert len(audit(bench)) == 1


def test_check_of_a_fence(cli: Cli, bench: Bench) -> None:
    """A fence is tried at once, without an application; a function that runs is left alone."""
    half_id = fenced(bench)
    with bench.engine.begin() as function:
        function.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": fence_key("outbox", half_id)})
        result = cli("half", "check", str(half_id), *BECAUSE, "-o", "json")
    assert (result.code, result.json["asked"], result.json["answer"]) == (0, "now", "unknown")
    assert result.err == f"no verdict on half message {half_id}: its transaction is still running\n"
    result = cli("half", "check", str(half_id), *BECAUSE)
    assert (result.code, result.out) == (0, "")
    assert result.err.startswith(f"half message {half_id} was rolled back by the check; it took ")
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
    assert (result.code, result.json["asked"], result.json["answer"]) == (0, "now", answer), result.err
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
    assert (result.code, "is being checked at this moment" in result.err) == (Code.CONFLICT, True)
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
    result = cli("half", "reset", *named, named[0], *BECAUSE, "-o", "json")
    assert (result.code, result.json) == (0, {"reset": named, "failed": []})
    assert result.err == "2 half messages will be checked again from the start\n"
    for name in ("parked", "waiting"):
        assert (bench.waits(world[name]).check_times, bench.waits(world[name]).parked) == (0, False)
    assert audit(bench) == [("ann", "reset", half_id, "the provider called") for half_id in named]
    assert cli("half", "reset", named[0], *BECAUSE).err == "1 half message will be checked again from the start\n"


def test_reset_in_part(cli: Cli, bench: Bench, world: dict[str, UUID]) -> None:
    """What can be done is done: 5. If nothing can be, the code says why."""
    missing = str(uuid4())
    decided, parked = str(world["decided"]), str(world["parked"])
    result = cli("half", "reset", decided, parked, missing, *BECAUSE, "-o", "json")
    assert (result.code, result.json["reset"]) == (Code.PARTIAL, [parked])
    assert [failure["id"] for failure in result.json["failed"]] == [decided, missing]
    assert result.json["failed"][0]["error"] == f"half message {decided} was already committed (by the check)"
    assert result.err.count("error: ") == 2
    assert [target for _, _, target, _ in audit(bench)] == [parked]
    assert cli("half", "reset", missing, *BECAUSE).code == Code.NOT_FOUND
    assert cli("half", "reset", decided, *BECAUSE).code == Code.CONFLICT
    assert cli("half", "reset", decided, missing, *BECAUSE).code == Code.PARTIAL


def test_reset_of_all_that_are_parked(cli: Cli, bench: Bench, world: dict[str, UUID]) -> None:
    """All parked halves of a topic, if one is sure."""
    refused = cli("half", "reset", "--parked", "--topic", "paid", *BECAUSE)
    assert (refused.code, refused.out) == (Code.USAGE, "")
    assert refused.err == (
        "error: not resetting 1 half message parked in paid: nobody here to ask; give --yes if you are sure\n"
    )
    assert audit(bench) == []
    nothing = cli("half", "reset", "--parked", "--topic", "refunds", *BECAUSE, "-o", "json")
    assert (nothing.code, nothing.json["reset"]) == (0, [])
    done = cli("half", "reset", "--parked", "--topic", "paid", "--yes", *BECAUSE, "-o", "json")
    assert (done.code, done.json) == (0, {"reset": [str(world["parked"])], "failed": []})
    assert audit(bench) == [("ann", "reset", str(world["parked"]), "the provider called")]


@pytest.mark.parametrize(
    "arguments", [[], ["--topic", "paid"], [str(uuid4()), "--parked"], [str(uuid4()), "--topic", "paid"]]
)
def test_reset_of_something_else(cli: Cli, arguments: list[str]) -> None:
    """Neither ids nor --parked, or both: wrong usage."""
    result = cli("half", "reset", *arguments, *BECAUSE)
    assert (result.code, result.out) == (Code.USAGE, "")
    assert "give ids, or --parked" in result.err


# --- commit, rollback ------------------------------------------------------------------------------------------------


def test_commit(cli: Cli, bench: Bench, world: dict[str, UUID]) -> None:
    """Decided for ever; the same once more is told who did it, another decision is a conflict."""
    half_id = str(world["parked"])
    result = cli("half", "commit", half_id, *BECAUSE, "--yes", "-o", "json")
    assert result.code == 0
    assert result.err == f"half message {half_id} was committed by the operator\n"
    shown = result.json
    assert shown.pop("decided_at") > "2"
    assert shown == {"id": half_id, "resolution": "commit", "decided_by": "operator", "first": True}
    again = cli("half", "commit", half_id, *BECAUSE, "--yes")
    assert (again.code, again.out) == (0, "")
    assert again.err == f"half message {half_id} was committed by the operator, before this\n"
    other = cli("half", "rollback", half_id, *BECAUSE, "--yes", "-o", "json")
    assert (other.code, other.out) == (Code.CONFLICT, "")
    assert other.err == f"error: half message {half_id} was already committed (by the operator)\n"
    assert audit(bench) == [("ann", "commit", half_id, "the provider called")]
    assert show(cli, world["parked"])["audit"][0]["result"] == {"resolution": "commit", "force": False}


def test_commit_fenced(cli: Cli, bench: Bench) -> None:
    """A fenced half is committed by force only: 2."""
    half_id = fenced(bench)
    refused = cli("half", "commit", str(half_id), *BECAUSE, "--yes")
    assert (refused.code, "is fenced and has no op" in refused.err) == (Code.USAGE, True)
    assert bench.op(half_id) is None
    assert cli("half", "commit", str(half_id), *BECAUSE, "--yes", "--force").code == 0
    assert bench.op(half_id) == ("commit", "operator")


class Terminal(io.StringIO):
    """Somebody at a terminal who types this."""

    def isatty(self) -> bool:
        """Say that it is one."""
        return True


@pytest.mark.parametrize("typed", ["y\n", "n\n", "\n"])
def test_decision_asks(cli: Cli, bench: Bench, monkeypatch: pytest.MonkeyPatch, typed: str) -> None:
    """Who sits at a terminal is asked, on stderr; without one and without --yes nothing is done."""
    half_id = bench.prepare(key=ESCAPE)
    nobody = cli("half", "rollback", str(half_id), *BECAUSE)
    assert (nobody.code, nobody.out) == (Code.USAGE, "")
    assert "nobody here to ask; give --yes if you are sure" in nobody.err
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    asked = cli("half", "rollback", str(half_id), *BECAUSE)
    question = (
        f"Roll back half message {half_id} of topic 'paid', key {ESCAPE!r} (orphan)? Then no consumer will ever see"
    )
    assert asked.err.startswith(question)
    assert asked.out == ""
    if typed == "y\n":
        assert (asked.code, bench.op(half_id)) == (0, ("rollback", "operator"))
    else:
        assert (asked.code, bench.op(half_id)) == (Code.USAGE, None)
        assert asked.err.endswith(f"error: not deciding half message {half_id}\n")


def test_decision_asks_only_what_is_open(cli: Cli, world: dict[str, UUID]) -> None:
    """Nobody is asked about a half that is decided, or isn't there."""
    decided = cli("half", "rollback", str(world["decided"]), *BECAUSE)
    assert (decided.code, "was already committed" in decided.err) == (Code.CONFLICT, True)
    assert cli("half", "rollback", str(uuid4()), *BECAUSE).code == Code.NOT_FOUND


def test_decision_while_another_decides(cli: Cli, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction that is deciding the half and doesn't end is waited for so long and no longer: 4."""
    monkeypatch.setattr(undecided, "PATIENCE", 0.05)
    half_id = bench.prepare()
    with bench.engine.begin() as rival:
        decide(rival, "outbox", half_id, COMMIT)
        for command in (["rollback", str(half_id), "--yes"], ["reset", str(half_id)]):
            result = cli("half", *command, *BECAUSE)
            assert (result.code, "another transaction is at it" in result.err) == (Code.CONFLICT, True), result.err
        checked = cli("half", "check", str(half_id), *BECAUSE)
        assert (checked.code, "is being decided by a transaction" in checked.err) == (Code.CONFLICT, True)
    assert (bench.op(half_id), audit(bench)) == (("commit", "producer"), [])


# --- all acts ------------------------------------------------------------------------------------------------------

ACTS = (("check", "{id}"), ("reset", "{id}"), ("reset", "--parked", "--yes"), ("commit", "{id}", "--yes"))


@pytest.mark.parametrize("act", ACTS, ids=" ".join)
def test_acts_need_a_reason(cli: Cli, bench: Bench, act: tuple[str, ...]) -> None:
    """Without a reason, or with an empty one: wrong usage, and nothing is done."""
    half_id = bench.prepare()
    arguments = [part.format(id=half_id) for part in act]
    missing = cli("half", *arguments)
    assert (missing.code, "--reason" in missing.err) == (Code.USAGE, True)
    for options in (["--reason", " "], ["--reason", "why", "--actor", ""]):
        result = cli("half", *arguments, *options)
        assert (result.code, result.out) == (Code.USAGE, "")
        assert "is empty: the audit must tell who did it, and why" in result.err
    assert (bench.op(half_id), audit(bench)) == (None, [])


@pytest.mark.parametrize("act", [act for act in ACTS if "{id}" in act], ids=" ".join)
def test_acts_on_unknown_halves(cli: Cli, bench: Bench, act: tuple[str, ...]) -> None:
    """No such half: 3. No id at all: 2."""
    unknown = cli("half", *(part.format(id=uuid4()) for part in act), *BECAUSE)
    assert (unknown.code, unknown.out) == (Code.NOT_FOUND, "")
    assert "error: no half message " in unknown.err
    assert cli("half", *(part.format(id=42) for part in act), *BECAUSE).code == Code.USAGE
    assert audit(bench) == []


def test_actor_by_default(cli: Cli, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who isn't named is on record as user@host, even if the user has no name."""
    monkeypatch.setattr(socket, "gethostname", lambda: "desk")
    monkeypatch.setenv("LOGNAME", "eve")
    half_id = bench.prepare()
    assert cli("half", "reset", str(half_id), "--reason", "why").code == 0

    def nameless() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr(getpass, "getuser", nameless)
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert cli("half", "reset", str(half_id), "--reason", "why").code == 0
    assert [actor for actor, *_ in audit(bench)] == ["eve@desk", "uid 4711@desk"]


def test_where_only_consumers_are(cli: Cli, empty_url: str) -> None:
    """Halves are in the producer's database: 78 elsewhere."""
    from outbox.database import migration

    migration.upgrade(empty_url, ["consumer"])
    for command in (["list"], ["show", str(uuid4())], ["reset", str(uuid4()), *BECAUSE]):
        result = cli("half", *command, "--url", empty_url)
        assert (result.code, "name the producer's database" in result.err) == (Code.CONFIG, True)


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
