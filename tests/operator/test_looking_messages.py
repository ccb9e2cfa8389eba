"""The list of messages: each filter, pages over several databases, windows, keys by an index, hostile texts."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError

from outbox import Settings
from outbox.acts.changes import MessageStatus
from outbox.embedded import ServerLike
from outbox.errors import InvalidRequest, UnknownDatabase
from outbox.operator.databases import Database, Databases
from outbox.operator.look import message_sql
from outbox.operator.look.message_sql import LARGEST_BODY
from outbox.operator.model import MessageFilter, MessageRow, PageRequest, Total
from outbox.operator.operator import Operator
from tests.operator.looking import all_pages, born, half, id_of, open_databases, put, registered

HOSTILE = "'; DROP TABLE x; -- %s %(topic)s {s} \\ <script> ☃"
STATUSES = [status.value for status in MessageStatus]
ALL = PageRequest(500)


@dataclass
class World:
    engines: dict[str, Engine]
    databases: Databases

    def rows(self, page: PageRequest = ALL, **wanted: Any) -> list[MessageRow]:
        """Return what a filter finds on one page."""
        return Operator(self.databases).messages(MessageFilter(**wanted), page).items

    def found(self, **wanted: Any) -> list[tuple[str, int]]:
        """Return database and number of each message that a filter finds."""
        return [(row.database, round((row.born_at - born(0)).total_seconds())) for row in self.rows(**wanted)]


@pytest.fixture(scope="module")
def world(server: ServerLike, template: str) -> Iterator[World]:
    """Two databases with messages of each status; in the south, numbers 60 and up, and one that the north has, too."""
    with open_databases(server, template, "north", "south", "empty") as engines:
        for place, status in enumerate(STATUSES):
            put(engines["north"], status, [half(number) for number in range(place, 60, 6)])
        put(engines["south"], "dispatched", [
            half(60, topic="payments", key=HOSTILE, tag="t", headers={"trace": "1", HOSTILE: HOSTILE}),
            half(61, topic="payments", headers={"trace": "1", "more": "x"}, producer_group="other"),
            half(62, body=b'{"order": {"id": "x"}, "trace": 1}', tag="t"),
            half(63, body=b'{"order": {"id": "x"}}', content_type="text/plain"),
            half(64, body=b'{"order": {"id": "x"', content_type="Application/Vnd.Shop+JSON; charset=utf-8"),
            half(65, body=b'{"order": {"id": "x"}}', content_type="application/vnd.shop+json; charset=utf-8"),
            half(66, body=json.dumps({"order": {"id": "x"}, "long": "y" * LARGEST_BODY}).encode()),
        ])  # fmt: skip
        put(engines["south"], "dispatched", [half(30)])
        for engine in engines.values():
            with engine.begin() as connection:
                connection.execute(text("ANALYZE"))
        yield World(engines, registered(engines))


def numbers(*found: int) -> list[tuple[str, int]]:
    """Return what these numbers of the south are found as."""
    return [("south", number) for number in found]


def test_all_the_newest_first(world: World) -> None:
    """Without a filter all come, of all databases; what two of them have comes twice, by their names."""
    found = world.found()
    assert [number for _, number in found] == sorted([*range(67), 30], reverse=True)
    assert [name for name, number in found if number == 30] == ["north", "south"]
    row = next(row for row in world.rows(topic="payments") if row.tag)
    assert row == MessageRow("south", id_of(60), "payments", HOSTILE, "t", "dispatched", born(60), None, "producer",
                             row.decided_at)  # fmt: skip


@pytest.mark.parametrize("status", STATUSES)
def test_by_status(world: World, status: str) -> None:
    """Each status finds its messages, whichever table leads to them."""
    rows = world.rows(status=(status,), database="north")
    assert [row.id for row in rows] == [id_of(number) for number in reversed(range(STATUSES.index(status), 60, 6))]
    assert {row.status for row in rows} == {status}


@pytest.mark.parametrize("statuses", [("undecided", "committed"), ("scheduled", "recalled"), tuple(STATUSES)])
def test_by_several_statuses(world: World, statuses: tuple[str, ...]) -> None:
    """Several statuses find the messages of each."""
    rows = world.rows(status=statuses, database="north")
    assert {row.status for row in rows} == set(statuses)
    assert len(rows) == 10 * len(statuses)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"topic": "payments"}, [61, 60]),
        ({"topic": "payments", "key": HOSTILE}, [60]),
        ({"key": HOSTILE}, [60]),
        ({"key": "key-61"}, [61]),
        ({"key": "Key-61"}, []),
        ({"tag": "t"}, [62, 60]),
        ({"producer_group": "other"}, [61]),
        ({"header": ("trace", "1")}, [61, 60]),
        ({"header": (HOSTILE, HOSTILE)}, [60]),
        ({"header": ("trace", "2")}, []),
        ({"header": ("trace", "1"), "tag": "t"}, [60]),
        ({"topic": HOSTILE}, []),
        ({"tag": "%"}, []),
        ({"body": ("order.id", "61")}, [61]),
        ({"body": ("order.id", "x")}, [65, 62]),
        ({"body": ("trace", "1")}, [62]),
        ({"body": (HOSTILE, HOSTILE)}, []),
        ({"body": ("order.id", "x"), "tag": "t", "status": ("dispatched",)}, [62]),
        ({"database": "south", "since": born(65)}, [66, 65]),
        ({"database": "south", "until": born(60)}, [30]),
        ({"since": born(60), "until": born(62)}, [61, 60]),
        ({"since": born(62), "until": born(62)}, []),
        ({"since": dt.datetime.min.replace(tzinfo=dt.UTC), "until": dt.datetime.max.replace(tzinfo=dt.UTC), "tag": "t"},
         [62, 60]),
        ({"database": "empty"}, []),
    ],
)  # fmt: skip
def test_by_each_filter(world: World, wanted: dict[str, Any], found: list[int]) -> None:
    """Each filter finds what it says and nothing else; what is in it is never SQL."""
    assert world.found(**wanted) == numbers(*found)


def test_born_long_after_the_id_was_made(world: World) -> None:
    """A message of a long transaction is found by when it was written, not by when its id was made."""
    put(world.engines["empty"], "dispatched", [half(7, born_at=born(80_000))])
    try:
        assert len(world.rows(database="empty", since=born(79_999))) == 1
        assert world.rows(database="empty", until=born(79_999)) == []
    finally:
        with world.engines["empty"].begin() as connection:
            connection.execute(text("TRUNCATE outbox.half_message, outbox.op_message, outbox.message"))


@pytest.mark.parametrize("size", [1, 7, 33, 500])
@pytest.mark.parametrize("wanted", [{}, {"status": ("dispatched",)}, {"body": ("order.id", "x")}, {"topic": "orders"}])
def test_pages_are_one_list(world: World, size: int, wanted: dict[str, Any]) -> None:
    """Whatever the size of the pages, they are the same list."""
    pages = all_pages(lambda page: Operator(world.databases).messages(MessageFilter(**wanted), page), size)
    assert pages == world.rows(**wanted)


@pytest.mark.parametrize(
    "wanted",
    [{}, {"status": ("dispatched",)}, {"status": ("undecided",)}, {"tag": "t"}, {"body": ("order.id", "x")},
     {"status": ("recalled",), "topic": "orders"}],
)  # fmt: skip
def test_windows_are_one_list(world: World, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any]) -> None:
    """A search that stops at its window says so, and goes on where it stopped."""
    expected = world.rows(**wanted)
    for name in ("WINDOW", "STATUS_WINDOW", "BODIES"):
        monkeypatch.setattr(message_sql, name, 4)
    pages = all_pages(lambda page: Operator(world.databases).messages(MessageFilter(**wanted), page), 3)
    assert len(pages) == len(expected)
    assert set(pages) == set(expected)


def test_a_window_without_a_match(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is empty since the search stopped tells how many it looked at, and that there may be more."""
    monkeypatch.setattr(message_sql, "WINDOW", 4)
    page = Operator(world.databases).messages(MessageFilter(database="north", tag="none"), ALL)
    assert (page.items, page.complete, page.searched, page.total) == ([], False, 4, None)
    assert page.next_page_token


