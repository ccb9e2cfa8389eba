"""Each source of a topic is reconciled with its own feed."""

from __future__ import annotations

import threading
from typing import Any
from uuid import UUID

from outbox.reconcile.duty.reconciliation import SOME_TIME, JobReconciler, reconcilers
from outbox.reconcile.job import Access, Job, Outcome, Pair, Repair, Window
from outbox.reconcile.rows import to_findings
from outbox.reconcile.run import reconcile
from tests.kit.bench import Two, address, record


def test_each_source_is_reconciled_with_its_own_feed(two: Two) -> None:
    """Both are in sync; what is missing in the inbox is found by the run of its source, and mended there."""
    consumers = two.declare()
    ids = [branch.send(name)[0] for branch, name in zip(two.branches, "ab", strict=True)]
    two.consume(consumers)
    assert [differing(two, number) for number in (0, 1)] == [{}, {}]
    two.run("DELETE FROM outbox.consumer_message WHERE topic = 't@1'")
    assert [differing(two, number) for number in (0, 1)] == [{}, {ids[1]: "missing"}]
    repaired = differing(two, 1, apply=True, policy={Outcome.MISSING: Repair.RESEND})
    assert repaired == {ids[1]: "missing"}


def differing(two: Two, number: int, **options: Any) -> dict[UUID, str]:
    """Reconcile a source with the head office; return what differs."""
    producer, consumer = (Access(address(each), two.settings) for each in (two.branches[number].engine, two.head))
    job = Job(producer, consumer, (Pair("t", "g"),), window=Window(grace=0.0), **options)
    (result,) = reconcile(job).pairs
    return {finding.id: finding.outcome.label for finding in to_findings(result.findings) if finding.outcome.differs}


def test_a_reconciliation_waits_until_it_can_tell_two_sources_apart(two: Two) -> None:
    """Which feed is whose isn't guessed: none runs before the groups have read from both, and then each by itself."""
    binds = [each.engine for each in two.branches]
    two.sink.consumer("t", group="g", source=binds[::-1])(record)
    two.sink.reconciliation("night", every=3600.0)
    found = reconcilers(two.sink, threading.Event())
    assert [each.locate() for each in found] == [False, False]
    assert [each.schedule(two.connection, two.connection).done for each in found] == [0, 0]
    for branch, name in zip(two.branches, "ab", strict=True):
        branch.send(name)
    two.declare_anew()
    assert [each.locate() for each in found] == [True, True]
    assert [each.pairs for each in found] == [[("t@1", "g")], [("t", "g")]]
    jobs = [each.work_at(SOME_TIME) for each in found if isinstance(each, JobReconciler)]
    assert [str(pair) for job in jobs for pair in job.pairs] == ["t@1 → g", "t → g"]
