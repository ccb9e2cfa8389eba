"""What people do in the console, found by what it is called: no test depends on how a page is laid out."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from uuid import UUID

from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

    from tests.console.browser.town import Town


def dialog(page: Page, title: str | re.Pattern[str]) -> Locator:
    """Wait for the dialog of this title, and return it."""
    shown = page.get_by_role("dialog")
    expect(shown.get_by_role("heading", name=title)).to_be_visible()
    return shown


def question(page: Page, title: str | re.Pattern[str]) -> Locator:
    """Wait for the question of this title, on a page or in a dialog, and return its form."""
    shown = page.get_by_role("form", name=title)
    expect(shown).to_be_visible()
    return shown


def told(page: Page, text: str | re.Pattern[str]) -> None:
    """Wait until the page tells what was done."""
    expect(page.get_by_role("main").get_by_text(text).first).to_be_visible()


def order_rollback(page: Page, message: UUID, typed: str, reason: str) -> None:
    """Order the rollback of a message's local transaction from its page; ends on the bulk job's page."""
    page.goto(f"messages/{message}")
    page.get_by_role("button", name="Compensate…").click()
    asked = question(page, "Compensate this local transaction?")
    asked.get_by_label("to go on").fill(typed)
    asked.get_by_label("Reason").fill(reason)
    asked.get_by_role("button", name="Compensate", exact=True).click()
    page.wait_for_url(re.compile("/bulk-jobs/"))


def carried_out(page: Page, town: Town) -> Locator:
    """Wait until workers are done with the bulk job that the page shows, load it anew, and return its progress."""
    page.wait_for_url(re.compile("/bulk-jobs/"))
    town.carried_out(UUID(urlsplit(page.url).path.rpartition("/")[2]))
    page.reload()
    return page.get_by_role("region", name="Progress")


def pace(page: Page) -> Locator:
    """Return the list of how often the page refreshes itself."""
    return page.get_by_role("combobox", name=re.compile("^Refresh"))


def row(page: Page, text: str) -> Locator:
    """Return the row of the main table that has this text."""
    return page.get_by_role("main").get_by_role("row").filter(has_text=text)


def entry(page: Page, text: str) -> Locator:
    """Return the entry of the audit that has this text."""
    return page.get_by_role("region", name="Audit").get_by_role("listitem").filter(has_text=text)


def rows(page: Page) -> Locator:
    """Return the rows of the main table, without its head."""
    return page.get_by_role("main").get_by_role("row").filter(has=page.get_by_role("cell"))


def hacked(page: Page) -> object:
    """Return what hostile text has done: None, if it is only text. Gives it the time to do it."""
    return page.evaluate("() => new Promise((done) => setTimeout(() => done(window.hacked ?? null), 50))")
