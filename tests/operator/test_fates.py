"""What became of messages after an act: consumed, failed again with what, or not tried yet; of one and of many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Park
from outbox.acts.changes import Target
from outbox.operator.databases import Databases, open_database
from outbox.operator.model import (
    AuditFilter,
    BulkItemFilter,
    BulkItemState,
    BulkOutcome,
    FateSince,
    PageRequest,
    Selector,
    Total,
)
from outbox.operator.operator import Operator
from outbox.testing import bulk, drain

TOPIC, GROUP = "orders", "billing"


class Shop:
    """Orders and their billing in two databases; the bodies in ``ill`` are parked, and fail when they are retried."""

    def __init__(self, producer: Engine, consumer: Engine) -> None:
        self.engine, self.inboxes = producer, consumer
        self.producer = Outbox(producer)
        self.consumer = Outbox(consumer)
        self.consumer.consumer(TOPIC, group=GROUP, retry_delays=(3600.0,), source=producer)(self.bill)
        self.ill: set[int] = set()
        self.again = False
        settings = self.producer.settings
        self.databases = Databases([open_database(*each, settings) for each in (("a", producer), ("b", consumer))])
        self.operator = Operator(self.databases)

    def bill(self, message: Message, _: Session) -> Park | None:
        if message.body not in self.ill:
            return None
        if self.again:
            raise RuntimeError(f"no customer {message.body}")
        return Park("no such customer")

    def send(self, *bodies: int) -> list[UUID]:
        with self.engine.begin() as connection:
            return [self.producer.send(connection, TOPIC, body) for body in bodies]

    def drain(self) -> None:
        drain(self.producer, self.consumer)

    def statuses(self, message_id: UUID) -> list[tuple[str | None, str]]:
        (outcome,) = self.operator.message(message_id).outcomes
        return [(fate.group, fate.status) for fate in outcome.fates]


@pytest.fixture
def shop(new_engine: Callable[[], Engine]) -> Shop:
    """A shop with nothing in it."""
    return Shop(new_engine(), new_engine())


def parked(shop: Shop, *bodies: int) -> list[UUID]:
    """Send orders that are parked."""
    shop.ill.update(bodies)
    ids = shop.send(*bodies)
    shop.drain()
    return ids


def test_a_retry_is_pending_until_a_worker_has_tried(shop: Shop) -> None:
    """That it was made due is not what came of it."""
    (message_id,) = parked(shop, 1)
    shop.operator.retry(message_id, group=GROUP, by="ann")
    assert shop.statuses(message_id) == [(GROUP, "pending")]
    shop.ill.clear()
    shop.drain()
    assert shop.statuses(message_id) == [(GROUP, "consumed")]


def test_a_retry_that_fails_again_says_with_what(shop: Shop) -> None:
    """The error is that of the attempt since, not the one for which the message was parked."""
    (message_id,) = parked(shop, 1)
    shop.again = True
    shop.operator.retry(message_id, group=GROUP, by="ann")
    shop.drain()
    (outcome,) = shop.operator.message(message_id).outcomes
    assert (outcome.action, outcome.actor) == ("retry", "ann")
    (fate,) = outcome.fates
    assert (fate.status, fate.error) == ("failed", "RuntimeError: no customer 1")
    shop.operator.retry(message_id, group=GROUP, by="bob")
    assert shop.statuses(message_id) == [(GROUP, "pending")]
    shop.operator.park(message_id, group=GROUP, by="bob", why="enough")
    assert shop.statuses(message_id) == [(GROUP, "parked")]
    shop.operator.discard(message_id, group=GROUP, by="bob", why="enough")
    assert shop.statuses(message_id) == [(GROUP, "discarded")]


def test_a_resend_is_followed_in_every_group(shop: Shop) -> None:
    """A group that has parked it tries it again, one that has lost it gets it: in the consumer's own database."""
    well, ill = shop.send(1, 2)
    shop.ill.add(2)
    shop.drain()
    with shop.inboxes.begin() as connection:
        connection.execute(text("DELETE FROM outbox.consumer_message WHERE message_id = :id"), {"id": well})
    shop.operator.resend([well, ill], by="ann")
    assert [shop.statuses(each) for each in (well, ill)] == [[(GROUP, "unconsumed")], [(GROUP, "pending")]]
    shop.again = True
    shop.drain()
    assert [shop.statuses(each) for each in (well, ill)] == [[(GROUP, "consumed")], [(GROUP, "failed")]]


