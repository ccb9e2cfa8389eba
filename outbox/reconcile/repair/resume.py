"""Parked: give the message back to its group, with all its attempts."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from outbox.consumer.resume import resume
from outbox.model import Status
from outbox.reconcile.repair import inbox
from outbox.reconcile.repair.inbox import InboxRow
from outbox.reconcile.repair.work import BUSY, DONE, HEALED, Work
from outbox.reconcile.result import Finding


def resume_parked(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Resume the parked rows that are as they were found.

    One that somebody resumed and that is parked again is left to a human: it would go round for ever.
    """
    results = {}
    with work.in_consumer() as connection:
        there = inbox.lock(work, connection, batch)
        for finding in batch:
            busy = finding.id in there.busy
            result = results[finding.id] = BUSY if busy else _result(finding, there.rows.get(finding.id))
            if result == DONE:
                resume(
                    connection,
                    work.job.consumer.schema,
                    work.pair.group,
                    finding.id,
                    actor=work.job.actor,
                    reason=work.reason(finding.outcome),
                )
    return results


def _result(finding: Finding, row: InboxRow | None) -> str:
    if row is None or row.status is not Status.PARKED:
        return HEALED
    return DONE if row.is_as(finding) else row.changed
