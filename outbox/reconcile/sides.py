"""Which sources stand for the two sides of a pair."""

from __future__ import annotations

from uuid import UUID

from outbox.ids import uuid7_at
from outbox.reconcile.archive import complete_from, with_archives
from outbox.reconcile.compare import Side
from outbox.reconcile.model import Access, Pair
from outbox.reconcile.options import Job
from outbox.reconcile.postgres import PostgresSide
from outbox.reconcile.snapshots import Snapshots


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
