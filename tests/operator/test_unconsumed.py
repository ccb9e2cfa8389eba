"""The list of what a group hasn't consumed yet: by its offsets and failures, over the databases of both sides."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Engine, create_engine, text

from outbox import Settings
from outbox.cli import main
from outbox.console import AllowAll, create_console_app
from outbox.database.execute import Statement, execute
from outbox.database.sql import plan_by_index
from outbox.embedded import ServerLike
from outbox.errors import InvalidRequest
from outbox.operator.databases import AwayDatabase, Database, Databases
from outbox.operator.look import message_sql, unconsumed
from outbox.operator.model import MessageFate, MessageFilter, Page, PageRequest, Selector
from outbox.operator.operator import Operator
from tests.kit import empty
from tests.operator.looking import all_pages, born, half, id_of, insert, open_databases, put, registered, row

ALL = PageRequest(500)
UNCONSUMED = (MessageFate.UNCONSUMED,)


@dataclass
class World:
    """The shop has topic ``orders`` of two queues; group ``till`` reads it in a database of its own."""

    shop: Engine
    till: Engine
    databases: Databases

    def send(self, number: int, queue: int, position: int, send_number: int = 1, **changed: Any) -> None:
        """Put a message, or one that is there once more, into a queue of the shop."""
        if send_number == 1:
            put(self.shop, "committed", [half(number, **changed)])
        place = {"queue": queue, "position": position, "send_number": send_number}
        insert(self.shop, "message", [{"topic": "orders", "half_id": id_of(number)} | place])

    def read(self, *positions: int, group: str = "till") -> None:
        """Move the offsets of a group, one for each queue."""
        insert(self.till, "consumer_offset", [
            {"consumer_group": group, "topic": "orders", "queue": queue, "position": position, "starts": 0}
            for queue, position in enumerate(positions)
        ])  # fmt: skip

    def had(self, number: int, status: str, **changed: Any) -> None:
        """Have the inbox of group ``till`` know a message."""
        insert(self.till, "consumer_message", [row(number, status, **changed)])

    def page(self, page: PageRequest = ALL, *, group: str = "till", **wanted: Any) -> Page[Any]:
        """Return a page of what a group hasn't consumed."""
        return Operator(self.databases).messages(MessageFilter(group=group, status=UNCONSUMED, **wanted), page)

    def found(self, **wanted: Any) -> list[int]:
        """Return the numbers of the messages that a group hasn't consumed."""
        return numbers(self.page(**wanted))


def numbers(page: Page[Any]) -> list[int]:
    """Return the numbers of the messages on a page."""
    return [round((row.born_at - born(0)).total_seconds()) for row in page.items]


@pytest.fixture(scope="module")
def _world(server: ServerLike, template: str) -> Iterator[World]:
    with open_databases(server, template, "shop", "till") as engines:
        yield World(engines["shop"], engines["till"], registered(engines))


@pytest.fixture
def world(_world: World) -> World:
    """Both databases, with nothing but the topic in them."""
    producers = "half_message", "half_check", "op_message", "scheduled_message", "message", "topic"
    tables = *producers, "consumer_message", "consumer_offset", "worker"
    for engine in (_world.shop, _world.till):
        with engine.begin() as connection:
            empty(connection, *(f"outbox.{table}" for table in tables))
    insert(_world.shop, "topic", [{"name": "orders", "queues": 2}])
    return _world


def test_what_stands_after_the_offsets_and_what_has_failed(world: World) -> None:
    """Neither what it has read, nor what it parked, comes: of before the offsets only what will be retried."""
    for number in range(10):
        world.send(number, number % 2, number + 1)
    world.read(5, 4)
    for number, status in enumerate(["consumed", "failed", "parked", "quarantined"]):
        world.had(number, status)
    assert world.found() == [9, 8, 7, 6, 5, 1]
    assert world.page().unreached == []


def test_from_birth(world: World) -> None:
    """What is committed and isn't dispatched yet, and what is scheduled, nothing has consumed; once it is sent, too."""
    world.send(0, 0, 1)
    world.read(1)
    for number, status in enumerate(["committed", "scheduled", "recalled", "undecided", "rolled_back", "committed"], 1):
        put(world.shop, status, [half(number)])
    put(world.shop, "committed", [half(7, topic="other")])
    assert world.found() == [6, 2, 1]
    assert numbers(Page(all_pages(world.page, 1))) == [6, 2, 1]
    assert world.found(key="none") == []
    insert(
        world.shop, "message", [{"topic": "orders", "queue": 0, "position": 2, "half_id": id_of(1), "send_number": 1}]
    )
    assert world.found() == [6, 2, 1]


