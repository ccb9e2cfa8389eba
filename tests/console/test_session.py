"""Logging in by the page: the cookie, what it is good for, and what it can't be made to do."""

from __future__ import annotations

import base64
import json
import time
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import create_engine

from outbox.console import Basic, Bearer, Principal, hash_password, hash_token
from outbox.console.auth import Throttle
from outbox.console.context import COOKIE
from outbox.errors import InvalidSettings
from outbox.operator.databases import Databases
from outbox.operator.operator import Operator
from tests.console.web import API, Asker, Http, Shop, console_of, token_of

TOKENS = {hash_token("right"): Principal.of("ada", "admin")}


def log_in(http: Http, token: str, **form: str) -> tuple[int, str, str]:
    """Log in; return status, where it leads, and the cookie."""
    answer = http.as_role(None).ask("POST", "/login", data={"token": token, **form})
    return answer.status_code, answer.headers.get("location", ""), answer.headers.get("set-cookie", "")


def opened(sessions: Bearer) -> str:
    """Return the cookie of a new session."""
    cookie, _ = sessions.log_in("right", "here") or ("", None)
    return cookie


def owner(sessions: Bearer, cookie: str | None) -> Principal | None:
    """Return whose session a cookie is, as far as one process knows."""
    session = sessions.session(cookie)
    return session.principal if session else None


def test_a_token_typed_into_the_page_opens_a_session(looking: Http) -> None:
    """The cookie can't be read by scripts nor sent by other sites, and lets in with the role of the token."""
    status, location, cookie = log_in(looking, token_of("operator"), next="/messages?topic=a")
    assert (status, location) == (303, "/messages?topic=a")
    assert {part.strip().lower() for part in cookie.split(";")[1:]} == {
        "httponly", "samesite=strict", "path=/", "max-age=43200"}  # fmt: skip
    answer = looking.as_role(None).get("/meta", headers={"Cookie": cookie.partition(";")[0]})
    assert answer.json()["role"] == "operator"


def test_behind_tls_the_cookie_is_secure(museum: Shop, ask: Asker) -> None:
    """Where the browser speaks TLS, also to a trusted proxy, the cookie isn't sent without."""
    http = ask(console_of(museum.outbox, trusted_proxies=["127.0.0.1"]))
    answer = http.ask("POST", "/login", data={"token": token_of("viewer")}, headers={"X-Forwarded-Proto": "https"})
    assert "secure" in answer.headers["set-cookie"].lower()


def test_a_wrong_token_is_told_on_the_page(looking: Http) -> None:
    """The page says so, and gives no cookie."""
    status, _, cookie = log_in(looking, "wrong")
    assert (status, cookie) == (401, "")


@pytest.mark.parametrize("onward", ["https://evil.test", "//evil.test", "/\\evil.test", "/a\\b", "/a\r\nb", "evil"])
def test_the_login_leads_nowhere_else(looking: Http, onward: str) -> None:
    """Where to go after the login is a path of the console, whatever a link says."""
    assert log_in(looking, token_of("viewer"), next=onward)[1] == "/"
    page = looking.as_role(None).ask("GET", "/login", params={"next": onward}).text
    assert "evil" not in page


def test_pages_send_to_the_login(looking: Http) -> None:
    """Who isn't logged in comes back to where they wanted to; a part of a page sends the whole page there."""
    stranger = looking.as_role(None)
    answer = stranger.ask("GET", "/messages?topic=orders")
    assert (answer.status_code, answer.headers["location"]) == (303, "/login?next=%2Fmessages%3Ftopic%3Dorders")
    part = stranger.ask("GET", "/messages", headers={"HX-Request": "true"})
    assert (part.status_code, part.headers["hx-redirect"]) == (401, "/login")


