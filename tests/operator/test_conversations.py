"""The conversation of a message, over a producer's database and a consumer's: its order, its senders, its end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, text

from outbox import Settings
from outbox.database.execute import execute
from outbox.embedded import ServerLike
from outbox.errors import DatabaseUnreached, NotFound
from outbox.message.ids import uuid7_at
from outbox.message.model import uuid7
from outbox.operator.databases import Databases, open_database
from outbox.operator.look import conversation
from outbox.operator.look.message_sql import CONVERSATION
from outbox.operator.model import Conversation
from outbox.operator.operator import Operator
from tests.operator.looking import born, half, insert, open_databases, put, registered, row


@dataclass
class World:
    engines: dict[str, Engine]
    databases: Databases
    count: int = 0

    def send(
        self,
        database: str,
        topic: str,
        *,
        cause: UUID | None = None,
        first: UUID | None = None,
        at: int = 0,
        group: str = "bank-a",
        headers: dict[str, str] | None = None,
    ) -> UUID:
        """Put a dispatched message into a database."""
        self.count += 1
        if cause is not None:
            headers = {"outbox-cause": str(cause), "outbox-conversation": str(first or cause)}
        written = half(self.count, topic=topic, headers=headers, producer_group=group, born_at=born(at))
        written["id"] = uuid7_at(1_700_000_000 + self.count)
        put(self.engines[database], "dispatched", [written])
        return UUID(str(written["id"]))

    def receive(self, database: str, message_id: UUID, group: str, status: str = "consumed", **more: Any) -> None:
        """Put a row into an inbox."""
        insert(self.engines[database], "consumer_message", [
            row(1, status, topic="t", consumer_group=group, message_id=message_id, **more),
        ])  # fmt: skip

    def view(self, message_id: UUID) -> Conversation:
        """Return the conversation of a message."""
        return Operator(self.databases).conversation(message_id)

    def run(self, name: str, sql: str, **values: Any) -> None:
        """Change a database."""
        with self.engines[name].begin() as connection:
            connection.execute(text(sql), values)


@pytest.fixture(scope="module")
def world(server: ServerLike, template: str) -> Iterator[World]:
    """Two banks, each with both sides."""
    with open_databases(server, template, "bank_a", "bank_b") as engines:
        yield World(engines, registered(engines))


def test_a_transfer_that_is_refunded(world: World) -> None:
    """From the transfer by the refusal to the compensation: the same, whichever of its messages is asked for."""
    transfer = world.send("bank_a", "transfer", group="bank-a")
    world.receive("bank_b", transfer, "bank-b")
    refused = world.send("bank_b", "refused", cause=transfer, at=5, group="shared")
    world.receive("bank_a", refused, "bank-a", "failed", last_error="no such account\ntrace", attempts=2)
    world.run(
        "bank_a",
        "INSERT INTO outbox.compensation (half_id, function, requested_by, reason) VALUES (:id, 'app.refund', '', '')",
        id=transfer,
    )
    found = world.view(transfer)
    assert found == world.view(refused)
    assert (found.id, found.complete, found.unseen) == (transfer, True, [])
    first, second = found.messages
    assert (first.id, first.database, first.sender, first.cause, first.depth) == (transfer, "bank_a", "bank-a", None, 0)
    assert [(each.database, each.group, each.status) for each in first.receipts] == [("bank_b", "bank-b", "consumed")]
    assert (first.compensated_by, first.compensated_at is not None) == ("app.refund", True)
    # Its sender is the group that handled the cause in that database, whatever its producer group is called.
    assert (second.id, second.sender, second.cause, second.depth) == (refused, "bank-b", transfer, 1)
    assert [(each.status, each.attempts, each.error) for each in second.receipts] == [("failed", 2, "no such account")]


def test_a_message_alone(world: World) -> None:
    """It is its own conversation."""
    alone = world.send("bank_b", "ping")
    (message,) = world.view(alone).messages
    assert (message.id, message.receipts, message.sender) == (alone, [], "bank-a")


def test_a_cause_comes_before_its_effects_whatever_the_clocks_say(world: World) -> None:
    """The second database's clock is behind; and of two effects the earlier one comes first."""
    first = world.send("bank_a", "transfer", at=100)
    early = world.send("bank_b", "one", cause=first, at=50)
    late = world.send("bank_b", "two", cause=early, first=first, at=300)
    other = world.send("bank_a", "three", cause=first, at=200)
    assert [each.id for each in world.view(late).messages] == [first, early, other, late]
    assert [each.depth for each in world.view(late).messages] == [0, 1, 1, 2]


def test_the_first_message_is_pruned(world: World) -> None:
    """What it caused is still one conversation, by its id, which can be asked for too."""
    gone = uuid7()
    one, two = (world.send("bank_a", "t", cause=gone) for _ in range(2))
    for message_id in (gone, one, two):
        found = world.view(message_id)
        assert (found.id, [each.id for each in found.messages]) == (gone, [one, two])
        assert {(each.cause, each.depth) for each in found.messages} == {(gone, 0)}


