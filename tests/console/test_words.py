"""How names, results and outcomes are written on the pages."""

from __future__ import annotations

import datetime as dt
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from outbox.acts.changes import Target
from outbox.console.pages.view import breaking, chip_of, facts, number, prose
from outbox.operator.model import BulkOutcome, Selector, Total
from outbox.testing import bulk
from tests.console.visitor import Visitor
from tests.console.web import GROUP, Http, Shop

if TYPE_CHECKING:
    from outbox.operator.model import BulkJob


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("orders", ["orders"]),
        ("orders.created_eu", ["orders.", "created_", "eu"]),
        ("seat-allocation", ["seat-", "allocation"]),
        ("a|b__c", ["a|", "b__", "c"]),
        ("<b>.x", ["&lt;b&gt;.", "x"]),
        ("", []),
    ],
)
def test_a_name_breaks_between_its_words_only(name: str, parts: list[str]) -> None:
    """After a dot, a dash, a bar, an underscore; whatever it has of markup is text."""
    assert str(breaking(name)) == "<wbr>".join(parts)


def test_what_stands_between_backticks_is_code() -> None:
    """And markup in it is text."""
    assert prose("see `a <b>`, then go on") == "See <code>a &lt;b&gt;</code>, then go on."


def test_what_a_function_returned_comes_first() -> None:
    """The money that a compensation moved, before what it is called; empty facts are left out."""
    result = {"function": "app.refund", "returned": {"refunded": "5.00"}, "bulk_job": "x", "quarantined": []}
    result["was"] = "parked"
    assert facts(result) == [("refunded", "5.00"), ("function", "app.refund"), ("was", "parked")]
    assert facts({"returned": "done"}) == [("returned", "done")]
    assert facts({"result": None}) == []


def test_big_numbers_need_no_fraction() -> None:
    """Of a hundred and more."""
    assert [number(value) for value in (1234.56, 99.94, 0.5)] == ["1,235", "99.9", "0.5"]


@pytest.mark.parametrize(
    ("state", "counts", "verdict", "tone"),
    [
        ("done", {}, "done", "good"),
        ("done", {"consumed": 3}, "done", "good"),
        ("done", {"consumed": 3, "parked": 1}, "unhealed", "bad"),
        ("partly", {"parked": 1}, "unhealed", "bad"),
        ("done", {"pending": 2, "consumed": 1}, "unsettled", "info"),
        ("running", {"parked": 1}, "running", "info"),
        ("cancelled", {"parked": 1}, "cancelled", ""),
    ],
)
def test_a_bulk_job_is_taken_by_what_came_of_it(state: str, counts: dict[str, int], verdict: str, tone: str) -> None:
    """That it was done says nothing of whether it has helped."""
    outcome = BulkOutcome(Total(3), counts, {"E": 1} if "parked" in counts else {}, [], 0)
    now = dt.datetime.now(dt.UTC)
    ended, cancelled = (None if state == "running" else now), (now if state == "cancelled" else None)
    job = SimpleNamespace(state=state, finished_at=ended, cancelled_at=cancelled)
    assert outcome.verdict_of(cast("BulkJob", job)) == verdict
    assert chip_of(verdict).tone == tone


def test_a_job_that_did_not_help_is_not_green(acting: Http, shop: Shop) -> None:
    """Its chip and its meter say so as soon as the groups have tried again."""
    ids = shop.parked(71, trouble="still closed")
    job = shop.outbox.operator.start("retry", Selector(tuple(Target(each, GROUP) for each in ids)), by="ann", why="x")
    bulk(shop.outbox)
    visitor = Visitor(acting)
    assert chip_of("unsettled").meaning in acting.ask("GET", f"/bulk-jobs/{job.id}").text
    shop.drain()
    assert "failed again" in visitor.go(f"bulk-jobs/{job.id}").text


def test_a_list_of_messages_tells_their_fate_in_each_group(acting: Http, shop: Shop) -> None:
    """Not that they were dispatched: a search for a customer's key says what became of the messages."""
    (parked,) = shop.parked(72)
    shop.order(73)
    shop.drain()
    rows = Visitor(acting).go("messages").rows
    one, other = (next(row for row in rows if f"order-{number} " in row) for number in (72, 73))
    assert f"parked {GROUP}" in one
    assert str(parked)[-8:] in one
    assert f"consumed {GROUP}" in other
    assert "dispatched" not in one + other
