"""Every page in light and in dark, wide and at 390 px: accessible, readable, and never wider than the screen."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import expect

from tests.console.browser.steps import dialog
from tests.kit.effort import EFFORT

if TYPE_CHECKING:
    from playwright.sync_api import Page, ViewportSize

    from tests.console.browser.conftest import Visit
    from tests.console.browser.museum import Museum
    from tests.console.browser.watch import Watch

WIDE: ViewportSize = {"width": 1280, "height": 900}
NARROW: ViewportSize = {"width": 390, "height": 844}

#: Every kind of page; ``{name}`` is an id of the museum.
PAGES = [
    "",
    "?window=7d",
    "messages",
    "messages?topic=nothing",
    "messages?header=nonsense",
    "messages/{rolled_back}",
    "messages/{hostile}",
    "messages/{failing}",
    "messages/{parked}",
    "messages/{parked_half}",
    "messages/{rolled_back}/conversation",
    "messages/{hostile}/conversation",
    "messages/{parked}/do/compensate",
    "messages/{parked}/do/recall",
    "bulk?action=retry&of=inbox&topic=note",
    "bulk?action=compensate&of=messages&topic=transfer",
    "dead",
    "dead?tab=discarded",
    "halves",
    "scheduled",
    "inbox",
    "bulk-jobs",
    "bulk-jobs/{running}",
    "bulk-jobs/{retried}",
    "bulk-jobs/{running}/cancel",
    "sagas",
    "sagas?overdue=yes",
    "sagas/{flow}",
    "acts/answer?command={doubtful}",
    "reconciliations",
    "reconciliations?topic=nothing",
    "reconciliations/{run}",
    "reconciliations/{run}?kind=parked&left=yes",
    "reconciliations/{run}/findings/{hostile}",
    "acts/repair?run_id={run}&kind=parked&repair=retry",
    "acts/repair?run_id={run}",
    "acts/reconcile?schedule=nightly&dry_run=yes",
    "groups",
    "handlers",
    "audit",
    "system",
    "nothing-here",
]

#: How a page can look. Two of them see each theme and each width, which is enough for every night. By day axe judges a
#: page in one of the two, by turns: what it is made of is on other pages, too.
LOOKS: dict[str, tuple[ViewportSize, Literal["light", "dark"]]] = {
    "light": (WIDE, "light"),
    "dark": (WIDE, "dark"),
    "light, 390 px": (NARROW, "light"),
    "dark, 390 px": (NARROW, "dark"),
}
EVERY_NIGHT = ("light", "dark, 390 px")
#: The file that is told how many violations each page has in all looks.
SUMMARY = os.environ.get("OUTBOX_TEST_AXE_SUMMARY", "")

_RUN = """(rules) => axe.run(document, {preload: false, resultTypes: ["violations"],
    ...(rules && {runOnly: {type: "rule", values: rules}})})
  .then((found) => found.violations.map((one) =>
    `${one.id} (${one.impact}): ` + one.nodes.map((node) => node.target.join(" ")).join(", ")))"""


_CUT_OFF = """() => [...document.querySelectorAll("table")]
  .map((table) => [table.caption?.textContent, table.getBoundingClientRect().width, table.parentElement.clientWidth])
  .filter(([_, width, room]) => width > room + 1)"""


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, dict[str, int]]]:
    """How many violations each page has by look: all four looks, where OUTBOX_TEST_AXE_SUMMARY names a file for it."""
    counts: dict[str, dict[str, int]] = {}
    yield counts
    if SUMMARY:
        Path(SUMMARY).write_text(json.dumps(counts, indent=1))


def axe(page: Page, rules: list[str] | None = None) -> list[str]:
    """Return what axe finds wrong with a page as it is now."""
    if page.evaluate("typeof axe === 'undefined'"):
        page.evaluate(AXE_SCRIPT)
    violations: list[str] = page.evaluate(_RUN, rules)
    return violations


def fits(page: Page) -> bool:
    """Tell whether nothing of a page is beside the screen."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def _judge(page: Page, found: dict[str, dict[str, int]], name: str, judged: Sequence[str] = EVERY_NIGHT) -> None:
    """Have axe judge a page in these looks, and see that it fits in each that there is."""
    faults = {}
    for look in LOOKS if SUMMARY else EVERY_NIGHT:
        size, theme = LOOKS[look]
        page.set_viewport_size(size)
        page.emulate_media(color_scheme=theme)
        assert fits(page), f"{name} is wider than the screen ({look})"
        if SUMMARY or look in judged:
            faults[look] = axe(page)
    found[name] = {look: len(violations) for look, violations in faults.items()}
    assert not any(faults.values()), faults


@pytest.mark.parametrize(("turn", "path"), list(enumerate(PAGES)), ids=PAGES)
def test_every_page(
    tour: Visit, museum: Museum, watches: list[Watch], found: dict[str, dict[str, int]], turn: int, path: str
) -> None:
    """Nothing is beside the screen at each width, and there is no violation in each theme: by day in one, by turns.

    At 1280 pixels no table needs to be scrolled to the side.
    """
    page = tour(museum.console, reduced_motion="reduce")
    watches[-1].expect("404|422")
    page.set_viewport_size(WIDE)
    page.goto(museum.at(path))
    assert page.evaluate(_CUT_OFF) == []
    _judge(page, found, path or "overview", EVERY_NIGHT if EFFORT > 1 else EVERY_NIGHT[turn % 2 :][:1])


