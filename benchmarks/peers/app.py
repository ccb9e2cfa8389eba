"""The application of the workers that are measured as processes: so many groups, one of which has messages."""

from __future__ import annotations

import os

from sqlalchemy import create_engine

from benchmarks.peers.ours import credit
from outbox import Outbox, Settings

TOPIC, GROUP = "transfer", "till"


def make() -> Outbox:
    """Return the Outbox of this process."""
    outbox = Outbox(create_engine(os.environ["OUTBOX_BENCH_URL"]), settings=Settings.from_env())
    outbox.consumer(TOPIC, group=GROUP, batch=100)(credit)
    for number in range(1, int(os.environ["OUTBOX_BENCH_GROUPS"])):
        outbox.consumer(f"{TOPIC}-{number}", group=f"{GROUP}-{number}")(credit)
    return outbox
