"""Endpoints for many messages at once: preview, order, the same order again, progress, cancel."""

from __future__ import annotations

import uuid
from typing import Any
from uuid import UUID

import httpx
import pytest

from outbox.operator.bulk.run import bulk_once
from tests.console.test_api_acts import problem
from tests.console.web import API, GROUP, Http, Shop

WHY = "ticket 4711"


def work(shop: Shop) -> None:
    """Do what a worker does, until nothing is left."""
    with shop.engine.connect() as connection:
        while bulk_once(connection, shop.outbox.settings, rated=False).taken:
            pass


def order(http: Http, ids: list[UUID], key: str | None = None, **more: Any) -> httpx.Response:
    """Order that dead letters are retried, by their ids."""
    body = {"action": "retry", "selector": {"ids": [str(each) for each in ids], "group": GROUP}, "reason": WHY, **more}
    return http.post("/bulk-jobs", body, headers={"Idempotency-Key": key} if key else {})


def by_error(trouble: str) -> dict[str, Any]:
    """A selector of dead letters by a part of their error."""
    return {"inbox": {"status": ["parked"], "error": trouble}}


def test_what_was_previewed_is_what_is_done(shop: Shop, acting: Http) -> None:
    """A filter is previewed with numbers and a sample; the order takes the token and says where to look."""
    ids = shop.parked(1, 2, 3, trouble="previewed")
    body = {"action": "retry", "selector": by_error("previewed")}
    preview = acting.post("/bulk-jobs/preview", body)
    assert preview.status_code == 200, preview.text
    seen = preview.json()
    assert (seen["matched"], seen["eligible"]) == ({"value": 3, "relation": "eq"}, 3)
    assert {row["message_id"] for row in seen["sample"]} == {str(each) for each in ids}
    answer = acting.as_role("operator").post("/bulk-jobs", {**body, "token": seen["token"], "reason": WHY})
    assert answer.status_code == 202, answer.text
    where = answer.headers["location"]
    assert where == f"{API}/bulk-jobs/{answer.json()['id']}"
    shop.parked(4, trouble="previewed")
    work(shop)
    done = acting.ask("GET", where).json()
    assert (done["state"], done["done"], done["total"], done["requested_by"]) == ("done", 3, 3, "otto")
    items = acting.ask("GET", f"{where}/items").json()["items"]
    assert {(item["message_id"], item["state"]) for item in items} == {(str(each), "done") for each in ids}
    assert acting.ask("GET", f"{where}/items", params={"state": "failed"}).json()["items"] == []


def test_a_filter_needs_the_token_of_its_preview(shop: Shop, acting: Http) -> None:
    """Without a token, with one of another order, or one that was changed, nothing is ordered."""
    shop.parked(1, trouble="tokens")
    body = {"action": "retry", "selector": by_error("tokens")}
    token = acting.post("/bulk-jobs/preview", body).json()["token"]
    assert problem(acting.post("/bulk-jobs", {**body, "reason": WHY})) == (422, "invalid")
    for wrong in (token[:-3] + "AAA", token[1:], "nonsense"):
        assert acting.post("/bulk-jobs", {**body, "reason": WHY, "token": wrong}).status_code in {409, 422}
    other = {"action": "discard", "selector": by_error("tokens"), "reason": WHY, "token": token}
    assert acting.post("/bulk-jobs", other).status_code in {409, 422}
    assert acting.post("/bulk-jobs", {**body, "reason": WHY, "token": token}).status_code == 202


def test_what_has_changed_since_the_preview_is_told(shop: Shop, acting: Http) -> None:
    """If what was previewed isn't there any more, nothing is ordered."""
    (first, _) = shop.parked(1, 2, trouble="changing")
    body = {"action": "discard", "selector": by_error("changing")}
    token = acting.post("/bulk-jobs/preview", body).json()["token"]
    assert acting.post(f"/inbox/{GROUP}/{first}/retry", {"reason": WHY}).status_code == 200
    assert problem(acting.post("/bulk-jobs", {**body, "reason": WHY, "token": token})) == (409, "selector-changed")


