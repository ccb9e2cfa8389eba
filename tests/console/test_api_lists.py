"""Endpoints that list and show: every filter, pages, conditions, and what is refused."""

from __future__ import annotations

import json
import plistlib
import uuid
from typing import Any

import pytest

from tests.console.web import GROUP, TOPIC, Http, Shop

LISTS = ("/messages", "/inbox", "/dead", "/halves", "/scheduled", "/audit", "/bulk-jobs")
PLAIN = ("/meta", "/overview", "/topics", "/dead/groups", "/handlers", "/workers", "/system")


def items(http: Http, path: str, **params: Any) -> list[dict[str, Any]]:
    """The rows of the first page."""
    answer = http.get(path, params=params)
    assert answer.status_code == 200, answer.text
    rows: list[dict[str, Any]] = answer.json()["items"]
    return rows


@pytest.mark.parametrize("path", [*LISTS, *PLAIN])
def test_everything_is_shown_to_a_viewer(looking: Http, path: str) -> None:
    """Who may look sees every list and page of facts, as JSON that nobody keeps."""
    answer = looking.as_role("viewer").get(path)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert answer.headers["cache-control"] == "no-store"


def test_pages_meet_without_gap_or_overlap(looking: Http) -> None:
    """The pages of a list are the list, whatever their size; ids are texts."""
    everything = [row["id"] for row in items(looking, "/messages", page_size=500)]
    found, token = [], None
    while True:
        page = looking.get("/messages", params={"page_size": 2} | ({"page_token": token} if token else {})).json()
        found += [row["id"] for row in page["items"]]
        if not (token := page["next_page_token"]):
            break
    assert found == everything
    assert all(str(uuid.UUID(each)) == each for each in found)


