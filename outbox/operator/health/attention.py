"""Order findings by their weight, and fold under each cause what follows from it.

The weight of a finding is how many messages it is about, times how long it has been so, times the money at stake where
that is known. A fault that stops a whole database comes first. A symptom is no entry of its own: it stands under its
cause, as far as the rules below name that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.operator.health.rules import Diagnosis, Severity
from outbox.reader import option
from outbox.text import topic_of

if TYPE_CHECKING:
    from outbox.operator.health.overview import GroupLag, Overview, TopicLag

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
#: A group that one of these is about doesn't work its backlog off.
_STOPPED = frozenset({"group.unconsumed", "group.behind", "group.pruned", "worker.none"})

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


# --- topics with their groups, by weight -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlaceFilter:
    """Select topics with their groups: by a part of their names, and by a database that has one of the two."""

    q: str = option("", most=500)
    database: str | None = option(None, most=1000)

    def fits(self, topic: TopicLag, group: GroupLag | None) -> bool:
        """Return whether a topic with one of its groups is selected."""
        names = (topic.topic, group.group if group else "")
        databases = {None, topic.database, group.database if group else None}
        return any(self.q.lower() in name.lower() for name in names) and self.database in databases


@dataclass(frozen=True, slots=True)
class Place:
    """A topic with one of its groups, None if it has none.

    ``lags`` are those of the window, None in place of what isn't known. ``stopped``: the group is held back, or no
    worker works its lag off. A lag beside a group that goes on is no alarm.
    """

    topic: TopicLag
    group: GroupLag | None
    lags: Sequence[float | None]
    stopped: bool

    @property
    def order(self) -> tuple[object, ...]:
        """What sorts it as texts: the most messages times the seconds that they have waited first."""
        topic, group = self.topic, self.group
        weight = (topic.undispatched or 0) * max(topic.oldest_undispatched or 1, 1) + 60 * (topic.parked or 0)
        if group is not None:
            weight += (group.lag or 0) * max(group.oldest_lag or 1, 1) + group.failed * max(group.oldest_due or 1, 1)
            weight += group.parked * max(group.oldest_parked or 1, 1)
        return f"{10**18 - int(weight):020}", topic.topic, group.group if group else "", topic.database


def places(found: Overview, criteria: PlaceFilter) -> list[Place]:
    """Return the topics of an overview with their groups, as far as they are selected."""
    lags = {each.name: each.values for each in found.series}
    stopped = {
        (each.database, each.details.get("topic"), each.details.get("group"))
        for each in found.findings
        if each.code in _STOPPED
    }

    def place(topic: TopicLag, group: GroupLag | None) -> Place:
        if group is None:
            return Place(topic, None, (), stopped=False)
        about = {(group.database, group.topic, group.group), (group.database, None, None)}
        held = group.paused or group.breaker_open or bool(group.lag and about & stopped)
        return Place(topic, group, lags.get(f"lag/{group.topic}/{group.group}", ()), held)

    pairs = ((topic, group) for topic in found.topics for group in topic.groups or (None,))
    return [place(*pair) for pair in pairs if criteria.fits(*pair)]
