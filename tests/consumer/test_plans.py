"""Statements that are given messages find their rows by the key: with many in a group, none walks through all of it.

What the planner knows of a group may be older than its messages. A join by id alone lets it take the group for the
smaller side, and go through it once for each message that is given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from types import ModuleType
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

import outbox.consumer.leased.sql
import outbox.consumer.outside.sql
import outbox.consumer.sql
from outbox.consumer import key_order
from outbox.database.execute import Template, driver_of
from outbox.prune.sql import old_business_inbox

_MODULES = (outbox.consumer.leased.sql, outbox.consumer.outside.sql, outbox.consumer.sql, key_order)
_TAKEN = """
INSERT INTO outbox.consumer_message
       (consumer_group, message_id, topic, queue, position, status, attempts, next_attempt_at, lease, taken_by)
SELECT 'mail', overlay(gen_random_uuid()::text PLACING :head FROM 1 FOR 1)::uuid, 'orders', 0, n,
       'taken', 0, clock_timestamp() + interval '1 hour', n, 'client'
  FROM generate_series(1, :rows) n
"""
#: What statements bind beside the messages; as `_VALUES` has them for lists.
_VALUES: dict[str, Any] = {
    **{"group": "mail", "topic": "orders", "queue": 0, "passage": 1, "invisible": 60.0, "next": 7, "seconds": 60.0},
    **{"taker": "client", "take_id": None, "limit": 32, "delay": 1.0, "status": "failed", "error": "no"},
    **{"kind": "no", "holds": False, "position": 3, "number": 5, "turn": 1, "key": "k", "digest": b"", "queues": [0]},
}
#: What a statement has that is given ids, and one that finds rows itself, or writes new ones.
_GIVEN, _FINDS = re.compile(r"%\((ids?|numbers)\)s"), re.compile(r"INSERT|ARRAY\(|LIMIT")
_SCAN = re.compile(r"\b(?:Scan on|Scan using|Index Scan using) .*consumer_message.*\n +(.*)\n(?: +(.*)\n)?")


def _statements() -> Iterator[Any]:
    """Yield each change that is given the ids of its rows, and finds none itself, in each of its forms."""
    for module in _MODULES:
        for name, value in vars(module).items():
            forms: dict[str, Any] = {}
            if isinstance(value, Template):
                forms[""] = value
            elif isinstance(value, outbox.consumer.leased.sql.LeaseTemplate):
                forms |= {f", {waits}": partial(value, waits=waits) for waits in (True, False)}
            for form, call in forms.items():
                sql = call("outbox", **_VALUES).sql
                if "UPDATE" in sql and _GIVEN.search(sql) and not _FINDS.search(sql):
                    yield pytest.param(call, id=f"{_name(module)}.{name}{form}")


def _name(module: ModuleType) -> str:
    return module.__name__.removeprefix("outbox.consumer.")


@pytest.mark.parametrize("head", [pytest.param("0", id="of time"), pytest.param("f", id="of business strings")])
@pytest.mark.parametrize(("analysed", "rows"), [(True, 3000), (False, 3000), (False, 150)])
@pytest.mark.parametrize("call", list(_statements()))
def test_each_finds_its_rows_by_the_key(call: Any, analysed: bool, rows: int, head: str, engine: Engine) -> None:
    """Also where the planner takes the group for empty: its statistics are older than it, or there are none."""
    with engine.begin() as connection:
        if analysed:
            connection.execute(text("ANALYZE outbox.consumer_message"))
        connection.execute(text(_TAKEN), {"rows": rows, "head": head})
        (id_, number) = connection.execute(text("SELECT message_id, lease FROM outbox.consumer_message LIMIT 1")).one()
        one = {"id": id_, "ids": [id_], "numbers": [number], "positions": [3], "digests": [b""], "keys": [None]}
        statement = call("outbox", **_VALUES, **one, again=[], running=[], attempts=1)
        lines = driver_of(connection).execute(f"EXPLAIN {statement.sql}", statement.values).fetchall()
    plan = "\n".join(line for (line,) in lines)
    scans = _SCAN.findall(f"{plan}\n\n")
    assert scans, plan
    for condition, more in scans:
        # Of so few the planner may take all, but only once: what isn't meant goes before it is joined.
        found = condition if rows > 150 else f"{condition} {more}"
        assert re.search(r"\b(?:message_id|order_key) = ", found), plan


def test_old_rows_of_business_strings_are_found_by_their_time(engine: Engine) -> None:
    """The index of these ids is for prune, which writes its condition as the index has it."""
    with engine.begin() as connection:
        connection.execute(text(_TAKEN), {"rows": 3000, "head": "f"})
        connection.execute(text("ANALYZE outbox.consumer_message"))
        more = {"retention": 0.0, "since": datetime.fromtimestamp(0, UTC), "after": UUID(int=0)}
        statement = old_business_inbox("outbox", **_VALUES, **more)
        plan = driver_of(connection).execute(f"EXPLAIN {statement.sql}", statement.values).fetchall()
    assert "Index Scan using ix_consumer_message_default_business" in str(plan), plan
    assert "Seq Scan" not in str(plan), plan
