"""A database is away: what can be read is shown, what can't is named, and nothing is told that isn't known."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import NullPool, create_engine, text

from outbox.acts.messages import ACTS
from outbox.embedded import ServerLike
from tests.console.test_api_roles import ask as ask_for
from tests.console.test_api_roles import routes
from tests.console.visitor import Page
from tests.console.web import API, Http, Shop

DEAD = "postgresql+psycopg://nobody@127.0.0.1:1/nothing"
LISTS = ("/messages", "/inbox", "/halves", "/scheduled", "/audit", "/bulk-jobs")
PAGES = (*LISTS, "/dead", "/dead?tab=discarded", "/handlers", "/locks", "/silences", "/groups")
MISSING = "Not reached: north. What only it knows is missing here."


@pytest.fixture
def north(server: ServerLike, template: str) -> Iterator[Shop]:
    """A second shop, in a database that can be taken away."""
    name = f"console_{uuid.uuid4().hex}"
    server.create_database(name, template=template)
    engine = create_engine(server.url(name))
    yield Shop(engine)
    engine.dispose()
    server.drop_database(name)


@contextmanager
def away(shop: Shop, server: ServerLike) -> Iterator[None]:
    """Let nobody connect to the database of a shop, and end those who have."""
    name = shop.engine.url.database
    shop.engine.dispose()
    admin = create_engine(server.url("postgres"), isolation_level="AUTOCOMMIT", poolclass=NullPool)
    ending = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"
    with admin.connect() as connection:
        connection.execute(text(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false'))
        connection.execute(text(ending), {"name": name})
        try:
            yield
        finally:
            connection.execute(text(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true'))


def test_lists_show_the_rest(shop: Shop, north: Shop, server: ServerLike, make_console: Callable[..., Http]) -> None:
    """Of databases of which one goes away, and comes back: the pages go on, and none of its rows is missed."""
    mine, theirs = shop.orders(1, 2), north.orders(3, 4, 5)
    mine += shop.orders(6, 7, 8)
    http = make_console({"south": shop.engine, "north": north.engine})
    first = http.get("/messages", params={"page_size": 4, "topic": "orders"}).json()
    assert first["unreached"] == []
    with away(north, server):
        for path in LISTS:
            page = http.get(path).json()
            assert (page["unreached"], page["total"]) == (["north"], None), path
        for path in PAGES:
            answer = http.ask("GET", path)
            assert (answer.status_code, answer.text.count(MISSING)) == (200, 1), path
        found = {row["id"] for row in http.get("/messages").json()["items"]}
        assert found.issuperset(map(str, mine))
        assert not found & set(map(str, theirs))
        for call in ("/dead/groups", "/export/messages.csv"):
            answer = http.get(call)
            assert answer.status_code == 503, (call, answer.text)
        # The half of the list that is left, to its end; the other half is still to come.
        seen, token = first["items"], first["next_page_token"]
        page = http.get("/messages", params={"page_size": 100, "topic": "orders", "page_token": token}).json()
        seen += page["items"]
        assert (page["complete"], page["unreached"]) == (False, ["north"])
        assert http.get("/messages", params={"database": "north"}).status_code == 503
        assert http.ask("GET", f"/jump?q={mine[0]}").status_code == 303
    token = page["next_page_token"]
    seen += http.get("/messages", params={"page_size": 100, "topic": "orders", "page_token": token}).json()["items"]
    ids = [row["id"] for row in seen]
    assert len(ids) == len(set(ids))
    assert set(ids).issuperset(map(str, [*mine, *theirs]))


def test_a_database_that_was_never_there_is_named(shop: Shop, make_console: Callable[..., Http]) -> None:
    """It was away when the console began: as one that went later. A message may be there, and isn't 'not found'."""
    http = make_console({"south": shop.engine, "north": DEAD})
    for path in PAGES:
        answer = http.ask("GET", path)
        assert (answer.status_code, answer.text.count(MISSING)) == (200, 1), path
        assert not re.search(r"No dead letters<|No group has|No messages yet|Nothing was discarded<", answer.text), path
    answer = http.get(f"/messages/{uuid.uuid4()}")
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:outbox:problem:unavailable")
    assert http.get(f"/bulk-jobs/{uuid.uuid4()}").status_code == 503
    page = http.ask("GET", "/system").text
    assert "north" in page
    (message_id,) = shop.orders(1)
    assert http.get(f"/messages/{message_id}").json()["unseen"] == ["north"]


