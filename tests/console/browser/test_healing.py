"""The two ways to heal: try again what failed, and roll back what can't succeed. Real workers carry them out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from tests.console.browser.steps import carried_out, dialog, entry, order_rollback, row, told
from tests.console.browser.town import KNOWN, OPENING, a_town
from tests.kit import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page
    from sqlalchemy import Engine

    from tests.console.browser.conftest import Serve
    from tests.console.browser.town import Town
    from tests.console.browser.watch import Watch


@pytest.fixture(scope="module")
def town(fresh_engine: Callable[[], Engine]) -> Iterator[Town]:
    """A town of this module's own: at its end all the money is counted."""
    with a_town(fresh_engine) as town, town.at_work():
        yield town


@pytest.fixture(scope="module")
def console(town: Town, serve: Serve) -> str:
    """Where its console is served."""
    return serve(town)


def test_a_group_is_tried_then_retried(page: Page, town: Town) -> None:
    """The account is opened late: one is tried first, it works, then all others; each is credited once."""
    parked = [town.transfer("10.00", f"BB-7{number}") for number in range(4)]
    for each in parked:
        town.becomes(each, "parked")
    for number in range(4):
        town.open_account(f"BB-7{number}")

    page.goto("dead")
    group = page.get_by_role("region", name=re.compile("no account"))
    expect(group).to_contain_text("4")
    group.get_by_role("button", name="Retry one as a trial…").click()
    asked = dialog(page, "Retry in bank-b?")
    asked.get_by_label("Reason").fill("the account is open now")
    asked.get_by_role("button", name="Retry", exact=True).click()
    told(page, "It will be tried again as soon as a worker comes to it.")
    wait_until(lambda: "consumed" in map(town.status, parked), "the trial is credited")
    page.reload()
    expect(page.get_by_role("region", name="Consumers")).to_contain_text("consumed")

    page.goto("dead")
    group.get_by_role("button", name="Retry all…").click()
    asked = dialog(page, "Retry 3 of 3?")
    asked.get_by_label("Reason").fill("the trial went well")
    asked.get_by_role("button", name="Retry 3").click()
    told(page, "Ordered. Workers carry it out.")
    progress = carried_out(page, town)
    expect(progress).to_contain_text("3 of 3")
    expect(progress).to_contain_text("the trial went well")
    for number, each in enumerate(parked):
        town.becomes(each, "consumed")
        assert town.credited(f"BB-7{number}") == Decimal("10.00")
    page.goto("dead")
    expect(page.get_by_role("main")).to_contain_text("No dead letters")


def test_a_rollback_brings_the_money_back(page: Page, town: Town) -> None:
    """The seed's case: the transfer can't arrive, the sender gets the money back, once; and who did it, and why."""
    before = town.balance()
    message = town.transfer("250.00", "BB-404")
    town.becomes(message, "parked")
    assert town.balance() == before - 250

    order_rollback(page, message, "BB-404", "the account does not exist")
    progress = carried_out(page, town)
    expect(progress).to_contain_text("1 of 1")
    expect(progress.get_by_title("all of it was done").first).to_be_visible()
    assert town.balance() == before
    assert town.status(message) == "quarantined"

    page.goto(f"messages/{message}")
    expect(page.get_by_role("region", name="Status", exact=True)).to_contain_text(
        "ordered by anna: the account does not exist"
    )
    # Even if the account comes into being, the transfer can't be credited any more, nor refunded again.
    town.open_account("BB-404")
    expect(page.get_by_role("button", name="Compensate…")).to_have_count(0)
    expect(page.get_by_role("button", name="Retry")).to_have_count(0)
    page.goto(f"audit?target={message}&action=compensate")
    undone = entry(page, "anna").first
    expect(undone).to_contain_text("the account does not exist")
    expect(undone).to_contain_text("refund")
    assert town.credited("BB-404") == 0


def test_a_delivered_transfer_needs_more_than_a_click(page: Page, town: Town) -> None:
    """It took effect: the question says so, and the rollback goes on only with the box ticked."""
    before = town.balance()
    message = town.transfer("10.00")
    town.becomes(message, "consumed")
    page.goto(f"messages/{message}")
    page.get_by_role("button", name="Compensate…").click()
    asked = dialog(page, "Compensate this local transaction?")
    expect(asked).to_contain_text("It took effect already in bank-b")
    asked.get_by_label("to go on").fill("BB-1")
    asked.get_by_label("Reason").fill("sent twice by the branch")
    asked.get_by_role("button", name="Compensate", exact=True).click()
    assert asked.get_by_role("checkbox").evaluate("box => box.validity.valueMissing")
    asked.get_by_role("checkbox").check()
    asked.get_by_role("button", name="Compensate", exact=True).click()
    expect(carried_out(page, town)).to_contain_text("1 of 1")
    assert town.balance() == before