def test_logging_out_takes_the_cookie_away(looking: Http) -> None:
    """The session ends on the server, so that a copy of the cookie is good for nothing; other sites can't do that."""
    stranger = looking.as_role(None)
    first, second = (log_in(looking, token_of("viewer"))[2].partition(";")[0] for _ in range(2))
    assert stranger.get("/meta", headers={"Cookie": first}).json()["role"] == "viewer"
    answer = stranger.ask("POST", "/logout", headers={"Cookie": first})
    assert answer.status_code == 303
    assert "Max-Age=0" in answer.headers["set-cookie"]
    assert answer.headers["set-cookie"].startswith(first.partition("=")[0])
    assert stranger.get("/meta", headers={"Cookie": first}).status_code == 401
    assert stranger.get("/meta", headers={"Cookie": second}).status_code == 200
    assert looking.ask("POST", "/logout", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403


def test_consoles_on_one_host_do_not_end_each_others_sessions(museum: Shop, ask: Asker) -> None:
    """Browsers send a cookie to all ports of a host and to all paths below: those of two consoles have two names."""
    names = set()
    for base_url, root_path in (("http://localhost:1", ""), ("http://localhost:2", ""), ("http://localhost:1", "/b")):
        http = ask(console_of(museum.outbox), base_url=base_url, root_path=root_path)
        names.add(log_in(http, token_of("viewer"))[2].partition("=")[0])
    assert len(names) == 3


def test_guessing_tokens_is_slowed_down(museum: Shop, ask: Asker) -> None:
    """The page and the header count together; whoever has a right one isn't locked out by others at that address."""
    way = Bearer({hash_token("right"): Principal.of("ada")}, throttle=Throttle(clock=lambda: 0.0))
    http = ask(console_of(museum.outbox, authorizer=way))
    for _ in range(3):
        log_in(http, "wrong")
        http.get("/meta", headers={"Authorization": "Bearer wrong"})
    assert log_in(http, "wrong")[0] == 429
    assert http.get("/meta", headers={"Authorization": "Bearer wrong"}).status_code == 429
    assert log_in(http, "right")[0] == 303
    assert http.get("/meta", headers={"Authorization": "Bearer right"}).status_code == 200
    assert log_in(http, "wrong")[0] == 429


def test_forged_cookies_are_nobody() -> None:
    """Changed, cut, of another key, or nonsense: it is nobody."""
    sessions = Bearer(TOKENS)
    cookie = opened(sessions)
    assert owner(sessions, cookie) == Principal.of("ada", "admin")
    content, _, signature = cookie.partition(".")
    other = base64.urlsafe_b64encode(base64.urlsafe_b64decode(content + "==").replace(b"[", b"[ ")).decode()
    for forged in ("", ".", cookie[:-2], f"{other}.{signature}", f"{content}.", "ä.ö", "x" * 5000, None):
        assert owner(sessions, forged) is None
    assert owner(Bearer(TOKENS), cookie) is None


def test_sessions_end() -> None:
    """With their time, and with their token; a key that is shared keeps them over processes."""
    key = "k" * 32
    cookie = opened(Bearer(TOKENS, session_key=key))
    assert owner(Bearer(TOKENS, session_key=key), cookie) is not None
    assert owner(Bearer({}, session_key=key), cookie) is None
    over = opened(Bearer(TOKENS, session_key=key, seconds=-1))
    assert owner(Bearer(TOKENS, session_key=key), over) is None
    with pytest.raises(InvalidSettings, match="at least 32"):
        Bearer(TOKENS, session_key="short")


def sent_at(cookie: str, moment: float, monkeypatch: pytest.MonkeyPatch, http: Http, **headers: str) -> Any:
    """Return the answer to a request with a cookie at a moment of the console's clock."""
    monkeypatch.setattr("outbox.console.auth.time.time", lambda: moment)
    return http.as_role(None).ask("GET", "/messages", headers={"Cookie": cookie.partition(";")[0], **headers})


def test_a_session_that_is_not_used_ends(museum: Shop, ask: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use keeps it, by a new cookie, as far as its whole time goes; a page that refreshes itself is no use."""
    http = ask(console_of(museum.outbox, authorizer=Bearer(TOKENS, idle=600, seconds=2000)))
    now = time.time()
    first = log_in(http, "right")[2]
    assert "set-cookie" not in sent_at(first, now + 1, monkeypatch, http).headers
    renewed = sent_at(first, now + 500, monkeypatch, http).headers["set-cookie"]
    assert renewed.partition("=")[0] == first.partition("=")[0]
    assert renewed.partition(";")[2] == first.partition(";")[2]
    refreshed = sent_at(renewed, now + 1000, monkeypatch, http, **{"HX-Request": "true"})
    assert (refreshed.status_code, "set-cookie" in refreshed.headers) == (200, False)
    for copy, moment in ((first, 700), (renewed, 1200)):
        assert sent_at(copy, now + moment, monkeypatch, http).headers["location"].startswith("/login")
    again = sent_at(renewed, now + 1050, monkeypatch, http).headers["set-cookie"]
    last = sent_at(again, now + 1600, monkeypatch, http).headers["set-cookie"]
    assert sent_at(last, now + 1999, monkeypatch, http).status_code == 200
    assert sent_at(last, now + 2001, monkeypatch, http).status_code == 303


def cookies_of(http: Http, number: int) -> list[dict[str, str]]:
    """Log in so often; return the headers by which each session is sent."""
    return [{"Cookie": log_in(http, "right")[2].partition(";")[0]} for _ in range(number)]


def test_a_session_that_was_ended_stays_so(museum: Shop, ask: Asker) -> None:
    """Ending another one, the same once more, or a forged one, changes nothing for it."""
    http = ask(console_of(museum.outbox, authorizer=Bearer(TOKENS)))
    first, second, third = cookies_of(http, 3)
    assert len({*first.values(), *second.values(), *third.values()}) == 3
    for headers in (first, first, second, {"Cookie": "forged"}, {}):
        assert http.ask("POST", "/logout", headers=headers).status_code == 303
    assert [http.get("/meta", headers=each).status_code for each in (first, second, third)] == [401, 401, 200]


SHARED = "k" * 32


def shared(ask: Asker, source: Any, **options: Any) -> Http:
    """Return one of the processes of a console that share a session key."""
    return ask(console_of(source, authorizer=Bearer(TOKENS, session_key=SHARED), **options))


def test_logging_out_ends_the_session_in_every_process(shop: Shop, ask: Asker) -> None:
    """In the others that have the key, and after a restart; it is one audited act, and other sessions go on."""
    here, there = shared(ask, shop.outbox), shared(ask, shop.outbox)
    ended, other = cookies_of(here, 2)
    assert there.get("/meta", headers=ended).status_code == 200
    assert here.ask("POST", "/logout", headers=ended).status_code == 303
    for process in (here, there, shared(ask, shop.outbox)):
        assert process.get("/meta", headers=ended).status_code == 401
        assert process.get("/meta", headers=other).status_code == 200
    assert there.ask("POST", "/logout", headers=ended).status_code == 303
    (row,) = there.get("/audit", params={"action": "log_out"}, headers=other).json()["items"]
    assert (row["actor"], row["origin"]["via"], row["target"].partition("/")[0]) == ("ada", "console", "session")
    number = json.loads(base64.urlsafe_b64decode(ended["Cookie"].partition("=")[2].partition(".")[0] + "=="))[2]
    assert number not in json.dumps(row), "the audit doesn't have what the cookie has"


def test_what_cannot_be_told_everywhere_is_no_logout(shop: Shop, ask: Asker) -> None:
    """While a database is away, the session ends here, and the page says that it may go on elsewhere."""
    here = shared(ask, {"shop": shop.engine, "gone": "postgresql+psycopg://localhost:1/gone"})
    there = shared(ask, shop.outbox)
    (cookie,) = cookies_of(here, 1)
    answer = here.ask("POST", "/logout", headers=cookie)
    assert answer.status_code == 503
    assert "not in other processes" in answer.text
    assert "gone" in answer.text
    for process in (here, there):
        assert process.get("/meta", headers=cookie).status_code == 401


def test_a_session_is_not_believed_while_nobody_knows_of_its_end(shop: Shop, ask: Asker) -> None:
    """Closed by default: a token that is sent itself is as good as ever."""
    away = shared(ask, operator_away(shop))
    (cookie,) = cookies_of(shared(ask, shop.outbox), 1)
    assert away.get("/meta", headers=cookie).status_code == 503
    assert away.get("/meta", headers={"Authorization": "Bearer right"}).status_code == 200


def operator_away(shop: Shop) -> Operator:
    """Return an operator whose database has gone away since it was opened."""
    (database,) = Databases.open({"shop": shop.engine}, shop.outbox.settings).values()
    return Operator(Databases([replace(database, engine=create_engine("postgresql+psycopg://localhost:1/gone"))]))


def test_a_console_that_only_reads_ends_sessions_for_itself(shop: Shop, ask: Asker) -> None:
    """It writes nothing, so that others can't know."""
    viewing, there = shared(ask, shop.outbox, read_only=True), shared(ask, shop.outbox)
    (cookie,) = cookies_of(viewing, 1)
    assert viewing.ask("POST", "/logout", headers=cookie).status_code == 303
    assert [each.get("/meta", headers=cookie).status_code for each in (viewing, there)] == [401, 200]


def test_a_session_does_not_act_for_another_site(looking: Http) -> None:
    """The guard holds for cookies too: the token of a page isn't needed."""
    cookie = log_in(looking, token_of("admin"))[2].partition(";")[0]
    headers = {"Cookie": cookie, "Origin": "http://evil.test"}
    answer = looking.as_role(None).ask("POST", f"{API}/messages/query", json={}, headers=headers)
    assert answer.status_code == 403
    assert COOKIE in cookie


def test_browsers_ask_for_passwords_themselves(museum: Shop, ask: Asker) -> None:
    """Where passwords are the way in, a page that isn't allowed makes the browser ask; there is no page for tokens."""
    hashed = hash_password("open sesame", cost=4)
    http = ask(console_of(museum.outbox, authorizer=Basic({"ada": (hashed, "admin")})))
    answer = http.ask("GET", "/messages")
    assert (answer.status_code, answer.headers["www-authenticate"].split()[0]) == (401, "Basic")
    assert answer.headers["content-type"].startswith("text/html")
    right = {"Authorization": "Basic " + base64.b64encode(b"ada:open sesame").decode()}
    assert http.ask("GET", "/messages", headers=right).status_code == 200
    assert http.ask("GET", "/login", headers=right).status_code == 404
