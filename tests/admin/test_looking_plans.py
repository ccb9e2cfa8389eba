"""Each statement of what operators see is answered by indexes, however the planner sees the tables."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection

from outbox.embedded import ServerLike
from outbox.ids import uuid7
from outbox.store import dead, find, find_audit, find_inbox, find_scheduled, find_way, operate
from outbox.store.browse_halves import HalfFilter
from outbox.store.dispatch import plan_by_index
from outbox.store.execute import Statement, execute
from tests.admin.looking import open_databases

NOW = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)
ID = uuid7()

MESSAGES = [
    find.Wanted(), find.Wanted(topic="t"), find.Wanted(key="k"), find.Wanted(header=("a", "b"), tag="t"),
    find.Wanted(since=NOW, until=NOW), find.Wanted(json_body=True), find.Wanted(statuses=("undecided",)),
    find.Wanted(statuses=("scheduled",)), find.Wanted(statuses=("recalled",)), find.Wanted(statuses=("rolled_back",)),
    find.Wanted(statuses=("committed", "dispatched")),
]  # fmt: skip
PARKED = find_inbox.Wanted(statuses=("parked",))
FAILED = find_inbox.Wanted(statuses=("failed",))
INBOX: list[tuple[find_inbox.Wanted, find_inbox.Source]] = [
    (find_inbox.Wanted(), "all"), (find_inbox.Wanted(group="g", topic="t", error="e"), "all"),
    (find_inbox.Wanted(statuses=("consumed", "rolled_back"), until=NOW), "all"), (PARKED, "parked"),
    (find_inbox.Wanted(statuses=("parked",), group="g"), "parked"),
    (find_inbox.Wanted(statuses=("parked",), group="g", topic="t", error_kind="k"), "parked"), (PARKED, "parked_few"),
    (FAILED, "failed"), (find_inbox.Wanted(statuses=("failed",), group="g"), "failed"),
    (find_inbox.Wanted(statuses=("parked",), discarded=True), "discarded"),
]  # fmt: skip

STATEMENTS: list[Statement | None] = [
    *(find.list_messages("outbox", wanted, after, 51) for wanted in MESSAGES for after in (None, ID)),
    *(find.count("outbox", wanted, 100) for wanted in MESSAGES),
    find.body("outbox", ID),
    *(find_inbox.list_inbox("outbox", *each, after, 51) for each in INBOX for after in (None, (ID, "g"))),
    *(find_inbox.count("outbox", wanted, 100) for wanted, _ in INBOX if find_inbox.is_cheap(wanted)),
    *(find_inbox.count_few("outbox", PARKED, source, 100) for source in ("parked_few", "failed", "discarded")),
    find_inbox.rows_of("outbox", find_inbox.Wanted(), ID, None, 51),
    *(dead.kinds("outbox", *place) for place in ((None, None), ("g", None), (None, "t"), ("g", "t"))),
    dead.counts("outbox", None, None, 100, 100),
    dead.details("outbox", ["g"], ["t"], ["k"]),
    find_scheduled.list_scheduled("outbox", "t", (NOW, ID), 51),
    find_scheduled.list_recalled("outbox", None, ID, 51),
    find_scheduled.count_scheduled("outbox", 100),
    find_scheduled.list_halves("outbox", HalfFilter(topic="t", status="parked", age=1.0), ID, 51),
    find_scheduled.count_halves("outbox", 100),
    find_audit.list_audit("outbox", find_audit.Wanted(actor="a", since=NOW), 7, 51),
    find_audit.list_audit("outbox", find_audit.Wanted(targets=["a", "b"]), None, 51),
    find_audit.count("outbox", 100),
    find_audit.groups("outbox"),
    find_way.findings_of("outbox", ID),
    operate.of_message("outbox", ID),
]


@pytest.fixture(scope="module")
def connection(server: ServerLike, template: str) -> Iterator[Connection]:
    """A connection to a database of which the planner knows nothing, in a transaction as operators' looks have it."""
    with (
        open_databases(server, template, "only") as engines,
        engines["only"].connect() as connection,
        connection.begin(),
    ):
        execute(connection, plan_by_index())
        yield connection


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield all nodes of a plan."""
    yield plan
    for inner in plan.get("Plans", []):
        yield from nodes(inner)


@pytest.mark.parametrize("statement", [each for each in STATEMENTS if each is not None])
def test_plans(connection: Connection, statement: Statement) -> None:
    """No table is read from end to end, and none is joined to all of another."""
    (((plan,),),) = execute(connection, Statement(f"EXPLAIN (FORMAT JSON) {statement.sql}", statement.values))
    plan = json.loads(plan) if isinstance(plan, str) else plan
    for node in nodes(plan[0]["Plan"]):
        assert node["Node Type"] not in {"Seq Scan", "Merge Join", "Hash Join"}, node
