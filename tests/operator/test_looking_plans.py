"""Each statement of what operators see is answered by indexes, however the planner sees the tables."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection

from outbox.database.execute import Statement, execute, statement
from outbox.database.sql import plan_by_index
from outbox.embedded import ServerLike
from outbox.message.model import Status, uuid7
from outbox.operator.bulk import sql as bulk_sql
from outbox.operator.look import inbox_sql, lists_sql, message_sql
from outbox.operator.look.paging import count_of
from outbox.operator.model import AuditFilter, HalfFilter, HalfStatus, MessageFilter, MessageStatus, ScheduledFilter
from tests.operator.looking import open_databases

NOW = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)
ID = uuid7()

MESSAGES = [
    MessageFilter(), MessageFilter(topic="t"), MessageFilter(key="k"),
    MessageFilter(header=("a", "b"), tag="t"), MessageFilter(since=NOW, until=NOW),
    MessageFilter(body=("a", "b")), MessageFilter(status=(MessageStatus.UNDECIDED,)),
    MessageFilter(status=(MessageStatus.SCHEDULED,)), MessageFilter(status=(MessageStatus.RECALLED,)),
    MessageFilter(status=(MessageStatus.ROLLED_BACK,)),
    MessageFilter(status=(MessageStatus.COMMITTED, MessageStatus.DISPATCHED)),
]  # fmt: skip
PARKED = inbox_sql.InboxQuery(status=(Status.PARKED,))
FAILED = inbox_sql.InboxQuery(status=(Status.FAILED,))
INBOX: list[tuple[inbox_sql.InboxQuery, inbox_sql.Source]] = [
    (inbox_sql.InboxQuery(), "all"), (inbox_sql.InboxQuery(group="g", topic="t", error="e"), "all"),
    (inbox_sql.InboxQuery(status=(Status.CONSUMED, Status.QUARANTINED), until=NOW), "all"), (PARKED, "parked"),
    (inbox_sql.InboxQuery(status=(Status.PARKED,), group="g"), "parked"),
    (inbox_sql.InboxQuery(status=(Status.PARKED,), group="g", topic="t", error_kind="k"), "parked"),
    (PARKED, "parked_few"),
    (FAILED, "failed"), (inbox_sql.InboxQuery(status=(Status.FAILED,), group="g"), "failed"),
    (inbox_sql.InboxQuery(status=(Status.PARKED,), discarded=True), "discarded"),
]  # fmt: skip

STATEMENTS: list[Statement | None] = [
    *(lists_sql.list_messages("outbox", wanted, after, 51) for wanted in MESSAGES for after in (None, ID)),
    *(lists_sql.count_messages("outbox", wanted) for wanted in MESSAGES),
    statement("outbox", message_sql.BODY, {"id": ID}),
    *(inbox_sql.list_inbox("outbox", *each, after, 51) for each in INBOX for after in (None, (ID, "g"))),
    *(inbox_sql.count("outbox", wanted) for wanted, _ in INBOX),
    *(inbox_sql.count_few("outbox", PARKED, source, 100) for source in ("parked_few", "failed", "discarded")),
    inbox_sql.rows_of("outbox", inbox_sql.InboxQuery(), ID, None, 51),
    *(inbox_sql.kinds("outbox", *place) for place in ((None, None), ("g", None), (None, "t"), ("g", "t"))),
    inbox_sql.counts("outbox", None, None, 100, 100),
    inbox_sql.details("outbox", ["g"], ["t"], ["k"]),
    lists_sql.list_after_offsets("outbox", MessageFilter(key="k"), [lists_sql.UnreadQueue("t", 0, 7, 2**40)], 51),
    lists_sql.messages_of("outbox", MessageFilter(), [ID]),
    inbox_sql.met("outbox", group="g", ids=[ID]),
    lists_sql.list_scheduled("outbox", ScheduledFilter(topic="t"), (NOW, ID), 51),
    lists_sql.list_scheduled("outbox", ScheduledFilter(recalled=True), (ID,), 51),
    count_of("outbox", "scheduled_message", "recalled_at IS NULL"),
    lists_sql.list_halves("outbox", HalfFilter(topic="t", status=HalfStatus.PARKED, min_age=1.0), ID, 51),
    count_of("outbox", "half_check"),
    lists_sql.list_audit("outbox", AuditFilter(actor="a", since=NOW), None, 7, 51),
    lists_sql.list_audit("outbox", AuditFilter(), ["a", "b"], None, 51),
    count_of("outbox", "audit"),
    statement("outbox", lists_sql.KNOWN_GROUPS, {}),
    message_sql.CONVERSATION("outbox", id=ID, limit=501),
    message_sql.RECEIPTS("outbox", ids=[ID]),
    message_sql.FINDINGS("outbox", id=ID),
    bulk_sql.OF_MESSAGE("outbox", id=ID),
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
