"""The lists of inbox rows and of dead letters in groups: each filter, each way to the rows, pages, windows."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox.embedded import ServerLike
from outbox.errors import InvalidRequest, UnknownDatabase
from outbox.message.model import Status, uuid7
from outbox.operator.databases import Databases
from outbox.operator.look import inbox_sql
from outbox.operator.model import DeadGroup, InboxFilter, InboxRow, PageRequest, Total
from outbox.operator.operator import Operator
from tests.operator.looking import all_pages, born, id_of, insert, open_databases, registered, row

HOSTILE = "'; DROP TABLE x; -- %s %(topic)s {s} <script> 100%_"
ALL = PageRequest(500)
STATUSES = ("consumed", "failed", "parked", "quarantined")


@dataclass
class World:
    engines: dict[str, Engine]
    databases: Databases

    def rows(self, page: PageRequest = ALL, **wanted: Any) -> list[InboxRow]:
        """Return what a filter finds on one page."""
        return Operator(self.databases).inbox(InboxFilter(**wanted), page).items

    def found(self, **wanted: Any) -> list[str]:
        """Return what a filter finds, as ``group number``."""
        return [f"{row.group} {int(row.message_id.hex[-4:], 16)}" for row in self.rows(**wanted)]

    def pages(self, size: int, **wanted: Any) -> list[InboxRow]:
        """Return what a filter finds, page by page."""
        return all_pages(lambda page: Operator(self.databases).inbox(InboxFilter(**wanted), page), size)


def numbered(number: int, status: str = "consumed", **changed: Any) -> dict[str, Any]:
    """Return an inbox row whose id ends with its number."""
    return row(number, status, **({"message_id": id_of(number, beside=number)} | changed))


def statuses_of(group: str, count: int) -> list[dict[str, Any]]:
    """Return rows of each status in turn, in two topics; a third of the parked ones are discarded."""
    return [
        numbered(
            number,
            STATUSES[number % 4],
            group=group,
            topic="orders" if number % 3 else "payments",
            discarded_at=born(90_000) if number % 12 == 2 else None,
            attempts=number % 5,
        )
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def world(server: ServerLike, template: str) -> Iterator[World]:
    """Three groups in the east, of which two share their messages; one of them in the west, too; few special rows."""
    with open_databases(server, template, "east", "west", "empty") as engines:
        for group in ("bank", "till"):
            insert(engines["east"], "consumer_message", statuses_of(group, 48))
        insert(engines["west"], "consumer_message", statuses_of("bank", 24))
        insert(engines["east"], "consumer_message", [
            numbered(100, "parked", group="other", last_error=HOSTILE, error_kind=None),
            numbered(101, "failed", group="other", last_error="Überlauf: DISK full\nand a needle", error_kind="k"),
            numbered(102, "parked", group="other", topic=HOSTILE, last_error="a_c", error_kind=HOSTILE),
            numbered(103, "parked", group="other", topic=HOSTILE, last_error="abc", error_kind=HOSTILE),
        ])  # fmt: skip
        yield World(engines, registered(engines))


def of(*found: int, group: str = "other") -> list[str]:
    """Return what these numbers are found as."""
    return [f"{group} {number}" for number in found]


def test_all_the_newest_first(world: World) -> None:
    """Without a filter all come, of all groups and databases, in one order."""
    rows = world.rows()
    assert len(rows) == 48 + 48 + 24 + 4
    assert rows == sorted(rows, key=lambda row: (row.message_id, row.group, -ord(row.database[0])), reverse=True)
    assert rows[3] == InboxRow(
        "east",
        "other",
        id_of(100, beside=100),
        "orders",
        0,
        101,
        "parked",
        1,
        None,
        None,
        HOSTILE,
        born(100),
        born(100),
    )


@pytest.mark.parametrize(
    "statuses",
    [("consumed",), ("failed",), ("parked",), ("quarantined",), ("parked", "failed"), ("parked", "quarantined"),
     ("failed", "consumed"), ("parked", "failed", "quarantined"), STATUSES],
)  # fmt: skip
@pytest.mark.parametrize(
    "wanted",
    [{}, {"group": "till"}, {"topic": "payments"}, {"group": "bank", "topic": "orders"}, {"discarded": False},
     {"attempts_gte": 3}, {"error": "ACCOUNT"}],
)  # fmt: skip
def test_by_status_and_place(world: World, statuses: tuple[str, ...], wanted: dict[str, Any]) -> None:
    """Whichever index leads to the rows, they are those of a look at all of them; and pages are the same list."""
    expected = [
        row
        for row in world.rows()
        if row.status in statuses
        and row.group == wanted.get("group", row.group)
        and row.topic == wanted.get("topic", row.topic)
        and ("discarded" not in wanted or row.discarded_at is None)
        and (row.attempts or 0) >= wanted.get("attempts_gte", 0)
        and ("error" not in wanted or "account" in (row.last_error or ""))
    ]
    assert world.rows(status=statuses, **wanted) == expected
    assert world.pages(7, status=statuses, **wanted) == expected


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"group": "other"}, of(103, 102, 101, 100)),
        ({"group": "nobody"}, []),
        ({"group": HOSTILE}, []),
        ({"topic": HOSTILE}, of(103, 102)),
        ({"error": "needle"}, of(101)),
        ({"error": "disk FULL"}, of(101)),
        ({"error": "Überlauf"}, of(101)),
        ({"error": HOSTILE}, of(100)),
        ({"error": "a_c"}, of(102)),
        ({"error": "%", "group": "other"}, of(100)),
        ({"error": "", "group": "other", "status": ("failed",)}, of(101)),
        ({"message_id": id_of(101, beside=101)}, of(101)),
        ({"message_id": id_of(101, beside=101), "status": ("parked",)}, []),
        ({"message_id": uuid7()}, []),
        ({"since": born(101)}, of(103, 102, 101)),
        ({"since": born(100), "until": born(102)}, of(101, 100)),
        ({"since": born(101), "status": ("parked",)}, of(103, 102)),
        ({"until": born(0)}, []),
        ({"until": dt.datetime.max.replace(tzinfo=dt.UTC), "error": "needle"}, of(101)),
        ({"discarded": True, "database": "west"}, of(14, 2, group="bank")),
        ({"discarded": True, "status": ("parked", "failed"), "database": "west"}, of(14, 2, group="bank")),
        ({"discarded": True, "status": ("failed",)}, []),
        ({"fingerprint": "0123456789abcdef"}, []),
        ({"fingerprint": HOSTILE}, []),
        ({"database": "empty"}, []),
    ],
)  # fmt: skip
def test_by_each_filter(world: World, wanted: dict[str, Any], found: list[str]) -> None:
    """Each filter finds what it says and nothing else; what is in it is neither SQL nor a pattern."""
    assert world.found(**wanted) == found


def test_one_message_in_all_inboxes(world: World) -> None:
    """An id finds the rows of all groups in all databases, page by page."""
    expected = [("till", "east"), ("bank", "east"), ("bank", "west")]
    wanted: dict[str, Any] = {"message_id": id_of(7, beside=7)}
    assert [(row.group, row.database) for row in world.rows(**wanted)] == expected
    assert [(row.group, row.database) for row in world.pages(1, **wanted)] == expected


def test_errors_are_their_first_line(world: World) -> None:
    """In lists, an error is its first line, also where one message is looked for."""
    ways: tuple[dict[str, Any], ...] = ({"error": "needle"}, {"message_id": id_of(101, beside=101)})
    for wanted in ways:
        assert [row.last_error for row in world.rows(**wanted)] == ["Überlauf: DISK full"]


@pytest.mark.parametrize("few", [0, 5_000])
@pytest.mark.parametrize(
    "wanted",
    [{}, {"status": ("parked",)}, {"status": ("failed",)}, {"error": "account 7"},
     {"status": ("parked",), "error": "account 7"}, {"status": ("parked", "failed")}, {"discarded": True},
     {"attempts_gte": 4, "status": ("parked", "quarantined")}],
)  # fmt: skip
def test_windows_are_one_list(world: World, monkeypatch: pytest.MonkeyPatch, few: int, wanted: dict[str, Any]) -> None:
    """A search that stops at its window goes on where it stopped, in each place; nothing is missed or repeated."""
    expected = world.rows(**wanted)
    for name, value in (("WINDOW", 6), ("ERROR_WINDOW", few or 4), ("LEAST", 1), ("FEW_ROWS", few)):
        monkeypatch.setattr(inbox_sql, name, value)
    rows = world.pages(5, **wanted)
    assert sorted(rows, key=str) == sorted(expected, key=str)
    by_database = {name: [row for row in rows if row.database == name] for name in world.databases}
    assert by_database == {name: [row for row in expected if row.database == name] for name in world.databases}


def test_a_window_without_a_match(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is empty since the search stopped tells so."""
    monkeypatch.setattr(inbox_sql, "WINDOW", 6)
    monkeypatch.setattr(inbox_sql, "LEAST", 1)
    page = Operator(world.databases).inbox(InboxFilter(database="east", attempts_gte=99), ALL)
    assert (page.items, page.complete, page.searched) == ([], False, 6)
    assert page.next_page_token


