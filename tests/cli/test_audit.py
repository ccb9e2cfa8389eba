"""``outbox audit``: who did what, why."""

from __future__ import annotations

import csv
import io
import json

import pytest
from sqlalchemy import Engine, text

from tests.cli.books import Books
from tests.cli.conftest import Cli


@pytest.fixture
def acted(cli: Cli, engine: Engine) -> list[str]:
    """Three acts, two by Ann, one with a reason that a spreadsheet would run; their targets, the newest first."""
    books = Books.open(engine)
    ids = books.parked("looks wrong", "looks wrong")
    targets = [f"till/{each}" for each in ids]
    for actor, command, target, reason in (
        ("ann", "retry", targets[0], "mended"),
        ("bea", "discard", targets[1], "=HYPERLINK(1)"),
        ("ann", "restore", targets[1], "was needed"),
    ):
        assert cli("dead", command, target, "--actor", actor, "--reason", reason, "--yes").code == 0
    return [targets[1], targets[1], targets[0]]


def test_list(cli: Cli, acted: list[str]) -> None:
    """The newest first; by actor, action, target and time."""
    result = cli("audit", "list", "-o", "json")
    assert (result.code, result.err) == (0, "")
    rows = result.json["items"]
    assert [row["target"] for row in rows] == acted
    assert [row["action"] for row in rows] == ["restore", "discard", "retry"]
    assert {row["origin"]["via"] for row in rows} == {"cli"}

    def found(*arguments: str) -> list[str]:
        lines = cli("audit", "list", "-o", "ndjson", *arguments).out.splitlines()
        return [json.loads(line)["action"] for line in lines]

    assert found("--by", "ann") == ["restore", "retry"]
    assert found("--action", "discard") == ["discard"]
    assert found("--target", acted[0]) == ["restore", "discard"]
    assert found("--since", "1h", "--limit", "1") == ["restore"]
    assert found("--until", "1h") == []
    assert "was needed" in cli("audit", "list").out


def test_export(cli: Cli, acted: list[str]) -> None:
    """All acts, as lines of JSON or as CSV without formulas; how many is told on stderr."""
    result = cli("audit", "export")
    assert (result.code, result.err) == (0, "3 acts\n")
    assert [json.loads(line)["target"] for line in result.out.splitlines()] == acted
    table = list(csv.DictReader(io.StringIO(cli("audit", "export", "-o", "csv").out)))
    assert [row["reason"] for row in table] == ["was needed", "'=HYPERLINK(1)", "mended"]
    assert json.loads(table[0]["origin"])["via"] == "cli"
    assert cli("audit", "export", "--limit", "1", "--by", "bea").out.count("\n") == 1


def test_more_than_a_page(cli: Cli, acted: list[str], engine: Engine) -> None:
    """An export goes through all pages, a list up to its limit; no row comes twice."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO outbox.audit (actor, action, target, reason) "
                "SELECT 'cal', 'retry', 'till/' || n, 'x' FROM generate_series(1, 1200) n"
            )
        )
    exported = cli("audit", "export", "--by", "cal").out.splitlines()
    assert len({json.loads(line)["target"] for line in exported}) == len(exported) == 1200
    listed = cli("audit", "list", "--by", "cal", "--limit", "700", "-o", "json").json
    assert len({row["target"] for row in listed["items"]}) == 700
    assert listed["next_page_token"] is not None
    rest = cli("audit", "list", "--by", "cal", "--limit", "10000", "--after", listed["next_page_token"], "-o", "id")
    assert len(rest.out.split()) == 500
