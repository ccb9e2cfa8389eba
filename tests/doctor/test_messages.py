"""Messages that aren't dispatched, released, retried, read or pruned, and those that wait for a human."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine

from outbox import Message, Outbox, Park, Retry, Settings
from outbox.consumer.consumer import Consumer
from outbox.dispatch.dispatch_pass import release_due_once
from outbox.prune.prune_pass import prune_producer_once
from tests.doctor.support import codes, dispatch_all, examine, inspected, mend_by_command, sql, the


def send(outbox: Outbox, count: int = 1, topic: str = "orders", **options: Any) -> list[UUID]:
    """Send messages, each in a transaction of its own."""
    engine: Any = outbox.engine
    ids = []
    for _ in range(count):
        with engine.begin() as connection:
            ids.append(outbox.send(connection, topic, {}, **options))
    return ids


def start(outbox: Outbox, engine: Engine) -> None:
    """Start the groups without reading anything."""
    with engine.connect() as connection:
        for subscription in outbox.subscriptions.values():
            Consumer(subscription, outbox.settings).start(connection, connection)


def consume(outbox: Outbox, engine: Engine) -> None:
    """Let all consumers consume what is there."""
    start(outbox, engine)
    with engine.connect() as connection:
        for subscription in outbox.subscriptions.values():
            consumer = Consumer(subscription, outbox.settings)
            while consumer.consume_once(connection, connection).more:
                pass


@pytest.fixture
def till(outbox: Outbox) -> list[Any]:
    """A consumer that answers what is put into this list, or nothing."""
    answers: list[Any] = []

    @outbox.consumer("orders", group="till")
    def handle(message: Message, session: Any) -> Any:
        return answers.pop() if answers else None

    return answers


# --- the producer's side ---------------------------------------------------------------------------------


def test_undispatched(engine: Engine, outbox: Outbox) -> None:
    """What was committed a minute ago and isn't dispatched lacks a worker; a dispatch mends it."""
    first, *_ = send(outbox, 3)
    assert codes(examine(engine)) == []
    sql(engine, "UPDATE outbox.op_message SET decided_at = now() - interval '2 minutes' WHERE half_id = :id", id=first)
    report = examine(engine, app="shop:outbox")
    assert codes(report) == ["op.undispatched"]
    finding = the(report, "op.undispatched")
    assert (finding.details["messages"], finding.details["topic"]) == (3, "orders")
    assert finding.mend == "outbox run --app shop:outbox --roles dispatch,release"
    dispatch_all(engine, outbox)
    assert codes(examine(engine)) == []


def test_undispatched_after_the_first_dispatch(engine: Engine, outbox: Outbox) -> None:
    """What dispatch has done before is no finding, however old; rolled back is not undispatched."""
    send(outbox, 2)
    dispatch_all(engine, outbox)
    with engine.begin() as connection:
        half_id = outbox.prepare(connection, "orders", {})
    outbox.rollback(half_id)
    sql(engine, "UPDATE outbox.op_message SET decided_at = now() - interval '1 hour'")
    assert codes(examine(engine)) == []


def test_without_the_control_file(engine: Engine, outbox: Outbox) -> None:
    """A role that may not read what cluster this is can't tell what is dispatched; the report says so."""
    from tests.doctor.support import READ_ALL, role

    sql(engine, "REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC")
    with role(engine, *READ_ALL) as url:
        report = examine(url)
        assert codes(report) == []
        assert "permission denied for function pg_control_system" in str(inspected(report, "dispatch").why)
        assert inspected(report, "scheduled messages").why is None


def test_scheduled(engine: Engine, outbox: Outbox) -> None:
    """A scheduled message whose time is over isn't released; one that is due later, or recalled, is fine."""
    _, later, recalled = send(outbox, 3, delay=3600)
    dispatch_all(engine, outbox)
    outbox.operator.recall(recalled, by="ann", why="a mistake")
    assert codes(examine(engine)) == []
    sql(engine, "UPDATE outbox.scheduled_message SET deliver_at = now() - interval '5 minutes' WHERE half_id <> :id",
        id=later)  # fmt: skip
    report = examine(engine)
    assert codes(report) == ["message.overdue"]
    assert the(report, "message.overdue").details["messages"] == 1
    with engine.connect() as connection:
        assert release_due_once(connection, outbox.settings).done == 1
    assert codes(examine(engine)) == []


