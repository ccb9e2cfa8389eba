"""The lists of undecided halves, scheduled and recalled messages, and of what operators did."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from outbox.embedded import ServerLike
from outbox.errors import InvalidRequest
from outbox.operator.databases import Databases
from outbox.operator.look import message_sql
from outbox.operator.model import (
    AuditFilter,
    AuditRow,
    HalfFilter,
    HalfRow,
    HalfStatus,
    PageRequest,
    ScheduledFilter,
    ScheduledRow,
    Total,
)
from outbox.operator.operator import Operator
from tests.operator.looking import all_pages, born, half, id_of, insert, open_databases, put, registered

HOSTILE = "'; DROP TABLE x; -- %s {s} <script>"
ALL = PageRequest(500)


@dataclass
class World:
    engines: dict[str, Engine]
    databases: Databases

    def halves(self, page: PageRequest = ALL, **wanted: Any) -> list[HalfRow]:
        """Return the halves that a filter finds."""
        return Operator(self.databases).halves(HalfFilter(**wanted), page).items

    def scheduled(self, page: PageRequest = ALL, **wanted: Any) -> list[ScheduledRow]:
        """Return the scheduled messages that a filter finds."""
        return Operator(self.databases).scheduled(ScheduledFilter(**wanted), page).items

    def audit(self, page: PageRequest = ALL, **wanted: Any) -> list[AuditRow]:
        """Return the acts that a filter finds."""
        return Operator(self.databases).audit(AuditFilter(**wanted), page).items


@pytest.fixture(scope="module")
def world(server: ServerLike, template: str) -> Iterator[World]:
    """Two databases with undecided halves in each status, scheduled messages with ties, and acts by turns."""
    with open_databases(server, template, "north", "south") as engines:
        for name, engine in engines.items():
            first = 0 if name == "north" else 1
            put(engine, "undecided", [half(number, topic=f"t{number % 3}") for number in range(first, 40, 2)])
            put(engine, "scheduled", [
                half(1000 + number, topic=f"t{number % 3}", deliver_at=born(90_000 + number // 4))
                for number in range(first, 24, 2)
            ])  # fmt: skip
            put(engine, "recalled", [half(2000 + number, topic=f"t{number % 3}") for number in range(first, 12, 2)])
            insert(engine, "audit", [
                {
                    "acted_at": born(number),
                    "actor": ("ann", "bob")[number % 3 == 0],
                    "action": ("resend", "retry", HOSTILE)[number % 5 % 3],
                    "target": f"till/{id_of(number // 10)}" if number % 4 else str(id_of(number // 10)),
                    "reason": HOSTILE,
                    "result": {"n": number},
                    "origin": {"via": "cli"} if number % 2 else None,
                }
                for number in range(first, 80, 2)
            ])  # fmt: skip
        insert(engines["south"], "consumer_message", [
            {"consumer_group": "till", "message_id": id_of(1), "topic": "t", "queue": 0, "position": 1,
             "status": "consumed", "attempts": 1},
        ])  # fmt: skip
        with engines["north"].begin() as connection:
            for change, ids in (
                ("next_check_at = now() + interval '1 day'", [0, 2]),
                ("next_check_at = now() + interval '1 day', checked_at = now(), check_times = 2, "
                 "last_answer = 'unknown', last_error = E'No till\\nTrace'", [4]),
                ("parked_at = now(), reason = 'over its checks'", [6, 8]),
            ):  # fmt: skip
                connection.execute(
                    text(f"UPDATE outbox.half_check SET {change} WHERE half_id = ANY (:ids)"),
                    {"ids": [id_of(number) for number in ids]},
                )
        yield World(engines, registered(engines))


def test_halves_the_oldest_first(world: World) -> None:
    """All undecided halves of all databases come in the order in which they were written."""
    rows = world.halves()
    assert [row.id for row in rows] == [id_of(number) for number in range(40)]
    assert [row.database for row in rows[:3]] == ["north", "south", "north"]
    row = rows[4]
    assert (row.status, row.checks, row.last_answer, row.last_error) == ("waiting", 2, "unknown", "No till")
    assert (row.topic, row.key, row.born_at, row.fenced, row.being_asked) == ("t1", "key-4", born(4), False, False)


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        ({}, 40), ({"database": "south"}, 20), ({"topic": "t0"}, 14), ({"topic": HOSTILE}, 0),
        ({"status": "immune"}, 2),
        ({"status": "waiting"}, 1), ({"status": "parked"}, 2), ({"status": "orphan"}, 35),
        ({"status": "parked", "topic": "t0"}, 1), ({"min_age": 0}, 40), ({"min_age": 3e9}, 0),
    ],
)  # fmt: skip
def test_halves_by_each_filter(
    world: World, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any], count: int
) -> None:
    """Each filter finds what it says; page by page and within windows the same."""
    rows = world.halves(**wanted)
    assert len(rows) == count

    def ids(size: int) -> list[UUID]:
        found = all_pages(lambda page: Operator(world.databases).halves(HalfFilter(**wanted), page), size)
        return sorted(row.id for row in found)

    expected = [row.id for row in rows]
    assert ids(3) == expected
    monkeypatch.setattr(message_sql, "HALF_WINDOW", 4)
    assert ids(3) == expected


def test_halves_that_are_decided_between_pages(world: World) -> None:
    """What is decided while somebody turns pages is gone; nothing else is missed, and nothing comes twice."""
    engine = world.engines["south"]
    numbers = range(50_000, 50_030)
    put(engine, "undecided", [half(number, topic="busy") for number in numbers])

    def between(number: int) -> None:
        """Decide one that was shown and one that comes; write one more."""
        gone = [id_of(50_000 + number), id_of(50_029 - number)]
        put(engine, "undecided", [half(50_100 + number, topic="busy")])
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM outbox.half_check WHERE half_id = ANY (:ids)"), {"ids": gone})

    try:
        wanted = HalfFilter(database="south", topic="busy")
        ids = [row.id for row in all_pages(lambda page: Operator(world.databases).halves(wanted, page), 4, between)]
        assert ids == sorted(set(ids))
        assert set(ids) >= {id_of(number) for number in range(50_000, 50_018)}
    finally:
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM outbox.half_check WHERE topic = 'busy'"))
            connection.execute(text("DELETE FROM outbox.half_message WHERE topic = 'busy'"))


def test_scheduled_the_next_due_first(world: World) -> None:
    """Scheduled messages come by when they are due, those of one moment by their ids."""
    rows = world.scheduled()
    assert rows == sorted(rows, key=lambda row: (row.deliver_at, row.id))
    assert {row.id for row in rows} == {id_of(1000 + number) for number in range(24)}
    assert rows[0] == ScheduledRow("north", id_of(1000), "t0", "key-1000", born(90_000), None, None, held=False)


def test_recalled_the_newest_first(world: World) -> None:
    """Recalled messages are a list of their own."""
    rows = world.scheduled(recalled=True)
    assert [row.id for row in rows] == [id_of(2000 + number) for number in reversed(range(12))]
    assert {row.recalled_by for row in rows} == {"ann"}


@pytest.mark.parametrize("recalled", [False, True])
@pytest.mark.parametrize(
    ("wanted", "share"), [({}, 1), ({"topic": "t1"}, 3), ({"database": "north"}, 2), ({"topic": "x"}, 0)]
)
@pytest.mark.parametrize("window", [3, 5_000])
def test_scheduled_by_each_filter(
    world: World, monkeypatch: pytest.MonkeyPatch, recalled: bool, wanted: dict[str, Any], share: int, window: int
) -> None:
    """Each filter finds what it says; page by page and within windows the same."""
    rows = world.scheduled(recalled=recalled, **wanted)
    assert len(rows) == ((12 if recalled else 24) // share if share else 0)
    for name in ("HALF_WINDOW", "RECALLED_WINDOW"):
        monkeypatch.setattr(message_sql, name, window)
    sought = ScheduledFilter(recalled=recalled, **wanted)
    found = all_pages(lambda page: Operator(world.databases).scheduled(sought, page), 5)
    assert sorted(found, key=str) == sorted(rows, key=str)
    assert window == 3 or found == rows


def test_audit_the_newest_first(world: World) -> None:
    """Acts of all databases come by time, with all that is known of them."""
    rows = world.audit()
    assert [row.acted_at for row in rows] == [born(number) for number in reversed(range(80))]
    assert rows[0] == AuditRow("south", rows[0].id, born(79), "ann", "retry", f"till/{id_of(7)}", HOSTILE, {"n": 79},
                               {"via": "cli"})  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        ({"database": "north"}, 40), ({"actor": "bob"}, 27), ({"actor": HOSTILE}, 0), ({"action": HOSTILE}, 16),
        ({"action": "retry", "actor": "bob"}, 10), ({"since": born(70)}, 10), ({"until": born(10)}, 10),
        ({"since": born(10), "until": born(20), "actor": "bob"}, 3), ({"target": str(id_of(2))}, 8),
        ({"target": str(id_of(2)).upper()}, 8), ({"target": str(id_of(2)), "actor": "bob"}, 3),
        ({"target": f"till/{id_of(2)}"}, 7), ({"target": HOSTILE}, 0),
        ({"target": str(id_of(2)), "database": "north"}, 3),
    ],
)  # fmt: skip
@pytest.mark.parametrize("window", [3, 5_000])
def test_audit_by_each_filter(
    world: World, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any], count: int, window: int
) -> None:
    """Each filter finds what it says; page by page and within windows the same."""
    rows = world.audit(**wanted)
    assert len(rows) == count
    monkeypatch.setattr(message_sql, "AUDIT_WINDOW", window)
    found = all_pages(lambda page: Operator(world.databases).audit(AuditFilter(**wanted), page), 2)
    assert len(found) == count
    assert sorted(found, key=lambda row: row.acted_at, reverse=True) == rows


def test_acts_between_pages(world: World) -> None:
    """What is done while somebody turns pages is neither shown nor hides what was."""
    before = world.audit()
    rows = all_pages(
        lambda page: Operator(world.databases).audit(AuditFilter(), page),
        9,
        lambda number: insert(world.engines["north"], "audit", [
            {"acted_at": born(100 + number), "actor": "eve", "action": "x", "target": "y"},
        ]),
    )  # fmt: skip
    with world.engines["north"].begin() as connection:
        connection.execute(text("DELETE FROM outbox.audit WHERE actor = 'eve'"))
    assert rows == before


def test_totals(world: World) -> None:
    """The first page has a total where counting is cheap, or the page is all."""
    page, databases = PageRequest(5), world.databases
    assert Operator(databases).halves(HalfFilter(), page).total == Total(40)
    assert Operator(databases).halves(HalfFilter(topic="t0"), page).total is None
    assert Operator(databases).halves(HalfFilter(status=HalfStatus.PARKED), page).total == Total(2)
    assert Operator(databases).scheduled(ScheduledFilter(), page).total == Total(24)
    assert Operator(databases).scheduled(ScheduledFilter(recalled=True), page).total is None
    assert Operator(databases).audit(AuditFilter(), page).total == Total(80)
    assert Operator(databases).audit(AuditFilter(actor="bob"), page).total is None


@pytest.mark.parametrize(
    ("look", "wanted", "field"),
    [
        ("halves", HalfFilter(status="undecided"), "status"), ("halves", HalfFilter(topic="\0"), "topic"),  # type: ignore[arg-type]
        ("halves", HalfFilter(min_age=-1), "min_age"), ("halves", HalfFilter(min_age=float("nan")), "min_age"),
        ("scheduled", ScheduledFilter(topic="\ud800"), "topic"), ("audit", AuditFilter(actor="\0"), "actor"),
        ("audit", AuditFilter(target="x" * 2000), "target"),
        ("audit", AuditFilter(since=dt.datetime(2026, 1, 1)), "since"),  # noqa: DTZ001
    ],
)  # fmt: skip
def test_filters_that_are_none(world: World, look: str, wanted: Any, field: str) -> None:
    """A filter that can't be one is refused, and the field is named."""
    with pytest.raises(InvalidRequest) as refused:
        getattr(Operator(world.databases), look)(wanted, ALL)
    assert refused.value.field == field