def test_the_same_key_is_the_same_order(shop: Shop, acting: Http) -> None:
    """A repeated order returns the bulk job that it was; another order, or another person, doesn't get it."""
    one, two = shop.parked(1, trouble="keys"), shop.parked(2, trouble="keys")
    first = order(acting, one, "key-1").json()
    assert order(acting, one, "key-1").json()["id"] == first["id"]
    assert problem(order(acting, two, "key-1")) == (409, "selector-changed")
    assert order(acting.as_role("operator"), two, "key-1").json()["id"] != first["id"]
    assert order(acting, one, "key-2").json()["id"] != first["id"]
    for odd in ("with space", "x" * 201):
        assert problem(order(acting, one, odd)) == (422, "invalid")


def test_what_was_named_and_can_not_be_done_is_skipped(shop: Shop, acting: Http) -> None:
    """Named messages are items, also those that can't be acted on, and each says why."""
    (parked,) = shop.parked(1)
    (consumed,) = shop.orders(2)
    shop.drain()
    where = order(acting, [parked, consumed]).headers["location"]
    work(shop)
    done = acting.ask("GET", where).json()
    assert (done["state"], done["done"], done["skipped"]) == ("partly", 1, 1)
    (skipped,) = acting.ask("GET", f"{where}/items", params={"state": "skipped"}).json()["items"]
    assert (skipped["message_id"], "consumed" in skipped["outcome"]) == (str(consumed), True)


def test_an_bulk_job_is_cancelled(shop: Shop, acting: Http) -> None:
    """What is left of it isn't done; what has ended can't be cancelled."""
    where = order(acting, shop.parked(1, 2), rate=5).headers["location"]
    path = where.removeprefix(API)
    assert acting.as_role("viewer").post(f"{path}/cancel", {"reason": WHY}).status_code == 403
    cancelled = acting.as_role("operator").post(f"{path}/cancel", {"reason": WHY}).json()
    assert (cancelled["state"], cancelled["cancelled"], cancelled["cancelled_by"]) == ("cancelled", 2, "otto")
    assert problem(acting.post(f"{path}/cancel", {"reason": WHY})) == (409, "state-conflict")
    assert cancelled["id"] in {row["id"] for row in acting.get("/bulk-jobs").json()["items"]}
    states = {row["state"] for row in acting.get("/bulk-jobs", params={"state": "cancelled"}).json()["items"]}
    assert states == {"cancelled"}


def test_messages_are_sent_again_by_their_ids(shop: Shop, acting: Http) -> None:
    """The short way: ids in, a bulk job out."""
    ids = shop.orders(1, 2)
    shop.drain()
    answer = acting.post("/messages/reSend", {"ids": [str(each) for each in ids], "reason": WHY})
    assert (answer.status_code, answer.json()["action"], answer.json()["total"]) == (202, "resend", 2)
    work(shop)
    assert acting.ask("GET", answer.headers["location"]).json()["done"] == 2


def test_halves_are_rolled_back_by_their_ids(shop: Shop, acting: Http) -> None:
    """What is undecided is rolled back, in one bulk job; a message among them is left, and its item says why."""
    halves, sent = [shop.half(1), shop.half(2)], shop.order(3)
    body = {"ids": [str(each) for each in (*halves, sent)], "reason": WHY}
    assert acting.as_role("operator").post("/messages/rollback", body).status_code == 403
    assert acting.post("/messages/rollback", {"ids": body["ids"]}).status_code == 422
    answer = acting.post("/messages/rollback", body, headers={"Idempotency-Key": "both"})
    assert (answer.status_code, answer.json()["action"], answer.json()["total"]) == (202, "rollback", 3), answer.text
    assert acting.post("/messages/rollback", body, headers={"Idempotency-Key": "both"}).json() == answer.json()
    work(shop)
    where = answer.headers["location"]
    items = acting.ask("GET", f"{where}/items").json()["items"]
    assert [(each["message_id"], each["state"]) for each in items] == [
        *((str(each), "done") for each in halves),
        (str(sent), "skipped"),
    ]
    assert "compensate its local transaction" in items[-1]["outcome"]
    assert {acting.get(f"/messages/{each}").json()["status"] for each in halves} == {"rolled_back"}
    assert (
        acting.post("/messages/rollback", body, headers={"Idempotency-Key": "both"}).json()["id"] == answer.json()["id"]
    )
    assert len(acting.get("/audit", params={"action": "rollback"}).json()["items"]) >= len(halves)


