"""Many at once: chosen by hand or by a filter, shown before it happens, watched while it does, stopped if it must."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from playwright.sync_api import expect

from tests.console.browser.steps import carried_out, dialog, entry, pace, row, rows, told
from tests.console.browser.town import a_town
from tests.kit import wait_until

if TYPE_CHECKING:
    from uuid import UUID

    from playwright.sync_api import Page
    from sqlalchemy import Engine

    from tests.console.browser.conftest import Serve, Visit
    from tests.console.browser.town import Town


def _parked(town: Town, count: int, trouble: str) -> list[UUID]:
    ids = [town.note(trouble, key=trouble) for _ in range(count)]
    town.settled(ids)
    return ids


def test_a_selection_is_previewed_and_done(page: Page, town: Town) -> None:
    """Three of five are ticked; the preview says which and how many; only these are discarded."""
    ids = _parked(town, 5, "ink ran out")
    page.goto("inbox?status=parked&error=ink")
    expect(rows(page)).to_have_count(5)
    for each in ids[:3]:
        page.get_by_role("checkbox", name=f"Select message {each}").check()
    bar = page.get_by_role("form", name="Do something with the selected rows")
    expect(bar).to_contain_text("3 selected")
    bar.get_by_role("button", name="Discard…").click()
    asked = dialog(page, "Discard 3 of 3?")
    expect(asked.get_by_role("link", name=str(ids[0])[-8:])).to_be_visible()
    asked.get_by_label("Reason").fill("not worth the paper")
    asked.get_by_role("button", name="Discard 3").click()
    told(page, "Ordered. Workers carry it out.")
    expect(carried_out(page, town)).to_contain_text("3 of 3")
    assert sorted(town.status(each) or "" for each in ids) == ["discarded"] * 3 + ["parked"] * 2
    page.goto("dead?tab=discarded")
    expect(row(page, "ink ran out")).to_have_count(3)


def test_a_filter_selects_more_than_a_page(page: Page, town: Town) -> None:
    """All that fit, beyond what the page shows; what can't be done is counted with the reason before it starts."""
    ids = _parked(town, 7, "wrong stamp")
    town.mended.add("wrong stamp")
    page.goto("inbox?error=stamp&size=3")
    expect(rows(page)).to_have_count(3)
    page.get_by_role("checkbox", name="Select all on this page").check()
    bar = page.get_by_role("form", name="Do something with the selected rows")
    bar.get_by_label("that the filter fits").check()
    bar.get_by_role("button", name="Retry…").click()
    asked = dialog(page, "Retry 7 of 7?")
    asked.get_by_label("Reason").fill("stamps came")
    asked.get_by_role("button", name="Retry 7").click()
    expect(carried_out(page, town)).to_contain_text("7 of 7")
    for each in ids:
        town.becomes(each, "consumed")
    # Once more, what can't be done any more: it is counted, with the reason, and there is nothing to click.
    page.goto(f"bulk?action=retry&of=inbox&message={ids[0]}")
    expect(page.get_by_role("heading", name="Retry 0 of 1?")).to_be_visible()
    expect(page.get_by_role("main")).to_contain_text("1: it is consumed")
    expect(page.get_by_role("button", name=re.compile("^Retry"))).to_have_count(0)


def test_progress_shows_without_reload_and_can_be_cancelled(
    visit: Visit, serve: Serve, fresh_engine: Callable[[], Engine]
) -> None:
    """It waits for a worker, moves on by itself as one comes, and what is left of it can be cancelled."""
    with a_town(fresh_engine) as town:
        with town.at_work():
            ids = _parked(town, 40, "no pen")
        page = visit(serve(town))
        page.goto("bulk?action=retry&of=inbox&error=pen")
        page.get_by_label("Reason").fill("found a pencil")
        page.get_by_label("At most so many a second").fill("2")
        page.get_by_role("button", name="Retry 40").click()
        progress = page.get_by_role("region", name="Progress")
        expect(progress).to_contain_text("0 of 40")
        expect(progress).to_contain_text("A worker with the role bulk takes it up.")
        pace(page).select_option("every 2 s")
        with town.at_work():
            expect(progress).to_contain_text(re.compile(r"(?<!\d)([1-9]|[12]\d) of 40"))
            page.get_by_role("button", name="Cancel the rest…").click()
            asked = dialog(page, "Cancel the open items?")
            asked.get_by_label("Reason").fill("wrong colour")
            asked.get_by_role("button", name="Cancel the rest").click()
            told(page, "Cancelled: the open items are not done.")
            expect(progress).to_contain_text("40 of 40")
            expect(progress).to_contain_text("by anna")
            wait_until(lambda: not [each for each in ids if town.status(each) == "failed"], "those retried are tried")
        page.goto(urlsplit(page.url)._replace(query="state=cancelled", fragment="").geturl())
        expect(rows(page).first).to_contain_text("cancelled")
        page.goto("audit?action=bulk")
        expect(entry(page, "wrong colour").first).to_contain_text("anna")


def test_a_mixed_selection_is_asked_for_its_database(page: Page, town: Town) -> None:
    """What can't be done to some of the selected is told with the reason, and the others are done."""
    first, second = _parked(town, 2, "torn")
    town.mended.add("torn")
    page.goto("inbox?topic=note&status=parked&error=torn")
    for each in (first, second):
        page.get_by_role("checkbox", name=f"Select message {each}").check()
    town.bank_b.operator.retry(first, group="clerk", by="otto", why="meanwhile")
    town.becomes(first, "consumed")
    page.get_by_role("button", name="Retry…").click()
    asked = dialog(page, "Retry 1 of 2?")
    expect(asked).to_contain_text("1: it is consumed")
    asked.get_by_label("Reason").fill("the other one")
    asked.get_by_role("button", name="Retry 1").click()
    expect(carried_out(page, town)).to_contain_text("2 of 2")
    town.becomes(second, "consumed")
