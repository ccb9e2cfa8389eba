"""``outbox reconcile``: what it is given, what it prints and leaves behind, and how it ends."""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import make_url, text

from outbox.cli.output import Code
from outbox.reconcile.tables import InboxState
from tests.cli.conftest import Result, run_cli
from tests.kit import wait_until
from tests.reconcile.town import HOUR, Place, Town, fate, ids_at, url_of

ROOT = Path(__file__).parents[2]
PAIR = ("--topic", "t", "--group", "g")
MISSING = fate(status=InboxState.NONE)
PARKED = fate(status=InboxState.PARKED)
PASSWORD = "hunter2/x y"  # noqa: S105
APP = """
from sqlalchemy import create_engine
from outbox import Outbox

print("imported")
outbox = Outbox(create_engine({consumer!r}))
for topic, group in {pairs!r}:
    outbox.consumer(topic, group=group, source={producer!r}, tags={tags!r})(lambda message, session: None)
"""


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable says which database."""
    for name in ("DATABASE_URL", "PRODUCER_URL", "CONSUMER_URL", "RECORD_URL", "SCHEMA", "APP"):
        monkeypatch.delenv(f"OUTBOX_{name}", raising=False)


@pytest.fixture
def sides(town: Town, monkeypatch: pytest.MonkeyPatch) -> Town:
    """A town whose databases are in the environment."""
    monkeypatch.setenv("OUTBOX_PRODUCER_URL", url_of(town.producer))
    monkeypatch.setenv("OUTBOX_CONSUMER_URL", url_of(town.consumer))
    return town


def reconcile(*arguments: str) -> Result:
    """Run ``outbox reconcile`` in this process."""
    return run_cli("reconcile", *arguments)


def refused(code: Code, *arguments: str) -> str:
    """Run it and see it fail in one line, with nothing on stdout; return the line."""
    result = reconcile(*arguments)
    assert (result.code, result.out) == (code, ""), result.err
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1, result.err
    return result.err


def runs(town: Town, columns: str = "topic, consumer_group, error") -> list[Any]:
    """Return the recorded runs, the oldest first."""
    return town.rows(f"SELECT {columns} FROM outbox.reconciliation_run ORDER BY started_at")


def sends(town: Town, message_id: UUID) -> int:
    """Return how often a message was sent."""
    with town.producer.connect() as connection:
        sql = text("SELECT count(*) FROM outbox.message WHERE half_id = :id")
        return int(connection.scalar(sql, {"id": message_id}) or 0)


def counts(result: Result) -> dict[str, int]:
    """Return how many differences of each kind a report tells of."""
    return {kind["kind"]: kind["number"] for pair in result.json["pairs"] for kind in pair["differences"]}


def test_in_sync(sides: Town) -> None:
    """In sync the exit code is 0, the report is on stdout, and how it was compared on stderr."""
    sides.plant([fate()] * 5)
    result = reconcile(*PAIR)
    assert result.code == Code.DONE, result.err
    assert "in sync" in result.out
    assert "t → g: every row is read" in result.err
    assert "engine local" in result.err
    assert runs(sides) == [("t", "g", None)]


def test_differences_are_told_and_nothing_is_changed(sides: Town) -> None:
    """Differences are 1; without --apply nothing but the record is written, and stdout is one JSON value."""
    sides.plant([fate(), MISSING, MISSING, PARKED])
    result = reconcile(*PAIR, "-o", "json")
    assert result.code == Code.PROBLEMS, result.err
    assert counts(result) == {"missing": 2, "parked": 1}
    assert result.json["applied"] is False
    assert len(sides.inbox()) == 2
    assert runs(sides, "applied, counts->>'missing'") == [(False, "2")]
    assert sides.rows("SELECT kind, action, result FROM outbox.reconciliation_finding ORDER BY kind") == [
        ("missing", "resend", None),
        ("missing", "resend", None),
        ("parked", "alert", None),
    ]


def test_dry_run_tells_what_to_expect(sides: Town) -> None:
    """How each pair would be compared and what that costs is told; nothing is compared, and no run is recorded."""
    sides.plant([fate(), MISSING])
    result = reconcile(*PAIR, "--pair", "u:g", "--dry-run", "-o", "json")
    assert result.code == Code.DONE, result.err
    assert {(plan["topic"], plan["tier"], plan["came"]) for plan in result.json} == {
        ("t", "full", None),
        ("u", "full", None),
    }
    assert all(plan["expected"].keys() == {"rows", "bytes", "seconds"} for plan in result.json)
    assert "megabytes" in reconcile(*PAIR, "--dry-run").out
    assert runs(sides) == []


def test_limit_of_the_findings(sides: Town) -> None:
    """--limit bounds the findings that are shown, and says how many it left out."""
    sides.plant([MISSING] * 30)
    pair = reconcile(*PAIR, "-o", "json", "--limit", "3").json["pairs"][0]
    assert (len(pair["findings"]), pair["findings_left_out"]) == (3, 27)
    assert len(reconcile(*PAIR, "-o", "json").json["pairs"][0]["findings"]) == 30
    table = reconcile(*PAIR).out
    assert "and 10 more" in table
    assert max(map(len, table.splitlines())) < 200


def test_one_database(village: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer's database is the producer's unless another is named; OUTBOX_DATABASE_URL is enough."""
    village.plant([fate(), MISSING])
    monkeypatch.setenv("OUTBOX_DATABASE_URL", url_of(village.producer))
    assert counts(reconcile(*PAIR, "-o", "json")) == {"missing": 1}


