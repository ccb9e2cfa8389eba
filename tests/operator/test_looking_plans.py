"""Each statement of what operators see is answered by indexes, however the planner sees the tables."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from typing import Any, cast
from uuid import UUID

import pytest
from sqlalchemy import Connection, create_engine

from outbox.acts.changes import MessageStatus
from outbox.acts.messages import act_named
from outbox.database.execute import Statement, execute, statement
from outbox.database.sql import jumps, plan_by_index
from outbox.embedded import ServerLike
from outbox.message.model import Status, uuid7
from outbox.operator.bulk import sql as bulk_sql
from outbox.operator.bulk.jobs import ResolvedIds, Selection, match
from outbox.operator.databases import Database
from outbox.operator.look import inbox_sql, message_sql
from outbox.operator.look.paging import count_of
from outbox.operator.model import AuditFilter, HalfFilter, HalfStatus, MessageFilter, ScheduledFilter, Selector
from tests.operator.looking import open_databases, registered

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
    *(message_sql.list_messages("outbox", wanted, after, 51) for wanted in MESSAGES for after in (None, ID)),
    *(message_sql.count_messages("outbox", wanted) for wanted in MESSAGES),
    statement("outbox", message_sql.BODY, {"id": ID}),
    *(inbox_sql.list_inbox("outbox", *each, after, 51) for each in INBOX for after in (None, (ID, "g"))),
    *(inbox_sql.count("outbox", wanted) for wanted, _ in INBOX),
    *(inbox_sql.count_few("outbox", PARKED, source, 100) for source in ("parked_few", "failed", "discarded")),
    inbox_sql.rows_of("outbox", inbox_sql.InboxQuery(), ID, None, 51),
    *(inbox_sql.kinds("outbox", *place) for place in ((None, None), ("g", None), (None, "t"), ("g", "t"))),
    inbox_sql.counts("outbox", None, None, 100, 100),
    inbox_sql.details("outbox", ["g"], ["t"], ["k"]),
    message_sql.list_after_offsets("outbox", MessageFilter(key="k"), [message_sql.UnreadQueue("t", 0, 7, 2**40)], 51),
    message_sql.messages_of("outbox", MessageFilter(), [ID]),
    inbox_sql.met("outbox", group="g", ids=[ID]),
    *(inbox_sql.offsets("outbox", "g", topic) for topic in (None, "t")),
    message_sql.list_scheduled("outbox", ScheduledFilter(topic="t"), (NOW, ID), 51),
    message_sql.list_scheduled("outbox", ScheduledFilter(recalled=True), (ID,), 51),
    count_of("outbox", "scheduled_message", "recalled_at IS NULL"),
    message_sql.list_halves("outbox", HalfFilter(topic="t", status=HalfStatus.PARKED, min_age=1.0), ID, 51),
    count_of("outbox", "half_check"),
    message_sql.list_audit("outbox", AuditFilter(actor="a", since=NOW), None, 7, 51),
    message_sql.list_audit("outbox", AuditFilter(), ["a", "b"], None, 51),
    count_of("outbox", "audit"),
    statement("outbox", message_sql.KNOWN_GROUPS, {}),
    message_sql.CONVERSATION("outbox", id=ID, limit=501),
    message_sql.RECEIPTS("outbox", ids=[ID]),
    message_sql.FINDINGS("outbox", id=ID),
    bulk_sql.OF_MESSAGE("outbox", id=ID),
]

#: Messages that no statistics tell of.
OF_ONE_TOPIC = """
INSERT INTO outbox.half_message (id, topic, key, headers, content_type, body, producer_group)
SELECT gen_random_uuid(), 't', 'k' || mod(n, 10), '{}', 'application/json', '', 'tests' FROM generate_series(1, 20000) n
"""
#: 4,000 visits, in five streets of each of three towns.
VISITS = """
CREATE TEMP TABLE visit (town text, street int, house int, guest text, ended boolean);
INSERT INTO visit SELECT chr(97 + n %% 3), n %% 5, n, CASE WHEN n %% 2 = 0 THEN 'g' || n %% 4 END, n %% 7 = 0
  FROM generate_series(1, 4000) n;
CREATE INDEX ON visit (town, street, house);
CREATE INDEX ON visit (town, coalesce(guest, '-')) WHERE NOT ended
"""
GUEST = "coalesce(guest, '-')"
STREETS = jumps("place", "visit", "town", "street")
#: Queries that jump, and what finds the same.
JUMPS = [
    (STREETS, "SELECT DISTINCT town, street FROM visit ORDER BY 1, 2"),
    (jumps("place", "visit", "town", where="town = 'z'"), "SELECT town FROM visit WHERE town = 'z'"),
    (jumps("place", "visit", "street", where="town = 'b'", start="street >= 2", selected="town, street"),
     "SELECT DISTINCT town, street FROM visit WHERE town = 'b' AND street >= 2 ORDER BY 2"),
    (jumps("place", "visit v", "town", f"{GUEST} AS name", where="NOT v.ended"),
     f"SELECT DISTINCT town, {GUEST} FROM visit WHERE NOT ended ORDER BY 1, 2"),
    (jumps("place", "visit", "town", "street", selected="*", then=["house"], backwards=True),
     "SELECT DISTINCT ON (town, street) * FROM visit ORDER BY town DESC, street DESC, house DESC"),
]  # fmt: skip
#: How often a statement about halves was planned for all values, and for its own.
PLANS = """
SELECT sum(generic_plans)::int, sum(custom_plans)::int FROM pg_prepared_statements
 WHERE position('half_message' IN statement) > 0 AND position('generic_plans' IN statement) = 0
