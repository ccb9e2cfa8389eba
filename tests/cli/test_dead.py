"""``outbox dead``: dead letters by what they died of; retried, discarded, restored."""

from __future__ import annotations

import csv
import io
import json
import sys
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from outbox.cli.output import Code
from tests.cli.books import Books, Terminal
from tests.cli.conftest import Cli

BECAUSE = ("--reason", "mended in 2.4.1", "--actor", "ann")


def fingerprint(cli: Cli, kind: str) -> str:
    """Return the fingerprint of a kind of error."""
    found = [row for row in cli("dead", "groups", "-o", "json").json["items"] if kind in row["error_kind"]]
    return str(found[0]["fingerprint"])


def test_groups(cli: Cli, books: Books) -> None:
    """Dead letters of one cause are one group, the biggest first, whatever ids their errors name."""
    books.parked("no account 17", "no account 18", "looks wrong")
    result = cli("dead", "groups", "-o", "json")
    assert (result.code, result.err) == (0, "")
    first, second = result.json["items"]
    assert (first["group"], first["topic"], first["count"]) == ("till", "orders", {"value": 2, "relation": "eq"})
    assert first["sample"]["last_error"] in {"no account 17", "no account 18"}
    assert second["count"]["value"] == 1
    assert cli("dead", "groups", "-o", "id").out.split() == [first["fingerprint"], second["fingerprint"]]
    shown = cli("dead", "groups").out
    assert first["fingerprint"] in shown
    assert "looks wrong" in shown
    assert cli("dead", "groups", "--topic", "refunds", "-o", "json").json["items"] == []


def test_list_in_each_form(cli: Cli, books: Books) -> None:
    """One list as JSON, lines of JSON, CSV, ids and a table; stdout has nothing else."""
    ids = books.parked("=1+1", "looks wrong")
    books.failed("the till is locked")
    whole = cli("dead", "list", "-o", "json")
    assert (whole.code, whole.err) == (0, "")
    assert [row["message_id"] for row in whole.json["items"]] == [str(each) for each in reversed(ids)]
    assert whole.json["next_page_token"] is None
    lines = [json.loads(line) for line in cli("dead", "list", "-o", "ndjson").out.splitlines()]
    assert lines == whole.json["items"]
    table = list(csv.DictReader(io.StringIO(cli("dead", "list", "-o", "csv").out)))
    assert [row["last_error"] for row in table] == ["looks wrong", "'=1+1"]
    assert cli("dead", "list", "-o", "id").out.split() == [f"till/{each}" for each in reversed(ids)]
    assert all(str(each) in cli("dead", "list").out for each in ids)


def test_a_trial_and_then_all(cli: Cli, books: Books) -> None:
    """--limit 1 retries the newest of a kind, alone; without it all are retried as a bulk job."""
    ids = books.parked("no account 17", "no account 18", "no account 19")
    (other,) = books.parked("looks wrong")
    of_kind = fingerprint(cli, "no account")
    trial = cli("dead", "retry", "--fingerprint", of_kind, "--limit", "1", "--yes")
    assert (trial.code, trial.out) == (0, ""), trial.err
    assert books.statuses(*ids) == ["parked", "parked", "failed"]
    result = cli("dead", "retry", "--fingerprint", of_kind, "--yes", *BECAUSE, "-o", "json")
    assert result.code == 0, result.err
    bulk_job = result.json
    assert (bulk_job["action"], bulk_job["state"], bulk_job["done"], bulk_job["total"]) == ("retry", "done", 2, 2)
    assert (bulk_job["requested_by"], bulk_job["reason"]) == ("ann", "mended in 2.4.1")
    assert books.statuses(*ids, other) == ["failed", "failed", "failed", "parked"]


def test_dry_run_changes_nothing(cli: Cli, books: Books, engine: Engine) -> None:
    """A dry run shows how many, which, and which not; needs no reason and no terminal; and writes nothing."""
    ids = books.parked("looks wrong", "looks wrong")
    with engine.connect() as connection:
        before = connection.scalar(text("SELECT pg_snapshot_xmax(pg_current_snapshot())::text"))
    result = cli("dead", "discard", "--all", "--dry-run", "-o", "json")
    assert (result.code, result.err) == (0, "")
    assert (result.json["action"], result.json["eligible"], result.json["matched"]["value"]) == ("discard", 2, 2)
    assert {row["message_id"] for row in result.json["sample"]} == {str(each) for each in ids}
    assert str(ids[0]) in cli("dead", "discard", "--all", "--dry-run").out
    one = cli("dead", "restore", f"till/{ids[0]}", "--dry-run", "-o", "json").json
    assert (one["eligible"], sum(one["ineligible"].values())) == (0, 1)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT pg_snapshot_xmax(pg_current_snapshot())::text")) == before


