"""From an order in the console to money that is back in line: a dry run, a finding, a repair, with a real worker."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect
from sqlalchemy import text

from outbox.worker import Worker
from tests.console.browser.steps import carried_out, question, row, told
from tests.console.browser.town import CREDIT, KNOWN, a_town
from tests.kit import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page
    from sqlalchemy import Engine

    from tests.console.browser.conftest import Serve, Visit
    from tests.console.browser.town import Town

_ENDED = text("SELECT count(*) FROM outbox.reconciliation_run WHERE finished_at IS NOT NULL")
_REPORTED = text("SELECT count(*) FROM outbox.worker WHERE handlers::text LIKE '%reconciliation%'")


@pytest.fixture(scope="module")
def audited(fresh_engine: Callable[[], Engine]) -> Iterator[Town]:
    """A town of its own, whose bank B reconciles what it credits, each day."""
    with a_town(fresh_engine) as town:
        sums = {
            "name": "credited", "topic": "transfer", "group": CREDIT, "by": [], "values": ["amount"],
            "producer": "SELECT -sum(amount) AS amount FROM ledger_entry WHERE amount < 0",
            "consumer": "SELECT sum(amount) AS amount FROM ledger_entry",
            "in_flight": {"amount": "amount"},
        }  # fmt: skip
        job = {"window": {"grace": 0.0}, "pair": [{"topic": "transfer", "group": CREDIT}], "measure": [sums]}
        town.bank_b.reconciliation("daily", every=dt.timedelta(days=1), job=job)
        with town.at_work(), Worker(town.bank_b, roles=["dispatch", "release", "reconcile"]):
            wait_until(lambda: _count(town, _ENDED) >= 1, "the first run")
            wait_until(lambda: _count(town, _REPORTED) >= 1, "the worker reports")
            yield town


def _count(town: Town, query: object) -> int:
    with town.b.connect() as connection:
        return int(connection.execute(query).scalar_one())  # type: ignore[call-overload]


@pytest.mark.parametrize("scripts", [True, False], ids=["with scripts", "without"])
def test_the_whole_way(visit: Visit, serve: Serve, audited: Town, scripts: bool) -> None:
    """A dry run finds the transfer that bank B has lost; its repair sends it again, and the finding says so."""
    lost = audited.transfer("40.00", KNOWN)
    audited.becomes(lost, "consumed")
    with audited.b.begin() as connection:
        connection.execute(text("DELETE FROM outbox.consumer_message WHERE message_id = :id"), {"id": lost})
        connection.execute(text("DELETE FROM ledger_entry WHERE message_id = :id"), {"id": lost})
    page = visit(serve(audited), "otto", java_script_enabled=scripts)
    runs = _count(audited, _ENDED)
    page.goto("reconciliations")
    page.get_by_role("button", name="Dry run…").click()
    asked = question(page, "Dry run reconciliation daily?")
    asked.get_by_label("Reason").fill("bank B was restored")
    asked.get_by_role("button", name="Dry run").click()
    told(page, "Ordered: a worker takes it up within seconds")
    wait_until(lambda: _count(audited, _ENDED) > runs, "the dry run has ended")
    page.goto("reconciliations")
    expect(row(page, "otto").first).to_contain_text("missing")
    row(page, "otto").first.get_by_role("link", name=f"transfer → {CREDIT}").click()
    expect(page.get_by_role("heading", name="Sums: credited")).to_be_visible()
    _repair(page, str(lost))
    expect(carried_out(page, audited)).to_contain_text("1 of 1")
    audited.becomes(lost, "consumed")
    page.get_by_role("link", name="this run").click()
    expect(row(page, str(lost)[-8:])).to_contain_text("done")


def _repair(page: Page, message: str) -> None:
    page.get_by_role("link", name=re.compile(message[-8:])).first.click()
    expect(page.get_by_role("region", name="Consumer")).to_contain_text("Its inbox")
    page.get_by_role("button", name="Resend…", exact=True).click()
    asked = question(page, re.compile("^Repair what run"))
    asked.get_by_label("Reason").fill("lost by the restore")
    asked.get_by_role("button", name="Repair").click()
    told(page, "Ordered.")
