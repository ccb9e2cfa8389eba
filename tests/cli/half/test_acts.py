"""``outbox half reset``, ``commit`` and ``rollback``: of several at once, as they are asked for, and in a race."""

from __future__ import annotations

import getpass
import io
import os
import socket
import sys
from uuid import UUID, uuid4

import pytest

from outbox import Resolution
from outbox.cli.output import Code
from outbox.database.decision import decide
from outbox.operator import databases
from tests.check.support import Bench
from tests.cli.conftest import Cli
from tests.cli.half.halves import BECAUSE, ESCAPE, audit, fenced


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


def test_rollback_while_another_decides(cli: Cli, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction that is deciding the half and doesn't end is waited for so long and no longer: 4."""
    monkeypatch.setattr(databases, "PATIENCE", 0.05)
    half_id = bench.prepare()
    with bench.engine.begin() as rival:
        decide(rival, "outbox", half_id, Resolution.COMMIT)
        for act in ("rollback", "reset", "check"):
            result = cli("half", act, str(half_id), *BECAUSE, "--yes")
            assert (result.code, result.err.count("\n")) == (Code.CONFLICT, 1), result.err
    assert (bench.op(half_id), audit(bench)) == (("commit", "producer"), [])


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
