"""What was done once isn't done again by going back, reloading or clicking twice; and who looks at old news is told."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

import pytest
from playwright.sync_api import expect
from sqlalchemy import text

from tests.console.browser.steps import carried_out, dialog, rows
from tests.kit import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.console.browser.conftest import Visit
    from tests.console.browser.town import Town
    from tests.console.browser.watch import Watch


@pytest.fixture
def message(town: Town) -> UUID:
    """A message that was sent and consumed."""
    sent = town.note()
    town.becomes(sent, "consumed")
    return sent


def _sends(town: Town, message: UUID) -> int:
    """Return how often the message was sent again."""
    with town.a.connect() as connection:
        query = text("SELECT count(*) FROM outbox.audit WHERE action = 'resend' AND target = :id")
        return int(connection.execute(query, {"id": str(message)}).scalar_one())


def _resend(page: Page, message: UUID) -> None:
    page.goto(f"messages/{message}")
    page.get_by_role("button", name="Resend…", exact=True).click()
    asked = dialog(page, "Resend?")
    asked.get_by_label("Reason").fill("once")
    asked.get_by_role("button", name="Resend", exact=True).click()
    expect(page.get_by_role("region", name="Audit")).to_contain_text("once")


def test_back_and_reload_do_nothing_again(page: Page, town: Town, message: UUID) -> None:
    """After an act, back is the page before, forward and reload the page after; it was done once."""
    _resend(page, message)
    page.reload()
    page.go_back()
    page.go_forward()
    page.reload()
    expect(page.get_by_text("Resent")).to_have_count(0)
    assert _sends(town, message) == 1


def test_a_second_click_does_nothing(page: Page, town: Town, message: UUID) -> None:
    """A form that was sent isn't sent again while its answer is on the way."""
    page.goto(f"messages/{message}/do/resend")
    page.get_by_label("Reason").fill("twice")
    page.get_by_role("button", name="Resend", exact=True).dblclick()
    expect(page.get_by_role("region", name="Audit")).to_contain_text("twice")
    assert _sends(town, message) == 1


def test_two_tabs_and_one_is_late(page: Page, town: Town, message: UUID, watches: list[Watch]) -> None:
    """Both look at the same; the first acts, the second is told that it has changed, and nothing is done."""
    watches[-1].expect("412")
    late = page.context.new_page()
    late.goto(f"messages/{message}")
    late.get_by_role("button", name="Resend…", exact=True).click()
    asked = dialog(late, "Resend?")
    asked.get_by_label("Reason").fill("me too")
    _resend(page, message)
    asked.get_by_role("button", name="Resend", exact=True).click()
    expect(late.get_by_role("dialog")).to_contain_text("changed")
    assert _sends(town, message) == 1
    late.get_by_role("link", name="Back to it").click()
    expect(late.get_by_role("heading", level=1)).to_be_visible()
    late.close()


@pytest.mark.parametrize("script", [True, False], ids=["with a script", "without"])
def test_an_bulk_job_is_ordered_once(tour: Visit, console: str, town: Town, script: bool) -> None:
    """Clicked twice it is one bulk job, by the key in the form; back from it is a new preview, and nothing is done."""
    page = tour(console, java_script_enabled=script)
    sent = [town.note(key=f"ordered {script}") for _ in range(2)]
    town.settled(sent)
    page.goto(f"bulk?action=resend&of=messages&topic=note&key=ordered+{script}")
    page.get_by_label("Reason").fill(f"ordered {script}")
    page.get_by_role("button", name="Resend 2").dblclick()
    page.wait_for_url("**/bulk-jobs/*")
    wait_until(lambda: all(_sends(town, each) for each in sent), "both are sent again")
    page.go_back()
    expect(page.get_by_role("button", name="Resend 2")).to_be_visible()
    page.goto("bulk-jobs")
    expect(rows(page).filter(has_text=f"ordered {script}")).to_have_count(1)
    assert [_sends(town, each) for each in sent] == [1, 1]


def test_what_was_previewed_is_what_runs(page: Page, town: Town, watches: list[Watch]) -> None:
    """What came after the preview isn't in it; what is gone since stops it, with the number there is now."""
    watches[-1].expect("409")
    first, second = ids = [town.note("damp") for _ in range(2)]
    town.settled(ids)
    page.goto("bulk?action=discard&of=inbox&error=damp")
    page.get_by_label("Reason").fill("dried")
    town.bank_b.operator.retry(first, group="clerk", by="otto", why="meanwhile")
    town.mended.add("damp")
    town.becomes(first, "consumed")
    page.get_by_role("button", name="Discard 2").click()
    expect(page.get_by_role("main")).to_contain_text("now 1; look at the preview again")
    assert town.status(second) == "parked"
    page.goto("bulk?action=discard&of=inbox&error=damp&status=parked")
    page.get_by_label("Reason").fill("dried")
    town.mended.remove("damp")
    late = town.note("damp")
    town.becomes(late, "parked")
    page.get_by_role("button", name="Discard 1").click()
    expect(carried_out(page, town)).to_contain_text("1 of 1")
    assert (town.status(second), town.status(late)) == ("discarded", "parked")
