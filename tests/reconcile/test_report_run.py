"""The report of a real run: two databases, put out of step, reconciled and repaired."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from outbox.reconcile.job import EngineName
from outbox.reconcile.measure import Measure
from outbox.reconcile.report import as_json, print_report
from outbox.reconcile.report.html import write_html
from outbox.reconcile.report.prometheus import write_prometheus
from outbox.reconcile.run import reconcile
from tests.reconcile.repairing import Night

AMOUNTS = Measure(
    "ledger",
    "t",
    "g",
    by=("book",),
    values=("amount",),
    consumer="SELECT 'all' AS book, 1.25 * count(*) AS amount FROM ledger",
    in_flight={"book": "book", "amount": "amount"},
)


def test_every_form_tells_of_the_same_run(night: Night, tmp_path: Path) -> None:
    """A lost message and one that took effect twice are in text, JSON, page and gauges alike, with what they cost."""
    ids = [str(message_id) for message_id in night.send(*[{"book": "all", "amount": "1.25"}] * 20)]
    night.consume(night.group)
    lost, twice = ids[3], ids[7]
    night.run("DELETE FROM outbox.consumer_message WHERE message_id = :id", id=lost)
    night.run("DELETE FROM ledger WHERE message_id = :id", id=lost)
    night.run("INSERT INTO ledger (message_id) VALUES (:id)", id=twice)
    job = replace(night.job({}), engine=EngineName.LOCAL, measures=(AMOUNTS,))
    sentence = "1 difference left, 1 of 2 repaired; ledger: 1.25 amount unexplained"

    result = reconcile(job)

    told = json.loads(json.dumps(as_json(result)))
    assert told["verdict"] == sentence
    (pair,) = told["pairs"]
    assert [(found["id"], found["kind"]) for found in pair["findings"]] == [
        (twice, "duplicate_effect"),
        (lost, "missing"),
    ]
    assert pair["counts"]["consumed"] == 18
    assert pair["repairs"] == [{"id": lost, "kind": "missing", "action": "resend", "result": "done"}]
    assert told["measures"][0]["rows"] == [
        {
            "key": ["all"],
            "value": "amount",
            "producer": "25.00",
            "rolled_back": "0",
            "consumer": "25.00",
            "in_flight": "1.25",
            "unexplained": "-1.25",
        }
    ]

    out = io.StringIO()
    print_report(result, Console(file=out, width=200, highlight=False, markup=False))
    write_html(tmp_path / "report.html", result)
    write_prometheus(tmp_path / "report.prom", result)
    assert out.getvalue().endswith(f"\n{sentence}\n")
    for text in (out.getvalue(), (tmp_path / "report.html").read_text()):
        assert lost in text
        assert twice in text
    gauges = {
        (sample.name, sample.labels.get("kind")): sample.value
        for family in text_string_to_metric_families((tmp_path / "report.prom").read_text())
        for sample in family.samples
    }
    assert gauges["outbox_reconcile_unexplained", None] == 1.25
    assert [gauges["outbox_reconcile_differences_left", kind] for kind in ("missing", "duplicate_effect")] == [0, 1]


def test_a_run_in_sync_says_so(night: Night) -> None:
    """Two databases that agree make the verdict `in sync`, and no finding."""
    night.send(*[{"book": "all", "amount": "1.25"}] * 3)
    night.consume(night.group)
    result = reconcile(replace(night.job({}), engine=EngineName.LOCAL, measures=(AMOUNTS,)))
    told = as_json(result)
    assert (told["verdict"], told["in_sync"], told["pairs"][0]["findings"]) == ("in sync", True, [])
    assert told["measures"][0]["totals"][0]["consumer"] == "3.75"
