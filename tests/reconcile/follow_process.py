"""A process that takes one pass of a follower: ``python -m tests.reconcile.follow_process PRODUCER CONSUMER``."""

from __future__ import annotations

import sys

from sqlalchemy import create_engine

from outbox import Settings
from outbox.reconcile.follow.follower import Follower
from outbox.reconcile.job import Access, Job, Window
from tests.reconcile.town import PAIR


def main(producer: str, consumer: str) -> None:
    """Take the pass."""
    job = Job(Access(producer, Settings()), Access(consumer, Settings()), (PAIR,), window=Window(grace=60.0))
    with create_engine(consumer).connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        Follower(job, PAIR, "live", 20.0)(connection)


if __name__ == "__main__":
    main(*sys.argv[1:])
