"""What is wrong with halves, messages and groups: do halves find their verdict, and messages their consumers?

The functions that take rows are shared by the doctor and the overview. Those that take an `Examination` are the
doctor's alone, which has the time to read more.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from outbox.dispatch.sql import newest_cursor, to_cursor
from outbox.operator.health import sql, stats
from outbox.operator.health.rules import NotInspected, Severity, at_most
from outbox.operator.health.stats import LIMIT
from outbox.operator.health.workers import alive, done, judge_bulk_jobs, judge_workers, merged, reports
from outbox.text import duration

if TYPE_CHECKING:
    from outbox.database.execute import Row
    from outbox.operator.health.examine import Examination
    from outbox.operator.health.rules import Diagnosis, Subject
    from outbox.operator.health.workers import WorkerReport

#: So many halves are read where halves are read topic by topic.
CHECKS_PER_TOPIC = 1_000
#: So many undecided halves the doctor reads to find the parked ones.
PARKED_HALVES = 100_000
# Prune comes round every prune_interval; what is left after so many, and after this time in any case, is left for good.
_PRUNE_ROUNDS = 10
_PRUNE_AT_LEAST = 3600.0
_PRUNE_ROWS = 1_000

#: What a reconciliation counts that is in order (`outbox.reconcile.job.Outcome`).
IN_ORDER = frozenset({"consumed", "rolled_back", "left_out", "in_flight", "unjudged"})


def judge_checks(
    subject: Subject, rows: Iterable[Row], registered: Collection[str] | None, workers: Sequence[WorkerReport]
) -> Iterator[Diagnosis]:
    """Judge the rows of `sql.CHECKS`: is there a checker for each topic, and do the checks come in time?

    ``registered`` are the topics for which the application registers a checker, None where it isn't known: then those
    of the living workers count, and where no worker is alive, whether any checker was ever asked. A half with a fence
    needs no checker, only a worker.
    """
    rows = list(rows)
    running = {each.topic for each in merged(workers) if each.kind == "checker"} if alive(workers) else None
    if rows and running is not None and not done(workers, "check"):
        yield subject.finding("duty.missing/check", {"duty": "check"})
    for topic, unfenced, due, late, unasked, fenced_late, overdue, half_id, some_asked in rows:
        if registered is not None:
            missing = 0 if topic in registered else unfenced
            why = f"{subject.app} registers no checker for this topic"
        elif running is not None:
            missing = 0 if topic in running else due
            why = "no living worker has a checker for this topic"
        else:
            missing = 0 if some_asked else unasked
            why = f"no checker was ever asked about them, due since {duration(overdue)}"
        if missing:
            details = {"topic": topic, "halves": at_most(missing, CHECKS_PER_TOPIC), "half_id": half_id}
            certain = registered is not None or running is not None
            yield subject.finding("checker.missing", details | {"overdue": overdue, "certain": certain}, why=why)
        if waiting := fenced_late + (0 if missing else late):
            halves = at_most(waiting, CHECKS_PER_TOPIC)
            yield subject.finding("check.late", {"topic": topic, "halves": halves, "overdue": overdue})


def judge_reconciliations(subject: Subject, rows: Iterable[Row], *, declared: bool) -> Iterator[Diagnosis]:
    """Judge the rows of `sql.LAST_RUNS`; ``declared``: a living worker has a reconciliation on a schedule."""
    for topic, group, ended, error, counts, applied, age, settled in rows:
        details = {"topic": topic, "group": group, "age": age}
        differences = sum(n for kind, n in json.loads(counts or "{}").items() if kind not in IN_ORDER)
        if ended and error:
            yield subject.finding("reconciliation.failed", details | {"error": error})
        elif differences:
            severity, repaired = (Severity.NOTE, ", and repaired what it could") if applied else (None, "")
            details |= {"differences": differences, "applied": applied}
            yield subject.finding("reconciliation.differences", details, severity=severity, repaired=repaired)
        elif declared and (settled is None or settled > subject.thresholds.reconciled):
            since = "so far" if settled is None else f"for {duration(settled)}"
            yield subject.finding("reconciliation.overdue", details | {"age": settled}, since=since)


# --- what the doctor inspects ------------------------------------------------------------------------------------


def checks(examination: Examination) -> Iterator[Diagnosis]:
    """Is a checker asked about the halves whose check is due?"""
    grace = examination.thresholds.check * examination.settings.check_interval
    rows = examination.rows(sql.CHECKS, grace=grace, limit=CHECKS_PER_TOPIC)
    yield from judge_checks(examination, rows, examination.checkers, _workers(examination))


def oldest_undecided(examination: Examination) -> Iterator[Diagnosis]:
    """Find the oldest half which should have been decided or parked long ago, and why it wasn't."""
    settings, thresholds = examination.settings, examination.thresholds
    for half_id, topic, fenced, times, checked, age, overdue in examination.rows(sql.OLDEST_UNDECIDED, limit=LIMIT):
        checking = settings.immunity + settings.max_checks * settings.check_interval
        if rules := (examination.checkers or {}).get(topic):
            checking = rules.immunity + rules.max_checks * rules.interval
        if age <= thresholds.old * checking:
            continue
        if not checked:
            state = f"was never checked, although its check was due {duration(max(overdue, 0))} ago"
        elif fenced:
            state = "its transaction still ran when it was checked last"
        else:
            state = f"its checker was asked {times} times without a verdict"
        late = overdue > thresholds.check * settings.check_interval
        details = {"half_id": half_id, "topic": topic, "age": age, "overdue": overdue, "checks": times}
        details |= {"fenced": fenced, "checked": checked}
        severity = Severity.PROBLEM if late else Severity.NOTE
        yield examination.finding("half.old", details, severity=severity, state=state)
        return


