"""The reconciliation as arms of its benchmark: whole jobs, second look and record included."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import Any

from benchmarks.reconcile_arms import AHEAD, AT_END, NOTES, Found, Place
from benchmarks.reconcile_fill import GROUP, TOPIC
from outbox import Settings
from outbox.reconcile.job import Access, EngineName, Job, Outcome, Pair, Spark, Tier
from outbox.reconcile.report import cost_of
from outbox.reconcile.run import reconcile

_WEEK = 7 * 86400.0


def full(place: Place) -> Callable[[], Found]:
    """Return what reads every row, in threads."""
    return partial(_found, _job(place, Tier.FULL))


def full_on_spark(place: Place) -> Callable[[], Found]:
    """Start Spark; return what reads every row there."""
    from outbox.reconcile.spark.session import session

    job = _job(place, Tier.FULL, EngineName.SPARK)
    stack = ExitStack()
    AT_END.append(stack.close)
    opened = stack.enter_context(session(Spark(), job.workers))
    # Spark ends a Python that had nothing to do for a minute, while others had their rounds.
    some = opened.spark.range(0, 2 * job.workers, 1, 2 * job.workers).mapInArrow(_import, "id bigint")
    AHEAD.append(some.count)
    return partial(_found, job)


def _import(batches: Iterator[Any]) -> Iterator[Any]:
    for name in ("adbc_driver_postgresql.dbapi", "outbox.reconcile.spark.frames"):
        import_module(name)
    time.sleep(0.3)  # so that no Python does all of them
    yield from batches


def digests(place: Place) -> Callable[[], Found]:
    """Return what makes digests of everything, also of what was settled before."""
    return partial(_found, _job(place, Tier.DIGEST, keep_for=0.0))


def settled(place: Place) -> Callable[[], Found]:
    """Return the function that digests the unsettled ranges, and settles them."""
    return partial(_found, _job(place, Tier.DIGEST))


def behind(place: Place) -> Callable[[], Found]:
    """Return the run with default options, as a nightly run has them."""
    return partial(_found, _job(place, Tier.AUTO))


def _job(place: Place, tier: Tier, engine: EngineName = EngineName.LOCAL, keep_for: float = _WEEK) -> Job:
    settings = Settings()
    return Job(
        Access(place.producer, settings),
        Access(place.consumer, settings),
        (Pair(TOPIC, GROUP),),
        tier=tier,
        engine=engine,
        keep_for=keep_for,
    )


def _found(job: Job) -> Found:
    (pair,) = reconcile(job).pairs
    NOTES.append(cost_of(pair.plan))
    ids, outcomes = (pair.findings[name].to_pylist() for name in ("id", "outcome"))
    return {id_: Outcome(outcome).label for id_, outcome in zip(ids, outcomes, strict=True)}