def test_few_bytes_of_bodies_at_a_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only so many bytes of bodies are read for a page; one that is larger than that by itself still comes."""
    monkeypatch.setattr(message_sql, "BODY_BYTES", 30)
    wanted = MessageFilter(body=("order.id", "x"))
    assert len(all_pages(lambda page: Operator(world.databases).messages(wanted, page), 500)) == 2
    assert not Operator(world.databases).messages(wanted, ALL).complete


@pytest.mark.parametrize(
    "columns", ["key", "key, topic", "key, id", "(key) WHERE key IS NOT NULL", "lower(key)", "tag, key", "topic, key"]
)
def test_keys_by_an_index(world: World, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    """The index on keys, or another that begins with all of them, finds a key; the window doesn't matter then."""
    monkeypatch.setattr(message_sql, "WINDOW", 4)
    target = columns if "WHERE" in columns else f"({columns})"
    wanted = MessageFilter(database="north", key="key-3", topic="orders")
    assert Operator(world.databases).messages(wanted, ALL).complete
    with world.engines["north"].begin() as connection:
        connection.execute(text("DROP INDEX outbox.ix_half_message_key"))
        connection.execute(text(f"CREATE INDEX by_key ON outbox.half_message {target}"))
    try:
        page = Operator(world.databases).messages(wanted, ALL)
    finally:
        with world.engines["north"].begin() as connection:
            connection.execute(text("DROP INDEX outbox.by_key"))
            own = "CREATE INDEX ix_half_message_key ON outbox.half_message (key) WHERE key IS NOT NULL"
            connection.execute(text(own))
    usable = columns not in {"lower(key)", "tag, key", "topic, key"}
    assert page.complete is usable
    assert [row.key for row in page.items] == ["key-3"] * usable


