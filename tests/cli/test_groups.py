"""``outbox group``: how far groups are, and what an operator does to one as a whole."""

from __future__ import annotations

import datetime as dt
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from outbox import Message, Settings
from outbox.cli.output import Code
from outbox.consumer.meter import BOUNDS
from tests.cli.conftest import Cli
from tests.kit.bench import Bench
from tests.operator.health import handler, hold_back, report, sample, this_minute

WHY = ("--reason", "a test", "--actor", "ada", "--yes")


def ignore(message: Message, session: Session) -> None:
    """Do nothing."""


@pytest.fixture
def bench(engine: Engine, settings: Settings) -> Iterator[Bench]:
    """A group that has consumed three messages of topic ``t``, and is one behind."""
    with Bench(engine, engine, settings) as bench:
        consumer = bench.declare(ignore)
        bench.send(1, 2, 3)
        bench.consume(consumer)
        bench.send(4)
        yield bench


def listed(cli: Cli) -> dict[str, Any]:
    """Return the one group."""
    (row,) = cli("group", "list", "-o", "json").json["items"]
    assert isinstance(row, dict)
    return row


def test_work_by_the_minute(engine: Engine, cli: Cli) -> None:
    """What the handlers did is a row for each minute that a sample knows of; without one that is said."""
    nothing = cli("group", "work", "g", "t")
    assert (nothing.code, "no group 'g' of topic 't' is known" in nothing.err) == (Code.NOT_FOUND, True)
    done = {"done": 90.0, "failed": 3.0, "calls": {str(bisect_left(BOUNDS, 2.0)): 90}}
    sample(engine, this_minute(engine) - dt.timedelta(minutes=5), {}, work={"t": {"g": done}})
    consumed, failed, p50, p95 = cli("group", "work", "g", "t", "-o", "json").json["items"]
    assert [{*each["values"]} - {None} for each in (consumed, failed)] == [{90.0}, {3.0}]
    assert [max(filter(None, each["values"])) for each in (p50, p95)] == pytest.approx([2.0, 2.0], rel=0.25)
    *_, row = cli("group", "work", "g", "t").out.splitlines()
    assert row.split()[-4:-2] == ["90.0", "3.0"]
    wrong = cli("group", "work", "g", "t", "--window", "2y")
    assert (wrong.code, "1h, 6h, 24h, 7d" in wrong.err) == (Code.USAGE, True)


def test_reset_and_skip(bench: Bench, cli: Cli) -> None:
    """Each shows what it is about to do, asks, and does it."""
    (row,) = cli("group", "list", "-o", "json").json["items"]
    assert (row["group"], row["topic"], row["lag"], row["workers"], row["passages"]) == ("g", "t", 1, 0, 0)
    reset = ("group", "reset", "g", "--topic", "t", "--to", "2")
    shown = cli(*reset, "--dry-run", "-o", "json").json
    assert (shown["messages"], shown["missing"]) == (2, 0)
    asked = cli(*reset, "--reason", "a test")
    assert (asked.code, "give --yes" in asked.err) == (Code.USAGE, True)
    unexplained = cli(*reset, "--yes")
    assert (unexplained.code, "give --reason" in unexplained.err) == (Code.USAGE, True)
    done = cli(*reset, *WHY)
    assert (done.code, "reads up to 2 messages again (passage 1)" in done.err) == (Code.DONE, True)
    again = cli(*reset, *WHY)
    assert (again.code, "is behind that already" in again.err) == (Code.CONFLICT, True)
    skipped = cli("group", "skip", "g", "--topic", "t", *WHY)
    assert (skipped.code, "leaves 3 messages out (passage 2)" in skipped.err) == (Code.DONE, True)
    (row,) = cli("group", "list", "-o", "json").json["items"]
    assert (row["lag"], row["passages"]) == (0, 2)
    audited = cli("audit", "list", "--action", "reset_group", "-o", "json").json["items"]
    assert [(each["target"], each["actor"], each["reason"]) for each in audited] == [("g/t", "ada", "a test")]


def test_delete(bench: Bench, cli: Cli) -> None:
    """What it had is gone."""
    assert "3 consumed" in cli("group", "delete", "g", "--topic", "t", "--dry-run").out
    done = cli("group", "delete", "g", "--topic", "t", *WHY)
    assert (done.code, "with 3 inbox rows" in done.err) == (Code.DONE, True)
    assert cli("group", "list", "-o", "json").json["items"] == []
    gone = cli("group", "delete", "g", "--topic", "t", *WHY)
    assert (gone.code, "knows group 'g' of topic 't'" in gone.err) == (Code.NOT_FOUND, True)