def test_unpruned(engine: Engine, outbox: Outbox) -> None:
    """What is settled, and older than the retention and some, lacks a worker that prunes."""
    with engine.begin() as connection:
        undecided = outbox.prepare(connection, "orders", {}, immunity=3600)
        rolled_back = outbox.prepare(connection, "orders", {})
    outbox.rollback(rolled_back)
    send(outbox, 3, key="a")
    send(outbox, 1, delay=3600)
    dispatch_all(engine, outbox)
    assert codes(examine(engine)) == []

    def made(hours: int) -> None:
        sql(engine, "UPDATE outbox.op_message SET decided_at = now() - make_interval(hours => :h)", h=hours)
        sql(engine, "UPDATE outbox.message SET visible_at = now() - make_interval(hours => :h)", h=hours)

    made(72)
    assert codes(examine(engine)) == []
    made(74)
    report = examine(engine)
    assert codes(report) == ["prune.behind"]
    # Not the newest of its queue, from which the next position is counted; nor what waits for its time.
    assert the(report, "prune.behind").details["halves"] == 3
    assert codes(examine(engine, Settings(retention=100 * 3600, inbox_retention=200 * 3600))) == []
    assert codes(examine(engine, Settings(undelivered_retention=100 * 3600))) == []
    with engine.connect() as connection:
        assert prune_producer_once(connection, outbox.settings).done == 3
    assert codes(examine(engine)) == []
    assert sql(engine, "SELECT count(*) FROM outbox.half_check WHERE half_id = :id", id=undecided) == 1


# --- the consumer's side ---------------------------------------------------------------------------------


def test_parked(engine: Engine, outbox: Outbox, till: list[Any]) -> None:
    """Parked messages are found by group and topic, with the command that has one tried again."""
    ids = send(outbox, 3)
    dispatch_all(engine, outbox)
    till += [Park("hunter2"), Park("hunter2")]
    consume(outbox, engine)
    report = examine(engine)
    assert codes(report) == ["message.parked"]
    finding = the(report, "message.parked")
    assert (finding.details["group"], finding.details["topic"], finding.details["messages"]) == ("till", "orders", 2)
    assert finding.details["message_id"] in ids
    assert "hunter2" not in repr(report)
    look_at, give_back = finding.mend.splitlines()
    shown = mend_by_command(engine, look_at, "-o", "json")
    assert shown.json["inbox"][0]["status"] == "parked"
    assert mend_by_command(engine, give_back.replace("…", "again"), "--yes").code == 0
    assert the(examine(engine), "message.parked").details["messages"] == 1
    sql(engine, "UPDATE outbox.consumer_message SET discarded_at = now() WHERE status = 'parked'")
    assert codes(examine(engine)) == []


def test_overdue_retry(engine: Engine, outbox: Outbox, till: list[Any]) -> None:
    """A retry that no worker makes lacks a worker of its group; one that is due just now doesn't."""
    send(outbox)
    dispatch_all(engine, outbox)
    till.append(Retry())
    consume(outbox, engine)
    assert codes(examine(engine)) == []
    sql(engine, "UPDATE outbox.consumer_message SET next_attempt_at = now() - interval '2 minutes'")
    assert codes(examine(engine)) == []
    sql(engine, "UPDATE outbox.consumer_message SET next_attempt_at = now() - interval '10 minutes'")
    report = examine(engine)
    assert codes(report) == ["retry.overdue"]
    assert the(report, "retry.overdue").details["messages"] == 1
    with engine.connect() as connection:
        for subscription in outbox.subscriptions.values():
            assert Consumer(subscription, outbox.settings).retry_once(connection, connection).done == 1
    assert codes(examine(engine)) == []


def test_leases_that_ended_long_ago(engine: Engine, outbox: Outbox) -> None:
    """What no client takes again is told; a handler that has the group now gets it by the mend's command."""
    group = outbox.leased("orders", group="till")
    send(outbox, 2)
    dispatch_all(engine, outbox)
    assert len(group.take(2)) == 2
    sql(engine, "UPDATE outbox.consumer_message SET next_attempt_at = now() - interval '2 minutes'")
    assert codes(examine(engine)) == []
    sql(engine, "UPDATE outbox.consumer_message SET next_attempt_at = now() - interval '10 minutes'")
    report = examine(engine)
    assert codes(report) == ["lease.lapsed"]
    assert the(report, "lease.lapsed").details["messages"] == 2
    now, handled = Outbox(engine), list[UUID]()
    now.consumer("orders", group="till")(lambda message, session: handled.append(message.id))
    consume(now, engine)
    assert handled == []
    _, hand_over = the(report, "lease.lapsed").mend.splitlines()
    assert mend_by_command(engine, hand_over.replace("…", "again"), "--yes").code == 0
    assert codes(examine(engine)) == []
    (subscription,) = now.subscriptions.values()
    with engine.connect() as connection:
        while Consumer(subscription, now.settings).retry_once(connection, connection).done:
            pass
    assert len(set(handled)) == 2
    sql(engine, "DELETE FROM outbox.consumer_message")
    assert codes(examine(engine)) == []


