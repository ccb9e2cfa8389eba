"""The whole way of a compensation: the message is quarantined, the local transaction undone, the money back once."""

from __future__ import annotations

import datetime as dt
import json
import threading
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox import Message
from outbox.compensate import sql
from outbox.database.execute import execute
from outbox.errors import ActRefused
from outbox.testing import make_due
from outbox.worker.connections import AsyncRunner, WorkerDatabase
from tests.compensate.support import GIVE, REFUND, Town, give_back, refuse, settle


def see_nothing_happens(town: Town, half_id: UUID) -> None:
    """Whatever an operator or a group does now, the message takes no effect, and no more money comes back."""
    before = town.balance
    with pytest.raises(ActRefused, match="its local transaction was compensated"):
        town.app.operator.resend(half_id, by="me", why="test")
    for group in town.status(half_id):
        with pytest.raises(ActRefused):
            town.sink.operator.retry(half_id, group=group, by="me", why="test")
        settle(town, town.declare(group=group))
    assert town.effects(half_id) == 0
    town.age()
    assert not town.work()
    assert (town.balance, town.refunds(half_id)) == (before, 1)


def test_parked_transfer(town: Town) -> None:
    """A transfer to an account that isn't there parks, and is rolled back; both banks record who did it and why."""
    half_id = town.parked(300)
    other = town.transfer(7)
    assert town.balance == 693
    bulk_job_id = town.order(half_id)
    counts = town.work()
    assert (counts.taken, counts.done, counts.failed, counts.parked) == (1, 1, 0, 0)
    assert town.item(bulk_job_id) == ("done", "compensated by tests.compensate.support.give_back")
    assert town.balance == 993
    assert town.status(half_id) == {"g": "quarantined"}
    assert town.acts(half_id) == [
        ("ada", "quarantine", f"g/{half_id}", "no such account"),
        ("ada", "compensate", str(half_id), "no such account"),
    ]
    ((function, by, reason, result),) = town.at_a.rows(
        "SELECT function, requested_by, reason, result FROM outbox.compensation"
    )
    assert (function, by, reason) == ("tests.compensate.support.give_back", "ada", "no such account")
    assert result == {"given back": 300}
    (finished,) = town.at_a.rows("SELECT finished_at IS NOT NULL AND started_at IS NOT NULL FROM outbox.bulk_job")
    assert finished
    see_nothing_happens(town, half_id)
    settle(town, town.declare())
    assert town.effects(other) == 1


def test_failed_transfer(town: Town) -> None:
    """One that is to be retried is not retried any more."""
    half_id = town.transfer()
    town.consume(town.declare(refuse))
    assert town.status(half_id) == {"g": "failed"}
    assert town.roll_back(half_id) == "done"
    see_nothing_happens(town, half_id)


def test_unconsumed_transfer(town: Town) -> None:
    """One that the group hasn't come to is stepped over when it does, and the others are not."""
    consumer = town.declare()
    first, half_id, last = (town.transfer() for _ in range(3))
    assert town.roll_back(half_id) == "done"
    settle(town, consumer)
    assert [town.effects(each) for each in (first, half_id, last)] == [1, 0, 1]
    see_nothing_happens(town, half_id)


@pytest.mark.parametrize("options", [{}, {"delay": 3600}], ids=["undispatched", "scheduled"])
def test_transfer_that_is_no_message_yet(town: Town, options: dict[str, Any]) -> None:
    """One that isn't out yet takes no effect when it comes out."""
    town.declare()
    half_id = town.transfer(dispatched=False, **options)
    if options:
        town.dispatch()
    assert town.roll_back(half_id) == "done"
    make_due(town.app, failed=False, orphans=False)
    town.dispatch()
    assert town.at_a.rows("SELECT count(*) FROM outbox.message WHERE half_id = :id", id=half_id) == [1]
    see_nothing_happens(town, half_id)


def test_recalled_transfer(town: Town) -> None:
    """One that was recalled, and so never sent, can be rolled back as well."""
    town.declare()
    half_id = town.transfer(delay=3600)
    town.app.operator.recall(half_id, by="me", why="test")
    assert town.roll_back(half_id) == "done"
    see_nothing_happens(town, half_id)


def test_one_database_for_both_sides(village: Town) -> None:
    """Where both banks are in one database, it is quarantined once."""
    half_id = village.parked()
    assert village.roll_back(half_id) == "done"
    assert [act[1] for act in village.acts(half_id)] == ["quarantine", "compensate"]
    see_nothing_happens(village, half_id)


