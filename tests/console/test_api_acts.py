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

from outbox.acts.changes import Act
from outbox.acts.messages import ACTS
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


def test_a_scheduled_message_is_recalled(shop: Shop, acting: Http) -> None:
    """Recall works once, and not for what is out."""
    late, out = shop.order(1, send={"delay": 3600}), shop.order(2)
    shop.drain()
    assert acting.post(f"/messages/{late}/recall", WHY).status_code == 200
    assert acting.get(f"/messages/{late}").json()["status"] == "recalled"
    for message_id in (late, out):
        assert problem(acting.post(f"/messages/{message_id}/recall", WHY)) == (409, "state-conflict")


def test_halves_are_checked_reset_and_decided(shop: Shop, acting: Http) -> None:
    """Check and reset leave a half undecided; commit and rollback decide it, once."""
    half, other = shop.half(1), shop.half(2)
    assert acting.post(f"/messages/{half}/check").status_code == 200
    assert acting.post(f"/messages/{half}/reset", WHY).status_code == 200
    for message_id, name, status in ((half, "commit", "committed"), (other, "rollback", "rolled_back")):
        assert acting.post(f"/messages/{message_id}/{name}", WHY).status_code == 200
        view = acting.get(f"/messages/{message_id}").json()
        assert (view["status"], view["op"]["decided_by"]) == (status, "operator")
    for action in ("commit", "rollback", "check"):
        assert acting.post(f"/messages/{half}/{action}", WHY).status_code == 409


def test_dead_letters_are_retried_parked_discarded_and_restored(shop: Shop, acting: Http) -> None:
    """The acts on an inbox, one after the other."""
    (message_id,) = shop.parked(1)
    path = f"/inbox/{GROUP}/{message_id}"

    def status(answer: httpx.Response) -> tuple[str, bool]:
        assert answer.status_code == 200, answer.text
        (row,) = acting.get(f"/messages/{message_id}").json()["inbox"]
        return row["status"], row["discarded_at"] is not None

    assert status(acting.post(f"{path}/discard", WHY)) == ("parked", True)
    assert problem(acting.post(f"{path}/retry", WHY)) == (409, "state-conflict")
    assert status(acting.post(f"{path}/restore", WHY)) == ("parked", False)
    assert status(acting.post(f"{path}/retry", WHY)) == ("failed", False)
    assert status(acting.post(f"{path}/park", WHY)) == ("parked", False)
    assert [row["action"] for row in audited(acting, message_id)] == ["discard", "restore", "retry", "park"]


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


@pytest.mark.parametrize("act", [each for each in ACTS.values() if not each.as_job], ids=lambda act: act.name)
def test_nobody_knows_the_message(acting: Http, act: Act) -> None:
    """An act on what isn't there is not found, as long as the request itself is one."""
    where = f"/inbox/{GROUP}/{uuid.uuid4()}" if act.noun == "inbox" else f"/messages/{uuid.uuid4()}"
    assert problem(acting.post(f"{where}/{act.name}", WHY)) == (404, "not-found")


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