def test_a_topic(bench: Bench, cli: Cli) -> None:
    """What speaks against its deletion is shown, and refuses it."""
    shown = cli("topics", "delete", "t", "--dry-run", "-o", "json").json
    assert (shown["last_messages"], [group for group, _ in shown["groups"]]) == (1, ["g"])
    assert shown["living"] == ["prune has yet to delete messages of 1 queue"]
    assert "it would be refused: " in cli("topics", "delete", "t", "--dry-run").err
    refused = cli("topics", "delete", "t", *WHY)
    assert (refused.code, "delete its groups first" in refused.err) == (Code.CONFLICT, True)
    assert cli("topics", "delete", "none", *WHY).code == Code.NOT_FOUND


@pytest.mark.parametrize("to", ["monday", "0", "0:1,", "2026-01-05T09:00:00", "1.5"])
def test_what_is_no_start(bench: Bench, cli: Cli, to: str) -> None:
    """The error says how one is written."""
    refused = cli("group", "reset", "g", "--topic", "t", "--to", to, *WHY)
    assert (refused.code, "must be 'first' or 'now'" in refused.err) == (Code.USAGE, True)


@pytest.mark.parametrize("to", ["first", "0:1,3:1", "3d", "2020-01-05T09:00:00+00:00"])
def test_starts(bench: Bench, cli: Cli, to: str) -> None:
    """All of it, by each of these."""
    assert cli("group", "reset", "g", "--topic", "t", "--to", to, "--dry-run", "-o", "json").json["messages"] == 3


def test_a_group_is_paused_and_resumed(bench: Bench, cli: Cli) -> None:
    """With a reason, and not without a confirmation; the audit and the list tell it."""
    assert (listed(cli)["group"], listed(cli)["state"]) == ("g", "unattended")
    without = cli("group", "pause", "g", "--yes")
    assert (without.code, "give --reason" in without.err) == (Code.USAGE, True)
    asked = cli("group", "pause", "g", "--reason", "the provider moves")
    assert (asked.code, "give --yes" in asked.err) == (Code.USAGE, True)
    paused = cli("group", "pause", "g", "--reason", "the provider moves", "--actor", "ann", "--yes")
    assert (paused.code, "group g of topic t is paused" in paused.err) == (Code.DONE, True)
    assert (listed(cli)["state"], listed(cli)["paused_by"]) == ("paused", "ann")
    assert "the provider moves" in cli("group", "list").out
    again = cli("group", "pause", "g", "--reason", "the provider moves", "--yes")
    assert (again.code, "paused already" in again.err) == (Code.CONFLICT, True)
    assert cli("group", "resume", "g", "--topic", "t", "--yes").code == Code.DONE
    assert listed(cli)["state"] == "unattended"
    actions = [row["action"] for row in cli("audit", "list", "-o", "json").json["items"]]
    assert actions == ["resume_group", "pause_group"]
    unknown = cli("group", "pause", "nobody", "--reason", "x", "--yes")
    assert (unknown.code, "'nobody'" in unknown.err) == (Code.NOT_FOUND, True)


def test_a_group_is_slowed_down(bench: Bench, cli: Cli) -> None:
    """By a rate in messages a second, a minute or an hour; and as its handler declares again."""
    assert cli("group", "rate", "g", "30/min", "--yes").code == Code.DONE
    assert listed(cli)["rate"] == 0.5
    assert "30/min" in cli("group", "list").out
    wrong = cli("group", "rate", "g", "fast", "--yes")
    assert (wrong.code, "'fast' must be messages a second" in wrong.err) == (Code.USAGE, True)
    assert cli("group", "rate", "g", "declared", "--yes").code == Code.DONE
    assert listed(cli)["rate"] is None


def test_handlers_show_what_holds_them_back(engine: Engine, cli: Cli) -> None:
    """Paused, or stopped by a breaker: by a word, as a row and in the table."""
    report(engine, handlers=[handler("consumer", topic, "mail") for topic in ("left", "lost", "paid", "sent")])
    hold_back(engine)
    states = [row["state"] for row in cli("handlers", "-o", "json").json["items"]]
    assert states == ["running", "half_open", "paused", "open"]
    table = cli("handlers").out
    for state in states:
        assert state in table
