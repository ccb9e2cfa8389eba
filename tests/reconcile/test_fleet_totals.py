"""Totals: many databases add up, whatever is under way between them and in whichever order they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox import Settings
from outbox.errors import InvalidSettings
from outbox.reconcile import source
from outbox.reconcile.fleet import totals
from outbox.reconcile.fleet.config import Bounds, Fleet, FleetTotal, PairPattern, TotalPart
from outbox.reconcile.fleet.report import as_json
from outbox.reconcile.fleet.run import compare_fleet
from outbox.reconcile.job import Access
from outbox.reconcile.tables import InboxState
from tests.reconcile.town import IN_SYNC, Place, Town, fate, url_of

UNDER_WAY = fate(status=InboxState.NONE, place=Place.AHEAD, age=0)
ACCOUNTS = TotalPart(("bank-*",), "SELECT currency, sum(amount) AS amount FROM account GROUP BY 1")
PAID_IN = TotalPart(("mint",), "SELECT currency, -amount AS amount FROM paid_in")
MONEY = FleetTotal(
    "money", ("amount",), {"currency": "currency", "amount": "amount"}, (ACCOUNTS, PAID_IN), ("currency",)
)
COINS = TotalPart(("bank-*",), "SELECT sum(amount) - 10 AS amount FROM account")
COUNTED = FleetTotal("coins", ("amount",), {"amount": "*"}, (COINS,))


@dataclass
class Banks:
    """Three banks with 10 in each account, and the mint, which paid in 30; ``way`` leads from bank 1 to bank 2."""

    engines: dict[str, Engine]
    way: Town
    settings: Settings

    def fleet(self, *of: FleetTotal) -> Fleet:
        """Return the fleet with these totals."""
        accesses = {name: Access(url_of(engine), self.settings) for name, engine in self.engines.items()}
        selection = PairPattern(consumers=("bank-2",), topics=("t",), groups=("g",), producers=("bank-1",))
        return Fleet(accesses, (selection,), {"window": {"grace": 60.0}}, Bounds(sessions=20), of)

    def book(self, bank: str, amount: int) -> None:
        """Add to the account of a bank."""
        with self.engines[bank].begin() as connection:
            connection.execute(text("UPDATE account SET amount = amount + :n"), {"n": amount})


@pytest.fixture
def banks(new_engine: Callable[[], Engine], settings: Settings) -> Iterator[Banks]:
    """All in balance."""
    engines = {name: new_engine() for name in ("bank-1", "bank-2", "bank-3", "mint")}
    for name, engine in engines.items():
        table, amount = ("paid_in", 30) if name == "mint" else ("account", 10)
        with engine.begin() as connection:
            connection.execute(text(f"CREATE TABLE {table} AS SELECT 'EUR' AS currency, {amount}::numeric AS amount"))
    with ExitStack() as stack:
        way = stack.enter_context(Town(engines["bank-1"], engines["bank-2"], settings))
        way.plant([IN_SYNC])
        yield Banks(engines, way, settings)


def test_what_is_under_way_is_a_part_of_the_total(banks: Banks) -> None:
    """What one bank has debited, and the other not credited yet, is in the body of its message."""
    banks.way.send({"amount": "2.50", "currency": "EUR"})
    with banks.engines["bank-1"].begin() as connection:
        connection.execute(text("UPDATE account SET amount = amount - 2.50"))
    (found,) = compare_fleet(banks.fleet(MONEY)).totals
    assert found.in_sync, found.verdict
    (row,) = found.rows
    assert row.parts == {"bank-1": Decimal("7.50"), "bank-2": Decimal(10), "bank-3": Decimal(10), "mint": Decimal(-30)}
    assert [row.key, row.in_flight, row.early] == [("EUR",), Decimal("2.50"), Decimal()]


def test_what_nothing_accounts_for_is_told(banks: Banks) -> None:
    """No two databases differ; what is in them has grown all the same."""
    banks.book("bank-3", 1)
    result = compare_fleet(banks.fleet(MONEY))
    assert all(each.in_sync for _, each in result.results)
    assert result.verdict.sentence == "money: 1 amount EUR unexplained"
    document = as_json(result)
    assert (document["in_sync"], document["totals"][0]["rows"][0]["unexplained"]) == (False, "1")


@pytest.mark.parametrize("between", ["bank-1", "bank-2"])
def test_the_order_of_the_snapshots_does_not_matter(
    banks: Banks, between: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transfer that is made, from end to end, between two of the snapshots is early or under way, and adds up."""
    real = source.snapshot_of
    fleet = banks.fleet(COUNTED)
    if between == "bank-2":  # the consumer's is taken first
        fleet = Fleet(dict(reversed([*fleet.databases.items()])), fleet.patterns, fleet.job, fleet.bounds, fleet.totals)

    @contextmanager
    def and_then_transfer(access: Access, *arguments: Any, **options: Any) -> Iterator[Any]:
        with real(access, *arguments, **options) as snapshot:
            if access == fleet.databases[between]:
                banks.book("bank-1", -1)
                banks.way.plant([fate(age=0)])
                banks.book("bank-2", 1)
            yield snapshot

    monkeypatch.setattr(totals, "snapshot_of", and_then_transfer)
    (found,) = compare_fleet(fleet).totals
    (row,) = found.rows
    assert [row.early, row.in_flight] == [Decimal(n) for n in ((1, 0) if between == "bank-1" else (0, 1))]
    assert found.in_sync, found.verdict


def test_a_phantom_is_accounted_for_by_nothing(banks: Banks) -> None:
    """What a bank has credited, and no bank has ever sent, is money that was made."""
    banks.way.plant([fate(state=None, age=0)])
    banks.book("bank-2", 1)
    (found,) = compare_fleet(banks.fleet(COUNTED)).totals
    assert [row.unexplained for row in found.rows] == [1]


def test_a_total_that_cannot_be_read_proves_nothing(banks: Banks) -> None:
    """The fault names the statement; the members are reported all the same."""
    slip = TotalPart(("bank-*",), "SELECT sum(amont) AS amount FROM account")
    wrong = FleetTotal("money", ("amount",), {"amount": "*"}, (slip,))
    result = compare_fleet(banks.fleet(wrong))
    assert [each.in_sync for _, each in result.results] == [True]
    (found,) = result.totals
    assert not found.in_sync
    assert "its part[1] SELECT failed" in found.faults[0]


def test_totals_that_cannot_be(banks: Banks) -> None:
    """The errors come before anything is read."""
    with pytest.raises(InvalidSettings, match=r"total 'money': no database is like house-\*; known are bank-1"):
        compare_fleet(banks.fleet(FleetTotal("money", ("n",), {"n": "*"}, (TotalPart(("house-*",), "SELECT 1 AS n"),))))
    with pytest.raises(InvalidSettings, match=r"part\[1\] must be a single SELECT"):
        FleetTotal("money", ("n",), {"n": "*"}, (TotalPart(("*",), "DELETE FROM account"),))
    with pytest.raises(InvalidSettings, match="in_flight lacks n"):
        FleetTotal("money", ("n", "m"), {"m": "*"}, (TotalPart(("*",), "SELECT 1"),))
    with pytest.raises(InvalidSettings, match="no part"):
        FleetTotal("money", ("n",), {"n": "*"}, ())
    few = banks.fleet(COUNTED)
    few = Fleet(few.databases, few.patterns, {**few.job, "workers": 2, "record": False}, Bounds(sessions=6), few.totals)
    with pytest.raises(InvalidSettings, match=r"needs \d sessions on .*; allow more"):
        compare_fleet(few)
