"""Order findings by their weight, and fold under each cause what follows from it.

The weight of a finding is how many messages it is about, times how long it has been so, times the money at stake where
that is known. A fault that stops a whole database comes first. A symptom is no entry of its own: it stands under its
cause, as far as the rules below name that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from outbox.operator.health.rules import Diagnosis, Severity
from outbox.text import topic_of

#: What follows from a fault: in its database, and of the topic and group that it names, if it names any.
FOLLOWS: Mapping[str, tuple[str, ...]] = {
    "worker.none": (
        "op.undispatched", "message.overdue", "check.late", "checker.missing", "half.old", "retry.overdue", "group.lag",
        "group.behind", "group.unconsumed", "reconciliation.unconsumed", "reconciliation.overdue", "schedule.overdue",
        "duty.missing", "delivery.late", "worker.lost", "prune.behind",
    ),
    "topic.paused": ("message.overdue",),
    "group.paused": ("retry.overdue", "group.lag", "group.behind", "group.unconsumed", "reconciliation.unconsumed"),
    "breaker.open": ("retry.overdue", "group.lag", "group.behind", "group.unconsumed", "reconciliation.unconsumed"),
    "group.unconsumed": ("retry.overdue", "group.behind", "reconciliation.unconsumed"),
    "group.lag": ("group.behind", "reconciliation.unconsumed"),
}  # fmt: skip
_CAUSES: Mapping[str, tuple[str, ...]] = {
    code: tuple(cause for cause, codes in FOLLOWS.items() if code in codes)
    for code in {code for codes in FOLLOWS.values() for code in codes}
}
#: A database that is away: what fails elsewhere with the same error follows from it.
_AWAY = "database.unreachable"
FOLDS_OF_AWAY = frozenset({"duty.failing", "delivery.unreachable", "reconciliation.failed"})
#: These stop all that a database does, however many messages that is about.
_STOP_ALL = frozenset({_AWAY, "worker.none"})
#: Under which of these names a finding says how many messages it is about, and how long (seconds) it has been so.
_COUNTS = ("messages", "halves", "lag", "missing", "flows", "differences", "jobs", "queues")
_AGES = ("age", "overdue", "oldest", "behind")

_Key = tuple[str, str, str | None, str | None]


@dataclass(frozen=True, slots=True)
class Attention:
    """A finding with the ``consequences`` that are folded under it; ``weight`` is that of all of them.

    ``messages`` is how many it is about, ``age`` how long (seconds) it has been so; None where it isn't known.
    """

    finding: Diagnosis
    messages: int | None
    age: float | None
    weight: float
    consequences: list[Diagnosis]


def count_of(finding: Diagnosis) -> int | None:
    """Return how many messages a finding is about; None where it doesn't say."""
    return next((int(finding.details[name]) for name in _COUNTS if finding.details.get(name) is not None), None)


def age_of(finding: Diagnosis) -> float | None:
    """Return how long (seconds) it has been so; None where a finding doesn't say."""
    return next((float(finding.details[name]) for name in _AGES if finding.details.get(name) is not None), None)


def weight_of(finding: Diagnosis) -> float:
    """Return messages times seconds, times the money that nothing explains where that is known."""
    money = abs(float(finding.details.get("unexplained") or 0))
    return float(count_of(finding) or 1) * max(age_of(finding) or 1.0, 1.0) * (1 + money)


def by_weight(findings: Iterable[Diagnosis]) -> list[Diagnosis]:
    """Return findings in their order: what stops a database, problems, notes, silenced; the heaviest first."""
    return sorted(findings, key=lambda each: (*_rank(each), -weight_of(each)))


def folded(findings: Iterable[Diagnosis]) -> list[Attention]:
    """Return the causes among the findings, the heaviest first, each with what follows from it."""
    ordered = by_weight(findings)
    known: dict[_Key, Diagnosis] = {}
    for each in ordered:
        known.setdefault(_key(each.code, each), each)
    away = [each for each in ordered if each.code == _AWAY]
    consequences: defaultdict[int, list[Diagnosis]] = defaultdict(list)
    roots: list[Diagnosis] = []
    for each in ordered:
        root = each
        # No circle: nothing in `FOLLOWS` is, over others, a cause of itself.
        while (cause := next(_causes(root, known, away), None)) is not None:
            root = cause
        if root is each:
            roots.append(each)
        else:
            consequences[id(root)].append(each)

    def entry(finding: Diagnosis) -> Attention:
        following = consequences[id(finding)]
        weight = weight_of(finding) + sum(map(weight_of, following))
        count = count_of(finding)
        # An outage doesn't say how many messages wait; what follows from it does.
        within = [number for number in map(count_of, following) if number is not None]
        messages = count if count is not None else sum(within) or None
        return Attention(finding, messages, age_of(finding), weight, following)

    return sorted(map(entry, roots), key=lambda one: (*_rank(one.finding), -one.weight))


def _rank(finding: Diagnosis) -> tuple[bool, bool, bool]:
    return bool(finding.silenced), finding.code not in _STOP_ALL, finding.severity is not Severity.PROBLEM


def _key(code: str, finding: Diagnosis) -> _Key:
    topic, group = finding.details.get("topic"), finding.details.get("group")
    return code, finding.database, topic_of(topic) if topic else None, group


def _causes(finding: Diagnosis, known: Mapping[_Key, Diagnosis], away: Iterable[Diagnosis]) -> Iterator[Diagnosis]:
    if finding.code in FOLDS_OF_AWAY:
        yield from (each for each in away if each.details["error"] in str(finding.details["error"]))
    for code in _CAUSES.get(finding.code, ()):
        _, database, topic, group = _key(code, finding)
        for key in ((code, database, topic, group), (code, database, topic, None), (code, database, None, None)):
            if (cause := known.get(key)) is not None and cause is not finding:
                yield cause