def test_a_topic_by_its_index(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window is one of the topic's own messages: however many others are newer, the first page has them."""
    monkeypatch.setattr(message_sql, "WINDOW", 4)
    page = Operator(world.databases).messages(MessageFilter(database="south", topic="payments"), ALL)
    assert [row.topic for row in page.items] == ["payments"] * 2
    assert page.complete
    assert not Operator(world.databases).messages(MessageFilter(database="south", tag="t"), ALL).complete


def test_a_key_of_many_by_an_index(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where too many messages have the key, the index is left alone; pages before and after are one list."""
    engine = world.engines["empty"]
    put(engine, "dispatched", [half(number, key="often") for number in range(20)])
    try:
        wanted = MessageFilter(database="empty", key="often")
        for most in (5, 100):
            monkeypatch.setattr(message_sql, "OF_KEY", most)
            rows = all_pages(lambda page: Operator(world.databases).messages(wanted, page), 3)
            assert [row.id for row in rows] == [id_of(number) for number in reversed(range(20))]
    finally:
        with engine.begin() as connection:
            connection.execute(text("TRUNCATE outbox.half_message, outbox.op_message, outbox.message"))


def test_messages_that_come_between_pages(world: World) -> None:
    """What comes while somebody turns pages is neither shown twice nor keeps anything else from being shown."""
    engine = world.engines["empty"]
    put(engine, "dispatched", [half(number) for number in range(100, 130)])
    come: list[int] = []

    def between(number: int) -> None:
        """Insert a newer one, an older one, and one at the moment of one that was shown."""
        more = [200 + number, 50 - number]
        put(engine, "dispatched", [*(half(each) for each in more), half(130 - 4 * number, beside=5)])
        come.extend(more)

    try:
        rows = all_pages(
            lambda page: Operator(world.databases).messages(MessageFilter(database="empty"), page), 4, between
        )
        ids = [row.id for row in rows]
        assert len(ids) == len(set(ids))
        assert ids == sorted(ids, reverse=True)
        assert set(ids) >= {id_of(number) for number in range(100, 130)}
        assert not set(ids) & {id_of(number) for number in come if number > 130}
    finally:
        with engine.begin() as connection:
            connection.execute(text("TRUNCATE outbox.half_message, outbox.op_message, outbox.message"))


@pytest.mark.parametrize(
    ("wanted", "total"),
    [
        ({}, Total(68)), ({"database": "north"}, Total(60)), ({"status": ("undecided",)}, Total(10)),
        ({"status": ("scheduled",)}, Total(10)), ({"status": ("scheduled", "recalled")}, Total(20)),
        ({"status": ("committed",)}, None), ({"topic": "orders"}, Total(66)),
        ({"topic": "orders", "status": ("scheduled",)}, None), ({"tag": "t"}, Total(2)),
    ],
)  # fmt: skip
def test_totals(world: World, wanted: dict[str, Any], total: Total | None) -> None:
    """The first page has a total where counting is cheap or the page is all; later ones have none."""
    page = Operator(world.databases).messages(MessageFilter(**wanted), PageRequest(5))
    assert page.total == total
    if page.next_page_token:
        assert (
            Operator(world.databases).messages(MessageFilter(**wanted), PageRequest(5, page.next_page_token)).total
            is None
        )


def test_totals_stop(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A total ends at its limit, and then says "at least"."""
    monkeypatch.setattr("outbox.operator.look.paging.COUNT_LIMIT", 40)
    assert Operator(world.databases).messages(MessageFilter(), PageRequest(5)).total == Total(40, "gte")


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ({"status": ("gone",)}, "status"), ({"status": ("dispatched", HOSTILE)}, "status"),
        ({"topic": "a\0b"}, "topic"), ({"key": "\ud800"}, "key"), ({"tag": "x" * 10_000}, "tag"),
        ({"producer_group": "\0"}, "producer_group"), ({"header": ("a\0", "b")}, "header"),
        ({"header": ("a", "\udfff")}, "header"), ({"body": ("a", "\0")}, "body"), ({"body": ("a." * 50, "b")}, "body"),
        ({"since": dt.datetime(2026, 1, 1)}, "since"), ({"until": dt.datetime(2026, 1, 1)}, "until"),  # noqa: DTZ001
    ],
)  # fmt: skip
def test_filters_that_are_none(world: World, wanted: dict[str, Any], field: str) -> None:
    """A filter that can't be one is refused, and the field is named."""
    with pytest.raises(InvalidRequest) as refused:
        world.rows(**wanted)
    assert refused.value.field == field


