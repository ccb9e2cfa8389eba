"""What an attacker sends: forged tokens of pages, formulas, lines for the log, and requests without end."""

from __future__ import annotations

import base64
import csv
import io
import json
import logging
import re
from collections.abc import Callable
from urllib.parse import quote

import anyio
import httpx
import pytest
from anyio.from_thread import BlockingPortal
from pydantic import BaseModel
from sqlalchemy.orm import Session
from starlette.types import Message as AsgiMessage

from outbox import Message
from outbox.console import events
from outbox.console.context import SLOTS
from outbox.telemetry.hooks import emit
from outbox.text import csv_cell
from tests.console.web import API, Asker, Http, Shop, bearer, console_of

FORGED = '"x"}\r\n2026-01-01 00:00:00 INFO outbox.console login.succeeded {"client": "10.0.0.1"}\u2028\x1b[2J'


def test_tokens_of_pages_can_not_be_changed(looking: Http) -> None:
    """A token that was changed, cut, or given to another list or filter is refused as such."""
    token = looking.get("/messages", params={"page_size": 1}).json()["next_page_token"]
    changed = [token[:at] + ("A" if token[at] != "A" else "B") + token[at + 1 :] for at in range(0, len(token), 7)]
    made = base64.urlsafe_b64encode(json.dumps({"after": "0"}).encode()).decode()
    for wrong in (*changed, token[:-1], token * 2, made, "%00", "é", "{}"):
        answer = looking.get("/messages", params={"page_size": 1, "page_token": wrong})
        assert answer.status_code == 400, (wrong, answer.text)
        assert answer.json()["type"] == "urn:outbox:problem:bad-page-token"
    for path, params in (("/inbox", {}), ("/messages", {"topic": "orders"}), ("/audit", {})):
        answer = looking.get(path, params={**params, "page_token": token})
        assert (answer.status_code, answer.json()["type"]) == (400, "urn:outbox:problem:bad-page-token"), path


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1"])
def test_cells_are_no_formulas(text: str) -> None:
    """A text that a spreadsheet would take for a formula is quoted."""
    assert csv_cell(text) == f"'{text}"


def test_cells_that_are_none_stay_as_they_are() -> None:
    """Numbers, times, missing values and harmless texts aren't touched."""
    assert [csv_cell(value) for value in (-1, None, "a=b", "", {"a": "=1"})] == ["-1", "", "a=b", "", '{"a": "=1"}']


def test_exports_are_safe_to_open(shop: Shop, acting: Http) -> None:
    """Keys and reasons that are formulas, and quotes and lines in them, come back as one harmless cell."""
    hostile = '=HYPERLINK("http://evil.test","a\r\nb")'
    message_id = shop.order(1, send={"key": hostile})
    shop.drain()
    answer = acting.get("/export/messages.csv", params={"key": hostile})
    assert (answer.headers["content-type"], answer.headers["x-content-type-options"]) == (
        "text/csv; charset=utf-8", "nosniff")  # fmt: skip
    (row,) = csv.DictReader(io.StringIO(answer.text, newline=""))
    assert (row["id"], row["key"]) == (str(message_id), "'" + hostile)
    lines = acting.get("/export/messages.ndjson", params={"key": hostile}).text.splitlines()
    assert [json.loads(line)["key"] for line in lines] == [hostile]
    assert acting.post(f"/messages/{message_id}/resend", {"reason": "@now"}).status_code == 200
    rows = list(csv.DictReader(io.StringIO(acting.get("/export/audit.csv").text, newline="")))
    assert [(row["target"], row["reason"]) for row in rows] == [(str(message_id), "'@now")]


def test_exports_have_all_rows_and_their_limit(shop: Shop, acting: Http) -> None:
    """More than one page comes out whole; a limit holds; a filter that isn't one is told before anything is sent."""
    with shop.engine.begin() as connection:
        ids = {str(shop.outbox.send(connection, "export", {"n": n})) for n in range(1203)}
    lines = acting.get("/export/messages.ndjson", params={"topic": "export"}).text.splitlines()
    assert {json.loads(line)["id"] for line in lines} == ids
    assert len(acting.get("/export/messages.csv", params={"topic": "export", "limit": 501}).text.splitlines()) == 502
    assert acting.get("/export/messages.csv", params={"database": "elsewhere"}).status_code == 422


