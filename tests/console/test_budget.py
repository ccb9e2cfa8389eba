"""A reader's work has a budget: what is inflated, for how long, how much at once, and for a client that still waits."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import pytest
from anyio.from_thread import BlockingPortal
from starlette.types import Message as AsgiMessage

from outbox.console.context import SEARCHES
from outbox.embedded import ServerLike
from outbox.message import compression
from outbox.message.content import ENCODING_HEADER
from outbox.operator.databases import CALLER, Database
from outbox.operator.look import lists
from outbox.operator.look.message_sql import LARGEST_BODY
from tests.console.web import API, Http, Shop, bearer
from tests.kit.databases import clones
from tests.operator.looking import half, id_of, put

BOMBS = 40
MIB = 1024 * 1024
NOWHERE = {"body": "n=none"}


def bomb(size: int) -> bytes:
    """A JSON body of this size, which is stored as a thousandth of it."""
    return gzip.compress(b'{"n": "' + b"0" * (size - 9) + b'"}')


@pytest.fixture(scope="module")
def bombed(server: ServerLike, template: str) -> Iterator[Shop]:
    """A shop with messages of 1 KB that are 1 MB of JSON, and one that is 3 MB."""
    with clones(server, template, "console_bombed") as (engine,):
        sizes = [*[MIB - 10] * BOMBS, 3 * MIB]
        headers = {ENCODING_HEADER: "gzip"}
        put(engine, "dispatched", [half(n, body=bomb(size), headers=headers) for n, size in enumerate(sizes)])
        yield Shop(engine)


@pytest.fixture(scope="module")
def http(bombed: Shop, make_console: Callable[..., Http]) -> Http:
    """Its console, for the admin."""
    return make_console(bombed.engine)


def test_a_search_counts_what_it_inflates(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page stops at its budget and says how far it came; the next ones go on, and look at each message once."""
    inflated: list[int] = []
    original = compression.decompress

    def counting(stored: bytes, encoding: str | None, limit: int) -> bytes:
        raw = b""
        try:
            raw = original(stored, encoding, limit)
        finally:
            inflated.append(len(raw) or limit)
        return raw

    monkeypatch.setattr(lists, "decompress", counting)
    monkeypatch.setattr(lists, "SEARCH_SECONDS", 60.0)
    searched, token, pages = 0, None, 0
    while pages == 0 or token:
        inflated.clear()
        page = http.as_role("viewer").get("/messages", params=NOWHERE | ({"page_token": token} if token else {})).json()
        assert (page["items"], sum(inflated) <= lists.INFLATED_BYTES + LARGEST_BODY) == ([], True)
        token, pages = page["next_page_token"], pages + 1
        assert page["complete"] is (token is None)
        searched += page["searched"] or BOMBS + 1 - searched
    assert (searched, pages) == (BOMBS + 1, 3)