def test_tokens_of_other_filters(world: World) -> None:
    """A token is of one filter, one list and one set of databases."""
    token = Operator(world.databases).messages(MessageFilter(topic="orders"), PageRequest(1)).next_page_token
    for wanted in (MessageFilter(), MessageFilter(topic="orders", database="north")):
        with pytest.raises(InvalidRequest) as refused:
            Operator(world.databases).messages(wanted, PageRequest(1, token))
        assert refused.value.field == "page_token"


def test_databases_by_name(world: World) -> None:
    """A database that isn't registered is an error; one without producer's tables has no messages."""
    with pytest.raises(UnknownDatabase):
        world.rows(database="west")
    consumer = Database("south", world.engines["south"], Settings(), frozenset({"consumer"}))
    assert Operator(Databases([consumer])).messages(MessageFilter(), ALL).items == []


def test_a_database_that_is_down(world: World, server: ServerLike) -> None:
    """A list that can't be whole says whose rows it hasn't; one of that database alone is an error."""
    gone = create_engine(server.url("is_not_there"))
    down = Database("down", gone, Settings(), frozenset({"producer", "consumer"}))
    databases = Databases([world.databases["north"], down])
    found = Operator(databases).messages(MessageFilter(), ALL)
    assert (len(found.items), list(found.unreached)) == (60, ["down"])
    with pytest.raises(DBAPIError):
        Operator(databases).messages(MessageFilter(database="down"), ALL)
    assert len(Operator(databases).messages(MessageFilter(database="north"), ALL).items) == 60
