"""``outbox half check``: by the next pass of a worker, or by an application here and now."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from sqlalchemy import text

from outbox import Resolution
from outbox.cli.output import Code
from outbox.database.decision import fence_key
from tests.check.support import Bench
from tests.cli.conftest import Cli
from tests.cli.half.halves import BECAUSE, audit, fenced
from tests.kit import ROOT
from tests.kit.warm import warm_python


def test_check_by_the_next_pass(cli: Cli, bench: Bench) -> None:
    """Without an application a worker is asked to ask: once, with the reason on record."""
    half_id = bench.prepare(due=False, immunity=3600)
    result = cli("half", "check", str(half_id), *BECAUSE, "--yes", "-o", "json")
    assert (result.code, result.json["action"], result.json["message_id"]) == (0, "check", str(half_id))
    assert result.err == f"message {half_id} will be asked about in the next check pass\n"
    assert audit(bench) == [("ann", "check", str(half_id), "the provider called")]
    bench.register(Resolution.COMMIT)
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
    """A checker that gives no answer keeps the command no longer than its time; the log and the command tell it."""
    function, hang = kind
    (tmp_path / "hanging.py").write_text(
        "import asyncio, os, time\nfrom sqlalchemy import create_engine\nfrom outbox import Outbox\n"
        "outbox = Outbox(create_engine(os.environ['OUTBOX_DATABASE_URL']))\n"
        f"@outbox.checker('paid', timeout=3)\n{function} check(orphan):\n    {hang}\n"
    )
    half_id = bench.prepare()
    done = subprocess.run(
        [warm_python(), "-m", "outbox.cli", "half", "check", str(half_id), *BECAUSE, "--app", "hanging:outbox"],
        env={**os.environ, "OUTBOX_DATABASE_URL": url, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "")
    late = "no answer within 3 s: the checker was given up"
    assert done.stderr.splitlines() == [
        f"check 1 of half message {half_id} of topic 'paid': unknown ({late})",
        f"no verdict on half message {half_id}: {late}",
    ]
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
