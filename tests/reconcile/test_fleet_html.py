"""The page of a fleet: what is told, what is hostile, and that it loads nothing."""

from __future__ import annotations

import re
from decimal import Decimal

from outbox.reconcile.fleet.report import render_fleet
from outbox.reconcile.fleet.run import compare_fleet
from outbox.reconcile.fleet.totals import Double, TotalResult, TotalRow
from tests.reconcile.test_fleet import MISSING, Houses, houses  # noqa: F401 - a fixture
from tests.reconcile.test_report_html import Page


def test_the_whole_is_told(houses: Houses) -> None:  # noqa: F811
    """Databases, differences, what came to no result, doubles and totals; each text stays text."""
    (lost,) = houses.towns["shop-1", "bank-1"].plant([MISSING], topic="shop-1-orders", group="bank-1-books")
    result = compare_fleet(houses.fleet())
    result.unreachable["gone"] = "<script>alert(1)</script>\x1b[2J"
    result.doubles.append(Double("shop-1", "fees", "fees", ("bank-1", "bank-2"), 3))
    rows = [
        TotalRow((f"k{number}",), "amount", {"bank-1": Decimal(number), "bank-2": Decimal(-7)}, Decimal(), Decimal())
        for number in range(60)
    ]
    result.totals.append(TotalResult("money", ("currency",), tuple(rows)))
    text = render_fleet(result)
    page = Page(text)
    assert [name for _, name in page.headings] == [
        "1 member or database came to no result, or not to its end; of the others: 1 difference left; "
        + result.totals[0].verdict,
        *("No result", "Databases", "Taken in several databases", "money", "Findings"),
    ]
    assert "<script" not in text
    assert "\x1b" not in text
    for told in ("shop-1 → bank-1", "shop-2 → bank-2", "shop-1-orders → bank-1-books", "1 missing", str(lost), "fees"):
        assert told in text
    # What doesn't add up comes first: k7 does, and isn't among the forty.
    assert "k8 amount" in text
    assert "k7 amount" not in text
    assert "20 more rows" in text
    assert not re.search(r"(src|href)=\"(?!#|data:)", text)


def test_a_fleet_in_sync_makes_a_quiet_page(houses: Houses) -> None:  # noqa: F811
    """The verdict, and the databases."""
    page = Page(render_fleet(compare_fleet(houses.fleet())))
    assert page.headings == [(1, "in sync"), (2, "Databases")]