def test_discard_and_restore(cli: Cli, books: Books) -> None:
    """Discarded messages leave the list, are found among the discarded, and come back."""
    ids = books.parked("looks wrong", "looks wrong")
    assert cli("dead", "discard", f"till/{ids[0]}", "--yes").code == Code.USAGE
    assert cli("dead", "discard", f"till/{ids[0]}", "--yes", *BECAUSE).code == 0
    assert books.statuses(*ids) == ["discarded", "parked"]
    assert cli("dead", "list", "-o", "id").out.split() == [f"till/{ids[1]}"]
    assert cli("dead", "list", "--discarded", "-o", "id").out.split() == [f"till/{ids[0]}"]
    assert cli("dead", "restore", "--all", "--yes", *BECAUSE).code == 0
    assert books.statuses(*ids) == ["parked", "parked"]


def test_done_in_part(cli: Cli, books: Books) -> None:
    """Of several, what can be done is done, and the rest is told: 5."""
    ids = [*books.parked("looks wrong"), *books.send({"do": "nothing"})]
    books.work()
    result = cli("dead", "retry", *(f"till/{each}" for each in ids), "--yes", *BECAUSE)
    assert result.code == Code.PARTIAL
    assert books.statuses(*ids) == ["failed", "consumed"]
    assert "it is consumed" in result.err


def test_no_terminal_to_ask_at(cli: Cli, books: Books) -> None:
    """Without a terminal and --yes: 2, with the mend, and nothing is done."""
    (one,) = books.parked("looks wrong")
    for arguments in ([f"till/{one}"], ["--all", *BECAUSE]):
        result = cli("dead", "retry", *arguments)
        assert (result.code, result.out) == (Code.USAGE, "")
        assert "there is no terminal to ask at; give --yes if you are sure" in result.err
    assert books.statuses(one) == ["parked"]


@pytest.mark.parametrize(("typed", "status", "code"), [("y\n", "failed", 0), ("\n", "parked", 2)])
def test_asked(cli: Cli, books: Books, monkeypatch: pytest.MonkeyPatch, typed: str, status: str, code: int) -> None:
    """At a terminal it says what is about to be done, and does it if the answer is yes."""
    ids = books.parked("looks wrong", "looks wrong")
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    result = cli("dead", "retry", "--all", *BECAUSE)
    assert (result.code, result.out) == (code, "")
    assert "Retry 2 parked messages of group till, topic orders (looks wrong)? [y/N]" in result.err
    assert books.statuses(*ids) == [status, status]


def test_ids_from_stdin(cli: Cli, books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `-o id` prints is what `-` reads."""
    ids = books.parked("looks wrong", "looks wrong", "looks wrong")
    listed = cli("dead", "list", "-o", "id").out
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{listed}\n{listed}"))
    assert cli("dead", "retry", "-", "--yes", *BECAUSE).code == 0
    assert books.statuses(*ids) == ["failed"] * 3


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ((), "name the messages"),
        (("till/01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11", "--all"), "not both"),
        (("01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11",), "has no group"),
        (("till/42",), "is not a message id"),
        (("--all", "--limit", "0"), "--limit"),
        (("--all",), "give --reason"),
        (("--all", "--reason", "x", "--actor", " "), "--actor is empty"),
        (("--all", "--reason", "x", "--rate", "0"), "--rate"),
        (("--in", "nowhere", "--all", "--reason", "x"), "no database 'nowhere' is registered"),
    ],
)
def test_wrong_usage(cli: Cli, arguments: tuple[str, ...], hint: str) -> None:
    """What can't be meant: 2, with the mend, and no data."""
    result = cli("dead", "retry", *arguments, "--yes")
    assert (result.code, result.out) == (Code.USAGE, "")
    assert hint in result.err


def test_nothing_fits(cli: Cli, books: Books) -> None:
    """Where nothing fits there is nothing to do, and that is no failure."""
    books.work()
    result = cli("dead", "retry", "--all", "--yes", *BECAUSE)
    assert (result.code, result.out) == (0, "")
    assert "nothing to do" in result.err
    assert UUID(int=0) not in books.parked()


def test_note(cli: Cli, books: Books) -> None:
    """A note and an owner, as `outbox dead groups` shows them from then on."""
    books.parked("no such form")
    (group,) = cli("dead", "groups", "-o", "json").json["items"]
    result = cli("dead", "note", group["fingerprint"], "--owner", "ann", "--note", "back at noon")
    assert result.code == 0, result.err
    (group,) = cli("dead", "groups", "-o", "json").json["items"]
    assert (group["owner"], group["note"], sum(group["trend"])) == ("ann", "back at noon", 1)
    assert cli("dead", "note", "0" * 16, "--note", "which?").code == Code.NOT_FOUND