def test_several_pairs(sides: Town) -> None:
    """--pair may be given again, beside --topic and --group; each pair is a run of one job."""
    sides.plant([MISSING])
    sides.plant([fate()], topic="u")
    sides.plant([PARKED], topic="u", group="h")
    result = reconcile(*PAIR, "--pair", "u:h", "--pair", "u:g", "-o", "json")
    assert {(pair["topic"], pair["group"]) for pair in result.json["pairs"]} == {("t", "g"), ("u", "h"), ("u", "g")}
    assert len(runs(sides)) == 3
    assert sides.rows("SELECT count(DISTINCT job_id) FROM outbox.reconciliation_run") == [1]


def test_filters_and_effect(sides: Town) -> None:
    """--tag and --key leave out what the group doesn't take; --effect looks into its business table."""
    sides.plant([fate(status=InboxState.NONE, tag="small"), fate(status=InboxState.NONE, key="other")])
    sides.plant([fate(tag="large", effects=2)])
    assert reconcile(*PAIR, "--tag", "large", "--key", "k*").code == Code.DONE
    found = reconcile(*PAIR, "--tag", "large", "--effect", "ledger.message_id", "-o", "json")
    assert counts(found) == {"duplicate_effect": 1}


def test_window(sides: Town) -> None:
    """--since and --until are times, or durations back from the producer's now; --grace is what may be open."""
    old, young = ids_at(50 * HOUR), ids_at(2 * HOUR)
    sides.plant([MISSING], ids=old)
    sides.plant([fate(status=InboxState.NONE, age=600)], ids=young)

    def found(*window: str) -> list[str]:
        pair = reconcile(*PAIR, *window, "-o", "json").json["pairs"][0]
        return [finding["id"] for finding in pair["findings"]]

    assert found() == [str(old[0]), str(young[0])]
    assert found("--since", "1d") == [str(young[0])]
    assert found("--since", "3d", "--until", "1d") == [str(old[0])]
    yesterday = (dt.datetime.now(dt.UTC) - dt.timedelta(days=1)).isoformat()
    assert found("--until", yesterday) == [str(old[0])]
    assert found("--since", yesterday, "--grace", "15m") == []