def test_the_overview_is_seen_at_a_glance(visit: Visit, museum: Museum) -> None:
    """A screen and a half at 1280 px, whatever is wrong; what needs attention is at its top, by weight."""
    page = visit(museum.console, viewport=WIDE, reduced_motion="reduce")
    page.goto("")
    assert page.evaluate("document.documentElement.scrollHeight") <= 1.5 * WIDE["height"]
    attention = page.get_by_role("region", name="Needs attention")
    expect(attention.locator("ul").first.locator("> li")).to_have_count(4)
    expect(page.get_by_role("heading", level=2).first).to_have_text("Needs attention")


def test_a_chart_as_a_table_takes_the_whole_line(visit: Visit, museum: Museum) -> None:
    """Beside two other charts it has room for numbers, not for the names of groups."""
    page = visit(museum.console, viewport=WIDE, reduced_motion="reduce")
    page.goto("")
    chart = page.get_by_role("figure").filter(has_text="Lag by group")
    chart.get_by_text("As a table").click()
    expect(chart.get_by_role("table")).to_be_visible()
    line = "figure => figure.getBoundingClientRect().width / figure.parentElement.getBoundingClientRect().width"
    assert chart.evaluate(line) == 1


def test_the_acts_of_a_group_are_in_its_menu(visit: Visit, museum: Museum) -> None:
    """One row a group; its acts open with a key, stand inside the screen, and are gone after Escape."""
    page = visit(museum.console, viewport=WIDE, reduced_motion="reduce")
    page.goto("groups")
    table = page.get_by_role("table", name="Groups, by topic")
    menu = table.get_by_role("row").last.get_by_role("button", name="Acts on")
    menu.focus()
    page.keyboard.press("Enter")
    sheet = page.get_by_role("group", name="Acts on")
    expect(sheet.get_by_role("button")).to_have_count(5)
    assert axe(page) == []
    assert axe(page, ["target-size"]) == []
    box = sheet.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["y"] + box["height"] <= WIDE["height"]
    page.keyboard.press("Escape")
    expect(sheet).to_be_hidden()
    page.keyboard.press("j")
    page.keyboard.press("j")
    expect(table.get_by_role("rowheader").nth(1).get_by_role("link")).to_be_focused()


def test_a_question_in_a_dialog(visit: Visit, museum: Museum, found: dict[str, dict[str, int]]) -> None:
    """It is as accessible over the page as alone, and fits a telephone."""
    page = visit(museum.console, viewport=NARROW, reduced_motion="reduce")
    page.goto(f"messages/{museum.parked}")
    page.get_by_role("button", name="Compensate…").click()
    shown = dialog(page, "Compensate this local transaction?")
    _judge(page, found, "dialog")
    box = shown.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= NARROW["width"]


def test_the_keys_in_a_dialog(visit: Visit, museum: Museum, found: dict[str, dict[str, int]]) -> None:
    """The list of keys is a table to everybody."""
    page = visit(museum.console, reduced_motion="reduce")
    page.goto("messages")
    page.keyboard.press("?")
    dialog(page, "Keyboard")
    _judge(page, found, "keys")


def test_the_themes_differ(visit: Visit, museum: Museum) -> None:
    """The system's theme is followed; the switch overrules it, on the next page as well."""
    page = visit(museum.console, color_scheme="light")
    colours = "() => [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    page.goto("messages")
    light = page.evaluate(colours)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(colours)
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    switch = page.get_by_role("button", name="Theme: auto")
    switch.click()
    expect(page.get_by_role("button", name="Theme: light")).to_be_visible()
    assert page.evaluate(colours) == light
    page.goto("audit")
    assert page.evaluate(colours) == light
    page.keyboard.press("t")
    expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
    page.emulate_media(color_scheme="light")
    assert page.evaluate(colours) == dark


def test_the_navigation_on_a_telephone(visit: Visit, museum: Museum) -> None:
    """It waits behind a button, covers the page, and is gone after Escape."""
    page = visit(museum.console, viewport=NARROW)
    page.goto("messages")
    pages = page.get_by_role("navigation", name="Pages")
    expect(pages).to_be_hidden()
    page.get_by_role("button", name="Menu").click()
    expect(pages).to_be_visible()
    page.keyboard.press("Escape")
    expect(pages).to_be_hidden()
    page.get_by_role("button", name="Menu").click()
    pages.get_by_role("link", name="Audit").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Audit")


def test_fingers_find_what_they_touch(visit: Visit, museum: Museum) -> None:
    """What can be touched is at least 24 px in both directions, or has that much room (WCAG 2.5.8)."""
    page = visit(museum.console, viewport=NARROW, has_touch=True, is_mobile=True)
    for path in ("", "messages", "groups", "dead", f"messages/{museum.parked}"):
        page.goto(path)
        assert axe(page, ["target-size"]) == []


def test_the_form_with_a_body(visit: Visit, museum: Museum, found: dict[str, dict[str, int]]) -> None:
    """It is as accessible as any page, though it isn't had by a link."""
    page = visit(museum.console, reduced_motion="reduce")
    page.goto(f"messages/{museum.parked}")
    page.get_by_role("button", name="Edit and resend…").click()
    expect(page.get_by_role("form", name=f"Edit and resend message {museum.parked}?")).to_be_visible()
    _judge(page, found, "edit")
