"""Phantoms, changed bodies, failures: set the message aside at the consumer, so that nobody runs it again."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from outbox.model import Status
from outbox.reconcile.model import Action, Outcome
from outbox.reconcile.repair import inbox
from outbox.reconcile.repair.inbox import InboxRow
from outbox.reconcile.repair.work import BUSY, DONE, HEALED, Work, ids_of
from outbox.reconcile.result import Finding
from outbox.store import repair as store
from outbox.store.execute import execute


def park(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Park the failed rows that are as they were found."""
    kind, schema = batch[0].outcome, work.job.consumer.schema
    results = _look_again(work, batch)
    with work.in_consumer() as connection:
        there = inbox.lock(work, connection, batch)
        for finding in batch:
            if finding.id not in results:
                busy = finding.id in there.busy
                results[finding.id] = BUSY if busy else _result(finding, there.rows.get(finding.id))
        chosen = [finding for finding in batch if results[finding.id] == DONE]
        why = f"parked by {work.reason(kind)}"
        execute(
            connection,
            store.settle_inbox(schema, work.pair.group, Status.PARKED.value, ids_of(chosen), why),
            *work.audits(Action.PARK, chosen, {finding.id: {"was": Status.FAILED.value} for finding in chosen}),
        )
    return results


def _result(finding: Finding, row: InboxRow | None) -> str:
    if row is None or row.status is Status.PARKED:
        return HEALED
    if row.status is Status.FAILED:
        return DONE if row.is_as(finding) else row.changed
    if finding.outcome is Outcome.FAILED:
        return HEALED  # its retry has succeeded, or was fenced off
    return f"refused: it is {row.status.value}: only what is to be retried can be parked"


def _look_again(work: Work, batch: Sequence[Finding]) -> dict[UUID, str]:
    """Return the results of what the producer has come to know meanwhile: a phantom's message, the body that it had."""
    with work.in_producer() as connection:
        (rows,) = execute(connection, store.dispatched(work.job.producer.schema, ids_of(batch)))
    digests: dict[UUID, bytes] = dict(rows)
    return {
        finding.id: HEALED
        for finding in batch
        if (finding.outcome is Outcome.PHANTOM and finding.id in digests)
        or (finding.outcome is Outcome.DIGEST_MISMATCH and digests.get(finding.id, b"") == finding.consumer_digest)
    }
