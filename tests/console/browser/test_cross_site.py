"""Another site can't make the browser of somebody who is logged in act, nor can a name that is bound to our address."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import UUID

import pytest
from fastapi import FastAPI
from sqlalchemy import text

from outbox.console import AnyOf, Basic, Bearer, Principal, create_console_router, hash_token
from tests.console.browser.conftest import PREFIX, Visit
from tests.console.browser.live import attacker, serving
from tests.console.browser.town import Town
from tests.console.browser.watch import Watch
from tests.kit import wait_until

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Names of this machine: of the console (where no Sec-Fetch-Site is sent, since it is neither TLS nor localhost), of
#: the attacker, and of an attacker who has bound a name to the console's address.
OURS, EVIL, REBOUND = "console.test", "evil.test", "rebound.test"
#: Chromium tells that it ignores a header of ours where there is no TLS, as there isn't in a test.
_NO_TLS = "Cross-Origin-Opener-Policy"
TOKEN = "a-token-of-sixteen-or-more-letters"  # noqa: S105


@dataclass
class Seen:
    """What an application was asked: method, path, whether who asked could be told, and the answer."""

    app: ASGIApp
    asked: list[tuple[str, str, bool, int]] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = dict(scope["headers"])
                known = b"authorization" in headers or b"outbox_console" in headers.get(b"cookie", b"")
                self.asked.append((scope["method"], scope["path"], known, message["status"]))
            await send(message)

        await self.app(scope, receive, note if scope["type"] == "http" else send)

    def posts(self) -> list[tuple[bool, int]]:
        """Return of each POST whether who asked could be told, and the answer."""
        return [(known, status) for method, _, known, status in self.asked if method == "POST"]


@dataclass(frozen=True)
class Target:
    """A console under two names, somebody's message in it, and what it was asked."""

    port: int
    seen: Seen
    town: Town
    message: UUID

    def at(self, host: str) -> str:
        """Return where the console is under a name."""
        return f"http://{host}:{self.port}{PREFIX}"

    def acts(self) -> int:
        """Return how many acts are on record in both banks."""
        with self.town.a.connect() as a, self.town.b.connect() as b:
            return sum(one.execute(text("SELECT count(*) FROM outbox.audit")).scalar_one() for one in (a, b))


@pytest.fixture(scope="module")
def target(town: Town, passwords: Basic) -> Iterator[Target]:
    """A console for people with passwords and with tokens, and a message that could be sent again."""
    message = town.note()
    town.becomes(message, "consumed")
    app = FastAPI()
    authorizer = AnyOf(passwords, Bearer({hash_token(TOKEN): Principal.of("anna", "admin")}))
    router = create_console_router(
        {"bank_a": town.a, "bank_b": town.b}, authorizer=authorizer, allowed_hosts=["127.0.0.1", OURS]
    )
    app.include_router(router, prefix=PREFIX)
    seen = Seen(app)
    with serving(seen) as port:
        yield Target(port, seen, town, message)


def _evil(action: str) -> dict[str, str]:
    # As plain text it is JSON: {"reason": "gotcha="}.
    fields = '<input name="{&quot;reason&quot;: &quot;gotcha" value="&quot;}">'
    return {
        "/form": f'<form method="post" action="{action}">{fields}</form>',
        "/plain": f'<form method="post" enctype="text/plain" action="{action}">{fields}</form>',
        "/frame": f'<iframe name="in"></iframe><form method="post" target="in" action="{action}">{fields}</form>',
        "/script": "<p>nothing to see here</p>",
    }


_SUBMIT = "document.forms[0].submit()"
#: What is sent, and whether Chromium sends the password with it: it does with pages, but keeps passwords apart for
#: what other sites embed.
_CASES = {
    "form": ("/form", _SUBMIT, True),
    "form of plain text": ("/plain", _SUBMIT, True),
    "form in a frame": ("/frame", _SUBMIT, False),
    "fetch without CORS": (
        "/script",
        "fetch(WHERE, {method: 'POST', mode: 'no-cors', credentials: 'include',"
        " body: new URLSearchParams({reason: 'x'})}).catch(() => null)",
        False,
    ),
    "beacon": ("/script", "navigator.sendBeacon(WHERE, new URLSearchParams({reason: 'x'}))", False),
}