def test_pages_by_number(looking: Http) -> None:
    """A page by its number is the one that the tokens come to, with a token to go on by; and a number has a limit."""
    everything = [row["id"] for row in items(looking, "/messages", page_size=500)]
    last = -(-len(everything) // 4)
    for number in range(1, last + 2):
        page = looking.get("/messages", params={"page_size": 4, "page": number}).json()
        assert [row["id"] for row in page["items"]] == everything[(number - 1) * 4 : number * 4]
        assert page["total"] == {"value": len(everything), "relation": "eq"}
        assert (page["next_page_token"] is None) == (number >= last)
    first = looking.post("/messages/query", {"page_size": 4, "page": 2}).json()
    rest = looking.get("/messages", params={"page_size": 500, "page_token": first["next_page_token"]}).json()
    assert [row["id"] for row in rest["items"]] == everything[8:]
    for wrong in ({"page": 0}, {"page": 2501, "page_size": 4}, {"page": 2, "page_token": first["next_page_token"]}):
        answer = looking.get("/messages", params=wrong)
        assert answer.status_code == 422
        assert "page" in answer.json()["detail"]


def test_pages_while_messages_come(shop: Shop, acting: Http) -> None:
    """Between two pages new messages arrive: no row comes twice, and none that was there is missed."""
    before = {str(each) for each in shop.orders(*range(20))}
    found: list[str] = []
    token, number = None, 100
    while True:
        page = acting.post("/messages/query", {"page_size": 3, "page_token": token}).json()
        found += [row["id"] for row in page["items"]]
        number += 2
        shop.orders(number, number + 1)
        if not (token := page["next_page_token"]):
            break
    assert len(found) == len(set(found))
    assert before <= set(found)


def test_a_page_is_no_bigger_than_it_may_be(looking: Http) -> None:
    """More than 500 at once are not refused, but not given."""
    assert looking.get("/messages", params={"page_size": 100_000}).status_code == 200
    for wrong in (0, -1, "many", 100_001):
        assert looking.get("/messages", params={"page_size": wrong}).status_code == 422


def test_the_inbox_and_its_dead_letters(looking: Http) -> None:
    """Inbox rows by status, dead letters alone, and in groups by their error."""
    assert {row["status"] for row in items(looking, "/inbox", page_size=500)} == {"consumed", "parked", "failed"}
    assert {row["status"] for row in items(looking, "/inbox", status="failed")} == {"failed"}
    dead = items(looking, "/dead", group=GROUP)
    assert (len(dead), {row["status"] for row in dead}) == (3, {"parked"})
    (group,) = looking.get("/dead/groups").json()
    assert (group["topic"], group["group"], group["count"]["value"]) == (TOPIC, GROUP, 3)
    assert len(items(looking, "/dead", fingerprint=group["fingerprint"])) == 3
    assert items(looking, "/dead", discarded=True) == []


def test_topics_have_backlog_and_lag(looking: Http) -> None:
    """A topic shows what waits at the producer, and each group what it has to do."""
    (topic,) = looking.get("/topics").json()["items"]
    assert (topic["topic"], topic["undecided"], topic["scheduled"]) == (TOPIC, 2, 1)
    (group,) = topic["groups"]
    assert (group["group"], group["lag"], group["parked"], group["failed"]) == (GROUP, 0, 3, 1)


def test_a_message_shows_its_whole_way(looking: Http) -> None:
    """Half, op, message and the inbox of each group, with what can be done now."""
    message_id = items(looking, "/dead")[0]["message_id"]
    view = looking.get(f"/messages/{message_id}").json()
    assert (view["id"], view["status"], view["half"]["topic"]) == (message_id, "dispatched", TOPIC)
    assert [row["status"] for row in view["inbox"]] == ["parked"]
    assert view["actions"]["retry"] == [GROUP]


def test_an_entity_tag_spares_what_is_known(looking: Http) -> None:
    """If-None-Match of the version that one has is answered without a body."""
    path = f"/messages/{items(looking, '/messages')[0]['id']}"
    tag = looking.get(path).headers["etag"]
    for known in (tag, f'"other", W/{tag}', "*"):
        answer = looking.get(path, headers={"If-None-Match": known})
        assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", tag)
    assert looking.get(path, headers={"If-None-Match": '"other"'}).status_code == 200


def test_what_is_not_there_is_not_found(looking: Http) -> None:
    """Messages and bulk jobs that nobody knows."""
    nobody = uuid.uuid4()
    for path in (f"/messages/{nobody}", f"/messages/{nobody}/payload", f"/bulk-jobs/{nobody}",
                 f"/bulk-jobs/{nobody}/items", "/nothing"):  # fmt: skip
        answer = looking.get(path)
        assert (answer.status_code, answer.json()["type"]) == (404, "urn:outbox:problem:not-found"), path


@pytest.mark.parametrize(
    ("path", "params", "field"),
    [
        ("/messages", {"since": "yesterday"}, "query.since"),
        ("/messages", {"since": "2026-01-01T00:00:00"}, "query.since"),
        ("/messages", {"status": "lost"}, "query.status[1]"),
        ("/messages", {"stauts": "recalled"}, "query.stauts"),
        ("/messages", {"header": "no pair"}, "query.header"),
        ("/messages", {"key": "a\x00b"}, "query.key"),
        ("/messages", {"database": "elsewhere"}, "database"),
        ("/inbox", {"attempts_gte": -1}, "query.attempts_gte"),
        ("/halves", {"min_age": "inf"}, "query.min_age"),
        ("/overview", {"window": "1y"}, "query.window"),
        ("/bulk-jobs", {"state": "odd"}, "query.state"),
        ("/messages/42", {}, "path.message_id"),
    ],
)
def test_what_is_no_filter_is_refused(looking: Http, path: str, params: dict[str, str], field: str) -> None:
    """A wrong value or an unknown name is a problem that names the field; the value isn't repeated."""
    answer = looking.get(path, params=params)
    problem = answer.json()
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")
    assert [error["field"] for error in problem["errors"]] == [field]
    assert problem["request_id"] == answer.headers["x-request-id"]


def test_broken_json_is_refused(looking: Http) -> None:
    """A body that isn't JSON, or no object, is the caller's fault."""
    headers = {"Content-Type": "application/json"}
    for content in (
        b"{",
        b"[]",
        b"nonsense",
        b'{"key": "\\ud800"}',
        b"[" * 60_000,
        b'{"page_size": ' + b"9" * 6000 + b"}",
    ):
        answer = looking.ask("POST", "/api/v1/messages/query", content=content, headers=headers)
        assert 400 <= answer.status_code < 500, content[:20]
        assert answer.headers["content-type"] == "application/problem+json"


def test_the_console_says_what_it_is(looking: Http, museum: Shop) -> None:
    """Meta has the databases and what the caller may do."""
    meta = looking.get("/meta").json()
    assert meta["databases"] == [{"name": "console_museum", "parts": ["consumer", "producer"], "reached": True}]
    assert (meta["read_only"], meta["role"]) == (False, "admin")


def test_bodies_are_masked_unless_somebody_may_see_them(shop: Shop, acting: Http) -> None:
    """A reveal needs its permission and is audited; other sites can't make a browser ask for it."""
    path = f"/messages/{shop.order(1, iban='DE89')}/payload"
    masked = acting.get(path).json()
    assert ("DE89" in masked["text"], masked["revealed"], list(masked["masked"])) == (False, False, ["iban"])
    for act in ("reveal", "raw"):
        assert acting.as_role("operator").post(f"{path}/{act}").status_code == 403
        assert acting.post(f"{path}/{act}", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
        # A link reveals nothing, whoever follows it.
        assert acting.get(f"{path}/{act}").status_code == 404
    assert "DE89" not in acting.get(path, params={"reveal": True}).text
    assert items(acting, "/audit", action="reveal") == []
    revealed = acting.post(f"{path}/reveal", {"reason": "ticket 7"}).json()
    assert ("DE89" in revealed["text"], revealed["revealed"]) == (True, True)
    assert [row["reason"] for row in items(acting, "/audit", action="reveal")] == ["ticket 7"]
    raw = acting.post(f"{path}/raw")
    assert raw.json()["iban"] == "DE89"
    assert raw.headers["content-disposition"].startswith("attachment")
    rows = items(acting, "/audit", action="reveal")
    assert [(row["actor"], row["origin"]["via"]) for row in rows] == [("ada", "api")] * 2


def test_what_a_codec_reads_is_shown_and_masked(shop: Shop, acting: Http) -> None:
    """A body in a format of the application's own is shown as JSON is; its bytes can be had as they are."""
    kind = "application/x-plist"
    if kind not in shop.outbox.codecs:
        shop.outbox.codec(kind, encode=plistlib.dumps, decode=plistlib.loads)
    path = f"/messages/{shop.order(2, iban='DE89', send={'content_type': kind})}/payload"
    masked = acting.get(path).json()
    assert (json.loads(masked["text"]), masked["content_type"]) == ({"number": 2, "iban": "***"}, kind)
    assert "DE89" in acting.post(f"{path}/reveal").json()["text"]
    assert plistlib.loads(acting.post(f"{path}/raw").content) == {"number": 2, "iban": "DE89"}
