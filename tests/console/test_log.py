"""What the console tells its log: who logs in, what is done, denied and refused, and what fails, with its id."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outbox.console import Basic, hash_password
from outbox.telemetry.hooks import TelemetryEvent, add_hook
from tests.console.test_auth import basic
from tests.console.web import Asker, Http, Shop, console_of, token_of

DEAD = "postgresql+psycopg://nobody@127.0.0.1:1/nothing"

Told = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Told]:
    """A function that returns what was told since its last call, as the attributes of the records."""
    with caplog.at_level(logging.INFO, "outbox.console"):

        def since() -> list[dict[str, Any]]:
            records = [record.__dict__ for record in caplog.records if record.name == "outbox.console"]
            caplog.clear()
            return records

        yield since


def facts(records: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    """Level, code, and some facts of each record."""
    return [tuple(record[name] for name in ("levelname", "outbox_event", *names)) for record in records]


def test_logins_are_told(museum: Shop, ask: Asker, told: Told) -> None:
    """By the page, in and out, and failed; by a wrong token in the header, and a wrong password of a user."""
    http = ask(console_of(museum.outbox), client="192.0.2.7")
    http.ask("POST", "/login", data={"token": "wrong"})
    cookie = http.ask("POST", "/login", data={"token": token_of("operator")}).headers["set-cookie"].partition(";")[0]
    http.ask("POST", "/logout", headers={"Cookie": cookie})
    http.ask("POST", "/logout", headers={"Cookie": cookie})
    assert facts(told(), "principal", "client") == [
        ("WARNING", "login.failed", None, "192.0.2.7"),
        ("INFO", "login.succeeded", "otto", "192.0.2.7"),
        ("INFO", "login.ended", "otto", "192.0.2.7"),
    ]
    http.get("/meta", headers={"Authorization": "Bearer wrong"})
    assert facts(told(), "principal") == [("WARNING", "login.failed", None), ("INFO", "authz.denied", None)]
    http = ask(console_of(museum.outbox, authorizer=Basic({"otto": (hash_password("right", cost=4), "viewer")})))
    for name in ("otto", "a password that was typed into the wrong field"):
        http.get("/meta", headers=basic(name, "wrong"))
    failed = [record for record in told() if record["outbox_event"] == "login.failed"]
    assert facts(failed, "principal") == [("WARNING", "login.failed", "otto"), ("WARNING", "login.failed", None)]


def test_what_is_denied_or_refused_is_told(looking: Http, told: Told) -> None:
    """An act without the permission, another site, and what isn't valid: who, what and why; never the query."""
    viewer = looking.as_role("viewer")
    viewer.post("/bulk-jobs/preview", {"action": "resend", "selector": {"ids": []}})
    viewer.ask("POST", "/logout", headers={"Sec-Fetch-Site": "cross-site"})
    viewer.get("/messages", params={"body": "card.code=not-for-logs"})
    viewer.ask("GET", "/nowhere")
    records = told()
    assert facts(records, "problem", "principal", "path") == [
        ("WARNING", "authz.denied", "forbidden", "vera", "/api/v1/bulk-jobs/preview"),
        ("WARNING", "authz.denied", "cross-origin", None, "/logout"),
        ("INFO", "console.refused", "invalid", "vera", "/api/v1/messages"),
        ("INFO", "console.refused", "not-found", "vera", "/nowhere"),
    ]
    assert "not-for-logs" not in str(records)


def test_reading_is_told_only_where_a_body_is_revealed(looking: Http, shop: Shop, acting: Http, told: Told) -> None:
    """Pages, lists and searches are no news."""
    (message_id,) = shop.orders(1)
    for path in ("/", "/messages", "/system"):
        assert looking.ask("GET", path).status_code == 200
    looking.post("/messages/query")
    assert told() == []
    acting.post(f"/messages/{message_id}/payload/reveal")
    acting.ask("POST", f"/messages/{message_id}/reveal")
    assert facts(told(), "principal", "status") == [("INFO", "console.done", "ada", 200)] * 2


def test_an_error_that_nobody_expected_has_an_id(museum: Shop, ask: Asker, told: Told) -> None:
    """The page shows it, and the problem; the log has the traceback under it; hooks get the exception."""
    heard: list[TelemetryEvent] = []
    forget = add_hook(heard.append)

    def broken() -> None:
        raise RuntimeError("a defect")

    http = ask(console_of(museum.outbox, authorizer=broken))
    page, answer = http.ask("GET", "/messages"), http.get("/messages")
    forget()
    on_page = re.findall(r"request <code>(\w+)</code>", page.text)
    in_problem = answer.json()["request_id"]
    assert on_page == [page.headers["x-request-id"]]
    records = told()
    assert facts(records, "request_id") == [
        ("ERROR", "console.failed", on_page[0]),
        ("ERROR", "console.failed", in_problem),
    ]
    assert all("RuntimeError: a defect" in record["traceback"] for record in records)
    assert [type(event.error) for event in heard] == [RuntimeError, RuntimeError]


def test_a_database_that_is_down_is_told(make_console: Callable[..., Http], told: Told) -> None:
    """Each request that failed for it, with its id; the outage itself once."""
    http = make_console(DEAD)
    for _ in range(2):
        assert http.get("/messages").status_code == 503
    records = told()
    assert [record["outbox_event"] for record in records].count("console.database_missing") == 1
    unavailable = [record for record in records if record["outbox_event"] == "console.unavailable"]
    assert len(unavailable) == 2
    assert all(record["levelname"] == "WARNING" and record["request_id"] for record in unavailable)