def b64(text: str) -> str:
    """A text as HTTP Basic has it."""
    return base64.b64encode(text.encode()).decode()


def broken() -> None:
    """An authorizer with a defect, whose error quotes what was sent."""
    raise RuntimeError(FORGED)


def test_log_lines_can_not_be_forged(museum: Shop, ask: Asker, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a caller sends as name, path, host or id: each line of the log is one line, of ASCII."""
    http = ask(console_of(museum.outbox))
    with caplog.at_level(logging.INFO, "outbox.console"):
        http.ask("GET", "/api/v1/messages/" + "x%0d%0aINFO%20forged")
        http.ask("GET", "/api/v1/meta", headers={"X-Forwarded-For": "1.2.3.4\tforged"})
        http.ask("GET", "/api/v1/meta", headers={"Host": "evil.test\tforged"})
        http.ask(
            "POST", "/login", data={"token": FORGED}, headers={"X-Forwarded-For": FORGED.split("\r", maxsplit=1)[0]}
        )
        http.ask("GET", "/api/v1/meta", headers={"Authorization": "Basic " + b64(f"{FORGED}:x")})
        ask(console_of(museum.outbox, authorizer=broken)).ask("GET", "/" + quote(FORGED))
        emit(events.DatabaseMissing(database=FORGED, reason=FORGED, repeated=False))
    assert len(caplog.records) >= 6
    for record in caplog.records:
        assert re.fullmatch(r"[\x20-\x7e]+", record.getMessage())
        assert re.fullmatch(r"[a-z_.]+", record.__dict__["outbox_event"])
        assert record.exc_info is None


def test_tokens_and_passwords_are_in_no_log(museum: Shop, ask: Asker, caplog: pytest.LogCaptureFixture) -> None:
    """What was tried as a token isn't logged, be it right or wrong."""
    http = ask(console_of(museum.outbox))
    with caplog.at_level(logging.DEBUG):
        http.ask("POST", "/login", data={"token": "almost-the-right-one"})
        http.ask("GET", "/api/v1/meta", headers={"Authorization": "Bearer almost-the-right-one"})
    assert "almost-the-right-one" not in caplog.text


def test_ids_of_requests_are_taken_only_if_they_are_harmless(looking: Http) -> None:
    """An id that came with the request is given back; anything else gets a new one."""
    assert looking.get("/meta", headers={"X-Request-ID": "trace-1.a_b"}).headers["x-request-id"] == "trace-1.a_b"
    for odd in ("<script>", "x" * 65, "", "a b"):
        assert re.fullmatch(
            r"[0-9a-f]{32}", looking.get("/meta", headers={"X-Request-ID": odd}).headers["x-request-id"]
        )


def test_bodies_of_messages_are_never_shown_as_a_page(shop: Shop, acting: Http) -> None:
    """The bytes of a body are a file to keep, whatever its sender called them."""
    with shop.engine.begin() as connection:
        body = b"<script>alert(1)</script>"
        message_id = shop.outbox.send(connection, "pages", body, headers={"content-type": "text/html"})
    answer = acting.post(f"/messages/{message_id}/payload/raw")
    assert (answer.headers["content-type"], answer.content) == ("application/octet-stream", body)
    assert answer.headers["content-disposition"] == f'attachment; filename="{message_id}.bin"'


def test_requests_without_end_take_no_threads(museum: Shop, make_console: Callable[..., Http]) -> None:
    """More requests at once than connections: all are answered, each in its turn."""
    from concurrent.futures import ThreadPoolExecutor

    http = make_console(museum.outbox)
    with ThreadPoolExecutor(30) as threads:
        statuses = list(threads.map(lambda _: http.get("/messages").status_code, range(60)))
    assert statuses == [200] * 60


GUESSES = {
    "code": ("body", "card.code", "247"),
    "inside": ("body", "lines.0.note", '{"password": "247"}'),
    "header": ("header", "api-key", "247"),
}


@pytest.mark.parametrize("place", GUESSES)
@pytest.mark.parametrize("role", ["viewer", "operator"])
def test_what_is_masked_can_not_be_guessed(shop: Shop, acting: Http, role: str, place: str) -> None:
    """By no list, export or preview: a filter that a message fits would tell the value. An admin may search."""
    (name, path, value), topic = GUESSES[place], f"{place}-{role}"
    body = {"card": {"code": "247"}, "lines": [{"note": '{"password": "247"}'}], "colour": "red"}
    message_id = shop.order(1, **body, send={"topic": topic, "headers": {"api-key": "247", "shard": "eu"}})
    condition, guessing = {name: f"{path}={value}", "topic": topic}, acting.as_role(role)
    found = {name: {"body": "colour=red", "header": "shard=eu"}[name], "topic": topic}
    for answer in (
        guessing.get("/messages", params=condition),
        guessing.post("/messages/query", condition | {name: [path, value]}),
        guessing.get("/export/messages.csv", params=condition),
        guessing.get("/export/messages.ndjson", params=condition),
        guessing.ask("GET", "/messages", params=condition),
        guessing.ask("GET", "/bulk", params=condition | {"action": "resend"}),
    ):
        assert answer.status_code in ({403} if role == "viewer" and "/bulk" in str(answer.url) else {422}), answer.text
        assert str(message_id) not in answer.text
    selector = {"messages": condition | {name: [path, value]}}
    refused = guessing.post("/bulk-jobs/preview", {"action": "resend", "selector": selector})
    assert refused.status_code == (403 if role == "viewer" else 422)
    assert [row["id"] for row in guessing.get("/messages", params=found).json()["items"]] == [str(message_id)]
    assert [row["id"] for row in acting.get("/messages", params=condition).json()["items"]] == [str(message_id)]


def test_a_body_that_a_handler_refuses_is_not_in_the_error(shop: Shop, acting: Http) -> None:
    """A handler that reads a part of the body by pydantic itself: its error names the field, and has no value."""

    class Card(BaseModel):
        number: int

    def charge(message: Message, _: Session) -> None:
        try:
            Card.model_validate(message.body["card"])
        except ValueError as error:
            raise RuntimeError(f"no card: {error}") from error

    shop.outbox.consumer("charges", group="charging", retry_delays=(3600.0,))(charge)
    message_id = shop.order(1, card={"number": "4111-secret"}, send={"topic": "charges"})
    shop.drain()
    (row,) = acting.get(f"/messages/{message_id}").json()["inbox"]
    assert "number: Input should be a valid integer" in row["last_error"]
    for place in (f"/messages/{message_id}", "/inbox", "/dead/groups"):
        assert "4111-secret" not in acting.get(place).text, place


def test_exports_keep_nobody_out(museum: Shop, make_console: Callable[..., Http], portal: BlockingPortal) -> None:
    """Who asks for exports and doesn't read them has two at once, and no slot: others' exports and all are answered."""
    http = make_console(museum.outbox)
    headers = {"host": "localhost", **{name.lower(): value for name, value in bearer("viewer").items()}}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": f"{API}/export/messages.ndjson",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 5000),
        "server": ("localhost", 80),
    }

    async def attack() -> None:
        stalled, forever = anyio.Semaphore(0), anyio.Event()

        async def receive() -> AsgiMessage:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: AsgiMessage) -> None:
            if message["type"] == "http.response.body":
                stalled.release()
                await forever.wait()

        async with anyio.create_task_group() as tasks:
            for _ in range(3 * SLOTS):
                tasks.start_soon(http.app, dict(scope), receive, send)
            with anyio.fail_after(60):
                for _ in range(3 * SLOTS):
                    await stalled.acquire()
                client = httpx.AsyncClient(transport=httpx.ASGITransport(http.app), base_url="http://localhost")
                for path in (f"{API}/meta", f"{API}/export/audit.csv"):
                    answer = await client.get(path, headers=bearer("operator"))
                    assert answer.status_code == 200
            tasks.cancel_scope.cancel()

    portal.call(attack)
    assert http.get("/meta").status_code == 200
