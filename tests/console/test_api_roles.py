"""Every route, found in the router: who may not, and what a console that only reads refuses."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.routing import iter_route_contexts

from outbox.acts.messages import ACTS
from outbox.console.context import CONTENT_SECURITY_POLICY
from tests.console.web import API, GROUP, Http, Shop

SAFE = {"GET", "HEAD", "OPTIONS"}
#: Who isn't logged in may see these: the login itself, what it needs, and the probes, which tell nothing.
PUBLIC = {"/login", "/logout", "/static/{name}", "/healthz", "/readyz"}
#: What changes nothing although its method is POST.
READS = {f"{API}/messages/query"}
#: Acts that need more than an operator.
OF_ADMINS = {"commit", "rollback", "compensate"}

TARGETS = {"action": "compensate", "selector": {"ids": [str(uuid.uuid4())]}, "reason": "x"}
BODIES: dict[str, Any] = {
    f"{API}/bulk-jobs": TARGETS,
    f"{API}/bulk-jobs/preview": {name: TARGETS[name] for name in ("action", "selector")},
    f"{API}/messages/reSend": {"ids": [str(uuid.uuid4())]},
    f"{API}/messages/rollback": {"ids": [str(uuid.uuid4())]},
    f"{API}/messages/{{message_id}}/compensate/preview": {},
}
ID = str(uuid.uuid4())
VALUES = {
    "message_id": ID,
    "run_id": ID,
    "flow_id": ID,
    "bulk_job_id": ID,
    "group": GROUP,
    "topic": "nothing",
    "schedule": "nothing",
    "cron": "nothing",
    "command": ID,
    "act": "pause",
    "session": "6564f1a2.1267",
    "rule": "group.lag",
    "fingerprint": "0123456789abcdef",
    "filter": "nothing",
    "action": "resend",
    "name": "x.css",
    "rest": "nothing",
}
#: What forms of the pages send.
FORM = {"action": "resend", "reason": "x", "token": "x", "of": "messages", "target": f"{ID}//console_museum"}


def routes(http: Http) -> Iterator[tuple[str, str]]:
    """Every method and path of the console."""
    for context in iter_route_contexts(http.app.routes):
        for method in context.methods or ():
            yield method, str(context.path)


def ask(http: Http, method: str, path: str) -> Any:
    """Ask for a route with values that a request could have."""
    filled = path.replace(":path}", "}").format(**VALUES)
    if method in SAFE:
        return http.ask(method, filled)
    if path.startswith(API):
        return http.ask(method, filled, json=BODIES.get(path, {} if path in READS else {"reason": "x"}))
    return http.ask(method, filled, data=FORM)


def test_only_the_login_and_the_probes_are_public(looking: Http) -> None:
    """Every other route, of the API and of the pages, wants to know who asks."""
    stranger, asked = looking.as_role(None), 0
    for method, path in routes(looking):
        answer = ask(stranger, method, path)
        if path in PUBLIC:
            assert answer.status_code not in {403, 500}, path
        elif path.startswith("/api/"):
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
        else:
            assert (answer.status_code, answer.headers["location"].partition("?")[0]) == (303, "/login"), (method, path)
        asked += 1
    assert asked > 50


def test_every_answer_has_all_headers(looking: Http) -> None:
    """Whatever is asked for and whatever comes of it, nothing of other origins is loaded, framed or kept."""
    for http in (looking, looking.as_role(None)):
        for method, path in (*routes(http), ("GET", "/nothing"), ("PUT", f"{API}/meta")):
            headers = ask(http, method, path).headers
            assert headers["content-security-policy"] == CONTENT_SECURITY_POLICY, path
            assert "frame-ancestors 'none'" in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "same-origin"
            assert headers["cross-origin-opener-policy"] == headers["cross-origin-resource-policy"] == "same-origin"
            assert headers["cache-control"] == "no-store"
            assert headers["x-request-id"]


def test_a_viewer_can_change_nothing(looking: Http) -> None:
    """Each POST as viewer is forbidden, and the answer names the permission that is missing."""
    viewer = looking.as_role("viewer")
    for method, path in routes(looking):
        if method in SAFE or path in PUBLIC | READS:
            continue
        answer = ask(viewer, method, path)
        assert answer.status_code == 403, (method, path, answer.text)
        assert "doesn&#39;t have the permission" in answer.text or "doesn't have the permission" in answer.text


def test_an_operator_decides_and_compensates_nothing(looking: Http) -> None:
    """What only an admin may do is forbidden to an operator, alone and in bulk jobs."""
    operator = looking.as_role("operator")
    for action, act in ACTS.items():
        where = f"/inbox/{GROUP}/{uuid.uuid4()}" if act.noun == "inbox" else f"/messages/{uuid.uuid4()}"
        of_group = {"group": GROUP} if act.noun == "inbox" else {}
        order = {"action": action, "selector": {"ids": [str(uuid.uuid4())], **of_group}, "reason": "x"}
        for answer in (operator.post(f"{where}/{action}", {"reason": "x"}), operator.post("/bulk-jobs", order)):
            assert (answer.status_code == 403) == (action in OF_ADMINS), (action, answer.text)


@pytest.fixture(scope="module")
def viewing(museum: Shop, make_console: Callable[..., Http]) -> Http:
    """A console that only reads, asked by its admin."""
    return make_console(museum.outbox, read_only=True)


def test_a_console_that_only_reads_changes_nothing(viewing: Http) -> None:
    """Each POST by an admin is refused with the setting that is to blame; looking works."""
    for method, path in routes(viewing):
        if method in SAFE or path in PUBLIC:
            continue
        answer = ask(viewing, method, path)
        if path in READS:
            assert answer.status_code == 200
            continue
        assert answer.status_code == 403, (method, path, answer.text)
        assert "OUTBOX_CONSOLE_READ_ONLY" in answer.text
    assert viewing.get("/meta").json()["permissions"] == ["view"]


def test_a_console_that_only_reads_reveals_nothing(viewing: Http) -> None:
    """A reveal must be recorded, and this console can't write."""
    message_id = viewing.get("/messages").json()["items"][0]["id"]
    assert viewing.get(f"/messages/{message_id}/payload").status_code == 200
    for path in ("payload/reveal", "payload/raw"):
        answer = viewing.post(f"/messages/{message_id}/{path}")
        assert (answer.status_code, answer.json()["type"]) == (403, "urn:outbox:problem:read-only")
