"""Which source stands for which side of a pair."""

from __future__ import annotations

from outbox.reconcile.compare import Side
from outbox.reconcile.model import Pair
from outbox.reconcile.options import Job
from outbox.reconcile.postgres import PostgresSide


def producer_side(job: Job, pair: Pair, snapshot: str | None = None) -> Side:
    """Return the producer's side: its database, and the archives for what it has pruned."""
    return PostgresSide(job.producer, "producer", pair, snapshot)


def consumer_side(job: Job, pair: Pair, snapshot: str | None = None) -> Side:
    """Return the consumer's side."""
    return PostgresSide(job.consumer, "consumer", pair, snapshot)
