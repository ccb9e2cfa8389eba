"""Without JavaScript everything works too: questions are pages, forms are forms."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from tests.console.browser.steps import carried_out, entry, order_rollback, rows, told

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.console.browser.conftest import Visit
    from tests.console.browser.town import Town


@pytest.fixture
def page(tour: Visit, console: str) -> Page:
    """The console in a browser that runs no script."""
    return tour(console, java_script_enabled=False)


def test_the_whole_way_of_a_retry(page: Page, town: Town) -> None:
    """From the overview to the dead letters, one as a trial, then the group; reload until it is done."""
    ids = [town.note("blot") for _ in range(3)]
    town.settled(ids)
    town.mended.add("blot")
    page.goto("")
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Dead letters").click()
    group = page.get_by_role("region", name="blot")
    group.get_by_role("button", name="Retry one as a trial…").click()
    page.get_by_label("Reason").fill("a trial")
    page.get_by_role("button", name="Retry", exact=True).click()
    told(page, "It will be tried again")
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Dead letters").click()
    group.get_by_role("button", name="Retry all…").click()
    expect(page.get_by_role("heading", name=re.compile("Retry 2 of 2"))).to_be_visible()
    page.get_by_label("Reason").fill("all of them")
    page.get_by_role("button", name="Retry 2").click()
    told(page, "Ordered")
    expect(carried_out(page, town)).to_contain_text("2 of 2")
    for each in ids:
        town.becomes(each, "consumed")


def test_the_whole_way_of_a_rollback(page: Page, town: Town) -> None:
    """Found by its key, asked for, typed, ordered, done: the money is back."""
    before = town.balance()
    message = town.transfer("99.00", "BB-501")
    town.becomes(message, "parked")
    page.goto("")
    page.get_by_role("searchbox").fill("BB-501")
    page.get_by_role("searchbox").press("Enter")
    expect(rows(page)).to_have_count(1)
    order_rollback(page, message, "BB-501", "no such account")
    expect(carried_out(page, town)).to_contain_text("1 of 1")
    assert town.balance() == before
    assert town.status(message) == "quarantined"
    page.goto(f"audit?action=compensate&target={message}")
    expect(entry(page, "no such account").first).to_be_visible()


def test_rows_are_ticked_and_previewed(page: Page, town: Town) -> None:
    """The bar for what is selected is there from the beginning, since no script can show it later."""
    ids = [town.note("smear") for _ in range(2)]
    town.settled(ids)
    page.goto("inbox?error=smear&status=parked")
    page.get_by_role("checkbox", name=f"Select message {ids[0]}").check()
    page.get_by_role("button", name="Discard…").click()
    expect(page.get_by_role("heading", name="Discard 1 of 1?")).to_be_visible()
    page.get_by_role("link", name="Cancel").click()
    assert [town.status(each) for each in ids] == ["parked", "parked"]


def test_nothing_is_offered_that_needs_a_script(page: Page) -> None:
    """No theme switch, no refresh, no copying: what would do nothing isn't there."""
    page.goto("messages")
    for name in ("Theme", "Refresh now", "Copy the id", "Select all on this page"):
        expect(page.get_by_role("button", name=name)).to_have_count(0)
        expect(page.get_by_role("checkbox", name=name)).to_have_count(0)


def test_the_whole_way_of_a_copy(page: Page, town: Town) -> None:
    """A transfer to an account that there isn't is sent again to one that there is; the money comes once."""
    town.open_account("BB-61")
    message = town.transfer("7.00", "BB-609")
    town.becomes(message, "parked")
    page.goto(f"messages/{message}")
    page.get_by_role("button", name="Edit and resend…").click()
    body = page.get_by_label("Body")
    body.fill(body.input_value().replace("BB-609", "BB-61"))
    page.get_by_label("Reason").fill("a typo")
    page.get_by_role("button", name="Edit and resend").click()
    told(page, "Sent: this is the copy")
    (copy,) = town.operator.message(message).copies
    town.becomes(copy, "consumed")
    assert town.credited("BB-61") == Decimal("7.00")
    page.reload()
    page.get_by_role("link", name=str(message)[-8:]).click()
    expect(page.get_by_role("main")).to_contain_text("Replaced: a copy with another body was sent")