def test_rows_that_come_between_pages(world: World) -> None:
    """What comes or changes while somebody turns pages is neither shown twice nor hides anything else."""
    engine = world.engines["empty"]
    insert(engine, "consumer_message", [numbered(n, "parked", group=g) for n in range(40) for g in ("a", "b")])

    def between(number: int) -> None:
        """Park one more at the moment of one that was shown, and a newer one; retry one that comes later."""
        insert(engine, "consumer_message", [
            numbered(40 - number, "parked", group="c"), numbered(900 + number, "parked", group="a"),
        ])  # fmt: skip
        with engine.begin() as connection:
            connection.execute(text(
                "UPDATE outbox.consumer_message SET status = 'failed', next_attempt_at = now() "
                f"WHERE consumer_group = 'b' AND position = {number}"
            ))  # fmt: skip

    try:
        rows = all_pages(
            lambda page: Operator(world.databases).inbox(InboxFilter(database="empty", status=(Status.PARKED,)), page),
            6,
            between,
        )
        keys = [(row.message_id, row.group) for row in rows]
        assert len(keys) == len(set(keys))
        assert keys == sorted(keys, reverse=True)
        assert set(keys) >= {(id_of(n, beside=n), "a") for n in range(40)}
    finally:
        with engine.begin() as connection:
            connection.execute(text("TRUNCATE outbox.consumer_message"))


