"""Repair what a reconciliation has found, through the framework's own functions.

Safe beside dispatchers, consumers, retries, prune, operators and another repair, and safe to kill and run again: each
act is one transaction in one database, which locks what it is about, looks whether it is still as it was found, acts,
and records the act. What has healed meanwhile is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from uuid import UUID

from sqlalchemy import Engine

from outbox.reconcile.job import Job, Outcome, Pair, Repair
from outbox.reconcile.repair.acts import check_undecided, dispatch_undispatched, park, resend_missing, retry_parked
from outbox.reconcile.repair.sync_status import sync_status
from outbox.reconcile.repair.work import Repairer, Work, attempt
from outbox.reconcile.rows import Finding, Repaired

__all__ = ["BATCH", "repair"]

#: How many messages an act is about at most.
BATCH = 500

_ACTS: Mapping[Repair, Repairer] = {
    Repair.RESEND: resend_missing,
    Repair.DISPATCH: dispatch_undispatched,
    Repair.SYNC_STATUS: sync_status,
    Repair.PARK: park,
    Repair.RETRY: retry_parked,
    Repair.CHECK: check_undecided,
}


def repair(
    job: Job,
    pair: Pair,
    run_id: UUID,
    findings: Iterable[Finding],
    producer: Engine,
    consumer: Engine,
    report: Callable[[Sequence[Repaired]], None] = lambda _: None,
) -> list[Repaired]:
    """Do what ``job.policy`` says about each difference of a pair; return what became of each attempt.

    ``findings`` are those of `result.to_findings`, in any order; what the policy only alerts to, and what is no
    difference, is left out. ``producer`` and ``consumer`` are engines on the databases of ``job``. ``report`` gets the
    results of each batch once it is committed: it may write them down, and a repair that is killed has reported all
    but its last batch.

    Raises:
        sqlalchemy.exc.DBAPIError: a connection was lost. Run it again: what is done is found healed.
    """
    work = Work(job, pair, run_id, producer, consumer)
    by_kind: dict[Outcome, list[Finding]] = {}
    for finding in findings:
        if finding.outcome.differs and job.repair_of(finding.outcome) is not Repair.ALERT:
            by_kind.setdefault(finding.outcome, []).append(finding)
    repaired: list[Repaired] = []
    for kind in sorted(by_kind):
        action = job.repair_of(kind)
        for batch in _batches(by_kind[kind]):
            results = attempt(_ACTS[action], work, batch)
            news = [Repaired(finding.id, kind, action, results[finding.id]) for finding in batch]
            report(news)
            repaired += news
    return repaired


def _batches(findings: list[Finding]) -> Iterator[list[Finding]]:
    """Yield findings by id, so that two repairs take their locks in the same order."""
    findings.sort(key=lambda finding: finding.id)
    for start in range(0, len(findings), BATCH):
        yield findings[start : start + BATCH]
