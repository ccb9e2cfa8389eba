"""``outbox messages export`` and the filters of ``messages list``."""

from __future__ import annotations

import base64
import csv
import io
import json
from uuid import UUID

import pytest

from outbox.cli.output import Code
from tests.cli.books import Books
from tests.cli.conftest import Cli

FORMULAS = ("=1+1", "+1", "-1", "@SUM(1)", "\tx", "\rx")


@pytest.fixture
def ids(books: Books) -> list[UUID]:
    """Messages with what may be secret in them."""
    (order,) = books.send(
        {"order": {"id": 42}, "password": "hunter2"}, key="a", tag="new", headers={"tenant": "acme", "token": "hunter2"}
    )
    (plain,) = books.send("hunter2", key="b")
    (binary,) = books.send(b"\x00\xff", topic="files")
    return [order, plain, binary]


def test_filters(cli: Cli, ids: list[UUID]) -> None:
    """Messages are found by topic, key, tag, header, and by what is in the body."""

    def found(*arguments: str) -> list[str]:
        result = cli("messages", "list", "-o", "id", *arguments)
        assert (result.code, result.err) == (0, "")
        return result.out.split()

    order, plain, binary = map(str, ids)
    assert found() == [binary, plain, order]
    assert found("--tag", "new") == found("--header", "tenant=acme") == found("--where", "order.id=42") == [order]
    assert found("--topic", "files", "--producer-group", "shop") == [binary]
    assert found("--status", "committed", "--status", "undecided", "--key", "b") == [plain]
    assert found("--where", "order.id=43") == found("--header", "tenant=other") == []


def test_export(cli: Cli, ids: list[UUID]) -> None:
    """All that fit, as they come, without bodies."""
    result = cli("messages", "export")
    assert (result.code, result.err) == (0, "3 messages\n")
    rows = [json.loads(line) for line in result.out.splitlines()]
    assert [row["id"] for row in rows] == [str(each) for each in reversed(ids)]
    assert "body" not in rows[0]
    assert "hunter2" not in result.out
    table = list(csv.DictReader(io.StringIO(cli("messages", "export", "--key", "a", "-o", "csv").out)))
    assert [row["id"] for row in table] == [str(ids[0])]


def test_bodies_are_masked(cli: Cli, ids: list[UUID], books: Books) -> None:
    """Bodies and headers come masked, unless they are revealed, which the audit tells."""
    masked = cli("messages", "export", "--body")
    assert masked.code == 0, masked.err
    assert "hunter2" not in masked.out
    binary, plain, order = [json.loads(line) for line in masked.out.splitlines()]
    assert json.loads(order["body"])["order"] == {"id": 42}
    assert order["masked"] == ["password"]
    assert order["headers"] == {"tenant": "acme", "token": "***", "outbox-sender": order["headers"]["outbox-sender"]}
    assert (plain["body"], binary["body"]) == (None, None)
    assert books.audited() == []
    assert cli("messages", "export", "--reveal").code == Code.USAGE
    shown = cli("messages", "export", "--body", "--reveal", "--actor", "ann")
    assert shown.code == 0, shown.err
    binary, plain, order = [json.loads(line) for line in shown.out.splitlines()]
    assert json.loads(order["body"])["password"] == "hunter2"  # noqa: S105
    assert plain["body"] == "hunter2"
    assert base64.b64decode(binary["body_base64"]) == b"\x00\xff"
    assert {(actor, target) for actor, _, target, _ in books.audited()} == {("ann", str(each)) for each in ids}


def test_no_formula_in_csv(cli: Cli, books: Books) -> None:
    """A cell that a spreadsheet would run begins with an apostrophe; numbers stay numbers."""
    for formula in FORMULAS:
        books.send({}, key=formula)
    table = list(csv.DictReader(io.StringIO(cli("messages", "export", "-o", "csv").out, newline="")))
    assert {row["key"] for row in table} == {f"'{formula}" for formula in FORMULAS}


def test_no_escape_in_a_table(cli: Cli, books: Books) -> None:
    """Control characters are shown, not obeyed, also as ids and in tables."""
    books.parked("\x1b[31mred\x1b[0m [bold]x[/bold]")
    for command in (["dead", "list"], ["dead", "groups"], ["inbox", "list"]):
        out = cli(*command).out
        assert "\x1b" not in out
        assert "[bold]x[/bold]" in out