def test_messages_are_compensated_by_their_ids(shop: Shop, acting: Http) -> None:
    """What a service calls to roll back a message that was sent; what took effect is refused."""
    ids = [str(each) for each in shop.parked(1, 2)]
    answer = acting.post("/messages/rollback", {"ids": ids, "reason": WHY})
    assert (answer.status_code, answer.json()["action"], answer.json()["total"]) == (202, "compensate", 2), answer.text
    assert acting.post(answer.headers["location"].removeprefix(API) + "/cancel", {"reason": WHY}).status_code == 200
    consumed = shop.order(3)
    shop.drain()
    refused = acting.post("/messages/rollback", {"ids": [str(consumed)], "reason": WHY})
    assert problem(refused) == (409, "compensation-refused")


def test_a_rollback_is_previewed_and_ordered(shop: Shop, acting: Http) -> None:
    """A rollback is a bulk job of one message; its version and its key hold as everywhere."""
    (message_id,) = shop.parked(1)
    path = f"/messages/{message_id}/compensate"
    preview = acting.post(f"{path}/preview")
    assert (preview.status_code, preview.json()["eligible"]) == (200, 1), preview.text
    body = {"reason": WHY, "token": preview.json()["token"]}
    assert problem(acting.post(path, body, headers={"If-Match": '"other"'})) == (412, "version-mismatch")
    assert acting.as_role("operator").post(path, body).status_code == 403
    seen = acting.get(f"/messages/{message_id}").headers["etag"]
    answer = acting.post(path, body, headers={"If-Match": seen, "Idempotency-Key": "rollback-1"})
    assert (answer.status_code, answer.json()["action"]) == (202, "compensate"), answer.text
    again = acting.post(path, body, headers={"Idempotency-Key": "rollback-1"})
    assert again.json()["id"] == answer.json()["id"]
    assert problem(acting.post(path, {"reason": WHY})) == (409, "compensation-refused")
    assert acting.post(answer.headers["location"].removeprefix(API) + "/cancel", {"reason": WHY}).status_code == 200


def test_what_took_effect_is_rolled_back_knowingly_only(shop: Shop, acting: Http) -> None:
    """A message that a group has consumed needs to be acknowledged."""
    (message_id,) = shop.orders(1)
    shop.drain()
    path = f"/messages/{message_id}/compensate"
    assert problem(acting.post(path, {"reason": WHY})) == (409, "compensation-refused")
    answer = acting.post("/bulk-jobs", {"action": "compensate", "selector": {"ids": [str(message_id)]}, "reason": WHY})
    assert answer.status_code == 409, answer.text
    answer = acting.post(path, {"reason": WHY, "acknowledge_delivered": True})
    assert (answer.status_code, answer.json()["options"]) == (202, {"acknowledge_delivered": True}), answer.text
    assert acting.post(answer.headers["location"].removeprefix(API) + "/cancel", {"reason": WHY}).status_code == 200


ONE = str(uuid.uuid4())


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"action": "retry", "selector": {}}, 422, "selector"),
        ({"action": "retry", "selector": {"ids": [ONE], "messages": {}}}, 422, "selector"),
        ({"action": "retry", "selector": {"messages": {}, "group": "g"}}, 422, "selector.group"),
        ({"action": "explode", "selector": {"ids": [ONE]}}, 422, "body.action"),
        ({"action": "retry", "selector": {"ids": ["42"]}}, 422, "body.selector.ids[1]"),
        ({"action": "retry", "selector": {"ids": [ONE] * 1001}}, 422, "selector.ids"),
        ({"action": "retry", "selector": {"ids": [ONE], "group": "g"}, "rate": 0}, 422, "body.rate"),
        ({"action": "retry", "selector": {"inbox": {"status": ["lost"]}}}, 422, "body.selector.inbox.status[1]"),
        ({"action": "retry", "selector": {"ids": [ONE], "group": "g"}, "options": {"odd": 1}}, 422, "options"),
        ({"action": "retry", "selector": {"ids": [ONE], "group": "g"}}, 404, None),
    ],
)
def test_orders_that_can_not_be_are_refused(acting: Http, body: Any, status: int, field: str | None) -> None:
    """What isn't an order is refused with the field that is wrong."""
    answer = acting.post("/bulk-jobs", {"reason": WHY, **body})
    assert answer.status_code == status, answer.text
    assert [error["field"] for error in answer.json().get("errors", [])] == ([field] if field else [])
