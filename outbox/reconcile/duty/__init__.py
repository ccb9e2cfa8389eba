"""The reconciliation as a duty: what a worker runs by a timetable, follows without an end, and repairs by order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outbox.database.duty import BULK, COUNTED_CONSUMER, Duty, Post, Task, alone, whole
from outbox.prune.prune_pass import prune_runs_once


def _tasks(at: Post) -> Iterator[Task]:
    if not at.outbox.reconciliations:
        return
    from outbox.reconcile.duty.following import followings  # noqa: PLC0415 - what few workers do
    from outbox.reconcile.duty.reconciliation import JobReconciler, reconcilers  # noqa: PLC0415 - what few workers do
    from outbox.reconcile.duty.repairs import Repairs  # noqa: PLC0415 - what few workers do

    repairing: list[Any] = []
    for reconciler in reconcilers(at.outbox, at.stopping):
        # A lane of its own: a job may take long, and nothing must wait for it.
        yield _task(reconciler, "reconcile")
        if isinstance(reconciler, JobReconciler):
            repairing.append(reconciler)
        elif "prune" in at.roles:
            ((topic, group),) = reconciler.pairs
            one_pass = alone(prune_runs_once, at.settings, group, topic)
            every, name = at.settings.prune_interval, f"prune {reconciler.name}"
            yield Task(name=name, one_pass=one_pass, every=every, lane="upkeep", parts=("consumer",))
    for following in followings(at.outbox, at.stopping):
        at.at_end(following.end)
        # Nothing that takes long must keep it.
        yield _task(following, None)
        repairing.append(following)
    if repairing:
        repairs = Repairs(repairing, at.settings.schema)
        yield Task(name="repair", one_pass=repairs, every=at.settings.idle_wait, parts=("consumer",))


def _task(work: Any, lane: str | None) -> Task:
    how: Any = {"lane": lane, "parts": ("consumer",), "compares": (work.declared.name, work.pairs)}
    return Task(name=work.name, one_pass=whole(work), every=work.wait, **how)


DUTIES = (
    Duty(
        "reconcile",
        "Compares both sides by a timetable or without an end, and repairs what operators order.",
        f"""
        producer: reconciler
        SELECT ON half_message half_check op_message message scheduled_message topic compensation
        consumer: reconciler
        {BULK}
        {COUNTED_CONSUMER}
        INSERT UPDATE ON reconciliation_run
        SELECT INSERT UPDATE ON reconciliation_finding reconciliation_mark
        SELECT ON consumer_start consumer_passage reread_message
        SELECT UPDATE ON reconciliation_order
        SELECT INSERT DELETE ON reconciliation_settled
        """,
        role="reconcile",
        tasks=_tasks,
        functions="reconciliations",
    ),
)
