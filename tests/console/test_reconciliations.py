"""Reconciliations as operators see them: runs, the kinds of differences, the sums, both sides of a finding."""

from __future__ import annotations

import csv
import io
import json
import threading
from typing import Any

import pytest
from sqlalchemy import text

from outbox.message.model import uuid7
from outbox.reconcile.duty.reconciliation import followings
from tests.console.reconciled import CARD, Reconciled, reconciled, sums
from tests.console.test_pages_look import well_made
from tests.console.visitor import Visitor
from tests.console.web import GROUP, TOPIC, Http, Shop
from tests.operator.health import report

RUNS = "/reconciliations/runs"


@pytest.fixture(scope="module")
def found(shop: Shop) -> Reconciled:
    """What one run found."""
    return reconciled(shop, sums(), sums("open", by="customer"))


def test_runs_are_listed(acting: Http, found: Reconciled) -> None:
    """With their state, their differences, and the totals of their sums; by filter and page by page."""
    viewer = acting.as_role("viewer")
    (run,) = viewer.get(RUNS).json()["items"]
    assert (run["id"], run["state"], run["topic"], run["group"]) == (str(found.run), "different", TOPIC, GROUP)
    assert (run["differences"], run["left"], run["counts"]["missing"], run["counts"]["parked"]) == (2, 2, 1, 1)
    assert run["plan"]["engine"] == "local"
    assert [measure["name"] for measure in run["measures"]] == ["billed", "open"]
    assert viewer.get(f"{RUNS}?state=different&topic={TOPIC}&group={GROUP}").json()["total"]["value"] == 1
    for query in ("state=in_sync", "state=running", "schedule=nightly", "topic=other"):
        assert viewer.get(f"{RUNS}?{query}").json()["items"] == []
    assert viewer.get(f"{RUNS}?state=lost").status_code == 422


def test_a_run_has_its_kinds(acting: Http, found: Reconciled) -> None:
    """What each means, what its repair does, and how many are left."""
    view = acting.get(f"{RUNS}/{found.run}").json()
    kinds = {kind["kind"]: kind for kind in view["kinds"]}
    assert list(kinds) == ["missing", "parked"]
    missing, parked = kinds["missing"], kinds["parked"]
    assert (missing["action"], missing["does"]) == ("resend", "sends it once more under its id")
    assert (missing["number"], missing["left"], missing["done"], missing["refused"]) == (1, 1, 0, 0)
    assert (parked["action"], parked["repairs"]) == ("alert", ["retry"])
    assert "outbox dead retry" in parked["by_hand"]


def test_sums_are_exact(acting: Http, found: Reconciled) -> None:
    """Both sides and the difference, in decimals."""
    measure = acting.get(f"{RUNS}/{found.run}").json()["run"]["measures"][0]
    assert not measure["in_sync"]
    totals = {row["value"]: row for row in measure["totals"]}
    assert {name: totals["amount"][name] for name in ("producer", "consumer", "unexplained")} == {
        "producer": "30.10",
        "consumer": "20.05",
        "unexplained": "10.05",
    }


def test_keys_of_sums_are_masked(acting: Http, found: Reconciled) -> None:
    """A part of a key that stands under a telling name is masked, for everybody; others are shown."""
    for role in ("viewer", "admin"):
        masked, shown = acting.as_role(role).get(f"{RUNS}/{found.run}").json()["run"]["measures"]
        assert [row["key"] for row in masked["rows"]] == [["***"], ["***"]]
        assert [row["key"] for row in shown["rows"]] == [[CARD], [CARD]]
    page = Visitor(acting).as_role("admin").go(f"reconciliations/{found.run}")
    assert page.text.count(CARD) == 2


def test_findings_page_by_page(acting: Http, found: Reconciled) -> None:
    """By kind, only what is left, and with a token that belongs to its filter."""
    path = f"{RUNS}/{found.run}/findings"
    first = acting.get(f"{path}?page_size=1").json()
    second = acting.get(f"{path}?page_size=1&page_token={first['next_page_token']}").json()
    assert second["next_page_token"] is None
    ids = {row["message_id"] for page in (first, second) for row in page["items"]}
    assert ids == {str(found.missing), str(found.parked)}
    (missing,) = acting.get(f"{path}?kind=missing&left=true").json()["items"]
    assert (missing["kind"], missing["action"], missing["result"]) == ("missing", "resend", None)
    assert acting.get(f"{path}?kind=missing&page_token={first['next_page_token']}").status_code == 400
    assert "must be one of: torn" in acting.get(f"{path}?kind=odd").json()["detail"]


