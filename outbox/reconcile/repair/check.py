"""Undecided: have the half checked by the next pass, a parked one exactly once more."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from sqlalchemy import Connection

from outbox.check.operator import request_check
from outbox.errors import AlreadyCommitted, AlreadyRolledBack, HalfNotFound
from outbox.reconcile.repair.work import BUSY, DONE, HEALED, Work, ids_of
from outbox.reconcile.result import Finding
from outbox.store import repair as store
from outbox.store.execute import execute


def check_undecided(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Request a check of what is still undecided, and not due to be checked anyway."""
    results = {}
    ids, schema = ids_of(batch), work.job.producer.schema
    with work.in_producer() as connection:
        # Whoever decides locks this row first, for as long as its transaction runs: not waited for.
        locked, there = execute(connection, store.lock_checks(schema, ids), store.checks(schema, ids))
        due: dict[UUID, bool] = dict(locked)
        busy = {half_id for (half_id,) in there} - due.keys()
        for finding in batch:
            if finding.id in busy:
                results[finding.id] = BUSY
            elif due.get(finding.id):
                results[finding.id] = "refused: a check is due already; is a worker running that has its checker?"
            else:
                results[finding.id] = _request(work, connection, finding)
    return results


def _request(work: Work, connection: Connection, finding: Finding) -> str:
    try:
        request_check(
            connection,
            work.job.producer.settings,
            finding.id,
            actor=work.job.actor,
            reason=work.reason(finding.outcome),
        )
    except (AlreadyCommitted, AlreadyRolledBack):
        return HEALED
    except HalfNotFound:
        return "refused: the producer has no half message of it any more"
    return DONE
