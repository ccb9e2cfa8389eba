"""Every page in light and in dark, wide and at 390 px: accessible, readable, and never wider than the screen."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import expect

from tests.console.browser.steps import dialog

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
    "messages/{parked_half}",
    "messages/{parked}/do/rollback",
    "messages/{parked}/do/recall",
    "bulk?action=retry&of=inbox&topic=note",
    "bulk?action=rollback&of=messages&topic=transfer",
    "dead",
    "dead?tab=discarded",
    "halves",
    "scheduled",
    "inbox",
    "operations",
    "operations/{running}",
    "operations/{running}/cancel",
    "handlers",
    "audit",
    "system",
    "nothing-here",
]

_RUN = """(rules) => axe.run(document, rules ? {runOnly: {type: "rule", values: rules}} : {resultTypes: ["violations"]})
  .then((found) => found.violations.map((one) =>
    `${one.id} (${one.impact}): ` + one.nodes.map((node) => node.target.join(" ")).join(", ")))"""
_WIDTH = "() => [document.documentElement.scrollWidth, innerWidth]"


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, dict[str, int]]]:
    """How many violations each page has by look; written where OUTBOX_TEST_AXE_SUMMARY says, for who wants to know."""
    counts: dict[str, dict[str, int]] = {}
    yield counts
    if path := os.environ.get("OUTBOX_TEST_AXE_SUMMARY"):
        Path(path).write_text(json.dumps(counts, indent=1))


def axe(page: Page, rules: list[str] | None = None) -> list[str]:
    """Return what axe finds wrong with a page as it is now."""
    if page.evaluate("typeof axe === 'undefined'"):
        page.evaluate(AXE_SCRIPT)
    violations: list[str] = page.evaluate(_RUN, rules)
    return violations


def _at(museum: Museum, path: str) -> str:
    return path.format_map({name: getattr(museum, name) for name in museum.__dataclass_fields__})


@pytest.mark.parametrize("path", PAGES)
def test_every_page(tour: Visit, museum: Museum, watches: list[Watch], found: dict[str, Any], path: str) -> None:
    """No violation and nothing beside the screen, wide and narrow; what a theme changes is contrast."""
    page = tour(museum.console, reduced_motion="reduce")
    watches[-1].expect("404|422")
    page.set_viewport_size(WIDE)
    page.emulate_media(color_scheme="light")
    page.goto(_at(museum, path))
    faults = {"light": axe(page)}
    page.emulate_media(color_scheme="dark")
    faults["dark"] = axe(page, ["color-contrast"])
    page.set_viewport_size(NARROW)
    faults["dark, 390 px"] = axe(page)
    found[path or "overview"] = {look: len(violations) for look, violations in faults.items()}
    assert not any(faults.values()), faults
    wide, screen = page.evaluate(_WIDTH)
    assert wide <= screen


def test_a_question_in_a_dialog(visit: Visit, museum: Museum, found: dict[str, Any]) -> None:
    """It is as accessible over the page as alone, and fits a telephone."""
    page = visit(museum.console, viewport=NARROW, reduced_motion="reduce")
    page.goto(f"messages/{museum.parked}")
    page.get_by_role("button", name="Roll back…").click()
    shown = dialog(page, "Roll back this local transaction?")
    faults = {"light, 390 px": axe(page)}
    page.emulate_media(color_scheme="dark")
    faults["dark, 390 px"] = axe(page)
    found["dialog"] = {look: len(violations) for look, violations in faults.items()}
    assert not any(faults.values()), faults
    box = shown.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= NARROW["width"]


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
    for path in ("messages", "dead", f"messages/{museum.parked}"):
        page.goto(path)
        assert axe(page, ["target-size"]) == []