def test_tiers_and_what_is_kept(sides: Town) -> None:
    """--tier chooses; what was in sync is trusted by the next run, but with --fresh or where nothing is recorded."""
    sides.plant_bulk(2000)
    until = dt.datetime.now(dt.UTC).isoformat()  # a range without an end is never kept

    def plan(*arguments: str) -> dict[str, Any]:
        found = reconcile(*PAIR, "--until", until, "--tier", "digest", *arguments, "-o", "json")
        assert found.code == Code.DONE, found.err
        value: dict[str, Any] = found.json["pairs"][0]["plan"]
        return value

    assert (plan("--no-record")["tier"], runs(sides)) == ("digest", [])
    assert plan()["settled"] == 0
    assert plan()["settled"] > 0
    assert plan("--fresh")["settled"] == 0
    assert reconcile(*PAIR, "--tier", "full", "-o", "json").json["pairs"][0]["plan"]["tier"] == "full"


def test_the_record_may_be_elsewhere(
    sides: Town, new_database: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--record and its variable name another database, which `runs` reads then; it excludes --no-record."""
    sides.plant([MISSING])
    elsewhere = new_database()
    assert reconcile(*PAIR, "--record", elsewhere).code == Code.PROBLEMS
    assert runs(sides) == []
    excluded = reconcile(*PAIR, "--record", elsewhere, "--no-record")
    assert "--record and --no-record exclude each other" in excluded.err
    monkeypatch.setenv("OUTBOX_RECORD_URL", elsewhere)
    assert reconcile(*PAIR).code == Code.PROBLEMS
    assert runs(sides) == []
    assert len(reconcile("runs", "-o", "json").json["items"]) == 2


def test_keep_for(sides: Town) -> None:
    """--keep-for is how long a range is trusted."""
    sides.plant_bulk(2000)
    window = ("--until", dt.datetime.now(dt.UTC).isoformat(), "--tier", "digest", "-o", "json")
    reconcile(*PAIR, *window)
    sides.run("UPDATE outbox.reconciliation_settled SET verified_at = verified_at - interval '2 hours'")
    plans = [reconcile(*PAIR, *window, "--keep-for", hours).json["pairs"][0]["plan"] for hours in ("3h", "1h")]
    assert [plan["settled"] > 0 for plan in plans] == [True, False]


def test_apply(sides: Town) -> None:
    """--apply --yes repairs by the policy; what is left decides the exit code, and the record says it all."""
    first, second = sides.plant([MISSING, PARKED])
    result = reconcile(*PAIR, "--apply", "--yes", "-o", "json")
    assert (result.code, result.json["applied"], result.json["left"]) == (Code.PROBLEMS, True, 1), result.err
    assert (sends(sides, first), sends(sides, second)) == (2, 1)
    assert runs(sides, "applied, finished_at IS NOT NULL") == [(True, True)]
    assert sides.rows("SELECT message_id, result FROM outbox.reconciliation_finding WHERE result IS NOT NULL") == [
        (first, "done")
    ]
    assert reconcile(*PAIR, "--apply", "--yes", "--policy", "parked=retry").code == Code.DONE
    assert sides.inbox()[second].status == "failed"


def test_all_repaired(sides: Town) -> None:
    """Where all is repaired the exit code is 0."""
    sides.plant([fate(), MISSING])
    assert reconcile(*PAIR, "--apply", "--yes").code == Code.DONE


def test_max_findings(sides: Town) -> None:
    """--max-findings bounds what is listed, and the report says so on a terminal as well."""
    sides.plant([fate(status=InboxState.NONE, place=Place.AHEAD)] * 40)
    bounded = reconcile(*PAIR, "--max-findings", "19")
    assert bounded.code == Code.PROBLEMS
    assert "19 of 40 differences are listed; 21 are left out (max_findings)" in " ".join(bounded.out.split())
    assert "40 messages beyond the offset (queue 1: 40)" in " ".join(bounded.out.split())
    assert len(sides.rows("SELECT FROM outbox.reconciliation_finding")) == 19


def test_names_with_dots_and_moments(sides: Town) -> None:
    """A group may have dots in its name, and a duration may be of milliseconds, by option and by file."""
    sides.plant([fate(status=InboxState.FAILED, age=0.0, received=2.0)], group="eu.loyalty")
    named = ("--topic", "t", "--group", "eu.loyalty", "-o", "json")
    assert counts(reconcile(*named, "--grace", "1500ms")) == {"failed": 1}
    assert counts(reconcile(*named, "--grace", "1h2500ms")) == {}
    (pair,) = reconcile("--pair", "t:eu.loyalty", "--grace", "1500ms", "-o", "json").json["pairs"]
    assert (pair["group"], pair["window"]["grace"]) == ("eu.loyalty", 1.5)
    assert "grace 250ms" in reconcile(*named[:4], "--grace", "250ms").out


def test_max_resends(sides: Town) -> None:
    """A message that was resent as often as --max-resends allows is given up."""
    sides.plant([fate(status=InboxState.NONE, sends=2)])
    assert counts(reconcile(*PAIR, "-o", "json")) == {"missing": 1}
    assert counts(reconcile(*PAIR, "--max-resends", "1", "-o", "json")) == {"resend_exhausted": 1}


@pytest.mark.parametrize(("answer", "applied"), [("y", True), ("n", False), ("", False)])
def test_apply_asks_first(sides: Town, monkeypatch: pytest.MonkeyPatch, answer: str, applied: bool) -> None:
    """On a terminal it shows what it would repair, and asks; no is a dry run."""
    (missing,) = sides.plant([MISSING])
    monkeypatch.setattr(sys, "stdin", Answering(answer))
    result = reconcile(*PAIR, "--apply", "-o", "json")
    assert "1 missing of t → g: resend\nRepair 1 differences? [y/N] " in result.err
    assert result.json["applied"] is applied
    assert result.code == (Code.DONE if applied else Code.PROBLEMS)
    assert sends(sides, missing) == (2 if applied else 1)
    assert runs(sides, "applied") == [applied]


def test_apply_without_a_terminal(sides: Town) -> None:
    """With nobody to ask and without --yes it is refused, before anything is read."""
    assert "give --yes" in refused(Code.USAGE, *PAIR, "--apply")
    assert runs(sides) == []


class Answering:
    """A terminal on which somebody has typed an answer."""

    def __init__(self, answer: str) -> None:
        self._answer = answer

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        return f"{self._answer}\n"


def test_config(sides: Town, tmp_path: Path) -> None:
    """A file has the job; options override it, and a topic alone chooses among its pairs."""
    sides.plant([MISSING])
    sides.plant([MISSING], topic="u", group="h")
    config = tmp_path / "night.toml"
    config.write_text(
        """
        [[pair]]
        topic = "t"
        group = "g"
        [[pair]]
        topic = "u"
        group = "h"
        [policy]
        missing = "alert"
        """
    )
    everything = reconcile("--config", str(config), "-o", "json")
    assert [pair["topic"] for pair in everything.json["pairs"]] == ["t", "u"]
    assert [kind["action"] for pair in everything.json["pairs"] for kind in pair["differences"]] == ["alert", "alert"]
    one = reconcile("--config", str(config), "--topic", "u", "--policy", "missing=resend", "-o", "json")
    assert [(pair["topic"], pair["differences"][0]["action"]) for pair in one.json["pairs"]] == [("u", "resend")]
    assert "known are t:g, u:h" in refused(Code.USAGE, "--config", str(config), "--topic", "x")


def write_app(folder: Path, town: Town, pairs: list[tuple[str, str]], tags: list[str] | None = None) -> str:
    """Write an application whose groups consume from the town's producer; return what names it."""
    name = f"app_{uuid4().hex}"
    values = {"producer": url_of(town.producer), "consumer": url_of(town.consumer), "pairs": pairs, "tags": tags}
    (folder / f"{name}.py").write_text(APP.format(**values))
    return f"{name}:outbox"


def test_app(town: Town, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs, filters and databases come from the subscriptions; what the application prints stays off stdout."""
    town.plant([fate(status=InboxState.NONE, tag="small"), fate(status=InboxState.NONE, tag="large")])
    town.plant([fate()], topic="u")
    monkeypatch.chdir(tmp_path)
    app = write_app(tmp_path, town, [("t", "g"), ("u", "g")], ["large"])
    result = reconcile("--app", app, "-o", "json")
    assert result.code == Code.PROBLEMS, result.err
    assert [(pair["topic"], pair["counts"]["missing"]) for pair in result.json["pairs"]] == [("t", 1), ("u", 0)]
    assert "imported" in result.err
    assert [pair["topic"] for pair in reconcile("--app", app, "--topic", "u", "-o", "json").json["pairs"]] == ["u"]
    line = reconcile("--app", app, "--pair", "t:x")
    assert line.code == Code.CONFIG
    assert "t:x is no subscription of the Outbox; it has t:g, u:g" in line.err


def test_files(sides: Town, tmp_path: Path) -> None:
    """--html, --prometheus and --findings are written whole, beside the report on stdout."""
    sides.plant([MISSING])
    page, gauges, lake = tmp_path / "report.html", tmp_path / "outbox.prom", tmp_path / "lake"
    reconcile(*PAIR, "--html", str(page), "--prometheus", str(gauges), "--findings", str(lake))
    assert page.read_text().rstrip().endswith("</html>")
    assert 'outbox_reconcile_differences{group="g",kind="missing",topic="t"} 1.0' in gauges.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lake", "outbox.prom", "report.html"]
    assert [path.parent.name for path in lake.rglob("*.parquet")] == [f"day={dt.datetime.now(dt.UTC).date()}"]


def test_files_that_cannot_be_written(sides: Town, tmp_path: Path) -> None:
    """Where a file can't be written it is said before anything is read."""
    assert "is a folder" in refused(Code.USAGE, *PAIR, "--html", str(tmp_path))
    (tmp_path / "file").touch()
    assert "is a file; name a folder" in refused(Code.USAGE, *PAIR, "--findings", str(tmp_path / "file"))
    assert "there is no folder" in refused(Code.USAGE, *PAIR, "--prometheus", str(tmp_path / "no" / "file"))
    assert runs(sides) == []


def test_a_file_that_fails_after_all(sides: Town, tmp_path: Path) -> None:
    """A file that can't be written when it comes to it is no difference; the report is on stdout by then."""
    sides.plant([MISSING])
    result = reconcile(*PAIR, "--html", str(tmp_path / ("x" * 250)), "-o", "json")
    assert (result.code, result.json["differences"]) == (Code.NO_RESULT, 1)
    assert "can't be written: File name too long" in result.err
    assert list(tmp_path.iterdir()) == []


def test_runs_and_show(sides: Town) -> None:
    """Recorded runs are listed, the newest first; the findings of one are shown page by page."""
    sides.plant([MISSING] * 5)
    reconcile(*PAIR)
    reconcile(*PAIR, "--apply", "--yes", "--since", "2d")
    listed = run_cli("reconcile", "runs", "-o", "json").json["items"]
    assert [(row["differences"], row["applied"]) for row in listed] == [(5, True), (5, False)]
    assert "5 differences" in run_cli("reconcile", "runs", "--topic", "t", "--limit", "1").out
    assert run_cli("reconcile", "runs", "--group", "x", "-o", "json").json == {"items": []}
    newest = listed[0]["id"]
    seen: list[Any] = []
    page = {"next": 0}
    while page["next"] is not None:
        arguments = ("--limit", "2", "--after", str(page["next"]), "-o", "json")
        page = run_cli("reconcile", "show", newest, *arguments).json
        seen += page["findings"]
    assert len({row["message_id"] for row in seen}) == 5
    assert {(row["kind"], row["action"], row["result"]) for row in seen} == {("missing", "resend", "done")}
    shown = run_cli("reconcile", "show", newest, "--limit", "2")
    assert shown.out.count("resend") == 3  # of its kind, and of each finding
    assert run_cli("reconcile", "show", newest, "--kind", "parked", "-o", "json").json["findings"] == []
    assert "must be one of" in run_cli("reconcile", "show", newest, "--kind", "odd").err
    assert "every row is read" in shown.out
    assert "there may be more: --after" in shown.err


def test_repairs_and_runs_are_ordered(sides: Town) -> None:
    """Orders are rows that a worker takes: who gives them is in the audit; what nobody has is refused."""
    sides.plant([MISSING] * 2)
    reconcile(*PAIR)
    (run,) = [row["id"] for row in run_cli("reconcile", "runs", "-o", "json").json["items"]]
    assert run_cli("reconcile", "schedules", "-o", "json").json == {"items": []}
    refused = run_cli("reconcile", "order", "nightly")
    assert "no living worker with the role reconcile has a reconciliation 'nightly'" in refused.err
    shown = run_cli("reconcile", "repair", run, "--dry-run", "-o", "json")
    assert (shown.json["number"], shown.json["workers"]) == (2, [])
    assert "give --reason" in run_cli("reconcile", "repair", run, "--yes").err
    ordered = run_cli("reconcile", "repair", run, "--yes", "--reason", "lost", "--actor", "ada", "-o", "json")
    assert (ordered.json["total"], ordered.json["requested_by"], ordered.json["state"]) == (2, "ada", "waiting")
    assert "it is carried out as soon as there is one" in ordered.err
    wrong = run_cli("reconcile", "repair", run, "--kind", "missing", "--repair", "park", "--yes", "--reason", "lost")
    assert "that mend missing: resend" in wrong.err


def test_show_of_a_run_that_is_not_there(sides: Town) -> None:
    """A run that isn't recorded is not found; what is no id is refused."""
    result = run_cli("reconcile", "show", str(UUID(int=1)))
    assert (result.code, result.out) == (Code.NOT_FOUND, "")
    assert run_cli("reconcile", "show", "1").code == Code.USAGE


REFUSED: list[tuple[tuple[str, ...], Code, str]] = [
    ((), Code.CONFIG, "name a topic and a group"),
    (("--topic", "t"), Code.USAGE, "--topic needs its --group"),
    (("--pair", "t"), Code.USAGE, "must be TOPIC:GROUP"),
    ((*PAIR, "--pair", "t:g"), Code.CONFIG, "named twice"),
    (("--tag", "x"), Code.USAGE, "name its topic and group"),
    ((*PAIR, "--effect", "."), Code.USAGE, "must be table.column or schema.table.column"),
    ((*PAIR, "--effect", 'x"; drop.y'), Code.USAGE, "not a plain name"),
    ((*PAIR, "--since", "yesterday"), Code.USAGE, "--since 'yesterday' must be a duration"),
    ((*PAIR, "--until", "2026-01-31T12:00:00"), Code.USAGE, "has no time zone"),
    ((*PAIR, "--since", "1h", "--until", "2h"), Code.CONFIG, "must be before"),
    ((*PAIR, "--grace", "long"), Code.USAGE, "--grace = 'long' must be a duration"),
    ((*PAIR, "--fresh", "--keep-for", "1d"), Code.USAGE, "exclude each other"),
    ((*PAIR, "--policy", "gone=resend"), Code.USAGE, "--policy.gone is unknown; known are"),
    ((*PAIR, "--policy", "missing=pray"), Code.USAGE, "--policy.missing = 'pray' must be one of alert, resend"),
    ((*PAIR, "--policy", "missing=park"), Code.CONFIG, "choose one of resend, alert"),
    (("--topic", "a b", "--group", "g"), Code.USAGE, "topic 'a b'"),
    ((*PAIR, "--config", "/nowhere.toml"), Code.CONFIG, "/nowhere.toml can't be read"),
    (("--app", "nowhere:outbox"), Code.CONFIG, "no module 'nowhere'"),
    ((*PAIR, "--schema", 'x"y'), Code.CONFIG, "must match"),
    ((*PAIR, "--schema", "elsewhere"), Code.CONFIG, "outbox db upgrade"),
]


def test_refused(sides: Town) -> None:
    """What can't be right is refused in one line, before anything is read."""
    for arguments, code, hint in REFUSED:
        assert hint in refused(code, *arguments)
    assert runs(sides) == []


def test_options_before_a_subcommand(sides: Town) -> None:
    """Options that would be without effect are refused."""
    assert "stand after it" in refused(Code.USAGE, "--topic", "t", "runs")


def test_no_database() -> None:
    """Neither option nor variable: wrong usage."""
    assert "give --producer" in refused(Code.USAGE, *PAIR)
    assert "give --consumer" in refused(Code.USAGE, "runs")


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_database_that_cannot_be_reached(sides: Town, tmp_path: Path, side: str) -> None:
    """A wrong host and a wrong password are 69, told without the password; Prometheus gets to know of it."""
    gauges = tmp_path / "outbox.prom"
    good = make_url(url_of(sides.producer if side == "producer" else sides.consumer))
    for bad in (good.set(port=1, password=PASSWORD), good.set(password=PASSWORD)):
        result = reconcile(*PAIR, f"--{side}", bad.render_as_string(False), "--prometheus", str(gauges))
        assert (result.code, result.out) == (Code.UNAVAILABLE, ""), result.err
        note, line = result.err.splitlines()
        assert f"OUTBOX_{side.upper()}_URL" in note
        assert "ps shows the password" in note
        assert line.startswith("error: database ")
        assert 'success{group="g",topic="t"} 0.0' in gauges.read_text()
        for text_ in (result.err, gauges.read_text(), str(runs(sides, "error"))):
            assert not any(form in text_ for form in (PASSWORD, "hunter2"))


def test_why_is_recorded(sides: Town) -> None:
    """Where the producer can't be reached, the record in the consumer's database says why."""
    bad = make_url(url_of(sides.producer)).set(port=1, password=PASSWORD)
    reconcile(*PAIR, "--producer", bad.render_as_string(False))
    ((ended, why),) = runs(sides, "finished_at IS NOT NULL, error")
    assert ended
    assert why.startswith("database ")
    assert "Connection refused" in why
    assert "hunter2" not in why
    (row,) = run_cli("reconcile", "runs", "-o", "json").json["items"]
    assert (row["error"], row["differences"]) == (why, None)


def test_password_in_the_environment_needs_no_note(sides: Town) -> None:
    """Only what `ps` shows is worth a note."""
    sides.plant([fate()])
    assert "note:" not in reconcile(*PAIR).err


def test_a_failure_is_no_difference(sides: Town) -> None:
    """What PostgreSQL refuses, and what nobody foresaw, have another code than differences."""
    sides.plant([fate()])
    sides.at_producer("ALTER TABLE outbox.message RENAME COLUMN visible_at TO seen_at")
    result = reconcile(*PAIR)
    assert result.code not in {Code.DONE, Code.FAILED, Code.PROBLEMS}
    assert result.out == ""


def test_what_nobody_foresaw(sides: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug has its traceback, without a password, and a code that isn't that of differences."""

    def breaks(*_: object) -> None:
        raise RuntimeError(f"no idea what to do with {url_of(sides.producer)}")

    password = make_url(url_of(sides.producer)).password
    monkeypatch.setattr("outbox.reconcile.pairing.rules_of", breaks)
    result = reconcile(*PAIR)
    assert (result.code, result.out) == (Code.NO_RESULT, "")
    assert "Traceback" in result.err
    assert "RuntimeError: no idea what to do with" in result.err
    assert password
    for told in (result.err, str(runs(sides, "error"))):
        assert str(password) not in told


@pytest.mark.parametrize(("missing", "extra"), [("pyarrow", "reconcile"), ("pyspark", "spark")])
def test_an_extra_that_is_not_installed(sides: Town, monkeypatch: pytest.MonkeyPatch, missing: str, extra: str) -> None:
    """One line says what to install."""
    script = f"import sys; sys.modules[{missing!r}] = None; from outbox.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "reconcile", *PAIR, *(["--engine", "spark"] if extra == "spark" else [])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (Code.CONFIG, ""), done.stderr
    assert done.stderr.count("\n") == 1
    assert f"{missing}; pip install 'outbox-postgres[{extra}]'" in done.stderr


def test_the_command_line_costs_no_extra() -> None:
    """Importing the command line imports none of the libraries of the reconciliation."""
    code = "import sys, outbox.cli; print(' '.join(name.partition('.')[0] for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    heavy = {"pyarrow", "numpy", "pyspark", "adbc_driver_postgresql", "jinja2", "prometheus_client", "pandas"}
    assert not set(done.stdout.split()) & heavy


@contextmanager
def hanging(town: Town, table: str) -> Iterator[subprocess.Popen[str]]:
    """Run a reconciliation that waits for a lock on one of the producer's tables."""
    waiting = text(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )

    def waits() -> bool:
        # In a transaction of its own: within one, the view stays as it was.
        with town.producer.connect() as other:
            return bool(other.scalar(waiting))

    with town.producer.connect() as connection, connection.begin():
        connection.execute(text(f"LOCK TABLE outbox.{table} IN ACCESS EXCLUSIVE MODE"))
        process = subprocess.Popen(
            [sys.executable, "-m", "outbox.cli", "reconcile", *PAIR],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            try:
                wait_until(waits, "the comparison waits for the lock")
                yield process
            finally:
                process.kill()


@pytest.mark.parametrize("table", ["half_message", "compensation"])
def test_interrupted(sides: Town, table: str) -> None:
    """Ctrl-C ends it at once, whoever waits for the database: 130, nothing on stdout, and the record says so."""
    sides.plant([fate()])
    with hanging(sides, table) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (Code.INTERRUPTED, ""), err
    assert err.endswith("interrupted\n")
    assert runs(sides, "error, finished_at IS NOT NULL") == [("interrupted", True)]


def test_killed(sides: Town) -> None:
    """A run that was killed has no end in the record; the next one is none the worse for it."""
    sides.plant([MISSING])
    # It has its snapshot, and waits for a table that it comes to later.
    with hanging(sides, "compensation") as process:
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
    assert "running, or died" in run_cli("reconcile", "runs").out
    assert reconcile(*PAIR, "--apply", "--yes").code == Code.DONE
    assert runs(sides, "applied, finished_at IS NULL") == [(False, True), (True, False)]


def test_bars_are_for_terminals(sides: Town) -> None:
    """On a terminal there are bars while it works; elsewhere plain lines."""
    import pty

    sides.plant([fate()] * 5)
    lead, follow = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "outbox.cli", "reconcile", *PAIR, "-o", "json"],
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=follow,
        text=True,
    )
    os.close(follow)
    parts = []
    with process:
        with suppress(OSError):  # EIO: nobody has the other end open any more
            while part := os.read(lead, 1 << 16):
                parts.append(part)
        out, _ = process.communicate(timeout=60)
    os.close(lead)
    shown = b"".join(parts).decode()
    assert json.loads(out)["in_sync"] is True
    assert "t → g: rows" in shown
    assert "every row is read" in shown
