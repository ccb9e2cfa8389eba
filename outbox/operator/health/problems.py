"""What needs a human, in sentences, each with the page on which it is seen; the gravest first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from outbox.operator.health.doctor.report import counted
from outbox.operator.health.stats import LIMIT
from outbox.operator.model import Problem, TopicLag
from outbox.text import duration
from outbox.worker.report import ALIVE

if TYPE_CHECKING:
    from outbox.operator.health.overview import Seen, Sources

Severity = Literal["problem", "warning"]

#: From where on (seconds) something is late that a worker should do at once, or when a retry is due.
_LATE = 60.0
_RETRY_LATE = 300.0
#: A lag is worth a word from so many messages on, if it grew in that many of the last samples and never shrank.
_LAG = 1_000
_GROWING = 5
#: How long (seconds) a worker that ended without a word is told of, and without a reconciliation nothing is said.
_GONE = 3600.0
_RECONCILED = 2 * 86400.0

#: What a reconciliation counts that is in order (`outbox.reconcile.model.Outcome`).
IN_ORDER = frozenset({"consumed", "rolled_back", "left_out", "in_flight", "unjudged"})


def problems(
    seen: Sequence[Seen], unseen: Mapping[str, str], topics: Sequence[TopicLag], sources: Sources
) -> list[Problem]:
    """Return what needs a human; ``unseen`` are the databases that can't be reached, with the reasons."""
    found = [
        _problem(f"Database {name!r} can't be reached: {why}", "system", {"database": name})
        for name, why in unseen.items()
    ]
    for each in seen:
        found += [*_workers(each), *_duties(each), *_halves(each), *_dispatch(each), *_bulk_jobs(each)]
        found += [*_messages(each), *_reconciliations(each)]
    for topic in topics:
        found += _lags(topic, seen, sources)
    return sorted(found, key=lambda problem: problem.severity != "problem")


def _problem(sentence: str, page: str, query: dict[str, str], severity: Severity = "problem") -> Problem:
    return Problem(severity, sentence, page, query)


def _number(count: int, one: str, several: str) -> str:
    return counted(count, one, several, LIMIT)


def _workers(each: Seen) -> Iterator[Problem]:
    if not any(worker.row.alive for worker in each.workers):
        last = min((worker.seconds for worker in each.workers), default=None)
        since = "" if last is None else f"; the last one was seen {duration(last)} ago"
        undone = " and ".join(
            text
            for part, text in (("producer", "dispatched, checked or pruned"), ("consumer", "consumed"))
            if part in each.database.parts
        )
        yield _problem(
            f"No worker is alive in database {each.name!r}{since}: nothing is {undone} there.",
            "handlers",
            {"database": each.name},
        )
        return
    for worker in each.workers:
        if not worker.row.alive and worker.seconds < _GONE:
            yield _problem(
                f"Worker {worker.row.name} was last seen {duration(worker.seconds)} ago, and has not ended in order: "
                "it died, or can't reach its database.",
                "handlers",
                {"database": each.name},
                "warning",
            )


def _duties(each: Seen) -> Iterator[Problem]:
    for worker in each.workers:
        for name, health in worker.row.duties.items() if worker.row.alive else ():
            if failures := health.get("failures"):
                yield _problem(
                    f"Duty {name!r} of worker {worker.row.name} has failed {counted(failures, 'time', 'times')} in a "
                    f"row: {health.get('last_error')}",
                    "handlers",
                    {"database": each.name},
                )


def _halves(each: Seen) -> Iterator[Problem]:
    for topic in each.stats.topics:
        if topic.parked:
            yield _problem(
                f"{_number(topic.parked, 'half', 'halves')} of topic {topic.topic!r} {_is(topic.parked)} parked: "
                "nobody could tell whether the local transaction committed.",
                "halves",
                {"database": each.name, "topic": topic.topic, "status": "parked"},
            )
    if not _alive(each):
        return
    checked = {handler.topic for handler in each.handlers if handler.kind == "checker"}
    for topic_name, count, late in each.unfenced:
        orphans = _number(count, "orphan", "orphans")
        if topic_name not in checked:
            yield _problem(
                f"{orphans} of topic {topic_name!r} {_is(count)} asked about by nobody: no living worker has a checker "
                "for it.",
                "halves",
                {"database": each.name, "topic": topic_name, "status": "orphan"},
            )
        elif late > each.database.settings.check_interval + _RETRY_LATE:
            yield _problem(
                f"{orphans} of topic {topic_name!r} should have been asked about, the first {duration(late)} ago: the "
                "workers can't keep up.",
                "halves",
                {"database": each.name, "topic": topic_name, "status": "orphan"},
            )
    if sum(topic.undecided for topic in each.stats.topics) and not _done(each, "check"):
        yield _problem(
            f"No living worker checks undecided halves in database {each.name!r}.", "halves", {"database": each.name}
        )


