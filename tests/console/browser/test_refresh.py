"""Pages keep themselves up to date, and never take anything out of somebody's hands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from tests.console.browser.steps import dialog, pace, rows

if TYPE_CHECKING:
    from playwright.sync_api import Page, Response

    from tests.console.browser.conftest import Visit
    from tests.console.browser.town import Town
    from tests.console.browser.watch import Watch


def _is_part(response: Response) -> bool:
    return response.request.headers.get("hx-request") == "true"


def _wait(page: Page, seconds: float = 6.0) -> None:
    """Let time pass for the page: longer than it waits between two refreshes."""
    page.clock.fast_forward(int(seconds * 1000))


def _refreshed(page: Page) -> None:
    """Wait until the page has asked by itself, and shows the answer."""
    before = page.evaluate("window.swaps")
    _wait(page)
    page.wait_for_function("before => window.swaps > before", arg=before)


def _open(page: Page, path: str) -> None:
    page.goto(path)
    page.evaluate("window.swaps = 0; document.addEventListener('htmx:after:swap', () => { window.swaps += 1 })")


@pytest.fixture
def page(visit: Visit, console: str) -> Page:
    """The console of the town, in a browser whose clock can be put forward."""
    page = visit(console)
    page.clock.install()
    return page


def test_what_changes_is_seen_without_a_hand(page: Page, town: Town) -> None:
    """A message's status, its inbox and its timeline change under one's eyes; what is open or scrolled stays so."""
    message = town.note("lost glasses", park=False, body={"order": {"id": list(range(400))}})
    town.becomes(message, "failed")
    _open(page, f"messages/{message}")
    consumers = page.get_by_role("region", name="Consumers")
    expect(consumers).to_contain_text("failed")
    body = page.get_by_role("region", name="Body").get_by_label("Body")
    body.evaluate("pre => { pre.scrollTop = 120 }")
    page.evaluate("scrollTo(0, 150)")
    page.get_by_text("Not possible now").click()
    top = page.evaluate("scrollY")
    town.mended.add("lost glasses")
    town.hurry(message)
    town.becomes(message, "consumed")
    _refreshed(page)
    expect(consumers).to_contain_text("consumed")
    assert page.evaluate("scrollY") == top
    assert body.evaluate("pre => pre.scrollTop") == 120
    expect(page.get_by_text("Not possible now").locator("..")).to_have_attribute("open", "")


def test_new_rows_wait_to_be_asked_for(page: Page, town: Town) -> None:
    """A table under somebody's eyes keeps its rows where they are; new ones are counted, and shown on demand."""
    town.settled([town.note(key="first")])
    _open(page, "messages?topic=note&key=first")
    expect(rows(page)).to_have_count(1)
    first = rows(page).first.get_attribute("id")
    town.settled([town.note(key="first") for _ in range(2)])
    _refreshed(page)
    notice = page.get_by_role("button", name="2 new")
    expect(notice).to_be_visible()
    expect(rows(page)).to_have_count(1)
    expect(rows(page).first).to_have_id(first or "")
    notice.click()
    expect(rows(page)).to_have_count(3)


def test_what_is_ticked_stays_ticked(page: Page, town: Town) -> None:
    """While rows are selected nothing is refreshed; after that it goes on."""
    ids = [town.note("rust") for _ in range(3)]
    town.settled(ids)
    _open(page, "inbox?error=rust")
    box = page.get_by_role("checkbox", name=f"Select message {ids[1]}")
    box.check()
    expect(page.get_by_text("paused: 1 selected")).to_be_visible()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for _ in range(3):
        _wait(page, 60)
    expect(page.get_by_text("paused: 1 selected")).to_be_visible()
    expect(box).to_be_checked()
    assert not asked
    page.get_by_role("button", name="Clear").click()
    _refreshed(page)
    expect(page.get_by_text("paused")).to_have_count(0)


