"""Topics with their groups, the heaviest backlog first: how far each has come, and whether a worker works it off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outbox.operator.health.overview import GroupLag, Overview, TopicLag
from outbox.reader import option

#: A group that one of these is about doesn't work its backlog off.
_STOPPED = frozenset({"group.unconsumed", "group.behind", "group.pruned", "worker.none"})


@dataclass(frozen=True, slots=True)
class BacklogFilter:
    """Select topics with their groups: by a part of their names, and by a database that has one of the two."""

    q: str = option("", most=500)
    database: str | None = option(None, most=1000)

    def fits(self, topic: TopicLag, group: GroupLag | None) -> bool:
        """Return whether a topic with one of its groups is selected."""
        names = (topic.topic, group.group if group else "")
        databases = {None, topic.database, group.database if group else None}
        return any(self.q.lower() in name.lower() for name in names) and self.database in databases


@dataclass(frozen=True, slots=True)
class BacklogRow:
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


def backlogs(found: Overview, criteria: BacklogFilter) -> list[BacklogRow]:
    """Return the topics of an overview with their groups, as far as they are selected."""
    lags = {each.name: each.values for each in found.series}
    stopped = {
        (each.database, each.details.get("topic"), each.details.get("group"))
        for each in found.findings
        if each.code in _STOPPED
    }

    def row_of(topic: TopicLag, group: GroupLag | None) -> BacklogRow:
        if group is None:
            return BacklogRow(topic, None, (), stopped=False)
        about = {(group.database, group.topic, group.group), (group.database, None, None)}
        held = group.paused or group.breaker_open or bool(group.lag and about & stopped)
        return BacklogRow(topic, group, lags.get(f"lag/{group.topic}/{group.group}", ()), held)

    pairs = ((topic, group) for topic in found.topics for group in topic.groups or (None,))
    return [row_of(*pair) for pair in pairs if criteria.fits(*pair)]