def test_producer_without_inboxes(town: Town) -> None:
    """A producer's database needs no consumer's tables."""
    half_id = town.parked()
    bulk_job_id = town.order(half_id)
    town.at_a.run("ALTER TABLE outbox.consumer_message RENAME TO elsewhere")
    try:
        town.work()
        assert town.item(bulk_job_id)[0] == "done"
    finally:
        town.at_a.run("ALTER TABLE outbox.elsewhere RENAME TO consumer_message")
    assert town.balance == 1000


def test_every_group_in_every_database(town: Town, new_engine: Callable[[], Engine]) -> None:
    """All groups of the topic are quarantined wherever they are; those of other topics are not."""
    third = new_engine()
    with third.connect() as connection:
        town.declare_on(connection, group="i")
    for group in ("g", "h"):
        town.declare(group=group)
    town.declare(group="elsewhere", topic="other")
    half_id = town.transfer()
    town.compensate_by(give_back, third.url.render_as_string(hide_password=False))
    assert town.roll_back(half_id) == "done"
    assert town.status(half_id) == dict.fromkeys(("g", "h"), "quarantined")
    assert town.status(half_id, third) == {"i": "quarantined"}


def test_group_that_has_passed_it_needs_no_quarantine(town: Town) -> None:
    """A group that left the message out, or began after it, is not quarantined; nor can it be sent to them again."""
    early = town.transfer(tag="us")
    town.consume(town.declare(tags={"eu"}))
    town.declare(group="later", start="now")
    assert town.roll_back(early) == "done"
    assert town.status(early) == {}
    with pytest.raises(ActRefused, match="its local transaction was compensated"):
        town.app.operator.resend(early, by="me", why="test")


def test_refused_where_it_took_effect(town: Town) -> None:
    """A message that one group has consumed is not rolled back, and is quarantined nowhere."""
    half_id = town.transfer()
    settle(town, town.declare())
    town.declare(group="h")
    bulk_job_id = town.order(half_id)
    counts = town.work()
    assert (counts.taken, counts.done, counts.failed) == (1, 0, 0)
    state, outcome = town.item(bulk_job_id)
    assert state == "skipped"
    assert outcome is not None
    assert outcome.startswith("refused: it took effect already: consumed by g (database ")
    assert "acknowledge_delivered" in outcome
    assert town.status(half_id) == {"g": "consumed"}
    assert (town.balance, town.refunds(half_id)) == (900, 0)


def test_acknowledged(town: Town) -> None:
    """Who says so knowingly has it rolled back all the same, and the other groups quarantined."""
    half_id = town.transfer()
    settle(town, town.declare())
    town.declare(group="h")
    bulk_job_id = town.order(half_id, acknowledge_delivered=True)
    town.work()
    assert town.item(bulk_job_id)[0] == "done"
    assert ", although g (database " in town.said(bulk_job_id)
    assert town.status(half_id) == {"g": "consumed", "h": "quarantined"}
    assert (town.balance, town.refunds(half_id)) == (1000, 1)
    (told,) = town.at_a.rows("SELECT result FROM outbox.audit WHERE action = 'compensate'")
    assert [name.partition(" ")[0] for name in (*told["consumed"], *told["quarantined"])] == ["g", "h"]


def test_async_compensation(town: Town) -> None:
    """A coroutine function gets an AsyncSession, in the event loop of a worker's lane."""

    async def later(message: Message, session: AsyncSession) -> str:
        await session.execute(GIVE, {"amount": message.body["amount"]})
        await session.execute(REFUND, {"id": message.id, "amount": 0})
        return "later"

    town.compensate_by(later)
    half_id = town.parked()
    bulk_job_id = town.order(half_id)
    database = WorkerDatabase(town.producer)
    town.work(lambda is_async: AsyncRunner(database, None, threading.Event()))
    assert town.item(bulk_job_id)[0] == "done"
    assert (town.balance, town.refunds(half_id)) == (1000, 1)


