"""What is wrong with workers, halves, messages and groups: do halves find their verdict, and messages their consumers?

The inspections of a `Subject` are shared by the doctor and the overview. Those of an `Examination` are the doctor's
alone, which has the time to read more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from outbox.database.sql import ALIVE
from outbox.operator.health import sql, stats
from outbox.operator.health.rules import LIMIT, NotInspected, Severity, at_most
from outbox.operator.health.system import alive, done, merged
from outbox.text import duration

if TYPE_CHECKING:
    from outbox.operator.health.examine import Examination
    from outbox.operator.health.rules import Diagnosis, Subject

#: So many undecided halves the doctor reads to find the parked ones.
PARKED_HALVES = 100_000
# So many halves are read where halves are read topic by topic.
_CHECKS_PER_TOPIC = 1_000
# Prune comes round every prune_interval; what is left after so many, and after this time in any case, is left for good.
_PRUNE_ROUNDS = 10
_PRUNE_AT_LEAST = 3600.0
_PRUNE_ROWS = 1_000

#: What a reconciliation counts that is in order (`outbox.reconcile.job.Outcome`).
IN_ORDER = frozenset({"consumed", "rolled_back", "left_out", "in_flight", "unjudged"})

# What no worker does where none is alive, by the part of the tables.
_UNDONE = {"producer": "dispatched, checked or pruned", "consumer": "consumed"}


# --- of the doctor and the overview ------------------------------------------------------------------------------


def workers(subject: Subject) -> Iterator[Diagnosis]:
    """Are the workers alive, and do their duties succeed?"""
    found = subject.workers
    if not alive(found):
        if found or subject.served:
            last = min((worker.seconds for worker in found), default=None)
            since = "" if last is None else f"; the last one was seen {duration(last)} ago"
            undone = " and ".join(text for part, text in _UNDONE.items() if part in subject.parts)
            yield subject.finding("worker.none", {"last_seen": last}, since=since, undone=undone)
        return
    for worker in found:
        name = worker.row.name
        if not worker.row.alive and worker.seconds < subject.thresholds.worker_lost:
            yield subject.finding("worker.lost", {"worker": name, "age": worker.seconds})
        for duty, health in worker.row.duties.items() if worker.row.alive else ():
            if failures := health.get("failures"):
                details = {"worker": name, "duty": duty, "failures": failures, "error": health.get("last_error")}
                yield subject.finding("duty.failing", details)
    if "producer" in subject.parts and not done(found, "dispatch"):
        yield subject.finding("duty.missing/dispatch", {"duty": "dispatch"})


def bulk_jobs(subject: Subject) -> Iterator[Diagnosis]:
    """Bulk jobs are carried out by a worker with the role bulk."""
    ((jobs, age),) = subject.rows(sql.OPEN_BULK_JOBS, limit=LIMIT)
    if jobs and age > ALIVE and alive(subject.workers) and not done(subject.workers, "bulk"):
        yield subject.finding("duty.missing/bulk", {"duty": "bulk", "jobs": at_most(jobs, LIMIT), "age": age})


def checks(subject: Subject) -> Iterator[Diagnosis]:
    """Is there a checker for each topic, and is it asked about the halves whose check is due?

    Where the topics with a checker aren't known, those of the living workers count, and where no worker is alive,
    whether any checker was ever asked. A half with a fence needs no checker, only a worker.
    """
    found, registered = subject.workers, subject.checkers
    if subject.served and not alive(found):
        return  # That is what has to be mended.
    running = {each.topic for each in merged(found) if each.kind == "checker"} if alive(found) else None
    grace = subject.thresholds.check * subject.settings.check_interval
    rows = subject.rows(sql.CHECKS, grace=grace, limit=_CHECKS_PER_TOPIC)
    if rows and running is not None and not done(found, "check"):
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
            details = {"topic": topic, "halves": at_most(missing, _CHECKS_PER_TOPIC), "half_id": half_id}
            certain = registered is not None or running is not None
            yield subject.finding("checker.missing", details | {"overdue": overdue, "certain": certain}, why=why)
        if waiting := fenced_late + (0 if missing else late):
            halves = at_most(waiting, _CHECKS_PER_TOPIC)
            yield subject.finding("check.late", {"topic": topic, "halves": halves, "overdue": overdue})


def reconciliations(subject: Subject) -> Iterator[Diagnosis]:
    """Did the last reconciliation of each group come to a result, and find no difference?"""
    declared = any(handler.kind == "reconciliation" for handler in merged(subject.workers))
    for topic, group, ended, error, counts, applied, age, settled in subject.rows(sql.LAST_RUNS):
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


# --- of the doctor alone -----------------------------------------------------------------------------------------


def judging(code: str, read: Callable[[Examination], Iterable[object]]) -> Callable[[Examination], Iterator[Diagnosis]]:
    """Return the inspection that judges the numbers which ``read`` returns by one rule."""
    return lambda examination: examination.judge([code], read(examination))


def undispatched(examination: Examination) -> list[stats.TopicStats]:
    """Return the topics whose ops are to be dispatched."""
    with examination.reading() as connection:
        rows = stats.undispatched(connection, examination.settings.schema)
    return stats.add_topics({}, stats.UNDISPATCHED, rows)


def scheduled(examination: Examination) -> list[stats.TopicStats]:
    """Return the topics that have scheduled messages."""
    rows = examination.rows(sql.SCHEDULED, grace=examination.thresholds.undispatched, limit=LIMIT)
    return stats.add_topics({}, stats.SCHEDULED, rows)


def failures(examination: Examination) -> list[stats.GroupStats]:
    """Return the groups with their failed and parked messages."""
    return stats.failures(examination.rows(sql.FAILURES, grace=examination.thresholds.retry, limit=LIMIT))


def parked_halves(examination: Examination) -> Iterator[Diagnosis]:
    """Halves that have used up their checks wait for an operator."""
    topics = stats.add_topics({}, stats.UNDECIDED, examination.rows(sql.UNDECIDED, limit=PARKED_HALVES))
    yield from examination.judge(["half.parked"], topics, PARKED_HALVES)
    if sum(topic.undecided for topic in topics) >= PARKED_HALVES:
        raise NotInspected(f"only the oldest {PARKED_HALVES} undecided halves were inspected")


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


def unpruned(examination: Examination) -> Iterator[Diagnosis]:
    """What is settled and older than the retention is deleted by a worker's prune."""
    settings = examination.settings
    age = settings.retention + max(_PRUNE_ROUNDS * settings.prune_interval, _PRUNE_AT_LEAST)
    ((halves, oldest),) = examination.rows(sql.UNPRUNED, age=age, limit=_PRUNE_ROWS)
    if halves:
        details = {"halves": at_most(halves, _PRUNE_ROWS), "oldest": oldest, "retention": settings.retention}
        yield examination.finding("prune.behind", details)


def unread(examination: Examination) -> Iterator[Diagnosis]:
    """Messages are kept for the retention; a group that comes later misses them. Needs both parts in one database."""
    retention = examination.settings.retention
    for group, topic, gaps, age, forget in examination.rows(sql.UNREAD):
        details = {"group": group, "topic": topic, "behind": age}
        if gaps:
            yield examination.finding("group.pruned", details | {"queues": gaps}, forget=forget)
        elif age > examination.thresholds.behind * retention:
            yield examination.finding("group.behind", details | {"retention": retention}, forget=forget)
