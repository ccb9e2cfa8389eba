"""What others wrote is text wherever it is shown: it runs nothing, asks for nothing, and breaks no page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from tests.console.browser.museum import HOSTILE, HOSTILE_NAME, TOPIC_LIKE_MARKUP
from tests.console.browser.steps import dialog, hacked, rows

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.console.browser.conftest import Visit
    from tests.console.browser.museum import Museum
    from tests.console.browser.watch import Watch

#: Where it is shown, and which part of it: a body's text is JSON, where quotes are escaped.
_MARKUP = HOSTILE[HOSTILE.index("<script>") : HOSTILE.index("<img")]
PLACES = {
    "messages?tag=%3Cb+onmouseover%3Dwindow.hacked%3D1%3Ex": HOSTILE_NAME,
    "messages/{hostile}": _MARKUP,
    "messages/{failing}": _MARKUP,
    "messages/{discarded}": _MARKUP,
    "messages/{hostile}/do/retry?group=clerk&database=bank_b": _MARKUP,
    "messages/{hostile}/do/compensate": _MARKUP,
    "dead": _MARKUP,
    "dead?tab=discarded": "no form",
    "inbox": _MARKUP,
    "bulk-jobs": _MARKUP,
    "audit": _MARKUP,
    "bulk?action=retry&of=inbox&topic=note": "note",
}


@pytest.fixture
def page(tour: Visit, museum: Museum) -> Page:
    """The museum, as an admin sees it."""
    return tour(museum.console)


@pytest.mark.parametrize("path", PLACES)
def test_it_is_shown_as_it_is(page: Page, museum: Museum, path: str) -> None:
    """As text, to the letter; nothing of it was taken for markup, by the browser or by htmx."""
    page.goto(museum.at(path))
    expect(page.get_by_role("main")).to_contain_text(PLACES[path])
    assert hacked(page) is None
    assert (
        page.get_by_role("main").locator("[hx-trigger=load], [onerror], [onload], [onmouseover], script").count() == 0
    )


def test_it_is_text_after_a_refresh_too(page: Page, museum: Museum, watches: list[Watch]) -> None:
    """What htmx puts into a page is as harmless as what the server sent with it."""
    page.goto(f"messages/{museum.hostile}")
    with page.expect_response(lambda response: "hx-request" in response.request.headers):
        page.get_by_role("button", name="Refresh now").click()
    expect(page.get_by_role("region", name="Error in group clerk")).to_contain_text(_MARKUP)
    page.get_by_role("button", name="Retry in clerk…").click()
    asked = dialog(page, "Retry in clerk?")
    expect(asked).to_contain_text(_MARKUP)
    assert hacked(page) is None
    assert not [url for url in watches[-1].requests if url.endswith("/hacked")]


def test_it_can_be_searched_for(page: Page, museum: Museum) -> None:
    """A key that is markup goes into a filter, into the URL and back, and finds its message."""
    page.goto("messages")
    page.get_by_role("combobox", name="Key", exact=True).fill(HOSTILE[:200])
    page.get_by_role("button", name="Search").click()
    expect(page.get_by_role("link", name=str(museum.hostile)[-8:])).to_be_visible()
    expect(page.get_by_role("combobox", name="Key", exact=True)).to_have_value(HOSTILE[:200])
    assert hacked(page) is None


def test_a_topic_that_looks_encoded_is_taken_literally(page: Page, museum: Museum) -> None:
    """What is allowed in a topic's name, in a link, in a filter and on the overview: decoded once, no more."""
    page.goto("")
    page.get_by_role("link", name=TOPIC_LIKE_MARKUP).first.click()
    expect(page.get_by_role("combobox", name="Topic", exact=True)).to_have_value(TOPIC_LIKE_MARKUP)
    expect(rows(page)).to_have_count(1)
    rows(page).get_by_role("link").first.click()
    expect(page.get_by_role("region", name="Body")).to_contain_text("text only")
    assert hacked(page) is None


@pytest.mark.parametrize(
    "path",
    [
        "messages?topic=%3Cscript%3Ewindow.hacked%3D1%3C/script%3E",
        "messages?status=%22%3E%3Cscript%3Ewindow.hacked=1%3C/script%3E",
        "messages?after=%3Cscript%3Ewindow.hacked=1%3C/script%3E",
        "messages/%3Cscript%3Ewindow.hacked=1%3C%2Fscript%3E",
        "?did=%3Cscript%3Ewindow.hacked=1%3C/script%3E",
        "?window=%3Cscript%3Ewindow.hacked=1%3C/script%3E",
        "dead?group=javascript:window.hacked=1",
        "jump?q=javascript:window.hacked=1",
        "bulk?action=%3Cscript%3Ewindow.hacked=1%3C/script%3E&of=x",
    ],
)
def test_a_link_brings_nothing_with_it(page: Page, watches: list[Watch], path: str) -> None:
    """What an attacker puts into a link is told as text, at most."""
    watches[-1].expect("40[04]|422")
    page.goto(path)
    expect(page.get_by_role("main")).to_be_visible()
    assert hacked(page) is None
    assert page.get_by_role("main").locator("script, a[href^='javascript:']").count() == 0