def test_what_waits_behind_a_failed_one_is_no_ones_lease(engine: Engine, outbox: Outbox) -> None:
    """Its retry is an hour away: the later ones of its key, which came with it, are neither lapsed nor overdue."""
    group = outbox.leased("orders", group="till", ordered="key")
    send(outbox, 3, key="7")
    dispatch_all(engine, outbox)
    first, *_ = group.take(3)
    first.fail("no stock", delay=3600)
    late = "now() - interval '10 minutes'"
    sql(engine, f"UPDATE outbox.consumer_message SET next_attempt_at = {late} WHERE next_attempt_at < now() + '30 min'")
    assert codes(examine(engine)) == []


def test_a_paused_group_has_no_leases_to_take(engine: Engine, outbox: Outbox) -> None:
    """It hands nothing out, as its operator has said."""
    group = outbox.leased("orders", group="till")
    send(outbox)
    dispatch_all(engine, outbox)
    assert len(group.take()) == 1
    sql(engine, "UPDATE outbox.consumer_message SET next_attempt_at = now() - interval '10 minutes'")
    outbox.operator.pause_group("till", topic="orders", by="me", why="test")
    assert "lease.lapsed" not in codes(examine(engine))


def test_group_that_falls_behind(engine: Engine, outbox: Outbox, till: list[Any]) -> None:
    """A group whose next message is older than half the retention will miss it soon."""
    start(outbox, engine)
    send(outbox, 3, key="a")
    dispatch_all(engine, outbox)
    sql(engine, "UPDATE outbox.message SET visible_at = now() - interval '35 hours'")
    assert codes(examine(engine)) == []
    sql(engine, "UPDATE outbox.message SET visible_at = now() - interval '40 hours'")
    report = examine(engine)
    assert codes(report) == ["group.behind"]
    assert (the(report, "group.behind").details["group"], the(report, "group.behind").details["topic"]) == (
        "till", "orders",
    )  # fmt: skip
    longer = Settings(undelivered_retention=100 * 3600)
    assert codes(examine(engine, longer)) == ["group.behind"]
    sql(engine, "INSERT INTO outbox.delivery_cursor VALUES ('orders', 'till', 1, '{0}', '{0}')")
    assert "group.behind" not in codes(examine(engine, longer))
    sql(engine, "DELETE FROM outbox.delivery_cursor")
    consume(outbox, engine)
    assert codes(examine(engine)) == []


def test_group_that_was_overtaken(engine: Engine, outbox: Outbox, till: list[Any]) -> None:
    """A group whose next messages were pruned stops; if it is gone for good, its offsets are deleted."""
    start(outbox, engine)
    send(outbox, 3, key="a")
    dispatch_all(engine, outbox)
    for column, table in (("decided_at", "op_message"), ("visible_at", "message")):
        sql(engine, f"UPDATE outbox.{table} SET {column} = now() - interval '80 hours'")
    with engine.connect() as connection:
        assert prune_producer_once(connection, outbox.settings).done == 2
    report = examine(engine)
    assert codes(report) == ["group.pruned"]
    finding = the(report, "group.pruned")
    assert finding.details["queues"] == 1
    delete = finding.mend.splitlines()[1].partition(": ")[2]
    sql(engine, delete)
    assert codes(examine(engine)) == []


def test_name_of_a_group_is_quoted(engine: Engine, outbox: Outbox) -> None:
    """The SQL that is given can be run as it stands, also in another schema."""
    from outbox.database import migration

    settings = Settings(schema="mail")
    migration.upgrade(engine, schema="mail")
    other = Outbox(engine, settings=settings)

    @other.consumer("a|b", group="the-till")
    def handle(message: Message, session: Any) -> None:
        pass

    start(other, engine)
    send(other, topic="a|b")
    dispatch_all(engine, other)
    sql(engine, "UPDATE mail.message SET visible_at = now() - interval '50 hours'")
    finding = the(examine(engine, settings), "group.behind")
    sql(engine, finding.mend.splitlines()[-1].partition(": ")[2])
    assert codes(examine(engine, settings)) == []


def test_groups_are_fine_when_they_have_read_everything(engine: Engine, outbox: Outbox, till: list[Any]) -> None:
    """However old messages are, a group that has read them is where it should be."""
    send(outbox, 3)
    dispatch_all(engine, outbox)
    consume(outbox, engine)
    sql(engine, "UPDATE outbox.message SET visible_at = now() - interval '71 hours'")
    assert codes(examine(engine)) == []
