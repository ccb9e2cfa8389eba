"""Who comes in, by which way, and what they are offered there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from outbox.console.app import ConsoleConfig, app_of, authorizer_of
from tests.console.browser.live import serving
from tests.console.browser.test_looks import NARROW, WIDE, axe, fits

if TYPE_CHECKING:
    from tests.console.browser.conftest import Serve, Visit
    from tests.console.browser.museum import Museum
    from tests.console.browser.watch import Watch

#: Buttons that change something, on any page.
_ACTS = re.compile(
    r"^(Resend|Recall|Compensate|Check now|Reset checks|Commit|Roll back|Retry|Park|Discard|Restore|Reveal)"
    r"|^Cancel the rest"
)
_PAGES = (
    *(
        "",
        "messages",
        "messages/{hostile}",
        "messages/{parked}",
        "messages/{parked_half}",
        "dead",
        "dead?tab=discarded",
    ),
    *("halves", "scheduled", "inbox", "bulk-jobs/{running}", "handlers", "audit", "system"),
)


@pytest.fixture(scope="module")
def newcomer(museum: Museum) -> Iterator[tuple[str, str]]:
    """A console without any configuration, as ``outbox console`` serves it: where it is, and its token."""
    urls = {name: engine.url.render_as_string(hide_password=False) for name, engine in museum.town.databases.items()}
    config = ConsoleConfig.from_env(
        {"OUTBOX_CONSOLE_DATABASES": " ".join(f"{name}={url}" for name, url in urls.items())}
    )
    authorizer, token = authorizer_of(config)
    assert token
    with serving(app_of(config, authorizer)) as port:
        yield f"http://127.0.0.1:{port}", token


def test_a_newcomer_logs_in_with_the_token(visit: Visit, newcomer: tuple[str, str]) -> None:
    """Asked for a page, sent to the login, and from there to the page; the token is never in a URL."""
    at, token = newcomer
    page = visit(at, user=None, reduced_motion="reduce")
    page.goto("messages?topic=transfer")
    expect(page).to_have_url(re.compile("/login"))
    expect(page.get_by_label("Token")).to_be_focused()
    assert axe(page) == []
    page.set_viewport_size(NARROW)
    page.emulate_media(color_scheme="dark")
    assert axe(page) == []
    assert fits(page)
    page.set_viewport_size(WIDE)
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Log in").click()
    expect(page).to_have_url(f"{at}/messages?topic=transfer")
    expect(page.get_by_role("navigation", name="Pages")).to_contain_text("admin")
    cookie = page.context.cookies()[0]
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert token not in cookie["value"]
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("Token")).to_be_visible()
    page.goto("messages")
    expect(page.get_by_label("Token")).to_be_visible()


def test_a_wrong_token_opens_nothing(visit: Visit, newcomer: tuple[str, str], watches: list[Watch]) -> None:
    """It is told, without saying what would be right, and the next try may succeed."""
    at, token = newcomer
    page = visit(at, user=None)
    watches[-1].expect("401")
    page.goto("login")
    page.get_by_label("Token").fill(token[:-1])
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_have_text("That isn't a token of this console.")
    assert page.context.cookies() == []
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Overview")


def test_a_wrong_password_opens_nothing(visit: Visit, museum: Museum, watches: list[Watch]) -> None:
    """The browser asks; who doesn't know sees no more than that."""
    page = visit(museum.console, user=None, http_credentials={"username": "anna", "password": "wrong"})
    watches[-1].expect("401|ERR_INVALID_AUTH_CREDENTIALS|ERR_TOO_MANY_RETRIES")
    answer = page.goto("messages")
    assert answer is not None
    assert answer.status == 401
    assert "transfer" not in page.content()


@pytest.mark.parametrize("path", _PAGES)
def test_who_may_only_look_is_offered_nothing_else(tour: Visit, museum: Museum, path: str) -> None:
    """What a viewer can't do isn't there; what a page shows is the same."""
    page = tour(museum.console, "vera")
    page.goto(museum.at(path))
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    expect(page.get_by_role("button", name=_ACTS)).to_have_count(0)


def test_an_operator_is_offered_what_can_be_taken_back(visit: Visit, museum: Museum) -> None:
    """Retry, not rollback; check, not decide."""
    page = visit(museum.console, "otto")
    page.goto(f"messages/{museum.parked}")
    expect(page.get_by_role("button", name="Retry in bank-b…")).to_be_visible()
    expect(page.get_by_role("button", name="Compensate…")).to_have_count(0)
    page.goto(f"messages/{museum.parked_half}")
    expect(page.get_by_role("button", name="Reset checks…")).to_be_visible()
    expect(page.get_by_role("button", name="Commit…")).to_have_count(0)


@pytest.mark.parametrize("path", ["messages/{parked}/do/retry?group=bank-b", "bulk?action=retry&of=inbox&topic=note"])
def test_a_link_to_an_act_is_refused(visit: Visit, museum: Museum, watches: list[Watch], path: str) -> None:
    """Who may only look, and has the address of a question, is told what they lack."""
    page = visit(museum.console, "vera")
    watches[-1].expect("403")
    page.goto(museum.at(path))
    expect(page.get_by_role("main")).to_contain_text("dead:retry")
    expect(page.get_by_role("button", name=_ACTS)).to_have_count(0)


def test_a_console_that_only_reads_says_so(visit: Visit, serve: Serve, museum: Museum) -> None:
    """To an admin as to everybody: the banner is on every page, and no act is offered."""
    page = visit(serve(museum.town, read_only=True, environment="production"))
    for path in ("", "dead", "messages/{parked}", "messages/{hostile}", "inbox", "bulk-jobs/{running}"):
        page.goto(museum.at(path))
        expect(page.get_by_text("Read only")).to_be_visible()
        expect(page.get_by_role("button", name=_ACTS)).to_have_count(0)
    expect(page.get_by_role("navigation", name="Pages")).to_contain_text("production")
