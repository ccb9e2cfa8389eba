"""What tests of ``outbox half`` say with each act, what they prepare, and what they read."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from outbox import Orphan, Resolution
from tests.check.support import Bench
from tests.cli.conftest import Cli, Result

BECAUSE = ("--reason", "the provider called", "--actor", "ann")
ESCAPE = "\x1b[31mred\x1b[0m"


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


def ids(result: Result) -> list[UUID]:
    """Return the ids of a list."""
    return [UUID(row["id"]) for row in result.json["items"]]


def audit(bench: Bench) -> list[tuple[str, str, str, str]]:
    """Return who did what to which half, and why."""
    found = bench.rows("SELECT actor, action, target, reason FROM outbox.audit ORDER BY id")
    return [tuple(row) for row in found]


def fenced(bench: Bench) -> UUID:
    """Return a fenced half whose function never began its transaction."""
    half_id = bench.prepare(due=False, immunity=3600)
    bench.run("UPDATE outbox.half_check SET fenced = true WHERE half_id = :id", id=half_id)
    return half_id


def show(cli: Cli, half_id: UUID) -> Any:
    """Return all that is shown of a half."""
    result = cli("half", "show", str(half_id), "-o", "json")
    assert (result.code, result.err) == (0, "")
    return result.json
