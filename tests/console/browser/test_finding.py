"""People find what they look for: by filters, by the jump box, page by page, from the number to the message."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from outbox.operator.look import lists
from tests.console.browser.steps import entry, row, rows

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.console.browser.conftest import Visit
    from tests.console.browser.museum import Museum
    from tests.console.browser.watch import Watch


@pytest.fixture
def page(tour: Visit, museum: Museum) -> Page:
    """The museum, as one sees it who may only look."""
    return tour(museum.console, "vera")


def test_messages_are_found_by_topic_and_key(page: Page, museum: Museum) -> None:
    """A filter is in the URL, is shown above the list, and can be taken away piece by piece."""
    page.goto("messages")
    page.get_by_role("combobox", name="Topic", exact=True).fill("transfer")
    page.get_by_role("combobox", name="Key", exact=True).fill("BB-405")
    page.get_by_role("button", name="Search").click()
    expect(rows(page)).to_have_count(1)
    assert "key=BB-405" in page.url
    page.get_by_role("link", name="key: BB-405").click()
    expect(rows(page)).to_have_count(6)
    page.get_by_role("link", name="Clear").click()
    expect(page.get_by_role("link", name="Clear")).to_have_count(0)
    expect(rows(page).nth(10)).to_be_visible()


def test_messages_are_found_by_what_is_in_them(page: Page, museum: Museum) -> None:
    """A path in the body and a header select messages; the section with these fields stays open."""
    page.goto("messages")
    page.get_by_text("More conditions").click()
    page.get_by_label("Body (JSON path)").fill("order.id=42")
    page.get_by_label("Header").fill("plain=yes")
    page.get_by_role("button", name="Search").click()
    expect(rows(page)).to_have_count(1)
    expect(page.get_by_label("Body (JSON path)")).to_have_value("order.id=42")
    page.get_by_role("link", name=str(museum.hostile)[-8:]).click()
    expect(page.get_by_role("heading", level=1)).to_contain_text(str(museum.hostile))


def test_the_jump_box_takes_an_id_and_a_key(page: Page, museum: Museum) -> None:
    """From any page, an id leads to the message, anything else to the messages of this key."""
    page.goto("system")
    jump = page.get_by_role("searchbox")
    jump.fill(f" {museum.consumed} ")
    jump.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_contain_text(str(museum.consumed))
    jump.fill("BB-404")
    jump.press("Enter")
    expect(rows(page)).to_have_count(1)


def test_a_message_shows_its_whole_way(page: Page, museum: Museum) -> None:
    """Half, decision and queue at bank A, inbox at bank B, and what operators did: on one page, from both databases."""
    page.goto(f"messages/{museum.rolled_back}")
    timeline = page.get_by_role("region", name="Timeline")
    expect(timeline).to_contain_text("bank_a")
    expect(timeline).to_contain_text("bank_b")
    expect(row(page, "bank-b").first).to_contain_text("quarantined")
    status = page.get_by_role("region", name="Status", exact=True)
    expect(status).to_contain_text("ordered by anna: no such account")
    page.get_by_role("link", name="Compensate", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Compensate 1 message")


def test_a_body_is_masked(page: Page, museum: Museum) -> None:
    """Whoever may only look sees no password, and no button that shows it."""
    page.goto(f"messages/{museum.hostile}")
    body = page.get_by_role("region", name="Body")
    expect(body).to_contain_text("Masked: password")
    expect(body).not_to_contain_text("secret")
    expect(page.get_by_role("button", name="Reveal")).to_have_count(0)


def test_from_a_number_to_the_message(page: Page, museum: Museum) -> None:
    """From the overview's dead letters to their group, its rows, and one of them."""
    page.goto("")
    page.get_by_role("main").get_by_role("link", name=re.compile("Dead letters")).first.click()
    group = page.get_by_role("region", name=re.compile("no account"))
    expect(group).to_contain_text("bank-b")
    group.get_by_role("link", name="List").click()
    expect(rows(page)).to_have_count(2)
    page.get_by_role("link", name=str(museum.parked)[-8:]).click()
    expect(page.get_by_role("region", name="Error in group bank-b")).to_contain_text("no account BB-405 at bank B")


def test_lists_go_on_and_back(page: Page) -> None:
    """Page by page to the end without a row twice, and back to where one came from."""
    page.goto("messages?size=5")
    seen: list[list[str]] = []
    while True:
        seen.append(rows(page).evaluate_all("rows => rows.map((row) => row.id)"))
        if not (following := page.get_by_role("link", name="Next")).count():
            break
        following.click()
        page.wait_for_url(re.compile(rf"^[^#]*?(trail=[^&]*&?){{{len(seen)}}}$"))
    ids = [each for ids in seen for each in ids]
    assert len(ids) == len(set(ids)) > 10
    page.get_by_role("link", name="Back", exact=True).click()
    expect(rows(page).first).to_have_id(seen[-2][0])