@pytest.mark.parametrize(
    ("wanted", "total"),
    [
        ({"status": ("parked",)}, Total(33)), ({"status": ("failed",)}, Total(31)),
        ({"status": ("parked",), "discarded": True, "database": "east"}, Total(8)),
        ({"status": ("parked",), "group": "bank", "topic": "orders"}, Total(12)), ({}, None),
        ({"status": ("consumed",)}, None), ({"status": ("parked",), "error": "account"}, None),
    ],
)  # fmt: skip
def test_totals(world: World, wanted: dict[str, Any], total: Total | None) -> None:
    """The first page has a total where an index counts it."""
    assert Operator(world.databases).inbox(InboxFilter(**wanted), PageRequest(5)).total == total


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ({"status": ("discarded",)}, "status"), ({"group": "\0"}, "group"), ({"topic": "\ud800"}, "topic"),
        ({"error": "\0"}, "error"), ({"fingerprint": "\0"}, "fingerprint"), ({"attempts_gte": -1}, "attempts_gte"),
        ({"attempts_gte": 2**31}, "attempts_gte"), ({"since": dt.datetime(2026, 1, 1)}, "since"),  # noqa: DTZ001
    ],
)  # fmt: skip
def test_filters_that_are_none(world: World, wanted: dict[str, Any], field: str) -> None:
    """A filter that can't be one is refused, and the field is named."""
    with pytest.raises(InvalidRequest) as refused:
        world.rows(**wanted)
    assert refused.value.field == field