def test_the_wrong_word_stops_a_rollback(page: Page, town: Town, watches: list[Watch]) -> None:
    """Who types something else is asked again, with the reason kept, and nothing is ordered."""
    watches[-1].expect("422")
    message = town.transfer("1.00", "BB-999")
    town.becomes(message, "parked")
    page.goto(f"messages/{message}/do/compensate")
    page.get_by_label("to go on").fill("BB-1")
    page.get_by_label("Reason").fill("a slip")
    page.get_by_role("button", name="Compensate", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("BB-999")
    expect(page.get_by_label("Reason")).to_have_value("a slip")
    assert town.status(message) == "parked"


def test_one_message_is_parked_discarded_and_restored(page: Page, town: Town) -> None:
    """The small acts, each told, each on record with its reason; what is discarded is out of the dead letters."""
    message = town.note("a smudge", park=False)
    town.becomes(message, "failed")
    for button, status in (
        ("Park in clerk…", "parked"),
        ("Discard in clerk…", "discarded"),
        ("Restore in clerk…", "parked"),
    ):
        page.goto(f"messages/{message}")
        page.get_by_role("button", name=button).click()
        asked = dialog(page, re.compile("clerk"))
        asked.get_by_label("Reason").fill(f"to {button.split()[0].lower()} it")
        asked.get_by_role("button", name=button.split()[0], exact=True).click()
        expect(page.get_by_role("region", name="Audit")).to_contain_text(f"to {button.split()[0].lower()} it")
        assert town.status(message) == status


def test_a_half_is_decided_by_hand(page: Page, town: Town) -> None:
    """Whose producer never came back: found among the halves, committed with a reason, sent and consumed."""
    half = town.prepare("note")
    page.goto("halves?topic=note")
    row(page, str(half)[-8:]).get_by_role("link").click()
    page.get_by_role("button", name="Commit…").click()
    asked = dialog(page, "Commit?")
    asked.get_by_label("Reason").fill("the branch has the paper")
    asked.get_by_role("button", name="Commit", exact=True).click()
    told(page, "Committed: the message goes out.")
    town.becomes(half, "consumed")
    page.goto(f"audit?target={half}")
    expect(entry(page, "the branch has the paper").first).to_contain_text("anna")
    page.goto("halves?topic=note")
    expect(page.get_by_role("main")).to_contain_text("Nothing fits this filter")


def test_a_scheduled_message_is_recalled(page: Page, town: Town) -> None:
    """Taken out of the schedule before its time; it never comes, and stands among the recalled."""
    message = town.note(delay=3600.0, key="too early")
    page.goto("scheduled")
    row(page, "too early").get_by_role("link").click()
    page.wait_for_load_state()  # before its script runs, the button leads to a page of its own
    page.get_by_role("button", name="Recall…").click()
    asked = dialog(page, "Recall?")
    asked.get_by_label("Reason").fill("next week")
    asked.get_by_role("button", name="Recall", exact=True).click()
    told(page, "Recalled: the message isn't delivered.")
    page.goto("scheduled?recalled=yes")
    expect(row(page, "too early")).to_contain_text("anna")
    expect(row(page, str(message)[-8:])).to_have_count(1)


def test_a_body_is_revealed_on_record(page: Page, town: Town) -> None:
    """An admin may see what is masked; that they did is in the audit."""
    message = town.note(body={"password": "swordfish"})
    page.goto(f"messages/{message}")
    body = page.get_by_role("region", name="Body")
    expect(body).not_to_contain_text("swordfish")
    body.get_by_role("button", name="Reveal").click()
    expect(body).to_contain_text("swordfish")
    page.goto(f"audit?target={message}")
    expect(entry(page, "reveal").first).to_contain_text("anna")


def test_all_the_money_is_somewhere(town: Town) -> None:
    """Whichever tests came before: what the sender has, bank B has credited, and is parked, add up."""
    refunded = town.refunded()
    consumed = {message for message in town.transfers if town.status(message) == "consumed"}
    receivers = [KNOWN, "BB-404", "BB-999", *(f"BB-7{number}" for number in range(4))]
    assert sum(map(town.credited, receivers)) == sum(town.transfers[message] for message in consumed)
    debited = sum(amount for message, amount in town.transfers.items() if message not in refunded)
    assert town.balance() + debited == OPENING