def test_headers_that_lie(world: World) -> None:
    """A header that is no id, however long, is none; messages that name each other as their cause are shown once."""
    odd = world.send("bank_a", "t", headers={"outbox-conversation": "x" * 9_000, "outbox-cause": "nobody"})
    assert [(each.id, each.cause) for each in world.view(odd).messages] == [(odd, None)]
    one = world.send("bank_a", "t")
    two = world.send("bank_a", "t", cause=one)
    headers = json.dumps({"outbox-conversation": str(one), "outbox-cause": str(two)})
    sql = "UPDATE outbox.half_message SET headers = CAST(:headers AS jsonb) WHERE id = :id"
    world.run("bank_a", sql, id=one, headers=headers)
    assert {each.id for each in world.view(one).messages} == {one, two}


def test_two_groups_handle_the_cause(world: World) -> None:
    """Which of them sent the effect isn't on record: its producer group is named."""
    first = world.send("bank_a", "t")
    for group in ("one", "two"):
        world.receive("bank_a", first, group)
    effect = world.send("bank_a", "t", cause=first, group="shop")
    assert {each.id: each.sender for each in world.view(first).messages}[effect] == "shop"


def test_no_more_than_the_most(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation that is too long says so."""
    monkeypatch.setattr(conversation, "MOST_MESSAGES", 3)
    first = world.send("bank_a", "t")
    effects = [world.send("bank_a", "t", cause=first, at=number) for number in range(3)]
    found = world.view(first)
    assert (found.complete, [each.id for each in found.messages]) == (False, [first, *effects[:2]])


def test_unknown(world: World) -> None:
    """No message, no conversation."""
    with pytest.raises(NotFound):
        world.view(uuid7())


def test_a_database_is_away(world: World) -> None:
    """It is named, and the rest is shown; what only it could know isn't called unknown."""
    first = world.send("bank_a", "t")
    away = create_engine("postgresql+psycopg://nobody@127.0.0.1:1/none", connect_args={"connect_timeout": 2})
    opened = open_database("bank_a", world.engines["bank_a"], Settings())
    gone = type(opened)("bank_b", away, Settings(), frozenset({"producer", "consumer"}))
    operator = Operator(Databases([opened, gone]))
    found = operator.conversation(first)
    assert ([each.id for each in found.messages], found.unseen) == ([first], ["bank_b"])
    with pytest.raises(DatabaseUnreached, match="bank_b"):
        operator.conversation(uuid7())


def test_only_the_conversation_is_read(world: World) -> None:
    """Both branches go by an index in each partition, whatever the planner believes of the tables."""
    database = world.databases["bank_a"]
    with database.read_only() as connection:
        found = CONVERSATION(database.schema, id=uuid7(), limit=10)
        plan = "\n".join(
            line for (line,) in execute(connection, type(found)(f"EXPLAIN (COSTS OFF) {found.sql}", found.values))[0]
        )
    assert "Seq Scan on half_message" not in plan
    assert "left" in plan


def test_the_cost_of_a_long_one(world: World) -> None:
    """Of a conversation of thousands, no more rows are read than are shown; of all else, none."""
    first = UUID("01900000-0000-7000-8000-000000000000")
    send = """
        INSERT INTO outbox.half_message (id, producer_group, topic, headers, content_type, body)
        SELECT overlay(cast(:first AS text) placing lpad(to_hex(n), 12, '0') from 25)::uuid, 'shop', 'chat',
               CASE WHEN n BETWEEN 1 AND 1999 THEN
                    jsonb_build_object('outbox-conversation', cast(:first AS text), 'outbox-cause', :first) END,
               'text/plain', '' FROM generate_series(0, 3999) n"""
    world.run("bank_a", send, first=str(first))
    database = world.databases["bank_a"]
    with database.read_only() as connection:
        found = CONVERSATION(database.schema, id=first, limit=conversation.MOST_MESSAGES + 1)
        explain = type(found)(f"EXPLAIN (ANALYZE, FORMAT JSON) {found.sql}", found.values)
        (((plan,),),) = execute(connection, explain)
    plan = json.loads(plan) if isinstance(plan, str) else plan
    of_halves = [rows for table, rows in rows_read(plan[0]["Plan"]) if table.startswith("half_message")]
    assert conversation.MOST_MESSAGES <= sum(of_halves) <= conversation.MOST_MESSAGES + 10
    view = world.view(first)
    assert (len(view.messages), view.complete) == (conversation.MOST_MESSAGES, False)


def rows_read(plan: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield how many rows of each table a plan has read."""
    if "Relation Name" in plan:
        rows = (
            plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0) + plan.get("Rows Removed by Index Recheck", 0)
        )
        yield plan["Relation Name"], rows * plan["Actual Loops"]
    for inner in plan.get("Plans", []):
        yield from rows_read(inner)