def summary(groups: list[DeadGroup]) -> list[tuple[str, str, str, int]]:
    """Return database, group, topic and count of groups of dead letters."""
    return [(each.database, each.group, each.topic, each.count.value) for each in groups]


def test_dead_groups(world: World) -> None:
    """Dead letters are grouped by database, group, topic and kind, the most first; discarded ones are none."""
    groups = Operator(world.databases).dead_groups()
    assert summary(groups) == [
        ("east", "bank", "orders", 4), ("east", "bank", "payments", 4), ("east", "till", "orders", 4),
        ("east", "till", "payments", 4), ("east", "other", HOSTILE, 2), ("west", "bank", "orders", 2),
        ("west", "bank", "payments", 2), ("east", "other", "orders", 1),
    ]  # fmt: skip
    assert sum(each.count.value for each in groups) == len(world.rows(status=("parked",), discarded=False))
    first = groups[0]
    assert (first.error_kind, first.count.relation) == ("ValueError in app.py:pay", "eq")
    expected = world.rows(database="east", group="bank", topic="orders", status=("parked",), discarded=False)
    assert first.sample == expected[0]
    assert (first.first_at, first.last_at) == (expected[-1].changed_at, expected[0].changed_at)


def test_dead_groups_by_place(world: World) -> None:
    """A group or a topic narrows them, alone and together."""
    every = Operator(world.databases).dead_groups()
    ways: list[dict[str, Any]] = [{"group": "bank"}, {"topic": "payments"}, {"group": "other", "topic": HOSTILE},
                                  {"database": "west"}]  # fmt: skip
    for wanted in ways:
        expected = [each for each in every if all(getattr(each, name) == value for name, value in wanted.items())]
        assert Operator(world.databases).dead_groups(**wanted) == expected
        assert expected
    assert Operator(world.databases).dead_groups(group=HOSTILE) == []
    assert Operator(world.databases).dead_groups(limit=2) == every[:2]
    assert {each.error_kind for each in every} == {"ValueError in app.py:pay", "unclassified", HOSTILE}


def test_a_fingerprint_finds_its_dead_letters(world: World) -> None:
    """The rows of a fingerprint are those of its group; it is of one database, and one kind."""
    others: list[dict[str, Any]] = [{"group": "nobody"}, {"topic": "nothing"}, {"status": ("failed",)},
                                    {"discarded": True}]  # fmt: skip
    groups = Operator(world.databases).dead_groups()
    assert len({each.fingerprint for each in groups}) == len(groups)
    for group in groups:
        rows = world.rows(fingerprint=group.fingerprint)
        assert len(rows) == group.count.value
        assert rows[0] == group.sample
        assert {(row.database, row.group, row.topic) for row in rows} == {(group.database, group.group, group.topic)}
        assert world.pages(1, fingerprint=group.fingerprint, status=("parked", "failed")) == rows
        for other in others:
            assert world.rows(fingerprint=group.fingerprint, **other) == []


def test_dead_groups_are_counted_to_a_limit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A count ends at its limit, and then says "at least"."""
    monkeypatch.setattr("outbox.operator.look.lists.model.COUNT_LIMIT", 3)
    assert Operator(world.databases).dead_groups()[0].count == Total(3, "gte")


def test_dead_groups_that_are_none(world: World) -> None:
    """A limit, text or database that can't be one is refused."""
    ways: list[dict[str, Any]] = [{"limit": 0}, {"limit": 1001}, {"group": "\0"}, {"topic": "\0"}]
    for wanted in ways:
        with pytest.raises(InvalidRequest):
            Operator(world.databases).dead_groups(**wanted)
    with pytest.raises(UnknownDatabase):
        Operator(world.databases).dead_groups(database="north")
