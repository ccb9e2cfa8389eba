"""How far a follower has come: what it has judged, what it has to judge again and when, what it has found.

Ids below the frontier were judged once. Of them there are judged again: single messages that are watched, at their
time; and pending ranges, which hold too much to name it one by one, a backlog say. All of it survives a restart, as
JSON in the follower's run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

from outbox.reconcile.job import Outcome, Range
from outbox.reconcile.record.settled import Mark
from outbox.reconcile.sql import LAST_ID

#: With another meaning of what is written, an older state is begun anew, from its frontier.
FORMAT = 1
#: So many messages are watched one by one; more of them become ranges.
MOST_WATCHED = 20_000
#: Of ids that were made within so many milliseconds of each other, so many make a range.
_CLOSE, _MANY = 4_096, 50
#: Beyond so many pending ranges, neighbors become one, up to so many messages.
MOST_PENDING, _ROWS_OF_PENDING = 500, 50_000
#: Never, in microseconds: a range of which nothing but the group's offset decides when it is judged again.
NEVER = 2**62


@dataclass(frozen=True, slots=True)
class PendingRange:
    """Ids below the frontier that are to be judged again.

    ``due_at`` is when, by the producer's clock in microseconds; sooner, once the group has come to the positions
    ``up_to``, by queue. ``counts`` are what it came to when it was judged last, with differences that aren't listed.
    """

    ids: Range
    due_at: int = 0
    up_to: Mapping[int, int] = field(default_factory=dict)
    counts: Counter[Outcome] = field(default_factory=Counter)

    def is_passed(self, offsets: Mapping[int, int]) -> bool:
        """Has the group come to the end of what was ahead of it?"""
        return bool(self.up_to) and all(offsets.get(queue, 0) >= position for queue, position in self.up_to.items())

    def joined(self, other: PendingRange) -> PendingRange:
        """Return one range for both, of which the other follows."""
        up_to = {
            queue: max(self.up_to.get(queue, 0), other.up_to.get(queue, 0))
            for queue in self.up_to.keys() | other.up_to.keys()
        }
        whole = Range(self.ids.first, other.ids.end)
        return PendingRange(whole, min(self.due_at, other.due_at), up_to, self.counts + other.counts)

    def as_json(self) -> list[Any]:
        """Return it as JSON can hold it."""
        up_to = {str(queue): position for queue, position in self.up_to.items()}
        return [str(self.ids.first), str(self.ids.end), self.due_at, up_to, counts_as_json(self.counts)]

    @classmethod
    def of_json(cls, value: Sequence[Any]) -> PendingRange:
        """Return what `as_json` returned."""
        first, end, due_at, up_to, counts = value
        positions = {int(queue): position for queue, position in up_to.items()}
        return cls(Range(UUID(first), UUID(end)), due_at, positions, counts_of_json(counts))


@dataclass(slots=True)
class FollowerState:
    """How far a follower of one pair has come.

    ``frontier``: ids below it were judged. ``mark``: all that was written up to it is known (`settled`). ``watch``:
    messages to be judged again, and when (microseconds by the producer's clock). ``pending`` is in order and doesn't
    overlap. ``span`` is how many seconds of ids a pass takes at most. ``judged`` are the messages in order that were
    counted since the run began.
    """

    frontier: UUID
    mark: Mark | None = None
    watch: dict[UUID, int] = field(default_factory=dict)
    pending: list[PendingRange] = field(default_factory=list)
    span: float = 60.0
    judged: Counter[Outcome] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return {
            "format": FORMAT,
            "frontier": str(self.frontier),
            "mark": self.mark,
            "watch": {str(id_): due_at for id_, due_at in self.watch.items()},
            "pending": [each.as_json() for each in self.pending],
            "span": self.span,
            "judged": counts_as_json(self.judged),
        }

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> FollowerState:
        """Return what `as_json` returned; of another format the frontier alone."""
        state = cls(UUID(value["frontier"]))
        if value.get("format") != FORMAT:
            return state
        return replace(
            state,
            mark=value["mark"],
            watch={UUID(id_): due_at for id_, due_at in value["watch"].items()},
            pending=[PendingRange.of_json(each) for each in value["pending"]],
            span=value["span"],
            judged=counts_of_json(value["judged"]),
        )

    def due(self, now: int, offsets: Mapping[int, int]) -> list[PendingRange]:
        """Return the pending ranges that are to be judged now.

        Of those that the group is just working at it is the oldest, so that what it leaves out there is found before
        it has come to the end.
        """
        due = [each for each in self.pending if each.due_at <= now or each.is_passed(offsets)]
        ahead = (each for each in self.pending if each.up_to and each not in due)
        return due + [each for each in ahead if not due][:1]

    def add_pending(self, ranges: Iterable[PendingRange]) -> None:
        """Add pending ranges; keep them in order, apart, and few."""
        apart: list[PendingRange] = []
        for each in sorted([*self.pending, *ranges], key=lambda each: each.ids.first):
            if apart and each.ids.first < (end := _end(apart[-1].ids)):
                if _end(each.ids) > end:
                    apart[-1] = apart[-1].joined(each)
                else:
                    apart[-1] = replace(apart[-1], due_at=min(apart[-1].due_at, each.due_at))
            else:
                apart.append(each)
        self.pending = apart
        most = _ROWS_OF_PENDING
        while len(self.pending) > MOST_PENDING:
            self.pending = _fewer(self.pending, most)
            most *= 2

    def watch_all(self, ids: Iterable[UUID], due_at: int) -> None:
        """Watch messages, unless they are due earlier; many that were made together as a range."""
        single, ranges = clustered(ids)
        for id_ in single:
            self.watch[id_] = min(self.watch.get(id_, due_at), due_at)
        self.add_pending(PendingRange(each, due_at) for each in ranges)
        if len(self.watch) > MOST_WATCHED:
            last = max(self.watch.values())
            single, ranges = clustered(self.watch, _CLOSE * 256, 1)
            self.watch = {id_: self.watch[id_] for id_ in single}
            self.add_pending(PendingRange(each, last) for each in ranges)


def _end(ids: Range) -> UUID:
    return LAST_ID if ids.end is None else ids.end


def _fewer(ranges: Sequence[PendingRange], most: int) -> list[PendingRange]:
    """Join neighbors that together have no more than so many messages."""
    result: list[PendingRange] = []
    for each in ranges:
        if result and result[-1].counts.total() + each.counts.total() <= most:
            result[-1] = result[-1].joined(each)
        else:
            result.append(each)
    return result


def clustered(ids: Iterable[UUID], close: int = _CLOSE, many: int = _MANY) -> tuple[list[UUID], list[Range]]:
    """Return ids that are alone, and ranges around those of which ``many`` were made ``close`` together (ms)."""
    clusters: dict[int, list[UUID]] = {}
    for id_ in ids:
        clusters.setdefault((id_.int >> 80) // close, []).append(id_)
    single = [id_ for found in clusters.values() if len(found) < many for id_ in found]
    ranges = [
        Range(min(found), UUID(int=min(max(found).int + 1, 2**128 - 1)))
        for found in clusters.values()
        if len(found) >= many
    ]
    return single, sorted(ranges)


def counts_as_json(counts: Mapping[Outcome, int]) -> dict[str, int]:
    """Return counts by the labels of outcomes, without those that are 0."""
    return {outcome.label: number for outcome, number in sorted(counts.items()) if number}


def counts_of_json(counts: Mapping[str, int]) -> Counter[Outcome]:
    """Return what `counts_as_json` returned."""
    return Counter({Outcome[name.upper()]: number for name, number in counts.items()})
