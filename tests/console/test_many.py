"""Thousands of topics: no answer is longer than a page, and what isn't shown is counted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import text

from outbox.embedded import ServerLike
from outbox.errors import InvalidRequest
from outbox.operator.look.paging import listed
from outbox.operator.model import MAX_PAGE, Page, PageRequest
from tests.console.test_api_roles import ask, routes
from tests.console.web import API, Http, Shop
from tests.kit.databases import clones

#: More than any list shows, and than two of its longest pages have; what is shown of ten thousand is as of these.
TOPICS = 1_200
NAMES = f"SELECT 't' || to_char(n, 'FM00000') AS t, n FROM generate_series(1, {TOPICS}) n"
FILL = (
    f"INSERT INTO outbox.topic (name, queues) SELECT t, 1 FROM ({NAMES}) f",
    "INSERT INTO outbox.half_check (half_id, topic, fenced, next_check_at) "
    f"SELECT gen_random_uuid(), t, false, now() - interval '1 day' FROM ({NAMES}) f",
    "INSERT INTO outbox.consumer_offset (consumer_group, topic, queue, position, starts) "
    f"SELECT 'billing', t, 0, 1, 0 FROM ({NAMES}) f",
    "INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts, "
    "last_error, error_kind) SELECT 'billing', gen_random_uuid(), t, 0, 1, 'parked', 1, 'E', 'E' || n "
    f"FROM ({NAMES}) f",
    f"INSERT INTO outbox.topic_pause (topic, paused_by, pause_reason) SELECT t, 'ann', 'x' FROM ({NAMES}) f",
    "INSERT INTO outbox.worker (id, name, version, roles, started_at, seen_at, duties, handlers) "
    """SELECT gen_random_uuid(), 'w', '1', '[]', now(), now() + interval '1 day', '{"check": {}, "dispatch": {}}', """
    "jsonb_agg(jsonb_build_object('kind', 'consumer', 'topic', t, 'group', 'billing', 'name', 'f', 'options', "
    f"jsonb_build_object())) FROM ({NAMES}) f",
)


@pytest.fixture(scope="module")
def http(server: ServerLike, template: str, make_console: Callable[..., Http]) -> Iterator[Http]:
    """A console over a shop of so many topics, of each of which everything is there."""
    with clones(server, template, "console_many") as (engine,):
        with engine.begin() as connection:
            for statement in FILL:
                connection.execute(text(statement.replace("%", "%%")))
        engine.dispose()
        yield make_console(Shop(engine).outbox, metrics="authenticated", metrics_rows=100)


def longest(value: Any) -> int:
    """The most items of a list in a JSON document."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max([len(value) if isinstance(value, list) else 0, *map(longest, inner)])


def test_no_answer_is_longer_than_a_page(http: Http) -> None:
    """Each route that is, of the API and of the pages: by its rows, and by its bytes."""
    asked = set()
    for method, path in routes(http):
        if method != "GET" or path in asked or path.startswith(("/static", f"{API}/export")) or "openapi" in path:
            continue
        asked.add(path)
        answer = ask(http, method, path)
        assert answer.status_code < 500, (path, answer.text[:500])
        assert len(answer.content) < 1_000_000, path
        if answer.headers.get("content-type") == "application/json":
            assert longest(answer.json()) <= MAX_PAGE, path
        else:
            assert answer.text.count("<tr") <= 2 * MAX_PAGE, path
    assert {f"{API}/topics", f"{API}/groups", f"{API}/handlers", "/groups", "/handlers", "/metrics", "/"} <= asked


def test_what_is_left_out_is_counted_and_is_on_further_pages(http: Http) -> None:
    """The overview says how much more there is; lists go on, and have their total."""
    overview = http.get("/overview").json()
    assert overview["left_out"]["topics"] == TOPICS - len(overview["topics"])
    assert overview["left_out"]["findings"] > TOPICS
    assert (overview["tiles"]["dead"], overview["tiles"]["undecided"]) == (TOPICS, TOPICS)
    shown = http.ask("GET", "/").text
    assert f"50 of {TOPICS:,} topics and groups" in shown
    assert shown.count('<th scope="row"') == 50
    assert "t01200" in http.ask("GET", "/", params={"q": "T01200"}).text
    first = http.get("/topics", params={"page_size": 500}).json()
    rest = http.get("/topics", params={"page_size": 500, "page_token": first["next_page_token"]}).json()
    names = [row["topic"] for page in (first, rest) for row in page["items"]]
    assert names == [f"t{number:05}" for number in range(1, 1001)]
    assert first["total"] == {"value": TOPICS, "relation": "eq"}
    page = http.ask("GET", "/handlers", params={"page": TOPICS // 50})
    assert page.status_code == 200
    assert [f"t{TOPICS - back:05}" in page.text for back in (1, 100)] == [True, False]


def test_metrics_have_so_many_rows_and_the_rest(http: Http) -> None:
    """Each gauge has the topics with the highest values, and the others together, so that sums are what they were."""
    lines = http.ask("GET", "/metrics").text.splitlines()
    dead = {line.split("{")[1]: float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("outbox_dead_mess")}
    assert (len(dead), sum(dead.values())) == (101, TOPICS)
    (rest,) = (value for labels, value in dead.items() if "(rest)" in labels)
    assert rest == TOPICS - 100
    assert len(lines) < 5_000


@dataclass(frozen=True)
class Named:
    """A row of a list."""

    name: str
    number: int


@pytest.mark.parametrize("size", [1, 3, 7, 500])
def test_pages_of_what_is_all_there(size: int) -> None:
    """Each row once, in order, also where several have one name; what comes meanwhile loses none, nor repeats one."""
    rows = [Named(name, number) for number, name in enumerate("cabbbaabcd")]
    seen: list[Named] = []
    token: str | None = None
    page: Page[Named] = Page([])
    while not seen or token:
        page = listed(rows, PageRequest(size, token), lambda row: (row.name,), ["north"] if size == 3 else [])
        seen += page.items
        token = page.next_page_token
        rows = [*rows, Named("0", -1)]
    assert seen == sorted(rows[:10], key=lambda row: row.name)
    assert (page.unreached, page.total is None) == ((["north"], True) if size == 3 else ([], False))
    third = listed(rows[:10], PageRequest(3, number=3), lambda row: (row.name,))
    assert third.items == sorted(rows[:10], key=lambda row: row.name)[6:9]
    with pytest.raises(InvalidRequest, match="page token"):
        listed(rows, PageRequest(size, json.dumps({"x": 1})), lambda row: (row.name,))
