"""Questions in the dialog: a moment is picked, what it would do is shown, and what is wrong stays there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Route, expect
from sqlalchemy import Engine

from outbox.testing import drain
from tests.console.browser.conftest import Serve, Visit
from tests.console.browser.steps import dialog, told
from tests.console.browser.town import CLERK, Town, a_town

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

    from tests.console.browser.watch import Watch


@pytest.fixture(scope="module")
def idle(fresh_engine: Callable[[], Engine]) -> Iterator[Town]:
    """A town whose clerk has read three notes, and that has no workers."""
    with a_town(fresh_engine) as town:
        for _ in range(3):
            town.note()
        drain(town.bank_a, town.bank_b)
        yield town


@pytest.fixture
def groups(idle: Town, serve: Serve, visit: Visit) -> Page:
    """The page of the groups."""
    page = visit(serve(idle))
    page.goto("groups")
    return page


def ask(page: Page, act: str) -> Locator:
    """Open the question of an act on the clerk, by two clicks; return its dialog."""
    page.get_by_role("row", name=CLERK).get_by_role("button", name="Acts on").click()
    page.get_by_role("button", name=act).click()
    return dialog(page, re.compile(f"group {CLERK}"))


def passages(town: Town) -> int:
    """How often the clerk was moved."""
    (row,) = (each for each in town.operator.groups() if each.group == CLERK)
    return row.passages


def test_a_group_is_reset_to_yesterday_by_three_clicks(groups: Page, idle: Town) -> None:
    """Two open the question with what it would do; the third does it. Other moments show what they would do there."""
    before = passages(idle)
    asked = ask(groups, "Reset…")
    expect(asked).to_contain_text("Messages3")
    asked.get_by_label("Reason").fill("the forms of yesterday were wrong")
    asked.get_by_role("button", name="Reset", exact=True).click()
    told(groups, "Reset: the group reads on from there.")
    assert passages(idle) == before + 1
    asked = ask(groups, "Skip…")
    expect(asked).to_contain_text("Messages3")
    asked.get_by_role("button", name="start of today").click()
    expect(asked).to_contain_text("Totoday")
    asked.get_by_label("UTC").fill("2020-01-01T12:00:00")
    asked.get_by_role("button", name="Show").click()
    expect(asked).to_contain_text("there already")
    assert passages(idle) == before + 1


def test_what_is_wrong_stays_in_the_dialog(groups: Page, idle: Town, watches: list[Watch]) -> None:
    """Another operator was faster: the question says so where it was asked, and nothing is lost of what was typed."""
    watches[-1].expect("409")
    asked = ask(groups, "Pause…")
    idle.operator.pause_group(CLERK, by="otto", why="the office is closed")
    asked.get_by_label("Reason").fill("the office moves")
    asked.get_by_role("button", name="Pause", exact=True).click()
    expect(asked.get_by_role("alert")).to_contain_text("it is paused already")
    expect(asked.get_by_label("Reason")).to_have_value("the office moves")
    assert groups.url.endswith("/groups")
    groups.keyboard.press("Escape")
    expect(groups.get_by_role("row", name=CLERK).get_by_role("button", name="Acts on")).to_be_focused()
    idle.operator.resume_group(CLERK, by="otto", why="it is open")


def test_a_console_that_is_away_is_said_in_the_dialog(groups: Page, idle: Town, watches: list[Watch]) -> None:
    """The form stays as it is, and can be sent again."""
    watches[-1].expect("ERR_FAILED")
    asked = ask(groups, "Pause…")
    asked.get_by_label("Reason").fill("the office moves")

    def cut(route: Route) -> None:
        route.abort()

    groups.route("**/acts/pause_group", cut)
    asked.get_by_role("button", name="Pause", exact=True).click()
    expect(asked.get_by_role("alert")).to_contain_text("be reached")
    groups.unroute("**/acts/pause_group", cut)
    asked.get_by_role("button", name="Pause", exact=True).click()
    told(groups, "Paused: workers begin nothing")
    idle.operator.resume_group(CLERK, by="otto", why="it is open")
