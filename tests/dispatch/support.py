"""What the tests of dispatch share: send, dispatch, and read what came out."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Engine, text

from outbox import Outbox, Settings
from outbox.acts.changes import ActRequest, Target, apply
from outbox.acts.messages import ACTS
from outbox.database import at_commit
from outbox.database.execute import Statement, execute
from outbox.database.sql import plan_by_index
from outbox.dispatch import sql as dispatch_sql
from outbox.dispatch.dispatch_pass import dispatch_lock, dispatch_once
from outbox.message import content
from outbox.message.model import Counts, number_of

#: How many statements wait for a lock that somebody else holds.
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


@dataclass(frozen=True)
class Sent:
    """A message as it stands in a queue."""

    topic: str
    queue: int
    position: int
    id: UUID
    send_number: int
    key: str | None
    body: Any


def messages(connection: Connection, topic: str = "t") -> list[Sent]:
    """Return all messages of a topic by queue and position."""
    sql = """SELECT m.topic, m.queue, m.position, m.half_id, m.send_number, h.key, h.body, h.content_type
               FROM outbox.message m JOIN outbox.half_message h ON h.id = m.half_id
              WHERE m.topic = :topic ORDER BY m.queue, m.position"""
    with connection.begin():
        rows = connection.execute(text(sql), {"topic": topic}).all()
    return [Sent(row[0], row[1], row[2], row[3], row[4], row[5], content.decode(row[6], row[7])) for row in rows]


def dispatch_all(connection: Connection, settings: Settings, limit: int | None = None) -> Counts:
    """Dispatch until nothing is left; return the sum of what the passes did."""
    total = Counts()
    while True:
        counts = dispatch_once(connection, settings, limit=limit)
        total += counts
        if not counts.more:
            return total


def assert_dense(found: list[Sent]) -> None:
    """Every queue has the numbers 1 to n, in the order of its positions; no message stands in it twice by one send."""
    queues = defaultdict(list)
    for message in found:
        queues[message.topic, message.queue].append(message.position)
    for name, positions in queues.items():
        numbers = [number_of(position) for position in positions]
        assert numbers == list(range(1, len(positions) + 1)), f"queue {name} has holes: {positions[:50]}"
    sends = [(message.id, message.send_number) for message in found]
    assert len(sends) == len(set(sends)), "a message was dispatched twice"


def by_key(found: list[Sent]) -> dict[str | None, list[Any]]:
    """Return the bodies of each key in the order of their queue; a key must not be in two queues."""
    bodies: dict[str | None, list[Any]] = defaultdict(list)
    homes: dict[str | None, int] = {}
    for message in found:
        assert homes.setdefault(message.key, message.queue) == message.queue, f"key {message.key} is in two queues"
        bodies[message.key].append(message.body)
    return bodies


def send(app: Outbox, *bodies: Any, topic: str = "t", **options: Any) -> list[UUID]:
    """Send bodies in one transaction of their own."""
    assert isinstance(app.engine, Engine)
    with app.engine.begin() as connection:
        return [app.send(connection, topic, body, **options) for body in bodies]


def write_now(app: Outbox, connection: Connection, body: Any, topic: str = "t", **options: Any) -> UUID:
    """Write half and op at once, in the connection's open transaction."""
    half_id = app.send(connection, topic, body, **options)
    flush(connection)
    return half_id


def flush(connection: Connection) -> None:
    """Write what was sent on a connection, in a transaction that goes on."""
    at_commit.write_now(connection)


def scalar(connection: Connection, sql: str, **values: Any) -> Any:
    """Return the one value of a query, in a transaction of its own."""
    with connection.begin():
        return connection.execute(text(sql), values).scalar_one()


def run(connection: Connection, sql: str, **values: Any) -> None:
    """Run a statement in a transaction of its own."""
    with connection.begin():
        connection.execute(text(sql), values)


def scans(connection: Connection, statement: Statement) -> list[dict[str, Any]]:
    """Run a statement of a dispatch pass, undo it, and return the plan's nodes that read a table."""
    with connection.begin() as transaction:
        execute(connection, plan_by_index(), dispatch_sql.try_turn(dispatch_lock("outbox")))
        found = table_scans(connection, statement)
        transaction.rollback()
    return found


def table_scans(connection: Connection, statement: Statement) -> list[dict[str, Any]]:
    """Run a statement in the open transaction, and return the plan's nodes that read a table.

    All rows are in the DEFAULT partitions.
    """
    explain = Statement(f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {statement.sql}", statement.values)
    (((plan,),),) = execute(connection, explain)
    found, todo = [], [plan[0]["Plan"]]
    while todo:
        node = todo.pop()
        todo += node.get("Plans", [])
        # A bitmap's index scan names no table: it counts for the heap scan above it.
        if "Relation Name" in node and node["Node Type"] != "ModifyTable":
            found.append(node | {"Relation Name": node["Relation Name"].removesuffix("_default")})
    return found


def rows_read(nodes: list[dict[str, Any]], table: str) -> int:
    """Return how many rows of a table these scans have read, those they threw away included."""
    return sum(
        round((node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"])
        for node in nodes
        if node["Relation Name"] == table
    )


def next_batch(connection: Connection, settings: Settings, limit: int) -> Statement:
    """Return the statement that the next pass would run."""
    with connection.begin():
        (cursors,) = execute(connection, dispatch_sql.newest_cursor(settings.schema))
    return dispatch_sql.dispatch_batch(settings, limit, dispatch_sql.Cursor(*cursors[0]))


def act(connection: Connection, settings: Settings, name: str, *ids: UUID) -> int:
    """Do an operator's act in the caller's transaction; return to how many messages it was done."""
    request = ActRequest(ACTS[name], "me", "test")
    outcomes = apply(connection, settings, request, [Target(half_id) for half_id in ids])
    return sum(outcome.state == "done" for outcome in outcomes)