"""


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


def plan_of(connection: Connection, statement: Statement, options: str = "") -> Iterator[dict[str, Any]]:
    """Yield all nodes of the plan of a statement."""
    explain = f"EXPLAIN (FORMAT JSON{options}) {statement.sql}"
    (((plan,),),) = execute(connection, Statement(explain, statement.values))
    yield from nodes((json.loads(plan) if isinstance(plan, str) else plan)[0]["Plan"])


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield all nodes of a plan."""
    yield plan
    for inner in plan.get("Plans", []):
        yield from nodes(inner)


def test_plans(connection: Connection) -> None:
    """No table is read from end to end, and none is joined to all of another."""
    wrong = [
        (statement.sql, node)
        for statement in STATEMENTS
        if statement is not None
        for node in plan_of(connection, statement)
        if node["Node Type"] in {"Seq Scan", "Merge Join", "Hash Join"}
    ]
    assert wrong == []


def test_jumps_find_each_value_once(connection: Connection) -> None:
    """Each by a look into an index that ends at one row; the last one finds none."""
    execute(connection, *map(Statement, VISITS.split(";\n")))
    for part, same in JUMPS:
        jump = Statement(f"WITH RECURSIVE {part} SELECT * FROM place LIMIT 9")
        found, expected = execute(connection, jump, Statement(f"{same} LIMIT 9"))
        assert found == expected
        looks = [node for node in plan_of(connection, jump, ", ANALYZE") if node.get("Relation Name") == "visit"]
        assert {node["Node Type"] for node in looks} <= {"Index Scan", "Index Only Scan"}
        assert all(node["Actual Rows"] <= 1 and not node.get("Rows Removed by Filter") for node in looks)
        assert sum(node["Actual Loops"] for node in looks) <= len(found) + 1


def matched(wanted: MessageFilter, edge: UUID | None) -> Statement:
    """Return what previews a resend of these messages."""
    selection = Selection(act_named("resend"), Selector(messages=wanted), {})
    # Neither the connection nor the database is looked at for a filter of messages.
    query = match(cast(Connection, None), cast(Database, None), selection, ResolvedIds([], [], None), edge, most=2_000)
    return bulk_sql.summary("outbox", query)


@pytest.mark.parametrize("wanted", [MessageFilter(topic="t"), MessageFilter(topic="t", since=NOW)])
def test_a_topic_is_found_by_its_index(connection: Connection, wanted: MessageFilter) -> None:
    """Neither pages, nor counts, nor previews of bulk jobs walk over millions of others to the few of a topic."""
    counted = message_sql.count_messages("outbox", wanted)
    listed = message_sql.list_messages("outbox", wanted, ID, 51)
    for each in [listed, matched(wanted, None), matched(wanted, ID), *([counted] if counted else [])]:
        read = [node for node in plan_of(connection, each) if "half_message" in node.get("Relation Name", "")]
        assert read
        assert all("topic = " in node["Index Cond"] for node in read)


def test_a_key_is_found_by_its_index_in_a_topic(server: ServerLike, template: str) -> None:
    """Nobody walks over all messages of a topic to those of a key, also before the server has counted anything."""
    wanted = MessageFilter(key="k", topic="t")
    with open_databases(server, template, "only") as engines, engines["only"].begin() as connection:
        execute(connection, plan_by_index(), Statement(OF_ONE_TOPIC))
        for each in [
            message_sql.list_messages("outbox", wanted, ID, 51, by_key=True),
            message_sql.count_of_key("outbox", "k", 2_000),
            matched(wanted, None),
            matched(wanted, ID),
        ]:
            read = [node for node in plan_of(connection, each) if "half_message" in node.get("Relation Name", "")]
            assert read
            assert all("key = " in node["Index Cond"] for node in read)


def test_looks_are_planned_for_their_values(server: ServerLike, template: str) -> None:
    """Where the engine prepares statements, the server doesn't go over to one plan for all values."""
    with open_databases(server, template, "only") as engines:
        engine = create_engine(engines["only"].url, connect_args={"prepare_threshold": 0})
        database = registered({"only": engine})["only"]
        for number in range(1, 11):
            with database.read_only() as connection:
                execute(connection, message_sql.list_messages("outbox", MessageFilter(topic="t"), ID, 51))
                ((plans,),) = execute(connection, Statement(PLANS))
            assert plans == (0, number)
        engine.dispose()
