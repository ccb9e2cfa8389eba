"""Prune: delete rows that are settled and older than the retention; evidence outlives doubt.

Undecided halves, failed and parked messages are never pruned: a checker or an operator still has to decide about them,
unless they were discarded. An inbox row goes only after the producer has pruned its message, so that nothing can come
again which the inbox has forgotten. The audit is never pruned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError

from outbox.database.duty import Duty, Part, Post, Task, alone
from outbox.database.execute import INSUFFICIENT_PRIVILEGE, Template, execute, sqlstate
from outbox.message.model import Counts
from outbox.prune import sql
from outbox.prune.ahead import make_ahead
from outbox.prune.inbox import INBOX, prune_inbox
from outbox.prune.rewrite import CHECKS, CURSORS, OFFSETS, TOTALS, Rewritten, rewrite
from outbox.prune.segments import (
    PRODUCER,
    SegmentedSide,
    complete_segments,
    drop_segment,
    empty_segment,
    gaps,
    in_batches,
    is_overdue,
    now_ms,
    prune_business_rows,
    prune_rows,
    segments,
)
from outbox.text import topic_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.settings import Settings

logger: logging.Logger = logging.getLogger("outbox.prune")

_DAY = 86400.0
#: How long (seconds) samples are kept, a day more than the longest chart shows; workers that died; and processes that
#: send no more.
SAMPLES = 8 * _DAY
WORKERS = _DAY
_BULK_JOBS = 100


def prune_segments_once(
    connection: Connection,
    settings: Settings,
    side: SegmentedSide = PRODUCER,
    *,
    stopping: Callable[[], bool] = lambda: False,
) -> Counts:
    """Make the segments of the time to come; empty those that are old, and drop one of them.

    Needs a role that owns the tables and may make new ones in their schema; without one, all is deleted row by row.
    Returns ``taken`` and ``done``: the halves, or inbox rows, that were pruned.
    """
    done = 0
    try:
        complete_segments(connection, settings, side)
        make_ahead(connection, settings, side, stopping)
        with connection.begin():
            found, now = segments(connection, settings.schema, side), now_ms(connection)
        old = [each for each in found if side.old_after(each, settings) < now]
        for segment in old:
            if stopping():
                break
            held = is_overdue(segment, side, settings, now)
            done += empty_segment(connection, settings, segment, side, by_row=held, stopping=stopping)
        # One a pass: it takes the lock of whole tables for an instant.
        next((each for each in old if drop_segment(connection, settings, each, side) is not None), None)
    except DBAPIError as error:
        if sqlstate(error) != INSUFFICIENT_PRIVILEGE:
            raise
        extra = {"outbox_event": "segments.not_allowed"}
        logger.debug("this role can't make or empty segments: %s", error.orig, extra=extra)
    return Counts(taken=done, done=done)


def prune_producer_once(
    connection: Connection, settings: Settings, *, stopping: Callable[[], bool] = lambda: False
) -> Counts:
    """Delete replaced cursors, flows that ended long ago, and settled rows in no segment, row by row.

    That is halves with their ops and messages; segments: `outbox.prune.segments`. The totals of topics are added up.
    Returns ``taken`` rows and ``done`` halves. ``stopping`` is asked between batches.
    """
    deletes, age = _Deletes(connection, settings, stopping), {"retention": settings.record_retention}
    cursors = deletes.replaced(CURSORS, sql.old_cursors) + deletes.all(sql.old_delivery_cursors)
    cursors += deletes.all(sql.silent_producers, age=WORKERS)
    flows = sum(deletes.all(old, **age) for old in (sql.old_sagas, sql.old_branches))
    deletes.all(sql.add_up_totals)
    deletes.all(sql.decided_checks)
    for rewritten in (CHECKS, TOTALS):
        rewrite(connection, settings.schema, rewritten)
    with connection.begin():
        found = segments(connection, settings.schema)
    deleted = sum(prune_rows(connection, settings, after, end, stopping) for after, end in gaps(found))
    deleted += prune_business_rows(connection, settings, stopping)
    return Counts(taken=cursors + flows + deleted, done=deleted)


def prune_consumer_once(
    connection: Connection,
    source: Connection,
    settings: Settings,
    group: str,
    topic: str,
    *,
    stopping: Callable[[], bool] = lambda: False,
) -> Counts:
    """Delete what a group needs no more: old inbox rows, attempts, notes, reconciliations, replaced offsets and leases.

    Inbox rows go when they are settled, and the producer has pruned their messages: those of a segment with it
    (`outbox.prune.inbox`). ``source`` is on the producer's database (the same object as ``connection`` where that is
    the same one), ``topic`` the name under which the group keeps that one's topic (`outbox.database.identity`).
    Returns ``taken`` rows and ``done`` inbox rows.
    """
    deletes = _Deletes(connection, settings, stopping)
    pair, age = {"group": group, "topic": topic}, {"retention": settings.record_retention}
    offsets = deletes.replaced(OFFSETS, sql.old_offsets, **pair) + deletes.all(sql.old_leases, **pair)
    records = sum(deletes.all(old, **age) for old in (sql.old_attempts, sql.old_earlier_rows))
    records += deletes.all(sql.old_notes, **pair, **age)
    records += deletes.all(sql.old_grants, group=group, topic=topic_of(topic))
    records += prune_runs_once(connection, settings, group, topic, stopping=stopping).taken
    deleted = prune_inbox(connection, source, settings, group, topic, stopping)
    return Counts(taken=offsets + records + deleted, done=deleted)


def prune_runs_once(
    connection: Connection, settings: Settings, group: str, topic: str, *, stopping: Callable[[], bool] = lambda: False
) -> Counts:
    """Delete reconciliations of a group that are older than records are kept, but the newest by each timetable.

    Returns ``taken`` and ``done`` rows.
    """
    deletes = _Deletes(connection, settings, stopping)
    values = {"group": group, "topic": topic, "retention": settings.record_retention}
    rows = sum(deletes.all(old, **values) for old in (sql.old_findings, sql.old_runs))
    return Counts(taken=rows, done=rows)


def prune_records_once(
    connection: Connection, settings: Settings, *, stopping: Callable[[], bool] = lambda: False
) -> Counts:
    """Delete what both sides have: old samples, workers that died, bulk jobs that finished long ago, with their items.

    Returns ``taken`` rows and ``done`` bulk jobs.
    """
    deletes, few = _Deletes(connection, settings, stopping), min(settings.prune_batch, _BULK_JOBS)
    # A rollback is known as long as an inbox knows its message.
    age = max(settings.record_retention, settings.inbox_retention)
    rows = deletes.all(sql.old_samples, age=SAMPLES) + deletes.all(sql.dead_workers, age=WORKERS)
    rows += deletes.all(sql.old_items, age=age, bulk_jobs=few)
    bulk_jobs = deletes.all(sql.old_bulk_jobs, few, age=age)
    return Counts(taken=rows + bulk_jobs, done=bulk_jobs)


@dataclass(frozen=True, slots=True)
class _Deletes:
    """Deletes rows in batches, each in a transaction of its own; ``stopping`` is asked between them."""

    connection: Connection
    settings: Settings
    stopping: Callable[[], bool]

    def replaced(self, rewritten: Rewritten, one_by_one: Template, **values: object) -> int:
        """Delete rows that newer ones have replaced: as a whole, or one by one."""
        gone = rewrite(self.connection, self.settings.schema, rewritten)
        return self.all(one_by_one, **values) if gone is None else gone

    def all(self, old: Template, most: int | None = None, /, **values: object) -> int:
        """Run a statement until it finds less than a batch (or ``most``) of rows; return how many went."""

        def delete(_: None, size: int) -> tuple[int, int, None, bool]:
            with self.connection.begin():
                (rows,) = execute(self.connection, old(self.settings.schema, **values, limit=size))
            return len(rows), len(rows), None, len(rows) >= size

        name, batch = ("prune", old(self.settings.schema).sql), most or self.settings.prune_batch
        return in_batches(self.connection, name, batch, self.stopping, delete, None)


def _upkeep(name: str, at: Post, function: Callable[..., Counts], *parts: Part) -> Task:
    one_pass = alone(function, at.settings)
    return Task(name=name, one_pass=one_pass, every=at.settings.prune_interval, lane="upkeep", parts=parts)


def _tasks(at: Post) -> Iterator[Task]:
    if "producer" in at.parts:
        yield _upkeep("segments", at, prune_segments_once, "producer")
        yield _upkeep("prune", at, prune_producer_once, "producer")
    if "consumer" in at.parts:
        yield _upkeep("inbox segments", at, partial(prune_segments_once, side=INBOX))


DUTIES = (
    Duty(
        "prune",
        "Deletes what is settled and older than the retention; of each group also what its inbox needs no more.",
        """
        producer: worker
        SELECT(id) DELETE ON half_message dispatch_cursor
        SELECT DELETE ON message scheduled_message delivery delivery_cursor producer_process saga saga_command
        SELECT DELETE ON tcc_branch
        SELECT(half_id) DELETE ON check_history half_error
        SELECT(id) DELETE ON published
        SELECT(half_id parked_at) DELETE ON half_check
        SELECT UPDATE DELETE ON op_message
        SELECT INSERT DELETE ON topic_total
        consumer: consumer
        SELECT DELETE ON attempt_history dead_letter_note consumer_message reread_message consumer_offset
        SELECT DELETE ON consumer_lease rate_grant reconciliation_run reconciliation_finding
        SELECT INSERT UPDATE ON segment_hold
        """,
        role="prune",
        tasks=_tasks,
    ),
    Duty(
        "prune records",
        "Deletes old samples, workers that died, and bulk jobs that ended long ago.",
        """
        producer: worker
        SELECT DELETE ON worker stats_sample bulk_job bulk_item
        consumer: consumer
        SELECT DELETE ON worker stats_sample bulk_job bulk_item
        """,
        role="prune",
        tasks=lambda at: [_upkeep("prune records", at, prune_records_once)] if at.parts else [],
    ),
)