@pytest.mark.parametrize("begins", ["away", "there"])
def test_the_overview_shows_no_zero_that_it_does_not_know(
    north: Shop, server: ServerLike, template: str, make_console: Callable[..., Http], begins: str
) -> None:
    """Of an empty database and one that is away: no zero, no green tick, no 'nothing needs you'; and no badge of 0."""
    name = f"console_{uuid.uuid4().hex}"
    server.create_database(name, template=template)
    empty = create_engine(server.url(name))
    north.parked(1)
    http = make_console({"south": empty, "north": DEAD if begins == "away" else north.engine})
    if begins == "there":
        page = http.ask("GET", "/").text
        assert ">0<" in page
    with away(north, server):
        if begins == "there":
            http.app.state.badges.forget()
        page = http.ask("GET", "/").text
        assert MISSING in page
        assert "Nothing needs you" not in page
        assert 'class="row good"' not in page
        tiles = re.findall(r'<span class="value[^>]*>\s*([^<\s]*)', page)
        assert set(tiles) == {"\N{EN DASH}"}
        assert re.findall(r'<span class="count"[^>]*>([^<]*)', page) == ["?", "?"]
        assert "can&#39;t be reached" in page
        overview = http.get("/overview").json()
        assert overview["unreachable"] == ["north"]
        assert overview["findings"][0]["code"] == "database.unreachable"
    empty.dispose()
    server.drop_database(name)


def test_where_databases_are_is_not_for_viewers(museum: Shop, shop: Shop, make_console: Callable[..., Http]) -> None:
    """No route tells one of a host, port, user or URL, neither of those that are read nor of one that is away."""
    url, said = shop.engine.url, 'connection to server at "10.1.2.3", port 5433 failed: no user "owner"'
    source = f"{url.host}:{url.port}/ledger"
    handlers = [{"kind": "consumer", "topic": "orders", "group": "billing", "name": "f", "options": {"source": source}}]
    duties = {"dispatch": {"failures": 3, "last_error": f"OperationalError: {said}"}}
    with shop.engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO outbox.worker (id, name, version, roles, started_at, seen_at, duties, handlers) VALUES "
                "(gen_random_uuid(), 'w', '1', '[]', now(), now() + interval '1 day', :duties, :handlers)"
            ),
            {"duties": json.dumps(duties), "handlers": json.dumps(handlers)},
        )
        connection.execute(
            text(
                "INSERT INTO outbox.reconciliation_run (id, job_id, topic, consumer_group, started_at, finished_at, "
                "applied, error) VALUES (gen_random_uuid(), gen_random_uuid(), 'orders', 'billing', now(), now(), "
                "false, :error)"
            ),
            {"error": said},
        )
    http = make_console({"south": shop.engine, "north": DEAD})
    # With its word: a hash or an id may have any four digits.
    secrets = ("://", source, "10.1.2.3", "port 5433", "port 1 ", '"owner"', "&#34;owner", "nobody@")
    found: dict[str, set[str]] = {"viewer": set(), "operator": set()}
    for method, path in routes(http):
        if method != "GET" or path.startswith("/static") or "openapi" in path:
            continue
        for role, secrets_of_role in found.items():
            answer = ask_for(http.as_role(role), method, path)
            assert answer.status_code < 500 or answer.status_code == 503, path
            secrets_of_role.update(f"{path}: {secret}" for secret in secrets if secret in answer.text)
    assert found["viewer"] == set()
    assert {each.partition(":")[0] for each in found["operator"]} >= {"/system", f"{API}/system", f"{API}/handlers"}