def test_a_search_through_bodies_goes_on_by_itself(page: Page, museum: Museum, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request after the other, each within its budget, to the end; the list says how much was searched."""
    monkeypatch.setattr(lists, "SEARCH_SECONDS", 0.0)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "after=" in request.url else None)
    page.goto("messages?body=order.id%3D42")
    expect(rows(page)).to_have_count(1)
    expect(page.get_by_role("link", name=str(museum.hostile)[-8:])).to_be_visible()
    expect(page.locator("#announcer")).to_have_text("1 found")
    expect(page.get_by_role("link", name="Search further")).to_have_count(0)
    expect(page.locator("[data-updated]")).to_contain_text("searched")
    assert len(asked) == len(set(asked)) > 10


def test_a_search_is_stopped(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request that runs is cut off; the link goes on from there, and nothing more is asked for."""
    monkeypatch.setattr(lists, "SEARCH_SECONDS", 0.0)
    page.route("**/messages?*after=*", lambda route: None)  # never answered
    page.goto("messages?body=order.id%3D42")
    expect(page.locator("[data-updated]")).to_contain_text("searching:")
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    expect(page.locator("[data-updated]")).to_contain_text("searched")
    page.unroute_all(behavior="ignoreErrors")
    page.get_by_role("link", name="Search further").first.click()
    expect(page.locator("#announcer")).to_have_text("1 found")


def test_messages_are_found_by_what_became_of_them(page: Page, museum: Museum) -> None:
    """By one status or several, which stay ticked; the filter is in the URL, and can be taken away piece by piece."""
    page.goto("messages")
    page.get_by_role("checkbox", name="compensated").check()
    page.get_by_role("button", name="Search").click()
    expect(rows(page)).to_have_count(1)
    expect(page.get_by_role("link", name=str(museum.rolled_back)[-8:])).to_be_visible()
    expect(page.get_by_role("checkbox", name="compensated")).to_be_checked()
    page.get_by_role("checkbox", name="scheduled").check()
    page.get_by_role("button", name="Search").click()
    expect(rows(page)).to_have_count(2)
    expect(page.get_by_role("link", name=str(museum.scheduled)[-8:])).to_be_visible()
    assert "status=scheduled" in page.url
    assert "status=compensated" in page.url
    page.get_by_role("link", name="status: compensated").click()
    expect(rows(page)).to_have_count(1)


def test_lists_have_page_numbers(page: Page) -> None:
    """A number leads to its page, which says which one it is; there and back the rows are the same."""
    page.goto("messages?size=5")
    pages, first = page.get_by_role("navigation", name="Page numbers"), rows(page).first
    expect(pages.locator("[aria-current=page]")).to_have_text("1")
    at_first = first.get_attribute("id")
    pages.get_by_role("link", name="Page 2").click()
    expect(pages.locator("[aria-current=page]")).to_have_text("2")
    expect(first).not_to_have_id(str(at_first))
    assert "page=2" in page.url
    pages.get_by_role("link", name="Page 1").click()
    expect(pages.locator("[aria-current=page]")).to_have_text("1")
    expect(first).to_have_id(str(at_first))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("messages?topic=nothing", "Nothing fits this filter"),
        ("bulk-jobs?state=waiting", "Nothing fits this filter"),
        ("dead?group=nobody", "No dead letter fits"),
    ],
)
def test_an_empty_list_says_why(page: Page, path: str, text: str) -> None:
    """It tells a filter that is too narrow from a world without rows, and offers the way out."""
    page.goto(path)
    expect(page.get_by_role("main")).to_contain_text(text)
    page.get_by_role("link", name=re.compile("Clear the filter|Show all")).last.click()
    expect(page.get_by_role("main")).not_to_contain_text(text)


def test_a_filter_that_is_none_is_explained(page: Page, watches: list[Watch]) -> None:
    """What can't be used is named, with what it should look like; what was typed stays."""
    watches[-1].expect("422")
    page.goto("messages?header=nonsense")
    expect(page.get_by_role("alert")).to_contain_text("header = 'nonsense' must be a pair, written name=value")
    expect(page.get_by_label("Header")).to_have_value("nonsense")


def test_the_audit_names_who_and_why(page: Page) -> None:
    """Found by action; a reason that looks like a formula is text, here and in the file."""
    page.goto("audit?action=recall")
    expect(entry(page, "anna")).to_contain_text("=1+1")
    with page.expect_download() as download:
        page.get_by_role("link", name="As CSV").click()
    assert "'=1+1" in download.value.path().read_text()


def test_an_id_is_copied(visit: Visit, museum: Museum) -> None:
    """With one click, and it is said aloud that it was."""
    page = visit(museum.console, "vera", permissions=["clipboard-read", "clipboard-write"])
    page.goto(f"messages/{museum.consumed}")
    page.get_by_role("button", name="Copy the id").click()
    expect(page.get_by_role("status").filter(has_text="Copied.")).to_be_attached()
    assert page.evaluate("navigator.clipboard.readText()") == str(museum.consumed)
