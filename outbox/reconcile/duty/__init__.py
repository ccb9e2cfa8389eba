"""The reconciliation as a duty: what a worker runs by a timetable, follows without an end, and repairs by order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from outbox.database.duty import BULK, COUNTED_CONSUMER, PARTS, Duty, Post, Task, whole
from outbox.database.execute import read_source
from outbox.database.identity import feed_from, source_identity
from outbox.message.model import Counts
from outbox.prune.prune_pass import prune_consumer_once, prune_runs_once

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.settings import Settings


def _run(at: Post) -> Iterator[Task]:
    if not at.outbox.reconciliations:
        return
    from outbox.reconcile.duty.reconciliation import SCHEDULE_EVERY, Runs, reconcilers  # noqa: PLC0415 - what few workers do

    settings, found = at.settings, reconcilers(at.outbox, at.stopping)
    for each in found:
        task = partial(Task, after=at.wake_dispatch, compares=(each.declared.name, each.pairs))
        yield task(name=each.name, one_pass=whole(each.schedule), every=SCHEDULE_EVERY, lane="upkeep", parts=PARTS)
    for name in dict.fromkeys(each.declared.name for each in found):
        runs = Runs(name, [each for each in found if each.declared.name == name], at.outbox, at.stopping, at.at_end)
        # A lane of its own: a run may take long, and nothing must wait for it.
        yield Task(name=runs.name, one_pass=whole(runs), every=settings.retry_interval, lane="reconcile", parts=PARTS)
        if "prune" in at.roles:
            every, prune = settings.prune_interval, partial(_prune, settings, name)
            yield Task(name=f"prune {runs.name}", one_pass=prune, every=every, lane="upkeep", parts=PARTS)


def _prune(
    settings: Settings, name: str, connection: Connection, source: Connection, stopping: Callable[[], bool]
) -> Counts:
    """Delete what the group of a reconciliation needs no more, and old runs of fleets, which have no group."""
    from outbox.reconcile.record.timetable import FLEET, TOPIC  # noqa: PLC0415 - what few workers do

    feed = feed_from(connection, settings.schema, TOPIC, read_source(source, source_identity(settings.schema))[0][0][0])
    counts = prune_consumer_once(connection, source, settings, name, feed, stopping=stopping)
    return counts + prune_runs_once(connection, settings, *FLEET, stopping=stopping)


def _follow(at: Post) -> Iterator[Task]:
    if not at.outbox.reconciliations:
        return
    from outbox.reconcile.duty.reconciliation import DeclaredJob, followings, reconcilers  # noqa: PLC0415 - as above
    from outbox.reconcile.duty.repairs import Repairs  # noqa: PLC0415 - what few workers do

    found = reconcilers(at.outbox, at.stopping)
    having: list[DeclaredJob] = [each for each in found if isinstance(each, DeclaredJob)]
    for following in followings(at.outbox, at.stopping):
        at.at_end(following.end)
        compares = following.declared.name, following.pairs
        # Nothing that takes long must keep it.
        yield Task(
            name=following.name, one_pass=whole(following), every=following.wait, parts=("consumer",), compares=compares
        )
        having.append(following)
    if having:
        repairs = Repairs(having, at.settings.schema)
        yield Task(name="repair", one_pass=repairs, every=at.settings.idle_wait, parts=("consumer",))


DUTIES = (
    # The messages are consumed as any: that takes the rights to consume, and those to reconcile.
    Duty(
        "runs",
        "Sends and handles the messages by which reconciliations are run.",
        """
        producer: worker
        SELECT(id) INSERT ON half_message
        INSERT ON op_message
        USAGE ON op_sequence
        consumer: reconciler
        SELECT INSERT UPDATE ON reconciliation_run
        """,
        role="reconcile",
        tasks=_run,
        functions="reconciliations",
    ),
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
        SELECT INSERT DELETE ON reconciliation_settled
        """,
        role="reconcile",
        tasks=_follow,
        functions="reconciliations",
    ),
)
