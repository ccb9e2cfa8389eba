"""Databases full of messages in every state, for the tests of what operators see; they only read them."""

from __future__ import annotations

import datetime as dt
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy import Engine, create_engine, text

from outbox import Settings
from outbox.embedded import ServerLike
from outbox.message.ids import uuid7_at
from outbox.operator.databases import Databases
from outbox.operator.model import Page, PageRequest

T = TypeVar("T")

#: When the first message was born; each is born a second after the one before.
BIRTH = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)
_number = itertools.count()


def id_of(number: int, beside: int = 0) -> UUID:
    """Return the id of the message of a number; ``beside`` makes more of the same moment."""
    return UUID(int=uuid7_at((BIRTH + dt.timedelta(seconds=number)).timestamp()).int + beside)


def born(number: int) -> dt.datetime:
    """Return when the message of a number was born."""
    return BIRTH + dt.timedelta(seconds=number)


@contextmanager
def open_databases(server: ServerLike, template: str, *names: str) -> Iterator[dict[str, Engine]]:
    """Give engines on new migrated databases, by the names they are registered under."""
    made = {name: f"looking_{next(_number)}" for name in names}
    for database in made.values():
        server.create_database(database, template=template)
    engines = {name: create_engine(server.url(database)) for name, database in made.items()}
    yield engines
    for engine in engines.values():
        engine.dispose()
    for database in made.values():
        server.drop_database(database)


def registered(engines: Mapping[str, Engine]) -> Databases:
    """Register databases."""
    return Databases.open(engines, Settings())


def insert(engine: Engine, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Insert rows that all have the same columns; what is a dict or list goes in as JSON."""
    rows = [
        {name: json.dumps(value) if isinstance(value, dict | list) else value for name, value in row.items()}
        for row in rows
    ]
    if rows:
        columns = list(rows[0])
        sql = f"INSERT INTO outbox.{table} ({', '.join(columns)}) VALUES ({', '.join(f':{name}' for name in columns)})"
        with engine.begin() as connection:
            connection.execute(text(sql), rows)


def half(number: int, *, beside: int = 0, **changed: Any) -> dict[str, Any]:
    """Return a half message; ``changed`` columns are other than usual."""
    usual = {
        "id": id_of(number, beside),
        "producer_group": "shop",
        "topic": "orders",
        "key": f"key-{number}",
        "tag": None,
        "headers": {},
        "content_type": "application/json",
        "body": json.dumps({"order": {"id": number}}).encode(),
        "deliver_at": None,
        "born_at": born(number),
    }
    return usual | changed


def put(engine: Engine, status: str, halves: Sequence[Mapping[str, Any]]) -> None:
    """Bring half messages into a status."""
    insert(engine, "half_message", halves)
    ids = [each["id"] for each in halves]
    if status == "undecided":
        insert(engine, "half_check", [
            {"half_id": each["id"], "fenced": False, "next_check_at": each["born_at"], "topic": each["topic"]}
            for each in halves
        ])  # fmt: skip
        return
    resolution = "rollback" if status == "rolled_back" else "commit"
    insert(engine, "op_message", [{"half_id": id_, "resolution": resolution, "decided_by": "producer"} for id_ in ids])
    if status == "dispatched":
        insert(engine, "message", [
            {"topic": each["topic"], "queue": 0, "position": next(_number) + 1, "half_id": each["id"], "send_number": 1}
            for each in halves
        ])  # fmt: skip
    if status in {"scheduled", "recalled"}:
        late = "2026-03-02T00:00:00Z" if status == "recalled" else None
        insert(engine, "scheduled_message", [
            {"half_id": each["id"], "deliver_at": each["deliver_at"] or born(90_000), "recalled_at": late,
             "recalled_by": late and "ann"}
            for each in halves
        ])  # fmt: skip


def row(number: int, status: str = "consumed", *, group: str = "till", **changed: Any) -> dict[str, Any]:
    """Return an inbox row; ``changed`` columns are other than usual."""
    usual = {
        "consumer_group": group,
        "message_id": id_of(number),
        "topic": "orders",
        "queue": 0,
        "position": number + 1,
        "status": status,
        "attempts": 1,
        "next_attempt_at": born(90_000) if status == "failed" else None,
        "last_error": "ValueError: account 7 is closed\n\nTraceback" if status in {"failed", "parked"} else None,
        "error_kind": "ValueError in app.py:pay" if status in {"failed", "parked"} else None,
        "received_at": born(number),
        "changed_at": born(number),
        "discarded_at": None,
    }
    return usual | changed


def all_pages(
    look: Callable[[PageRequest], Page[T]], size: int, between: Callable[[int], None] = lambda number: None
) -> list[T]:
    """Return the rows of all pages; ``between`` is called after each page with its number from 1."""
    rows: list[T] = []
    token = None
    for number in itertools.count(1):
        page = look(PageRequest(size, token))
        assert len(page.items) <= size
        assert page.complete or (page.next_page_token is not None and len(page.items) < size)
        rows += page.items
        between(number)
        if (token := page.next_page_token) is None:
            return rows
        assert number < 1_000, "pages without an end"
    raise AssertionError