@pytest.mark.parametrize("host", ["127.0.0.1", OURS])
@pytest.mark.parametrize("case", _CASES)
def test_what_another_site_sends_is_refused(
    visit: Visit, watches: list[Watch], target: Target, host: str, case: str
) -> None:
    """With the password of somebody who is logged in, by each way that a page can send without asking first."""
    console = target.at(host)
    act = f"{console}/messages/{target.message}/do/resend"
    page = visit(console)
    page.goto("messages")
    path, script, with_password = _CASES[case]
    before, asked = target.acts(), len(target.seen.posts())
    with attacker(_evil(act)) as port:
        watches[-1].allow_origin(f"http://{EVIL}:{port}")
        watches[-1].expect("403|net::ERR_BLOCKED_BY|chrome-error:|favicon|frame-ancestors|X-Frame-Options")
        watches[-1].expect(_NO_TLS)
        page.goto(f"http://{EVIL}:{port}{path}")
        page.evaluate(script.replace("WHERE", repr(act)))
        wait_until(lambda: len(target.seen.posts()) > asked, "the browser sends it")
    assert target.seen.posts()[-1] == (with_password, 403)
    assert target.acts() == before


def test_a_cookie_is_of_no_use_to_another_site(visit: Visit, watches: list[Watch], target: Target) -> None:
    """Who has logged in by a page has a cookie; other sites can't send it, and are refused all the same."""
    console = target.at(OURS)
    page = visit(console, user=None)
    page.goto("login")
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Log in").click()
    page.goto("messages")
    assert page.get_by_role("heading", name="Messages").is_visible()
    act = f"{console}/messages/{target.message}/do/resend"
    before, asked = target.acts(), len(target.seen.posts())
    with attacker(_evil(act)) as port:
        watches[-1].allow_origin(f"http://{EVIL}:{port}")
        watches[-1].expect(f"403|MIME|favicon|{_NO_TLS}")
        page.goto(f"http://{EVIL}:{port}/form")
        page.evaluate(_SUBMIT)
        wait_until(lambda: len(target.seen.posts()) > asked, "the browser sends it")
    assert target.seen.posts()[-1] == (False, 403)
    assert target.acts() == before


def test_json_from_another_site_is_never_sent(visit: Visit, watches: list[Watch], target: Target) -> None:
    """The API takes JSON only, for which a browser asks first; the console doesn't say yes, so nothing is sent."""
    console = target.at(OURS)
    page = visit(console)
    page.goto("messages")
    before, asked = target.acts(), len(target.seen.posts())
    with attacker(_evil("")) as port:
        watches[-1].allow_origin(f"http://{EVIL}:{port}")
        watches[-1].expect(f"CORS|net::ERR_FAILED|405|401|403|favicon|{_NO_TLS}")
        page.goto(f"http://{EVIL}:{port}/script")
        answer = page.evaluate(
            "(url) => fetch(url, {method: 'POST', credentials: 'include', body: '{}',"
            " headers: {'Content-Type': 'application/json'}}).then(() => 'sent', (error) => error.name)",
            f"{console}/api/v1/messages/{target.message}/resend",
        )
    assert answer == "TypeError"
    assert len(target.seen.posts()) == asked
    assert target.acts() == before


def test_links_of_another_site_change_nothing(visit: Visit, watches: list[Watch], target: Target) -> None:
    """Whatever a picture or a link can ask for only looks; and the console can't be put into a frame."""
    console = target.at(OURS)
    paths = [f"messages/{target.message}/do/resend", "bulk?action=resend&of=messages&topic=note", "logout"]
    page = visit(console)
    page.goto("messages")
    before = target.acts()
    pictures = "".join(f'<img src="{console}/{path}" alt="">' for path in paths)
    with attacker({"/": f'{pictures}<iframe src="{console}/messages"></iframe>'}) as port:
        watches[-1].allow_origin(f"http://{EVIL}:{port}")
        watches[-1].expect(f"net::ERR_BLOCKED|favicon|frame-ancestors|40[1345]|{_NO_TLS}")
        page.goto(f"http://{EVIL}:{port}/")
        frame = page.frames[1]
        assert frame.get_by_role("heading", name="Messages").count() == 0
    assert target.acts() == before


def test_a_name_bound_to_our_address_is_refused(visit: Visit, watches: list[Watch], target: Target) -> None:
    """DNS rebinding: to the browser the attacker's page and the console are one origin; the host gives it away."""
    page = visit(target.at(REBOUND))
    watches[-1].expect(f"403|MIME|favicon|{_NO_TLS}")
    before = target.acts()
    shown = page.goto("messages")
    assert shown is not None
    assert shown.status == 403
    assert "rebound.test" in page.content()
    assert str(target.message) not in page.content()
    status = page.evaluate(
        "(url) => fetch(url, {method: 'POST', body: new URLSearchParams({reason: 'x'})}).then((got) => got.status)",
        f"{target.at(REBOUND)}/messages/{target.message}/do/resend",
    )
    assert status == 403
    assert target.acts() == before
