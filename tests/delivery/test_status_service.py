"""The producer asks by HTTP: neither side reaches the other's database, and without the token it learns nothing."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route

from outbox import Outbox
from outbox.asgi import InboxStatusService
from outbox.errors import InvalidSettings
from outbox.message.model import uuid7
from tests.delivery.support import Post
from tests.kit import PATIENCE, wait_until

TOKEN = "correct-horse-battery"  # noqa: S105 - of a test


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve an application; give its URL."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            wait_until(lambda: server.started, "the server listens")
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def service(post: Post) -> InboxStatusService:
    """The service of bank B, which consumes as group ``g``."""
    return InboxStatusService(post.sink, token=TOKEN, groups=["g"])


@pytest.fixture
def client(service: InboxStatusService) -> Iterator[httpx.Client]:
    """A client of the service, mounted as a framework does it."""
    with (
        serving(Starlette(routes=[Mount("/inbox/status", service)])) as url,
        httpx.Client(base_url=url, follow_redirects=True, timeout=PATIENCE) as client,
    ):
        yield client


QUESTION = {"topic": "t", "group": "g", "source": str(uuid7()), "ids": []}


def ask(client: httpx.Client, *, token: str | None = TOKEN, **question: Any) -> httpx.Response:
    """Ask about group ``g`` of topic ``t``, unless told otherwise."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return client.post("/inbox/status/", headers=headers, json=QUESTION | question)


def test_a_pass_asks_the_service(post: Post, client: httpx.Client) -> None:
    """What is consumed, and what is lost, is found as in the consumer's database."""
    app = post.know(consumer=None, status_url=f"{client.base_url}/inbox/status/", token=TOKEN)
    consumer = post.declare()
    ids = post.send(1, 2)
    assert not post.confirm(app)
    post.consume(consumer)
    post.lose(ids[1])
    post.confirm(app)
    post.consume(consumer)
    post.confirm(app)
    assert post.fates() == {ids[0]: ["consumed"], ids[1]: ["unconsumed", "consumed"]}


def test_a_framework_that_wants_a_slash_at_the_end(post: Post, client: httpx.Client) -> None:
    """As the page has it: a service that is mounted at a path is asked at that path."""
    app = post.know(consumer=None, status_url=f"{client.base_url}/inbox/status", token=TOKEN)
    consumer = post.declare()
    ids = post.send(1)
    post.consume(consumer)
    post.confirm(app)
    assert post.fates() == {ids[0]: ["consumed"]}


def test_no_other_redirect_is_followed(post: Post, caplog: pytest.LogCaptureFixture) -> None:
    """The token is for the address that it was given for, and for no other."""
    tokens: list[str | None] = []

    async def elsewhere(request: Request) -> Response:
        tokens.append(request.headers.get("authorization"))
        return RedirectResponse("/thief", 307)

    async def thief(request: Request) -> Response:
        raise AssertionError(request.headers)

    routes = [Route("/thief", thief, methods=["POST"]), Route("/{path:path}", elsewhere, methods=["POST"])]
    with serving(Starlette(routes=routes)) as url:
        post.consume(post.declare())
        post.confirm(post.know(consumer=None, status_url=f"{url}/inbox/status", token=TOKEN))
    assert tokens == [f"Bearer {TOKEN}"] * 2
    assert "the status service of group g answered 307" in caplog.text


def test_what_it_answers(post: Post, client: httpx.Client) -> None:
    """Statuses of what the inbox has, and how far the group has read."""
    consumer = post.declare()
    (half_id,) = post.send(1)
    post.consume(consumer)
    source = str(post.at_a.value("SELECT outbox.source_id()"))
    answer = ask(client, ids=[str(half_id), str(uuid7())], source=source).json()
    assert ask(client, ids=[], source=str(uuid7())).json()["queues"] == []  # one that it has read nothing from
    assert answer["statuses"] == {str(half_id): {"status": "consumed", "reason": None}}
    assert [each["queue"] for each in answer["queues"]] == list(range(len(answer["queues"])))
    assert sum(each["position"] > each["start"] for each in answer["queues"]) == 1


@pytest.mark.parametrize("token", [None, "wrong", TOKEN[:-1], TOKEN + "x", "é" * 20])
def test_nobody_without_the_token_learns_anything(client: httpx.Client, token: str | None) -> None:
    """A wrong token gets the same answer as none, whatever else it asks."""
    headers: dict[bytes, bytes] = {} if token is None else {b"Authorization": f"Bearer {token}".encode()}
    answers = [
        client.request(method, "/inbox/status/", headers=headers, content=content)
        for method, content in (("POST", b"{}"), ("GET", None), ("POST", b"not JSON"))
    ]
    assert {(each.status_code, each.text) for each in answers} == {(401, answers[0].text)}
    assert answers[0].headers["www-authenticate"] == "Bearer"


