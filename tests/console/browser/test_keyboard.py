"""Everything can be done by the keyboard, and the focus is where one expects it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from tests.console.browser.steps import dialog, rows

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

    from tests.console.browser.conftest import Visit
    from tests.console.browser.museum import Museum


@pytest.fixture
def page(tour: Visit, museum: Museum) -> Page:
    """The museum, as an admin sees it; nothing is done there."""
    return tour(museum.console)


def _link(row: Locator) -> Locator:
    return row.get_by_role("link").first


def test_rows_are_walked_selected_and_opened(page: Page, museum: Museum) -> None:
    """j and k go down and up, x selects, Enter opens; the ends of the list hold."""
    page.goto("inbox")
    page.keyboard.press("j")
    expect(_link(rows(page).nth(0))).to_be_focused()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    expect(_link(rows(page).nth(1))).to_be_focused()
    page.keyboard.press("x")
    expect(rows(page).nth(1).get_by_role("checkbox")).to_be_checked()
    bar = page.get_by_role("form", name="Do something with the selected rows")
    expect(bar).to_contain_text("1 selected")
    page.keyboard.press("Escape")
    expect(rows(page).nth(1).get_by_role("checkbox")).not_to_be_checked()
    expect(bar).to_be_hidden()
    page.keyboard.press("k")
    page.keyboard.press("k")
    expect(_link(rows(page).nth(0))).to_be_focused()
    page.keyboard.press("Enter")
    page.wait_for_url("**/messages/*")


def test_a_range_is_selected_with_shift(page: Page, museum: Museum) -> None:
    """Click one, shift-click another: all between are selected, too."""
    page.goto("inbox")
    rows(page).nth(1).get_by_role("checkbox").click()
    rows(page).nth(4).get_by_role("checkbox").click(modifiers=["Shift"])
    expect(page.get_by_role("form", name="Do something with the selected rows")).to_contain_text("4 selected")
    every = page.get_by_role("checkbox", name="Select all on this page")
    assert every.evaluate("box => box.indeterminate")


@pytest.mark.parametrize(
    ("key", "heading"),
    [
        ("d", "Dead letters"),
        ("m", "Messages"),
        ("h", "Halves & checks"),
        ("i", "Inbox"),
        ("o", "Overview"),
        ("a", "Audit"),
    ],
)
def test_g_and_a_letter_lead_to_a_page(page: Page, key: str, heading: str) -> None:
    """Two keys after each other, as in other tools."""
    page.goto("system")
    page.keyboard.press("g")
    page.keyboard.press(key)
    expect(page.get_by_role("heading", level=1, name=heading)).to_be_visible()


def test_slash_searches_and_letters_are_letters_there(page: Page) -> None:
    """In a field no key is a command."""
    page.goto("messages")
    page.keyboard.press("/")
    jump = page.get_by_role("searchbox")
    expect(jump).to_be_focused()
    page.keyboard.type("gmjx?/t")
    expect(jump).to_have_value("gmjx?/t")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("Escape")
    expect(jump).not_to_be_focused()


def test_help_opens_and_gives_the_focus_back(page: Page) -> None:
    """? lists the keys; Escape closes it, and the focus is where it was."""
    page.goto("messages")
    page.keyboard.press("j")
    page.keyboard.press("?")
    shown = dialog(page, "Keyboard")
    expect(shown.get_by_role("button", name="Close")).to_be_focused()
    page.keyboard.press("j")
    page.keyboard.press("Escape")
    expect(shown).to_be_hidden()
    expect(_link(rows(page).nth(0))).to_be_focused()


def test_a_question_is_asked_and_left_by_keys(page: Page, museum: Museum) -> None:
    """Cancel has the focus first, the focus can't leave the dialog, and returns to the button that opened it."""
    page.goto(f"messages/{museum.parked}")
    opener = page.get_by_role("button", name="Compensate…")
    opener.focus()
    page.keyboard.press("Enter")
    shown = dialog(page, "Compensate this local transaction?")
    expect(shown.get_by_role("button", name="Cancel").or_(shown.get_by_role("link", name="Cancel"))).to_be_focused()
    for _ in range(8):
        page.keyboard.press("Tab")
        # The browser's own bar may take its turn; what is behind the dialog never does.
        assert page.evaluate("document.activeElement === document.body || !!document.activeElement.closest('dialog')")
    page.keyboard.press("Escape")
    expect(shown).to_be_hidden()
    expect(opener).to_be_focused()


def test_the_first_tab_skips_the_navigation(page: Page) -> None:
    """Who can't see the page is at its content with two keys."""
    page.goto("messages")
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to the content")
    expect(skip).to_be_focused()
    expect(skip).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.get_by_role("main")).to_be_focused()


def test_nothing_is_done_by_a_single_key(page: Page, museum: Museum) -> None:
    """Whatever letter is pressed on a message, no question is open, and nothing was sent."""
    page.goto(f"messages/{museum.parked}")
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.method))
    for letter in "abcdefhiklmnopqsuvwyz0123456789":
        page.keyboard.press(letter)
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert "POST" not in sent
    assert page.url.endswith(str(museum.parked))