def test_findings_are_exported(acting: Http, found: Reconciled) -> None:
    """As CSV and as NDJSON, by the filters of the list; with the limit and the slots that all exports have."""
    viewer, path = acting.as_role("viewer"), f"/export/findings/{found.run}"
    listed = viewer.get(f"{RUNS}/{found.run}/findings").json()["items"]
    assert [json.loads(line) for line in viewer.get(f"{path}.ndjson").text.splitlines()] == listed
    answer = viewer.get(f"{path}.csv?kind=missing")
    assert answer.headers["content-disposition"] == f'attachment; filename="findings-{found.run}.csv"'
    (row,) = csv.DictReader(io.StringIO(answer.text, newline=""))
    assert (row["message_id"], row["kind"]) == (str(found.missing), "missing")
    assert len(viewer.get(f"{path}.csv?limit=1").text.splitlines()) == 2
    assert viewer.get(f"/export/findings/{uuid7()}.csv").status_code == 404
    assert viewer.get(f"{path}.csv?kind=odd").status_code == 422
    page = Visitor(viewer).go(f"reconciliations/{found.run}?kind=missing")
    assert page.link("CSV").endswith(f"/api/v1/export/findings/{found.run}.csv?kind=missing")


def test_both_sides_of_a_finding(acting: Http, found: Reconciled) -> None:
    """As they were when it was found, with what it means and what can be done."""
    missing = acting.get(f"{RUNS}/{found.run}/findings/{found.missing}").json()
    assert (missing["producer"]["state"], missing["consumer"]["status"]) == ("dispatched", None)
    assert missing["repairs"] == {"resend": "sends it once more under its id"}
    parked = acting.get(f"{RUNS}/{found.run}/findings/{found.parked}").json()
    assert (parked["consumer"]["status"], parked["consumer"]["attempts"]) == ("parked", 1)


def test_what_is_not_there(acting: Http, found: Reconciled) -> None:
    """An unknown run, and a message in which the run found nothing."""
    for path in (f"{RUNS}/{uuid7()}", f"{RUNS}/{uuid7()}/findings", f"{RUNS}/{found.run}/findings/{uuid7()}"):
        assert acting.get(path).status_code == 404


@pytest.mark.parametrize("role", ["viewer", "admin"])
def test_pages(acting: Http, found: Reconciled, role: str) -> None:
    """The list leads to the run, the run to the finding, the finding to the message."""
    visitor = Visitor(acting).as_role(role)
    page = visitor.go("reconciliations")
    well_made(page)
    assert "1 missing, 1 parked" in page.text
    assert page.link("2 left").endswith(f"/reconciliations/{found.run}?left=yes")
    assert "10.05 amount" in page.text
    page = visitor.go(page.link(f"{TOPIC} → {GROUP}"))
    well_made(page)
    assert "2 differences in 2 messages; some sums" in page.text
    assert "30.10" in page.text
    page = visitor.go(f"reconciliations/{found.run}/findings/{found.missing}")
    well_made(page)
    assert "Its inbox" in page.text
    assert CARD not in page.text
    assert '"card": "***"' in page.text
    page = visitor.go(page.link("all that happened to it"))
    assert page.link("Both sides of it").endswith(f"/reconciliations/{found.run}/findings/{found.missing}")


def test_a_message_that_was_pruned(acting: Http, shop: Shop, found: Reconciled) -> None:
    """A finding is shown when no database knows its message any more."""
    gone = uuid7()
    with shop.engine.begin() as connection:
        insert = """INSERT INTO outbox.reconciliation_finding (run_id, message_id, kind, detail, action)
                    VALUES (:run, :id, 'phantom', '{"status": "consumed", "attempts": 1}', 'alert')"""
        connection.execute(text(insert), {"run": found.run, "id": gone})
    page = Visitor(acting).go(f"reconciliations/{found.run}/findings/{gone}")
    assert page.status == 200
    assert "No registered database knows this message any more." in page.text
    with shop.engine.begin() as connection:
        connection.execute(text("DELETE FROM outbox.reconciliation_finding WHERE message_id = :id"), {"id": gone})


