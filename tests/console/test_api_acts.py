"""Endpoints that do one thing to one message: what they do, what they refuse, and what the audit says."""

from __future__ import annotations

import logging
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from outbox.dispatch.dispatch_pass import dispatch_lock
from tests.console.web import GROUP, Http, Shop

WHY = {"reason": "ticket 4711"}


def problem(answer: httpx.Response) -> tuple[int, str]:
    """The status and the kind of problem of an answer."""
    return answer.status_code, answer.json()["type"].rpartition(":")[2]


def audited(http: Http, message_id: UUID) -> list[dict[str, Any]]:
    """What the audit of a message says, in order."""
    rows: list[dict[str, Any]] = http.get(f"/messages/{message_id}").json()["audit"]
    return rows


def test_a_message_is_sent_again(shop: Shop, acting: Http, caplog: pytest.LogCaptureFixture) -> None:
    """Resend: the outcome in a sentence, and who did it from where in audit and log."""
    caplog.set_level(logging.INFO, "outbox.console")
    (message_id,) = shop.orders(1)
    shop.drain()
    answer = acting.as_role("operator").post(f"/messages/{message_id}/resend", WHY, headers={"X-Request-ID": "r-1"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["outcome"].startswith(f"message {message_id}")
    assert len(acting.get(f"/messages/{message_id}").json()["sends"]) == 2
    (row,) = audited(acting, message_id)
    assert (row["actor"], row["action"], row["reason"]) == ("otto", "resend", "ticket 4711")
    assert row["origin"] == {"via": "api", "ip": "127.0.0.1", "request_id": "r-1"}
    (record,) = [record.__dict__ for record in caplog.records if record.name == "outbox.console"]
    facts = [record[name] for name in ("outbox_event", "principal", "request_id", "path", "status")]
    assert facts == ["console.done", "otto", "r-1", f"/api/v1/messages/{message_id}/resend", 200]


def test_what_has_changed_is_not_acted_on(shop: Shop, acting: Http) -> None:
    """If-Match: the version that was seen, and no other; a second one of two who saw the same is told."""
    (message_id,) = shop.parked(1)
    path = f"/inbox/{GROUP}/{message_id}/discard"
    seen = acting.get(f"/messages/{message_id}").headers["etag"]
    assert problem(acting.post(path, WHY, headers={"If-Match": '"other"'})) == (412, "version-mismatch")
    assert acting.post(path, WHY, headers={"If-Match": seen}).status_code == 200
    assert problem(acting.post(path, WHY, headers={"If-Match": seen})) == (412, "version-mismatch")
    assert acting.post(path.replace("discard", "restore"), WHY, headers={"If-Match": "*"}).status_code == 200
    for odd in ("unquoted", '"a", "b"', '"open'):
        assert problem(acting.post(path, WHY, headers={"If-Match": odd})) == (422, "invalid")


def test_of_many_who_do_the_same_one_does_it(shop: Shop, acting: Http) -> None:
    """Twenty at once with the same version: one act, one row in the audit, nineteen who are told."""
    (message_id,) = shop.parked(1)
    seen = acting.get(f"/messages/{message_id}").headers["etag"]

    def discard(_: int) -> int:
        return acting.post(f"/inbox/{GROUP}/{message_id}/discard", WHY, headers={"If-Match": seen}).status_code

    with ThreadPoolExecutor(20) as threads:
        statuses = sorted(threads.map(discard, range(20)))
    assert statuses[0] == 200
    assert set(statuses[1:]) <= {409, 412}
    assert len(audited(acting, message_id)) == 1


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"reason": 1}, "body.reason"),
        ({"reason": "a\x00b"}, "body.reason"),
        ({"reason": "x" * 2001}, "body.reason"),
        ({"because": "typo"}, "body.because"),
        ({"force": "perhaps"}, "body.force"),
        ([], "body"),
        ({}, "reason"),
        ({**WHY, "database": "elsewhere"}, "database"),
        ({**WHY, "force": True}, "body.force"),
    ],
)
def test_bad_bodies_are_refused(shop: Shop, acting: Http, body: Any, field: str) -> None:
    """What isn't a body of an act is refused before anything is done."""
    message_id = shop.half(7)
    answer = acting.ask("POST", f"/api/v1/messages/{message_id}/rollback", json=body)
    assert problem(answer) == (422, "invalid")
    assert [error["field"] for error in answer.json()["errors"]] == [field]
    assert audited(acting, message_id) == []


def test_names_in_paths_are_checked(acting: Http) -> None:
    """A group that can't be one, or an id that is none."""
    for path in (f"/inbox/a b/{uuid.uuid4()}/retry", "/messages/42/resend"):
        assert problem(acting.post(path, WHY)) == (422, "invalid")


def test_the_holder_of_a_lock_is_ended(shop: Shop, acting: Http) -> None:
    """Only an admin may; the session is named by its start and pid, and one that holds no lock is left alone."""
    with shop.engine.connect() as holder:
        holder.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": dispatch_lock("outbox")})
        (row,) = acting.get("/locks").json()["items"]
        assert (row["lock"], row["state"]) == ("dispatch", "idle in transaction")
        end = f"/locks/{row['session']}/end"
        refused = acting.as_role("operator").post(end, WHY)
        assert problem(refused) == (403, "forbidden")
        assert "permission 'lock:end'" in refused.json()["detail"]
        assert holder.execute(text("SELECT true")).scalar_one()
        assert problem(acting.post("/locks/0.0/end", WHY)) == (409, "state-conflict")
        answer = acting.post(end, WHY)
        assert answer.status_code == 200, answer.text
        assert answer.json()["outcome"].startswith(f"session {row['session']}, which held the lock of dispatch")
        with pytest.raises(DBAPIError):
            holder.execute(text("SELECT true"))
    (audited_row,) = acting.get("/audit", params={"action": "end"}).json()["items"]
    assert (audited_row["target"], audited_row["reason"]) == (row["session"], "ticket 4711")


def test_a_copy_with_another_body(shop: Shop, acting: Http) -> None:
    """201, with the copy's address; what is wrong is told, and nothing done then; an operator may not."""
    (message_id,) = shop.parked(1)
    path, order = f"/messages/{message_id}/edit", {"body": '{"number": 1}', "reason": "a typo"}
    for wrong in ({"reason": ""}, {"body": "{"}, {"original": "forget"}):
        assert problem(acting.post(path, order | wrong)) == (422, "invalid")
    assert problem(acting.post(path, order, headers={"If-Match": '"other"'})) == (412, "version-mismatch")
    assert problem(acting.as_role("operator").post(path, order)) == (403, "forbidden")
    answer = acting.post(path, order)
    assert answer.status_code == 201
    assert answer.headers["location"].endswith(f"/messages/{answer.json()['id']}")
    assert acting.get(path).json()["copies"] == [answer.json()["id"]]
    assert problem(acting.post(path, order))[0] == 409
    assert acting.get(f"/messages/{answer.json()['id']}").json()["copy_of"] == str(message_id)
    assert acting.post(path, order | {"again": True, "original": "leave"}).status_code == 201