def test_a_bulk_job_tells_what_became_of_its_messages(shop: Shop) -> None:
    """Its outcome is counted, each item has its own, and the kinds of errors are named."""
    ids = parked(shop, *range(6))
    job = shop.operator.start("retry", Selector(tuple(Target(each, GROUP) for each in ids)), by="ann", why="mended")
    assert shop.operator.bulk_outcome(job.id) == BulkOutcome(Total(0), {}, {}, [], 0)
    bulk(shop.consumer)
    assert shop.operator.bulk_outcome(job.id).counts == {"pending": 6}
    shop.ill, shop.again = {0, 1}, True
    shop.drain()
    outcome = shop.operator.bulk_outcome(job.id)
    assert outcome.counts == {"consumed": 4, "failed": 2}
    assert list(outcome.errors.values()) == [2]
    assert outcome.items == Total(6)
    fates = [item.fates for item in shop.operator.bulk_items(job.id, BulkItemFilter(), PageRequest()).items]
    assert [[fate.status for fate in each] for each in fates] == [["failed"]] * 2 + [["consumed"]] * 4
    assert fates[0][0].error == "RuntimeError: no customer 0"
    page = shop.operator.bulk_items(job.id, BulkItemFilter(BulkItemState.DONE), PageRequest(size=2))
    assert [item.fates[0].status for item in page.items] == ["failed", "failed"]


def test_an_act_at_the_producer_is_followed_there(shop: Shop) -> None:
    """Of what is committed it says how far the message has come."""
    with shop.engine.begin() as connection:
        half = shop.producer.prepare(connection, TOPIC, 1)
    job = shop.operator.start("commit", Selector((Target(half),)), by="ann", why="paid")
    bulk(shop.producer)
    assert shop.operator.bulk_outcome(job.id).counts == {"committed": 1}
    shop.drain()
    assert shop.operator.bulk_outcome(job.id).counts == {"dispatched": 1}
    (item,) = shop.operator.bulk_items(job.id, BulkItemFilter(), PageRequest()).items
    assert item.fates == [FateSince("a", None, "dispatched", None, None, None)]


def test_a_database_that_is_away_is_named(shop: Shop) -> None:
    """What became of a resend in an inbox that can't be read isn't told, nor passed over."""
    ids = shop.send(1, 2)
    shop.drain()
    job = shop.operator.start("resend", Selector(tuple(map(Target, ids))), by="ann", why="lost")
    bulk(shop.producer)
    nowhere = create_engine("postgresql+psycopg://nobody@127.0.0.1:1/nothing")
    shop.databases["b"] = replace(shop.databases["b"], engine=nowhere)
    assert shop.operator.bulk_outcome(job.id) == BulkOutcome(Total(2), {}, {}, ["b"], 0)


def test_the_audit_of_a_bulk_job_is_its_order_and_its_end(shop: Shop) -> None:
    """One row has the counts; what was done to each message is found by its target, or where all is asked for."""
    ids = parked(shop, *range(5))
    job = shop.operator.start("retry", Selector(tuple(Target(each, GROUP) for each in ids)), by="ann", why="mended")
    bulk(shop.consumer)
    summed = shop.operator.audit(AuditFilter(summed=True), PageRequest()).items
    assert [(row.action, row.target, row.result["did"]) for row in summed] == [
        ("bulk", str(job.id), "end"),
        ("bulk", str(job.id), "start"),
    ]
    assert summed[0].result == {"did": "end", "action": "retry", "items": 5, "done": 5}
    assert (summed[0].actor, summed[0].reason) == ("ann", "mended")
    assert len(shop.operator.audit(AuditFilter(), PageRequest()).items) == 7
    (row,) = shop.operator.audit(AuditFilter(target=str(ids[0])), PageRequest()).items
    assert row.action == "retry"
