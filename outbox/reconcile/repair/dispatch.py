"""Undispatched: make the message that the op was to become, unless dispatch will come to it by itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from uuid import UUID

from outbox.dispatch import dispatch_once, dispatch_passed, release_due_once
from outbox.reconcile.repair.work import BUSY, DONE, HEALED, PATIENCE, Work, ids_of
from outbox.reconcile.result import Finding

_PAUSE = 0.05


def dispatch_undispatched(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Place what dispatch has passed; let it come to the others, and look again.

    What dispatch or release has made is healed: that is their work, nothing was mended.
    """
    results: dict[UUID, str] = {}
    left = ids_of(batch)
    progress = time.monotonic()
    while True:
        with work.in_producer() as connection:
            placed, ahead = dispatch_passed(
                connection,
                work.job.producer.settings,
                left,
                actor=work.job.actor,
                reason=work.reason(batch[0].outcome),
            )
        results |= dict.fromkeys(left, HEALED) | dict.fromkeys(placed, DONE)
        if not ahead:
            return results
        left = ahead
        if _run_passes(work):
            progress = time.monotonic()
        elif time.monotonic() - progress > PATIENCE:
            return results | dict.fromkeys(left, BUSY)
        else:
            time.sleep(_PAUSE)  # another worker is dispatching, or a transaction holds up the re-base


def _run_passes(work: Work) -> bool:
    """Run a pass of dispatch and one of release; tell whether they did anything."""
    settings = work.job.producer.settings
    with work.producer.connect().execution_options(isolation_level="READ COMMITTED") as connection:
        dispatched = dispatch_once(connection, settings)
        released = release_due_once(connection, settings)
    return bool(dispatched or released)