def test_nothing_is_zero_that_is_not_known(shop: Shop, make_console: Callable[..., Http]) -> None:
    """Each answer of the API names the database that is away, or isn't given; and no number of it is told for all."""
    with shop.engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO outbox.consumer_offset (consumer_group, topic, queue, position, starts) "
                "VALUES ('auditing', 'elsewhere', 0, 7, 0)"
            )
        )
    (message_id,) = shop.orders(1)
    http = make_console({"south": shop.engine, "north": DEAD}, metrics="authenticated")
    of_one_database = {f"{API}/bulk-jobs/{{bulk_job_id}}", f"{API}/openapi.json"}
    for method, path in routes(http):
        if method == "GET" and path.startswith(API) and path not in of_one_database and "/payload" not in path:
            answer = ask_for(http, method, path)
            assert answer.status_code in {422, 503} or "north" in answer.text, (path, answer.text[:300])
    overview = http.get("/overview").json()
    assert 0 not in overview["tiles"].values()
    assert {name for name, value in overview["tiles"].items() if value is not None} == set(overview["capped"])
    totals = [each for each in overview["series"] if "/" not in each["name"]]
    assert totals
    assert {value for each in totals for value in each["values"]} == {None}
    (topic,) = (each for each in overview["topics"] if each["topic"] == "elsewhere")
    counts = ("undecided", "undispatched", "messages", "scheduled", "parked", "queues", "committed", "checks")
    assert [topic[name] for name in counts] == [None] * len(counts)
    assert topic["groups"][0]["lag"] is None
    page = Page(http.ask("GET", "/"))
    assert next(row for row in page.rows if "elsewhere" in row).split()[2:5] == ["unknown", *"\N{EN DASH}" * 2]
    assert next(row for row in page.rows if "elsewhere" in row).endswith("0 0 unknown")
    assert "outbox_pending_messages{" not in "".join(
        line for line in http.ask("GET", "/metrics").text.splitlines() if "elsewhere" in line
    )
    view = http.get(f"/messages/{message_id}").json()
    of_inbox = [name for name, act in ACTS.items() if act.noun == "inbox"]
    assert [view["refused"][name] for name in of_inbox] == [
        "its state in all groups isn't known: north can't be read now"
    ] * len(of_inbox)
    (unknown,) = (each for each in http.get("/groups").json()["items"] if each["group"] == "auditing")
    assert (unknown["lag"], unknown["oldest_lag"]) == (None, None)


def test_a_message_whose_groups_are_away(
    shop: Shop, north: Shop, server: ServerLike, make_console: Callable[..., Http]
) -> None:
    """Neither its page nor its next step says that no group has it."""
    with shop.engine.begin() as connection:
        message_id = shop.outbox.send(connection, "alone", {})
    shop.drain()
    http = make_console({"south": shop.engine, "north": north.engine})
    assert http.get(f"/messages/{message_id}").json()["next"].endswith("no group of its topic is known here")
    with away(north, server):
        view = http.get(f"/messages/{message_id}").json()
        assert view["next"] == "dispatched; what groups did with it is unknown: north can't be read now"
        page = http.ask("GET", f"/messages/{message_id}").text
        assert "No group of this topic" not in page
        assert "What groups did with it isn" in page


def test_badges_count_from_two_on(north: Shop, make_console: Callable[..., Http]) -> None:
    """Of one, of two, of three parked halves and dead letters."""
    http = make_console(north.engine)
    for number in range(1, 4):
        north.parked(number)
        half = north.half(number)
        with north.engine.begin() as connection:
            connection.execute(
                text("UPDATE outbox.half_check SET parked_at = now(), reason = 'x' WHERE half_id = :id"), {"id": half}
            )
        http.app.state.badges.forget()
        page = http.ask("GET", "/system").text
        assert re.findall(r'<span class="count">([^<]*)', page) == [str(number), str(number)]