def test_a_search_stops_at_its_time(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little it inflates; it looks at one message at least, so that it comes to an end."""
    monkeypatch.setattr(lists, "SEARCH_SECONDS", 0.0)
    page = http.get("/messages", params=NOWHERE).json()
    assert (page["searched"], page["complete"]) == (1, False)


def test_nothing_is_inflated_while_a_connection_is_held(
    bombed: Shop, http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are read, the connection goes back, and then bodies are opened."""
    (database,) = http.app.state.console.source().databases.values()
    held: list[int] = []

    def note(*_: object) -> bool:
        held.append(database.engine.pool.checkedout())
        return False

    monkeypatch.setattr(lists, "has_at", note)
    assert http.get("/messages", params=NOWHERE).status_code == 200
    assert held
    assert set(held) == {0}


def test_a_principal_searches_a_little_at_once(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    """Further searches and exports are refused, with a time to come back; others get in, and so does it in the end."""
    begun, go_on = threading.Semaphore(0), threading.Event()

    def slow(raw: bytes, path: str, value: str, *_: object) -> bool:
        if value == "slow":
            begun.release()
            assert go_on.wait(60)
        return False

    monkeypatch.setattr(lists, "has_at", slow)
    viewer = http.as_role("viewer")
    with ThreadPoolExecutor(SEARCHES) as threads:
        running = [threads.submit(viewer.get, "/messages", params={"body": "n=slow"}) for _ in range(SEARCHES)]
        try:
            assert all(begun.acquire(timeout=60) for _ in running)
            for answer in (
                viewer.get("/messages", params=NOWHERE),
                viewer.post("/messages/query", {"body": ["n", "none"]}),
                viewer.ask("GET", "/messages", params=NOWHERE),
                viewer.get("/messages", params={"header": "n=none"}),
                viewer.get("/inbox", params={"error": "none"}),
                viewer.get("/export/messages.csv"),
                viewer.get("/export/audit.csv"),
            ):
                assert (answer.status_code, answer.headers.get("retry-after")) == (429, "2"), answer.url
            assert viewer.get("/messages").status_code == 200
            for answer in (
                http.get("/messages", params=NOWHERE),
                http.get("/export/audit.csv"),
                http.post("/bulk-jobs/preview", {"action": "resend", "selector": {"messages": {"topic": "none"}}}),
            ):
                assert answer.status_code == 200, answer.url
        finally:
            go_on.set()
        assert [each.result().status_code for each in running] == [200] * SEARCHES
    assert viewer.get("/messages", params=NOWHERE).status_code == 200


def requested(portal: BlockingPortal, app: Any, path: str, query: bytes, gone: anyio.Event) -> list[AsgiMessage]:
    """Ask for a path as a client that goes away at the event; return what was sent to it."""
    headers = {"host": "localhost", **{name.lower(): value for name, value in bearer("viewer").items()}}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": f"{API}{path}",
        "query_string": query,
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 5000),
        "server": ("localhost", 80),
    }
    messages, sent = iter([{"type": "http.request", "body": b"", "more_body": False}]), []

    async def receive() -> AsgiMessage:
        if (first := next(messages, None)) is not None:
            return first
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: AsgiMessage) -> None:
        sent.append(message)

    portal.call(app, scope, receive, send)
    return sent


def test_a_client_that_has_gone_ends_its_search(
    http: Http, portal: BlockingPortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No body more is opened for it, and no row read."""
    gone, compared = portal.call(anyio.Event), []

    def leave(*_: object) -> bool:
        compared.append(1)
        portal.call(gone.set)
        while not CALLER.get().gone:  # type: ignore[attr-defined]  # the request of a console
            portal.call(anyio.lowlevel.checkpoint)
        return False

    monkeypatch.setattr(lists, "has_at", leave)
    sent = requested(portal, http.app, "/messages", b"body=n%3Dnone", gone)
    assert (sent[0]["status"], len(compared)) == (408, 1)


def test_a_client_that_has_gone_ends_its_export(
    http: Http, portal: BlockingPortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one in which nothing fits: no page more is read."""
    monkeypatch.setattr(lists, "SEARCH_SECONDS", 0.0)
    gone, reads, original = portal.call(anyio.Event), [], Database.read_only

    def read_only(database: Database, *seconds: float) -> Any:
        reads.append(1)
        if len(reads) == 3:
            portal.call(gone.set)
        return original(database, *seconds)

    monkeypatch.setattr(Database, "read_only", read_only)
    requested(portal, http.app, "/export/messages.csv", b"body=n%3Dnone", gone)
    assert 3 <= len(reads) < BOMBS / 2


def test_a_large_body_is_opened_to_be_revealed_only(http: Http) -> None:
    """A viewer's page of a message costs no more than what is shown masked; an admin sees what there is, on record."""
    path = f"/messages/{id_of(BOMBS)}/payload"
    body = http.as_role("viewer").get(path).json()
    assert (body["text"], body["size"]) == (None, None)
    page = http.as_role("viewer").ask("GET", f"/messages/{id_of(BOMBS)}")
    assert (page.status_code, len(page.content) < MIB) == (200, True)
