"""What the outcome of a message depends on besides its rows, read from both databases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection

from outbox.reconcile.judge import Rules
from outbox.reconcile.model import Access, Pair
from outbox.reconcile.options import Job
from outbox.reconcile.sides import judged_from
from outbox.reconcile.snapshots import Snapshots, engine_of, reaching
from outbox.store import reconcile as store
from outbox.store.execute import execute


def rules_of(job: Job, pair: Pair, snapshots: Snapshots) -> Rules:
    """Return the rules as of two snapshots."""
    with reaching(job.consumer):
        return _rules(job, pair, snapshots.consumer.connection, snapshots.producer.now, snapshots.consumer.now)


def rules_now(job: Job, pair: Pair) -> Rules:
    """Return the rules as of now. Read them before the inbox: a message behind the offset then has its row there."""
    with _connected(job.producer) as producer:
        (((producer_now,),),) = execute(producer, store.clock())
    with _connected(job.consumer) as consumer:
        (((consumer_now,),),) = execute(consumer, store.clock())
        return _rules(job, pair, consumer, producer_now, consumer_now)


@contextmanager
def _connected(access: Access) -> Iterator[Connection]:
    engine = engine_of(access)
    try:
        with reaching(access), engine.begin() as connection:
            yield connection
    finally:
        engine.dispose()


def _rules(job: Job, pair: Pair, consumer: Connection, producer_now: int, consumer_now: int) -> Rules:
    schema = job.consumer.schema
    offsets, starts = execute(
        consumer,
        store.offsets(schema, pair.group, pair.topic),
        store.starts(schema, pair.group, pair.topic),
    )
    return Rules(
        producer_now=producer_now,
        consumer_now=consumer_now,
        grace=int(job.window.grace * 1e6),
        horizon=judged_from(job, pair, producer_now).bytes,
        offsets=dict(offsets),
        starts=dict(starts),
        max_resends=job.policy.max_resends,
    )