def parked_halves(examination: Examination) -> Iterator[Diagnosis]:
    """Halves that have used up their checks wait for an operator."""
    topics = stats.add_topics({}, stats.UNDECIDED, examination.rows(sql.UNDECIDED, limit=PARKED_HALVES))
    yield from examination.judge(["half.parked"], topics, PARKED_HALVES)
    if sum(topic.undecided for topic in topics) >= PARKED_HALVES:
        raise NotInspected(f"only the oldest {PARKED_HALVES} undecided halves were inspected")


def undispatched(examination: Examination) -> Iterator[Diagnosis]:
    """Ops are dispatched as soon as any worker is alive."""
    (cursors,) = examination.read(newest_cursor(examination.schema))
    cursor = to_cursor(cursors[0]) if cursors else None
    (rows,) = examination.read(sql.undispatched(examination.schema, cursor, LIMIT))
    yield from examination.judge(["op.undispatched"], stats.add_topics({}, stats.UNDISPATCHED, rows), LIMIT)


def scheduled(examination: Examination) -> Iterator[Diagnosis]:
    """Scheduled messages are released when their time has come."""
    rows = examination.rows(sql.SCHEDULED, grace=examination.thresholds.undispatched, limit=LIMIT)
    yield from examination.judge(["message.overdue"], stats.add_topics({}, stats.SCHEDULED, rows), LIMIT)


def unpruned(examination: Examination) -> Iterator[Diagnosis]:
    """What is settled and older than the retention is deleted by a worker's prune."""
    settings = examination.settings
    age = settings.retention + max(_PRUNE_ROUNDS * settings.prune_interval, _PRUNE_AT_LEAST)
    ((halves, oldest),) = examination.rows(sql.UNPRUNED, age=age, limit=_PRUNE_ROWS)
    if halves:
        details = {"halves": at_most(halves, _PRUNE_ROWS), "oldest": oldest, "retention": settings.retention}
        yield examination.finding("prune.behind", details)


def parked_messages(examination: Examination) -> Iterator[Diagnosis]:
    """Messages that have used up their attempts wait for an operator."""
    yield from examination.judge(["message.parked"], _groups(examination), LIMIT)


def retries(examination: Examination) -> Iterator[Diagnosis]:
    """A failed message is tried again when its time has come, if a worker of its group is alive."""
    yield from examination.judge(["retry.overdue"], _groups(examination), LIMIT)


def _groups(examination: Examination) -> list[stats.GroupStats]:
    return stats.failures(examination.rows(sql.FAILURES, grace=examination.thresholds.retry, limit=LIMIT), LIMIT)


def unread(examination: Examination) -> Iterator[Diagnosis]:
    """Messages are kept for the retention; a group that comes later misses them. Needs both parts in one database."""
    retention = examination.settings.retention
    for group, topic, gaps, age, forget in examination.rows(sql.UNREAD):
        details = {"group": group, "topic": topic, "behind": age}
        if gaps:
            yield examination.finding("group.pruned", details | {"queues": gaps}, forget=forget)
        elif age > examination.thresholds.behind * retention:
            yield examination.finding("group.behind", details | {"retention": retention}, forget=forget)


def workers(examination: Examination) -> Iterator[Diagnosis]:
    """Are the workers alive, and do their duties succeed?

    A database that no worker has ever served is in order: the doctor is asked before the first deployment as well.
    """
    if found := _workers(examination):
        yield from judge_workers(examination, found, examination.parts)


def bulk_jobs(examination: Examination) -> Iterator[Diagnosis]:
    """Bulk jobs are carried out by a worker with the role bulk."""
    ((jobs, age),) = examination.rows(sql.OPEN_BULK_JOBS, limit=LIMIT)
    yield from judge_bulk_jobs(examination, _workers(examination), at_most(jobs, LIMIT), age)


def reconciliations(examination: Examination) -> Iterator[Diagnosis]:
    """Did the last reconciliation of each group come to a result, and find no difference?"""
    declared = any(handler.kind == "reconciliation" for handler in merged(_workers(examination)))
    yield from judge_reconciliations(examination, examination.rows(sql.LAST_RUNS), declared=declared)


def _workers(examination: Examination) -> list[WorkerReport]:
    return reports(examination.name, examination.rows(sql.WORKERS))