def test_what_a_compensation_is_given_and_may_do(town: Town) -> None:
    """It gets the message as its consumers do, with its model; what it sends goes out with the compensation."""
    seen: list[Message] = []

    def tell(message: Message, session: Session) -> None:
        seen.append(message)
        assert message.body == {"amount": 5}
        session.commit()
        town.app.send(session, "t", {"amount": 0}, id=UUID(int=1))

    town.compensate_by(tell, model=dict[str, int])
    half_id = town.transfer(5, key="me", tag="x", headers={"a": "b"}, delay=dt.timedelta(seconds=0.001))
    town.dispatch()
    assert town.roll_back(half_id) == "done"
    (message,) = seen
    ((queue, position),) = town.at_a.rows("SELECT queue, position FROM outbox.message WHERE half_id = :id", id=half_id)
    assert (message.id, message.topic, message.queue, message.position) == (half_id, "t", queue, position)
    assert (message.key, message.tag, message.headers, message.attempt) == ("me", "x", {"a": "b"}, 1)
    assert town.at_a.rows("SELECT count(*) FROM outbox.op_message WHERE half_id = :id", id=UUID(int=1)) == [1]


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (None, None),
        ({"when": dt.date(2030, 1, 2)}, {"when": "2030-01-02"}),
        ([1, "a"], [1, "a"]),
        ("text", "text"),
        (3, 3),
        (float("nan"), "nan"),
        ({"a": "\0"}, "{'a': '\\x00'}"),
        ("a\0b", "ab"),
        (b"\xff", "b'\\xff'"),
    ],
    ids=str,
)
def test_result_is_stored_as_json(village: Town, given: Any, stored: Any) -> None:
    """Whatever a compensation returns, it is recorded, and never fails the compensation."""
    village.compensate_by(lambda message, session: given)
    half_id = village.transfer()
    assert village.roll_back(half_id) == "done"
    (result,) = village.at_a.rows("SELECT result::text FROM outbox.compensation")
    assert (None if result is None else json.loads(result)) == stored


def test_reconciliation_agrees(town: Town) -> None:
    """After a compensation there is nothing that a reconciliation would find."""
    pytest.importorskip("pyarrow")
    from tests.reconcile.repairing import Night

    half_id = town.parked()
    assert town.roll_back(half_id) == "done"
    town.run("DROP TABLE ledger")
    with Night(town.producer, town.consumer, town.settings) as night:
        assert night.found() == []


def test_nothing_is_opened_without_work(town: Town) -> None:
    """A pass with nothing to do asks its own database alone, and one without compensations not even that."""
    town.compensate_by(give_back, "postgresql+psycopg://nobody@127.0.0.1:1/nowhere")
    assert not town.work(lambda is_async: pytest.fail("a room was opened"))
    town.compensations = {}
    with town.producer.connect() as connection:
        assert not town.work_on(connection)
        assert not connection.in_transaction()


def test_others_leave_it_alone(town: Town) -> None:
    """A worker that has no compensation for the topic leaves its items to those that have."""
    half_id = town.parked()
    bulk_job_id = town.order(half_id)
    mine, town.compensations = town.compensations, {}
    town.compensate_by(topic="other")
    assert not town.work()
    assert town.item(bulk_job_id) == ("pending", None)
    town.compensations = mine
    assert town.work().done == 1


def test_each_job_with_a_rate_begins(town: Town) -> None:
    """The first item of a bulk job is due at once, however many microseconds pass while that is found out."""
    bulk_job_id = town.order(town.transfer())
    town.at_a.run("UPDATE outbox.bulk_job SET rate = 0.001")
    town.at_a.run(
        "INSERT INTO outbox.bulk_job SELECT (jsonb_populate_record(j, jsonb_build_object('id', gen_random_uuid()))).*"
        "  FROM outbox.bulk_job j, generate_series(1, 1000) WHERE j.id = :id",
        id=bulk_job_id,
    )
    town.at_a.run(
        "INSERT INTO outbox.bulk_item (bulk_job_id, number, action, message_id, topic)"
        " SELECT id, 1, 'compensate', gen_random_uuid(), 't' FROM outbox.bulk_job WHERE id <> :id",
        id=bulk_job_id,
    )
    with town.producer.connect() as connection:
        (rows,) = execute(connection, sql.due("outbox", topics=["t"], limit=2000))
    assert len(rows) == 1001


def test_rate_and_turns(town: Town) -> None:
    """A bulk job of many items begins no more than its rate lets it, and doesn't hold up another one."""
    ids = [town.transfer() for _ in range(6)]
    bulk_job_id = town.order(ids[0])
    town.at_a.run(
        "INSERT INTO outbox.bulk_item (bulk_job_id, number, action, message_id, topic)"
        " SELECT :id, n + 1, 'compensate', m, 't' FROM unnest(CAST(:ids AS uuid[])) WITH ORDINALITY x (m, n)",
        id=bulk_job_id,
        ids=ids[1:5],
    )
    town.at_a.run("UPDATE outbox.bulk_job SET total = 5, rate = 0.001")
    single = town.order(ids[5])
    assert town.work().done == 2
    assert town.item(single)[0] == "done"
    assert not town.work()
    town.at_a.run("UPDATE outbox.bulk_job SET started_at = started_at - interval '1100 s' WHERE rate IS NOT NULL")
    assert town.work().done == 1
    town.at_a.run("UPDATE outbox.bulk_job SET rate = NULL")
    counts = town.work(limit=2)
    assert (counts.done, counts.more) == (2, True)
    assert town.work().done == 1
    assert [town.refunds(each) for each in ids] == [1] * 6
