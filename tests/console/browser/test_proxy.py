"""Behind a proxy that takes a prefix off the path: every link, form and file leads back through it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

import pytest
from playwright.sync_api import expect

from outbox.console import Bearer, Principal, create_console_app, hash_token
from tests.console.browser.live import serving, stripping_proxy
from tests.console.browser.steps import carried_out, dialog, order_rollback

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.console.browser.conftest import Visit
    from tests.console.browser.town import Town

PREFIX = "/tools/outbox"
TOKEN = "a-token-of-sixteen-or-more-letters"  # noqa: S105

_LINKS = """() => ["href", "action", "src", "hx-get", "hx-post"].flatMap((name) =>
  [...document.querySelectorAll(`[${name}]`)].map((at) => at.getAttribute(name)))"""


@dataclass
class Outside:
    """The console as the browser sees it, and what was asked for beside the prefix."""

    at: str = ""
    strays: list[str] = field(default_factory=list)


@pytest.fixture(scope="module", params=["told by the proxy", "told by root_path"])
def outside(request: pytest.FixtureRequest, town: Town) -> Iterator[Outside]:
    """A console of its own that knows its prefix by one of two ways."""
    by_proxy = request.param == "told by the proxy"
    options: dict[str, Any] = {"trusted_proxies": ["127.0.0.1"]} if by_proxy else {"root_path": PREFIX}
    authorizer = Bearer({hash_token(TOKEN): Principal.of("anna", "admin")})
    told = {"X-Forwarded-Prefix": PREFIX} if by_proxy else {}
    found = Outside()
    with (
        serving(create_console_app(town.databases, authorizer=authorizer, **options), proxy_headers=False) as port,
        stripping_proxy(PREFIX, port, told, found.strays) as outer,
    ):
        found.at = f"http://127.0.0.1:{outer}{PREFIX}"
        yield found


@pytest.fixture
def page(visit: Visit, outside: Outside) -> Page:
    """The console through the proxy, logged in."""
    page = visit(outside.at, user=None)
    page.goto("")
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Log in").click()
    expect(page).to_have_url(outside.at + "/")
    return page


def test_every_link_leads_back(page: Page, outside: Outside, town: Town) -> None:
    """From the overview by every link to every page, each answered, none asked for beside the prefix."""
    message = town.transfer("1.00", "BB-502")
    town.becomes(message, "parked")
    todo, seen = ["messages", f"messages/{message}", "dead", ""], set[str]()
    while todo and len(seen) < 40:
        page.goto(todo.pop())
        for link in page.evaluate(_LINKS):
            where = urlsplit(urljoin(page.url, link))
            assert not urlsplit(link).netloc, f"{link} on {page.url} names a host"
            assert where.path == PREFIX or where.path.startswith(PREFIX + "/"), f"{link} on {page.url}"
            below = where.path.removeprefix(PREFIX).lstrip("/")
            kind = "/".join(below.split("/")[:1])
            if kind not in {*seen, "static", "api", "logout", "jump", "bulk"}:
                seen.add(kind)
                todo.append(below + (f"?{where.query}" if where.query else ""))
    assert {"messages", "dead", "halves", "scheduled", "inbox", "bulk-jobs", "handlers", "audit", "system"} <= seen
    assert outside.strays == []


def test_every_form_leads_back(page: Page, outside: Outside, town: Town) -> None:
    """The jump box, a question in a dialog, a refresh, a rollback, the file of the audit, and logging out."""
    before = town.balance()
    message = town.transfer("5.00", "BB-503")
    town.becomes(message, "parked")
    page.goto("messages")
    page.get_by_role("searchbox").fill(str(message))
    page.get_by_role("searchbox").press("Enter")
    expect(page).to_have_url(f"{outside.at}/messages/{message}")
    page.get_by_role("button", name="Retry in bank-b…").click()
    asked = dialog(page, "Retry in bank-b?")
    asked.get_by_role("link", name="Cancel").or_(asked.get_by_role("button", name="Cancel")).click()
    with page.expect_response(lambda response: "hx-request" in response.request.headers) as refreshed:
        page.get_by_role("button", name="Refresh now").click()
    assert refreshed.value.ok
    order_rollback(page, message, "BB-503", "no such account")
    expect(carried_out(page, town)).to_contain_text("1 of 1")
    assert town.balance() == before
    page.goto("audit")
    with page.expect_download() as download:
        page.get_by_role("link", name="As CSV").click()
    assert "no such account" in download.value.path().read_text()
    page.get_by_role("button", name="Log out").click()
    expect(page).to_have_url(f"{outside.at}/login")
    assert outside.strays == []
