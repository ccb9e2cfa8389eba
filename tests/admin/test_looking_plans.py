"""Each statement of what operators see is answered by indexes, however the planner sees the tables."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection

from outbox.database.execute import Statement, execute
from outbox.database.sql import plan_by_index
from outbox.embedded import ServerLike
from outbox.message.model import uuid7
from outbox.operator.bulk import sql as bulk_sql
from outbox.operator.look import audit_sql, inbox_sql, messages_sql, scheduled_sql
from outbox.operator.old_halves_sql import HalfFilter
from tests.admin.looking import open_databases

NOW = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)
ID = uuid7()

MESSAGES = [
    messages_sql.Wanted(), messages_sql.Wanted(topic="t"), messages_sql.Wanted(key="k"),
    messages_sql.Wanted(header=("a", "b"), tag="t"), messages_sql.Wanted(since=NOW, until=NOW),
    messages_sql.Wanted(json_body=True), messages_sql.Wanted(statuses=("undecided",)),
    messages_sql.Wanted(statuses=("scheduled",)), messages_sql.Wanted(statuses=("recalled",)),
    messages_sql.Wanted(statuses=("rolled_back",)),
    messages_sql.Wanted(statuses=("committed", "dispatched")),
]  # fmt: skip
PARKED = inbox_sql.Wanted(statuses=("parked",))
FAILED = inbox_sql.Wanted(statuses=("failed",))
INBOX: list[tuple[inbox_sql.Wanted, inbox_sql.Source]] = [
    (inbox_sql.Wanted(), "all"), (inbox_sql.Wanted(group="g", topic="t", error="e"), "all"),
    (inbox_sql.Wanted(statuses=("consumed", "quarantined"), until=NOW), "all"), (PARKED, "parked"),
    (inbox_sql.Wanted(statuses=("parked",), group="g"), "parked"),
    (inbox_sql.Wanted(statuses=("parked",), group="g", topic="t", error_kind="k"), "parked"), (PARKED, "parked_few"),
    (FAILED, "failed"), (inbox_sql.Wanted(statuses=("failed",), group="g"), "failed"),
    (inbox_sql.Wanted(statuses=("parked",), discarded=True), "discarded"),
]  # fmt: skip

STATEMENTS: list[Statement | None] = [
    *(messages_sql.list_messages("outbox", wanted, after, 51) for wanted in MESSAGES for after in (None, ID)),
    *(messages_sql.count("outbox", wanted, 100) for wanted in MESSAGES),
    messages_sql.body("outbox", ID),
    *(inbox_sql.list_inbox("outbox", *each, after, 51) for each in INBOX for after in (None, (ID, "g"))),
    *(inbox_sql.count("outbox", wanted, 100) for wanted, _ in INBOX if inbox_sql.is_cheap(wanted)),
    *(inbox_sql.count_few("outbox", PARKED, source, 100) for source in ("parked_few", "failed", "discarded")),
    inbox_sql.rows_of("outbox", inbox_sql.Wanted(), ID, None, 51),
    *(inbox_sql.kinds("outbox", *place) for place in ((None, None), ("g", None), (None, "t"), ("g", "t"))),
    inbox_sql.counts("outbox", None, None, 100, 100),
    inbox_sql.details("outbox", ["g"], ["t"], ["k"]),
    scheduled_sql.list_scheduled("outbox", "t", (NOW, ID), 51),
    scheduled_sql.list_recalled("outbox", None, ID, 51),
    scheduled_sql.count_scheduled("outbox", 100),
    scheduled_sql.list_halves("outbox", HalfFilter(topic="t", status="parked", age=1.0), ID, 51),
    scheduled_sql.count_halves("outbox", 100),
    audit_sql.list_audit("outbox", audit_sql.Wanted(actor="a", since=NOW), 7, 51),
    audit_sql.list_audit("outbox", audit_sql.Wanted(targets=["a", "b"]), None, 51),
    audit_sql.count("outbox", 100),
    audit_sql.groups("outbox"),
    messages_sql.findings_of("outbox", ID),
    bulk_sql.of_message("outbox", ID),
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