def test_states_of_runs(acting: Http, shop: Shop) -> None:
    """Two that began or were heard of lately, two that weren't, one that failed, one that is in sync."""
    insert = """INSERT INTO outbox.reconciliation_run (id, job_id, topic, consumer_group, started_at, finished_at,
                                                       counts, error, schedule, plan)
                SELECT gen_random_uuid(), gen_random_uuid(), 'states', 'g', now() - make_interval(hours => age),
                       finished_at, counts, error, 'hourly',
                       CASE WHEN heard_of IS NOT NULL
                            THEN jsonb_build_object('alive_at', now() - make_interval(mins => heard_of)) END
                  FROM (VALUES (0, NULL::timestamptz, NULL::jsonb, NULL, NULL::int),
                               (1, NULL, NULL, NULL, 1),
                               (2, NULL, NULL, NULL, NULL),
                               (2, NULL, NULL, NULL, 6),
                               (3, now(), NULL, 'no such host', NULL),
                               (4, now(), '{"consumed": 7}', NULL, NULL)) v
                       (age, finished_at, counts, error, heard_of)"""
    with shop.engine.begin() as connection:
        connection.execute(text(insert))
    answer = acting.get(f"{RUNS}?topic=states").json()
    states = ["running", "running", "unended", "unended", "failed", "in_sync"]
    assert [run["state"] for run in answer["items"]] == states
    assert [run["plan"] for run in answer["items"]] == [None] * 6
    for state in dict.fromkeys(states):
        run = acting.get(f"{RUNS}?topic=states&state={state}").json()["items"][0]
        page = Visitor(acting).go(f"reconciliations/{run['id']}")
        well_made(page)
    assert "no such host" in Visitor(acting).go("reconciliations?topic=states").text


def test_a_run_that_has_no_end(acting: Http, shop: Shop) -> None:
    """It is at work as long as it follows the log, and its page says so."""
    shop.outbox.reconciliation("live", follows=True)
    (following,) = followings(shop.outbox, threading.Event())
    try:
        with shop.engine.connect() as connection:
            auto = connection.execution_options(isolation_level="AUTOCOMMIT")
            following(auto, auto)
        (run,) = acting.get(f"{RUNS}?schedule=live").json()["items"]
        assert (run["state"], run["plan"]["engine"]) == ("running", "local")
        page = Visitor(acting).go(f"reconciliations/{run['id']}")
        well_made(page)
        assert "it follows the log" in page.text
    finally:
        following.end()
        del shop.outbox.reconciliations["live"]
        with shop.engine.begin() as connection:
            connection.execute(text("DELETE FROM outbox.reconciliation_run WHERE schedule = 'live'"))


def test_timetables(acting: Http, shop: Shop) -> None:
    """What workers report, with the last runs and when the next is due."""
    options: dict[str, Any] = {"cron": None, "every": 7200.0, "timezone": "UTC"}
    declared = {"kind": "reconciliation", "topic": "", "group": None, "name": "hourly"}
    report(shop.engine, handlers=[declared | {"options": options | {"pairs": [["states", "g"]]}}])
    report(shop.engine, handlers=[declared | {"options": options | {"pairs": []}}], number=2)
    report(shop.engine, handlers=[declared | {"name": "nobody", "options": options | {"pairs": []}}], number=3)
    hourly, nobody = acting.get("/reconciliations/schedules").json()["items"]
    assert (hourly["name"], hourly["every"], hourly["pairs"]) == ("hourly", 7200.0, [["states", "g"]])
    assert [run["state"] for run in hourly["last"]] == ["running"]
    assert hourly["next_at"] > hourly["last"][0]["started_at"]
    assert (nobody["pairs"], nobody["next_at"]) == ([], None)
    page = Visitor(acting).go("reconciliations")
    assert "every 2h00m" in page.text
    assert "no living worker with the role reconcile has it" in page.text
