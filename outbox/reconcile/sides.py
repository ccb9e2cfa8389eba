"""Which sources stand for the two sides of a pair.

What the outcome of a message depends on besides its rows, read from both databases.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from sqlalchemy import Connection

from outbox.database.execute import execute
from outbox.message.model import uuid7_at
from outbox.reconcile import sql
from outbox.reconcile.archive import complete_from, with_archives
from outbox.reconcile.compare import Side
from outbox.reconcile.judge import Rules
from outbox.reconcile.model import Access, Pair
from outbox.reconcile.options import Job
from outbox.reconcile.postgres import PostgresSide
from outbox.reconcile.source import Snapshots, engine_of, reaching


def sides(
    job: Job, pair: Pair, producer_now: int, consumer_now: int, snapshots: Snapshots | None = None
) -> tuple[Side, Side]:
    """Return the sides of producer and consumer: their databases, and the archives for what they may have pruned.

    ``producer_now`` and ``consumer_now`` are the databases' clocks in microseconds; without ``snapshots`` the sides
    read what is there at the time.

    Raises:
        SourceError: a folder has no archive in it.
    """
    producer = PostgresSide(job.producer, "producer", pair, snapshots.producer.name if snapshots else None)
    consumer = PostgresSide(job.consumer, "consumer", pair, snapshots.consumer.name if snapshots else None)
    if not job.archives:
        return producer, consumer
    return (
        with_archives(producer, job.archives, "producer", pair, pruned_below(job.producer, producer_now)),
        with_archives(consumer, job.archives, "consumer", pair, pruned_below(job.consumer, consumer_now, inbox=True)),
    )


def pruned_below(access: Access, now: int, *, inbox: bool = False) -> UUID:
    """Return the id below which a database may have pruned messages, by its clock (microseconds)."""
    kept = access.settings.inbox_retention if inbox else access.settings.retention
    return uuid7_at(max(now / 1e6 - kept, 0.0))


def judged_from(job: Job, pair: Pair, producer_now: int) -> UUID:
    """Return the id from which on the producer's side is complete: what it lacks there, it never had."""
    horizon = pruned_below(job.producer, producer_now)
    return complete_from(job.archives, pair, horizon) if job.archives else horizon


def rules_of(job: Job, pair: Pair, snapshots: Snapshots) -> Rules:
    """Return the rules as of two snapshots."""
    with reaching(job.consumer):
        return _rules(job, pair, snapshots.consumer.connection, snapshots.producer.now, snapshots.consumer.now)


def rules_now(job: Job, pair: Pair) -> Rules:
    """Return the rules as of now. Read them before the inbox: a message behind the offset then has its row there."""
    with _connected(job.producer) as producer:
        (((producer_now,),),) = execute(producer, sql.clock())
    with _connected(job.consumer) as consumer:
        (((consumer_now,),),) = execute(consumer, sql.clock())
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
        sql.offsets(schema, pair.group, pair.topic),
        sql.starts(schema, pair.group, pair.topic),
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