def test_other_schemes_are_refused(client: httpx.Client) -> None:
    """The token counts as a bearer token only."""
    assert client.post("/inbox/status/", headers={"Authorization": f"Basic {TOKEN}"}, json={}).status_code == 401


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b"7", b'{"topic": 1, "group": "g", "ids": []}', b'{"topic": "t", "group": "g", "ids": ["x"]}',
     b'{"topic": "t", "group": "g", "ids": 5}', b'{"topic": "t", "group": "g", "ids": []}',
     b'{"topic": "\\u0000", "group": "g", "ids": []}', b"[" * 100_000],
)  # fmt: skip
def test_what_is_no_question_is_refused(client: httpx.Client, body: bytes) -> None:
    """One clear answer, and no trace of how it was read."""
    answer = client.post("/inbox/status/", headers={"Authorization": f"Bearer {TOKEN}"}, content=body)
    assert (answer.status_code, list(answer.json())) == (400, ["error"])


def test_limits(client: httpx.Client) -> None:
    """A question has a size; only POST is one; a group that doesn't consume here isn't known."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert client.post("/inbox/status/", headers=headers, content=b"x" * (1 << 21)).status_code == 413
    assert ask(client, ids=[str(uuid7())] * 10_001).status_code == 400
    assert client.get("/inbox/status/", headers=headers).headers["allow"] == "POST"
    assert ask(client, group="h").status_code == 404


def test_several_tokens(post: Post) -> None:
    """While one token is replaced by another, both count."""
    service = InboxStatusService(post.sink, token=["an older token 123", "a newer token 1234"], groups=["g"])
    with serving(service) as url, httpx.Client(base_url=url, timeout=PATIENCE) as client:
        assert [ask(client, token=each).status_code for each in ("an older token 123", "a newer token 1234")] == [
            200
        ] * 2


def test_no_service_without_a_token(post: Post) -> None:
    """It is closed unless somebody opens it."""
    for token in ("", "short", [], [""]):
        with pytest.raises(InvalidSettings, match="token"):
            InboxStatusService(post.sink, token=token)


def test_a_database_that_is_away(post: Post, caplog: pytest.LogCaptureFixture) -> None:
    """The answer says so, and no more; the log says why, without a password."""
    from sqlalchemy import create_engine

    engine = create_engine("postgresql+psycopg://me:secret@127.0.0.1:1/nowhere")
    away = InboxStatusService(Outbox(engine), token=TOKEN, groups=["g"])
    with serving(away) as url, httpx.Client(base_url=url, timeout=PATIENCE) as client:
        answer = ask(client)
        app = post.know(consumer=None, status_url=f"{url}/", token=TOKEN)
        assert not post.confirm(app)
    assert (answer.status_code, answer.json()) == (503, {"error": "the inbox can't be read now"})
    events = [getattr(each, "outbox_event", "") for each in caplog.records]
    assert {"delivery.not_answered", "delivery.unreachable"} <= set(events)
    assert "secret" not in caplog.text
    assert TOKEN not in caplog.text + repr(app.known_groups)


@pytest.mark.parametrize(
    "answer",
    [[], {}, {"queues": [], "statuses": []}, {"queues": [{"queue": 3, "start": 0, "position": 1}], "statuses": {}}],
)
def test_an_answer_that_can_not_be_read(post: Post, answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Another service at the URL, or a broken one, changes nothing."""

    async def other(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    (half_id,) = post.send(1)
    with serving(other) as url:
        assert not post.confirm(post.know(consumer=None, status_url=url, token=TOKEN))
    assert post.sends(half_id) == 1
    assert "can't be read" in caplog.text


def test_an_outbox_that_is_bound_anew(post: Post) -> None:
    """The service answers from the database that its Outbox is bound to at the time of the question."""
    consumer = post.declare()
    (half_id,) = post.send(1)
    post.consume(consumer)
    app = Outbox(post.producer)
    service = InboxStatusService(app, token=TOKEN, groups=["g"])
    with (
        serving(Starlette(routes=[Mount("/inbox/status", service)])) as url,
        httpx.Client(base_url=url, follow_redirects=True, timeout=PATIENCE) as client,
    ):
        assert ask(client, ids=[str(half_id)]).json() == {"queues": [], "statuses": {}}
        app.unbind()
        app.bind(post.consumer)
        assert list(ask(client, ids=[str(half_id)]).json()["statuses"]) == [str(half_id)]