def _dispatch(each: Seen) -> Iterator[Problem]:
    if "producer" in each.database.parts and _alive(each) and not _done(each, "dispatch"):
        yield _problem(
            f"No living worker dispatches database {each.name!r}: what is committed there never becomes a message.",
            "handlers",
            {"database": each.name},
        )
    for topic in each.stats.topics:
        waits = topic.oldest_undispatched
        if waits is not None and waits > _LATE:
            yield _problem(
                f"{_number(topic.undispatched, 'message', 'messages')} of topic {topic.topic!r} "
                f"{_is(topic.undispatched)} committed and not dispatched, the oldest for {duration(waits)}.",
                "messages",
                {"database": each.name, "topic": topic.topic, "status": "committed"},
            )
        late = None if topic.next_due is None else (each.stats.at - topic.next_due).total_seconds()
        if late is not None and late > _LATE:
            yield _problem(
                f"Scheduled messages of topic {topic.topic!r} should have been released, the first "
                f"{duration(late)} ago.",
                "scheduled",
                {"database": each.name, "topic": topic.topic},
            )


def _bulk_jobs(each: Seen) -> Iterator[Problem]:
    count, age = each.bulk_jobs
    if count and age > ALIVE and _alive(each) and not _done(each, "bulk"):
        yield _problem(
            f"{_number(count, 'bulk_job waits', 'bulk_jobs wait')} in database {each.name!r}, the oldest for "
            f"{duration(age)}: no living worker there has the role bulk.",
            "bulk-jobs",
            {"database": each.name},
        )


def _messages(each: Seen) -> Iterator[Problem]:
    for group in each.stats.groups:
        query = {"database": each.name, "group": group.group, "topic": group.topic}
        if group.parked:
            yield _problem(
                f"{_number(group.parked, 'message', 'messages')} of topic {group.topic!r} {_is(group.parked)} parked "
                f"in group {group.group!r}.",
                "dead",
                query,
            )
        if group.oldest_due is not None and group.oldest_due > _RETRY_LATE:
            yield _problem(
                f"Retries of group {group.group!r} of topic {group.topic!r} are overdue, the first by "
                f"{duration(group.oldest_due)}.",
                "inbox",
                query | {"status": "failed"},
            )


def _lags(topic: TopicLag, seen: Sequence[Seen], sources: Sources) -> Iterator[Problem]:
    for group in topic.groups:
        each = next(each for each in seen if each.name == group.database)
        query = {"database": group.database, "group": group.group, "topic": group.topic}
        if not group.lag or not _alive(each):
            continue
        behind = f"Group {group.group!r} is {counted(group.lag, 'message', 'messages')} behind in topic {group.topic!r}"
        if not _done(each, f"consume {group.topic} of {group.group}"):
            yield _problem(f"{behind}: no living worker consumes for it.", "inbox", query)
            continue
        lags = sources.recent_lags(group.database, group.topic, group.group)
        if group.lag >= _LAG and len(lags) >= _GROWING and lags == sorted(lags) and lags[0] < lags[-1] <= group.lag:
            yield _problem(
                f"{behind}, and falls further behind: {lags[-1] - lags[0]:,} in the last minutes.",
                "inbox",
                query,
                "warning",
            )


def _reconciliations(each: Seen) -> Iterator[Problem]:
    declared = any(handler.kind == "reconciliation" for handler in each.handlers)
    for topic, group, ended, error, counts, applied, age, settled in each.runs:
        pair = f"of topic {topic!r} with group {group!r}"
        query = {"database": each.name, "group": group, "topic": topic}
        found = sum(count for kind, count in (counts or {}).items() if kind not in IN_ORDER)
        if ended and error:
            yield _problem(f"The last reconciliation {pair} failed {duration(age)} ago: {error}", "system", query)
        elif found:
            yield _problem(
                f"The last reconciliation {pair} found {counted(found, 'difference', 'differences')} {duration(age)} "
                f"ago{', and repaired what it could' if applied else ''}; see: outbox reconcile runs",
                "system",
                query,
                "warning" if applied else "problem",
            )
        elif declared and (settled is None or settled > _RECONCILED):
            since = "so far" if settled is None else f"for {duration(settled)}"
            yield _problem(f"No reconciliation {pair} has come to a result {since}.", "system", query, "warning")


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _alive(each: Seen) -> bool:
    return any(worker.row.alive for worker in each.workers)


def _done(each: Seen, duty: str) -> bool:
    return any(worker.does(duty) for worker in each.workers)
