"""The report as JSON."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from decimal import Decimal
from uuid import UUID

from outbox.reconcile.job import KINDS, Outcome
from outbox.reconcile.report import VERSION, as_json
from outbox.reconcile.rows import DIGESTS, Finding
from tests.reconcile.report_samples import NOW, every_kind, job, money, pair_result, row, whole


def test_it_is_one_object_of_plain_values() -> None:
    """The whole report survives JSON, with its version, times in UTC, and the verdict."""
    result = whole()
    result.begun_at = NOW.astimezone(dt.timezone(dt.timedelta(hours=2)))
    value = json.loads(json.dumps(as_json(result)))
    assert value["version"] == VERSION
    assert value["begun_at"] == "2026-03-14T02:00:00+00:00"
    assert (value["in_sync"], value["differences"], value["left"]) == (False, 57, 52)
    assert value["verdict"].startswith("52 differences left")


def test_counts_and_kinds_round_trip() -> None:
    """Each outcome has its count, each kind what became of it, each finding what both sides say and a sentence."""
    result = whole()
    pair = json.loads(json.dumps(as_json(result)))["pairs"][0]
    assert {Outcome[name.upper()]: number for name, number in pair["counts"].items() if number} == result.pairs[
        0
    ].counts
    assert [told["kind"] for told in pair["differences"]] == [kind.label for kind in KINDS]
    (missing,) = (told for told in pair["differences"] if told["kind"] == "missing")
    assert {name: missing[name] for name in ("number", "left", "action", "done", "healed", "refused")} == {
        "number": 3,
        "left": 1,
        "action": "resend",
        "done": 1,
        "healed": 1,
        "refused": {"somebody else holds its row": 1},
    }
    assert {UUID(found["id"]) for found in pair["findings"]} == {UUID(bytes=found["id"]) for found in every_kind(3)}
    names = {field.name for field in dataclasses.fields(Finding)} - {"outcome", *DIGESTS} | {
        "kind",
        "sentence",
        "since",
    }
    assert all(set(found) == names for found in pair["findings"])
    (mismatch,) = (
        found for found in pair["findings"][:18] if found["kind"] == "digest_mismatch" and found["queue"] == 0
    )
    assert mismatch["sentence"].endswith("the bodies differ")
    assert (mismatch["state"], mismatch["status"], mismatch["effects"]) == ("dispatched", "consumed", None)
    assert pair["lag"] | {"counts": None, "bounds": None} == {
        "bounds": None, "counts": None, "total": 1223, "sampled": True, "p50": 0.1, "p90": 0.3, "p99": 10.0,
    }  # fmt: skip
    assert len(pair["repairs"]) == 6


def test_amounts_are_strings_with_every_digit() -> None:
    """Decimals become strings without exponent, and their totals read back are those of the rows."""
    measure = money((("1",), "amount", "1E+3", "0.00", "999.995", "0"), (("2",), "amount", "0.10", "0", "0.10", "0"))
    (value,) = json.loads(json.dumps(as_json(job([], [measure]))))["measures"]
    assert value["rows"][0] == {
        "key": ["1"],
        "value": "amount",
        "producer": "1000",
        "rolled_back": "0.00",
        "consumer": "999.995",
        "in_flight": "0",
        "unexplained": "0.005",
    }
    (total,) = value["totals"]
    assert Decimal(total["producer"]) == sum(Decimal(row["producer"]) for row in value["rows"])
    assert (value["in_sync"], value["faults"]) == (False, [])


def test_a_limit_says_what_it_leaves_out() -> None:
    """With a limit some of each kind are there, and how many aren't; without one all are there."""
    result = job([pair_result([row(Outcome.PHANTOM, 0), *(row(Outcome.MISSING, at) for at in range(1, 2000))])])
    (pair,) = as_json(result, 10)["pairs"]
    assert ([found["kind"] for found in pair["findings"]], pair["findings_left_out"]) == (
        ["phantom", *["missing"] * 9],
        1990,
    )
    (pair,) = as_json(result)["pairs"]
    assert (len(pair["findings"]), pair["findings_left_out"]) == (2000, 0)


def test_an_empty_job_has_every_name() -> None:
    """A job in sync has the same names, with nothing in them."""
    empty, full = as_json(job([pair_result()])), as_json(whole())
    assert empty["in_sync"] is True
    assert empty.keys() == full.keys()
    assert empty["pairs"][0].keys() == full["pairs"][0].keys()
    assert (empty["pairs"][0]["lag"], empty["pairs"][0]["findings"]) == (None, [])