def test_what_is_there_stays_there(page: Page, town: Town) -> None:
    """The box for all rows and its meaning survive a refresh, and so does what somebody has opened."""
    town.settled([town.note(key="there")])
    _open(page, "messages?key=there")
    every = page.get_by_role("checkbox", name="Select all on this page")
    expect(every).to_be_visible()
    _refreshed(page)
    expect(every).to_be_visible()
    every.check()
    expect(rows(page).get_by_role("checkbox")).to_be_checked()
    every.uncheck()
    _open(page, "")
    table = page.get_by_role("group").filter(has_text="As a table").first
    table.get_by_text("As a table").click()
    _refreshed(page)
    expect(table).to_have_attribute("open", "")


def test_what_is_typed_stays_typed(page: Page, town: Town) -> None:
    """Neither a filter that somebody is filling in nor its cursor is disturbed by what refreshes beside it."""
    town.settled([town.note(key="typed")])
    _open(page, "messages?key=typed")
    topic = page.get_by_role("combobox", name="Topic", exact=True)
    page.get_by_text("More conditions").click()
    topic.fill("half a wo")
    page.get_by_role("heading", level=1).click()
    _refreshed(page)
    expect(topic).to_have_value("half a wo")
    expect(page.get_by_label("Tag")).to_be_visible()
    topic.focus()
    expect(page.get_by_text("paused: you are typing")).to_be_visible()


def test_the_focus_stays_on_the_row(page: Page, town: Town) -> None:
    """Who walks through a table by keys goes on where they were, whatever came meanwhile."""
    town.settled([town.note(key="walk") for _ in range(3)])
    _open(page, "messages?key=walk")
    page.keyboard.press("j")
    page.keyboard.press("j")
    at = rows(page).nth(1)
    expect(at.get_by_role("link").first).to_be_focused()
    _refreshed(page)
    expect(at.get_by_role("link").first).to_be_focused()
    page.keyboard.press("j")
    expect(rows(page).nth(2).get_by_role("link").first).to_be_focused()


def test_a_dialog_stops_it(page: Page, town: Town) -> None:
    """While a question is open, neither it nor what is behind it changes."""
    message = town.note("fog")
    town.becomes(message, "parked")
    _open(page, f"messages/{message}")
    page.get_by_role("button", name="Retry in clerk…").click()
    shown = dialog(page, "Retry in clerk?")
    shown.get_by_label("Reason").fill("the fog has lift")
    expect(page.get_by_text("paused: a dialog is open")).to_be_attached()
    _wait(page, 60)
    expect(shown.get_by_label("Reason")).to_have_value("the fog has lift")
    expect(shown.get_by_label("Reason")).to_be_focused()


def test_off_means_off(page: Page, town: Town) -> None:
    """Who turns it off isn't asked again on the next page, and can refresh by hand."""
    message = town.note("dusk", park=False)
    town.becomes(message, "failed")
    page.goto(f"inbox?message={message}")
    pace(page).select_option("off")
    page.goto(f"inbox?message={message}&group=clerk")
    expect(pace(page)).to_have_value("0")
    town.mended.add("dusk")
    town.hurry(message)
    town.becomes(message, "consumed")
    _wait(page, 600)
    expect(rows(page).first).to_contain_text("failed")
    with page.expect_response(_is_part):
        page.get_by_role("button", name="Refresh now").click()
    expect(rows(page).first).to_contain_text("consumed")


def test_a_console_that_is_away_is_told(page: Page, watches: list[Watch], town: Town) -> None:
    """What is shown stays, marked as old; when the console is back, so is what it shows."""
    watches[-1].expect("ERR_INTERNET_DISCONNECTED|Failed to fetch|uncaught")
    town.settled([town.note(key="away")])
    _open(page, "messages?key=away")
    page.context.set_offline(True)
    _wait(page)
    expect(page.get_by_text("You see its last answer")).to_be_visible()
    expect(rows(page)).to_have_count(1)
    page.context.set_offline(False)
    page.get_by_role("button", name="Refresh now").click()
    expect(page.get_by_text("You see its last answer")).to_be_hidden()