@pytest.mark.parametrize("look", ["halves", "scheduled", "audit"])
def test_tokens_of_other_lists(world: World, look: str) -> None:
    """A token of one list is refused by the others."""
    filters: dict[Any, Any] = {"halves": HalfFilter(), "scheduled": ScheduledFilter(), "audit": AuditFilter()}
    operator = Operator(world.databases)
    token = getattr(operator, look)(filters[look], PageRequest(1)).next_page_token
    for other, wanted in filters.items():
        if other != look:
            with pytest.raises(InvalidRequest):
                getattr(operator, other)(wanted, PageRequest(1, token))


@pytest.mark.parametrize("time", ["infinity", "-infinity", "0044-03-15 BC", "20000-01-01"])
def test_times_that_python_does_not_have(server: ServerLike, template: str, time: str) -> None:
    """What was written into a table by hand can be listed, as the first or the last moment that there is."""
    with open_databases(server, template, "north") as engines:
        put(engines["north"], "undecided", [half(1)])
        put(engines["north"], "recalled", [half(2)])
        insert(engines["north"], "audit", [{"acted_at": time, "actor": "ann", "action": "check", "target": "x"}])
        with engines["north"].begin() as connection:
            connection.execute(text(f"UPDATE outbox.half_check SET next_check_at = '{time}'"))
            connection.execute(text(f"UPDATE outbox.scheduled_message SET deliver_at = '{time}'"))
        world = World(engines, registered(engines))
        ends = dt.datetime.min.replace(tzinfo=dt.UTC), dt.datetime.max.replace(tzinfo=dt.UTC)
        for _ in range(2):  # the driver runs the first by itself
            assert [row.next_check_at for row in world.halves()] == [ends[time[0] in "i2"]]
            assert [row.acted_at for row in world.audit()] == [ends[time[0] in "i2"]]
            assert len(Operator(world.databases).scheduled(ScheduledFilter(recalled=True), ALL).items) == 1