def test_many_that_are_scheduled(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read by windows, and none is missed or comes twice."""
    monkeypatch.setattr(unconsumed, "WINDOW", 3)
    world.send(0, 0, 1)
    world.read(1)
    for number in range(1, 9):
        put(world.shop, "committed" if number % 3 == 0 else "scheduled", [half(number)])
    for size in (1, 2, 50):
        assert numbers(Page(all_pages(world.page, size))) == [*range(8, 0, -1)]


def test_a_queue_without_an_offset_is_unread(world: World) -> None:
    """One that was added after the group began is read from its first message."""
    world.send(0, 0, 1)
    world.send(1, 1, 1)
    world.read(1)
    assert world.found() == [1]


def test_what_was_sent_again_comes_once(world: World) -> None:
    """A resend of what is consumed or kept off isn't awaited; of what is parked it is; two sends are one message."""
    for number, status in enumerate(["consumed", "quarantined", "parked", "failed"]):
        world.send(number, 0, number + 1)
        world.had(number, status)
        world.send(number, 1, number + 1, send_number=2)
    world.send(4, 0, 9)
    world.send(4, 1, 9, send_number=2)
    world.read(4, 0)
    assert world.found() == [4, 3, 2]


def test_pages(world: World) -> None:
    """No message is missed and none comes twice, by tokens or numbers, while new ones come and old ones are read."""
    for number in range(40):
        world.send(number, number % 2, number + 1)
    world.read(0, 0)
    for number in (0, 1, 2):
        world.had(number, "failed")
    world.read(4, 4)
    coming = itertools.count(100)

    def between(_: int) -> None:
        number = next(coming)
        world.send(number, number % 2, number + 1)

    for size in (1, 7, 50):
        rows = all_pages(world.page, size, between if size == 7 else lambda _: None)
        found = [number for number in numbers(Page(rows)) if number < 100]
        assert found == [*range(39, 3, -1), 2, 1, 0]
    world.read(40, 40)
    assert numbers(world.page(PageRequest(2, number=2))) == numbers(Page(world.page().items[2:4]))


def test_a_page_in_the_middle_of_a_resend(world: World) -> None:
    """What the inbox has nonetheless is stepped over, however many such rows there are."""
    for number in range(6):
        world.send(number, 0, number + 1)
        world.send(number, 1, number + 1, send_number=2)
        if number != 2:
            world.had(number, "consumed")
    world.read(6, 0)
    rows = all_pages(world.page, 2)
    assert numbers(Page(rows)) == [2]


def test_more_conditions(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other conditions hold for both kinds; a search stops at its window and goes on."""
    monkeypatch.setattr(unconsumed, "WINDOW", 3)
    for number in range(12):
        world.send(number, number % 2, number + 1, key="mine" if number in {0, 2, 11} else "other")
    world.had(0, "failed")
    world.had(1, "failed")
    world.read(1, 2)
    rows = all_pages(lambda page: world.page(page, key="mine"), 2)
    assert sorted(numbers(Page(rows))) == [0, 2, 11]
    assert world.found(key="nobody's") == []
    assert world.found(topic="orders", since=born(5), until=born(8)) == [7, 6, 5]


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ({"group": "nobody"}, "group"),
        ({"group": "till", "topic": "payments"}, "group"),
        ({"group": "till", "status": ()}, "group"),
        ({"group": "till", "status": (MessageFate.UNCONSUMED, MessageFate.FAILED)}, "group"),
        ({"group": "till", "body": ("order.id", "1")}, "body"),
    ],
)
def test_refused(world: World, wanted: dict[str, Any], field: str) -> None:
    """A group that nobody knows is no empty list, which would read as: all is consumed."""
    world.read(0, 0)
    with pytest.raises(InvalidRequest) as caught:
        Operator(world.databases).messages(MessageFilter(**({"status": UNCONSUMED} | wanted)), ALL)
    assert caught.value.field == field


def test_a_bulk_job_is_refused(world: World) -> None:
    """Its query runs in one database, and can't ask the other one."""
    with pytest.raises(InvalidRequest, match="name them"):
        Operator(world.databases).preview("resend", Selector(messages=MessageFilter(group="till", status=UNCONSUMED)))


def test_several_databases_have_the_topic(world: World) -> None:
    """Then the group's living workers tell which one it reads, or the operator does."""
    insert(world.till, "topic", [{"name": "orders", "queues": 2}])
    world.send(0, 0, 1)
    world.read(0, 0)
    assert world.found() == [], "a group reads the topic of its own database, where there is one"
    twin = Databases([*world.databases.values(), Database("twin", world.shop, Settings(), frozenset({"producer"}))])
    with world.till.begin() as connection:
        connection.execute(text("DELETE FROM outbox.topic"))
    operator, criteria = Operator(twin), MessageFilter(group="till", status=UNCONSUMED)
    with pytest.raises(InvalidRequest, match="name one of: shop, twin"):
        operator.messages(criteria, ALL)
    page = operator.messages(MessageFilter(group="till", status=UNCONSUMED, database="twin"), ALL)
    assert [row.database for row in page.items] == ["twin"]


def test_a_producer_that_is_not_registered(world: World) -> None:
    """What the group waits for can't be listed; it isn't nothing."""
    world.read(0, 0)
    with pytest.raises(InvalidRequest, match="register that of its producer"):
        Operator(Databases([world.databases["till"]])).messages(MessageFilter(group="till", status=UNCONSUMED), ALL)


@pytest.mark.parametrize("away", ["shop", "till"])
def test_while_a_database_is_away(world: World, away: str) -> None:
    """The list says which one it can't read, and goes on when it is back; it never says that nothing is left."""
    for number in range(4):
        world.send(number, 0, number + 1)
    world.had(0, "failed")
    world.read(1, 0)
    first = world.page(PageRequest(2))
    down = create_engine("postgresql+psycopg://localhost:1/nowhere")
    error = ConnectionError("down")
    there = [each for each in world.databases.values() if each.name != away]
    broken = World(world.shop, world.till, Databases(there, [AwayDatabase(away, down, Settings(), error)]))
    for page in (broken.page(), broken.page(PageRequest(2, first.next_page_token))):
        assert (page.items, page.unreached) == ([], [away])
    assert page.next_page_token == first.next_page_token
    assert numbers(world.page(PageRequest(2, page.next_page_token))) == [1, 0]
    gone = Databases([*there, Database(away, down, Settings(), world.databases[away].parts)])
    found = World(world.shop, world.till, gone).page()
    assert (found.items, found.unreached) == ([], [away])
    down.dispose()


def test_ways_in(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """HTTP, the page and the command find the same; so does the link of the group's row."""
    world.send(0, 0, 1)
    world.send(1, 0, 2)
    world.read(1, 0)
    wanted = {"group": "till", "status": "unconsumed"}
    with TestClient(create_console_app(Operator(world.databases), authorizer=AllowAll())) as client:
        client.base_url = "http://localhost"
        assert [each["id"] for each in client.get("/api/v1/messages", params=wanted).json()["items"]] == [str(id_of(1))]
        page = client.get("/messages", params=wanted).text
        assert str(id_of(1)) in page
        assert str(id_of(0)) not in page
        overview = client.get("/").text
        assert "messages?group=till&amp;topic=orders&amp;status=unconsumed" in overview
        assert client.get("/messages", params={"group": "till"}).status_code == 422
    urls = [f"{name}={engine.url.render_as_string(hide_password=False)}" for name, engine in
            (("shop", world.shop), ("till", world.till))]  # fmt: skip
    with pytest.raises(SystemExit, match="0"):
        main(["messages", "list", "--group", "till", "--status", "unconsumed", "-o", "json",
              *(word for url in urls for word in ("--database", url))])  # fmt: skip
    assert str(id_of(1)) in capsys.readouterr().out


def test_cost(world: World) -> None:
    """However many messages were consumed before: the rows that are read are those after the offsets."""
    with world.shop.begin() as connection:
        connection.execute(
            text("""
            INSERT INTO outbox.half_message (id, producer_group, topic, headers, content_type, body, born_at)
            SELECT ('00000000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, 'shop', 'orders', '{}', 'x', '',
                   now() FROM generate_series(1, 3000) n""")
        )
        connection.execute(
            text("""
            INSERT INTO outbox.message (topic, queue, position, half_id, send_number)
            SELECT 'orders', 0, row_number() OVER (ORDER BY id), id, 1 FROM outbox.half_message""")
        )
    queues = [message_sql.UnreadQueue("orders", 0, 2990, 2**62)]
    statement = message_sql.list_after_offsets("outbox", MessageFilter(), queues, 51)
    with world.shop.connect() as connection, connection.begin():
        execute(connection, plan_by_index())
        explain = Statement(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement.sql}", statement.values)
        (((plan,),),) = execute(connection, explain)
    assert sum(_read(plan[0]["Plan"])) < 200


def _read(plan: dict[str, Any]) -> Iterator[float]:
    if "Scan" in plan["Node Type"] and "Relation Name" in plan:
        yield (plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)) * plan["Actual Loops"]
    for inner in plan.get("Plans", []):
        yield from _read(inner)
