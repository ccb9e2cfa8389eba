"""A shop that was reconciled: a message that its group has lost, one that is parked, and sums that don't add up."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Engine, text

from outbox import Settings
from outbox.reconcile.job import Access, Job, Pair, Window
from outbox.reconcile.measure import Measure
from outbox.reconcile.run import reconcile
from tests.console.web import GROUP, TOPIC, Shop

#: What stands in a key of the sums under a name that is masked.
CARD = "4000-0012-3456-7899"


@dataclass(frozen=True)
class Reconciled:
    """The run, and the messages in which it found a difference."""

    run: UUID
    missing: UUID
    parked: UUID


def job_of(engine: Engine, since: dt.datetime, *measures: Measure) -> Job:
    """Return the job that compares the orders of a shop from a moment on with their billing."""
    access = Access(engine.url.render_as_string(hide_password=False), Settings())
    return Job(access, access, (Pair(TOPIC, GROUP),), window=Window(since=since, grace=0.0), measures=measures)


def sums(name: str = "billed", by: str = "card") -> Measure:
    """Return a measure of which one order is unexplained, under a key that nobody may see."""
    select = f"SELECT '{CARD}' AS {by}, {{}} AS orders, {{}} AS amount"
    producer, consumer = select.format(3, "30.10"), select.format(2, "20.05")
    return Measure(name, TOPIC, GROUP, (by,), ("orders", "amount"), producer=producer, consumer=consumer)


def forget(engine: Engine, *ids: UUID) -> None:
    """Have the group lose messages."""
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM outbox.consumer_message WHERE message_id = ANY(:ids)"), {"ids": list(ids)})


def reconciled(shop: Shop, *measures: Measure) -> Reconciled:
    """Have the group lose a message and park another one, and compare."""
    since = dt.datetime.now(dt.UTC)
    missing, parked = shop.order(1, card=CARD), shop.parked(2)[0]
    shop.drain()
    forget(shop.engine, missing)
    result = reconcile(job_of(shop.engine, since, *measures))
    return Reconciled(result.pairs[0].run_id, missing, parked)
