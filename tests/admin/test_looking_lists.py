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
from outbox.operator.look import audit_sql, scheduled_sql
from outbox.operator.look.audit import list_audit
from outbox.operator.look.scheduled import list_halves, list_scheduled
from outbox.operator.model import (
    AuditFilter,
    AuditRow,
    HalfFilter,
    HalfRow,
    PageRequest,
    ScheduledFilter,
    ScheduledRow,
    Total,
)
from tests.admin.looking import all_pages, born, half, id_of, insert, open_databases, put, registered

HOSTILE = "'; DROP TABLE x; -- %s {s} <script>"
ALL = PageRequest(500)


@dataclass
class World:
    engines: dict[str, Engine]
    databases: Databases

    def halves(self, page: PageRequest = ALL, **wanted: Any) -> list[HalfRow]:
        """Return the halves that a filter finds."""
        return list_halves(self.databases, HalfFilter(**wanted), page).items

    def scheduled(self, page: PageRequest = ALL, **wanted: Any) -> list[ScheduledRow]:
        """Return the scheduled messages that a filter finds."""
        return list_scheduled(self.databases, ScheduledFilter(**wanted), page).items

    def audit(self, page: PageRequest = ALL, **wanted: Any) -> list[AuditRow]:
        """Return the acts that a filter finds."""
        return list_audit(self.databases, AuditFilter(**wanted), page).items


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
        found = all_pages(lambda page: list_halves(world.databases, HalfFilter(**wanted), page), size)
        return sorted(row.id for row in found)

    expected = [row.id for row in rows]
    assert ids(3) == expected
    monkeypatch.setattr(scheduled_sql.list_halves, "__defaults__", (4,))
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
        ids = [row.id for row in all_pages(lambda page: list_halves(world.databases, wanted, page), 4, between)]
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
    assert rows[0] == ScheduledRow("north", id_of(1000), "t0", "key-1000", born(90_000), None, None)


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
    for function in (scheduled_sql.list_scheduled, scheduled_sql.list_recalled):
        monkeypatch.setattr(function, "__defaults__", (window,))
    sought = ScheduledFilter(recalled=recalled, **wanted)
    found = all_pages(lambda page: list_scheduled(world.databases, sought, page), 5)
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
    monkeypatch.setattr(audit_sql.list_audit, "__defaults__", (window,))
    found = all_pages(lambda page: list_audit(world.databases, AuditFilter(**wanted), page), 2)
    assert len(found) == count
    assert sorted(found, key=lambda row: row.acted_at, reverse=True) == rows


def test_acts_between_pages(world: World) -> None:
    """What is done while somebody turns pages is neither shown nor hides what was."""
    before = world.audit()
    rows = all_pages(
        lambda page: list_audit(world.databases, AuditFilter(), page),
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
    assert list_halves(databases, HalfFilter(), page).total == Total(40)
    assert list_halves(databases, HalfFilter(topic="t0"), page).total is None
    assert list_halves(databases, HalfFilter(status="parked"), page).total == Total(2)
    assert list_scheduled(databases, ScheduledFilter(), page).total == Total(24)
    assert list_scheduled(databases, ScheduledFilter(recalled=True), page).total is None
    assert list_audit(databases, AuditFilter(), page).total == Total(80)
    assert list_audit(databases, AuditFilter(actor="bob"), page).total is None


@pytest.mark.parametrize(
    ("look", "wanted", "field"),
    [
        (list_halves, HalfFilter(status="undecided"), "status"), (list_halves, HalfFilter(topic="\0"), "topic"),
        (list_halves, HalfFilter(min_age=-1), "min_age"), (list_halves, HalfFilter(min_age=float("nan")), "min_age"),
        (list_scheduled, ScheduledFilter(topic="\ud800"), "topic"), (list_audit, AuditFilter(actor="\0"), "actor"),
        (list_audit, AuditFilter(target="x" * 2000), "target"),
        (list_audit, AuditFilter(since=dt.datetime(2026, 1, 1)), "since"),  # noqa: DTZ001
    ],
)  # fmt: skip
def test_filters_that_are_none(world: World, look: Any, wanted: Any, field: str) -> None:
    """A filter that can't be one is refused, and the field is named."""
    with pytest.raises(InvalidRequest) as refused:
        look(world.databases, wanted, ALL)
    assert refused.value.field == field


@pytest.mark.parametrize("look", [list_halves, list_scheduled, list_audit])
def test_tokens_of_other_lists(world: World, look: Any) -> None:
    """A token of one list is refused by the others."""
    filters: dict[Any, Any] = {list_halves: HalfFilter(), list_scheduled: ScheduledFilter(), list_audit: AuditFilter()}
    token = look(world.databases, filters[look], PageRequest(1)).next_page_token
    for other, wanted in filters.items():
        if other is not look:
            with pytest.raises(InvalidRequest):
                other(world.databases, wanted, PageRequest(1, token))
